"""Algebra: groups as values, their elements as tensors.

``_group`` defines ``Group``, the interface of all groups. ``_finite`` contains finite groups of matrices, and
``_catalog`` the functions that build named ones. ``_lie`` contains the Lie groups and the semidirect product R^d ⋊ H,
where H is a finite or a Lie group. Exponentials and logarithms of rotations are computed in ``_skew``.
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
from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._group import Group, LieGroup, affine
from lieattn.groups._lie import SO, Dilations, O, RotationDilations, Translations
from lieattn.groups._real_irreps import RealIrrep, real_irreps
from lieattn.groups._semidirect import SE, E, SemidirectProduct, Sim, linear_part
from lieattn.groups._skew import quaternion_from_rotation, rotation_from_quaternion

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
    "affine",
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
    "linear_part",
    "octahedral",
    "pyritohedral",
    "quaternion_from_rotation",
    "real_irreps",
    "reflection",
    "rotation_from_quaternion",
    "tetrahedral",
    "trivial",
]
