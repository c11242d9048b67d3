"""Finite groups as values: matrices, and the tables derived from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

CLOSURE_TOLERANCE = 1e-9
"""How far (largest entry) a product may be from the element it is taken for."""


@final
class FiniteGroup:
    """A finite group H of invertible d x d matrices, with the tables its users need.

    The matrices are the group: product and inverse are looked up in tables derived from them, so a new
    group is a function that returns matrices and never a new class. Groups are immutable values: they
    are shared, not copied (a deep copy returns the same object), compare by value, and live on the CPU
    in float64; whoever computes asks for the device and dtype needed (:meth:`matrices`, :meth:`to`).

    Build one with :meth:`from_matrices`, :meth:`from_permutations` or :meth:`generate`, or take one from
    the catalog (:func:`lieattn.groups.cyclic` and its neighbors).

    Attributes
    ----------
    name
        What the group is called in messages and checkpoints.
    elements
        ``[order, dim, dim]`` float64, the matrices in the order of their indices.
    cayley
        ``[order, order]`` int64, ``cayley[g, h]`` is the index of g h.
    inverse
        ``[order]`` int64, ``inverse[g]`` is the index of g⁻¹.
    relative
        ``[order, order]`` int64, ``relative[g, h]`` is the index of g⁻¹ h: what is left of h when the frame
        g is divided out. It does not change when g and h are multiplied by one element from the left.
    identity
        Index of the identity.
    """

    __slots__ = ("cayley", "elements", "identity", "inverse", "name", "relative")

    name: str
    elements: Tensor
    cayley: Tensor
    inverse: Tensor
    relative: Tensor
    identity: int

    def __init__(self, name: str, elements: Tensor, *, tolerance: float = CLOSURE_TOLERANCE) -> None:
        matrices = _checked_matrices(elements, name)
        cayley = _cayley_table(matrices, name, tolerance)
        identity = _identity(cayley)
        inverse = (cayley == identity).to(torch.int64).argmax(dim=1)
        fields = {
            "name": name,
            "elements": matrices,
            "cayley": cayley,
            "identity": identity,
            "inverse": inverse,
            "relative": cayley[inverse],
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @classmethod
    def from_matrices(
        cls,
        matrices: Tensor | np.ndarray[Any, Any] | Sequence[Any],
        name: str = "custom",
        *,
        tolerance: float | None = None,
    ) -> FiniteGroup:
        """Group from the list of all its matrices, in the order given.

        Parameters
        ----------
        matrices
            ``[order, dim, dim]``, closed under product; any real dtype.
        name
            What to call it.
        tolerance
            Largest entry by which a product may miss an element; 1e-9, or 1e-5 for matrices given in
            single precision.

        Raises
        ------
        ValueError
            If two elements coincide, a matrix is singular, or a product is not in the list (the message
            names the two factors).
        """
        given = torch.as_tensor(np.asarray(matrices) if not isinstance(matrices, Tensor) else matrices)
        if tolerance is None:
            tolerance = CLOSURE_TOLERANCE if given.dtype not in _LOW_PRECISION else 1e-5
        return cls(name, given, tolerance=tolerance)

    @classmethod
    def from_permutations(cls, permutations: Sequence[Sequence[int]] | Tensor, name: str = "custom") -> FiniteGroup:
        """Group of permutations of d points, acting on R^d by permutation matrices, P e_i = e_p(i).

        Parameters
        ----------
        permutations
            ``[order, d]`` integers: ``permutations[g][i]`` is where element g sends i.
        name
            What to call it.

        Raises
        ------
        ValueError
            If a row is not a permutation of 0..d-1, or the list is not closed.
        """
        table = torch.as_tensor(permutations)
        if table.ndim != 2 or table.dtype.is_floating_point or table.shape[0] == 0:
            raise ValueError(
                f"permutations of {name!r}: expected a table of integers [order, points], got shape "
                f"{tuple(table.shape)} of {table.dtype}"
            )
        table = table.to(torch.int64)
        degree = table.shape[1]
        for g, row in enumerate(table.tolist()):
            if sorted(row) != list(range(degree)):
                raise ValueError(f"permutations of {name!r}: row {g} is {row}, not a permutation of 0..{degree - 1}")
        matrices = torch.zeros(table.shape[0], degree, degree, dtype=torch.float64)
        matrices.scatter_(1, table[:, None, :], 1.0)
        return cls(name, matrices)

    @classmethod
    def generate(cls, generators: Tensor, name: str = "custom", *, max_order: int = 1000) -> FiniteGroup:
        """Group generated by some matrices: the identity first, then by length of the word.

        Parameters
        ----------
        generators
            ``[generators, dim, dim]`` float64.
        name
            What to call it.
        max_order
            Where to give up: matrices that generate an infinite group never close.

        Raises
        ------
        ValueError
            If more than ``max_order`` elements are found.
        """
        generators = generators.to(torch.float64)
        found = torch.eye(generators.shape[-1], dtype=torch.float64)[None]
        fresh = found
        while len(fresh):
            products = _snap((generators[:, None] @ fresh[None]).flatten(0, 1))
            fresh = _new_elements(products, found)
            found = torch.cat([found, fresh])
            if len(found) > max_order:
                raise ValueError(f"{name!r}: the generators give more than max_order={max_order} elements")
        return cls(name, found)

    @property
    def order(self) -> int:
        """Number of elements."""
        return self.elements.shape[0]

    @property
    def dim(self) -> int:
        """Dimension of the space the matrices act on."""
        return self.elements.shape[-1]

    @property
    def is_orthogonal(self) -> bool:
        """Whether every element preserves distances, which balls as neighborhoods rely on."""
        gram = self.elements.mT @ self.elements
        return bool((gram - torch.eye(self.dim, dtype=gram.dtype)).abs().max() < 1e-9)

    @property
    def is_abelian(self) -> bool:
        """Whether g h = h g for all elements."""
        return bool(torch.equal(self.cayley, self.cayley.mT))

    def matrices(self, like: Tensor) -> Tensor:
        """``[order, dim, dim]`` matrices on the device and in the floating dtype of ``like``."""
        return self.elements.to(device=like.device, dtype=like.dtype)

    def index(self, matrices: Tensor, *, tolerance: float = 1e-6) -> Tensor:
        """Indices of elements given as matrices: the nearest element, if it is near enough.

        Matrices are compared by distance, never by rounded entries, so that elements computed in another
        way (a conjugate, a product of logarithms, single precision) are found.

        Parameters
        ----------
        matrices
            ``[*, dim, dim]``, any floating dtype.
        tolerance
            Largest entry by which a matrix may miss its element.

        Returns
        -------
        Tensor
            ``[*]`` int64.

        Raises
        ------
        ValueError
            If a matrix is not an element; the message gives the first one and its distance.
        """
        if matrices.shape[-2:] != (self.dim, self.dim):
            raise ValueError(
                f"matrices: expected [*, {self.dim}, {self.dim}] for {self.name}, got {tuple(matrices.shape)}"
            )
        flat = matrices.detach().to(device="cpu", dtype=torch.float64).reshape(-1, self.dim * self.dim)
        nearest, found = _nearest(flat, self.elements.flatten(1))
        # The largest entry of a difference overlooks NaN.
        missed = ~(nearest <= tolerance) | ~torch.isfinite(flat).all(dim=1)
        if missed.any():
            first = int(missed.nonzero()[0])
            raise ValueError(
                f"matrices: number {first} is not an element of {self.name}: the nearest one is "
                f"{float(nearest[first]):.1e} away (tolerance {tolerance:.0e})"
            )
        return found.reshape(matrices.shape[:-2]).to(matrices.device)

    def act(self, g: int | Tensor, points: Tensor) -> Tensor:
        """Act on points or vectors: ``[*, dim]`` to ``[*, dim]``, v ↦ A_g v.

        Parameters
        ----------
        g
            One index for all points, or indices that broadcast against ``points.shape[:-1]``.
        points
            ``[*, dim]`` floating.
        """
        if points.shape[-1] != self.dim:
            raise ValueError(
                f"points: {self.name} acts on vectors of {self.dim} components, got shape {tuple(points.shape)}"
            )
        index = g.to(points.device) if isinstance(g, Tensor) else g
        return (self.matrices(points)[index] @ points[..., None])[..., 0]

    def permutation(self, g: int) -> Tensor:
        """How g moves the fiber: ``[order]`` int64 p with (g · f)(h) = f(g⁻¹ h) = f[p[h]]."""
        return self.relative[g]

    def translate(self, g: int, f: Tensor) -> Tensor:
        """Left regular representation: (g · f)(h) = f(g⁻¹ h), for f ``[*, order, channels]``."""
        if f.ndim < 2 or f.shape[-2] != self.order:
            raise ValueError(
                f"f: expected a signal on {self.name} with shape [*, {self.order}, channels], got {tuple(f.shape)}"
            )
        return f[..., self.permutation(g).to(f.device), :]

    def conjugate(self, by: Tensor, name: str | None = None) -> FiniteGroup:
        """Group B H B⁻¹ in the same order, so with the same tables: H about another axis, for example.

        Parameters
        ----------
        by
            ``[dim, dim]`` invertible.
        name
            What to call it; the old name if absent.
        """
        basis = by.to(torch.float64)
        return FiniteGroup(name or self.name, _snap(basis @ self.elements @ torch.linalg.inv(basis)))

    def __len__(self) -> int:
        return self.order

    def __repr__(self) -> str:
        return f"FiniteGroup({self.name!r}, order={self.order}, dim={self.dim})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FiniteGroup):
            return NotImplemented
        return self is other or (
            self.elements.shape == other.elements.shape
            and bool(torch.equal(self.cayley, other.cayley))
            and bool((self.elements - other.elements).abs().max() < CLOSURE_TOLERANCE)
        )

    def __hash__(self) -> int:
        return hash((self.order, self.dim, self.identity))

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"a FiniteGroup is immutable: {field!r} of {self.name} cannot be set")

    def __delattr__(self, field: str) -> None:
        raise AttributeError(f"a FiniteGroup is immutable: {field!r} of {self.name} cannot be deleted")

    def __copy__(self) -> FiniteGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FiniteGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self.elements.numpy()))


_LOW_PRECISION = (torch.float32, torch.float16, torch.bfloat16)


def _rebuild(name: str, elements: np.ndarray[Any, Any]) -> FiniteGroup:
    return FiniteGroup(name, torch.from_numpy(elements), tolerance=1e-5)


def _checked_matrices(elements: Tensor, name: str) -> Tensor:
    if elements.ndim != 3 or elements.shape[-1] != elements.shape[-2] or len(elements) == 0:
        raise ValueError(
            f"matrices of {name!r}: expected shape [order, dim, dim] with order >= 1, got {tuple(elements.shape)}"
        )
    matrices = elements.detach().to(device="cpu", dtype=torch.float64).clone()
    if not torch.isfinite(matrices).all():
        first = int((~torch.isfinite(matrices)).flatten(1).any(1).nonzero()[0])
        raise ValueError(f"matrices of {name!r}: element {first} has an entry that is not finite")
    flat = matrices.flatten(1)
    distance = torch.cdist(flat, flat, p=math.inf).fill_diagonal_(math.inf)
    if distance.min() < 1e-6:
        i, j = divmod(int(distance.argmin()), len(flat))
        raise ValueError(f"matrices of {name!r}: elements {i} and {j} are the same")
    singular = torch.linalg.det(matrices).abs() < 1e-9
    if singular.any():
        raise ValueError(f"matrices of {name!r}: element {int(singular.nonzero()[0])} has no inverse")
    return matrices


def _nearest(flat: Tensor, elements: Tensor) -> tuple[Tensor, Tensor]:
    """Distance (largest entry) and index of the element nearest to each row."""
    nearest, found = torch.cdist(flat, elements, p=math.inf).min(dim=-1)
    return nearest, found


def _cayley_table(matrices: Tensor, name: str, tolerance: float) -> Tensor:
    order = len(matrices)
    table = torch.empty(order, order, dtype=torch.int64)
    for g in range(order):
        distance, table[g] = _nearest((matrices[g] @ matrices).flatten(1), matrices.flatten(1))
        worst = int(distance.argmax())
        if not distance[worst] <= tolerance:
            raise ValueError(
                f"{name!r} is not closed under its product: elements[{g}] @ elements[{worst}] is "
                f"{float(distance[worst]):.1e} away from every element (tolerance {tolerance:.0e}); "
                f"give all elements, or generators to FiniteGroup.generate"
            )
    return table


def _identity(cayley: Tensor) -> int:
    # A finite set of invertible matrices closed under product is a group, so exactly one row is 0..n-1.
    return int((cayley == torch.arange(len(cayley))).all(dim=1).nonzero()[0])


def _new_elements(products: Tensor, found: Tensor) -> Tensor:
    """Those products that are neither found already nor repeated, in their order."""
    fresh: list[Tensor] = []
    known = found.flatten(1)
    for product in products:
        if torch.cdist(product.reshape(1, -1), known, p=math.inf).min() > 1e-6:
            fresh.append(product)
            known = torch.cat([known, product.reshape(1, -1)])
    return torch.stack(fresh) if fresh else products[:0]


def _snap(matrices: Tensor) -> Tensor:
    """Make entries that are a half-integer up to rounding exactly that: quarter turns stay exact."""
    halves = torch.round(2 * matrices) / 2
    return torch.where((matrices - halves).abs() < 1e-14, halves, matrices)
