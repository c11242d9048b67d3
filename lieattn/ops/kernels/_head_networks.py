"""Run the networks of the heads on the threads of torch, which divide the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lieattn.ops.kernels._calls import Workspace, compile_together, cut_for_threads, new_empty, vector, widest_lanes
from lieattn.ops.kernels._head_networks_kernels import TILE, backward, forward
from lieattn.ops.kernels._threads import run


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
