"""The interface of homogeneous spaces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lieattn._core.checks import (
    check_broadcast,
    check_count,
    check_none,
    check_returned,
    check_tensor,
    may_read_values,
)
from lieattn._core.values import equal_values
from lieattn.groups import (
    SE,
    SO,
    FiniteGroup,
    Group,
    O,
    SemidirectProduct,
    Translations,
    affine,
    check_group,
    linear_part,
)

_NORMAL_PART = 1e-3  # of the longest vector, which a field of tangent vectors may have


@dataclass(frozen=True)
class HomogeneousSpace:
    """A space X on which a group G acts, described orbit by orbit. Like a group, it is a value without data.

    If G is transitive, there is one orbit, and X = G/H: every point is x = g o for the origin o. The elements g that
    map o to x are s(x) h, where s is a section and h an element of the stabilizer H of the origin. If G is not
    transitive, a representative of each orbit takes the place of the origin. All representatives have the same
    stabilizer, and invariants distinguish the orbits.

    To define a space, override :meth:`section`, and also :meth:`representative`, :meth:`invariants`, :meth:`embed`,
    :meth:`act` and :meth:`faults` if they differ from the defaults. docs/your_own_group.md has worked examples.

    Attributes
    ----------
    name
        Name of the space in messages.
    group
        The group G.
    dim
        Number of components of a point.
    stabilizer
        The stabilizer H as a group of matrices, which :meth:`embed` maps into G; None if it is trivial.
    num_invariants
        Number of invariants of an orbit; 0 if G is transitive.
    """

    name: str
    group: Group
    dim: int
    stabilizer: Group | None = None
    num_invariants: int = 0

    def __post_init__(self) -> None:
        check_group("group", self.group, Group)
        check_count("dim", self.dim)
        check_count("num_invariants", self.num_invariants, least=0)
        if self.stabilizer is not None:
            check_group("stabilizer", self.stabilizer, Group)

    def __eq__(self, other: object) -> bool:
        # All attributes are compared, since a space of the user may have further ones, such as a radius.
        return equal_values(self, other) if isinstance(other, HomogeneousSpace) else NotImplemented

    # --- points ---------------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Float[Tensor, " {self.dim}"]:
        """The point ``[dim]`` float64 whose section is the identity. It is the representative of one of the orbits."""
        return torch.zeros(self.dim, dtype=torch.float64)

    def representative(self, x: Float[Tensor, "*batch {self.dim}"]) -> Float[Tensor, "*batch {self.dim}"]:
        """Return the points ``[*, dim]`` that ``section(x)`` maps to x. They are the origin if G is transitive."""
        return self.origin.to(device=x.device, dtype=x.dtype).expand_as(x)

    def act(
        self, g: Float[Tensor, "*#batch n n"], x: Float[Tensor, "*#batch {self.dim}"]
    ) -> Float[Tensor, "... {self.dim}"]:
        """Move points ``[*, dim]`` by elements ``[*, m, m]`` of G. Errors are those of :meth:`Group.act`."""
        return self.group.act(g, x)

    def invariants(self, x: Float[Tensor, "*batch {self.dim}"]) -> Float[Tensor, "*batch {self.num_invariants}"]:
        """Return the invariants ``[*, num_invariants]``, which are equal for x and g x and differ between orbits."""
        return x[..., :0]

    def tangent(
        self, x: Float[Tensor, "*batch {self.dim}"], vectors: Float[Tensor, "*batch count n"]
    ) -> Float[Tensor, "*batch count n"]:
        """Return the tangent parts of vectors ``[*, count, n]`` at points ``[*, dim]``; in R^d all of them."""
        return vectors

    # --- lifting --------------------------------------------------------------------------------------------------

    def section(self, x: Float[Tensor, "*batch {self.dim}"]) -> Float[Tensor, "*batch n n"]:
        """Return an element ``[*, m, m]`` for each point x ``[*, dim]``, which maps the representative of x to x."""
        raise NotImplementedError(f"{self.name} does not define a section: implement section")

    def embed(self, h: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch n n"]:
        """Map matrices ``[*, k, k]`` of the stabilizer to elements ``[*, m, m]`` of G."""
        if self.stabilizer is None or self.stabilizer.size == self.group.size:
            return h
        if self.group.is_affine and self.stabilizer.size == self.group.dim:
            return affine(h, torch.zeros_like(h[..., 0]))
        raise NotImplementedError(
            f"{self.name} does not define how its stabilizer is embedded in its group: implement embed"
        )

    def lift(
        self, x: Float[Tensor, "*batch {self.dim}"], h: Float[Tensor, "... k k"] | None = None
    ) -> Float[Tensor, "... n n"]:
        """Return the elements ``section(x) h`` ``[*, fiber, m, m]`` over points x ``[*, dim]``.

        The elements h of the stabilizer are ``[fiber, k, k]``, the same for all points, or ``[*, fiber, k, k]``. If
        ``h`` is None, the result is the section, with a fiber of one element.
        """
        self.check("x", x)
        section, sizes, what = self.section(x), (self.group.size,) * 2, f"elements of {self.group.name}"
        check_returned(f"section of {self.name}", section, what, (*x.shape[:-1], *sizes), x)
        section = section[..., None, :, :]
        if h is None:
            return section
        if self.stabilizer is None:
            raise ValueError(f"h: expected None, since the stabilizer of {self.name} is trivial")
        self.stabilizer.check("h", h)
        if h.ndim < 3:
            raise ValueError(f"h: expected [fiber, k, k] or [*, fiber, k, k], got {tuple(h.shape)}")
        check_broadcast("x", x.shape[:-1], "h", h.shape[:-3])
        h = h.to(dtype=x.dtype, device=x.device)
        embedded = self.embed(h)
        check_returned(f"embed of {self.name}", embedded, what, (*h.shape[:-2], *sizes), h)
        return self.group.product(section, embedded)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, argument: str, x: Tensor) -> None:
        """Raise TypeError or ValueError, naming the argument, unless ``x`` contains points of this space.

        Subclasses override :meth:`faults`, not this method.
        """
        check_tensor(argument, x, f"floating points of {self.name}")
        if x.shape[-1:] != (self.dim,):
            found = f"got {tuple(x.shape)}"
            if isinstance(self, Euclidean) and x.ndim and x.shape[-1] in (2, 3):
                examples = "cyclic(4) or SE(2)" if x.shape[-1] == 2 else "octahedral() or SE(3)"
                found += f": points with {x.shape[-1]} coordinates need a group such as {examples}"
            raise ValueError(f"{argument}: expected points [*, {self.dim}] of {self.name}, {found}")
        infinite = ~torch.isfinite(x.detach()).all(-1)
        for fault, where in {"it is not finite": infinite, **self.faults(x.detach())}.items():
            check_none(argument, where, f"is not a point of {self.name}: {fault}")

    def check_tangent(self, argument: str, x: Tensor, vectors: Tensor) -> None:
        """Raise ValueError, naming the argument, unless vectors ``[*, count, n]`` at points ``[*, dim]`` are tangent.

        A normal part of 0.1 % of the longest vector is allowed, for data with few digits. In R^d, all are tangent.
        """
        x, given = x.detach(), vectors.detach()
        if (part := self.tangent(x, given)) is given:
            return
        length, normal = (torch.linalg.vector_norm(v, dim=-1).flatten() for v in (given, given - part))
        if not may_read_values(normal) or not len(normal) or normal.max() <= _NORMAL_PART * length.max():
            return
        share = float((normal / length)[normal > _NORMAL_PART * length.max()].max())
        raise ValueError(
            f"{argument}: expected vectors that are tangent to {self.name} at their points, got normal parts of up to "
            f"{share:.1%} of the length; remove them with space.tangent, and make them features if they matter. A "
            "vector that all points share is [clouds, 3]; vectors in space are fields of type '1o'"
        )

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        """Return the reasons why finite vectors ``[*, dim]`` are not points of this space.

        The keys describe the reasons. The values are masks ``[*]`` of the vectors that they apply to.
        """
        return {}


class Euclidean(HomogeneousSpace):
    """R^d under R^d ⋊ H. The origin is 0, its stabilizer is H, and the section consists of translations.

    ``group`` is ``SE(d)``, ``E(d)``, ``Sim(d)``, ``Translations(d)`` or another ``SemidirectProduct``. A finite group H
    stands for ``SemidirectProduct(H)``.
    """

    def __init__(self, group: Group) -> None:
        check_group("group", group, Group)
        if isinstance(group, FiniteGroup):
            group = SemidirectProduct(group)
        linear = linear_part(group)
        if linear is group and not group.only_translates:
            expected = f"group: expected Translations or a SemidirectProduct such as SE(3), got {group!r}"
            raise TypeError(f"{expected}; for a group that fixes the origin use Orbits")
        super().__init__(f"R^{group.dim} under {group.name}", group, group.dim, None if linear is group else linear)

    def section(self, x: Tensor) -> Tensor:
        """Return the translations by x ``[*, d + 1, d + 1]``, which are smooth in x."""
        return Translations(self.dim).element(x)


class Sphere(HomogeneousSpace):
    """S^2, the unit vectors of R^3, under SO(3). The origin is (1, 0, 0), with the stabilizer SO(2) about this axis.

    If ``improper``, the group is O(3), which includes reflections, and the stabilizer is O(2).

    The section rotates the origin to x by the least angle. No section of the sphere is continuous everywhere. This one
    jumps at (-1, 0, 0), where it is the half turn about (0, 0, 1), and its derivative is unbounded near this point.
    Averages over the whole stabilizer do not depend on the choice of the section.
    """

    def __init__(self, *, improper: bool = False) -> None:
        group = O if improper else SO
        super().__init__("S^2", group(3), 3, group(2))

    @property
    def origin(self) -> Tensor:
        return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def section(self, x: Tensor) -> Tensor:
        return minimal_rotation(polar(x)[0])

    def embed(self, h: Tensor) -> Tensor:
        return about_first_axis(h)

    def tangent(self, x: Tensor, vectors: Tensor) -> Tensor:
        normal = x.to(vectors.dtype)[..., None, :]
        return vectors - (vectors * normal).sum(-1, keepdim=True) * normal

    def exponential(
        self, x: Float[Tensor, "*batch 3"], vectors: Float[Tensor, "*batch count 3"]
    ) -> Float[Tensor, "*batch count 3"]:
        """Return the points that tangent vectors ``[*, count, 3]`` at points ``[*, 3]`` lead to along great circles."""
        length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        return length.cos() * x.to(vectors.dtype)[..., None, :] + torch.sinc(length / torch.pi) * vectors

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        return {"it is not a unit vector; divide by its length": not_unit(x)}


class PositionDirection(HomogeneousSpace):
    """R^3 x S^2 under SE(3): positions p with unit directions n, as vectors ``(p, n)`` of 6 components.

    The origin is the position 0 with direction (1, 0, 0), and its stabilizer is SO(2) about this axis. The section is
    the section of :class:`Sphere` at n, followed by the translation by p. It is discontinuous at the same directions.
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

    The representative of a sphere or circle is its point on the positive first axis. The point 0 is excluded, since it
    is an orbit by itself with a larger stabilizer. Sections in space jump at the negative first axis, as in
    :class:`Sphere`.
    """

    def __init__(self, group: Group) -> None:
        check_group("group", group, Group)
        turns_or_scales = group.is_conformal and (group.has_rotations or group.has_dilations)
        if not turns_or_scales or group.is_affine or group.has_reflections:
            expected = f"group: expected SO(2), SO(3), Dilations(d) or RotationDilations(d), got {group!r}"
            raise TypeError(f"{expected}; for groups with translations use Euclidean")
        invariants = 1 - group.has_dilations if group.has_rotations else group.dim
        stabilizer = SO(2) if group.has_rotations and group.dim == 3 else None
        super().__init__(f"R^{group.dim} under {group.name}", group, group.dim, stabilizer, invariants)

    @property
    def origin(self) -> Tensor:
        return torch.eye(self.dim, dtype=torch.float64)[0]

    def representative(self, x: Tensor) -> Tensor:
        direction, length = polar(x)
        if not self.group.has_rotations:
            return direction
        first = super().representative(x)
        return first if self.group.has_dilations else length[..., None] * first

    def invariants(self, x: Tensor) -> Tensor:
        """Return the radius or the direction of x, as in the table, ``[*, num_invariants]``."""
        direction, length = polar(x)
        if not self.group.has_rotations:
            return direction
        return x[..., :0] if self.group.has_dilations else length[..., None]

    def section(self, x: Tensor) -> Tensor:
        direction, length = polar(x)
        if not self.group.has_rotations:
            return length[..., None, None] * self.group.identity(x)
        if self.dim == 2:
            first, second = direction.unbind(-1)
            rotation = torch.stack([first, -second, second, first], dim=-1).unflatten(-1, (2, 2))
        else:
            rotation = minimal_rotation(direction)
        return length[..., None, None] * rotation if self.group.has_dilations else rotation

    def embed(self, h: Tensor) -> Tensor:
        return about_first_axis(h)

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        # Subnormal numbers are too inaccurate for a direction.
        zero = x.abs().amax(-1) < torch.finfo(x.dtype).tiny
        return {f"it is 0, which {self.group.name} does not move; leave it out or shift the origin": zero}


def polar(x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """Return directions ``[*, d]`` and lengths ``[*]`` of nonzero vectors, without overflow or underflow."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    scaled = x / largest
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / length, (length * largest)[..., 0]


def not_unit(n: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch"]:
    """Return the mask ``[*]`` of vectors ``[*, d]`` that do not have unit length, up to the rounding of their dtype."""
    allowed = max(1e-5, 8 * torch.finfo(n.dtype).eps)
    dtype = torch.promote_types(n.dtype, torch.float32)
    return (torch.linalg.vector_norm(n, dim=-1, dtype=dtype) - 1).abs() > allowed


def minimal_rotation(n: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3 3"]:
    """Return the rotations ``[*, 3, 3]`` of least angle that map (1, 0, 0) to unit vectors n ``[*, 3]``.

    At n = (-1, 0, 0), every half turn about a perpendicular axis has the least angle, and the half turn about (0, 0, 1)
    is returned. No choice of rotations is continuous on the whole sphere; this one is discontinuous only there.
    """
    a, across = n[..., 0], n[..., 1:]
    behind = (a < 0)[..., None]
    # This close to the antipode, the perpendicular direction has no effect, but its derivative would overflow.
    antipodal = (across.abs().amax(-1, keepdim=True) < torch.finfo(n.dtype).eps ** 2) & behind
    # (1 - a) u uᵀ = v vᵀ / (1 + a) for v = across and its direction u. Each form is used where it does not cancel; the
    # other one gets an argument with a finite gradient.
    before = across / torch.where(behind, 1.0, 1 + a[..., None]).sqrt()
    direction = polar(torch.where(behind & ~antipodal, across, 1.0))[0]
    opposite = direction * torch.where(behind, 1 - a[..., None], 1.0).sqrt()
    half_turn = torch.tensor([math.sqrt(2.0), 0.0], dtype=n.dtype, device=n.device)
    root = torch.where(antipodal, half_turn, torch.where(behind, opposite, before))
    block = torch.eye(2, dtype=n.dtype, device=n.device) - root[..., :, None] * root[..., None, :]
    top = torch.cat([a[..., None], -across], dim=-1)
    bottom = torch.cat([across[..., :, None], block], dim=-1)
    return torch.cat([top[..., None, :], bottom], dim=-2)


def about_first_axis(h: Float[Tensor, "*batch 2 2"]) -> Float[Tensor, "*batch 3 3"]:
    """Return the orthogonal matrices ``[*, 3, 3]`` that fix the first axis and act by ``[*, 2, 2]`` on the others."""
    padded = torch.nn.functional.pad(h, (1, 0, 1, 0))
    corner = torch.zeros_like(padded)
    corner[..., 0, 0] = 1
    return padded + corner
