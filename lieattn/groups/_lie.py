"""Lie groups of linear maps."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lieattn._core.checks import check_count, check_last, check_none
from lieattn._core.contexts import is_mapped
from lieattn._core.numerics import lengths
from lieattn.groups import _catalog
from lieattn.groups._finite import FiniteGroup
from lieattn.groups._group import (
    LieGroup,
    determinant,
    draw_normal,
    draw_uniform,
    far,
    homogeneous,
    tolerance,
)
from lieattn.groups._skew import (
    expm1_ratio,
    rotation_by,
    rotation_from_quaternion,
    rotation_log,
    scaled_rotation_integral,
    skew,
    turning_angle,
)


class Rotational(LieGroup):
    """Base class of SO(d) and O(d), which have the same Lie algebra, and whose inverses are transposes."""

    letters: ClassVar[str]
    has_rotations = True
    is_orthogonal = True

    def __init__(self, dim: int) -> None:
        if not isinstance(dim, int | np.integer) or dim not in (2, 3):
            raise ValueError(f"dim: {self.letters}(d) is available for d = 2 and d = 3, got {dim!r}")
        dim = int(dim)
        super().__init__(f"{self.letters}({dim})", dim=dim, size=dim, algebra_dim=1 if dim == 2 else 3)

    def inverse(self, g: Tensor) -> Tensor:
        return g.mT

    def hat(self, a: Tensor) -> Tensor:
        return skew(self._checked_algebra(a))

    def vee(self, matrix: Tensor) -> Tensor:
        if self.dim == 2:
            return matrix[..., 1, 0, None]
        return torch.stack([matrix[..., 2, 1], matrix[..., 0, 2], matrix[..., 1, 0]], dim=-1)

    def exp(self, a: Tensor) -> Tensor:
        return rotation_by(self._checked_algebra(a))

    def log(self, g: Tensor) -> Tensor:
        """Return the angle ``[*, 1]`` in (-π, π] or the rotation vector ``[*, 3]`` of length at most π.

        The logarithm of a half turn has two values. The angle is chosen as +π, and the axis so that its largest
        component is positive (the first one if several are equal). Angles within rounding of π count as half turns, so
        the logarithm of a half turn does not depend on how it was computed. The logarithm is discontinuous at π.
        """
        return rotation_log(g)

    def exp_integral(self, a: Tensor) -> Tensor:
        return scaled_rotation_integral(torch.zeros_like(a[..., 0]), self._checked_algebra(a))

    def inverse_exp_integral(self, a: Tensor) -> Tensor:
        return scaled_rotation_integral(torch.zeros_like(a[..., 0]), self._checked_algebra(a), inverse=True)

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        error = (g.mT @ g - self.identity(g)).abs().amax((-2, -1))
        worst, allowed = float(error.max()) if error.numel() else 0.0, tolerance(g.dtype)
        fault = f"its columns are not orthonormal (largest error {worst:.1e}, allowed {allowed:.0e})"
        return {fault: error > allowed}


class SO(Rotational):
    """The rotations of the plane, SO(2), or of space, SO(3).

    The coordinates of the Lie algebra are the counter-clockwise angle or the rotation vector.

    Examples
    --------
    >>> group = SO(3)
    >>> half_turn = group.exp(torch.tensor([0.0, torch.pi, 0.0]))
    >>> group.act(half_turn, torch.tensor([1.0, 2.0, 3.0])).round(decimals=3)
    tensor([-1.,  2., -3.])
    """

    letters = "SO"

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Return the angle ``[*]`` in [0, π] of the rotation g⁻¹ h. It is invariant from both sides."""
        return turning_angle(self.relative(g, h))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        if self.dim == 2:
            return rotation_by(2 * math.pi * draw_uniform((*shape, 1), generator))
        return rotation_from_quaternion(draw_normal((*shape, 4), generator))

    def finite_subgroup(self, count: int) -> FiniteGroup:
        """Return a finite group of ``count`` rotations, the identity first.

        In the plane they are equally spaced, and average functions of angular degree below ``count`` exactly. In space
        ``count`` is 1, 2, 4, 12, 24 or 60 (C1, C2, D2, T, O, I), and matrix elements of degree at most 0, 0, 1, 2, 3
        and 5 are averaged exactly. ValueError is raised for other counts.
        """
        check_count("count", count)
        if self.dim == 3 and count not in _catalog.ROTATIONS_3D:
            raise ValueError(f"count: SO(3) has designs of {list(_catalog.ROTATIONS_3D)} elements, got {count}")
        return _catalog.design_of_rotations(self.dim, int(count))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        improper = determinant(g) < 0
        return super().faults(g) | {"it is improper, a rotation with a reflection (determinant -1)": improper}


class O(Rotational):  # noqa: E742 - the name of the group
    """The rotations and reflections of the plane, O(2), or of space, O(3).

    The exponential map reaches only proper rotations, so improper elements have no logarithm.
    """

    letters = "O"
    has_reflections = True

    def log(self, g: Tensor) -> Tensor:
        """Return the logarithm as :class:`SO` does, or raise ValueError if an element is improper."""
        improper = determinant(g.detach()) < 0
        check_none("g", improper, f"has no logarithm in {self.name}: it is improper (determinant -1)")
        return super().log(g)

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Return the angle ``[*]`` of g⁻¹ h, or π if g⁻¹ h is improper. It is invariant from both sides."""
        relative = self.relative(g, h)
        improper = determinant(relative.detach()) < 0
        proper = torch.where(improper[..., None, None], self.identity(relative), relative)
        return torch.where(improper, math.pi, turning_angle(proper))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        proper = SO(self.dim).draw(shape, generator)
        sign = torch.where(draw_uniform(shape, generator) < 0.5, -1.0, 1.0)
        return torch.cat([proper[..., :-1], proper[..., -1:] * sign[..., None, None]], dim=-1)

    def finite_subgroup(self, count: int) -> FiniteGroup:
        """Return a finite group of ``count`` elements, the identity first, half of which are improper.

        In the plane it is a dihedral group. In space it contains a group of rotations and their products with the
        inversion, so all odd degrees are also averaged exactly. ValueError is raised for other counts.
        """
        check_count("count", count, least=2)
        if count % 2:
            raise ValueError(f"count: expected an even number, since half of a design is improper, got {count}")
        return _catalog.with_reflections(SO(self.dim).finite_subgroup(count // 2))


class Dilations(LieGroup):
    """The group R+ of dilations r I of R^d with r > 0. The coordinate of the Lie algebra is log r."""

    has_dilations = True
    is_orthogonal = False

    def __init__(self, dim: int = 2) -> None:
        check_count("dim", dim)
        super().__init__(f"R+({dim})", dim=dim, size=dim, algebra_dim=1)

    def inverse(self, g: Tensor) -> Tensor:
        largest, squared = _squared_scale(g)
        return g / largest / squared / largest

    def hat(self, a: Tensor) -> Tensor:
        return self._checked_algebra(a)[..., None] * self.identity(a)

    def vee(self, matrix: Tensor) -> Tensor:
        return matrix[..., 0, 0, None]

    def exp(self, a: Tensor) -> Tensor:
        return self.hat(torch.exp(_checked_scale(a)))

    def log(self, g: Tensor) -> Tensor:
        return log_scale(g)[..., None]

    def exp_integral(self, a: Tensor) -> Tensor:
        return self.hat(expm1_ratio(a))

    def inverse_exp_integral(self, a: Tensor) -> Tensor:
        return self.hat(1 / expm1_ratio(a))

    @property
    def num_coordinates(self) -> int:
        return 1

    def coordinates(self, g: Tensor) -> Tensor:
        """Return log r ``[*, 1]``, which is smooth everywhere and not dominated by large scales."""
        return self.log(g)

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Return ``|log(r_h / r_g)|`` ``[*]``. It is invariant from both sides."""
        return (log_scale(h) - log_scale(g)).abs()

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw dilations with standard normal log r. The group is not compact and has no uniform distribution."""
        return self.exp(draw_normal((*shape, 1), generator))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        positive = g[..., 0, 0] > 0
        relative = g / torch.where(positive, g[..., 0, 0], 1.0)[..., None, None]
        other = far(relative, self.identity(g)).flatten(-2).any(-1)
        return {"it does not scale by a positive number": ~positive, "it is not a multiple of the identity": other}


class RotationDilations(LieGroup):
    """The group R+ x SO(d) of rotations with dilations r R, for d = 2 or 3.

    The coordinates of the Lie algebra are log r, then those of the rotation.
    """

    has_rotations = True
    has_dilations = True
    is_orthogonal = False

    def __init__(self, dim: int = 2) -> None:
        rotations = SO(dim)
        super().__init__(f"R+xSO({dim})", dim=dim, size=dim, algebra_dim=1 + rotations.algebra_dim)

    @property
    def rotations(self) -> SO:
        """The group SO(d)."""
        return SO(self.dim)

    def split(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return log r ``[*]`` and the rotation ``[*, d, d]`` of elements r R."""
        scale = log_scale(g)
        return scale, g * torch.exp(-scale)[..., None, None]

    def inverse(self, g: Tensor) -> Tensor:
        largest, squared = _squared_scale(g)
        return g.mT / largest / squared / largest

    def hat(self, a: Tensor) -> Tensor:
        return self._checked_algebra(a)[..., :1, None] * self.identity(a) + self.rotations.hat(a[..., 1:])

    def vee(self, matrix: Tensor) -> Tensor:
        return torch.cat([matrix[..., 0, 0, None], self.rotations.vee(matrix)], dim=-1)

    def exp(self, a: Tensor) -> Tensor:
        return torch.exp(_checked_scale(self._checked_algebra(a)[..., :1, None])) * self.rotations.exp(a[..., 1:])

    def log(self, g: Tensor) -> Tensor:
        scale, rotation = self.split(g)
        return torch.cat([scale[..., None], self.rotations.log(rotation)], dim=-1)

    def exp_integral(self, a: Tensor) -> Tensor:
        return scaled_rotation_integral(self._checked_algebra(a)[..., 0], a[..., 1:])

    def inverse_exp_integral(self, a: Tensor) -> Tensor:
        return scaled_rotation_integral(self._checked_algebra(a)[..., 0], a[..., 1:], inverse=True)

    @property
    def num_coordinates(self) -> int:
        return 1 + self.rotations.num_coordinates

    def coordinates(self, g: Tensor) -> Tensor:
        scale, rotation = self.split(g)
        return torch.cat([scale[..., None], self.rotations.coordinates(rotation)], dim=-1)

    def distance(self, g: Tensor, h: Tensor, *, alpha: float = 0.5) -> Tensor:
        """Return ``alpha`` times the angle plus ``1 - alpha`` times ``|log(r_h / r_g)|``, invariant from both sides."""
        (first, rotation), (second, moved) = self.split(g), self.split(h)
        return alpha * self.rotations.distance(rotation, moved) + (1 - alpha) * (second - first).abs()

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw uniform rotations and standard normal log r. The group is not compact."""
        rotation = self.rotations.draw(shape, generator)
        return torch.exp(draw_normal((*shape, 1, 1), generator)) * rotation

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        degenerate = (g == 0).flatten(-2).all(-1)
        rotation = torch.where(degenerate[..., None, None], self.identity(g), self.split(g)[1])
        faults = {f"after scaling, {fault}": where for fault, where in self.rotations.faults(rotation).items()}
        return {"it is zero": degenerate} | faults


def _checked_scale(a: Tensor) -> Tensor:
    """Return ``a`` = log r, or raise ValueError if r or 1 / r overflows its dtype.

    Values are not checked in compiled code, nor if ``torch.func.vmap`` maps over them.
    """
    if not (torch.compiler.is_compiling() or is_mapped(a)):
        largest = math.log(torch.finfo(a.dtype).max)
        sizes = a.detach().abs()
        if not (sizes <= largest).all():  # true for NaN
            expected = f"expected logarithms of scales from -{largest:.1f} to {largest:.1f} in {a.dtype}"
            raise ValueError(f"a: {expected}, got one of size {float(sizes.max()):.1f}")
    return a


def log_scale(g: Tensor) -> Tensor:
    """Return log r ``[*]`` of matrices r R with R orthogonal."""
    largest, squared = _squared_scale(g)
    return (torch.log(largest) + 0.5 * torch.log(squared))[..., 0, 0]


def _squared_scale(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry m of matrices r R, and (r / m)², both ``[*, 1, 1]``, without overflow or underflow."""
    largest = g.detach().abs().amax((-2, -1), keepdim=True)
    return largest, (g / largest).square().sum((-2, -1), keepdim=True) / g.shape[-1]


class Translations(LieGroup):
    """The translations of R^d as matrices [[I, t], [0, 1]]. The coordinates of the Lie algebra are t."""

    only_translates = True
    is_orthogonal = True

    def __init__(self, dim: int) -> None:
        check_count("dim", dim)
        super().__init__(f"R^{dim}", dim=dim, size=dim + 1, algebra_dim=dim)

    def element(self, translation: Tensor) -> Tensor:
        """Return the element ``[*, d + 1, d + 1]`` with translation ``[*, d]``."""
        check_last("translation", translation, (self.dim,), self.name)
        return homogeneous(torch.eye(self.dim, dtype=translation.dtype, device=translation.device), translation)

    def product(self, g: Tensor, h: Tensor) -> Tensor:
        return self.element(self.translation(g) + self.translation(h))

    def inverse(self, g: Tensor) -> Tensor:
        return self.element(-self.translation(g))

    def hat(self, a: Tensor) -> Tensor:
        return self.element(a) - self.identity(a)

    def vee(self, matrix: Tensor) -> Tensor:
        return self.translation(matrix)

    def exp(self, a: Tensor) -> Tensor:
        return self.element(a)

    def log(self, g: Tensor) -> Tensor:
        """Return the translation ``[*, dim]``, which is the logarithm and the inverse of :meth:`exp`."""
        return self.translation(g)

    def coordinates(self, g: Tensor) -> Tensor:
        """Return the translation ``[*, dim]``."""
        return self.translation(g)

    @property
    def num_coordinates(self) -> int:
        return self.dim

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Return the length ``[*]`` of the difference."""
        return lengths(self.translation(h) - self.translation(g))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw standard normal translations. The group is not compact and has no uniform distribution."""
        return self.element(draw_normal((*shape, self.dim), generator))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        turned = far(self.linear(g), torch.eye(self.dim, dtype=g.dtype, device=g.device)).flatten(-2).any(-1)
        return super().faults(g) | {"its linear part is not the identity": turned}
