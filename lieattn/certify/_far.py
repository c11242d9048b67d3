"""Diagnoses of errors that only coarse dtypes have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch_geometric.data import Data

from lieattn.certify._certificate import Diagnosis, Row
from lieattn.certify._clouds import center_and_extent, shifted
from lieattn.certify._kinds import Kind
from lieattn.certify._moves import Move
from lieattn.certify._probe import Probe
from lieattn.certify._rows import degenerate_rows, move_rows
from lieattn.models import Symmetry

MOVED = frozenset({"element", "degenerate"})
"""Checks in which positions are rounded after a motion."""
_CAUSE = "rounding of positions far from the origin"
_EXTENTS = 10.0  # smallest distance from the origin, in extents of the cloud


def far_away(
    probes: Mapping[torch.dtype, Probe],
    clouds: list[Data],
    moves: Sequence[Move],
    inputs: Mapping[str, Kind],
    outputs: Kind | Mapping[str, Kind] | None,
    limits: Mapping[torch.dtype, float],
    promise: Symmetry,
    sizes: Mapping[str, float],
    rows: Sequence[Row],
) -> dict[torch.dtype, Diagnosis]:
    """Return a diagnosis for each dtype in which moved clouds fail, if the same clouds pass around the origin.

    ``rows`` are those of the clouds, and ``sizes`` the largest outputs. There is none unless all translations are
    promised, because outputs would not be those of the same clouds.
    """
    if promise.group is None or not is_far(clouds, promise):
        return {}
    dim = promise.group.dim
    extents = max(_distance_in_extents(cloud, dim) for cloud in clouds)
    centered = [shifted(cloud, -center_and_extent(cloud, dim)[0]) for cloud in clouds]
    diagnoses = {}
    again = [move for move in moves if move.check in MOVED]
    for dtype, probe in probes.items():
        failed = [row for row in rows if row.passed is False and row.check in MOVED and row.dtype == probe.precision]
        if not failed:
            continue
        found = list(move_rows(probe, centered, again, inputs, outputs, limits[dtype], True))
        found += degenerate_rows(
            {dtype: probe}, centered[-1], inputs, outputs, limits, promise, sizes, torch.Generator()
        )
        if all(row.passed is not False for row in found):
            worst = max(failed, key=lambda row: (row.check == "element", row.max_error))
            step = extents * torch.finfo(dtype).eps
            text = (
                f"positions are up to {extents:.0e} times the extent of their cloud away from the origin, so "
                f"{probe.precision} rounds them to {step:.0e} of the extent, and around the origin the same clouds "
                f"pass; center the data, as in data.pos - data.pos.mean(dim=0)"
            )
            check = f"{worst.check} {worst.label} in {probe.precision}"
            diagnoses[dtype] = Diagnosis(check, None, None, (), _CAUSE, text)
    return diagnoses


def is_far(clouds: Sequence[Data], promise: Symmetry) -> bool:
    """Return whether a cloud could be moved to the origin, and is far from there."""
    group = promise.group
    if group is None or not promise.all_translations:
        return False
    return max(_distance_in_extents(cloud, group.dim) for cloud in clouds) >= _EXTENTS


def only_coarse(rows: Sequence[Row], finest: torch.dtype, done: Collection[torch.dtype]) -> Iterator[Diagnosis]:
    """Yield a diagnosis for each dtype, except those that are ``done``, in which outputs fail that pass in the finest.

    The errors are larger than rounding explains.
    """
    name, skipped = _name(finest), {_name(dtype) for dtype in done}
    broken = {row.output for row in rows if row.dtype == name and row.passed is False}
    failed = [row for row in rows if row.passed is False and row.dtype not in {name} | skipped]
    for dtype in dict.fromkeys(row.dtype for row in failed):
        here = [row for row in failed if row.dtype == dtype and row.output not in broken and row.allowed]
        if here:
            worst = max(here, key=lambda row: row.max_error / (row.allowed or 1.0))
            text = (
                f"{name} passes, and rounding explains {worst.allowed:.0e} of the error {worst.max_error:.0e}; some "
                f"operations may have fewer digits in {dtype}, or outputs jump within the rounding of positions"
            )
            check = " ".join(filter(None, (worst.check, worst.label, "in", dtype)))
            yield Diagnosis(check, None, None, (), f"only in {dtype}", text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _distance_in_extents(cloud: Data, dim: int) -> float:
    """Return how far the center of a cloud is from the origin, in units of the largest distance from the center."""
    center, extent = center_and_extent(cloud, dim)
    return float(center.norm()) / extent if extent else 0.0
