"""Checks of arguments, whose errors name the argument, what was found and what is expected."""

import contextlib
from collections import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Batch, Data

_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", Path: "a path", Data: "a Data"}
_NUMBERS = {int: Integral, float: Real, bool: bool | np.bool_}
_SHORT = 60  # characters of a value in a message
_LARGEST = 1e100
_NAMES = {"PIL": "Pillow", "sklearn": "scikit-learn"}  # on a package index


def require(holds: object, argument: str, expected: str, got: object) -> None:
    """Raise ValueError, naming the argument, unless a condition holds."""
    if not holds:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def at_least_one(**numbers: int | None) -> None:
    """Raise ValueError, naming the argument, unless all numbers that are given are positive."""
    for argument, number in numbers.items():
        require(number is None or number >= 1, argument, "an integer of at least 1", number)


def check_choice(argument: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError, naming the argument, unless the value is one of those allowed."""
    require(value in allowed, argument, f"one of {', '.join(map(repr, allowed))}", repr(value))


def shapes_of(*arrays: NDArray[Any]) -> str:
    """Return the shapes of arrays in words."""
    return ", ".join(str(list(array.shape)) for array in arrays)


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        command = f"pip install 'lieattn[{extra}]'"
        raise ImportError(f"{what} needs {_NAMES.get(package, package)}: {command}", name=error.name) from error


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless arguments have the types and are among the choices in the annotations.

    Call it first in the function: ``check_arguments(function, locals())``. It does not check ranges and arrays, which
    the function checks afterwards.
    """
    for argument, hint in _hints(function).items():
        if argument in given and not _fits(given[argument], hint):
            shown = repr(given[argument])
            found = shown if len(shown) < _SHORT else type(given[argument]).__name__
            raise TypeError(f"{argument}: expected {_words(hint)}, got {found}")
        if argument in given and (choices := _choices(hint)):
            check_choice(argument, given[argument], choices)


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


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(function).items() if name != "return"}


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value matches an annotation. True for arrays and for annotations that are not handled below."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in arguments)
    if origin is Literal:
        return any(_fits(value, type(allowed)) for allowed in arguments)
    if origin is abc.Callable:
        return callable(value)
    if origin is abc.Mapping:
        return isinstance(value, Mapping)
    if origin is abc.Sequence:
        listed = isinstance(value, abc.Sequence | np.ndarray) and not isinstance(value, str | bytes)
        return listed and all(_fits(entry, arguments[0]) for entry in value)  # type: ignore[attr-defined]
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and (hint is bool or not isinstance(value, bool))
    if hint is Path:
        return isinstance(value, str | PathLike) and not isinstance(value, bytes)
    return not isinstance(hint, type) or hint not in (str, Data, type(None)) or isinstance(value, hint)


def _choices(hint: Any) -> tuple[object, ...]:
    """Return the values that an annotation allows, if it lists them."""
    if get_origin(hint) in (Union, UnionType):
        parts = get_args(hint)
        listed = [choice for part in parts for choice in _choices(part)]
        return (*listed, *([None] if type(None) in parts else [])) if listed else ()
    return get_args(hint) if get_origin(hint) is Literal else ()


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is abc.Sequence:
        return "a sequence" if arguments[0] is Any else f"a sequence in which each entry is {_words(arguments[0])}"
    if hint is type(None):
        return "None"
    return _WORDS.get(hint, "a callable" if origin is abc.Callable else "a mapping")


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
    right = isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= _LARGEST
    require(right, argument, f"a number of at most {_LARGEST:g} in size", repr(value))
