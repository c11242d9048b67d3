"""The lifted point set: all geometry that the layers of a network share, computed once per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lieattn._checks import check_floating, check_length, check_neighborhood
from lieattn.geometry._displacements import distinct_displacements
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Nearest, Radius
from lieattn.geometry._point_clouds import PointClouds, collate_clouds, point_clouds
from lieattn.groups import FiniteGroup, check_group


class Neighborhood(Protocol):
    """A definition of neighborhoods: a value that finds them for any clouds."""

    @property
    def scale(self) -> float | None:
        """Length that makes displacements dimensionless, if the definition has one."""

    def __call__(self, pos: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None) -> Neighbors:
        """Neighbor lists of the points ``[points, dim]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LiftedGraph(PointClouds):
    """Point clouds lifted to n = |H| group elements over each point, with their neighbor lists.

    Over the point x_i stand the elements g_ia = (x_i, h_a). A field on them is a tensor
    ``[points, fiber, channels]``, and every layer is ``layer(x, graph) -> x``. Make one with :func:`lift`.

    Attributes
    ----------
    group
        H, whose elements are the frames h_a over every point.
    pos, batch, num_clouds, grid, cell, pbc
        The clouds, see :class:`PointClouds`.
    neighbors
        Neighbor lists, sorted by target, with their transpose.
    scale
        Length that makes displacements dimensionless for positional encodings.
    displacement_index
        ``[edges]`` int64, the type of each edge's displacement; None where nothing repeats, and then every edge
        is its own type.
    relative_positions
        ``[types, fiber, dim]``, h_a⁻¹ (x_j - x_i) / scale: the displacement seen from each frame.
    """

    group: FiniteGroup
    neighbors: Neighbors
    scale: float
    displacement_index: Tensor | None
    relative_positions: Tensor

    @property
    def num_types(self) -> int:
        """Number of rows of tables that depend on the displacement."""
        return self.relative_positions.shape[0]

    @property
    def frames(self) -> Tensor:
        """Matrices h_a of the frames, the same over every point: ``[fiber, dim, dim]``."""
        return self.group.matrices(self.pos)

    def frame_positions(self) -> Tensor:
        """Coordinates in each frame, h_a⁻¹ x_i / scale: ``[points, fiber, dim]``."""
        return in_frames(self.group, self.pos) / self.scale

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> LiftedGraph:
        """Same graph on another device."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LiftedGraph:
        """Same graph in page-locked memory, from which copies to a GPU overlap with work."""
        return self._map(lambda part: part.pin_memory())

    def astype(self, dtype: torch.dtype) -> LiftedGraph:
        """Same graph with its coordinates rounded to a floating dtype."""
        check_floating("dtype", dtype)
        return replace(self, pos=self.pos.to(dtype), relative_positions=self.relative_positions.to(dtype))

    def _map(self, move: Callable[[Any], Any]) -> LiftedGraph:
        moved = {
            field.name: move(value) if isinstance(value := getattr(self, field.name), Tensor | Neighbors) else value
            for field in fields(self)
        }
        return LiftedGraph(**moved)

    @staticmethod
    def collate(graphs: Sequence[LiftedGraph]) -> LiftedGraph:
        """Disjoint union of graphs over the same group and scale, in their order.

        Displacements shared between the graphs are not merged again; the index is shifted.

        Raises
        ------
        ValueError
            If there are no graphs, or they differ in group, scale, dtype, device, or in having a raster.
        """
        clouds = collate_clouds("graphs", graphs, ("group", "scale"))
        first = graphs[0]
        type_shift = _exclusive_sum([graph.num_types for graph in graphs])
        index = None
        if any(graph.displacement_index is not None for graph in graphs):
            index = torch.cat([_type_index(g) + s for g, s in zip(graphs, type_shift, strict=True)])
        return LiftedGraph(
            **{field.name: getattr(clouds, field.name) for field in fields(PointClouds)},
            group=first.group,
            neighbors=Neighbors.collate([graph.neighbors for graph in graphs]),
            scale=first.scale,
            displacement_index=index,
            relative_positions=torch.cat([graph.relative_positions for graph in graphs]),
        )


def lift(
    points: Any,
    group: FiniteGroup,
    neighborhood: Neighborhood,
    *,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
    grid: Tensor | None = None,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    scale: float | None = None,
) -> LiftedGraph:
    """Lift point clouds onto the fiber of a finite group, the same frames over every point.

    **Equivariance.** Moving the points by (t, h) in R^d ⋊ H leaves the neighbor lists alone, if the neighborhood
    is a ball or a number of nearest points, and permutes the relative positions:
    ``relative_positions[:, a]`` becomes what it was at h⁻¹a.

    Parameters
    ----------
    points
        Point clouds in any of the forms that :func:`point_clouds` takes.
    group
        H, of matrices of size dim.
    neighborhood
        For example ``Radius(1.5)``; see :mod:`lieattn.geometry`.
    batch, ptr, mask, grid, cell, pbc
        See :func:`point_clouds`.
    scale
        Length that makes displacements dimensionless; the neighborhood's own if absent, or 1.

    Raises
    ------
    TypeError, ValueError
        If shapes, dtypes, devices, batch indices or the group's dimension do not fit, a coordinate is not finite,
        or the group does not preserve the distances that the neighborhood is made of.
    """
    check_group("group", group)
    check_neighborhood(neighborhood)
    clouds = point_clouds(points, batch=batch, ptr=ptr, mask=mask, grid=grid, cell=cell, pbc=pbc)
    pos = clouds.pos
    _check_match(pos, group, neighborhood)
    neighbors = find_neighbors(clouds, neighborhood)
    if scale is None:
        scale = 1.0 if neighborhood.scale is None else neighborhood.scale
    check_length("scale", scale)
    displacements = neighbors.displacements(pos)
    index = None
    if not displacements.requires_grad and len(displacements):
        # With gradients every edge keeps its own displacement, or they would reach a representative only.
        extent = _extents(clouds, neighbors)[clouds.batch[neighbors.target]]
        rows, index = distinct_displacements(displacements, extent)
        displacements = displacements[rows]
    return LiftedGraph(
        **{field.name: getattr(clouds, field.name) for field in fields(PointClouds)},
        group=group,
        neighbors=neighbors,
        scale=float(scale),
        displacement_index=index,
        relative_positions=in_frames(group, displacements) / scale,
    )


def find_neighbors(clouds: PointClouds, neighborhood: Neighborhood) -> Neighbors:
    """Neighbor lists of clouds, whether they repeat or not.

    Raises
    ------
    ValueError
        If they repeat and the neighborhood does not find images.
    """
    if clouds.cell is None:
        return neighborhood(clouds.pos, clouds.batch)
    if not isinstance(neighborhood, Radius):
        raise ValueError(f"neighborhood: clouds that repeat have images within a Radius, got {neighborhood!r}")
    lattices = {"cell": clouds.cell, "pbc": clouds.pbc}
    if clouds.num_points == 0 or int(clouds.batch.max()) + 1 < clouds.num_clouds:
        # The neighborhood counts clouds by their largest index.
        last = int(clouds.batch.max()) + 1 if clouds.num_points else 0
        lattices = {name: None if value is None else value[:last] for name, value in lattices.items()}
    return neighborhood(clouds.pos, clouds.batch, **lattices)


def _extents(clouds: PointClouds, neighbors: Neighbors) -> Tensor:
    """Largest absolute coordinate of each cloud and of the shifts of its edges, ``[clouds]``."""
    largest = clouds.pos.abs().amax(dim=1)
    extents = largest.new_zeros(clouds.num_clouds).scatter_reduce(0, clouds.batch, largest, "amax")
    if neighbors.shift is not None:
        longest = neighbors.shift.abs().amax(dim=1).to(extents)
        extents = extents.scatter_reduce(0, clouds.batch[neighbors.target], longest, "amax")
    return extents


def in_frames(group: FiniteGroup, vectors: Tensor) -> Tensor:
    """h_a⁻¹ v for each frame: ``[vectors, dim]`` to ``[vectors, fiber, dim]``, in their dtype, under autocast too."""
    inverse = group.elements[group.inverse_index].to(vectors.device)
    # The product is taken in float64 so that a coordinate which should vanish does, as nearly as it can.
    return torch.einsum("aij,pj->pai", inverse, vectors.to(torch.float64)).to(vectors.dtype)


def _check_match(pos: Tensor, group: FiniteGroup, neighborhood: Neighborhood) -> None:
    if pos.shape[1] != group.dim:
        raise ValueError(
            f"points: {group.name} acts on {group.dim} coordinates, so expected [points, {group.dim}], got "
            f"{tuple(pos.shape)}"
        )
    if isinstance(neighborhood, Radius | Nearest) and not group.is_orthogonal:
        raise ValueError(
            f"group: {group.name} does not preserve distances, so {neighborhood} would not turn with it; give its "
            f"matrices in an orthonormal basis"
        )


def _type_index(graph: LiftedGraph) -> Tensor:
    if graph.displacement_index is not None:
        return graph.displacement_index
    return torch.arange(graph.num_types, device=graph.device)


def _exclusive_sum(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
