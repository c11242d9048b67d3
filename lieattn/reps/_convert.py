"""Cartesian features as irreps of O(3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lieattn.reps._irreps import Irreps, wigner_d
from lieattn.reps._representation import DirectSum, Multiple, Representation, check_representation
from lieattn.reps._tensor import Pseudoscalar, Pseudovector, Scalar, SymmetricTensor, TracelessSymmetric, Vector

_SIMPLE: dict[Representation, str] = {
    Scalar(): "0e",
    Pseudoscalar(): "0o",
    Vector(3): "1o",
    Pseudovector(): "1e",
}


def to_irreps(rep: Representation) -> tuple[Irreps, Tensor]:
    """Irreps of a representation of O(3), and the change of basis to them.

    Parameters
    ----------
    rep
        Any representation of this package that acts on R^3.

    Returns
    -------
    irreps
        What it is a sum of.
    basis
        ``[dim, dim]`` float64 orthogonal Q: ``features @ Q.T`` are features of ``irreps``, and
        ``Q @ rep.matrix(R) == irreps.matrix(R) @ Q``. A feature with independent components of variance 1 stays so,
        which is e3nn's component normalization.

    Raises
    ------
    TypeError, ValueError
        If it is not a representation of O(3), or of a type that is not known here.
    """
    check_representation("rep", rep)
    spec, basis = _decomposed(rep)
    return Irreps(spec), basis


def _decomposed(rep: Representation) -> tuple[str, Tensor]:
    if isinstance(rep, Irreps):
        return rep.spec, torch.eye(rep.dim, dtype=torch.float64)
    if isinstance(rep, DirectSum | Multiple):
        parts = rep.parts if isinstance(rep, DirectSum) else (rep.part,) * rep.count
        pieces = [_decomposed(part) for part in parts]
        return " + ".join(spec for spec, _ in pieces), torch.block_diag(*(basis for _, basis in pieces))
    if rep in _SIMPLE:
        return _SIMPLE[rep], torch.eye(rep.dim, dtype=torch.float64)
    if rep == TracelessSymmetric(3):
        return "2e", _traceless_to_degree_two()
    if rep == SymmetricTensor(3):
        full, traceless = SymmetricTensor(3), TracelessSymmetric(3)
        trace = full.from_tensor(torch.eye(3, dtype=torch.float64)) / math.sqrt(3)
        to_traceless = traceless.from_tensor(full.to_tensor(torch.eye(6, dtype=torch.float64))).T
        return "0e + 2e", torch.cat([trace[None], _traceless_to_degree_two() @ to_traceless])
    raise ValueError(f"rep: {rep.name} is no representation of O(3) whose irreps are known")


def _traceless_to_degree_two() -> Tensor:
    """Orthogonal ``[5, 5]`` from traceless symmetric matrices to the components of degree 2.

    Every v gives a tensor v vᵀ and harmonics Y_2(v), linear in it; five directions determine the map, and
    R ↦ D²(R) takes the harmonics of one direction, the axis y, to all others.
    """
    rep = TracelessSymmetric(3)
    generic = torch.randn(12, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotations = torch.linalg.matrix_exp(generic - generic.mT)
    directions = rotations[:, :, 1]
    tensors = rep.from_tensor(directions[:, :, None] * directions[:, None, :])
    # About e3nn's axis y, only the component m = 0 of a harmonic is there.
    harmonics = wigner_d(2, rotations)[:, :, 2]
    solution = torch.linalg.lstsq(tensors, harmonics).solution.T
    left, _, right = torch.linalg.svd(solution)
    return left @ right
