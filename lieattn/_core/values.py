"""Values of attributes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lieattn._core.checks import kind

if TYPE_CHECKING:
    from torch_geometric.data import Data


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


def agreeing(clouds: Sequence[Data], numbers: Sequence[int] | None = None) -> list[Data]:
    """Return clouds with the same attributes, of the same dtypes and shapes, so that a batch of them loses nothing.

    PyTorch Geometric makes batches with the attributes of their first cloud. Here, attributes that only some clouds
    have are added to copies of the others if their absence has a meaning: a cloud without ``cell`` is not periodic,
    one with ``cell`` but without ``pbc`` is periodic along all vectors, an image with ``grid`` has all pixels of the
    ``raster`` that others have, and missing masks and weights of targets (``mask``, ``weight``, ``NAME_mask``,
    ``NAME_weight``) are true or 1. Numbers of Python become tensors ``[1]`` if other clouds have tensors, and numbers
    of lower precision get the highest one.

    ValueError is raised for all other differences, and for features ``x`` and ``z`` that are not one row for each
    point. It names the attribute and the cloud, by its entry in ``numbers`` or else its place in the list.
    """
    numbers = range(len(clouds)) if numbers is None else numbers
    if any("raster" in cloud for cloud in clouds):
        clouds = [listing_pixels(cloud) for cloud in clouds]
    given: list[dict[str, Any]] = [cloud.to_dict() for cloud in clouds]
    axes: dict[str, Any] = {}  # along which attributes are joined
    for cloud, own, number in zip(clouds, given, numbers, strict=True):
        axes |= {name: cloud.__cat_dim__(name, value) for name, value in own.items() if name not in axes}
        _check_rows(own, number)
    forms = [{name: _form(value, axes[name]) for name, value in own.items()} for own in given]
    if all(form == forms[0] for form in forms):
        return list(clouds)
    clouds = [copy.copy(cloud) for cloud in clouds]
    if any(isinstance(own.get("cell"), Tensor) for own in given):
        axes = {"pbc": 0, **axes}
    for name, axis in axes.items():
        if all(name in form and form[name] == forms[0][name] for form in forms):
            continue
        values = [own[name] if name in own else _meaning(name, one, clouds, given) for one, own in enumerate(given)]
        values = _of_one_type(values)
        _check_forms(name, values, axis, numbers)
        for cloud, own, value in zip(clouds, given, values, strict=True):
            if own.get(name) is not value:
                cloud[name] = value
    return clouds


def listing_pixels(cloud: Data) -> Data:
    """Return an image with ``grid`` as one with ``raster`` and ``pixel``, of which no pixel is missing."""
    grid = cloud.get("grid")
    if not isinstance(grid, Tensor) or grid.ndim != 2:
        return cloud
    cloud, sides = copy.copy(cloud), grid[0].tolist()
    places = torch.unravel_index(torch.arange(math.prod(sides), device=grid.device), sides)
    cloud.pixel, cloud.raster = torch.stack(places, dim=1), cloud.pop("grid")
    return cloud


def _check_forms(name: str, values: Sequence[Any], axis: Any, numbers: Sequence[int]) -> None:
    """Raise ValueError if values of an attribute cannot be joined, or if one is None, which has no meaning."""
    for number, value in zip(numbers, values, strict=True):
        if value is None:
            found = f"got none in cloud {number}; unknown targets are NaN, with False in data.{name}_mask"
            raise ValueError(f"data.{name}: expected in all clouds or in none, {found}")
        if _form(value, axis) != _form(values[0], axis):
            found = f"{_text(values[0], axis)} as in cloud {numbers[0]}, got {_text(value, axis)} in cloud {number}"
            raise ValueError(f"data.{name}: expected {found}")


def _check_rows(own: Mapping[str, Any], number: int) -> None:
    """Raise ValueError unless each point has a row of features: all clouds together might have one for each."""
    pos = own.get("pos")
    for name in ("x", "z"):
        value = own.get(name)
        if isinstance(value, Tensor) and isinstance(pos, Tensor) and value.shape[:1] != pos.shape[:1]:
            expected = f"expected a row for each of {len(pos)} points"
            raise ValueError(f"data.{name}: {expected}, got {list(value.shape)} in cloud {number}")


def _form(value: Any, axis: Any) -> Any:
    """Return what the values of an attribute must have in common to be joined."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.dtype, value.layout
        shape = value.shape
        if axis is not None and shape:
            shape = shape[1:] if axis == 0 else shape[:axis] + shape[axis:][1:]
        return value.dtype, value.ndim, shape
    if isinstance(value, Mapping):
        return {key: _form(part, axis) for key, part in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [_form(part, axis) for part in value]
    return isinstance(value, int | float)  # other values are a list in a batch


def _text(value: Any, axis: Any) -> str:
    """Describe the form of a value in a message, such as ``float32 [*, 3]``."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        shape = [str(size) for size in value.shape]
        if axis is not None and shape:
            shape[axis] = "*"
        return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(shape)}]"
    if isinstance(value, Mapping):
        return str({key: _text(part, axis) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return kind(value)


def _meaning(name: str, one: int, clouds: Sequence[Data], given: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value that is meant if a cloud lacks an attribute of others, or None if that has no meaning."""
    own, others = given[one], [number for number, other in enumerate(given) if name in other]
    if name == "num_nodes":
        return clouds[one].num_nodes
    like = given[others[0]][name] if others else next(o["cell"] for o in given if o.get("cell") is not None)[..., 0]
    if not isinstance(like, Tensor):
        return None
    if name == "cell":
        return torch.zeros_like(like)
    if name == "pbc":
        return torch.full_like(like, "cell" in own, dtype=torch.bool)
    target, _, use = name.rpartition("_")
    if use not in ("mask", "weight"):
        return None
    if target:
        entries = own.get(target)
        if not isinstance(entries, Tensor | int | float):
            return None
        entries = torch.atleast_1d(torch.as_tensor(entries))
        stacked = clouds[one].__cat_dim__(target, entries) is None
        return like.new_ones((entries[None] if stacked else entries).shape[: like.ndim])
    rows = [(given[other][name].shape[:1].numel(), clouds[other].num_nodes) for other in others]
    of_points, of_clouds = all(n == points for n, points in rows), all(n == 1 for n, _ in rows)
    if of_points == of_clouds and not (of_points and clouds[one].num_nodes == 1):
        return None
    return like.new_ones(clouds[one].num_nodes if of_points else 1, *like.shape[1:])


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return tensors of one dtype in place of tensors and numbers, if the tensors are floating, integer, ... alike."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len({(value.is_floating_point(), value.is_complex(), value.dtype == torch.bool) for value in tensors}) != 1:
        return values
    dtype = reduce(torch.promote_types, (value.dtype for value in tensors))

    def converted(value: Any) -> Any:
        if isinstance(value, int | float):
            number = torch.tensor([value], device=tensors[0].device)
            return number.to(dtype) if torch.can_cast(number.dtype, dtype) else value
        return (value if value.ndim else value[None]).to(dtype) if isinstance(value, Tensor) else value

    return [converted(value) for value in values]
