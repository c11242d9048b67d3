"""The views of a microscope as one HTML file."""

from __future__ import annotations

import base64
import html
import json
import math
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_index
from lieattn.io import replace_text
from lieattn.viz._draw import bonds_of, camera_of, spacing, symbols_of, value_range
from lieattn.viz._observation import Observation
from lieattn.viz._recording import Attention, Places, rolled_out
from lieattn.viz._views import Choice, frame_name

_COLORS, _STEPS = ("magma", "viridis", "RdBu_r", "gray_r"), 48
_MOST_NUMBERS = 3_000_000  # of a page, which are 8 MB of text
_MOST_CHANNELS = 8
_SMALL = (
    "To keep this file small, weights are means over the heads and sums over the frames of the keys, fields are norms "
    "over the channels, and rollouts are left out."
)
_QUERIES = 64  # rolled out at a time
_FEW = 6  # numbers of an output that are shown


def write_page(scope: Observation, path: Path, choice: Choice) -> Path:
    """Write the page, which first shows the chosen view; see :meth:`Microscope.save`."""
    edges: list[Attention] = []
    layers = [(layer, _index(edges, layer, "source", "target")) for layer in scope.recording.attention]
    small = _is_small(scope, edges)
    start = _start(scope, choice, small)
    places: list[Places] = []
    content: dict[str, Any] = {
        "start": start,
        "attention": [_attention(layer, places, small) | {"edges": number} for layer, number in layers],
        "edges": [_sources(layer) for layer in edges],
        "rollout": [] if small else _rollouts(scope, places),
        "fields": [_field(scope, number, places, small) for number in range(len(scope.recording.fields))],
        "turns": [turn._asdict() | {"matrix": turn.matrix.tolist()} for turn in scope.turns],
        "input": _input(scope, places),
        "places": [_place(one) for one in places],
        "camera": camera_of(scope.data.pos).tolist() if places[0].pos.shape[1] > 2 else None,
        "sphere": scope.sphere,
        "bonds": bonds_of(scope.data).tolist(),
        "symbols": symbols_of(scope.data),
        "normals": _normals(scope.data),
        "colors": {name: _colors(name) for name in _COLORS},
    }
    texts = {
        "title": f"{scope.name}: attention and fields of one cloud",
        "guarantee": scope.guarantee,
        "result": _result(scope),
        "note": _SMALL if small else "",
    }
    folder = resources.files("lieattn.viz")
    page = Template((folder / "microscope.html").read_text(encoding="utf-8")).substitute(
        **{name: html.escape(text) for name, text in texts.items()},
        data=json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=(folder / "microscope.js").read_text(encoding="utf-8"),
    )
    replace_text(path, page)
    return path


def _is_small(scope: Observation, different: list[Attention]) -> bool:
    """Return whether a page has only means and sums. ValueError is raised if these are too many numbers too."""
    layers, count = scope.recording.attention, 0
    inputs = len(layers[0].places.pos) if layers else 0
    for small in (False, True):
        count = sum(2 * len(layer.source) for layer in different)
        for layer in layers:
            rolled = 0 if small else len(layer.places.pos) * layer.places.fiber * inputs
            count += rolled + (math.prod(layer.weights.shape[:2]) if small else layer.weights.numel())
        for field in scope.recording.fields:
            values = 1 + (0 if small else min(_MOST_CHANNELS, field.x.shape[-1]))
            count += 2 * len(scope.turns) * len(field.x) * field.x.shape[1] * values
        if count <= _MOST_NUMBERS:
            return small
    raise ValueError(
        f"data: expected at most {_MOST_NUMBERS:,} numbers for a page, got at least {count:,} for "
        f"{scope.data.num_nodes} points; draw a .png, or use a smaller cloud or fewer turns"
    )


def _start(scope: Observation, choice: Choice, small: bool) -> dict[str, Any]:
    """Return the initial choices of the page, after checks."""
    query, channel, number = 0, choice.channel, choice.number
    if choice.view == "field":
        fields = scope.fields(number)
        check_index("frame", choice.frame, fields.shape[2])
        check_index("channel", channel, fields.shape[3])
        known = 0 if small else min(_MOST_CHANNELS, fields.shape[3])
        if channel is not None and channel >= known:
            raise ValueError(
                f"channel: a page has the first {known} channels of this field, got {channel}; draw a .png"
            )
        number %= len(scope.recording.fields)
    else:
        found = scope.attention_layer(number)
        query = scope.query(found, choice.point, choice.frame)
        check_index("head", choice.head, found.heads)
        if small and choice.head is not None:
            raise ValueError(f"head: a page of this size has the mean over the heads, got {choice.head}; draw a .png")
        if small and choice.view == "rollout":
            raise ValueError("view: a page of this size has no rollout; draw a .png")
        number %= len(scope.recording.attention)
    shown = 0 if channel is None else channel + 1
    start = choice._asdict() | {"layer": number, "point": query, "channel": shown}
    return {**start, "turn": min(1, len(scope.turns) - 1)}


def _input(scope: Observation, places: list[Places]) -> dict[str, Any]:
    """Return the given cloud, with the mean of its features."""
    cloud, features = scope.input
    return {"places": _index(places, Places(cloud), "pos"), "values": features.tolist()}


def _attention(layer: Attention, places: list[Places], small: bool) -> dict[str, Any]:
    """Return weights ``[edges, fiber, keys, heads]`` with edges sorted by query."""
    weights = layer.weights.mean(dim=3, keepdim=True).sum(dim=2, keepdim=True) if small else layer.weights
    names = [frame_name(layer.places, h) for h in range(layer.places.fiber)]
    return {
        "name": layer.name,
        "places": _index(places, layer.places, "pos"),
        "frames": names,
        "key_frames": names if weights.shape[2] == len(names) else [f"frame {k}" for k in range(weights.shape[2])],
        "heads": weights.shape[3],
        "weights": _packed(weights),
    }


def _sources(layer: Attention) -> dict[str, Any]:
    """Return the first edge of each query, and the sources of edges as two numbers of 16 bits."""
    count = torch.bincount(layer.target, minlength=len(layer.places.pos))
    parts = torch.stack([layer.source % 65536, layer.source // 65536]).numpy().astype("<u2").tobytes()
    packed = {"shape": [2, len(layer.source)], "low": 0, "high": 65535, "data": base64.b64encode(parts).decode()}
    return {"rows": [0, *count.cumsum(0).tolist()], "source": packed}


def _rollouts(scope: Observation, places: list[Places]) -> list[dict[str, Any]]:
    """Return rolled out weights ``[points, fiber, points of the input]``, or an empty list for negative weights."""
    found, layers = [], scope.recording.attention
    if any(bool((layer.weights < 0).any()) for layer in layers):
        return []
    for number, layer in enumerate(layers):
        points, fiber = len(layer.places.pos), layer.places.fiber
        flow = torch.eye(points * fiber, dtype=torch.float64).view(-1, points, fiber)
        parts = [rolled_out(layers[: number + 1], part).sum(dim=2) for part in flow.split(_QUERIES)]
        values = torch.cat(parts).view(points, fiber, -1)
        names = [frame_name(layer.places, h) for h in range(fiber)]
        found.append(
            {
                "name": layer.name,
                "places": _index(places, layer.places, "pos"),
                "frames": names,
                "values": _packed(values),
            }
        )
    return found


def _field(scope: Observation, number: int, places: list[Places], small: bool) -> dict[str, Any]:
    """Return raw and stabilized values ``[turns, points, fiber, 1 + channels]``.

    They are the norm over all channels, followed by the first channels.
    """
    raw, stable = scope.fields(number), scope.stabilized(number)
    own = scope.recording.fields[number].places
    shown = range(0 if small else min(_MOST_CHANNELS, raw.shape[-1]))
    first, second = (torch.cat([x.norm(dim=-1, keepdim=True), x[..., : len(shown)]], dim=-1) for x in (raw, stable))
    largest = float(raw.abs().max())
    return {
        "name": scope.field_layer(number).name,
        "places": _index(places, own, "pos"),
        "frames": [frame_name(own, h) for h in range(own.fiber)],
        "channels": ["norm over the channels", *(f"channel {channel}" for channel in shown)],
        "raw": _packed(first),
        "stable": _packed(second),
        "deviation": (stable - stable[0]).abs().flatten(1).amax(dim=1).tolist(),
        "largest": largest,
        "ranges": [value_range(values, largest) for values in first.unbind(dim=-1)],
    }


def _result(scope: Observation) -> str:
    """Return the outputs of the network and the targets in words."""
    output, parts = scope.recording.output, []
    named = output._asdict() if hasattr(output, "_asdict") else output if isinstance(output, dict) else {"y": output}
    for name, found in named.items():
        target = scope.data.get(name)
        if not isinstance(found, Tensor):
            continue
        labels = isinstance(target, Tensor) and not target.is_floating_point() and found.shape[:-1] == (target.numel(),)
        if labels and found.shape[-1] > 1:
            share, label = found.detach().double().softmax(dim=-1).max(dim=-1)
            if len(label) > 1:
                told = [f"{int((label.cpu() == target.flatten().cpu()).sum())} of {len(label)} labels are right"]
            else:
                told = [f"prediction: {scope.class_name(label)} ({100 * float(share):.0f} %)"]
                told.append(f"target: {scope.class_name(target)}")
        else:
            told = [f"prediction: {_numbers(found)}"]
            if isinstance(target, Tensor) and target.numel() == found.numel():
                told.append(f"target: {_numbers(target)}")
        parts.append(", ".join(told) if name == "y" else f"{name}, {', '.join(told)}")
    return "; ".join(parts)


def _numbers(values: Tensor) -> str:
    """Return a few numbers as text, or the root mean square of many."""
    flat = values.detach().cpu().double().flatten()
    if len(flat) > _FEW:
        return f"{len(flat)} numbers, root mean square {float(flat.square().mean().sqrt()):.4g}"
    return " ".join(f"{x:.4g}" for x in flat.tolist())


def _normals(data: Data) -> list[list[float]]:
    """Return ``data.normal`` of the points of a surface in space, or an empty list."""
    normal = data.get("normal")
    if not isinstance(normal, Tensor) or normal.shape != data.pos.shape or normal.shape[1] != 3:
        return []
    return [[round(x, 3) for x in one] for one in torch.nn.functional.normalize(normal.double()).tolist()]


def _index(known: list[Any], new: Any, *names: str) -> int:
    """Return the index of an object among the known ones with equal tensors of these names. New ones are added."""
    for number, other in enumerate(known):
        if all(torch.equal(getattr(other, name), getattr(new, name)) for name in names):
            return number
    known.append(new)
    return len(known) - 1


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
