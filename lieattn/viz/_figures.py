"""Pictures of the papers."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count, check_counts, check_index, check_is
from lieattn.geometry import AllPairs, LiftedGraph, PointClouds, lift, pixel_positions, point_clouds
from lieattn.groups import FiniteGroup, cyclic
from lieattn.models import AffineSelfConvNet, AttentiveNetwork
from lieattn.nn import AffineSelfConvolution, SimpleAffineSelfConvolution, act_on_grid
from lieattn.nn.relative import CoordinateEncoding, RelativePositionTable
from lieattn.testing import relative_error
from lieattn.viz import _draw as draw
from lieattn.viz._charts import ROUNDING, line_style, plain_chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_MARKS = (draw.COLORS[1], draw.COLORS[5], draw.COLORS[2])
_Layer = AffineSelfConvolution | SimpleAffineSelfConvolution
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


# --- affine maps ------------------------------------------------------------------------------------------------------


def affine_maps(network: AffineSelfConvNet, *, block: int = 0, channels: int = 4) -> Figure:
    r"""Draw the affine maps that a block of an Affine Self Convolution network has learned.

    Each row is a channel. The columns are the factors ψ(m, v) of every frame m and the summand β(v), over the
    displacements v in the window, first for the keys and then for the values, if these have separate maps. In another
    output frame h the same tables are read at h⁻¹ m and h⁻¹ v.

    Parameters
    ----------
    network
        Network with the layer ``"affine"`` or ``"simple"``.
    block
        Index of the block, counted from 0.
    channels
        Number of channels that are drawn, starting with the first; all of them if the block has fewer.
    """
    draw.require_matplotlib()
    check_arguments(affine_maps, locals())
    check_counts(channels=channels)
    layer, window = _layer(network, block)
    group, count = network.group, min(channels, layer.channels)
    both = not isinstance(layer, SimpleAffineSelfConvolution)
    maps: dict[str, Any] = {"keys": layer.key_map, "values": layer.value_map} if both else {"": layer.affine_map}
    tables = [torch.cat([found.psi, found.beta[None]]).detach().float().cpu()[..., :count] for found in maps.values()]
    norm = draw.color_scale_from_zero(torch.stack(tables))
    labels = [*(rf"$\psi$, {draw.element_name(element)}" for element in group.elements), r"$\beta$"]
    columns = [f"{name}\n{label}".strip() for name in maps for label in labels]
    board = draw.Board([f"channel {channel}" for channel in range(count)], columns)
    for channel, panels in enumerate(board.axes):
        for axes, values in zip(panels, torch.cat(tables)[..., channel], strict=True):
            _draw_window(axes, window, values, "RdBu_r", norm)
        board.row_scale(channel, "RdBu_r", norm, r"$\psi$, $\beta$")
    which = f"{group.name}, block {block} of {len(network.blocks)}"
    told = r"factor $\psi$ of each frame of a neighbor, and summand $\beta$, over the displacements in the window"
    board.title(f"Affine maps, {which}", told)
    return board.figure


def effective_filters(
    network: AffineSelfConvNet, image: Float[Tensor, "channels rows columns"], *, block: int = 0, channel: int = 0
) -> Figure:
    r"""Draw the filters that attention forms from an affine map, for one image and for the image moved by the group.

    There is one row for each element g of the group, which moves the image. The columns are the image with three
    marked pixels, and for each of them the attention weights α(g, x; y) in the frame g and the product with the factors
    of the values, the filter α(g, x; y) ψ(1, g⁻¹(y - x)), over the displacements y - x in the window. A convolution
    would have the same filter at all pixels. The pixels are those with the sharpest attention, the widest attention,
    and one between. If the network is equivariant, each row is the first row moved by g. The title gives the measured
    difference after moving the rows back.

    Parameters
    ----------
    network, block
        See :func:`affine_maps`, also for errors. A copy of the network in eval mode is used.
    image
        One image ``[in_channels, rows, columns]``, with as many rows as columns if the group has quarter turns.
    channel
        Index of the channel of the values. The attention is that of its head.
    """
    draw.require_matplotlib()
    check_arguments(effective_filters, locals())
    from matplotlib.colors import PowerNorm

    network = copy.deepcopy(network).eval()
    layer, window = _layer(network, block)
    check_index("channel", channel, layer.channels)
    if image.ndim != 3:
        raise ValueError(f"image: expected one image [channels, rows, columns], got {tuple(image.shape)}")
    group = network.group
    views = [_view(network, layer, act_on_grid(group, h, image[None])[0], h, channel) for h in range(group.order)]
    first = views[group.identity_index]
    chosen = _sharp_to_wide(first, window, len(_MARKS))
    turned = _map(layer).turned.cpu()
    spread, filters = 0.0, []
    for h, view in enumerate(views):
        # The positions to which the group moves the chosen points.
        goals = first.graph.pos[chosen].double() @ group.elements[h].T
        view.points = torch.cdist(goals, view.graph.pos.double()).argmin(dim=1)
        expected = first.filters[chosen][:, turned[:, h]]
        spread = max(spread, float((view.filters[view.points] - expected).abs().max()))
        filters.append(view.filters[view.points])
    norms = (
        PowerNorm(0.5, 0.0, max(float(view.attention[view.points].max()) for view in views)),
        draw.color_scale_from_zero(torch.stack(filters)),
    )
    scales = (("magma", norms[0], r"$\alpha$"), ("RdBu_r", norms[1], r"$\alpha\,\psi$"))
    headings = [f"pixel {number + 1}\n{label}" for number in range(len(chosen)) for *_, label in scales]
    board = draw.Board([draw.element_name(element) for element in group.elements], ["image", *headings])
    for h, (view, panels) in enumerate(zip(views, board.axes, strict=True)):
        _marked(panels[0], view, window)
        drawn = [values[point] for point in view.points for values in (view.attention, view.filters)]
        for axes, values, (cmap, norm, _) in zip(panels[1:], drawn, scales * len(chosen), strict=True):
            _draw_window(axes, window, values, cmap, norm)
        for number, (cmap, norm, label) in enumerate(scales):
            board.row_scale(h, cmap, norm, label, number, len(scales))
    largest = float(torch.stack(filters).abs().max())
    what = f"Filters of block {block}, channel {channel}, {group.name}"
    board.title(what, f"filters of rows that are moved back differ by {spread:.1e} (largest value {largest:.2g})")
    return board.figure


@dataclass(eq=False)
class _View:
    """Attention weights and filters of an image, ``[points, rows of the window]``, and the points that are drawn."""

    image: Tensor  # [rows, columns]
    graph: LiftedGraph
    attention: Tensor
    filters: Tensor
    points: Tensor


def _layer(network: AffineSelfConvNet, block: int) -> tuple[_Layer, PointClouds]:
    """Return the layer of a block, and the displacements of its window as points."""
    check_is("network", network, AffineSelfConvNet)
    check_index("block", block, len(network.blocks))
    layer: Any = cast(Any, network.blocks[block]).layer
    if not isinstance(layer, _Layer):
        raise ValueError(
            f"network: expected the layer 'affine' or 'simple', got {type(layer).__name__}, which has no affine maps"
        )
    offsets = torch.tensor(cast(RelativePositionTable, layer.positions).offsets)
    return layer, point_clouds(offsets, grid=torch.tensor([[1, len(offsets)]]))


def _map(layer: _Layer) -> Any:
    """Return the affine map of the values."""
    return layer.affine_map if isinstance(layer, SimpleAffineSelfConvolution) else layer.value_map


def _view(network: AffineSelfConvNet, layer: _Layer, image: Tensor, h: int, channel: int) -> _View:
    """Return the attention weights and filters of every pixel in the frame h."""
    seen: list[Any] = []
    weight = next(network.parameters())
    with torch.no_grad(), layer.register_forward_pre_hook(lambda _, given: seen.append(given)):
        network(image[None].to(weight))
        x, graph = seen.pop()
        weights = layer.weights(x, graph)[:, h, channel * layer.heads // layer.channels]
        edges, tables = layer.positions.edges(graph), _map(layer)
        psi = tables.psi[network.group.identity_index, tables.turned[edges.index, h], channel]
        dense = weights.new_zeros(2, graph.num_points, len(tables.turned))
        dense[:, edges.neighbors.target, edges.index] = torch.stack([weights, weights * psi])
    attention, filters = dense.cpu().float().unbind()
    return _View(image.detach().float().mean(dim=0).cpu(), graph.to("cpu"), attention, filters, torch.empty(0))


def _sharp_to_wide(view: _View, window: PointClouds, count: int) -> Tensor:
    """Return pixels from the sharpest to the widest attention.

    If there is room, they are apart from each other and from the border.
    """
    pos, reach = view.graph.pos, float(window.pos.abs().max())
    entropy = torch.special.entr(view.attention).sum(dim=1)
    inside = (pos - pos.amin(dim=0)).amin(dim=1).minimum((pos.amax(dim=0) - pos).amin(dim=1)) >= reach
    free = inside if bool(inside.any()) else torch.ones_like(inside)
    goals = torch.quantile(entropy[free], torch.linspace(0, 1, count, dtype=entropy.dtype))
    chosen = list[int]()
    for goal in goals:
        chosen.append(int((entropy - goal).abs().masked_fill(~free, math.inf).argmin()))
        near = (pos - pos[chosen[-1]]).abs().amax(dim=1) < reach
        free = free & ~near if bool((free & ~near).any()) else free
    return torch.tensor(chosen)


def _marked(axes: Axes, view: _View, window: PointClouds) -> None:
    """Draw the image, with the window around each of the points."""
    from matplotlib.patches import Rectangle

    rows, columns = view.image.shape
    pixels = point_clouds(pixel_positions(rows, columns), grid=torch.tensor([[rows, columns]]))
    values = view.image.flatten()
    draw.points(axes, pixels, values, "gray", draw.color_scale(values))
    # After a pooling pixels are larger.
    scale = rows / (float(view.graph.pos[:, 1].max() - view.graph.pos[:, 1].min()) + 1)
    half = scale * (float(window.pos.abs().max()) + 0.5)
    for number, (mark, point) in enumerate(zip(_MARKS, view.points.tolist(), strict=False)):
        x, y = (scale * view.graph.pos[point]).tolist()
        axes.add_patch(Rectangle((x - half, y - half), 2 * half, 2 * half, fill=False, edgecolor=mark, linewidth=1.2))
        axes.text(x, y, str(number + 1), color=mark, weight="bold", size=8, ha="center", va="center")
    draw.look_at(axes, *_square(pixels))


def _draw_window(axes: Axes, window: PointClouds, values: Tensor, cmap: str, norm: Normalize) -> None:
    draw.points(axes, window, values[: window.num_points], cmap, norm)
    draw.look_at(axes, *_square(window))


def _square(clouds: PointClouds) -> tuple[Tensor, float]:
    """Return the center and half the width of the square that contains pixels of unit spacing."""
    return clouds.pos.mean(dim=0), float(clouds.pos.abs().max()) + 0.6
