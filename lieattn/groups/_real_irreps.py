"""Real irreducible representations of a finite group, found numerically from its Cayley table."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lieattn.groups._finite import FiniteGroup, check_group

_SAME = 1e-6  # characters of different irreps differ by more, those of equal ones by rounding only
_TRIALS = 16  # random operators among which the one with the best separated eigenvalues is taken


@dataclass(frozen=True, eq=False)
class RealIrrep:
    """A real irreducible representation and its copies in the regular representation.

    Attributes
    ----------
    matrices
        ``[order, degree, degree]`` float64, orthogonal: ``matrices[g] @ matrices[h] == matrices[g h]``.
    basis
        ``[copies, degree, order]`` float64, orthonormal functions on H on which right translations act by
        ``matrices``: with (R_k f)(x) = f(x k), ``basis[m, a] · (R_k f) = Σ_b matrices[k, a, b] basis[m, b] · f``.
    """

    matrices: Tensor
    basis: Tensor

    @property
    def degree(self) -> int:
        """Real dimension of the representation."""
        return self.matrices.shape[1]

    @property
    def copies(self) -> int:
        """How often it is contained in the regular representation."""
        return self.basis.shape[0]


@lru_cache(maxsize=64)
def real_irreps(group: FiniteGroup) -> tuple[RealIrrep, ...]:
    r"""All real irreducible representations of a finite group.

    A symmetric operator :math:`\sum_g a_g L_g` of left translations commutes with all right translations; for
    generic :math:`a_g = a_{g^{-1}}` its eigenspaces are irreducible under them. Equivalent eigenspaces are turned
    into one another by an averaged intertwiner. Degrees and copies satisfy Σ degree · copies = order; by real
    type (Frobenius and Schur) copies are the degree, half of it, or a quarter. The order is fixed; all are float64 on
    the CPU.
    """
    check_group("group", group)
    generator = torch.Generator().manual_seed(0)
    identity = torch.eye(group.order, dtype=torch.float64)
    right, left = identity[group.cayley.T], identity[group.relative_index]
    weights = torch.randn(_TRIALS, group.order, generator=generator, dtype=torch.float64)
    operators = torch.einsum("tg,gxy->txy", weights + weights[:, group.inverse_index], left)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for space in max(map(_eigenspaces, operators), key=lambda spectrum: spectrum[0])[1]:
        matrices = space.T @ right @ space
        for known, copies in found:
            if _equivalent(known, matrices):
                random = torch.randn(known.shape[1:], generator=generator, dtype=torch.float64)
                intertwiner = (matrices @ random @ known.mT).mean(dim=0)
                # Between irreducible orthogonal representations it is orthogonal up to a factor.
                copies.append(space @ intertwiner * math.sqrt(len(intertwiner)) / intertwiner.norm())
                break
        else:
            found.append((matrices, [space]))
    return tuple(RealIrrep(matrices, torch.stack(copies).mT.contiguous()) for matrices, copies in found)


def _eigenspaces(operator: Tensor) -> tuple[float, tuple[Tensor, ...]]:
    """Smallest gap between different eigenvalues, on which the accuracy depends, and a basis for each of them."""
    values, vectors = torch.linalg.eigh(operator)
    gaps = values.diff() / values.abs().max()
    real = gaps > 1e-9
    edges = [0, *(real.nonzero().flatten() + 1).tolist(), len(values)]
    spaces = vectors.split([end - start for start, end in itertools.pairwise(edges)], dim=1)
    return float(gaps[real].min()) if real.any() else math.inf, spaces


def _equivalent(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    characters = [matrices.diagonal(dim1=1, dim2=2).sum(dim=-1) for matrices in (one, other)]
    return bool((characters[0] - characters[1]).abs().max() < _SAME)
