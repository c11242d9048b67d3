"""Calls of the kernels of attentive group convolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.ops._gated_sums import Clouds, Lists, Operands, Window
from lieattn.ops.kernels._attentive_kernels import attentive_backward, attentive_forward
from lieattn.ops.kernels._attentive_taps import LISTS, TAPS_TOGETHER, UNITS, WINDOWS
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
_OF_POINTS = ("near_ptr", "near_share", "wide_ptr", "wide_share")  # tables with an entry for each point
_NONE = torch.empty(0, device="cpu")


def _lanes(outs: int, dtype: torch.dtype) -> int:
    """Return the number of outputs in a vector: the number of lanes of the machine, or half of it if that is faster.

    Double precision has vectors of one length, since each length is compiled separately, in more than ten seconds.
    """
    most = widest_lanes() * torch.float32.itemsize // dtype.itemsize
    if dtype == torch.float64:
        return most
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
        "whole_columns": 0,
        "listed": WINDOWS,
        "unit_step": 0,
        "point_step": 0,
        "spatial_turn_step": 0,
        "spatial_pair_step": 2 * _whole(window.spatial_size**2, TAPS_TOGETHER),
        "spatial_number_step": _whole(window.spatial_size**2, TAPS_TOGETHER),
        "spatial_tap_step": 1,
    }
    spatial = _offsets(window.spatial_size, window.spatial_dilation, stride, center)
    tables = {
        "taps": _offsets(window.size, window.dilation, columns, 0),
        "back": -_offsets(window.size, window.dilation, stride, 0),
        "spatial_taps": spatial,
        "spatial_back": -spatial,
    }
    return sizes, tables | dict.fromkeys(_LISTS, _NONE)


def _clouds(x: torch.Size, rows: tuple[int, int], clouds: Clouds) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return sizes and tables of clouds, which are planes of one row, with ``x`` of this shape."""
    window, none = _planes(1, 1, Window(size=1))
    taps = {"taps": rows[0], "spatial_taps": rows[1]}
    whole = {f"whole_{name}": number for name, number in taps.items()}
    steps = {"unit_step": math.prod(x[-2:]), "point_step": math.prod(x[1:])}
    lists = {"near": clouds.near, "wide": clouds.wide}
    tables = {
        f"{kind}_{name}": table.contiguous()
        for kind, part in lists.items()
        if part is not None
        for name, table in zip(Lists._fields, part, strict=True)
    }
    return window | taps | whole | steps | {"margin": 0, "listed": LISTS if clouds.near else UNITS}, none | tables


class _Run(NamedTuple):
    """Samples of equal sizes, one after another, which one call of the kernel computes."""

    sizes: dict[str, int]
    first: int = 0  # first point of the clouds


def _runs(points: list[int], sizes: dict[str, int], step: int) -> list[_Run]:
    """Return the runs of clouds with these numbers of points, filled up to whole steps, without empty clouds."""
    found, first = [], 0
    for size, same in itertools.groupby(points):
        samples = len(list(same))
        own = dict.fromkeys(("in_columns", "source", "columns", "stride", "positions", "length", "plane"), size)
        own["whole_columns"] = _whole(size, step)
        if size > 0:
            found.append(_Run(sizes | own | {"samples": samples}, first))
        first += samples * size
    return found


def _offsets(size: int, dilation: int, stride: int, center: int) -> Tensor:
    """Return the offsets of the taps of a square kernel in pixels, filled up with 0 to whole groups."""
    steps = dilation * torch.arange(size, device="cpu") - center
    return _filled((steps[:, None] * stride + steps).flatten())


def _filled(taps: Tensor) -> Tensor:
    return F.pad(taps, (0, -taps.shape[-1] % TAPS_TOGETHER))


class _Call:
    """Sizes, packed operands and tables of one call, whose memory this object owns."""

    def __init__(self, operands: Operands, taps: Window | Clouds, wants_input: bool = False) -> None:
        x, kernel, first, second, spatial = operands
        self.clouds = taps if isinstance(taps, Clouds) else None
        fiber, channels = x.shape[1:3] if self.clouds is None else x.shape[-2:]
        units = None if self.clouds is None else self.clouds.units
        self.units = None if units is None else units.transpose(0, 1)  # [turns, taps, units]
        self.turns = x.shape[1] if self.clouds is not None and self.clouds.near is None else 1
        self.dtype, self.shapes, self.outs = x.dtype, [t if t is None else t.shape for t in operands], len(kernel)
        self.each = self.outs // self.turns
        self.lanes = _lanes(self.each, x.dtype)
        blocks = -(-self.each // self.lanes)
        self.sizes = {
            "own_blocks": blocks,  # blocks of output channels times poses in a turn
            "blocks": blocks * self.turns,
            "fiber": fiber,
            "channels": channels,
            "hidden": 0 if first is None else first.shape[-2],
            "has_channel": int(first is not None),
            "has_spatial": int(spatial is not None),
            "wants_input": int(wants_input),  # whether the gradient of the input is needed
        }
        if isinstance(taps, Window):
            planes, self.tables = _planes(*x.shape[-2:], taps)
            self.runs = [_Run(planes | self.sizes | {"samples": len(x)})]
            kernel, spatial = _filled(kernel), None if spatial is None else _filled(spatial)
        else:
            rows = (
                kernel.shape[-1],
                0 if spatial is None else len(taps.units) if taps.units is not None else spatial.shape[-1],
            )
            planes, self.tables = _clouds(x.shape, rows, taps)
            pairs = blocks * fiber
            pair, number, tap = (2 * rows[1], rows[1], 1) if units is None else (2, 1, 2 * pairs)
            steps = {"turn": 2 * rows[1] * pairs, "pair": pair, "number": number, "tap": tap}
            planes |= {f"spatial_{name}_step": step for name, step in steps.items()}
            self.runs = _runs(taps.sizes, planes | self.sizes, 4 * self.lanes)
            x = x if taps.near is None else self._by_run(x, -1)
        self.operands: _Tensors = {
            "x": x.contiguous(),
            "kernel": self._in_lanes(kernel),
            "first": None if first is None else self._in_lanes(first),
            "second": None if second is None else self._in_lanes(second),
            "spatial": None if spatial is None else self._in_lanes(spatial),
        }
        self.mix: Tensor | None = None  # [turns, units, blocks of a turn times fiber times 2 times lanes]
        mix = self.operands["spatial"]
        if mix is not None and self.units is not None:
            mix = mix.unflatten(0, (self.turns, -1)).movedim(4, 1)
            self.mix = mix.flatten(2)
            self.operands["spatial"] = (self.units @ self.mix).unflatten(2, mix.shape[2:])

    def _in_lanes(self, table: Tensor) -> Tensor:
        """Convert ``[outs, ...]`` to ``[blocks, ..., lanes]``, where each turn is filled up with zeros."""
        return self._filled_up(table, 0).unflatten(0, (-1, self.lanes)).movedim(1, -1).contiguous()

    def _filled_up(self, table: Tensor, dim: int) -> Tensor:
        """Fill up the outputs of each turn, along an axis, with zeros to whole vectors."""
        if self.each % self.lanes == 0:
            return table
        missing = (0, 0) * (table.ndim - 1 - dim) + (0, -self.each % self.lanes)
        return F.pad(table.unflatten(dim, (self.turns, self.each)), missing).flatten(dim, dim + 1)

    def _cut_off(self, table: Tensor, dim: int) -> Tensor:
        """Remove what was filled up."""
        return table.unflatten(dim, (self.turns, -1)).narrow(dim + 1, 0, self.each).flatten(dim, dim + 1)

    def unpacked(self, gradients: _Tensors) -> list[Tensor | None]:
        """Return the gradients in the shapes of the operands."""
        found, of_units = list[Tensor | None](), None
        spatial = gradients["spatial"]
        if self.units is not None and self.mix is not None and spatial is not None:
            table = spatial.flatten(2)
            of_units = table @ self.mix.mT
            of_mix = (self.units.mT @ table).unflatten(2, spatial.shape[2:])
            gradients = gradients | {"spatial": of_mix.movedim(1, 4).flatten(0, 1)}
        for (name, grad), shape in zip(gradients.items(), self.shapes, strict=True):
            if grad is not None and shape is not None:
                if name != "x":
                    grad = self._cut_off(grad.movedim(-1, 1).flatten(0, 1), 0)[..., : shape[-1]]
                elif self.clouds is not None and self.clouds.near is not None:
                    grad = self._by_point(grad, shape[1:], -1)
            found.append(grad)
        return found if of_units is None else [*found, of_units.transpose(0, 1)]

    def planes(self, images: Tensor) -> Tensor:
        """Convert images to planes without margins, for each sample ``[blocks, length, lanes]``.

        Images are ``[samples, outs, rows, columns]``, those of clouds ``[points, outs]``.
        """
        filled = self._filled_up(images, 1).unflatten(1, (-1, self.lanes))
        if self.clouds is not None:
            return self._by_run(filled, -2)
        sizes = self.runs[0].sizes
        return F.pad(filled, (0, sizes["stride"] - sizes["columns"])).flatten(3).mT.contiguous()

    def images(self, planes: Tensor) -> Tensor:
        """Convert planes to images, as the inverse of :meth:`planes`."""
        blocks = self.sizes["blocks"]
        if self.clouds is not None:
            return self._cut_off(self._by_point(planes, (blocks, self.lanes), -2).flatten(1), 1)
        sizes = self.runs[0].sizes
        pixels = planes.view(-1, blocks, sizes["rows"], sizes["stride"], self.lanes)[..., : sizes["columns"], :]
        return self._cut_off(pixels.movedim(-1, 2).flatten(1, 2), 1)

    def _by_run(self, x: Tensor, axis: int) -> Tensor:
        """Move the points of ``[points, *]`` to an axis of their clouds, and return all clouds in one row."""
        clouds = (own.unflatten(0, (part.sizes["samples"], -1)).movedim(1, axis) for part, own in self._own(x))
        return torch.cat([own.flatten() for own in clouds]) if self.runs else x.new_empty(0)

    def _by_point(self, x: Tensor, axes: tuple[int, ...], axis: int) -> Tensor:
        """Return ``[points, *axes]``, as the inverse of :meth:`_by_run`."""
        found = [x.new_empty(0, *axes)]
        for part, own in self._own(x.view(-1, math.prod(axes))):
            sides = [part.sizes["samples"], *axes]
            sides.insert(len(sides) + 1 + axis, part.sizes["columns"])
            found.append(own.reshape(sides).movedim(axis, 1).flatten(0, 1))
        return torch.cat(found)

    def _own(self, rows: Tensor) -> list[tuple[_Run, Tensor]]:
        """Return the rows of the points of each run."""
        return [(own, rows[own.first :][: own.sizes["samples"] * own.sizes["columns"]]) for own in self.runs]

    def parts(self, own: _Run, fibers: str) -> Ranges:
        """Return a range of samples times ``fibers`` (or blocks) for each thread; without samples, an empty range."""
        return cut_for_threads(own.sizes["samples"] * self.sizes[fibers])

    def zeros(self) -> list[_Tensors]:
        """Return gradients of the operands for each thread. They share that of the input."""
        x, tables = self.operands["x"], {name: t for name, t in self.operands.items() if name != "x"}
        shared = {"x": torch.zeros_like(x) if x is not None and self.sizes["wants_input"] else None}
        most = max((len(self.parts(own, "fiber")) for own in self.runs), default=1)
        return [
            shared | {name: None if t is None else torch.zeros_like(t) for name, t in tables.items()}
            for _ in range(most)
        ]

    def run(self, kernel: Callable[..., None], fibers: str, planes: Tensor, grads: list[_Tensors] | None) -> None:
        """Call a kernel for each part, with planes that it reads or writes, and gradients that it adds to if given."""
        for own in self.runs:
            parts, needed = self.parts(own, fibers), self._scratch(own.sizes, backward=grads is not None)
            memory = torch.zeros(len(parts), sum(needed.values()) * self.lanes, dtype=self.dtype, device="cpu")
            told = self._told(own, self.operands), record(own.sizes), self._told(own, self.tables)
            to = [()] * len(parts) if grads is None else [(self._told(own, grad),) for grad in grads[: len(parts)]]
            at = planes.data_ptr() + own.first * self.sizes["blocks"] * self.lanes * planes.element_size()
            vector = (NUMPY_TYPES[self.dtype](0),) * self.lanes
            calls = [
                (*told, *part, at, *grad, scratch, vector)
                for part, grad, scratch in zip(parts, to, scratch_addresses(needed, memory, self.lanes), strict=True)
            ]
            if grads is None and calls:
                _compile(self.dtype, self.lanes, calls[0])
            run(kernel, calls)

    def _told(self, own: _Run, tensors: _Tensors | dict[str, Tensor]) -> Any:
        """Return the addresses of tensors, from the first point of a run on. Absent operands are never read."""
        steps = dict.fromkeys(_OF_POINTS, 1) | {"x": own.sizes["point_step"]}
        return record(
            {
                name: 0 if t is None else t.data_ptr() + own.first * steps.get(name, 0) * t.element_size()
                for name, t in tensors.items()
            }
        )

    def _scratch(self, s: dict[str, int], backward: bool) -> dict[str, int]:
        """Return the numbers of vectors of scratch memory, which is zero at the start of a call."""
        channels, plane = s["channels"], s["plane"]
        points = s["whole_columns"] // self.lanes if s["listed"] == UNITS else 0
        packed = channels * s["taps"] * points
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
            "packed": packed,
            "of_packed": packed * backward,
            "turned": self.lanes * points * backward,
            "numbers": 8 * channels + 4 * s["hidden"],  # statistics and hidden values
        }


def _compile(dtype: torch.dtype, lanes: int, call: tuple[Any, ...]) -> None:
    *given, scratch, vector = call
    compile_together(
        "attentive",
        dtype,
        lanes,
        forward=lambda: [(attentive_forward, call)],
        # Gradients have the same types as operands.
        backward=lambda: [(attentive_backward, (*given, given[0], scratch, vector))],
    )


def run_forward(operands: Operands, taps: Window | Clouds) -> Tensor:
    """Return :func:`lieattn.ops._gated_sums.residual_sums`, of clouds ``[points, outs]``."""
    call = _Call(operands, taps)
    vectors = sum(own.sizes["samples"] * own.sizes["blocks"] * own.sizes["length"] for own in call.runs)
    planes = torch.empty(vectors * call.lanes, dtype=call.dtype, device="cpu")
    call.run(attentive_forward, "blocks", planes, None)
    return call.images(planes)


def run_backward(grad: Tensor, operands: Operands, taps: Window | Clouds, wants_input: bool) -> list[Tensor | None]:
    """Return the gradients of the operands and, if there are, of units; that of the input only if it is wanted."""
    call = _Call(operands, taps, wants_input)
    planes, grads = call.planes(grad), call.zeros()
    call.run(attentive_backward, "fiber", planes, grads)
    totals = grads[0]
    for own, (name, total) in itertools.product(grads[1:], totals.items()):
        share = own[name]
        if total is not None and share is not None and name != "x":
            total += share
    return call.unpacked(totals)
