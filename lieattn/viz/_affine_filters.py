"""Pictures of Affine Self Convolution."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_arguments, check_counts, check_index, check_is
from lieattn.geometry import LiftedGraph, PointClouds, pixel_positions, point_clouds
from lieattn.models import AffineSelfConvNet
from lieattn.nn import AffineSelfConvolution, SimpleAffineSelfConvolution, act_on_grid
from lieattn.nn.relative import RelativePositionTable
from lieattn.viz import _draw as draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_MARKS = (draw.COLORS[1], draw.COLORS[5], draw.COLORS[2])
_Layer = AffineSelfConvolution | SimpleAffineSelfConvolution


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
