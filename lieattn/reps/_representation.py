"""What a representation is, and how representations are put together."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn._checks import check_count, check_tensor


class Representation(abc.ABC):
    """A map ρ from orthogonal matrices R of R^d to matrices that multiplies as they do: ρ(R S) = ρ(R) ρ(S).

    Representations are values: immutable, compared by what they are, without data on any device. All of the
    library's are orthogonal, ρ(R)⁻¹ = ρ(R)ᵀ, for orthogonal R. Where ``orthogonal_only`` is false ρ takes every
    invertible matrix, else orthogonal ones alone.
    """

    orthogonal_only: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the representation is called in messages."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Number of components of a feature."""

    @property
    @abc.abstractmethod
    def space_dim(self) -> int | None:
        """Dimension d of the matrices R, None where any will do."""

    @abc.abstractmethod
    def _evaluate(self, rotation: Tensor) -> Tensor:
        """Matrices ``[*, dim, dim]`` of float64 matrices ``[*, d, d]`` that are known to fit."""

    def matrix(self, rotation: Tensor) -> Tensor:
        """Matrices ρ(R) ``[*, dim, dim]`` for R ``[*, d, d]``, computed in float64 and given in the dtype of R.

        TypeError or ValueError is raised if R is not floating, has another size, or is not orthogonal where it must be.
        """
        self._check(rotation)
        with torch.autocast(rotation.device.type, enabled=False):
            return self._evaluate(rotation.to(torch.float64)).to(rotation.dtype)

    def act(self, rotation: Tensor, features: Tensor) -> Tensor:
        """Act on features: ρ(R) v, for R ``[*, d, d]`` and v ``[*, dim]`` whose leading axes broadcast.

        It computes, and answers, in the dtype of the features, float32 at least, also under autocast.
        """
        self._check(rotation)
        if features.shape[-1:] != (self.dim,):
            raise ValueError(f"features: expected [*, {self.dim}] for {self.name}, got {tuple(features.shape)}")
        dtype = torch.promote_types(features.dtype, torch.float32)
        with torch.autocast(features.device.type, enabled=False):
            return self._apply(rotation.to(torch.float64), features.to(dtype))

    def _apply(self, rotation: Tensor, features: Tensor) -> Tensor:
        """:meth:`act` on float64 matrices, in the dtype of the features."""
        return torch.einsum("...ij,...j->...i", self._evaluate(rotation).to(features.dtype), features)

    def _check(self, rotation: Tensor) -> None:
        d = self.space_dim
        check_tensor("rotation", rotation, "a floating tensor [*, d, d]")
        shape = tuple(rotation.shape)
        if rotation.ndim < 2 or shape[-1] != shape[-2] or d not in (None, shape[-1]):
            raise ValueError(f"rotation: {self.name} takes matrices [*, {d or 'd'}, {d or 'd'}], got {shape}")
        if self.orthogonal_only:
            check_orthogonal("rotation", rotation)

    def __add__(self, other: Representation) -> Representation:
        """Direct sum: components of this one first."""
        if not isinstance(other, Representation):
            return NotImplemented
        return DirectSum((*_parts(self), *_parts(other)))

    def __rmul__(self, count: int) -> Representation:
        """Sum of ``count`` copies, one after another; no wrapper for one."""
        if not isinstance(count, int):
            return NotImplemented
        return self if count == 1 else Multiple(count, self)

    def __str__(self) -> str:
        return self.name


class _Composite(Representation):
    """What sums and multiples share: ρ(R) is block diagonal."""

    @property
    @abc.abstractmethod
    def _summands(self) -> tuple[Representation, ...]: ...

    @property
    def orthogonal_only(self) -> bool:  # type: ignore[override]
        """Whether any summand is for orthogonal matrices alone."""
        return any(part.orthogonal_only for part in self._summands)

    @property
    def dim(self) -> int:
        return sum(part.dim for part in self._summands)

    @property
    def space_dim(self) -> int | None:
        return next((part.space_dim for part in self._summands if part.space_dim is not None), None)


@dataclass(frozen=True)
class DirectSum(_Composite):
    """Representations one after another: ρ(R) is block diagonal. Write it as ``Vector(3) + Scalar()``.

    ``parts`` are the summands, at least one, of spaces of one dimension.
    """

    parts: tuple[Representation, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts:
            raise ValueError(f"parts: expected a tuple of at least one representation, got {self.parts!r}")
        for part in self.parts:
            check_representation("parts", part)
        if len({part.space_dim for part in self.parts} - {None}) > 1:
            raise ValueError(f"parts: act on spaces of different dimensions: {self.name}")

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
    """``count`` copies of one ``part``, copy by copy: features are ``[*, count, part.dim]`` flattened."""

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
    """Raise TypeError, naming the argument, unless ``rep`` is a :class:`Representation`, not a class."""
    if not isinstance(rep, Representation):
        raise TypeError(f"{argument}: expected a Representation such as lieattn.reps.Vector(3), got {rep!r}")


def check_orthogonal(argument: str, matrices: Tensor) -> None:
    """Raise ValueError, naming the argument, if a matrix of a stack ``[*, d, d]`` does not preserve lengths.

    The tolerance is 1e-6 in float64 and 1e-3 in lower precision. Nothing is checked while a graph is compiled.
    """
    error = _orthogonality_error(matrices)
    if not error <= _allowed(matrices):
        raise ValueError(f"{argument}: expected orthogonal matrices, but Rᵀ R differs from the identity by {error:.1e}")


def is_orthogonal(matrices: Tensor) -> bool:
    """Whether :func:`check_orthogonal` would let a stack ``[*, d, d]`` pass."""
    return _orthogonality_error(matrices) <= _allowed(matrices)


def _allowed(matrices: Tensor) -> float:
    return 1e-6 if matrices.dtype == torch.float64 else 1e-3


def _orthogonality_error(matrices: Tensor) -> float:
    if matrices.numel() == 0 or torch.compiler.is_compiling():
        return 0.0
    wide = matrices.detach().to(torch.float64)
    gram = wide.mT @ wide - torch.eye(wide.shape[-1], dtype=torch.float64, device=wide.device)
    return float(gram.abs().max())


def _parts(rep: Representation) -> tuple[Representation, ...]:
    return rep.parts if isinstance(rep, DirectSum) else (rep,)


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Matrices with the blocks ``[*, k, k]`` on the diagonal."""
    if len(blocks) == 1:
        return blocks[0]
    size = sum(block.shape[-1] for block in blocks)
    rows, first = [], 0
    for block in blocks:
        width = block.shape[-1]
        rows.append(F.pad(block, (first, size - first - width)))
        first += width
    return torch.cat(rows, dim=-2)
