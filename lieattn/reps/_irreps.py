"""Irreducible representations of O(3) in the conventions of e3nn. No other file of the core imports e3nn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lieattn._core.contexts import outside_of_transforms
from lieattn.reps._representation import (
    DirectSum,
    Multiple,
    Pseudoscalar,
    Pseudovector,
    Representation,
    Scalar,
    SymmetricTensor,
    TracelessSymmetric,
    Vector,
    block_diagonal,
    check_representation,
    determinant_sign,
)

_SIMPLE: dict[Representation, str] = {Scalar(): "0e", Pseudoscalar(): "0o", Vector(3): "1o", Pseudovector(): "1e"}


@dataclass(frozen=True)
class Irreps(Representation):
    """Irreducible representations of O(3), ``Irreps("2x0e + 1o + 2e")``, with the components and order of e3nn.

    ``spec`` is any argument of ``e3nn.o3.Irreps``, and is stored as its string without empty terms. ValueError is
    raised if e3nn cannot parse it, if it is empty, or if a degree exceeds 11. ``parts`` contains the count, the degree
    l and the parity (1 or -1) of each term, in order.

    A proper rotation acts on degree l by the Wigner matrix D^l, which has 2l + 1 rows. The point reflection acts by the
    parity, 1 for ``e`` and -1 for ``o``. Degree 1 has the components x, y, z. The components of degree l are
    coefficients of real spherical harmonics about the *y* axis, m = -l..l: e3nn's axes y, z, x are the x, y, z of the
    usual formulas (see :meth:`polar_z`). Copies of an irrep are contiguous: ``[copies, 2l + 1]``, flattened.
    """

    spec: str

    space_dim: ClassVar[int] = 3
    max_degree: ClassVar[int] = 11  # e3nn has Clebsch-Gordan coefficients up to this degree
    # Derived from the spec. They are not fields, so they do not take part in comparisons.
    dim: ClassVar[int] = 0
    parts: ClassVar[tuple[tuple[int, int, int], ...]] = ()
    _isometries: ClassVar[tuple[Tensor, ...]] = ()

    def __post_init__(self) -> None:
        try:
            irreps = _o3().Irreps(self.spec).remove_zero_multiplicities()
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"spec: expected irreps such as '2x0e + 1o', got {self.spec!r}") from error
        if irreps.dim == 0:
            raise ValueError(f"spec: expected at least one irrep, got {self.spec!r}")
        if irreps.lmax > Irreps.max_degree:
            raise ValueError(f"spec: degrees are limited to {Irreps.max_degree}, got {irreps.lmax} in {self.spec!r}")
        parts = tuple((mul, ir.l, ir.p) for mul, ir in irreps)
        vars(self).update(spec=str(irreps), parts=parts, dim=irreps.dim, _isometries=_clebsch_gordan(irreps.lmax))

    @property
    def name(self) -> str:
        return f"Irreps({self.spec!r})"

    def to_e3nn(self) -> Any:
        """Return the equivalent ``e3nn.o3.Irreps``."""
        return _parsed(self.spec)

    def polar_z(self) -> Tensor:
        """Return the orthogonal matrix ``[dim, dim]`` float64 that maps features to harmonics about the z axis.

        The resulting components m = -l..l are the usual real harmonics Y_lm of quantum chemistry, without the
        Condon-Shortley phase. Those of degree 1 are y, z, x.
        """
        return self.matrix(torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.float64))

    def _evaluate(self, rotation: Tensor) -> Tensor:
        blocks = self._blocks(rotation)
        return block_diagonal([blocks[degree, parity] for count, degree, parity in self.parts for _ in range(count)])

    def _apply(self, rotation: Tensor, features: Tensor) -> Tensor:
        blocks = self._blocks(rotation)
        pieces = features.split([count * (2 * degree + 1) for count, degree, _ in self.parts], dim=-1)
        turned = []
        for (count, degree, parity), piece in zip(self.parts, pieces, strict=True):
            copies = piece.unflatten(-1, (count, 2 * degree + 1))
            matrix = blocks[degree, parity].to(features.dtype)
            turned.append(torch.einsum("...ij,...cj->...ci", matrix, copies).flatten(-2))
        return torch.cat(turned, dim=-1)

    def _blocks(self, rotation: Tensor) -> dict[tuple[int, int], Tensor]:
        """Return the matrix of each pair of degree and parity that occurs."""
        sign = determinant_sign(rotation)[..., None, None]
        wigner = _wigner(sign * rotation, self._isometries)
        kinds = {(degree, parity) for _, degree, parity in self.parts}
        return {(degree, p): wigner[degree] * (1 if p == 1 else sign) for degree, p in kinds}


def _wigner(rotation: Tensor, isometries: tuple[Tensor, ...]) -> list[Tensor]:
    r"""Return D^0 and D^1 of float64 rotations, and one further degree for each Clebsch-Gordan isometry C.

    They are polynomials in the entries of R, computed degree by degree,

    .. math::  D^l(R) = C_l^T (R \otimes D^{l-1}(R)) C_l

    Values and gradients are therefore accurate at every rotation, unlike with Euler angles, which are singular where
    their axes coincide.
    """
    matrices = [rotation.new_ones(*rotation.shape[:-2], 1, 1), rotation]
    for isometry in isometries:
        isometry = isometry.to(rotation.device)
        half = torch.einsum("...bn,knp->...kbp", matrices[-1], isometry)
        both = torch.einsum("...ik,...kbp->...ibp", rotation, half)
        matrices.append(torch.einsum("ibm,...ibp->...mp", isometry, both))
    return matrices


@lru_cache(maxsize=Irreps.max_degree + 1)
@torch.inference_mode(False)
@outside_of_transforms
def _clebsch_gordan(degree: int) -> tuple[Tensor, ...]:
    """Return the isometries ``[3, 2l - 1, 2l + 1]`` of degree l into the product of 1 and l - 1, for l = 2..degree."""
    if degree < 2:
        return ()
    table = _o3().wigner_3j(1, degree - 1, degree, dtype=torch.float64, device="cpu")
    return (*_clebsch_gordan(degree - 1), table * math.sqrt(2 * degree + 1))


def _o3() -> Any:
    from e3nn import o3

    return o3


@lru_cache(maxsize=256)
def _parsed(spec: str) -> Any:
    return _o3().Irreps(spec)


def to_irreps(rep: Representation) -> tuple[Irreps, Tensor]:
    """Decompose a representation of O(3) into irreps, and return them with the change of basis.

    The basis is an orthogonal matrix Q ``[dim, dim]`` float64 with ``Q @ rep.matrix(R) == irreps.matrix(R) @ Q``, so
    ``features @ Q.T`` are features of the irreps. Independent components of variance 1 remain independent with
    variance 1, which is e3nn's component normalization. TypeError is raised if ``rep`` is not a representation, and
    ValueError if its irreps are not known.
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
    raise ValueError(f"rep: expected a representation of O(3) with known irreps, such as Vector(3), got {rep.name}")


def _traceless_to_degree_two() -> Tensor:
    """Return the orthogonal matrix ``[5, 5]`` from traceless symmetric matrices to the components of degree 2.

    The latter are, up to factors, xz, xy, y² - (x² + z²) / 2, yz and z² - x².
    """
    long, short = math.sqrt(0.75), 0.5
    rows = ((0, 1, 0, 0, 0), (1, 0, 0, 0, 0), (0, 0, 0, -long, short), (0, 0, 1, 0, 0), (0, 0, 0, -short, -long))
    return torch.tensor(rows, dtype=torch.float64)
