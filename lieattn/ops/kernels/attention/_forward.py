# mypy: allow-untyped-defs
"""Forward pass: for every target, a softmax over its edges with a running maximum.

The backward pass uses the same weights of an edge. For query frame g and key frame m, c[g, m] is the part of the score
that does not depend on the output frame h, and p[h, g] is the part that does. The softmax over m is computed first:

    inner[g, m] = softmax_m(c),  level[g] = max_m c,  mass[g] = Σ_m exp(c - level),  outer[h, g] = p + level.

A weight is inner · exp(outer - top) · mass / total, where top is the largest outer[h, g] of all edges, and total is the
sum of exp(outer - top) · mass over them.
"""

import math

import numba
import numpy as np

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import combine, dot_products, prefetch_row, row, set_all
from lieattn.ops.kernels._vectors import (
    at_address,
    exp,
    fill,
    integer_at,
    keep_mask,
    load,
    load_one,
    lowest,
    maximum,
    multiply_add,
    offset,
    stay_apart,
    store,
)

SOFTMAX, EXP_MEAN, MEAN, NONE = range(4)


@part
def point_scores(p, s, query, base, lanes):
    """Compute the scores ⟨q, ρ(g, m)⟩ + b(g, m), [queries, columns], which all edges of a point share."""
    stay_apart()
    wide = len(lanes)
    for g in range(s.queries):
        for m in range(s.columns):
            at = (g * s.columns + m) * wide
            pair = g * s.keys + (g if s.tied_key else m)
            total = fill(base, float(s.constant), lanes)
            if s.has_fiber_bias:
                total = total + load(at_address(p.fiber_bias, lanes), pair * wide, lanes)
            if s.has_fiber_key:
                for d in range(s.depth):
                    key = load(at_address(p.fiber_key, lanes), (pair * s.depth + d) * wide, lanes)
                    total = multiply_add(load(query, (g * s.depth + d) * wide, lanes), key, total)
            store(base, at, total)


@part
def prefetch_source(p, s, lists, edge, end, lanes):
    """Prefetch key and value of a later edge, which may be far away in memory in large clouds."""
    if edge < end:
        wide = len(lanes)
        source = integer_at(lists.source, edge)
        prefetch_row(at_address(p.key, lanes), source, s.key_frames * s.depth * wide)
        prefetch_row(at_address(p.value, lanes), source, s.keys * s.width * wide)


@part
def positional_keys(p, s, kind, stage, lanes):
    """Return a pointer to the positional keys of a type, [outs, depth]. If heads share them, copy them to ``stage``."""
    wide = len(lanes)
    if not s.rho_shared:
        return offset(at_address(p.rho, lanes), kind * s.rho_type), s.rho_out
    for h in range(s.outs):
        for d in range(s.depth):
            one = load_one(at_address(p.rho, lanes), kind * s.rho_type + h * s.rho_out + d, lanes)
            store(stage, (h * s.depth + d) * wide, one)
    return stage, s.depth * wide


@part
def edge_signals(p, s, source, made, lanes):
    """Return pointers to keys and values of an edge: at its source, or in ``made`` if query frames have their own."""
    depth, width = s.depth * len(lanes), s.width * len(lanes)
    if s.pooled:
        return made, row(made, s.queries, depth)
    key = row(at_address(p.key, lanes), source, s.key_frames * depth)
    return key, row(at_address(p.value, lanes), source, s.keys * width)


@part
def make_signals(p, s, source, kind, made, lanes):
    """Write keys and values of an edge to ``made``: for each query frame, sums over the frames of the source."""
    stay_apart()
    depth, width = s.depth * len(lanes), s.width * len(lanes)
    key, value = row(at_address(p.key, lanes), source, s.key_frames * depth), offset(made, s.queries * depth)
    psi = offset(at_address(p.key_psi, lanes), kind * s.key_psi_type)
    _mix_frames(s, made, s.depth, key, s.key_frames, s.has_key_psi, psi, s.key_psi_out, s.key_psi_frame, lanes)
    psi, signal = (
        offset(at_address(p.psi, lanes), kind * s.psi_type),
        row(at_address(p.value, lanes), source, s.keys * width),
    )
    _mix_frames(s, value, s.width, signal, s.keys, s.mixed_psi, psi, s.psi_out, s.psi_frame, lanes)


@part
def _mix_frames(s, out, width, signal, frames, has_psi, psi, psi_out, psi_frame, lanes):
    """Compute Σ_m psi[h, m] signal[m] for every query frame h. Without ``psi``, there is only one frame m."""
    wide = len(lanes)
    for h in range(s.queries):
        for d in range(0, width * wide, wide):
            total = load(signal, d, lanes)
            if has_psi:
                total = load(psi, h * psi_out + d, lanes) * total
                for m in range(1, frames):
                    factor = load(psi, h * psi_out + m * psi_frame + d, lanes)
                    total = multiply_add(factor, load(signal, m * width * wide + d, lanes), total)
            store(out, h * width * wide + d, total)


@part
def edge_weights(p, s, query, key, kind, edge, seed, base, stage, inner, masked, mass, outer, lanes):
    """Compute ``inner``, ``mass`` and ``outer`` of an edge, and ``masked``, the inner weights after dropout."""
    stay_apart()
    wide = len(lanes)
    _outer_scores(p, s, query, kind, stage, outer, lanes)
    _inner_scores(p, s, query, key, kind, base, inner, lanes)
    if s.normalize == MEAN or s.normalize == NONE:
        # The output frame is the query frame here, and these weights are sums, not products.
        for g in range(s.queries):
            extra = load(outer, g * wide, lanes)
            for m in range(s.columns):
                at = (g * s.columns + m) * wide
                store(inner, at, load(inner, at, lanes) + extra)
            store(outer, g * wide, fill(outer, 0.0, lanes))
            store(mass, g * wide, fill(outer, 1.0, lanes))
    else:
        _softmax(s, inner, mass, outer, lanes)
    if s.split:
        for pair in range(s.queries * s.columns):
            kept = dropout_factor(s, inner, seed, edge * s.queries * s.columns + pair, lanes)
            store(masked, pair * wide, load(inner, pair * wide, lanes) * kept)


@part
def _outer_scores(p, s, query, kind, stage, outer, lanes):
    stay_apart()
    wide = len(lanes)
    has_bias = s.has_bias and s.bias_key == 0
    if has_bias:
        for pair in range(s.pairs):
            h = pair if s.tied_out else pair // s.queries
            store(outer, pair * wide, load(at_address(p.bias, lanes), kind * s.bias_type + h * s.bias_out, lanes))
    elif not s.has_rho:
        set_all(outer, s.pairs, 0.0, lanes)
    if s.has_rho:
        rho, rho_out = positional_keys(p, s, kind, stage, lanes)
        size = s.depth * wide
        if s.tied_out:
            frame_products(True, query, s.queries, rho, rho_out, 1, s.depth, has_bias, outer, lanes)
        else:
            dot_products(
                rho, rho_out, s.outs, query, size, s.queries, s.depth, has_bias, outer, s.queries * wide, wide, lanes
            )


@part
def _inner_scores(p, s, query, key, kind, base, inner, lanes):
    stay_apart()
    wide = len(lanes)
    for g in range(s.queries):
        for m in range(s.columns):
            at = (g * s.columns + m) * wide
            total = load(base, at, lanes)
            if s.has_bias and s.bias_key != 0:
                total = total + load(
                    at_address(p.bias, lanes), kind * s.bias_type + g * s.bias_out + m * s.bias_key, lanes
                )
            store(inner, at, total)
    if s.depth > 0:
        frame_products(s.tied_key, query, s.queries, key, s.depth * wide, s.keys, s.depth, True, inner, lanes)


@part
def _softmax(s, inner, mass, outer, lanes):
    """Compute the softmax over the key frames of every query frame, and write its level to ``outer``."""
    stay_apart()
    wide = len(lanes)
    one, least = fill(inner, 1.0, lanes), fill(inner, lowest(inner), lanes)
    for g in range(s.queries):
        start = g * s.columns * wide
        end = start + s.columns * wide
        level = load(inner, start, lanes)
        for at in range(start + wide, end, wide):
            level = maximum(level, load(inner, at, lanes))
        total = one
        if s.columns == 1:
            store(inner, start, one)
        else:
            # If all scores are minus infinity, the weights are zero. Otherwise the sum is at least one.
            level = maximum(level, least)
            total = fill(inner, 0.0, lanes)
            for at in range(start, end, wide):
                weight = exp(load(inner, at, lanes) - level)
                total = total + weight
                store(inner, at, weight)
            share = one / maximum(total, one)
            for at in range(start, end, wide):
                store(inner, at, load(inner, at, lanes) * share)
        store(mass, g * wide, total)
        for pair in range(g, s.pairs, s.queries):
            store(outer, pair * wide, load(outer, pair * wide, lanes) + level)


@part
def frame_products(tied, x, rows, y, y_row, columns, depth, keep, out, lanes):
    """Compute ⟨x[i], y[j]⟩ for all pairs of frames, or ⟨x[i], y[i]⟩ if they are tied; see :func:`dot_products`."""
    stay_apart()
    wide = len(lanes)
    size = depth * wide
    if not tied:
        dot_products(x, size, rows, y, y_row, columns, depth, keep, out, columns * wide, wide, lanes)
        return
    for i in range(rows):
        total = fill(out, 0.0, lanes)
        for at in range(0, size, wide):
            total = multiply_add(load(x, i * size + at, lanes), load(y, i * y_row + at, lanes), total)
        store(out, i * wide, total + load(out, i * wide, lanes) if keep else total)


@part
def edge_values(s, value, weights, values, lanes):
    """Compute Σ_m weights[g, m] v[m], [queries, width]."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    if not s.tied_key:
        combine(weights, s.keys * wide, wide, s.queries, s.keys, value, size, s.width, False, values, size, lanes)
        return
    for g in range(s.queries):
        weight = load(weights, g * wide, lanes)
        for at in range(g * size, (g + 1) * size, wide):
            store(values, at, weight * load(value, at, lanes))


@part
def row_sums(s, weights, sums, lanes):
    """Compute Σ_m weights[g, m], [queries]."""
    stay_apart()
    wide = len(lanes)
    for g in range(s.queries):
        total = fill(sums, 0.0, lanes)
        for m in range(s.columns):
            total = total + load(weights, (g * s.columns + m) * wide, lanes)
        store(sums, g * wide, total)


@part
def dropout_factor(s, pointer, seed, counter, lanes):
    """Return 0 in dropped lanes and 1 / (1 - probability) in the others. The counter is hashed by SplitMix64."""
    stay_apart()
    state = numba.uint64(seed) + numba.uint64(counter) * numba.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> numba.uint64(30))) * numba.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> numba.uint64(27))) * numba.uint64(0x94D049BB133111EB)
    state = state ^ (state >> numba.uint64(31))
    state += numba.uint64(s.seeded_lane) * numba.uint64(0x9E3779B9)
    kept = keep_mask(pointer, state, numba.uint64(s.threshold), lanes)
    return kept * fill(pointer, 4294967296.0 / (4294967296.0 - s.threshold), lanes)


@part
def outer_dropout(s, outer, edge, seed, lanes):
    """Multiply the outer weights of an edge by their dropout factors, if these belong to pairs of frames."""
    stay_apart()
    wide = len(lanes)
    for pair in range(s.pairs):
        kept = dropout_factor(s, outer, seed, edge * s.pairs + pair, lanes)
        store(outer, pair * wide, load(outer, pair * wide, lanes) * kept)


@compiled
def forward(p, s, lists, first, last, seed, out, norm, scratch, lanes):
    """Attend from the targets ``first`` to ``last``.

    The kernel writes ``out`` [points, outs, width] and ``norm`` [points, 2 pairs]: for the softmax, the largest scores
    of all pairs of frames, then the sums of the exponentials relative to them. It writes nothing for points without
    edges.
    """
    wide = len(lanes)
    sums = at_address(scratch.sums, lanes)
    for target in range(first, last):
        begin, end = integer_at(lists.row_ptr, target), integer_at(lists.row_ptr, target + 1)
        if begin == end:
            continue
        query = row(at_address(p.query, lanes), target, s.queries * s.depth * wide)
        point_scores(p, s, query, at_address(scratch.base, lanes), lanes)
        top = row(at_address(norm, lanes), target, 2 * s.pairs * wide)
        total = offset(top, s.pairs * wide)
        set_all(top, s.pairs, start_level(s, end - begin, top), lanes)
        set_all(total, s.pairs, 0.0, lanes)
        set_all(sums, s.pairs * s.width, 0.0, lanes)
        for start in range(begin, end, s.chunk):
            edges = min(s.chunk, end - start)
            _weigh(p, s, lists, start, edges, end, seed, query, scratch, lanes)
            for g in range(s.queries):
                _outer_weights(s, g, start, edges, seed, scratch, top, total, lanes)
                if not s.has_psi and not s.has_beta:
                    _add_values(s, g, edges, scratch, lanes)
            if s.has_psi or s.has_beta:
                _add_affine_values(p, s, lists, start, edges, scratch, lanes)
        _close(s, sums, total, row(at_address(out, lanes), target, s.outs * s.width * wide), lanes)


@part
def _weigh(p, s, lists, start, edges, end, seed, query, scratch, lanes):
    """Compute outer scores and U of a chunk of edges."""
    stay_apart()
    wide = len(lanes)
    base, inner, stage = (
        at_address(scratch.base, lanes),
        at_address(scratch.inner, lanes),
        at_address(scratch.stage, lanes),
    )
    masked = at_address(scratch.masked, lanes) if s.split else inner
    mass, shares = at_address(scratch.mass, lanes), at_address(scratch.shares, lanes)
    outer, values = at_address(scratch.outer, lanes), at_address(scratch.values, lanes)
    made = at_address(scratch.made, lanes)
    for e in range(edges):
        edge = start + e
        source = integer_at(lists.source, edge)
        prefetch_source(p, s, lists, edge + 1, end, lanes)
        kind = integer_at(lists.kind, edge) if s.indexed else edge
        if s.pooled:
            make_signals(p, s, source, kind, made, lanes)
        key, value = edge_signals(p, s, source, made, lanes)
        weight, part = row(outer, e, odd(s.pairs) * wide), row(mass, e, s.queries * wide)
        edge_weights(p, s, query, key, kind, edge, seed, base, stage, inner, masked, part, weight, lanes)
        edge_values(s, value, masked, row(values, e, odd(s.queries * s.width) * wide), lanes)
        if s.has_beta:
            row_sums(s, masked, row(shares, e, s.queries * wide), lanes)


@part
def start_level(s, degree, scores):
    """Return the initial value subtracted from scores, which is final if the normalization is the number of keys."""
    if s.normalize == SOFTMAX:
        return lowest(scores)
    if s.normalize == EXP_MEAN or s.normalize == MEAN:
        return math.log(np.float64(degree * s.columns))
    return 0.0


@part
def odd(vectors):
    """Return an odd row length, since with a power of two, the entries of a column would map to few cache lines."""
    return vectors | 1


@part
def _outer_weights(s, g, start, edges, seed, scratch, top, total, lanes):
    """Convert the outer scores of query frame g to weights relative to the running maximum, and rescale the sums."""
    stay_apart()
    wide = len(lanes)
    step = odd(s.pairs) * wide
    mass, outer = at_address(scratch.mass, lanes), at_address(scratch.outer, lanes)
    sums = at_address(scratch.sums, lanes)
    for pair in range(g, s.pairs, s.queries):
        level = load(top, pair * wide, lanes)
        if s.normalize == SOFTMAX:
            before = level
            for e in range(edges):
                level = maximum(level, load(outer, e * step + pair * wide, lanes))
            store(top, pair * wide, level)
            shrink = exp(before - level)
            store(total, pair * wide, load(total, pair * wide, lanes) * shrink)
            for d in range(s.width):
                at = (pair * s.width + d) * wide
                store(sums, at, load(sums, at, lanes) * shrink)
        added = load(total, pair * wide, lanes)
        for e in range(edges):
            at = e * step + pair * wide
            weight = exp(load(outer, at, lanes) - level) * load(mass, (e * s.queries + g) * wide, lanes)
            added = added + weight
            if s.threshold > 0 and not s.split:
                weight = weight * dropout_factor(s, outer, seed, (start + e) * s.pairs + pair, lanes)
            store(outer, at, weight)
        store(total, pair * wide, added)


@part
def _add_values(s, g, edges, scratch, lanes):
    """Add the weighted values of query frame g."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    outer, values = at_address(scratch.outer, lanes), at_address(scratch.values, lanes)
    sums = at_address(scratch.sums, lanes)
    combine(
        row(outer, g, wide), s.queries * wide, odd(s.pairs) * wide, 1 if s.tied_out else s.outs, edges,
        row(values, g, size), odd(s.queries * s.width) * wide, s.width,
        True, row(sums, g, size), s.queries * size, lanes,
    )  # fmt: skip


@part
def _add_affine_values(p, s, lists, start, edges, scratch, lanes):
    """Add the weighted values ψ v + β."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    outer, values = at_address(scratch.outer, lanes), at_address(scratch.values, lanes)
    sums, shares = at_address(scratch.sums, lanes), at_address(scratch.shares, lanes)
    one, zero = fill(sums, 1.0, lanes), fill(sums, 0.0, lanes)
    for e in range(edges):
        kind = integer_at(lists.kind, start + e) if s.indexed else start + e
        value = row(values, e, odd(s.queries * s.width) * wide)
        for pair in range(s.pairs):
            h, g = (pair if s.tied_out else pair // s.queries), pair % s.queries
            weight, share = load(outer, (e * odd(s.pairs) + pair) * wide, lanes), zero
            if s.has_beta:
                share = load(shares, (e * s.queries + g) * wide, lanes)
            for d in range(s.width):
                psi, beta = one, zero
                if s.has_psi:
                    psi = load(at_address(p.psi, lanes), kind * s.psi_type + h * s.psi_out + d * wide, lanes)
                if s.has_beta:
                    beta = load(at_address(p.beta, lanes), kind * s.beta_type + h * s.beta_out + d * wide, lanes)
                message = psi * load(value, g * size + d * wide, lanes) + beta * share
                at = pair * size + d * wide
                store(sums, at, multiply_add(weight, message, load(sums, at, lanes)))


@part
def _close(s, sums, total, out, lanes):
    """Normalize the sums, and sum over query frames unless the output frame is the query frame."""
    stay_apart()
    wide = len(lanes)
    one = fill(out, 1.0, lanes)
    for h in range(s.outs):
        for d in range(s.width):
            result = fill(out, 0.0, lanes)
            for g in range(h if s.tied_out else 0, h + 1 if s.tied_out else s.queries):
                pair = g if s.tied_out else h * s.queries + g
                share = one / load(total, pair * wide, lanes) if s.normalize == SOFTMAX else one
                result = multiply_add(share, load(sums, (pair * s.width + d) * wide, lanes), result)
            store(out, (h * s.width + d) * wide, result)
