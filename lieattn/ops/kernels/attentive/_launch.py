"""Attentive group convolution on the CPU: layout of the planes, threads, and the operator of torch.

A plane is one row of memory with ``stride`` entries from one image row to the next; entries to the right of the image
are computed and masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.ops._attentive import Operands, Window, gated_sums
from lieattn.ops.kernels._calls import NUMPY_TYPES, Ranges, compile_together, record, scratch_addresses
from lieattn.ops.kernels._threads import run
from lieattn.ops.kernels.attentive._kernels import TAPS_TOGETHER, attentive_backward, attentive_forward

_Tensors = dict[str, Tensor | None]


@lru_cache(maxsize=64)
def _planes(
    rows: int, columns: int, window: Window, lanes: int, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes in elements, and tables, of the planes of one image size."""
    span = window.dilation * (window.size - 1)
    out_rows, out_columns = rows - span, columns - span
    border = window.spatial_dilation * (window.spatial_size // 2)
    stride = max(columns, out_columns + border)
    taps = _offsets(window.size, window.dilation, stride, 0)
    spatial_taps = _offsets(window.spatial_size, window.spatial_dilation, stride, border)
    length = _whole(out_rows * stride, lanes)
    mask = torch.zeros(length, dtype=dtype)
    _pixels(mask, out_rows, out_columns, stride).fill_(1)
    reach = int(taps.max())
    sizes = {
        "rows": out_rows,
        "columns": out_columns,
        "stride": stride,
        "positions": out_rows * out_columns,
        "length": length,  # of a plane of responses
        "source": _whole(max(rows * stride, length + reach), lanes),  # of a plane of inputs
        "reach": reach,  # largest offset of a tap
        "margin": border * (stride + 1),  # zeros before and after a plane, for the spatial kernel
        "taps": window.size**2,
        "spatial_taps": window.spatial_size**2,
        "whole_taps": len(taps),  # filled up to whole groups
        "whole_spatial_taps": len(spatial_taps),
    }
    tables = {
        "taps": taps,
        "spatial_taps": spatial_taps,
        "mirrored": -spatial_taps,
        "back": -taps,
        "mask": mask,  # 1, or 0 where there is no pixel
        "lowest": torch.where(mask > 0, 0.0, -torch.inf).to(dtype),  # 0, or minus infinity there
    }
    return sizes, tables


def _offsets(size: int, dilation: int, stride: int, border: int) -> Tensor:
    """Where the taps of a square kernel are, in entries; filled up with 0 to whole groups."""
    steps = dilation * torch.arange(size) - border
    taps = (steps[:, None] * stride + steps).flatten()
    return F.pad(taps, (0, -len(taps) % TAPS_TOGETHER))


def _whole(size: int, lanes: int) -> int:
    return -(-size // lanes) * lanes


def _pixels(planes: Tensor, rows: int, columns: int, stride: int) -> Tensor:
    """The image ``[*, rows, columns]`` of planes."""
    return planes[..., : rows * stride].unflatten(-1, (rows, stride))[..., :columns]


class _Call:
    """Sizes, packed operands and tables of one call; holds the memory whose addresses it gives."""

    def __init__(self, operands: Operands, window: Window, wants_input: bool = False) -> None:
        x, kernel, first, second, spatial = operands
        self.dtype, self.lanes, self.image = x.dtype, 64 // x.element_size(), x.shape[-2:]
        planes, self.tables = _planes(*self.image, window, self.lanes, x.dtype)
        samples, fiber, channels = x.shape[:3]
        self.sizes = planes | {
            "samples": samples,
            "outs": kernel.shape[0],  # output channels times poses
            "fiber": fiber,
            "channels": channels,
            "hidden": 0 if first is None else first.shape[-2],
            "has_channel": int(first is not None),
            "has_spatial": int(spatial is not None),
            "wants_input": int(wants_input),  # whether the gradient with respect to the input is asked for
        }
        # Where nothing is added, nothing is copied, and the planes are where the caller had them.
        padded = F.pad(x, (0, planes["stride"] - x.shape[-1])).flatten(-2)
        padded = F.pad(padded, (0, planes["source"] - padded.shape[-1]))  # [samples, fiber, channels, source]
        given = {"x": padded, "kernel": kernel, "first": first, "second": second, "spatial": spatial}
        self.operands = {name: None if t is None else t.contiguous() for name, t in given.items()}

    def pixels(self, planes: Tensor) -> Tensor:
        """The image of planes of responses."""
        return _pixels(planes, *(self.sizes[name] for name in ("rows", "columns", "stride")))

    def parts(self, fibers: str) -> Ranges:
        """Ranges of the samples times the ``fibers`` or outputs, one for each thread; an empty one without samples."""
        count = self.sizes["samples"] * self.sizes[fibers]
        number = max(1, min(torch.get_num_threads(), count))
        return list(itertools.pairwise(count * part // number for part in range(number + 1)))

    def run(self, kernel: Callable[..., None], parts: Ranges, planes: Tensor, grads: list[_Tensors] | None) -> None:
        """Call a kernel for each part, with planes it reads or writes and, if given, gradients to add to."""
        needed = self._scratch()
        memory = torch.zeros(len(parts), sum(needed.values()), dtype=self.dtype)
        told = _addresses(self.operands), record(self.sizes), _addresses(self.tables)
        own = [()] * len(parts) if grads is None else [(_addresses(grad),) for grad in grads]
        vector = (NUMPY_TYPES[self.dtype](0),) * self.lanes
        calls = [
            (*told, *part, planes.data_ptr(), *to, scratch, vector)
            for part, to, scratch in zip(parts, own, scratch_addresses(needed, memory, lanes=1), strict=True)
        ]
        if grads is None and calls:
            *given, scratch, _ = calls[0]
            compile_together(
                "attentive",
                self.dtype,
                forward=lambda: [(attentive_forward, calls[0])],
                # Gradients are told as operands are.
                backward=lambda: [(attentive_backward, (*given, given[0], scratch, vector))],
            )
        run(kernel, calls)

    def _scratch(self) -> dict[str, int]:
        """Elements of what a call writes to and forgets, in whole vectors; zero at the start."""
        s, channels, length = self.sizes, self.sizes["channels"], self.sizes["length"]
        padded = 2 * s["margin"] + length
        sizes = {
            "responses": channels * length,
            "slopes": channels * (s["reach"] + s["source"]),
            "planes": 2 * padded,  # mean and maximum over the channels
            "winner": length,  # number of the channel with the maximum
            "kernel": channels * s["whole_taps"] * self.lanes,  # a vector each: gradient of the kernel
            "spatial": 2 * s["whole_spatial_taps"] * self.lanes,
            "shares": 3 * length,
            "slope_of_map": padded,
            "numbers": 7 * channels + 4 * s["hidden"],  # statistics and hidden values
        }
        return {name: _whole(size, self.lanes) for name, size in sizes.items()}


def _addresses(tensors: _Tensors | dict[str, Tensor]) -> Any:
    """Addresses; absent operands are never read."""
    return record({name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()})


def _backward(call: _Call, grad: Tensor) -> list[Tensor | None]:
    parts, planes = call.parts("fiber"), grad.new_zeros(*grad.shape[:2], call.sizes["length"])
    call.pixels(planes).copy_(grad)
    x, tables = call.operands["x"], {name: t for name, t in call.operands.items() if name != "x"}
    grad_input = {"x": torch.zeros_like(x) if x is not None and call.sizes["wants_input"] else None}
    grads = [
        grad_input | {name: None if t is None else torch.zeros_like(t) for name, t in tables.items()} for _ in parts
    ]
    call.run(attentive_backward, parts, planes, grads)
    totals = grads[0]
    for own, name in itertools.product(grads[1:], tables):
        total, share = totals[name], own[name]
        if total is not None and share is not None:
            total += share
    if totals["x"] is not None:
        rows, columns = call.image
        totals["x"] = _pixels(totals["x"], rows, columns, call.sizes["stride"])
    return list(totals.values())


class Fused(torch.autograd.Function):
    """Gated sums by the kernels; the gradient of their gradient is that of the plain ``gated_sums``."""

    @staticmethod
    def forward(ctx: Any, window: Window, *operands: Any) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.window = window
        call = _Call(Operands(*operands), window)
        planes = torch.empty(*(call.sizes[name] for name in ("samples", "outs", "length")), dtype=call.dtype)
        call.run(attentive_forward, call.parts("outs"), planes, None)
        return call.pixels(planes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operands = Operands(*ctx.saved_tensors)
        needed = ctx.needs_input_grad[1:]
        if not torch.is_grad_enabled():
            return (None, *_backward(_Call(operands, ctx.window, wants_input=needed[0]), grads[0]))
        gated = gated_sums(operands, ctx.window)
        wanted: list[Any] = [operand for operand, needs in zip(operands, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(gated, wanted, grads[0], create_graph=True, allow_unused=True))
        return (None, *(next(found) if needs else None for needs in needed))
