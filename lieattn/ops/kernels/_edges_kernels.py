# mypy: allow-untyped-defs
"""Networks of edges, and messages along edges whose kernels are linear in their outputs, on the CPU.

Lanes are the units of a layer or the channels of a signal, so all tables are read row by row in the layout of torch.
The rows of an edge, one for each frame, are multiplied by a matrix four at a time, so that its entries are loaded only
once for the four. Units and channels fill whole vectors, with zeros after the last channel.
"""

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import activate, activate_with_slope, copy_row, multiply, row
from lieattn.ops.kernels._vectors import (
    add_to,
    add_up,
    at_address,
    fill,
    integer_at,
    load,
    load_one,
    multiply_add,
    offset,
    stay_apart,
    store,
)


@part
def affine(x, x_row, rows, ins, weight, outs, start, out, lanes):
    """Compute ``out[k, o] = start[o] + Σ_r x[k, r] weight[r, o]``."""
    stay_apart()
    wide = len(lanes)
    fours, pairs = rows - rows % 4, outs - outs % (2 * wide)
    for k in range(0, fours, 4):
        x0, x1, x2, x3 = row(x, k, x_row), row(x, k + 1, x_row), row(x, k + 2, x_row), row(x, k + 3, x_row)
        for o in range(0, pairs, 2 * wide):
            a0 = a1 = a2 = a3 = load(start, o, lanes)
            b0 = b1 = b2 = b3 = load(start, o + wide, lanes)
            for r in range(ins):
                w, v = load(weight, r * outs + o, lanes), load(weight, r * outs + o + wide, lanes)
                a0, b0 = _fold(load_one(x0, r, lanes), w, v, a0, b0)
                a1, b1 = _fold(load_one(x1, r, lanes), w, v, a1, b1)
                a2, b2 = _fold(load_one(x2, r, lanes), w, v, a2, b2)
                a3, b3 = _fold(load_one(x3, r, lanes), w, v, a3, b3)
            _put_four(out, k * outs + o, outs, a0, a1, a2, a3)
            _put_four(out, k * outs + o + wide, outs, b0, b1, b2, b3)
        for o in range(pairs, outs, wide):
            a0 = a1 = a2 = a3 = load(start, o, lanes)
            for r in range(ins):
                w = load(weight, r * outs + o, lanes)
                a0, a1 = multiply_add(load_one(x0, r, lanes), w, a0), multiply_add(load_one(x1, r, lanes), w, a1)
                a2, a3 = multiply_add(load_one(x2, r, lanes), w, a2), multiply_add(load_one(x3, r, lanes), w, a3)
            _put_four(out, k * outs + o, outs, a0, a1, a2, a3)
    for k in range(fours, rows):
        for o in range(0, outs, wide):
            a0 = load(start, o, lanes)
            for r in range(ins):
                a0 = multiply_add(load_one(x, k * x_row + r, lanes), load(weight, r * outs + o, lanes), a0)
            store(out, k * outs + o, a0)


@part
def _fold(factor, w, v, a, b):
    return multiply_add(factor, w, a), multiply_add(factor, v, b)


@part
def _put_four(out, at, step, a, b, c, d):
    store(out, at, a)
    store(out, at + step, b)
    store(out, at + 2 * step, c)
    store(out, at + 3 * step, d)


@part
def add_outer(x, x_row, ins, y, outs, rows, total, lanes):
    """Add ``Σ_k x[k, r] y[k, o]`` to ``total[r, o]``."""
    stay_apart()
    wide = len(lanes)
    fours = rows - rows % 4
    for k in range(0, fours, 4):
        x0, x1, x2, x3 = row(x, k, x_row), row(x, k + 1, x_row), row(x, k + 2, x_row), row(x, k + 3, x_row)
        for o in range(0, outs, wide):
            y0, y1 = load(y, k * outs + o, lanes), load(y, (k + 1) * outs + o, lanes)
            y2, y3 = load(y, (k + 2) * outs + o, lanes), load(y, (k + 3) * outs + o, lanes)
            for r in range(ins):
                a = multiply_add(load_one(x0, r, lanes), y0, load(total, r * outs + o, lanes))
                a = multiply_add(load_one(x1, r, lanes), y1, a)
                b = multiply_add(load_one(x3, r, lanes), y3, load_one(x2, r, lanes) * y2)
                store(total, r * outs + o, a + b)
    for k in range(fours, rows):
        for o in range(0, outs, wide):
            value = load(y, k * outs + o, lanes)
            for r in range(ins):
                at = r * outs + o
                store(total, at, multiply_add(load_one(x, k * x_row + r, lanes), value, load(total, at, lanes)))


@part
def add_rows(total, x, rows, outs, lanes):
    """Add the sum of some rows to a row."""
    for o in range(0, outs, len(lanes)):
        value = load(total, o, lanes)
        for k in range(rows):
            value = value + load(x, k * outs + o, lanes)
        store(total, o, value)


@compiled
def units_forward(
    seen, shared, weight, first, second, bias, last, zero, begin, end, fiber, inputs, hidden, maps, channels, apart,
    out, scratch, lanes,
):  # fmt: skip
    """Compute units ``[edges, fiber, hidden]`` of the edges ``begin`` to ``end``, and apply ``maps`` if there are any.

    ``seen`` is ``[edges, fiber, inputs]``, ``shared`` ``[edges, hidden]`` and ``weight`` ``[edges]``. ``first``
    ``[inputs, hidden]``, ``second`` ``[hidden, hidden]`` and ``last`` have a row for each input. The rows of ``last``
    contain the channels of all maps, and fill vectors. The outputs of a map are ``[edges, fiber, channels]``, and
    ``apart`` is the distance between two maps.
    """
    wide, many, length = len(lanes), fiber * hidden, _filled(maps * channels, lanes)
    y, none = at_address(scratch, lanes), at_address(zero, lanes)
    made = row(y, 2, many)
    for edge in range(begin, end):
        own, t = row(at_address(seen, lanes), edge, fiber * inputs), row(at_address(shared, lanes), edge, hidden)
        affine(own, inputs, fiber, inputs, at_address(first, lanes), hidden, t, y, lanes)
        activate(y, many // wide, lanes)
        z = row(y, 1, many) if maps else row(at_address(out, lanes), edge, many)
        affine(y, hidden, fiber, hidden, at_address(second, lanes), hidden, at_address(bias, lanes), z, lanes)
        activate(z, many // wide, lanes)
        _scale(z, load_one(at_address(weight, lanes), edge, lanes), many, lanes)
        if maps:
            affine(z, hidden, fiber, hidden, at_address(last, lanes), length, none, made, lanes)
            for number in range(maps):
                to = offset(at_address(out, lanes), number * apart + edge * fiber * channels)
                for k in range(fiber):
                    copy_row(row(to, k, channels), offset(made, k * length + number * channels), channels, lanes)


@part
def _filled(count, lanes):
    """Return the smallest multiple of the number of lanes that is at least ``count``."""
    return (count + len(lanes) - 1) // len(lanes) * len(lanes)


@part
def _scale(x, factor, count, lanes):
    for at in range(0, count, len(lanes)):
        store(x, at, factor * load(x, at, lanes))


@compiled
def units_backward(
    seen, shared, weight, first, second, bias, last, zero, begin, end, fiber, inputs, hidden, maps, channels, turned,
    grads, to_seen, wanted, to_shared, to_weight, learns, to_first, to_second, to_bias, to_last, scratch, lanes,
):  # fmt: skip
    """Compute gradients, given the addresses ``grads`` of those of the units or of the outputs of the maps.

    Here ``last`` ``[maps * channels, hidden]`` has a row for each output, and so has ``turned``, the transpose of
    ``second``. All gradients are added, that of ``seen`` only if it is wanted, and those of matrices if one ``learns``.
    """
    wide, many, length = len(lanes), fiber * hidden, maps * channels
    y, none = at_address(scratch, lanes), at_address(zero, lanes)
    slope1, z, slope2, change = row(y, 1, many), row(y, 2, many), row(y, 3, many), row(y, 4, many)
    made = row(y, 5, many)
    for edge in range(begin, end):
        own, t = row(at_address(seen, lanes), edge, fiber * inputs), row(at_address(shared, lanes), edge, hidden)
        affine(own, inputs, fiber, inputs, at_address(first, lanes), hidden, t, y, lanes)
        activate_with_slope(y, slope1, many // wide, lanes)
        affine(y, hidden, fiber, hidden, at_address(second, lanes), hidden, at_address(bias, lanes), z, lanes)
        activate_with_slope(z, slope2, many // wide, lanes)
        share, total = load_one(at_address(weight, lanes), edge, lanes), fill(y, 0.0, lanes)
        if maps:
            _side_by_side(grads, maps, edge, fiber, channels, made, lanes)
            affine(made, length, fiber, length, at_address(last, lanes), hidden, none, change, lanes)
        g = change if maps else row(at_address(integer_at(grads, 0), lanes), edge, many)
        for at in range(0, many, wide):
            value, unit = load(g, at, lanes), load(z, at, lanes)
            total = multiply_add(value, unit, total)
            store(z, at, unit * share)
            store(change, at, value * share * load(slope2, at, lanes))
        add_to(at_address(to_weight, lanes), edge, add_up(total))
        if learns:
            add_outer(made, length, length, z, hidden, fiber, at_address(to_last, lanes), lanes)
            add_rows(at_address(to_bias, lanes), change, fiber, hidden, lanes)
            add_outer(y, hidden, hidden, change, hidden, fiber, at_address(to_second, lanes), lanes)
        affine(change, hidden, fiber, hidden, at_address(turned, lanes), hidden, none, z, lanes)
        multiply(z, slope1, many // wide, lanes)
        add_rows(row(at_address(to_shared, lanes), edge, hidden), z, fiber, hidden, lanes)
        if learns:
            add_outer(own, inputs, inputs, z, hidden, fiber, at_address(to_first, lanes), lanes)
        if wanted:
            to_own = row(at_address(to_seen, lanes), edge, fiber * inputs)
            _add_products(z, fiber, at_address(first, lanes), inputs, hidden, to_own, lanes)


@part
def _side_by_side(tables, maps, edge, fiber, channels, out, lanes):
    """Copy the rows of an edge in several tables ``[edges, fiber, channels]`` to ``[fiber, maps * channels]``."""
    for number in range(maps):
        table = row(at_address(integer_at(tables, number), lanes), edge, fiber * channels)
        for k in range(fiber):
            copy_row(offset(out, (k * maps + number) * channels), row(table, k, channels), channels, lanes)


@part
def _add_products(x, rows, y, columns, depth, out, lanes):
    """Add ``Σ_d x[k, d] y[r, d]`` to ``out[k, r]``."""
    for k in range(rows):
        for r in range(columns):
            total = fill(x, 0.0, lanes)
            for at in range(0, depth, len(lanes)):
                total = multiply_add(load(x, k * depth + at, lanes), load(y, r * depth + at, lanes), total)
            add_to(out, k * columns + r, add_up(total))


@compiled
def messages_forward(
    pointers, edges, others, low, high, z, hidden, fiber, weight, channels, x, zero, out, scratch, lanes
):
    """Sum ``(z weight) * x`` over the edges of the points ``low`` to ``high``, to ``[points, fiber, channels]``.

    The edges of point i are ``edges[pointers[i] : pointers[i + 1]]``, or the numbers in this range if ``edges`` is 0.
    They lead to ``others[edge]``, whose ``x`` is used. ``weight`` is ``[hidden, channels]``. ``out`` is zero at first.
    """
    wide, length = len(lanes), fiber * channels
    rows, table, none = at_address(z, lanes), at_address(weight, lanes), at_address(zero, lanes)
    kernel = at_address(scratch, lanes)
    for point in range(low, high):
        total = row(at_address(out, lanes), point, length)
        for number in range(integer_at(pointers, point), integer_at(pointers, point + 1)):
            edge = integer_at(edges, number) if edges else number
            affine(row(rows, edge, fiber * hidden), hidden, fiber, hidden, table, channels, none, kernel, lanes)
            signal = row(at_address(x, lanes), integer_at(others, edge), length)
            for at in range(0, length, wide):
                value = multiply_add(load(kernel, at, lanes), load(signal, at, lanes), load(total, at, lanes))
                store(total, at, value)


@compiled
def messages_backward(
    pointers, sources, low, high, z, hidden, fiber, weight, channels, used, x, grad, zero, to_z, learns, to_weight,
    scratch, lanes,
):  # fmt: skip
    """Write the gradients of units, and add those of weights ``[used, hidden]``, given the gradient ``grad`` of sums.

    The latter are left out unless the weights learn.

    The edges are those of the targets ``low`` to ``high``. The first ``used`` of the ``channels`` are not padding.
    """
    wide, length = len(lanes), fiber * channels
    table, none, product = at_address(weight, lanes), at_address(zero, lanes), at_address(scratch, lanes)
    for point in range(low, high):
        g = row(at_address(grad, lanes), point, length)
        for edge in range(integer_at(pointers, point), integer_at(pointers, point + 1)):
            signal = row(at_address(x, lanes), integer_at(sources, edge), length)
            for at in range(0, length, wide):
                store(product, at, load(g, at, lanes) * load(signal, at, lanes))
            changed = row(at_address(to_z, lanes), edge, fiber * hidden)
            affine(product, channels, fiber, used, table, hidden, none, changed, lanes)
            rows = row(at_address(z, lanes), edge, fiber * hidden)
            if learns:
                add_outer(product, channels, used, rows, hidden, fiber, at_address(to_weight, lanes), lanes)


@compiled
def gated_forward(pointers, edges, others, low, high, kernels, x, out, length, lanes):
    """Write the sums of ``kernels * x`` over the edges of the points ``low`` to ``high``, ``[points, length]``.

    Edges are given as in :func:`messages_forward`, and kernels are ``[edges, length]``.
    """
    wide, gates, signals = len(lanes), at_address(kernels, lanes), at_address(x, lanes)
    for point in range(low, high):
        total = _cleared(out, point, length, lanes)
        for number in range(integer_at(pointers, point), integer_at(pointers, point + 1)):
            edge = integer_at(edges, number) if edges else number
            gate, signal = row(gates, edge, length), row(signals, integer_at(others, edge), length)
            for at in range(0, length, wide):
                value = multiply_add(load(gate, at, lanes), load(signal, at, lanes), load(total, at, lanes))
                store(total, at, value)


@compiled
def gated_backward(pointers, edges, others, low, high, grad, kernels, x, to_kernels, to_x, length, lanes):
    """Write the gradients of kernels and of ``x`` at sources, given the gradient ``grad`` of the sums.

    The edges are those of the sources ``low`` to ``high``, and lead to the targets ``others[edge]``.
    """
    wide, gates, changes = len(lanes), at_address(kernels, lanes), at_address(grad, lanes)
    for point in range(low, high):
        total, signal = _cleared(to_x, point, length, lanes), row(at_address(x, lanes), point, length)
        for number in range(integer_at(pointers, point), integer_at(pointers, point + 1)):
            edge = integer_at(edges, number) if edges else number
            gate, change = row(gates, edge, length), row(changes, integer_at(others, edge), length)
            changed = row(at_address(to_kernels, lanes), edge, length)
            for at in range(0, length, wide):
                value = load(change, at, lanes)
                store(changed, at, value * load(signal, at, lanes))
                store(total, at, multiply_add(load(gate, at, lanes), value, load(total, at, lanes)))


@compiled
def gated_again(
    pointers, edges, others, low, high, by_kernels, by_x, grad, kernels, x, to_grad, to_kernels, length, lanes
):
    """Write the gradients of ``grad`` and of kernels, given those of both results of :func:`gated_backward`.

    The edges are those of the targets ``low`` to ``high``.
    """
    wide, gates, turns = len(lanes), at_address(kernels, lanes), at_address(by_kernels, lanes)
    signals, waves = at_address(x, lanes), at_address(by_x, lanes)
    for point in range(low, high):
        total, change = _cleared(to_grad, point, length, lanes), row(at_address(grad, lanes), point, length)
        for number in range(integer_at(pointers, point), integer_at(pointers, point + 1)):
            edge = integer_at(edges, number) if edges else number
            gate, turn, end = row(gates, edge, length), row(turns, edge, length), integer_at(others, edge)
            signal, wave = row(signals, end, length), row(waves, end, length)
            changed = row(at_address(to_kernels, lanes), edge, length)
            for at in range(0, length, wide):
                value = load(wave, at, lanes)
                store(changed, at, value * load(change, at, lanes))
                value = multiply_add(load(gate, at, lanes), value, load(total, at, lanes))
                store(total, at, multiply_add(load(turn, at, lanes), load(signal, at, lanes), value))


@part
def _cleared(table, number, length, lanes):
    """Return a pointer to a row of a table, after writing zeros to it."""
    out = row(at_address(table, lanes), number, length)
    for at in range(0, length, len(lanes)):
        store(out, at, fill(out, 0.0, lanes))
    return out


@compiled
def moments_of_points(pointers, edges, low, high, arrows, size, functions, count, out, lanes):
    """Add sums of products of arrows and functions, ``[points, size, count]``, for points from ``low`` to ``high``.

    The edges of a point are given as in :func:`messages_forward`; arrows are ``[edges, size]``, functions ``[edges,
    count]``.
    """
    wide = len(lanes)
    for point in range(low, high):
        total = row(at_address(out, lanes), point, size * count)
        for number in range(integer_at(pointers, point), integer_at(pointers, point + 1)):
            edge = integer_at(edges, number) if edges else number
            arrow, values = row(at_address(arrows, lanes), edge, size), row(at_address(functions, lanes), edge, count)
            for k in range(0, count, wide):
                value = load(values, k, lanes)
                for at in range(size):
                    to = at * count + k
                    store(total, to, multiply_add(load_one(arrow, at, lanes), value, load(total, to, lanes)))


@compiled
def moments_along_edges(ends, begin, end, arrows, size, moments, count, out, lanes):
    """Compute the products ``[edges, count]`` of arrows and the moments at the points ``ends``."""
    wide = len(lanes)
    for edge in range(begin, end):
        arrow = row(at_address(arrows, lanes), edge, size)
        table = row(at_address(moments, lanes), integer_at(ends, edge), size * count)
        for k in range(0, count, wide):
            total = fill(table, 0.0, lanes)
            for at in range(size):
                total = multiply_add(load_one(arrow, at, lanes), load(table, at * count + k, lanes), total)
            store(at_address(out, lanes), edge * count + k, total)
