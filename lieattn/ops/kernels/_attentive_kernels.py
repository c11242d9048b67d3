# mypy: allow-untyped-defs
"""Kernels of attentive group convolution, which compute the responses to one input pose at a time.

For a sample and an input pose, channel and spatial attention of an output depend only on the responses of the input
channels,

    t_c(y) = Σ_p x_c(y + p) ψ_c(p).

They are computed, reduced, and recomputed in the backward pass. Lanes are outputs (channels times poses), in blocks of
one vector. Addresses are those of ``_launch.py``: the operand ``x`` [samples, fiber, channels, source] consists of
numbers, and the others of vectors: ``kernel`` [blocks, fiber, channels, whole_taps], ``first`` and ``second`` [blocks,
fiber, hidden, channels] and its transpose, and ``spatial`` [blocks, fiber, 2, whole_spatial_taps]. Gradients have the
same names. With units, ``x`` is [points, turns, taps, fiber, channels], and the blocks of a turn see its inputs. If
``spatial`` is a product with units, it is [turns, spatial_taps, own_blocks, fiber, 2].

A plane has ``rows`` of ``stride`` vectors, of which the first ``columns`` are pixels and the others are 0, with a
``margin`` of zeros at both ends.
"""

from lieattn.ops.kernels._attentive_taps import (
    LISTS,
    UNITS,
    WINDOWS,
    back_through_taps,
    back_through_units,
    levels_of_list,
    pack_units,
    respond,
    respond_to_list,
    respond_to_units,
    unpack_units,
)
from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import row
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
    pick_equal,
    pick_greater,
    stay_apart,
    store,
)


@part
def channel_scores(s, first, second, numbers, lanes):
    """Compute the channel attention α of one input pose, and 1 - α. ``hidden`` has the values before the relu."""
    stay_apart()
    wide = len(lanes)
    mean, top, score, rest, _, _, _, _, hidden = _numbers(s, numbers, lanes)
    zero, one = fill(mean, 0.0, lanes), fill(mean, 1.0, lanes)
    for n in range(s.hidden):
        of_mean = of_top = zero
        for c in range(s.channels):
            weight = load(first, (n * s.channels + c) * wide, lanes)
            of_mean = multiply_add(weight, load(mean, c * wide, lanes), of_mean)
            of_top = multiply_add(weight, load(top, c * wide, lanes), of_top)
        store(hidden, n * wide, of_mean)
        store(hidden, (s.hidden + n) * wide, of_top)
    for c in range(s.channels):
        level = zero
        for n in range(s.hidden):
            of_mean = maximum(load(hidden, n * wide, lanes), zero)
            of_top = maximum(load(hidden, (s.hidden + n) * wide, lanes), zero)
            level = multiply_add(load(second, (c * s.hidden + n) * wide, lanes), of_mean + of_top, level)
        store(score, c * wide, sigmoid(level, one))
        store(rest, c * wide, sigmoid(zero - level, one))


@part
def channel_gradients(s, first, second, numbers, grad_first, grad_second, lanes):
    """Compute the backward pass of :func:`channel_scores`, from the gradient of the scores to those of mean and top."""
    stay_apart()
    wide = len(lanes)
    zero = fill(first, 0.0, lanes)
    mean, top, score, rest, slope, slope_mean, slope_top, _, hidden = _numbers(s, numbers, lanes)
    back = offset(hidden, 2 * s.hidden * wide)
    for n in range(2 * s.hidden):
        store(back, n * wide, zero)
    for c in range(s.channels):
        level = load(slope, c * wide, lanes) * load(score, c * wide, lanes) * load(rest, c * wide, lanes)
        for n in range(s.hidden):
            at, other = n * wide, (s.hidden + n) * wide
            of_mean, of_top = load(hidden, at, lanes), load(hidden, other, lanes)
            to = (c * s.hidden + n) * wide
            weight, sums = level * load(second, to, lanes), maximum(of_mean, zero) + maximum(of_top, zero)
            store(grad_second, to, multiply_add(level, sums, load(grad_second, to, lanes)))
            store(back, at, load(back, at, lanes) + pick_greater(of_mean, zero, weight, zero))
            store(back, other, load(back, other, lanes) + pick_greater(of_top, zero, weight, zero))
    for c in range(s.channels):
        of_mean = of_top = zero
        for n in range(s.hidden):
            to_mean, to_top = load(back, n * wide, lanes), load(back, (s.hidden + n) * wide, lanes)
            to = (n * s.channels + c) * wide
            weight, grad = load(first, to, lanes), load(grad_first, to, lanes)
            grad = multiply_add(to_mean, load(mean, c * wide, lanes), grad)
            store(grad_first, to, multiply_add(to_top, load(top, c * wide, lanes), grad))
            of_mean, of_top = multiply_add(to_mean, weight, of_mean), multiply_add(to_top, weight, of_top)
        store(slope_mean, c * wide, of_mean)
        store(slope_top, c * wide, of_top)


@part
def _numbers(s, numbers, lanes):
    """Return pointers to vectors of channels: mean, top, α, 1 - α, slopes of α, mean and top, place of top, hidden."""
    step = s.channels * len(lanes)
    return (
        numbers,
        offset(numbers, step),
        offset(numbers, 2 * step),
        offset(numbers, 3 * step),
        offset(numbers, 4 * step),
        offset(numbers, 5 * step),
        offset(numbers, 6 * step),
        offset(numbers, 7 * step),
        offset(numbers, 8 * step),
    )


@part
def _inner(s, address, number, lanes):
    """Return a pointer to the first pixel of a plane at an address."""
    return offset(at_address(address, lanes), (number * s.plane + s.margin) * len(lanes))


@part
def _inputs(s, address, sample, block, pose, lanes):
    """Return a pointer to the numbers of the first channel of an input pose."""
    if s.listed == UNITS:
        turn = block // s.own_blocks
        first = sample * s.columns * s.point_step + turn * s.taps * s.unit_step + pose * s.channels
        return offset(at_address(address, lanes), first)
    return row(at_address(address, lanes), sample * s.fiber + pose, s.channels * s.source)


@part
def _spatial_taps(s, address, pair, number, lanes):
    """Return a pointer to the first tap of a pair for the mean (``number`` 0) or the maximum (1) over the channels."""
    own = s.own_blocks * s.fiber
    first = pair // own * s.spatial_turn_step + pair % own * s.spatial_pair_step
    return row(at_address(address, lanes), first + number * s.spatial_number_step, len(lanes))


@part
def attend_to(p, s, tables, sample, block, pose, scratch, lanes):
    """Write the responses to one input pose, their statistics and channel scores to ``scratch``."""
    stay_apart()
    wide = len(lanes)
    numbers = at_address(scratch.numbers, lanes)
    mean, top, score, rest, _, _, _, place, _ = _numbers(s, numbers, lanes)
    pair = block * s.fiber + pose
    x = _inputs(s, p.x, sample, block, pose, lanes)
    kernel = row(at_address(p.kernel, lanes), pair, s.channels * s.whole_taps * wide)
    zero, one, share = fill(mean, 0.0, lanes), fill(mean, 1.0, lanes), fill(mean, 1 / s.positions, lanes)
    packed, size = at_address(scratch.packed, lanes), s.taps * s.whole_columns
    if s.listed == UNITS:
        pack_units(s, x, packed, lanes)
    for c in range(s.channels):
        own, t = row(kernel, c, s.whole_taps * wide), _inner(s, scratch.responses, c, lanes)
        if s.listed == UNITS:
            total, largest, where = respond_to_units(s, row(packed, c, size), own, t, lanes)
        elif s.listed == LISTS:
            total, largest, where = respond_to_list(s, tables, sample, row(x, c, s.source), own, t, lanes)
        else:
            total, largest, where = respond(s, tables, row(x, c, s.source), own, t, lanes)
        store(mean, c * wide, share * total)
        store(top, c * wide, largest)
        store(place, c * wide, where)
        store(score, c * wide, one)
        store(rest, c * wide, zero)
    if s.has_channel:
        matrix = s.hidden * s.channels * wide
        first, second = row(at_address(p.first, lanes), pair, matrix), row(at_address(p.second, lanes), pair, matrix)
        channel_scores(s, first, second, numbers, lanes)


@part
def gather_channels(s, scratch, lanes):
    """Compute Σ_c (1 - α_C) t and Σ_c α_C t, and mean and maximum of α_C t over the channels."""
    stay_apart()
    wide = len(lanes)
    t, step = _inner(s, scratch.responses, 0, lanes), s.plane * wide
    _, _, score, rest, _, _, _, _, _ = _numbers(s, at_address(scratch.numbers, lanes), lanes)
    passed, kept = _inner(s, scratch.passed, 0, lanes), _inner(s, scratch.kept, 0, lanes)
    mean, largest = _inner(s, scratch.statistics, 0, lanes), _inner(s, scratch.statistics, 1, lanes)
    winner = _inner(s, scratch.winner, 0, lanes)
    share, zero, one = fill(t, 1 / s.channels, lanes), fill(t, 0.0, lanes), fill(t, 1.0, lanes)
    for at in range(0, s.length * wide, wide):
        own = load(t, at, lanes)
        left, total = load(rest, 0, lanes) * own, load(score, 0, lanes) * own
        top = total
        first = number = zero
        for c in range(1, s.channels):
            own = load(t, c * step + at, lanes)
            value = load(score, c * wide, lanes) * own
            number = number + one
            left = multiply_add(load(rest, c * wide, lanes), own, left)
            total = total + value
            first = pick_greater(value, top, number, first)
            top = maximum(top, value)
        store(passed, at, left)
        store(kept, at, total)
        if s.has_spatial:
            store(mean, at, share * total)
            store(largest, at, top)
            store(winner, at, first)


@part
def spatial_levels(p, s, tables, sample, pair, scratch, lanes):
    """Compute the spatial attention before the sigmoid, from mean and maximum."""
    stay_apart()
    wide = len(lanes)
    mean, largest = _inner(s, scratch.statistics, 0, lanes), _inner(s, scratch.statistics, 1, lanes)
    level = _inner(s, scratch.level, 0, lanes)
    kernel, other = _spatial_taps(s, p.spatial, pair, 0, lanes), _spatial_taps(s, p.spatial, pair, 1, lanes)
    zero = fill(mean, 0.0, lanes)
    if s.listed != WINDOWS:
        levels_of_list(s, tables, sample, mean, largest, kernel, other, level, lanes)
        return
    fours = s.columns - s.columns % 4
    for r in range(s.rows):
        for c in range(0, fours, 4):
            place = (r * s.stride + c) * wide
            a0 = a1 = a2 = a3 = zero
            for k in range(s.spatial_taps):
                at, weight = place + integer_at(tables.spatial_taps, k) * wide, load(kernel, k * wide, lanes)
                a0 = multiply_add(weight, load(mean, at, lanes), a0)
                a1 = multiply_add(weight, load(mean, at + wide, lanes), a1)
                a2 = multiply_add(weight, load(mean, at + 2 * wide, lanes), a2)
                a3 = multiply_add(weight, load(mean, at + 3 * wide, lanes), a3)
                weight = load(other, k * wide, lanes)
                a0 = multiply_add(weight, load(largest, at, lanes), a0)
                a1 = multiply_add(weight, load(largest, at + wide, lanes), a1)
                a2 = multiply_add(weight, load(largest, at + 2 * wide, lanes), a2)
                a3 = multiply_add(weight, load(largest, at + 3 * wide, lanes), a3)
            store(level, place, a0)
            store(level, place + wide, a1)
            store(level, place + 2 * wide, a2)
            store(level, place + 3 * wide, a3)
        for c in range(fours, s.columns):
            place = (r * s.stride + c) * wide
            total = zero
            for k in range(s.spatial_taps):
                at = place + integer_at(tables.spatial_taps, k) * wide
                total = multiply_add(load(kernel, k * wide, lanes), load(mean, at, lanes), total)
                total = multiply_add(load(other, k * wide, lanes), load(largest, at, lanes), total)
            store(level, place, total)


@part
def sigmoid(level, one):
    """Return 1 / (1 + exp(-level)) of vectors, where ``one`` is the vector of ones."""
    return one / (one + exp(one - one - level))


@compiled
def attentive_forward(p, s, tables, begin, end, sums_at, scratch, lanes):
    """Compute Σ_h̃ Σ_c (1 - α_X α_C) t for the blocks ``begin`` to ``end``, numbered sample by sample.

    The result consists of vectors ``[samples, blocks, length]``.
    """
    wide = len(lanes)
    sums = at_address(sums_at, lanes)
    passed, kept = _inner(s, scratch.passed, 0, lanes), _inner(s, scratch.kept, 0, lanes)
    level = _inner(s, scratch.level, 0, lanes)
    zero, one = fill(sums, 0.0, lanes), fill(sums, 1.0, lanes)
    for number in range(begin, end):
        sample, block = number // s.blocks, number % s.blocks
        to = row(sums, number, s.length * wide)
        for pose in range(s.fiber):
            attend_to(p, s, tables, sample, block, pose, scratch, lanes)
            gather_channels(s, scratch, lanes)
            if s.has_spatial:
                spatial_levels(p, s, tables, sample, block * s.fiber + pose, scratch, lanes)
            for at in range(0, s.length * wide, wide):
                left = load(passed, at, lanes)
                if s.has_spatial:
                    rest = sigmoid(zero - load(level, at, lanes), one)
                    left = multiply_add(rest, load(kept, at, lanes), left)
                if pose > 0:
                    left = left + load(to, at, lanes)
                store(to, at, left)


@part
def gate_gradients(p, s, tables, sample, pair, grad, scratch, lanes):
    """Compute gradients from that of the result: of Σ_c α_C t and of spatial levels.

    The result is Σ_c t - α_X Σ_c α_C t, also Σ_c (1 - α_C) t + (1 - α_X) Σ_c α_C t. The gradient of Σ_c α_C t in the
    first form, for the channel attention, replaces ``scratch.passed``, and that in the second one, for t, replaces
    ``scratch.kept``.
    """
    stay_apart()
    wide = len(lanes)
    passed, kept = _inner(s, scratch.passed, 0, lanes), _inner(s, scratch.kept, 0, lanes)
    level, slope = _inner(s, scratch.level, 0, lanes), _inner(s, scratch.slope_of_map, 0, lanes)
    zero, one, least = fill(grad, 0.0, lanes), fill(grad, 1.0, lanes), fill(grad, -80.0, lanes)
    if s.has_spatial:
        spatial_levels(p, s, tables, sample, pair, scratch, lanes)
    for at in range(0, s.length * wide, wide):
        given = load(grad, at, lanes)
        removed, left = zero - given, zero
        if s.has_spatial:
            # Below this level the inverse is infinite in float32.
            inverse = exp(zero - maximum(load(level, at, lanes), least))
            gate = one / (one + inverse)
            removed, left = removed * gate, given * inverse * gate
            store(slope, at, removed * load(kept, at, lanes) * inverse * gate)
        store(passed, at, removed)
        store(kept, at, left)


@part
def score_slopes(p, s, grads, pair, scratch, lanes):
    """Compute gradients of the channel attention, from those of Σ_c α_C t and of its mean and maximum over channels.

    The gradient of the mean is added to both gradients of Σ_c α_C t.
    """
    stay_apart()
    wide = len(lanes)
    numbers = at_address(scratch.numbers, lanes)
    _, _, _, _, slope, _, _, _, _ = _numbers(s, numbers, lanes)
    removed, kept = _inner(s, scratch.passed, 0, lanes), _inner(s, scratch.kept, 0, lanes)
    of_mean = _inner(s, scratch.slopes, 0, lanes)
    share, zero = fill(kept, 1 / s.channels, lanes), fill(kept, 0.0, lanes)
    if s.has_spatial:
        for at in range(0, s.length * wide, wide):
            mean = load(of_mean, at, lanes)
            store(removed, at, multiply_add(share, mean, load(removed, at, lanes)))
            store(kept, at, multiply_add(share, mean, load(kept, at, lanes)))
    if s.has_channel:
        for c in range(s.channels):
            t, number, total = _inner(s, scratch.responses, c, lanes), fill(kept, float(c), lanes), zero
            for at in range(0, s.length * wide, wide):
                total = multiply_add(_slope(s, scratch, removed, at, number, lanes), load(t, at, lanes), total)
            store(slope, c * wide, total)
        matrix = s.hidden * s.channels * wide
        first, second = row(at_address(p.first, lanes), pair, matrix), row(at_address(p.second, lanes), pair, matrix)
        to_first = row(at_address(grads.first, lanes), pair, matrix)
        to_second = row(at_address(grads.second, lanes), pair, matrix)
        channel_gradients(s, first, second, numbers, to_first, to_second, lanes)


@part
def _slope(s, scratch, of_sum, at, number, lanes):
    """Return the gradient of α_C t of the channel ``number`` at a pixel from that of Σ_c α_C t."""
    value = load(of_sum, at, lanes)
    if s.has_spatial:
        zero = fill(of_sum, 0.0, lanes)
        winner, of_top = _inner(s, scratch.winner, 0, lanes), _inner(s, scratch.slopes, 1, lanes)
        value = value + pick_equal(load(winner, at, lanes), number, load(of_top, at, lanes), zero)
    return value


@part
def response_slopes(s, grad, scratch, lanes):
    """Replace the responses by their gradients."""
    stay_apart()
    wide = len(lanes)
    _, _, score, rest, _, slope_mean, slope_top, place, _ = _numbers(s, at_address(scratch.numbers, lanes), lanes)
    kept, share, zero = _inner(s, scratch.kept, 0, lanes), fill(grad, 1 / s.positions, lanes), fill(grad, 0.0, lanes)
    for c in range(s.channels):
        t, number = _inner(s, scratch.responses, c, lanes), fill(grad, float(c), lanes)
        factor, other, base = load(score, c * wide, lanes), load(rest, c * wide, lanes), zero
        if s.has_channel:
            base = share * load(slope_mean, c * wide, lanes)
        for r in range(s.rows):
            for at in range(r * s.stride * wide, (r * s.stride + s.columns) * wide, wide):
                value = _slope(s, scratch, kept, at, number, lanes)
                store(t, at, multiply_add(factor, value, multiply_add(other, load(grad, at, lanes), base)))
        if s.has_channel:
            # One of several equal maxima gets the gradient, as in torch.
            for lane in range(c * wide, (c + 1) * wide):
                add_to(t, int(place[lane]) * wide + lane - c * wide, slope_top[lane])


@part
def back_through_responses(p, s, tables, grads, sample, block, pose, scratch, lanes):
    """Add to the gradients of the kernel and of the inputs, from those of the responses."""
    stay_apart()
    wide, taps = len(lanes), s.taps * s.whole_columns
    x, of_x = _inputs(s, p.x, sample, block, pose, lanes), at_address(scratch.of_x, lanes)
    packed, of_packed = at_address(scratch.packed, lanes), at_address(scratch.of_packed, lanes)
    for c in range(s.channels):
        own = ((block * s.fiber + pose) * s.channels + c) * s.whole_taps
        weight, sums = row(at_address(p.kernel, lanes), own, wide), row(at_address(grads.kernel, lanes), own, wide)
        slope = _inner(s, scratch.responses, c, lanes)
        if s.listed == UNITS:
            turned, to = at_address(scratch.turned, lanes), row(of_packed, c, taps)
            back_through_units(s, slope, weight, row(packed, c, taps), to, sums, turned, lanes)
        else:
            here, to = row(x, c, s.source), row(of_x, c, s.source * wide)
            back_through_taps(s, tables, sample, slope, weight, here, to, sums, True, block > 0, lanes)
    if s.wants_input and s.listed == UNITS:
        unpack_units(s, of_packed, _inputs(s, grads.x, sample, block, pose, lanes), lanes)


@compiled
def attentive_backward(p, s, tables, begin, end, grad_at, grads, scratch, lanes):
    """Compute gradients for the pairs (input pose, sample) ``begin`` to ``end``, numbered pose by pose.

    ``grad_at`` is the gradient of the output of :func:`attentive_forward`, and 0 outside of the pixels. Different pairs
    write to different parts of ``grads.x``, and add to the same other gradients.
    """
    wide = len(lanes)
    of_x = at_address(scratch.of_x, lanes)
    slope_of_map = _inner(s, scratch.slope_of_map, 0, lanes)
    for number in range(begin, end):
        pose, sample = number // s.samples, number % s.samples
        for block in range(s.blocks):
            pair = block * s.fiber + pose
            attend_to(p, s, tables, sample, block, pose, scratch, lanes)
            if s.has_spatial:
                gather_channels(s, scratch, lanes)
            grad = row(at_address(grad_at, lanes), sample * s.blocks + block, s.length * wide)
            gate_gradients(p, s, tables, sample, pair, grad, scratch, lanes)
            if s.has_spatial:
                for q in range(2):
                    weight = _spatial_taps(s, p.spatial, pair, q, lanes)
                    sums = _spatial_taps(s, grads.spatial, pair, q, lanes)
                    seen, to = _inner(s, scratch.statistics, q, lanes), _inner(s, scratch.slopes, q, lanes)
                    back_through_taps(s, tables, sample, slope_of_map, weight, seen, to, sums, False, False, lanes)
            score_slopes(p, s, grads, pair, scratch, lanes)
            response_slopes(s, grad, scratch, lanes)
            back_through_responses(p, s, tables, grads, sample, block, pose, scratch, lanes)
        if s.wants_input and s.listed != UNITS:
            to = _inputs(s, grads.x, sample, 0, pose, lanes)
            for i in range(s.channels * s.source):
                to[i] = add_up(load(of_x, i * wide, lanes))
