"""Errors of a network as rows of its certificate."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import TOLERANCE
from lieattn.certify._certificate import Row
from lieattn.certify._elements import elements_of
from lieattn.certify._moves import (
    Kind,
    Move,
    center_and_extent,
    check_kind,
    degenerate,
    motion,
    point_indices,
    shifted,
    sizes_of,
    still,
)
from lieattn.certify._probe import REFUSALS, Probe, checked_outputs
from lieattn.groups import FiniteGroup
from lieattn.models import Symmetry
from lieattn.reps import Pseudovector, Representation, Vector

_DEGENERATE_MOVES = 4  # number of elements that degenerate clouds are moved by
_AT_ONCE = 1_000  # points of a batch of clouds that are moved in several ways
_STEPS = 64  # initial number of steps of a path
_SUSPECTS = 3  # steps that are divided: those with the largest changes, and as many that exceed their neighbors most
_ROUNDS, _PARTS = 13, 4  # how often steps are divided, and into how many parts
_STEEPER = 1e2  # a continuous output may be this many times as steep as over the initial steps
_TIMES_ROUNDING = 4.0  # largest error that rounding explains, in units of the rounding that is seen in float64


@dataclass(frozen=True)
class Task:
    """What is measured.

    ``inputs`` are the kinds of attributes of the clouds, and ``outputs`` those of the outputs. ``limits`` are the
    largest errors by dtype, relative to the largest output (or 1). If outputs may vanish on these clouds, ``usual`` has
    their sizes on other clouds. ``tensors`` is whether outputs that are tensors or rotations are promised to be
    equivariant, and ``apart`` whether clouds of a batch are known not to depend on each other.
    """

    clouds: list[Data]
    inputs: Mapping[str, Kind]
    outputs: Mapping[str, Kind]
    promise: Symmetry
    limits: Mapping[torch.dtype, float]
    generator: torch.Generator
    usual: Mapping[str, float] | None = None
    tensors: bool = True
    apart: bool = False


def not_finite(probe: Probe, outputs: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yield a failed row for each output that is not finite."""
    for name, value in outputs.items():
        if not value.isfinite().all():
            yield Row("finite", "", name, probe.precision, float(value.abs().max()), math.nan, None, False)


def move_rows(
    probe: Probe,
    task: Task,
    moves: Sequence[Move],
    explain: bool = False,
    reference: Mapping[str, Tensor] | None = None,
) -> list[Row]:
    """Return the errors in one precision for each move, and for each cloud without the rest of its batch.

    With ``explain``, rows that would fail may have the errors that rounding explains, in addition to the tolerance. The
    ``reference`` are the outputs for the clouds before the moves, if they are known.
    """
    rows = list(_move_rows(probe, task, moves, task.limits[probe.dtype], reference))
    if not explain or all(row.passed is not False for row in rows):
        return rows
    more = _rounding(probe, task, [move for move in moves if move.promised])
    for place, row in enumerate(rows):
        if row.allowed is not None:
            allowed = row.allowed + more.get(row.output, 0.0)
            rows[place] = replace(row, allowed=allowed, passed=row.max_error <= allowed)
    return rows


def _rounding(probe: Probe, task: Task, moves: Sequence[Move]) -> dict[str, float]:
    """Return the error that rounding explains, for each output without a larger error in float64 than its tolerance.

    The network in float64 has an error too if the moved clouds are rounded to the dtype of the probe. The rounding of
    its operations is smaller by the ratio of the precisions.
    """
    ratio = torch.finfo(probe.dtype).eps / torch.finfo(torch.float64).eps
    try:
        exact, coarse = (
            list(_move_rows(one, task, moves, TOLERANCE[torch.float64]))
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
    probe: Probe, task: Task, moves: Sequence[Move], limit: float, reference: Mapping[str, Tensor] | None = None
) -> Iterator[Row]:
    clouds = task.clouds
    sizes = sizes_of(clouds)
    outputs: Iterable[Mapping[str, Tensor] | None] = ()
    if reference is None and task.apart and moves:
        first = still("", clouds, len(moves[0].linear))
        reference, *outputs = _moved(probe, task, [first, *moves], True)
    reference = checked_outputs(probe(clouds) if reference is None else reference, sizes)
    kinds, dtype = task.outputs, probe.precision
    largest = {
        name: max(float(value.abs().max()), (task.usual or {}).get(name, 1.0)) for name, value in reference.items()
    }
    allowed = {name: limit * max(1.0, size) for name, size in largest.items()}
    alone: list[Row] = []
    if len(clouds) > 1:
        parts = [probe([cloud]) for cloud in clouds]
        for name, value in reference.items():
            found_alone = torch.cat([part[name] for part in parts])
            exact = task.promise.group is not None
            alone.append(_row("alone", "", name, dtype, found_alone, value, allowed[name] if exact else None))
    apart = task.apart or (len(clouds) > 1 and all(row.passed for row in alone))
    for move, found in zip(moves, outputs or _moved(probe, task, moves, apart), strict=True):
        if found is None:
            for name in reference:
                yield Row(move.check, f"{move.label}, refused", name, dtype, math.nan, math.nan, None, None)
            continue
        for name, value in reference.items():
            expected = move.expected(name, kinds[name], value, sizes)
            # A rotation that maps such a cloud to itself would have to keep its pose.
            pose = task.usual is not None and kinds[name] == "rotation"
            promised = move.promised and name not in move.excepted
            promised = promised and not pose and (task.tensors or not _is_tensor(kinds[name]))
            yield _row(
                move.check, move.label, name, dtype, found.get(name), expected, allowed[name] if promised else None
            )
    yield from alone


def _moved(probe: Probe, task: Task, moves: Sequence[Move], apart: bool) -> Iterator[dict[str, Tensor] | None]:
    """Yield the outputs for each move, or None if the network refuses one that is not promised.

    If clouds are ``apart``, those of several promised moves are one batch.
    """
    points = sum(len(cloud.pos) for cloud in task.clouds)
    apart = apart and all(cloud.get("grid") is None for cloud in task.clouds)  # images of a batch have one size
    for promised, alike in itertools.groupby(moves, key=lambda move: move.promised):
        left = list(alike)
        step = max(1, _AT_ONCE // points) if apart and promised else 1
        while left:
            some, left = left[:step], left[step:]
            changed = [move.apply(task.clouds, task.inputs) for move in some]
            try:
                yield from probe.at_once(changed)
            except REFUSALS:
                if step > 1:  # the network may refuse large batches
                    step, left = 1, [*some, *left]
                elif promised:
                    raise
                else:
                    yield None


def degenerate_rows(
    probes: Mapping[torch.dtype, Probe],
    task: Task,
    sizes: Mapping[str, float],
    explained: Collection[torch.dtype] = (),
    apart: bool = False,
) -> Iterator[Row]:
    """Yield rows for degenerate clouds, which are derived from the last cloud, if the network accepts them.

    In the ``explained`` dtypes, errors may have the size that rounding explains. ``apart`` is that of :class:`Task`.
    """
    promise, last = task.promise, task.clouds[-1]
    group = promise.group
    if group is None or any(last.get(name) is not None for name in ("grid", "cell")) or list(point_indices(last)):
        return
    # Principal axes follow points, vectors and pseudovectors, which do not determine all components of other tensors.
    fields = getattr(next(iter(probes.values())).network, "field_inputs", {}).values()
    if promise.moving_axes and any(rep.dim > 1 and rep != Pseudovector() for rep in fields):
        return
    centered = group.is_affine or isinstance(group, FiniteGroup)
    for name, cloud in degenerate(last, group.dim, centered=centered).items():
        chosen = list(elements_of(group, 1, task.generator, translations=promise.translations))[-_DEGENERATE_MOVES:]
        shaped = [motion("degenerate", element, [cloud], True, task.generator) for element in chosen]
        shaped = [replace(move, label=f"{name}, {move.label}") for move in shaped]
        for dtype, probe in probes.items():
            with contextlib.suppress(*REFUSALS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one = replace(task, clouds=[cloud], usual=sizes, tensors=not promise.moving_axes, apart=apart)
                for row in move_rows(probe, one, shaped, dtype in explained):
                    # A network that promises no symmetry may be undefined if distances are 0. This is not a failure.
                    undefined = math.isnan(row.max_error) and not hasattr(probe.network, "symmetry")
                    yield replace(row, allowed=None, passed=None) if undefined else row


def continuity_rows(probe: Probe, task: Task, dim: int) -> Iterator[Row]:
    """Yield jumps of outputs and their derivatives on paths of the smallest cloud, if the network accepts these."""
    jumps, kinks = getattr(probe.network, "jumps", None), getattr(probe.network, "has_kinks", True)
    for path in paths(min(task.clouds, key=lambda cloud: len(cloud.pos)), dim, task.generator):
        measured = (
            ("continuity", jumps == (), probe),
            ("first derivative", jumps == () and not kinks, lambda c, p=path: probe.derivatives(c, p.velocity)),
        )
        for check, promised, outputs in measured:
            with warnings.catch_warnings(), contextlib.suppress(*REFUSALS):
                warnings.simplefilter("ignore")
                for name, (jump, size, rounding) in largest_jumps(path, outputs).items():
                    allowed = task.limits[probe.dtype] * max(1.0, size) + rounding if promised else None
                    passed = None if allowed is None else jump <= allowed
                    relative = jump / size if size else 0.0
                    yield Row(check, path.label, name, probe.precision, jump, relative, allowed, passed)


def spreads_of(
    probe: Probe, clouds: list[Data], others: Sequence[list[Data]], reference: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how much each output differs between clouds, see :class:`Certificate`, and its largest absolute value.

    If the network refuses some of the ``others``, they are left out. The ``reference`` are the outputs for the clouds.
    """
    sizes = sizes_of(clouds)
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


def _row(
    check: str, label: str, name: str, dtype: str, found: Tensor | None, expected: Tensor, allowed: float | None
) -> Row:
    if found is None or found.shape != expected.shape:
        got, what = "none" if found is None else tuple(found.shape), f"output {name!r}" if name else "an output"
        raise ValueError(
            f"network: expected {what} {tuple(expected.shape)}, as before the clouds were moved or separated, got {got}"
        )
    difference = found - expected
    error, size = float(difference.abs().max()), float(expected.norm())
    relative = float(difference.norm()) / size if size else math.inf if error else 0.0
    return Row(check, label, name, dtype, error, relative, allowed, None if allowed is None else error <= allowed)


# --- forces -------------------------------------------------------------------------------------------------------

_ENERGY, FORCES = "energy", ("force", "forces")
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
    forces = next((name for name in FORCES if name in given), None)
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


# --- paths --------------------------------------------------------------------------------------------------------

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


def largest_jumps(path: Path, outputs: Outputs) -> dict[str, tuple[float, float, float]]:
    """Return the largest jump of each output ``[clouds | points, *]``.

    The other numbers are the largest absolute value of the output, and the change that also occurs if it is continuous.
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
        found[name] = float(_change(high, low).max()), float(values[name].abs().max()), rounding
    return found


def _by_time(outputs: dict[str, Tensor], times: int) -> dict[str, Tensor]:
    """Split the rows of each output into ``[times, rows of one cloud, *]``."""
    return {name: value.unflatten(0, (times, -1)) for name, value in outputs.items()}


def _change(first: Tensor, second: Tensor, batch_dims: int = 1) -> Tensor:
    """Return the largest absolute difference for each index of the first ``batch_dims`` axes, or NaN if one is NaN."""
    return (first - second).abs().flatten(batch_dims).amax(dim=-1)
