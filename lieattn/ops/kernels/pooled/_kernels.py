# mypy: allow-untyped-defs
"""Kernels of the pattern ``"pooled"``: affine keys and values of a neighbor are made edge by edge and never stored."""

from typing import NamedTuple

from lieattn.ops.kernels.vectors._products import compiled, row, set_all
from lieattn.ops.kernels.vectors._vectors import (
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


class PooledSizes(NamedTuple):
    """Sizes, strides in elements, and switches. A stride of 0 stands for an axis of size 1 that serves all entries."""

    outs: int
    query_out: int
    depth: int  # channels of queries and keys
    width: int  # channels of values
    key_frames: int  # 1 where the keys were summed over their fiber
    value_frames: int
    has_key_psi: int
    key_psi_type: int
    key_psi_out: int
    key_psi_frame: int
    has_rho: int
    rho_type: int
    rho_out: int
    has_psi: int
    psi_type: int
    psi_out: int
    psi_frame: int
    has_beta: int
    beta_type: int
    beta_out: int
    has_bias: int
    bias_type: int
    bias_out: int
    indexed: int  # edges name the row of the tables
    degree: int  # largest number of edges of a target


class PooledOperands(NamedTuple):
    """Addresses; the same names serve the gradients. Absent operands are never read."""

    query: int
    key: int
    value: int
    key_psi: int
    rho: int
    psi: int
    beta: int
    bias: int


class PooledScratch(NamedTuple):
    """Scratch of a call: vectors in each of its parts, or where in memory the parts begin."""

    weights: int
    keys: int
    values: int
    key_slope: int
    value_slope: int
    delta: int


def pooled_scratch(s: PooledSizes) -> PooledScratch:
    """How much scratch a call needs."""
    return PooledScratch(s.degree * s.outs, s.depth, s.width, s.depth, s.width, s.outs)


@compiled
def affine(result, width, signal, frames, has_psi, psi, frame_step, has_shift, shift, lanes):
    """Compute ``result[d] = shift[d] + Σ_m psi[m, d] signal[m, d]``."""
    wide = len(lanes)
    for at in range(0, width * wide, wide):
        total = load(shift, at, lanes) if has_shift else fill(result, 0.0, lanes)
        if has_psi:
            for m in range(frames):
                total = multiply_add(
                    load(psi, m * frame_step + at, lanes), load(signal, m * width * wide + at, lanes), total
                )
        else:
            total = total + load(signal, at, lanes)
        store(result, at, total)


@compiled
def affine_gradients(
    slope, width, signal, frames, has_psi, psi, frame_step, has_shift, grad_signal, grad_psi, grad_shift, lanes
):
    """Add the gradients of :func:`affine`, ``slope`` being that of its result."""
    wide = len(lanes)
    for at in range(0, width * wide, wide):
        change = load(slope, at, lanes)
        if has_shift:
            store(grad_shift, at, load(grad_shift, at, lanes) + change)
        if not has_psi:
            store(grad_signal, at, load(grad_signal, at, lanes) + change)
            continue
        for m in range(frames):
            here, there = m * width * wide + at, m * frame_step + at
            store(grad_psi, there, multiply_add(change, load(signal, here, lanes), load(grad_psi, there, lanes)))
            store(grad_signal, here, multiply_add(change, load(psi, there, lanes), load(grad_signal, here, lanes)))


@compiled
def products(x, y, width, total, lanes):
    """Sum of the products of two rows of vectors, added to ``total``."""
    wide = len(lanes)
    for at in range(0, width * wide, wide):
        total = multiply_add(load(x, at, lanes), load(y, at, lanes), total)
    return total


@compiled
def key_at(p, s, source, kind, h, result, lanes):
    """Key that the output frame h sees at an edge."""
    affine(
        result, s.depth, row(at_address(p.key, lanes), source, s.key_frames * s.depth * len(lanes)), s.key_frames,
        s.has_key_psi, offset(at_address(p.key_psi, lanes), kind * s.key_psi_type + h * s.key_psi_out),
        s.key_psi_frame, s.has_rho, offset(at_address(p.rho, lanes), kind * s.rho_type + h * s.rho_out), lanes,
    )  # fmt: skip


@compiled
def value_at(p, s, source, kind, h, result, lanes):
    """Value that the output frame h sees at an edge."""
    affine(
        result, s.width, row(at_address(p.value, lanes), source, s.value_frames * s.width * len(lanes)),
        s.value_frames, s.has_psi, offset(at_address(p.psi, lanes), kind * s.psi_type + h * s.psi_out),
        s.psi_frame, s.has_beta, offset(at_address(p.beta, lanes), kind * s.beta_type + h * s.beta_out), lanes,
    )  # fmt: skip


@compiled
def score_at(p, s, query, keys, kind, h, lanes):
    """Score of the key in ``keys``."""
    start = fill(keys, 0.0, lanes)
    if s.has_bias:
        start = load(at_address(p.bias, lanes), kind * s.bias_type + h * s.bias_out, lanes)
    return products(offset(query, h * s.query_out), keys, s.depth, start, lanes)


@compiled
def pooled_forward(p, s, lists, first, last, out, top, total, scratch, lanes):
    """Attend from the targets ``first`` to ``last``.

    Writes ``out`` [points, outs, width] and maximum ``top`` and sum ``total`` of the exponentials, [points, outs];
    leaves the entries of points without edges alone.
    """
    wide = len(lanes)
    weights = at_address(scratch.weights, lanes)
    keys, values = at_address(scratch.keys, lanes), at_address(scratch.values, lanes)
    for target in range(first, last):
        begin, end = integer_at(lists.row_ptr, target), integer_at(lists.row_ptr, target + 1)
        if begin == end:
            continue
        query = row(at_address(p.query, lanes), target, query_size(s) * wide)
        for edge in range(begin, end):
            source = integer_at(lists.source, edge)
            kind = integer_at(lists.kind, edge) if s.indexed else edge
            for h in range(s.outs):
                key_at(p, s, source, kind, h, keys, lanes)
                store(weights, ((edge - begin) * s.outs + h) * wide, score_at(p, s, query, keys, kind, h, lanes))
        here = row(at_address(top, lanes), target, s.outs * wide)
        normalize(weights, end - begin, s.outs, here, row(at_address(total, lanes), target, s.outs * wide), lanes)
        sums = row(at_address(out, lanes), target, s.outs * s.width * wide)
        for edge in range(begin, end):
            source = integer_at(lists.source, edge)
            kind = integer_at(lists.kind, edge) if s.indexed else edge
            for h in range(s.outs):
                value_at(p, s, source, kind, h, values, lanes)
                weight = load(weights, ((edge - begin) * s.outs + h) * wide, lanes)
                add_weighted(sums, h * s.width * wide, weight, values, s.width, lanes)


@compiled
def query_size(s):
    """Vectors of the query of a point."""
    return s.depth if s.query_out == 0 else s.outs * s.depth


@compiled
def add_weighted(sums, start, weight, values, width, lanes):
    """Add weighted vectors to those from ``start`` on."""
    wide = len(lanes)
    for at in range(0, width * wide, wide):
        store(sums, start + at, multiply_add(weight, load(values, at, lanes), load(sums, start + at, lanes)))


@compiled
def scale(result, weight, values, width, lanes):
    """Weighted vectors."""
    for at in range(0, width * len(lanes), len(lanes)):
        store(result, at, weight * load(values, at, lanes))


@compiled
def normalize(weights, edges, outs, top, total, lanes):
    """Softmax of scores [edges, outs] over the edges; writes their maximum and the sum of the exponentials."""
    stay_apart()
    wide = len(lanes)
    for h in range(outs):
        level = load(weights, h * wide, lanes)
        for e in range(1, edges):
            level = maximum(level, load(weights, (e * outs + h) * wide, lanes))
        summed = fill(weights, 0.0, lanes)
        for e in range(edges):
            weight = exp(load(weights, (e * outs + h) * wide, lanes) - level)
            store(weights, (e * outs + h) * wide, weight)
            summed = summed + weight
        share = fill(weights, 1.0, lanes) / summed
        for e in range(edges):
            at = (e * outs + h) * wide
            store(weights, at, load(weights, at, lanes) * share)
        store(top, h * wide, level)
        store(total, h * wide, summed)


@compiled
def pooled_backward(p, s, lists, first, last, out, norm, grad, grads, window, scratch, lanes):
    """Add the gradients of the targets ``first`` to ``last`` to ``grads``, whose points start at ``window``.

    ``out`` and ``grad`` are the output and its gradient, ``norm`` the logarithms of the sums, [points, outs].
    """
    wide = len(lanes)
    keys, values = at_address(scratch.keys, lanes), at_address(scratch.values, lanes)
    delta = at_address(scratch.delta, lanes)
    key_slope, value_slope = at_address(scratch.key_slope, lanes), at_address(scratch.value_slope, lanes)
    for target in range(first, last):
        begin, end = integer_at(lists.row_ptr, target), integer_at(lists.row_ptr, target + 1)
        if begin == end:
            continue
        query = row(at_address(p.query, lanes), target, query_size(s) * wide)
        grad_query = row(at_address(grads.query, lanes), target, query_size(s) * wide)
        level = row(at_address(norm, lanes), target, s.outs * wide)
        slope = row(at_address(grad, lanes), target, s.outs * s.width * wide)
        result = row(at_address(out, lanes), target, s.outs * s.width * wide)
        set_all(delta, s.outs, 0.0, lanes)
        for h in range(s.outs):
            back, there = offset(slope, h * s.width * wide), offset(result, h * s.width * wide)
            store(delta, h * wide, products(back, there, s.width, load(delta, h * wide, lanes), lanes))
        for edge in range(begin, end):
            source = integer_at(lists.source, edge)
            kind = integer_at(lists.kind, edge) if s.indexed else edge
            for h in range(s.outs):
                key_at(p, s, source, kind, h, keys, lanes)
                value_at(p, s, source, kind, h, values, lanes)
                weight = exp(score_at(p, s, query, keys, kind, h, lanes) - load(level, h * wide, lanes))
                back = offset(slope, h * s.width * wide)
                gain = products(back, values, s.width, fill(keys, 0.0, lanes), lanes) - load(delta, h * wide, lanes)
                change = weight * gain
                scale(key_slope, change, offset(query, h * s.query_out), s.depth, lanes)
                scale(value_slope, weight, back, s.width, lanes)
                add_weighted(grad_query, h * s.query_out, change, keys, s.depth, lanes)
                edge_gradients(p, s, source, kind, h, key_slope, value_slope, grads, window, lanes)
                if s.has_bias:
                    place = kind * s.bias_type + h * s.bias_out
                    grad_bias = at_address(grads.bias, lanes)
                    store(grad_bias, place, load(grad_bias, place, lanes) + change)


@compiled
def edge_gradients(p, s, source, kind, h, key_slope, value_slope, grads, window, lanes):
    """Add the gradients that an edge has by the key and the value that the output frame h sees."""
    wide = len(lanes)
    key_row, value_row = s.key_frames * s.depth * wide, s.value_frames * s.width * wide
    psi_place, rho_place = kind * s.key_psi_type + h * s.key_psi_out, kind * s.rho_type + h * s.rho_out
    affine_gradients(
        key_slope, s.depth, row(at_address(p.key, lanes), source, key_row), s.key_frames, s.has_key_psi,
        offset(at_address(p.key_psi, lanes), psi_place), s.key_psi_frame, s.has_rho,
        row(at_address(grads.key, lanes), source - window, key_row),
        offset(at_address(grads.key_psi, lanes), psi_place), offset(at_address(grads.rho, lanes), rho_place), lanes,
    )  # fmt: skip
    psi_place, beta_place = kind * s.psi_type + h * s.psi_out, kind * s.beta_type + h * s.beta_out
    affine_gradients(
        value_slope, s.width, row(at_address(p.value, lanes), source, value_row), s.value_frames, s.has_psi,
        offset(at_address(p.psi, lanes), psi_place), s.psi_frame, s.has_beta,
        row(at_address(grads.value, lanes), source - window, value_row),
        offset(at_address(grads.psi, lanes), psi_place), offset(at_address(grads.beta, lanes), beta_place), lanes,
    )  # fmt: skip
