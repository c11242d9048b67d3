"""Calls of the kernels of attention.

A signal ``[rows, fiber, heads, dim]`` becomes ``[blocks, rows, fiber, dim, lanes]``: its heads are divided into blocks
of one vector, and the last block is filled up with zeros. A kernel processes one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lieattn.ops._terms import ROW_TABLES, Problem
from lieattn.ops.kernels._calls import (
    PartGradients,
    Ranges,
    Workspace,
    check_lists,
    compile_together,
    cut_targets,
    cut_with_windows,
    new_empty,
    record,
    scratch_addresses,
    vector,
)
from lieattn.ops.kernels._products import pack_heads, unpack_heads
from lieattn.ops.kernels._threads import run
from lieattn.ops.kernels.attention._backward import backward
from lieattn.ops.kernels.attention._bundle import (
    SINGLE,
    Bundle,
    HeadRange,
    block_seed,
    bundle,
    common_sizes,
    norm_shape,
    seeded_heads,
)
from lieattn.ops.kernels.attention._forward import EXP_MEAN, MEAN, NONE, SOFTMAX, forward

_NORMALIZATIONS = {"softmax": SOFTMAX, "exp-mean": EXP_MEAN, "mean": MEAN, "none": NONE}
_SCRATCH_BYTES = 2**19
_REPEATED_BYTES = 2**20  # tables up to this size are repeated for each lane
_SIGNALS = ("query", "key", "value")


def run_forward(problem: Problem, seed: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the output ``[points, outs, heads, width]`` and the numbers of :func:`norm_shape`."""
    bundled, value = _bundled(problem), problem.value
    out = new_empty(value.dtype, len(value), problem.outs, *value.shape[2:])
    norm = new_empty(value.dtype, *norm_shape(problem))
    with Workspace() as memory:
        for part in bundled.head_ranges(problem):
            _forward(_Layout(problem, bundled, part, memory), int(seed), out, norm)
    return out, norm


def _forward(layout: _Layout, seed: int, result: Tensor, norm: Tensor) -> None:
    row_ptr, sizes, memory, dtype = layout.row_ptr, layout.sizes, layout.memory, result.dtype
    points = len(row_ptr) - 1
    # The kernel writes nothing for points without edges.
    make = memory.zeros if points == 0 or int(row_ptr.diff().min()) == 0 else memory.empty
    out = make(dtype, layout.blocks, points, sizes["outs"], sizes["width"], layout.lanes)
    sums = make(dtype, layout.blocks, points, 2 * sizes["pairs"], 1, layout.lanes)

    def results(block: int, number: int) -> tuple[int, ...]:
        return out[block].data_ptr(), sums[block].data_ptr()

    parts = cut_targets(row_ptr, torch.get_num_threads())
    layout.run(forward, seed, layout.scratch(backward=False), parts, results)
    _unpack(out, layout.bundle, layout.part, result)
    if norm.numel():
        _unpack(sums, layout.bundle, layout.part, norm[..., None])


def run_backward(problem: Problem, seed: Tensor | int, grad_out: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    """Return gradients in the order of :meth:`Problem.operands`, with empty tensors for absent operands."""
    bundled = _bundled(problem)
    grads: dict[str, Tensor] = {}
    with Workspace() as memory:
        for part in bundled.head_ranges(problem):
            _backward(_Layout(problem, bundled, part, memory), int(seed), grad_out, norm, grads)
    return tuple(grads.get(name, problem.value.new_empty(0)) for name in problem.operands())


def _backward(layout: _Layout, seed: int, grad_out: Tensor, norm: Tensor, grads: dict[str, Tensor]) -> None:
    norm = layout.pack(norm[..., None]) if norm.numel() else grad_out.new_empty(layout.blocks, 0)
    grad = layout.pack(grad_out)
    parts, windows = cut_with_windows(layout.row_ptr, layout.source, torch.get_num_threads())
    results = PartGradients(layout.packed, layout.memory.zeros, windows, layout.index is not None)

    def own(block: int, number: int) -> tuple[object, ...]:
        window = windows[number][0] if number else 0
        to = _addresses(block, results.of_parts[number])
        return grad[block].data_ptr(), norm[block].data_ptr(), to, window

    layout.run(backward, seed, layout.scratch(backward=True), parts, own)
    for name, total in results.total().items():
        layout.add_gradient(name, total, grads)


def _bundled(problem: Problem) -> Bundle:
    tables = (table for name, table in problem.terms.tables().items() if name in ROW_TABLES)
    check_lists(problem.neighbors, problem.terms.row, tables)
    return bundle(problem)


class _Layout:
    """The memory layout of the operands and gradients of one call, for a range of the heads."""

    def __init__(self, problem: Problem, bundle: Bundle, part: HeadRange, memory: Workspace) -> None:
        self.problem, self.bundle, self.part, self.memory = problem, bundle, part, memory
        self.given = problem.operands()
        self.lanes, self.blocks = part.lanes, part.blocks
        self.packed = {name: self._pack_table(name, table) for name, table in self.given.items()}
        self.row_ptr, self.source, self.index = bundle.lists(problem)
        self.sizes = self._sizes()

    def pack(self, signal: Tensor) -> Tensor:
        """Convert a signal ``[points, fiber, heads, dim]`` to ``[blocks, rows, fiber, dim, lanes]``, bundled."""
        return _pack(signal, self.bundle, self.part, self.memory)

    def run(
        self,
        kernel: Callable[..., None],
        seed: int,
        scratch: dict[str, int],
        parts: Ranges,
        results: Callable[[int, int], tuple[Any, ...]],
    ) -> None:
        """Call a kernel for all blocks of heads and parts of targets, with the outputs ``results(block, number)``."""
        dtype = self.problem.value.dtype
        memory = self.memory.empty(dtype, self.blocks * len(parts), sum(scratch.values()), self.lanes)
        addresses = iter(scratch_addresses(scratch, memory, self.lanes))
        kind = 0 if self.index is None else self.index.data_ptr()
        lists = record({"row_ptr": self.row_ptr.data_ptr(), "source": self.source.data_ptr(), "kind": kind})
        lanes = vector(dtype, self.lanes)
        together = seeded_heads(dtype)
        calls: list[tuple[Any, ...]] = []
        for block in range(self.blocks):
            # The weights that a head drops do not depend on the length of its vector and its place in it.
            seeded, lane = divmod(self.part.first + block * self.lanes, together)
            told = _addresses(block, self.packed), record(self.sizes | {"seeded_lane": lane}), lists
            start = np.uint64(block_seed(seed, seeded))
            for number, part in enumerate(parts):
                calls.append((*told, *part, start, *results(block, number), next(addresses), lanes))
        if kernel is forward and calls:
            self._prepare(calls[0])
        run(kernel, calls)

    def _prepare(self, call: tuple[Any, ...]) -> None:
        """Compile the kernels of the other ranges and of the backward pass, given a call of the forward pass."""
        dtype, ranges = self.problem.value.dtype, self.bundle.head_ranges(self.problem)
        *given, scratch, _ = call

        def calls(kernel: Any, *arguments: Any) -> list[tuple[Any, tuple[Any, ...]]]:
            return [(kernel, (*arguments, vector(dtype, part.lanes))) for part in ranges]

        compile_together(
            "attention",
            dtype,
            *(part.lanes for part in ranges),
            forward=lambda: calls(forward, *given, scratch),
            # Gradients have the same types as operands.
            backward=lambda: calls(backward, *given, given[0], 0, record(self.scratch(backward=True))),
        )

    @property
    def _heads(self) -> int:
        """Return the number of heads of a bundle."""
        return self.bundle.clouds * self.problem.value.shape[2]

    def add_gradient(self, name: str, packed: Tensor, grads: dict[str, Tensor]) -> None:
        """Add this range's part of the gradient of an operand, given the gradient of its packed form."""
        given = self.given[name]
        if given is None:
            return
        if name in _SIGNALS:
            if name not in grads:
                grads[name] = new_empty(given.dtype, *given.shape)
            _unpack(packed, self.bundle, self.part, grads[name])  # every range writes other heads
            return
        grad = self._table_gradient(name, packed).sum_to_size(given.shape).contiguous()
        grads[name] = grads[name].add_(grad) if name in grads else grad

    def _table_gradient(self, name: str, packed: Tensor) -> Tensor:
        if name == "rho" and self._shared_rho:
            return packed.sum(0)[:, :, None]
        if name == "bias":
            packed = packed.flatten(2, 3).unsqueeze(3)
        rows, fiber, dim = packed.shape[1:4]
        shape, whole = (rows, fiber, self._heads, dim), self.part.heads == self._heads
        grad = new_empty(packed.dtype, *shape) if whole else packed.new_zeros(shape)
        own = grad.narrow(2, self.part.first, self.part.heads)
        _unpack(packed, SINGLE, HeadRange(0, self.part.heads, self.lanes), own)
        if self.bundle.clouds > 1:  # the clouds share the tables
            grad = grad.unflatten(2, (self.bundle.clouds, -1)).sum(2)
        if name == "fiber_bias":
            return grad[..., 0]
        if name == "bias":
            return grad[..., 0].unflatten(1, (self._frames(name), -1))
        if name in ("psi", "beta", "key_psi"):
            return grad.unflatten(1, (self._frames(name), -1))
        return grad

    def _sizes(self) -> dict[str, int]:
        """Return sizes, strides in elements, and switches, all as integers, so that Numba compiles each kernel once.

        An axis of size 1 that is used for all entries has stride 0.
        """
        a, t, sizes = self.problem, self.problem.terms, common_sizes(self.problem)
        pooled = a.pattern == "pooled"
        sizes |= {
            "key_frames": 0 if a.key is None else a.key.shape[1],
            "pooled": pooled,  # every query frame has its own key and value, computed for each edge
            "normalize": _NORMALIZATIONS[a.normalize],
            "indexed": self.index is not None,  # edges have an index of rows of the displacement tables
            "has_fiber_key": t.fiber_key is not None,
            "has_fiber_bias": t.fiber_bias is not None,
            "rho_shared": self._shared_rho,  # one entry for all heads, not a vector
            "threshold": int(a.dropout * 2**32),
            # Dropout applies to pairs of query and key frame.
            "split": a.dropout > 0 and sizes["tied_out"] and not sizes["tied_key"],
        }
        for name in ("rho", "bias", "psi", "beta", "key_psi"):
            sizes |= self._strides(name)
        # If values are computed for each edge, their factors are not applied to the output again.
        sizes["mixed_psi"], sizes["has_psi"] = sizes["has_psi"] * pooled, sizes["has_psi"] * (not pooled)
        full = t.displacement_bias is not None and t.displacement_bias.shape[2] > 1
        sizes["bias_key"] = self.lanes if full else 0
        # Number of edges that are processed together, whose scratch memory fits into the cache.
        edge = sizes["queries"] * (sizes["columns"] + sizes["width"] + 2) + 2 * sizes["pairs"]
        fitting = _SCRATCH_BYTES // (edge * self.lanes * a.value.element_size())
        degree = int(self.row_ptr.diff().max()) if len(self.row_ptr) > 1 else 0
        sizes["chunk"] = max(1, min(degree, max(4, fitting)))
        return {name: int(size) for name, size in sizes.items()}

    def scratch(self, backward: bool) -> dict[str, int]:
        """Return the numbers of vectors in the parts of the scratch memory of a call."""
        outs, queries, pairs, columns, depth, width, chunk, pooled = (
            self.sizes[name] for name in ("outs", "queries", "pairs", "columns", "depth", "width", "chunk", "pooled")
        )
        square, made = queries * columns, pooled * queries * (depth + width)
        both = {"base": square, "masked": square, "stage": outs * depth, "shares": chunk * queries}
        if not backward:
            chunks = {"values": chunk * (queries * width + 1), "mass": chunk * queries, "outer": chunk * (pairs + 1)}
            return both | chunks | {"inner": square, "sums": pairs * width, "made": made}
        return both | {
            "slope": square,
            "slopes": square,
            "turn": outs * depth,
            "mean": pairs,
            "level": pairs,
            "part": pairs,
            "pulled": outs * width,
            "shift": outs,
            "back": queries * width,
            "small": queries,
            "unmade": made,
            "made": chunk * made,
            "inner": chunk * square,
            "values": chunk * queries * width,
            "outer": chunk * pairs,
            "slant": chunk * pairs,
        }

    @property
    def _shared_rho(self) -> bool:
        """Whether positional keys have one entry for all heads, and are stored without lanes."""
        return self.packed["rho"].ndim == 4

    def _frames(self, name: str) -> int:
        """Return the number of output frames of a table of displacements."""
        table = self.given[name]
        return 1 if table is None else table.shape[1]

    def _strides(self, name: str) -> dict[str, int]:
        """Return whether there is a table, and its strides by type, output frame and key frame."""
        packed, outs = self.packed[name], self._frames(name)
        if packed.ndim < 3:
            return {f"has_{name}": 0, f"{name}_type": 0, f"{name}_out": 0, f"{name}_frame": 0}
        frames, frame = packed.shape[2] // outs, math.prod(packed.shape[3:])
        steps = {f"{name}_out": frames * frame * (outs > 1), f"{name}_frame": frame * (frames > 1)}
        return {f"has_{name}": 1, f"{name}_type": packed.shape[2] * frame, **steps}

    def _pack_table(self, name: str, table: Tensor | None) -> Tensor:
        a = self.problem
        if table is None:
            return a.value.new_empty(self.blocks, 0)
        if name in _SIGNALS:
            return self.pack(table)
        heads, depth = a.value.shape[2], 0 if a.query is None else a.query.shape[-1]
        if name == "rho":
            table = table.expand(-1, -1, -1, depth)
            repeated = table.numel() * self.lanes * table.element_size()
            if table.shape[2] == 1 and self.part.heads > 1 and repeated > _REPEATED_BYTES:
                return table[None, :, :, 0].contiguous().expand(self.blocks, -1, -1, -1)
            table = table.expand(-1, -1, heads, -1)
        elif name == "fiber_key":
            table = table.expand(a.queries, a.value.shape[1], heads, depth)
        elif name == "fiber_bias":
            table = table[..., None].expand(a.queries, a.value.shape[1], heads, 1)
        elif name == "bias":
            # Its key frames keep their own vectors, so that pairs of frames need not be moved.
            table = table.expand(-1, -1, -1, heads).flatten(1, 2)[..., None]
        else:
            table = table.flatten(1, 2).expand(-1, -1, heads, depth if name == "key_psi" else a.value.shape[-1])
        if self.bundle.clouds > 1:
            table = table.repeat(1, 1, self.bundle.clouds, 1)
        table = table.narrow(2, self.part.first, self.part.heads)
        packed = _pack(table, SINGLE, HeadRange(0, self.part.heads, self.lanes), self.memory)
        return packed.squeeze(3).unflatten(2, (self._frames(name), -1)) if name == "bias" else packed


def _addresses(block: int, tensors: dict[str, Tensor]) -> Any:
    """Return the addresses of one block, or of its gradients. Absent operands are never read."""
    return record({name: tensor[block].data_ptr() for name, tensor in tensors.items()})


def _pack(signal: Tensor, bundle: Bundle, part: HeadRange, memory: Workspace) -> Tensor:
    """Convert ``[groups clouds points, fiber, heads, dim]`` to ``[blocks, groups points, fiber, dim, lanes]``.

    The heads of all clouds of a bundle are consecutive, and lanes after the last head are zero. The result is in the
    workspace, or is the signal itself if it already consists of vectors of heads.
    """
    rows, fiber, heads, dim = signal.shape
    if _is_packed(signal, bundle, part):
        return signal.contiguous().view(1, rows, fiber, dim, heads)
    points = rows // (bundle.clouds * bundle.groups)
    packed = memory.empty(signal.dtype, part.blocks, bundle.groups * points, fiber, dim, part.lanes)
    if packed.numel():
        given = signal.contiguous()
        # Clouds of a bundle that have heads in the range.
        begin, end = part.first // heads, -(-(part.first + part.heads) // heads)
        # Lanes after the last head remain zero.
        row = memory.zeros(signal.dtype, (end - begin) * heads + part.lanes, dim)
        sizes = bundle.groups, bundle.clouds, points, fiber, heads, dim, part.first, part.heads, begin, end
        lanes = vector(signal.dtype, part.lanes)
        pack_heads(given.data_ptr(), packed.data_ptr(), row.data_ptr(), *sizes, lanes)
    return packed


def _unpack(packed: Tensor, bundle: Bundle, part: HeadRange, signal: Tensor) -> None:
    """Write the heads of the range to ``signal``, as the inverse of :func:`_pack`. It may be a slice of heads."""
    _, rows, fiber, dim, _ = packed.shape
    if _is_packed(signal, bundle, part):
        signal.copy_(packed.view(signal.shape))
    elif packed.numel():
        point, frame, head, _ = signal.stride()
        sizes = bundle.groups, bundle.clouds, rows // bundle.groups, fiber, signal.shape[2], dim
        places = point, frame, head, part.first, part.heads, part.lanes
        unpack_heads(packed.data_ptr(), signal.data_ptr(), *sizes, *places, vector(packed.dtype, 1))


def _is_packed(signal: Tensor, bundle: Bundle, part: HeadRange) -> bool:
    """Return whether a signal and its packed form have the same order of numbers, and all lanes are used."""
    return bundle.clouds == 1 and signal.shape[2:] == (part.lanes, 1) and part.heads == part.lanes
