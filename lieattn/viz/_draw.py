"""Drawing: figures, sheets of panels, and the points and frames in a panel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lieattn.geometry import LiftedGraph, PointClouds, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.viz._observe import Observer, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

INK, GRAY, FAINT = "#222222", "#777777", "#dddddd"
# Okabe and Ito's colors, told apart by color-blind readers too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
# Sizes of a grid of panels, in inches.
_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP, _BLOCK_GAP = 0.68, 0.95, 1.05, 0.12, 0.04, 0.2


class Sheet:
    """A grid of square panels in blocks of columns: inputs in the first, then blocks of one panel an element h."""

    def __init__(self, observer: Observer, headings: Sequence[str], widths: Sequence[int]) -> None:
        self.views = views = observer.views
        self.group = group = observer.group
        side = min(1.45, max(0.62, 10.5 / sum(widths)))
        # Blocks of columns stand further apart than the columns of one block.
        blocks = [block for block, width in enumerate(widths) for _ in range(width)]
        lefts = [_LEFT + column * (side + _GAP) + block * _BLOCK_GAP for column, block in enumerate(blocks)]
        tops = [_TOP + number * (side + _GAP) for number in range(len(views))]
        self.right, self.bottom = lefts[-1] + side, tops[-1] + side
        self.size = (self.right + _RIGHT, self.bottom + _BOTTOM)
        self.figure = blank_figure(*self.size)
        self.axes = [[self._axes(left, top, side, side) for left in lefts] for top in tops]
        for view, top, row in zip(views, tops, self.axes, strict=True):
            for axes in row:
                axes.set_aspect("equal")
                axes.set_axis_off()
            _draw_input(row[0], view)
            label = _degrees(view.angle) + ("" if view.in_group else "\noutside")
            self._text(_LEFT - 0.08, top + side / 2, label, ha="right", va="center", size=8)
        for block, heading in enumerate(headings):
            inside = [left for left, own in zip(lefts, blocks, strict=True) if own == block]
            self._text((inside[0] + inside[-1] + side) / 2, _TOP - 0.24, heading, ha="center", size=9)
            for h, left in enumerate(inside if block else ()):
                self._text(left + side / 2, _TOP - 0.03, _element_name(group, h), ha="center", size=7.5)

    def title(self, what: str, stable: Tensor) -> None:
        """State what is drawn, and the largest difference between stabilized rows ``[views, ...]``."""
        self._text(0.25, 0.3, f"{what}, {self.group.name}", size=10, weight="bold")
        inside = stable[torch.tensor([view.in_group for view in self.views])]
        measured = f"largest difference between stabilized rows: {_spread(stable)}"
        if 1 < len(inside) < len(stable):
            measured += f"; between those in the group: {_spread(inside)}"
        measured += f" (largest value {float(stable.abs().max()):.2g})"
        if _has_mirrors(self.group):
            measured += "; m: mirrored frame"
        self._text(0.25, 0.52, measured, size=8, color=GRAY)

    def colorbar(self, cmap: str, norm: Normalize, label: str) -> None:
        """Draw the color scale at the right."""
        from matplotlib.cm import ScalarMappable

        height = min(self.bottom - _TOP, 3.0)
        place = self._axes(self.right + 0.15, (self.bottom + _TOP - height) / 2, 0.11, height)
        bar = self.figure.colorbar(ScalarMappable(norm, cmap), cax=place)
        bar.set_label(label, size=8, color=INK)
        bar.ax.tick_params(labelsize=7, length=2, color=GRAY, labelcolor=INK)
        bar.ax.set_frame_on(False)

    def _axes(self, left: float, top: float, width: float, height: float) -> Axes:
        across, down = self.size
        return self.figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))

    def _text(self, left: float, top: float, text: str, *, color: str = INK, **style: Any) -> None:
        self.figure.text(left / self.size[0], 1 - top / self.size[1], text, color=color, **style)


def blank_figure(width: float, height: float) -> Figure:
    """A figure without pyplot, of a size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a picture, in the format of the suffix of ``path``, and return where; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=figure.dpi)
    return path


def points(
    axes: Axes,
    clouds: PointClouds,
    values: Tensor,
    angle: float,
    cmap: str,
    norm: Normalize,
    only: Tensor | None = None,
    **style: Any,
) -> None:
    """Each point as a square (of a raster) or a disc, turned by the angle."""
    from matplotlib.collections import PolyCollection

    verts = _tiles(clouds, angle)
    chosen = torch.arange(len(verts)) if only is None else only
    tiles = PolyCollection(verts[chosen.numpy()], array=values[chosen].numpy(), cmap=cmap, norm=norm)
    edge = "white" if clouds.grid is None else "face"
    tiles.set(**{"edgecolor": edge, "linewidth": min(0.3, 2.4 / len(verts) ** 0.5), **style})
    axes.add_collection(tiles, autolim=False)


def _tiles(clouds: PointClouds, angle: float) -> Any:
    """Corners ``[points, corners, 2]``."""
    corners = 4 if clouds.grid is not None else 24
    around = angle + np.pi / corners + 2 * np.pi * np.arange(corners) / corners
    radius = _spacing(clouds) * (np.sqrt(0.5) if corners == 4 else 0.48)
    return clouds.pos.cpu().numpy()[:, None] + radius * np.stack([np.cos(around), np.sin(around)], axis=-1)


def _spacing(clouds: PointClouds) -> float:
    """Typical distance to the nearest other point; 1 if there is none."""
    from scipy.spatial import cKDTree

    pos = clouds.pos.cpu().double().numpy()
    nearest = np.asarray(cKDTree(pos).query(pos, k=[2])[0])
    nearest = nearest[np.isfinite(nearest) & (nearest > 0)]
    return float(np.median(nearest)) if len(nearest) else 1.0


def _draw_input(axes: Axes, view: View) -> None:
    clouds, values = point_clouds(view.data), view.data.x.mean(dim=1).cpu()
    points(axes, clouds, values, view.angle, "gray_r", color_scale(values), edgecolor=FAINT)
    look_at(axes, *extent(clouds))


def neighborhood(axes: Axes, graph: LiftedGraph, keys: Tensor, point: int, angle: float) -> None:
    """Outline the neighbors of a point and fill the point."""
    from matplotlib.collections import PolyCollection

    verts, color = _tiles(graph, angle), COLORS[1]
    axes.add_collection(PolyCollection(verts[keys], facecolor="none", edgecolor=color, linewidth=0.7))
    axes.add_collection(PolyCollection(verts[[point]], facecolor=color, edgecolor=color, linewidth=0.7))


def frame(axes: Axes, group: FiniteGroup, h: int) -> None:
    """Arrow h e_x in the lower left corner, and a stub h e_y where mirrors make a difference."""
    mirrors = _has_mirrors(group)
    along, across = 0.16 * group.elements[h].numpy().T
    across = across / 2 if mirrors else 0 * across
    tail = 0.08 - (along + across) / 2
    parts = [("-|>,head_length=0.25,head_width=0.13", along)] + [("-", across)] * mirrors
    for style, part in parts:
        arrow = {"arrowstyle": style, "color": COLORS[1], "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        place: dict[str, Any] = {"xy": tuple(tail + part), "xytext": tuple(tail), "xycoords": "axes fraction"}
        axes.annotate("", **place, textcoords="axes fraction", arrowprops=arrow)


def _has_mirrors(group: FiniteGroup) -> bool:
    return bool((torch.linalg.det(group.elements) < 0).any())


def extent(clouds: PointClouds) -> tuple[Tensor, float]:
    """Center of the points and a half width that holds them however they are turned."""
    center = clouds.pos.mean(dim=0)
    reach = float((clouds.pos - center).norm(dim=1).max())
    return center, reach + _spacing(clouds)


def neighbor_reach(graph: LiftedGraph, keys: Tensor, point: int) -> float:
    """Half width of a panel around a point that holds its neighbors however they are turned."""
    return float((graph.pos[keys] - graph.pos[point]).norm(dim=1).max()) + _spacing(graph)


def look_at(axes: Axes, center: Tensor, reach: float) -> None:
    x, y = center.tolist()
    axes.set(xlim=(x - reach, x + reach), ylim=(y - reach, y + reach))


def color_scale(values: Tensor) -> Normalize:
    """One color scale for all values; a constant field gets a range too."""
    from matplotlib.colors import Normalize

    bottom, top = float(values.min()), float(values.max())
    return Normalize(bottom, top if top > bottom else bottom + 1)


def _spread(rows: Tensor) -> str:
    """Largest difference between two rows."""
    largest = float((rows.amax(dim=0) - rows.amin(dim=0)).max())
    return f"{largest:.1e}" if largest else "0"


def _degrees(angle: float) -> str:
    return f"{round(math.degrees(angle), 1):g}°"


def _element_name(group: FiniteGroup, h: int) -> str:
    """Angle of h e_x, marked m where a mirror comes first."""
    matrix = group.elements[h]
    angle = math.atan2(float(matrix[1, 0]), float(matrix[0, 0])) % (2 * math.pi)
    return _degrees(angle) + (" m" if torch.linalg.det(matrix) < 0 else "")


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "lieattn[viz]"') from error
