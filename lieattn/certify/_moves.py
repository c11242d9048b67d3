"""Changes of the clouds, and what outputs should make of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn.certify._elements import Element
from lieattn.certify._kinds import Kind, transform

_OFF_LATTICE = 1e-3  # pixels


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
        changed = [copy.copy(cloud) for cloud in clouds]
        for number, cloud in enumerate(changed):
            for name, kind in kinds.items():
                if cloud.get(name) is not None:
                    value = cloud[name].detach().cpu().double()
                    shift = self.shifts[number].expand(len(value), -1)
                    cloud[name] = transform(f"data.{name}", kind, value, self.linear, shift)
            if self.orders is not None:
                for key in cloud.node_attrs():
                    cloud[key] = cloud[key][self.orders[number].to(cloud[key].device)]
            if self.grids is not None:
                cloud.grid = cloud.grid.new_tensor([self.grids[number]])
        return changed

    def expected(self, name: str, kind: Kind, values: Tensor, sizes: Tensor) -> Tensor:
        """What outputs ``[clouds, *]`` or ``[points, *]`` float64 should become, for clouds of some sizes."""
        per_cloud = len(values) == len(sizes)
        shift = self.shifts if per_cloud else self.shifts.repeat_interleave(sizes, dim=0)
        moved = transform(f"outputs {name}".rstrip(), kind, values, self.linear, shift)
        if per_cloud or self.orders is None:
            return moved
        starts = (sizes.cumsum(0) - sizes).tolist()
        return moved[torch.cat([start + order for start, order in zip(starts, self.orders, strict=True)])]


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


def raster_motion(check: str, move: Move, clouds: Sequence[Data]) -> Move | None:
    """The same motion of images, their pixels then in raster order; None unless all end on upright lattices.

    So a network that takes pixels by their places in the raster, and never looks at coordinates, sees the image move.
    """
    orders, grids = [], []
    for cloud in clouds:
        found = _raster_order(cloud, move.linear)
        if found is None:
            return None
        orders.append(found[0])
        grids.append(found[1])
    return Move(check, move.label, move.promised, move.linear, move.shifts, tuple(orders), tuple(grids))


def _raster_order(cloud: Data, linear: Tensor) -> tuple[Tensor, tuple[int, int]] | None:
    """Order in which moved pixels are written, with the rows and columns; None if they miss the lattice."""
    grid, pos = cloud.get("grid"), cloud.pos.detach().cpu().double()
    if grid is None or linear.shape != (2, 2) or pos.shape[1] != 2:
        return None
    rows, columns = (int(side) for side in grid.reshape(-1, 2)[0])
    if rows * columns == 1:
        return torch.zeros(1, dtype=torch.int64), (1, 1)
    # Steps along a row and down a column, as the image itself has them; a side of one pixel takes the other's length.
    along = pos[1] - pos[0] if columns > 1 else (pos[0] - pos[1]).flip(0) * pos.new_tensor([1.0, -1.0])
    down = pos[columns] - pos[0] if rows > 1 else along.flip(0) * pos.new_tensor([1.0, -1.0])
    steps = torch.linalg.solve(torch.stack([down, along], dim=1), ((pos - pos[0]) @ linear.mT).mT).mT
    steps = steps - steps.amin(dim=0)
    cells = steps.round().long()
    height, width = (int(side) + 1 for side in cells.amax(dim=0))
    place = cells[:, 0] * width + cells[:, 1]
    order = place.argsort()
    filled = height * width == len(pos) and torch.equal(place[order], torch.arange(len(pos)))
    if not filled or float((steps - cells).abs().max()) > _OFF_LATTICE:
        return None
    return order, (height, width)


def _shifts(clouds: Sequence[Data], dim: int, generator: torch.Generator) -> Tensor:
    shifts = []
    for cloud in clouds:
        pos = cloud.pos.detach().cpu().double()[:, :dim]
        extent = float((pos - pos.mean(dim=0)).norm(dim=1).max()) or 1.0
        shifts.append(extent * torch.randn(dim, generator=generator, dtype=torch.float64))
    return torch.stack(shifts)
