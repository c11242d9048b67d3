"""Representations of orthogonal maps as immutable values.

A :class:`Representation` returns the matrix of any orthogonal map, ``rep.matrix(rotation)``, and acts on features
``[*, dim]``, ``rep.act(rotation, features)``. Sums and multiples are also representations: ``2 * Vector(3) +
Scalar()``.
"""

from lieattn.reps._irreps import Irreps, to_irreps
from lieattn.reps._permutation import Permutation
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
    check_orthogonal,
    check_representation,
    is_orthogonal,
)

__all__ = [
    "DirectSum",
    "Irreps",
    "Multiple",
    "Permutation",
    "Pseudoscalar",
    "Pseudovector",
    "Representation",
    "Scalar",
    "SymmetricTensor",
    "TracelessSymmetric",
    "Vector",
    "check_orthogonal",
    "check_representation",
    "is_orthogonal",
    "to_irreps",
]
