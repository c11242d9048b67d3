# mypy: allow-untyped-defs
"""Softmax attention of few channels over whole clouds, on threads of the CPU that divide the heads of clouds.

Lanes are queries. With few channels, matrix products are too short to fill registers, and the exponentials of the
scores are most of the work. Queries, outputs and their gradients are columns of channels, ``[channels, places]``, where
places fill whole vectors. Keys and values are rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.ops.kernels._calls import Workspace, compile_together, cut_for_threads, new_empty, vector, widest_lanes
from lieattn.ops.kernels._compiled import compiled, part
from lieattn.ops.kernels._products import row, set_all
from lieattn.ops.kernels._threads import run
from lieattn.ops.kernels._vectors import (
    add_up,
    at_address,
    exp,
    fill,
    integer_at,
    load,
    load_one,
    lowest,
    maximum,
    multiply_add,
    offset,
    store,
)


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


@compiled
def forward(query, key, value, counts, first, last, heads, places, channels, values, keys, out, norm, scratch, lanes):
    """Write outputs ``[blocks, values, places]``, and ``norm`` ``[blocks, 2, places]``: largest scores and 1 / sums.

    A block is a head of a cloud, and ``counts`` is the number of existing keys of each cloud. Keys are ``[blocks, keys,
    channels]``, values ``[blocks, keys, values]``, and queries ``[blocks, channels, places]``.
    """
    wide = len(lanes)
    scores = at_address(scratch, lanes)
    for block in range(first, last):
        k = row(at_address(key, lanes), block, keys * channels)
        v = row(at_address(value, lanes), block, keys * values)
        count = integer_at(counts, block // heads)
        for at in range(0, places, wide):
            q = offset(row(at_address(query, lanes), block, channels * places), at)
            to = offset(row(at_address(out, lanes), block, values * places), at)
            top = fill(q, lowest(q), lanes)
            for j in range(count):
                score = _score(q, k, j, places, channels, lanes)
                top = maximum(top, score)
                store(scores, j * wide, score)
            total = fill(q, 0.0, lanes)
            for c in range(values):
                store(to, c * places, total)
            for j in range(count):
                weight = exp(load(scores, j * wide, lanes) - top)
                total = total + weight
                for c in range(values):
                    sums = multiply_add(weight, load_one(v, j * values + c, lanes), load(to, c * places, lanes))
                    store(to, c * places, sums)
            share = fill(q, 1.0, lanes) / total if count else total
            for c in range(values):
                store(to, c * places, share * load(to, c * places, lanes))
            tops = row(at_address(norm, lanes), block, 2 * places)
            store(tops, at, top)
            store(tops, places + at, share)


@part
def _score(q, k, j, places, channels, lanes):
    """Return the scores of the key j with one vector of queries."""
    score = load(q, 0, lanes) * load_one(k, j * channels, lanes)
    for c in range(1, channels):
        score = multiply_add(load(q, c * places, lanes), load_one(k, j * channels + c, lanes), score)
    return score


@compiled
def backward(
    query, key, value, counts, first, last, heads, places, channels, values, keys, out, norm, grad, to_query, to_key,
    to_value, scratch, lanes,
):  # fmt: skip
    """Write the gradients of queries, and add those of keys and values to zeros, in the layouts of the operands."""
    wide = len(lanes)
    of_keys = at_address(scratch, lanes)  # a vector for each channel of each key
    of_values = row(of_keys, keys * channels, wide)
    for block in range(first, last):
        k = row(at_address(key, lanes), block, keys * channels)
        v = row(at_address(value, lanes), block, keys * values)
        count = integer_at(counts, block // heads)
        zero = fill(k, 0.0, lanes)
        set_all(of_keys, count * channels, 0.0, lanes)
        set_all(of_values, count * values, 0.0, lanes)
        tops = row(at_address(norm, lanes), block, 2 * places)
        for at in range(0, places, wide):
            q = offset(row(at_address(query, lanes), block, channels * places), at)
            o = offset(row(at_address(out, lanes), block, values * places), at)
            g = offset(row(at_address(grad, lanes), block, values * places), at)
            to = offset(row(at_address(to_query, lanes), block, channels * places), at)
            mean = zero
            for c in range(values):
                mean = multiply_add(load(o, c * places, lanes), load(g, c * places, lanes), mean)
            for c in range(channels):
                store(to, c * places, zero)
            top, share = load(tops, at, lanes), load(tops, places + at, lanes)
            for j in range(count):
                weight = share * exp(_score(q, k, j, places, channels, lanes) - top)
                change = zero - mean
                for c in range(values):
                    slope = load(g, c * places, lanes)
                    change = multiply_add(slope, load_one(v, j * values + c, lanes), change)
                    place = (j * values + c) * wide
                    store(of_values, place, multiply_add(weight, slope, load(of_values, place, lanes)))
                change = weight * change
                for c in range(channels):
                    place, one = (j * channels + c) * wide, load_one(k, j * channels + c, lanes)
                    store(to, c * places, multiply_add(change, one, load(to, c * places, lanes)))
                    store(of_keys, place, multiply_add(change, load(q, c * places, lanes), load(of_keys, place, lanes)))
        _add_lanes(row(at_address(to_key, lanes), block, keys * channels), of_keys, count * channels, lanes)
        _add_lanes(row(at_address(to_value, lanes), block, keys * values), of_values, count * values, lanes)


@part
def _add_lanes(out, x, vectors, lanes):
    """Write the sums of the lanes of a number of vectors."""
    single = (lanes[0],)
    for at in range(vectors):
        store(out, at, fill(out, add_up(load(x, at * len(lanes), lanes)), single))
