"""Motions of all clouds with the outputs that are expected after them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.values import attributes_of_points, select_points
from lieattn.certify._clouds import center_and_extent, moved, point_indices, shifted
from lieattn.certify._elements import Element
from lieattn.certify._kinds import Kind, transform
from lieattn.geometry import Raster, point_clouds


@dataclass(frozen=True, eq=False)
class Move:
    """A motion of all clouds, with a translation for each cloud, which may also reorder the points.

    Attributes
    ----------
    check, label
        The check that the move belongs to, as in :class:`Row`, and the name of the motion.
    promised
        Whether equivariance is promised; otherwise the error is for comparison only.
    linear, shifts
        ``[dim, dim]`` float64, the same for all clouds, and ``[clouds, dim]`` float64, the translation of each cloud.
    orders, grids
        The new order of the points and the new sides of the raster of each cloud, or None if these do not change.
    images
        Vectors of the lattice ``[points, dim]`` float64 of each cloud, by which its points are shifted before the
        motion, or None if they are not.
    excepted
        Names of outputs for which equivariance is not promised.
    """

    check: str
    label: str
    promised: bool
    linear: Tensor
    shifts: Tensor
    orders: tuple[Tensor, ...] | None = None
    grids: tuple[tuple[int, ...], ...] | None = None
    images: tuple[Tensor, ...] | None = None
    excepted: frozenset[str] = frozenset()

    def apply(self, clouds: Sequence[Data], kinds: Mapping[str, Kind]) -> list[Data]:
        """Return moved clouds in float64. The attributes in ``kinds`` are transformed too."""
        if self.images is not None:
            clouds = [shifted(cloud, image) for cloud, image in zip(clouds, self.images, strict=True)]
        changed = [moved(cloud, self.linear, shift, kinds) for cloud, shift in zip(clouds, self.shifts, strict=True)]
        for cloud, order in zip(changed, self.orders or (), strict=False):
            indices = list(point_indices(cloud))  # found before any attribute changes
            select_points(cloud, order, attributes_of_points(cloud))
            _relabel(cloud, order, indices)
        for cloud, grid in zip(changed, self.grids or (), strict=False):
            cloud.grid = cloud.grid.new_tensor([grid])
        return changed

    def expected(self, name: str, kind: Kind, values: Tensor, sizes: Tensor) -> Tensor:
        """Return the expected outputs ``[clouds, *]`` or ``[points, *]`` float64 after the move."""
        per_cloud = len(values) == len(sizes)
        shift = self.shifts if per_cloud else self.shifts.repeat_interleave(sizes, dim=0)
        if self.images is not None and len(values) == int(sizes.sum()):  # also for clouds of one point
            shift = shift + torch.cat(self.images) @ self.linear.mT
        changed = transform(f"outputs {name}".rstrip(), kind, values, self.linear, shift)
        if per_cloud or self.orders is None:
            return changed
        starts = (sizes.cumsum(0) - sizes).tolist()
        return changed[torch.cat([start + order for start, order in zip(starts, self.orders, strict=True)])]


def motion(check: str, element: Element, clouds: Sequence[Data], promised: bool, generator: torch.Generator) -> Move:
    """Return the move of all clouds by an element. Random translations have about the size of the cloud."""
    dim = len(element.linear)
    if element.translation is not None:
        return Move(check, element.label, promised, element.linear, element.translation.expand(len(clouds), -1))
    shifts = []
    for cloud in clouds:
        extent = center_and_extent(cloud, dim)[1] or 1.0
        shifts.append(extent * torch.randn(dim, generator=generator, dtype=torch.float64))
    return Move(check, element.label, promised, element.linear, torch.stack(shifts))


def permutation(clouds: Sequence[Data], dim: int, promised: bool, generator: torch.Generator) -> Move:
    """Return a move that puts the points of each cloud in a random order."""
    orders = tuple(torch.randperm(int(cloud.num_nodes or 0), generator=generator) for cloud in clouds)
    zero = torch.zeros(len(clouds), dim, dtype=torch.float64)
    return Move("permutation", "", promised, torch.eye(dim, dtype=torch.float64), zero, orders)


def other_images(
    clouds: Sequence[Data],
    dim: int,
    promised: bool,
    generator: torch.Generator,
    excepted: frozenset[str] = frozenset(),
) -> list[Move]:
    """Return a move of each point to a random periodic image, or no move without periodic clouds, or with given edges.

    Given edges would have to connect other images after the move, but which ones is up to the network. Nothing is
    promised for the outputs in ``excepted``.
    """
    if all(cloud.get("cell") is None for cloud in clouds) or any(list(point_indices(cloud)) for cloud in clouds):
        return []
    images = []
    for cloud in clouds:
        read = point_clouds(cloud.pos.double()[:, :dim], cell=cloud.get("cell"), pbc=cloud.get("pbc"))
        steps = torch.randint(-1, 2, read.pos.shape, generator=generator).double()
        if read.cell is None or read.pbc is None:  # the cloud is not periodic
            images.append(torch.zeros_like(steps))
        else:
            images.append((steps * read.pbc[0].cpu()) @ read.cell[0].detach().cpu().double())
    if not any(bool(image.any()) for image in images):
        return []
    zero = torch.zeros(len(clouds), dim, dtype=torch.float64)
    still = torch.eye(dim, dtype=torch.float64)
    return [Move("image", "", promised, still, zero, images=tuple(images), excepted=excepted)]


def raster_motion(check: str, move: Move, clouds: Sequence[Data]) -> Move | None:
    """Return the same motion with the pixels in raster order, or None if some image is not on an upright lattice then.

    A network that uses the places of the pixels in the raster instead of coordinates thus gets a moved image.
    """
    try:
        read = [Raster.read(point_clouds(moved(cloud, move.linear))) for cloud in clouds]
    except ValueError:
        return None
    grids = tuple(raster.sides for raster, _ in read)
    return replace(move, check=check, orders=tuple(order for _, order in read), grids=grids)


def _relabel(cloud: Data, order: Tensor, names: Iterable[str]) -> None:
    """Replace indices of points by the new indices of the same points. Negative ones are kept."""
    places = order.argsort()
    for name in names:
        value = cloud[name]
        shifted = (torch.as_tensor(cloud.__inc__(name, value)) == len(order)).to(value.device)
        new = places.to(value.device)[value.long().clamp(0, max(len(order) - 1, 0))]
        cloud[name] = torch.where(shifted & (value >= 0), new.to(value.dtype), value)
