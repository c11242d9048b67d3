"""Calls of the kernels of attentive group convolution."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.ops._gated_sums import Lists, Operands, Window
from lieattn.ops.kernels._attentive_kernels import TAPS_TOGETHER, attentive_backward, attentive_forward
from lieattn.ops.kernels._calls import (
    NUMPY_TYPES,
    Ranges,
    compile_together,
    cut_for_threads,
    record,
    scratch_addresses,
    widest_lanes,
)
from lieattn.ops.kernels._threads import run

_Tensors = dict[str, Tensor | None]
_LISTS = tuple(f"{kind}_{part}" for kind in ("near", "wide") for part in Lists._fields)
_NONE = torch.empty(0, device="cpu")


def _lanes(outs: int, dtype: torch.dtype) -> int:
    """Return the number of outputs in a vector: the number of lanes of the machine, or half of it if that is faster."""
    most = widest_lanes() * torch.float32.itemsize // dtype.itemsize
    half = max(1, most // 2)
    # A block of half as many outputs takes about two thirds of the time.
    return half if 2 * -(-outs // half) < 3 * -(-outs // most) else most


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step


@lru_cache(maxsize=64)
def _planes(rows: int, columns: int, window: Window) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the sizes in pixels and the tables of the planes of one image size."""
    span = window.dilation * (window.size - 1)
    out_rows, out_columns = rows - span, columns - span
    center = window.spatial_dilation * (window.spatial_size // 2)
    border = max(span, center)
    stride = out_columns + border
    margin = border * (stride + 1)
    sizes = {
        "in_rows": rows,
        "in_columns": columns,
        "source": rows * columns,  # size of a plane of inputs
        "rows": out_rows,
        "columns": out_columns,
        "stride": stride,
        "margin": margin,
        "positions": out_rows * out_columns,
        "length": out_rows * stride,  # length of a plane without its margins
        "plane": out_rows * stride + 2 * margin,
        "taps": window.size**2,
        "spatial_taps": window.spatial_size**2,
        "whole_taps": _whole(window.size**2, TAPS_TOGETHER),  # filled up to whole groups
        "whole_spatial_taps": _whole(window.spatial_size**2, TAPS_TOGETHER),
        "listed": 0,  # whether taps are lists of neighbors
    }
    spatial = _offsets(window.spatial_size, window.spatial_dilation, stride, center)
    tables = {
        "taps": _offsets(window.size, window.dilation, columns, 0),
        "back": -_offsets(window.size, window.dilation, stride, 0),
        "spatial_taps": spatial,
        "spatial_back": -spatial,
    }
    return sizes, tables | dict.fromkeys(_LISTS, _NONE)


def _clouds(points: int, rows: tuple[int, int], lists: tuple[Lists, Lists]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the sizes and tables of clouds with this number of points, which are planes of one row."""
    window, none = _planes(1, 1, Window(size=1))
    taps = {"taps": rows[0], "spatial_taps": rows[1]}
    whole = {f"whole_{name}": number for name, number in taps.items()}
    own = dict.fromkeys(("in_columns", "source", "columns", "stride", "positions", "length", "plane"), points)
    sizes = window | own | taps | whole | {"margin": 0, "listed": 1}
    return sizes, none | dict(zip(_LISTS, (part.contiguous() for own in lists for part in own), strict=True))


def _offsets(size: int, dilation: int, stride: int, center: int) -> Tensor:
    """Return the offsets of the taps of a square kernel in pixels, filled up with 0 to whole groups."""
    steps = dilation * torch.arange(size, device="cpu") - center
    return _filled((steps[:, None] * stride + steps).flatten())


def _filled(taps: Tensor) -> Tensor:
    return F.pad(taps, (0, -taps.shape[-1] % TAPS_TOGETHER))


class _Call:
    """Sizes, packed operands and tables of one call, whose memory this object owns."""

    def __init__(self, operands: Operands, taps: Window | tuple[Lists, Lists], wants_input: bool = False) -> None:
        x, kernel, first, second, spatial = operands
        samples, fiber, channels = x.shape[:3]
        self.dtype, self.shapes, self.outs = x.dtype, [t if t is None else t.shape for t in operands], len(kernel)
        self.lanes = _lanes(self.outs, x.dtype)
        if isinstance(taps, Window):
            planes, self.tables = _planes(*x.shape[-2:], taps)
            kernel, spatial = _filled(kernel), None if spatial is None else _filled(spatial)
        else:
            rows = kernel.shape[-1], 0 if spatial is None else spatial.shape[-1]
            planes, self.tables = _clouds(x.shape[-1], rows, taps)
        self.sizes = planes | {
            "samples": samples,
            "blocks": _whole(self.outs, self.lanes) // self.lanes,  # blocks of output channels times poses
            "fiber": fiber,
            "channels": channels,
            "hidden": 0 if first is None else first.shape[-2],
            "has_channel": int(first is not None),
            "has_spatial": int(spatial is not None),
            "wants_input": int(wants_input),  # whether the gradient of the input is needed
        }
        self.operands: _Tensors = {
            "x": x.contiguous(),
            "kernel": self._in_lanes(kernel),
            "first": None if first is None else self._in_lanes(first),
            "second": None if second is None else self._in_lanes(second),
            "spatial": None if spatial is None else self._in_lanes(spatial),
        }

    def _in_lanes(self, table: Tensor) -> Tensor:
        """Convert ``[outs, ...]`` to ``[blocks, ..., lanes]``, filled up with zeros."""
        missing = -self.outs % self.lanes
        filled = F.pad(table, (0, 0) * (table.ndim - 1) + (0, missing)) if missing else table
        return filled.unflatten(0, (-1, self.lanes)).movedim(1, -1).contiguous()

    def unpacked(self, gradients: _Tensors) -> list[Tensor | None]:
        """Return the gradients in the shapes of the operands."""
        found = list[Tensor | None]()
        for (name, grad), shape in zip(gradients.items(), self.shapes, strict=True):
            if grad is not None and shape is not None and name != "x":
                grad = grad.movedim(-1, 1).flatten(0, 1)[: self.outs, ..., : shape[-1]]
            found.append(grad)
        return found

    def planes(self, images: Tensor) -> Tensor:
        """Convert images [samples, outs, rows, columns] to planes without margins, [samples, blocks, length, lanes]."""
        right, above = self.sizes["stride"] - self.sizes["columns"], -self.outs % self.lanes
        filled = F.pad(images, (0, right, 0, 0, 0, above)).unflatten(1, (-1, self.lanes))
        return filled.flatten(3).mT.contiguous()

    def images(self, planes: Tensor) -> Tensor:
        """Convert planes to images, as the inverse of :meth:`planes`."""
        columns = planes.mT.unflatten(-1, (self.sizes["rows"], self.sizes["stride"]))[..., : self.sizes["columns"]]
        return columns.flatten(1, 2)[:, : self.outs]

    def parts(self, fibers: str) -> Ranges:
        """Return a range of samples times ``fibers`` (or blocks) for each thread; without samples, an empty range."""
        return cut_for_threads(self.sizes["samples"] * self.sizes[fibers])

    def run(self, kernel: Callable[..., None], parts: Ranges, planes: Tensor, grads: list[_Tensors] | None) -> None:
        """Call a kernel for each part, with planes that it reads or writes, and gradients that it adds to if given."""
        needed = self._scratch(backward=grads is not None)
        memory = torch.zeros(len(parts), sum(needed.values()) * self.lanes, dtype=self.dtype, device="cpu")
        told = _addresses(self.operands), record(self.sizes), _addresses(self.tables)
        own = [()] * len(parts) if grads is None else [(_addresses(grad),) for grad in grads]
        vector = (NUMPY_TYPES[self.dtype](0),) * self.lanes
        calls = [
            (*told, *part, planes.data_ptr(), *to, scratch, vector)
            for part, to, scratch in zip(parts, own, scratch_addresses(needed, memory, self.lanes), strict=True)
        ]
        if grads is None and calls:
            *given, scratch, _ = calls[0]
            compile_together(
                "attentive",
                self.dtype,
                self.lanes,
                forward=lambda: [(attentive_forward, calls[0])],
                # Gradients have the same types as operands.
                backward=lambda: [(attentive_backward, (*given, given[0], scratch, vector))],
            )
        run(kernel, calls)

    def _scratch(self, backward: bool) -> dict[str, int]:
        """Return the numbers of vectors of scratch memory, which is zero at the start of a call."""
        s, channels, plane = self.sizes, self.sizes["channels"], self.sizes["plane"]
        return {
            "responses": channels * plane,
            "statistics": 2 * plane,  # mean and maximum over the channels
            "winner": plane,  # number of the channel with the maximum
            "passed": plane,
            "kept": plane,
            "level": plane,
            "slope_of_map": plane * backward,
            "slopes": 2 * plane * backward,  # gradients of the statistics
            "of_x": channels * s["source"] * backward,
            "numbers": 8 * channels + 4 * s["hidden"],  # statistics and hidden values
        }


def _addresses(tensors: _Tensors | dict[str, Tensor]) -> Any:
    """Return the addresses of tensors. Absent operands are never read."""
    return record({name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()})


def run_forward(operands: Operands, taps: Window | tuple[Lists, Lists]) -> Tensor:
    """Return :func:`lieattn.ops._gated_sums.residual_sums` ``[samples, outs, rows, columns]``."""
    call = _Call(operands, taps)
    shape = [*(call.sizes[name] for name in ("samples", "blocks", "length")), call.lanes]
    planes = torch.empty(shape, dtype=call.dtype, device="cpu")
    call.run(attentive_forward, call.parts("blocks"), planes, None)
    return call.images(planes)


def run_backward(
    grad: Tensor, operands: Operands, taps: Window | tuple[Lists, Lists], wants_input: bool
) -> list[Tensor | None]:
    """Return the gradients of the operands, and that of the input only if it is wanted."""
    call = _Call(operands, taps, wants_input)
    parts, planes = call.parts("fiber"), call.planes(grad)
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
    return call.unpacked(totals)
