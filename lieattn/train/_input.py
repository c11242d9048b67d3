"""The kind of clouds that a network is trained on: what a checkpoint keeps of it, and such clouds drawn at random."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn.geometry import pixel_positions
from lieattn.train._errors import UsageError

_KNOWN = frozenset({"x", "pos", "grid", "batch", "ptr"})
_MOST_NUMBERS = 256  # that are kept of an attribute


def describe_input(batch: Batch) -> dict[str, Any]:
    """Kind of the clouds of a batch, in plain values.

    Of attributes beside features and coordinates it keeps: of those of points ``shape`` (that of one point), and the
    ``values`` that integers have or the ``range`` of other numbers; of those of clouds the ``value`` of the first one.
    """
    x, pos, grid = batch.get("x"), batch.get("pos"), batch.get("grid")
    of_points, first = set(batch.node_attrs()), batch.get_example(0)
    found: dict[str, Any] = {}
    for name, value in batch.to_dict().items():
        if name in _KNOWN or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        value = value.detach().cpu()
        if name not in of_points:
            if first[name].numel() <= _MOST_NUMBERS:
                found[name] = {"value": first[name].tolist(), "integer": not value.is_floating_point()}
        elif value.is_floating_point():
            found[name] = {"shape": list(value.shape[1:]), "range": [float(value.min()), float(value.max())]}
        elif len(values := value.unique().tolist()) <= _MOST_NUMBERS:
            found[name] = {"shape": list(value.shape[1:]), "values": values}
    return {
        "points": math.ceil((batch.num_nodes or 0) / batch.num_graphs),
        "channels": None if x is None else int(x[0].numel()),
        "dim": None if pos is None else int(pos.shape[1]),
        "grid": None if grid is None else grid[0].tolist(),
        "attributes": found,
    }


def random_clouds(kind: dict[str, Any] | None, number: int, seed: int, vectors: tuple[str, ...] = ()) -> list[Data]:
    """Clouds of a kind: images of noise, or normally distributed points about a unit apart.

    Parameters
    ----------
    kind
        The entry ``"input"`` of a checkpoint's ``"lieattn"``; UsageError is raised if it is unknown.
    number, seed
        How many clouds, and of what seed.
    vectors
        Names of attributes that are drawn as normally distributed vectors.
    """
    if kind is None or kind["dim"] is None:
        raise UsageError("the checkpoint does not know the kind of its clouds: give a data set with --data")
    generator = torch.Generator().manual_seed(seed)
    clouds = []
    for _ in range(number):
        if kind["grid"] is None:
            size = kind["points"] ** (1 / kind["dim"]) / 2
            cloud = Data(pos=size * torch.randn(kind["points"], kind["dim"], generator=generator))
        else:
            cloud = Data(pos=pixel_positions(*kind["grid"]), grid=torch.tensor([kind["grid"]]))
        if kind["channels"] is not None:
            cloud.x = torch.rand(len(cloud.pos), kind["channels"], generator=generator)
        for name, attribute in kind.get("attributes", {}).items():
            cloud[name] = _drawn(attribute, len(cloud.pos), generator)
        for name in vectors:
            cloud[name] = torch.randn(cloud.pos.shape, generator=generator)
        clouds.append(cloud)
    return clouds


def _drawn(attribute: dict[str, Any], points: int, generator: torch.Generator) -> Tensor:
    if "value" in attribute:
        return torch.tensor(attribute["value"], dtype=torch.int64 if attribute["integer"] else torch.float32)
    shape = (points, *attribute["shape"])
    if "values" in attribute:
        values = torch.tensor(attribute["values"])
        return values[torch.randint(len(values), shape, generator=generator)]
    low, high = attribute["range"]
    return low + (high - low) * torch.rand(shape, generator=generator)
