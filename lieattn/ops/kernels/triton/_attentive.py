"""Attentive group convolution in Triton: the steps that need all responses, which are computed in registers.

For a sample, an output with its pose and an input pose, the responses t_c(y) = Σ_p x_c(y + p) ψ_c(p) of all input
channels are needed for two maxima, over positions and over channels, and for the sums Σ_c (1 - α_c) t_c and
Σ_c α_c t_c. All other steps are plain torch. After a kernel has found a maximum over positions, plain torch multiplies
its window by ψ, which defines the gradient. Gradients of the sums and of the maxima over channels are sums in a fixed
order, each by one program.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lieattn._core.numerics import attention_of
from lieattn.ops import _gated_sums as plain
from lieattn.ops._gated_sums import Operands, Window
from lieattn.ops.kernels.triton import constants

_POSITIONS = 256  # largest number of positions of a plane that a program processes at a time
_ENTRIES = 2048  # largest number of entries of windows at these positions, if it stores whole windows

# Constants of a kernel. Planes of x are [rows, columns], planes of responses are [height, width], and P is the padded
# number of taps. ``gated`` is whether channels have scores, and ``topped`` whether maxima over channels are needed.
Sizes = namedtuple("Sizes", "outs fiber channels rows columns height width size dilation gated topped B P dtype")


@triton.jit
def _split(number, outs, fiber):  # type: ignore[no-untyped-def]
    """Return sample, output and pose of a plane of responses."""
    return number // (outs * fiber), number // fiber % outs, number % fiber


@triton.jit
def _responses(x, kernel, s, sample, out, pose, channel, y, inside):  # type: ignore[no-untyped-def]
    """Return the responses of a channel at positions, [B]."""
    plane = x + ((sample * s.fiber + pose) * s.channels + channel) * (s.rows * s.columns)
    taps = kernel + ((out * s.fiber + pose) * s.channels + channel) * (s.size * s.size)
    at = y // s.width * s.columns + y % s.width
    total = tl.zeros([s.B], s.dtype)
    for i in range(s.size):
        for j in range(s.size):
            pixel = at + (i * s.columns + j) * s.dilation
            total += tl.load(taps + i * s.size + j) * tl.load(plane + pixel, mask=inside, other=0.0)
    return total


@triton.jit
def largest_places(x, kernel, s, places):  # type: ignore[no-untyped-def]
    """Write the first place of the largest response, ``[samples, outs, fiber, channels]``."""
    number, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample, out, pose = _split(number, s.outs, s.fiber)
    best = tl.full([s.B], float("-inf"), s.dtype)
    where = tl.zeros([s.B], tl.int64)
    for first in range(0, s.height * s.width, s.B):
        y = first + tl.arange(0, s.B)
        inside = y < s.height * s.width
        t = _responses(x, kernel, s, sample, out, pose, channel, y, inside)
        better = inside & (t > best)
        where = tl.where(better, y, where)
        best = tl.where(better, t, best)
    ties = tl.where(best == tl.max(best, 0), where, s.height * s.width - 1)
    tl.store(places + number * s.channels + channel, tl.min(ties, 0))


@triton.jit
def channel_sums(x, kernel, scores, rest, s, passed, kept, top, winner):  # type: ignore[no-untyped-def]
    """Write Σ_c (1 - α_c) t_c, Σ_c α_c t_c, the largest α_c t_c and its channel, all ``[samples, outs, fiber, y]``.

    ``scores`` are α_c, and ``rest`` is 1 - α_c.
    """
    number = tl.program_id(0).to(tl.int64)
    sample, out, pose = _split(number, s.outs, s.fiber)
    y = tl.program_id(1) * s.B + tl.arange(0, s.B)
    inside = y < s.height * s.width
    left = tl.zeros([s.B], s.dtype)
    total = tl.zeros([s.B], s.dtype)
    largest = tl.full([s.B], float("-inf"), s.dtype)
    first = tl.zeros([s.B], tl.int32)
    for channel in range(s.channels):
        t = _responses(x, kernel, s, sample, out, pose, channel, y, inside)
        if s.gated:
            left += t * tl.load(rest + number * s.channels + channel)
            t = t * tl.load(scores + number * s.channels + channel)
        total += t
        better = t > largest
        first = tl.where(better, channel, first)
        largest = tl.where(better, t, largest)
    at = number * (s.height * s.width) + y
    tl.store(kept + at, total, mask=inside)
    if s.gated:
        tl.store(passed + at, left, mask=inside)
    if s.topped:
        tl.store(top + at, largest, mask=inside)
        tl.store(winner + at, first, mask=inside)


@triton.jit
def _slopes(to_sum, to_top, winner, s, at, channel, inside):  # type: ignore[no-untyped-def]
    """Return the gradient of α_c t_c, [B], from that of Σ_c α_c t_c."""
    slope = tl.load(to_sum + at, mask=inside, other=0.0)
    if s.topped:
        ours = tl.load(winner + at, mask=inside, other=-1) == channel
        slope += tl.where(ours, tl.load(to_top + at, mask=inside, other=0.0), 0.0)
    return slope


@triton.jit
def pixel_gradients(kernel, scores, rest, s, to_passed, to_kept, to_top, winner, grad):  # type: ignore[no-untyped-def]
    """Write the gradient of x, with a program for each block of pixels of a plane."""
    plane = tl.program_id(0).to(tl.int64)
    sample, pose, channel = _split(plane, s.fiber, s.channels)
    pixel = tl.program_id(1) * s.B + tl.arange(0, s.B)
    row, column = pixel // s.columns, pixel % s.columns
    total = tl.zeros([s.B], s.dtype)
    for out in range(s.outs):
        number = (sample * s.outs + out) * s.fiber + pose
        taps = kernel + ((out * s.fiber + pose) * s.channels + channel) * (s.size * s.size)
        part = tl.zeros([s.B], s.dtype)
        other = tl.zeros([s.B], s.dtype)
        for i in range(s.size):
            for j in range(s.size):
                r, q = row - i * s.dilation, column - j * s.dilation
                inside = (r >= 0) & (r < s.height) & (q >= 0) & (q < s.width)
                at = number * (s.height * s.width) + r * s.width + q
                tap = tl.load(taps + i * s.size + j)
                part += tap * _slopes(to_kept, to_top, winner, s, at, channel, inside)
                if s.gated:
                    other += tap * tl.load(to_passed + at, mask=inside, other=0.0)
        if s.gated:
            at = number * s.channels + channel
            part = part * tl.load(scores + at) + other * tl.load(rest + at)
        total += part
    tl.store(grad + plane * (s.rows * s.columns) + pixel, total, mask=pixel < s.rows * s.columns)


@triton.jit
def tap_products(  # type: ignore[no-untyped-def]
    x, kernel, scores, rest, s, to_passed, to_kept, to_change, to_top, winner, products, changes
):
    """Write Σ_y (gradient of t_c)(y) x_c(y + p) ``[samples, outs, fiber, channels, taps]``, and gradients of α_c.

    Gradients of α_c, ``[samples, outs, fiber, channels]``, are those of ``change``.
    """
    number, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample, out, pose = _split(number, s.outs, s.fiber)
    plane = x + ((sample * s.fiber + pose) * s.channels + channel) * (s.rows * s.columns)
    tap = tl.arange(0, s.P)
    reach = (tap // s.size * s.columns + tap % s.size) * s.dilation
    known = tap < s.size * s.size
    total = tl.zeros([s.P], s.dtype)
    changed = tl.zeros([s.P], s.dtype)
    for first in range(0, s.height * s.width, s.B):
        y = first + tl.arange(0, s.B)
        inside = y < s.height * s.width
        place = number * (s.height * s.width) + y
        slope = _slopes(to_kept, to_top, winner, s, place, channel, inside)
        at = y // s.width * s.columns + y % s.width
        seen = tl.load(plane + at[None, :] + reach[:, None], mask=known[:, None] & inside[None, :], other=0.0)
        if s.gated:
            slope = slope * tl.load(scores + number * s.channels + channel)
            passed = tl.load(to_passed + place, mask=inside, other=0.0)
            slope += passed * tl.load(rest + number * s.channels + channel)
            change = _slopes(to_change, to_top, winner, s, place, channel, inside)
            changed += tl.sum(seen * change[None, :], 1)
        total += tl.sum(seen * slope[None, :], 1)
    tl.store(products + (number * s.channels + channel) * (s.size * s.size) + tap, total, mask=known)
    if s.gated:
        taps = kernel + ((out * s.fiber + pose) * s.channels + channel) * (s.size * s.size)
        weights = tl.load(taps + tap, mask=known, other=0.0)
        tl.store(changes + number * s.channels + channel, tl.sum(weights * changed, 0))


def residual_sums(operands: Operands, window: Window) -> Tensor:
    """Return Σ_h̃ Σ_c (1 - α_X α_C) t ``[samples, outs, height, width]``, differentiable once, computed in parts."""
    x, kernel = operands.x, operands.kernel
    pixels = (x.shape[-2] - window.dilation * (window.size - 1)) * (x.shape[-1] - window.dilation * (window.size - 1))
    return plain.in_parts(_weighted, operands, window, x.shape[0] * x.shape[1] * max(pixels, kernel[0, 0].numel()))


def _weighted(operands: Operands, window: Window) -> Tensor:
    x, kernel, first, second, spatial = operands
    level = None
    if first is not None and second is not None:
        mean, top = _statistics(x, kernel, window)
        level = plain.channel_levels(mean, top, first, second)
    sides, found = _Call(x, kernel, window).sides, _ChannelSums.apply(window, spatial is not None, x, kernel, level)
    planes: Any = (None if part is None else part.unflatten(-1, sides) for part in found)
    passed, kept, change, top = planes
    levels = None
    if spatial is not None:
        total = kept if change is None else kept + change
        levels = plain.spatial_levels(total / x.shape[2], top, spatial, window)
    return plain.weighted(plain.ChannelSums(passed, kept, change, levels)).sum(dim=2)


def _statistics(x: Tensor, kernel: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return mean and largest responses over positions, ``[samples, outs, fiber, channels]``."""
    call = _Call(x, kernel, window)
    means = F.avg_pool2d(x.flatten(1, 2), call.sides, stride=window.dilation).flatten(2).unflatten(1, x.shape[1:3])
    mean = torch.einsum("sfcp,ofcp->sofc", means, kernel)
    places = torch.zeros(mean.shape, dtype=torch.int64, device=x.device)
    given = (t.detach().contiguous() for t in (x, kernel))
    call.run(largest_places, (*call.planes, x.shape[2]), *given, call.sizes(), places)
    columns, steps = x.shape[-1], window.dilation * torch.arange(window.size, device=x.device)
    corner = places // call.sides[1] * columns + places % call.sides[1]
    pixels = corner[..., None] + (steps[:, None] * columns + steps).flatten()
    index = pixels.movedim(1, 3).flatten(3)  # [samples, fiber, channels, outs * taps]
    seen = x.flatten(3).gather(3, index).unflatten(3, (kernel.shape[0], -1))
    return mean, torch.einsum("sfcop,ofcp->sofc", seen, kernel)


class _ChannelSums(torch.autograd.Function):
    """``passed``, ``kept`` and ``change`` of :class:`ChannelSums` and the maximum of α_c t_c, differentiable once.

    Channel attention is given before the sigmoid. Without it, ``passed`` and ``change`` are None. The maximum is None
    if it is not needed.
    """

    @staticmethod
    def forward(ctx: Any, window: Window, topped: bool, *operands: Any) -> tuple[Tensor | None, ...]:
        x, kernel, level = operands
        x, kernel, scores, rest = x.contiguous(), kernel.contiguous(), None, None
        if level is not None:
            scores, rest = (part.contiguous() for part in attention_of(level))
        call = _Call(x, kernel, window)
        sizes = call.sizes(gated=scores is not None, topped=topped)
        shape = (len(x), len(kernel), x.shape[1], call.positions)
        kept, top = x.new_empty(shape), x.new_empty(shape) if topped else None
        passed = None if scores is None else torch.empty_like(kept)
        winner = x.new_empty(shape if topped else 0, dtype=torch.int32)
        grid = (*call.planes, call.blocks(call.positions))
        call.run(channel_sums, grid, x, kernel, scores, rest, sizes, passed, kept, top, winner)
        ctx.save_for_backward(x, kernel, scores, rest, winner)
        ctx.window, ctx.topped = window, topped
        return passed, kept, None if scores is None else torch.zeros_like(kept), top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, scores, rest, winner = ctx.saved_tensors
        call = _Call(x, kernel, ctx.window)
        options = {"gated": scores is not None, "topped": ctx.topped}
        to_passed, to_kept, to_change, to_top = (None if grad is None else grad.contiguous() for grad in grads)
        to_x = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        if to_x is not None:
            grid = (x.shape[0] * x.shape[1] * x.shape[2], call.blocks(x.shape[-1] * x.shape[-2]))
            sizes = call.sizes(**options)
            call.run(pixel_gradients, grid, kernel, scores, rest, sizes, to_passed, to_kept, to_top, winner, to_x)
        products = x.new_empty(len(x), *kernel.shape)
        changes = None if scores is None else torch.empty_like(scores)
        sizes = call.sizes(windows=True, **options)
        slopes = to_passed, to_kept, to_change, to_top, winner
        grid = (*call.planes, x.shape[2])
        call.run(tap_products, grid, x, kernel, scores, rest, sizes, *slopes, products, changes)
        return None, None, to_x, products.sum(0), None if changes is None else changes * scores * rest


class _Call:
    """Sizes and grids of the kernels for given operands."""

    def __init__(self, x: Tensor, kernel: Tensor, window: Window) -> None:
        self.x, self.kernel, self.window = x, kernel, window
        height, width = (side - window.dilation * (window.size - 1) for side in x.shape[-2:])
        self.sides, self.positions = (height, width), height * width
        self.planes = (len(x) * len(kernel) * x.shape[1],)

    def sizes(self, *, gated: bool = False, topped: bool = False, windows: bool = False) -> Sizes:
        """Return the sizes of a kernel, which stores whole windows at its positions or processes taps one by one."""
        padded = triton.next_power_of_2(self.window.size**2)
        double = self.x.dtype == torch.float64
        numbers = {
            **{"outs": len(self.kernel), "fiber": self.x.shape[1], "channels": self.x.shape[2]},
            **dict(zip(("rows", "columns", "height", "width"), (*self.x.shape[-2:], *self.sides), strict=True)),
            **{"size": self.window.size, "dilation": self.window.dilation, "gated": gated, "topped": topped},
            "B": max(16, _ENTRIES // padded) if windows else _POSITIONS,
            "P": padded,
            "dtype": tl.float64 if double else tl.float32,
        }
        return constants(Sizes, **numbers)

    def blocks(self, positions: int) -> int:
        """Return the number of programs for the positions of a plane."""
        return -(-positions // _POSITIONS)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Start the programs of a grid, if there are any."""
        if min(grid) > 0:
            with torch.cuda.device_of(self.x):
                kernel[grid](*arguments, num_warps=4, enable_fp_fusion=True)
