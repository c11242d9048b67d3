"""Dilations, alone and with rotations: x ↦ r x and x ↦ r R x with r > 0."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn._checks import check_count
from lieattn.groups._group import LieGroup, draw_normal, far
from lieattn.groups._rotations import SO
from lieattn.groups._series import expm1_ratio
from lieattn.groups._skew import scaled_rotation_integral


class Dilations(LieGroup):
    """The positive numbers R+ as dilations r I of R^d. The coordinate of the Lie algebra is log r.

    Parameters
    ----------
    dim
        d.
    """

    def __init__(self, dim: int = 2) -> None:
        check_count("dim", dim)
        super().__init__(f"R+({dim})", dim=dim, size=dim, algebra_dim=1)

    def inverse(self, g: Tensor) -> Tensor:
        """The inverse I / r."""
        return g / _squared_scale(g)

    def hat(self, a: Tensor) -> Tensor:
        """``[*, d, d]`` from ``[*, 1]``."""
        return a[..., None] * self.identity(a)

    def vee(self, matrix: Tensor) -> Tensor:
        """``[*, 1]`` from ``[*, d, d]``."""
        return matrix[..., 0, 0, None]

    def exp(self, a: Tensor) -> Tensor:
        """Dilation by the exponential of ``[*, 1]``."""
        return self.hat(torch.exp(a)) + torch.zeros_like(self.identity(a))

    def log(self, g: Tensor) -> Tensor:
        """Logarithm of r ``[*, 1]``."""
        return log_scale(g)[..., None]

    def exp_integral(self, a: Tensor) -> Tensor:
        """``∫₀¹ exp(x a) dx`` in closed form."""
        return self.hat(expm1_ratio(a))

    def inverse_exp_integral(self, a: Tensor) -> Tensor:
        """Its inverse in closed form."""
        return self.hat(1 / expm1_ratio(a))

    @property
    def num_coordinates(self) -> int:
        """One."""
        return 1

    def coordinates(self, g: Tensor) -> Tensor:
        """Logarithm of r ``[*, 1]``, smooth everywhere and not dominated by large scales."""
        return self.log(g)

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """``|log(r_h / r_g)|`` ``[*]``; invariant from both sides."""
        return log_scale(self.relative(g, h)).abs()

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Dilations with a standard normal log r; the group is not compact and has no uniform distribution."""
        return self.exp(draw_normal((*shape, 1), generator))

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        """Matrices other than positive multiples of the identity."""
        scale = g[..., 0, 0]
        positive = scale > 0
        relative = g / torch.where(positive, scale, 1.0)[..., None, None]
        return {
            "it does not scale by a positive number": ~positive,
            "it is not a multiple of the identity": far(relative, self.identity(g)).flatten(-2).any(-1),
        }


class RotationDilations(LieGroup):
    """R+ x SO(d): rotations with dilations, r R. Coordinates of the Lie algebra are log r, then the rotation.

    Parameters
    ----------
    dim
        2 or 3.
    """

    def __init__(self, dim: int = 2) -> None:
        rotations = SO(dim)
        super().__init__(f"R+xSO({dim})", dim=dim, size=dim, algebra_dim=1 + rotations.algebra_dim)

    @property
    def rotations(self) -> SO:
        """SO(d)."""
        return SO(self.dim)

    def split(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of r ``[*]`` and the rotation ``[*, d, d]`` of elements."""
        scale = log_scale(g)
        return scale, g * torch.exp(-scale)[..., None, None]

    def inverse(self, g: Tensor) -> Tensor:
        """The inverse: the transpose, scaled back."""
        return g.mT / _squared_scale(g)

    def hat(self, a: Tensor) -> Tensor:
        """``[*, d, d]`` from ``[*, algebra_dim]``."""
        return a[..., :1, None] * self.identity(a) + self.rotations.hat(a[..., 1:])

    def vee(self, matrix: Tensor) -> Tensor:
        """``[*, algebra_dim]`` from ``[*, d, d]``."""
        return torch.cat([matrix[..., 0, 0, None], self.rotations.vee(matrix)], dim=-1)

    def exp(self, a: Tensor) -> Tensor:
        """Rotation and dilation ``[*, d, d]`` with coordinates ``[*, algebra_dim]``."""
        return torch.exp(a[..., :1, None]) * self.rotations.exp(a[..., 1:])

    def log(self, g: Tensor) -> Tensor:
        """Logarithm of r, then the logarithm of the rotation; at an angle of π as in :meth:`SO.log`."""
        scale, rotation = self.split(g)
        return torch.cat([scale[..., None], self.rotations.log(rotation)], dim=-1)

    def exp_integral(self, a: Tensor) -> Tensor:
        """``∫₀¹ exp(x a) dx`` in closed form."""
        return scaled_rotation_integral(a[..., 0], a[..., 1:])

    def inverse_exp_integral(self, a: Tensor) -> Tensor:
        """Its inverse in closed form, for angles below 2π."""
        return scaled_rotation_integral(a[..., 0], a[..., 1:], inverse=True)

    @property
    def num_coordinates(self) -> int:
        """One, and those of the rotation."""
        return 1 + self.rotations.num_coordinates

    def coordinates(self, g: Tensor) -> Tensor:
        """Logarithm of r, then the entries of the rotation, ``[*, num_coordinates]``."""
        scale, rotation = self.split(g)
        return torch.cat([scale[..., None], self.rotations.coordinates(rotation)], dim=-1)

    def distance(self, g: Tensor, h: Tensor, *, alpha: float = 0.5) -> Tensor:
        """``alpha`` times the angle plus ``1 - alpha`` times ``|log(r_h / r_g)|``; invariant from both sides."""
        scale, rotation = self.split(self.relative(g, h))
        return alpha * self.rotations.distance(self.identity(g), rotation) + (1 - alpha) * scale.abs()

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Uniform rotations with a standard normal log r; the group is not compact."""
        rotation = self.rotations.draw(shape, generator)
        return torch.exp(draw_normal((*shape, 1, 1), generator)) * rotation

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        """Matrices whose columns are not orthogonal and equally long, and improper ones."""
        degenerate = _squared_scale(g)[..., 0, 0] == 0
        rotation = torch.where(degenerate[..., None, None], self.identity(g), self.split(g)[1])
        return {"it is zero": degenerate} | {
            f"after scaling, {fault}": where for fault, where in self.rotations.faults(rotation).items()
        }


def log_scale(g: Tensor) -> Tensor:
    """Logarithm of r ``[*]`` of matrices r R with R orthogonal."""
    return 0.5 * torch.log(_squared_scale(g)[..., 0, 0])


def _squared_scale(g: Tensor) -> Tensor:
    return (g * g).sum((-2, -1), keepdim=True) / g.shape[-1]
