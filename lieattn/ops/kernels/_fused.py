"""The fused kernels as operators of torch, differentiable and known to torch.compile.

Forward and backward pass are an operator each. The gradient of the forward pass is the backward pass; that of the
backward pass is plain maths on the same operands, so second and higher derivatives are exact.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops import _plain as plain
from lieattn.ops._backend import fused_backend
from lieattn.ops._precision import common_dtype
from lieattn.ops._terms import Normalization, Pattern, RelativeTerms
from lieattn.ops.kernels._arguments import Arguments, norm_shape
from lieattn.ops.kernels._dropout import dropout_mask

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_OPERANDS = 9


def attend(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    neighbors: Neighbors,
    terms: RelativeTerms,
    pattern: Pattern,
    normalize: Normalization,
    dropout: float,
) -> Tensor:
    """Evaluate :func:`lieattn.ops.group_attention` on checked operands with a scaled query.

    Computes in the widest dtype of the operands, half precisions in float32, and returns the dtype of ``value`` for
    these. Signals in half precision are left as they are where the kernel widens them itself.
    """
    tables = (
        terms.positional_key,
        terms.displacement_bias,
        terms.fiber_key,
        terms.fiber_bias,
        terms.psi,
        terms.beta,
    )
    dtype = common_dtype(query, key, value, *tables)
    alike = all(signal is None or signal.dtype == value.dtype for signal in (query, key))
    narrow = dtype == torch.float32 and alike and fused_backend(value.device) == "triton"
    query, key, wide = (_prepared(t, value.dtype if narrow else dtype) for t in (query, key, value))
    tables_ = [_prepared(table, dtype) for table in tables]
    # Drawn by torch, so that torch.manual_seed governs the mask and a compiled graph draws a new one each time.
    seed = torch.randint(2**62, ()) if dropout > 0 else torch.zeros((), dtype=torch.int64)
    out, _ = _forward(
        query,
        key,
        cast(Tensor, wide),
        *tables_,
        neighbors.row_ptr.contiguous(),
        neighbors.source.contiguous(),
        neighbors.target,
        None if terms.row is None else terms.row.contiguous(),
        seed,
        pattern,
        normalize,
        dropout,
    )
    return out.to(value.dtype) if value.dtype.itemsize < 4 else out


def _prepared(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


def _launcher(device: torch.device) -> ModuleType:
    """The kernels for a device; those for another one may not be installed."""
    if fused_backend(device) == "triton":
        from lieattn.ops.kernels import _triton_launch

        return _triton_launch
    from lieattn.ops.kernels import _launch

    return _launch


@torch.library.custom_op("lieattn::group_attention", mutates_args=())
def _forward(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    positional_key: Tensor | None,
    displacement_bias: Tensor | None,
    fiber_key: Tensor | None,
    fiber_bias: Tensor | None,
    psi: Tensor | None,
    beta: Tensor | None,
    row_ptr: Tensor,
    source: Tensor,
    target: Tensor,
    index: Tensor | None,
    seed: Tensor,
    pattern: str,
    normalize: str,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    tables = (positional_key, displacement_bias, fiber_key, fiber_bias, psi, beta)
    arguments = Arguments(query, key, value, *tables, pattern=pattern, normalize=normalize)
    launch = _launcher(value.device)
    return cast(tuple[Tensor, Tensor], launch.run_forward(arguments, row_ptr, source, index, int(seed), dropout))


@torch.library.custom_op("lieattn::group_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    norm: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    positional_key: Tensor | None,
    displacement_bias: Tensor | None,
    fiber_key: Tensor | None,
    fiber_bias: Tensor | None,
    psi: Tensor | None,
    beta: Tensor | None,
    row_ptr: Tensor,
    source: Tensor,
    target: Tensor,
    index: Tensor | None,
    seed: Tensor,
    pattern: str,
    normalize: str,
    dropout: float,
) -> _Gradients:
    tables = (positional_key, displacement_bias, fiber_key, fiber_bias, psi, beta)
    arguments = Arguments(query, key, value, *tables, pattern=pattern, normalize=normalize)
    launch = _launcher(value.device)
    return cast(_Gradients, launch.run_backward(arguments, row_ptr, source, index, int(seed), dropout, grad_out, norm))


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    called = Arguments(*arguments[:_OPERANDS], *arguments[-3:-1])
    value, points = called.value, len(arguments[_OPERANDS]) - 1
    shape = norm_shape(called, points)
    out = value.new_empty(points, called.outs, *value.shape[2:])
    return out, value.new_empty(shape, dtype=torch.promote_types(value.dtype, torch.float32))


@_backward.register_fake
def _(grad_out: Tensor, norm: Tensor, *arguments: Any) -> _Gradients:
    return cast(
        _Gradients,
        tuple(grad_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in arguments[:_OPERANDS]),
    )


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:-3])
    ctx.options = inputs[-3:]


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_norm: Tensor | None) -> tuple[Tensor | None, ...]:
    norm, *inputs = ctx.saved_tensors
    nothing = (None,) * (len(inputs) - _OPERANDS + len(ctx.options))
    if grad_out is None:
        return (None,) * _OPERANDS + nothing
    grads = _backward(grad_out.contiguous(), norm, *inputs, *ctx.options)
    wanted = ctx.needs_input_grad
    return tuple(grad if wanted[i] else None for i, grad in enumerate(grads)) + nothing


_forward.register_autograd(_differentiate, setup_context=_keep_forward)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: _Gradients) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], *inputs[2:-3])
    ctx.options = inputs[-3:]


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out, *inputs = ctx.saved_tensors
    wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2 : 2 + _OPERANDS])
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        if not further:  # nothing is differentiated a third time: a graph of its own
            grad_out, *inputs = (
                _leaf(tensor, wanted[i] if i <= _OPERANDS else False) for i, tensor in enumerate((grad_out, *inputs))
            )
        first = _plain_gradients(grad_out, inputs, ctx.options, wanted)
        pairs = [(one, grad) for one, grad in zip(first, grads, strict=True) if one is not None and grad is not None]
        through = [t for t, want in zip((grad_out, *inputs), wanted, strict=False) if want]
        found: list[Tensor | None] = [None] * len(through)
        pairs = [(one, grad) for one, grad in pairs if one.requires_grad]
        if pairs:
            ones, seconds = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(ones, through, seconds, create_graph=further, allow_unused=True))
    results = iter(found)
    second = [next(results) if want else None for want in wanted]
    return (second[0], None, *second[1:], *(None,) * (len(inputs) - _OPERANDS + len(ctx.options)))


_backward.register_autograd(_differentiate_twice, setup_context=_keep_backward)


def _leaf(tensor: Tensor | None, wanted: bool) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(wanted)


def _plain_gradients(
    grad_out: Tensor, inputs: list[Any], options: tuple[Any, ...], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """What the backward operator computes, by the plain evaluation, with a graph behind it."""
    wide = torch.promote_types(inputs[2].dtype, torch.float32)
    operands: list[Any] = [_prepared(tensor, wide) for tensor in inputs[:_OPERANDS]]
    query, key, value, rho, bias, fiber_key, fiber_bias, psi, beta = operands
    row_ptr, source, target, index, seed = inputs[_OPERANDS:]
    pattern, normalize, dropout = options
    called = Arguments(query, key, value, rho, bias, fiber_key, fiber_bias, psi, beta, pattern, normalize)

    def drop(weights: Tensor) -> Tensor:
        bundled = _launcher(value.device).bundle(called, row_ptr, source, index)
        mask = dropout_mask(called, len(source), int(seed), dropout, bundled)
        return weights * (mask if weights.ndim == mask.ndim else mask[..., 0])

    out, _ = plain.attend(
        query,
        key,
        value,
        Neighbors(row_ptr, source, target),
        pattern=pattern,
        normalize=normalize,
        terms=RelativeTerms(rho, bias, fiber_key, fiber_bias, psi, beta, row=index),
        drop=drop if dropout > 0 else None,
    )
    through = [t for t, want in zip(inputs, wanted[1:], strict=False) if want]
    grad_out = grad_out.to(wide)
    found = iter(torch.autograd.grad(out, through, grad_out, create_graph=True, allow_unused=True) if through else ())
    return [next(found) if want else None for want in wanted[1:]]
