"""The interface of representations."""

from __future__ import annotations

import abc
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_broadcast, check_count, check_has_numbers, check_last, check_tensor
from lieattn._core.contexts import is_mapped, without_autocast
from lieattn.groups import FiniteGroup


class Representation(abc.ABC):
    """A map ρ from orthogonal matrices R of R^d to matrices, with ρ(R S) = ρ(R) ρ(S).

    Representations are immutable values without data on a device, and compare by value. All representations of the
    library are orthogonal, ρ(R)⁻¹ = ρ(R)ᵀ, for orthogonal R. If ``orthogonal_only`` is false, ρ is defined for every
    invertible matrix, otherwise only for orthogonal matrices. If there is a finite group ``domain``, ρ is defined for
    its elements only.
    """

    orthogonal_only: ClassVar[bool] = True
    domain: ClassVar[FiniteGroup | None] = None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the representation in messages."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Number of components of a feature."""

    @property
    @abc.abstractmethod
    def space_dim(self) -> int | None:
        """Dimension d of the matrices R, or None if any dimension is allowed."""

    @abc.abstractmethod
    def _evaluate(self, rotation: Tensor) -> Tensor:
        """Return the matrices ``[*, dim, dim]`` of float64 matrices ``[*, d, d]``, without checks."""

    def matrix(self, rotation: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch {self.dim} {self.dim}"]:
        """Return the matrices ρ(R) ``[*, dim, dim]`` of R ``[*, d, d]``, computed in float64, in the dtype of R.

        TypeError or ValueError is raised if R is not floating, has another size, or is not orthogonal although
        ``orthogonal_only`` is true.
        """
        self._check(rotation)
        with without_autocast(rotation.device):
            return self._evaluate(rotation.to(torch.float64)).to(rotation.dtype)

    def act(
        self, rotation: Float[Tensor, "*#batch d d"], features: Float[Tensor, "*#batch {self.dim}"]
    ) -> Float[Tensor, "... {self.dim}"]:
        """Return ρ(R) v ``[*, dim]`` for R ``[*, d, d]`` and features v ``[*, dim]``, whose leading axes broadcast.

        The result is computed and returned in the dtype of the features, but at least in float32, also under autocast.
        TypeError or ValueError is raised if dtypes, shapes or devices do not fit, or R is not orthogonal although
        ``orthogonal_only`` is true.
        """
        self._check(rotation)
        check_last("features", features, (self.dim,), self.name)
        check_broadcast("rotation", rotation.shape[:-2], "features", features.shape[:-1])
        if rotation.device != features.device:
            raise ValueError(
                f"rotation, features: expected the same device, got {rotation.device} and {features.device}"
            )
        return self.act_unchecked(rotation, features)

    def act_unchecked(self, rotation: Tensor, features: Tensor) -> Tensor:
        """Compute :meth:`act` without checks, which read numbers."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        with without_autocast(features.device):
            return self._apply(rotation.to(torch.float64), features.to(dtype))

    def _apply(self, rotation: Tensor, features: Tensor) -> Tensor:
        """Compute :meth:`act` for float64 matrices, in the dtype of the features."""
        matrix = self._evaluate(rotation).to(features.dtype)
        matrix = matrix[(None,) * (features.ndim + 1 - matrix.ndim)]  # ONNX requires equal numbers of axes
        return torch.einsum("...ij,...j->...i", matrix, features)

    def _check(self, rotation: Tensor) -> None:
        d = self.space_dim
        check_tensor("rotation", rotation, "a floating tensor [*, d, d]")
        check_has_numbers("rotation", rotation)
        shape = tuple(rotation.shape)
        if rotation.ndim < 2 or shape[-1] != shape[-2] or d not in (None, shape[-1]):
            raise ValueError(f"rotation: expected matrices [*, {d or 'd'}, {d or 'd'}] for {self.name}, got {shape}")
        if self.orthogonal_only:
            check_orthogonal("rotation", rotation)
        self.check_domain("rotation", rotation)

    def check_domain(self, argument: str, rotation: Float[Tensor, "*batch d d"]) -> None:
        """Raise ValueError, naming the argument, unless matrices ``[*, d, d]`` are elements of the ``domain``, if any.

        Values are not checked in compiled code.
        """
        if self.domain is None or torch.compiler.is_compiling():
            return
        try:
            self.domain.check(argument, rotation)
        except ValueError as error:
            expected = f"expected elements of {self.domain.name}, for which {self.name} is defined"
            raise ValueError(f"{argument}: {expected}, got others") from error

    def __add__(self, other: Representation) -> Representation:
        """Return the direct sum, with the components of this representation first."""
        if not isinstance(other, Representation):
            return NotImplemented
        return DirectSum((*_parts(self), *_parts(other)))

    def __rmul__(self, count: int) -> Representation:
        """Return the sum of ``count`` copies, or the representation itself if ``count`` is 1."""
        if not isinstance(count, int):
            return NotImplemented
        return self if count == 1 else Multiple(count, self)

    def __str__(self) -> str:
        return self.name


class _Composite(Representation):
    """Base class of sums and multiples, whose matrices ρ(R) are block diagonal."""

    @property
    @abc.abstractmethod
    def _summands(self) -> tuple[Representation, ...]: ...

    @property
    def orthogonal_only(self) -> bool:  # type: ignore[override]
        """Whether any summand is defined only for orthogonal matrices."""
        return any(part.orthogonal_only for part in self._summands)

    @property
    def domain(self) -> FiniteGroup | None:  # type: ignore[override]
        """Group for whose elements alone some summand is defined, or None."""
        return next((part.domain for part in self._summands if part.domain is not None), None)

    @property
    def dim(self) -> int:
        return sum(part.dim for part in self._summands)

    @property
    def space_dim(self) -> int | None:
        return next((part.space_dim for part in self._summands if part.space_dim is not None), None)


@dataclass(frozen=True)
class DirectSum(_Composite):
    """The direct sum of representations, written as ``Vector(3) + Scalar()``. Its matrices ρ(R) are block diagonal.

    ``parts`` is a tuple of at least one summand, all of which act on the same space R^d. TypeError or ValueError is
    raised for other parts.
    """

    parts: tuple[Representation, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts:
            raise ValueError(f"parts: expected a tuple of at least one representation, got {self.parts!r}")
        for part in self.parts:
            check_representation("parts", part)
        if len({part.space_dim for part in self.parts} - {None}) > 1:
            raise ValueError(f"parts: expected representations on spaces of the same dimension, got {self.name}")
        if len({part.domain for part in self.parts} - {None}) > 1:
            raise ValueError(f"parts: expected representations of the same group, got {self.name}")

    @property
    def _summands(self) -> tuple[Representation, ...]:
        return self.parts

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return block_diagonal([part._evaluate(rotation) for part in self.parts])

    def _apply(self, rotation: Tensor, features: Tensor) -> Tensor:
        pieces = features.split([part.dim for part in self.parts], dim=-1)
        return torch.cat([part._apply(rotation, v) for part, v in zip(self.parts, pieces, strict=True)], dim=-1)


@dataclass(frozen=True)
class Multiple(_Composite):
    """The sum of ``count`` copies of ``part``, written as ``2 * Vector(3)``.

    Features are ``[*, count, part.dim]`` with the last two axes flattened.
    """

    count: int
    part: Representation

    def __post_init__(self) -> None:
        check_count("count", self.count)
        check_representation("part", self.part)

    @property
    def _summands(self) -> tuple[Representation, ...]:
        return (self.part,) * self.count

    @property
    def name(self) -> str:
        return f"{self.count} * ({self.part.name})"

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return block_diagonal([self.part._evaluate(rotation)] * self.count)

    def _apply(self, rotation: Tensor, features: Tensor) -> Tensor:
        copies = features.unflatten(-1, (self.count, self.part.dim))
        return self.part._apply(rotation[..., None, :, :], copies).flatten(-2)


def check_representation(argument: str, rep: object) -> None:
    """Raise TypeError, naming the argument, unless ``rep`` is an instance of :class:`Representation`."""
    if not isinstance(rep, Representation):
        raise TypeError(f"{argument}: expected a Representation such as reps.Vector(3) or Irreps('1o'), got {rep!r}")


def check_orthogonal(argument: str, matrices: Tensor) -> None:
    """Raise ValueError, naming the argument, unless all matrices ``[*, d, d]`` are orthogonal.

    The tolerance is 1e-6 in float64, 1e-3 in float32, and eight rounding steps in half precision. Values are not
    checked in compiled code, nor if ``torch.func.vmap`` maps over them. TypeError or ValueError is also raised if the
    argument is not a floating tensor of square matrices.
    """
    error, allowed = _orthogonality_error(argument, matrices)
    if error is not None and not error <= allowed:
        raise ValueError(f"{argument}: expected orthogonal matrices, but Rᵀ R differs from the identity by {error:.1e}")


def is_orthogonal(matrices: Tensor) -> bool:
    """Return whether all matrices ``[*, d, d]`` are orthogonal, up to the tolerance of :func:`check_orthogonal`.

    The result is False where that function does not check values.
    """
    error, allowed = _orthogonality_error("matrices", matrices)
    return error is not None and error <= allowed


def _orthogonality_error(argument: str, matrices: Tensor) -> tuple[float | None, float]:
    """Return the largest entry of Rᵀ R - 1, or None if values cannot be read, and the allowed one."""
    check_tensor(argument, matrices, "a floating tensor [*, d, d]")
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"{argument}: expected matrices [*, d, d], got {tuple(matrices.shape)}")
    check_has_numbers(argument, matrices)
    allowed = 1e-6 if matrices.dtype == torch.float64 else max(1e-3, 8 * torch.finfo(matrices.dtype).eps)
    if matrices.numel() == 0:
        return 0.0, allowed
    if torch.compiler.is_compiling() or is_mapped(matrices):
        return None, allowed
    wide = matrices.detach().to(torch.float64)
    gram = wide.mT @ wide - torch.eye(wide.shape[-1], dtype=torch.float64, device=wide.device)
    return float(gram.abs().max()), allowed


def _parts(rep: Representation) -> tuple[Representation, ...]:
    return rep.parts if isinstance(rep, DirectSum) else (rep,)


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Return matrices with the blocks ``[*, k, k]`` on the diagonal."""
    if len(blocks) == 1:
        return blocks[0]
    size = sum(block.shape[-1] for block in blocks)
    rows, first = [], 0
    for block in blocks:
        width = block.shape[-1]
        rows.append(F.pad(block, (first, size - first - width)))
        first += width
    return torch.cat(rows, dim=-2)


@dataclass(frozen=True)
class Scalar(Representation):
    """Numbers that are invariant to rotations and reflections, ρ(R) = 1: energies, charges, temperatures."""

    name: ClassVar[str] = "Scalar"
    dim: ClassVar[int] = 1
    space_dim: ClassVar[None] = None
    orthogonal_only: ClassVar[bool] = False

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return rotation.new_ones(*rotation.shape[:-2], 1, 1)


@dataclass(frozen=True)
class Pseudoscalar(Representation):
    """Numbers that change sign under reflections, ρ(R) = det R: chirality, helicity, the curl of a plane field."""

    name: ClassVar[str] = "Pseudoscalar"
    dim: ClassVar[int] = 1
    space_dim: ClassVar[None] = None

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return determinant_sign(rotation)[..., None, None]


@dataclass(frozen=True)
class Pseudovector(Representation):
    """Axial vectors of R^3, ρ(R) = det(R) R: angular velocities, magnetic moments."""

    name: ClassVar[str] = "Pseudovector"
    dim: ClassVar[int] = 3
    space_dim: ClassVar[int] = 3

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return determinant_sign(rotation)[..., None, None] * rotation


@dataclass(frozen=True)
class _OfDimension(Representation):
    """A family with one representation for each dimension d >= ``_least`` of the space."""

    d: int = 3

    _least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_count("d", self.d, self._least)

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.d})"

    @property
    def dim(self) -> int:
        return self.d

    @property
    def space_dim(self) -> int:
        return self.d


@dataclass(frozen=True)
class Vector(_OfDimension):
    """Vectors of R^d, ρ(R) = R: velocities, forces, dipole moments. R can be any invertible matrix."""

    orthogonal_only: ClassVar[bool] = False

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return rotation


@dataclass(frozen=True)
class _SymmetricMatrices(_OfDimension):
    """A space of symmetric matrices under T ↦ R T Rᵀ, in an orthonormal basis."""

    _least: ClassVar[int] = 2
    # Derived from d. It is not a field, so it does not take part in comparisons.
    _basis: ClassVar[Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        # Otherwise it could never be used in training. torch.compile cannot follow inference mode.
        with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
            object.__setattr__(self, "_basis", self._orthonormal_basis())

    @property
    def dim(self) -> int:
        return len(self._basis)

    def _orthonormal_basis(self) -> Tensor:
        """Return the basis ``[dim, d, d]`` float64 of the matrices."""
        raise NotImplementedError

    def to_tensor(self, features: Float[Tensor, "*batch {self.dim}"]) -> Float[Tensor, "*batch d d"]:
        """Convert components ``[*, dim]`` to symmetric matrices ``[*, d, d]``."""
        check_last("features", features, (self.dim,), self.name)
        check_has_numbers("features", features)
        with without_autocast(features.device):
            return torch.einsum("...a,aij->...ij", features, self._basis.to(features))

    def from_tensor(self, tensor: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch {self.dim}"]:
        """Project matrices ``[*, d, d]`` to the space, and return their components ``[*, dim]``."""
        check_last("tensor", tensor, (self.d, self.d), self.name)
        check_has_numbers("tensor", tensor)
        with without_autocast(tensor.device):
            return torch.einsum("...ij,aij->...a", tensor, self._basis.to(tensor))

    def _evaluate(self, rotation: Tensor) -> Tensor:
        basis = self._basis.to(rotation)
        turned = rotation[..., None, :, :] @ basis @ rotation[..., None, :, :].mT
        return torch.einsum("aij,...bij->...ab", basis, turned)


@dataclass(frozen=True)
class SymmetricTensor(_SymmetricMatrices):
    """Symmetric tensors of rank 2, T ↦ R T Rᵀ, for d >= 2: polarizabilities, stresses, moments of inertia.

    The d (d + 1) / 2 components are the entries of the upper triangle, row by row. Entries off the diagonal are
    multiplied by √2, so that components and matrix have the same sum of squares and ρ(R) is orthogonal. See
    ``to_tensor`` and ``from_tensor``. R can be any invertible matrix.
    """

    orthogonal_only: ClassVar[bool] = False

    def _orthonormal_basis(self) -> Tensor:
        return torch.stack([_symmetric_unit(self.d, i, j) for i in range(self.d) for j in range(i, self.d)])


@dataclass(frozen=True)
class TracelessSymmetric(_SymmetricMatrices):
    """Traceless symmetric tensors of rank 2, T ↦ R T Rᵀ, for d >= 2: quadrupole moments, anisotropies.

    The components refer to an orthonormal basis. They are the entries above the diagonal times √2, row by row, then the
    products with the d - 1 diagonal matrices diag(1, ..., 1, -k, 0, ...) / √(k (k + 1)).
    """

    def _orthonormal_basis(self) -> Tensor:
        off_diagonal = [_symmetric_unit(self.d, i, j) for i in range(self.d) for j in range(i + 1, self.d)]
        ones = torch.ones(self.d, self.d, dtype=torch.float64)
        # Row k is 1, ..., 1, -k, 0, ...
        entries = ones.tril(-1) - torch.diag(torch.arange(self.d, dtype=torch.float64))
        return torch.stack([*off_diagonal, *torch.diag_embed(entries[1:] / entries[1:].norm(dim=1, keepdim=True))])


def determinant_sign(rotation: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return the sign ``[*]`` of det R for orthogonal matrices ``[*, d, d]``, detached from the graph."""
    return torch.linalg.det(rotation.detach()).sign()


def _symmetric_unit(d: int, i: int, j: int) -> Tensor:
    unit = torch.zeros(d, d, dtype=torch.float64)
    unit[i, j] = unit[j, i] = 1 if i == j else math.sqrt(0.5)
    return unit
