"""Run attention of few channels over whole clouds on the threads of torch, which divide the heads of clouds."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.ops.kernels._calls import Workspace, compile_together, cut_for_threads, new_empty, vector, widest_lanes
from lieattn.ops.kernels._dense_kernels import backward, forward
from lieattn.ops.kernels._threads import run


def run_forward(query: Tensor, key: Tensor, value: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs ``[clouds, heads, values, places]``, and the sums that the backward pass needs.

    Signals are ``[clouds, heads, rows, channels]``. ``counts`` int64 ``[clouds]`` is the number of existing keys of
    each cloud, which come first.
    """
    with Workspace() as memory:
        job = _Job(query, key, value, counts, memory)
        out = new_empty(job.dtype, *query.shape[:2], job.values, job.places)
        norm = new_empty(job.dtype, job.blocks, 2, job.places)
        scratch = memory.empty(job.dtype, len(job.cuts), max(1, job.keys), len(job.lanes))
        calls = [
            (*job.given(cut), out.data_ptr(), norm.data_ptr(), scratch[number].data_ptr(), job.lanes)
            for number, cut in enumerate(job.cuts)
        ]
        compile_together(
            "few channels",
            job.dtype,
            forward=lambda: [(forward, (*job.given((0, 0)), 0, 0, 0, job.lanes))],
            backward=lambda: [(backward, (*job.given((0, 0)), *(0,) * 7, job.lanes))],
        )
        run(forward, calls)
        return out, norm


def run_backward(
    grad: Tensor, out: Tensor, norm: Tensor, query: Tensor, key: Tensor, value: Tensor, counts: Tensor
) -> list[Tensor]:
    """Return the gradients of queries, keys and values, given that of the outputs ``[clouds, heads, rows, values]``."""
    with Workspace() as memory:
        job = _Job(query, key, value, counts, memory)
        change = job.columns(grad)
        to_query = memory.empty(job.dtype, *query.shape[:2], job.channels, job.places)
        to_key, to_value = torch.zeros_like(job.key), torch.zeros_like(job.value)
        scratch = memory.empty(job.dtype, len(job.cuts), max(1, job.keys * (job.channels + job.values)), len(job.lanes))
        calls = [
            (
                *(*job.given(cut), out.data_ptr(), norm.data_ptr(), change.data_ptr(), to_query.data_ptr()),
                *(to_key.data_ptr(), to_value.data_ptr(), scratch[number].data_ptr(), job.lanes),
            )
            for number, cut in enumerate(job.cuts)
        ]
        run(backward, calls)
        return [to_query[..., : query.shape[2]].mT.contiguous(), to_key, to_value]


class _Job:
    """Signals in the layout of the kernels, with queries as columns that fill vectors."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, counts: Tensor, memory: Workspace) -> None:
        self.memory, self.dtype = memory, query.dtype
        self.lanes = vector(query.dtype, widest_lanes() * 4 // query.dtype.itemsize)
        clouds, self.heads, rows, self.channels = query.shape
        self.keys, self.values, self.blocks = key.shape[2], value.shape[3], clouds * self.heads
        self.places = -(-rows // len(self.lanes)) * len(self.lanes)
        self.key, self.value, self.counts = key.contiguous(), value.contiguous(), counts.contiguous()
        self.query = self.columns(query)
        self.cuts = cut_for_threads(self.blocks)

    def columns(self, signal: Tensor) -> Tensor:
        """Convert [clouds, heads, rows, channels] to [clouds, heads, channels, places], filled up with zeros."""
        clouds, heads, rows, channels = signal.shape
        made = self.memory.empty(self.dtype, clouds, heads, channels, self.places)
        made[..., rows:] = 0
        made[..., :rows] = signal.mT
        return made

    def given(self, cut: tuple[int, int]) -> tuple[int, ...]:
        """Return the arguments of both kernels for a range of blocks."""
        tables = self.query, self.key, self.value, self.counts
        sizes = self.heads, self.places, self.channels, self.values, self.keys
        return *(table.data_ptr() for table in tables), *cut, *sizes
