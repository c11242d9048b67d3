"""Changes of the clouds, and what outputs should make of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn.certify._elements import Element, random_rotation
from lieattn.certify._kinds import Kind, transform
from lieattn.geometry import Raster, pixel_positions, point_clouds

_MOTIONS = 6  # of which each point of a scrambled cloud takes one


@dataclass(frozen=True, eq=False)
class Move:
    """A change of all clouds by one motion, each with a translation of its own, and perhaps another order of points.

    Attributes
    ----------
    check, label
        See :class:`Row`.
    promised
        Whether outputs should follow; otherwise it is measured for comparison.
    linear
        A ``[dim, dim]`` float64.
    shifts
        t of each cloud, ``[clouds, dim]`` float64.
    orders
        For each cloud the new order of its points; None where it stays.
    grids
        For each cloud the new (rows, columns); None where they stay.
    """

    check: str
    label: str
    promised: bool
    linear: Tensor
    shifts: Tensor
    orders: tuple[Tensor, ...] | None = None
    grids: tuple[tuple[int, int], ...] | None = None

    def apply(self, clouds: Sequence[Data], kinds: Mapping[str, Kind]) -> list[Data]:
        """The clouds changed; attributes of the kinds given move along, all in float64."""
        changed = []
        for number, cloud in enumerate(clouds):
            other = moved(cloud, self.linear, self.shifts[number], kinds)
            if self.orders is not None:
                _reorder(other, self.orders[number], other.node_attrs())
            if self.grids is not None:
                other.grid = other.grid.new_tensor([self.grids[number]])
            changed.append(other)
        return changed

    def expected(self, name: str, kind: Kind, values: Tensor, sizes: Tensor) -> Tensor:
        """What outputs ``[clouds, *]`` or ``[points, *]`` float64 should become, for clouds of some sizes."""
        per_cloud = len(values) == len(sizes)
        shift = self.shifts if per_cloud else self.shifts.repeat_interleave(sizes, dim=0)
        changed = transform(f"outputs {name}".rstrip(), kind, values, self.linear, shift)
        if per_cloud or self.orders is None:
            return changed
        starts = (sizes.cumsum(0) - sizes).tolist()
        return changed[torch.cat([start + order for start, order in zip(starts, self.orders, strict=True)])]


def moved(cloud: Data, linear: Tensor, shift: Tensor | None = None, kinds: Mapping[str, Kind] | None = None) -> Data:
    """A cloud after the motion x ↦ A x + t, with float64 positions; the one given stays as it is.

    Parameters
    ----------
    cloud
        torch_geometric ``Data`` of one cloud.
    linear
        A ``[dim, dim]`` float64.
    shift
        t ``[dim]`` float64; 0 if absent.
    kinds
        Attributes that move along, with their kinds: ``{"pos": "position"}`` if absent.
    """
    other = copy.copy(cloud)
    shift = linear.new_zeros(len(linear)) if shift is None else shift
    for name, kind in ({"pos": "position"} if kinds is None else kinds).items():
        if cloud.get(name) is not None:
            value = cloud[name].detach().cpu().double()
            other[name] = transform(f"data.{name}", kind, value, linear, shift.expand(len(value), -1))
    return other


def motion(check: str, element: Element, clouds: Sequence[Data], promised: bool, generator: torch.Generator) -> Move:
    """Move all clouds by an element; where it leaves translations open, they are of about the size of each cloud."""
    if element.translation is None:
        shifts = _shifts(clouds, len(element.linear), generator)
    else:
        shifts = element.translation.expand(len(clouds), -1)
    return Move(check, element.label, promised, element.linear, shifts)


def permutation(clouds: Sequence[Data], dim: int, promised: bool, generator: torch.Generator) -> Move:
    """Put the points of every cloud in another order."""
    orders = tuple(torch.randperm(int(cloud.num_nodes or 0), generator=generator) for cloud in clouds)
    still = torch.zeros(len(clouds), dim, dtype=torch.float64)
    return Move("permutation", "", promised, torch.eye(dim, dtype=torch.float64), still, orders)


def scrambled(cloud: Data, kind: Kind, dim: int, *, centered: bool, scaled: bool, generator: torch.Generator) -> Data:
    """A cloud with each point moved by a random motion of its own; of an image, with its pixels exchanged.

    Parameters
    ----------
    cloud
        The cloud, which stays as it is.
    kind
        Kind of ``pos``.
    dim
        Dimension of the positions.
    centered
        Whether the points turn about their mean; otherwise about the origin.
    scaled
        Whether their distances from there change too; otherwise points of spheres stay there.
    generator
        Of the motions.
    """
    other = copy.copy(cloud)
    if cloud.get("grid") is not None:
        order = torch.randperm(int(cloud.num_nodes or 0), generator=generator)
        _reorder(other, order, [name for name in cloud.node_attrs() if name != "pos"])
        return other
    pos = cloud.pos.detach().cpu().double()
    center = pos[:, :dim].mean(dim=0) if centered else pos.new_zeros(dim)
    factors = 0.5 + torch.rand(_MOTIONS, generator=generator, dtype=torch.float64) if scaled else pos.new_ones(_MOTIONS)
    chosen = torch.randperm(len(pos), generator=generator) % _MOTIONS
    other.pos = pos.clone()
    for number in chosen.unique().tolist():
        linear, rows = factors[number] * random_rotation(dim, generator)[0], (chosen == number).nonzero()[:, 0]
        shift = (center - linear @ center).expand(len(rows), -1)
        other.pos[rows] = transform("data.pos", kind, pos[rows], linear, shift)
    return other


def raster_motion(check: str, move: Move, clouds: Sequence[Data]) -> Move | None:
    """The same motion of images, their pixels then in raster order; None unless all end on upright lattices.

    So a network that takes pixels by their places in the raster, and never looks at coordinates, sees the image move.
    """
    orders, grids = [], []
    for cloud in clouds:
        try:
            raster, order = Raster.read(point_clouds(moved(cloud, move.linear)))
        except ValueError:
            return None
        orders.append(order)
        grids.append((raster.rows, raster.columns))
    return replace(move, check=check, orders=tuple(orders), grids=tuple(grids))


def clouds_of_images(images: Tensor) -> list[Data]:
    """Pixels of floating images ``[images, channels, rows, columns]`` as points, row after row from the top.

    Raises
    ------
    ValueError
        For other tensors.
    """
    if images.ndim != 4 or images.numel() == 0 or not images.is_floating_point():
        raise ValueError(
            f"data: expected floating images [images, channels, rows, columns], got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    pos, grid = pixel_positions(*images.shape[-2:]), torch.tensor([images.shape[-2:]])
    return [Data(x=x, pos=pos, grid=grid) for x in images.detach().cpu().flatten(2).mT]


def images_of_clouds(clouds: Sequence[Data]) -> Tensor:
    """Images ``[images, channels, rows, columns]`` of points in raster order."""
    return torch.stack([cloud.x.mT.unflatten(1, cloud.grid[0].tolist()) for cloud in clouds])


def _reorder(cloud: Data, order: Tensor, names: Sequence[str]) -> None:
    for name in names:
        cloud[name] = cloud[name][order.to(cloud[name].device)]


def _shifts(clouds: Sequence[Data], dim: int, generator: torch.Generator) -> Tensor:
    shifts = []
    for cloud in clouds:
        pos = cloud.pos.detach().cpu().double()[:, :dim]
        extent = float((pos - pos.mean(dim=0)).norm(dim=1).max()) or 1.0
        shifts.append(extent * torch.randn(dim, generator=generator, dtype=torch.float64))
    return torch.stack(shifts)
