"""Backward kernels of Triton for small fibers; see ``_lanes.py``. The notation is that of ``_backward.py``."""

import triton
import triton.language as tl

from lieattn.ops.kernels.triton._backward import put_slopes
from lieattn.ops.kernels.triton._forward import norm_places, row_and_head
from lieattn.ops.kernels.triton._lanes import (
    added,
    after_dropout,
    channels,
    edges_of,
    entries,
    kept_keys,
    kept_pairs,
    lane_weights,
    mixed,
    over_keys,
    products,
    put,
    to_outputs,
    values,
)


@triton.jit
def _over_queries(s, inner, query):  # type: ignore[no-untyped-def]
    """Return Σ_g inner[g, m] query[g], [K, V, E]."""
    return mixed(s.tied_key, inner, query, 1, 0)


@triton.jit
def _to_queries(s, weight, out):  # type: ignore[no-untyped-def]
    """Return Σ_h weight[h, g] out[h], [G, V, E]."""
    return mixed(s.tied_out, weight, out, 0, 0)


@triton.jit
def _norm_places(s, e):  # type: ignore[no-untyped-def]
    """Return for each lane what ``norm_places`` returns for a point, [P, G, E]."""
    g = tl.arange(0, s.G)[None, :, None]
    pair = tl.arange(0, s.P)[:, None, None] * s.queries + g
    at = (e.target[None, None, :] * 2 * s.pairs + pair) * s.heads + e.head
    return at, (g < s.queries) & (pair < s.pairs) & e.valid[None, None, :]


@triton.jit
def _levels(s, lists, norm, e):  # type: ignore[no-untyped-def]
    """Return the number subtracted from outer exponents, and the factor of weights, [P, G, E], for each lane."""
    at, exists = _norm_places(s, e)
    part = tl.full([s.P, s.G, s.E], 1.0, s.dtype)
    if s.softmax:
        level = tl.load(norm + at, mask=exists, other=0.0).to(s.dtype)
        part = part / tl.load(norm + s.pairs * s.heads + at, mask=exists, other=1.0).to(s.dtype)
    else:
        level = tl.zeros([s.P, s.G, s.E], s.dtype)
        if s.counted:
            begin = tl.load(lists.row_ptr + e.target, mask=e.valid, other=0)
            degree = tl.load(lists.row_ptr + e.target + 1, mask=e.valid, other=0) - begin
            level += tl.log(tl.maximum(degree * s.columns, 1).to(s.dtype))[None, None, :]
    return tl.where(exists, level, float("inf")), part


@triton.jit
def _means(s, means, e):  # type: ignore[no-untyped-def]
    """Return the means of the gradients of the weights, [P, G, E], or zeros without a softmax."""
    if means is None:
        return tl.zeros([s.P, s.G, s.E], s.dtype)
    else:
        at, exists = _norm_places(s, e)
        return tl.load(means + at, mask=exists, other=0.0)


@triton.jit
def _gradients(s, e, grad_out, group):  # type: ignore[no-untyped-def]
    """Return a group of channels of the gradient of the output, [O, V, E]."""
    return channels(grad_out, e.target, e, group, s.outs, s, s.width, s.O, s.VW)


@triton.jit
def _pulled_back(p, strides, s, e, grad, group):  # type: ignore[no-untyped-def]
    """Return a group of channels of y, and of β · grad_out, [O, V, E]."""
    shift = tl.zeros([s.O, s.VW, s.E], s.dtype)
    if p.beta is not None:
        shift += grad * entries(p.beta, e, group, strides.beta, s.outs, s, s.O, s.VW)
    if p.psi is not None:
        grad = grad * entries(p.psi, e, group, strides.psi, s.outs, s, s.O, s.VW)
    return grad, shift


@triton.jit
def _weights_again(p, strides, s, e, lists, norm, draw):  # type: ignore[no-untyped-def]
    """Return inner [G, M, E] and W [P, G, E], and both after dropout."""
    inner, outer = lane_weights(p, strides, s, e)
    level, part = _levels(s, lists, norm, e)
    weight = tl.exp(outer - level) * part
    masked, dropped = after_dropout(s, e, inner, weight, draw)
    return inner, weight, masked, dropped


@triton.jit
def _slopes(p, strides, s, e, lists, grad_out, norm, mean, draw):  # type: ignore[no-untyped-def]
    """Return slope and inner after dropout [G, M, E], steep and W after dropout [P, G, E]."""
    inner, weight, masked, dropped = _weights_again(p, strides, s, e, lists, norm, draw)
    share = tl.sum(masked, 1)[:, None, :]
    x = tl.zeros([s.P, s.G, s.E], s.dtype)
    slope = tl.zeros([s.G, s.M, s.E], s.dtype)
    middle = tl.zeros([s.G, s.E], s.dtype)
    for group in range(s.width // s.VW):
        value = values(p, s, e, group)
        pooled = over_keys(s, masked, value)
        y, shift = _pulled_back(p, strides, s, e, _gradients(s, e, grad_out, group), group)
        back = _to_queries(s, dropped, y)
        x += products(s.tied_out, y, pooled, 0)
        slope += products(s.tied_key, back, value, 1)
        middle += tl.sum(back * pooled, 1)
        if p.beta is not None:
            shift = tl.sum(shift, 1)[:, None, :]
            x += products(s.tied_out, shift, share, 0)
            moved = tl.sum(_to_queries(s, dropped, shift), 1)
            slope += moved[:, None, :]
            middle += moved * tl.sum(share, 1)
    if s.dropout == 2:
        x = x * kept_pairs(s, e, draw)
    if s.dropout == 1:
        slope = slope * kept_keys(s, e, draw)
    if s.product:
        steep = weight * (x - mean)
        slope = inner * (slope - (middle - tl.sum(steep, 0))[:, None, :])
    else:
        inside = (tl.arange(0, s.M)[None, :, None] < s.columns) & e.valid[None, None, :]
        slope = tl.where(inside, slope, 0.0)
        steep = tl.sum(slope, 1)[None, :, :]
    return slope, masked, steep, dropped


@triton.jit
def _mean_gradient(p, strides, s, e, lists, grad_out, norm, draw):  # type: ignore[no-untyped-def]
    """Return W x, [P, G, E]."""
    _, weight, masked, _ = _weights_again(p, strides, s, e, lists, norm, draw)
    x = tl.zeros([s.P, s.G, s.E], s.dtype)
    for group in range(s.width // s.VW):
        y, shift = _pulled_back(p, strides, s, e, _gradients(s, e, grad_out, group), group)
        x += products(s.tied_out, y, over_keys(s, masked, values(p, s, e, group)), 0)
        if p.beta is not None:
            x += products(s.tied_out, tl.sum(shift, 1)[:, None, :], tl.sum(masked, 1)[:, None, :], 0)
    if s.dropout == 2:
        x = x * kept_pairs(s, e, draw)
    return weight * x


@triton.jit(do_not_specialize=["threshold"])
def backward_targets(p, strides, lists, s, grad_out, norm, means, grad_query, slopes, seed, threshold):  # type: ignore[no-untyped-def]
    """Write ``means``, the gradient of queries without the shared scores, and that of the shared scores."""
    point, head = row_and_head(s.heads)
    begin, end = tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)
    target = tl.zeros([s.E], tl.int64) + point
    draw = (seed, threshold)
    mean = tl.zeros([s.P, s.G, s.E], s.dtype)
    if s.softmax:
        for first in range(begin, end, s.E):
            edge = first + tl.arange(0, s.E)
            e = edges_of(lists, target, edge, edge < end, head)
            mean += _mean_gradient(p, strides, s, e, lists, grad_out, norm, draw)
        average = tl.sum(mean, 2)
        at, exists = norm_places(s, point, head)
        tl.store(means + at, average, mask=exists)
        mean = tl.zeros([s.P, s.G, s.E], s.dtype) + average[:, :, None]
    total = tl.zeros([s.G, s.D // s.VD, s.VD, s.E], s.dtype)
    shared = tl.zeros([s.G, s.M, s.E], s.dtype)
    for first in range(begin, end, s.E):
        edge = first + tl.arange(0, s.E)
        e = edges_of(lists, target, edge, edge < end, head)
        slope, _, steep, _ = _slopes(p, strides, s, e, lists, grad_out, norm, mean, draw)
        shared += slope
        if p.query is not None:
            for group in tl.static_range(s.depth // s.VD):
                change = over_keys(s, slope, channels(p.key, e.source, e, group, s.keys, s, s.depth, s.K, s.VD))
                if p.rho is not None:
                    change += _to_queries(s, steep, entries(p.rho, e, group, strides.rho, s.outs, s, s.O, s.VD))
                total = added(total, group, change)
    if p.query is not None:
        put(grad_query, total, point, head, s.queries, s.heads, s.depth, s.G, s.VD)
    if slopes is not None:
        put_slopes(slopes, tl.sum(shared, 2), s, point, head)


@triton.jit(do_not_specialize=["threshold"])
def backward_sources(  # type: ignore[no-untyped-def]
    p, strides, lists, s, grad_out, norm, means, row_first, row_last, column_edge, grad_key, grad_value, seed, threshold
):
    """Write the gradients of keys and values. A program loops over the edges of a source, or over some of them."""
    row, head = row_and_head(s.heads)
    draw = (seed, threshold)
    of_key = tl.zeros([s.K, s.D // s.VD, s.VD, s.E], s.dtype)
    of_value = tl.zeros([s.K, s.W // s.VW, s.VW, s.E], s.dtype)
    last = tl.load(row_last + row)
    for first in range(tl.load(row_first + row), last, s.E):
        place = first + tl.arange(0, s.E)
        edge = tl.load(column_edge + place, mask=place < last, other=0)
        target = tl.load(lists.target + edge, mask=place < last, other=0)
        e = edges_of(lists, target, edge, place < last, head)
        slope, masked, _, dropped = _slopes(p, strides, s, e, lists, grad_out, norm, _means(s, means, e), draw)
        if p.query is not None:
            for group in tl.static_range(s.depth // s.VD):
                query = channels(p.query, target, e, group, s.queries, s, s.depth, s.G, s.VD)
                of_key = added(of_key, group, _over_queries(s, slope, query))
        for group in tl.static_range(s.width // s.VW):
            y, _ = _pulled_back(p, strides, s, e, _gradients(s, e, grad_out, group), group)
            of_value = added(of_value, group, _over_queries(s, masked, _to_queries(s, dropped, y)))
    if p.query is not None:
        put(grad_key, of_key, row, head, s.keys, s.heads, s.depth, s.K, s.VD)
    put(grad_value, of_value, row, head, s.keys, s.heads, s.width, s.K, s.VW)


@triton.jit
def _type_sums(p, strides, s, e, lists, grad_out, norm, means, draw, of_rho, of_bias, of_pairs, of_psi, of_beta):  # type: ignore[no-untyped-def]
    """Add to the gradients of the tables, which are those of ρ, of the bias (both forms), of ψ and of β."""
    slope, masked, steep, dropped = _slopes(p, strides, s, e, lists, grad_out, norm, _means(s, means, e), draw)
    of_pairs += slope[:, :, None, :]
    if s.tied_out:
        of_bias += tl.sum(steep, 0)[:, None, None, :]
    else:
        of_bias += tl.sum(steep, 1)[:, None, None, :]
    if p.rho is not None:
        for group in tl.static_range(s.depth // s.VD):
            query = channels(p.query, e.target, e, group, s.queries, s, s.depth, s.G, s.VD)
            of_rho = added(of_rho, group, to_outputs(s, steep, query))
    if p.psi is not None:
        for group in tl.static_range(s.width // s.VW):
            sums = to_outputs(s, dropped, over_keys(s, masked, values(p, s, e, group)))
            of_psi = added(of_psi, group, _gradients(s, e, grad_out, group) * sums)
    if p.beta is not None:
        share = to_outputs(s, dropped, tl.sum(masked, 1)[:, None, :])
        for group in tl.static_range(s.width // s.VW):
            of_beta = added(of_beta, group, _gradients(s, e, grad_out, group) * share)
    return of_rho, of_bias, of_pairs, of_psi, of_beta


@triton.jit
def _put_sums(tile, pointer, own, row, count, head, frames, heads, width, F, V, E):  # type: ignore[no-untyped-def]
    """Write [F, groups, V, E] to rows ``[rows, frames, heads, width]``: their sum, or each lane to a row of its own."""
    if own:
        f = tl.arange(0, F)[:, None, None, None]
        w = tl.arange(0, tile.shape[1])[None, :, None, None] * V + tl.arange(0, V)[None, None, :, None]
        rows = row * E + tl.arange(0, E)[None, None, None, :]
        at = ((rows * frames + f) * heads + head) * width + w
        tl.store(pointer + at, tile, mask=(f < frames) & (w < width) & (rows < count))
    else:
        put(pointer, tile, row, head, frames, heads, width, F, V)


@triton.jit(do_not_specialize=["threshold"])
def backward_types(  # type: ignore[no-untyped-def]
    p, strides, lists, s, grad_out, norm, means, type_ptr, type_edge, types, splits, each: tl.constexpr,
    grad_rho, grad_bias, grad_psi, grad_beta, grad_key_psi, grad_value_psi, seed, threshold
):  # fmt: skip
    """Write the gradients of the tables of displacements, ``[types, splits, outs, heads, *]``.

    As in ``_backward.py``, the edges of a type are divided into ``splits`` parts, and the gradient of ρ is summed over
    ``each`` heads. If every edge has its own type, a program processes E types, and lanes are not summed.
    """
    row, group = row_and_head(s.heads // each)
    own: tl.constexpr = lists.index is None
    if own:
        first = row * s.E
        last = tl.minimum(first + s.E, types)
    else:
        kind = row // splits
        begin = tl.load(type_ptr + kind)
        count = tl.load(type_ptr + kind + 1) - begin
        first = begin + count * (row % splits) // splits
        last = begin + count * (row % splits + 1) // splits
    of_rho = tl.zeros([s.O, s.D // s.VD, s.VD, s.E], s.dtype)
    for number in range(each):
        head = group * each + number
        of_bias = tl.zeros([s.O, 1, 1, s.E], s.dtype)
        of_pairs = tl.zeros([s.G, s.M, 1, s.E], s.dtype)
        of_psi = tl.zeros([s.O, s.W // s.VW, s.VW, s.E], s.dtype)
        of_beta = tl.zeros([s.O, s.W // s.VW, s.VW, s.E], s.dtype)
        for block in range(first, last, s.E):
            edge = block + tl.arange(0, s.E)
            valid = edge < last
            if not own:
                edge = tl.load(type_edge + edge, mask=valid, other=0)
            e = edges_of(lists, tl.load(lists.target + edge, mask=valid, other=0), edge, valid, head)
            of_rho, of_bias, of_pairs, of_psi, of_beta = _type_sums(
                p, strides, s, e, lists, grad_out, norm, means, (seed, threshold),
                of_rho, of_bias, of_pairs, of_psi, of_beta,
            )  # fmt: skip
        if p.psi is not None:
            _put_sums(of_psi, grad_psi, own, row, types, head, s.outs, s.heads, s.width, s.O, s.VW, s.E)
        if p.beta is not None:
            _put_sums(of_beta, grad_beta, own, row, types, head, s.outs, s.heads, s.width, s.O, s.VW, s.E)
        if p.bias is not None:
            if s.full_bias:
                _put_sums(of_pairs, grad_bias, own, row, types, head, s.queries, s.heads, s.columns, s.G, 1, s.E)
            else:
                _put_sums(of_bias, grad_bias, own, row, types, head, s.outs, s.heads, 1, s.O, 1, s.E)
    if p.rho is not None:
        _put_sums(of_rho, grad_rho, own, row, types, group, s.outs, s.heads // each, s.depth, s.O, s.VD, s.E)
