# mypy: allow-untyped-defs
"""The networks of the heads on the CPU: small matrices, and vectors of rows.

All layers of a head are applied to a tile of vectors of rows while it is in the cache. The backward pass applies them
again, and adds the gradients of weights in vectors, whose lanes are summed at the end.
"""

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import activate, activate_with_slope, dot_products, multiply, row
from lieattn.ops.kernels._vectors import (
    at_address,
    fill,
    gather,
    load,
    load_one,
    multiply_add,
    offset,
    stay_apart,
    store,
)

TILE = 8
"""Number of vectors of rows in a tile, which is even."""
ZERO, BIAS, KEEP = 0, 1, 2  # a product is added to zero, to the bias, or to the old value


@part
def mix(weight, to_out, to_in, outs, ins, x, x_row, start, bias, out, out_row, lanes):
    """Compute ``out[i] = start + Σ_r weight[i, r] x[r]`` for a tile, with ``weight`` at ``i * to_out + r * to_in``."""
    stay_apart()
    wide = len(lanes)
    fours = outs - outs % 4
    for t in range(0, TILE * wide, 2 * wide):
        for i in range(0, fours, 4):
            a, b = _begin(start, bias, i, out, out_row, t, lanes), _begin(start, bias, i + 1, out, out_row, t, lanes)
            c, d = (
                _begin(start, bias, i + 2, out, out_row, t, lanes),
                _begin(start, bias, i + 3, out, out_row, t, lanes),
            )
            for r in range(ins):
                at, two = i * to_out + r * to_in, _two(x, r * x_row + t, lanes)
                a = _fold(load_one(weight, at, lanes), two, a)
                b = _fold(load_one(weight, at + to_out, lanes), two, b)
                c = _fold(load_one(weight, at + 2 * to_out, lanes), two, c)
                d = _fold(load_one(weight, at + 3 * to_out, lanes), two, d)
            at = i * out_row + t
            _put(out, at, a, lanes)
            _put(out, at + out_row, b, lanes)
            _put(out, at + 2 * out_row, c, lanes)
            _put(out, at + 3 * out_row, d, lanes)
        for i in range(fours, outs):
            a = _begin(start, bias, i, out, out_row, t, lanes)
            for r in range(ins):
                a = _fold(load_one(weight, i * to_out + r * to_in, lanes), _two(x, r * x_row + t, lanes), a)
            _put(out, i * out_row + t, a, lanes)


@part
def _two(table, at, lanes):
    return load(table, at, lanes), load(table, at + len(lanes), lanes)


@part
def _fold(factor, two, sums):
    """Add two products to two sums."""
    return multiply_add(factor, two[0], sums[0]), multiply_add(factor, two[1], sums[1])


@part
def _put(out, at, two, lanes):
    store(out, at, two[0])
    store(out, at + len(lanes), two[1])


@part
def _begin(start, bias, i, out, out_row, t, lanes):
    """Return the two vectors to which a row of a product is added."""
    if start == KEEP:
        return _two(out, i * out_row + t, lanes)
    value = load_one(bias, i, lanes) if start == BIAS else fill(out, 0.0, lanes)
    return value, value


@part
def add_rows(out, x, rows, lanes):
    """Add the sum of each row of a tile to a vector."""
    wide = len(lanes)
    for i in range(rows):
        total = load(out, i * wide, lanes)
        for t in range(TILE):
            total = total + load(x, (i * TILE + t) * wide, lanes)
        store(out, i * wide, total)


@compiled
def forward(
    x, x_row, tail, count, first, last, weights, parameters, heads, inputs, hidden, outputs, out, out_tail, scratch,
    lanes,
):  # fmt: skip
    """Write outputs ``[heads outputs, count]`` of the rows ``first`` to ``last``, which are at the borders of tiles.

    Rows are ``[inputs, x_row]``, or ``[count, inputs]`` if ``x_row`` is 0. The last, incomplete tile is read from
    ``tail`` and written to ``out_tail``. ``weights`` are ``parameters`` numbers for each head: w1 [inputs, hidden], b1,
    w2 [hidden, hidden], b2, w3 [hidden, outputs] and b3, in this order.
    """
    size = TILE * len(lanes)
    h1 = row(at_address(scratch, lanes), inputs, size)
    h2 = row(h1, hidden, size)
    for begin in range(first, last, size):
        columns, stride = _columns(x, x_row, tail, begin, count, inputs, scratch, lanes)
        end, apart = _place(out, out_tail, begin, count, lanes)
        for head in range(heads):
            own = row(at_address(weights, lanes), head, parameters)
            w1, b1, w2, b2, w3, b3 = _parts(own, inputs, hidden, outputs, 1)
            mix(w1, 1, hidden, hidden, inputs, columns, stride, BIAS, b1, h1, size, lanes)
            activate(h1, hidden * TILE, lanes)
            mix(w2, 1, hidden, hidden, hidden, h1, size, BIAS, b2, h2, size, lanes)
            activate(h2, hidden * TILE, lanes)
            final = row(end, head * outputs, apart)
            mix(w3, 1, outputs, outputs, hidden, h2, size, BIAS, b3, final, apart, lanes)
            for number in range(outputs):
                activate(row(final, number, apart), TILE, lanes)


@part
def _columns(x, x_row, tail, begin, count, inputs, scratch, lanes):
    """Return a pointer to a tile as vectors of rows, and the distance of two inputs."""
    wide = len(lanes)
    size = TILE * wide
    if begin + size > count:
        return at_address(tail, lanes), size
    if x_row:
        return offset(at_address(x, lanes), begin), x_row
    rows, columns = offset(at_address(x, lanes), begin * inputs), at_address(scratch, lanes)
    for i in range(inputs):
        for t in range(0, size, wide):
            store(columns, i * size + t, gather(rows, t * inputs + i, inputs, lanes))
    return columns, size


@part
def _place(values, tail, begin, count, lanes):
    """Return a pointer to a tile of ``[heads outputs, count]``, and the distance of two outputs."""
    size = TILE * len(lanes)
    if begin + size > count:
        return at_address(tail, lanes), size
    return offset(at_address(values, lanes), begin), count


@compiled
def backward(
    x, x_row, tail, count, first, last, weights, parameters, heads, inputs, hidden, outputs, grad, grad_tail,
    to_weights, to_x, to_x_row, wanted, scratch, lanes,
):  # fmt: skip
    """Add gradients to vectors ``to_weights``, in the order of weights, and, if wanted, to ``[inputs, to_x_row]``."""
    wide = len(lanes)
    size, many = TILE * wide, hidden * TILE
    h1 = row(at_address(scratch, lanes), inputs, size)
    s1, h2 = row(h1, hidden, size), row(h1, 2 * hidden, size)
    s2, d1, d2 = row(h1, 3 * hidden, size), row(h1, 4 * hidden, size), row(h1, 5 * hidden, size)
    h3, d3 = row(h1, 6 * hidden, size), row(h1, 6 * hidden + outputs, size)
    for begin in range(first, last, size):
        columns, stride = _columns(x, x_row, tail, begin, count, inputs, scratch, lanes)
        end, apart = _place(grad, grad_tail, begin, count, lanes)
        for head in range(heads):
            own = row(at_address(weights, lanes), head, parameters)
            w1, b1, w2, b2, w3, b3 = _parts(own, inputs, hidden, outputs, 1)
            totals = row(at_address(to_weights, lanes), head, parameters * wide)
            g1, gb1, g2, gb2, g3, gb3 = _parts(totals, inputs, hidden, outputs, wide)
            mix(w1, 1, hidden, hidden, inputs, columns, stride, BIAS, b1, h1, size, lanes)
            activate_with_slope(h1, s1, many, lanes)
            mix(w2, 1, hidden, hidden, hidden, h1, size, BIAS, b2, h2, size, lanes)
            activate_with_slope(h2, s2, many, lanes)
            mix(w3, 1, outputs, outputs, hidden, h2, size, BIAS, b3, h3, size, lanes)
            activate_with_slope(h3, d3, outputs * TILE, lanes)
            for number in range(outputs):
                multiply(row(d3, number, size), row(end, head * outputs + number, apart), TILE, lanes)
            dot_products(h2, size, hidden, d3, size, outputs, TILE, True, g3, outputs * wide, wide, lanes)
            add_rows(gb3, d3, outputs, lanes)
            mix(w3, outputs, 1, hidden, outputs, d3, size, ZERO, b3, d2, size, lanes)
            multiply(d2, s2, many, lanes)
            dot_products(h1, size, hidden, d2, size, hidden, TILE, True, g2, hidden * wide, wide, lanes)
            add_rows(gb2, d2, hidden, lanes)
            mix(w2, hidden, 1, hidden, hidden, d2, size, ZERO, b2, d1, size, lanes)
            multiply(d1, s1, many, lanes)
            dot_products(columns, stride, inputs, d1, size, hidden, TILE, True, g1, hidden * wide, wide, lanes)
            add_rows(gb1, d1, hidden, lanes)
            if wanted:
                to_tile = offset(at_address(to_x, lanes), begin)
                mix(w1, hidden, 1, inputs, hidden, d1, size, KEEP, b1, to_tile, to_x_row, lanes)


@part
def _parts(weights, inputs, hidden, outputs, width):
    """Return pointers to w1, b1, w2, b2, w3, b3."""
    b1 = offset(weights, inputs * hidden * width)
    w2 = offset(b1, hidden * width)
    b2 = offset(w2, hidden * hidden * width)
    w3 = offset(b2, hidden * width)
    return weights, b1, w2, b2, w3, offset(w3, hidden * outputs * width)
