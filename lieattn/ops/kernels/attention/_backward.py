# mypy: allow-untyped-defs
"""Backward pass: one loop over targets that recomputes the weights and distributes their gradients.

Let W[h, g] be the outer weights, inner[g, m] those of the forward pass, U[g] = Σ_m inner v, y[h] = ψ · grad_out[h] and
b[h] = β · grad_out[h]. An edge has

    x[h, g] = ⟨y[h], U[g]⟩ + b[h],                      gradient of W,
    s[h, g] = W (x - Σ_edges W x),                      gradient of the outer score,
    u[g] = Σ_h W y,                                     gradient of U,
    c[g, m] = inner (⟨u[g], v[m]⟩ - ⟨u[g], U[g]⟩ + Σ_h s),   gradient of the inner score,

and all other gradients are products of these with q, k, v and the tables. Each call has its own window of source points
for the gradients of keys and values, and its own arrays for the gradients of tables. No two threads write to the same
place, and the order of sums is fixed.
"""

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import add_row, combine, copy_row, prefetch_row, row, scale_row, set_all
from lieattn.ops.kernels._vectors import (
    add_to,
    add_up,
    at_address,
    exp,
    fill,
    integer_at,
    load,
    maximum,
    multiply_add,
    offset,
    stay_apart,
    store,
)
from lieattn.ops.kernels.attention._forward import (
    EXP_MEAN,
    MEAN,
    NONE,
    SOFTMAX,
    dropout_factor,
    edge_signals,
    edge_values,
    edge_weights,
    frame_products,
    make_signals,
    outer_dropout,
    point_scores,
    positional_keys,
    prefetch_source,
    row_sums,
    start_level,
)


@compiled
def backward(p, s, lists, first, last, seed, grad_out, norm, to, window, scratch, lanes):
    """Compute the gradients of the outputs at the targets ``first`` to ``last``.

    ``norm`` is the array written by the forward pass. Gradients are added to the arrays ``to``, which have the shapes
    of the operands; those of key and value begin with the source point ``window``.
    """
    wide = len(lanes)
    grad_at, norm_at = at_address(grad_out, lanes), at_address(norm, lanes)
    for target in range(first, last):
        begin, end = integer_at(lists.row_ptr, target), integer_at(lists.row_ptr, target + 1)
        if begin == end:
            continue
        size = s.queries * s.depth * wide
        query = row(at_address(p.query, lanes), target, size)
        grad_query = row(at_address(to.query, lanes), target, size)
        grad = row(grad_at, target, s.outs * s.width * wide)
        point_scores(p, s, query, at_address(scratch.base, lanes), lanes)
        set_all(at_address(scratch.slopes, lanes), s.queries * s.columns, 0.0, lanes)
        set_all(at_address(scratch.mean, lanes), s.pairs, 0.0, lanes)
        _begin_weights(s, end - begin, row(norm_at, target, 2 * s.pairs * wide), scratch, lanes)
        # The mean of x over all edges is needed before any gradient, so long lists are processed twice.
        if s.normalize == SOFTMAX and end - begin > s.chunk:
            for start in range(begin, end, s.chunk):
                edges = min(s.chunk, end - start)
                _weigh(p, s, lists, start, edges, seed, query, grad, scratch, True, lanes)
        once = s.normalize == SOFTMAX and end - begin <= s.chunk
        for start in range(begin, end, s.chunk):
            edges = min(s.chunk, end - start)
            _weigh(p, s, lists, start, edges, seed, query, grad, scratch, once, lanes)
            for e in range(edges):
                ahead = integer_at(lists.source, start + e + 1) if e + 1 < edges else -1
                _spread(p, s, lists, start + e, ahead, e, seed, query, grad, to, grad_query, window, scratch, lanes)
        _to_frames(p, s, to, query, at_address(scratch.slopes, lanes), grad_query, lanes)


@part
def _of_edge(s, scratch, e, lanes):
    """Return pointers to the data of an edge of a chunk: inner and outer weights, x, U, Σ_m inner, keys and values."""
    wide = len(lanes)
    return (
        row(at_address(scratch.inner, lanes), e, s.queries * s.columns * wide),
        row(at_address(scratch.outer, lanes), e, s.pairs * wide),
        row(at_address(scratch.slant, lanes), e, s.pairs * wide),
        row(at_address(scratch.values, lanes), e, s.queries * s.width * wide),
        row(at_address(scratch.shares, lanes), e, s.queries * wide),
        row(at_address(scratch.made, lanes), e, s.queries * (s.depth + s.width) * wide),
    )


@part
def _weigh(p, s, lists, start, edges, seed, query, grad, scratch, average, lanes):
    """Compute inner and outer weights, U and x of a chunk of edges, and sum W x if ``average``."""
    stay_apart()
    wide = len(lanes)
    for e in range(edges):
        edge = start + e
        source = integer_at(lists.source, edge)
        prefetch_source(p, s, lists, edge + 1, start + edges, lanes)
        kind = integer_at(lists.kind, edge) if s.indexed else edge
        weights, weight, steep, value, share, made = _of_edge(s, scratch, e, lanes)
        behind = at_address(scratch.masked, lanes) if s.split else weights
        base, stage = at_address(scratch.base, lanes), at_address(scratch.stage, lanes)
        small = at_address(scratch.small, lanes)
        if s.pooled:
            make_signals(p, s, source, kind, made, lanes)
        keys, values = edge_signals(p, s, source, made, lanes)
        edge_weights(p, s, query, keys, kind, edge, seed, base, stage, weights, behind, small, weight, lanes)
        edge_values(s, values, behind, value, lanes)
        row_sums(s, behind, share, lanes)
        _normalized(s, weight, at_address(scratch.level, lanes), at_address(scratch.part, lanes), small, lanes)
        y = pulled_back(p, s, grad, kind, at_address(scratch.pulled, lanes), at_address(scratch.shift, lanes), lanes)
        outer_gradients(s, y, at_address(scratch.shift, lanes), value, share, steep, lanes)
        if s.threshold > 0 and not s.split:
            outer_dropout(s, steep, edge, seed, lanes)
        if average:
            mean = at_address(scratch.mean, lanes)
            for at in range(0, s.pairs * wide, wide):
                store(mean, at, multiply_add(load(weight, at, lanes), load(steep, at, lanes), load(mean, at, lanes)))


@part
def _spread(p, s, lists, edge, ahead, e, seed, query, grad, to, grad_query, window, scratch, lanes):
    """Add the gradients of one edge to those of its operands."""
    stay_apart()
    wide = len(lanes)
    source = integer_at(lists.source, edge)
    if ahead >= 0:
        prefetch_row(at_address(to.key, lanes), ahead - window, s.key_frames * s.depth * wide)
        prefetch_row(at_address(to.value, lanes), ahead - window, s.keys * s.width * wide)
    kind = integer_at(lists.kind, edge) if s.indexed else edge
    weights, weight, steep, value, share, made = _of_edge(s, scratch, e, lanes)
    for pair in range(s.pairs):
        at = pair * wide
        lean = load(steep, at, lanes) - load(at_address(scratch.mean, lanes), at, lanes)
        store(steep, at, load(weight, at, lanes) * lean)
    if s.threshold > 0 and not s.split:
        outer_dropout(s, weight, edge, seed, lanes)
    y = pulled_back(p, s, grad, kind, at_address(scratch.pulled, lanes), at_address(scratch.shift, lanes), lanes)
    if s.has_psi or s.has_beta:
        value_table_gradients(s, to, kind, grad, weight, value, share, lanes)
    shift, back = at_address(scratch.shift, lanes), at_address(scratch.back, lanes)
    slope = at_address(scratch.slope, lanes)
    keys, values = edge_signals(p, s, source, made, lanes)
    frame_gradients(s, values, y, weight, back, slope, lanes)
    inner_gradients(s, shift, weights, weight, steep, value, share, back, slope, edge, seed, lanes)
    _to_source(p, s, to, source, window, kind, query, weights, scratch, edge, seed, lanes)
    _to_query(s, keys, slope, grad_query, lanes)
    if s.has_rho:
        stage, turn = at_address(scratch.stage, lanes), at_address(scratch.turn, lanes)
        rho_gradients(p, s, to, kind, query, steep, stage, turn, grad_query, lanes)
    if s.has_bias:
        bias_gradients(s, to, kind, slope, steep, lanes)
    add_row(at_address(scratch.slopes, lanes), slope, s.queries * s.columns, lanes)


@part
def _begin_weights(s, degree, norm, scratch, lanes):
    """Write the numbers that are subtracted from exponents of outer weights, and the factors of the exponentials."""
    stay_apart()
    wide = len(lanes)
    level, part = at_address(scratch.level, lanes), at_address(scratch.part, lanes)
    if s.normalize != SOFTMAX:
        set_all(level, s.pairs, start_level(s, degree, level), lanes)
        set_all(part, s.pairs, 1.0, lanes)
        return
    copy_row(level, norm, s.pairs * wide, lanes)
    # Sums are at least one, but zero in unused lanes, where results must also be finite.
    one, total = fill(norm, 1.0, lanes), offset(norm, s.pairs * wide)
    for at in range(0, s.pairs * wide, wide):
        store(part, at, one / maximum(load(total, at, lanes), one))


@part
def _normalized(s, outer, level, part, mass, lanes):
    """Convert outer scores to weights."""
    stay_apart()
    wide = len(lanes)
    for pair in range(s.pairs):
        at = pair * wide
        weight = exp(load(outer, at, lanes) - load(level, at, lanes)) * load(part, at, lanes)
        store(outer, at, weight * load(mass, pair % s.queries * wide, lanes))


@part
def _to_source(p, s, to, source, window, kind, query, inner, scratch, edge, seed, lanes):
    """Add the gradients of key and value at the source of an edge."""
    stay_apart()
    wide = len(lanes)
    depth, width = s.depth * wide, s.width * wide
    slope, back = at_address(scratch.slope, lanes), at_address(scratch.back, lanes)
    masked = at_address(scratch.masked, lanes)
    to_key = row(at_address(to.key, lanes), source - window, s.key_frames * depth)
    to_value = row(at_address(to.value, lanes), source - window, s.keys * width)
    key, value = to_key, to_value
    if s.pooled:
        key, value = edge_signals(p, s, source, at_address(scratch.unmade, lanes), lanes)
        set_all(key, s.queries * (s.depth + s.width), 0.0, lanes)
    if s.tied_key:
        for g in range(s.queries):
            scale_row(row(key, g, depth), row(query, g, depth), load(slope, g * wide, lanes), s.depth, lanes)
            scale_row(row(value, g, width), row(back, g, width), load(inner, g * wide, lanes), s.width, lanes)
        if s.pooled:
            _unmake(p, s, to, source, kind, key, value, to_key, to_value, lanes)
        return
    weights = inner
    if s.split:
        for pair in range(s.queries * s.columns):
            kept = dropout_factor(s, inner, seed, edge * s.queries * s.columns + pair, lanes)
            store(masked, pair * wide, load(inner, pair * wide, lanes) * kept)
        weights = masked
    combine(slope, wide, s.keys * wide, s.keys, s.queries, query, depth, s.depth, True, key, depth, lanes)
    combine(weights, wide, s.keys * wide, s.keys, s.queries, back, width, s.width, True, value, width, lanes)


@part
def _unmake(p, s, to, source, kind, key, value, to_key, to_value, lanes):
    """Compute the backward pass of :func:`make_signals` from the gradients of its results."""
    stay_apart()
    wide = len(lanes)
    at, signal = kind * s.key_psi_type, row(at_address(p.key, lanes), source, s.key_frames * s.depth * wide)
    psi, to_psi = offset(at_address(p.key_psi, lanes), at), offset(at_address(to.key_psi, lanes), at)
    _unmix(
        s, key, s.depth, signal, s.key_frames, s.has_key_psi, psi, s.key_psi_out, s.key_psi_frame, to_key, to_psi, lanes
    )
    at, signal = kind * s.psi_type, row(at_address(p.value, lanes), source, s.keys * s.width * wide)
    psi, to_psi = offset(at_address(p.psi, lanes), at), offset(at_address(to.psi, lanes), at)
    _unmix(s, value, s.width, signal, s.keys, s.mixed_psi, psi, s.psi_out, s.psi_frame, to_value, to_psi, lanes)


@part
def _unmix(s, slope, width, signal, frames, has_psi, psi, psi_out, psi_frame, to_signal, to_psi, lanes):
    wide = len(lanes)
    for h in range(s.queries):
        for d in range(0, width * wide, wide):
            change = load(slope, h * width * wide + d, lanes)
            if not has_psi:
                store(to_signal, d, load(to_signal, d, lanes) + change)
                continue
            for m in range(frames):
                here, there = m * width * wide + d, h * psi_out + m * psi_frame + d
                store(to_psi, there, multiply_add(change, load(signal, here, lanes), load(to_psi, there, lanes)))
                store(to_signal, here, multiply_add(change, load(psi, there, lanes), load(to_signal, here, lanes)))


@part
def _to_query(s, key, slope, grad_query, lanes):
    stay_apart()
    wide = len(lanes)
    size = s.depth * wide
    if s.tied_key:
        for g in range(s.queries):
            scale_row(row(grad_query, g, size), row(key, g, size), load(slope, g * wide, lanes), s.depth, lanes)
        return
    combine(slope, s.keys * wide, wide, s.queries, s.keys, key, size, s.depth, True, grad_query, size, lanes)


@part
def _to_frames(p, s, to, query, slopes, grad_query, lanes):
    """Add the gradients through the scores that all edges of a point share."""
    stay_apart()
    wide = len(lanes)
    size = s.depth * wide
    for g in range(s.queries):
        for m in range(s.columns):
            slope = load(slopes, (g * s.columns + m) * wide, lanes)
            pair = g * s.keys + (g if s.tied_key else m)
            if s.has_fiber_bias:
                table = at_address(to.fiber_bias, lanes)
                store(table, pair * wide, load(table, pair * wide, lanes) + slope)
            if s.has_fiber_key:
                key = row(at_address(p.fiber_key, lanes), pair, size)
                scale_row(row(at_address(to.fiber_key, lanes), pair, size), row(query, g, size), slope, s.depth, lanes)
                scale_row(row(grad_query, g, size), key, slope, s.depth, lanes)


@part
def pulled_back(p, s, grad, kind, pulled, shift, lanes):
    """Return y = ψ · grad_out, [outs, width], and write b = β · grad_out to ``shift``, [outs]."""
    stay_apart()
    wide = len(lanes)
    if s.has_beta:
        for h in range(s.outs):
            total = fill(shift, 0.0, lanes)
            for d in range(s.width):
                beta = load(at_address(p.beta, lanes), kind * s.beta_type + h * s.beta_out + d * wide, lanes)
                total = multiply_add(beta, load(grad, (h * s.width + d) * wide, lanes), total)
            store(shift, h * wide, total)
    if not s.has_psi:
        return grad
    for h in range(s.outs):
        for d in range(s.width):
            psi = load(at_address(p.psi, lanes), kind * s.psi_type + h * s.psi_out + d * wide, lanes)
            at = (h * s.width + d) * wide
            store(pulled, at, psi * load(grad, at, lanes))
    return pulled


@part
def outer_gradients(s, y, shift, values, shares, x, lanes):
    """Compute x[h, g] = ⟨y[h], U[g]⟩ + b[h] Σ_m inner."""
    stay_apart()
    wide = len(lanes)
    frame_products(s.tied_out, y, s.outs, values, s.width * wide, s.queries, s.width, False, x, lanes)
    if s.has_beta:
        for pair in range(s.pairs):
            h, g = (pair if s.tied_out else pair // s.queries), pair % s.queries
            b, share = load(shift, h * wide, lanes), load(shares, g * wide, lanes)
            store(x, pair * wide, multiply_add(b, share, load(x, pair * wide, lanes)))


@part
def frame_gradients(s, value, y, outer, back, slope, lanes):
    """Write u to ``back`` and ⟨u, v⟩ to ``slope``."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    if s.tied_out:
        for g in range(s.queries):
            set_all(row(back, g, size), s.width, 0.0, lanes)
            scale_row(row(back, g, size), row(y, g, size), load(outer, g * wide, lanes), s.width, lanes)
    else:
        combine(outer, wide, s.queries * wide, s.queries, s.outs, y, size, s.width, False, back, size, lanes)
    frame_products(s.tied_key, back, s.queries, value, size, s.keys, s.width, False, slope, lanes)


@part
def inner_gradients(s, shift, inner, outer, steep, values, shares, back, slope, edge, seed, lanes):
    """Replace ⟨u, v⟩ in ``slope`` by c. If weights are sums, also write the gradient of p to ``steep``."""
    stay_apart()
    wide = len(lanes)
    product = s.normalize == SOFTMAX or s.normalize == EXP_MEAN
    for g in range(s.queries):
        moved, lean = _frame_sums(s, g, shift, outer, steep, lanes)
        if product and s.columns == 1:  # ⟨u, v⟩ = ⟨u, U⟩, whose difference would be a rounding error
            store(slope, g * wide, lean)
            continue
        middle = fill(slope, 0.0, lanes)
        if product:
            middle = moved * load(shares, g * wide, lanes) - lean
            for d in range(s.width):
                at = (g * s.width + d) * wide
                middle = multiply_add(load(back, at, lanes), load(values, at, lanes), middle)
        total = fill(slope, 0.0, lanes)
        for m in range(s.columns):
            at = (g * s.columns + m) * wide
            change = load(slope, at, lanes) + moved
            if s.split:
                change = change * dropout_factor(s, slope, seed, (edge * s.queries + g) * s.columns + m, lanes)
            if product:
                change = load(inner, at, lanes) * (change - middle)
            store(slope, at, change)
            total = total + change
        if not product:
            store(steep, g * wide, total)


@part
def _frame_sums(s, g, shift, outer, steep, lanes):
    """Return Σ_h W b and Σ_h s of a query frame. The first is 0 if it would cancel."""
    wide = len(lanes)
    summed = s.has_beta and (s.split or s.normalize == MEAN or s.normalize == NONE)
    moved, lean = fill(outer, 0.0, lanes), fill(outer, 0.0, lanes)
    for h in range(g if s.tied_out else 0, g + 1 if s.tied_out else s.outs):
        at = (h if s.tied_out else h * s.queries + g) * wide
        lean = lean + load(steep, at, lanes)
        if summed:
            moved = multiply_add(load(outer, at, lanes), load(shift, h * wide, lanes), moved)
    return moved, lean


@part
def rho_gradients(p, s, to, kind, query, steep, stage, turn, grad_query, lanes):
    """Add the gradients through ⟨q, ρ⟩ to those of the query and the table."""
    stay_apart()
    wide = len(lanes)
    size = s.depth * wide
    rho, rho_out = positional_keys(p, s, kind, stage, lanes)
    table = at_address(to.rho, lanes)
    if s.tied_out:
        for g in range(s.queries):
            slope = load(steep, g * wide, lanes)
            scale_row(row(grad_query, g, size), offset(rho, g * rho_out), slope, s.depth, lanes)
            set_all(row(turn, g, size), s.depth, 0.0, lanes)
            scale_row(row(turn, g, size), row(query, g, size), slope, s.depth, lanes)
    else:
        stride = s.queries * wide
        combine(steep, wide, stride, s.queries, s.outs, rho, rho_out, s.depth, True, grad_query, size, lanes)
        if not s.rho_shared:
            table = offset(table, kind * s.rho_type)
            combine(steep, stride, wide, s.outs, s.queries, query, size, s.depth, True, table, s.rho_out, lanes)
            return
        combine(steep, stride, wide, s.outs, s.queries, query, size, s.depth, False, turn, size, lanes)
    for h in range(s.outs):
        for d in range(s.depth):
            change = load(turn, h * size + d * wide, lanes)
            if s.rho_shared:
                add_to(table, kind * s.rho_type + h * s.rho_out + d, add_up(change))
            else:
                at = kind * s.rho_type + h * s.rho_out + d * wide
                store(table, at, load(table, at, lanes) + change)


@part
def bias_gradients(s, to, kind, slope, steep, lanes):
    """Add the gradient of the bias of the displacement."""
    stay_apart()
    wide, table = len(lanes), at_address(to.bias, lanes)
    if s.bias_key == 0:
        for pair in range(s.pairs):
            h = pair if s.tied_out else pair // s.queries
            at = kind * s.bias_type + h * s.bias_out
            store(table, at, load(table, at, lanes) + load(steep, pair * wide, lanes))
        return
    for g in range(s.queries):
        for m in range(s.columns):
            at = kind * s.bias_type + g * s.bias_out + m * s.bias_key
            change = load(slope, (g * s.columns + m) * wide, lanes)
            store(table, at, load(table, at, lanes) + change)


@part
def value_table_gradients(s, to, kind, grad, outer, values, shares, lanes):
    """Add the gradients of ψ and β."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    for pair in range(s.pairs):
        h, g = (pair if s.tied_out else pair // s.queries), pair % s.queries
        weight = load(outer, pair * wide, lanes)
        share = weight * load(shares, g * wide, lanes)
        for d in range(s.width):
            slope = load(grad, h * size + d * wide, lanes)
            if s.has_psi:
                at = kind * s.psi_type + h * s.psi_out + d * wide
                value = weight * load(values, g * size + d * wide, lanes)
                table = at_address(to.psi, lanes)
                store(table, at, multiply_add(slope, value, load(table, at, lanes)))
            if s.has_beta:
                at = kind * s.beta_type + h * s.beta_out + d * wide
                table = at_address(to.beta, lanes)
                store(table, at, multiply_add(slope, share, load(table, at, lanes)))
