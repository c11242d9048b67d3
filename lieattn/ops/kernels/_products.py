# mypy: allow-untyped-defs
"""Arithmetic of small tables of vectors, with one table per lane, which the kernels use, and their layout in memory.

A table is a pointer and strides in elements, and the vectors of a row are contiguous. Tiles of 2 x 4 results fit into
registers, so that an operand is loaded once for several products. Larger tiles are faster alone, but slower in the
kernels.
"""

from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._vectors import (
    at_address,
    exp,
    fill,
    gather,
    load,
    multiply_add,
    offset,
    prefetch,
    stay_apart,
    store,
)


@part
def dot_products(x, x_row, rows, y, y_row, columns, depth, keep, out, out_row, out_column, lanes):
    """Compute ``out[i, j] = Σ_d x[i, d] y[j, d]``, or add to ``out`` if ``keep``."""
    stay_apart()
    wide = len(lanes)
    zero = fill(x, 0.0, lanes)
    even, fours = rows - rows % 2, columns - columns % 4
    for i in range(0, even, 2):
        x0, x1 = offset(x, i * x_row), offset(x, (i + 1) * x_row)
        for j in range(0, fours, 4):
            y0, y1, y2, y3 = _four_rows(y, j, y_row)
            a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = zero
            for at in range(0, depth * wide, wide):
                shared = load(y0, at, lanes), load(y1, at, lanes), load(y2, at, lanes), load(y3, at, lanes)
                a00, a01, a02, a03 = _fold(load(x0, at, lanes), shared, (a00, a01, a02, a03))
                a10, a11, a12, a13 = _fold(load(x1, at, lanes), shared, (a10, a11, a12, a13))
            at = i * out_row + j * out_column
            _put_four(out, at, out_column, (a00, a01, a02, a03), keep, lanes)
            _put_four(out, at + out_row, out_column, (a10, a11, a12, a13), keep, lanes)
    for i in range(rows):
        for j in range(fours if i < even else 0, columns):
            total = zero
            for d in range(depth):
                total = multiply_add(load(x, i * x_row + d * wide, lanes), load(y, j * y_row + d * wide, lanes), total)
            _put(out, i * out_row + j * out_column, total, keep, lanes)


@part
def combine(weight, weight_row, weight_column, rows, columns, y, y_row, depth, keep, out, out_row, lanes):
    """Compute ``out[i, d] = Σ_r weight[i, r] y[r, d]``, or add to ``out`` if ``keep``."""
    stay_apart()
    wide = len(lanes)
    zero = fill(y, 0.0, lanes)
    fours = depth - depth % 4
    for at in range(0, fours * wide, 4 * wide):
        for i in range(0, rows - 1, 2):
            a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = zero
            for r in range(columns):
                place = i * weight_row + r * weight_column
                shared = _four_vectors(y, r * y_row + at, lanes)
                a00, a01, a02, a03 = _fold(load(weight, place, lanes), shared, (a00, a01, a02, a03))
                a10, a11, a12, a13 = _fold(load(weight, place + weight_row, lanes), shared, (a10, a11, a12, a13))
            _put_four(out, i * out_row + at, wide, (a00, a01, a02, a03), keep, lanes)
            _put_four(out, (i + 1) * out_row + at, wide, (a10, a11, a12, a13), keep, lanes)
        if rows % 2:
            i = rows - 1
            a00 = a01 = a02 = a03 = zero
            for r in range(columns):
                w0 = load(weight, i * weight_row + r * weight_column, lanes)
                a00, a01, a02, a03 = _fold(w0, _four_vectors(y, r * y_row + at, lanes), (a00, a01, a02, a03))
            _put_four(out, i * out_row + at, wide, (a00, a01, a02, a03), keep, lanes)
    if fours < depth:
        _combine_rest(
            weight, weight_row, weight_column, rows, columns, y, y_row, fours, depth, keep, out, out_row, lanes
        )


@part
def _combine_rest(weight, weight_row, weight_column, rows, columns, y, y_row, fours, depth, keep, out, out_row, lanes):
    """Compute the channels from ``fours`` on, in tiles of 4 x 2 results."""
    wide = len(lanes)
    zero = fill(y, 0.0, lanes)
    quads, pairs = rows - rows % 4, depth - depth % 2
    for d in range(fours, pairs, 2):
        at = d * wide
        for i in range(0, quads, 4):
            w0, w1, w2, w3 = _four_rows(weight, i, weight_row)
            a00 = a01 = a10 = a11 = a20 = a21 = a30 = a31 = zero
            for r in range(columns):
                place, other = r * weight_column, r * y_row + at
                shared = load(w0, place, lanes), load(w1, place, lanes), load(w2, place, lanes), load(w3, place, lanes)
                a00, a10, a20, a30 = _fold(load(y, other, lanes), shared, (a00, a10, a20, a30))
                a01, a11, a21, a31 = _fold(load(y, other + wide, lanes), shared, (a01, a11, a21, a31))
            first = i * out_row + at
            _put_four(out, first, out_row, (a00, a10, a20, a30), keep, lanes)
            _put_four(out, first + wide, out_row, (a01, a11, a21, a31), keep, lanes)
    for i in range(rows):
        for d in range(pairs if i < quads else fours, depth):
            total = zero
            for r in range(columns):
                w0 = load(weight, i * weight_row + r * weight_column, lanes)
                total = multiply_add(w0, load(y, r * y_row + d * wide, lanes), total)
            _put(out, i * out_row + d * wide, total, keep, lanes)


@part
def _four_rows(table, first, length):
    """Return pointers to four rows of a table."""
    start = offset(table, first * length)
    return start, offset(start, length), offset(start, 2 * length), offset(start, 3 * length)


@part
def _four_vectors(table, at, lanes):
    wide = len(lanes)
    return (
        load(table, at, lanes),
        load(table, at + wide, lanes),
        load(table, at + 2 * wide, lanes),
        load(table, at + 3 * wide, lanes),
    )


@part
def _fold(factor, four, sums):
    """Add four products to four sums."""
    return (
        multiply_add(factor, four[0], sums[0]),
        multiply_add(factor, four[1], sums[1]),
        multiply_add(factor, four[2], sums[2]),
        multiply_add(factor, four[3], sums[3]),
    )


@part
def _put(out, at, value, keep, lanes):
    if keep:
        value = value + load(out, at, lanes)
    store(out, at, value)


@part
def _put_four(out, at, step, four, keep, lanes):
    """Write four vectors, ``step`` elements apart."""
    _put(out, at, four[0], keep, lanes)
    _put(out, at + step, four[1], keep, lanes)
    _put(out, at + 2 * step, four[2], keep, lanes)
    _put(out, at + 3 * step, four[3], keep, lanes)


@part
def prefetch_row(table, number, length):
    """Prefetch a row of a table, in steps of 16 elements, which are a cache line of float32."""
    for at in range(0, length, 16):
        prefetch(table, number * length + at)


@part
def set_all(out, vectors, number, lanes):
    """Set all lanes of a number of vectors to a number."""
    value = fill(out, number, lanes)
    for at in range(vectors):
        store(out, at * len(lanes), value)


@part
def copy_row(out, x, elements, lanes):
    """Copy a number of elements, the last of which need not fill a vector."""
    wide, four, one = len(lanes), (lanes[0], lanes[0], lanes[0], lanes[0]), (lanes[0],)
    whole, quads = elements - elements % wide, elements - elements % 4
    for at in range(0, whole, wide):
        store(out, at, load(x, at, lanes))
    for at in range(whole, quads, 4):
        store(out, at, load(x, at, four))
    for at in range(max(whole, quads), elements):
        store(out, at, load(x, at, one))


@part
def add_row(out, x, vectors, lanes):
    """Add a row of vectors to another."""
    for at in range(vectors):
        place = at * len(lanes)
        store(out, place, load(out, place, lanes) + load(x, place, lanes))


@part
def scale_row(out, x, factor, vectors, lanes):
    """Add ``factor * x`` to a row of vectors."""
    for at in range(vectors):
        place = at * len(lanes)
        store(out, place, multiply_add(factor, load(x, place, lanes), load(out, place, lanes)))


@part
def row(table, number, length):
    """Return a pointer to a row of a table."""
    return offset(table, number * length)


@part
def activate(u, vectors, lanes):
    """Replace u by its swish u σ(u)."""
    stay_apart()
    wide = len(lanes)
    one, zero = fill(u, 1.0, lanes), fill(u, 0.0, lanes)
    for at in range(0, vectors * wide, wide):
        value = load(u, at, lanes)
        store(u, at, value / (one + exp(zero - value)))


@part
def activate_with_slope(u, slope, vectors, lanes):
    """Replace u by its swish, and write the derivative to ``slope``."""
    stay_apart()
    wide = len(lanes)
    one, zero = fill(u, 1.0, lanes), fill(u, 0.0, lanes)
    for at in range(0, vectors * wide, wide):
        value = load(u, at, lanes)
        share = one / (one + exp(zero - value))
        value = value * share
        store(u, at, value)
        store(slope, at, multiply_add(value, one - share, share))


@part
def multiply(out, x, vectors, lanes):
    """Multiply a table of vectors by another, entry by entry."""
    wide = len(lanes)
    for at in range(0, vectors * wide, wide):
        store(out, at, load(out, at, lanes) * load(x, at, lanes))


@compiled
def pack_heads(signal, packed, bundled, groups, clouds, points, fiber, heads, dim, first, filled, begin, end, lanes):
    """Pack a signal. ``bundled`` is memory for one frame of a bundle, so that reads and writes are contiguous."""
    signal_at, packed_at, bundled_at = at_address(signal, lanes), at_address(packed, lanes), at_address(bundled, lanes)
    wide, length = len(lanes), heads * dim
    rows, size = groups * points, fiber * dim * wide
    blocks = (filled + wide - 1) // wide
    for row in range(rows):
        point = row // points * clouds * points + row % points
        for frame in range(fiber):
            for cloud in range(begin, end):
                given = ((point + cloud * points) * fiber + frame) * length
                copy_row(offset(bundled_at, (cloud - begin) * length), offset(signal_at, given), length, lanes)
            for block in range(blocks):
                at = offset(packed_at, (block * rows + row) * size + frame * dim * wide)
                start = (first - begin * heads + block * wide) * dim
                for d in range(dim):
                    store(at, d * wide, gather(bundled_at, start + d, dim, lanes))


@compiled
def unpack_heads(
    packed, signal, groups, clouds, points, fiber, heads, dim, a_point, a_frame, a_head, first, filled, wide, one
):
    signal_at, packed_at = at_address(signal, one), at_address(packed, one)
    rows, size = groups * points, fiber * dim * wide
    for row in range(rows):
        point = row // points * clouds * points + row % points
        for lane in range(filled):
            head = first + lane
            given = (point + head // heads * points) * a_point + head % heads * a_head
            start = (lane // wide * rows + row) * size + lane % wide
            for frame in range(fiber):
                source = offset(packed_at, start + frame * dim * wide)
                at = offset(signal_at, given + frame * a_frame)
                for d in range(dim):
                    store(at, d, load(source, d * wide, one))
