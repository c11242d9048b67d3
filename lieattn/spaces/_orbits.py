"""R^d without 0 under linear groups: orbits, told apart by their invariants."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.groups import SO, Dilations, Group, RotationDilations, check_group
from lieattn.spaces._directions import about_first_axis, at_origin, minimal_rotation, polar
from lieattn.spaces._space import HomogeneousSpace


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

    Parameters
    ----------
    group
        One of those above.

    Raises
    ------
    TypeError
        If it is another group.
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
        """(1, 0, ..., 0)."""
        return torch.eye(self.dim, dtype=torch.float64)[0]

    def representative(self, x: Tensor) -> Tensor:
        """Point ``[*, dim]`` of the orbit of x that ``section(x)`` takes to x."""
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
        """Elements ``[*, dim, dim]`` that take the representative of its orbit to x ``[*, dim]``."""
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
        """Rotations ``[*, 3, 3]`` about (1, 0, 0) from ``[*, 2, 2]``."""
        return about_first_axis(h)

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        """Points at 0."""
        return {f"it is 0, which {self.group.name} does not move; leave it out or shift the origin": at_origin(x)}
