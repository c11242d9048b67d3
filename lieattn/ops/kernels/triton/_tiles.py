"""What the Triton kernels are told, and the tiles of numbers they work on.

A program works on one target point (or source point, or type of displacement) and one head. Its tiles are padded to
powers of two: ``[G, M]`` for pairs of query and key frame, ``[P, G]`` for pairs of output and query frame, where P is
1 if the output frame is the query frame. Frames that are padding never weigh anything.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operands(NamedTuple):
    """Pointers; None where there is no such operand.

    Signals are contiguous ``[points, fiber, heads, channels]``; tables come with :class:`Strides`.
    """

    query: Any
    key: Any
    value: Any
    base: Any  # scores of pairs of frames that all edges of a point share
    rho: Any
    bias: Any
    psi: Any
    beta: Any


class Strides(NamedTuple):
    """Strides in elements; 0 along an axis where one entry serves all."""

    base: Any  # point, head; then [queries, columns] contiguous
    rho: Any  # type, out, head, channel
    bias: Any  # type, out, head, key frame
    psi: Any  # type, out, head, channel
    beta: Any  # type, out, head, channel


class Lists(NamedTuple):
    """Neighbor lists and the type of each edge; ``index`` is None where every edge is its own type."""

    row_ptr: Any
    source: Any
    target: Any
    index: Any


# What a kernel is compiled for: sizes, their padded counterparts in capitals, and switches; see ``_launch.py``.
Shape = namedtuple(
    "Shape",
    "outs queries keys columns pairs depth width heads lanes O G M K P D W tied_out tied_key softmax product counted "
    "full_bias dropout constant dot_keys dot_pairs precision dtype",
)


@triton.jit
def signal_tile(pointer, point, head, frames, heads, width, F, W, dtype):  # type: ignore[no-untyped-def]
    """Channels of all frames over a point, [F, W]."""
    f = tl.arange(0, F)[:, None]
    d = tl.arange(0, W)[None, :]
    at = ((point * frames + f) * heads + head) * width + d
    return tl.load(pointer + at, mask=(f < frames) & (d < width), other=0.0).to(dtype)


@triton.jit
def put_signal(pointer, tile, point, head, frames, heads, width, F, W):  # type: ignore[no-untyped-def]
    """Write a tile to where :func:`signal_tile` would read it."""
    f = tl.arange(0, F)[:, None]
    d = tl.arange(0, W)[None, :]
    at = ((point * frames + f) * heads + head) * width + d
    tl.store(pointer + at, tile, mask=(f < frames) & (d < width))


@triton.jit
def table_tile(pointer, kind, head, strides, frames, width, F, W, dtype):  # type: ignore[no-untyped-def]
    """Entries of a table for one type of displacement, [F, W]."""
    f = tl.arange(0, F)[:, None]
    d = tl.arange(0, W)[None, :]
    at = kind * strides[0] + f * strides[1] + head * strides[2] + d * strides[3]
    return tl.load(pointer + at, mask=(f < frames) & (d < width), other=0.0).to(dtype)


@triton.jit
def dot_products(a, b, matrix, precision, dtype):  # type: ignore[no-untyped-def]
    """Σ_d a[i, d] b[j, d]."""
    if matrix:
        return tl.dot(a, tl.trans(b), input_precision=precision, out_dtype=dtype)
    else:
        return tl.sum(a[:, None, :] * b[None, :, :], 2)


@triton.jit
def combine(weight, b, matrix, precision, dtype):  # type: ignore[no-untyped-def]
    """Σ_r weight[i, r] b[r, d]."""
    if matrix:
        return tl.dot(weight, b, input_precision=precision, out_dtype=dtype)
    else:
        return tl.sum(weight[:, :, None] * b[None, :, :], 1)


@triton.jit
def kind_of(lists, edge):  # type: ignore[no-untyped-def]
    """Row of the tables of displacements for an edge."""
    if lists.index is None:
        return edge
    else:
        return tl.load(lists.index + edge)


@triton.jit
def query_tile(p, s, point, head):  # type: ignore[no-untyped-def]
    """Queries of a point, [G, D]; zeros where there are none."""
    if p.query is None:
        return tl.zeros([s.G, s.D], s.dtype)
    else:
        return signal_tile(p.query, point, head, s.queries, s.heads, s.depth, s.G, s.D, s.dtype)


@triton.jit
def base_tile(p, strides, s, point, head):  # type: ignore[no-untyped-def]
    """Scores that all edges of a point share, [G, M]."""
    if p.base is None:
        return tl.zeros([s.G, s.M], s.dtype) + s.constant
    else:
        g = tl.arange(0, s.G)[:, None]
        m = tl.arange(0, s.M)[None, :]
        at = point * strides.base[0] + head * strides.base[1] + g * s.columns + m
        return tl.load(p.base + at, mask=(g < s.queries) & (m < s.columns), other=0.0).to(s.dtype) + s.constant


@triton.jit
def norm_places(s, point, head):  # type: ignore[no-untyped-def]
    """Offsets of the numbers kept for each pair of frames of a point, [P, G], and which of them exist."""
    g = tl.arange(0, s.G)[None, :]
    h = tl.arange(0, s.P)[:, None]
    at = (point * s.pairs + h * s.queries + g) * s.heads + head
    return at, (g < s.queries) & (h * s.queries + g < s.pairs)


@triton.jit
def kept(s, head, counter, draw):  # type: ignore[no-untyped-def]
    """0 where a weight is dropped, 1 / (1 - probability) elsewhere: the numbers of the kernel for CPUs."""
    seed, threshold = draw
    state = seed.to(tl.uint64) + (head // s.lanes).to(tl.uint64) * 0xD1B54A32D192ED03
    state = state + counter.to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    word = (state & 0xFFFFFFFF).to(tl.uint32) + ((head % s.lanes).to(tl.uint32) * 0x9E3779B9)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    word = word ^ (word >> 16)
    factor = 4294967296.0 / (4294967296.0 - threshold.to(s.dtype))
    return tl.where(word.to(tl.int64) >= threshold.to(tl.int64), factor, 0.0)


@triton.jit
def kept_keys(s, edge, head, draw):  # type: ignore[no-untyped-def]
    """Dropout factors of pairs of query and key frame, [G, M]."""
    pair = tl.arange(0, s.G)[:, None] * s.columns + tl.arange(0, s.M)[None, :]
    return kept(s, head, pair + edge * (s.queries * s.columns), draw)


@triton.jit
def kept_pairs(s, edge, head, draw):  # type: ignore[no-untyped-def]
    """Dropout factors of pairs of output and query frame, [P, G]."""
    pair = tl.arange(0, s.P)[:, None] * s.queries + tl.arange(0, s.G)[None, :]
    return kept(s, head, pair + edge * s.pairs, draw)
