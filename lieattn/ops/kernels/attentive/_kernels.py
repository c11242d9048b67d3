# mypy: allow-untyped-defs
"""Kernels of attentive group convolution: responses of one output, one input pose at a time, never all of them.

For a sample, an output channel with its pose and an input pose, the responses of the input channels

    t_c(y) = Σ_p x_c(y + p) ψ_c(p)

are all that channel and spatial attention look at. They are made, reduced, and made again in the backward pass.
Addresses are those of ``_launch.py``: operands ``x`` [samples, fiber, channels, source], ``kernel`` [outs, fiber,
channels, taps], ``first`` and ``second`` [outs, fiber, hidden, channels] and its transpose, ``spatial`` [outs, fiber,
2, spatial_taps]; the same names serve the gradients.
"""

import math

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels.vectors._products import row
from lieattn.ops.kernels.vectors._vectors import (
    add_to,
    add_up,
    at_address,
    count_lanes,
    exp,
    fill,
    integer_at,
    largest_lane,
    load,
    load_one,
    maximum,
    multiply_add,
    offset,
    pick_equal,
    pick_greater,
    smallest_lane,
    stay_apart,
    store,
)

TAPS_TOGETHER = 5


@part
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


@part
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


@part
def add_lanes(out, sums, rows, count, whole, lanes):
    """Add up the lanes of ``sums`` into ``out``, rows of ``count`` of ``whole`` numbers, and set ``sums`` to 0."""
    stay_apart()
    wide = len(lanes)
    zero = fill(out, 0.0, lanes)
    for r in range(rows):
        for t in range(whole):
            at = (r * whole + t) * wide
            if t < count:
                add_to(out, r * count + t, add_up(load(sums, at, lanes)))
            store(sums, at, zero)


@part
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


@part
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


@part
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


@part
def gather_channels(s, tables, scratch, lanes):
    """Sum, mean, maximum and its channel over the channels of responses times their scores, left in ``scratch``."""
    stay_apart()
    wide = len(lanes)
    t, score = at_address(scratch.responses, lanes), offset(at_address(scratch.numbers, lanes), 2 * s.channels)
    kept, mean = at_address(scratch.shares, lanes), offset(at_address(scratch.planes, lanes), s.margin)
    largest, winner = offset(mean, 2 * s.margin + s.length), at_address(scratch.winner, lanes)
    mask = at_address(tables.mask, lanes)
    share = fill(t, 1 / s.channels, lanes)
    for i in range(0, s.length, wide):
        total = top = load_one(score, 0, lanes) * load(t, i, lanes)
        first = fill(t, 0.0, lanes)
        for c in range(1, s.channels):
            value = load_one(score, c, lanes) * load(t, c * s.length + i, lanes)
            total = total + value
            first = pick_greater(value, top, fill(t, float(c), lanes), first)
            top = maximum(top, value)
        here = load(mask, i, lanes)
        total, top = total * here, top * here
        store(kept, i, total)
        store(mean, i, share * total)
        store(largest, i, top)
        store(winner, i, first)


@part
def attend_to(p, s, tables, sample, out, pose, scratch, lanes):
    """Responses of one output and input pose, their statistics and channel scores, all left in ``scratch``."""
    stay_apart()
    responses, numbers = at_address(scratch.responses, lanes), at_address(scratch.numbers, lanes)
    mask, lowest = at_address(tables.mask, lanes), at_address(tables.lowest, lanes)
    mean, top = numbers, offset(numbers, s.channels)
    score, place = offset(numbers, 2 * s.channels), offset(numbers, 6 * s.channels)
    hidden = offset(numbers, 7 * s.channels)
    pair = out * s.fiber + pose
    x = row(at_address(p.x, lanes), sample * s.fiber + pose, s.channels * s.source)
    kernel = row(at_address(p.kernel, lanes), pair, s.channels * s.taps)
    for c in range(s.channels):
        t = row(responses, c, s.length)
        correlate(t, s.length, row(x, c, s.source), row(kernel, c, s.taps), s.taps, tables.taps, False, lanes)
        score[c] = 1.0
        if s.has_channel:
            total, largest, at = reduce_plane(t, s.length, mask, lowest, lanes)
            mean[c], top[c], place[c] = total / s.positions, largest, at
    if s.has_channel:
        matrix = s.hidden * s.channels
        first, second = row(at_address(p.first, lanes), pair, matrix), row(at_address(p.second, lanes), pair, matrix)
        channel_scores(s, first, second, mean, top, hidden, score)


@part
def spatial_levels(p, s, tables, pair, scratch, lanes):
    """Spatial attention before the sigmoid, from mean and maximum, in the second row of ``scratch.shares``."""
    stay_apart()
    mean = offset(at_address(scratch.planes, lanes), s.margin)
    largest = offset(mean, 2 * s.margin + s.length)
    kernel = row(at_address(p.spatial, lanes), pair, 2 * s.spatial_taps)
    other = offset(kernel, s.spatial_taps)
    level = offset(at_address(scratch.shares, lanes), s.length)
    correlate(level, s.length, mean, kernel, s.spatial_taps, tables.spatial_taps, False, lanes)
    correlate(level, s.length, largest, other, s.spatial_taps, tables.spatial_taps, True, lanes)


@part
def sigmoid(level, one):
    """1 / (1 + exp(-level)) of vectors; ``one`` is the vector of ones."""
    return one / (one + exp(one - one - level))


@compiled
def attentive_forward(p, s, tables, begin, end, gated_at, scratch, lanes):
    """Sums Σ_h̃ α_X Σ_c α_C t for the outputs ``begin`` to ``end``, counted sample by sample.

    The result is ``[samples, outs, length]``.
    """
    wide = len(lanes)
    gated = at_address(gated_at, lanes)
    kept = at_address(scratch.shares, lanes)
    level = offset(kept, s.length)
    one = fill(gated, 1.0, lanes)
    for number in range(begin, end):
        sample, out = number // s.outs, number % s.outs
        to = row(gated, number, s.length)
        for pose in range(s.fiber):
            attend_to(p, s, tables, sample, out, pose, scratch, lanes)
            gather_channels(s, tables, scratch, lanes)
            if s.has_spatial:
                spatial_levels(p, s, tables, out * s.fiber + pose, scratch, lanes)
            for i in range(0, s.length, wide):
                share = load(kept, i, lanes)
                if s.has_spatial:
                    share = share * sigmoid(load(level, i, lanes), one)
                if pose > 0:
                    share = share + load(to, i, lanes)
                store(to, i, share)


@part
def gate_gradients(p, s, tables, pair, grad, scratch, lanes):
    """From the gradient of the gated sum to that of Σ_c α_C t, in ``scratch.shares``, and of the spatial levels."""
    stay_apart()
    wide = len(lanes)
    kept = at_address(scratch.shares, lanes)
    level = offset(kept, s.length)
    slope = offset(at_address(scratch.slope_of_map, lanes), s.margin)
    one = fill(grad, 1.0, lanes)
    if s.has_spatial:
        spatial_levels(p, s, tables, pair, scratch, lanes)
    for i in range(0, s.length, wide):
        given = load(grad, i, lanes)
        if s.has_spatial:
            gate = sigmoid(load(level, i, lanes), one)
            store(slope, i, given * load(kept, i, lanes) * gate * (one - gate))
            given = given * gate
        store(kept, i, given)


@part
def spatial_gradients(p, s, tables, pair, scratch, lanes):
    """Backward pass of the spatial levels: kernels, and the gradients of mean and maximum in ``scratch.shares``."""
    stay_apart()
    padded, taps = 2 * s.margin + s.length, s.spatial_taps
    mean = offset(at_address(scratch.planes, lanes), s.margin)
    slope = offset(at_address(scratch.slope_of_map, lanes), s.margin)
    kernel = row(at_address(p.spatial, lanes), pair, 2 * taps)
    sums = at_address(scratch.spatial, lanes)
    shares = offset(at_address(scratch.shares, lanes), s.length)
    for q in range(2):
        own = row(kernel, q, taps)
        correlate(row(shares, q, s.length), s.length, slope, own, taps, tables.mirrored, False, lanes)
        to = row(sums, q, s.whole_spatial_taps * len(lanes))
        tap_products(to, slope, row(mean, q, padded), s.length, taps, tables.spatial_taps, lanes)


@part
def response_slopes(s, tables, scratch, lanes):
    """Gradients of α_C t in ``scratch.slopes`` from those of sum, mean and maximum over the channels."""
    stay_apart()
    wide = len(lanes)
    mask, winner = at_address(tables.mask, lanes), at_address(scratch.winner, lanes)
    slopes = offset(at_address(scratch.slopes, lanes), s.reach)
    kept = at_address(scratch.shares, lanes)
    of_mean = offset(kept, s.length)
    of_top = offset(of_mean, s.length)
    share, zero = fill(kept, 1 / s.channels, lanes), fill(kept, 0.0, lanes)
    for i in range(0, s.length, wide):
        here = load(mask, i, lanes)
        base = load(kept, i, lanes) * here
        top, first = zero, zero
        if s.has_spatial:
            base = multiply_add(share * here, load(of_mean, i, lanes), base)
            top, first = load(of_top, i, lanes) * here, load(winner, i, lanes)
        for c in range(s.channels):
            value = base
            if s.has_spatial:
                value = base + pick_equal(first, fill(kept, float(c), lanes), top, zero)
            store(slopes, c * (s.reach + s.source) + i, value)


@part
def through_scores(p, s, tables, grads, pair, scratch, lanes):
    """From gradients of α_C t to those of t, in ``scratch.slopes``, with those of the channel attention."""
    stay_apart()
    wide = len(lanes)
    responses, numbers = at_address(scratch.responses, lanes), at_address(scratch.numbers, lanes)
    mask, place = at_address(tables.mask, lanes), offset(numbers, 6 * s.channels)
    slopes = offset(at_address(scratch.slopes, lanes), s.reach)
    mean, top = numbers, offset(numbers, s.channels)
    score, slope = offset(numbers, 2 * s.channels), offset(numbers, 3 * s.channels)
    slope_mean, slope_top = offset(numbers, 4 * s.channels), offset(numbers, 5 * s.channels)
    matrix = s.hidden * s.channels
    stride = s.reach + s.source
    for c in range(s.channels):
        total = fill(slopes, 0.0, lanes)
        for i in range(0, s.length, wide):
            total = multiply_add(load(slopes, c * stride + i, lanes), load(responses, c * s.length + i, lanes), total)
        slope[c] = add_up(total)
    first, second = row(at_address(p.first, lanes), pair, matrix), row(at_address(p.second, lanes), pair, matrix)
    to_first = row(at_address(grads.first, lanes), pair, matrix)
    to_second = row(at_address(grads.second, lanes), pair, matrix)
    hidden = offset(numbers, 7 * s.channels)
    channel_gradients(
        s, first, second, mean, top, hidden, score, slope, to_first, to_second, slope_mean, slope_top
    )  # fmt: skip
    for c in range(s.channels):
        factor, share = load_one(score, c, lanes), fill(slopes, slope_mean[c] / s.positions, lanes)
        for i in range(0, s.length, wide):
            value = factor * load(slopes, c * stride + i, lanes)
            store(slopes, c * stride + i, multiply_add(share, load(mask, i, lanes), value))
        # One of several equal maxima takes the gradient, as in torch.
        slopes[c * stride + int(place[c])] += slope_top[c]


@compiled
def attentive_backward(p, s, tables, begin, end, grad_at, grads, scratch, lanes):
    """Gradients for the pairs (input pose, sample) ``begin`` to ``end``, counted pose by pose.

    ``grad_at`` is the gradient of what :func:`attentive_forward` writes, 0 where there is no pixel. Different pairs
    write to different parts of ``grads.x``; all add to the other gradients.
    """
    slopes = offset(at_address(scratch.slopes, lanes), s.reach)
    stride = s.reach + s.source
    kernel_sums, spatial_sums = at_address(scratch.kernel, lanes), at_address(scratch.spatial, lanes)
    number = begin
    while number < end:
        pose = number // s.samples
        last = min(end, (pose + 1) * s.samples)
        for out in range(s.outs):
            pair = out * s.fiber + pose
            kernel = row(at_address(p.kernel, lanes), pair, s.channels * s.taps)
            for sample in range(number - pose * s.samples, last - pose * s.samples):
                plane = sample * s.fiber + pose
                x = row(at_address(p.x, lanes), plane, s.channels * s.source)
                attend_to(p, s, tables, sample, out, pose, scratch, lanes)
                if s.has_spatial:
                    gather_channels(s, tables, scratch, lanes)
                grad = row(at_address(grad_at, lanes), sample * s.outs + out, s.length)
                gate_gradients(p, s, tables, pair, grad, scratch, lanes)
                if s.has_spatial:
                    spatial_gradients(p, s, tables, pair, scratch, lanes)
                response_slopes(s, tables, scratch, lanes)
                if s.has_channel:
                    through_scores(p, s, tables, grads, pair, scratch, lanes)
                for c in range(s.channels):
                    slope, sums = row(slopes, c, stride), row(kernel_sums, c, s.whole_taps * len(lanes))
                    tap_products(sums, slope, row(x, c, s.source), s.length, s.taps, tables.taps, lanes)
                    if s.wants_input:
                        to = row(at_address(grads.x, lanes), plane * s.channels + c, s.source)
                        correlate(to, s.source, slope, row(kernel, c, s.taps), s.taps, tables.back, True, lanes)
            to = row(at_address(grads.kernel, lanes), pair, s.channels * s.taps)
            add_lanes(to, kernel_sums, s.channels, s.taps, s.whole_taps, lanes)
            if s.has_spatial:
                to = row(at_address(grads.spatial, lanes), pair, 2 * s.spatial_taps)
                add_lanes(to, spatial_sums, 2, s.spatial_taps, s.whole_spatial_taps, lanes)
        number = last
