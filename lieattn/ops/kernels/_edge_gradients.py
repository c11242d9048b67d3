# mypy: allow-untyped-defs
"""Gradients at one edge, in the letters of the backward pass."""

from lieattn.ops.kernels._edges import dropout_factor, positional_keys
from lieattn.ops.kernels._problem import EXP_MEAN, SOFTMAX
from lieattn.ops.kernels._products import combine, compiled, dot_products, row, scale_row, set_all
from lieattn.ops.kernels._vectors import add_to, add_up, at_address, fill, load, multiply_add, offset, stay_apart, store


@compiled
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


@compiled
def outer_gradients(s, y, shift, values, shares, x, lanes):
    """x[h, g] = ⟨y[h], U[g]⟩ + b[h] Σ_m inner."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    if s.tied_out:
        for g in range(s.queries):
            at, place = row(y, g, size), row(x, g, wide)
            dot_products(at, 0, 1, row(values, g, size), 0, 1, s.width, False, place, 0, 0, lanes)
    else:
        dot_products(y, size, s.outs, values, size, s.queries, s.width, False, x, s.queries * wide, wide, lanes)
    if s.has_beta:
        for pair in range(s.pairs):
            h, g = (pair if s.tied_out else pair // s.queries), pair % s.queries
            b, share = load(shift, h * wide, lanes), load(shares, g * wide, lanes)
            store(x, pair * wide, multiply_add(b, share, load(x, pair * wide, lanes)))


@compiled
def frame_gradients(p, s, source, y, outer, back, slope, lanes):
    """Write u to ``back`` and ⟨u, v⟩ to ``slope``."""
    stay_apart()
    wide = len(lanes)
    size = s.width * wide
    value = row(at_address(p.value, lanes), source, s.keys * size)
    if s.tied_out:
        for g in range(s.queries):
            set_all(row(back, g, size), s.width, 0.0, lanes)
            scale_row(row(back, g, size), row(y, g, size), load(outer, g * wide, lanes), s.width, lanes)
    else:
        combine(outer, wide, s.queries * wide, s.queries, s.outs, y, size, s.width, False, back, size, lanes)
    if s.tied_key:
        for g in range(s.queries):
            at, place = row(back, g, size), row(slope, g, wide)
            dot_products(at, 0, 1, row(value, g, size), 0, 1, s.width, False, place, 0, 0, lanes)
    else:
        dot_products(back, size, s.queries, value, size, s.keys, s.width, False, slope, s.keys * wide, wide, lanes)


@compiled
def inner_gradients(s, shift, inner, outer, steep, values, shares, back, slope, edge, seed, split, lanes):
    """Turn ⟨u, v⟩ in ``slope`` into c; for weights that are sums, write the gradient of p to ``steep``."""
    stay_apart()
    wide = len(lanes)
    product = s.normalize == SOFTMAX or s.normalize == EXP_MEAN
    for g in range(s.queries):
        moved, lean = _frame_sums(s, g, shift, outer, steep, lanes)
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
            if split:
                change = change * dropout_factor(s, slope, seed, (edge * s.queries + g) * s.columns + m, lanes)
            if product:
                change = load(inner, at, lanes) * (change - middle)
            store(slope, at, change)
            total = total + change
        if not product:
            store(steep, g * wide, total)


@compiled
def _frame_sums(s, g, shift, outer, steep, lanes):
    """Σ_h W b and Σ_h s of a query frame."""
    wide = len(lanes)
    moved, lean = fill(outer, 0.0, lanes), fill(outer, 0.0, lanes)
    for h in range(g if s.tied_out else 0, g + 1 if s.tied_out else s.outs):
        at = (h if s.tied_out else h * s.queries + g) * wide
        lean = lean + load(steep, at, lanes)
        if s.has_beta:
            moved = multiply_add(load(outer, at, lanes), load(shift, h * wide, lanes), moved)
    return moved, lean


@compiled
def rho_gradients(p, s, to, kind, query, steep, stage, turn, grad_query, lanes):
    """Gradients through ⟨q, ρ⟩, to the query and to the table."""
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


@compiled
def bias_gradients(s, to, kind, slope, steep, lanes):
    """Gradient of the bias of the displacement."""
    stay_apart()
    wide = len(lanes)
    if s.bias_key == 0:
        for pair in range(s.pairs):
            h = pair if s.tied_out else pair // s.queries
            at = kind * s.bias_type + h * s.bias_out
            store(
                at_address(to.bias, lanes),
                at,
                load(at_address(to.bias, lanes), at, lanes) + load(steep, pair * wide, lanes),
            )
        return
    for g in range(s.queries):
        for m in range(s.columns):
            at = kind * s.bias_type + g * s.bias_out + m * s.bias_key
            change = load(slope, (g * s.columns + m) * wide, lanes)
            store(at_address(to.bias, lanes), at, load(at_address(to.bias, lanes), at, lanes) + change)


@compiled
def value_table_gradients(s, to, kind, grad, outer, values, shares, lanes):
    """Gradients of ψ and β."""
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
                store(
                    at_address(to.psi, lanes),
                    at,
                    multiply_add(slope, value, load(at_address(to.psi, lanes), at, lanes)),
                )
            if s.has_beta:
                at = kind * s.beta_type + h * s.beta_out + d * wide
                store(
                    at_address(to.beta, lanes),
                    at,
                    multiply_add(slope, share, load(at_address(to.beta, lanes), at, lanes)),
                )
