# mypy: allow-untyped-defs
"""Softmax attention of few channels over whole clouds, on the CPU.

Lanes are queries. With few channels, matrix products are too short to fill registers, and the exponentials of the
scores are most of the work. Queries, outputs and their gradients are columns of channels, ``[channels, places]``, where
places fill whole vectors. Keys and values are rows.
"""

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import row, set_all
from lieattn.ops.kernels._vectors import (
    add_up,
    at_address,
    exp,
    fill,
    integer_at,
    load,
    load_one,
    lowest,
    maximum,
    multiply_add,
    offset,
    store,
)


@compiled
def forward(query, key, value, counts, first, last, heads, places, channels, values, keys, out, norm, scratch, lanes):
    """Write outputs ``[blocks, values, places]``, and ``norm`` ``[blocks, 2, places]``: largest scores and 1 / sums.

    A block is a head of a cloud, and ``counts`` is the number of existing keys of each cloud. Keys are ``[blocks, keys,
    channels]``, values ``[blocks, keys, values]``, and queries ``[blocks, channels, places]``.
    """
    wide = len(lanes)
    scores = at_address(scratch, lanes)
    for block in range(first, last):
        k = row(at_address(key, lanes), block, keys * channels)
        v = row(at_address(value, lanes), block, keys * values)
        count = integer_at(counts, block // heads)
        for at in range(0, places, wide):
            q = offset(row(at_address(query, lanes), block, channels * places), at)
            to = offset(row(at_address(out, lanes), block, values * places), at)
            top = fill(q, lowest(q), lanes)
            for j in range(count):
                score = _score(q, k, j, places, channels, lanes)
                top = maximum(top, score)
                store(scores, j * wide, score)
            total = fill(q, 0.0, lanes)
            for c in range(values):
                store(to, c * places, total)
            for j in range(count):
                weight = exp(load(scores, j * wide, lanes) - top)
                total = total + weight
                for c in range(values):
                    sums = multiply_add(weight, load_one(v, j * values + c, lanes), load(to, c * places, lanes))
                    store(to, c * places, sums)
            share = fill(q, 1.0, lanes) / total if count else total
            for c in range(values):
                store(to, c * places, share * load(to, c * places, lanes))
            tops = row(at_address(norm, lanes), block, 2 * places)
            store(tops, at, top)
            store(tops, places + at, share)


@part
def _score(q, k, j, places, channels, lanes):
    """Return the scores of the key j with one vector of queries."""
    score = load(q, 0, lanes) * load_one(k, j * channels, lanes)
    for c in range(1, channels):
        score = multiply_add(load(q, c * places, lanes), load_one(k, j * channels + c, lanes), score)
    return score


@compiled
def backward(
    query, key, value, counts, first, last, heads, places, channels, values, keys, out, norm, grad, to_query, to_key,
    to_value, scratch, lanes,
):  # fmt: skip
    """Write the gradients of queries, and add those of keys and values to zeros, in the layouts of the operands."""
    wide = len(lanes)
    of_keys = at_address(scratch, lanes)  # a vector for each channel of each key
    of_values = row(of_keys, keys * channels, wide)
    for block in range(first, last):
        k = row(at_address(key, lanes), block, keys * channels)
        v = row(at_address(value, lanes), block, keys * values)
        count = integer_at(counts, block // heads)
        zero = fill(k, 0.0, lanes)
        set_all(of_keys, count * channels, 0.0, lanes)
        set_all(of_values, count * values, 0.0, lanes)
        tops = row(at_address(norm, lanes), block, 2 * places)
        for at in range(0, places, wide):
            q = offset(row(at_address(query, lanes), block, channels * places), at)
            o = offset(row(at_address(out, lanes), block, values * places), at)
            g = offset(row(at_address(grad, lanes), block, values * places), at)
            to = offset(row(at_address(to_query, lanes), block, channels * places), at)
            mean = zero
            for c in range(values):
                mean = multiply_add(load(o, c * places, lanes), load(g, c * places, lanes), mean)
            for c in range(channels):
                store(to, c * places, zero)
            top, share = load(tops, at, lanes), load(tops, places + at, lanes)
            for j in range(count):
                weight = share * exp(_score(q, k, j, places, channels, lanes) - top)
                change = zero - mean
                for c in range(values):
                    slope = load(g, c * places, lanes)
                    change = multiply_add(slope, load_one(v, j * values + c, lanes), change)
                    place = (j * values + c) * wide
                    store(of_values, place, multiply_add(weight, slope, load(of_values, place, lanes)))
                change = weight * change
                for c in range(channels):
                    place, one = (j * channels + c) * wide, load_one(k, j * channels + c, lanes)
                    store(to, c * places, multiply_add(change, one, load(to, c * places, lanes)))
                    store(of_keys, place, multiply_add(change, load(q, c * places, lanes), load(of_keys, place, lanes)))
        _add_lanes(row(at_address(to_key, lanes), block, keys * channels), of_keys, count * channels, lanes)
        _add_lanes(row(at_address(to_value, lanes), block, keys * values), of_values, count * values, lanes)


@part
def _add_lanes(out, x, vectors, lanes):
    """Write the sums of the lanes of a number of vectors."""
    single = (lanes[0],)
    for at in range(vectors):
        store(out, at, fill(out, add_up(load(x, at * len(lanes), lanes)), single))
