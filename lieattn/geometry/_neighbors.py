"""Neighborhoods: small values that say which points are neighbors, and find them in any clouds.

All of them search in float64, on any device, never across clouds, without a cap on the number of neighbors,
and without gradient. Points at the same place are distinct points.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from lieattn._checks import check_choice, check_counts, check_flag, check_is, check_length, check_neighborhood
from lieattn._functional import outside_of_transforms
from lieattn.geometry._clouds import PointClouds, as_coordinates, cloud_index, first_true, lattices
from lieattn.geometry._neighbor_lists import Neighbors, all_pairs_of_clouds, check_edge_index
from lieattn.geometry._search import Method, Ties, images_within, pairs_all, pairs_nearest, pairs_within

OFF_LATTICE = 1e-2  # of the spacing: coordinates far from the origin are rounded


class Neighborhood(Protocol):
    """A definition of neighborhoods: a value that finds them for any clouds.

    It may have a ``cutoff``, a distance at which neighbors count nothing (see :func:`smooth_cutoff`), and a method
    ``scaled(factor)``, which makes the definition for points that are further apart (see :func:`scaled`).
    """

    @property
    def length(self) -> float | None:
        """Length that makes displacements dimensionless, if the definition has one."""

    def __call__(self, pos: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None) -> Neighbors:
        """Neighbor lists of the points ``[points, dim]``."""


class _Neighborhood(abc.ABC):
    """What the definitions share: they check the clouds, then search."""

    @property
    def length(self) -> float | None:
        """Length that makes displacements dimensionless; None where the definition has none."""
        return None

    @property
    def cutoff(self) -> float | None:
        """Distance at which neighbors count nothing; None where all count alike."""
        return None

    def scaled(self, factor: float) -> Self:
        """The same neighborhood of points that are further apart by a factor."""
        return self

    def __call__(self, pos: Tensor, batch: Tensor | None = None, ptr: Tensor | None = None) -> Neighbors:
        """Neighbor lists on the device of ``pos``, coordinates ``[points, dim]`` of any floating dtype.

        For ``batch`` and ``ptr`` see :func:`point_clouds`. TypeError or ValueError is raised for wrong shapes, dtypes
        or devices, coordinates that are not finite, or invalid clouds.
        """
        return self._find(pos, batch, ptr)

    @outside_of_transforms
    def _find(self, pos: Tensor, batch: Tensor | None, ptr: Tensor | None, method: Method | None = None) -> Neighbors:
        """Neighbors by a given method, or the best one on the device."""
        pos = as_coordinates(pos)
        cloud, num_clouds = cloud_index(pos, batch, ptr)
        if num_clouds > len(pos):
            # The search keeps tables of clouds.
            cloud = torch.unique(cloud, return_inverse=True)[1]
        return self._search(pos, cloud, method)

    @abc.abstractmethod
    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        """Find the neighbors among checked float64 points."""


@dataclass(frozen=True)
class Radius(_Neighborhood):
    """All points of the cloud in the closed ball around each point; symmetric.

    Distances up to a relative 1e-5 above the radius count as within, so that points at exactly the radius,
    as grids have them, do not come and go under the round-off of a rotation.

    In clouds that repeat, all images within the ball are neighbors, several of one point and of the point itself
    included if the radius exceeds half the cell: ``radius(pos, batch, cell=cell, pbc=pbc)`` gives lists with a
    ``shift``. A point is its own neighbor if ``include_self``; its images are in any case. TypeError or ValueError is
    raised if ``radius`` is not a positive finite number, ``include_self`` not a bool, or ``smooth`` neither that nor
    None.

    ``smooth`` neighbors fade: in sums over a neighborhood, and in what a softmax is divided by, each counts with the
    weight exp(-x² / (1 - x²)), x = r / radius, so that outputs and all their derivatives do not jump where points come
    and go, as energies need it. A point must then be its own neighbor, so that something is left to divide by. None
    leaves it open: all neighbors count alike, as with False, unless the network learns energies
    (:class:`lieattn.models.EnergyForces`), which makes its open radii smooth.

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
        """The radius of smooth neighborhoods."""
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
        """Neighbor lists on the device of ``pos``; where clouds repeat, with shifts in its dtype.

        For the arguments see :func:`point_clouds`. The shifts are differentiable functions of the ``cell``.
        """
        checked = as_coordinates(pos)
        cloud, num_clouds = cloud_index(checked, batch, ptr)
        cell, pbc = lattices(cell, pbc, num_clouds, checked)
        if cell is None or pbc is None:
            return self._find(pos, cloud, None)
        return self._with_images(pos, cloud, cell, pbc)

    def _with_images(self, pos: Tensor, cloud: Tensor, cell: Tensor, pbc: Tensor) -> Neighbors:
        """Neighbor lists of checked clouds that repeat."""
        used, cloud = torch.unique(cloud, return_inverse=True)
        cell, pbc, points = cell[used], pbc[used], pos.detach().double()
        keys, images = images_within(points, cloud, float(self.radius), self.include_self, cell.detach().double(), pbc)
        neighbors = Neighbors.from_keys(keys, len(pos))
        lattice = torch.where(pbc[..., None], cell, 0.0)[cloud[neighbors.target]]
        # In the dtype of the cell or of the points, whichever is finer: shifts are long.
        shift = (images.to(torch.promote_types(cell.dtype, pos.dtype))[:, None] @ lattice)[:, 0]
        return replace(neighbors, shift=shift.to(pos.dtype))

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        keys = pairs_within(pos, cloud, float(self.radius), "euclidean", self.include_self, method)
        return Neighbors.from_keys(keys, len(pos))


@dataclass(frozen=True)
class Nearest(_Neighborhood):
    """The k nearest *other* points of the cloud, and self if included; in general not symmetric.

    A cloud with k points or fewer gives all of them. Distances within a relative 1e-5 of the k-th smallest
    are tied with it. No choice among tied points is independent of their order. ``ties="index"`` takes the
    lowest indices: each point has exactly k others, but reordering a cloud with ties, such as a grid, can
    change its neighbors. ``ties="all"`` takes all of them: a point may have more than k others, and neighbors
    depend on the geometry alone, whatever the order of the points. Where n points are at one place, as zero padding
    puts them, these are n² edges.

    TypeError or ValueError is raised unless ``k`` is a positive integer, ``include_self`` a bool and ``ties`` known.

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
    """The points of the axis-aligned square (in 3D, cube) around each point; symmetric.

    Neighbors are all x_j with max over the axes of |x_j - x_i| <= (P - 1)/2 spacing, up to a relative 1e-5, with P =
    ``size`` odd and ``spacing`` the distance of adjacent pixels. On the pixels of an image that is the P x P window,
    without what lies outside the image; P = 1 leaves the point itself (and points at the same place). **It turns with
    the image only under rotations and reflections that map the square to itself** (those of p4 and p4m); for
    any others use :class:`Radius`.

    With a ``dilation`` D the neighbors are as many, but D pixels apart, up to a hundredth of the spacing, and the
    square is D times as wide: with powers of 2 these are dyadic neighborhoods.
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
        """(P - 1)/2 steps of dilation · spacing; for P = 1, where that is zero, one."""
        return (max(int(self.size), 3) - 1) / 2 * float(self.spacing) * int(self.dilation)

    def scaled(self, factor: float) -> PixelSquare:
        check_length("factor", factor)
        return replace(self, spacing=self.spacing * factor)

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        step = float(self.spacing) * int(self.dilation)
        half = (int(self.size) - 1) / 2 * step
        keys = pairs_within(pos, cloud, half, "chebyshev", self.include_self, method)
        if self.dilation > 1:
            apart = pos[keys % len(pos)] - pos[keys // len(pos)] if len(pos) else pos
            off_lattice = (apart - (apart / step).round() * step).abs().amax(dim=1)
            keys = keys[off_lattice <= OFF_LATTICE * float(self.spacing)]
        return Neighbors.from_keys(keys, len(pos))


@dataclass(frozen=True)
class AllPairs(_Neighborhood):
    """All points of the cloud; symmetric. Memory grows with the square of the size of the clouds."""

    include_self: bool = True

    def __post_init__(self) -> None:
        check_flag(include_self=self.include_self)

    def _search(self, pos: Tensor, cloud: Tensor, method: Method | None) -> Neighbors:
        found = all_pairs_of_clouds(cloud) if self.include_self else None
        return Neighbors.from_keys(pairs_all(pos, cloud, self.include_self), len(pos)) if found is None else found


@dataclass(frozen=True, eq=False)
class Given(_Neighborhood):
    """Edges from outside, such as bonds or a mesh: a tensor, or the ``edge_index`` that the data have.

    ``edge_index`` is int64 ``[2, edges]``: source points j, then target points i, which attend to their sources, in any
    order, no edge twice, as PyTorch Geometric has them; symmetric or not as given. It may be on another device than the
    points. ``Given("edge_index")`` takes it from a ``Data`` or ``Batch``, whose offsets are PyTorch Geometric's.

    ``include_self`` adds the edges from each point to itself that are missing, or leaves out those that are there. If
    None, data get them as from all other definitions, and a tensor stays as it is.

    Finding neighbors raises ValueError if an edge has points that do not exist, joins two clouds or comes twice, or if
    the data have no edges.

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
        """Raise ValueError: edges that are given stay as they are."""
        raise ValueError(f"neighborhood: {self} cannot be scaled by {factor:g}; use a Radius, PixelSquare or Nearest")

    def of(self, clouds: PointClouds) -> Given:
        """The edges as a tensor, read from clouds that were made of data."""
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
        crossing = cloud[neighbors.source] != cloud[neighbors.target]
        if crossing.any():
            ends = [int(end[first_true(crossing)]) for end in (neighbors.source, neighbors.target)]
            got = f"got one from point {ends[0]} to point {ends[1]} of another cloud"
            raise ValueError(f"edge_index: expected edges within clouds, {got}")
        if self.include_self is None:
            return neighbors
        others = neighbors.select((~neighbors.is_loop).nonzero()[:, 0])
        if not self.include_self:
            return others
        loops = torch.arange(len(pos), device=pos.device).expand(2, -1)
        return Neighbors.from_edge_index(torch.cat([others.edge_index, loops], dim=1), len(pos))


def find_neighbors(clouds: PointClouds, neighborhood: Neighborhood) -> Neighbors:
    """Neighbor lists of clouds; ValueError if they repeat and the neighborhood does not find images."""
    check_is("clouds", clouds, PointClouds)
    check_neighborhood(neighborhood)
    if clouds.cell is None or clouds.pbc is None:
        found = neighborhood.of(clouds) if isinstance(neighborhood, Given) else neighborhood
        return found(clouds.pos, clouds.batch)
    if not isinstance(neighborhood, Radius):
        raise ValueError(f"neighborhood: expected a Radius for periodic clouds, got {neighborhood!r}")
    return neighborhood._with_images(clouds.pos, clouds.batch, clouds.cell, clouds.pbc)


def smooth_cutoff(neighborhood: Neighborhood) -> float | None:
    """Distance at which neighbors count nothing; None where all count alike, or the definition has no ``cutoff``."""
    cutoff: float | None = getattr(neighborhood, "cutoff", None)
    return cutoff


def scaled(neighborhood: Neighborhood, factor: float) -> Neighborhood:
    """The same neighborhood of points further apart by a factor; ValueError if it does not say what that is."""
    grown: Callable[[float], Neighborhood] | None = getattr(neighborhood, "scaled", None)
    if grown is None:
        raise ValueError(f"neighborhood: {neighborhood} does not define how it is scaled; implement scaled(factor)")
    return grown(factor)
