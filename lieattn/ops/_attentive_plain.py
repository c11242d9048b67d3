"""Attentive group convolution in plain maths: differentiable as often as one likes, on any device.

Poses of the output are counted with its channels: ``outs`` is their product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_AT_ONCE = 2**24
"""How many responses are held at once; more are made in parts, and made again for the backward pass."""


class Window(NamedTuple):
    """How the kernel is laid on padded planes, and the spatial kernel on the responses."""

    size: int
    dilation: int = 1
    spatial_size: int = 1  # 1 without spatial attention
    spatial_dilation: int = 1
    stride: int = 1


def responses(x: Tensor, kernel: Tensor, window: Window) -> Tensor:
    """Responses t before any sum: ``[samples, fiber, in, rows, columns]`` to ``[samples, outs, fiber, in, *, *]``."""
    outs, fiber, channels = kernel.shape[:3]
    size = (window.size, window.size)
    filters = kernel.reshape(outs, fiber * channels, *size).transpose(0, 1).reshape(-1, 1, *size)
    planes = F.conv2d(x.flatten(1, 2), filters, stride=window.stride, dilation=window.dilation, groups=fiber * channels)
    return planes.unflatten(1, (fiber, channels, outs)).permute(0, 3, 1, 2, 4, 5)


def channel_levels(mean: Tensor, top: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """W2 relu(W1 mean) + W2 relu(W1 max), matrices ``[outs, fiber, hidden, in]`` and ``[outs, fiber, in, hidden]``."""
    hidden = sum(torch.relu(torch.einsum("ofnc,...ofc->...ofn", first, part)) for part in (mean, top))
    return torch.einsum("ofcn,...ofn->...ofc", second, hidden)


def spatial_levels(mean: Tensor, top: Tensor, spatial: Tensor, window: Window) -> Tensor:
    """Spatial attention before the sigmoid, from mean and maximum over channels, ``[samples, outs, fiber, *, *]``."""
    outs, fiber = mean.shape[1:3]
    planes = torch.stack([mean, top], dim=3).flatten(1, 3)
    size = (window.spatial_size, window.spatial_size)
    border = window.spatial_dilation * (window.spatial_size // 2)
    levels = F.conv2d(
        planes,
        spatial.reshape(outs * fiber, 2, *size),
        padding=border,
        dilation=window.spatial_dilation,
        groups=outs * fiber,
    )
    return levels.unflatten(1, (outs, fiber))


def attend(
    x: Tensor, kernel: Tensor, first: Tensor | None, second: Tensor | None, spatial: Tensor | None, window: Window
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sums Σ_c α_C t and spatial levels, both ``[samples, outs, fiber, *, *]``, and the channel attention.

    ``x`` is padded, ``[samples, fiber, in, rows, columns]``, ``kernel`` ``[outs, fiber, in, size²]``, ``first`` and
    ``second`` are those of :func:`channel_levels`, ``spatial`` ``[outs, fiber, 2, spatial_size²]``.
    """
    t = responses(x, kernel, window)
    scores = None
    if first is not None and second is not None:
        pixels = t.flatten(-2)
        scores = torch.sigmoid(channel_levels(pixels.mean(-1), pixels.max(-1).values, first, second))
        t = scores[..., None, None] * t
    kept = t.sum(dim=3)
    levels = None if spatial is None else spatial_levels(t.mean(dim=3), t.max(dim=3).values, spatial, window)
    return kept, levels, scores


def gated_sums(
    x: Tensor, kernel: Tensor, first: Tensor | None, second: Tensor | None, spatial: Tensor | None, window: Window
) -> Tensor:
    """What attention takes away, Σ_h̃ α_X Σ_c α_C t ``[samples, outs, *, *]``; in parts where responses are many."""
    outs, fiber, channels = kernel.shape[:3]
    pixels = math.prod((side - window.dilation * (window.size - 1)) // window.stride for side in x.shape[-2:])
    at_once = max(1, _AT_ONCE // max(1, x.shape[0] * fiber * channels * pixels))
    if at_once >= outs:
        return _gated(x, kernel, first, second, spatial, window)
    parts = []
    for start in range(0, outs, at_once):
        own = slice(start, start + at_once)
        tables = (None if table is None else table[own] for table in (first, second, spatial))
        operands: Any = (x, kernel[own], *tables, window)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_gated, *operands, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_gated(*operands))
    return torch.cat(parts, dim=1)


def _gated(
    x: Tensor, kernel: Tensor, first: Tensor | None, second: Tensor | None, spatial: Tensor | None, window: Window
) -> Tensor:
    kept, levels, _ = attend(x, kernel, first, second, spatial, window)
    return gate(kept, levels)


def gate(kept: Tensor, levels: Tensor | None) -> Tensor:
    """Sum over the fiber of Σ_c α_C t times the spatial attention."""
    return (kept if levels is None else torch.sigmoid(levels) * kept).sum(dim=2)
