"""Spaces of directions: the sphere, positions with directions, and R^d without 0 as orbits of linear groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lieattn.groups import SE, SO, Dilations, Group, RotationDilations, check_group
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
        return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def section(self, x: Tensor) -> Tensor:
        return minimal_rotation(polar(x)[0])

    def embed(self, h: Tensor) -> Tensor:
        return about_first_axis(h)

    def faults(self, x: Tensor) -> dict[str, Tensor]:
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
        return torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def act(self, g: Tensor, x: Tensor) -> Tensor:
        if x.shape[-1:] != (6,):
            raise ValueError(f"x: expected positions and directions [*, 6], got {tuple(x.shape)}")
        return torch.cat([self.group.act(g, x[..., :3]), self.group.act_vectors(g, x[..., 3:])], dim=-1)

    def section(self, x: Tensor) -> Tensor:
        return SE(3).element(minimal_rotation(polar(x[..., 3:])[0]), x[..., :3])

    def embed(self, h: Tensor) -> Tensor:
        rotation = about_first_axis(h)
        return SE(3).element(rotation, torch.zeros_like(rotation[..., 0]))

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        return {"its direction, the last three components, is not a unit vector": not_unit(x[..., 3:])}


class Orbits(HomogeneousSpace):
    """R^d without 0 under rotations, dilations, or both.

    ======================= ============================= =================== ==========================
    group                   orbits                        invariants of x     stabilizer
    ======================= ============================= =================== ==========================
    ``SO(2)``               circles                       the radius ``|x|``  trivial
    ``SO(3)``               spheres                       the radius ``|x|``  SO(2) about (1, 0, 0)
    ``Dilations(d)``        rays                          direction ``x/|x|`` trivial
    ``RotationDilations(2)``  the plane without 0         none                trivial
    ``RotationDilations(3)``  space without 0             none                SO(2) about (1, 0, 0)
    ======================= ============================= =================== ==========================

    The representative of a sphere or circle is its point on the first axis. The point 0 is an orbit by itself with a
    larger stabilizer and has to be left out. Sections in space jump at the negative first axis, as in :class:`Sphere`.
    TypeError is raised for other groups.
    """

    def __init__(self, group: Group) -> None:
        check_group("group", group, Group)
        if not isinstance(group, SO | Dilations | RotationDilations):
            raise TypeError(
                f"group: expected SO(2), SO(3), Dilations(d) or RotationDilations(d), got {group!r}; "
                "groups with translations act on a Euclidean space"
            )
        turning = not isinstance(group, Dilations)
        invariants = {SO: 1, Dilations: group.dim, RotationDilations: 0}[type(group)]
        stabilizer = SO(2) if turning and group.dim == 3 else None
        super().__init__(f"R^{group.dim} under {group.name}", group, group.dim, stabilizer, invariants)

    @property
    def origin(self) -> Tensor:
        return torch.eye(self.dim, dtype=torch.float64)[0]

    def representative(self, x: Tensor) -> Tensor:
        direction, length = polar(x)
        if isinstance(self.group, Dilations):
            return direction
        first = super().representative(x)
        return first if isinstance(self.group, RotationDilations) else length[..., None] * first

    def invariants(self, x: Tensor) -> Tensor:
        """Radius or direction of x, as in the table, ``[*, num_invariants]``."""
        direction, length = polar(x)
        if isinstance(self.group, Dilations):
            return direction
        return length[..., None] if isinstance(self.group, SO) else x[..., :0]

    def section(self, x: Tensor) -> Tensor:
        direction, length = polar(x)
        if isinstance(self.group, Dilations):
            return length[..., None, None] * self.group.identity(x)
        if self.dim == 2:
            first, second = direction.unbind(-1)
            rotation = torch.stack([first, -second, second, first], dim=-1).unflatten(-1, (2, 2))
        else:
            rotation = minimal_rotation(direction)
        return rotation if isinstance(self.group, SO) else length[..., None, None] * rotation

    def embed(self, h: Tensor) -> Tensor:
        return about_first_axis(h)

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        return {f"it is 0, which {self.group.name} does not move; leave it out or shift the origin": at_origin(x)}


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Directions ``[*, d]`` and lengths ``[*]`` of vectors other than 0, without overflow or underflow."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    scaled = x / largest
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / length, (length * largest)[..., 0]


def at_origin(x: Tensor) -> Tensor:
    """Where vectors ``[*, d]`` are 0, or too short for their direction to be known."""
    return x.abs().amax(-1) < torch.finfo(x.dtype).tiny


def not_unit(n: Tensor) -> Tensor:
    """Where vectors ``[*, d]`` are not of unit length."""
    return (torch.linalg.vector_norm(n, dim=-1) - 1).abs() > 1e-5


def minimal_rotation(n: Tensor) -> Tensor:
    """Rotations ``[*, 3, 3]`` by the least angle that takes (1, 0, 0) to unit vectors n ``[*, 3]``.

    At n = (-1, 0, 0), where all half turns about axes across are as short, the one about (0, 0, 1) is taken. No
    choice of rotations is continuous on the whole sphere: this one jumps there and nowhere else.
    """
    a, across = n[..., 0], n[..., 1:]
    behind = (a < 0)[..., None]
    # So close to the antipode the direction across makes no difference, but its derivative would overflow.
    antipodal = (across.abs().amax(-1, keepdim=True) < torch.finfo(n.dtype).eps ** 2) & behind
    # (1 - a) u uᵀ = v vᵀ / (1 + a) for v = across and u its direction: each form where it does not cancel, the
    # other one with an argument that has a finite gradient.
    before = across / torch.where(behind, 1.0, 1 + a[..., None]).sqrt()
    direction = polar(torch.where(behind & ~antipodal, across, 1.0))[0]
    opposite = direction * torch.where(behind, 1 - a[..., None], 1.0).sqrt()
    half_turn = torch.tensor([math.sqrt(2.0), 0.0], dtype=n.dtype, device=n.device)
    root = torch.where(antipodal, half_turn, torch.where(behind, opposite, before))
    block = torch.eye(2, dtype=n.dtype, device=n.device) - root[..., :, None] * root[..., None, :]
    top = torch.cat([a[..., None], -across], dim=-1)
    bottom = torch.cat([across[..., :, None], block], dim=-1)
    return torch.cat([top[..., None, :], bottom], dim=-2)


def about_first_axis(h: Tensor) -> Tensor:
    """Rotations ``[*, 3, 3]`` about the first axis from rotations ``[*, 2, 2]`` of the plane across it."""
    padded = torch.nn.functional.pad(h, (1, 0, 1, 0))
    corner = torch.zeros_like(padded)
    corner[..., 0, 0] = 1
    return padded + corner
