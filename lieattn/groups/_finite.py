"""Finite groups as values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lieattn._core.checks import (
    any_negative,
    check_count,
    check_default_device,
    check_has_numbers,
    check_is,
    check_last,
    check_none,
    check_positive,
    is_whole,
    kind,
    permutation_table,
    shown,
)
from lieattn._core.contexts import is_mapped, outside_of_transforms
from lieattn._core.numerics import lengths
from lieattn.groups._group import Group, far, tolerance

CLOSURE_TOLERANCE = 1e-9
"""Largest difference, over the matrix entries, between a product and the group element that it is identified with."""


@final
class FiniteGroup(Group):
    """A finite group H of invertible d x d matrices, with its multiplication tables.

    Groups are immutable values. They compare by value, and a deep copy returns the same object. Their matrices are
    stored on the CPU in float64; use :meth:`matrices` to get them on another device or in another dtype. Elements are
    given as matrices, as in every :class:`Group`. Methods that also accept or return indices say so.

    Build a group with :meth:`from_matrices`, :meth:`from_permutations` or :meth:`generate`, or with a function of the
    catalog, such as :func:`lieattn.groups.cyclic`.

    Attributes
    ----------
    elements
        ``[order, dim, dim]`` float64, the matrices in the order of their indices.
    cayley
        ``[order, order]`` int64, ``cayley[g, h]`` is the index of g h.
    inverse_index, relative_index
        ``[order]`` and ``[order, order]`` int64: the indices of g⁻¹ and of g⁻¹ h, which is h seen from the frame g.
    identity_index
        Index of the identity.
    tolerance
        Largest difference between a product and the element that it is identified with.
    """

    elements: Tensor
    cayley: Tensor
    inverse_index: Tensor
    relative_index: Tensor
    identity_index: int
    tolerance: float
    _orthogonal: bool

    @torch.inference_mode(False)  # otherwise its tables could never be used in training
    def __init__(self, name: str, elements: Tensor, *, tolerance: float = CLOSURE_TOLERANCE) -> None:
        check_default_device()
        check_is("name", name, str)
        check_positive(tolerance=tolerance)
        matrices = checked_matrices(elements, name, tolerance)
        cayley = cayley_table(matrices, name, tolerance)
        # A finite set of invertible matrices closed under product is a group, so exactly one row is 0..n-1.
        identity = int((cayley == torch.arange(len(cayley))).all(dim=1).nonzero()[0])
        inverse = (cayley == identity).to(torch.int64).argmax(dim=1)
        super().__init__(name, dim=matrices.shape[-1], size=matrices.shape[-1], algebra_dim=0)
        vars(self).update(elements=matrices, cayley=cayley, identity_index=identity, tolerance=tolerance)
        vars(self).update(inverse_index=inverse, relative_index=cayley[inverse])
        gram = matrices.mT @ matrices
        # An attribute, since compiled code cannot read matrices.
        vars(self)["_orthogonal"] = bool((gram - torch.eye(self.dim, dtype=gram.dtype)).abs().max() < tolerance)

    @classmethod
    def from_matrices(
        cls,
        matrices: Tensor | np.ndarray[Any, Any] | Sequence[Any],
        name: str = "custom",
        *,
        tolerance: float | None = None,
    ) -> FiniteGroup:
        """Build a group from the list of all its matrices ``[order, dim, dim]``, of any real dtype, in their order.

        ``tolerance`` is the largest difference allowed, in any entry, between a product and its element. The default
        is 1e-9, or 1e-5 for float32 and lower precisions. TypeError or ValueError is raised if dtype or shape do not
        fit, two elements coincide or differ by less than twice the tolerance, a matrix is singular, or a product is not
        in the list (the message names the two factors).
        """
        given = _as_tensor("matrices", matrices, "order")
        return cls(name, given, tolerance=_tolerance_for(given) if tolerance is None else tolerance)

    @classmethod
    def from_permutations(cls, permutations: Sequence[Sequence[int]] | Tensor, name: str = "custom") -> FiniteGroup:
        """Build a group of permutations of d points, which acts on R^d by permutation matrices, P e_i = e_p(i).

        ``permutations`` are integers ``[order, d]``: element g sends point i to ``permutations[g][i]``. A Cayley table,
        whose entry [g][h] is the index of g h, is such a list of n permutations of n points. ValueError is raised if a
        row is not a permutation of 0..d-1, or if the list is not closed.
        """
        table = permutation_table(f"permutations of {name!r}", permutations, "a table of integers [order, points]")
        return cls(name, torch.nn.functional.one_hot(table).mT.double())

    @classmethod
    def generate(
        cls,
        generators: Tensor | np.ndarray[Any, Any] | Sequence[Any],
        name: str = "custom",
        *,
        max_order: int = 1000,
        tolerance: float | None = None,
    ) -> FiniteGroup:
        """Build the group generated by matrices ``[generators, dim, dim]``, of any real dtype.

        The identity comes first, and the other elements are ordered by the length of their word in the generators.
        ``tolerance`` is the same as in :meth:`from_matrices`. TypeError or ValueError is raised if dtype or shape do
        not fit, or if more than ``max_order`` elements are found, as for generators of an infinite group. The message
        names the first generator that has no power equal to the identity.
        """
        check_count("max_order", max_order)
        given = _as_tensor("generators", generators, "generators")
        generators = real_matrices(f"generators of {name!r}", given)
        tolerance = _tolerance_for(given) if tolerance is None else tolerance
        check_positive(tolerance=tolerance)
        sizes = torch.linalg.det(generators).abs()
        wrong = (sizes - 1).abs() > 0.01 + 10 * tolerance  # the others are found by their products
        if wrong.any():
            first = int(wrong.nonzero()[0])
            what = f"generator {first} has a determinant of size {float(sizes[first]):.3g}"
            raise ValueError(f"generators of {name!r}: {what}, but that of an element of a finite group is 1")
        found = torch.eye(generators.shape[-1], dtype=torch.float64)[None]
        fresh = found
        while len(fresh):
            products = snap((generators[:, None] @ fresh[None]).flatten(0, 1))
            fresh = new_elements(products, found, max(_DISTINCT, tolerance))
            found = torch.cat([found, fresh])
            if len(found) > max_order:
                reason = _why_many(generators, max_order, max(_DISTINCT, tolerance))
                many = f"they generate more than max_order={max_order} elements"
                raise ValueError(f"generators of {name!r}: {many}; {reason}")
        return cls(name, found, tolerance=tolerance)

    @property
    def order(self) -> int:
        """Number of elements."""
        return self.elements.shape[0]

    @property
    def is_proper(self) -> bool:
        """Whether no element has a negative determinant."""
        return bool((torch.linalg.det(self.elements) > 0).all())

    @property
    def is_abelian(self) -> bool:
        """Whether g h = h g for all elements."""
        return bool(torch.equal(self.cayley, self.cayley.mT))

    def matrices(self, like: Tensor) -> Float[Tensor, "{self.order} {self.dim} {self.dim}"]:
        """Return all matrices ``[order, dim, dim]`` on the device and in the floating dtype of ``like``.

        The result may share memory with the group, and must not be modified.
        """
        if like.device.type == "cpu":
            return self.elements.to(like.dtype)
        return _matrices_on(self, like.device, like.dtype)

    def element(
        self, g: int | Shaped[Tensor, " ..."], like: Tensor, *, argument: str = "g"
    ) -> Float[Tensor, "... {self.dim} {self.dim}"]:
        """Return the matrices ``[*, dim, dim]`` of the elements with indices ``[*]``.

        A floating tensor ``g`` is returned unchanged. ValueError is raised if an index is out of range; the message
        calls it ``argument``.
        """
        check_is("argument", argument, str)
        check_is("like", like, Tensor)
        if isinstance(g, Tensor) and g.is_floating_point():
            return g
        return rows(argument, g, self.matrices(like), self.name)

    def index(
        self, matrices: Float[Tensor, "*batch {self.dim} {self.dim}"], *, tolerance: float | None = None
    ) -> Int[Tensor, "*batch"]:
        """Return the indices ``[*]`` int64 of the elements nearest to matrices ``[*, dim, dim]``.

        ValueError is raised if an entry of a matrix differs by more than ``tolerance`` from the nearest element. The
        message gives the first matrix that does and its distance. The default is the tolerance of the group, but at
        least 1e-6 in float64, 1e-4 in float32, and eight rounding steps in half precision. Within ``torch.func.vmap``,
        distances are not checked.
        """
        check_last("matrices", matrices, (self.dim, self.dim), self.name)
        check_has_numbers("matrices", matrices)
        tolerance = self._allowed(matrices) if tolerance is None else tolerance
        check_positive(tolerance=tolerance)
        distance, found = self._nearest(matrices)
        missed = ~(distance <= tolerance)
        if not is_mapped(missed) and missed.any():
            first = int(missed.flatten().nonzero()[0])
            away = f"{float(distance.flatten()[first]):.1e} away (tolerance {tolerance:.0e})"
            what = f"number {first} is not an element of {self.name}"
            raise ValueError(f"matrices: {what}: the nearest one is {away}")
        return found

    def _allowed(self, matrices: Tensor) -> float:
        """Return the largest distance allowed between ``matrices`` in their dtype and elements of the group."""
        return max(self.tolerance, tolerance(matrices.dtype))

    def _nearest(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance (largest entry) and the index of the element nearest to each matrix, both ``[*]``."""
        flat = matrices.detach().to(device="cpu", dtype=torch.float64).reshape(-1, self.dim * self.dim)
        distance, found = torch.cdist(flat, self.elements.flatten(1), p=torch.inf).min(dim=-1)
        # cdist ignores NaN in its maximum.
        distance = torch.where(torch.isfinite(flat).all(dim=1), distance, torch.nan)
        shape = matrices.shape[:-2]
        return distance.reshape(shape).to(matrices.device), found.reshape(shape).to(matrices.device)

    # --- the interface of groups ----------------------------------------------------------------------------------

    def inverse(
        self, g: Float[Tensor, "*batch {self.dim} {self.dim}"]
    ) -> Float[Tensor, "*batch {self.dim} {self.dim}"]:
        """Look up the inverses of matrices ``[*, dim, dim]``; ValueError is raised if one is not in the group."""
        return _rows_at(self.matrices(g), _rows_at(self.inverse_index.to(g.device), self.index(g)))

    def act(
        self, g: int | Shaped[Tensor, " ..."], points: Float[Tensor, "*batch {self.dim}"]
    ) -> Float[Tensor, "... {self.dim}"]:
        """Move points or vectors ``[*, dim]``, v ↦ A v, by elements ``[*, dim, dim]`` or their indices ``[*]``."""
        check_last("points", points, (self.dim,), self.name)
        return super().act(self.element(g, points), points)

    def act_vectors(
        self, g: int | Shaped[Tensor, " ..."], vectors: Float[Tensor, "*batch {self.dim}"]
    ) -> Float[Tensor, "... {self.dim}"]:
        check_last("vectors", vectors, (self.dim,), self.name)
        return super().act_vectors(self.element(g, vectors), vectors)

    def hat(self, a: Tensor) -> Tensor:
        return a.new_zeros(*self._checked_algebra(a).shape[:-1], self.dim, self.dim)

    def vee(self, matrix: Tensor) -> Tensor:
        return matrix[..., 0, :0]

    def log(self, g: Tensor) -> Tensor:
        """Return an empty tensor ``[*, 0]`` for the identity; other elements raise ValueError."""
        no = f"has no logarithm in {self.name}: only the identity of a finite group has one"
        check_none("g", far(g.detach(), self.identity(g)).flatten(-2).any(-1), no)
        return self.vee(g)

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Return the Frobenius norm ``[*]`` of 1 - g⁻¹ h. It is left-invariant, and a metric if H is orthogonal."""
        relative = self.relative(g, h)
        return lengths((relative - self.identity(relative)).flatten(-2))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        index = torch.randint(self.order, shape, generator=generator, device=generator.device if generator else None)
        return self.elements.to(index.device)[index]

    def finite_subgroup(self, count: int) -> FiniteGroup:
        """Return the group itself, or raise ValueError if ``count`` is not its order."""
        check_count("count", count)
        if count != self.order:
            raise ValueError(f"count: the only design of {self.name} has all {self.order} elements, got {count}")
        return self

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        return {"it is not one of its matrices": ~(self._nearest(g)[0] <= self._allowed(g))}

    @property
    def is_orthogonal(self) -> bool:
        """Whether every element preserves distances up to the tolerance, as neighborhoods that are balls require."""
        return self._orthogonal

    # --- signals and other groups ---------------------------------------------------------------------------------

    def permutation(self, g: int | Tensor) -> Int[Tensor, " {self.order}"]:
        """Return the permutation of the fiber by g: ``[order]`` int64 p with (g · f)(h) = f(g⁻¹ h) = f[p[h]]."""
        return rows("g", g, self.relative_index, self.name)

    def translate(
        self, g: int | Tensor, f: Shaped[Tensor, "*batch {self.order} channels"]
    ) -> Shaped[Tensor, "*batch {self.order} channels"]:
        """Apply the left regular representation, (g · f)(h) = f(g⁻¹ h), to signals f ``[*, order, channels]``."""
        check_is("f", f, Tensor)
        if f.ndim < 2 or f.shape[-2] != self.order:
            raise ValueError(f"f: expected [*, {self.order}, channels], a signal on {self.name}, got {tuple(f.shape)}")
        return f[..., self.permutation(g).to(f.device), :]

    def conjugate(self, by: Shaped[Tensor, "{self.dim} {self.dim}"], name: str | None = None) -> FiniteGroup:
        """Return B H B⁻¹, for example H about another axis, with the same order of elements and the same tables."""
        check_is("by", by, Tensor)
        if by.shape != (self.dim, self.dim):
            raise ValueError(f"by: expected [{self.dim}, {self.dim}] for {self.name}, got {tuple(by.shape)}")
        basis = real_matrices("by", by[None])[0]
        if torch.linalg.matrix_rank(basis) < self.dim:
            raise ValueError(f"by: expected an invertible matrix, got {by.tolist()}")
        moved = snap(basis @ self.elements @ torch.linalg.inv(basis))
        return FiniteGroup(self.name if name is None else name, moved, tolerance=self.tolerance)

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
        return hash((self.order, self.dim, self.identity_index))

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"a FiniteGroup is immutable: {field!r} of {self.name} cannot be set")

    def __delattr__(self, field: str) -> None:
        raise AttributeError(f"a FiniteGroup is immutable: {field!r} of {self.name} cannot be deleted")

    def __copy__(self) -> FiniteGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FiniteGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self.elements.numpy(), self.tolerance))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
@outside_of_transforms
def _matrices_on(group: FiniteGroup, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrices ``[order, dim, dim]`` on a device. They are cached, since each copy synchronizes with it."""
    return group.elements.to(device=device, dtype=dtype)


def check_group(argument: str, group: object, allowed: type[Group] = FiniteGroup) -> None:
    """Raise TypeError, naming the argument, unless ``group`` is an instance of ``allowed``."""
    check_is("allowed", allowed, type)
    if not isinstance(group, allowed):
        finite = "FiniteGroup such as lieattn.groups.cyclic(4)"
        example = finite if allowed is FiniteGroup else "group such as SO(3) or cyclic(4)"
        raise TypeError(f"{argument}: expected a {example}, got {group!r}")


_LOW_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
_MOST_POWERS = 1000  # of a generator, to explain why there are too many elements
_DISTINCT = 1e-6  # matrices whose entries differ by less are the same element


def _as_tensor(argument: str, matrices: Tensor | np.ndarray[Any, Any] | Sequence[Any], axis: str) -> Tensor:
    """Return matrices as a tensor; TypeError if they are no numbers."""
    try:
        return matrices if isinstance(matrices, Tensor) else torch.from_numpy(np.array(matrices, order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument}: expected numbers [{axis}, dim, dim], got {shown(matrices)}") from error


def _tolerance_for(given: Tensor) -> float:
    """Return the error allowed in products of matrices, which depends on the dtype that they were rounded to."""
    return CLOSURE_TOLERANCE if given.dtype not in _LOW_PRECISION else 1e-5


def _rebuild(name: str, elements: np.ndarray[Any, Any], tolerance: float = 1e-5) -> FiniteGroup:
    return FiniteGroup(name, torch.from_numpy(elements), tolerance=tolerance)


def real_matrices(argument: str, stack: Tensor) -> Tensor:
    """Return a float64 copy of finite matrices ``[order, dim, dim]``, or raise an error that names the argument."""
    if not isinstance(stack, Tensor) or stack.is_complex():
        raise TypeError(f"{argument}: expected a real tensor [order, dim, dim], got {kind(stack)}")
    if stack.ndim != 3 or stack.shape[-1] != stack.shape[-2] or 0 in stack.shape:
        expected = "expected shape [order, dim, dim] with order >= 1 and dim >= 1"
        raise ValueError(f"{argument}: {expected}, got {tuple(stack.shape)}")
    check_has_numbers(argument, stack)
    infinite = ~torch.isfinite(stack).flatten(1).all(1)
    if infinite.any():
        raise ValueError(f"{argument}: element {int(infinite.nonzero()[0])} has an entry that is not finite")
    return stack.detach().to(device="cpu", dtype=torch.float64).clone()


def checked_matrices(elements: Tensor, name: str, tolerance: float) -> Tensor:
    """Return a float64 copy of the matrices, or raise an error unless they are invertible and can be told apart."""
    matrices = real_matrices(f"matrices of {name!r}", elements)
    flat = matrices.flatten(1)
    distance = torch.cdist(flat, flat, p=math.inf).fill_diagonal_(math.inf)
    if distance.min() < _DISTINCT:
        i, j = divmod(int(distance.argmin()), len(flat))
        raise ValueError(f"matrices of {name!r}: elements {i} and {j} are the same")
    if not tolerance < (least := float(distance.min()) / 2):
        expected = f"expected less than half of the smallest difference of two elements of {name!r}, {least:.1e}"
        raise ValueError(f"tolerance: {expected}, got {tolerance:.1e}")
    singular = torch.linalg.det(matrices).abs() < 1e-9
    if singular.any():
        raise ValueError(f"matrices of {name!r}: element {int(singular.nonzero()[0])} has no inverse")
    return matrices


def cayley_table(matrices: Tensor, name: str, tolerance: float) -> Tensor:
    """Return the indices of all products ``[order, order]``, or raise an error that names a missing product."""
    table = torch.empty(len(matrices), len(matrices), dtype=torch.int64)
    for g, matrix in enumerate(matrices):
        distance, table[g] = torch.cdist((matrix @ matrices).flatten(1), matrices.flatten(1), p=math.inf).min(dim=-1)
        worst = int(distance.argmax())
        if not distance[worst] <= tolerance:
            away = f"{float(distance[worst]):.1e} away from every element (tolerance {tolerance:.0e})"
            what = f"{name!r} is not closed under its product: elements[{g}] @ elements[{worst}] is {away}"
            raise ValueError(f"{what}; give all elements, use FiniteGroup.generate, or raise the tolerance")
    return table


def rows(argument: str, index: int | Tensor, table: Tensor, name: str) -> Tensor:
    """Return ``table[index]``, or raise an error that names the group if an index is out of range."""
    try:
        whole = is_whole(index) if isinstance(index, Tensor) else isinstance(index, int | np.integer)
        if whole and not isinstance(index, bool) and not any_negative(index):
            # Of the other integers, torch reads bytes as masks, and refuses some.
            return _rows_at(table, index.to(table.device, torch.int64)) if isinstance(index, Tensor) else table[index]
    except IndexError:
        pass
    raise ValueError(f"{argument}: expected indices 0..{len(table) - 1} of {name}, got {index}")


def _rows_at(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]`` for indices ``[*]``, also within ``torch.func.vmap``."""
    # torch 2.10 reads the value of an index without dimensions, which it does not have within vmap.
    return table[index.unsqueeze(-1)].squeeze(index.ndim)


def new_elements(products: Tensor, found: Tensor, apart: float) -> Tensor:
    """Return the products that are farther than ``apart`` from known elements and from each other, in their order."""
    fresh: list[Tensor] = []
    known = found.flatten(1)
    for product in products:
        if torch.cdist(product.reshape(1, -1), known, p=math.inf).min() > apart:
            fresh.append(product)
            known = torch.cat([known, product.reshape(1, -1)])
    return torch.stack(fresh) if fresh else products[:0]


def _why_many(generators: Tensor, max_order: int, apart: float) -> str:
    """Return why generators generate many elements: the first one without a power that is the identity, if any."""
    one, tried = torch.eye(generators.shape[-1], dtype=generators.dtype), min(max_order, _MOST_POWERS)
    for number, generator in enumerate(generators):
        powers = itertools.accumulate(itertools.repeat(generator, tried), torch.matmul)
        if not any((power - one).abs().max() <= apart for power in powers):
            none = f"of the powers 1 .. {tried} of generator {number}, none is the identity up to {apart:.0e}"
            return f"{none}; give angles with all digits, and leave out translations, which are always added"
    return "each generator has a small order, but their products have not; raise max_order if the group is finite"


def snap(matrices: Tensor) -> Tensor:
    """Round entries that are within 1e-14 of a half-integer, so that quarter turns are exact."""
    halves = torch.round(2 * matrices) / 2
    return torch.where((matrices - halves).abs() < 1e-14, halves, matrices)
