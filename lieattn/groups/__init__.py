"""Algebra: groups as values, their elements as tensors.

``Group`` is the interface of all of them, in ``_group``. Finite groups of matrices are in ``_finite`` and ``_catalog``;
Lie groups in ``_rotations``, ``_dilations`` and ``_semidirect``, which also has R^d x| H for both kinds of H. Their
exponentials and logarithms rest on ``_series``, ``_skew`` and ``_quaternions``.
"""

from lieattn.groups._catalog import (
    commuting_product,
    cyclic,
    cyclic_about,
    dihedral,
    dihedral_about,
    direct_product,
    full_icosahedral,
    full_octahedral,
    full_tetrahedral,
    icosahedral,
    inversion,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
    trivial,
)
from lieattn.groups._dilations import Dilations, RotationDilations
from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._group import Group, LieGroup
from lieattn.groups._quaternions import quaternion_from_rotation, rotation_from_quaternion
from lieattn.groups._real_irreps import RealIrrep, real_irreps
from lieattn.groups._rotations import SO, O
from lieattn.groups._semidirect import SE, E, SemidirectProduct, Sim, Translations

__all__ = [  # noqa: RUF022 - its order puts SE and SO before SemidirectProduct
    "Dilations",
    "E",
    "FiniteGroup",
    "Group",
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
    "commuting_product",
    "cyclic",
    "cyclic_about",
    "dihedral",
    "dihedral_about",
    "direct_product",
    "full_icosahedral",
    "full_octahedral",
    "full_tetrahedral",
    "icosahedral",
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
