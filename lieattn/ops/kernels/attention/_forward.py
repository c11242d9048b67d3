# mypy: allow-untyped-defs
"""Forward pass: for every target, a softmax over its edges with a running maximum."""

import math

import numpy as np

from lieattn.ops.kernels.attention._edges import (
    EXP_MEAN,
    MEAN,
    SOFTMAX,
    dropout_factor,
    edge_signals,
    edge_values,
    edge_weights,
    make_signals,
    point_scores,
    prefetch_source,
    row_sums,
)
from lieattn.ops.kernels.vectors._products import combine, compiled, row, set_all
from lieattn.ops.kernels.vectors._vectors import (
    at_address,
    exp,
    fill,
    integer_at,
    load,
    maximum,
    multiply_add,
    stay_apart,
    store,
)


@compiled
def forward(p, s, lists, first, last, seed, out, top, total, scratch, lanes):
    """Attend from the targets ``first`` to ``last``.

    Writes ``out`` [points, outs, width] and, for the softmax, maximum ``top`` and sum ``total`` of the exponentials
    for each pair of frames, [points, pairs]; leaves the entries of points without edges alone.
    """
    wide = len(lanes)
    sums = at_address(scratch.sums, lanes)
    for target in range(first, last):
        begin, end = integer_at(lists.row_ptr, target), integer_at(lists.row_ptr, target + 1)
        if begin == end:
            continue
        query = row(at_address(p.query, lanes), target, s.queries * s.depth * wide)
        point_scores(p, s, query, at_address(scratch.base, lanes), lanes)
        here = row(at_address(top, lanes), target, s.pairs * wide)
        norm = row(at_address(total, lanes), target, s.pairs * wide)
        set_all(here, s.pairs, start_level(s, end - begin), lanes)
        set_all(norm, s.pairs, 0.0, lanes)
        set_all(sums, s.pairs * s.width, 0.0, lanes)
        for start in range(begin, end, s.chunk):
            edges = min(s.chunk, end - start)
            _weigh(p, s, lists, start, edges, end, seed, query, scratch, lanes)
            for g in range(s.queries):
                _outer_weights(s, g, start, edges, seed, scratch, here, norm, lanes)
                if not s.has_psi and not s.has_beta:
                    _add_values(s, g, edges, scratch, lanes)
            if s.has_psi or s.has_beta:
                _add_affine_values(p, s, lists, start, edges, scratch, lanes)
        _close(s, sums, norm, row(at_address(out, lanes), target, s.outs * s.width * wide), lanes)


@compiled
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


@compiled
def start_level(s, degree):
    """What is subtracted from the scores at first, and for good where the normalization is the number of keys."""
    if s.normalize == SOFTMAX:
        return -3.0e38
    if s.normalize == EXP_MEAN or s.normalize == MEAN:
        return math.log(np.float64(degree * s.columns))
    return 0.0


@compiled
def odd(vectors):
    """Odd row length: with a power of two, the entries of a column would share few cache lines."""
    return vectors | 1


@compiled
def _outer_weights(s, g, start, edges, seed, scratch, top, total, lanes):
    """Turn the outer scores of query frame g into weights relative to the running maximum; rescale what was summed."""
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


@compiled
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


@compiled
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


@compiled
def _close(s, sums, total, out, lanes):
    """Normalize, and sum over the query frames where the output frame is another."""
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
