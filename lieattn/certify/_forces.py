"""Tests of whether forces are the gradient of an energy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn.certify._certificate import Row
from lieattn.certify._moves import Kind, center_and_extent, shifted
from lieattn.certify._probe import Probe

_ENERGY, _FORCES = "energy", ("force", "forces")
_DIRECTIONS = 3
_FIRST_STEP = 0.02  # relative to the distance of the farthest point from the center
_HALVINGS = 20  # of the step at most, for energies of networks with large weights
_STRONG = 1e-3  # least forces that are tested, relative to the largest ones
_TOLERANCE = 1e-5  # relative to the largest difference: far above numerical errors, far below those of wrong forces
_ENOUGH = 1e-3 * _TOLERANCE  # estimated error at which no smaller step is needed
_ROUNDINGS = 100.0  # allowed error of a difference of energies over the first step, in units of their rounding


def conservation(
    probe: Probe, clouds: list[Data], outputs: Mapping[str, Kind], judged: bool, generator: torch.Generator
) -> Iterator[Row]:
    """Yield a row for the output ``force`` or ``forces``, from central differences in float64, extrapolated to step 0.

    If there is an output ``energy``, the forces must be equal to minus its gradient. Otherwise, the row contains the
    asymmetry of their derivatives, which is not judged.
    """
    given, cloud = probe(clouds[:1]), clouds[0]
    forces = next((name for name in _FORCES if name in given), None)
    if forces is None or given[forces].shape != cloud.pos.shape or outputs.get(forces, "vector") == "invariant":
        return
    if probe.dtype != torch.float64:
        return
    has_energy = _ENERGY in given and given[_ENERGY].numel() == 1
    cloud = _smallest(probe, clouds, forces)
    extent = center_and_extent(cloud, cloud.pos.shape[1])[1] or 1.0
    here = probe([cloud])
    pairs = []  # of numbers that should be equal
    for _ in range(_DIRECTIONS):
        directions = torch.randn(2, *cloud.pos.shape, generator=generator, dtype=torch.float64)
        directions = directions / directions.flatten(1).norm(dim=1)[:, None, None]
        if has_energy:
            slope = _derivative(probe, cloud, directions[0], _ENERGY, extent)
            pairs.append(torch.stack([slope, -(here[forces] * directions[0]).sum()]))
        else:
            slopes = [_derivative(probe, cloud, one, forces, extent) for one in directions]
            pairs.append(torch.stack([(slopes[0] * directions[1]).sum(), (slopes[1] * directions[0]).sum()]))
    numbers = torch.stack(pairs)
    worst, size = float(numbers.diff(dim=1).abs().max()), float(numbers.abs().nan_to_num(0.0).max())
    allowed = None
    if has_energy and judged:
        rounding = torch.finfo(torch.float64).eps * float(here[_ENERGY].abs().max())
        allowed = _TOLERANCE * size + _ROUNDINGS * rounding / (_FIRST_STEP * extent)
    check = "gradient" if has_energy else "curl"
    passed = None if allowed is None else worst <= allowed
    yield Row(check, f"{_DIRECTIONS} directions", forces, "float64", worst, worst / (size or 1.0), allowed, passed)


def _smallest(probe: Probe, clouds: list[Data], forces: str) -> Data:
    """Return the smallest cloud with forces that are not much weaker than elsewhere, as for one atom of a crystal."""
    sizes = [float(probe([cloud])[forces].abs().max()) for cloud in clouds]
    chosen = [cloud for cloud, size in zip(clouds, sizes, strict=True) if not size < _STRONG * max(sizes)]
    return min(chosen, key=lambda cloud: len(cloud.pos))


def _derivative(probe: Probe, cloud: Data, direction: Tensor, name: str, extent: float) -> Tensor:
    """Return the derivative of an output in a direction, by Ridders' extrapolation of central differences.

    Of all extrapolations, the one with the smallest estimated error is returned: the larger difference from the two
    numbers that it was computed from.
    """
    step = _FIRST_STEP * extent
    rows: list[Tensor] = []
    best, smallest = torch.zeros(()), torch.inf
    for _ in range(_HALVINGS):
        ends = [shifted(cloud, sign * step * direction) for sign in (1, -1)]
        values = [probe([end])[name] for end in ends]
        row = [(values[0] - values[1]) / (2 * step)]
        best = best if rows else row[0]
        # Low orders count too: they use the last steps alone, which may be too small to cross a kink.
        for order, before in enumerate(rows, start=1):
            found = row[-1] + (row[-1] - before) / (4.0**order - 1)
            error = max(float((found - other).abs().max()) for other in (row[-1], before))
            if error < smallest:
                best, smallest = found, error
            row.append(found)
        if rows and smallest <= _ENOUGH * float(best.abs().max()):
            break
        rows, step = row, step / 2
    return best.squeeze() if best.numel() == 1 else best
