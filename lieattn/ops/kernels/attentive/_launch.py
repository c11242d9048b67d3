"""Attentive group convolution on the CPU: layout of the planes, threads, and the operator of torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.ops import _attentive_plain as plain
from lieattn.ops._attentive_plain import Window
from lieattn.ops.kernels._calls import record, run, scratch_addresses
from lieattn.ops.kernels._memory import NUMPY_TYPES
from lieattn.ops.kernels.attentive._kernels import attentive_backward, attentive_forward
from lieattn.ops.kernels.attentive._planes import (
    TAPS_TOGETHER,
    AttentiveOperands,
    AttentiveSizes,
    AttentiveTables,
    attentive_scratch,
)


@dataclass(frozen=True, eq=False)
class _Planes:
    """Planes of one image size: a row takes ``stride`` entries."""

    rows: int  # of the responses
    columns: int
    stride: int
    length: int
    source: int
    reach: int
    margin: int
    taps: Tensor
    spatial_taps: Tensor
    mask: Tensor
    lowest: Tensor


@lru_cache(maxsize=64)
def _planes(rows: int, columns: int, window: Window, lanes: int, dtype: torch.dtype) -> _Planes:
    span = window.dilation * (window.size - 1)
    out_rows, out_columns = rows - span, columns - span
    border = window.spatial_dilation * (window.spatial_size // 2)
    stride = max(columns, out_columns + border)
    taps = _offsets(window.size, window.dilation, stride, 0)
    spatial = _offsets(window.spatial_size, window.spatial_dilation, stride, border)
    length = _whole(out_rows * stride, lanes)
    mask = torch.zeros(length, dtype=dtype)
    mask[: out_rows * stride].view(out_rows, stride)[:, :out_columns] = 1
    reach, margin = int(taps.max()), border * (stride + 1)
    source = _whole(max(rows * stride, length + reach), lanes)
    lowest = torch.where(mask > 0, 0.0, -torch.inf).to(dtype)
    return _Planes(out_rows, out_columns, stride, length, source, reach, margin, taps, spatial, mask, lowest)


def _offsets(size: int, dilation: int, stride: int, border: int) -> Tensor:
    """Where the taps of a square kernel are, in entries; filled up with 0 to whole groups."""
    steps = dilation * torch.arange(size) - border
    taps = (steps[:, None] * stride + steps).flatten()
    return F.pad(taps, (0, -len(taps) % TAPS_TOGETHER))


def _whole(size: int, lanes: int) -> int:
    return -(-size // lanes) * lanes


class _Problem:
    """Sizes, packed operands and tables of one call; holds the memory whose addresses it gives."""

    def __init__(self, operands: tuple[Any, ...], window: Window, wants_input: bool) -> None:
        x, kernel, first, _, spatial = operands
        self.dtype, self.window = x.dtype, window
        self.lanes = 64 // x.element_size()
        self.vector = (NUMPY_TYPES[x.dtype](0),) * self.lanes
        self.image = x.shape
        self.planes = _planes(x.shape[-2], x.shape[-1], window, self.lanes, x.dtype)
        self.x = self._pack(x)
        self.tables = [None if t is None else t.contiguous() for t in operands[1:]]
        planes, (samples, fiber, channels) = self.planes, x.shape[:3]
        self.sizes = AttentiveSizes(
            samples=samples,
            outs=kernel.shape[0],
            fiber=fiber,
            channels=channels,
            hidden=0 if first is None else first.shape[-2],
            taps=window.size**2,
            spatial_taps=window.spatial_size**2,
            positions=planes.rows * planes.columns,
            length=planes.length,
            source=planes.source,
            reach=planes.reach,
            margin=planes.margin,
            has_channel=int(first is not None),
            has_spatial=int(spatial is not None),
            wants_input=int(wants_input),
        )
        backward = (-planes.spatial_taps).contiguous(), (-planes.taps).contiguous()
        self.kept = (planes, backward)
        tables = planes.taps, planes.spatial_taps, *backward, planes.mask, planes.lowest
        self.offsets = record(AttentiveTables(*(table.data_ptr() for table in tables)))

    def _pack(self, x: Tensor) -> Tensor:
        """Planes with rows of ``stride`` entries, ``[samples, fiber, channels, source]``."""
        padded = F.pad(x, (0, self.planes.stride - x.shape[-1])).flatten(-2)
        # Where nothing is added, nothing is copied, and the planes are where the caller had them.
        return F.pad(padded, (0, self.planes.source - padded.shape[-1])).contiguous()

    def unpack_input(self, grad: Tensor) -> Tensor:
        """The pixels of planes like those of :meth:`_pack`."""
        rows, columns = self.image[-2:]
        return grad[..., : rows * self.planes.stride].unflatten(-1, (rows, -1))[..., :columns]

    def scratch(self, calls: int) -> tuple[Tensor, list[Any]]:
        """Zeroed memory for so many calls, and the addresses of its parts for each of them."""
        needed = attentive_scratch(self.sizes, self.lanes)
        memory = torch.zeros(calls, sum(needed), dtype=self.dtype)
        return memory, scratch_addresses(needed, memory, lanes=1)


def _addresses(tensors: list[Tensor | None]) -> Any:
    return record(AttentiveOperands(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors)))


def _parts(count: int) -> list[tuple[int, int]]:
    number = max(1, min(torch.get_num_threads(), count))
    bounds = [count * part // number for part in range(number + 1)]
    return [(low, high) for low, high in itertools.pairwise(bounds) if low < high]


def _forward(problem: _Problem) -> Tensor:
    s = problem.sizes
    gated = torch.empty(s.samples, s.outs, s.length, dtype=problem.dtype)
    parts = _parts(s.samples * s.outs)
    scratch, addresses = problem.scratch(len(parts))
    operands, sizes = _addresses([problem.x, *problem.tables]), record(s)
    calls = [
        (operands, sizes, problem.offsets, *part, gated.data_ptr(), own, problem.vector)
        for part, own in zip(parts, addresses, strict=True)
    ]
    run(attentive_forward, calls)
    del scratch  # held until the kernels are done
    return gated


def _backward(problem: _Problem, grad: Tensor) -> list[Tensor | None]:
    parts = _parts(problem.sizes.samples * problem.sizes.fiber)
    scratch, addresses = problem.scratch(len(parts))
    operands, sizes = _addresses([problem.x, *problem.tables]), record(problem.sizes)
    grad_input = torch.zeros_like(problem.x) if problem.sizes.wants_input else None
    grads = [[grad_input, *(None if t is None else torch.zeros_like(t) for t in problem.tables)] for _ in parts]
    calls = [
        (operands, sizes, problem.offsets, *part, grad.data_ptr(), _addresses(result), own, problem.vector)
        for part, result, own in zip(parts, grads, addresses, strict=True)
    ]
    run(attentive_backward, calls)
    del scratch
    totals = grads[0]
    for own in grads[1:]:
        for total, share in zip(totals[1:], own[1:], strict=True):
            if total is not None and share is not None:
                total += share
    if grad_input is not None:
        totals[0] = problem.unpack_input(grad_input)
    return totals


class _Fused(torch.autograd.Function):
    """Gated sums by the kernels; the gradient of their gradient is that of the plain evaluation."""

    @staticmethod
    def forward(ctx: Any, window: Window, *operands: Tensor | None) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.window = window
        problem = _Problem(operands, window, wants_input=False)
        return _pixels(_forward(problem), problem.planes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (None, *_plain_gradients(ctx, grads[0]))
        problem = _Problem(ctx.saved_tensors, ctx.window, wants_input=ctx.needs_input_grad[1])
        packed = torch.zeros(*grads[0].shape[:2], problem.planes.length, dtype=problem.dtype)
        _pixels(packed, problem.planes).copy_(grads[0])
        return (None, *_backward(problem, packed))


def _pixels(planes: Tensor, layout: _Planes) -> Tensor:
    return planes[..., : layout.rows * layout.stride].unflatten(-1, (layout.rows, -1))[..., : layout.columns]


def _plain_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, kernel, first, second, spatial = operands = ctx.saved_tensors
    needed = ctx.needs_input_grad[1:]
    gated = plain.gated_sums(x, kernel, first, second, spatial, ctx.window)
    wanted = [operand for operand, needs in zip(operands, needed, strict=True) if needs]
    found = iter(torch.autograd.grad(gated, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needs else None for needs in needed)


def gated_sums(
    x: Tensor, kernel: Tensor, first: Tensor | None, second: Tensor | None, spatial: Tensor | None, window: Window
) -> Tensor:
    """Evaluate :func:`lieattn.ops._attentive_plain.gated_sums`, with the same operands, by the kernels."""
    gated: Tensor = _Fused.apply(window, x, kernel, first, second, spatial)
    return gated
