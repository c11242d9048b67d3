"""Pieces of large clouds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count, check_tensor, may_read_values
from lieattn._core.contexts import may_recompute
from lieattn.geometry._clouds import PointClouds
from lieattn.geometry._indices import check_indices, ranges
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._movable import Movable
from lieattn.geometry._neighbor_lists import Neighbors


@dataclass(frozen=True, eq=False)
class Piece(Movable):
    """Some points of a graph, with the data that a layer needs to evaluate them.

    Attributes
    ----------
    points
        ``[n]`` int64, ascending indices in the whole graph: the own points of the piece, and its halo, which consists
        of their neighbors outside.
    own
        Places of the own points in ``points``, int64. Every point of the graph is an own point of exactly one piece.
    graph
        Graph on ``points`` with the edges of the whole graph that end at own points. Outputs of a layer at the halo are
        meaningless.
    """

    points: Tensor
    own: Tensor
    graph: LiftedGraph

    @staticmethod
    def rows(x: Tensor, found: Sequence[Piece]) -> tuple[Tensor, ...]:
        """Return the rows of ``x`` ``[points, *]`` for each piece. Their gradients are summed in a single tensor.

        ValueError is raised, on the CPU, if ``x`` has fewer rows than the graph has points.
        """
        check_arguments(Piece.rows, locals())
        check_tensor("x", x, "a tensor [points, *]")
        seen = (piece.points for piece in found if len(piece.points) and may_read_values(piece.points))
        least = max((int(points[-1]) + 1 for points in seen), default=0)
        if x.ndim == 0 or len(x) < least:
            raise ValueError(f"x: expected [points, *] with at least {least} points, got {tuple(x.shape)}")
        if not x.requires_grad or not may_recompute():
            return tuple(x.index_select(0, piece.points) for piece in found)
        return cast(tuple[Tensor, ...], _Rows.apply(x, *(piece.points for piece in found)))


def pieces(graph: LiftedGraph, parts: int | Tensor) -> list[Piece]:
    """Cut a graph into pieces, which can be evaluated one after the other, or on different machines.

    If the output of a layer at a point depends only on that point and its neighbors, as for attention with layer
    normalization, ``layer(x[piece.points], piece.graph)[piece.own]`` are the rows of ``layer(x, graph)`` at the own
    points of the piece. The features of the halos must be updated between two layers. Relative elements of a piece are
    not computed here, but when a layer uses them.

    Parameters
    ----------
    graph
        Graph with any frames on one scale. ValueError is raised if it has several scales.
    parts
        Largest number of points of a piece; clouds are then cut in halves across their longest side until they are
        small enough. Or the index of the part of each point, int64 ``[points]`` from 0; parts may be empty.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import Radius, lift, pieces
    >>> from lieattn.groups import cyclic
    >>> graph = lift(torch.rand(100, 2), cyclic(4), Radius(0.2))
    >>> sum(len(piece.own) for piece in pieces(graph, 30))
    100
    """
    check_arguments(pieces, locals())
    if graph.levels > 1:
        raise ValueError(f"graph: expected one scale, since a graph of {graph.levels} scales cannot be cut")
    if isinstance(parts, Tensor):
        check_indices("parts", parts, dim=1, device=graph.device)
        least = int(parts.min()) if len(parts) else 0
        if len(parts) != graph.num_points or least < 0:
            expected = f"the part of each of {graph.num_points} points, from 0"
            raise ValueError(f"parts: expected {expected}, got {len(parts)} numbers from {least}")
        counts = torch.bincount(parts)
        found = list(parts.argsort(stable=True).split(counts.tolist()))
    else:
        check_count("parts", parts)
        found = list(_halves(torch.arange(graph.num_points, device=graph.device), graph, parts))
    return [_piece(graph, own) for own in found]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *points: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*points)
        ctx.length = len(x)
        return tuple(x.index_select(0, some) for some in points)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].new_zeros(ctx.length, *grads[0].shape[1:])
        for points, grad in zip(ctx.saved_tensors, grads, strict=True):
            total.index_add_(0, points, grad)
        return total, *([None] * len(grads))


def _halves(points: Tensor, clouds: PointClouds, size: int) -> Iterator[Tensor]:
    """Yield ascending points in boxes of at most ``size`` points. Different clouds are separated first."""
    if len(points) <= size:
        yield points.sort().values
        return
    places = torch.cat([clouds.batch[points, None].double(), clouds.pos[points].detach().double()], dim=1)
    extent = places.amax(dim=0) - places.amin(dim=0)
    axis = 0 if extent[0] > 0 else int(extent.argmax())
    order = points[places[:, axis].argsort(stable=True)]
    del places
    half = -(-len(points) // size) // 2 * size  # most pieces then have exactly this size
    yield from _halves(order[:half], clouds, size)
    yield from _halves(order[half:], clouds, size)


def _piece(graph: LiftedGraph, own: Tensor) -> Piece:
    whole = graph.neighbors
    target, edges = ranges(whole.row_ptr[own], whole.row_ptr[own + 1] - whole.row_ptr[own])
    source = whole.source[edges]
    # Ascending order keeps the lists sorted, and sums have the same order as in the whole graph.
    mask = torch.zeros(graph.num_points, dtype=torch.bool, device=graph.device)
    mask[own] = mask[source] = True
    points = mask.nonzero()[:, 0]
    place = torch.empty(graph.num_points, dtype=torch.int64, device=graph.device)
    place[points] = torch.arange(len(points), device=graph.device)
    degree = torch.zeros_like(points)
    degree[place[own]] = whole.row_ptr[own + 1] - whole.row_ptr[own]
    row_ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    shift = None if whole.shift is None else whole.shift[edges]
    neighbors = Neighbors(row_ptr, place[source], place[own][target], shift=shift)
    return Piece(points, place[own], graph.restricted(neighbors, points=points, edges=edges))
