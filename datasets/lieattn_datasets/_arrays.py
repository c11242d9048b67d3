"""Conversion and checks of numerical arguments. Errors name the argument."""

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_LARGEST = 1e100


def real_array(argument: str, values: ArrayLike, *, finite: bool = True) -> NDArray[np.float64]:
    """Return numbers as float64; raise ValueError, naming the argument, if they are not real or, optionally, finite."""
    try:
        if np.ma.is_masked(values):
            raise TypeError(f"values that are missing (masked), {np.ma.count_masked(values)} of {np.size(values)}")
        found = np.asarray(values)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"dtype {found.dtype}")
        found = found.astype(np.float64, order="C", copy=False)  # torch does not support negative strides
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{argument}: expected an array of real numbers, got {type(values).__name__}: {error}"
        ) from error
    if finite and not np.isfinite(found).all():
        first = np.argwhere(~np.isfinite(found))[0].tolist()
        raise ValueError(f"{argument}: expected finite numbers, got NaN or infinity, the first at {first}")
    return found


def square_matrix(argument: str, values: ArrayLike | Tensor) -> Tensor:
    """Return a square matrix of finite numbers as a float64 copy; raise ValueError, naming the argument, for others."""
    matrix = torch.from_numpy(real_array(argument, values)).clone()
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{argument}: expected a square matrix, got {list(matrix.shape)}")
    return matrix


def plain_array(argument: str, values: ArrayLike, *, finite: bool = True) -> NDArray[Any]:
    """Return the numbers or booleans of a list, array or tensor as an array of their own dtype; see real_array."""
    real_array(argument, values, finite=finite)
    return np.asarray(values)


def dtype_of_places(pos: NDArray[Any], size: ArrayLike) -> type[np.floating[Any]]:
    """Return float32, or float64 for clouds ``[clouds, ...]`` whose places float32 would round by over 1e-5 of a size.

    These are given in float64, and far from the origin. Networks that are invariant to translations round them around
    the origin, so that displacements keep their digits, and other networks still see the places.
    """
    steps = np.abs(pos).reshape(len(pos), -1).max(axis=1, initial=0.0) * np.finfo(np.float32).eps
    lost = (steps > 1e-5 * np.asarray(size)) & (np.asarray(size) > 0)
    return np.float64 if pos.dtype.itemsize > 4 and lost.any() else np.float32


def class_array(argument: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return integers as int64; raise TypeError, naming the argument, for other numbers."""
    found = plain_array(argument, values)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{argument}: expected integers, got {found.dtype}")
    return found.astype(np.int64)


def check_number(argument: str, value: float) -> None:
    """Raise ValueError, naming the argument, unless a value is a real number whose square is finite."""
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(value) <= _LARGEST:
        raise ValueError(f"{argument}: expected a number of at most {_LARGEST:g} in size, got {value!r}")


def check_points(points: int) -> None:
    """Raise ValueError unless a number of points is a positive integer."""
    if isinstance(points, bool) or not isinstance(points, Integral) or points < 1:
        raise ValueError(f"points: expected an integer of at least 1, got {points!r}")
