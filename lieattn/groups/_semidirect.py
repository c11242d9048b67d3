"""Translations, and their semidirect product with a group of linear maps: SE(d), E(d), Sim(d), and yours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn._checks import check_count
from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._group import Group, LieGroup, draw_normal, far, matvec
from lieattn.groups._rotations import SO, O, RotationDilations
from lieattn.groups._skew import norm


class Translations(LieGroup):
    """The translations R^d, as matrices [[I, t], [0, 1]]. Coordinates of the Lie algebra are t."""

    def __init__(self, dim: int) -> None:
        check_count("dim", dim)
        super().__init__(f"R^{dim}", dim=dim, size=dim + 1, algebra_dim=dim)

    def element(self, translation: Tensor) -> Tensor:
        """Element ``[*, d + 1, d + 1]`` with translation ``[*, d]``."""
        return affine(torch.eye(self.dim, dtype=translation.dtype, device=translation.device), translation)

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

    # Coordinates of the Lie algebra and smooth ones are the translation.
    log = coordinates = LieGroup.translation

    @property
    def num_coordinates(self) -> int:
        return self.dim

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Length ``[*]`` of the difference."""
        return norm(self.translation(h) - self.translation(g))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Standard normal translations; the group is not compact and has no uniform distribution."""
        return self.element(draw_normal((*shape, self.dim), generator))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        turned = far(self.linear(g), torch.eye(self.dim, dtype=g.dtype, device=g.device)).flatten(-2).any(-1)
        return super().faults(g) | {"its linear part is not the identity": turned}


@dataclass(frozen=True, init=False, repr=False)
class SemidirectProduct(LieGroup):
    """R^d ⋊ H: elements x ↦ A x + t with A in a group H of linear maps, as matrices [[A, t], [0, 1]].

    Coordinates of the Lie algebra are those of H, then d for the translation: for SE(3) (ω, u). They are
    those of the matrix logarithm, t = V u with V the ``exp_integral`` of H, and not t itself. A finite H has none:
    the exponential reaches the translations alone, and inverses of linear parts are looked up in H.

    ``stabilizer`` is H, which keeps the origin where it is: a finite or Lie group of linear maps.
    """

    stabilizer: Group

    def __init__(self, stabilizer: Group, name: str | None = None) -> None:
        check_group("stabilizer", stabilizer, Group)
        if stabilizer.is_affine:
            raise ValueError(f"stabilizer: expected a group of linear maps, but {stabilizer.name} has translations")
        dim = stabilizer.dim
        object.__setattr__(self, "stabilizer", stabilizer)
        size = {"dim": dim, "size": dim + 1, "algebra_dim": stabilizer.algebra_dim + dim}
        super().__init__(name or f"R^{dim} x| {stabilizer.name}", **size)

    def element(self, linear: int | Tensor, translation: Tensor) -> Tensor:
        """Element ``[*, d + 1, d + 1]`` with linear part ``[*, d, d]`` in H and translation ``[*, d]``.

        The linear parts of a finite H may be given by their indices ``[*]``.
        """
        if translation.shape[-1:] != (self.dim,) or not translation.is_floating_point():
            got = f"{translation.dtype} {tuple(translation.shape)}"
            raise ValueError(f"translation: {self.name} takes floating vectors [*, {self.dim}], got {got}")
        if isinstance(self.stabilizer, FiniteGroup):
            return affine(self.stabilizer.element(linear, translation, argument="linear"), translation)
        return affine(torch.as_tensor(linear), translation)

    def product(self, g: Tensor, h: Tensor) -> Tensor:
        """The element g h, which acts by h first: (A, t)(B, s) = (A B, A s + t)."""
        linear = self.stabilizer.product(self.linear(g), self.linear(h))
        return affine(linear, self.act(g, self.translation(h)))

    def inverse(self, g: Tensor) -> Tensor:
        linear = self.stabilizer.inverse(self.linear(g))
        return affine(linear, -self.stabilizer.act(linear, self.translation(g)))

    def relative(self, g: Tensor, h: Tensor) -> Tensor:
        """The element g⁻¹ h = (A⁻¹ B, A⁻¹ (s - t)); subtracting first keeps it exact far from the origin."""
        inverse = self.stabilizer.inverse(self.linear(g))
        linear = self.stabilizer.product(inverse, self.linear(h))
        return affine(linear, self.stabilizer.act(inverse, self.translation(h) - self.translation(g)))

    def hat(self, a: Tensor) -> Tensor:
        h, u = self._split(a)
        top = torch.cat([self.stabilizer.hat(h), u[..., None]], dim=-1)
        return torch.cat([top, torch.zeros_like(top[..., :1, :])], dim=-2)

    def vee(self, matrix: Tensor) -> Tensor:
        return torch.cat([self.stabilizer.vee(self.linear(matrix)), self.translation(matrix)], dim=-1)

    def exp(self, a: Tensor) -> Tensor:
        h, u = self._split(a)
        translation = matvec(self.stabilizer.exp_integral(h), u)
        return affine(self.stabilizer.exp(h), translation)

    def log(self, g: Tensor) -> Tensor:
        """Coordinates ``[*, algebra_dim]``, the part in H as that group's logarithm gives it."""
        h = self.stabilizer.log(self.linear(g))
        u = matvec(self.stabilizer.inverse_exp_integral(h), self.translation(g))
        return torch.cat([h, u], dim=-1)

    @property
    def num_coordinates(self) -> int:
        return self.stabilizer.num_coordinates + self.dim

    def coordinates(self, g: Tensor) -> Tensor:
        return torch.cat([self.stabilizer.coordinates(self.linear(g)), self.translation(g)], dim=-1)

    def distance(self, g: Tensor, h: Tensor, *, alpha: float = 0.2) -> Tensor:
        """``alpha`` times the distance in H plus ``1 - alpha`` times that of the points, ``[*]``.

        The points are those that g and h move the origin to; their distance is divided by the geometric mean of the
        scales of g and h, if H has any. Left-invariant, symmetric, and a metric if H is orthogonal.
        """
        relative = self.relative(g, h)
        linear = self.linear(relative)
        unit = self.stabilizer.identity(linear)
        moved = norm(self.translation(relative))
        scale = torch.linalg.det(linear).abs() ** (-0.5 / self.dim)
        return alpha * self.stabilizer.distance(unit, linear) + (1 - alpha) * scale * moved

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Linear parts as H draws them, with standard normal translations; the group is not compact."""
        return affine(self.stabilizer.draw(shape, generator), draw_normal((*shape, self.dim), generator))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        found = super().faults(g)
        return found | {f"in its linear part, {f}": w for f, w in self.stabilizer.faults(self.linear(g)).items()}

    def _split(self, a: Tensor) -> tuple[Tensor, Tensor]:
        a = self._checked_algebra(a)
        return a[..., : -self.dim], a[..., -self.dim :]


def SE(dim: int) -> SemidirectProduct:  # noqa: N802 - the name of the group
    """Rigid motions of R^2 or R^3, SE(d) = R^d ⋊ SO(d)."""
    return SemidirectProduct(SO(dim), f"SE({dim})")


def E(dim: int) -> SemidirectProduct:  # noqa: N802 - the name of the group
    """Rigid motions and reflections of R^2 or R^3, E(d) = R^d ⋊ O(d)."""
    return SemidirectProduct(O(dim), f"E({dim})")


def Sim(dim: int) -> SemidirectProduct:  # noqa: N802 - the name of the group
    """Similarities of R^2 or R^3: rigid motions and dilations, Sim(d) = R^d ⋊ (R+ x SO(d))."""
    return SemidirectProduct(RotationDilations(dim), f"Sim({dim})")


def affine(linear: Tensor, translation: Tensor) -> Tensor:
    """Matrices [[A, t], [0, 1]] ``[*, d + 1, d + 1]`` from ``[*, d, d]`` and ``[*, d]``."""
    dim = translation.shape[-1]
    shape = torch.broadcast_shapes(linear.shape[:-2], translation.shape[:-1])
    top = torch.cat([linear.expand(*shape, dim, dim), translation[..., None].expand(*shape, dim, 1)], dim=-1)
    bottom = torch.zeros_like(top[..., :1, :])
    bottom[..., -1] = 1
    return torch.cat([top, bottom], dim=-2)
