"""One picture of what any model makes of one cloud, in the plane or in space: its field, and its attention."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._checks import check_arguments
from lieattn.certify import moved
from lieattn.geometry import LiftedGraph, PointClouds, point_clouds
from lieattn.groups import SO, FiniteGroup, O, SemidirectProduct
from lieattn.models import Network, Symmetry
from lieattn.nn import GroupAttention
from lieattn.viz import _draw as draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE = 2.5  # inches of a panel
_MOST_LAYERS = 4


@dataclass(frozen=True)
class _Field:
    """Numbers at the points that a layer works on."""

    clouds: PointClouds
    values: Tensor  # [points]


def model_picture(network: nn.Module, data: Data, *, point: int | None = None, seed: int = 0) -> Figure:
    """Draw what a network makes of one cloud: its last field, the field of the cloud turned, and its attention.

    Above: the features of the points; the norm of the field behind the last layer, over channels, and averaged over the
    frames of each point; and the same for the cloud turned by an element of the group that the network states, drawn at
    the turned points. The title gives the largest difference between the two fields, as measured. Of a network without
    a :meth:`~lieattn.models.Network.field`, it is the last values ``[points, *]`` of one of its modules.

    Below: how much one point, with a ring around it, attends to each point, for up to four layers of attention from the
    first to the last, averaged over heads and frames.

    Parameters
    ----------
    network
        Any model; what is drawn is a copy in eval mode.
    data
        One cloud with ``pos`` ``[points, dim]``, of which the first two or three coordinates are drawn.
    point
        Index of the point that attends; the one nearest to the center if absent.
    seed
        Of the element of a Lie group.

    Raises
    ------
    TypeError, ValueError
        If ``data`` is not one cloud with points, there is no such point, or no module has values at points.
    """
    draw.require_matplotlib()
    check_arguments(model_picture, locals())
    clouds = point_clouds(data)
    if clouds.num_clouds != 1 or clouds.num_points == 0:
        raise ValueError(f"data: expected one cloud with points, got {clouds}")
    if point is not None and not 0 <= point < clouds.num_points:
        raise ValueError(f"point: expected one of 0..{clouds.num_points - 1}, got {point}")
    network = copy.deepcopy(network).eval()
    field, layers = _observed(network, data)
    turn, name = _turn(getattr(network, "symmetry", None), clouds.pos.shape[1], seed)
    kinds = {"pos": "position", "cell": "vector", **dict.fromkeys(getattr(network, "vector_inputs", ()), "vector")}
    after = _observed(network, moved(data, turn, kinds=kinds))[0] if len(turn) == clouds.pos.shape[1] else None
    chosen = [layers[round(k * (len(layers) - 1) / 3)] for k in range(_MOST_LAYERS)] if len(layers) > 4 else layers
    maps = [(label, found) for label, layer in chosen for found in _attention(point, *layer)]
    columns = max(3, len(maps))
    spatial = clouds.pos.shape[1] > 2
    figure = draw.blank_figure(_SIDE * columns + 0.6, _SIDE * (1 + bool(maps)) + 0.7)
    figure.set_layout_engine("constrained")
    shape: dict[str, Any] = {"squeeze": False, "subplot_kw": {"projection": "3d"} if spatial else {}}
    panels = figure.subplots(1 + bool(maps), columns, **shape)
    for axes in panels.flat:
        axes.set_axis_off()
    x = data.get("x")
    features = clouds.pos.new_ones(clouds.num_points) if x is None else x.detach().float().flatten(1).mean(dim=1)
    _panel(panels[0][0], _Field(clouds, features), "features, mean over channels", "cividis")
    _panel(panels[0][1], field, "field, norm over channels", "viridis")
    title = type(network).__name__
    if after is not None:
        angle = math.atan2(float(turn[1, 0]), float(turn[0, 0])) if len(turn) == 2 else 0.0
        _panel(panels[0][2], after, name, "viridis", top=float(field.values.max()), angle=angle)
        if (apart := _difference(field, after, turn)) is not None:
            largest = float(field.values.abs().max())
            title += f": the field of the turned cloud differs by {apart:.1e} (largest value {largest:.2g})"
    for axes, (label, (found, query)) in zip(panels[-1], maps, strict=False):
        _panel(axes, found, label, "magma", query=query)
    figure.suptitle(title, fontsize=9)
    return figure


def _observed(network: nn.Module, data: Data) -> tuple[_Field, list[tuple[str, tuple[Any, ...]]]]:
    """Field behind the last layer; name of every layer of attention, with itself and what it was given."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    values: list[Tensor] = []
    points = int(data.num_nodes or 0)

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim > 1 and len(output) == points and output.is_floating_point():
            values.append(output.detach())

    with torch.no_grad():
        hooks = []
        for name, module in network.named_modules():
            if isinstance(module, GroupAttention):
                hooks.append(module.register_forward_pre_hook(_recorder(calls, name, module)))
            hooks.append(module.register_forward_hook(keep))
        given = Batch.from_data_list([data])
        inner = next((module for module in network.modules() if isinstance(module, Network)), None)
        if inner is None:
            network(given)
        else:
            x, graph = inner.field(given)
        for hook in hooks:
            hook.remove()
    if inner is not None:
        return _Field(graph, x.float().norm(dim=-1).mean(dim=1).cpu()), calls
    if not values:
        raise ValueError(f"network: nothing in {type(network).__name__} has values at the {points} points")
    return _Field(point_clouds(data), values[-1].float().flatten(1).norm(dim=1).cpu()), calls


def _difference(field: _Field, after: _Field, turn: Tensor) -> float | None:
    """Largest difference at points that belong together; None where some do not, as of lattices that are not kept."""
    before, now = (found.clouds.pos.detach().cpu().double() for found in (field, after))
    before, now = (before - before.mean(dim=0)) @ turn.mT, now - now.mean(dim=0)
    if len(before) != len(now):
        return None
    apart, partner = torch.cdist(before, now).min(dim=1)
    if float(apart.max()) > 1e-4 * float(now.abs().max()):
        return None
    return float((after.values[partner] - field.values).abs().max())


def _recorder(calls: list[tuple[str, tuple[Any, ...]]], name: str, module: nn.Module) -> Any:
    return lambda _, given: calls.append((name, (module, *given)))


def _attention(point: int | None, module: Any, x: Tensor, graph: LiftedGraph, *rest: Any) -> Iterator[Any]:
    """Weights ``[points]`` of one point, and which one it is; nothing where it has no neighbors."""
    clouds = graph.pos.float()
    query = int((clouds - clouds.mean(dim=0)).norm(dim=1).argmin()) if point is None else point
    if query >= graph.num_points:
        return
    with torch.no_grad():
        weights = module.attend(x, graph, *rest, return_weights=True)[1].float().flatten(1).mean(dim=1)
    positions = getattr(module, "positions", None)
    neighbors = graph.neighbors if positions is None else positions.edges(graph).neighbors
    first, end = neighbors.row_ptr[query : query + 2].tolist()
    # Where borders are zeros there is one point more, outside.
    found = weights.new_zeros(neighbors.num_points).index_add_(0, neighbors.source[first:end], weights[first:end])
    found = found[: graph.num_points]
    if first < end:
        yield _Field(graph, (found / found.sum() if bool((found >= 0).all()) else found).cpu()), query


def _turn(symmetry: Any, dim: int, seed: int) -> tuple[Tensor, str]:
    """A turn in the group that a network states, or any other one, and what it is in words."""
    generator = torch.Generator().manual_seed(seed)
    group = symmetry.group if isinstance(symmetry, Symmetry) else symmetry
    turns = group.stabilizer if isinstance(group, SemidirectProduct) else group
    if isinstance(turns, FiniteGroup) and turns.order > 1:
        return turns.elements[1], f"turned by element 1 of {turns.name}"
    if isinstance(turns, SO | O):
        return SO(turns.dim).sample(generator=generator, dtype=torch.float64), f"turned by an element of {turns.name}"
    matrix = SO(min(dim, 3)).sample(generator=generator, dtype=torch.float64) if dim > 1 else -torch.eye(1).double()
    return matrix, "turned, which is not in its group"


def _panel(
    axes: Axes,
    field: _Field,
    title: str,
    cmap: str,
    *,
    top: float | None = None,
    query: int | None = None,
    angle: float = 0.0,
) -> None:
    """Points in colors, with a scale of their own from 0, or about 0 where there are negative values."""
    from matplotlib.cm import ScalarMappable

    values = field.values.cpu()
    norm, cmap = draw.color_scale_from_zero(values, top), ("RdBu_r" if bool((values < 0).any()) else cmap)
    axes.set_title(title, fontsize=8, color=draw.INK)
    if field.clouds.pos.shape[1] > 2:
        _in_space(axes, field, cmap, norm, query)
    else:
        draw.points(axes, draw.in_plane(field.clouds), values, angle, cmap, norm)
        axes.set_aspect("equal")
        draw.look_at(axes, *draw.extent(draw.in_plane(field.clouds)))
        if query is not None:
            draw.ring(axes, draw.in_plane(field.clouds), query)
    bar = axes.figure.colorbar(ScalarMappable(norm, cmap), ax=axes, shrink=0.6, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=2, color=draw.GRAY, labelcolor=draw.INK)
    bar.ax.set_frame_on(False)


def _in_space(axes: Any, field: _Field, cmap: str, norm: Any, query: int | None) -> None:
    """Points as spheres that are drawn from the far ones to the near ones, without perspective."""
    pos = field.clouds.pos[:, :3].detach().cpu().double()
    size = min(160.0, 4000.0 / len(pos))
    style = {"cmap": cmap, "norm": norm, "s": size, "edgecolors": draw.GRAY, "linewidths": 0.3, "depthshade": False}
    axes.scatter(*pos.T.numpy(), c=field.values.cpu().numpy(), **style)
    if query is not None:
        place = pos[[query]].T.numpy()
        axes.scatter(*place, s=2.2 * size, facecolors="none", edgecolors=draw.COLORS[1], linewidths=1.5)
    center = pos.mean(dim=0)
    reach = float((pos - center).norm(dim=1).max()) or 1.0
    for set_limits, middle in zip((axes.set_xlim, axes.set_ylim, axes.set_zlim), center.tolist(), strict=True):
        set_limits(middle - reach, middle + reach)
    axes.set_proj_type("ortho")
    axes.set_box_aspect((1, 1, 1), zoom=0.95)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    for one, other in itertools.combinations(corners, 2):  # of a cube, in which depth can be seen
        if int((one != other).sum()) == 1:
            line = center + reach * torch.stack([one, other])
            axes.plot(*line.T.numpy(), color=draw.FAINT, linewidth=0.6, zorder=0)
