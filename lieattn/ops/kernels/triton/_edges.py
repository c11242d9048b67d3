"""What the forward and backward kernels of Triton compute alike: the weights of one edge.

For query frame g and key frame m, c[g, m] is the part of the score that does not see the output frame h, and
p[h, g] the part that does:

    inner[g, m] = softmax_m(c),  outer[h, g] = p + logsumexp_m c,  weight = inner · exp(outer - norm[h, g]).
"""

import triton
import triton.language as tl

from lieattn.ops.kernels.triton._tiles import (
    combine,
    dot_products,
    kept_keys,
    kept_pairs,
    norm_places,
    signal_tile,
    table_tile,
)


@triton.jit
def _inner_scores(p, strides, s, query, base, source, kind, head):  # type: ignore[no-untyped-def]
    score = base
    if p.query is not None:
        key = signal_tile(p.key, source, head, s.keys, s.heads, s.depth, s.K, s.D, s.dtype)
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
        level = tl.max(score, 1)
        inner = tl.exp(score - level[:, None])
        mass = tl.sum(inner, 1)
        return inner / mass[:, None], outer + (level + tl.log(mass))[None, :]
    else:
        # Output and query frame are one here: these weights are sums, not products.
        return tl.where(columns, score + tl.sum(outer, 0)[:, None], 0.0), tl.zeros([s.P, s.G], s.dtype)


@triton.jit
def levels(strides, s, lists, norm, point, head):  # type: ignore[no-untyped-def]
    """What the exponent of an outer weight subtracts, [P, G]; infinite in the padding."""
    at, exists = norm_places(s, point, head)
    if s.softmax:
        level = tl.load(norm + at, mask=exists, other=0.0).to(s.dtype)
    else:
        level = tl.zeros([s.P, s.G], s.dtype)
        if s.counted:
            degree = tl.load(lists.row_ptr + point + 1) - tl.load(lists.row_ptr + point)
            level += tl.log(tl.maximum(degree * s.columns, 1).to(s.dtype))
    return tl.where(exists, level, float("inf"))


@triton.jit
def fiber_values(p, s, weights, source, head):  # type: ignore[no-untyped-def]
    """Σ_m weights[g, m] v[m], [G, W]."""
    value = signal_tile(p.value, source, head, s.keys, s.heads, s.width, s.K, s.W, s.dtype)
    if s.tied_key:
        return weights * value
    else:
        return combine(weights, value, s.dot_keys, s.precision, s.dtype)


@triton.jit
def to_outputs(s, weight, rows):  # type: ignore[no-untyped-def]
    """Σ_g weight[h, g] rows[g], [O, *]."""
    if s.tied_out:
        return tl.sum(weight, 0)[:, None] * rows
    else:
        return combine(weight, rows, s.dot_pairs, s.precision, s.dtype)


@triton.jit
def to_queries(s, weight, rows):  # type: ignore[no-untyped-def]
    """Σ_h weight[h, g] rows[h], [G, *]."""
    if s.tied_out:
        return tl.sum(weight, 0)[:, None] * rows
    else:
        return combine(tl.trans(weight), rows, s.dot_pairs, s.precision, s.dtype)


@triton.jit
def shares_of_outputs(s, weight, share):  # type: ignore[no-untyped-def]
    """Σ_g weight[h, g] share[g], [O]."""
    if s.tied_out:
        return tl.sum(weight, 0) * share
    else:
        return tl.sum(weight * share[None, :], 1)


@triton.jit
def message(p, strides, s, inner, weight, source, kind, edge, head, draw):  # type: ignore[no-untyped-def]
    """What an edge adds to the output, [O, W], with dropout."""
    if s.dropout == 1:
        inner = inner * kept_keys(s, edge, head, draw)
    if s.dropout == 2:
        weight = weight * kept_pairs(s, edge, head, draw)
    total = to_outputs(s, weight, fiber_values(p, s, inner, source, head))
    if p.psi is not None:
        total = total * table_tile(p.psi, kind, head, strides.psi, s.outs, s.width, s.O, s.W, s.dtype)
    if p.beta is not None:
        beta = table_tile(p.beta, kind, head, strides.beta, s.outs, s.width, s.O, s.W, s.dtype)
        total += shares_of_outputs(s, weight, tl.sum(inner, 1))[:, None] * beta
    return total
