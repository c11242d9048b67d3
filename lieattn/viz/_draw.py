"""Drawing in a panel of a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lieattn._core.checks import TOLERANCE
from lieattn._core.extras import needs_extra
from lieattn.geometry import PointClouds
from lieattn.io import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

INK, GRAY, FAINT = "#222222", "#777777", "#dddddd"
# Okabe and Ito's colors, which color-blind readers can also distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ANIMATION_DPI, _ANIMATION_COLORS = 90, {"viridis": 80, "magma": 80, "RdBu_r": 55, "gray": 33}
_DURATION = 450  # milliseconds of a picture of an animation
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")


def blank_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


class Canvas:
    """A figure whose parts are placed in inches from its left and top."""

    def __init__(self, width: float, height: float) -> None:
        self.size = width, height
        self.figure = blank_figure(width, height)

    def place(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return axes at a place."""
        across, down = self.size
        return self.figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))

    def panel(self, left: float, top: float, side: float) -> Axes:
        """Return a square without a frame, with the same unit on both axes."""
        axes = self.place(left, top, side, side)
        axes.set_aspect("equal")
        axes.set_axis_off()
        return axes

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Write text at a place."""
        self.figure.text(left / self.size[0], 1 - top / self.size[1], text, **{"color": INK, **style})

    def scale(
        self, left: float, top: float, width: float, height: float, cmap: str, norm: Normalize, label: str
    ) -> None:
        """Draw a color scale at a place."""
        from matplotlib.cm import ScalarMappable

        bar = self.figure.colorbar(ScalarMappable(norm, cmap), cax=self.place(left, top, width, height))
        bar.set_label(label, size=8, color=INK)
        bar.ax.tick_params(labelsize=7, length=2, color=GRAY, labelcolor=INK)
        bar.ax.set_frame_on(False)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a picture in the format of the suffix of ``path``, and return the path. Missing folders are created.

    ValueError is raised if matplotlib does not have this format.
    """
    return save_picture(figure, Path(path))


def save_picture(figure: Figure, path: Path, others: tuple[str, ...] = ()) -> Path:
    """Do what :func:`save` does. Errors also name ``others``, the formats that the caller writes itself."""
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        known = ", ".join(sorted({*formats, *others}))
        raise ValueError(f"path: expected a name that ends in one of {known}, got {path.name!r}")
    with replacing(path) as part:
        figure.savefig(part, dpi=figure.dpi, format=path.suffix.removeprefix(".") or None)
    return path


def save_animation(figures: Iterable[Figure], path: Path) -> Path:
    """Write figures of one size as a repeating GIF, and return the path. Missing folders are created."""
    from PIL import Image

    pictures, palette = [], Image.new("P", (1, 1))
    palette.putpalette(_palette())
    for figure in figures:
        figure.set_dpi(ANIMATION_DPI)
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]
        pictures.append(Image.fromarray(pixels).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE))
    with replacing(path) as part:
        options: dict[str, Any] = {"duration": _DURATION, "loop": 0, "optimize": True}
        pictures[0].save(part, "GIF", save_all=True, append_images=pictures[1:], **options)
    return path


def _palette() -> list[int]:
    """Return red, green and blue of 256 colors: the color scales, grays, and shades of the colors of marks."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    parts = [colormaps[name](np.linspace(0, 1, count))[:, :3] for name, count in _ANIMATION_COLORS.items()]
    white, shares = np.ones(3), np.linspace(0.25, 1, 4)[:, None]
    parts += [white + shares * (np.array(to_rgb(color)) - white) for color in COLORS[:2]]
    return [round(255 * float(part)) for part in np.concatenate(parts).flatten()]


def points(
    axes: Axes,
    clouds: PointClouds,
    values: Tensor,
    angle: float,
    cmap: str,
    norm: Normalize,
) -> None:
    """Draw each point as a square (for a raster) or a disc, rotated by the angle."""
    from matplotlib.collections import PolyCollection

    verts = _tiles(clouds, angle)
    edge = "0.6" if clouds.grid is None else "face"  # gray edges make white points visible
    width = min(0.3, 2.4 / len(verts) ** 0.5)
    tiles = PolyCollection(verts, array=values.numpy(), cmap=cmap, norm=norm, edgecolor=edge, linewidth=width)
    axes.add_collection(tiles, autolim=False)


def _tiles(clouds: PointClouds, angle: float) -> Any:
    """Return the corners of squares or discs, ``[points, corners, 2]``."""
    corners = 4 if clouds.grid is not None else 24
    around = angle + np.pi / corners + 2 * np.pi * np.arange(corners) / corners
    radius = spacing(clouds) * (np.sqrt(0.5) if corners == 4 else 0.48)
    return clouds.pos.cpu().numpy()[:, None] + radius * np.stack([np.cos(around), np.sin(around)], axis=-1)


def spacing(clouds: PointClouds) -> float:
    """Return the median distance to the nearest other point, or 1 if there is none."""
    from scipy.spatial import cKDTree

    pos = clouds.pos.cpu().double().numpy()
    nearest = np.asarray(cKDTree(pos).query(pos, k=[2])[0])
    nearest = nearest[np.isfinite(nearest) & (nearest > 0)]
    return float(np.median(nearest)) if len(nearest) else 1.0


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


def element_name(matrix: Tensor) -> str:
    """Return the angle of h e_x for an orthogonal matrix h ``[2, 2]``, followed by m if h contains a reflection."""
    angle = math.degrees(math.atan2(float(matrix[1, 0]), float(matrix[0, 0]))) % 360
    return f"{round(angle, 1):g}°" + (" m" if float(torch.linalg.det(matrix)) < 0 else "")


def in_words(matrix: Tensor) -> str:
    """Describe the action of an orthogonal matrix ``[dim, dim]`` in two or three dimensions by its angle."""
    dim, mirrors = len(matrix), float(torch.linalg.det(matrix)) < 0
    if dim == 2:
        # The axis of a reflection is the bisector of the first axis and its image.
        degrees = math.degrees(math.atan2(float(matrix[1, 0]), float(matrix[0, 0]))) % 360
        return f"reflected, axis at {degrees / 2:.4g}°" if mirrors else f"rotated by {degrees:.4g}°"
    proper = -matrix if mirrors else matrix
    cosine = (float(proper.diagonal().sum()) - 1) / 2
    degrees = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
    return f"rotated by {degrees:.4g}°" + (", inverted" if mirrors else "")


def extent(clouds: PointClouds) -> tuple[Tensor, float]:
    """Return the center of the points, and half the width of a panel that contains them in every orientation."""
    center = clouds.pos.mean(dim=0)
    reach = float((clouds.pos - center).norm(dim=1).max())
    return center, reach + spacing(clouds)


def look_at(axes: Axes, center: Tensor, reach: float) -> None:
    x, y = center.tolist()
    axes.set(xlim=(x - reach, x + reach), ylim=(y - reach, y + reach))


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


def in_plane(clouds: PointClouds) -> PointClouds:
    """Return the same points with their first two coordinates. The second is 0 for points on a line."""
    pos = clouds.pos.detach().cpu()
    return replace(clouds, pos=torch.cat([pos, pos.new_zeros(len(pos), 1)], dim=1)[:, :2])


def ring(axes: Axes, clouds: PointClouds, point: int, angle: float = 0.0) -> None:
    """Outline a point, so that its color remains visible."""
    from matplotlib.collections import PolyCollection

    outline = _tiles(clouds, angle)[[point]]
    for color, width in (("white", 2.2), (COLORS[1], 1.2)):
        axes.add_collection(PolyCollection(outline, facecolor="none", edgecolor=color, linewidth=width, zorder=3))


def require_matplotlib() -> None:
    with needs_extra("lieattn.viz", "viz"):
        import matplotlib.figure  # noqa: F401
