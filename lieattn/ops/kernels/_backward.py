# mypy: allow-untyped-defs
"""Backward pass: one walk over targets that computes the weights again and spreads their gradients.

With W[h, g] the outer weights, inner[g, m] as in the forward pass, U[g] = Σ_m inner v, y[h] = ψ · grad_out[h] and
b[h] = β · grad_out[h], an edge has

    x[h, g] = ⟨y[h], U[g]⟩ + b[h],                      gradient of W,
    s[h, g] = W (x - Σ_edges W x),                      gradient of the outer score,
    u[g] = Σ_h W y,                                     gradient of U,
    c[g, m] = inner (⟨u[g], v[m]⟩ - ⟨u[g], U[g]⟩ + Σ_h s),   gradient of the inner score,

and everything else is a product of these with q, k, v and the tables. Gradients of keys and values are summed in a
window of source points that belongs to one call alone, those of the tables in arrays that do: no two threads
write to one place, and sums are taken in one order.
"""

from lieattn.ops.kernels._edge_gradients import (
    bias_gradients,
    frame_gradients,
    inner_gradients,
    outer_gradients,
    pulled_back,
    rho_gradients,
    value_table_gradients,
)
from lieattn.ops.kernels._edges import (
    dropout_factor,
    edge_values,
    edge_weights,
    outer_dropout,
    point_scores,
    prefetch_source,
    row_sums,
)
from lieattn.ops.kernels._forward import start_level
from lieattn.ops.kernels._problem import SOFTMAX
from lieattn.ops.kernels._products import add_row, combine, compiled, prefetch_row, row, scale_row, set_all
from lieattn.ops.kernels._vectors import (
    at_address,
    exp,
    fill,
    integer_at,
    load,
    multiply_add,
    stay_apart,
    store,
)


@compiled
def backward(p, s, lists, first, last, seed, grad_out, norm, to, window, room, lanes):
    """Gradients of what the targets ``first`` to ``last`` computed.

    ``norm`` is the logarithm of the sum of exponentials [points, pairs]. ``grads`` are arrays like the operands,
    added to; those of key and value begin with the source point ``window``.
    """
    wide = len(lanes)
    grad_at, norm_at = at_address(grad_out, lanes), at_address(norm, lanes)
    for target in range(first, last):
        begin, end = integer_at(lists.row_ptr, target), integer_at(lists.row_ptr, target + 1)
        if begin == end:
            continue
        size = s.queries * s.depth * wide
        query, grad_query = (
            row(at_address(p.query, lanes), target, size),
            row(at_address(to.query, lanes), target, size),
        )
        grad = row(grad_at, target, s.outs * s.width * wide)
        point_scores(p, s, query, at_address(room.base, lanes), lanes)
        set_all(at_address(room.slopes, lanes), s.queries * s.columns, 0.0, lanes)
        set_all(at_address(room.mean, lanes), s.pairs, 0.0, lanes)
        _levels(s, row(norm_at, target, s.pairs * wide), end - begin, at_address(room.level, lanes), lanes)
        # The mean of x over all edges must be known before any gradient: long lists are walked twice.
        if s.normalize == SOFTMAX and end - begin > s.chunk:
            for start in range(begin, end, s.chunk):
                edges = min(s.chunk, end - start)
                _weigh(p, s, lists, start, edges, seed, query, grad, room, True, lanes)
        once = s.normalize == SOFTMAX and end - begin <= s.chunk
        for start in range(begin, end, s.chunk):
            edges = min(s.chunk, end - start)
            _weigh(p, s, lists, start, edges, seed, query, grad, room, once, lanes)
            for e in range(edges):
                ahead = integer_at(lists.source, start + e + 1) if e + 1 < edges else -1
                _spread(p, s, lists, start + e, ahead, e, seed, query, grad, to, grad_query, window, room, lanes)
        _to_frames(p, s, to, query, at_address(room.slopes, lanes), grad_query, lanes)


@compiled
def _split(s):
    """Whether dropout falls on single pairs of query and key frame."""
    return s.threshold > 0 and s.tied_out and not s.tied_key


@compiled
def _weigh(p, s, lists, start, edges, seed, query, grad, room, average, lanes):
    """Compute inner and outer weights, U and x of a chunk of edges, and, if ``average``, add up W x."""
    stay_apart()
    wide = len(lanes)
    for e in range(edges):
        edge = start + e
        source = integer_at(lists.source, edge)
        prefetch_source(p, s, lists, edge + 1, start + edges, lanes)
        kind = integer_at(lists.kind, edge) if s.indexed else edge
        weights = row(at_address(room.inner, lanes), e, s.queries * s.columns * wide)
        weight, steep = (
            row(at_address(room.outer, lanes), e, s.pairs * wide),
            row(at_address(room.slant, lanes), e, s.pairs * wide),
        )
        value = row(at_address(room.values, lanes), e, s.queries * s.width * wide)
        share = row(at_address(room.shares, lanes), e, s.queries * wide)
        behind = at_address(room.masked, lanes) if _split(s) else weights
        edge_weights(
            p,
            s,
            query,
            source,
            kind,
            edge,
            seed,
            at_address(room.base, lanes),
            at_address(room.stage, lanes),
            weights,
            behind,
            at_address(room.small, lanes),
            weight,
            lanes,
        )
        edge_values(p, s, source, behind, value, lanes)
        row_sums(s, behind, share, lanes)
        _normalized(s, weight, at_address(room.level, lanes), at_address(room.small, lanes), lanes)
        y = pulled_back(p, s, grad, kind, at_address(room.pulled, lanes), at_address(room.shift, lanes), lanes)
        outer_gradients(s, y, at_address(room.shift, lanes), value, share, steep, lanes)
        if s.threshold > 0 and not _split(s):
            outer_dropout(s, steep, edge, seed, lanes)
        if average:
            for pair in range(s.pairs):
                at = pair * wide
                mean = load(at_address(room.mean, lanes), at, lanes)
                store(
                    at_address(room.mean, lanes),
                    at,
                    multiply_add(load(weight, at, lanes), load(steep, at, lanes), mean),
                )


@compiled
def _spread(p, s, lists, edge, ahead, e, seed, query, grad, to, grad_query, window, room, lanes):
    """Add the gradients of one edge to where they belong."""
    stay_apart()
    wide = len(lanes)
    source = integer_at(lists.source, edge)
    if ahead >= 0:
        prefetch_row(at_address(to.key, lanes), ahead - window, s.keys * s.depth * wide)
        prefetch_row(at_address(to.value, lanes), ahead - window, s.keys * s.width * wide)
    kind = integer_at(lists.kind, edge) if s.indexed else edge
    weights = row(at_address(room.inner, lanes), e, s.queries * s.columns * wide)
    weight, steep = (
        row(at_address(room.outer, lanes), e, s.pairs * wide),
        row(at_address(room.slant, lanes), e, s.pairs * wide),
    )
    value, share = (
        row(at_address(room.values, lanes), e, s.queries * s.width * wide),
        row(at_address(room.shares, lanes), e, s.queries * wide),
    )
    for pair in range(s.pairs):
        at = pair * wide
        lean = load(steep, at, lanes) - load(at_address(room.mean, lanes), at, lanes)
        store(steep, at, load(weight, at, lanes) * lean)
    if s.threshold > 0 and not _split(s):
        outer_dropout(s, weight, edge, seed, lanes)
    y = pulled_back(p, s, grad, kind, at_address(room.pulled, lanes), at_address(room.shift, lanes), lanes)
    if s.has_psi or s.has_beta:
        value_table_gradients(s, to, kind, grad, weight, value, share, lanes)
    frame_gradients(p, s, source, y, weight, at_address(room.back, lanes), at_address(room.slope, lanes), lanes)
    inner_gradients(
        s,
        at_address(room.shift, lanes),
        weights,
        weight,
        steep,
        value,
        share,
        at_address(room.back, lanes),
        at_address(room.slope, lanes),
        edge,
        seed,
        _split(s),
        lanes,
    )
    _to_source(s, to, source - window, query, weights, room, edge, seed, lanes)
    _to_query(
        s,
        row(at_address(p.key, lanes), source, s.keys * s.depth * wide),
        at_address(room.slope, lanes),
        grad_query,
        lanes,
    )
    if s.has_rho:
        rho_gradients(
            p, s, to, kind, query, steep, at_address(room.stage, lanes), at_address(room.turn, lanes), grad_query, lanes
        )
    if s.has_bias:
        bias_gradients(s, to, kind, at_address(room.slope, lanes), steep, lanes)
    add_row(at_address(room.slopes, lanes), at_address(room.slope, lanes), s.queries * s.columns, lanes)


@compiled
def _levels(s, norm, degree, level, lanes):
    """What the exponent of an outer weight subtracts."""
    for pair in range(s.pairs):
        at = pair * len(lanes)
        if s.normalize == SOFTMAX:
            store(level, at, load(norm, at, lanes))
        else:
            store(level, at, fill(level, start_level(s, degree), lanes))


@compiled
def _normalized(s, outer, level, mass, lanes):
    stay_apart()
    wide = len(lanes)
    for pair in range(s.pairs):
        at = pair * wide
        weight = exp(load(outer, at, lanes) - load(level, at, lanes))
        store(outer, at, weight * load(mass, pair % s.queries * wide, lanes))


@compiled
def _to_source(s, to, place, query, inner, room, edge, seed, lanes):
    """Gradients of key and value at the source of an edge."""
    stay_apart()
    wide = len(lanes)
    depth, width = s.depth * wide, s.width * wide
    slope, back, masked = at_address(room.slope, lanes), at_address(room.back, lanes), at_address(room.masked, lanes)
    key, value = (
        row(at_address(to.key, lanes), place, s.keys * depth),
        row(at_address(to.value, lanes), place, s.keys * width),
    )
    if s.tied_key:
        for g in range(s.queries):
            scale_row(row(key, g, depth), row(query, g, depth), load(slope, g * wide, lanes), s.depth, lanes)
            scale_row(row(value, g, width), row(back, g, width), load(inner, g * wide, lanes), s.width, lanes)
        return
    weights = inner
    if _split(s):
        for pair in range(s.queries * s.columns):
            kept = dropout_factor(s, inner, seed, edge * s.queries * s.columns + pair, lanes)
            store(masked, pair * wide, load(inner, pair * wide, lanes) * kept)
        weights = masked
    combine(slope, wide, s.keys * wide, s.keys, s.queries, query, depth, s.depth, True, key, depth, lanes)
    combine(weights, wide, s.keys * wide, s.keys, s.queries, back, width, s.width, True, value, width, lanes)


@compiled
def _to_query(s, key, slope, grad_query, lanes):
    stay_apart()
    wide = len(lanes)
    size = s.depth * wide
    if s.tied_key:
        for g in range(s.queries):
            scale_row(row(grad_query, g, size), row(key, g, size), load(slope, g * wide, lanes), s.depth, lanes)
        return
    combine(slope, s.keys * wide, wide, s.queries, s.keys, key, size, s.depth, True, grad_query, size, lanes)


@compiled
def _to_frames(p, s, to, query, slopes, grad_query, lanes):
    """Gradients through the scores that all edges of a point share."""
    stay_apart()
    wide = len(lanes)
    size = s.depth * wide
    for g in range(s.queries):
        for m in range(s.columns):
            slope = load(slopes, (g * s.columns + m) * wide, lanes)
            pair = g * s.keys + (g if s.tied_key else m)
            if s.has_fiber_bias:
                store(
                    at_address(to.fiber_bias, lanes),
                    pair * wide,
                    load(at_address(to.fiber_bias, lanes), pair * wide, lanes) + slope,
                )
            if s.has_fiber_key:
                scale_row(row(at_address(to.fiber_key, lanes), pair, size), row(query, g, size), slope, s.depth, lanes)
                scale_row(
                    row(grad_query, g, size), row(at_address(p.fiber_key, lanes), pair, size), slope, s.depth, lanes
                )
