"""Run the kernels on the threads that torch may use.

The targets are cut into as many parts as there are threads, with about as many edges each. A part writes to memory
of its own, and what several parts contribute to is added up in their order: the result depends on the number of
threads (in its last bits), never on their timing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lieattn.ops.kernels._arguments import Arguments, norm_shape
from lieattn.ops.kernels._backward import backward
from lieattn.ops.kernels._bundle import bundle
from lieattn.ops.kernels._forward import forward
from lieattn.ops.kernels._layout import Layout
from lieattn.ops.kernels._memory import Workspace, new_empty
from lieattn.ops.kernels._problem import SOFTMAX, Lists, Sizes, record
from lieattn.ops.kernels._scratch import BackwardRoom, ForwardRoom, backward_room, forward_room

_MOST_WINDOWS = 8
_POINT_TABLES = ("fiber_key", "fiber_bias")
_EDGE_TABLES = ("rho", "bias", "psi", "beta")
_Given = tuple[Tensor, Tensor, Tensor | None]  # row_ptr, source, type of displacement


def run_forward(
    arguments: Arguments, row_ptr: Tensor, source: Tensor, index: Tensor | None, seed: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Output ``[points, outs, heads, width]`` and logarithms of the sums ``[points, pairs, heads]``."""
    _check_lists(arguments, row_ptr, source, index)
    a, points = arguments, len(row_ptr) - 1
    out = new_empty(a.value.dtype, points, a.outs, *a.value.shape[2:])
    norm = new_empty(a.value.dtype, *norm_shape(a, points))
    with Workspace() as memory:
        bundled = bundle(arguments, row_ptr, source, index)
        lists = bundled.lists(row_ptr, source, index)
        for part in bundled.head_ranges(arguments):
            _forward(Layout(arguments, bundled, part, memory), lists, seed, dropout, out, norm)
    return out, norm


def _forward(layout: Layout, given: _Given, seed: int, dropout: float, result: Tensor, norm: Tensor) -> None:
    row_ptr, source, index = given
    lists, sizes = _prepare(layout, row_ptr, source, index, dropout)
    points = len(row_ptr) - 1
    dtype, memory = layout.arguments.value.dtype, layout.memory
    # The kernel leaves points without edges alone.
    make = memory.zeros if points == 0 or int(row_ptr.diff().min()) == 0 else memory.empty
    out = make(dtype, layout.blocks, points, sizes.outs, sizes.width, layout.lanes)
    top = make(dtype, layout.blocks, points, sizes.pairs, layout.lanes)
    total = make(dtype, *top.shape)
    parts = _parts(row_ptr, torch.get_num_threads())
    scratch = _Scratch(forward_room(sizes), layout, layout.blocks * len(parts))
    calls: list[tuple[Any, ...]] = []
    for block in range(layout.blocks):
        operands = layout.operands(block, layout.packed)
        results = out[block].data_ptr(), top[block].data_ptr(), total[block].data_ptr()
        start = layout.seed(seed, block)
        for part in parts:
            room = scratch.rooms[len(calls)]
            calls.append((operands, record(sizes), lists, *part, start, *results, room, layout.vector))
    _run(forward, calls)
    layout.unpack(out, result)
    if sizes.normalize == SOFTMAX:
        layout.unpack(total.log_().add_(top)[..., None, :], norm[..., None])


def run_backward(
    arguments: Arguments,
    row_ptr: Tensor,
    source: Tensor,
    index: Tensor | None,
    seed: int,
    dropout: float,
    grad_out: Tensor,
    norm: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of signals and tables in the order of :class:`Arguments`; empty tensors for those absent."""
    _check_lists(arguments, row_ptr, source, index)
    with Workspace() as memory:
        bundled = bundle(arguments, row_ptr, source, index)
        lists, parts = bundled.lists(row_ptr, source, index), bundled.head_ranges(arguments)
        grads: dict[str, Tensor] = {}
        for part in parts:
            _backward(Layout(arguments, bundled, part, memory), lists, seed, dropout, grad_out, norm, grads)
    return tuple(grads.get(name, arguments.value.new_empty(0)) for name in arguments.tables())


def _backward(
    layout: Layout,
    given: _Given,
    seed: int,
    dropout: float,
    grad_out: Tensor,
    norm: Tensor,
    grads: dict[str, Tensor],
) -> None:
    row_ptr, source, index = given
    lists, sizes = _prepare(layout, row_ptr, source, index, dropout)
    norm = layout.pack(norm[..., None]) if sizes.normalize == SOFTMAX else grad_out.new_empty(layout.blocks, 0)
    grad = layout.pack(grad_out)
    parts, windows = _windows(row_ptr, source, torch.get_num_threads())
    shared = ("query",) if index is not None else ("query", *_EDGE_TABLES)
    results = [{name: layout.zeros(name) for name in layout.packed}]
    for _, (low, high) in list(zip(parts, windows, strict=True))[1:]:
        own = {name: layout.zeros(name, high - low) for name in ("key", "value")}
        own |= {name: layout.zeros(name) for name in (*_POINT_TABLES, *_EDGE_TABLES)}
        results.append(own | {name: results[0][name] for name in shared})

    scratch = _Scratch(backward_room(sizes), layout, layout.blocks * len(parts))
    calls: list[tuple[Any, ...]] = []
    for block in range(layout.blocks):
        operands = layout.operands(block, layout.packed)
        incoming = layout.seed(seed, block), grad[block].data_ptr(), norm[block].data_ptr()
        for number, part in enumerate(parts):
            outgoing = layout.operands(block, results[number])
            window = windows[number][0] if number else 0
            room = scratch.rooms[len(calls)]
            calls.append((operands, record(sizes), lists, *part, *incoming, outgoing, window, room, layout.vector))
    _run(backward, calls)
    totals = results[0]
    for (low, high), own in zip(windows[1:], results[1:], strict=True):
        for name in layout.packed:
            if name in ("key", "value"):
                totals[name][:, low:high] += own[name]
            elif name not in shared:
                totals[name] += own[name]
    for name, total in totals.items():
        layout.add_gradient(name, total, grads)


class _Scratch:
    """Memory for so many calls of a kernel, and the addresses of its parts for each of them."""

    def __init__(self, room: ForwardRoom | BackwardRoom, layout: Layout, calls: int) -> None:
        self.memory = layout.memory.empty(layout.arguments.value.dtype, calls, sum(room), layout.lanes)
        size = self.memory.element_size() * layout.lanes
        starts = list(itertools.accumulate(room, initial=0))[:-1]
        self.rooms = [record(type(room)(*(row.data_ptr() + size * at for at in starts))) for row in self.memory]


def _prepare(
    layout: Layout, row_ptr: Tensor, source: Tensor, index: Tensor | None, dropout: float
) -> tuple[Any, Sizes]:
    degree = int(row_ptr.diff().max()) if len(row_ptr) > 1 else 0
    # All are contiguous and outlive the kernels: the operators hold them.
    lists = Lists(row_ptr.data_ptr(), source.data_ptr(), 0 if index is None else index.data_ptr())
    return record(lists), layout.sizes(degree, index is not None, dropout)


def _check_lists(arguments: Arguments, row_ptr: Tensor, source: Tensor, index: Tensor | None) -> None:
    """Raise ValueError where a kernel would read memory that is not its own: it does not check."""
    points = len(row_ptr) - 1
    if int(row_ptr[0]) != 0 or int(row_ptr[-1]) != len(source) or bool((row_ptr.diff() < 0).any()):
        raise ValueError(f"neighbors: row_ptr must ascend from 0 to the number of edges, {len(source)}")
    tables = (arguments.positional_key, arguments.displacement_bias, arguments.psi, arguments.beta)
    types = min((len(table) for table in tables if table is not None), default=None)
    for name, numbers, limit in (("neighbors: source", source, points), ("terms.row", index, types)):
        if numbers is None or limit is None or len(numbers) == 0:
            continue
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name}: expected numbers from 0 to {limit - 1}, got {low} to {high}")


def _parts(row_ptr: Tensor, number: int) -> list[tuple[int, int]]:
    """Cut the targets into ranges of about as many edges each; empty ones are left out."""
    edges = int(row_ptr[-1])
    cuts = torch.searchsorted(row_ptr, torch.arange(1, number) * edges // max(number, 1)).tolist()
    bounds = [0, *cuts, len(row_ptr) - 1]
    return [(low, high) for low, high in itertools.pairwise(bounds) if low < high]


def _windows(row_ptr: Tensor, source: Tensor, number: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Parts and the range of source points that each one sees.

    Where clouds follow one another the ranges hardly overlap. In a large cloud in random order each is the whole
    cloud: then there are fewer parts, since every one holds gradients of its range.
    """
    points = len(row_ptr) - 1
    while True:
        parts = _parts(row_ptr, number)
        windows = []
        for low, high in parts:
            seen = source[int(row_ptr[low]) : int(row_ptr[high])]
            windows.append((int(seen.min()), int(seen.max()) + 1) if len(seen) else (0, 0))
        if number <= _MOST_WINDOWS or sum(high - low for low, high in windows) <= _MOST_WINDOWS * points:
            return parts, windows
        number //= 2


def _run(kernel: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    if len(calls) < 2 or torch.get_num_threads() == 1:
        for arguments in calls:
            kernel(*arguments)
        return
    # The calling thread works too, so the pool needs one thread less.
    pool = _pool(os.getpid(), torch.get_num_threads() - 1)
    others = [pool.submit(kernel, *arguments) for arguments in calls[1:]]
    try:
        kernel(*calls[0])
    finally:
        wait(others)  # whatever happens, nobody may write to memory that is given back
    for done in others:
        done.result()


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process; a fork makes its own, since threads do not survive it."""
    return ThreadPoolExecutor(threads, thread_name_prefix="lieattn")
