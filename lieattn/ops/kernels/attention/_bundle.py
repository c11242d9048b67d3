"""Clouds that are alike, such as images of one size: the heads of several of them share vectors.

With 9 heads, 7 of 16 lanes idle. Where the neighbor lists of b clouds are copies of those of the first, b clouds of
p points with h heads are one cloud of p points with b h heads: 8 images with 9 heads fill 4 vectors of 16 and one of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.ops._terms import ROW_TABLES, Problem
from lieattn.ops.kernels._heads import HeadRange, head_ranges, lanes_of

_MOST_HEADS = 256  # of a bundle: more would not fill the vectors better, and every block has scratch memory
_OVERHEAD = 4  # lanes: a vector of 8 takes 0.6 of the time of one of 16


@dataclass(frozen=True)
class Bundle:
    """How clouds are put side by side: ``groups`` bundles of ``clouds``, 1 where there is nothing to gain."""

    clouds: int
    groups: int

    def lists(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """Neighbor lists of as many clouds as there are bundles: those of the first clouds."""
        row_ptr, source, index = problem.neighbors.row_ptr, problem.neighbors.source, problem.terms.row
        if self.clouds == 1:
            return row_ptr, source, index
        points, edges = (len(row_ptr) - 1) // self.clouds, len(source) // self.clouds
        return row_ptr[: points + 1], source[:edges], None if index is None else index[:edges]

    def head_ranges(self, problem: Problem) -> list[HeadRange]:
        """The heads of a bundle by the length of their vectors."""
        return head_ranges(self.clouds * problem.value.shape[2], problem.value.dtype)

    def scatter_edges(self, rows: Tensor) -> Tensor:
        """``[groups edges, b heads, ...]`` to ``[groups b edges, heads, ...]``."""
        if self.clouds == 1:
            return rows
        clouds = rows.unflatten(1, (self.clouds, -1)).unflatten(0, (self.groups, -1))
        return clouds.transpose(1, 2).flatten(0, 2)


SINGLE = Bundle(1, 1)  # every cloud by itself


def bundle(problem: Problem) -> Bundle:
    """Bundle with the least time a cloud; a single cloud where lists differ or vectors are full already."""
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
    """Largest number of clouds of one size whose neighbor lists are those of the first moved on; 1 if they differ."""
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
    """Numbers of first points that no edge joins to others, of those that divide the number of points, ascending."""
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
