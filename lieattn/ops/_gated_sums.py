"""The gated sum of attentive group convolution in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lieattn._core.contexts import may_recompute
from lieattn._core.numerics import attention_of

CONVOLUTIONS = {2: F.conv2d, 3: F.conv3d}


_AT_ONCE = 2**24  # number of responses that plain torch stores at a time, and recomputes in the backward pass


class Window(NamedTuple):
    """Sizes, dilations and stride of the kernel on padded planes, and of the spatial kernel on the responses."""

    size: int
    dilation: int = 1
    spatial_size: int = 1  # 1 without spatial attention
    spatial_dilation: int = 1
    stride: int = 1


class Lists(NamedTuple):
    """Edges between the points of clouds, sorted by target."""

    ptr: Tensor  # first edge of each point, [points + 1]
    source: Tensor  # number of the point in its cloud, [edges]
    row: Tensor  # tap of each edge, [edges]
    share: Tensor  # factor of the sum at each point, [points]


class Clouds(NamedTuple):
    """Clouds of any sizes, one after another, with lists of edges in place of a window."""

    sizes: list[int]  # numbers of points
    near: Lists | None  # edges of the kernel; None if each point has its own inputs of all taps
    wide: Lists | None  # edges of spatial attention
    units: Tensor | None = None  # [taps, turns, units]; the spatial kernel is then [outs, fiber, 2, units]


class Operands(NamedTuple):
    """The operands of the gated sum. ``outs`` is the number of pairs of an output channel and an output frame.

    If points have their own inputs of all taps, these differ between ``turns`` of equally many outputs.
    """

    x: Tensor  # padded, [samples, fiber, in, *sides]; of clouds [points, fiber, in] or [points, turns, taps, fiber, in]
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


def responses_of(x: Tensor, kernel: Tensor, window: Window) -> Tensor:
    """Return responses t ``[samples, outs, fiber, in, *sides']`` of x ``[samples, fiber, in, *sides]``, unsummed."""
    outs, fiber, channels = kernel.shape[:3]
    size, groups = (window.size,) * (x.ndim - 3), fiber * channels
    filters = kernel.reshape(outs, groups, *size).transpose(0, 1).reshape(-1, 1, *size)
    convolve = CONVOLUTIONS[len(size)]
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
    convolve = CONVOLUTIONS[dim]
    levels = convolve(planes, kernel, padding=border, dilation=window.spatial_dilation, groups=outs * fiber)
    return levels.unflatten(1, (outs, fiber))


def over_positions(x: Tensor, dim: int) -> Tensor:
    """Append axes of size 1 for the positions."""
    return x[(..., *[None] * dim)]


def attend(operands: Operands, window: Window) -> tuple[ChannelSums, Tensor | None]:
    """Return sums of the responses and, if there is one, the channel attention ``[samples, outs, fiber, in]``."""
    x, kernel, first, second, spatial = operands
    t = responses_of(x, kernel, window)
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
        products = t if scores is None else over_positions(scores, x.ndim - 3) * t
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
    return weighted(attend(operands, window)[0]).sum(dim=2)


def residual_sums(operands: Operands, window: Window) -> Tensor:
    """Return the weighted sum Σ_h̃ Σ_c (1 - α_X α_C) t ``[samples, outs, *sides]``.

    It is computed by plain torch, in parts if there are many responses. It can be differentiated any number of times,
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
