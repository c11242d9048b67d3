"""Numbers that keep their precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.checks import check_default_device, check_is, check_tensor
from lieattn._core.contexts import transformed


def lengths(vectors: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return the lengths ``[*]`` of vectors ``[*, dim]``, whose derivatives are 0 at 0. The function can be traced."""
    square = vectors.square().sum(dim=-1, keepdim=keepdim)
    zero = square == 0
    # Both branches need finite derivatives, because an infinite one times the zero of the other branch would be NaN.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def attention_of(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return α = σ(levels) and 1 - α. Derivatives of ``torch.sigmoid``, but not these, lose digits for α close to 1."""
    return F.logsigmoid(levels).exp(), F.logsigmoid(-levels).exp()


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Compute ``torch.nn.functional.layer_norm``, within transforms by plain operations."""
    if not transformed():
        return F.layer_norm(x, shape, weight, bias, eps)
    axes = tuple(range(-len(shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(axes, keepdim=True)
    normal = (centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)).to(x.dtype)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` by :func:`layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


_MANY = 2**16  # numbers from which less memory is worth a function of Python in the backward pass


def counts(index: Tensor, count: int) -> Tensor:
    """Return the number of rows with each index, ``[count]`` int64, from ``index`` ``[rows]`` int64.

    Unlike ``torch.bincount``, a GPU does this without waiting for the CPU.
    """
    return index.new_zeros(count).index_add(0, index, torch.ones_like(index))


def sums(x: Tensor, index: Tensor, count: int, at_least: torch.dtype = torch.float32) -> Tensor:
    """Return the sums of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    Integers and masks are summed in int64. Other numbers are summed ``at_least`` in this dtype, because torch may round
    after every row, so that a sum of ones in bfloat16 ends at 256.
    """
    kept = x.is_floating_point() or x.is_complex()
    wide = x.to(torch.promote_types(x.dtype, at_least) if kept else torch.int64)
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    light = not recorded and wide.requires_grad and wide.numel() >= _MANY and not transformed()
    total: Tensor = (_Sums.apply if light else _added)(wide, index, count)
    return total.to(x.dtype) if kept else total


def _added(x: Tensor, index: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, *x.shape[1:]).index_add(0, index, x)


class _Sums(torch.autograd.Function):
    """Sums that, unlike those of torch, do not keep the summands for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return _added(x, index, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def means(x: Tensor, index: Tensor, rows: Tensor, at_least: torch.dtype = torch.float32) -> Tensor:
    """Return the means of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    ``rows`` ``[count]`` are the :func:`counts`. An index without rows gives zero.
    """
    kept = x.is_floating_point() or x.is_complex()
    total = sums(x.to(torch.promote_types(x.dtype, at_least)) if kept else x, index, len(rows))  # halves may overflow
    mean = total / rows.clamp(min=1).to(total.dtype).view(-1, *[1] * (x.ndim - 1))
    return mean.to(x.dtype) if kept else mean


def maxima(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the maxima of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    An index without rows gives zero. Equal maxima share the gradient.
    """
    trailing = [1] * (x.ndim - 1)
    places = index.view(-1, *trailing).expand_as(x)
    # An initial value that equals the maximum would get a share of the gradient, although it is excluded.
    start = x.new_full((count, *x.shape[1:]), math.nan if x.is_floating_point() else 0)
    found = start.scatter_reduce(0, places, x, "amax", include_self=False)
    return torch.where((counts(index, count) > 0).view(-1, *trailing), found, 0)


def reduced(x: Tensor, index: Tensor, count: int, reduction: Literal["sum", "mean", "max"]) -> Tensor:
    """Return the :func:`sums`, :func:`means` or :func:`maxima` of the rows of x with equal ``index``."""
    if reduction == "max":
        return maxima(x, index, count)
    return sums(x, index, count) if reduction == "sum" else means(x, index, counts(index, count))


def keep_variance(linear: nn.Linear, factor: float = 1.0) -> None:
    """Redraw the weights of a linear map in place, so that it preserves the size of signals after a swish.

    The standard deviation is ``factor`` · sqrt(2 / fan in).
    """
    nn.init.normal_(linear.weight, std=factor * math.sqrt(2 / linear.in_features))


class KeptTables(nn.Module):
    """A module whose buffers outside of the state dict, such as tables of groups, never lose their values.

    Weights that go to the meta device, or that ``to_empty`` allocates, get their values from a state dict. Tables get
    back the values that they had. RuntimeError is raised if torch's default device is not the CPU.
    """

    def __init__(self, *parts: Any) -> None:
        check_default_device()
        super().__init__(*parts)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = _tables(self)
        super()._apply(fn, recurse)
        for name, moved in _tables(self).items():
            table = before[name]
            if moved is table:
                continue
            if moved.is_meta and not table.is_meta:
                vars(self).setdefault("_kept", {})[name] = table
            table = vars(self).get("_kept", {}).get(name, table) if table.is_meta else table
            if not (moved.is_meta or table.is_meta):
                self._buffers[name] = table.to(moved.device, self._dtype_of(name, moved))
        return self

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if local_metadata.get("assign_to_params_buffers"):  # the weights take the place of those on the meta device
            weight = next((value for value in state_dict.values() if isinstance(value, Tensor)), None)
            for name, table in vars(self).get("_kept", {}).items():
                current = self._buffers[name]
                if current is not None and current.is_meta:
                    dtype = self._dtype_of(name, current)
                    self._buffers[name] = table.to(table.device if weight is None else weight.device, dtype)

    def _dtype_of(self, name: str, moved: Tensor) -> Any:
        return moved.dtype


class ExactConstants(KeptTables):
    """A module with float64 buffers that move with the module between devices, but keep their dtype when it is cast.

    Otherwise, ``module.float().double()`` would round them to float32.
    """

    def register_constant(self, name: str, value: Tensor) -> None:
        """Register a float64 buffer that is not part of the state dict."""
        check_is("name", name, str)
        check_tensor("value", value, "a floating tensor")
        self.register_buffer(name, value.double(), persistent=False)
        vars(self).setdefault("_constants", set()).add(name)

    def _dtype_of(self, name: str, moved: Tensor) -> Any:
        return torch.float64 if name in vars(self).get("_constants", ()) else moved.dtype


class WideStatistics(nn.Module):
    """A module whose own buffers, such as shifts and scales, stay in float32 when it is cast to half precision.

    Those called ``references_*`` keep their dtype: sums of energies of atoms need float64.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, moved in self._buffers.items():
            if moved is not None and moved.is_floating_point():
                earlier = cast(Tensor, before[name])
                kept = earlier.dtype if name.startswith("references_") else torch.float32
                if moved.itemsize < kept.itemsize:
                    self._buffers[name] = earlier.to(moved.device, kept)
        return self


def first_dtype(module: nn.Module, weights: Mapping[str, Tensor], prefix: str = "") -> torch.dtype | None:
    """Return the dtype of a module's first floating weight that is no buffer; without one, of its first buffer.

    The names of its weights have the prefix. None is returned if no weight is floating.
    """
    buffers = {f"{prefix}{name}" for name, _ in module.named_buffers()}
    found = {
        name: value.dtype for name, value in weights.items() if name.startswith(prefix) and value.is_floating_point()
    }
    trained = (dtype for name, dtype in found.items() if name not in buffers)
    return next(trained, next(iter(found.values()), None))


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, without those of its parts, that are not in its state dict."""
    found = {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
    return {name: table for name, table in found.items() if table is not None}
