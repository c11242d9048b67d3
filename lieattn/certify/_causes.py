"""Diagnoses: the first layer that breaks a symmetry."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn._core.checks import is_whole
from lieattn.certify._certificate import NOT_PROMISED, Diagnosis, Row
from lieattn.certify._elements import Element, are_among, elements_of
from lieattn.certify._moves import (
    Kind,
    Move,
    center_and_extent,
    motion,
    other_images,
    permutation,
    raster_motion,
    relative_error,
    sizes_of,
    still,
)
from lieattn.certify._probe import Probe, possible_kinds
from lieattn.certify._rows import Task
from lieattn.certify._trace import Call, Change, edges_law, irreps_of, law, record
from lieattn.groups import FiniteGroup, Group, linear_part
from lieattn.models import Symmetry
from lieattn.nn.relative import RelativeFunction

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_TIMES_ROUNDING = 100.0  # largest ratio of an error to the rounding that caused it
_HALF = 1e-5  # smallest rounding of half precision
_BORDER = 4  # pixels
_PADDING = "padding", "clouds are padded to the size of the largest, and the padding counts"
_CAUSE_FAR = "rounding of positions far from the origin"
_EXTENTS = 10.0  # smallest distance from the origin, in extents of the cloud
_SHARE = 0.2  # smallest share of points with the largest number of neighbors if neighbors are capped


@dataclass(frozen=True)
class _Break:
    """The first module whose inputs follow known laws and whose outputs do not.

    Attributes
    ----------
    call, moved
        The calls of the module before and after the change, or None if there is no such module.
    inputs
        The laws that its inputs follow, see :func:`lieattn.certify._trace.law`.
    edges
        If points were reordered: the name of the first module whose edges connect other pairs of points than before,
        and its edges before the change; None if there is no such module.
    """

    call: Call | None = None
    moved: Call | None = None
    inputs: tuple[str, ...] = ()
    edges: tuple[str, Tensor] | None = None


def diagnose(probe: Probe, task: Task, failed: set[str], known: tuple[str, Group] | None) -> Iterator[Diagnosis]:
    """Yield the first layer that breaks each failed symmetry, and the likely cause.

    ``failed`` has the checks with a failed row. Features are compared with the transformed features of the original
    clouds, as far as their law is known: invariants, vectors, positions, permuted fibers and pixels, irreps of e3nn.
    ``known`` is from :func:`known_group`. Elements outside of this group are not the fault of a layer.
    """
    # The smallest cloud is first, so that it is padded in the batch, and not padded alone.
    clouds = sorted(task.clouds, key=lambda cloud: int(cloud.num_nodes or 0))
    sizes, tolerance = sizes_of(clouds), task.limits[probe.dtype]
    reference = probe(clouds)
    if any(not value.isfinite().all() for value in reference.values()):  # all comparisons fail
        yield _not_finite(reference, record(probe, clouds))
        return
    outputs = dict(task.outputs)
    again = probe(clouds)
    repeated = max(float((again[name] - value).abs().max()) for name, value in reference.items())
    if repeated > tolerance * max(1.0, *(float(value.abs().max()) for value in reference.values())):
        calls, others = record(probe, clouds), record(probe, clouds)
        found = _first_break(calls, others, Change(still("", clouds, 1), sizes, tolerance))
        text = f"two calls with the same clouds differ by {repeated:.1e}, even in eval mode"
        yield _diagnosis("same clouds", found, "randomness", text)
        return
    done: set[str] = set()  # one diagnosis for an element of the group is enough, and one for a cloud alone
    outside_reported: set[str] = set()
    for check, change in _changes(probe, replace(task, clouds=clouds), failed, sizes):
        move = change.move
        if move.check in done:
            continue
        change = replace(change, irreps=irreps_of(probe.network, move.linear))
        changed = move.apply(clouds, task.inputs) if change.alone is None else [clouds[change.alone]]
        moved = probe(changed)
        error = max(_error(moved, change, name, outputs[name], value) for name, value in reference.items())
        if error <= tolerance:
            continue
        if move.check == "turn" and known is not None and (what := _outside(move.linear, known[1])) is not None:
            if what not in outside_reported:
                outside_reported.add(what)
                text = f"{known[0]} {known[1].name}, which does not contain it"
                yield Diagnosis(f"{check}, a {what}", None, None, (), NOT_PROMISED, text)
            continue
        done |= {move.check} & {"turn", "alone"}
        declared = {} if change.alone is not None else _other_kinds(moved, change, reference, outputs)
        if declared:
            outputs = {**outputs, **declared}  # explain the other changes as if they had been declared
            yield _diagnosis(check, _Break(), "kind of the output", _declaration(declared))
        else:
            yield _explained(check, probe, clouds, changed, change, error)


def _explained(
    check: str, probe: Probe, clouds: list[Data], changed: list[Data], change: Change, error: float
) -> Diagnosis:
    """Return the first layer that breaks a symmetry, and the likely cause."""
    calls, others = record(probe, clouds), record(probe, changed)
    found = _first_break(calls, others, change)
    if check == "order of points":
        found = replace(found, edges=_first_edges(calls, others, change))
    cause, text = _cause(check, found, error, change, probe)
    if check == "rest of the batch" and cause == "other clouds" and _pads(calls, others, found, change):
        cause, text = _PADDING
    return _diagnosis(check, found, cause, text)


def known_group(network: Any, found: Group | None) -> tuple[str, Group] | None:
    """Return the group that a network promises, or else the found one if it has all rotations, and where it is from.

    A found group without all rotations is ignored: all causes that are known here would break rotations too, so they
    do not explain why only reflections fail.
    """
    stated = Symmetry.stated_by(network).group
    if stated is not None:
        return "the network promises", stated
    return ("the search found", found) if found is not None and linear_part(found).has_rotations else None


def _outside(matrix: Tensor, group: Group) -> str | None:
    """Return ``"rotation"`` or ``"reflection"`` if the group does not contain the element; None if it does or may."""
    linear = linear_part(group)
    if len(matrix) != group.dim:
        return None
    what = "reflection" if float(torch.linalg.det(matrix)) < 0 else "rotation"
    if isinstance(linear, FiniteGroup):
        inside = bool(are_among(matrix[None], linear.elements, linear.tolerance))
    else:
        inside = what == "rotation" or linear.has_reflections or not linear.has_rotations
    return None if inside else what


def _not_finite(outputs: Mapping[str, Tensor], calls: Sequence[Call]) -> Diagnosis:
    """Return a diagnosis with the first module whose inputs are finite and whose outputs are not."""

    def finite(tensors: Sequence[Tensor]) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    first = next((call for call in calls if finite(call.inputs) and not finite(call.outputs)), None)
    counts = [
        f"{int((~value.isfinite()).sum())} of {value.numel()} numbers{f' of {name}' if name else ''} are not finite"
        for name, value in outputs.items()
        if not value.isfinite().all()
    ]
    return _diagnosis("any clouds", _Break(first), "not finite", " and ".join(counts))


def _changes(probe: Probe, task: Task, failed: set[str], sizes: Tensor) -> Iterator[tuple[str, Change]]:
    """Yield one change for each symmetry that may be broken, starting with the simplest."""
    clouds, group, generator = task.clouds, task.promise.group, task.generator
    dim = clouds[0].pos.shape[1] if group is None else group.dim
    moves: list[tuple[str, Move, int | None]] = []  # names of the changes, and the indices of elements
    if group is not None and failed & {"element", "degenerate", "raster"}:
        moves += _moves_by_elements(probe, task, group, "raster" in failed)
    if "permutation" in failed:
        moves.append(("order of points", permutation(clouds, dim, True, generator), None))
    if "image" in failed:
        moves += [("periodic images", move, None) for move in other_images(clouds, dim, True, generator)]
    finite = group if isinstance(group, FiniteGroup) else None
    base = Change(still("alone", clouds, dim), sizes, task.limits[probe.dtype], as_images=probe.as_images)
    for name, move, element in moves:
        fiber: dict[str, Any] = {} if element is None else {"group": finite, "element": element}
        yield name, replace(base, move=move, **fiber)
    if "alone" in failed:
        yield from (("rest of the batch", replace(base, alone=number)) for number in range(len(clouds)))


def _moves_by_elements(probe: Probe, task: Task, group: Group, raster: bool) -> Iterator[tuple[str, Move, int | None]]:
    """Yield a translation, if there are any, and the elements of the group without translation."""
    identity = torch.eye(group.dim, dtype=torch.float64)
    elements = list(elements_of(group, 2, task.generator, translations=task.promise.translations))
    if not probe.as_images and any(e.translation is None or bool(e.translation.any()) for e in elements):
        yield "translation", motion("translation", Element("", identity, None), task.clouds, True, task.generator), None
    for index, element in enumerate(elements):
        if torch.equal(element.linear, identity):
            continue
        turned = replace(still("turn", task.clouds, group.dim), label=element.label, linear=element.linear)
        name = f"element {element.label}" if isinstance(group, FiniteGroup) else element.label
        written = raster_motion("turn", turned, task.clouds) if probe.as_images or raster else None
        for one in (written,) if probe.as_images else (turned, written):
            if one is not None:
                yield name, one, index


def _error(found: Mapping[str, Tensor], change: Change, name: str, kind: Kind, reference: Tensor) -> float:
    """Return the error of an output, relative to its largest value (or 1)."""
    if change.alone is None:
        expected = change.move.expected(name, kind, reference, change.sizes)
    else:
        rows = torch.ones_like(change.sizes) if len(reference) == len(change.sizes) else change.sizes
        expected = reference.split(rows.tolist())[change.alone]
    return relative_error(found[name], expected, reference)


def _other_kinds(
    found: Mapping[str, Tensor], change: Change, reference: Mapping[str, Tensor], outputs: Mapping[str, Kind]
) -> dict[str, Kind]:
    """Return the kinds, by name, for which all outputs that are wrong would be right; empty if there are none."""
    kinds: dict[str, Kind] = {}
    for name, value in reference.items():
        if _error(found, change, name, outputs[name], value) > change.tolerance:
            possible = possible_kinds(value, len(change.move.linear))
            others = [kind for kind in possible if _error(found, change, name, kind, value) <= change.tolerance]
            if not others:
                return {}
            kinds[name] = others[0]
    return kinds


def _declaration(kinds: Mapping[str, Kind]) -> str:
    named = dict(kinds) if "" not in kinds else kinds[""]
    words = " and ".join(f"{f'{name!r}' if name else 'the output'} moves as a {kind}" for name, kind in kinds.items())
    return f"{words}; if this is meant, declare outputs={named!r}"


def _first_break(first: Sequence[Call], second: Sequence[Call], change: Change) -> _Break:
    """Find the first module whose inputs follow known laws and whose outputs do not."""
    for before, after in zip(first, second, strict=False):
        if before.name != after.name or len(before.outputs) != len(after.outputs):
            break
        # Terms of the same displacements may stand in other rows: the layer that uses them shows what is wrong.
        if len(before.inputs) != len(after.inputs) or isinstance(before.module, RelativeFunction):
            continue
        laws = _laws(before.inputs, after.inputs, change)
        broken = None in _laws(before.outputs, after.outputs, change)
        if None not in laws and (broken or _edges_change(before.outputs, after.outputs, change) is not None):
            return _Break(before, after, tuple(name for name in laws if name))
    return _Break()


def _laws(first: Sequence[Tensor], second: Sequence[Tensor], change: Change) -> list[str | None]:
    floating = [pair for pair in zip(first, second, strict=True) if pair[0].is_floating_point()]
    return [law(before, after, change) for before, after in floating]


def _edges_change(first: Sequence[Tensor], second: Sequence[Tensor], change: Change) -> Tensor | None:
    """Return the first edges that connect other pairs of points after the change, as they were before; else None."""
    for before, after in zip(first, second, strict=True):
        if is_whole(before) and not edges_law(before, after, change):
            return before
    return None


# --- causes -------------------------------------------------------------------------------------------------------


def _cause(check: str, found: _Break, error: float, change: Change, probe: Probe) -> tuple[str, str]:
    """Return the likely cause in a few words, and the evidence."""
    rounding = _cause_of_rounding(found, error, probe)
    if rounding is not None:
        return rounding
    if check == "order of points":
        return _cause_of_order(found)
    if check == "rest of the batch":
        return _cause_of_batch(found)
    if check == "translation":
        return "absolute positions", "outputs depend on where the cloud is, and not only on differences of positions"
    if check == "periodic images":
        return "images of points", "outputs depend on which of the periodic images of a point is given"
    if found.call is None or found.moved is None:
        return "unknown", "no single module that can be observed breaks the symmetry by itself"
    return (_cause_in_images(found.call, found.moved, change) if change.as_images else None) or _cause_of_features(
        found
    )


def _cause_of_rounding(found: _Break, error: float, probe: Probe) -> tuple[str, str] | None:
    coarse = probe.dtype if found.call is None else found.call.coarsest
    rounding = torch.finfo(coarse).eps
    if rounding > torch.finfo(probe.dtype).eps and error <= _TIMES_ROUNDING * rounding:
        what = "half precision" if rounding > _HALF else "single precision"
        name = str(coarse).removeprefix("torch.")
        return what, f"it computes in {name}, whose rounding {rounding:.0e} explains the error {error:.0e}"
    single = torch.finfo(torch.float32).eps
    if found.call is None and probe.dtype == torch.float64 and error <= _TIMES_ROUNDING * single:
        return "single precision", f"the error {error:.0e} in float64 is about the rounding of float32 constants"
    return None


def _cause_of_features(found: _Break) -> tuple[str, str]:
    if found.call is not None and "fibers permuted" in found.inputs:
        if isinstance(found.call.module, _NORMS):
            text = f"{type(found.call.module).__name__} has separate statistics or weights for each frame of the fiber"
            return "batch statistics over the fiber", text
        return "weights that differ between frames", "its input is permuted along the fiber, but its output is not"
    if any(name != "invariant" for name in found.inputs):
        return "components of vectors", "it treats components of vectors like invariant numbers"
    return "unknown", "its inputs transform by known laws, and its outputs by none"


def _cause_of_order(found: _Break) -> tuple[str, str]:
    if found.edges is None:
        return "order of points", "outputs depend on the order of the points"
    name, edges = found.edges
    if len(edges) == 2:
        # Either end may be the center of a neighborhood: use the one at which more points have the largest number.
        counts = [torch.bincount(end) for end in edges]
        count = max(counts, key=lambda count: float((count == count.max()).double().mean()))
        most, full = int(count.max()), int((count == count.max()).sum())
        if most > 1 and full > max(1, _SHARE * len(count)):
            text = f"in the edges at {name}, {full} of {len(count)} points have exactly {most} neighbors"
            return "capped neighbors", f"{text}, and which neighbors these are depends on the order of the points"
    text = f"the edges at {name} depend on the order of the points"
    return "neighbors chosen by order", f"{text}, for example if some of several equally distant neighbors are taken"


def _first_edges(first: Sequence[Call], second: Sequence[Call], change: Change) -> tuple[str, Tensor] | None:
    for before, after in zip(first, second, strict=False):
        ends = [(*call.inputs, *call.outputs) for call in (before, after)]
        if before.name == after.name and len(ends[0]) == len(ends[1]):
            edges = _edges_change(ends[0], ends[1], change)
            if edges is not None:
                return before.name or "the network itself", edges
    return None


def _cause_of_batch(found: _Break) -> tuple[str, str]:
    if found.call is not None and isinstance(found.call.module, _NORMS):
        kind = type(found.call.module).__name__
        return "batch statistics", f"{kind} computes statistics over all clouds of a batch"
    return "other clouds", "outputs of a cloud depend on the other clouds of the batch"


def _pads(first: Sequence[Call], second: Sequence[Call], found: _Break, change: Change) -> bool:
    """Return whether the module that breaks the symmetry, or one that it calls, gets or returns padded clouds."""
    largest, size = int(change.sizes.max()), int(change.sizes[change.alone or 0])
    if found.call is None or largest == size:
        return False
    name = found.call.name
    return any(
        one.ndim >= 2 and one.shape[1:2] == (largest,) and other.shape[1:2] == (size,)
        for before, after in zip(first, second, strict=False)
        if before.name == after.name and (name in ("", before.name) or before.name.startswith(f"{name}."))
        for one, other in zip((*before.inputs, *before.outputs), (*after.inputs, *after.outputs), strict=False)
    )


def _cause_in_images(call: Call, after: Call, change: Change) -> tuple[str, str] | None:
    module, kind, dim = call.module, type(call.module).__name__, len(change.move.linear)
    strides = _strides(module)
    if max(strides) > 1 and _is_kept_without_stride(call, after, change):
        stride = " x ".join(map(str, strides if len({*strides}) > 1 else strides[:1]))
        sides = " x ".join(map(str, call.inputs[0].shape[-dim:])) + (" pixels" if dim == 2 else " voxels")
        moved = "reflected" if float(torch.linalg.det(change.move.linear)) < 0 else "rotated"
        text = f"{kind} with stride {stride} on {sides} samples other ones if the image is {moved}"
        return "strided pooling on the wrong residue", f"{text}; with stride 1 it is equivariant"
    same = isinstance(module, nn.Conv2d | nn.Conv3d) and module.padding == "same" and min(module.kernel_size) % 2 == 0
    if same or any("Pad" in base.__name__ for base in type(module).__mro__):
        return "padding", f"{kind} adds pixels on one side, and not on the opposite side"
    if call.outputs and call.outputs[0].ndim >= 2 + dim and min(call.outputs[0].shape[-dim:]) > 2 * _BORDER:
        within: tuple[Any, ...] = (..., *[slice(_BORDER, -_BORDER)] * dim)
        inner = [t.outputs[0][within] for t in (call, after)]
        if law(inner[0], inner[1], change) is not None:
            return "padding", f"{kind} is equivariant, except within {_BORDER} pixels of the border"
    return None


def _strides(module: nn.Module) -> tuple[int, ...]:
    """Return the stride of a layer, or the strides of its axes; 1 if its ``stride`` is something else, or missing."""
    stride = getattr(module, "stride", 1)
    strides = tuple(stride) if isinstance(stride, tuple | list) else (stride,)
    return strides if strides and all(isinstance(one, int) for one in strides) else (1,)


def _is_kept_without_stride(call: Call, after: Call, change: Change) -> bool:
    """Return whether a layer with one input is equivariant if its stride is set to 1."""
    layer = copy.deepcopy(call.module)
    vars(layer)["stride"] = 1 if isinstance(layer.stride, int) else (1,) * len(_strides(layer))
    dtype = next((weight.dtype for weight in layer.parameters()), torch.float64)
    try:
        with torch.no_grad():
            dense = [layer(given.inputs[0].to(dtype)).double() for given in (call, after)]
    except Exception:  # code of other people may need more arguments, or its own stride
        return False
    return law(dense[0], dense[1], change) is not None


def _diagnosis(check: str, found: _Break, cause: str, evidence: str) -> Diagnosis:
    name, kind = (None, None) if found.call is None else (found.call.name, type(found.call.module).__name__)
    return Diagnosis(check, name, kind, found.inputs, cause, evidence)


# --- coarse dtypes ------------------------------------------------------------------------------------------------


def extents_away(clouds: Sequence[Data], promise: Symmetry) -> float:
    """Return how many extents of its cloud a center is away from the origin, if this is far; 0 otherwise.

    Clouds are not far if they could not be moved to the origin, because translations change the outputs.
    """
    if promise.group is None or not promise.all_translations:
        return 0.0
    found = [center_and_extent(cloud, promise.group.dim) for cloud in clouds]
    away = max(float(center.norm()) / extent if extent else 0.0 for center, extent in found)
    return away if away >= _EXTENTS else 0.0


def only_coarse(rows: Sequence[Row], finest: torch.dtype, away: float) -> Iterator[Diagnosis]:
    """Yield a diagnosis for each dtype in which outputs fail that pass in the finest.

    The errors are larger than rounding explains. ``away`` is the result of :func:`extents_away`.
    """
    name = str(finest).removeprefix("torch.")
    broken = {row.output for row in rows if row.dtype == name and row.passed is False}
    failed = [row for row in rows if row.passed is False and row.dtype != name]
    for dtype in dict.fromkeys(row.dtype for row in failed):
        here = [row for row in failed if row.dtype == dtype and row.output not in broken and row.allowed]
        if not here:
            continue
        worst = max(here, key=lambda row: row.max_error / (row.allowed or 1.0))
        cause = f"only in {dtype}"
        text = (
            f"{name} passes, and rounding explains {worst.allowed:.0e} of the error {worst.max_error:.0e}; some "
            f"operations may have fewer digits in {dtype}, or outputs jump within the rounding of positions"
        )
        if away and worst.check in ("element", "degenerate"):
            cause, step = _CAUSE_FAR, away * torch.finfo(getattr(torch, dtype)).eps
            text = (
                f"{name} passes, and positions are up to {away:.0e} times the extent of their cloud away from the "
                f"origin, so {dtype} rounds them to {step:.0e} of the extent; center the data, as in data.pos - "
                f"data.pos.mean(dim=0)"
            )
        check = " ".join(filter(None, (worst.check, worst.label, "in", dtype)))
        yield Diagnosis(check, None, None, (), cause, text)
