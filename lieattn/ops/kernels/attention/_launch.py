"""Run the kernels of attention on the threads that torch may use; see ``kernels/_calls.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lieattn.ops._terms import ROW_TABLES, Problem
from lieattn.ops.kernels._calls import (
    PartGradients,
    check_lists,
    cut_targets,
    cut_with_windows,
    largest_degree,
    list_addresses,
    record,
    run,
    scratch_addresses,
)
from lieattn.ops.kernels._heads import norm_shape
from lieattn.ops.kernels._memory import Workspace, new_empty
from lieattn.ops.kernels.attention._backward import backward
from lieattn.ops.kernels.attention._bundle import Bundle, bundle
from lieattn.ops.kernels.attention._forward import forward
from lieattn.ops.kernels.attention._layout import Layout
from lieattn.ops.kernels.attention._operands import SOFTMAX, backward_scratch, forward_scratch, operands_of

_Given = tuple[Tensor, Tensor, Tensor | None]  # row_ptr, source, type of displacement


def run_forward(problem: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """Output ``[points, outs, heads, width]`` and logarithms of the sums ``[points, pairs, heads]``."""
    bundled = _bundled(problem)
    value = problem.value
    out = new_empty(value.dtype, len(value), problem.outs, *value.shape[2:])
    norm = new_empty(value.dtype, *norm_shape(problem))
    with Workspace() as memory:
        for part in bundled.head_ranges(problem):
            _forward(Layout(problem, bundled, part, memory), bundled.lists(problem), seed, out, norm)
    return out, norm


def _forward(layout: Layout, given: _Given, seed: int, result: Tensor, norm: Tensor) -> None:
    row_ptr, _, index = given
    lists, sizes = list_addresses(*given), layout.sizes(largest_degree(row_ptr), index is not None)
    points = len(row_ptr) - 1
    dtype, memory = layout.problem.value.dtype, layout.memory
    # The kernel leaves points without edges alone.
    make = memory.zeros if points == 0 or int(row_ptr.diff().min()) == 0 else memory.empty
    out = make(dtype, layout.blocks, points, sizes.outs, sizes.width, layout.lanes)
    top = make(dtype, layout.blocks, points, sizes.pairs, layout.lanes)
    total = make(dtype, *top.shape)
    parts = cut_targets(row_ptr, torch.get_num_threads())
    needed = forward_scratch(sizes)
    scratch = memory.empty(dtype, layout.blocks * len(parts), sum(needed), layout.lanes)
    addresses = iter(scratch_addresses(needed, scratch, layout.lanes))
    calls: list[tuple[Any, ...]] = []
    for block in range(layout.blocks):
        operands, start = layout.operands(block, layout.packed), layout.seed(seed, block)
        results = out[block].data_ptr(), top[block].data_ptr(), total[block].data_ptr()
        for part in parts:
            calls.append((operands, record(sizes), lists, *part, start, *results, next(addresses), layout.vector))
    run(forward, calls)
    layout.unpack(out, result)
    if sizes.normalize == SOFTMAX:
        layout.unpack(total.log_().add_(top)[..., None, :], norm[..., None])


def run_backward(problem: Problem, seed: int, grad_out: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    """Gradients of signals and tables in the order of :func:`operands`; empty tensors for those absent."""
    bundled = _bundled(problem)
    grads: dict[str, Tensor] = {}
    with Workspace() as memory:
        for part in bundled.head_ranges(problem):
            _backward(Layout(problem, bundled, part, memory), bundled.lists(problem), seed, grad_out, norm, grads)
    return tuple(grads.get(name, problem.value.new_empty(0)) for name in operands_of(problem))


def _backward(
    layout: Layout, given: _Given, seed: int, grad_out: Tensor, norm: Tensor, grads: dict[str, Tensor]
) -> None:
    row_ptr, source, index = given
    lists, sizes = list_addresses(*given), layout.sizes(largest_degree(row_ptr), index is not None)
    norm = layout.pack(norm[..., None]) if sizes.normalize == SOFTMAX else grad_out.new_empty(layout.blocks, 0)
    grad = layout.pack(grad_out)
    parts, windows = cut_with_windows(row_ptr, source, torch.get_num_threads())
    results = PartGradients(layout.packed, layout.memory.zeros, windows, index is not None)
    needed = backward_scratch(sizes)
    scratch = layout.memory.empty(norm.dtype, layout.blocks * len(parts), sum(needed), layout.lanes)
    addresses = iter(scratch_addresses(needed, scratch, layout.lanes))
    calls: list[tuple[Any, ...]] = []
    for block in range(layout.blocks):
        operands = layout.operands(block, layout.packed)
        incoming = layout.seed(seed, block), grad[block].data_ptr(), norm[block].data_ptr()
        for number, part in enumerate(parts):
            outgoing = layout.operands(block, results.of_parts[number])
            window = windows[number][0] if number else 0
            told = operands, record(sizes), lists, *part, *incoming, outgoing, window
            calls.append((*told, next(addresses), layout.vector))
    run(backward, calls)
    for name, total in results.total().items():
        layout.add_gradient(name, total, grads)


def _bundled(problem: Problem) -> Bundle:
    tables = (table for name, table in problem.terms.tables().items() if name in ROW_TABLES)
    check_lists(problem.neighbors, problem.terms.row, tables)
    return bundle(problem)
