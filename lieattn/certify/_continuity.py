"""Continuity: jumps of outputs while a cloud changes along a path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

_STEPS = 64  # initial number of steps of a path
_SUSPECTS = 3  # steps that are divided: those with the largest changes, and as many that exceed their neighbors most
_ROUNDS, _PARTS = 13, 4  # how often steps are divided, and into how many parts
_STEEPER = 1e2  # a continuous output may be this many times as steep as over the initial steps

Outputs = Callable[[Sequence[Data]], dict[str, Tensor]]


@dataclass(frozen=True)
class Path:
    """A path of a cloud, from ``start`` to ``start + velocity``, both ``[points, dim]``, at constant speed."""

    label: str
    cloud: Data
    start: Tensor
    velocity: Tensor

    def at(self, times: Tensor) -> list[Data]:
        """Return the cloud at these times between 0 and 1."""
        clouds = []
        for time in times.tolist():
            cloud = copy.copy(self.cloud)
            cloud.pos = self.cloud.pos.double().clone()
            cloud.pos[:, : self.start.shape[1]] = self.start + time * self.velocity
            clouds.append(cloud)
        return clouds


@dataclass(frozen=True)
class Jump:
    """The largest jump of an output along a path.

    ``size`` is the largest absolute value of the output. Changes up to ``rounding`` also occur if it is continuous.
    """

    jump: float
    size: float
    rounding: float


def paths(cloud: Data, dim: int, generator: torch.Generator) -> Iterator[Path]:
    """Yield two paths: a point crosses and leaves the cloud; the cloud is stretched until two second moments cross."""
    pos = cloud.pos[:, :dim].double()
    centered = pos - pos.mean(dim=0)
    extent = float(centered.norm(dim=1).max())
    if len(pos) < 2 or extent == 0:
        return
    point = int(torch.randint(len(pos), (), generator=generator))
    aside = torch.randn(dim, generator=generator, dtype=torch.float64)
    # The point passes near the center, and ends at twice the radius of the cloud.
    target = -2 * extent * torch.nn.functional.normalize(centered[point] + 0.2 * extent * aside, dim=0)
    velocity = torch.zeros_like(pos)
    velocity[point] = target - centered[point]
    yield Path("a point crosses the cloud", cloud, pos, velocity)
    moments, axes = torch.linalg.eigh(centered.mT @ centered)
    if dim > 1 and moments[-2] > 1e-6 * moments[-1]:
        axis = axes[:, -2]
        factor = 1.5 * float((moments[-1] / moments[-2]).sqrt())
        yield Path("the cloud is stretched", cloud, pos, (factor - 1) * (centered @ axis)[:, None] * axis)


def largest_jumps(path: Path, outputs: Outputs) -> dict[str, Jump]:
    """Return the largest jump of each output ``[clouds | points, *]``.

    The steps in which an output changes most are divided repeatedly.
    """
    times = torch.linspace(0, 1, _STEPS + 1, dtype=torch.float64)
    values = _by_time(outputs(path.at(times)), len(times))
    steps: dict[str, Tensor] = {}
    if not values:
        return {}
    for name, value in values.items():
        changes = _change(value[1:], value[:-1])
        around = torch.nn.functional.pad(changes, (1, 1))
        ranked = changes, changes - torch.maximum(around[:-2], around[2:])
        steps[name] = torch.cat([order.topk(_SUSPECTS).indices for order in ranked]).unique()
    ends = {name: (times[step], values[name][step], values[name][step + 1]) for name, step in steps.items()}
    counts = [len(step) * (_PARTS - 1) for step in steps.values()]
    width = 1 / _STEPS
    for _ in range(_ROUNDS):
        width /= _PARTS
        inner = width * torch.arange(1, _PARTS, dtype=times.dtype)
        new = torch.cat([(begin[:, None] + inner).flatten() for begin, _, _ in ends.values()])
        new_values = _by_time(outputs(path.at(new)), len(new))
        for (name, (begin, low, high)), own in zip(ends.items(), torch.arange(len(new)).split(counts), strict=True):
            between = new_values[name][own].unflatten(0, (-1, _PARTS - 1))
            points = torch.cat([low[:, None], between, high[:, None]], dim=1)
            row, part = torch.arange(len(begin)), _change(points[:, 1:], points[:, :-1], 2).argmax(dim=1)
            ends[name] = begin + width * part.to(times.dtype), points[row, part], points[row, part + 1]
    found = {}
    for name, (_, low, high) in ends.items():
        steepest = float(_change(values[name][1:], values[name][:-1]).max())
        rounding = _STEEPER * steepest * _PARTS**-_ROUNDS
        found[name] = Jump(float(_change(high, low).max()), float(values[name].abs().max()), rounding)
    return found


def _by_time(outputs: dict[str, Tensor], times: int) -> dict[str, Tensor]:
    """Split the rows of each output into ``[times, rows of one cloud, *]``."""
    return {name: value.unflatten(0, (times, -1)) for name, value in outputs.items()}


def _change(first: Tensor, second: Tensor, batch_dims: int = 1) -> Tensor:
    """Return the largest absolute difference for each index of the first ``batch_dims`` axes, or NaN if one is NaN."""
    return (first - second).abs().flatten(batch_dims).amax(dim=-1)
