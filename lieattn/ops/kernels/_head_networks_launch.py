"""Run the networks of the heads on the threads that torch may use, rows cut into parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lieattn.ops.kernels._head_networks import TILE, backward, forward
from lieattn.ops.kernels._launch import _run
from lieattn.ops.kernels._memory import NUMPY_TYPES, Workspace, new_empty

_LANES = {torch.float32: 16, torch.float64: 8}


def run_forward(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Outputs ``[heads, rows]`` of rows ``[rows, inputs]``."""
    with Workspace() as memory:
        job = _Job(rows, parameters, memory)
        out = memory.empty(rows.dtype, job.heads, job.places)
        room = memory.empty(rows.dtype, job.heads, len(job.cuts), 2 * job.hidden * job.tile)
        calls = [
            (
                *(job.x.data_ptr(), job.places, *cut, job.weights[head].data_ptr(), job.inputs, job.hidden),
                *(out[head].data_ptr(), room[head, number].data_ptr(), job.lanes),
            )
            for head in range(job.heads)
            for number, cut in enumerate(job.cuts)
        ]
        _run(forward, calls)
        return new_empty(rows.dtype, job.heads, len(rows)).copy_(out[:, : len(rows)])


def run_backward(
    grad: Tensor, rows: Tensor, parameters: Sequence[Tensor], wanted: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients of the rows, if wanted, and of the parameters, for those ``[heads, rows]`` of the outputs."""
    with Workspace() as memory:
        return _backward(_Job(rows, parameters, memory), grad, parameters, wanted)


def _backward(
    job: _Job, grad: Tensor, parameters: Sequence[Tensor], wanted: bool
) -> tuple[Tensor | None, list[Tensor]]:
    memory, dtype, parts = job.memory, grad.dtype, len(job.cuts)
    padded = job.padded(grad)
    to_weights = memory.zeros(dtype, job.heads, parts, job.weights.shape[1], len(job.lanes))
    # Heads that may run at the same time write to places of their own.
    apart = torch.get_num_threads() > 1
    to_x = memory.zeros(dtype, job.heads if apart else 1, job.inputs, job.places if wanted else 1)
    room = memory.empty(dtype, job.heads, parts, (6 * job.hidden + 2) * job.tile)
    calls = [
        (
            *(job.x.data_ptr(), job.places, *cut, job.weights[head].data_ptr(), job.inputs, job.hidden),
            *(padded[head].data_ptr(), to_weights[head, number].data_ptr()),
            *(to_x[head if apart else 0].data_ptr(), wanted),
            *(room[head, number].data_ptr(), job.lanes),
        )
        for head in range(job.heads)
        for number, cut in enumerate(job.cuts)
    ]
    _run(backward, calls)
    flat = to_weights.sum(dim=(1, 3))
    found = flat.split([p[0].numel() for p in parameters], dim=1)
    gradients = [part.reshape(p.shape).clone() for part, p in zip(found, parameters, strict=True)]
    to_rows = None
    if wanted:
        total = to_x.sum(dim=0) if apart else to_x[0]
        to_rows = new_empty(dtype, job.rows, job.inputs).copy_(total.T[: job.rows])
    return to_rows, gradients


class _Job:
    """Rows and weights as the kernels read them."""

    def __init__(self, rows: Tensor, parameters: Sequence[Tensor], memory: Workspace) -> None:
        self.rows, self.memory = len(rows), memory
        self.heads, self.inputs, self.hidden = parameters[0].shape
        count = _LANES[rows.dtype]
        self.lanes: tuple[Any, ...] = (NUMPY_TYPES[rows.dtype](0),) * count
        self.tile = TILE * count
        tiles = -(-len(rows) // self.tile)
        self.places = tiles * self.tile
        self.x = self.padded(rows.T)
        self.weights = torch.cat([p.flatten(1) for p in parameters], dim=1).contiguous()
        threads = max(1, min(torch.get_num_threads(), tiles))
        bounds = [tiles * number // threads * self.tile for number in range(threads + 1)]
        self.cuts = list(pairwise(bounds))

    def padded(self, columns: Tensor) -> Tensor:
        """``[*, rows]`` filled up with zeros to whole tiles, in the workspace."""
        filled = self.memory.empty(columns.dtype, len(columns), self.places)
        filled[:, : self.rows] = columns
        filled[:, self.rows :] = 0
        return filled
