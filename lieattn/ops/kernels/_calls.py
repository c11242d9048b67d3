"""Common functions of the kernels for CPUs.

The targets are divided into as many parts as there are threads, with about equal numbers of edges. Each part writes to
its own memory, and contributions of several parts are added in the order of the parts. The last bits of the result
therefore depend on the number of threads, but not on their timing.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Self
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from lieattn._core.machine import usable_cores
from lieattn.geometry import Neighbors
from lieattn.ops._terms import ROW_TABLES, Problem
from lieattn.ops.kernels import _ahead

# Id of the process that owns the threads of the kernels, and of the parent in a fork. Other modules of kernels are
# imported at their first call, which may be in a fork; this one is imported with the package.
IMPORTED_BY = os.getpid()
NUMPY_TYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 64  # bytes of a cache line
_MOST_KEPT = 2**28
_MOST_WINDOWS = 8
# The largest block that is not in use. A thread that finds none allocates its own.
_free: list[np.ndarray] = []
_prepared: set[tuple[Any, ...]] = set()  # kinds of calls whose kernels have been requested
_checked: WeakSet[Neighbors] = WeakSet()
Ranges = list[tuple[int, int]]


class _Expected(threading.local):
    """Whether gradients of a kernel's output will be needed, which is unknown inside an operator of torch."""

    gradients = False


_expected = _Expected()


def expect_gradients(operands: Iterable[Tensor | None]) -> None:
    """Record, before torch calls an operator with these operands, whether its backward pass will follow."""
    if not torch.compiler.is_compiling():
        asked = any(operand is not None and operand.requires_grad for operand in operands)
        _expected.gradients = torch.is_grad_enabled() and asked


def compile_together(
    *kind: object, forward: Callable[[], list[_ahead.Call]], backward: Callable[[], list[_ahead.Call]]
) -> None:
    """Compile the kernels of the first call of a kind on several cores, with those of an expected backward pass.

    The number of processes is that of torch's threads.
    """
    kind = (*kind, _expected.gradients)
    if kind in _prepared:
        return
    _prepared.add(kind)
    processes = min(usable_cores(), torch.get_num_threads())
    if processes > 1:
        _ahead.start(forward() + (backward() if _expected.gradients else []), processes)


def record(numbers: Mapping[str, int]) -> Any:
    """Return integers as a structure with these names, which compiled functions pass by its address.

    Named tuples are passed by value, entry by entry, and take several times as long to compile.
    """
    return np.array([tuple(numbers.values())], dtype=_record_type(tuple(numbers)))[0]


@cache
def _record_type(names: tuple[str, ...]) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


def scratch_addresses(parts: Mapping[str, int], memory: Tensor, lanes: int) -> list[Any]:
    """Return the addresses of the parts of scratch memory in each row of ``memory``. Sizes are in vectors."""
    starts, size = list(itertools.accumulate(parts.values(), initial=0)), memory.element_size() * lanes
    return [
        record({name: row.data_ptr() + size * at for name, at in zip(parts, starts, strict=False)}) for row in memory
    ]


def check_lists(neighbors: Neighbors, index: Tensor | None, tables: Iterable[Tensor | None]) -> None:
    """Raise ValueError if a kernel, which has no bounds checks, would read invalid memory.

    ``tables`` have a row for each type of displacement.
    """
    row_ptr, source = neighbors.row_ptr, neighbors.source
    descends = len(row_ptr) > 1 and int(row_ptr.diff().min()) < 0
    if descends or int(row_ptr[0]) != 0 or int(row_ptr[-1]) != len(source):
        raise ValueError(f"neighbors: row_ptr must ascend from 0 to the number of edges, {len(source)}")
    types = min((len(table) for table in tables if table is not None), default=None)
    for name, numbers, limit in (("neighbors: source", source, len(row_ptr) - 1), ("terms.row", index, types)):
        if numbers is None or limit is None or len(numbers) == 0:
            continue
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name}: expected numbers from 0 to {limit - 1}, got {low} to {high}")


def check_all_lists(problem: Problem) -> None:
    """Raise ValueError if lists contain invalid numbers, or if their targets disagree with ``row_ptr``."""
    neighbors, terms = problem.neighbors, problem.terms
    check_lists(neighbors, terms.row, (table for name, table in terms.tables().items() if name in ROW_TABLES))
    check_targets(neighbors)


def check_edges(neighbors: Neighbors) -> None:
    """Check lists without tables, once for each object, as :func:`check_all_lists` does."""
    if neighbors not in _checked:
        check_lists(neighbors, None, ())
        check_targets(neighbors)
        _checked.add(neighbors)


def check_targets(neighbors: Neighbors) -> None:
    """Raise ValueError if the targets of edges disagree with ``row_ptr``."""
    targets = torch.repeat_interleave(neighbors.degree, output_size=neighbors.num_edges)
    if not torch.equal(targets, neighbors.target):
        raise ValueError("neighbors: target must hold, for each edge, the point to which row_ptr assigns it")


def cut_targets(row_ptr: Tensor, number: int) -> Ranges:
    """Divide the targets into ranges with about equal numbers of edges, and omit empty ranges."""
    if number < 2:
        return [(0, len(row_ptr) - 1)] if len(row_ptr) > 1 else []
    edges = int(row_ptr[-1])
    cuts = torch.searchsorted(row_ptr, torch.arange(1, number, device="cpu") * edges // number).tolist()
    bounds = [0, *cuts, len(row_ptr) - 1]
    return [(low, high) for low, high in itertools.pairwise(bounds) if low < high]


def cut_evenly(count: int, parts: int) -> Ranges:
    """Divide a number of rows into ranges of about equal lengths."""
    return list(itertools.pairwise(count * part // parts for part in range(parts + 1)))


def cut_for_threads(count: int) -> Ranges:
    """Divide a number of rows into a range for each thread of torch, or for each row if there are fewer."""
    return cut_evenly(count, max(1, min(torch.get_num_threads(), count)))


def vector(dtype: torch.dtype, lanes: int) -> tuple[Any, ...]:
    """Return the argument of a kernel that determines the type and length of its vectors."""
    return (NUMPY_TYPES[dtype](0),) * lanes


def cut_with_windows(row_ptr: Tensor, source: Tensor, number: int) -> tuple[Ranges, Ranges]:
    """Return parts of the targets, and the range of source points of each part.

    If the clouds are sorted, the ranges hardly overlap. In a large cloud in random order, each range is the whole
    cloud. The number of parts is then reduced, because every part stores gradients of its range.
    """
    points = len(row_ptr) - 1
    while True:
        parts = cut_targets(row_ptr, number)
        windows = []
        for low, high in parts:
            seen = source[int(row_ptr[low]) : int(row_ptr[high])]
            windows.append((int(seen.min()), int(seen.max()) + 1) if len(seen) else (0, 0))
        if number <= _MOST_WINDOWS or sum(high - low for low, high in windows) <= _MOST_WINDOWS * points:
            return parts, windows
        number //= 2


class PartGradients:
    """Gradients of packed operands ``[blocks, rows, ...]``, to which the parts of a call add.

    The first part has complete gradients. The others have gradients of keys and values only for their windows of the
    points. They share with the first part all gradients that no two parts write to: those of queries, and those of the
    tables if every edge has its own row.
    """

    def __init__(self, packed: dict[str, Tensor], zeros: Callable[..., Tensor], windows: Ranges, indexed: bool) -> None:
        given, self.windows = [name for name, operand in packed.items() if operand.numel()], windows
        self.windowed = [name for name in given if name in ("key", "value")]
        tables = [name for name in given if name not in ("query", "key", "value")]
        self.summed = [name for name in tables if indexed or name in ("fiber_key", "fiber_bias")]
        self.of_parts = [{name: zeros(operand.dtype, *operand.shape) for name, operand in packed.items()}]
        for low, high in windows[1:]:
            own = {}
            for name in (*self.windowed, *self.summed):
                blocks, rows, *row = packed[name].shape
                own[name] = zeros(packed[name].dtype, blocks, high - low if name in self.windowed else rows, *row)
            self.of_parts.append(self.of_parts[0] | own)

    def total(self) -> dict[str, Tensor]:
        """Return the sums over the parts, in their order."""
        totals = self.of_parts[0]
        for (low, high), own in zip(self.windows[1:], self.of_parts[1:], strict=True):
            for name in self.windowed:
                totals[name][:, low:high] += own[name]
            for name in self.summed:
                totals[name] += own[name]
        return totals


class Workspace:
    """Memory for the ``with`` block of one call. Its tensors must not be used after the block.

    Allocation takes longer than copying signals into the memory, since the system clears every page on first access.
    Up to 256 MB are therefore kept for the next call.
    """

    def __enter__(self) -> Self:
        try:
            self.block = _free.pop()
        except IndexError:  # first call, or another thread uses the block
            self.block = np.empty(0, np.uint8)
        self.start, self.needed = 0, 0
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # after an interrupt, a thread might still write here
            return
        if len(self.block) < self.needed <= _MOST_KEPT:
            self.block = np.empty(self.needed, np.uint8)  # needs no memory before it is used
        kept = _free[:1]
        if not kept or len(kept[0]) < len(self.block):
            _free[:] = [self.block]

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return uninitialized memory, aligned to cache lines, since a vector across two lines needs two loads."""
        size = math.prod(shape) * dtype.itemsize
        self.needed += size + 2 * _LINE
        if self.start + size + _LINE > len(self.block):
            return new_empty(dtype, *shape)
        memory, after = _cut(self.block, self.start, size)
        self.start = after
        return torch.from_numpy(memory.view(NUMPY_TYPES[dtype])).view(shape)

    def zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return memory filled with zeros."""
        return self.empty(dtype, *shape).zero_()


def release_memory() -> None:
    """Release the memory that the kernels for CPUs keep from one call to the next, at most 256 MB."""
    _free.clear()


def new_empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return uninitialized memory that outlives the call.

    NumPy requests large pages, unlike torch: the first access to 10 MB takes 0.3 ms instead of 4.
    """
    size = math.prod(shape) * dtype.itemsize
    memory, _ = _cut(np.empty(size + _LINE, np.uint8), 0, size)
    return torch.from_numpy(memory.view(NUMPY_TYPES[dtype])).view(shape)


def _cut(block: np.ndarray, start: int, size: int) -> tuple[np.ndarray, int]:
    """Return ``size`` bytes of a block from the next cache line on, and their end."""
    first = start + -(block.ctypes.data + start) % _LINE
    return block[first : first + size], first + size


_TILE = 13  # vectors of a tile of products: 2 x 4 sums and 1 + 4 operands
_LONGEST = 16


@cache
def widest_lanes() -> int:
    """Return the largest number of float32 lanes in a vector, given the processor (or ``NUMBA_CPU_FEATURES``)."""
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return lanes_on(triple, features)


def lanes_on(triple: str, features: str) -> int:
    """Return the number of lanes with which a tile fits into the registers of a target, so that LLVM spills nothing.

    It is 16 with AVX-512, 8 with AVX and AVX2, 8 with NEON (where a vector is two registers), and 4 with SSE.
    """
    floats, registers = 4, 32
    if triple.startswith("x86_64"):
        present = features.split(",")
        floats, registers = (16, 32) if "+avx512f" in present else (8, 16) if "+avx" in present else (4, 16)
    return min(_LONGEST, floats * (registers // _TILE))
