"""The mask of attention dropout in plain maths: the numbers that the kernels draw, for second derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.ops._terms import Problem
from lieattn.ops.kernels._heads import block_seed, lanes_of
from lieattn.ops.kernels.attention._bundle import SINGLE, Bundle

_WORD = 2**32 - 1


def dropout_mask(problem: Problem, seed: int, bundle: Bundle = SINGLE) -> Tensor:
    """Factors of the weights, 0 or 1 / (1 - dropout).

    ``[edges, heads, out, query, key]``, out 1 where it is the query frame, and key 1 where a key point is dropped
    with its whole fiber or frames attend alone.
    """
    a = problem
    heads, edges = a.value.shape[2] * bundle.clouds, a.neighbors.num_edges // bundle.clouds
    lanes = lanes_of(heads, a.value.dtype)
    outs = a.outs if a.pattern == "query_sum" else 1
    keys = a.value.shape[1] if a.pattern == "joint" else 1
    weights = outs * a.queries * keys
    counter = torch.arange(edges * weights, device=a.value.device).reshape(edges, outs, a.queries, keys)
    blocks = []
    for block in range(-(-heads // lanes)):
        state = _split_mix(counter * _signed(0x9E3779B97F4A7C15) + _signed(block_seed(seed, block)))
        blocks.append(_finalize((state & _WORD)[:, None] + _lane_offsets(lanes).to(counter.device)))
    threshold = int(a.dropout * 2**32)
    kept = torch.cat(blocks, dim=1)[:, :heads] >= threshold
    kept = bundle.scatter_edges(kept)
    return kept.to(a.value.dtype) * (2**32 / (2**32 - threshold))


def _signed(word: int) -> int:
    """The 64 bits of an unsigned word as torch's signed ones."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros from the left."""
    return (word >> bits) & (2 ** (64 - bits) - 1)


def _split_mix(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _lane_offsets(lanes: int) -> Tensor:
    return torch.tensor([lane * 0x9E3779B9 & _WORD for lane in range(lanes)]).reshape(-1, 1, 1, 1)


def _finalize(value: Tensor) -> Tensor:
    value = value & _WORD
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = ((value ^ (value >> shift)) * factor) & _WORD
    return value
