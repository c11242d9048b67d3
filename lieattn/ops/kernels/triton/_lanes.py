"""Kernels of Triton for small fibers, in which each lane of a warp processes an edge of its own.

They compute what ``_forward.py`` and ``_backward.py`` compute, whose tiles of one edge would be smaller than a warp.
Here, tiles have a last axis for E edges: ``[G, M, E]`` for pairs of query and key frame, ``[P, G, E]`` for pairs of
output and query frame, and ``[frames, V, E]`` for a group of V channels, which a lane loads together. All other axes
are in the registers of a lane, so that sums over frames and channels need no communication, and lanes are summed only
once, after all edges. Sums of groups of channels are ``[frames, groups, V, E]``.
"""

from collections import namedtuple

import triton
import triton.language as tl

from lieattn.ops.kernels.triton._forward import kept, levels, norm_places, row_and_head

# The edges of the lanes, [E]: points, rows in the tables, numbers, whether they exist; and the head of the program.
Edges = namedtuple("Edges", "target source kind edge valid head")


@triton.jit
def channels(pointer, point, e, group, frames, s, width, F, V):  # type: ignore[no-untyped-def]
    """Return a group of channels of all frames over the points of the lanes, [F, V, E]."""
    f = tl.arange(0, F)[:, None, None]
    v = tl.arange(0, V)[None, :, None]
    at = ((point[None, None, :] * frames + f) * s.heads + e.head) * width + group * V + v
    return tl.load(pointer + at, mask=(f < frames) & e.valid[None, None, :], other=0.0).to(s.dtype)


@triton.jit
def entries(pointer, e, group, strides, frames, s, F, V):  # type: ignore[no-untyped-def]
    """Return a group of channels of a table for the types of the lanes, [F, V, E]."""
    f = tl.arange(0, F)[:, None, None]
    v = tl.arange(0, V)[None, :, None]
    at = e.kind[None, None, :] * strides[0] + f * strides[1] + e.head * strides[2] + (group * V + v) * strides[3]
    return tl.load(pointer + at, mask=(f < frames) & e.valid[None, None, :], other=0.0).to(s.dtype)


@triton.jit
def added(total, group, part):  # type: ignore[no-untyped-def]
    """Add [F, V, E] to one group of [F, groups, V, E].

    In a loop that is unrolled (``static_range``), the compiler knows the registers of the group. Other loops over
    groups are not unrolled: code would be longer, and registers would be spilled.
    """
    chosen = tl.arange(0, total.shape[1])[None, :, None, None] == group
    return tl.where(chosen, total + part[:, None, :, :], total)


@triton.jit
def edges_of(lists, target, edge, valid, head):  # type: ignore[no-untyped-def]
    """Return the :class:`Edges` of given targets and numbers."""
    source = tl.load(lists.source + edge, mask=valid, other=0)
    if lists.index is None:
        return Edges(target, source, edge, edge, valid, head)
    else:
        return Edges(target, source, tl.load(lists.index + edge, mask=valid, other=0), edge, valid, head)


@triton.jit
def _scores(p, strides, s, e):  # type: ignore[no-untyped-def]
    """Return the part of the scores that does not depend on the output frame, [G, M, E], and the part that does."""
    g = tl.arange(0, s.G)[:, None, None]
    m = tl.arange(0, s.M)[None, :, None]
    inside = (g < s.queries) & (m < s.columns) & e.valid[None, None, :]
    score = tl.zeros([s.G, s.M, s.E], s.dtype) + s.constant
    outer = tl.zeros([s.P, s.G, s.E], s.dtype)
    if p.base is not None:
        at = e.target[None, None, :] * strides.base[0] + e.head * strides.base[1] + g * s.columns + m
        score += tl.load(p.base + at, mask=inside, other=0.0).to(s.dtype)
    if p.query is not None:
        for group in range(s.depth // s.VD):
            query = channels(p.query, e.target, e, group, s.queries, s, s.depth, s.G, s.VD)
            key = channels(p.key, e.source, e, group, s.keys, s, s.depth, s.K, s.VD)
            score += products(s.tied_key, query, key, 1)
            if p.rho is not None:
                outer += products(s.tied_out, entries(p.rho, e, group, strides.rho, s.outs, s, s.O, s.VD), query, 0)
    if p.bias is not None:
        if s.full_bias:
            at = e.kind[None, None, :] * strides.bias[0] + g * strides.bias[1] + e.head * strides.bias[2]
            score += tl.load(p.bias + at + m * strides.bias[3], mask=inside, other=0.0).to(s.dtype)
        else:
            bias = tl.sum(entries(p.bias, e, 0, strides.bias, s.outs, s, s.O, 1), 1)
            if s.tied_out:
                outer += bias[None, :, :]
            else:
                outer += bias[:, None, :]
    return score, outer


@triton.jit
def lane_weights(p, strides, s, e):  # type: ignore[no-untyped-def]
    """Return ``inner`` [G, M, E] and ``outer`` [P, G, E], as ``edge_weights`` does for one edge."""
    score, outer = _scores(p, strides, s, e)
    columns = tl.arange(0, s.M)[None, :, None] < s.columns
    if s.product:
        score = tl.where(columns, score, float("-inf"))
        level = tl.maximum(tl.max(score, 1), s.lowest)
        inner = tl.exp(score - level[:, None, :])
        mass = tl.sum(inner, 1)
        inner = inner * (1.0 / tl.where(mass == 0, 1.0, mass))[:, None, :]
        return inner, tl.where(e.valid[None, None, :], outer + (level + tl.log(mass))[None, :, :], float("-inf"))
    else:
        score += tl.sum(outer, 0)[:, None, :]
        return tl.where(columns & e.valid[None, None, :], score, 0.0), tl.zeros([s.P, s.G, s.E], s.dtype)


@triton.jit
def kept_keys(s, e, draw):  # type: ignore[no-untyped-def]
    """Return the dropout factors of pairs of query and key frame, [G, M, E]."""
    pair = tl.arange(0, s.G)[:, None, None] * s.columns + tl.arange(0, s.M)[None, :, None]
    return kept(s, e.head, pair + e.edge[None, None, :] * (s.queries * s.columns), draw)


@triton.jit
def kept_pairs(s, e, draw):  # type: ignore[no-untyped-def]
    """Return the dropout factors of pairs of output and query frame, [P, G, E]."""
    pair = tl.arange(0, s.P)[:, None, None] * s.queries + tl.arange(0, s.G)[None, :, None]
    return kept(s, e.head, pair + e.edge[None, None, :] * s.pairs, draw)


@triton.jit
def products(tied, a, b, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return Σ_v a[i, v] b[j, v], [I, J, E]; those with i = j, and 1 for the frames of the ``axis``, if ``tied``."""
    if tied:
        return tl.expand_dims(tl.sum(a * b, 1), axis)
    else:
        return tl.sum(a[:, None, :, :] * b[None, :, :, :], 2)


@triton.jit
def mixed(tied, weight, a, single: tl.constexpr, over: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum [frames, V, E] over its frames, which are the axis ``over`` of the weights [I, J, E].

    If ``tied``, the weights are those with i = j, and the axis ``single`` has size 1.
    """
    if tied:
        return tl.sum(weight, single)[:, None, :] * a
    else:
        return tl.sum(weight[:, :, None, :] * tl.expand_dims(a, 1 - over), over)


@triton.jit
def over_keys(s, inner, key):  # type: ignore[no-untyped-def]
    """Return Σ_m inner[g, m] key[m], [G, V, E]."""
    return mixed(s.tied_key, inner, key, 1, 1)


@triton.jit
def to_outputs(s, weight, query):  # type: ignore[no-untyped-def]
    """Return Σ_g weight[h, g] query[g], [O, V, E]."""
    return mixed(s.tied_out, weight, query, 0, 1)


@triton.jit
def values(p, s, e, group):  # type: ignore[no-untyped-def]
    """Return a group of channels of the values, [K, V, E]."""
    return channels(p.value, e.source, e, group, s.keys, s, s.width, s.K, s.VW)


@triton.jit
def _message(p, strides, s, e, inner, weight, group):  # type: ignore[no-untyped-def]
    """Return a group of channels of the contributions of the edges to the output, [O, V, E]."""
    total = to_outputs(s, weight, over_keys(s, inner, values(p, s, e, group)))
    if p.psi is not None:
        total = total * entries(p.psi, e, group, strides.psi, s.outs, s, s.O, s.VW)
    if p.beta is not None:
        beta = entries(p.beta, e, group, strides.beta, s.outs, s, s.O, s.VW)
        total += to_outputs(s, weight, tl.sum(inner, 1)[:, None, :]) * beta
    return total


@triton.jit
def put(pointer, tile, row, head, frames, heads, width, F, V):  # type: ignore[no-untyped-def]
    """Write the sum over the lanes of [F, groups, V, E] to a row of ``[rows, frames, heads, width]``."""
    f = tl.arange(0, F)[:, None, None]
    w = tl.arange(0, tile.shape[1])[None, :, None] * V + tl.arange(0, V)[None, None, :]
    at = ((row * frames + f) * heads + head) * width + w
    tl.store(pointer + at, tl.sum(tile, 3), mask=(f < frames) & (w < width))


@triton.jit
def after_dropout(s, e, inner, weight, draw):  # type: ignore[no-untyped-def]
    """Return inner and outer weights after dropout."""
    if s.dropout == 1:
        return inner * kept_keys(s, e, draw), weight
    elif s.dropout == 2:
        return inner, weight * kept_pairs(s, e, draw)
    else:
        return inner, weight


@triton.jit
def _put_norm(s, norm, best, mass, point, head):  # type: ignore[no-untyped-def]
    """Write the statistics of each pair of output and query frame, [P, G], and return the mask of valid pairs."""
    at, exists = norm_places(s, point, head)
    tl.store(norm + at, best, mask=exists)
    tl.store(norm + s.pairs * s.heads + at, mass, mask=exists)
    return exists


@triton.jit(do_not_specialize=["threshold"])
def forward(p, strides, lists, s, out, norm, seed, threshold):  # type: ignore[no-untyped-def]
    """Write ``out`` [points, outs, heads, width] and, for the softmax, ``norm``.

    There are one or two loops over the edges, as in ``_forward.py``. In the first of two and in an only one, each lane
    has a running maximum of its own.
    """
    point, head = row_and_head(s.heads)
    begin, end = tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)
    target = tl.zeros([s.E], tl.int64) + point
    online: tl.constexpr = s.softmax and s.tied_out
    top = tl.full([s.P, s.G, s.E], s.lowest, s.dtype)
    total = tl.zeros([s.P, s.G, s.E], s.dtype)
    part = tl.full([s.P, s.G, s.E], 1.0, s.dtype)
    result = tl.zeros([s.O, s.W // s.VW, s.VW, s.E], s.dtype)
    if s.softmax and not s.tied_out:
        for first in range(begin, end, s.E):
            edge = first + tl.arange(0, s.E)
            _, outer = lane_weights(p, strides, s, edges_of(lists, target, edge, edge < end, head))
            level = tl.maximum(top, outer)
            total = total * tl.exp(top - level) + tl.exp(outer - level)
            top = level
        best = tl.max(top, 2)
        mass = tl.sum(total * tl.exp(top - best[:, :, None]), 2)
        if begin == end:
            mass += 1.0
        exists = _put_norm(s, norm, best, mass, point, head)
        top = tl.zeros([s.P, s.G, s.E], s.dtype) + tl.where(exists, best, float("inf"))[:, :, None]
        part = part / mass[:, :, None]
    if not s.softmax:
        level, _ = levels(strides, s, lists, norm, point, head)
        top = tl.zeros([s.P, s.G, s.E], s.dtype) + level[:, :, None]
    for first in range(begin, end, s.E):
        edge = first + tl.arange(0, s.E)
        e = edges_of(lists, target, edge, edge < end, head)
        inner, outer = lane_weights(p, strides, s, e)
        if online:
            level = tl.maximum(top, outer)
            shrink = tl.exp(top - level)
            total = total * shrink + tl.exp(outer - level)
            result = result * tl.sum(shrink, 0)[:, None, None, :]
            top = level
        weight = tl.exp(outer - top) * part
        inner, weight = after_dropout(s, e, inner, weight, (seed, threshold))
        for group in tl.static_range(s.width // s.VW):
            result = added(result, group, _message(p, strides, s, e, inner, weight, group))
    if online:
        best = tl.max(top, 2)
        scale = tl.exp(top - best[:, :, None])
        mass = tl.sum(total * scale, 2)
        if begin == end:  # zero if there are no edges, and NaN if all keys are masked
            mass += 1.0
        _put_norm(s, norm, best, mass, point, head)
        result = result * tl.sum(scale / mass[:, :, None], 0)[:, None, None, :]
    put(out, result, point, head, s.outs, s.heads, s.width, s.O, s.VW)
