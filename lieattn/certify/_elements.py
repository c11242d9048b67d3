"""The elements that are tried: all of a finite group, and of a Lie group random and special ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lieattn.groups import SO, FiniteGroup, Group, O, RotationDilations, SemidirectProduct, Translations, reflection

_NEAR = 1e-3  # radians, of the element near the identity


class Element(NamedTuple):
    """A motion x ↦ A x + t.

    Attributes
    ----------
    label
        What the row is called.
    linear
        A ``[dim, dim]`` float64.
    translation
        t ``[dim]``; None if any translation may go with A, so that each cloud gets another one.
    """

    label: str
    linear: Tensor
    translation: Tensor | None


def elements_of(
    group: Group, count: int, generator: torch.Generator, *, translations: bool = True
) -> Iterator[Element]:
    """All elements of a finite group, or of a Lie group ``count`` random ones, then special ones.

    Those of a finite group come with translations or without. Special are, as far as the group has them: an element
    near the identity, a half turn, a reflection, the inversion.
    """
    if isinstance(group, SemidirectProduct) and isinstance(group.stabilizer, FiniteGroup):
        group = group.stabilizer
    if isinstance(group, FiniteGroup):
        still = None if translations else torch.zeros(group.dim, dtype=torch.float64)
        for index, matrix in enumerate(group.elements):
            yield Element(str(index), matrix, still)
        return
    free = isinstance(group, SemidirectProduct | Translations)
    for number, g in enumerate(group.sample(count, generator=generator, dtype=torch.float64)):
        yield Element(f"random {number}", group.linear(g), None if free else group.translation(g))
    still = None if free else torch.zeros(group.dim, dtype=torch.float64)
    turns = group.stabilizer if isinstance(group, SemidirectProduct) else group
    if not turns.is_affine:
        for label, matrix in _special(turns, generator):
            yield Element(label, matrix, still)


def _special(group: Group, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    direction = torch.randn(group.algebra_dim, generator=generator, dtype=torch.float64)
    direction = direction / direction.norm()
    try:
        yield "near identity", group.exp(_NEAR * direction)
    except NotImplementedError:
        return
    if not isinstance(group, SO | O | RotationDilations):
        return
    angle = torch.randn(SO(group.dim).algebra_dim, generator=generator, dtype=torch.float64)
    yield "half turn", SO(group.dim).exp(math.pi * angle / angle.norm())
    if isinstance(group, O):
        yield "reflection", _reflection(group.dim, generator)
        if group.dim == 3:
            yield "inversion", -torch.eye(3, dtype=torch.float64)


def outside_of(group: Group | None, dim: int, count: int, generator: torch.Generator) -> Iterator[Element]:
    """Random rotations to compare with; reflections if all rotations belong to the group, nothing if these do too."""
    turns: Any = group.stabilizer if isinstance(group, SemidirectProduct) else group
    if isinstance(turns, O) or dim == 1:
        return
    still = torch.zeros(dim, dtype=torch.float64)
    for _ in range(count):
        if isinstance(turns, SO | RotationDilations):
            yield Element("random reflection", _reflection(dim, generator), still)
        else:
            matrix, label = random_rotation(dim, generator)
            yield Element(label, matrix, still)


def _reflection(dim: int, generator: torch.Generator) -> Tensor:
    return reflection(dim, torch.randn(dim, generator=generator, dtype=torch.float64).tolist()).elements[1]


def random_rotation(dim: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """A rotation and its label; on a line a sign, in more than three dimensions of the first three coordinates."""
    if dim == 1:
        return 2.0 * torch.randint(2, (1, 1), generator=generator).double() - 1, "random sign"
    matrix = SO(min(dim, 3)).sample(generator=generator, dtype=torch.float64)
    if dim == 2:
        return matrix, f"{math.degrees(float(SO(2).log(matrix))) % 360:.1f} degrees"
    return torch.block_diag(matrix, torch.eye(dim - 3, dtype=torch.float64)), "random rotation"
