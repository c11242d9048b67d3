"""Views of a microscope as figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lieattn._core.checks import check_index
from lieattn.geometry import PointClouds
from lieattn.viz import _draw as draw
from lieattn.viz._observation import Observation
from lieattn.viz._recording import Places

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_ROWS, _MOST_FRAMES, _MOST_FIELDS, _MOST_QUERIES = 4, 6, 4, 24
_SIDE = 2.5  # inches of a panel of an overview
_WORDS = {"attention": "Attention of a point (ring)", "rollout": "Attention of a point (ring), rolled out to the input"}


class Choice(NamedTuple):
    """What is drawn: a view, and indices, each of which may be None for a default."""

    view: str
    point: int | None = None
    frame: int | None = None
    head: int | None = None
    layer: int | None = None
    channel: int | None = None

    @property
    def number(self) -> int:
        """Number of the layer, by default of the last one."""
        return -1 if self.layer is None else self.layer


def attention_board(scope: Observation, choice: Choice) -> Figure:
    """Return a figure with rows for layers and columns for the frames of the query or, for one frame, of the keys."""
    numbers = _layers(scope, choice.layer)
    queries = {number: _query_of(scope, number, numbers[0], choice.point, choice.frame) for number in numbers}
    maps = {number: _maps(scope, choice, number, queries[number]) for number in numbers}
    return _attention_figure(scope, choice, queries, maps, _tops([maps]))


def attention_moments(scope: Observation, choice: Choice) -> Iterator[Figure]:
    """Yield a figure for each of up to 24 query points, ordered from neighbor to neighbor."""
    numbers = _layers(scope, choice.layer)
    tour = _tour(scope.attention_layer(numbers[0]).places.pos)
    tour = [tour[k] for k in _spread(len(tour), _MOST_QUERIES)]
    queries = [{n: _query_of(scope, n, numbers[0], point, choice.frame) for n in numbers} for point in tour]
    maps = [{n: _maps(scope, choice, n, query[n])[:1] for n in numbers} for query in queries]
    for query, found in zip(queries, maps, strict=True):
        yield _attention_figure(scope, choice, query, found, _tops(maps))


def _tops(maps: list[dict[int, list[Tensor]]]) -> dict[int, float]:
    """Return the largest weight of each layer in several figures."""
    return {n: max(float(values.abs().max()) for found in maps for values in found[n]) for n in maps[0]}


def field_board(scope: Observation, choice: Choice) -> Figure:
    """Return a figure with a row for each of up to four maps: the cloud, raw fields, stabilized fields."""
    field, rows = _Fields(scope, choice), _spread(len(scope.turns), _MOST_ROWS)
    columns = ["input", *(f"{name},\n{kind}" for kind in ("raw", "stabilized") for name in field.names)]
    board = draw.Board([_label(scope, row) for row in rows], columns)
    for place, row in enumerate(rows):
        field.draw(board, place, row, pulled_back=False)
        field.draw(board, place, row, pulled_back=True, first=1 + len(field.frames))
    board.title(*field.title())
    return board.figure


def field_moments(scope: Observation, choice: Choice) -> Iterator[Figure]:
    """Yield a figure for each map: the transformed cloud and its raw fields above, both pulled back below."""
    field = _Fields(scope, choice)
    for row in range(len(scope.turns)):
        board = draw.Board([f"raw,\n{_label(scope, row)}", "stabilized"], ["input", *field.names])
        for place, pulled_back in enumerate((False, True)):
            field.draw(board, place, row, pulled_back=pulled_back)
        board.title(*field.title())
        yield board.figure


class _Fields:
    """The values ``[turns, points, frames]`` of a field that are drawn, raw and stabilized."""

    def __init__(self, scope: Observation, choice: Choice) -> None:
        self.raw, self.stable = scope.fields(choice.number), scope.stabilized(choice.number)
        check_index("frame", choice.frame, self.raw.shape[2])
        check_index("channel", choice.channel, self.raw.shape[3])
        self.scope, layer = scope, scope.field_layer(choice.number)
        self.name, self.places = layer.name, layer.places
        self.frames = range(min(self.raw.shape[2], _MOST_FIELDS)) if choice.frame is None else [choice.frame]
        self.names = [frame_name(self.places, h) for h in self.frames]
        both = (self.raw, self.stable)
        if choice.channel is None:
            self.channel, values = "norm", [x.norm(dim=-1) for x in both]
        else:
            self.channel, values = f"channel {choice.channel}", [x[..., choice.channel] for x in both]
        self.values = [x[..., list(self.frames)] for x in values]
        self.norm = draw.color_scale(self.values[0], float(self.raw.abs().max()))

    def draw(self, board: draw.Board, place: int, row: int, *, pulled_back: bool, first: int = 1) -> None:
        """Draw the input and the frames from the column ``first`` on, in a place of the board."""
        turn = None if pulled_back else self.scope.turns[row].matrix
        if first == 1:
            cloud, features = self.scope.input
            self.scope.scene(cloud).draw(board.axes[place][0], cloud, features, *_gray(features), turn=turn)
            board.row_scale(place, "viridis", self.norm, self.channel)
        scene, clouds = self.scope.scene(self.places.clouds), self.places.clouds
        for axes, h, values in zip(
            board.axes[place][first:], self.frames, self.values[pulled_back][row].T, strict=False
        ):
            scene.draw(axes, clouds, values, "viridis", self.norm, turn=turn)
            _arrow(axes, self.places, h)

    def title(self) -> tuple[str, str]:
        """Return the title of the figure, and what was measured."""
        what = "norm over the channels" if self.channel == "norm" else self.channel
        inside = self.stable[torch.tensor([turn.inside for turn in self.scope.turns])]
        measured = f"stabilized fields of {len(self.stable)} transformed clouds {_spread_of(self.raw, self.stable)}"
        if len(inside) < len(self.stable):
            within = float((inside - inside[0]).abs().max())
            measured += f"; those of maps in the group of the network by {within:.1e}"
        return f"Field of layer {self.name}, {what}: {self.scope.name}", measured


def _spread_of(raw: Tensor, stable: Tensor) -> str:
    apart, largest = float((stable - stable[0]).abs().max()), float(raw.abs().max())
    return f"differ by {apart:.1e} (largest value of a channel {largest:.2g})"


def overview(scope: Observation, point: int | None) -> Figure:
    """Return a figure of the features, the last field, also for a transformed cloud, and the attention of layers."""
    layers = [] if not scope.recording.attention else _layers(scope, None)
    rows, columns, title = 1 + bool(layers), max(3, len(layers)), scope.name
    figure = draw.blank_figure(_SIDE * columns + 0.6, _SIDE * rows + 0.7, "constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
        axes.set_aspect("equal")
    _titled(scope, panels[0][0], *scope.input, "input, mean over channels", "cividis")
    if scope.recording.fields:
        fields, last = scope.fields(), scope.field_layer(-1)
        raw, clouds = fields[:2].norm(dim=-1).mean(dim=2), last.places.clouds
        norm = draw.color_scale_from_zero(raw)
        _titled(scope, panels[0][1], clouds, raw[0], f"field of {last.name}, norm over channels", "viridis", norm)
        if len(raw) > 1:
            turn = scope.turns[1]
            told = f"the same, {turn.label}" + (f"\n({turn.outside})" if turn.outside else "")
            _titled(scope, panels[0][2], clouds, raw[1], told, "viridis", norm, turn=turn.matrix)
            title += f": fields of transformed clouds, pulled back, {_spread_of(fields, scope.stabilized())}"
    for axes, number in zip(panels[-1], layers, strict=False):
        found, query = scope.attention_layer(number), _query_of(scope, number, layers[0], point, None)
        values = scope.attention(query, layer=number).sum(dim=1)
        _titled(scope, axes, found.places.clouds, values, f"attention of {found.name}", "magma", query=query)
    figure.suptitle(title, fontsize=9)
    return figure


def _titled(
    scope: Observation,
    axes: Axes,
    clouds: PointClouds,
    values: Tensor,
    title: str,
    cmap: str,
    norm: Any = None,
    **options: Any,
) -> None:
    """Draw a panel with a title and its own color scale, which starts at 0 or is symmetric about 0."""
    norm = draw.color_scale_from_zero(values) if norm is None else norm
    cmap = "RdBu_r" if bool((values < 0).any()) else cmap
    scope.scene(clouds).draw(axes, clouds, values, cmap, norm, **options)
    axes.set_title(title, fontsize=8, color=draw.INK)
    draw.color_bar(axes.get_figure(), cmap, norm, ax=axes, shrink=0.6, pad=0.02)  # type: ignore[arg-type]


def _attention_figure(
    scope: Observation,
    choice: Choice,
    queries: dict[int, int],
    maps: dict[int, list[Tensor]],
    tops: Mapping[int, float],
) -> Figure:
    """Return a figure of maps ``[points]``. The first column is for all frames together."""
    width, frame = max(map(len, maps.values())), choice.frame
    first, at_input = scope.attention_layer(next(iter(maps))), scope.attention_layer(0)
    labelled = at_input if frame is not None and choice.view == "rollout" else first
    frames = [frame_name(labelled.places, h) for h in range(width - 1)]
    together = "mean over frames" if frame is None else "sum over frames of keys"
    columns = ["input", together if frames else "attention", *frames]
    board = draw.Board([scope.attention_layer(number).name for number in maps], columns)
    cloud, features = scope.input
    ringed = _in_input(cloud.pos, first.places.pos, queries[next(iter(maps))])
    scope.scene(cloud).draw(board.axes[0][0], cloud, features, *_gray(features), query=ringed)
    for row, (number, found) in enumerate(maps.items()):
        queried = scope.attention_layer(number)
        keys = (at_input if choice.view == "rollout" else queried).places
        norm = draw.color_scale_from_zero(torch.stack(found), tops[number])
        cmap = "RdBu_r" if bool((torch.stack(found) < 0).any()) else "magma"
        query = _nearest(keys.pos, queried.places.pos[queries[number]])
        for column, (axes, values) in enumerate(zip(board.axes[row][1:], found, strict=False)):
            scope.scene(keys.clouds).draw(axes, keys.clouds, values, cmap, norm, query=query)
            if column and frame is None:
                _arrow(axes, queried.places, column - 1)
        board.row_scale(row, cmap, norm, "weight")
    last, point = scope.attention_layer(next(reversed(queries))), next(reversed(queries.values()))
    of = ["the mean over its frames, and each of them" if frame is None else "by frames of the keys"] * (width > 1)
    if frame is not None and last.places.fiber > 1:
        of = [", ".join([f"its {frame_name(last.places, frame)}", *of])]
    heads = "mean over the heads" if choice.head is None else f"head {choice.head}"
    told = "; ".join([f"point {point} of {last.name}", *of, heads])
    board.title(f"{_WORDS[choice.view]}: {scope.name}", told)
    return board.figure


def _maps(scope: Observation, choice: Choice, layer: int, point: int) -> list[Tensor]:
    """Return weights ``[points]`` for all frames, then for each frame of the query or, for one frame, of the keys."""

    def weights(h: int | None) -> Tensor:
        if choice.view == "rollout":
            return scope.rollout(point, frame=h, layer=layer)
        return scope.attention(point, frame=h, head=choice.head, layer=layer)

    found = weights(choice.frame)
    if choice.frame is not None:
        parts = list(found.T[:_MOST_FRAMES]) if found.shape[1] > 1 else []
    else:
        fiber = scope.attention_layer(layer).places.fiber
        parts = [weights(h).sum(dim=1) for h in range(min(fiber, _MOST_FRAMES))] if fiber > 1 else []
    return [found.sum(dim=1), *parts]


def _layers(scope: Observation, layer: int | None) -> list[int]:
    """Return the number of the chosen layer, or those of up to four layers."""
    scope.attention_layer(-1 if layer is None else layer)
    count = len(scope.recording.attention)
    return _spread(count, _MOST_ROWS) if layer is None else [layer % count]


def _query_of(scope: Observation, layer: int, indexed: int, point: int | None, frame: int | None) -> int:
    """Return the query of a layer that is nearest to ``point`` of another layer."""
    found, other = scope.attention_layer(layer), scope.attention_layer(indexed)
    point = scope.query(other, point, frame if other.places.fiber > 1 else None)
    scope.query(found, None, frame)
    return _nearest(found.places.pos, other.places.pos[point])


def _in_input(pos: Tensor, places: Tensor, point: int) -> int:
    """Return the point of the input that corresponds to a point of a layer.

    If the layer has other points, it is the nearest one. Networks may shift and scale their input, so both clouds are
    compared relative to their means, in units of the distances of their farthest points.
    """
    if len(pos) == len(places):
        return point
    centered = [cloud - cloud.mean(dim=0) for cloud in (pos, places)]
    units = [cloud / cloud.norm(dim=1).max().clamp(min=1e-30) for cloud in centered]
    return _nearest(units[0], units[1][point])


def _nearest(pos: Tensor, place: Tensor) -> int:
    return int((pos - place).norm(dim=1).argmin())


def _tour(pos: Tensor) -> list[int]:
    """Return the points in an order in which each is the nearest remaining point to the previous one."""
    left, tour = set(range(1, len(pos))), [0]
    while left:
        here = pos[tour[-1]]
        following = min(left, key=lambda point: float((pos[point] - here).norm()))
        left.remove(following)
        tour.append(following)
    return tour


def _spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced numbers below a count, including the first and the last."""
    return [round(k * (count - 1) / (most - 1)) for k in range(most)] if count > most else list(range(count))


def _gray(features: Tensor) -> tuple[str, Any]:
    """Return the colors of the input. If all features are equal, all points are gray."""
    ends = torch.stack([features.min(), features.max()])
    if bool(ends[0] == ends[1]):
        ends = ends + torch.tensor([-0.4, 0.6])
    return "gray_r", draw.color_scale(ends)


def _arrow(axes: Axes, places: Places, h: int) -> None:
    """Draw the frame h in the corner, if frames are the same over all points of the plane."""
    if places.frames is not None and places.frames.shape[0] == 1 and places.frames.shape[-1] == 2:
        scale = torch.linalg.det(places.frames[0]).abs().sqrt()[:, None, None]
        draw.frame(axes, places.frames[0] / scale, h)


def frame_name(places: Places, h: int) -> str:
    """Return the number of a frame and, in the plane, its angle, followed by m if it contains a reflection."""
    frames = places.frames
    if frames is None or len(frames) > 1 or frames.shape[-1] != 2:
        return f"frame {h}" if places.fiber > 1 else "field"
    return f"frame {h} ({draw.element_name(frames[0, h])})"


def _label(scope: Observation, row: int) -> str:
    turn = scope.turns[row]
    told = f"{turn.label}\n({turn.outside})" if turn.outside else turn.label
    return told.replace(" by ", "\nby ").replace(" of ", "\nof ").replace(", ", ",\n")
