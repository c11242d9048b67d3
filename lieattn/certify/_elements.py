"""Group elements inside or outside of a group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lieattn.groups import (
    SO,
    FiniteGroup,
    Group,
    SemidirectProduct,
    Translations,
    cyclic,
    cyclic_about,
    dihedral,
    dihedral_about,
    full_tetrahedral,
    icosahedral,
    linear_part,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
)

_NEAR = 1e-3  # size of the element near the identity, in radians
_SAME = 1e-6  # largest difference between equal matrices


class Element(NamedTuple):
    """A motion x ↦ A x + t.

    ``translation`` is t. It is None if the group contains all translations, so that each cloud has a random one.
    """

    label: str
    linear: Tensor
    translation: Tensor | None


def elements_of(
    group: Group, count: int, generator: torch.Generator, *, translations: bool = True
) -> Iterator[Element]:
    """Yield all elements of a finite group, or ``count`` random elements of a Lie group, then special ones.

    ``translations`` is whether elements of a finite group are combined with translations. The special elements are
    those of the following that the group contains: one near the identity, a half turn, a reflection, the inversion.
    """
    group = linear if isinstance(linear := linear_part(group), FiniteGroup) else group
    # An affine group of a user may contain only some of the translations.
    free = translations if isinstance(group, FiniteGroup) else isinstance(group, SemidirectProduct | Translations)
    fixed = None if free else torch.zeros(group.dim, dtype=torch.float64)
    if isinstance(group, FiniteGroup):
        yield from (Element(str(index), matrix, fixed) for index, matrix in enumerate(group.elements))
        return
    for number, g in enumerate(group.sample(count, generator=generator, dtype=torch.float64)):
        yield Element(f"random {number}", group.linear(g), None if free else group.translation(g))
    if not linear.is_affine:
        yield from (Element(label, matrix, fixed) for label, matrix in _special(linear, generator))


def _special(group: Group, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    direction = torch.randn(group.algebra_dim, generator=generator, dtype=torch.float64)
    direction = direction / direction.norm()
    try:
        yield "near identity", group.exp(_NEAR * direction)
    except NotImplementedError:
        return
    if not group.has_rotations:
        return
    angle = torch.randn(SO(group.dim).algebra_dim, generator=generator, dtype=torch.float64)
    yield "half turn", SO(group.dim).exp(math.pi * angle / angle.norm())
    if group.has_reflections:
        yield "reflection", random_reflection(group.dim, generator)
        if group.dim == 3:
            yield "inversion", -torch.eye(3, dtype=torch.float64)


def outside_of(group: Group | None, dim: int, count: int, generator: torch.Generator) -> Iterator[Element]:
    """Yield random motions outside of a group, for comparison.

    These are rotations, of which the last one is replaced by a reflection if the group is finite and contains none. If
    the group contains all rotations, they are reflections; if it contains these too, there are none. For a finite group
    in the plane or in space, one element of each larger group of :func:`_larger` follows.
    """
    linear = linear_part(group)
    if dim == 1 or (group is not None and linear.has_reflections):
        return
    zero = torch.zeros(dim, dtype=torch.float64)
    proper = isinstance(linear, FiniteGroup) and bool((torch.linalg.det(linear.elements) > 0).all())
    for number in range(count):
        if (group is not None and linear.has_rotations) or (proper and number == count - 1 > 0):
            yield Element("random reflection", random_reflection(dim, generator), zero)
        else:
            matrix, label = random_rotation(dim, generator)
            yield Element(label, matrix, zero)
    if isinstance(linear, FiniteGroup) and count > 0:
        yield from (Element(label, matrix, zero) for label, matrix in _larger(linear))


def _larger(group: FiniteGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield an element outside of a finite group for each of some larger groups that contain it.

    Random motions almost never belong to these larger groups. In the plane, they are C_2n, C_3n, and D_n and D_2n with
    a mirror on the x axis. In space, they are T, O, T_h, T_d, I, D_n and D_2n about the z axis, and the group extended
    by the inversion. For rotations about one axis, a rotation by half the smallest angle and one by 1 rad are added.
    Elements that the group makes of another one of these are not repeated.
    """
    n = int((torch.linalg.det(group.elements) > 0).sum())
    if group.dim == 2:
        known = [cyclic(2 * n), cyclic(3 * n), dihedral(n), dihedral(2 * n)]
    elif group.dim == 3:
        known = [tetrahedral(), octahedral(), pyritohedral(), full_tetrahedral(), icosahedral()]
        known += [dihedral_about(number) for number in (n, 2 * n)]
        known.sort(key=lambda larger: larger.order)  # the element of a larger group is not one of its subgroups
    else:
        return
    named = list(_extended(group, n)) if group.dim == 3 else []
    tried = torch.cat([group.elements, *(group.elements @ matrix for _, matrix in named)])
    for larger in known:
        others = larger.elements[~are_among(larger.elements, tried, group.tolerance)]
        if len(others) > 0 and bool(are_among(group.elements, larger.elements, group.tolerance).all()):
            tried = torch.cat([tried, group.elements @ others[0]])
            yield f"of {larger.name}", others[0]
    yield from named


def _extended(group: FiniteGroup, n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the inversion and rotations about the axis of ``n`` rotations in space, if they are outside of a group."""
    if not are_among(inversion := -torch.eye(3, dtype=torch.float64)[None], group.elements, group.tolerance).any():
        yield "inversion", inversion[0]
    # The projection onto the vectors that all rotations leave unchanged.
    fixed = group.elements[torch.linalg.det(group.elements) > 0].mean(dim=0)
    if n > 1 and float(fixed.trace()) > 0.5:
        axis = torch.linalg.eigh(fixed)[1][:, -1]
        yield f"of C{2 * n} about its axis", cyclic_about(2 * n, axis.tolist()).elements[1]
        yield "1 rad about its axis", SO(3).exp(axis)


def are_among(matrices: Tensor, others: Tensor, tolerance: float) -> Tensor:
    """Return a mask ``[n]`` of the matrices ``[n, dim, dim]`` that are among others, up to a tolerance or rounding."""
    return (matrices[:, None] - others).abs().amax(dim=(2, 3)).amin(dim=1) < max(_SAME, tolerance)


def random_reflection(dim: int, generator: torch.Generator) -> Tensor:
    return reflection(dim, torch.randn(dim, generator=generator, dtype=torch.float64).tolist()).elements[1]


def random_rotation(dim: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """Return a rotation and its label: a sign in one dimension, and of the first three coordinates beyond three."""
    if dim == 1:
        return 2.0 * torch.randint(2, (1, 1), generator=generator).double() - 1, "random sign"
    matrix = SO(min(dim, 3)).sample(generator=generator, dtype=torch.float64)
    if dim == 2:
        return matrix, f"{math.degrees(float(SO(2).log(matrix))) % 360:.1f} degrees"
    return torch.block_diag(matrix, torch.eye(dim - 3, dtype=torch.float64)), "random rotation"
