"""Group elements inside or outside of a group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_tensor, shown
from lieattn.groups import (
    SO,
    FiniteGroup,
    Group,
    SemidirectProduct,
    Translations,
    commuting_product,
    cyclic,
    cyclic_about,
    dihedral,
    dihedral_about,
    full_icosahedral,
    full_octahedral,
    full_tetrahedral,
    icosahedral,
    inversion,
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
    """Yield random motions outside of a group, for comparison; their labels say so.

    These are rotations, of which the last one is replaced by a reflection if the group is finite and contains none. If
    the group contains all rotations, they are reflections; if it contains these too, there are none. For a finite
    group, one element of each larger group of :func:`_larger` follows.
    """
    linear = linear_part(group)
    if dim == 1 or (group is not None and linear.has_reflections):
        return
    zero = torch.zeros(dim, dtype=torch.float64)
    proper = isinstance(linear, FiniteGroup) and bool((torch.linalg.det(linear.elements) > 0).all())
    beyond = "" if group is None else f", outside of {group.name}"
    for number in range(count):
        if (group is not None and linear.has_rotations) or (proper and number == count - 1 > 0):
            yield Element(f"random reflection{beyond}", random_reflection(dim, generator), zero)
        else:
            matrix, label = random_rotation(dim, generator)
            yield Element(f"{label}{beyond}", matrix, zero)
    if isinstance(linear, FiniteGroup) and count > 0:
        yield from (Element(f"element of {name}{beyond}", matrix, zero) for name, matrix in _larger(linear))


def where_outside(matrix: Tensor, group: Group | None) -> str:
    """Return words for a motion outside of a group, such as ``"element of C24, outside of C8"``.

    ``matrix`` is float64 ``[dim, dim]``. The first group is the smallest of some larger groups with the motion, see
    docs/certify.md; if there is none, only the group is named. For an element of a finite group, the words are empty.
    TypeError or ValueError is raised for a matrix of another dtype or shape, or with entries that are not finite.
    """
    check_arguments(where_outside, locals())
    check_tensor("matrix", matrix, "a float64 matrix [dim, dim]", torch.float64)
    linear = linear_part(group)
    dim = matrix.shape[-1] if group is None and matrix.ndim else getattr(group, "dim", 0)
    if matrix.shape != (dim, dim) or not matrix.isfinite().all():
        expected = "expected finite [dim, dim] for the points that the group moves"
        raise ValueError(f"matrix: {expected}, got {shown(matrix)} {tuple(matrix.shape)}")
    if group is None:
        return "in no group that is stated"
    finite = isinstance(linear, FiniteGroup)
    if finite and are_among(matrix[None], linear.elements, linear.tolerance).all():
        return ""
    known = _known(linear) if finite else []
    larger = [one for one in known if are_among(matrix[None], one.elements, linear.tolerance).all()]
    smallest = min(larger, key=lambda one: one.order, default=None)
    return f"outside of {group.name}" if smallest is None else f"element of {smallest.name}, outside of {group.name}"


def _larger(group: FiniteGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each larger group of :func:`_known` with an element that is outside of the group.

    Random motions almost never belong to these larger groups. For rotations of space about one axis, the group with a
    rotation by half the smallest angle and that with all rotations about the axis are added. Elements that the group
    makes of another one of these are not repeated.
    """
    named = list(_about_axis(group)) if group.dim == 3 else []
    tried = torch.cat([group.elements, *(group.elements @ matrix for _, matrix in named)])
    for larger in _known(group):
        others = larger.elements[~are_among(larger.elements, tried, group.tolerance)]
        if len(others) > 0:
            tried = torch.cat([tried, group.elements @ others[0]])
            yield larger.name, others[0]
    yield from named


@lru_cache(maxsize=8)
def _known(group: FiniteGroup) -> list[FiniteGroup]:
    """Return some larger groups that contain a finite group with n rotations, small ones first in space.

    In the plane, they are C_2n, C_3n, and D_n and D_2n with a mirror on the x axis. In space, they are T, O, I, T_d,
    T_h, O_h, I_h, D_n and D_2n about the z axis, and D_n with the inversion. Beyond the plane, the group with the
    inversion is added.
    """
    n = int((torch.linalg.det(group.elements) > 0).sum())
    known: list[FiniteGroup] = []
    if group.dim == 2:
        known = [cyclic(2 * n), cyclic(3 * n), dihedral(n), dihedral(2 * n)]
    elif group.dim == 3:
        known = [tetrahedral(), octahedral(), pyritohedral(), full_tetrahedral(), icosahedral()]
        known += [full_octahedral(), full_icosahedral()]
        known += [dihedral_about(n), dihedral_about(2 * n), commuting_product(dihedral_about(n), inversion(3))]
    if group.dim > 2 and not are_among(inversion(group.dim).elements, group.elements, group.tolerance).all():
        known.append(commuting_product(group, inversion(group.dim)))
    if group.dim > 2:
        known.sort(key=lambda larger: larger.order)  # the element of a larger group is not one of its subgroups
    return [larger for larger in known if bool(are_among(group.elements, larger.elements, group.tolerance).all())]


def _about_axis(group: FiniteGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield two larger groups by name with rotations about the axis of the rotations of a group in space, if any."""
    rotations = group.elements[torch.linalg.det(group.elements) > 0]
    fixed = rotations.mean(dim=0)  # the projection onto the vectors that all rotations leave unchanged
    n = len(rotations)
    if n > 1 and float(fixed.trace()) > 0.5:
        axis = torch.linalg.eigh(fixed)[1][:, -1]
        others = "" if group.order == n else f"{group.name} with "
        yield f"{others}C{2 * n} about its axis", cyclic_about(2 * n, axis.tolist()).elements[1]
        yield f"{others}SO(2) about its axis", SO(3).exp(axis)


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
