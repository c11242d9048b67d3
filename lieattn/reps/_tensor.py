"""Cartesian representations: scalars, vectors and symmetric tensors, with and without parity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lieattn._checks import check_count
from lieattn.reps._representation import Representation


@dataclass(frozen=True)
class Scalar(Representation):
    """What rotations and mirrors leave alone, ρ(R) = 1: energies, charges, temperatures."""

    name: ClassVar[str] = "Scalar"
    dim: ClassVar[int] = 1
    space_dim: ClassVar[None] = None
    orthogonal_only: ClassVar[bool] = False

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return rotation.new_ones(*rotation.shape[:-2], 1, 1)


@dataclass(frozen=True)
class Pseudoscalar(Representation):
    """What mirrors reverse, ρ(R) = det R: chirality, helicity, the curl of a plane vector field."""

    name: ClassVar[str] = "Pseudoscalar"
    dim: ClassVar[int] = 1
    space_dim: ClassVar[None] = None

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return determinant_sign(rotation)[..., None, None]


@dataclass(frozen=True)
class Pseudovector(Representation):
    """Vectors of R^3 that mirrors treat as rotation axes, ρ(R) = det(R) R: angular velocities, magnetic moments."""

    name: ClassVar[str] = "Pseudovector"
    dim: ClassVar[int] = 3
    space_dim: ClassVar[int] = 3

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return determinant_sign(rotation)[..., None, None] * rotation


@dataclass(frozen=True)
class _OfDimension(Representation):
    """A family with one representation for each dimension of the space, from ``_least`` on."""

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
    """Vectors of R^d, ρ(R) = R: velocities, forces, dipole moments. It takes every invertible matrix."""

    orthogonal_only: ClassVar[bool] = False

    def _evaluate(self, rotation: Tensor) -> Tensor:
        return rotation


@dataclass(frozen=True)
class _SymmetricMatrices(_OfDimension):
    """Symmetric matrices T ↦ R T Rᵀ in an orthonormal basis of a space of them."""

    _least: ClassVar[int] = 2
    # Made once from d; no field, so it takes no part in comparisons.
    _basis: ClassVar[Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_basis", self._orthonormal_basis())

    @property
    def dim(self) -> int:
        return len(self._basis)

    def _orthonormal_basis(self) -> Tensor:
        """Basis ``[dim, d, d]`` of the matrices, float64."""
        raise NotImplementedError

    def to_tensor(self, features: Tensor) -> Tensor:
        """Components ``[*, dim]`` to symmetric matrices ``[*, d, d]``."""
        if features.shape[-1:] != (self.dim,):
            raise ValueError(f"features: expected [*, {self.dim}] for {self.name}, got {tuple(features.shape)}")
        with torch.autocast(features.device.type, enabled=False):
            return torch.einsum("...a,aij->...ij", features, self._basis.to(features))

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """Matrices ``[*, d, d]`` to components ``[*, dim]`` of their projection on the space."""
        if tensor.shape[-2:] != (self.d, self.d):
            raise ValueError(f"tensor: expected [*, {self.d}, {self.d}] for {self.name}, got {tuple(tensor.shape)}")
        with torch.autocast(tensor.device.type, enabled=False):
            return torch.einsum("...ij,aij->...a", tensor, self._basis.to(tensor))

    def _evaluate(self, rotation: Tensor) -> Tensor:
        basis = self._basis.to(rotation)
        turned = rotation[..., None, :, :] @ basis @ rotation[..., None, :, :].mT
        return torch.einsum("aij,...bij->...ab", basis, turned)


@dataclass(frozen=True)
class SymmetricTensor(_SymmetricMatrices):
    """Symmetric tensors of rank 2, T ↦ R T Rᵀ, for d from 2: polarizabilities, stresses, moments of inertia.

    The d (d + 1) / 2 components are taken in the order of the upper triangle, row by row, those off the diagonal times
    √2, so that their squares sum to those of the matrix and ρ(R) is orthogonal. See :meth:`to_tensor` and
    :meth:`from_tensor`. It takes every invertible matrix.
    """

    orthogonal_only: ClassVar[bool] = False

    def _orthonormal_basis(self) -> Tensor:
        return torch.stack([_symmetric_unit(self.d, i, j) for i in range(self.d) for j in range(i, self.d)])


@dataclass(frozen=True)
class TracelessSymmetric(_SymmetricMatrices):
    """Symmetric tensors of rank 2 without trace, T ↦ R T Rᵀ, for d from 2: quadrupole moments, anisotropies.

    The components refer to an orthonormal basis: the entries above the diagonal times √2, row by row, then the
    d - 1 diagonal matrices diag(1, ..., 1, -k, 0, ...) / √(k (k + 1)).
    """

    def _orthonormal_basis(self) -> Tensor:
        off_diagonal = [_symmetric_unit(self.d, i, j) for i in range(self.d) for j in range(i + 1, self.d)]
        ones = torch.ones(self.d, self.d, dtype=torch.float64)
        # 1, ..., 1, -k, 0, ... in row k
        entries = ones.tril(-1) - torch.diag(torch.arange(self.d, dtype=torch.float64))
        return torch.stack([*off_diagonal, *torch.diag_embed(entries[1:] / entries[1:].norm(dim=1, keepdim=True))])


def determinant_sign(rotation: Tensor) -> Tensor:
    """Sign det R = ±1 of orthogonal matrices ``[*, d, d]``, as a constant: ``[*]``."""
    return torch.linalg.det(rotation.detach()).sign()


def _symmetric_unit(d: int, i: int, j: int) -> Tensor:
    unit = torch.zeros(d, d, dtype=torch.float64)
    unit[i, j] = unit[j, i] = 1 if i == j else math.sqrt(0.5)
    return unit
