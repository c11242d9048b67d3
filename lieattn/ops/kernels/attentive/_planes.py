# mypy: allow-untyped-defs
"""What the kernels of attentive group convolution are told, and their work on single planes.

A plane is one row of memory with a fixed number of entries from one image row to the next; entries to the right of the
image are computed and masked.
"""

import math
from typing import NamedTuple

from lieattn.ops.kernels.vectors._products import compiled
from lieattn.ops.kernels.vectors._vectors import (
    add_to,
    add_up,
    count_lanes,
    fill,
    integer_at,
    largest_lane,
    load,
    load_one,
    maximum,
    multiply_add,
    pick_equal,
    pick_greater,
    smallest_lane,
    stay_apart,
    store,
)

TAPS_TOGETHER = 5


class AttentiveSizes(NamedTuple):
    """Sizes in elements, and switches."""

    samples: int
    outs: int  # output channels times poses
    fiber: int
    channels: int
    hidden: int
    taps: int
    spatial_taps: int
    positions: int
    length: int  # of a plane of responses
    source: int  # of a plane of inputs
    reach: int  # largest offset of a tap
    margin: int  # zeros before and after a plane, for the spatial kernel
    has_channel: int
    has_spatial: int
    wants_input: int  # whether the gradient with respect to the input is asked for


class AttentiveOperands(NamedTuple):
    """Addresses; the same names serve the gradients. Absent operands are never read."""

    x: int  # [samples, fiber, channels, source]
    kernel: int  # [outs, fiber, channels, taps]
    first: int  # [outs, fiber, hidden, channels]
    second: int  # [outs, fiber, channels, hidden]
    spatial: int  # [outs, fiber, 2, spatial_taps]


class AttentiveTables(NamedTuple):
    """Addresses of int64 offsets, padded to whole groups of taps, and of planes that mask what is no pixel."""

    taps: int
    spatial_taps: int
    mirrored: int  # the spatial offsets with the other sign
    back: int  # the offsets of the taps with the other sign
    mask: int  # 1, or 0 where there is no pixel
    lowest: int  # 0, or minus infinity there


class AttentiveScratch(NamedTuple):
    """Sizes in elements, later addresses, of what a call writes to and forgets; zero at the start."""

    responses: int  # [channels, length]
    slopes: int  # [channels, reach + source]
    planes: int  # [2, margin + length + margin]: mean and maximum over the channels
    winner: int  # [length]: number of the channel with the maximum
    kernel: int  # [channels, taps], a vector each: gradient of the kernel
    spatial: int  # [2, spatial_taps], a vector each
    shares: int  # [3, length]
    slope_of_map: int  # [margin + length + margin]
    numbers: int  # statistics and hidden values


def attentive_scratch(s: AttentiveSizes, lanes: int) -> AttentiveScratch:
    """How much scratch a call needs, in whole vectors."""
    padded = 2 * s.margin + s.length
    sizes = (
        s.channels * s.length,
        s.channels * (s.reach + s.source),
        2 * padded,
        s.length,
        s.channels * _whole_groups(s.taps) * lanes,
        2 * _whole_groups(s.spatial_taps) * lanes,
        3 * s.length,
        padded,
        7 * s.channels + 4 * s.hidden,
    )
    return AttentiveScratch(*(-(-size // lanes) * lanes for size in sizes))


def _whole_groups(taps: int) -> int:
    return -(-taps // TAPS_TOGETHER) * TAPS_TOGETHER


@compiled
def correlate(out, length, x, taps, count, offsets, keep, lanes):
    """Compute ``out[i] = Σ_t taps[t] x[i + offsets[t]]``, or add to ``out`` if ``keep``."""
    stay_apart()
    wide = len(lanes)
    zero = fill(x, 0.0, lanes)
    blocks = length - length % (4 * wide)
    for i in range(0, blocks, 4 * wide):
        a0 = a1 = a2 = a3 = zero
        if keep:
            a0, a1 = load(out, i, lanes), load(out, i + wide, lanes)
            a2, a3 = load(out, i + 2 * wide, lanes), load(out, i + 3 * wide, lanes)
        for t in range(count):
            weight, at = load_one(taps, t, lanes), i + integer_at(offsets, t)
            a0 = multiply_add(weight, load(x, at, lanes), a0)
            a1 = multiply_add(weight, load(x, at + wide, lanes), a1)
            a2 = multiply_add(weight, load(x, at + 2 * wide, lanes), a2)
            a3 = multiply_add(weight, load(x, at + 3 * wide, lanes), a3)
        store(out, i, a0)
        store(out, i + wide, a1)
        store(out, i + 2 * wide, a2)
        store(out, i + 3 * wide, a3)
    for i in range(blocks, length, wide):
        total = load(out, i, lanes) if keep else zero
        for t in range(count):
            total = multiply_add(load_one(taps, t, lanes), load(x, i + integer_at(offsets, t), lanes), total)
        store(out, i, total)


@compiled
def tap_products(out, x, y, length, count, offsets, lanes):
    """Add the lanes of ``Σ_i x[i] y[i + offsets[t]]`` to the vector ``out[t]``; taps come in whole groups."""
    stay_apart()
    wide = len(lanes)
    for t in range(0, count, TAPS_TOGETHER):
        o0, o1, o2 = integer_at(offsets, t), integer_at(offsets, t + 1), integer_at(offsets, t + 2)
        o3, o4 = integer_at(offsets, t + 3), integer_at(offsets, t + 4)
        at = t * wide
        a0, a1, a2 = load(out, at, lanes), load(out, at + wide, lanes), load(out, at + 2 * wide, lanes)
        a3, a4 = load(out, at + 3 * wide, lanes), load(out, at + 4 * wide, lanes)
        for i in range(0, length, wide):
            factor = load(x, i, lanes)
            a0 = multiply_add(factor, load(y, i + o0, lanes), a0)
            a1 = multiply_add(factor, load(y, i + o1, lanes), a1)
            a2 = multiply_add(factor, load(y, i + o2, lanes), a2)
            a3 = multiply_add(factor, load(y, i + o3, lanes), a3)
            a4 = multiply_add(factor, load(y, i + o4, lanes), a4)
        store(out, at, a0)
        store(out, at + wide, a1)
        store(out, at + 2 * wide, a2)
        store(out, at + 3 * wide, a3)
        store(out, at + 4 * wide, a4)


@compiled
def add_lanes(out, sums, rows, count, lanes):
    """Add up the lanes of ``sums`` into ``out``, rows of ``count`` numbers, and set ``sums`` to 0."""
    stay_apart()
    wide = len(lanes)
    groups = -(-count // TAPS_TOGETHER) * TAPS_TOGETHER
    zero = fill(out, 0.0, lanes)
    for r in range(rows):
        for t in range(groups):
            at = (r * groups + t) * wide
            if t < count:
                add_to(out, r * count + t, add_up(load(sums, at, lanes)))
            store(sums, at, zero)


@compiled
def reduce_plane(t, length, mask, lowest, lanes):
    """Sum and largest of the pixels of a plane, and where the first of the largest is."""
    stay_apart()
    wide = len(lanes)
    total, largest = fill(t, 0.0, lanes), load(t, 0, lanes) + load(lowest, 0, lanes)
    where, start, step = fill(t, 0.0, lanes), fill(t, 0.0, lanes), fill(t, float(wide), lanes)
    for i in range(0, length, wide):
        value = load(t, i, lanes)
        total = multiply_add(value, load(mask, i, lanes), total)
        value = value + load(lowest, i, lanes)
        where = pick_greater(value, largest, start, where)
        largest = maximum(largest, value)
        start = start + step
    top = largest_lane(largest)
    beyond = fill(t, float(length), lanes)
    place = smallest_lane(pick_equal(largest, fill(t, top, lanes), where + count_lanes(where), beyond))
    return add_up(total), top, min(place, float(length - 1))


@compiled
def channel_scores(s, first, second, mean, top, hidden, score):
    """Channel attention of one output and input pose; ``hidden`` keeps the hidden values before the relu."""
    for n in range(s.hidden):
        of_mean = of_top = 0.0
        for c in range(s.channels):
            weight = first[n * s.channels + c]
            of_mean += weight * mean[c]
            of_top += weight * top[c]
        hidden[n] = of_mean
        hidden[s.hidden + n] = of_top
    for c in range(s.channels):
        level = 0.0
        for n in range(s.hidden):
            level += second[c * s.hidden + n] * (max(hidden[n], 0.0) + max(hidden[s.hidden + n], 0.0))
        score[c] = 1 / (1 + math.exp(-level))


@compiled
def channel_gradients(
    s, first, second, mean, top, hidden, score, slope, grad_first, grad_second, slope_mean, slope_top
):
    """Backward pass of :func:`channel_scores`; ``slope`` is that of the scores, ``hidden`` ends with scratch."""
    back = 2 * s.hidden
    for n in range(2 * s.hidden):
        hidden[back + n] = 0.0
    for c in range(s.channels):
        level = slope[c] * score[c] * (1 - score[c])
        for n in range(s.hidden):
            weight = level * second[c * s.hidden + n]
            of_mean, of_top = max(hidden[n], 0.0), max(hidden[s.hidden + n], 0.0)
            grad_second[c * s.hidden + n] += level * (of_mean + of_top)
            if of_mean > 0:
                hidden[back + n] += weight
            if of_top > 0:
                hidden[back + s.hidden + n] += weight
    for c in range(s.channels):
        of_mean = of_top = 0.0
        for n in range(s.hidden):
            to_mean, to_top = hidden[back + n], hidden[back + s.hidden + n]
            grad_first[n * s.channels + c] += to_mean * mean[c] + to_top * top[c]
            of_mean += to_mean * first[n * s.channels + c]
            of_top += to_top * first[n * s.channels + c]
        slope_mean[c], slope_top[c] = of_mean, of_top
