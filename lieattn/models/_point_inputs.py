"""Reading features and vectors from data, and reading out: shared by models of molecules and shapes."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lieattn._checks import check_count, check_length, check_neighborhood
from lieattn.geometry import Neighborhood, PointClouds
from lieattn.nn import CloudPool

Readout = Literal["sum", "mean", "point"]
Kind = Literal["invariant", "vector"]


def check_options(readout: Readout, kind: Kind, scale: float, **counts: int) -> None:
    """Raise ValueError, naming the argument, if options of a model are not among what is allowed."""
    for argument, option, allowed in (("readout", readout, Readout), ("kind", kind, Kind)):
        if option not in get_args(allowed):
            raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {option!r}")
    check_length("scale", scale)
    for argument, count in counts.items():
        check_count(argument, count)


def length_of(argument: str, neighborhood: Neighborhood, length: float | None) -> float:
    """The length at which functions of the distance vanish: the one given, or the neighborhood's own, checked."""
    check_neighborhood(neighborhood)
    if (found := neighborhood.scale if length is None else length) is None:
        raise ValueError(
            f"{argument}: {neighborhood} has no length of its own; give the one where radial functions vanish"
        )
    check_length(argument, found)
    return float(found)


def features(data: Any, channels: int, clouds: PointClouds) -> Tensor:
    """Invariant features ``data.x`` ``[points, channels]``, checked."""
    x = getattr(data, "x", None)
    if not isinstance(x, Tensor):
        raise TypeError(f"data: expected a torch_geometric Data or Batch with features x, got {type(data).__name__}")
    if x.shape != (clouds.num_points, channels) or not x.is_floating_point():
        raise ValueError(
            f"data.x: expected floating features [points={clouds.num_points}, {channels}], got {x.dtype} "
            f"{tuple(x.shape)}"
        )
    return x


def vectors(data: Any, names: tuple[str, ...], clouds: PointClouds) -> Tensor:
    """Vector inputs ``[points, names, dim]``, checked."""
    found = []
    for name in names:
        value = getattr(data, name, None)
        if not isinstance(value, Tensor) or value.shape != clouds.pos.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"data.{name}: expected vectors {tuple(clouds.pos.shape)} as in pos, got {got}")
        found.append(value)
    return torch.stack(found, dim=1) if found else clouds.pos.new_zeros(*clouds.pos.shape[:1], 0, clouds.pos.shape[1])


def centered(clouds: PointClouds) -> Tensor:
    """Positions relative to the mean of their cloud."""
    mean = CloudPool("mean")(clouds.pos, clouds.batch, clouds.num_clouds)
    return clouds.pos - mean[clouds.batch]


def read_out(values: Tensor, clouds: PointClouds, readout: Readout, kind: Kind) -> Tensor:
    """Reduce ``[points, outputs]`` or ``[points, outputs, dim]`` over the points, or not; one vector loses its axis."""
    if kind == "vector" and values.shape[1] == 1:
        values = values[:, 0]
    if readout == "point":
        return values
    return CloudPool(readout)(values, clouds.batch, clouds.num_clouds)
