"""Equality of immutable values that users derive classes from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBER = re.compile(r"np\.(float\w+|u?int\w+)\(([^()]*)\)")
_FLAG = re.compile(r"np\.(True|False)_?\b")


def plain_text(text: str) -> str:
    """Return the ``repr`` of a value with numbers of Python in place of those of NumPy, as files contain them."""

    def plain(number: re.Match[str]) -> str:
        return repr(getattr(np, number[1])(number[2]).item())

    return _FLAG.sub(r"\1", _NUMBER.sub(plain, text))


def equal_values(one: Any, other: Any) -> bool:
    """Return whether two objects have the same class and equal attributes, among them tensors and arrays."""
    mine, others = vars(one), vars(other)
    return type(one) is type(other) and mine.keys() == others.keys() and all(_equal(mine[k], others[k]) for k in mine)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def with_finite(value: Any, replaced: Callable[[float], Any] = lambda number: None) -> Any:
    """Replace NaN and infinity, which JSON does not have, also inside dictionaries and lists; by default with None."""
    if isinstance(value, dict):
        return {key: with_finite(item, replaced) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_finite(item, replaced) for item in value]
    return replaced(value) if isinstance(value, float) and not math.isfinite(value) else value


def attributes_of_points(data: Any) -> list[str]:
    """Return the names of attributes of points. Three lattice vectors of three points are not among them."""
    return [name for name in data.node_attrs() if name not in ("cell", "pbc")]


def select_points(data: Any, index: Tensor, names: Iterable[str]) -> None:
    """Replace attributes of points by their entries at these points, ``[points kept]`` int64."""
    for name in names:
        value = data[name]
        data[name] = entries(value, data.__cat_dim__(name, value), index)


def entries(value: Any, axis: int, index: Tensor) -> Any:
    """Return entries of an attribute of points: a tensor, with the axis of points, or a list, tuple or array."""
    if isinstance(value, Tensor):
        return value.index_select(axis, index.to(value.device))
    if isinstance(value, list | tuple):
        return type(value)([value[i] for i in index.tolist()])
    return value[index.cpu().numpy()]
