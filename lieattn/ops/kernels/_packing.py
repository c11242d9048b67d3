# mypy: allow-untyped-defs
"""Between signals and vectors of heads, in one pass."""

from __future__ import annotations

from torch import Tensor

from lieattn.ops.kernels._memory import NUMPY_TYPES, Workspace, new_empty
from lieattn.ops.kernels._products import compiled
from lieattn.ops.kernels._vectors import at_address, fill, load, offset, store


def pack(signal: Tensor, clouds: int, groups: int, lanes: int, memory: Workspace) -> Tensor:
    """``[groups clouds points, fiber, heads, dim]`` to ``[blocks, groups points, fiber, dim, lanes]``.

    The heads of a bundle of clouds follow one another; lanes beyond the last are zero. The result lies
    in the workspace.
    """
    rows, fiber, heads, dim = signal.shape
    points, blocks = rows // (clouds * groups), -(-clouds * heads // lanes)
    packed = memory.empty(signal.dtype, blocks, groups * points, fiber, dim, lanes)
    if packed.numel():
        given, one = signal.contiguous(), (NUMPY_TYPES[signal.dtype](0),)
        _pack(given.data_ptr(), packed.data_ptr(), groups, clouds, points, fiber, heads, dim, lanes, one)
    return packed


def unpack(packed: Tensor, clouds: int, groups: int, heads: int) -> Tensor:
    """The inverse of :func:`pack`, in memory of its own."""
    _, rows, fiber, dim, lanes = packed.shape
    signal = new_empty(packed.dtype, rows * clouds, fiber, heads, dim)
    if signal.numel():
        sizes = groups, clouds, rows // groups, fiber, heads, dim, lanes
        _unpack(packed.data_ptr(), signal.data_ptr(), *sizes, (NUMPY_TYPES[packed.dtype](0),))
    return signal


@compiled
def _pack(signal, packed, groups, clouds, points, fiber, heads, dim, wide, one):
    signal_at, packed_at = at_address(signal, one), at_address(packed, one)
    filled = clouds * heads
    blocks = (filled + wide - 1) // wide
    rows, size = groups * points, fiber * dim * wide
    zero = fill(packed_at, 0.0, one)
    for group in range(groups):
        for point in range(points):
            row = group * points + point
            for head in range(filled):
                given = ((group * clouds + head // heads) * points + point) * fiber * heads + head % heads
                start = (head // wide * rows + row) * size + head % wide
                for frame in range(fiber):
                    source, at = (
                        offset(signal_at, (given + frame * heads) * dim),
                        offset(packed_at, start + frame * dim * wide),
                    )
                    for d in range(dim):
                        store(at, d * wide, load(source, d, one))
            for lane in range(filled - (blocks - 1) * wide, wide):
                start = ((blocks - 1) * rows + row) * size + lane
                for at in range(fiber * dim):
                    store(packed_at, start + at * wide, zero)


@compiled
def _unpack(packed, signal, groups, clouds, points, fiber, heads, dim, wide, one):
    signal_at, packed_at = at_address(signal, one), at_address(packed, one)
    rows, size = groups * points, fiber * dim * wide
    for group in range(groups):
        for point in range(points):
            row = group * points + point
            for head in range(clouds * heads):
                given = ((group * clouds + head // heads) * points + point) * fiber * heads + head % heads
                start = (head // wide * rows + row) * size + head % wide
                for frame in range(fiber):
                    source, at = (
                        offset(packed_at, start + frame * dim * wide),
                        offset(signal_at, (given + frame * heads) * dim),
                    )
                    for d in range(dim):
                        store(at, d, load(source, d * wide, one))
