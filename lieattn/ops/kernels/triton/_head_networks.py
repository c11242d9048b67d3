"""The networks of the heads in Triton, which apply all layers of a head to a tile of rows in registers.

Gradients of parameters are sums over rows, which are divided into parts with a program each, whose sums are added
afterwards. Gradients of rows are sums over heads. No two programs write to the same place.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lieattn.ops.kernels.triton import constants

_MOST_PARTS = 512  # largest number of programs that sum gradients, over all heads

# Pointers to weights and biases of three layers, or to their gradients.
Parameters = namedtuple("Parameters", "w1 b1 w2 b2 w3 b3")
# Constants of a kernel: sizes, and padded sizes in capitals.
Sizes = namedtuple("Sizes", "heads inputs hidden T I H precision dtype")


@triton.jit
def _tile(pointer, first, rows, columns, R, C, dtype):  # type: ignore[no-untyped-def]
    """Return rows of ``[rows, columns]``, beginning with ``first``, [R, C]."""
    i = first + tl.arange(0, R)[:, None]
    j = tl.arange(0, C)[None, :]
    return tl.load(pointer + i * columns + j, mask=(i < rows) & (j < columns), other=0.0).to(dtype)


@triton.jit
def _put(pointer, tile, first, rows, columns, R, C):  # type: ignore[no-untyped-def]
    i = first + tl.arange(0, R)[:, None]
    j = tl.arange(0, C)[None, :]
    tl.store(pointer + i * columns + j, tile, mask=(i < rows) & (j < columns))


@triton.jit
def _product(a, b, s):  # type: ignore[no-untyped-def]
    return tl.dot(a, b, input_precision=s.precision, out_dtype=s.dtype)


@triton.jit
def _swish(u):  # type: ignore[no-untyped-def]
    return u / (1 + tl.exp(-u))


@triton.jit
def _slope(u):  # type: ignore[no-untyped-def]
    share = 1 / (1 + tl.exp(-u))
    return share * (1 + u * (1 - share))


@triton.jit
def _sums(p, s, head, x):  # type: ignore[no-untyped-def]
    """Return the inputs of the activations of the three layers, [T, H], [T, H], [T], and the weights w1, w2, w3."""
    w1 = _tile(p.w1 + head * s.inputs * s.hidden, 0, s.inputs, s.hidden, s.I, s.H, s.dtype)
    w2 = _tile(p.w2 + head * s.hidden * s.hidden, 0, s.hidden, s.hidden, s.H, s.H, s.dtype)
    w3 = _tile(p.w3 + head * s.hidden, 0, 1, s.hidden, 1, s.H, s.dtype)
    first = _product(x, w1, s) + _tile(p.b1 + head * s.hidden, 0, 1, s.hidden, 1, s.H, s.dtype)
    second = _product(_swish(first), w2, s) + _tile(p.b2 + head * s.hidden, 0, 1, s.hidden, 1, s.H, s.dtype)
    third = tl.sum(_swish(second) * w3, 1) + tl.load(p.b3 + head).to(s.dtype)
    return first, second, third, w1, w2, w3


@triton.jit
def _changes(p, s, head, x, grad):  # type: ignore[no-untyped-def]
    """Return hidden units h1, h2 [T, H], the gradients of the activations' inputs, [T, H], [T, H], [T], and w1."""
    first, second, third, w1, w2, w3 = _sums(p, s, head, x)
    d3 = grad * _slope(third)
    d2 = d3[:, None] * w3 * _slope(second)
    d1 = _product(d2, tl.trans(w2), s) * _slope(first)
    return _swish(first), _swish(second), d1, d2, d3, w1


@triton.jit
def _of_rows(pointer, head, first, count, s):  # type: ignore[no-untyped-def]
    """Return the numbers of one head of ``[heads, count]`` for a tile of rows, [T]."""
    row = first + tl.arange(0, s.T)
    return tl.load(pointer + head * count + row, mask=row < count, other=0.0).to(s.dtype)


@triton.jit
def forward(p, s, rows, count, out):  # type: ignore[no-untyped-def]
    """Write the outputs ``[heads, count]``, with a program for each tile of rows and head."""
    first, head = tl.program_id(0).to(tl.int64) * s.T, tl.program_id(1)
    x = _tile(rows, first, count, s.inputs, s.T, s.I, s.dtype)
    _, _, third, _, _, _ = _sums(p, s, head, x)
    row = first + tl.arange(0, s.T)
    tl.store(out + head * count + row, _swish(third), mask=row < count)


@triton.jit
def backward_rows(p, s, rows, count, grad, to_rows):  # type: ignore[no-untyped-def]
    """Write the gradient of the rows, given that of the outputs ``[heads, count]``, with a program for each tile."""
    first = tl.program_id(0).to(tl.int64) * s.T
    x = _tile(rows, first, count, s.inputs, s.T, s.I, s.dtype)
    total = tl.zeros([s.T, s.I], s.dtype)
    for head in range(s.heads):
        _, _, d1, _, _, w1 = _changes(p, s, head, x, _of_rows(grad, head, first, count, s))
        total += _product(d1, tl.trans(w1), s)
    _put(to_rows, total, first, count, s.inputs, s.T, s.I)


@triton.jit
def backward_parameters(p, s, rows, count, grad, to, each):  # type: ignore[no-untyped-def]
    """Write the sums over ``each`` tiles of rows of the gradients of the parameters, ``[parts, heads, *]``."""
    part, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_w1 = tl.zeros([s.I, s.H], s.dtype)
    of_w2 = tl.zeros([s.H, s.H], s.dtype)
    of_b1 = tl.zeros([s.H], s.dtype)
    of_b2 = tl.zeros([s.H], s.dtype)
    of_w3 = tl.zeros([s.H], s.dtype)
    of_b3 = tl.zeros([s.T], s.dtype)
    for number in range(each):
        first = (part * each + number) * s.T
        x = _tile(rows, first, count, s.inputs, s.T, s.I, s.dtype)
        h1, h2, d1, d2, d3, _ = _changes(p, s, head, x, _of_rows(grad, head, first, count, s))
        of_w1 += _product(tl.trans(x), d1, s)
        of_w2 += _product(tl.trans(h1), d2, s)
        of_w3 += tl.sum(h2 * d3[:, None], 0)
        of_b1 += tl.sum(d1, 0)
        of_b2 += tl.sum(d2, 0)
        of_b3 += d3
    at = part * s.heads + head
    _put(to.w1 + at * s.inputs * s.hidden, of_w1, 0, s.inputs, s.hidden, s.I, s.H)
    _put(to.w2 + at * s.hidden * s.hidden, of_w2, 0, s.hidden, s.hidden, s.H, s.H)
    _put(to.b1 + at * s.hidden, of_b1[None, :], 0, 1, s.hidden, 1, s.H)
    _put(to.b2 + at * s.hidden, of_b2[None, :], 0, 1, s.hidden, 1, s.H)
    _put(to.w3 + at * s.hidden, of_w3[None, :], 0, 1, s.hidden, 1, s.H)
    tl.store(to.b3 + at, tl.sum(of_b3, 0))


def run_forward(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the outputs ``[heads, rows]`` of rows ``[rows, inputs]``."""
    call = _Call(rows, parameters)
    out = rows.new_empty(call.heads, len(rows))
    call.run(forward, (call.tiles, call.heads), out)
    return out


def run_backward(grad: Tensor, rows: Tensor, parameters: Sequence[Tensor], wanted: bool) -> list[Tensor]:
    """Return gradients of rows (empty if not wanted) and parameters, given those of outputs ``[heads, rows]``."""
    call, grad = _Call(rows, parameters), grad.contiguous()
    to_rows = torch.empty_like(call.rows) if wanted else rows.new_empty(0)
    if wanted:
        call.run(backward_rows, (call.tiles,), grad, to_rows)
    each = max(1, -(-call.tiles * call.heads // _MOST_PARTS))
    parts = -(-call.tiles // each)
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = [rows.new_empty(parts, *part.shape, dtype=wide) for part in parameters]
    call.run(backward_parameters, (parts, call.heads), grad, Parameters(*sums), each)
    return [to_rows, *(total.sum(0).to(part.dtype) for total, part in zip(sums, parameters, strict=True))]


class _Call:
    """The arguments of the kernels of one call."""

    def __init__(self, rows: Tensor, parameters: Sequence[Tensor]) -> None:
        self.rows, self.parameters = rows.contiguous(), Parameters(*(part.contiguous() for part in parameters))
        self.heads, inputs, hidden = parameters[0].shape
        padded = {letter: max(16, 1 << (size - 1).bit_length()) for letter, size in (("I", inputs), ("H", hidden))}
        small = max(padded.values()) <= 32
        tile, self.warps = (64, 4) if small else (32, 8)
        self.tiles = -(-len(rows) // tile)
        sizes = {
            **{"heads": self.heads, "inputs": inputs, "hidden": hidden, "T": tile},
            **padded,
            "precision": "tf32" if rows.dtype.itemsize < 4 else "ieee",  # half precisions are exact in TF32
            "dtype": tl.float64 if rows.dtype == torch.float64 else tl.float32,
        }
        self.sizes = constants(Sizes, **sizes)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Start the programs of a grid, if there are any."""
        if min(grid) > 0:
            with torch.cuda.device_of(self.rows):
                told = (self.parameters, self.sizes, self.rows, len(self.rows))
                kernel[grid](*told, *arguments, num_warps=self.warps, enable_fp_fusion=True)
