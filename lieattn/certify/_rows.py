"""Measurements of a certificate as rows of errors."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import TOLERANCE
from lieattn.certify._certificate import Row
from lieattn.certify._clouds import degenerate, point_indices, sizes_of
from lieattn.certify._continuity import largest_jumps, paths
from lieattn.certify._elements import elements_of
from lieattn.certify._kinds import Kind, check_kind
from lieattn.certify._moves import Move, motion
from lieattn.certify._probe import REFUSALS, Probe, checked_outputs
from lieattn.groups import FiniteGroup
from lieattn.models import Symmetry
from lieattn.reps import Representation, Vector

_DEGENERATE_MOVES = 4  # number of elements that degenerate clouds are moved by
_TIMES_ROUNDING = 4.0  # largest error that rounding explains, in units of the rounding that is seen in float64


def not_finite(probe: Probe, clouds: list[Data]) -> Iterator[Row]:
    """Yield a failed row for each output that is not finite."""
    for name, value in probe(clouds).items():
        if not value.isfinite().all():
            yield Row("finite", "", name, probe.precision, float(value.abs().max()), math.nan, None, False)


def move_rows(
    probe: Probe,
    clouds: list[Data],
    moves: Sequence[Move],
    inputs: Mapping[str, Kind],
    outputs: Kind | Mapping[str, Kind] | None,
    tolerance: float,
    exact: bool,
    usual: Mapping[str, float] | None = None,
    tensors: bool = True,
    explain: bool = False,
) -> list[Row]:
    """Return the errors in one precision for each move, and for each cloud without the rest of its batch.

    If outputs may vanish on these clouds, ``usual`` has their sizes on other clouds. ``tensors`` is whether outputs
    that are tensors or rotations are promised to be equivariant. With ``explain``, rows that would fail may have the
    errors that rounding explains, in addition to the ``tolerance``.
    """
    rows = list(_move_rows(probe, clouds, moves, inputs, outputs, tolerance, exact, usual, tensors))
    if not explain or all(row.passed is not False for row in rows):
        return rows
    more = _rounding(probe, clouds, [move for move in moves if move.promised], inputs, outputs, usual, tensors)
    for place, row in enumerate(rows):
        if row.allowed is not None:
            allowed = row.allowed + more.get(row.output, 0.0)
            rows[place] = replace(row, allowed=allowed, passed=row.max_error <= allowed)
    return rows


def _rounding(
    probe: Probe,
    clouds: list[Data],
    moves: Sequence[Move],
    inputs: Mapping[str, Kind],
    outputs: Kind | Mapping[str, Kind] | None,
    usual: Mapping[str, float] | None,
    tensors: bool,
) -> dict[str, float]:
    """Return the error that rounding explains, for each output without a larger error in float64 than its tolerance.

    The network in float64 has an error too if the moved clouds are rounded to the dtype of the probe. The rounding of
    its operations is smaller by the ratio of the precisions.
    """
    ratio = torch.finfo(probe.dtype).eps / torch.finfo(torch.float64).eps
    try:
        exact, coarse = (
            list(_move_rows(one, clouds, moves, inputs, outputs, TOLERANCE[torch.float64], True, usual, tensors))
            for one in (probe.double, probe.double.rounded(probe.dtype))
        )
    except (*REFUSALS, TypeError):  # a function may be written for one dtype, and devices may lack float64
        return {}
    broken = {row.output for row in exact if row.passed is False}
    found: dict[str, float] = {}
    for own, rounded in zip(exact, coarse, strict=True):
        if own.output not in broken and own.allowed is not None:
            error = _TIMES_ROUNDING * max(own.max_error * ratio, rounded.max_error)
            found[own.output] = max(found.get(own.output, 0.0), error)
    return found


def _move_rows(
    probe: Probe,
    clouds: list[Data],
    moves: Sequence[Move],
    inputs: Mapping[str, Kind],
    outputs: Kind | Mapping[str, Kind] | None,
    tolerance: float,
    exact: bool,
    usual: Mapping[str, float] | None,
    tensors: bool,
) -> Iterator[Row]:
    sizes = sizes_of(clouds)
    reference = checked_outputs(probe(clouds), sizes)
    kinds, dtype = kinds_of_outputs(probe.network, outputs, reference), probe.precision
    largest = {name: max(float(value.abs().max()), (usual or {}).get(name, 1.0)) for name, value in reference.items()}
    allowed = {name: tolerance * max(1.0, size) for name, size in largest.items()}
    for move in moves:
        changed = move.apply(clouds, inputs)
        try:
            found = probe(changed)
        except REFUSALS:
            if move.promised:
                raise
            for name in reference:
                yield Row(move.check, f"{move.label}, refused", name, dtype, math.nan, math.nan, None, None)
            continue
        for name, value in reference.items():
            expected = move.expected(name, kinds[name], value, sizes)
            # A rotation that maps such a cloud to itself would have to keep its pose.
            pose = usual is not None and kinds[name] == "rotation"
            promised = move.promised and name not in move.excepted
            promised = promised and not pose and (tensors or not _is_tensor(kinds[name]))
            limit = allowed[name] if promised else None
            yield _row(move.check, move.label, name, dtype, found.get(name), expected, limit)
    if len(clouds) > 1:
        parts = [probe([cloud]) for cloud in clouds]
        for name, value in reference.items():
            limit = allowed[name] if exact else None
            yield _row("alone", "", name, dtype, torch.cat([part[name] for part in parts]), value, limit)


def degenerate_rows(
    probes: Mapping[torch.dtype, Probe],
    last: Data,
    inputs: Mapping[str, Kind],
    outputs: Kind | Mapping[str, Kind] | None,
    limits: Mapping[torch.dtype, float],
    promise: Symmetry,
    sizes: Mapping[str, float],
    generator: torch.Generator,
    explained: Collection[torch.dtype] = (),
) -> Iterator[Row]:
    """Yield rows for degenerate clouds, which are derived from the ``last`` cloud, if the network accepts them.

    In the ``explained`` dtypes, errors may have the size that rounding explains.
    """
    group = promise.group
    if group is None or any(last.get(name) is not None for name in ("grid", "cell")) or list(point_indices(last)):
        return
    centered = group.is_affine or isinstance(group, FiniteGroup)
    for name, cloud in degenerate(last, group.dim, centered=centered).items():
        chosen = list(elements_of(group, 1, generator, translations=promise.translations))[-_DEGENERATE_MOVES:]
        shaped = [motion("degenerate", element, [cloud], True, generator) for element in chosen]
        shaped = [replace(move, label=f"{name}, {move.label}") for move in shaped]
        for dtype, probe in probes.items():
            with contextlib.suppress(*REFUSALS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                moving = not promise.moving_axes
                given = shaped, inputs, outputs, limits[dtype], True, sizes, moving, dtype in explained
                for row in move_rows(probe, [cloud], *given):
                    # A network that promises no symmetry may be undefined if distances are 0. This is not a failure.
                    undefined = math.isnan(row.max_error) and not hasattr(probe.network, "symmetry")
                    yield replace(row, allowed=None, passed=None) if undefined else row


def continuity_rows(
    probe: Probe, clouds: list[Data], dim: int, tolerance: float, generator: torch.Generator
) -> Iterator[Row]:
    """Yield jumps of outputs and their derivatives on paths of the smallest cloud, if the network accepts these."""
    jumps, kinks = getattr(probe.network, "jumps", None), getattr(probe.network, "has_kinks", True)
    for path in paths(min(clouds, key=lambda cloud: len(cloud.pos)), dim, generator):
        measured = (
            ("continuity", jumps == (), probe),
            ("first derivative", jumps == () and not kinks, lambda c, p=path: probe.derivatives(c, p.velocity)),
        )
        for check, promised, outputs in measured:
            with warnings.catch_warnings(), contextlib.suppress(*REFUSALS):
                warnings.simplefilter("ignore")
                for name, found in largest_jumps(path, outputs).items():
                    allowed = tolerance * max(1.0, found.size) + found.rounding if promised else None
                    passed = None if allowed is None else found.jump <= allowed
                    relative = found.jump / found.size if found.size else 0.0
                    yield Row(check, path.label, name, probe.precision, found.jump, relative, allowed, passed)


def spreads_of(
    probe: Probe, clouds: list[Data], others: Sequence[list[Data]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how much each output differs between clouds, see :class:`Certificate`, and its largest absolute value.

    If the network refuses some of the ``others``, they are left out.
    """
    reference, sizes = probe(clouds), sizes_of(clouds)
    changed = [reference]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network may warn about these clouds
        for given in others:
            with contextlib.suppress(*REFUSALS):
                changed.append(probe(given))
    spreads = {}
    for name, value in reference.items():
        alike = [value[sizes == size] for size in sizes.unique()] if len(value) == len(sizes) else [value]
        apart = [float((some.amax(dim=0) - some.amin(dim=0)).max()) for some in alike]
        spreads[name] = max(*apart, *(float((found[name] - value).abs().max()) for found in changed))
    return spreads, {name: float(value.abs().max()) for name, value in reference.items()}


def kinds_of_outputs(
    network: Any, given: Kind | Mapping[str, Kind] | None, outputs: Mapping[str, Tensor]
) -> dict[str, Kind]:
    """Return the kind of each output by name: the given one, or that of the network, or else invariant."""
    stated = getattr(network, "kind", "invariant") if given is None else given
    if not isinstance(stated, Mapping):
        check_kind("outputs", stated)
        return dict.fromkeys(outputs, stated)
    for name, kind in stated.items():
        check_kind(f"outputs[{name!r}]", kind)
        if name not in outputs:
            known = sorted(outputs) if outputs.keys() != {""} else "one tensor"
            raise ValueError(f"outputs: {name!r} is not among the outputs of the network, {known}")
    return {name: stated.get(name, "invariant") for name in outputs}


def _is_tensor(kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return any(_is_tensor(part) for part in kind)
    return kind in ("tensor", "rotation") or (isinstance(kind, Representation) and not isinstance(kind, Vector))


def _output(name: str) -> str:
    return f"output {name!r}" if name else "an output"


def _row(
    check: str, label: str, name: str, dtype: str, found: Tensor | None, expected: Tensor, allowed: float | None
) -> Row:
    if found is None or found.shape != expected.shape:
        got = "none" if found is None else tuple(found.shape)
        raise ValueError(
            f"network: expected {_output(name)} {tuple(expected.shape)}, as before the clouds were moved or separated, "
            f"got {got}"
        )
    difference = found - expected
    error, size = float(difference.abs().max()), float(expected.norm())
    relative = float(difference.norm()) / size if size else math.inf if error else 0.0
    return Row(check, label, name, dtype, error, relative, allowed, None if allowed is None else error <= allowed)
