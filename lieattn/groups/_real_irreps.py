"""Real irreducible representations of finite groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lieattn._core.contexts import outside_of_transforms
from lieattn.groups._finite import FiniteGroup, check_group

_SAME = 1e-6  # characters of different irreps differ by more, characters of equivalent ones only by rounding
_TRIALS = 16  # number of random operators; the one with the best separated eigenvalues is used


@dataclass(frozen=True, eq=False)
class RealIrrep:
    """A real irreducible representation and its copies in the regular representation.

    ``matrices`` ``[order, degree, degree]`` are orthogonal, with ``matrices[g] @ matrices[h] == matrices[g h]``.
    ``basis`` ``[copies, degree, order]`` contains orthonormal functions on H, on which right translations act by
    ``matrices``: with (R_k f)(x) = f(x k), ``basis[m, a] · (R_k f) = Σ_b matrices[k, a, b] basis[m, b] · f``. Both are
    float64.
    """

    matrices: Tensor
    basis: Tensor

    @property
    def degree(self) -> int:
        """Real dimension of the representation."""
        return self.matrices.shape[1]

    @property
    def copies(self) -> int:
        """Multiplicity in the regular representation."""
        return self.basis.shape[0]


@lru_cache(maxsize=64)
@torch.inference_mode(False)
@outside_of_transforms
def real_irreps(group: FiniteGroup) -> tuple[RealIrrep, ...]:
    r"""Return all real irreducible representations of a finite group, in a fixed order, in float64 on the CPU.

    A symmetric operator :math:`\sum_g a_g L_g` of left translations commutes with all right translations, and for
    generic :math:`a_g = a_{g^{-1}}` its eigenspaces are irreducible under them. An averaged intertwiner maps equivalent
    eigenspaces onto each other. Degrees and copies satisfy Σ degree · copies = order. Depending on the real type
    (Frobenius and Schur), the number of copies is the degree, half of it, or a quarter of it.
    """
    check_group("group", group)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(_TRIALS, group.order, generator=generator, dtype=torch.float64)
    # Translations permute, so their matrices, which are cubic in the order, are not stored.
    quotient = group.cayley[:, group.inverse_index]  # x y⁻¹
    operators = (weights + weights[:, group.inverse_index])[:, quotient]
    found: list[tuple[Tensor, list[Tensor]]] = []
    for space in max(map(_eigenspaces, operators), key=lambda spectrum: spectrum[0])[1]:
        matrices = space[quotient.T].mT.contiguous() @ space  # f_a(x k⁻¹) f_b(x), summed over x
        character = matrices.diagonal(dim1=1, dim2=2).sum(dim=-1)
        for known, copies in found:
            others = known.diagonal(dim1=1, dim2=2).sum(dim=-1)
            if known.shape == matrices.shape and (character - others).abs().max() < _SAME:
                random = torch.randn(known.shape[1:], generator=generator, dtype=torch.float64)
                intertwiner = (matrices @ random @ known.mT).mean(dim=0)
                # An intertwiner of irreducible orthogonal representations is orthogonal up to a factor.
                copies.append(space @ intertwiner * math.sqrt(len(intertwiner)) / intertwiner.norm())
                break
        else:
            found.append((matrices, [space]))
    return tuple(RealIrrep(matrices, torch.stack(copies).mT.contiguous()) for matrices, copies in found)


def _eigenspaces(operator: Tensor) -> tuple[float, tuple[Tensor, ...]]:
    """Return the smallest gap between different eigenvalues, which limits the accuracy, and a basis of each space."""
    values, vectors = torch.linalg.eigh(operator)
    gaps = values.diff() / values.abs().max()
    real = gaps > 1e-9
    edges = [0, *(real.nonzero().flatten() + 1).tolist(), len(values)]
    spaces = vectors.split([end - start for start, end in itertools.pairwise(edges)], dim=1)
    return float(gaps[real].min()) if real.any() else math.inf, spaces
