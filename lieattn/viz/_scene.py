"""Panels of points in figures."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn.geometry import PointClouds, Radius
from lieattn.groups import SO
from lieattn.viz import _draw as draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 0.95, 0.95, 1.0, 0.12, 0.06  # inches
_WIDEST, _LARGEST = 11.0, 2.4
_TILT = 0.3  # radians
_LONGER = 1.25  # largest length of a bond, relative to the sum of the covalent radii
_MANY = 4  # bonds per point: graphs with more edges are neighborhoods, which would cover the points


@dataclass(frozen=True)
class Scene:
    """Parts of panels in addition to colored points.

    These are the ``bonds`` int64 ``[bonds, 2]``, and the ``sphere`` if points are on a sphere. ``camera`` ``[3, 3]``
    maps points to coordinates to the right, upwards, and towards the viewer; it is None in the plane.
    """

    bonds: Tensor
    sphere: bool
    camera: Tensor | None

    @classmethod
    def of(cls, data: Data, clouds: PointClouds, *, sphere: bool) -> Scene:
        """Return the scene of a cloud. It has bonds if the cloud has as many points as the data."""
        bonds = bonds_of(data) if data.num_nodes == clouds.num_points else torch.zeros(0, 2, dtype=torch.int64)
        return cls(bonds, sphere, camera_of(data.pos) if clouds.pos.shape[1] > 2 else None)

    def draw(
        self,
        axes: Axes,
        clouds: PointClouds,
        values: Tensor,
        cmap: str,
        norm: Any,
        *,
        turn: Tensor | None = None,
        query: int | None = None,
    ) -> None:
        """Draw colored points, rotated by a matrix, with a ring around the query."""
        from matplotlib.collections import LineCollection

        middle = clouds.pos.new_zeros(1) if self.sphere else clouds.pos.mean(dim=0)
        pos = clouds.pos - middle if turn is None else (clouds.pos - middle) @ turn.mT
        clouds = replace(clouds, pos=pos)
        if self.camera is not None:
            clouds = replace(clouds, pos=pos[:, :3] @ self.camera.mT)
        if len(self.bonds):
            lines = clouds.pos[self.bonds][..., :2].numpy()
            axes.add_collection(LineCollection(list(lines), color=draw.GRAY, linewidth=0.9, zorder=0.5))
        if self.camera is not None:
            self._in_space(axes, clouds.pos, values, cmap, norm, query)
            return
        angle = 0.0 if turn is None else math.atan2(float(turn[1, 0]), float(turn[0, 0]))
        flat = draw.in_plane(clouds)
        draw.points(axes, flat, values, angle, cmap, norm)
        draw.look_at(axes, *draw.extent(flat))
        if query is not None:
            draw.ring(axes, flat, query, angle)

    def _in_space(self, axes: Axes, pos: Tensor, values: Tensor, cmap: str, norm: Any, query: int | None) -> None:
        """Draw points as discs, from the farthest to the nearest, without perspective."""
        order = pos[:, 2].argsort()
        size = min(110.0, 3600.0 / len(pos))
        behind = self.sphere & (pos[order, 2] < 0)
        style: dict[str, Any] = {"cmap": cmap, "norm": norm, "s": size, "edgecolors": draw.GRAY, "linewidths": 0.4}
        style["alpha"] = torch.where(behind, 0.3, 1.0).numpy()
        across, up = pos[order, :2].T.numpy()
        axes.scatter(across, up, c=values[order].numpy(), zorder=1, **style)
        if query is not None:
            ring: dict[str, Any] = {"facecolors": "none", "edgecolors": draw.COLORS[1], "linewidths": 1.5, "zorder": 3}
            across, up = pos[[query], :2].T.numpy()
            axes.scatter(across, up, s=2.4 * size, **ring)
        reach = float(pos.norm(dim=1).max()) or 1.0
        draw.look_at(axes, pos.new_zeros(2), 1.12 * reach)
        if self.sphere:
            from matplotlib.patches import Circle

            axes.add_patch(Circle((0, 0), reach, facecolor="none", edgecolor=draw.FAINT, linewidth=0.8, zorder=0))


class Board(draw.Canvas):
    """Rows of square panels: labels at the left of rows, headings over columns, color scales of rows at the right."""

    def __init__(self, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.side = side = min(_LARGEST, max(0.7, _WIDEST / len(columns)))
        lefts = [_LEFT + number * (side + _GAP) for number in range(len(columns))]
        self.tops = [_TOP + number * (side + _GAP) for number in range(len(rows))]
        self.right = lefts[-1] + side
        super().__init__(max(self.right + _RIGHT, 5.2), self.tops[-1] + side + _BOTTOM)
        self.axes = [[self.panel(left, top, side) for left in lefts] for top in self.tops]
        for label, top in zip(rows, self.tops, strict=True):
            self.write(_LEFT - 0.08, top + side / 2, label, ha="right", va="center", size=8)
        for heading, left in zip(columns, lefts, strict=True):
            self.write(left + side / 2, _TOP - 0.05, heading, ha="center", va="bottom", size=8)

    def title(self, what: str, more: str) -> None:
        """Write the title of the figure, and a second line with measurements, smaller if a figure is too narrow."""
        sizes = 10.0, 8.0
        self.write(0.2, 0.3, what, size=sizes[0], weight="bold")
        self.write(0.2, 0.52, more, size=sizes[1], color=draw.GRAY)
        dpi = self.figure.dpi
        self.figure.set_dpi(draw.ANIMATION_DPI)  # letters are wider there, since they are fitted to pixels
        room = (self.size[0] - 0.4) * self.figure.dpi
        for line, size in zip(self.figure.texts[-2:], sizes, strict=True):
            while line.get_window_extent().width > room and size > 4:
                size -= 0.5
                line.set_fontsize(size)
        self.figure.set_dpi(dpi)

    def row_scale(self, row: int, cmap: str, norm: Any, label: str, number: int = 0, of: int = 1) -> None:
        """Draw the color scale of a row, with this number ``of`` several that are stacked."""
        height = self.side / of
        top = self.tops[row] + (number + 0.1) * height
        self.scale(self.right + 0.12, top, 0.1, 0.8 * height, cmap, norm, label)


def bonds_of(data: Data) -> Tensor:
    """Return the bonds ``[bonds, 2]`` int64 of a molecule: its edges, if these are few, or pairs of near atoms.

    Two atoms are near if their distance is at most 1.25 times the sum of their covalent radii. This needs nuclear
    charges ``data.z`` and ase; otherwise there are no bonds.
    """
    edges, z, pos = data.get("edge_index"), _charges(data), data.pos.detach().cpu().double()
    if isinstance(edges, Tensor) and edges.shape[1] <= 2 * _MANY * len(pos):
        pairs = edges.cpu().T
        return torch.unique(pairs[pairs[:, 0] != pairs[:, 1]].sort(dim=1).values, dim=0)
    if z is None or len(z) == 0:
        return torch.zeros(0, 2, dtype=torch.int64)
    from ase.data import covalent_radii

    radius = torch.as_tensor(covalent_radii)[z]
    found = Radius(2 * _LONGER * float(radius.max()))(pos)
    near = found.displacements(pos).norm(dim=1) <= _LONGER * (radius[found.source] + radius[found.target])
    return torch.stack([found.target, found.source], dim=1)[near & (found.target < found.source)]


def symbols_of(data: Data) -> list[str]:
    """Return the chemical symbols of atoms, or an empty list without nuclear charges or ase."""
    z = _charges(data)
    if z is None:
        return []
    from ase.data import chemical_symbols

    return [chemical_symbols[number] for number in z.tolist()]


def _charges(data: Data) -> Tensor | None:
    """Return ``data.z`` ``[points]`` int64, or None without ase, or if it is something else than nuclear charges."""
    z = data.get("z")
    if not isinstance(z, Tensor) or z.shape != data.pos.shape[:1] or importlib.util.find_spec("ase") is None:
        return None
    from ase.data import chemical_symbols

    if z.is_complex() or not bool(((z >= 0) & (z < len(chemical_symbols)) & (z == z.long())).all()):
        return None
    return z.cpu().long()


def camera_of(pos: Tensor) -> Tensor:
    """Return the rotation ``[3, 3]`` float64 to a slightly tilted view of the broadest side of a cloud."""
    centered = pos.detach().cpu().double()[:, :3]
    centered = centered - centered.mean(dim=0)
    axes = torch.linalg.svd(centered, full_matrices=True).Vh if len(centered) > 1 else torch.eye(3, dtype=torch.float64)
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    axes = axes * largest.sign()  # so that the signs do not depend on the machine
    axes = torch.cat([axes[:2], torch.linalg.cross(axes[:1], axes[1:2])])
    tilts = torch.tensor([[_TILT, 0.0, 0.0], [0.0, _TILT, 0.0]], dtype=torch.float64)
    first, second = SO(3).exp(tilts)
    return first @ second @ axes
