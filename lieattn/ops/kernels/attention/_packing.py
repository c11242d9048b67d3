# mypy: allow-untyped-defs
"""Conversions between signals and vectors of heads, in one pass over memory."""

from __future__ import annotations

from torch import Tensor

from lieattn.ops.kernels._calls import Workspace, vector
from lieattn.ops.kernels._compiled import compiled
from lieattn.ops.kernels.attention._bundle import Bundle, HeadRange
from lieattn.ops.kernels.vectors._products import copy_row
from lieattn.ops.kernels.vectors._vectors import at_address, gather, load, offset, store


def pack(signal: Tensor, bundle: Bundle, part: HeadRange, memory: Workspace) -> Tensor:
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
        _pack(given.data_ptr(), packed.data_ptr(), row.data_ptr(), *sizes, lanes)
    return packed


def unpack(packed: Tensor, bundle: Bundle, part: HeadRange, signal: Tensor) -> None:
    """Write the heads of the range to ``signal``, as the inverse of :func:`pack`. It may be a slice of heads."""
    _, rows, fiber, dim, _ = packed.shape
    if _is_packed(signal, bundle, part):
        signal.copy_(packed.view(signal.shape))
    elif packed.numel():
        point, frame, head, _ = signal.stride()
        sizes = bundle.groups, bundle.clouds, rows // bundle.groups, fiber, signal.shape[2], dim
        places = point, frame, head, part.first, part.heads, part.lanes
        _unpack(packed.data_ptr(), signal.data_ptr(), *sizes, *places, vector(packed.dtype, 1))


def _is_packed(signal: Tensor, bundle: Bundle, part: HeadRange) -> bool:
    """Return whether a signal and its packed form have the same order of numbers, and all lanes are used."""
    return bundle.clouds == 1 and signal.shape[2:] == (part.lanes, 1) and part.heads == part.lanes


@compiled
def _pack(signal, packed, bundled, groups, clouds, points, fiber, heads, dim, first, filled, begin, end, lanes):
    """Pack a signal. ``bundled`` is memory for one frame of a bundle, so that reads and writes are contiguous."""
    signal_at, packed_at, bundled_at = at_address(signal, lanes), at_address(packed, lanes), at_address(bundled, lanes)
    wide, length = len(lanes), heads * dim
    rows, size = groups * points, fiber * dim * wide
    blocks = (filled + wide - 1) // wide
    for row in range(rows):
        point = row // points * clouds * points + row % points
        for frame in range(fiber):
            for cloud in range(begin, end):
                given = ((point + cloud * points) * fiber + frame) * length
                copy_row(offset(bundled_at, (cloud - begin) * length), offset(signal_at, given), length, lanes)
            for block in range(blocks):
                at = offset(packed_at, (block * rows + row) * size + frame * dim * wide)
                start = (first - begin * heads + block * wide) * dim
                for d in range(dim):
                    store(at, d * wide, gather(bundled_at, start + d, dim, lanes))


@compiled
def _unpack(
    packed, signal, groups, clouds, points, fiber, heads, dim, a_point, a_frame, a_head, first, filled, wide, one
):
    signal_at, packed_at = at_address(signal, one), at_address(packed, one)
    rows, size = groups * points, fiber * dim * wide
    for row in range(rows):
        point = row // points * clouds * points + row % points
        for lane in range(filled):
            head = first + lane
            given = (point + head // heads * points) * a_point + head % heads * a_head
            start = (lane // wide * rows + row) * size + lane % wide
            for frame in range(fiber):
                source = offset(packed_at, start + frame * dim * wide)
                at = offset(signal_at, given + frame * a_frame)
                for d in range(dim):
                    store(at, d, load(source, d * wide, one))
