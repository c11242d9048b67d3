"""Large clouds cut into pieces: own points, and the points of other pieces that they read, their halo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from lieattn._checks import check_arguments, check_count, check_tensor
from lieattn._recompute import may_recompute
from lieattn.geometry._clouds import Movable, PointClouds, check_indices, ranges
from lieattn.geometry._lift import LiftedGraph
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._relative import RelativeElements


@dataclass(frozen=True, eq=False)
class Piece(Movable):
    """Some points of a graph with all that a layer needs to evaluate them.

    Attributes
    ----------
    points
        ``[n]`` int64, points of the whole graph, ascending: those of the piece, and their neighbors outside, the halo.
    own
        Places of those of the piece among ``points``, int64. Every point of the graph is the own point of one piece.
    graph
        On ``points``, with the edges of the whole graph that end at own points; what a layer gives elsewhere is void.
    """

    points: Tensor
    own: Tensor
    graph: LiftedGraph

    @staticmethod
    def rows(x: Tensor, found: Sequence[Piece]) -> tuple[Tensor, ...]:
        """Rows of ``x`` ``[points, *]`` for the points of each piece; gradients of all are added up in one tensor."""
        check_arguments(Piece.rows, locals())
        check_tensor("x", x, "a tensor [points, *]")
        if not x.requires_grad or not may_recompute():
            return tuple(x.index_select(0, piece.points) for piece in found)
        return cast(tuple[Tensor, ...], _Rows.apply(x, *(piece.points for piece in found)))


def pieces(graph: LiftedGraph, parts: int | Tensor) -> list[Piece]:
    """Cut a graph into pieces, which are evaluated one after the other, or each on a machine of its own.

    For a layer whose output at a point depends on that point and its neighbors alone, such as attention with a layer
    normalization, ``layer(x[piece.points], piece.graph)[piece.own]`` are the rows of ``layer(x, graph)`` at the
    piece's own points. Between two layers the halos are to be read anew. Nothing is evaluated here: the relative
    elements of a piece are computed when a layer asks for them.

    Parameters
    ----------
    graph
        Of any frames, on one scale; ValueError is raised for a fiber of several.
    parts
        How many points a piece has at most: clouds are then cut in halves, across their longest side, until they are
        small enough; or the number of the part that each point belongs to, int64 ``[points]`` from 0, where parts may
        be empty.

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
        if len(parts) != graph.num_points or (len(parts) and int(parts.min()) < 0):
            expected = f"the part of each of {graph.num_points} points, from 0"
            raise ValueError(f"parts: expected {expected}, got {len(parts)} numbers from {int(parts.min())}")
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
    """Points in boxes of at most ``size``, each ascending; clouds are kept apart as long as there are several."""
    if len(points) <= size:
        yield points.sort().values
        return
    places = torch.cat([clouds.batch[points, None].double(), clouds.pos[points].detach().double()], dim=1)
    extent = places.amax(dim=0) - places.amin(dim=0)
    axis = 0 if extent[0] > 0 else int(extent.argmax())
    order = points[places[:, axis].argsort(stable=True)]
    del places
    half = -(-len(points) // size) // 2 * size  # so that few pieces are smaller than they may be
    yield from _halves(order[:half], clouds, size)
    yield from _halves(order[half:], clouds, size)


def _piece(graph: LiftedGraph, own: Tensor) -> Piece:
    whole = graph.neighbors
    target, edges = ranges(whole.row_ptr[own], whole.row_ptr[own + 1] - whole.row_ptr[own])
    source = whole.source[edges]
    # In ascending order, so that lists stay sorted and sums are taken in the order of the whole graph.
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
    log_measure = None if graph.log_measure is None else graph.log_measure[edges]
    relative = _relative(graph.relative, points, edges, neighbors)
    part = replace(
        graph,
        pos=relative.pos,
        batch=relative.batch,
        grid=None,
        edge_index=None,
        log_measure=log_measure,
        relative=relative,
    )
    return Piece(points, place[own], part)


def _relative(whole: RelativeElements, points: Tensor, edges: Tensor, neighbors: Neighbors) -> RelativeElements:
    pose, elements, dilation = (None if x is None else x[points] for x in (whole.pose, whole.elements, whole.dilation))
    levels_up, given = (None if whole.levels_up is None else whole.levels_up[edges]), whole.given
    if given is not None:
        given = given[edges if whole.row is None else whole.row[edges]]
    changed = replace(whole, pos=whole.pos[points], batch=whole.batch[points], neighbors=neighbors, given=given)
    return replace(changed, pose=pose, elements=elements, dilation=dilation, levels_up=levels_up)
