"""Semidirect products of translations with linear maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lieattn._core.checks import check_last
from lieattn._core.numerics import lengths
from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._group import (
    Group,
    LieGroup,
    affine,
    draw_normal,
    drawn,
    homogeneous,
    matvec,
    volume,
)
from lieattn.groups._lie import SO, O, RotationDilations


@dataclass(frozen=True, init=False, repr=False, eq=False)
class SemidirectProduct(LieGroup):
    """The semidirect product R^d ⋊ H of maps x ↦ A x + t with A in H, as matrices [[A, t], [0, 1]].

    The coordinates of the Lie algebra are those of H, then d numbers u for the translation: (ω, u) for SE(3). The
    translation of the exponential is t = V u, where V is the ``exp_integral`` of H. If H is finite, its algebra has no
    coordinates, the exponential reaches only the translations, and inverses of linear parts are looked up in H.

    ``stabilizer`` is H, the subgroup that fixes the origin: a finite or Lie group of linear maps. ValueError is raised
    if it has translations.
    """

    stabilizer: Group

    def __init__(self, stabilizer: Group, name: str | None = None) -> None:
        check_group("stabilizer", stabilizer, Group)
        if stabilizer.is_affine:
            raise ValueError(f"stabilizer: expected a group of linear maps, but {stabilizer.name} has translations")
        dim = stabilizer.dim
        object.__setattr__(self, "stabilizer", stabilizer)
        size = {"dim": dim, "size": dim + 1, "algebra_dim": stabilizer.algebra_dim + dim}
        super().__init__(f"R^{dim} x| {stabilizer.name}" if name is None else name, **size)

    @property
    def is_orthogonal(self) -> bool | None:
        return self.stabilizer.is_orthogonal

    @property
    def is_conformal(self) -> bool | None:
        return self.stabilizer.is_conformal

    @property
    def has_logarithm(self) -> bool:
        return self.stabilizer.has_logarithm

    def element(self, linear: int | Tensor, translation: Tensor) -> Tensor:
        """Return the element ``[*, d + 1, d + 1]`` with linear part ``[*, d, d]`` in H and translation ``[*, d]``.

        If H is finite, linear parts can also be given by their indices ``[*]``.
        """
        check_last("translation", translation, (self.dim,), self.name)
        if isinstance(self.stabilizer, FiniteGroup):
            linear = self.stabilizer.element(linear, translation, argument="linear")
        check_last("linear", linear, (self.dim, self.dim), self.name)
        return affine(cast(Tensor, linear), translation)

    def product(self, g: Tensor, h: Tensor) -> Tensor:
        linear = self.stabilizer.product(self.linear(g), self.linear(h))
        return homogeneous(linear, self._moved(g, self.translation(h)))

    def inverse(self, g: Tensor) -> Tensor:
        linear = self.stabilizer.inverse(self.linear(g))
        return homogeneous(linear, -matvec(linear, self.translation(g)))

    def relative(self, g: Tensor, h: Tensor) -> Tensor:
        """Return g⁻¹ h = (A⁻¹ B, A⁻¹ (s - t)). Subtracting first keeps it accurate far from the origin."""
        inverse = self.stabilizer.inverse(self.linear(g))
        translation = matvec(inverse, self.translation(h) - self.translation(g))
        return homogeneous(self.stabilizer.product(inverse, self.linear(h)), translation)

    def hat(self, a: Tensor) -> Tensor:
        h, u = self._split(a)
        top = torch.cat([self.stabilizer.hat(h), u[..., None]], dim=-1)
        return torch.cat([top, torch.zeros_like(top[..., :1, :])], dim=-2)

    def vee(self, matrix: Tensor) -> Tensor:
        return torch.cat([self.stabilizer.vee(self.linear(matrix)), self.translation(matrix)], dim=-1)

    def exp(self, a: Tensor) -> Tensor:
        h, u = self._split(a)
        linear = self.stabilizer.exp(h)
        return homogeneous(linear, matvec(self.stabilizer.exp_integral(h), u))

    def log(self, g: Tensor) -> Tensor:
        h = self.stabilizer.log(self.linear(g))
        u = matvec(self.stabilizer.inverse_exp_integral(h), self.translation(g))
        return torch.cat([h, u], dim=-1)

    @property
    def num_coordinates(self) -> int:
        return self.stabilizer.num_coordinates + self.dim

    def coordinates(self, g: Tensor) -> Tensor:
        return torch.cat([self.stabilizer.coordinates(self.linear(g)), self.translation(g)], dim=-1)

    def distance(self, g: Tensor, h: Tensor, *, alpha: float = 0.2) -> Tensor:
        """Return ``alpha`` times the distance in H plus ``1 - alpha`` times the distance of the points, ``[*]``.

        The points are the images of the origin under g and h. If H has dilations, their distance is divided by the
        geometric mean of the scales of g and h. The result is left-invariant and symmetric, and a metric if H is
        orthogonal.
        """
        relative = self.relative(g, h)
        turned = self.stabilizer.distance(self.linear(g), self.linear(h))
        scale = (volume(self.linear(relative)) ** (-0.5 / self.dim)).to(relative.dtype)
        return alpha * turned + (1 - alpha) * scale * lengths(self.translation(relative))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw linear parts as H does, and standard normal translations. The group is not compact."""
        return homogeneous(drawn(self.stabilizer, shape, generator), draw_normal((*shape, self.dim), generator))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        own = self.stabilizer.faults(self.linear(g))
        return super().faults(g) | {f"in its linear part, {fault}": where for fault, where in own.items()}

    def _split(self, a: Tensor) -> tuple[Tensor, Tensor]:
        a = self._checked_algebra(a)
        return a[..., : -self.dim], a[..., -self.dim :]


def SE(dim: int) -> SemidirectProduct:  # noqa: N802 - the name of the group
    """Return SE(d) = R^d ⋊ SO(d), the rigid motions of R^2 or R^3."""
    return SemidirectProduct(SO(dim), f"SE({dim})")


def E(dim: int) -> SemidirectProduct:  # noqa: N802 - the name of the group
    """Return E(d) = R^d ⋊ O(d), the rigid motions and reflections of R^2 or R^3."""
    return SemidirectProduct(O(dim), f"E({dim})")


def Sim(dim: int) -> SemidirectProduct:  # noqa: N802 - the name of the group
    """Return Sim(d) = R^d ⋊ (R+ x SO(d)), the similarities of R^2 or R^3: rigid motions with dilations."""
    return SemidirectProduct(RotationDilations(dim), f"Sim({dim})")


def linear_part(group: Any) -> Any:
    """Return H for a semidirect product R^d ⋊ H, and everything else unchanged: other groups, or None for no group.

    Examples
    --------
    >>> linear_part(SE(3)), linear_part(SO(2)), linear_part(None)
    (SO(3), SO(2), None)
    """
    return group.stabilizer if isinstance(group, SemidirectProduct) else group
