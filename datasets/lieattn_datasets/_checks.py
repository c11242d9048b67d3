"""Checks of arrays and clouds, whose errors name the argument, what was found and what is expected."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Batch, Data


def require(holds: object, argument: str, expected: str, got: object) -> None:
    """Raise ValueError, naming the argument, unless a condition holds."""
    if not holds:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def shapes_of(*arrays: NDArray[Any]) -> str:
    """Return the shapes of arrays in words."""
    return ", ".join(str(list(array.shape)) for array in arrays)


def check_one_cloud(data: Data, reason: str) -> None:
    """Raise ValueError for a batch."""
    require(not isinstance(data, Batch), "data", "one cloud", f"a Batch, {reason}")


def check_attribute(data: Data, name: str, points: int | None = None, *, floating: bool = False) -> Tensor:
    """Return a tensor of a cloud.

    ValueError is raised unless it is a tensor of real numbers with at least one axis and, if ``points`` is given, has
    one row for each point; with ``floating`` also for integers, to which results would be rounded.
    """
    values = data.get(name)
    if not isinstance(values, Tensor) or values.dim() == 0 or values.is_complex():
        found = "nothing" if values is None else type(values).__name__
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else found
        raise ValueError(f"data.{name}: expected a tensor of real numbers with at least one axis, got {found}")
    right = not floating or values.is_floating_point()
    require(right, f"data.{name}", "a floating tensor", f"{values.dtype}; convert it, {name}.float()")
    right = points is None or len(values) == points
    require(right, f"data.{name}", f"a row for each of {points} points", list(values.shape))
    return values


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
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    require(square, argument, "a square matrix", list(matrix.shape))
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
    steps = np.abs(pos).max(axis=tuple(range(1, pos.ndim)), initial=0.0) * np.finfo(np.float32).eps
    lost = (steps > 1e-5 * np.asarray(size)) & (np.asarray(size) > 0)
    return np.float64 if pos.dtype.itemsize > 4 and lost.any() else np.float32


def class_array(argument: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return integers as int64; raise TypeError, naming the argument, for other numbers."""
    found = plain_array(argument, values)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{argument}: expected integers, got {found.dtype}")
    return found.astype(np.int64)
