"""Neighborhoods: small values that define which points are neighbors.

They search in float64, on any device, without a limit on the number of neighbors and without gradient. Points of
different clouds are never neighbors. Points at the same place are distinct points.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lieattn._core.checks import check_choice, check_counts, check_flag, check_is, check_length, check_neighborhood
from lieattn._core.contexts import outside_of_transforms
from lieattn.geometry._clouds import PointClouds, as_coordinates, lattices
from lieattn.geometry._indices import cloud_index, first_true
from lieattn.geometry._neighbor_lists import (
    Neighbors,
    all_pairs_of_clouds,
    check_edge_index,
    check_lists,
    check_within_clouds,
)
from lieattn.geometry._search import Method, Ties, images_within, pairs_all, pairs_between, pairs_nearest, pairs_within

OFF_LATTICE = 1e-2  # tolerance in units of the spacing, for the rounding of coordinates far from the origin


@runtime_checkable
class Neighborhood(Protocol):
    """Interface of neighborhoods: a value that finds the neighbors in any clouds.

    It may have a ``cutoff``, the distance at which the weight of neighbors vanishes (see :func:`smooth_cutoff`), and a
    method ``scaled(factor)``, which returns the neighborhood for points that are further apart (see :func:`scaled`).
    :func:`find_neighbors` and :func:`lift` check the lists that your own neighborhoods return.
    """

    @property
    def length(self) -> float | None:
        """Length that makes displacements dimensionless, or None."""

    def __call__(self, pos: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None) -> Neighbors:
        """Return the neighbor lists of points ``[points, dim]``, such as ``Neighbors.from_edge_index(edges, points)``.

        Edges connect points of one cloud.
        """


class _Neighborhood(abc.ABC):
    """Base class of neighborhoods, which checks the clouds before it searches."""

    @property
    def length(self) -> float | None:
        """Length that makes displacements dimensionless, or None if the neighborhood has none."""
        return None

    @property
    def cutoff(self) -> float | None:
        """Distance at which the weight of neighbors vanishes, or None if all have the same weight."""
        return None

    def scaled(self, factor: float) -> Self:
        """Return the same neighborhood for points that are further apart by a factor."""
        return self

    def __call__(self, pos: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None) -> Neighbors:
        """Return neighbor lists of coordinates ``pos`` ``[points, dim]`` of any floating dtype, on their device.

        For ``batch`` and ``ptr``, see :func:`point_clouds`.
        """
        return self._find(pos, batch, ptr)

    @outside_of_transforms
    def _find(self, pos: Tensor, batch: Tensor | None, ptr: Tensor | None, method: Method | None = None) -> Neighbors:
        """Find neighbors by a given method, or by the fastest one on the device."""
        pos = as_coordinates(pos)
        cloud, num_clouds = cloud_index(pos, batch, ptr)
        if num_clouds > len(pos):
            # Renumber the clouds without empty ones, because the search uses tables with a row for each cloud.
            cloud = torch.unique(cloud, return_inverse=True)[1]
        return self._search(pos, cloud, method)

    @abc.abstractmethod
    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        """Find the neighbors among checked float64 points."""


@dataclass(frozen=True)
class Radius(_Neighborhood):
    """All points of the cloud in the closed ball around each point. The neighborhood is symmetric.

    **Equivariance.** Rotations, reflections and translations of the points do not change the neighbors. The tolerance
    is a relative 1e-5 of the radius, so neighbors at exactly the radius, as on grids, are not lost to rounding. Where
    float32 coordinates exceed some hundred radii, their own rounding is larger: there, choose a radius between two
    distances, such as 1.2 spacings of a grid instead of 1.

    In periodic clouds, all images in the ball are neighbors. If the radius exceeds half the cell, this includes several
    images of one point, and images of the point itself. ``radius(pos, batch, cell=cell, pbc=pbc)`` returns lists with a
    ``shift``. A point is its own neighbor if ``include_self``; its periodic images are neighbors in any case.

    ``smooth`` neighbors fade with the distance r: in sums over a neighborhood, and in the denominator of a softmax,
    each has the weight exp(-x² / (1 - x²)), x = r / radius. Outputs and all their derivatives are then continuous when
    points enter or leave the ball, as energies require. A point must be its own neighbor in this case, so that the
    denominator does not vanish. With False, all neighbors have the same weight. None means False, except for networks
    that learn energies (:class:`lieattn.models.EnergyForces`), which make these neighborhoods smooth.

    Examples
    --------
    >>> Radius(1.0, include_self=False)(torch.tensor([[0.0], [1.0], [3.0]])).edge_index.tolist()
    [[1, 0], [0, 1]]
    """

    radius: float
    include_self: bool = True
    smooth: bool | None = None

    def __post_init__(self) -> None:
        check_length("radius", self.radius)
        check_flag(include_self=self.include_self)
        if self.smooth is not None:
            check_flag(smooth=self.smooth)
        if self.smooth and not self.include_self:
            raise ValueError(
                "include_self: expected True for smooth neighborhoods, since all other neighbors may have weight 0"
            )

    @property
    def length(self) -> float:
        """The radius."""
        return float(self.radius)

    @property
    def cutoff(self) -> float | None:
        """The radius if the neighborhood is smooth, otherwise None."""
        return float(self.radius) if self.smooth else None

    def scaled(self, factor: float) -> Radius:
        check_length("factor", factor)
        return replace(self, radius=self.radius * factor)

    def __call__(
        self,
        pos: Tensor,
        batch: Tensor | None = None,
        ptr: Tensor | None = None,
        *,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
    ) -> Neighbors:
        """Return neighbor lists on the device of ``pos``, with shifts in float64 if clouds are periodic.

        For the arguments and errors, see :func:`point_clouds`. The shifts are differentiable functions of the ``cell``.
        """
        checked = as_coordinates(pos)
        cloud, num_clouds = cloud_index(checked, batch, ptr)
        cell, pbc = lattices(cell, pbc, num_clouds, checked)
        if cell is None or pbc is None:
            return self._find(pos, cloud, None)
        return self._with_images(pos, cloud, cell, pbc)

    def _with_images(self, pos: Tensor, cloud: Tensor, cell: Tensor, pbc: Tensor) -> Neighbors:
        """Return the neighbor lists of checked periodic clouds."""
        used, cloud = torch.unique(cloud, return_inverse=True)
        cell, pbc, points = cell[used], pbc[used], pos.detach().double()
        keys, images = images_within(points, cloud, float(self.radius), self.include_self, cell.detach().double(), pbc)
        neighbors = Neighbors.from_keys(keys, len(pos))
        lattice = torch.where(pbc[..., None], cell, 0.0)[cloud[neighbors.target]]
        # Shifts are long, and differences of points that are far apart are added to them.
        return replace(neighbors, shift=(images.double()[:, None] @ lattice.double())[:, 0])

    @outside_of_transforms
    def between(
        self,
        x: Float[Tensor, "sources dim"],
        y: Float[Tensor, "targets dim"],
        batch_x: Int[Tensor, " sources"] | None,
        batch_y: Int[Tensor, " targets"] | None,
    ) -> Int[Tensor, "2 edges"]:
        """Return the pairs of points of ``y`` and of ``x``, int64 ``[2, edges]``; see :mod:`lieattn.transforms`."""
        x, y = as_coordinates(x, "x"), as_coordinates(y, "y")
        clouds = torch.cat([cloud_index(x, batch_x, name="batch_x")[0], cloud_index(y, batch_y, name="batch_y")[0]])
        clouds = torch.unique(clouds, return_inverse=True)[1]  # the search has tables with a row for each cloud
        keys = pairs_between(x, y, clouds[: len(x)], clouds[len(x) :], float(self.radius))
        return torch.stack([keys // max(len(x), 1), keys % max(len(x), 1)])

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        keys = pairs_within(pos, cloud, float(self.radius), "euclidean", self.include_self, method)
        return Neighbors.from_keys(keys, len(pos))


@dataclass(frozen=True)
class Nearest(_Neighborhood):
    """The k nearest *other* points of the cloud, and the point itself if included. In general not symmetric.

    **Equivariance.** Rotations, reflections, translations and dilations of the points do not change the neighbors.

    In a cloud of at most k points, all points are neighbors. Distances within a relative 1e-5 of the k-th smallest are
    tied with it. With ``ties="index"``, the tied points with the lowest indices are chosen: each point has exactly k
    other neighbors, but they depend on the order of the points in clouds with ties, such as grids. With
    ``ties="all"``, all tied points are neighbors: a point may have more than k other neighbors, and they depend only on
    the geometry. If n points are at one place, as with zero padding, these are n² edges.

    Examples
    --------
    >>> line = torch.tensor([[0.0], [1.0], [2.0]])
    >>> Nearest(1, include_self=False)(line).edge_index.tolist()
    [[1, 0, 1], [0, 1, 2]]
    >>> Nearest(1, include_self=False, ties="all")(line).edge_index.tolist()
    [[1, 0, 2, 1], [0, 1, 1, 2]]
    """

    k: int
    include_self: bool = True
    ties: Ties = "index"

    def __post_init__(self) -> None:
        check_counts(k=self.k)
        check_flag(include_self=self.include_self)
        check_choice("ties", self.ties, Ties)

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        keys = pairs_nearest(pos, cloud, int(self.k), self.ties, self.include_self, method)
        return Neighbors.from_keys(keys, len(pos))


@dataclass(frozen=True)
class PixelSquare(_Neighborhood):
    """The points in the axis-aligned square (in 3D, cube) around each point. The neighborhood is symmetric.

    Neighbors are all x_j with max over the axes of |x_j - x_i| <= (P - 1)/2 spacing, where P = ``size`` is odd and
    ``spacing`` is the distance of adjacent pixels. The tolerance is a hundredth of the spacing, so that rounding loses
    no pixels that are small or far from the origin. For the pixels of an image, this is the part of the P x P window
    inside the image. P = 1 gives the point itself (and points at the same place). **The square is preserved only by the
    rotations and reflections that map it to itself** (those of p4 and p4m). For others, use :class:`Radius`.

    With a ``dilation`` D, the square is D times as wide, and the same number of neighbors are D pixels apart, with the
    same tolerance. Powers of 2 give dyadic neighborhoods.
    """

    size: int
    spacing: float = 1.0
    include_self: bool = True
    dilation: int = 1

    def __post_init__(self) -> None:
        check_counts(size=self.size, dilation=self.dilation)
        if self.size % 2 == 0:
            raise ValueError(f"size: expected an odd number, so that there is a central pixel, got {self.size}")
        check_length("spacing", self.spacing)
        check_flag(include_self=self.include_self)

    @property
    def length(self) -> float:
        """(P - 1)/2 · dilation · spacing, or dilation · spacing if P = 1."""
        return (max(int(self.size), 3) - 1) / 2 * float(self.spacing) * int(self.dilation)

    def scaled(self, factor: float) -> PixelSquare:
        check_length("factor", factor)
        return replace(self, spacing=self.spacing * factor)

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        step = float(self.spacing) * int(self.dilation)
        half = (int(self.size) - 1) / 2 * step
        reach = half + OFF_LATTICE * float(self.spacing)
        keys = pairs_within(pos, cloud, reach, "chebyshev", self.include_self, method)
        if self.dilation > 1:
            apart = pos[keys % len(pos)] - pos[keys // len(pos)] if len(pos) else pos
            off_lattice = (apart - (apart / step).round() * step).abs().amax(dim=1)
            keys = keys[off_lattice <= OFF_LATTICE * float(self.spacing)]
        return Neighbors.from_keys(keys, len(pos))


@dataclass(frozen=True)
class AllPairs(_Neighborhood):
    """All points of the cloud. The neighborhood is symmetric, and no transformation of the points changes it.

    Memory is quadratic in the size of the clouds.
    """

    include_self: bool = True

    def __post_init__(self) -> None:
        check_flag(include_self=self.include_self)

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        found = all_pairs_of_clouds(cloud) if self.include_self else None
        return Neighbors.from_keys(pairs_all(pos, cloud, self.include_self), len(pos)) if found is None else found


@dataclass(frozen=True, eq=False)
class Given(_Neighborhood):
    """Given edges, such as bonds or a mesh: a tensor, or the ``edge_index`` of the data.

    ``edge_index`` is int64 ``[2, edges]`` in the format of PyTorch Geometric: source points j, then target points i,
    which attend to their sources. Edges can be in any order, directed or not, and on another device than the points.
    ``Given("edge_index")`` reads them from a ``Data`` or ``Batch``, for which PyTorch Geometric adds the offsets.

    ``include_self`` adds missing edges from each point to itself, or removes existing ones. If None, they are added to
    edges of the data, as by all other neighborhoods, and a tensor is unchanged.

    ValueError is raised when neighbors are found, if an edge has a point that does not exist, connects two clouds or
    occurs twice, or if the data have no edges.

    Examples
    --------
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import point_clouds
    >>> path = Data(pos=torch.zeros(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    >>> find_neighbors(point_clouds(path), Given("edge_index")).edge_index.tolist()
    [[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]]
    """

    edge_index: Literal["edge_index"] | Tensor
    include_self: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.edge_index, str):
            check_edge_index(self.edge_index)
        elif self.edge_index != "edge_index":
            raise ValueError(f"edge_index: expected 'edge_index' of the data, or a tensor, got {self.edge_index!r}")
        if self.include_self is not None:
            check_flag(include_self=self.include_self)

    def scaled(self, factor: float) -> Given:
        """Raise ValueError, because given edges cannot be scaled."""
        raise ValueError(f"neighborhood: {self} cannot be scaled by {factor:g}; use a Radius, PixelSquare or Nearest")

    def of(self, clouds: PointClouds) -> Given:
        """Return this neighborhood with its edges as a tensor, read from clouds if they are those of the data."""
        if not isinstance(self.edge_index, str):
            return self
        if clouds.edge_index is None:
            without = "the data have none, or their points were cropped, pooled or subsampled"
            raise ValueError(f"edge_index: expected int64 [2, edges] in the data for {self}, but {without}")
        return Given(clouds.edge_index, self.include_self is not False)

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        if isinstance(self.edge_index, str):
            raise ValueError(f"edge_index: {self} is read from data; call find_neighbors(point_clouds(data), ...)")
        neighbors = Neighbors.from_edge_index(self.edge_index.to(pos.device), len(pos))
        check_within_clouds("edge_index: expected edges within clouds", neighbors, cloud)
        if self.include_self is None:
            return neighbors
        others = neighbors.select((~neighbors.is_loop).nonzero()[:, 0])
        if not self.include_self:
            return others
        loops = torch.arange(len(pos), device=pos.device).expand(2, -1)
        return Neighbors.from_edge_index(torch.cat([others.edge_index, loops], dim=1), len(pos))


def find_neighbors(clouds: PointClouds, neighborhood: Neighborhood) -> Neighbors:
    """Return the neighbor lists of clouds.

    ValueError is raised for periodic clouds unless the neighborhood is a :class:`Radius`. TypeError or ValueError is
    raised if your own neighborhood returns anything but sorted :class:`Neighbors` of these points, or connects clouds.
    """
    check_is("clouds", clouds, PointClouds)
    check_neighborhood(neighborhood)
    if clouds.cell is None or clouds.pbc is None:
        found = neighborhood.of(clouds) if isinstance(neighborhood, Given) else neighborhood
        own = type(found) not in (Radius, Nearest, PixelSquare, AllPairs, Given)
        return _of_user(found, clouds.pos, clouds.batch) if own else found(clouds.pos, clouds.batch)
    if not isinstance(neighborhood, Radius):
        i = first_true(clouds.pbc.any(dim=1))
        cell = f"the cell {clouds.cell[i].tolist()} of cloud {i}, periodic along pbc={clouds.pbc[i].tolist()}"
        got = f"got {neighborhood!r} and {cell}; remove the cell if periodic images are not meant"
        raise ValueError(f"neighborhood: expected a Radius for periodic clouds, {got}")
    return neighborhood._with_images(clouds.pos, clouds.batch, clouds.cell, clouds.pbc)


@outside_of_transforms
def _of_user(neighborhood: Neighborhood, pos: Tensor, batch: Tensor) -> Neighbors:
    found = neighborhood(pos.detach(), batch)
    check_lists(found, batch)
    return found


def smooth_cutoff(neighborhood: Neighborhood) -> float | None:
    """Return the ``cutoff``, at which the weight of neighbors vanishes; None if there is none."""
    cutoff: float | None = getattr(neighborhood, "cutoff", None)
    if cutoff is not None:
        check_length("neighborhood.cutoff", cutoff)
    return cutoff


def scaled(neighborhood: Neighborhood, factor: float) -> Neighborhood:
    """Return the same neighborhood for points that are further apart by a factor.

    ValueError is raised if the neighborhood does not implement ``scaled``.
    """
    grown: Callable[[float], Neighborhood] | None = getattr(neighborhood, "scaled", None)
    if grown is None:
        raise ValueError(f"neighborhood: {neighborhood} does not define how it is scaled; implement scaled(factor)")
    return grown(factor)
