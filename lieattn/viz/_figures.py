"""Pictures of what a network does with one cloud: fields and attention, one row a rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lieattn.models import GSANet
from lieattn.viz import _draw as draw
from lieattn.viz._observe import Observer, check_choice, query_point

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def feature_fields(
    network: GSANet, data: Any, angles: Sequence[float], *, channel: int | None = 0, layer: int = -1
) -> Figure:
    """Draw a field of the network for one cloud under rotations, and the same field stabilized.

    One row an angle. Columns: the rotated input; the field at each element h of the group, at the rotated points;
    the stabilized field (:func:`stabilized_fields`) at the points before rotation, which for an equivariant network
    looks the same in every row. An arrow shows h e_x, and a stub h e_y if the group has mirrors. The title gives the
    largest difference between stabilized rows, over all channels, as measured.

    Parameters
    ----------
    network
        Its group acts on the plane. Dropout is off while it is observed.
    data
        torch_geometric ``Data`` of one cloud with features ``x`` ``[points, channels]`` and ``pos`` ``[points, 2]``.
        Points are drawn as squares if it has ``grid``, else as discs.
    angles
        Rotations about the origin, counter-clockwise, in radians.
    channel
        Which channel; None for the norm over all channels.
    layer
        0 for the lifting layer, k for the k-th block; negative numbers count from the last block.

    Raises
    ------
    TypeError, ValueError
        If ``network`` is no GSANet on the plane, ``data`` is not one cloud, there are no angles, or there is no such
        layer or channel.
    """
    draw.require_matplotlib()
    observer = Observer(network, data, angles, layer)
    fields = observer.fields()
    stable = observer.stabilized(fields)
    check_choice("channel", channel, fields.shape[-1])
    shown, stable_shown = (f.norm(dim=-1) if channel is None else f[..., channel] for f in (fields, stable))
    order, norm = observer.group.order, draw.color_scale(shown)
    sheet = draw.Sheet(observer, ("input", "field $f(x, h)$", "stabilized field"), (1, order, order))
    at_rest = observer.view(0.0).clouds(observer.layer)
    for row, view in enumerate(observer.views):
        clouds = view.clouds(observer.layer)
        for h in range(order):
            for axes, drawn, values, angle in (
                (sheet.axes[row][1 + h], clouds, shown, view.angle),
                (sheet.axes[row][1 + order + h], at_rest, stable_shown, 0.0),
            ):
                draw.points(axes, drawn, values[row, :, h], angle, "viridis", norm)
                draw.look_at(axes, *draw.extent(drawn))
                draw.frame(axes, observer.group, h)
    what = "norm over channels" if channel is None else f"channel {channel}"
    sheet.title(f"Field of {observer.name}, {what}", stable)
    sheet.colorbar("viridis", norm, "feature")
    return sheet.figure


def stabilized_fields(network: GSANet, data: Any, angles: Sequence[float], *, layer: int = -1) -> Tensor:
    """Fields of rotated copies of one cloud, with the rotation taken off again.

    Points keep their order when a cloud is rotated, so only the fiber is left to permute back: by the element of the
    group that the rotation is, or by the rotation in the group nearest to it. If the network is equivariant and the
    rotations are in its group, all rows are equal up to rounding.

    Parameters
    ----------
    network, data, angles, layer
        As for :func:`feature_fields`, and so are the errors.

    Returns
    -------
    Tensor
        ``[angles, points, fiber, channels]`` on the CPU.
    """
    observer = Observer(network, data, angles, layer)
    return observer.stabilized(observer.fields())


def attention_maps(
    network: GSANet,
    data: Any,
    angles: Sequence[float],
    *,
    point: int | None = None,
    head: int | None = None,
    layer: int = -1,
) -> Figure:
    """Draw where one point attends to, for each output frame, under rotations of its cloud.

    One row an angle. Columns: the rotated input with the neighborhood of the point outlined; then the attention of
    each output frame h on the neighbors, summed over the frames of query and key and normalized to 1. In an
    equivariant network a rotation g turns the map of h into that of g h. The title gives how far the rows differ once
    that is undone, as measured.

    Parameters
    ----------
    network, data, angles, layer
        As for :func:`feature_fields`; the layer's attention is meant.
    point
        Index of the query among the points the layer attends on; the one nearest to the center if absent.
    head
        Which head; the mean over all heads if absent.

    Raises
    ------
    TypeError, ValueError
        As for :func:`feature_fields`, or if there is no such point or head, or the point has no neighbors.
    """
    draw.require_matplotlib()
    observer = Observer(network, data, angles, layer)
    layer = observer.layer
    point = query_point(observer.view(0.0).graph(layer), point)
    maps = observer.attention(point, head)
    norm = draw.color_scale(maps[maps > 0])
    sheet = draw.Sheet(observer, ("input", "attention of output frame $h$"), (1, observer.group.order))
    reach = max(draw.neighbor_reach(view.graph(layer), view.keys(layer, point), point) for view in observer.views)
    for row, view in enumerate(observer.views):
        graph, keys = view.graph(layer), view.keys(layer, point)
        draw.neighborhood(sheet.axes[row][0], graph, keys, point, view.angle)
        for h, axes in enumerate(sheet.axes[row][1:]):
            draw.points(axes, graph, maps[row, :, h], view.angle, "magma", norm, keys)
            axes.plot(*graph.pos[point].tolist(), "o", ms=3.5, mfc="white", mec="black", mew=0.7)
            draw.look_at(axes, graph.pos[point], reach)
            draw.frame(axes, observer.group, h)
    heads = "mean over heads" if head is None else f"head {head}"
    sheet.title(f"Attention of {observer.name}, point {point}, {heads}", observer.stabilized(maps[..., None]))
    sheet.colorbar("magma", norm, "attention weight")
    return sheet.figure
