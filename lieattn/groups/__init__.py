"""Algebra: groups as values, their elements as tensors.

Finite groups of matrices are in ``_finite`` and ``_catalog``, their semidirect product with the translations in
``_affine``. Lie groups are in ``_lie`` (the interface), ``_rotations``, ``_dilations`` and ``_semidirect``; their
exponentials and logarithms rest on ``_series``, ``_skew`` and ``_quaternions``.
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
from lieattn.groups._dilations import Dilations, RotationDilations
from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._lie import LieGroup, check_lie_group
from lieattn.groups._quaternions import quaternion_from_rotation, rotation_from_quaternion
from lieattn.groups._real_irreps import RealIrrep, real_irreps
from lieattn.groups._rotations import SO, O
from lieattn.groups._semidirect import SE, E, SemidirectProduct, Sim, Translations

__all__ = [  # noqa: RUF022 - its order puts SE and SO before AffineGroup
    "AffineGroup",
    "Dilations",
    "E",
    "FiniteGroup",
    "LieGroup",
    "O",
    "RealIrrep",
    "RotationDilations",
    "SE",
    "SO",
    "SemidirectProduct",
    "Sim",
    "Translations",
    "check_group",
    "check_lie_group",
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
    "quaternion_from_rotation",
    "real_irreps",
    "reflection",
    "rotation_from_quaternion",
    "tetrahedral",
    "trivial",
]
