"""Whether forces are the gradient of an energy: of the one that is given with them, or of any."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn.certify._certificate import Row
from lieattn.certify._moves import Kind
from lieattn.certify._probe import Probe

_ENERGY, _FORCES = "energy", ("force", "forces")
_DIRECTIONS = 3
_FIRST_STEP = 0.02  # of the distance of the farthest point from the center
_HALVINGS = 8
_TOLERANCE = 1e-5  # of differences, relative to the largest of them: far above their error, far below any mistake
_ROUNDINGS = 100.0  # of an energy, in float64, that a difference of it over the first step may show


class _Pair(NamedTuple):
    energy: str | None
    forces: str


def conservation(
    probe: Probe, clouds: list[Data], outputs: Mapping[str, Kind], judged: bool, generator: torch.Generator
) -> Iterator[Row]:
    """Rows of outputs named ``force`` or ``forces``, by central differences that are extrapolated to step 0.

    Next to an ``energy`` they are compared with minus its gradient, which must be equal; alone, the asymmetry of their
    derivatives is told. Differences are in float64.
    """
    pair = _pair(probe(clouds[:1]), outputs, clouds[0])
    if pair is None or probe.dtype != torch.float64:
        return
    cloud = min(clouds, key=lambda cloud: len(cloud.pos))
    pos = cloud.pos.detach().cpu().double()
    extent = float((pos - pos.mean(dim=0)).norm(dim=1).max()) or 1.0
    worst, size, rounding = 0.0, 0.0, 0.0
    for _ in range(_DIRECTIONS):
        ways = torch.randn(2, *pos.shape, generator=generator, dtype=torch.float64)
        ways = ways / ways.flatten(1).norm(dim=1)[:, None, None]
        if pair.energy is not None:
            slope = _derivative(probe, cloud, ways[0], pair.energy, extent)
            here = probe([cloud])
            along = (here[pair.forces] * ways[0]).sum()
            digit = torch.finfo(torch.float64).eps * float(here[pair.energy].abs().max())
            rounding = _ROUNDINGS * digit / (_FIRST_STEP * extent)
            worst, size = max(worst, float((slope + along).abs())), max(size, float(slope.abs()), float(along.abs()))
        else:
            first, second = (_derivative(probe, cloud, way, pair.forces, extent) for way in ways)
            mixed = (first * ways[1]).sum(), (second * ways[0]).sum()
            worst = max(worst, float((mixed[0] - mixed[1]).abs()))
            size = max(size, *(float(value.abs()) for value in mixed))
    allowed = _TOLERANCE * size + rounding if pair.energy is not None and judged else None
    check = "curl" if pair.energy is None else "gradient"
    passed = None if allowed is None else worst <= allowed
    yield Row(check, f"{_DIRECTIONS} directions", pair.forces, "float64", worst, worst / (size or 1.0), allowed, passed)


def _pair(given: Mapping[str, Tensor], outputs: Mapping[str, Kind], cloud: Data) -> _Pair | None:
    forces = next((name for name in _FORCES if name in given), None)
    if forces is None or given[forces].shape != cloud.pos.shape or outputs.get(forces, "vector") == "invariant":
        return None
    energy = given.get(_ENERGY)
    return _Pair(None if energy is None or energy.numel() != 1 else _ENERGY, forces)


def _derivative(probe: Probe, cloud: Data, way: Tensor, name: str, extent: float) -> Tensor:
    """Derivative of an output along a way: Ridders' extrapolation of central differences, the most certain of them."""
    step = _FIRST_STEP * extent
    rows: list[Tensor] = []
    best, least = torch.zeros(()), torch.inf
    for _ in range(_HALVINGS):
        ends = [_moved(cloud, sign * step * way) for sign in (1, -1)]
        values = [probe([end])[name] for end in ends]
        row = [(values[0] - values[1]) / (2 * step)]
        for order, before in enumerate(rows, start=1):
            row.append(row[-1] + (row[-1] - before) / (4.0**order - 1))
        if rows:
            uncertain = float((row[-1] - rows[-1]).abs().max())
            if uncertain < least:
                best, least = row[-1], uncertain
        else:
            best = row[-1]
        rows, step = row, step / 2
    return best.squeeze() if best.numel() == 1 else best


def _moved(cloud: Data, by: Tensor) -> Data:
    other = copy.copy(cloud)
    other.pos = cloud.pos.detach().cpu().double() + by
    return other
