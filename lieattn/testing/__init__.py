"""Checks for the tests of this library, which serve yours too."""

from lieattn._core.checks import TOLERANCE
from lieattn.testing._equivariance import (
    assert_certified,
    assert_equivariant,
    equivariance_error,
    further_symmetries,
    random_cloud,
    randomize,
    relative_error,
)
from lieattn.testing._properties import PROPERTIES, assert_conforms

__all__ = [
    "PROPERTIES",
    "TOLERANCE",
    "assert_certified",
    "assert_conforms",
    "assert_equivariant",
    "equivariance_error",
    "further_symmetries",
    "random_cloud",
    "randomize",
    "relative_error",
]
