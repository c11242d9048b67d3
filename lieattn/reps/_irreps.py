"""Irreducible representations of O(3) in the conventions of e3nn; the only file of the core that imports e3nn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lieattn._checks import check_count
from lieattn.reps._representation import Representation, check_orthogonal
from lieattn.reps._tensor import determinant_sign

MAX_DEGREE = 11
"""Largest degree l that e3nn has Clebsch-Gordan coefficients for."""


@dataclass(frozen=True)
class Irreps(Representation):
    """Irreducible representations of O(3), ``Irreps("2x0e + 1o + 2e")``, with the components and order of e3nn.

    A proper rotation acts on degree l by the Wigner matrix D^l, of 2l + 1 rows; the point reflection by the parity,
    1 for ``e`` and -1 for ``o``. Degree 1 has the components x, y, z. Those of degree l are the coefficients of real
    spherical harmonics about the *y* axis, m = -l..l with e3nn's axes named y, z, x in the usual order: see
    :meth:`polar_z`. Copies of an irrep stand one after another, ``[copies, 2l + 1]`` flattened.

    Attributes
    ----------
    spec
        Anything that ``e3nn.o3.Irreps`` takes; kept as its string, without empty terms.
    parts
        Count, degree l and parity (1 or -1) of each term, in their order.

    Raises
    ------
    ValueError
        If e3nn cannot read it, nothing is in it, or a degree exceeds 11.
    """

    spec: str

    space_dim: ClassVar[int] = 3
    # Read once from the spec; no fields, so they take no part in comparisons.
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
        if irreps.lmax > MAX_DEGREE:
            raise ValueError(f"spec: degrees are limited to {MAX_DEGREE}, got {irreps.lmax} in {self.spec!r}")
        object.__setattr__(self, "spec", str(irreps))
        parts = tuple((mul, ir.l, ir.p) for mul, ir in irreps)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "dim", irreps.dim)
        object.__setattr__(self, "_isometries", _clebsch_gordan(irreps.lmax))

    @property
    def name(self) -> str:
        """The spec in e3nn's spelling."""
        return f"Irreps({self.spec!r})"

    def to_e3nn(self) -> Any:
        """The same as an ``e3nn.o3.Irreps``."""
        return _parsed(self.spec)

    def polar_z(self) -> Tensor:
        """Orthogonal ``[dim, dim]`` float64 that takes features to harmonics about the z axis, m = -l..l.

        With it the components of degree 1 are y, z, x, and those of the harmonics themselves are the usual
        real ones (Y_lm as in quantum chemistry without the Condon-Shortley phase).
        """
        return self.matrix(torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.float64))

    def _evaluate(self, rotation: Tensor) -> Tensor:
        blocks = self._blocks(rotation)
        out = rotation.new_zeros(*rotation.shape[:-2], self.dim, self.dim)
        first = 0
        for count, degree, parity in self.parts:
            for _ in range(count):
                last = first + 2 * degree + 1
                out[..., first:last, first:last] = blocks[degree, parity]
                first = last
        return out

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
        """Matrix of each degree and parity that occurs."""
        sign = determinant_sign(rotation)[..., None, None]
        wigner = _wigner(sign * rotation, self._isometries)
        kinds = {(degree, parity) for _, degree, parity in self.parts}
        return {(degree, p): wigner[degree] * (1 if p == 1 else sign) for degree, p in kinds}


def wigner_d(degree: int, rotation: Tensor) -> Tensor:
    r"""Wigner matrices D^l(R) in the basis of e3nn, without angles.

    They are polynomials in the entries of R, built degree by degree with the isometries C of Clebsch and Gordan,

    .. math::  D^l(R) = C_l^T (R \otimes D^{l-1}(R)) C_l

    so they lose no accuracy, and have the right gradients, at every rotation; Euler angles do neither where their axes
    coincide.

    Parameters
    ----------
    degree
        l, from 0 to 11.
    rotation
        ``[*, 3, 3]`` proper rotations.

    Returns
    -------
    Tensor
        ``[*, 2 l + 1, 2 l + 1]``, computed in float64 and given in the dtype of ``rotation``.

    Raises
    ------
    ValueError
        If the degree is out of range, or the matrices are not proper rotations.
    """
    check_count("degree", degree, 0)
    if degree > MAX_DEGREE:
        raise ValueError(f"degree: expected at most {MAX_DEGREE}, got {degree}")
    if rotation.shape[-2:] != (3, 3) or not rotation.is_floating_point():
        raise ValueError(f"rotation: expected floating [*, 3, 3], got {rotation.dtype} {tuple(rotation.shape)}")
    check_orthogonal("rotation", rotation)
    if bool((determinant_sign(rotation) < 0).any()):
        raise ValueError("rotation: expected proper rotations, but a determinant is negative; use Irreps for both")
    with torch.autocast(rotation.device.type, enabled=False):
        return _wigner(rotation.to(torch.float64), _clebsch_gordan(degree))[degree].to(rotation.dtype)


def _wigner(rotation: Tensor, isometries: tuple[Tensor, ...]) -> list[Tensor]:
    """D^0, D^1 and so on of float64 rotations, one more for each isometry."""
    matrices = [rotation.new_ones(*rotation.shape[:-2], 1, 1), rotation]
    for isometry in isometries:
        isometry = isometry.to(rotation.device)
        half = torch.einsum("...bn,knp->...kbp", matrices[-1], isometry)
        both = torch.einsum("...ik,...kbp->...ibp", rotation, half)
        matrices.append(torch.einsum("ibm,...ibp->...mp", isometry, both))
    return matrices


@lru_cache(maxsize=MAX_DEGREE + 1)
def _clebsch_gordan(degree: int) -> tuple[Tensor, ...]:
    """Isometries ``[3, 2l - 1, 2l + 1]`` from degree l into the product of degrees 1 and l - 1, l = 2 to ``degree``."""
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
