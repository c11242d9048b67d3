"""Graphs of group elements over the points of clouds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count, check_is, check_tensor, may_read_values
from lieattn._core.contexts import may_recompute, without_autocast
from lieattn.geometry._clouds import PointClouds
from lieattn.geometry._indices import Movable, check_indices, ranges
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Neighborhood, find_neighbors, smooth_cutoff
from lieattn.geometry._relative import RelativeElements, in_frames, rows_of
from lieattn.groups import FiniteGroup
from lieattn.spaces import HomogeneousSpace


@dataclass(frozen=True, eq=False)
class Kept(Movable):
    """The points that remain after a layer: their indices ``[points kept]`` int64, and their clouds."""

    points: Tensor
    clouds: PointClouds


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LiftedGraph(PointClouds):
    """Point clouds lifted to a fiber of group elements over each point, with their neighbor lists.

    The elements over the point x_i are g_ia. A field on them is a tensor ``[points, fiber, channels]``, and every layer
    is called as ``layer(x, graph) -> x``. Build a graph with :func:`lift`.

    Attributes
    ----------
    pos, batch, num_clouds, grid, raster, pixel, cell, pbc
        See :class:`PointClouds`; ``pos`` are points of the space.
    relative
        Relative elements of all edges.
    log_measure
        ``[edges]``, logarithm of the Haar measure of the source relative to the target, see :class:`ScaleFrames`, or
        None if it is constant. It is added to the scores of a softmax; without a softmax, its exponential multiplies
        the values.
    levels
        Number of scales over each point. The graph has a node for each point i and scale k, with index i · levels + k.
    vectors, edge_features, charge
        Further inputs of layers: vectors ``[points, count, dim]``, invariant features ``[edges, channels]``, and total
        charges ``[clouds]``. These and the next attributes are None unless they are set by :meth:`carrying`.
    terms, local
        Terms that a network has evaluated for several layers, in place of those of their encodings, or a
        :class:`Stencil` in place of neighbor lists, see :func:`lift_rasters`; a graph of the same points with other
        neighbors, for messages. Derived graphs with other points or edges have neither of these, nor ``kept``.
    kept
        Points that remain after a block, see :meth:`keeping`; None if all do.
    """

    relative: RelativeElements
    log_measure: Tensor | None = None
    levels: int = 1
    vectors: Tensor | None = None
    edge_features: Tensor | None = None
    charge: Tensor | None = None
    terms: Any = None
    local: LiftedGraph | None = None
    kept: Kept | None = None

    @classmethod
    def over(
        cls, clouds: PointClouds, *, log_measure: Tensor | None = None, levels: int = 1, **relative: Any
    ) -> LiftedGraph:
        """Build a graph over clouds. Further arguments are those of :class:`RelativeElements`."""
        found = RelativeElements(pos=clouds.pos, batch=clouds.batch, **relative)
        own = {part.name: getattr(clouds, part.name) for part in fields(PointClouds)}
        return cls(**own, relative=found, log_measure=log_measure, levels=levels)

    def _facts(self) -> dict[str, object]:
        found = {"fiber": self.fiber, "edges": self.neighbors.num_edges, "space": self.space.name}
        return {**super()._facts(), **found}

    @property
    def neighbors(self) -> Neighbors:
        """Neighbor lists, sorted by target."""
        return self.relative.neighbors

    @property
    def space(self) -> HomogeneousSpace:
        """The homogeneous space X with its group G."""
        return self.relative.space

    @property
    def group(self) -> FiniteGroup | None:
        """Finite group whose elements are the fiber, or None if the frames are not a finite group."""
        return self.relative.group

    @property
    def fiber(self) -> int:
        """Number of elements over each point."""
        return self.relative.fiber

    @property
    def degree(self) -> Float[Tensor, " points"]:
        """Number of neighbors of each point, ``[points]`` floating. Smooth neighbors count with their weights."""
        window, neighbors = self.relative.log_window, self.neighbors
        if window is None:
            return neighbors.degree.to(self.pos.dtype)
        weights = window.exp() if self.relative.row is None else window.exp().index_select(0, self.relative.row)
        return neighbors.sum_to_targets(weights)

    @property
    def length(self) -> float:
        """Length by which the translations of relative elements are divided."""
        return self.relative.length

    @property
    def frames(self) -> Float[Tensor, "*points fiber k k"]:
        """Linear parts of the elements, which map components in a frame to vectors of the space.

        They are ``[fiber, dim, dim]`` if all points have the same frames, otherwise ``[points, fiber, dim, dim]``.
        """
        relative = self.relative
        if relative.elements is not None:
            return self.space.group.linear(relative.elements)
        matrices = cast(FiniteGroup, relative.group).matrices(self.pos)
        if relative.pose is None:  # torch cannot load an exported program with a context around nothing
            return matrices
        with without_autocast(self.device):
            return relative.pose[:, None] @ matrices

    @property
    def elements(self) -> Float[Tensor, "points fiber n n"]:
        """The elements g_ia ``[points, fiber, m, m]``."""
        if self.relative.elements is not None:
            return self.relative.elements
        section = self.space.section(self.pos)[:, None]
        if self.space.stabilizer is None:
            return section
        return self.space.group.product(section, self.space.embed(self.frames))

    def frame_positions(self, *, centered: bool = True) -> Float[Tensor, "points fiber dim"]:
        """Return coordinates in each frame, divided by the length, ``[points, fiber, dim]``.

        They are relative to the origin or, if ``centered``, to the mean of the cloud. If all points have the same
        frames and scale, their differences are :attr:`RelativeElements.positions`. Centered positions of periodic
        clouds are ``[images, fiber, dim]``, in the frames of the points of :attr:`Neighbors.images`.
        """
        check_is("centered", centered, bool)
        places, images = self.pos[:, : self.space.group.dim], self.neighbors.images if centered else None
        seen = self.neighbors.at_images(places - self.mean(places)[self.batch]) if centered else places
        points = None if images is None else images.point
        if self.relative.tied:
            return in_frames(cast(FiniteGroup, self.group), self.relative.posed(seen / self.length, points))
        inverse = torch.linalg.inv(self.frames.double())[slice(None) if points is None else points]
        return (inverse @ (seen / self.length).double()[:, None, :, None])[..., 0].to(places.dtype)

    def seen_in_frames(
        self, vectors: Float[Tensor, "n count dim"], points: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, "n fiber count dim"]:
        """Return the components A_iaᵀ v ``[n, fiber, count, dim]`` of vectors ``[n, count, dim]`` in orthogonal frames.

        The frames of row i are those of the point ``points[i]``, or of point i by default.
        """
        check_tensor("vectors", vectors, "a floating tensor [n, count, dim]")
        if points is not None:
            check_indices("points", points, dim=1, device=self.device)
        rows, dim = self.num_points if points is None else len(points), self.space.group.dim
        if vectors.ndim != 3 or vectors.shape[::2] != (rows, dim):
            raise ValueError(f"vectors: expected [{rows}, count, {dim}], got {tuple(vectors.shape)}")
        pose, group = self.relative.pose, self.group
        with without_autocast(self.device):
            if not self.relative.tied or group is None:
                frames = self.frames if points is None else self.frames[points]
                return torch.einsum("paji,pkj->paki", frames, vectors)
            if pose is not None:
                # After rotation to the pose of the cloud, the matrices are the same for all rows.
                vectors = torch.einsum("pji,pkj->pki", pose if points is None else pose[points], vectors)
            return torch.einsum("aji,pkj->paki", group.matrices(vectors), vectors)

    def spread(self, x: Shaped[Tensor, " points *rest"]) -> Shaped[Tensor, " nodes *rest"]:
        """Repeat features of points on all scales, ``[points, *]`` to ``[nodes, *]``."""
        check_is("x", x, Tensor)
        return x if self.levels == 1 else x.repeat_interleave(self.levels, dim=0)

    def by_level(self, x: Shaped[Tensor, " nodes *rest"]) -> Shaped[Tensor, "points levels *rest"]:
        """Separate the scales of a field, ``[nodes, *]`` to ``[points, levels, *]``."""
        check_is("x", x, Tensor)
        return x.unflatten(0, (-1, self.levels))

    @property
    def scales(self) -> PointClouds:
        """The nodes, with each scale k of a cloud as a separate cloud of index cloud · levels + k."""
        if self.levels == 1:
            return self
        batch = self.batch * self.levels + torch.arange(self.num_points, device=self.device) % self.levels
        return PointClouds(pos=self.pos, batch=batch, num_clouds=self.num_clouds * self.levels)

    def at(
        self, pos: Float[Tensor, "points dim"], deformation: Float[Tensor, "clouds dim dim"] | None = None
    ) -> LiftedGraph:
        """Return the graph with the same lists and frames for new positions, see :meth:`RelativeElements.at`."""
        moved, cell = self.carrying(pos=pos, relative=self.relative.at(pos, deformation)), self.cell
        return moved if cell is None or deformation is None else replace(moved, cell=cell @ deformation.to(cell))

    def with_relative(self, relative: RelativeElements) -> LiftedGraph:
        """Return the graph of the same clouds with other relative elements."""
        return replace(self, relative=relative)

    def keeping(self, points: Int[Tensor, " kept"], clouds: PointClouds) -> LiftedGraph:
        """Return the graph for a block after which only some points remain, given by indices int64 and as clouds."""
        check_indices("points", points, dim=1, device=self.device)
        return replace(self, kept=Kept(points, clouds))

    def select_edges(self, kept: Int[Tensor, " edges"]) -> LiftedGraph:
        """Return the graph with some of the edges, given by their indices ``[kept]`` in ascending order."""
        check_indices("kept", kept, dim=1, device=self.device, below=self.neighbors.num_edges)
        return self.restricted(self.neighbors.select(kept), edges=kept)

    def subset(self, kept: Int[Tensor, " kept"], neighborhood: Neighborhood) -> LiftedGraph:
        """Return the graph of the points ``kept`` with their elements, for example those of :func:`farthest_points`.

        ``kept`` are int64 indices. Neighbors are found again, and the length is unchanged. ValueError is raised for
        graphs with several scales.
        """
        check_indices("kept", kept, dim=1, device=self.device, below=self.num_points)
        if self.levels > 1:
            raise ValueError("kept: a graph with a fiber of scales has no subset; lift the kept points instead")
        pos, batch, dim = self.pos[kept], self.batch[kept], self.space.group.dim
        clouds = PointClouds(pos=pos[:, :dim], batch=batch, num_clouds=self.num_clouds, cell=self.cell, pbc=self.pbc)
        left = self.restricted(find_neighbors(clouds, neighborhood), points=kept)
        return left.with_relative(replace(left.relative, cutoff=smooth_cutoff(neighborhood)))

    def restricted(
        self, neighbors: Neighbors, *, points: Tensor | None = None, edges: Tensor | None = None
    ) -> LiftedGraph:
        """Return the graph of ``points`` (all if absent) with other lists, whose edges were ``edges`` (new if absent).

        ``points`` and ``edges`` are int64 indices. Nothing is checked.
        """
        relative = self.relative.restricted(neighbors, points, edges)
        measure, features = (
            None if edges is None else rows_of(x, edges) for x in (self.log_measure, self.edge_features)
        )
        changed = replace(self, relative=relative, log_measure=measure, edge_features=features)
        changed = replace(changed, pos=relative.pos, batch=relative.batch, terms=None, local=None, kept=None)
        if points is None:
            return changed
        vectors, pixel = rows_of(self.vectors, points), rows_of(self.pixel, points)
        return replace(changed, vectors=vectors, pixel=pixel, grid=None, edge_index=None, each=None)

    def carrying(self, **attributes: Any) -> LiftedGraph:
        """Return the same graph with other attributes of those that layers read, such as ``terms`` and ``vectors``."""
        # What torch compiles does not read the sizes of clouds, and must not be compiled again for others.
        unread: dict[str, Any] = {"each": None} if torch.compiler.is_compiling() else {}
        return replace(self, **unread, **attributes)


# --- pieces of large clouds -------------------------------------------------------------------------------------------


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
    def rows(x: Shaped[Tensor, " points *rest"], found: Sequence[Piece]) -> tuple[Tensor, ...]:
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


def pieces(graph: LiftedGraph, parts: int | Int[Tensor, " points"]) -> list[Piece]:
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
