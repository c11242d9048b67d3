"""Drawing of points in panels of figures."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import TOLERANCE
from lieattn._core.messages import needs_extra
from lieattn.geometry import PointClouds, Radius
from lieattn.groups import SO
from lieattn.io import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

INK, GRAY, FAINT = "#222222", "#777777", "#dddddd"
# Okabe and Ito's colors, which color-blind readers can also distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_DPI, _DURATION = 90, 450  # of animations; milliseconds of a picture
_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 0.95, 0.95, 1.0, 0.12, 0.06  # inches
_NARROWEST, _WIDEST, _LARGEST = 5.2, 11.0, 2.4
_TILT = 0.3  # radians
_LONGER = 1.25  # largest length of a bond, relative to the sum of the covalent radii
_MANY = 4  # bonds per point: graphs with more edges are neighborhoods, which would cover the points

# --- figures ------------------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    with needs_extra("lieattn.viz", "viz"):
        import matplotlib.figure  # noqa: F401


def blank_figure(width: float, height: float, layout: str | None = None) -> Figure:
    """Return an empty figure of a size in inches, without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    figure.set_layout_engine(layout)  # type: ignore[arg-type]
    FigureCanvasAgg(figure)
    return figure


def color_bar(figure: Figure, cmap: str, norm: Normalize, label: str = "", **place: Any) -> None:
    """Draw a color scale; ``place`` has the options of matplotlib's ``colorbar``."""
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(ScalarMappable(norm, cmap), **place)
    bar.set_label(label, size=8, color=INK)
    bar.ax.tick_params(labelsize=7, length=2, color=GRAY, labelcolor=INK)
    bar.ax.set_frame_on(False)


class Board:
    """Rows of square panels: labels at the left of rows, headings over columns, color scales of rows at the right."""

    def __init__(self, rows: Sequence[str], columns: Sequence[str]) -> None:
        side = min(_LARGEST, max(0.7, _WIDEST / len(columns)))
        across, down = (count * (side + _GAP) - _GAP for count in (len(columns), len(rows)))
        width, height = max(_LEFT + across + _RIGHT, _NARROWEST), _TOP + down + _BOTTOM
        grid = {"left": _LEFT / width, "right": (_LEFT + across) / width, "wspace": _GAP / side, "hspace": _GAP / side}
        grid |= {"bottom": _BOTTOM / height, "top": 1 - _TOP / height}
        self.figure = blank_figure(width, height)
        self.axes = self.figure.subplots(len(rows), len(columns), squeeze=False, gridspec_kw=grid)
        for axes in self.axes.flat:
            axes.set_aspect("equal")
            axes.set_axis_off()
        for axes, label in zip(self.axes[:, 0], rows, strict=True):
            style: dict[str, Any] = {"ha": "right", "va": "center", "size": 8, "color": INK}
            axes.text(-0.08 / side, 0.5, label, transform=axes.transAxes, **style)
        for axes, heading in zip(self.axes[0], columns, strict=True):
            axes.set_title(heading, size=8, color=INK, pad=6)

    def title(self, what: str, more: str) -> None:
        """Write the title of the figure, and a second line with measurements, smaller if a figure is too narrow."""
        width, height = self.figure.get_size_inches()
        for top, size, text, weight, color in ((0.3, 10, what, "bold", INK), (0.52, 8, more, "normal", GRAY)):
            line = self.figure.text(0.2 / width, 1 - top / height, text, color=color, size=size, weight=weight)
            # Letters of animations are wider, since they are fitted to pixels.
            room = 0.92 * (width - 0.4) * self.figure.dpi
            line.set_fontsize(size * min(1.0, room / line.get_window_extent().width))

    def row_scale(self, row: int, cmap: str, norm: Any, label: str) -> None:
        """Draw the color scale of a row."""
        box, width = self.axes[row, -1].get_position(), self.figure.get_figwidth()
        place = self.figure.add_axes((box.x1 + 0.12 / width, box.y1 - 0.9 * box.height, 0.1 / width, 0.8 * box.height))
        color_bar(self.figure, cmap, norm, label, cax=place)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a picture in the format of the suffix of ``path``, and return the path. Missing folders are created.

    ValueError is raised if matplotlib does not have this format.
    """
    return save_picture(figure, Path(path))


def save_picture(figure: Figure, path: Path, others: tuple[str, ...] = ()) -> Path:
    """Do what :func:`save` does. Errors also name ``others``, the formats that the caller writes itself."""
    from matplotlib import rc_context

    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        known = ", ".join(sorted({*formats, *others}))
        raise ValueError(f"path: expected a name that ends in one of {known}, got {path.name!r}")
    # Journals refuse the Type 3 fonts that matplotlib writes by default.
    with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}), replacing(path) as part:
        figure.savefig(part, dpi=figure.dpi, format=path.suffix.removeprefix(".") or None)
    return path


def save_animation(figures: Iterable[Figure], path: Path) -> Path:
    """Write figures of one size as a repeating GIF, and return the path. Missing folders are created."""
    from PIL import Image

    pictures: list[Any] = []
    for figure in figures:
        figure.set_dpi(_DPI)
        figure.canvas.draw()
        picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")  # type: ignore[attr-defined]
        # The first picture has the color scales, and so all colors. Rare ones, as of arrows, are kept as they are.
        method, palette = Image.Quantize.MAXCOVERAGE, pictures[0] if pictures else None
        pictures.append(picture.quantize(method=method, kmeans=1, palette=palette, dither=Image.Dither.NONE))
    with replacing(path) as part:
        options: dict[str, Any] = {"duration": _DURATION, "loop": 0, "optimize": True}
        pictures[0].save(part, "GIF", save_all=True, append_images=pictures[1:], **options)
    return path


# --- colors and names ---------------------------------------------------------------------------------------------


def value_range(values: Tensor, size: float = 0.0) -> tuple[float, float]:
    """Return the ends of the color scale for all values, which differ by 1 if the values are constant.

    Values that differ by less than the rounding errors of networks in float32 are constant. These errors are relative
    to the largest value, or to ``size`` if it is larger.
    """
    bottom, top = float(values.min()), float(values.max())
    rounding = TOLERANCE[torch.float32] * max(abs(bottom), abs(top), size)
    return bottom, top if top - bottom > rounding else bottom + 1


def color_scale(values: Tensor, size: float = 0.0) -> Normalize:
    """Return a color scale for all values; see :func:`value_range`."""
    from matplotlib.colors import Normalize

    return Normalize(*value_range(values, size))


def color_scale_from_zero(values: Tensor, top: float | None = None) -> Normalize:
    """Return a color scale from 0 to the largest value or ``top``; symmetric about 0 if there are negative values."""
    from matplotlib.colors import Normalize

    largest = max(float(values.abs().max()), top or 0.0) or 1.0
    return Normalize(-largest if bool((values < 0).any()) else 0.0, largest)


def _degrees(matrix: Tensor) -> float:
    return math.degrees(math.atan2(float(matrix[1, 0]), float(matrix[0, 0]))) % 360


def element_name(matrix: Tensor) -> str:
    """Return the angle of h e_x for an orthogonal matrix h ``[2, 2]``, followed by m if h contains a reflection."""
    return f"{round(_degrees(matrix), 1):g}°" + (" m" if float(torch.linalg.det(matrix)) < 0 else "")


def in_words(matrix: Tensor) -> str:
    """Describe the action of an orthogonal matrix ``[dim, dim]`` in two or three dimensions by its angle."""
    dim, mirrors = len(matrix), float(torch.linalg.det(matrix)) < 0
    if dim == 2:
        # The axis of a reflection is the bisector of the first axis and its image.
        degrees = _degrees(matrix)
        return f"reflected, axis at {degrees / 2:.4g}°" if mirrors else f"rotated by {degrees:.4g}°"
    proper = -matrix if mirrors else matrix
    cosine = (float(proper.diagonal().sum()) - 1) / 2
    degrees = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
    return f"rotated by {degrees:.4g}°" + (", inverted" if mirrors else "")


# --- points -------------------------------------------------------------------------------------------------------


def points(
    axes: Axes,
    clouds: PointClouds,
    values: Tensor,
    cmap: str,
    norm: Normalize,
    angle: float = 0.0,
    query: int | None = None,
) -> None:
    """Draw points of the plane as squares (of a raster) or discs, rotated by the angle, and outline a query."""
    from matplotlib.collections import PolyCollection

    corners = 4 if clouds.grid is not None else 24
    around = angle + np.pi / corners + 2 * np.pi * np.arange(corners) / corners
    radius = spacing(clouds) * (np.sqrt(0.5) if corners == 4 else 0.48)
    tiles: Any = clouds.pos.cpu().numpy()[:, None] + radius * np.stack([np.cos(around), np.sin(around)], axis=-1)
    edge = "0.6" if clouds.grid is None else "face"  # gray edges make white points visible
    style: dict[str, Any] = {"edgecolor": edge, "linewidth": min(0.3, 2.4 / len(tiles) ** 0.5)}
    axes.add_collection(PolyCollection(tiles, array=values.numpy(), cmap=cmap, norm=norm, **style), autolim=False)
    if query is not None:
        for color, width in (("white", 2.2), (COLORS[1], 1.2)):
            style = {"facecolor": "none", "edgecolor": color, "linewidth": width, "zorder": 3}
            axes.add_collection(PolyCollection(tiles[[query]], **style))


def spacing(clouds: PointClouds) -> float:
    """Return the median distance to the nearest other point, or 1 if there is none."""
    from scipy.spatial import cKDTree

    pos = clouds.pos.cpu().double().numpy()
    nearest = np.asarray(cKDTree(pos).query(pos, k=[2])[0])
    nearest = nearest[np.isfinite(nearest) & (nearest > 0)]
    return float(np.median(nearest)) if len(nearest) else 1.0


def look_at(axes: Axes, center: Tensor, reach: float) -> None:
    x, y = center.tolist()
    axes.set(xlim=(x - reach, x + reach), ylim=(y - reach, y + reach))


def frame(axes: Axes, frames: Tensor, h: int) -> None:
    """Draw an arrow h e_x in the lower left corner, and a stub h e_y if there are reflections among the frames."""
    mirrors = bool((torch.linalg.det(frames) < 0).any())
    along, across = 0.16 * frames[h].numpy().T
    across = across / 2 if mirrors else 0 * across
    tail = 0.08 - (along + across) / 2
    parts = [("-|>,head_length=0.25,head_width=0.13", along)] + [("-", across)] * mirrors
    for style, part in parts:
        arrow = {"arrowstyle": style, "color": COLORS[1], "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        place: dict[str, Any] = {"xy": tuple(tail + part), "xytext": tuple(tail), "xycoords": "axes fraction"}
        axes.annotate("", **place, textcoords="axes fraction", arrowprops=arrow)


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

        pos = clouds.pos - (clouds.pos.new_zeros(1) if self.sphere else clouds.pos.mean(dim=0))
        pos = pos if turn is None else pos @ turn.mT
        # The second coordinate of points on a line is 0.
        pos = torch.cat([pos, pos.new_zeros(len(pos), 1)], dim=1)[:, :2] if self.camera is None else pos[:, :3]
        pos = pos if self.camera is None else pos @ self.camera.mT
        if len(self.bonds):
            lines = pos[self.bonds][..., :2].numpy()
            axes.add_collection(LineCollection(list(lines), color=GRAY, linewidth=0.9, zorder=0.5))
        if self.camera is not None:
            self._in_space(axes, pos, values, cmap, norm, query)
            return
        angle = 0.0 if turn is None else math.atan2(float(turn[1, 0]), float(turn[0, 0]))
        flat, center = replace(clouds, pos=pos), pos.mean(dim=0)
        points(axes, flat, values, cmap, norm, angle, query)
        # All points are visible in every orientation.
        look_at(axes, center, float((pos - center).norm(dim=1).max()) + spacing(flat))

    def _in_space(self, axes: Axes, pos: Tensor, values: Tensor, cmap: str, norm: Any, query: int | None) -> None:
        """Draw points as discs, from the farthest to the nearest, without perspective."""
        order = pos[:, 2].argsort()
        size = min(110.0, 3600.0 / len(pos))
        behind = self.sphere & (pos[order, 2] < 0)
        style: dict[str, Any] = {"cmap": cmap, "norm": norm, "s": size, "edgecolors": GRAY, "linewidths": 0.4}
        style["alpha"] = torch.where(behind, 0.3, 1.0).numpy()
        axes.scatter(pos[order, 0].numpy(), pos[order, 1].numpy(), c=values[order].numpy(), zorder=1, **style)
        if query is not None:
            ring: dict[str, Any] = {"facecolors": "none", "edgecolors": COLORS[1], "linewidths": 1.5, "zorder": 3}
            axes.scatter(pos[query, 0].item(), pos[query, 1].item(), s=2.4 * size, **ring)
        reach = float(pos.norm(dim=1).max()) or 1.0
        look_at(axes, pos.new_zeros(2), 1.12 * reach)
        if self.sphere:
            from matplotlib.patches import Circle

            axes.add_patch(Circle((0, 0), reach, facecolor="none", edgecolor=FAINT, linewidth=0.8, zorder=0))


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
