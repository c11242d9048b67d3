"""Checks of the types of arguments against the annotations of a function or constructor."""

from collections import abc
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor
from torch_geometric.data import Data

_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", Path: "a path", Data: "a Data"}
_NUMBERS = {int: Integral, float: Real, bool: bool | np.bool_}
_SHORT = 60  # characters of a value in a message


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError, naming the argument, unless arguments have the types in the annotations of a function.

    Call it first in the function: ``check_arguments(function, locals())``. It does not check ranges, choices and
    arrays, which the function checks afterwards.
    """
    for argument, hint in _hints(function).items():
        if argument in given and not _fits(given[argument], hint):
            shown = repr(given[argument])
            found = shown if len(shown) < _SHORT else type(given[argument]).__name__
            raise TypeError(f"{argument}: expected {_words(hint)}, got {found}")


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
    if floating and not values.is_floating_point():
        raise ValueError(f"data.{name}: expected a floating tensor, got {values.dtype}; convert it, {name}.float()")
    if points is not None and len(values) != points:
        raise ValueError(f"data.{name}: expected a row for each of {points} points, got {list(values.shape)}")
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
