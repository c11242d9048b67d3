"""Backward kernels of Triton.

The notation is that of ``attention/_backward.py``: W are the outer weights, U[g] = Σ_m inner v, y[h] = ψ · grad_out[h],
b[h] = β · grad_out[h],

    x[h, g] = ⟨y[h], U[g]⟩ + b[h],                      gradient of W,
    s[h, g] = W (x - Σ_edges W x),                      gradient of the outer score (``steep``),
    u[g] = Σ_h W y,                                     gradient of U,
    c[g, m] = inner (⟨u[g], v[m]⟩ - ⟨u[g], U[g]⟩ + Σ_h s),   gradient of the inner score (``slope``).

Three kernels compute gradients: those of queries are sums over the edges of a target, those of keys and values are sums
over the edges of a source, and those of tables are sums over the edges of a type. No two programs write to the same
place.
"""

import triton
import triton.language as tl

from lieattn.ops.kernels.triton._forward import (
    base_tile,
    combine,
    dot_products,
    edge_weights,
    factors,
    fiber_values,
    frame_rows,
    kept_keys,
    kept_pairs,
    key_tile,
    kind_of,
    levels,
    norm_places,
    put_signal,
    query_tile,
    row_and_head,
    shares_of_outputs,
    signal_tile,
    table_tile,
    to_outputs,
    to_queries,
    value_tile,
)


@triton.jit
def _pulled_back(p, strides, s, grad, kind, head):  # type: ignore[no-untyped-def]
    """Return y [O, W] and b [O]."""
    y = grad
    shift = tl.zeros([s.O], s.dtype)
    if p.psi is not None:
        y = grad * table_tile(p.psi, kind, head, strides.psi, s.outs, s.width, s.O, s.W, s.dtype)
    if p.beta is not None:
        beta = table_tile(p.beta, kind, head, strides.beta, s.outs, s.width, s.O, s.W, s.dtype)
        shift += tl.sum(beta * grad, 1)
    return y, shift


@triton.jit
def _weight_gradients(p, s, y, shift, values, share, edge, head, draw):  # type: ignore[no-untyped-def]
    """Return x after dropout, [P, G]."""
    if s.tied_out:
        x = tl.sum(y * values, 1)[None, :]
        if p.beta is not None:
            x += (shift * share)[None, :]
    else:
        x = dot_products(y, values, s.dot_pairs, s.precision, s.dtype)
        if p.beta is not None:
            x += shift[:, None] * share[None, :]
    if s.dropout == 2:
        x = x * kept_pairs(s, edge, head, draw)
    return x


@triton.jit
def _weights_again(p, strides, s, target, source, kind, edge, head, draw):  # type: ignore[no-untyped-def]
    """Return inner and inner after dropout [G, M], W [P, G], U [G, W] and Σ_m inner [G]."""
    query, base, _, level, _ = target
    inner, outer = edge_weights(p, strides, s, query, base, source, kind, head)
    masked = inner
    if s.dropout == 1:
        masked = inner * kept_keys(s, edge, head, draw)
    values = fiber_values(p, strides, s, masked, source, kind, head)
    return inner, masked, tl.exp(outer - level[0]) * level[1], values, tl.sum(masked, 1)


@triton.jit
def _slopes(p, strides, s, target, source, kind, edge, head, draw):  # type: ignore[no-untyped-def]
    """Return slope and inner after dropout [G, M], steep and W after dropout [P, G], u and U [G, W], Σ_m inner."""
    _, _, grad, _, mean = target
    inner, masked, weight, values, share = _weights_again(p, strides, s, target, source, kind, edge, head, draw)
    y, shift = _pulled_back(p, strides, s, grad, kind, head)
    steep = weight * (_weight_gradients(p, s, y, shift, values, share, edge, head, draw) - mean)
    if s.dropout == 2:
        weight = weight * kept_pairs(s, edge, head, draw)
    back = to_queries(s, weight, y)
    value = value_tile(p, strides, s, source, kind, head)
    if s.tied_key:
        slope = tl.sum(back * value, 1)[:, None]
    else:
        slope = dot_products(back, value, s.dot_keys, s.precision, s.dtype)
    moved = tl.zeros([s.G], s.dtype)
    if p.beta is not None:
        moved += tl.sum(weight * (shift[None, :] if s.tied_out else shift[:, None]), 0)
        slope += moved[:, None]
    if s.dropout == 1:
        slope = slope * kept_keys(s, edge, head, draw)
    if s.product:
        middle = moved * share + tl.sum(back * values, 1) - tl.sum(steep, 0)
        slope = inner * (slope - middle[:, None])
    else:
        slope = tl.where(tl.arange(0, s.M)[None, :] < s.columns, slope, 0.0)
        steep = tl.sum(slope, 1)[None, :]
    return slope, masked, steep, weight, back, values, share


@triton.jit
def _target(p, strides, lists, s, grad_out, norm, means, point, head):  # type: ignore[no-untyped-def]
    """Return the data of a target that its edges need: queries, shared scores, gradient, norms, and means if known."""
    query = query_tile(p, s, point, head)
    base = base_tile(p, strides, s, point, head)
    grad = signal_tile(grad_out, point, head, s.outs, s.heads, s.width, s.O, s.W, s.dtype)
    level = levels(strides, s, lists, norm, point, head)
    mean = tl.zeros([s.P, s.G], s.dtype)
    if means is not None:
        at, exists = norm_places(s, point, head)
        mean += tl.load(means + at, mask=exists, other=0.0)
    return query, base, grad, level, mean


@triton.jit
def put_slopes(slopes, tile, s, point, head):  # type: ignore[no-untyped-def]
    """Write the gradient of the scores that the edges of a point share, [G, M]."""
    g = tl.arange(0, s.G)[:, None]
    m = tl.arange(0, s.M)[None, :]
    place = ((point * s.heads + head) * s.queries + g) * s.columns + m
    tl.store(slopes + place, tile, mask=(g < s.queries) & (m < s.columns))


@triton.jit(do_not_specialize=["threshold"])
def backward_targets(p, strides, lists, s, grad_out, norm, means, grad_query, slopes, seed, threshold):  # type: ignore[no-untyped-def]
    """Write ``means``, the gradient of queries without the shared scores, and that of the shared scores.

    ``slopes`` is ``[points, heads, queries, columns]``, or None if there are no shared scores.
    """
    point, head = row_and_head(s.heads)
    begin, end = tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)
    draw = (seed, threshold)
    query, base, grad, level, mean = _target(p, strides, lists, s, grad_out, norm, None, point, head)
    if s.softmax:
        for edge in range(begin, end):
            source = tl.load(lists.source + edge)
            kind = kind_of(lists, edge)
            known = (query, base, grad, level, mean)
            _, _, weight, values, share = _weights_again(p, strides, s, known, source, kind, edge, head, draw)
            y, shift = _pulled_back(p, strides, s, grad, kind, head)
            mean += weight * _weight_gradients(p, s, y, shift, values, share, edge, head, draw)
        at, exists = norm_places(s, point, head)
        tl.store(means + at, mean, mask=exists)
    target = (query, base, grad, level, mean)
    total = tl.zeros([s.G, s.D], s.dtype)
    shared = tl.zeros([s.G, s.M], s.dtype)
    for edge in range(begin, end):
        source = tl.load(lists.source + edge)
        kind = kind_of(lists, edge)
        slope, _, steep, _, _, _, _ = _slopes(p, strides, s, target, source, kind, edge, head, draw)
        shared += slope
        if p.query is not None:
            key = key_tile(p, strides, s, source, kind, head)
            if s.tied_key:
                total += slope * key
            else:
                total += combine(slope, key, s.dot_keys, s.precision, s.dtype)
            if p.rho is not None:
                rho = table_tile(p.rho, kind, head, strides.rho, s.outs, s.depth, s.O, s.D, s.dtype)
                total += to_queries(s, steep, rho)
    if p.query is not None:
        put_signal(grad_query, total, point, head, s.queries, s.heads, s.depth, s.G, s.D)
    if slopes is not None:
        put_slopes(slopes, shared, s, point, head)


@triton.jit
def _to_frames(table, strides, s, grad, kind, head, first, frames, width, W):  # type: ignore[no-untyped-def]
    """Return the gradient [B, W] of a block of frames of a neighbor, given that of the pooled frames, [G, W]."""
    if table is None:
        return tl.zeros([s.B, W], s.dtype) + tl.sum(grad, 0)[None, :]
    else:
        return tl.sum(factors(table, strides, s, kind, head, first, frames, width, W) * grad[:, None, :], 0)


@triton.jit(do_not_specialize=["threshold"])
def backward_sources(  # type: ignore[no-untyped-def]
    p, strides, lists, s, grad_out, norm, means, row_first, row_last, column_edge, grad_key, grad_value, seed, threshold
):
    """Write the gradients of keys and values. A program loops over the edges of a source, or over some of them.

    It processes all frames over the point, or a block of them if frames are pooled.
    """
    row, head = row_and_head(s.heads)
    first = tl.program_id(1) * s.B
    of_key = tl.zeros([s.B, s.D], s.dtype)
    of_value = tl.zeros([s.B, s.W], s.dtype)
    for number in range(tl.load(row_first + row), tl.load(row_last + row)):
        edge = tl.load(column_edge + number)
        source = tl.load(lists.source + edge)
        target = _target(p, strides, lists, s, grad_out, norm, means, tl.load(lists.target + edge), head)
        kind = kind_of(lists, edge)
        slope, masked, _, _, back, _, _ = _slopes(p, strides, s, target, source, kind, edge, head, (seed, threshold))
        if s.pooled:
            if p.query is not None:
                of_key += _to_frames(
                    p.key_psi, strides.key_psi, s, slope * target[0], kind, head, first, s.key_frames, s.depth, s.D
                )
            of_value += _to_frames(
                p.value_psi, strides.value_psi, s, masked * back, kind, head, first, s.keys, s.width, s.W
            )
        elif s.tied_key:
            of_key += slope * target[0]
            of_value += masked * back
        else:
            of_key += combine(tl.trans(slope), target[0], s.dot_keys, s.precision, s.dtype)
            of_value += combine(tl.trans(masked), back, s.dot_keys, s.precision, s.dtype)
    if p.query is not None:
        put_signal(grad_key, of_key, row, head, s.key_frames, s.heads, s.depth, s.B, s.D, first)
    put_signal(grad_value, of_value, row, head, s.keys, s.heads, s.width, s.B, s.W, first)


@triton.jit
def _type_sums(p, strides, lists, s, grad_out, norm, means, kind, type_edge, first, last, head, frame, draw):  # type: ignore[no-untyped-def]
    """Return the gradients of one row of the tables, summed over some of its edges.

    They are those of ρ, of the bias (both forms), of ψ, of β, and of the factors that pool a block of frames, which
    begins with ``frame``.
    """
    of_rho = tl.zeros([s.O, s.D], s.dtype)
    of_bias = tl.zeros([s.O], s.dtype)
    of_pairs = tl.zeros([s.G, s.M], s.dtype)
    of_psi = tl.zeros([s.O, s.W], s.dtype)
    of_beta = tl.zeros([s.O, s.W], s.dtype)
    of_key_psi = tl.zeros([s.G, s.B, s.D], s.dtype)
    of_value_psi = tl.zeros([s.G, s.B, s.W], s.dtype)
    for number in range(first, last):
        edge = tl.load(type_edge + number)
        source = tl.load(lists.source + edge)
        target = _target(p, strides, lists, s, grad_out, norm, means, tl.load(lists.target + edge), head)
        query, _, grad, _, _ = target
        slope, masked, steep, weight, back, values, share = _slopes(
            p, strides, s, target, source, kind, edge, head, draw
        )
        of_pairs += slope
        if s.tied_out:
            of_bias += tl.sum(steep, 0)
        else:
            of_bias += tl.sum(steep, 1)
        if p.rho is not None:
            of_rho += to_outputs(s, steep, query)
        if p.psi is not None:
            of_psi += grad * to_outputs(s, weight, values)
        if p.beta is not None:
            of_beta += grad * shares_of_outputs(s, weight, share)[:, None]
        if p.key_psi is not None:
            key = frame_rows(p.key, s, source, head, frame, s.key_frames, s.depth, s.D)
            of_key_psi += (slope * query)[:, None, :] * key[None, :, :]
        if p.value_psi is not None:
            value = frame_rows(p.value, s, source, head, frame, s.keys, s.width, s.W)
            of_value_psi += (masked * back)[:, None, :] * value[None, :, :]
    return of_rho, of_bias, of_pairs, of_psi, of_beta, of_key_psi, of_value_psi


@triton.jit
def _put_factors(pointer, tile, s, row, head, first, frames, width, W):  # type: ignore[no-untyped-def]
    """Write [G, B, W] to rows ``[outs, frames, heads, width]``."""
    g = tl.arange(0, s.G)[:, None, None]
    m = first + tl.arange(0, s.B)[None, :, None]
    d = tl.arange(0, W)[None, None, :]
    at = (((row * s.outs + g) * frames + m) * s.heads + head) * width + d
    tl.store(pointer + at, tile, mask=(g < s.queries) & (m < frames) & (d < width))


@triton.jit
def _put_tables(p, s, row, head, of_bias, of_pairs, of_psi, of_beta, grad_bias, grad_psi, grad_beta):  # type: ignore[no-untyped-def]
    if p.psi is not None:
        put_signal(grad_psi, of_psi, row, head, s.outs, s.heads, s.width, s.O, s.W)
    if p.beta is not None:
        put_signal(grad_beta, of_beta, row, head, s.outs, s.heads, s.width, s.O, s.W)
    if p.bias is not None:
        if s.full_bias:
            put_signal(grad_bias, of_pairs, row, head, s.queries, s.heads, s.columns, s.G, s.M)
        else:
            put_signal(grad_bias, of_bias[:, None], row, head, s.outs, s.heads, 1, s.O, 1)


@triton.jit(do_not_specialize=["threshold"])
def backward_types(  # type: ignore[no-untyped-def]
    p, strides, lists, s, grad_out, norm, means, type_ptr, type_edge, types, splits, each: tl.constexpr,
    grad_rho, grad_bias, grad_psi, grad_beta, grad_key_psi, grad_value_psi, seed, threshold
):  # fmt: skip
    """Write the gradients of the tables of displacements, ``[types, splits, outs, heads, *]``.

    The edges of a type are divided into ``splits`` parts, each with its own program, and their sums are added
    afterwards. A program processes ``each`` heads, and sums the gradient of ρ over them, ``[types, splits, outs,
    heads / each, *]``. It computes the gradients of the factors that pool a block of frames, ``[types, splits, outs,
    frames, heads, *]``. The program of the first block also computes those of the other tables.
    """
    row, group = row_and_head(s.heads // each)
    kind = row // splits
    begin = tl.load(type_ptr + kind)
    count = tl.load(type_ptr + kind + 1) - begin
    first = begin + count * (row % splits) // splits
    last = begin + count * (row % splits + 1) // splits
    frame = tl.program_id(1) * s.B
    rho = tl.zeros([s.O, s.D], s.dtype)
    for number in range(each):
        head = group * each + number
        of_rho, of_bias, of_pairs, of_psi, of_beta, of_key_psi, of_value_psi = _type_sums(
            p, strides, lists, s, grad_out, norm, means, kind, type_edge, first, last, head, frame, (seed, threshold)
        )
        rho += of_rho
        if p.key_psi is not None:
            _put_factors(grad_key_psi, of_key_psi, s, row, head, frame, s.key_frames, s.depth, s.D)
        if p.value_psi is not None:
            _put_factors(grad_value_psi, of_value_psi, s, row, head, frame, s.keys, s.width, s.W)
        if frame == 0:
            _put_tables(p, s, row, head, of_bias, of_pairs, of_psi, of_beta, grad_bias, grad_psi, grad_beta)
    if p.rho is not None:
        if frame == 0:
            put_signal(grad_rho, rho, row, group, s.outs, s.heads // each, s.depth, s.O, s.D)
