"""The distribution of heads to vectors, which clouds with equal neighbor lists can share.

With 9 heads, 7 of 16 lanes are unused. If the neighbor lists of b clouds are copies of those of the first (for example,
for images of one size), b clouds of p points with h heads are treated as one cloud of p points with b h heads: 8 images
with 9 heads fill 4 vectors of 16 lanes and one of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.ops._terms import ROW_TABLES, Problem
from lieattn.ops.kernels._calls import widest_lanes

_MOST_HEADS = 256  # largest number of heads of a bundle; more would need more memory without filling vectors better
_OVERHEAD = 4  # time of a vector in addition to its lanes: a vector of 8 takes 0.6 of the time of one of 16


def lanes_of(heads: int, dtype: torch.dtype) -> int:
    """Return the number of lanes of a vector. There are few choices, because each is compiled separately."""
    if dtype == torch.float64:
        return 4
    return min(4 if heads <= 4 else 8 if heads <= 8 else 16, widest_lanes())


def seeded_heads(dtype: torch.dtype) -> int:
    """Return the number of heads that share a seed of the dropout, so that it is the same on every machine."""
    return 4 if dtype == torch.float64 else 16


@dataclass(frozen=True)
class HeadRange:
    """Consecutive heads in vectors of one length. ``first`` is a multiple of the longest one."""

    first: int
    heads: int
    lanes: int

    @property
    def blocks(self) -> int:
        """Number of vectors for these heads."""
        return -(-self.heads // self.lanes)


def head_ranges(heads: int, dtype: torch.dtype) -> list[HeadRange]:
    """Divide the heads into those that fill vectors, and the last few, which need only shorter vectors."""
    lanes = lanes_of(heads, dtype)
    rest = heads % lanes
    if heads > lanes and rest > 0 and lanes_of(rest, dtype) < lanes:
        return [HeadRange(0, heads - rest, lanes), HeadRange(heads - rest, rest, lanes_of(rest, dtype))]
    return [HeadRange(0, heads, lanes)]


def common_sizes(problem: Problem) -> dict[str, int]:
    """Return the sizes and switches that all kernels get."""
    a, t, outs, queries, keys = problem, problem.terms, problem.outs, problem.queries, problem.value.shape[1]
    tied_out, tied_key = a.pattern != "query_sum", a.pattern in ("framewise", "pooled")
    scoreless = a.query is None and t.displacement_bias is None and t.fiber_bias is None
    return {
        "outs": outs,
        "queries": queries,
        "keys": keys,  # frames of a value over a point, and of a key except for the pattern "pooled"
        "pairs": queries if tied_out else outs * queries,  # pairs of output and query frames
        "columns": 1 if tied_key else keys,  # key frames of a point to which one query frame attends
        "depth": 0 if a.query is None else a.query.shape[-1],  # channels of queries and keys
        "width": a.value.shape[-1],  # channels of values
        "tied_out": tied_out,  # the output frame is the query frame
        "tied_key": tied_key,  # the key frame is the query frame
        "constant": scoreless and a.normalize != "softmax",  # added to all scores
    }


def norm_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape ``[points, 2 pairs, heads]`` of the softmax statistics for the backward pass.

    These are the largest scores of all pairs of frames, followed by the sums of the exponentials relative to them. A
    single number, the logarithm of the sum of exponentials, would give all weights of a point the same rounding error,
    which differences of weights in the gradients would amplify.
    """
    if problem.normalize != "softmax":
        return (0,)
    pairs = problem.queries if problem.pattern != "query_sum" else problem.outs * problem.queries
    return problem.value.shape[0], 2 * pairs, problem.value.shape[2]


def block_seed(seed: int, block: int) -> int:
    """Return the 64-bit seed of a block of :func:`seeded_heads`, so that blocks drop different weights."""
    return (seed + block * 0xD1B54A32D192ED03) % 2**64


@dataclass(frozen=True)
class Bundle:
    """The distribution of clouds to ``groups`` bundles of ``clouds`` clouds each, which is 1 if bundles do not help."""

    clouds: int
    groups: int

    def lists(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the neighbor lists of the first clouds, as many as there are bundles."""
        row_ptr, source, index = problem.neighbors.row_ptr, problem.neighbors.source, problem.terms.row
        if self.clouds == 1:
            return row_ptr, source, index
        points, edges = (len(row_ptr) - 1) // self.clouds, len(source) // self.clouds
        return row_ptr[: points + 1], source[:edges], None if index is None else index[:edges]

    def head_ranges(self, problem: Problem) -> list[HeadRange]:
        """Return the heads of a bundle by the length of their vectors."""
        return head_ranges(self.clouds * problem.value.shape[2], problem.value.dtype)

    def scatter_edges(self, rows: Tensor) -> Tensor:
        """Convert ``[groups edges, b heads, ...]`` to ``[groups b edges, heads, ...]``."""
        if self.clouds == 1:
            return rows
        clouds = rows.unflatten(1, (self.clouds, -1)).unflatten(0, (self.groups, -1))
        return clouds.transpose(1, 2).flatten(0, 2)


SINGLE = Bundle(1, 1)  # every cloud by itself


def bundle(problem: Problem) -> Bundle:
    """Return the bundle with the least time per cloud, a single cloud if lists differ or vectors are already full."""
    heads, dtype, terms = problem.value.shape[2], problem.value.dtype, problem.terms
    of_edges = terms.row is None and not terms.tables().keys().isdisjoint(ROW_TABLES)
    if heads % lanes_of(_MOST_HEADS, dtype) == 0 or of_edges:
        return SINGLE
    clouds = _copies(problem.neighbors.row_ptr, problem.neighbors.source, terms.row)

    def time(number: int) -> float:
        return sum(part.blocks * (part.lanes + _OVERHEAD) for part in head_ranges(number * heads, dtype)) / number

    choices = [b for b in range(2, clouds + 1) if clouds % b == 0 and b * heads <= _MOST_HEADS]
    best = min((1, *choices), key=time)
    return Bundle(best, clouds // best) if best > 1 else SINGLE


def _copies(row_ptr: Tensor, source: Tensor, index: Tensor | None) -> int:
    """Return the largest number of clouds of one size whose neighbor lists are shifted copies; 1 if they differ."""
    points, edges, degree = len(row_ptr) - 1, len(source), row_ptr.diff()
    for first in _ends(row_ptr, source):
        clouds = points // first
        if edges % clouds or bool((degree.view(clouds, -1) != degree[:first]).any()):
            continue
        starts = torch.arange(clouds, device=source.device)[:, None] * first
        part = edges // clouds
        if bool((source.view(clouds, -1) == source[:part] + starts).all()) and (
            index is None or bool((index.view(clouds, -1) == index[:part]).all())
        ):
            return clouds
    return 1


def _ends(row_ptr: Tensor, source: Tensor) -> list[int]:
    """Return the ascending divisors n of the number of points for which no edge connects the first n to others."""
    points, edges = len(row_ptr) - 1, len(source)
    numbers = torch.arange(1, points + 1, device=row_ptr.device)
    alone = points % numbers == 0
    if edges:
        highest, lowest = source.cummax(0).values, source.flip(0).cummin(0).values.flip(0)
        ends = row_ptr[1:]
        alone &= torch.where(ends > 0, highest[(ends - 1).clamp_min(0)], -1) < numbers
        alone &= torch.where(ends < edges, lowest[ends.clamp_max(edges - 1)], points) >= numbers
    ascending: list[int] = numbers[alone].tolist()
    return ascending
