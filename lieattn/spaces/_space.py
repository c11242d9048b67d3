"""The interface of a space that a group acts on, how its points are lifted to the group, and Euclidean space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn._checks import check_count, check_none, check_tensor
from lieattn.groups import FiniteGroup, Group, SemidirectProduct, Translations, affine, check_group


@dataclass(frozen=True)
class HomogeneousSpace:
    """A space X on which a group G acts, seen orbit by orbit; a value without data, like the group.

    If G is transitive there is one orbit and X = G/H: every point is x = g o for the origin o, and the elements
    that do so are s(x) h with s a section and h in the stabilizer H of the origin. Otherwise each orbit has a
    representative in place of the origin, all with the same stabilizer, and the orbits are told apart by invariants.

    A space of your own overrides :meth:`section`, and where they differ from the defaults :meth:`representative`,
    :meth:`invariants`, :meth:`embed`, :meth:`act` and :meth:`faults`; docs/your_own_group.md has worked examples.

    ``name`` is what the space is called in messages, ``group`` is G, ``dim`` the number of components of a point,
    ``stabilizer`` H as a group of matrices, which :meth:`embed` takes into G, or None if it is trivial, and
    ``num_invariants`` the number of invariants of an orbit, 0 if G is transitive.
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

    # --- points ---------------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Tensor:
        """The point ``[dim]`` float64 that the identity is lifted from; a representative of one of the orbits."""
        return torch.zeros(self.dim, dtype=torch.float64)

    def representative(self, x: Tensor) -> Tensor:
        """Point ``[*, dim]`` of the orbit of x that ``section(x)`` takes to x; the origin if G is transitive."""
        return self.origin.to(device=x.device, dtype=x.dtype).expand_as(x)

    def act(self, g: Tensor, x: Tensor) -> Tensor:
        """Move points ``[*, dim]``; raises ValueError if they have another dimension."""
        return self.group.act(g, x)

    def invariants(self, x: Tensor) -> Tensor:
        """Invariants of the orbit of x, ``[*, num_invariants]``: the same for x and g x, different on other orbits."""
        return x[..., :0]

    # --- lifting --------------------------------------------------------------------------------------------------

    def section(self, x: Tensor) -> Tensor:
        """One element ``[*, m, m]`` for each point ``[*, dim]``, which takes the representative of its orbit to x."""
        raise NotImplementedError(f"{self.name} defines no section")

    def embed(self, h: Tensor) -> Tensor:
        """Elements ``[*, m, m]`` of G that matrices ``[*, k, k]`` of the stabilizer stand for."""
        if self.stabilizer is None or self.stabilizer.size == self.group.size:
            return h
        if self.group.is_affine and self.stabilizer.size == self.group.dim:
            return affine(h, torch.zeros_like(h[..., 0]))
        raise NotImplementedError(f"{self.name} does not say how its stabilizer lies in its group: define embed")

    def lift(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Elements over points: ``section(x) h``.

        For points ``[*, dim]`` and elements h of the stabilizer, ``[fiber, k, k]``, the same for all points, or ``[*,
        fiber, k, k]``, the result is ``[*, fiber, m, m]``; the section alone, a fiber of one element, if h is absent.
        TypeError or ValueError is raised if ``x`` or ``h`` does not fit.
        """
        self.check("x", x)
        section = self.section(x)[..., None, :, :]
        if h is None:
            return section
        if self.stabilizer is None:
            raise ValueError(f"h: the stabilizer of {self.name} is trivial, so leave h out")
        self.stabilizer.check("h", h)
        if h.ndim < 3:
            raise ValueError(f"h: expected [fiber, k, k] or [*, fiber, k, k], got {tuple(h.shape)}")
        return self.group.product(section, self.embed(h.to(dtype=x.dtype, device=x.device)))

    # --- bad input ------------------------------------------------------------------------------------------------

    def check(self, argument: str, x: Tensor) -> None:
        """Raise TypeError or ValueError, naming the argument, unless ``x`` holds points of this space.

        Subclasses override :meth:`faults`, not this method.
        """
        check_tensor(argument, x, f"floating points of {self.name}")
        if x.shape[-1:] != (self.dim,):
            raise ValueError(f"{argument}: expected points [*, {self.dim}] of {self.name}, got {tuple(x.shape)}")
        infinite = ~torch.isfinite(x.detach()).all(-1)
        for fault, where in {"it is not finite": infinite, **self.faults(x.detach())}.items():
            check_none(argument, where, f"is not a point of {self.name}: {fault}")

    def faults(self, x: Tensor) -> dict[str, Tensor]:
        """Reasons why vectors ``[*, dim]`` are not points: a description, and ``[*]`` bool where it holds."""
        return {}


class Euclidean(HomogeneousSpace):
    """R^d under R^d ⋊ H: the origin is 0, its stabilizer H, the section translates.

    ``group`` is ``SE(d)``, ``E(d)``, ``Sim(d)``, ``Translations(d)`` or another ``SemidirectProduct``; a finite group H
    is short for ``SemidirectProduct(H)``. TypeError is raised for others.
    """

    def __init__(self, group: Group) -> None:
        check_group("group", group, Group)
        if isinstance(group, FiniteGroup):
            group = SemidirectProduct(group)
        if not isinstance(group, SemidirectProduct | Translations):
            raise TypeError(
                f"group: expected Translations or a SemidirectProduct such as SE(3), got {group!r}; "
                "a group that fixes 0 has Orbits"
            )
        stabilizer = group.stabilizer if isinstance(group, SemidirectProduct) else None
        super().__init__(f"R^{group.dim} under {group.name}", group, group.dim, stabilizer)

    def section(self, x: Tensor) -> Tensor:
        """Translations by x, ``[*, d + 1, d + 1]``; smooth."""
        return Translations(self.dim).element(x)
