"""The sphere S^2 under rotations, and positions with directions, R^3 x S^2, under rigid motions."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.groups import SE, SO
from lieattn.spaces._directions import about_first_axis, minimal_rotation, not_unit, polar
from lieattn.spaces._space import HomogeneousSpace


class Sphere(HomogeneousSpace):
    """S^2, the unit vectors of R^3, under SO(3): the origin is (1, 0, 0), its stabilizer SO(2) about this axis.

    The section takes the origin to x by the least angle. No section of the sphere is continuous everywhere: this
    one jumps at (-1, 0, 0), where it is the half turn about (0, 0, 1), and its derivative grows without bound near
    there. What is averaged over the whole stabilizer does not depend on the choice.
    """

    def __init__(self) -> None:
        super().__init__("S^2", SO(3), 3, SO(2))

    @property
    def origin(self) -> Tensor:
        """(1, 0, 0)."""
        return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def section(self, x: Tensor) -> Tensor:
        """Rotations ``[*, 3, 3]`` by the least angle that take (1, 0, 0) to x ``[*, 3]``."""
        return minimal_rotation(polar(x)[0])

    def embed(self, h: Tensor) -> Tensor:
        """Rotations ``[*, 3, 3]`` about (1, 0, 0) from ``[*, 2, 2]``."""
        return about_first_axis(h)

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        """Vectors that are not of unit length."""
        return {"it is not a unit vector; divide by its length": not_unit(x)}


class PositionDirection(HomogeneousSpace):
    """R^3 x S^2, positions p with unit directions n, as ``(p, n)`` of 6 components, under SE(3).

    The origin is the position 0 with direction (1, 0, 0); its stabilizer is SO(2) about this axis. The section is
    that of :class:`Sphere` for the direction, followed by a translation by p, and jumps at the same directions.
    """

    def __init__(self) -> None:
        super().__init__("R^3 x S^2", SE(3), 6, SO(2))

    @property
    def origin(self) -> Tensor:
        """(0, 0, 0, 1, 0, 0)."""
        return torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def act(self, g: Tensor, x: Tensor) -> Tensor:
        """Move positions and turn directions ``[*, 6]``."""
        self._check_components(x)
        return torch.cat([self.group.act(g, x[..., :3]), self.group.act_vectors(g, x[..., 3:])], dim=-1)

    def section(self, x: Tensor) -> Tensor:
        """Rigid motions ``[*, 4, 4]`` that take the origin to x ``[*, 6]``."""
        return SE(3).element(minimal_rotation(polar(x[..., 3:])[0]), x[..., :3])

    def embed(self, h: Tensor) -> Tensor:
        """Rotations about (1, 0, 0) as rigid motions ``[*, 4, 4]``, from ``[*, 2, 2]``."""
        rotation = about_first_axis(h)
        return SE(3).element(rotation, torch.zeros_like(rotation[..., 0]))

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        """Directions that are not of unit length."""
        return {"its direction, the last three components, is not a unit vector": not_unit(x[..., 3:])}

    def _check_components(self, x: Tensor) -> None:
        if x.shape[-1:] != (6,):
            raise ValueError(f"x: expected positions and directions [*, 6], got {tuple(x.shape)}")
