"""A picture of rotated weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count
from lieattn.geometry import AllPairs, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.nn.relative import CoordinateEncoding
from lieattn.viz import _draw as draw
from lieattn.viz._charts import line_style, plain_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE, _CHART = 1.2, 3.0  # inches
_MOST_DRAWN = 9  # angles
_ROUNDING = 1e-17  # errors of 0 on a logarithmic axis


def steerability(*, size: int = 7, order: int = 16, seed: int = 0) -> Figure:
    """Draw positional scores, which rotate without interpolation, and a convolution with interpolation.

    The picture illustrates Figure 2 of GSA-Nets. The score of a pixel u of the neighborhood is ⟨q, ρ(h⁻¹ u)⟩, a
    function on the plane, which each frame h evaluates at any position. A convolution with the same weights at 0° has
    them only at pixels, and must interpolate (here bilinearly) to rotate them. The chart shows the difference to the
    weights at 0° after a rotation by an angle and back, relative to the largest weight: interpolation is exact only for
    quarter turns. Squares of pixels have no other rotational symmetry, so the layers are exact at other angles only if
    neighborhoods are balls that rotate with the points.

    Parameters
    ----------
    size
        Number of pixels along a side of the neighborhood, an odd number of at least 3.
    order
        Number of angles in a full turn, a multiple of 4. The chart has all angles of the first quarter, of which up to
        nine are drawn.
    seed
        Seed of the encoding and the query.
    """
    draw.require_matplotlib()
    check_arguments(steerability, locals())
    check_count("size", size, least=3)
    check_count("order", order, least=4)
    if size % 2 == 0 or order % 4:
        raise ValueError(f"size, order: expected an odd number and a multiple of 4, got {size} and {order}")
    score = _Score(size, order, seed)
    turns = range(order // 4 + 1)
    rows = {
        "attention,\na function": (
            [score.of_attention(a) for a in turns],
            [score.attention_error(a) for a in turns],
        ),
        "convolution,\ninterpolated": (
            [score.interpolated(a) for a in turns],
            [score.convolution_error(a) for a in turns],
        ),
    }
    return _drawn(rows, [360 * a / order for a in turns])


class _Score:
    """Positional scores of a square of pixels around the query, in all frames."""

    def __init__(self, size: int, order: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoding = CoordinateEncoding(2, 16).double()
            self.query = torch.randn(16, dtype=torch.float64)
        self.size, self.group = size, cyclic(order)
        self.pixels = pixel_positions(size, size, dtype=torch.float64)
        # Rotated pixels can leave the square unless they are in the disc.
        self.disc = self.pixels.norm(dim=1) <= (size - 1) / 2
        self.mean = torch.zeros((), dtype=torch.float64)
        self.mean = self._scores(self.pixels)[:, 0].mean()  # it has no effect on a softmax, but on zeros at borders
        self.upright = self._scores(self.pixels)

    def _scores(self, pos: Tensor) -> Tensor:
        """Return the scores ``[points, fiber]`` for the point in the middle as the query."""
        graph = lift(pos, self.group, AllPairs(), length=(self.size - 1) / 2)
        with torch.no_grad():
            terms = self.encoding(graph)
        middle = graph.neighbors.target == len(pos) // 2
        row = middle.nonzero()[:, 0] if terms.row is None else terms.row[middle]
        found: Tensor = terms.positional_key[row][:, :, 0] @ self.query
        return found - self.mean

    def of_attention(self, a: int) -> Tensor:
        return self.upright[:, a]

    def attention_error(self, a: int) -> float:
        """Return the difference of the rotated score at the rotated pixels to the upright score."""
        return self._error(self._scores(self.pixels @ self.group.elements[a].T)[:, a])

    def interpolated(self, a: int, weights: Tensor | None = None) -> Tensor:
        """Rotate weights ``[points]``, by default those at 0°, by bilinear interpolation with zeros outside."""
        weights = self.upright[:, 0] if weights is None else weights
        back = self.pixels @ self.group.elements[a]  # h⁻¹ u
        # grid_sample has rows from the top, and coordinates from -1 to 1.
        places = back * torch.tensor([1.0, -1.0], dtype=torch.float64) * 2 / (self.size - 1)
        image = weights.view(1, 1, self.size, self.size)
        sampled = torch.nn.functional.grid_sample(image, places.view(1, self.size, self.size, 2), align_corners=True)
        return sampled.flatten()

    def convolution_error(self, a: int) -> float:
        return self._error(self.interpolated(-a % self.group.order, self.interpolated(a)))

    def _error(self, found: Tensor) -> float:
        upright = self.upright[self.disc, 0]
        return float((found[self.disc] - upright).abs().max() / upright.abs().max())


def _drawn(rows: dict[str, tuple[list[Tensor], list[float]]], degrees: list[float]) -> Figure:
    columns = min(len(degrees), _MOST_DRAWN)
    shown = [round(n * (len(degrees) - 1) / (columns - 1)) for n in range(columns)]
    figure = draw.blank_figure(_SIDE * columns + _CHART + 1.7, len(rows) * _SIDE + 0.9, "constrained")
    figure.suptitle("Weights rotated by an angle", size=10, color=draw.INK, weight="bold")
    grid = figure.add_gridspec(len(rows), columns + 1, width_ratios=[*[_SIDE] * columns, _CHART])
    chart = figure.add_subplot(grid[:, -1])
    norm = draw.color_scale_from_zero(torch.stack([image for images, _ in rows.values() for image in images]))
    for row, (name, (images, errors)) in enumerate(rows.items()):
        for column, turn in enumerate(shown):
            axes, side = figure.add_subplot(grid[row, column]), math.isqrt(len(images[turn]))
            axes.imshow(images[turn].view(side, side).numpy(), cmap="RdBu_r", norm=norm)
            axes.set(xticks=[], yticks=[], frame_on=False)
            if column == 0:
                axes.set_ylabel(name, size=8, color=draw.INK, rotation=0, ha="right", va="center")
            if row == 0:
                axes.set_title(f"{degrees[turn]:g}°", size=8, color=draw.INK)
        style = {**line_style(row), "markersize": 4, "clip_on": False}
        chart.semilogy(degrees, [max(error, _ROUNDING) for error in errors], label=name.split(",")[0], **style)
    plain_chart(chart, "angle (degrees)")
    told = "relative error after rotation by the angle and back\n(an error of 0 is drawn as 1e-17)"
    chart.set_title(told, size=8.5, color=draw.INK)
    chart.set_xticks(degrees if len(degrees) < 8 else range(0, 91, 15))
    chart.set_ylim(_ROUNDING, 10)
    chart.legend(fontsize=8, frameon=False, loc="center")
    return figure
