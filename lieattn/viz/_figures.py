"""Pictures of the fields and the attention of a network for one cloud, with one row for each rotation."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_has_numbers, check_index, check_tensor
from lieattn.certify import moved
from lieattn.geometry import LiftedGraph, PointClouds, point_clouds
from lieattn.groups import SO, FiniteGroup
from lieattn.models import GSAGeometry, GSANet
from lieattn.viz import _draw as draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_IN_GROUP = 1e-6
# Sizes of a grid of panels, in inches.
_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP, _BLOCK_GAP = 0.68, 0.95, 1.05, 0.12, 0.04, 0.2


def feature_fields(
    network: GSANet, data: Any, angles: Sequence[float], *, channel: int | None = 0, layer: int = -1
) -> Figure:
    """Draw a field of the network for one cloud under rotations, and the same field stabilized.

    Each row is an angle. The columns are the rotated input; the field at each element h of the group, at the rotated
    points; and the stabilized field (:func:`stabilized_fields`) at the points before rotation, which for an equivariant
    network is the same in every row. An arrow shows h e_x, and a stub shows h e_y if the group has reflections. The
    title gives the measured largest difference between stabilized rows, over all channels.

    Parameters
    ----------
    network
        Network whose group acts on the plane. A copy in eval mode is evaluated.
    data
        torch_geometric ``Data`` of one cloud with features ``x`` ``[points, channels]`` and ``pos`` ``[points, 2]``.
        Points are drawn as squares if it has ``grid``, and as discs otherwise.
    angles
        Rotations about the origin, counter-clockwise, in radians.
    channel
        Index of the channel; None for the norm over all channels.
    layer
        0 for the lifting layer, k for the k-th block; negative numbers count from the last block.

    Raises
    ------
    TypeError, ValueError
        If ``network`` is not a GSANet on the plane, ``data`` is not one cloud, there are no angles, or the layer or
        channel does not exist.
    """
    draw.require_matplotlib()
    observer = Observer(network, data, angles, layer)
    fields = observer.fields()
    stable = observer.stabilized(fields)
    check_arguments(feature_fields, {"channel": channel})
    check_index("channel", channel, fields.shape[-1])
    shown, stable_shown = (f.norm(dim=-1) if channel is None else f[..., channel] for f in (fields, stable))
    order = observer.group.order
    norm = draw.color_scale_from_zero(shown) if channel is None else draw.color_scale(shown, float(fields.abs().max()))
    sheet = Sheet(observer, ("input", "field $f(x, h)$", "stabilized field"), (1, order, order))
    at_rest = observer.view(0.0).clouds
    for row, view in enumerate(observer.views):
        for h in range(order):
            for axes, drawn, values, angle in (
                (sheet.axes[row][1 + h], view.clouds, shown, view.angle),
                (sheet.axes[row][1 + order + h], at_rest, stable_shown, 0.0),
            ):
                draw.points(axes, drawn, values[row, :, h], angle, "viridis", norm)
                draw.look_at(axes, *draw.extent(drawn))
                draw.frame(axes, observer.group.elements, h)
    what = "norm over channels" if channel is None else f"channel {channel}"
    sheet.title(f"Field of {observer.name}, {what}", stable, "" if channel is None else ", in all channels")
    sheet.colorbar("viridis", norm, "feature")
    return sheet.figure


def stabilized_fields(network: GSANet, data: Any, angles: Sequence[float], *, layer: int = -1) -> Tensor:
    """Return the fields of rotated copies of one cloud, with the rotation undone.

    Points keep their order when a cloud is rotated, so only the fiber must be permuted back: by the element of the
    group that equals the rotation, or by the rotation in the group nearest to it. If the network is equivariant and the
    rotations are in its group, all rows are equal up to rounding. Parameters and errors are those of
    :func:`feature_fields`. The fields ``[angles, points, fiber, channels]`` are on the CPU.
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
    """Draw the attention of one point to its neighbors, for each output frame, under rotations of its cloud.

    Each row is an angle. The columns are the rotated input with the neighborhood of the point outlined, and the
    attention of each output frame h to the neighbors, summed over the frames of query and key and normalized to 1. In
    an equivariant network a rotation g maps the attention of h to that of g h. The title gives the measured difference
    of the rows after this is undone.

    Parameters
    ----------
    network, data, angles, layer
        As for :func:`feature_fields`, also for errors. The attention is that of the layer.
    point
        Index of the query among the points of the layer. ValueError is raised if it has no neighbors. Default: the
        point nearest to the center.
    head
        Index of the head. ValueError is raised if it does not exist. Default: the mean over all heads.
    """
    draw.require_matplotlib()
    observer = Observer(network, data, angles, layer)
    check_arguments(attention_maps, {"point": point, "head": head})
    at_rest = observer.view(0.0).graph
    if point is None:
        point = int((at_rest.pos - at_rest.pos.mean(dim=0)).norm(dim=1).argmin())
    if not 0 <= point < at_rest.num_points:
        raise ValueError(f"point: expected one of the layer's points 0..{at_rest.num_points - 1}, got {point}")
    maps = observer.attention(point, head)
    norm = draw.color_scale_from_zero(maps)
    sheet = Sheet(observer, ("input", "attention of output frame $h$"), (1, observer.group.order))
    reach = max(draw.neighbor_reach(view.graph, view.keys(point), point) for view in observer.views)
    for row, view in enumerate(observer.views):
        graph, keys = view.graph, view.keys(point)
        draw.neighborhood(sheet.axes[row][0], graph, keys, point, view.angle)
        for h, axes in enumerate(sheet.axes[row][1:]):
            draw.points(axes, graph, maps[row, :, h], view.angle, "magma", norm, keys)
            draw.ring(axes, graph, point, view.angle)
            draw.look_at(axes, graph.pos[point], reach)
            draw.frame(axes, observer.group.elements, h)
    heads = "mean over heads" if head is None else f"head {head}"
    sheet.title(f"Attention of {observer.name}, point {point}, {heads}", observer.stabilized(maps[..., None]))
    sheet.colorbar("magma", norm, "attention weight")
    return sheet.figure


@dataclass(frozen=True, eq=False)
class View:
    """A rotated cloud, and the element of the group that equals the rotation or is nearest to it."""

    angle: float
    element: int
    in_group: bool
    data: Any
    geometry: GSAGeometry

    graph: LiftedGraph  # the graph of the attention of the layer
    clouds: PointClouds  # the points of its output, after its crop

    def keys(self, point: int) -> Tensor:
        """Return the neighbors of a point."""
        first, end = self.graph.neighbors.row_ptr[point : point + 2].tolist()
        return self.graph.neighbors.source[first:end].cpu()


class Observer:
    """Views of one cloud under rotations, with the fields and the attention of a layer of the network."""

    def __init__(self, network: GSANet, data: Any, angles: Sequence[float], layer: int) -> None:
        if not isinstance(network, GSANet):
            raise TypeError(f"network: expected a GSANet, got {type(network).__name__}")
        if network.group is None or network.group.dim != 2:
            raise ValueError(f"network: expected a group of the plane, got {network.group!r}")
        check_arguments(Observer.__init__, {"angles": angles})
        angles = [float(angle) for angle in angles]
        if not angles or not all(math.isfinite(angle) for angle in angles):
            raise ValueError(f"angles: expected at least one finite angle in radians, got {angles}")
        if getattr(data, "x", None) is None:
            raise TypeError(f"data: expected a torch_geometric Data with x and pos, got {data!r}")
        clouds = point_clouds(data)
        if clouds.num_clouds != 1 or clouds.num_points == 0:
            raise ValueError(
                f"data: expected one cloud with points, got {clouds.num_points} points in {clouds.num_clouds} clouds; "
                f"select one with batch[i]"
            )
        blocks = len(network.blocks)
        if not isinstance(layer, int | np.integer) or not -blocks - 1 <= layer <= blocks:
            raise ValueError(
                f"layer: expected 0 (lifting) to {blocks} (the last block) or {-blocks - 1} to -1, got {layer!r}"
            )
        self.network, self.data, self.layer = copy.deepcopy(network).eval(), data, layer % (blocks + 1)
        self.group: FiniteGroup = network.group
        self.views = [self.view(angle) for angle in angles]

    @property
    def name(self) -> str:
        """Name of the layer."""
        return f"block {self.layer}" if self.layer else "the lifting layer"

    def view(self, angle: float) -> View:
        """Return the view of the rotated cloud."""
        matrix = SO(2).exp(torch.tensor([angle], dtype=torch.float64))
        distance = (self.group.elements - matrix).abs().amax(dim=(1, 2))
        # Rotations outside of the group are compared with rotations only: a nearer reflection would mirror the picture.
        distance[torch.linalg.det(self.group.elements) < 0] = math.inf
        element = int(distance.argmin())
        in_group = bool(distance[element] < _IN_GROUP)
        # Matrices of the group are preferred, since their quarter turns are exact.
        rotated = moved(self.data, self.group.elements[element] if in_group else matrix)
        parameter = next(self.network.parameters())
        check_tensor("data.x", self.data.x, "floating features")
        check_has_numbers("data.x", self.data.x)
        rotated.x, rotated.pos = self.data.x.to(parameter), rotated.pos.to(parameter)
        rotated = rotated.to(parameter.device)
        geometry = self.network.geometry(rotated)
        steps: list[tuple[LiftedGraph, PointClouds]] = [(geometry.lifting, geometry.lifting)]
        steps += [(step.graph, step.clouds) for stage in geometry.stages for step in stage]
        return View(angle, element, in_group, rotated, geometry, *steps[self.layer])

    def fields(self) -> Tensor:
        """Return the fields ``[views, points, fiber, channels]`` on the CPU."""
        with torch.no_grad():
            found = [self.network.features(view.data.x, view.geometry)[self.layer].cpu() for view in self.views]
        return torch.stack(found)

    def attention(self, point: int, head: int | None) -> Tensor:
        """Return the weights ``[views, points, fiber]`` of the keys of one query, normalized to 1."""
        layer: Any = self.network.blocks[self.layer - 1].attention if self.layer else self.network.lifting
        check_index("head", head, layer.heads)
        maps, seen = [], list[Any]()
        with torch.no_grad(), layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs)):
            for view in self.views:
                self.network.features(view.data.x, view.geometry)
                weights = layer.weights(*seen.pop())
                first, end = view.graph.neighbors.row_ptr[point : point + 2].tolist()
                if first == end:
                    raise ValueError(f"point: expected one with neighbors in {self.name}, got {point}")
                by_key = weights[first:end].sum(dim=(2, 3))  # [neighbors, fiber, heads]
                by_key = (by_key / by_key.sum(dim=0)).cpu()
                dense = by_key.new_zeros(view.graph.num_points, by_key.shape[1])
                dense[view.keys(point)] = by_key.mean(dim=-1) if head is None else by_key[..., head]
                maps.append(dense)
        return torch.stack(maps)

    def stabilized(self, fields: Tensor) -> Tensor:
        """Return fields ``[views, points, fiber, channels]`` with the fiber of each permuted back."""
        back = [int(self.group.inverse_index[view.element]) for view in self.views]
        return torch.stack([self.group.translate(h, field) for h, field in zip(back, fields, strict=True)])


class Sheet(draw.Canvas):
    """A grid of square panels in blocks of columns: the inputs, then blocks with one panel for each element h."""

    def __init__(self, observer: Observer, headings: Sequence[str], widths: Sequence[int]) -> None:
        self.views = views = observer.views
        self.group = group = observer.group
        side = min(1.45, max(0.62, 10.5 / sum(widths)))
        # Blocks of columns are further apart than the columns of one block.
        blocks = [block for block, width in enumerate(widths) for _ in range(width)]
        lefts = [_LEFT + column * (side + _GAP) + block * _BLOCK_GAP for column, block in enumerate(blocks)]
        tops = [_TOP + number * (side + _GAP) for number in range(len(views))]
        self.right, self.bottom = lefts[-1] + side, tops[-1] + side
        super().__init__(self.right + _RIGHT, self.bottom + _BOTTOM)
        self.axes = [[self.panel(left, top, side) for left in lefts] for top in tops]
        for view, top, row in zip(views, tops, self.axes, strict=True):
            _draw_input(row[0], view)
            label = _degrees(view.angle) + ("" if view.in_group else "\nnot in\nthe group")
            self.write(_LEFT - 0.08, top + side / 2, label, ha="right", va="center", size=8)
        for block, heading in enumerate(headings):
            inside = [left for left, own in zip(lefts, blocks, strict=True) if own == block]
            self.write((inside[0] + inside[-1] + side) / 2, _TOP - 0.24, heading, ha="center", size=9)
            for h, left in enumerate(inside if block else ()):
                self.write(left + side / 2, _TOP - 0.03, draw.element_name(group.elements[h]), ha="center", size=7.5)

    def title(self, what: str, stable: Tensor, place: str = "") -> None:
        """Write the title, and the largest difference between stabilized rows ``[views, ...]`` at a place."""
        self.write(0.25, 0.3, f"{what}, {self.group.name}", size=10, weight="bold")
        inside = stable[torch.tensor([view.in_group for view in self.views])]
        measured = f"largest difference between stabilized rows{place}: {_spread(stable)}"
        if 1 < len(inside) < len(stable):
            measured += f"; for rotations in the group: {_spread(inside)}"
        measured += f" (largest value {float(stable.abs().max()):.2g})"
        if draw.has_mirrors(self.group.elements):
            measured += "; m: reflected frame"
        self.write(0.25, 0.52, measured, size=8, color=draw.GRAY)

    def colorbar(self, cmap: str, norm: Normalize, label: str) -> None:
        """Draw the color scale at the right."""
        height = min(self.bottom - _TOP, 3.0)
        self.scale(self.right + 0.15, (self.bottom + _TOP - height) / 2, 0.11, height, cmap, norm, label)


def _draw_input(axes: Axes, view: View) -> None:
    clouds, values = point_clouds(view.data), view.data.x.mean(dim=1).cpu()
    draw.points(axes, clouds, values, view.angle, "gray_r", draw.color_scale(values), edgecolor=draw.FAINT)
    draw.look_at(axes, *draw.extent(clouds))


def _spread(rows: Tensor) -> str:
    """Return the largest difference between two rows."""
    largest = float((rows.amax(dim=0) - rows.amin(dim=0)).max())
    return f"{largest:.1e}" if largest else "0"


def _degrees(angle: float) -> str:
    return f"{round(math.degrees(angle), 1):g}°"
