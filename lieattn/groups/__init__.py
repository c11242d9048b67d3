"""Algebra: groups as values, their elements as tensors.

``_group`` holds ``Group``, the interface of all groups. Finite groups of matrices are in ``_finite``, those that have
names in ``_catalog``. Lie groups are in ``_lie``, together with the semidirect product R^d ⋊ H, where H is a finite or
a Lie group; their exponentials and logarithms are computed in ``_skew``.
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
from lieattn.groups._finite import FiniteGroup, RealIrrep, check_group, real_irreps
from lieattn.groups._group import Group, LieGroup
from lieattn.groups._lie import SE, SO, Dilations, E, O, RotationDilations, SemidirectProduct, Sim, Translations, affine
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
    "octahedral",
    "pyritohedral",
    "quaternion_from_rotation",
    "real_irreps",
    "reflection",
    "rotation_from_quaternion",
    "tetrahedral",
    "trivial",
]
