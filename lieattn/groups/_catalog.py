"""The finite groups people ask for. A new one is a function that returns its matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lieattn._checks import check_count
from lieattn.groups._finite import FiniteGroup, check_group, snap


def trivial(dim: int = 2) -> FiniteGroup:
    """Group of the identity alone: translations without rotations, Z2 in the papers on images."""
    check_count("dim", dim)
    return FiniteGroup(f"trivial{dim}", torch.eye(dim, dtype=torch.float64)[None])


def cyclic(n: int) -> FiniteGroup:
    """C_n: the rotations of the plane by multiples of 2π/n, element k by 2πk/n."""
    check_count("n", n)
    return FiniteGroup(f"C{n}", _plane_rotations(n))


def dihedral(n: int) -> FiniteGroup:
    """D_n of order 2n: the n rotations R(2πk/n), then each after the mirror diag(1, -1)."""
    check_count("n", n)
    rotations = _plane_rotations(n)
    return FiniteGroup(f"D{n}", torch.cat([rotations, rotations @ _diagonal(1, -1)]))


def reflection(dim: int, axis: int | Sequence[float] = -1) -> FiniteGroup:
    """Group of order 2 of the mirror that reverses one direction of R^dim.

    ``axis`` is a coordinate axis, or any non-zero vector of ``dim`` components.
    """
    check_count("dim", dim)
    if isinstance(axis, int):
        if not -dim <= axis < dim:
            raise ValueError(f"axis: expected -{dim} <= axis < {dim}, got {axis}")
        axis = torch.eye(dim)[axis].tolist()
    direction = _unit_vector(axis, dim)
    identity = torch.eye(dim, dtype=torch.float64)
    mirror = identity - 2 * torch.outer(direction, direction)
    last = bool(direction[:-1].count_nonzero() == 0)
    return FiniteGroup(f"mirror{dim}" + ("" if last else _axis_name(axis)), torch.stack([identity, mirror]))


def inversion(dim: int = 3) -> FiniteGroup:
    """Group of order 2 of the point reflection x ↦ -x."""
    check_count("dim", dim)
    identity = torch.eye(dim, dtype=torch.float64)
    return FiniteGroup(f"inversion{dim}", torch.stack([identity, -identity]))


def cyclic_about(n: int, axis: Sequence[float] = (0.0, 0.0, 1.0)) -> FiniteGroup:
    """C_n about an axis of R^3, turning counter-clockwise seen from the tip of ``axis``.

    ``axis`` has three components, not all zero, and any length.
    """
    check_count("n", n)
    matrices = _rotations_about(n, axis)
    return FiniteGroup(f"C{n}{_axis_name(axis)}", matrices)


def dihedral_about(n: int, axis: Sequence[float] = (0.0, 0.0, 1.0)) -> FiniteGroup:
    """D_n as rotations of R^3: the n rotations about an axis, then each after a half turn across it; order 2n.

    The half turn is about the direction across the axis that is nearest to the x axis, or to the y axis where the axis
    itself is nearer to x than to y and z. D_2 about a coordinate axis consists of the diagonal matrices with entries
    ±1 and determinant 1.
    """
    check_count("n", n)
    direction = _unit_vector(axis, 3)
    start = _unit_vector((0, 1, 0) if direction[0].abs() > direction[1:].abs().max() else (1, 0, 0), 3)
    across = start - (start @ direction) * direction
    turns = _rotations_about(n, axis)
    matrices = torch.cat([turns, turns @ _rotations_about(2, across.tolist())[1]])
    return FiniteGroup(f"D{n}{_axis_name(axis)}", snap(matrices))


def tetrahedral() -> FiniteGroup:
    """T, the 12 rotations of the tetrahedron (1,1,1), (1,-1,-1), (-1,1,-1), (-1,-1,1)."""
    group = _signed_permutations()
    return FiniteGroup("T", group[(group.det() > 0) & (_sign_product(group) > 0)])


def octahedral() -> FiniteGroup:
    """O, the 24 rotations of the cube."""
    group = _signed_permutations()
    return FiniteGroup("O", group[group.det() > 0])


def icosahedral() -> FiniteGroup:
    """I, the 60 rotations of the icosahedron with vertices (0, ±1, ±φ) and cyclic permutations."""
    golden = (1 + math.sqrt(5)) / 2
    fifth = cyclic_about(5, (0.0, 1.0, golden)).elements[1]
    third = torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    return FiniteGroup.generate(torch.stack([fifth, third, _diagonal(-1, -1, 1)]), "I")


def pyritohedral() -> FiniteGroup:
    """T_h, T and the point reflection: order 24."""
    return commuting_product(tetrahedral(), inversion(3), "Th")


def full_tetrahedral() -> FiniteGroup:
    """T_d, all symmetries of the tetrahedron: order 24, the rotations first."""
    kept = _signed_permutations()
    kept = kept[_sign_product(kept) > 0]
    return FiniteGroup("Td", torch.cat([kept[kept.det() > 0], kept[kept.det() < 0]]))


def full_octahedral() -> FiniteGroup:
    """O_h, all symmetries of the cube: order 48, the rotations first."""
    return commuting_product(octahedral(), inversion(3), "Oh")


def full_icosahedral() -> FiniteGroup:
    """I_h, all symmetries of the icosahedron: order 120, the rotations first."""
    return commuting_product(icosahedral(), inversion(3), "Ih")


def direct_product(first: FiniteGroup, second: FiniteGroup, name: str | None = None) -> FiniteGroup:
    """H × K acting on R^dH ⊕ R^dK by block matrices; element (h, k) has index h·|K| + k."""
    check_group("first", first)
    check_group("second", second)
    name = f"{first.name}x{second.name}" if name is None else name
    blocks = [torch.block_diag(h, k) for h in first.elements for k in second.elements]
    return FiniteGroup(name, torch.stack(blocks), tolerance=max(first.tolerance, second.tolerance))


def commuting_product(first: FiniteGroup, second: FiniteGroup, name: str | None = None) -> FiniteGroup:
    """H K inside one space, for subgroups that commute and share the identity alone.

    Element k h has index k·|H| + h, so that ``first`` comes first. ValueError is raised if the spaces differ, or two
    elements do not commute (the message names them).
    """
    check_group("first", first)
    check_group("second", second)
    name = f"{first.name}x{second.name}" if name is None else name
    if first.dim != second.dim:
        raise ValueError(
            f"first, second: expected groups that act on the same space, but {first.name} acts on R^{first.dim} and "
            f"{second.name} on R^{second.dim}"
        )
    left = first.elements[:, None] @ second.elements
    difference = (left - second.elements @ first.elements[:, None]).abs().amax(dim=(-2, -1))
    tolerance = max(first.tolerance, second.tolerance)
    if difference.max() > tolerance:
        h, k = divmod(int(difference.argmax()), second.order)
        pair = f"element {h} of {first.name} and element {k} of {second.name}"
        raise ValueError(
            f"first, second: {pair} do not commute; use direct_product for an action on the sum of the two spaces"
        )
    return FiniteGroup(name, left.transpose(0, 1).flatten(0, 1), tolerance=tolerance)


def _plane_rotations(n: int) -> Tensor:
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    cosine, sine = torch.cos(angles), torch.sin(angles)
    return snap(torch.stack([cosine, -sine, sine, cosine], dim=-1).reshape(n, 2, 2))


def _rotations_about(n: int, axis: Sequence[float]) -> Tensor:
    """Rodrigues' formula for the multiples of 2π/n."""
    x, y, z = _unit_vector(axis, 3).tolist()
    hat = torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]], dtype=torch.float64)
    cosine, sine = _plane_rotations(n)[:, :, 0, None, None].unbind(dim=1)
    return snap(torch.eye(3, dtype=torch.float64) + sine * hat + (1 - cosine) * (hat @ hat))


def _diagonal(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=torch.float64))


def _signed_permutations() -> Tensor:
    """The 48 matrices with one entry ±1 in each row and column, the identity first."""
    orders = torch.eye(3, dtype=torch.float64)[torch.tensor(list(itertools.permutations(range(3))))]
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=3)), dtype=torch.float64)
    return (orders[:, None] * signs[:, :, None]).flatten(0, 1)


def _sign_product(matrices: Tensor) -> Tensor:
    return matrices.sum(dim=-1).prod(dim=-1)


def _unit_vector(axis: Sequence[float], dim: int) -> Tensor:
    vector = torch.zeros(dim, dtype=torch.float64)
    with suppress(TypeError, ValueError):
        vector = torch.tensor([float(a) for a in axis], dtype=torch.float64)
    if len(vector) != dim or not torch.isfinite(vector).all() or not vector.any():
        raise ValueError(f"axis: expected {dim} finite components, not all zero, got {axis!r}")
    # The squares of long and short vectors overflow and underflow; powers of two do not round.
    _, exponent = math.frexp(float(vector.abs().max()))
    vector = torch.tensor([math.ldexp(a, -exponent) for a in vector.tolist()], dtype=torch.float64)
    return vector / vector.norm()


def _axis_name(axis: Sequence[float]) -> str:
    """``x``, ``-y`` or ``[1,-2,0.5]``: tells directions apart."""
    components = [float(a) for a in axis]
    (first, *others) = [i for i, a in enumerate(components) if a]
    if not others and first < 3:
        return "-" * (components[first] < 0) + "xyz"[first]
    return f"[{','.join(repr(a).removesuffix('.0') for a in components)}]"
