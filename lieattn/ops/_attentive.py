"""Attentive group convolution on grids: a group convolution whose responses are weighted before they are summed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lieattn._core.autocast import without_autocast
from lieattn._core.checks import (
    axes_of,
    check_alike,
    check_broadcast,
    check_count,
    check_counts,
    check_features,
    check_flag,
    check_is,
    check_number,
    check_tensor,
    kind,
)
from lieattn._core.recompute import may_recompute
from lieattn._core.sigmoid import attention_of
from lieattn.ops._backend import fused_kernel, is_recorded
from lieattn.ops.kernels._calls import expect_gradients

_CONVOLUTIONS = {2: F.conv2d, 3: F.conv3d}
_AT_ONCE = 2**24  # number of responses that plain maths stores at a time, and recomputes in the backward pass


class Window(NamedTuple):
    """Sizes, dilations and stride of the kernel on padded planes, and of the spatial kernel on the responses."""

    size: int
    dilation: int = 1
    spatial_size: int = 1  # 1 without spatial attention
    spatial_dilation: int = 1
    stride: int = 1


class Operands(NamedTuple):
    """The operands of the gated sum. ``outs`` is the number of pairs of an output channel and an output frame."""

    x: Tensor  # padded, [samples, fiber, in, *sides]
    kernel: Tensor  # [outs, fiber, in, size^dim]
    first: Tensor | None  # W1, [outs, fiber, hidden, in]
    second: Tensor | None  # W2, [outs, fiber, in, hidden]
    spatial: Tensor | None  # [outs, fiber, 2, spatial_size^dim]


class ChannelSums(NamedTuple):
    """Sums of the responses t of a sample, an output and an input frame over the channels, and spatial attention."""

    passed: Tensor | None  # Σ_c (1 - α_C) t with constant α_C, [samples, outs, fiber, *sides]
    kept: Tensor  # Σ_c α_C t with constant α_C
    change: Tensor | None  # 0, with the derivatives of Σ_c α_C t with respect to α_C
    levels: Tensor | None  # spatial attention before the sigmoid


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention maps of a layer, with at least one of the factors ``channel`` and ``spatial``.

    Responses are multiplied by 1 minus the product of the factors. Shapes are those of :func:`attentive_convolution`.
    """

    channel: Tensor | None = None
    spatial: Tensor | None = None

    @property
    def removed(self) -> Tensor:
        """The residual attention α⁻, the product of the factors. ValueError is raised if both are None."""
        given = [factor for factor in (self.channel, self.spatial) if factor is not None]
        if not given:
            raise ValueError("attention maps: expected channel or spatial attention, got neither")
        return reduce(torch.mul, given)

    @property
    def passed(self) -> Tensor:
        """The factors α⁺ = 1 - α⁻ by which responses are multiplied."""
        return 1 - self.removed


def attentive_convolution(
    x: Tensor,
    kernels: Tensor,
    *,
    channel: tuple[Tensor, Tensor] | None = None,
    spatial: Tensor | None = None,
    measure: float = 1.0,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    spatial_dilation: int = 1,
    return_maps: bool = False,
) -> tuple[Tensor, AttentionMaps | None]:
    r"""Convolve, compute attention from the responses, and sum the weighted responses.

    With the responses t_{oc}(y, h, h̃) = Σ_p f_c(h̃, y + p) ψ_{o c}(h, h̃, p), it computes

    .. math::
        \alpha_C &= \sigma\big( W_2 \operatorname{relu}(W_1 \operatorname{mean}_y t)
            + W_2 \operatorname{relu}(W_1 \max_y t) \big), \\
        \alpha_X &= \sigma\big( \psi_X * (\operatorname{mean}_c \alpha_C t, \max_c \alpha_C t) \big), \\
        f'_o(h, y) &= \mu \sum_c \sum_{\tilde h} (1 - \alpha_X \alpha_C) t_{oc}

    separately for every output channel o and pair of frames (h, h̃) (Romero et al. 2020, Eqs. 14-20 as implemented).

    **Equivariance.** If the group moves ``kernels``, ``channel`` and ``spatial`` to the output frames, as in the layers
    of this library, the output at stride 1 is equivariant to the group and, away from the border, to translations.

    The sum is evaluated as Σ_h̃ (Σ_c (1 - α_C) t + (1 - α_X) Σ_c α_C t), without cancellation where attention is close
    to 1. Only the two maxima require all responses, which are computed for one pair of frames at a time, and recomputed
    in the backward pass. If several maxima are equal, one of them gets the gradient, as in torch.

    Parameters
    ----------
    x
        ``[batch, in, fiber, *sides]``, with 2 sides (rows, columns) or 3 (layers, rows, columns). The fiber of images
        is 1.
    kernels
        ``[out, order, in, fiber, *sizes]``, with as many equal sizes as sides, moved to all output frames.
    channel
        W1 ``[out, order, fiber, hidden, in]`` and W2 ``[out, order, fiber, in, hidden]``, or None for α_C = 1.
    spatial
        ψ_X ``[out, order, fiber, 2, *sizes]`` with equal odd sizes, or None for α_X = 1.
    measure
        The factor μ.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    spatial_dilation
        Dilation of ψ_X, which is padded so that the size does not change.
    return_maps
        Whether to return the attention as well.

    Returns
    -------
    out
        ``[batch, out, order, *sides']``.
    maps
        None, or channel attention ``[batch, out, order, in, fiber, 1, 1]`` (with a further 1 if there are three sides),
        and spatial attention ``[batch, out, order, 1, fiber, *sides']``.

    Raises
    ------
    TypeError, ValueError
        If types, shapes, devices or numbers do not fit; the message names the argument.
    """
    _check(x, kernels, channel, spatial, stride=stride, pad=pad, dilation=dilation)
    check_count("spatial_dilation", spatial_dilation)
    check_number("measure", measure)
    check_flag(return_maps=return_maps)
    window = Window(
        size=kernels.shape[-1],
        dilation=dilation,
        spatial_size=1 if spatial is None else spatial.shape[-1],
        spatial_dilation=spatial_dilation,
        stride=stride,
    )
    dim = kernels.ndim - 4
    narrow, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x.device):
        x, kernels = F.pad(x.to(wide), (pad, pad) * dim), kernels.to(wide)
        first, second = (None, None) if channel is None else (matrix.to(wide).flatten(0, 1) for matrix in channel)
        operands = Operands(
            x.transpose(1, 2),
            kernels.flatten(0, 1).transpose(1, 2).flatten(3),
            first,
            second,
            None if spatial is None else spatial.to(wide).flatten(0, 1).flatten(3),
        )
        maps = None
        if return_maps:
            found, scores = _attend(operands, window)
            outs, levels = kernels.shape[:2], found.levels
            maps = AttentionMaps(
                None if scores is None else _over_positions(scores.unflatten(1, outs).transpose(3, 4), dim),
                None if levels is None else torch.sigmoid(levels).unflatten(1, outs).unsqueeze(3),
            )
            sums = weighted(found).sum(dim=2)
        elif stride == 1 and dim == 2 and not is_recorded() and (name := fused_kernel(x.device)) is not None:
            expect_gradients(operands)
            sums = _fused_sums(name, operands, window)
        else:
            sums = residual_sums(operands, window)
        out = (measure * sums).unflatten(1, kernels.shape[:2]).to(narrow)
    return out, maps


def _fused_sums(name: str, operands: Operands, window: Window) -> Tensor:
    """Compute :func:`residual_sums` by a fused kernel, imported here because the other one may not be installed."""
    if name == "triton":
        from lieattn.ops.kernels.triton import _attentive as triton_kernels

        return cast(Tensor, triton_kernels.Fused.apply(window, *operands))
    from lieattn.ops.kernels.attentive import _launch

    return cast(Tensor, _launch.Fused.apply(window, *operands))


def residual_branch(responses: Tensor, maps: AttentionMaps, measure: float = 1.0) -> Tensor:
    """Sum the weighted responses, μ Σ_c Σ_h̃ (1 - α⁻) t.

    The responses t are ``[batch, out, order, in, fiber, *sides']``, and the result is ``[batch, out, order, *sides']``.
    TypeError or ValueError, naming the argument, is raised if ``maps`` do not fit the responses.
    """
    check_tensor("responses", responses, "a floating tensor")
    check_is("maps", maps, AttentionMaps)
    check_number("measure", measure)
    check_alike("responses", responses, "maps", maps.removed)
    check_broadcast("responses", responses.shape, "maps", maps.removed.shape)
    return measure * (maps.passed * responses).sum(dim=(3, 4))


def convolution_responses(x: Tensor, kernels: Tensor, *, stride: int = 1, pad: int = 0, dilation: int = 1) -> Tensor:
    """Return the responses of a group convolution before any sum, ``[batch, out, order, in, fiber, *sides']``.

    Parameters and errors are those of :func:`attentive_convolution`. The result has a plane for every pair of channels
    and frames.
    """
    _check(x, kernels, None, None, stride=stride, pad=pad, dilation=dilation)
    check_features(x, kernels, beside="the kernels")
    window = Window(size=kernels.shape[-1], dilation=dilation, stride=stride)
    outs = kernels.flatten(0, 1).transpose(1, 2).flatten(3)
    t = _responses(F.pad(x, (pad, pad) * (x.ndim - 3)).transpose(1, 2), outs, window)
    return t.unflatten(1, kernels.shape[:2]).transpose(3, 4)


def _check(
    x: Tensor,
    kernels: Tensor,
    channel: tuple[Tensor, Tensor] | None,
    spatial: Tensor | None,
    *,
    stride: int,
    pad: int,
    dilation: int,
) -> None:
    check_counts(stride=stride, dilation=dilation)
    check_count("pad", pad, least=0)
    _check_types(x, kernels, channel, spatial)
    dim = kernels.ndim - 4
    if dim not in _CONVOLUTIONS or len(set(kernels.shape[4:])) != 1:
        expected = "[out, order, in, fiber, size, size], or three sizes in space"
        raise ValueError(f"kernels: expected {expected}, got {tuple(kernels.shape)}")
    out, order, channels, fiber = kernels.shape[:4]
    if x.ndim != 3 + dim or x.shape[1:3] != (channels, fiber):
        raise ValueError(f"x: expected [batch, {channels}, {fiber}, {axes_of(dim)}], got {tuple(x.shape)}")
    span, most = dilation * (kernels.shape[-1] - 1) + 1, min(x.shape[3:]) + 2 * pad
    if kernels.numel() == 0 or span > most:
        raise ValueError(
            f"kernels: expected a window of 1 to {most} pixels, which x has with its border, got one of {span} "
            f"with shape {tuple(kernels.shape)}"
        )
    if channel is not None:
        first, second = channel
        hidden = first.shape[-2] if first.ndim == 5 else 0
        for name, matrix, shape in (("W1", first, (hidden, channels)), ("W2", second, (channels, hidden))):
            if matrix.shape != (out, order, fiber, *shape):
                raise ValueError(
                    f"channel: expected {name} of shape {(out, order, fiber, *shape)} for these kernels, got "
                    f"{tuple(matrix.shape)}"
                )
    if spatial is not None:
        side = spatial.shape[-1] if spatial.ndim else 0
        if spatial.shape != (out, order, fiber, 2, *[side] * dim) or side % 2 == 0:
            expected = f"[{out}, {order}, {fiber}, 2{', side' * dim}] with odd side for these kernels"
            raise ValueError(f"spatial: expected {expected}, got {tuple(spatial.shape)}")


def _check_types(x: Tensor, kernels: Tensor, channel: tuple[Tensor, Tensor] | None, spatial: Tensor | None) -> None:
    if channel is not None and (not isinstance(channel, tuple | list) or len(channel) != 2):
        raise TypeError(f"channel: expected the tensors W1 and W2, got {kind(channel)}")
    matrices = [] if channel is None else [("channel", matrix) for matrix in channel]
    tables = [] if spatial is None else [("spatial", spatial)]
    for name, tensor in (("x", x), ("kernels", kernels), *matrices, *tables):
        check_tensor(name, tensor, "a floating tensor")
        if tensor.device != x.device:
            raise ValueError(f"{name}: expected a tensor on {x.device} like x, got one on {tensor.device}")


def _responses(x: Tensor, kernel: Tensor, window: Window) -> Tensor:
    """Return responses t ``[samples, outs, fiber, in, *sides']`` of x ``[samples, fiber, in, *sides]``, unsummed."""
    outs, fiber, channels = kernel.shape[:3]
    size, groups = (window.size,) * (x.ndim - 3), fiber * channels
    filters = kernel.reshape(outs, groups, *size).transpose(0, 1).reshape(-1, 1, *size)
    convolve = _CONVOLUTIONS[len(size)]
    planes = convolve(x.flatten(1, 2), filters, stride=window.stride, dilation=window.dilation, groups=groups)
    return planes.unflatten(1, (fiber, channels, outs)).movedim(3, 1)


def channel_levels(mean: Tensor, top: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return W2 relu(W1 mean) + W2 relu(W1 max), of ``[outs, fiber, hidden, in]`` and ``[outs, fiber, in, hidden]``."""
    hidden = sum(torch.relu(torch.einsum("ofnc,...ofc->...ofn", first, part)) for part in (mean, top))
    return torch.einsum("ofcn,...ofn->...ofc", second, hidden)


def spatial_levels(mean: Tensor, top: Tensor, spatial: Tensor, window: Window) -> Tensor:
    """Return spatial attention before the sigmoid, from mean and maximum ``[samples, outs, fiber, *sides]``."""
    outs, fiber = mean.shape[1:3]
    dim = mean.ndim - 3
    planes = torch.stack([mean, top], dim=3).flatten(1, 3)
    kernel = spatial.reshape(outs * fiber, 2, *[window.spatial_size] * dim)
    border = window.spatial_dilation * (window.spatial_size // 2)
    convolve = _CONVOLUTIONS[dim]
    levels = convolve(planes, kernel, padding=border, dilation=window.spatial_dilation, groups=outs * fiber)
    return levels.unflatten(1, (outs, fiber))


def _over_positions(x: Tensor, dim: int) -> Tensor:
    """Append axes of size 1 for the positions."""
    return x[(..., *[None] * dim)]


def _attend(operands: Operands, window: Window) -> tuple[ChannelSums, Tensor | None]:
    """Return sums of the responses and, if there is one, the channel attention ``[samples, outs, fiber, in]``."""
    x, kernel, first, second, spatial = operands
    t = _responses(x, kernel, window)
    passed = change = scores = levels = None
    if first is None or second is None:
        kept = total = t.sum(dim=3)
    else:
        pixels = t.flatten(4)
        scores, rest = attention_of(channel_levels(pixels.mean(-1), pixels.max(-1).values, first, second))
        constant = scores.detach()
        factors = torch.stack([rest.detach(), constant, scores - constant])
        passed, kept, change = torch.einsum("ksofc,sofc...->ksof...", factors, t).unbind()
        total = kept + change
    if spatial is not None:
        products = t if scores is None else _over_positions(scores, x.ndim - 3) * t
        levels = spatial_levels(total / x.shape[2], products.max(dim=3).values, spatial, window)
    return ChannelSums(passed, kept, change, levels), scores


def weighted(sums: ChannelSums) -> Tensor:
    """Return Σ_c (1 - α_X α_C) t as Σ_c (1 - α_C) t + (1 - α_X) Σ_c α_C t - α_X change.

    Terms do not cancel if attention is close to 1, nor do their derivatives if it is close to 0. Since ``change`` has
    the derivatives with respect to α_C, they are those of -α_X α_C t, not of the difference of the first two terms.
    """
    passed, kept, change, levels = sums
    if levels is None:
        return torch.zeros_like(kept) if passed is None or change is None else passed - change
    seen, rest = attention_of(levels)
    if passed is None or change is None:
        return rest * kept
    return passed.addcmul(rest, kept).addcmul(seen, change, value=-1)


def _weighted(operands: Operands, window: Window) -> Tensor:
    return weighted(_attend(operands, window)[0]).sum(dim=2)


def residual_sums(operands: Operands, window: Window) -> Tensor:
    """Return the weighted sum Σ_h̃ Σ_c (1 - α_X α_C) t ``[samples, outs, *sides]``.

    It is computed by plain maths, in parts if there are many responses. It can be differentiated any number of times,
    on any device.
    """
    x, fiber, channels = operands.x, *operands.kernel.shape[1:3]
    pixels = math.prod([(side - window.dilation * (window.size - 1)) // window.stride for side in x.shape[3:]])
    return in_parts(_weighted, operands, window, x.shape[0] * fiber * channels * pixels)


def in_parts(
    evaluate: Callable[[Operands, Window], Tensor], operands: Operands, window: Window, entries: int
) -> Tensor:
    """Evaluate weighted sums for as many outputs at a time as memory allows, if each takes ``entries`` numbers."""
    x, kernel, *tables = operands
    outs, at_once = len(kernel), max(1, _AT_ONCE // max(1, entries))
    if at_once >= outs:
        return evaluate(operands, window)
    parts = []
    for start in range(0, outs, at_once):
        own = slice(start, start + at_once)
        part = Operands(x, kernel[own], *(None if table is None else table[own] for table in tables))
        if may_recompute():
            parts.append(checkpoint(evaluate, part, window, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(evaluate(part, window))
    return torch.cat(parts, dim=1)
