# mypy: allow-untyped-defs
"""What forward and backward pass compute alike: the weights of one edge.

For query frame g and key frame m, c[g, m] is the part of the score that does not see the output frame h, and
p[h, g] the part that does. The softmax over m is taken first:

    inner[g, m] = softmax_m(c),  level[g] = max_m c,  mass[g] = Σ_m exp(c - level),  outer[h, g] = p + level.

A weight is inner · exp(outer - L) · mass, with L[h, g] the logarithm of the sum over all edges.
"""

import numba

from lieattn.ops.kernels.attention._operands import MEAN, NONE
from lieattn.ops.kernels.vectors._products import combine, compiled, dot_products, prefetch_row, row, set_all
from lieattn.ops.kernels.vectors._vectors import (
    at_address,
    exp,
    fill,
    integer_at,
    keep_mask,
    load,
    load_one,
    maximum,
    multiply_add,
    offset,
    stay_apart,
    store,
)


@compiled
def point_scores(p, s, query, base, lanes):
    """Scores of pairs of frames that all edges of a point share: ⟨q, ρ(g, m)⟩ + b(g, m), [queries, columns]."""
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


@compiled
def prefetch_source(p, s, lists, edge, end, lanes):
    """Ask for key and value of an edge that comes next: in large clouds they are anywhere in memory."""
    if edge < end:
        wide = len(lanes)
        source = integer_at(lists.source, edge)
        prefetch_row(at_address(p.key, lanes), source, s.keys * s.depth * wide)
        prefetch_row(at_address(p.value, lanes), source, s.keys * s.width * wide)


@compiled
def positional_keys(p, s, kind, stage, lanes):
    """Positional keys of a type of displacement, [outs, depth]: where they lie, or in ``stage`` if heads share."""
    wide = len(lanes)
    if not s.rho_shared:
        return offset(at_address(p.rho, lanes), kind * s.rho_type), s.rho_out
    for h in range(s.outs):
        for d in range(s.depth):
            one = load_one(at_address(p.rho, lanes), kind * s.rho_type + h * s.rho_out + d, lanes)
            store(stage, (h * s.depth + d) * wide, one)
    return stage, s.depth * wide


@compiled
def edge_weights(p, s, query, source, kind, edge, seed, base, stage, inner, masked, mass, outer, lanes):
    """Compute ``inner``, ``mass`` and ``outer`` of an edge, and ``masked``, the inner weights behind dropout."""
    stay_apart()
    wide = len(lanes)
    _outer_scores(p, s, query, kind, stage, outer, lanes)
    _inner_scores(p, s, query, source, kind, base, inner, lanes)
    if s.normalize == MEAN or s.normalize == NONE:
        # Output and query frame are one here: these weights are sums, not products.
        for g in range(s.queries):
            extra = load(outer, g * wide, lanes)
            for m in range(s.columns):
                at = (g * s.columns + m) * wide
                store(inner, at, load(inner, at, lanes) + extra)
            store(outer, g * wide, fill(outer, 0.0, lanes))
            store(mass, g * wide, fill(outer, 1.0, lanes))
    else:
        _softmax(s, inner, mass, outer, lanes)
    if s.threshold > 0 and s.tied_out and not s.tied_key:
        for pair in range(s.queries * s.columns):
            kept = dropout_factor(s, inner, seed, edge * s.queries * s.columns + pair, lanes)
            store(masked, pair * wide, load(inner, pair * wide, lanes) * kept)


@compiled
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
            for g in range(s.queries):
                at, place = offset(rho, g * rho_out), row(outer, g, wide)
                dot_products(at, 0, 1, row(query, g, size), 0, 1, s.depth, has_bias, place, 0, 0, lanes)
        else:
            dot_products(
                rho, rho_out, s.outs, query, size, s.queries, s.depth, has_bias, outer, s.queries * wide, wide, lanes
            )


@compiled
def _inner_scores(p, s, query, source, kind, base, inner, lanes):
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
    size = s.depth * wide
    key = row(at_address(p.key, lanes), source, s.keys * size)
    if s.depth == 0:
        return
    if s.tied_key:
        for g in range(s.queries):
            q, k = row(query, g, size), row(key, g, size)
            dot_products(q, 0, 1, k, 0, 1, s.depth, True, row(inner, g, wide), 0, 0, lanes)
    else:
        dot_products(query, size, s.queries, key, size, s.keys, s.depth, True, inner, s.keys * wide, wide, lanes)


@compiled
def _softmax(s, inner, mass, outer, lanes):
    """Softmax over the key frames of every query frame; its level goes to ``outer``."""
    stay_apart()
    wide = len(lanes)
    one = fill(inner, 1.0, lanes)
    for g in range(s.queries):
        start = g * s.columns * wide
        end = start + s.columns * wide
        level = load(inner, start, lanes)
        for at in range(start + wide, end, wide):
            level = maximum(level, load(inner, at, lanes))
        total = fill(inner, 0.0, lanes)
        for at in range(start, end, wide):
            weight = exp(load(inner, at, lanes) - level)
            total = total + weight
            store(inner, at, weight)
        share = one / total
        for at in range(start, end, wide):
            store(inner, at, load(inner, at, lanes) * share)
        store(mass, g * wide, total)
        for pair in range(g, s.pairs, s.queries):
            store(outer, pair * wide, load(outer, pair * wide, lanes) + level)


@compiled
def edge_values(p, s, source, weights, values, lanes):
    """Σ_m weights[g, m] v[m]: [queries, width]."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    value = row(at_address(p.value, lanes), source, s.keys * size)
    if s.tied_key:
        for g in range(s.queries):
            weight, place = row(weights, g, wide), row(values, g, size)
            combine(weight, 0, 0, 1, 1, row(value, g, size), 0, s.width, False, place, 0, lanes)
    else:
        combine(weights, s.keys * wide, wide, s.queries, s.keys, value, size, s.width, False, values, size, lanes)


@compiled
def row_sums(s, weights, sums, lanes):
    """Σ_m weights[g, m]: [queries]."""
    stay_apart()
    wide = len(lanes)
    for g in range(s.queries):
        total = fill(sums, 0.0, lanes)
        for m in range(s.columns):
            total = total + load(weights, (g * s.columns + m) * wide, lanes)
        store(sums, g * wide, total)


@compiled
def dropout_factor(s, pointer, seed, counter, lanes):
    """0 in lanes that are dropped, 1 / (1 - probability) in the others; the counter is hashed by SplitMix64."""
    stay_apart()
    state = numba.uint64(seed) + numba.uint64(counter) * numba.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> numba.uint64(30))) * numba.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> numba.uint64(27))) * numba.uint64(0x94D049BB133111EB)
    state = state ^ (state >> numba.uint64(31))
    kept = keep_mask(pointer, state, numba.uint64(s.threshold), lanes)
    return kept * fill(pointer, 4294967296.0 / (4294967296.0 - s.threshold), lanes)


@compiled
def outer_dropout(s, outer, edge, seed, lanes):
    """Multiply the outer weights of an edge by their dropout factors, where these belong to pairs of frames."""
    stay_apart()
    wide = len(lanes)
    for pair in range(s.pairs):
        kept = dropout_factor(s, outer, seed, edge * s.pairs + pair, lanes)
        store(outer, pair * wide, load(outer, pair * wide, lanes) * kept)
