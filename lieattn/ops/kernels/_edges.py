"""Calls of the kernels of edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops.kernels._calls import (
    Ranges,
    Workspace,
    check_edges,
    compile_together,
    cut_evenly,
    cut_targets,
    new_empty,
    vector,
    widest_lanes,
)
from lieattn.ops.kernels._edges_kernels import (
    gated_again,
    gated_backward,
    gated_forward,
    messages_backward,
    messages_forward,
    moments_along_edges,
    moments_of_points,
    units_backward,
    units_forward,
)
from lieattn.ops.kernels._threads import run

_FEWEST = 4  # lanes of the shortest vector of float32
# Rows of a part, which has its own sums and scratch memory. Results therefore do not depend on the number of threads,
# and the sum of partial sums has a smaller rounding error than one sum of all terms.
_PART, _MOST_PARTS = 4096, 256


def lanes_of(dtype: torch.dtype, hidden: int) -> tuple[Any, ...]:
    """Return the longest vector whose lanes divide the number of units, or an empty one if there is none."""
    count, fewest = (4 * floats // dtype.itemsize for floats in (widest_lanes(), _FEWEST))
    while count >= fewest and hidden % count:
        count //= 2
    return vector(dtype, count) if count >= fewest else ()


def parts_of(rows: int) -> int:
    """Return the number of parts for a number of rows."""
    return max(1, min(-(-rows // _PART), _MOST_PARTS))


def run_units(operands: Sequence[Tensor], maps: Sequence[Tensor]) -> list[Tensor]:
    """Return the units ``[edges, fiber, hidden]`` of :func:`lieattn.ops.edge_units`, or the outputs of maps of them.

    Each map is ``[channels, hidden]``.
    """
    with Workspace() as memory:
        job = _Units(operands, maps, memory)
        out = new_empty(job.dtype, max(1, len(maps)), *job.shape[:2], job.channels if maps else job.hidden)
        last = memory.zeros(job.dtype, job.hidden, -(-len(maps) * job.channels // len(job.lanes)) * len(job.lanes))
        if maps:
            last[:, : len(maps) * job.channels] = torch.cat(list(maps)).T
        scratch = memory.empty(job.dtype, len(job.cuts), job.fiber * (2 * job.hidden + last.shape[1]))
        zero = memory.zeros(job.dtype, max(1, last.shape[1]))
        calls = [
            (
                *job.given(last, zero, cut),
                *(out[0].numel(), out.data_ptr(), scratch[number].data_ptr(), job.lanes),
            )
            for number, cut in enumerate(job.cuts)
        ]
        backward = (*job.given(last, zero, (0, 0)), 0, 0, 0, True, 0, 0, True, *(0,) * 5, job.lanes)
        compile_together(
            "units of edges",
            job.dtype,
            len(job.lanes),
            forward=lambda: [(units_forward, calls[0])],
            backward=lambda: [(units_backward, backward)],
        )
        run(units_forward, calls)
        return list(out)


def run_units_backward(
    grads: Sequence[Tensor], operands: Sequence[Tensor], maps: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor]:
    """Return gradients of operands and maps, given those of the outputs. They may be empty or 0 if not wanted."""
    with Workspace() as memory:
        job, grads = _Units(operands, maps, memory), [grad.contiguous() for grad in grads]
        parts, turned = len(job.cuts), operands[4].contiguous()
        last = torch.cat(list(maps)).contiguous() if maps else operands[4].new_zeros(0, job.hidden)
        to_seen = torch.zeros_like(job.seen) if wanted[0] else job.seen.new_empty(0)
        to_shared, to_weight = torch.zeros_like(job.shared), torch.zeros_like(job.weight)
        sums = [memory.zeros(job.dtype, parts, *like.shape) for like in (job.first, job.second, job.bias, last)]
        scratch = memory.empty(job.dtype, parts, job.fiber * (5 * job.hidden + len(last)))
        addresses = torch.tensor([grad.data_ptr() for grad in grads], device="cpu")
        zero = memory.zeros(job.dtype, job.hidden)
        calls = [
            (
                *(*job.given(last, zero, cut), turned.data_ptr(), addresses.data_ptr(), to_seen.data_ptr(), wanted[0]),
                *(
                    to_shared.data_ptr(),
                    to_weight.data_ptr(),
                    any(wanted[3:]),
                    *(total[number].data_ptr() for total in sums),
                ),
                *(scratch[number].data_ptr(), job.lanes),
            )
            for number, cut in enumerate(job.cuts)
        ]
        run(units_backward, calls)
        to_first, to_second, to_bias, to_last = (total.sum(dim=0) for total in sums)
        return [to_seen, to_shared, to_weight, to_first.T, to_second.T, to_bias, *to_last.split([*map(len, maps)])]


class _Units:
    """Edges and weights in the layout of the kernels."""

    def __init__(self, operands: Sequence[Tensor], maps: Sequence[Tensor], memory: Workspace) -> None:
        seen, shared, weight, first, second, bias = operands
        self.seen, self.shared, self.weight = seen.contiguous(), shared.contiguous(), weight.contiguous()
        self.first, self.second, self.bias = first.T.contiguous(), second.T.contiguous(), bias.contiguous()
        self.dtype, self.shape, self.hidden = seen.dtype, seen.shape, len(second)
        self.fiber, self.maps, self.channels = seen.shape[1], len(maps), len(maps[0]) if maps else 0
        self.lanes = lanes_of(self.dtype, self.hidden)
        edges, parts = len(seen), parts_of(len(seen) * self.fiber)
        self.cuts = cut_evenly(edges, parts)

    def given(self, last: Tensor, zero: Tensor, cut: tuple[int, int]) -> tuple[int, ...]:
        """Return the arguments of both kernels for a range of edges."""
        tables = self.seen, self.shared, self.weight, self.first, self.second, self.bias, last, zero
        sizes = self.fiber, self.shape[2], self.hidden, self.maps, self.channels
        return *(table.data_ptr() for table in tables), *cut, *sizes


def run_messages(z: Tensor, weight: Tensor, x: Tensor, neighbors: Neighbors) -> Tensor:
    """Return the sums ``[points, fiber, channels]`` of :func:`lieattn.ops.edge_messages`."""
    with Workspace() as memory:
        check_edges(neighbors)
        job = _Messages(z, weight, x, neighbors, memory)
        compile_together(
            "messages of edges",
            job.dtype,
            len(job.lanes),
            forward=lambda: [(messages_forward, (*(0,) * 14, job.lanes))],
            backward=lambda: [(messages_backward, (*(0,) * 14, True, 0, 0, job.lanes))],
        )
        return job.sums(job.pointers, None, job.sources, job.padded(x))


def run_messages_backward(
    grad: Tensor, z: Tensor, weight: Tensor, x: Tensor, neighbors: Neighbors, learns: bool
) -> list[Tensor]:
    """Return the gradients of units, weights and signals, given that of the sums; 0 for weights that do not learn."""
    with Workspace() as memory:
        job = _Messages(z, weight, x, neighbors, memory)
        signal, change, table = job.padded(x), job.padded(grad), weight.contiguous()
        cuts = job.cut(job.pointers)
        to_z, to_weight = new_empty(job.dtype, *z.shape), memory.zeros(job.dtype, len(cuts), *weight.shape)
        scratch = memory.empty(job.dtype, len(cuts), job.length)
        zero = memory.zeros(job.dtype, job.hidden)
        calls = [
            (
                *(job.pointers.data_ptr(), job.sources.data_ptr(), *cut, job.z.data_ptr(), job.hidden, job.fiber),
                *(table.data_ptr(), job.channels, len(weight), signal.data_ptr(), change.data_ptr(), zero.data_ptr()),
                *(to_z.data_ptr(), learns, to_weight[number].data_ptr(), scratch[number].data_ptr(), job.lanes),
            )
            for number, cut in enumerate(cuts)
        ]
        run(messages_backward, calls)
        to_x = job.sums(neighbors.col_ptr, neighbors.col_edge, neighbors.target.contiguous(), change)
        return [to_z, to_weight.sum(dim=0), to_x]


class _Messages:
    """Units, weights and lists in the layout of the kernels, with channels padded to fill vectors."""

    def __init__(self, z: Tensor, weight: Tensor, x: Tensor, neighbors: Neighbors, memory: Workspace) -> None:
        self.z, self.dtype, self.memory = z.contiguous(), z.dtype, memory
        self.points, self.fiber, self.used = x.shape
        self.hidden, self.lanes = z.shape[2], lanes_of(z.dtype, z.shape[2])
        self.channels = -(-self.used // len(self.lanes)) * len(self.lanes)
        self.length = self.fiber * self.channels
        self.pointers, self.sources = neighbors.row_ptr.contiguous(), neighbors.source.contiguous()
        self.weight = memory.zeros(self.dtype, self.hidden, self.channels)
        self.weight[:, : self.used] = weight.T

    def padded(self, signal: Tensor) -> Tensor:
        """Return a signal ``[points, fiber, channels]`` with zeros after its channels."""
        if self.used == self.channels:
            return signal.contiguous()
        wider = self.memory.zeros(self.dtype, self.points, self.fiber, self.channels)
        wider[..., : self.used] = signal
        return wider

    def cut(self, pointers: Tensor) -> Ranges:
        """Return the ranges of points of each part."""
        return cut_targets(pointers, parts_of(int(pointers[-1]) * self.fiber))

    def sums(self, pointers: Tensor, edges: Tensor | None, others: Tensor, signal: Tensor) -> Tensor:
        """Sum the products of kernels and signals at the other ends of the edges given by the pointers."""
        cuts = self.cut(pointers)
        out = new_empty(self.dtype, self.points, self.fiber, self.channels).zero_()
        scratch = self.memory.empty(self.dtype, len(cuts), self.length)
        zero = self.memory.zeros(self.dtype, self.channels)
        number_of = 0 if edges is None else edges.data_ptr()
        calls = [
            (
                *(pointers.data_ptr(), number_of, others.data_ptr(), *cut, self.z.data_ptr(), self.hidden, self.fiber),
                *(self.weight.data_ptr(), self.channels, signal.data_ptr(), zero.data_ptr(), out.data_ptr()),
                *(scratch[number].data_ptr(), self.lanes),
            )
            for number, cut in enumerate(cuts)
        ]
        run(messages_forward, calls)
        return out if self.used == self.channels else out[..., : self.used].contiguous()


def run_gated(kernels: Tensor, x: Tensor, neighbors: Neighbors) -> Tensor:
    """Return the sums ``[points, *]`` of kernels ``[edges, *]`` times signals ``[points, *]``, stored in any order."""
    check_edges(neighbors)
    job, out = _Gated(kernels, neighbors), new_empty(x.dtype, *x.shape)
    job.launch(gated_forward, False, kernels, x, out)
    return out


def run_gated_backward(grad: Tensor, kernels: Tensor, x: Tensor, neighbors: Neighbors) -> tuple[Tensor, Tensor]:
    """Return the gradients of kernels and signals, given that of the sums."""
    job, out = _Gated(kernels, neighbors), (new_empty(x.dtype, *kernels.shape), new_empty(x.dtype, *x.shape))
    job.launch(gated_backward, True, grad, kernels, x, *out)
    return out


def run_gated_again(
    by_kernels: Tensor, by_x: Tensor, grad: Tensor, kernels: Tensor, x: Tensor, neighbors: Neighbors
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``grad``, kernels and signals, given those of both results of the former function."""
    job = _Gated(kernels, neighbors)
    to_grad, to_kernels, to_x = (new_empty(x.dtype, *one.shape) for one in (x, kernels, x))
    job.launch(gated_again, False, by_kernels, by_x, grad, kernels, x, to_grad, to_kernels)
    job.launch(gated_forward, True, by_kernels, grad, to_x)
    return to_grad, to_kernels, to_x


class _Gated:
    """Lists of edges in the layout of the kernels of products."""

    def __init__(self, kernels: Tensor, neighbors: Neighbors) -> None:
        self.neighbors, self.length = neighbors, kernels.shape[1:].numel()
        self.lanes = lanes_of(kernels.dtype, self.length)
        # The sums of a point are never divided, so that the parts can be those of the threads.
        self.parts = parts_of(len(kernels) * kernels.shape[1]) if torch.get_num_threads() > 1 else 1

    def launch(self, kernel: Any, by_source: bool, *tables: Tensor) -> None:
        """Call a kernel for parts of the targets, or of the sources."""
        near, edges = self.neighbors, None
        if by_source:
            pointers, others, edges = near.col_ptr, near.target.contiguous(), near.col_edge
        else:
            pointers, others = near.row_ptr.contiguous(), near.source.contiguous()
        tables = tuple(table.contiguous() for table in tables)  # results are contiguous, so that they are no copies
        lists = pointers.data_ptr(), 0 if edges is None else edges.data_ptr(), others.data_ptr()
        rest = *(table.data_ptr() for table in tables), self.length, self.lanes
        run(kernel, [(*lists, *cut, *rest) for cut in cut_targets(pointers, self.parts)])


def run_moments(arrows: Tensor, functions: Tensor, neighbors: Neighbors) -> list[Tensor]:
    """Return the moments and their products with the arrows, see :func:`lieattn.ops.edge_moments`."""
    check_edges(neighbors)
    job = _Moments(arrows, functions.shape[1], neighbors)
    moments = new_empty(job.dtype, neighbors.num_points, job.size, job.count).zero_()
    job.add(neighbors.row_ptr, None, functions, moments)
    return [moments, job.along(neighbors.target, moments), job.along(neighbors.source, moments)]


def run_moments_backward(grads: Sequence[Tensor], arrows: Tensor, neighbors: Neighbors) -> Tensor:
    """Return the gradient of the functions, given those of the moments and of both products."""
    of_moments, at_target, at_source = grads
    job = _Moments(arrows, at_target.shape[1], neighbors)
    total = new_empty(job.dtype, *of_moments.shape).copy_(of_moments)
    job.add(neighbors.row_ptr, None, at_target, total)
    job.add(neighbors.col_ptr, neighbors.col_edge, at_source, total)
    return job.along(neighbors.target, total)


class _Moments:
    """Arrows of edges in the layout of the kernels."""

    def __init__(self, arrows: Tensor, count: int, neighbors: Neighbors) -> None:
        self.arrows, self.dtype, self.size, self.count = arrows.contiguous(), arrows.dtype, arrows.shape[1], count
        self.lanes, self.parts = lanes_of(arrows.dtype, count), parts_of(neighbors.num_edges)

    def add(self, pointers: Tensor, edges: Tensor | None, functions: Tensor, total: Tensor) -> None:
        """Add the products of arrows and functions to the moments of the points."""
        pointers, functions = pointers.contiguous(), functions.contiguous()
        lists = pointers.data_ptr(), 0 if edges is None else edges.data_ptr()
        tables = self.arrows.data_ptr(), self.size, functions.data_ptr(), self.count, total.data_ptr(), self.lanes
        run(moments_of_points, [(*lists, *cut, *tables) for cut in cut_targets(pointers, self.parts)])

    def along(self, ends: Tensor, moments: Tensor) -> Tensor:
        """Return the products ``[edges, count]`` of the arrows and the moments at the given ends."""
        ends, out = ends.contiguous(), new_empty(self.dtype, len(ends), self.count)
        tables = self.arrows.data_ptr(), self.size, moments.data_ptr(), self.count, out.data_ptr(), self.lanes
        run(moments_along_edges, [(ends.data_ptr(), *cut, *tables) for cut in cut_evenly(len(ends), self.parts)])
        return out
