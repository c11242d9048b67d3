"""Search for the symmetry of a network among groups of motions."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn.certify._certificate import Row
from lieattn.certify._elements import Element, elements_of
from lieattn.certify._moves import (
    Kind,
    Move,
    motion,
    other_images,
    permutation,
    raster_motion,
    relative_error,
    sizes_of,
    still,
)
from lieattn.certify._probe import REFUSALS, Probe, checked_outputs, possible_kinds
from lieattn.groups import (
    SE,
    SO,
    E,
    FiniteGroup,
    Group,
    O,
    Translations,
    cyclic,
    cyclic_about,
    dihedral,
    full_icosahedral,
    full_octahedral,
    full_tetrahedral,
    icosahedral,
    inversion,
    octahedral,
    pyritohedral,
    tetrahedral,
)
from lieattn.models import Symmetry

_SCALES = (0.5, 3.0)
_ELEMENTS = 4  # number of random elements of each Lie group


@dataclass(frozen=True)
class _Candidate:
    """A subgroup to be tested. ``promotes`` is the group that it generates together with the translations."""

    label: str
    moves: Sequence[Move]
    group: Group | None = None
    promotes: Group | None = None


def search(
    probe: Probe,
    clouds: list[Data],
    inputs: Mapping[str, Kind],
    outputs: Mapping[str, Kind] | None,
    tolerance: float,
    generator: torch.Generator,
) -> tuple[Symmetry, dict[str, Kind], tuple[Row, ...], bool, bool]:
    """Test translations, SO(n), O(n), finite groups, and more, and return the largest group that passes.

    Permutations of the points, other periodic images of points, and scales are tested too. If the kinds of outputs are
    not given, each output has the kind with which most candidates pass. The axes of finite groups are coordinate axes.
    The other results are the kind of each output, the measured rows of the certificate, and whether outputs depend on
    the order of the points, and on which periodic images of the points are given.
    """
    dim = clouds[0].pos.shape[1] if inputs["pos"] == "position" else 0
    if dim not in (2, 3):
        raise ValueError(
            f"group: expected a group, since a search needs 2 or 3 dimensions, got clouds with {clouds[0].pos.shape[1]}"
        )
    reference = checked_outputs(probe(clouds), sizes_of(clouds))
    possible = {
        name: possible_kinds(value, dim) if outputs is None else [outputs[name]] for name, value in reference.items()
    }
    candidates = _candidates(dim, clouds, probe.as_images, generator)
    errors = {
        candidate.label: _errors(probe, clouds, candidate, inputs, possible, reference, tolerance)
        for candidate in candidates
    }
    chosen = {}
    for name, kinds in possible.items():
        passing = [sum(found[name, n] <= tolerance for found in errors.values()) for n in range(len(kinds))]
        chosen[name] = passing.index(max(passing))
    rows: list[Row] = []
    for label, found in errors.items():
        for name, number in chosen.items():
            size, error = max(1.0, float(reference[name].abs().max())), found[name, number]
            measured = error * size, error, tolerance * size, error <= tolerance
            rows.append(Row("searched", label, name, probe.precision, *measured))
    passes = {label: all(found[pair] <= tolerance for pair in chosen.items()) for label, found in errors.items()}
    symmetry = _largest(candidates, passes)
    kinds_of = {name: possible[name][number] for name, number in chosen.items()}
    sees_order, sees_images = (not passes.get(label, False) for label in ("permutations", "periodic images"))
    return symmetry, kinds_of, tuple(rows), sees_order, sees_images


def _errors(
    probe: Probe,
    clouds: list[Data],
    candidate: _Candidate,
    inputs: Mapping[str, Kind],
    possible: Mapping[str, Sequence[Kind]],
    reference: Mapping[str, Tensor],
    tolerance: float,
) -> dict[tuple[str, int], float]:
    """Return the largest error of each output, with each of its kinds, under the moves of a candidate.

    Moves are skipped after no kind passes any more. The errors returned then exceed the tolerance.
    """
    sizes = sizes_of(clouds)
    errors = {(name, number): 0.0 for name, kinds in possible.items() for number in range(len(kinds))}
    for move in candidate.moves:
        found: Mapping[str, Tensor] = {}
        with contextlib.suppress(*REFUSALS):
            found = probe(move.apply(clouds, inputs))
        scaled = abs(float(torch.linalg.det(move.linear).abs()) - 1) > 1e-6
        for (name, number), before in errors.items():
            value, kind = reference[name], possible[name][number]
            # Outputs of all kinds should not change with the scale.
            expected = value if scaled else move.expected(name, kind, value, sizes)
            errors[name, number] = max(before, relative_error(found.get(name), expected, value))
        if min(errors.values()) > tolerance:
            break
    return errors


def _largest(candidates: Sequence[_Candidate], passes: Mapping[str, bool]) -> Symmetry:
    """Return the largest group that passes, with translations if these pass. Candidates must start with the largest."""
    translations = passes.get("translations", True)  # images are not shifted
    for candidate in candidates:
        if candidate.group is not None and passes[candidate.label]:
            if isinstance(candidate.group, FiniteGroup):
                return Symmetry(candidate.group, translations=translations)
            return Symmetry(candidate.promotes if translations else candidate.group)
    shifts = next((c.promotes for c in candidates if c.label == "translations"), None)
    return Symmetry(shifts if translations else None)


def _candidates(dim: int, clouds: list[Data], as_images: bool, generator: torch.Generator) -> list[_Candidate]:
    """Return the candidates for clouds, or for pixels that must remain on their lattice."""
    on_lattice = as_images or any(cloud.get("grid") is not None for cloud in clouds)
    found = []
    if not on_lattice:
        identity = torch.eye(dim, dtype=torch.float64)
        shifts = [motion("searched", Element("", identity, None), clouds, True, generator) for _ in range(2)]
        found.append(_Candidate("translations", shifts, promotes=Translations(dim)))
        for group, promoted in ((O(dim), E(dim)), (SO(dim), SE(dim))):
            found.append(_Candidate(group.name, _moves(group, clouds, generator), group, promoted))
    for finite in _finite_groups(dim):
        moves: Sequence[Move | None] = _moves(finite, clouds, generator)
        if on_lattice:
            moves = [raster_motion("searched", move, clouds) for move in moves if move is not None]
        kept = [move for move in moves if move is not None]
        if len(kept) == finite.order:
            found.append(_Candidate(finite.name, kept, finite))
    if not on_lattice:
        found.append(_Candidate("permutations", [permutation(clouds, dim, True, generator)]))
        if images := other_images(clouds, dim, True, generator):
            found.append(_Candidate("periodic images", images))
        scaled = [factor * torch.eye(dim, dtype=torch.float64) for factor in _SCALES]
        unmoved = still("searched", clouds, dim)
        found.append(_Candidate("scales", [replace(unmoved, linear=factor) for factor in scaled]))
    return found


def _moves(group: Group, clouds: list[Data], generator: torch.Generator) -> list[Move]:
    elements = elements_of(group, _ELEMENTS, generator, translations=False)
    moves = [motion("searched", element, clouds, True, generator) for element in elements]
    # In reverse order, failures are found early: the first element of a finite group is the identity, which passes.
    return [replace(move, label="") for move in reversed(moves)]


def _finite_groups(dim: int) -> list[FiniteGroup]:
    if dim == 2:
        return [*(make(n) for n in (8, 6, 4, 3, 2) for make in (dihedral, cyclic)), dihedral(1)]
    platonic = (full_icosahedral, icosahedral, full_octahedral, octahedral, full_tetrahedral, pyritohedral, tetrahedral)
    return [*(make() for make in platonic), *(cyclic_about(n) for n in (8, 6, 4, 3, 2)), inversion()]
