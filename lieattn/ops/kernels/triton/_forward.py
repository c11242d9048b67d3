"""Forward kernel of Triton.

A program processes one target point (or source point, or type of displacement) and one head. Its tiles are padded to
powers of two: ``[G, M]`` for pairs of query and key frame, ``[P, G]`` for pairs of output and query frame, where P is
1 if the output frame is the query frame. Padded frames have weight 0.

For query frame g and key frame m, c[g, m] is the part of the score that does not depend on the output frame h, and
p[h, g] is the part that does:

    inner[g, m] = softmax_m(c),  outer[h, g] = p + logsumexp_m c,  weight = inner · exp(outer - top) / total.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operands(NamedTuple):
    """Pointers to operands, or None if they are absent.

    Signals are contiguous ``[points, fiber, heads, channels]``. Tables have :class:`Strides`.
    """

    query: Any
    key: Any
    value: Any
    base: Any  # scores of pairs of frames that all edges of a point share
    rho: Any
    bias: Any
    psi: Any
    beta: Any
    key_psi: Any  # factors of keys and values of a neighbor before their sum, if frames are pooled
    value_psi: Any


class Strides(NamedTuple):
    """Strides in elements, which are 0 along an axis with one entry for all."""

    base: Any  # point, head; then [queries, columns] contiguous
    rho: Any  # type, out, head, channel
    bias: Any  # type, out, head, key frame
    psi: Any  # type, out, head, channel
    beta: Any  # type, out, head, channel
    key_psi: Any  # type, out, head, channel, key frame
    value_psi: Any  # type, out, head, channel, key frame


class Lists(NamedTuple):
    """Neighbor lists and the type of each edge. ``index`` is None if every edge has its own type."""

    row_ptr: Any
    source: Any
    target: Any
    index: Any


# Constants of a kernel: sizes, their padded counterparts in capitals, and switches; see ``_launch.py``.
Shape = namedtuple(
    "Shape",
    "outs queries keys key_frames columns pairs depth width heads seeded O G M K P D W B pooled tied_out tied_key "
    "softmax product counted full_bias dropout constant lowest dot_keys dot_pairs precision dtype E VD VW",
)


@triton.jit
def row_and_head(heads):  # type: ignore[no-untyped-def]
    """Return the row and the head of a program. Programs of one row are neighbors, since they read the same memory."""
    program = tl.program_id(0).to(tl.int64)
    return program // heads, (program % heads).to(tl.int32)


@triton.jit
def signal_tile(pointer, point, head, frames, heads, width, F, W, dtype):  # type: ignore[no-untyped-def]
    """Return the channels of all frames over a point, [F, W]."""
    f = tl.arange(0, F)[:, None]
    d = tl.arange(0, W)[None, :]
    at = ((point * frames + f) * heads + head) * width + d
    return tl.load(pointer + at, mask=(f < frames) & (d < width), other=0.0).to(dtype)


@triton.jit
def put_signal(pointer, tile, point, head, frames, heads, width, F, W, first=0):  # type: ignore[no-untyped-def]
    """Write a tile of frames, beginning with ``first``, to the place from which :func:`signal_tile` reads it."""
    f = first + tl.arange(0, F)[:, None]
    d = tl.arange(0, W)[None, :]
    at = ((point * frames + f) * heads + head) * width + d
    tl.store(pointer + at, tile, mask=(f < frames) & (d < width))


@triton.jit
def table_tile(pointer, kind, head, strides, frames, width, F, W, dtype):  # type: ignore[no-untyped-def]
    """Return the entries of a table for one type of displacement, [F, W]."""
    f = tl.arange(0, F)[:, None]
    d = tl.arange(0, W)[None, :]
    at = kind * strides[0] + f * strides[1] + head * strides[2] + d * strides[3]
    return tl.load(pointer + at, mask=(f < frames) & (d < width), other=0.0).to(dtype)


@triton.jit
def factors(table, strides, s, kind, head, first, frames, width, W):  # type: ignore[no-untyped-def]
    """Return the factors of a block of key frames for each query frame, [G, B, W]."""
    g = tl.arange(0, s.G)[:, None, None]
    m = first + tl.arange(0, s.B)[None, :, None]
    d = tl.arange(0, W)[None, None, :]
    at = kind * strides[0] + g * strides[1] + head * strides[2] + d * strides[3] + m * strides[4]
    return tl.load(table + at, mask=(g < s.queries) & (m < frames) & (d < width), other=0.0).to(s.dtype)


@triton.jit
def frame_rows(pointer, s, point, head, first, frames, width, W):  # type: ignore[no-untyped-def]
    """Return the channels of a block of frames over a point, [B, W]."""
    m = first + tl.arange(0, s.B)[:, None]
    d = tl.arange(0, W)[None, :]
    at = ((point * frames + m) * s.heads + head) * width + d
    return tl.load(pointer + at, mask=(m < frames) & (d < width), other=0.0).to(s.dtype)


@triton.jit
def _pooled(pointer, table, strides, s, point, kind, head, frames, width, W):  # type: ignore[no-untyped-def]
    """Return Σ_m factor[g, m] signal[m], [G, W]. Without factors there is one frame."""
    total = tl.zeros([s.G, W], s.dtype)
    for first in range(0, frames, s.B):
        rows = frame_rows(pointer, s, point, head, first, frames, width, W)
        if table is None:
            total += tl.sum(rows, 0)[None, :]
        else:
            total += tl.sum(factors(table, strides, s, kind, head, first, frames, width, W) * rows[None, :, :], 1)
    return total


@triton.jit
def key_tile(p, strides, s, source, kind, head):  # type: ignore[no-untyped-def]
    """Return the keys over a point, [K, D], or those computed for each query frame, [G, D], if frames are pooled."""
    if s.pooled:
        return _pooled(p.key, p.key_psi, strides.key_psi, s, source, kind, head, s.key_frames, s.depth, s.D)
    else:
        return signal_tile(p.key, source, head, s.keys, s.heads, s.depth, s.K, s.D, s.dtype)


@triton.jit
def value_tile(p, strides, s, source, kind, head):  # type: ignore[no-untyped-def]
    """Return the values, as :func:`key_tile` returns the keys."""
    if s.pooled:
        return _pooled(p.value, p.value_psi, strides.value_psi, s, source, kind, head, s.keys, s.width, s.W)
    else:
        return signal_tile(p.value, source, head, s.keys, s.heads, s.width, s.K, s.W, s.dtype)


@triton.jit
def dot_products(a, b, matrix, precision, dtype):  # type: ignore[no-untyped-def]
    """Return Σ_d a[i, d] b[j, d]."""
    if matrix:
        return tl.dot(a, tl.trans(b), input_precision=precision, out_dtype=dtype)
    else:
        return tl.sum(a[:, None, :] * b[None, :, :], 2)


@triton.jit
def combine(weight, b, matrix, precision, dtype):  # type: ignore[no-untyped-def]
    """Return Σ_r weight[i, r] b[r, d]."""
    if matrix:
        return tl.dot(weight, b, input_precision=precision, out_dtype=dtype)
    else:
        return tl.sum(weight[:, :, None] * b[None, :, :], 1)


@triton.jit
def kind_of(lists, edge):  # type: ignore[no-untyped-def]
    """Return the row of an edge in the tables of displacements."""
    if lists.index is None:
        return edge
    else:
        return tl.load(lists.index + edge)


@triton.jit
def query_tile(p, s, point, head):  # type: ignore[no-untyped-def]
    """Return the queries of a point, [G, D], or zeros if there are none."""
    if p.query is None:
        return tl.zeros([s.G, s.D], s.dtype)
    else:
        return signal_tile(p.query, point, head, s.queries, s.heads, s.depth, s.G, s.D, s.dtype)


@triton.jit
def base_tile(p, strides, s, point, head):  # type: ignore[no-untyped-def]
    """Return the scores that all edges of a point share, [G, M]."""
    if p.base is None:
        return tl.zeros([s.G, s.M], s.dtype) + s.constant
    else:
        g = tl.arange(0, s.G)[:, None]
        m = tl.arange(0, s.M)[None, :]
        at = point * strides.base[0] + head * strides.base[1] + g * s.columns + m
        return tl.load(p.base + at, mask=(g < s.queries) & (m < s.columns), other=0.0).to(s.dtype) + s.constant


@triton.jit
def norm_places(s, point, head):  # type: ignore[no-untyped-def]
    """Return the offsets of the largest scores of each pair of frames of a point, [P, G], and the mask of valid pairs.

    The offsets of the sums of exponentials are larger by ``pairs * heads``.
    """
    g = tl.arange(0, s.G)[None, :]
    h = tl.arange(0, s.P)[:, None]
    at = (point * 2 * s.pairs + h * s.queries + g) * s.heads + head
    return at, (g < s.queries) & (h * s.queries + g < s.pairs)


@triton.jit
def kept(s, head, counter, draw):  # type: ignore[no-untyped-def]
    """Return 0 for dropped weights and 1 / (1 - probability) for others, equal to the numbers of the CPU kernel."""
    seed, threshold = draw
    state = tl.load(seed).to(tl.uint64) + (head // s.seeded).to(tl.uint64) * 0xD1B54A32D192ED03
    state = state + counter.to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    word = (state & 0xFFFFFFFF).to(tl.uint32) + ((head % s.seeded).to(tl.uint32) * 0x9E3779B9)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    word = word ^ (word >> 16)
    factor = 4294967296.0 / (4294967296.0 - threshold.to(s.dtype))
    return tl.where(word.to(tl.int64) >= threshold.to(tl.int64), factor, 0.0)


@triton.jit
def kept_keys(s, edge, head, draw):  # type: ignore[no-untyped-def]
    """Return the dropout factors of pairs of query and key frame, [G, M]."""
    pair = tl.arange(0, s.G)[:, None] * s.columns + tl.arange(0, s.M)[None, :]
    return kept(s, head, pair + edge * (s.queries * s.columns), draw)


@triton.jit
def kept_pairs(s, edge, head, draw):  # type: ignore[no-untyped-def]
    """Return the dropout factors of pairs of output and query frame, [P, G]."""
    pair = tl.arange(0, s.P)[:, None] * s.queries + tl.arange(0, s.G)[None, :]
    return kept(s, head, pair + edge * s.pairs, draw)


@triton.jit
def _inner_scores(p, strides, s, query, base, source, kind, head):  # type: ignore[no-untyped-def]
    score = base
    if p.query is not None:
        key = key_tile(p, strides, s, source, kind, head)
        if s.tied_key:
            score += tl.sum(query * key, 1)[:, None]
        else:
            score += dot_products(query, key, s.dot_keys, s.precision, s.dtype)
    if s.full_bias:
        g = tl.arange(0, s.G)[:, None]
        m = tl.arange(0, s.M)[None, :]
        at = kind * strides.bias[0] + g * strides.bias[1] + head * strides.bias[2] + m * strides.bias[3]
        score += tl.load(p.bias + at, mask=(g < s.queries) & (m < s.columns), other=0.0).to(s.dtype)
    return score


@triton.jit
def _outer_scores(p, strides, s, query, kind, head):  # type: ignore[no-untyped-def]
    score = tl.zeros([s.P, s.G], s.dtype)
    if p.rho is not None:
        rho = table_tile(p.rho, kind, head, strides.rho, s.outs, s.depth, s.O, s.D, s.dtype)
        if s.tied_out:
            score += tl.sum(rho * query, 1)[None, :]
        else:
            score += dot_products(rho, query, s.dot_pairs, s.precision, s.dtype)
    if p.bias is not None:
        if not s.full_bias:
            h = tl.arange(0, s.O)
            at = kind * strides.bias[0] + h * strides.bias[1] + head * strides.bias[2]
            bias = tl.load(p.bias + at, mask=h < s.outs, other=0.0).to(s.dtype)
            if s.tied_out:
                score += bias[None, :]
            else:
                score += bias[:, None]
    return score


@triton.jit
def edge_weights(p, strides, s, query, base, source, kind, head):  # type: ignore[no-untyped-def]
    """Return ``inner`` [G, M], zero in the padding, and ``outer`` [P, G]."""
    columns = tl.arange(0, s.M)[None, :] < s.columns
    score = _inner_scores(p, strides, s, query, base, source, kind, head)
    outer = _outer_scores(p, strides, s, query, kind, head)
    if s.product:
        score = tl.where(columns, score, float("-inf"))
        # If all scores are minus infinity, the weights and their sum are zero.
        level = tl.maximum(tl.max(score, 1), s.lowest)
        inner = tl.exp(score - level[:, None])
        mass = tl.sum(inner, 1)
        return inner / tl.where(mass == 0, 1.0, mass)[:, None], outer + (level + tl.log(mass))[None, :]
    else:
        # The output frame is the query frame here, and these weights are sums, not products.
        return tl.where(columns, score + tl.sum(outer, 0)[:, None], 0.0), tl.zeros([s.P, s.G], s.dtype)


@triton.jit
def levels(strides, s, lists, norm, point, head):  # type: ignore[no-untyped-def]
    """Return the number subtracted from outer exponents, infinite for padding, and the factor of weights, [P, G]."""
    at, exists = norm_places(s, point, head)
    part = tl.full([s.P, s.G], 1.0, s.dtype)
    if s.softmax:
        level = tl.load(norm + at, mask=exists, other=0.0).to(s.dtype)
        part = part / tl.load(norm + s.pairs * s.heads + at, mask=exists, other=1.0).to(s.dtype)
    else:
        level = tl.zeros([s.P, s.G], s.dtype)
        if s.counted:
            degree = tl.load(lists.row_ptr + point + 1) - tl.load(lists.row_ptr + point)
            level += tl.log(tl.maximum(degree * s.columns, 1).to(s.dtype))
    return tl.where(exists, level, float("inf")), part


@triton.jit
def fiber_values(p, strides, s, weights, source, kind, head):  # type: ignore[no-untyped-def]
    """Return Σ_m weights[g, m] v[m], [G, W]."""
    value = value_tile(p, strides, s, source, kind, head)
    if s.tied_key:
        return weights * value
    else:
        return combine(weights, value, s.dot_keys, s.precision, s.dtype)


@triton.jit
def to_outputs(s, weight, rows):  # type: ignore[no-untyped-def]
    """Return Σ_g weight[h, g] rows[g], [O, *]."""
    if s.tied_out:
        return tl.sum(weight, 0)[:, None] * rows
    else:
        return combine(weight, rows, s.dot_pairs, s.precision, s.dtype)


@triton.jit
def to_queries(s, weight, rows):  # type: ignore[no-untyped-def]
    """Return Σ_h weight[h, g] rows[h], [G, *]."""
    if s.tied_out:
        return tl.sum(weight, 0)[:, None] * rows
    else:
        return combine(tl.trans(weight), rows, s.dot_pairs, s.precision, s.dtype)


@triton.jit
def shares_of_outputs(s, weight, share):  # type: ignore[no-untyped-def]
    """Return Σ_g weight[h, g] share[g], [O]."""
    if s.tied_out:
        return tl.sum(weight, 0) * share
    else:
        return tl.sum(weight * share[None, :], 1)


@triton.jit
def message(p, strides, s, inner, weight, source, kind, edge, head, draw):  # type: ignore[no-untyped-def]
    """Return the contribution of an edge to the output, [O, W], with dropout."""
    if s.dropout == 1:
        inner = inner * kept_keys(s, edge, head, draw)
    if s.dropout == 2:
        weight = weight * kept_pairs(s, edge, head, draw)
    total = to_outputs(s, weight, fiber_values(p, strides, s, inner, source, kind, head))
    if p.psi is not None:
        total = total * table_tile(p.psi, kind, head, strides.psi, s.outs, s.width, s.O, s.W, s.dtype)
    if p.beta is not None:
        beta = table_tile(p.beta, kind, head, strides.beta, s.outs, s.width, s.O, s.W, s.dtype)
        total += shares_of_outputs(s, weight, tl.sum(inner, 1))[:, None] * beta
    return total


@triton.jit
def _measure(p, strides, lists, s, query, base, norm, point, head):  # type: ignore[no-untyped-def]
    """Write the statistics of each pair of output and query frame, [P, G], to ``norm``, and return :func:`levels`."""
    top = tl.full([s.P, s.G], s.lowest, s.dtype)
    total = tl.zeros([s.P, s.G], s.dtype)
    begin, end = tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)
    for edge in range(begin, end):
        source = tl.load(lists.source + edge)
        _, outer = edge_weights(p, strides, s, query, base, source, kind_of(lists, edge), head)
        level = tl.maximum(top, outer)
        total = total * tl.exp(top - level) + tl.exp(outer - level)
        top = level
    if begin == end:
        total += 1.0
    at, exists = norm_places(s, point, head)
    tl.store(norm + at, top, mask=exists)
    tl.store(norm + s.pairs * s.heads + at, total, mask=exists)
    return tl.where(exists, top, float("inf")), 1.0 / total


@triton.jit(do_not_specialize=["threshold"])
def forward(p, strides, lists, s, out, norm, seed, threshold):  # type: ignore[no-untyped-def]
    """Write ``out`` [points, outs, heads, width] and, for the softmax, ``norm``.

    If output frames are query frames, one loop over the edges with a running maximum is enough. A query sum loops
    twice: with known norms, it can sum over the query frames immediately. With a running maximum, it would have to
    store a row of values for each pair of output and query frame.
    """
    point, head = row_and_head(s.heads)
    query = query_tile(p, s, point, head)
    base = base_tile(p, strides, s, point, head)
    online: tl.constexpr = s.softmax and s.tied_out
    top = tl.full([s.P, s.G], s.lowest, s.dtype)
    total = tl.zeros([s.P, s.G], s.dtype)
    result = tl.zeros([s.O, s.W], s.dtype)
    begin, end = tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)
    if s.softmax and not s.tied_out:
        top, part = _measure(p, strides, lists, s, query, base, norm, point, head)
    if not s.softmax:
        top, part = levels(strides, s, lists, norm, point, head)
    for edge in range(begin, end):
        source = tl.load(lists.source + edge)
        kind = kind_of(lists, edge)
        inner, outer = edge_weights(p, strides, s, query, base, source, kind, head)
        if online:
            level = tl.maximum(top, outer)
            shrink = tl.exp(top - level)
            total = total * shrink + tl.exp(outer - level)
            result = result * tl.sum(shrink, 0)[:, None]
            top = level
        weight = tl.exp(outer - top)
        if not online:
            weight *= part
        result += message(p, strides, s, inner, weight, source, kind, edge, head, (seed, threshold))
    if online:
        if begin == end:  # zero if there are no edges, and NaN if all keys are masked
            total += 1.0
        at, exists = norm_places(s, point, head)
        tl.store(norm + at, top, mask=exists)
        tl.store(norm + s.pairs * s.heads + at, total, mask=exists)
        result = result / tl.sum(total, 0)[:, None]
    put_signal(out, result, point, head, s.outs, s.heads, s.width, s.O, s.W)
