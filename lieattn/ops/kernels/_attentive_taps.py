# mypy: allow-untyped-defs
"""Taps of attentive group convolution: windows of pixels, lists of neighbors, or units of points.

The points of a cloud are a plane of one row. Edges are those of :class:`lieattn.ops._gated_sums.Lists`, the ``near``
ones of the responses and the ``wide`` ones of spatial attention. With units, each point has its own inputs of all taps,
which are ``unit_step`` numbers apart, and those of the next point ``point_step``.
"""

from lieattn.ops.kernels._compiled import part
from lieattn.ops.kernels._vectors import (
    add_to,
    at_address,
    fill,
    integer_at,
    load,
    load_one,
    lowest,
    maximum,
    multiply_add,
    offset,
    pick_greater,
    stay_apart,
    store,
)

TAPS_TOGETHER = 9
WINDOWS, LISTS, UNITS = 0, 1, 2  # what taps are


@part
def respond(s, tables, x, kernel, t, lanes):
    """Write the responses of one channel to the plane ``t``; return their sum, their maximum, and its first place."""
    stay_apart()
    wide = len(lanes)
    zero, one = fill(x, 0.0, lanes), fill(x, 1.0, lanes)
    seen = zero, fill(x, lowest(x), lanes), zero
    for r in range(s.rows):
        fours = s.columns - s.columns % 4
        for c in range(0, fours, 4):
            a0 = a1 = a2 = a3 = zero
            for k in range(s.taps):
                weight, at = load(kernel, k * wide, lanes), r * s.in_columns + c + integer_at(tables.taps, k)
                a0 = multiply_add(weight, load_one(x, at, lanes), a0)
                a1 = multiply_add(weight, load_one(x, at + 1, lanes), a1)
                a2 = multiply_add(weight, load_one(x, at + 2, lanes), a2)
                a3 = multiply_add(weight, load_one(x, at + 3, lanes), a3)
            place = r * s.stride + c
            here = fill(x, float(place), lanes)
            seen = _see(t, place, a0, here, seen, lanes)
            seen = _see(t, place + 1, a1, here + one, seen, lanes)
            seen = _see(t, place + 2, a2, here + one + one, seen, lanes)
            seen = _see(t, place + 3, a3, here + one + one + one, seen, lanes)
        for c in range(fours, s.columns):
            total = zero
            for k in range(s.taps):
                at = r * s.in_columns + c + integer_at(tables.taps, k)
                total = multiply_add(load(kernel, k * wide, lanes), load_one(x, at, lanes), total)
            place = r * s.stride + c
            seen = _see(t, place, total, fill(x, float(place), lanes), seen, lanes)
    return seen


@part
def _see(t, place, value, here, seen, lanes):
    """Write a response, and update the sum, the maximum and its place."""
    store(t, place * len(lanes), value)
    total, top, where = seen
    return total + value, maximum(top, value), pick_greater(value, top, here, where)


@part
def respond_to_list(s, tables, sample, x, kernel, t, lanes):
    """Write the responses of one channel to the plane ``t``; return their sum, their maximum, and its first place."""
    stay_apart()
    wide, first = len(lanes), sample * s.columns
    share = offset(at_address(tables.near_share, lanes), first)
    zero, one = fill(x, 0.0, lanes), fill(x, 1.0, lanes)
    seen, here = (zero, fill(x, lowest(x), lanes), zero), zero
    for i in range(s.columns):
        value = zero
        for e in range(integer_at(tables.near_ptr, first + i), integer_at(tables.near_ptr, first + i + 1)):
            weight = load(kernel, integer_at(tables.near_row, e) * wide, lanes)
            value = multiply_add(weight, load_one(x, integer_at(tables.near_source, e), lanes), value)
        seen, here = _see(t, i, load_one(share, i, lanes) * value, here, seen, lanes), here + one
    return seen


@part
def levels_of_list(s, tables, sample, mean, largest, kernel, other, level, lanes):
    """Write the spatial attention before the sigmoid, from mean and maximum, to the plane ``level``."""
    stay_apart()
    wide, first = len(lanes), sample * s.columns
    step = s.spatial_tap_step * wide
    share = offset(at_address(tables.wide_share, lanes), first)
    zero = fill(mean, 0.0, lanes)
    for i in range(s.columns):
        value = zero
        for e in range(integer_at(tables.wide_ptr, first + i), integer_at(tables.wide_ptr, first + i + 1)):
            k, at = integer_at(tables.wide_row, e) * step, integer_at(tables.wide_source, e) * wide
            value = multiply_add(load(kernel, k, lanes), load(mean, at, lanes), value)
            value = multiply_add(load(other, k, lanes), load(largest, at, lanes), value)
        store(level, i * wide, load_one(share, i, lanes) * value)


@part
def back_through_list(s, tables, sample, slope, weight, x, to, sums, spread, keep, lanes):
    """Compute the backward pass of a sum over neighbors, like ``back_through_taps``."""
    stay_apart()
    wide, first = len(lanes), sample * s.columns
    step = s.spatial_tap_step * wide
    ptr, source, row, shares = tables.wide_ptr, tables.wide_source, tables.wide_row, tables.wide_share
    if spread:
        step = wide
        ptr, source, row, shares = tables.near_ptr, tables.near_source, tables.near_row, tables.near_share
    share = offset(at_address(shares, lanes), first)
    if not keep:
        for i in range(s.columns):
            store(to, i * wide, fill(to, 0.0, lanes))
    for i in range(s.columns):
        value = load_one(share, i, lanes) * load(slope, i * wide, lanes)
        for e in range(integer_at(ptr, first + i), integer_at(ptr, first + i + 1)):
            k, j = integer_at(row, e) * step, integer_at(source, e)
            pixel = load_one(x, j, lanes) if spread else load(x, j * wide, lanes)
            store(to, j * wide, multiply_add(load(weight, k, lanes), value, load(to, j * wide, lanes)))
            store(sums, k, multiply_add(pixel, value, load(sums, k, lanes)))


@part
def back_through_taps(s, tables, sample, slope, weight, x, to, sums, spread, keep, lanes):
    """Compute the backward pass of a window for a plane of inputs, from the gradient ``slope`` of its results.

    The gradient of the inputs is ``to[i] = Σ_k weight[k] slope[i - offset k]``, added to the old value if ``keep``, and
    that of the taps is ``sums[k] += Σ_i x[i] slope[i - offset k]``. With ``spread``, inputs are numbers of the image,
    otherwise vectors of a plane.
    """
    stay_apart()
    wide = len(lanes)
    if s.listed != WINDOWS:
        back_through_list(s, tables, sample, slope, weight, x, to, sums, spread, keep, lanes)
        return
    rows, columns, stride = s.rows, s.columns, s.stride
    taps, offsets = s.spatial_taps, tables.spatial_back
    if spread:
        rows, columns, stride = s.in_rows, s.in_columns, s.in_columns
        taps, offsets = s.taps, tables.back
    for k in range(0, taps, TAPS_TOGETHER):
        o0, o1, o2 = _three_offsets(offsets, k, wide)
        o3, o4, o5 = _three_offsets(offsets, k + 3, wide)
        o6, o7, o8 = _three_offsets(offsets, k + 6, wide)
        w0, w1, w2 = _three_vectors(weight, k, lanes)
        w3, w4, w5 = _three_vectors(weight, k + 3, lanes)
        w6, w7, w8 = _three_vectors(weight, k + 6, lanes)
        s0, s1, s2 = _three_vectors(sums, k, lanes)
        s3, s4, s5 = _three_vectors(sums, k + 3, lanes)
        s6, s7, s8 = _three_vectors(sums, k + 6, lanes)
        for r in range(rows):
            for c in range(columns):
                place, at = r * stride + c, (r * s.stride + c) * wide
                pixel = load_one(x, place, lanes) if spread else load(x, place * wide, lanes)
                v0, v1, v2 = load(slope, at + o0, lanes), load(slope, at + o1, lanes), load(slope, at + o2, lanes)
                total = w0 * v0
                if keep or k > 0:
                    total = total + load(to, place * wide, lanes)
                total, other = multiply_add(w1, v1, total), w2 * v2
                s0, s1, s2 = multiply_add(pixel, v0, s0), multiply_add(pixel, v1, s1), multiply_add(pixel, v2, s2)
                v0, v1, v2 = load(slope, at + o3, lanes), load(slope, at + o4, lanes), load(slope, at + o5, lanes)
                total, other = multiply_add(w3, v0, total), multiply_add(w4, v1, other)
                total = multiply_add(w5, v2, total)
                s3, s4, s5 = multiply_add(pixel, v0, s3), multiply_add(pixel, v1, s4), multiply_add(pixel, v2, s5)
                v0, v1, v2 = load(slope, at + o6, lanes), load(slope, at + o7, lanes), load(slope, at + o8, lanes)
                total, other = multiply_add(w6, v0, total), multiply_add(w7, v1, other)
                total = multiply_add(w8, v2, total)
                s6, s7, s8 = multiply_add(pixel, v0, s6), multiply_add(pixel, v1, s7), multiply_add(pixel, v2, s8)
                store(to, place * wide, total + other)
        _put_three(sums, k, (s0, s1, s2), wide)
        _put_three(sums, k + 3, (s3, s4, s5), wide)
        _put_three(sums, k + 6, (s6, s7, s8), wide)


@part
def _three_offsets(offsets, k, wide):
    return integer_at(offsets, k) * wide, integer_at(offsets, k + 1) * wide, integer_at(offsets, k + 2) * wide


@part
def _three_vectors(table, k, lanes):
    wide = len(lanes)
    at = k * wide
    return load(table, at, lanes), load(table, at + wide, lanes), load(table, at + 2 * wide, lanes)


@part
def _put_three(table, k, three, wide):
    store(table, k * wide, three[0])
    store(table, (k + 1) * wide, three[1])
    store(table, (k + 2) * wide, three[2])


@part
def pack_units(s, x, to, lanes):
    """Write the inputs of one pose as ``[channels, taps, whole_columns]``, so that points are one after another."""
    stay_apart()
    for i in range(s.columns):
        for k in range(s.taps):
            at, place = i * s.point_step + k * s.unit_step, k * s.whole_columns + i
            for c in range(s.channels):
                to[place + c * s.taps * s.whole_columns] = x[at + c]


@part
def unpack_units(s, x, to, lanes):
    """Add what :func:`pack_units` would write as ``x`` to the inputs ``to``."""
    stay_apart()
    for i in range(s.columns):
        for k in range(s.taps):
            at, place = i * s.point_step + k * s.unit_step, k * s.whole_columns + i
            for c in range(s.channels):
                add_to(to, at + c, x[place + c * s.taps * s.whole_columns])


@part
def respond_to_units(s, x, kernel, t, lanes):
    """Write the responses of one channel to the plane ``t``; return their sum, their maximum, and its first place."""
    stay_apart()
    wide, step = len(lanes), s.whole_columns
    zero, one = fill(x, 0.0, lanes), fill(x, 1.0, lanes)
    seen, here = (zero, fill(x, lowest(x), lanes), zero), zero
    fours = s.columns - s.columns % 4
    for i in range(0, fours, 4):
        a0 = a1 = a2 = a3 = zero
        for k in range(s.taps):
            weight, at = load(kernel, k * wide, lanes), k * step + i
            a0 = multiply_add(weight, load_one(x, at, lanes), a0)
            a1 = multiply_add(weight, load_one(x, at + 1, lanes), a1)
            a2 = multiply_add(weight, load_one(x, at + 2, lanes), a2)
            a3 = multiply_add(weight, load_one(x, at + 3, lanes), a3)
        seen, here = _see(t, i, a0, here, seen, lanes), here + one
        seen, here = _see(t, i + 1, a1, here, seen, lanes), here + one
        seen, here = _see(t, i + 2, a2, here, seen, lanes), here + one
        seen, here = _see(t, i + 3, a3, here, seen, lanes), here + one
    for i in range(fours, s.columns):
        value = zero
        for k in range(s.taps):
            value = multiply_add(load(kernel, k * wide, lanes), load_one(x, k * step + i, lanes), value)
        seen, here = _see(t, i, value, here, seen, lanes), here + one
    return seen


@part
def back_through_units(s, slope, weight, x, to, sums, turned, lanes):
    """Write the gradients ``to`` of packed inputs ``x``, and add to those of the taps, which are ``sums``.

    ``turned`` is memory for the slopes as ``[lanes, whole_columns]``, so that vectors of points are multiplied.
    """
    stay_apart()
    wide, step = len(lanes), s.whole_columns
    zero, fours = fill(x, 0.0, lanes), s.columns - s.columns % 4
    if s.wants_input:
        for i in range(s.columns):
            for lane in range(wide):
                turned[lane * step + i] = slope[i * wide + lane]
    for k in range(s.taps):
        s0, s1, s2, s3 = load(sums, k * wide, lanes), zero, zero, zero
        for i in range(0, fours, 4):
            at, place = k * step + i, i * wide
            s0 = multiply_add(load_one(x, at, lanes), load(slope, place, lanes), s0)
            s1 = multiply_add(load_one(x, at + 1, lanes), load(slope, place + wide, lanes), s1)
            s2 = multiply_add(load_one(x, at + 2, lanes), load(slope, place + 2 * wide, lanes), s2)
            s3 = multiply_add(load_one(x, at + 3, lanes), load(slope, place + 3 * wide, lanes), s3)
        for i in range(fours, s.columns):
            s0 = multiply_add(load_one(x, k * step + i, lanes), load(slope, i * wide, lanes), s0)
        store(sums, k * wide, s0 + s1 + (s2 + s3))
        if s.wants_input:
            for i in range(0, step, 4 * wide):
                a0 = a1 = a2 = a3 = zero
                for lane in range(wide):
                    own, at = load_one(weight, k * wide + lane, lanes), lane * step + i
                    a0 = multiply_add(own, load(turned, at, lanes), a0)
                    a1 = multiply_add(own, load(turned, at + wide, lanes), a1)
                    a2 = multiply_add(own, load(turned, at + 2 * wide, lanes), a2)
                    a3 = multiply_add(own, load(turned, at + 3 * wide, lanes), a3)
                place = k * step + i
                store(to, place, a0)
                store(to, place + wide, a1)
                store(to, place + 2 * wide, a2)
                store(to, place + 3 * wide, a3)
