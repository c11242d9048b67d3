"""Vectors of heads: how long they are, and how heads are cut into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lieattn.ops._terms import Problem


def lanes_of(heads: int, dtype: torch.dtype) -> int:
    """Lanes of a vector: few choices, since each is compiled for itself."""
    if dtype == torch.float64:
        return 4
    return 4 if heads <= 4 else 8 if heads <= 8 else 16


@dataclass(frozen=True)
class HeadRange:
    """Heads that follow one another, in vectors of one length; ``first`` is a multiple of the longest."""

    first: int
    heads: int
    lanes: int

    @property
    def blocks(self) -> int:
        """Vectors that hold them."""
        return -(-self.heads // self.lanes)


def head_ranges(heads: int, dtype: torch.dtype) -> list[HeadRange]:
    """Cut the heads into those that fill vectors and the last few, for which shorter vectors will do."""
    lanes = lanes_of(heads, dtype)
    rest = heads % lanes
    if heads > lanes and rest > 0 and lanes_of(rest, dtype) < lanes:
        return [HeadRange(0, heads - rest, lanes), HeadRange(heads - rest, rest, lanes_of(rest, dtype))]
    return [HeadRange(0, heads, lanes)]


def norm_shape(problem: Problem) -> tuple[int, ...]:
    """Shape of the logarithms of the sums that the backward pass needs, ``[points, pairs, heads]``."""
    if problem.normalize != "softmax":
        return (0,)
    pairs = problem.queries if problem.pattern != "query_sum" else problem.outs * problem.queries
    return len(problem.value), pairs, problem.value.shape[2]


def block_seed(seed: int, block: int) -> int:
    """Seed of a block of heads, 64 bits: blocks drop different weights."""
    return (seed + block * 0xD1B54A32D192ED03) % 2**64
