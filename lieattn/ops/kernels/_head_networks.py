# mypy: allow-untyped-defs
"""The networks of the heads, on threads of the CPU that divide the rows: small matrices, and vectors of rows.

All layers of a head are applied to a tile of vectors of rows while it is in the cache. The backward pass applies them
again, and adds the gradients of weights in vectors, whose lanes are summed at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lieattn.ops.kernels._calls import Workspace, compile_together, cut_for_threads, new_empty, vector, widest_lanes
from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import activate, activate_with_slope, dot_products, multiply, row
from lieattn.ops.kernels._threads import run
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


def run_forward(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the outputs ``[heads outputs, rows]`` of rows ``[rows, inputs]``."""
    with Workspace() as memory:
        job = _Job(rows, parameters, memory)
        numbers = job.heads * job.outputs
        out, out_tail = new_empty(rows.dtype, numbers, len(rows)), memory.empty(rows.dtype, numbers, job.tile)
        scratch = memory.empty(rows.dtype, len(job.cuts), (job.inputs + 2 * job.hidden) * job.tile)
        calls = [
            (*job.given(cut), out.data_ptr(), out_tail.data_ptr(), scratch[number].data_ptr(), job.lanes)
            for number, cut in enumerate(job.cuts)
        ]
        compile_together(
            "networks",
            rows.dtype,
            forward=lambda: [(forward, calls[0])],
            backward=lambda: [(backward, (*job.given(job.cuts[0]), 0, 0, 0, 0, 0, True, 0, job.lanes))],
        )
        run(forward, calls)
        out[:, job.whole :] = out_tail[:, : len(rows) - job.whole]
        return out


def run_backward(grad: Tensor, rows: Tensor, parameters: Sequence[Tensor], wanted: bool) -> list[Tensor]:
    """Return gradients of rows (empty if not wanted) and parameters, given those of the outputs of run_forward."""
    with Workspace() as memory:
        job, grad, dtype = _Job(rows, parameters, memory), grad.contiguous(), grad.dtype
        parts = len(job.cuts)
        grad_tail = memory.zeros(dtype, len(grad), job.tile)
        grad_tail[:, : len(rows) - job.whole] = grad[:, job.whole :]
        to_weights = memory.zeros(dtype, parts, job.heads, job.weights.shape[1], len(job.lanes))
        to_x = memory.zeros(dtype, job.inputs, job.places if wanted else 1)
        scratch = memory.empty(dtype, parts, (job.inputs + 6 * job.hidden + 2 * job.outputs) * job.tile)
        calls = [
            (
                *(*job.given(cut), grad.data_ptr(), grad_tail.data_ptr(), to_weights[number].data_ptr()),
                *(to_x.data_ptr(), job.places, wanted, scratch[number].data_ptr(), job.lanes),
            )
            for number, cut in enumerate(job.cuts)
        ]
        run(backward, calls)
        found = to_weights.sum(dim=(0, 3)).split([p[0].numel() for p in parameters], dim=1)
        gradients = [part.reshape(p.shape).clone() for part, p in zip(found, parameters, strict=True)]
        to_rows = torch.empty_like(job.rows).copy_(to_x.T[: len(rows)]) if wanted else rows.new_empty(0)
        return [to_rows, *gradients]


class _Job:
    """Rows and weights in the layout of the kernels."""

    def __init__(self, rows: Tensor, parameters: Sequence[Tensor], memory: Workspace) -> None:
        self.by_columns = rows.stride(0) < rows.stride(1)
        self.rows = rows.T.contiguous().T if self.by_columns else rows.contiguous()
        self.memory = memory
        self.heads, self.inputs, self.hidden = parameters[0].shape
        self.outputs = parameters[-1].shape[1]
        count = widest_lanes() // (rows.element_size() // 4)
        self.lanes = vector(rows.dtype, count)
        self.tile = TILE * count
        tiles = -(-len(rows) // self.tile)
        self.places = tiles * self.tile
        # Kernels read whole tiles, so the rows after the last complete tile are filled up with zeros.
        self.whole = len(rows) // self.tile * self.tile
        self.tail = memory.zeros(rows.dtype, self.inputs, self.tile)
        self.tail[:, : len(rows) - self.whole] = rows[self.whole :].T
        self.weights = torch.cat([p.flatten(1) for p in parameters], dim=1).contiguous()
        self.cuts = [(first * self.tile, end * self.tile) for first, end in cut_for_threads(tiles)]

    def given(self, cut: tuple[int, int]) -> tuple[int, ...]:
        """Return the arguments of both kernels for a range of rows."""
        sizes = self.heads, self.inputs, self.hidden, self.outputs
        x_row = len(self.rows) if self.by_columns else 0
        weights = self.weights.data_ptr(), self.weights.shape[1]
        return self.rows.data_ptr(), x_row, self.tail.data_ptr(), len(self.rows), *cut, *weights, *sizes


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
