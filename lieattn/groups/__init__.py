"""Algebra: groups as values, their elements as tensors.

Finite groups of matrices are in ``_finite`` and ``_catalog``, the semidirect product with the translations
in ``_affine``; Lie groups (SO(d), dilations and what is built from them) belong beside them, with the same
verbs ``product``, ``inverse``, ``act_points``.
"""

from lieattn.groups._affine import AffineGroup
from lieattn.groups._catalog import (
    cyclic,
    cyclic_about,
    dihedral,
    direct_product,
    full_icosahedral,
    full_octahedral,
    full_tetrahedral,
    icosahedral,
    internal_product,
    inversion,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
    trivial,
)
from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._real_irreps import RealIrrep, real_irreps

__all__ = [
    "AffineGroup",
    "FiniteGroup",
    "RealIrrep",
    "check_group",
    "cyclic",
    "cyclic_about",
    "dihedral",
    "direct_product",
    "full_icosahedral",
    "full_octahedral",
    "full_tetrahedral",
    "icosahedral",
    "internal_product",
    "inversion",
    "octahedral",
    "pyritohedral",
    "real_irreps",
    "reflection",
    "tetrahedral",
    "trivial",
]
