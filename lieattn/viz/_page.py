"""The views of a microscope as one HTML file."""

from __future__ import annotations

import base64
import html
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lieattn._core.checks import check_index
from lieattn.io import replace_text
from lieattn.viz._draw import bonds_of, camera_of, spacing, symbols_of, value_range
from lieattn.viz._observation import Observation
from lieattn.viz._recording import Attention, Places, rolled_out
from lieattn.viz._views import Choice, frame_name

_COLORS, _STEPS = ("magma", "viridis", "RdBu_r", "gray_r"), 48
_MOST_NUMBERS = 3_000_000  # in one array, which is 8 MB of text
_MOST_CHANNELS = 8
_QUERIES = 64  # rolled out at a time


def write_page(scope: Observation, path: Path, choice: Choice) -> Path:
    """Write the page, which first shows the chosen view; see :meth:`Microscope.save`."""
    start = _start(scope, choice)
    places: list[Places] = []
    content: dict[str, Any] = {
        "start": start,
        "attention": [_attention(layer, places, scope) for layer in scope.recording.attention],
        "rollout": _rollouts(scope, places),
        "fields": [_field(scope, number, places) for number in range(len(scope.recording.fields))],
        "turns": [turn._asdict() | {"matrix": turn.matrix.tolist()} for turn in scope.turns],
        "input": _input(scope, places),
        "places": [_place(one) for one in places],
        "camera": camera_of(scope.data.pos).tolist() if places[0].pos.shape[1] > 2 else None,
        "sphere": scope.sphere,
        "bonds": bonds_of(scope.data).tolist(),
        "symbols": symbols_of(scope.data),
        "colors": {name: _colors(name) for name in _COLORS},
    }
    moves = "Drag, or use Shift and the arrow keys, to rotate. " if content["camera"] else ""
    texts = {
        "title": f"{scope.name}: attention and fields of one cloud",
        "guarantee": scope.guarantee,
        "help": "Click a point to make it the query. If a picture has the focus, the arrow keys select the next or "
        f"previous point or transformation. {moves}Weights are means over the frames of the query and the heads, and "
        "sums over the frames of the keys, unless one of them is selected.",
    }
    folder = resources.files("lieattn.viz")
    page = Template((folder / "microscope.html").read_text(encoding="utf-8")).substitute(
        **{name: html.escape(text) for name, text in texts.items()},
        data=json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=(folder / "microscope.js").read_text(encoding="utf-8"),
    )
    replace_text(path, page)
    return path


def _start(scope: Observation, choice: Choice) -> dict[str, Any]:
    """Return the initial choices of the page, after checks."""
    query, channel, number = 0, choice.channel, choice.number
    if choice.view == "field":
        fields = scope.fields(number)
        check_index("frame", choice.frame, fields.shape[2])
        check_index("channel", channel, fields.shape[3])
        known = _known_channels(scope, fields)
        if channel is not None and channel >= known:
            raise ValueError(
                f"channel: a page has the first {known} channels of this field, got {channel}; draw a .png"
            )
        number %= len(scope.recording.fields)
    else:
        found = scope.attention_layer(number)
        query = scope.query(found, choice.point, choice.frame)
        check_index("head", choice.head, found.heads)
        number %= len(scope.recording.attention)
    shown = 0 if channel is None else channel + 1
    start = choice._asdict() | {"layer": number, "point": query, "channel": shown}
    return {**start, "turn": min(1, len(scope.turns) - 1)}


def _input(scope: Observation, places: list[Places]) -> dict[str, Any]:
    """Return the given cloud, with the mean of its features."""
    cloud, features = scope.input
    return {"places": _index(places, Places(cloud, None, 1)), "values": features.tolist()}


def _attention(layer: Attention, places: list[Places], scope: Observation) -> dict[str, Any]:
    """Return weights ``[edges, fiber, keys, heads]`` with edges sorted by query.

    If there are too many weights, they are averaged over the heads and then summed over the keys.
    """
    weights = layer.weights
    if weights.numel() > _MOST_NUMBERS:
        weights = weights.mean(dim=-1, keepdim=True)
    if weights.numel() > _MOST_NUMBERS:
        weights = weights.sum(dim=2, keepdim=True)
    _check_size(scope, weights)
    count = torch.bincount(layer.target, minlength=len(layer.places.pos))
    names = [frame_name(layer.places, h) for h in range(layer.places.fiber)]
    return {
        "name": layer.name,
        "places": _index(places, layer.places),
        "frames": names,
        "key_frames": names if weights.shape[2] == len(names) else [f"frame {k}" for k in range(weights.shape[2])],
        "heads": weights.shape[3],
        "rows": [0, *count.cumsum(0).tolist()],
        "source": layer.source.tolist(),
        "weights": _packed(weights),
    }


def _rollouts(scope: Observation, places: list[Places]) -> list[dict[str, Any]]:
    """Return rolled out weights ``[points, fiber, points of the input]``, or an empty list for negative weights."""
    found, layers = [], scope.recording.attention
    if any(bool((layer.weights < 0).any()) for layer in layers):
        return []
    for number, layer in enumerate(layers):
        points, fiber = len(layer.places.pos), layer.places.fiber
        inputs = len(layers[0].places.pos)
        together = points * fiber * inputs > _MOST_NUMBERS
        flow = torch.eye(points * fiber, dtype=torch.float64).view(-1, points, fiber)
        if together:
            flow = flow.view(points, fiber, points, fiber).mean(dim=1)
        parts = [rolled_out(layers[: number + 1], part).sum(dim=2) for part in flow.split(_QUERIES)]
        values = torch.cat(parts).view(points, -1, inputs)
        _check_size(scope, values)
        names = [""] if together else [frame_name(layer.places, h) for h in range(fiber)]
        found.append(
            {"name": layer.name, "places": _index(places, layer.places), "frames": names, "values": _packed(values)}
        )
    return found


def _field(scope: Observation, number: int, places: list[Places]) -> dict[str, Any]:
    """Return raw and stabilized values ``[turns, points, fiber, 1 + channels]``.

    They are the norm over all channels, followed by the first channels.
    """
    raw, stable = scope.fields(number), scope.stabilized(number)
    own, shown = scope.recording.fields[number].places, range(_known_channels(scope, raw))
    first, second = (torch.cat([x.norm(dim=-1, keepdim=True), x[..., : len(shown)]], dim=-1) for x in (raw, stable))
    _check_size(scope, first)
    largest = float(raw.abs().max())
    return {
        "name": scope.field_layer(number).name,
        "places": _index(places, own),
        "frames": [frame_name(own, h) for h in range(own.fiber)],
        "channels": ["norm over the channels", *(f"channel {channel}" for channel in shown)],
        "raw": _packed(first),
        "stable": _packed(second),
        "deviation": (stable - stable[0]).abs().flatten(1).amax(dim=1).tolist(),
        "largest": largest,
        "ranges": [value_range(values, largest) for values in first.unbind(dim=-1)],
    }


def _known_channels(scope: Observation, field: Tensor) -> int:
    """Return the number of channels of a field ``[turns, points, fiber, channels]`` that the page contains."""
    fitting = _MOST_NUMBERS // (field[..., 0].numel() * len(scope.recording.fields)) - 1
    return max(0, min(_MOST_CHANNELS, fitting, field.shape[-1]))


def _check_size(scope: Observation, values: Tensor) -> None:
    if values.numel() > _MOST_NUMBERS:
        raise ValueError(
            f"data: expected at most {_MOST_NUMBERS:,} numbers per layer for a page, got {values.numel():,} for "
            f"{scope.data.num_nodes} points; draw a .png, or use a smaller cloud"
        )


def _index(places: list[Places], own: Places) -> int:
    """Return the index of a set of points among those of the page. New points are added."""
    for number, known in enumerate(places):
        if known.pos.shape == own.pos.shape and torch.equal(known.pos, own.pos):
            return number
    places.append(own)
    return len(places) - 1


def _place(places: Places) -> dict[str, Any]:
    clouds = places.clouds
    flat = clouds.pos.shape[1] < 3
    pos = [[round(x, 5) for x in point] for point in clouds.pos[:, :3].tolist()]
    return {"pos": pos, "square": flat and clouds.grid is not None, "spacing": spacing(clouds)}


def _packed(values: Tensor) -> dict[str, Any]:
    """Encode finite numbers as 16 bits between the lowest and the highest, little-endian, in base64."""
    if not bool(values.isfinite().all()):
        raise ValueError("network: expected finite attention and fields for this cloud, got NaN or infinity")
    low, high = float(values.min()), float(values.max())
    part = (values - low) / ((high - low) or 1.0)
    data = (65535 * part).round().numpy().astype("<u2").tobytes()
    return {"shape": list(values.shape), "low": low, "high": high, "data": base64.b64encode(data).decode()}


def _colors(name: str) -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(color) for color in colormaps[name](np.linspace(0, 1, _STEPS))]
