"""Pictures of the papers."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count
from lieattn.geometry import AllPairs, lift, pixel_positions
from lieattn.groups import FiniteGroup, cyclic
from lieattn.models import AttentiveNetwork
from lieattn.nn import act_on_grid
from lieattn.nn.relative import CoordinateEncoding
from lieattn.testing import relative_error
from lieattn.viz import _draw as draw
from lieattn.viz._charts import ROUNDING, line_style, plain_chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = 2.4  # inches
_ARROW = 1.6  # pixels that the longest arrow spans
_SIDE, _CHART = 1.2, 3.0  # inches
_MOST_DRAWN = 9  # angles


def attention_picture(
    network: AttentiveNetwork,
    images: Float[Tensor, "images channels rows columns"],
    *,
    planar: bool = True,
    passed: bool = False,
) -> Float[Tensor, "images order rows columns"]:
    """Return the product of the spatial attention of all layers, for each frame, at the size of the image.

    The map of every layer is resized to the image bilinearly with corner pixels aligned, as in the figures of
    attentive group convolution. The maps are the output of the sigmoid, the residual α⁻ that is *subtracted*: layers
    weaken the bright regions.

    Parameters
    ----------
    network
        Network with attention to the input of its layers (α_F) or to its frames (α_RH), whose maps are shared by all
        output channels. It is evaluated in eval mode.
    images
        Images ``[images, in_channels, rows, columns]``.
    planar
        Whether the map of the first layer, which has no frames, is a factor for all frames (rotated MNIST, PCam and p4m
        All-CNN in the paper) or is left out (p4 All-CNN).
    passed
        Whether the factors are 1 - α⁻, the share that passes, instead of α⁻.

    Returns
    -------
    Tensor
        Products ``[images, order, rows, columns]``. Their sum over the frames is the picture. ValueError is raised if
        the network has another kind of attention.
    """
    check_arguments(attention_picture, locals())
    if network.attention not in ("input", "pose"):
        raise ValueError(
            f"network: expected attention 'input' or 'pose', whose maps are shared by all output channels, got "
            f"{network.attention!r}"
        )
    if network.group.dim != 2:
        raise ValueError(f"network: expected a network for images, got the group {network.group.name} in space")
    network = copy.deepcopy(network).eval()
    with torch.no_grad():
        images = network.images(images)
        maps = network.attention_maps(images)
    product = images.new_ones(len(images), network.group.order, *images.shape[-2:])
    for found in (layer.spatial for layer in maps.values()):
        if found is None or (found.ndim == 4 and not planar):
            continue
        layer = found if found.ndim == 4 else found[:, 0]
        layer = F.interpolate(layer, images.shape[-2:], mode="bilinear", align_corners=True)
        product = product * (1 - layer if passed else layer)
    return product


def attention_under_group(
    network: AttentiveNetwork,
    image: Float[Tensor, "channels side side"],
    *,
    passed: bool = False,
) -> Figure:
    """Draw the attention of a network for one image moved by every element of its group.

    Each column is an element, with the image above and its attention picture below (:func:`attention_picture`, summed
    over the frames). An arrow at every pixel shows the frame with the largest product of maps. It points to the image
    of "up" under the frame, and its length is the difference of the product to the mean over the frames; the longest
    arrow spans 1.6 pixels. For an equivariant network the columns are moved copies of the first. The title gives the
    measured largest difference after moving them back, relative to the largest entry.

    Parameters
    ----------
    network, passed
        See :func:`attention_picture`, also for errors.
    image
        One image ``[in_channels, rows, columns]`` with as many rows as columns; ValueError is raised otherwise.
    """
    draw.require_matplotlib()
    check_arguments(attention_under_group, locals())
    if image.ndim != 3 or image.shape[-1] != image.shape[-2]:
        raise ValueError(f"image: expected one square image [channels, rows, columns], got {tuple(image.shape)}")
    group = network.group
    moved = torch.cat([act_on_grid(group, h, image[None]) for h in range(group.order)])
    pictures = attention_picture(network, moved, passed=passed)
    figure = draw.blank_figure(_CELL * group.order, 2 * _CELL + 0.4, "constrained")
    axes = figure.subplots(2, group.order, squeeze=False)
    top = float(pictures.sum(dim=1).max())
    lengths = pictures - pictures.mean(dim=1, keepdim=True)
    longest = max(float(lengths.max()), 1e-3 * float(pictures.max()))  # so that rounding is not magnified
    for h in range(group.order):
        shown = moved[h].mean(dim=0)
        axes[0][h].imshow(shown.cpu(), cmap="gray")
        axes[0][h].set_title(draw.in_words(group.elements[h]), fontsize=9)
        drawn = axes[1][h].imshow(pictures[h].sum(dim=0).cpu(), cmap="viridis", vmin=0, vmax=top)
        _draw_poses(axes[1][h], group, lengths[h].cpu(), longest)
        for axis in axes[:, h]:
            axis.set_axis_off()
    figure.colorbar(drawn, ax=axes[1].tolist(), shrink=0.8, label="sum over the frames")
    what = r"product of $1 - \alpha^-$ (passes)" if passed else r"product of $\alpha^-$ (is subtracted)"
    first = pictures[group.identity_index][None, None]
    expected = torch.cat([act_on_grid(group, h, first)[0] for h in range(group.order)])
    apart = relative_error(pictures, expected, floor=1e-30)
    figure.suptitle(f"{what}; relative difference of columns that are moved back: {apart:.1e}", fontsize=10)
    return figure


def _draw_poses(axes: Axes, group: FiniteGroup, lengths: Tensor, longest: float) -> None:
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in lengths.shape[-2:]), indexing="ij")
    style: dict[str, Any] = {"color": "white", "scale_units": "x", "scale": max(longest, 1e-30) / _ARROW}
    for pose, (right, upward) in enumerate(group.elements[:, :, 1].tolist()):
        shown = lengths.argmax(dim=0) == pose
        length = lengths[pose][shown]
        axes.quiver(columns[shown], rows[shown], right * length, upward * length, width=0.006, pivot="mid", **style)


# --- rotated weights -------------------------------------------------------------------------------------------------


def steerability(*, size: int = 7, order: int = 16) -> Figure:
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
    """
    draw.require_matplotlib()
    check_arguments(steerability, locals())
    check_count("size", size, least=3)
    check_count("order", order, least=4)
    if size % 2 == 0 or order % 4:
        raise ValueError(f"size, order: expected an odd number and a multiple of 4, got {size} and {order}")
    score = _Score(size, order)
    turns = range(order // 4 + 1)
    attention = [score.upright[:, a] for a in turns], [score.error(score.turned(a)) for a in turns]
    rotated = [score.interpolated(a) for a in turns]
    convolution = rotated, [score.error(score.interpolated(-a % order, rotated[a])) for a in turns]
    rows = {"attention,\na function": attention, "convolution,\ninterpolated": convolution}
    return _drawn(rows, [360 * a / order for a in turns])


class _Score:
    """Positional scores of a square of pixels around the query, in all frames."""

    def __init__(self, size: int, order: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
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

    def turned(self, a: int) -> Tensor:
        """Return the rotated score at the rotated pixels ``[points]``."""
        return self._scores(self.pixels @ self.group.elements[a].T)[:, a]

    def interpolated(self, a: int, weights: Tensor | None = None) -> Tensor:
        """Rotate weights ``[points]``, by default those at 0°, by bilinear interpolation with zeros outside."""
        weights = self.upright[:, 0] if weights is None else weights
        back = self.pixels @ self.group.elements[a]  # h⁻¹ u
        # grid_sample has rows from the top, and coordinates from -1 to 1.
        places = back * torch.tensor([1.0, -1.0], dtype=torch.float64) * 2 / (self.size - 1)
        image = weights.view(1, 1, self.size, self.size)
        sampled = F.grid_sample(image, places.view(1, self.size, self.size, 2), align_corners=True)
        return sampled.flatten()

    def error(self, found: Tensor) -> float:
        """Return the difference of scores ``[points]`` to the upright ones in the disc, relative to the largest."""
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
        chart.semilogy(degrees, [max(error, ROUNDING) for error in errors], label=name.split(",")[0], **style)
    plain_chart(chart, "angle (degrees)")
    told = "relative error after rotation by the angle and back\n(an error of 0 is drawn as 1e-17)"
    chart.set_title(told, size=8.5, color=draw.INK)
    chart.set_xticks(degrees if len(degrees) < 8 else range(0, 91, 15))
    chart.set_ylim(ROUNDING, 10)
    chart.legend(fontsize=8, frameon=False, loc="center")
    return figure
