"""Tensors of clouds that move between devices, from the cloud of each point to padded layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from lieattn._core.checks import (
    check_device,
    check_flag,
    check_floating,
    check_has_numbers,
    check_is,
    check_none,
    check_tensor,
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Movable:
    """Base class of frozen dataclasses of tensors, with methods that move all their tensors, nested ones included."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the same value on another device."""
        check_device(device)
        check_flag(non_blocking=non_blocking)
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the same value in page-locked memory, from which copies to a GPU are asynchronous."""
        return self.map(lambda tensor: tensor.pin_memory())

    def astype(self, dtype: torch.dtype) -> Self:
        """Return the same value with its floating tensors converted to ``dtype``."""
        check_floating("dtype", dtype)
        return self.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def map(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the same value with ``move`` applied to every tensor. A tensor that occurs twice is moved once."""
        return _moved(self, move, {})


def _moved(value: Any, move: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    if not isinstance(value, Tensor | Movable):
        return value
    if id(value) not in known:
        if isinstance(value, Tensor):
            known[id(value)] = move(value)
        else:
            # Skip the constructor, which has checked these tensors already, and move cached attributes as well.
            known[id(value)] = copy = object.__new__(type(value))
            vars(copy).update({name: _moved(part, move, known) for name, part in vars(value).items()})
    return known[id(value)]


class OnFirstUse(cached_property[T]):
    """A cached property of a value that is computed on first use, but is not kept while torch compiles or exports."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if torch.compiler.is_compiling():  # tensors without numbers
            return self.func(instance)
        tensors = (part for part in vars(instance).values() if isinstance(part, Tensor))
        with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)):
            return super().__get__(instance, owner)


def cloud_index(
    points: Tensor | int,
    batch: Int[Tensor, " points"] | None = None,
    ptr: Int[Tensor, " starts"] | None = None,
    name: str = "batch",
) -> tuple[Int[Tensor, " points"], int]:
    """Return the cloud of each point and the number of clouds.

    The ``points`` are a tensor ``[points, ...]`` or their number. ``batch`` is the cloud of each point, int64
    ``[points]``, in any order; clouds may be empty. ``ptr`` contains the first point of each cloud and, as last entry,
    the number of points, int64 ``[clouds + 1]``; unlike ``batch``, it can describe empty clouds at the end. If both are
    given, they must describe the same clouds; if both are absent, all points are one cloud. TypeError or ValueError,
    which calls the batch ``name``, is raised if they do not fit.
    """
    number, device = (len(points), points.device) if isinstance(points, Tensor) else (points, None)
    if batch is not None:
        check_indices(name, batch, dim=1, device=device)
        if len(batch) != number:
            raise ValueError(f"{name}: expected one entry for each of {number} points, got {len(batch)}")
        if number and batch.min() < 0:
            i = first_true(batch < 0)
            raise ValueError(f"{name}: expected ids from 0, got {name}[{i}] = {int(batch[i])}")
        device = batch.device
    if ptr is None:
        if batch is None:
            return torch.zeros(number, dtype=torch.int64, device=device), 1
        return batch, int(batch.max()) + 1 if number else 0
    check_indices("ptr", ptr, dim=1, device=device)
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != number:
        got = f"from {int(ptr[0])} to {int(ptr[-1])}" if len(ptr) else "no entries"
        raise ValueError(f"ptr: expected to go from 0 to {number}, the number of points, got {got}")
    if (ptr.diff() < 0).any():
        i = first_true(ptr.diff() < 0)
        raise ValueError(f"ptr: expected ascending, got {int(ptr[i])} before {int(ptr[i + 1])} at entry {i + 1}")
    num_clouds = len(ptr) - 1
    of_ptr = torch.repeat_interleave(torch.arange(num_clouds, device=ptr.device), ptr.diff(), output_size=number)
    if batch is not None and not torch.equal(batch, of_ptr):
        i = first_true(batch != of_ptr)
        got = f"got batch[{i}] = {int(batch[i])} where ptr puts point {i} in cloud {int(of_ptr[i])}"
        raise ValueError(f"batch, ptr: expected the same clouds from both, or only one of them, {got}")
    return of_ptr, num_clouds


def check_indices(
    name: str, value: Tensor, dim: int, device: torch.device | None = None, below: int | None = None
) -> None:
    """Raise an error unless a value is an int64 tensor with ``dim`` dimensions on ``device`` (any if None).

    If ``below`` is given, entries must be from 0 to ``below - 1``.
    """
    check_tensor(name, value, "an int64 tensor", torch.int64)
    if value.dim() != dim:
        raise ValueError(f"{name}: expected {dim} dimension(s), got shape {tuple(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected on {device} as the other inputs, got on {value.device}")
    if below is not None:
        check_none(name, (value < 0) | (value >= below), f"is out of range: expected indices from 0 to {below - 1}")


def first_true(mask: Bool[Tensor, " n"]) -> int:
    """Return the first index at which a mask is true."""
    return int(mask.nonzero()[0])


def members(
    batch: Int[Tensor, " points"], num_clouds: int
) -> tuple[Int[Tensor, " points"], Int[Tensor, " clouds"], Int[Tensor, " clouds"]]:
    """Return the indices of the points sorted by cloud ``[points]``, and the start and size of each cloud in them."""
    size = torch.bincount(batch, minlength=num_clouds)
    return batch.argsort(stable=True), size.cumsum(0) - size, size


def ranks(batch: Int[Tensor, " points"], num_clouds: int) -> Int[Tensor, " points"]:
    """Return the rank of each point within its cloud, ``[points]`` int64."""
    order, first, _ = members(batch, num_clouds)
    place = torch.empty_like(batch)
    place[order] = torch.arange(len(order), device=order.device)
    return place - first[batch]


def ranges(
    first: Int[Tensor, " rows"], count: Int[Tensor, " rows"]
) -> tuple[Int[Tensor, " numbers"], Int[Tensor, " numbers"]]:
    """Concatenate the ranges ``first[s] ... first[s] + count[s] - 1``. Return the s of each number, and the numbers."""
    segment = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    position = torch.arange(len(segment), device=count.device) + (first - count.cumsum(0) + count)[segment]
    return segment, position


@dataclass(frozen=True, eq=False)
class Padding(Movable):
    """The layout of points in a padded tensor, in which every cloud has the size of the largest. See :func:`padding`.

    ``shape`` is (clouds, places per cloud), and ``cloud`` ``[points]`` int64 is the cloud of each point. ``place``
    ``[points]`` int64 is the index of each point in the flattened layout, and ``mask`` ``[clouds, places]`` bool is
    true at points. Both are None if the clouds have equal sizes and are sorted, so that padding needs no copy.
    """

    shape: tuple[int, int]
    cloud: Tensor
    place: Tensor | None = None
    mask: Tensor | None = None

    def pad(self, x: Shaped[Tensor, " points *rest"]) -> Shaped[Tensor, "clouds places *rest"]:
        """Convert ``[points, *]`` to ``[clouds, places, *]``, filled up with zeros."""
        if self.place is None:
            return x.unflatten(0, self.shape)
        flat = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return flat.index_copy(0, self.place, x).unflatten(0, self.shape)

    def unpad(self, x: Shaped[Tensor, "clouds places *rest"]) -> Shaped[Tensor, " points *rest"]:
        """Convert ``[clouds, places, *]`` to ``[points, *]``."""
        flat = x.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


def padding(batch: Int[Tensor, " points"], num_clouds: int) -> Padding:
    """Return the padded layout of points with the clouds ``batch`` ``[points]`` int64, in any order.

    Clouds may be empty.
    """
    counts = torch.bincount(batch, minlength=num_clouds)
    places = int(counts.max()) if num_clouds else 0
    regular = len(batch) == num_clouds * places
    if regular and not bool((batch[1:] < batch[:-1]).any()):
        return Padding((num_clouds, places), batch)
    mask = torch.arange(places, device=batch.device) < counts[:, None]
    return Padding((num_clouds, places), batch, batch * places + ranks(batch, num_clouds), mask)


def flatten(
    padded: Shaped[Tensor, "clouds places *rest"], mask: Bool[Tensor, "clouds places"]
) -> Shaped[Tensor, " points *rest"]:
    """Select the points of a padded layout: ``[clouds, N, *]`` with mask ``[clouds, N]`` to ``[points, *]``."""
    check_is("padded", padded, Tensor)
    check_mask(mask, padded.device, padded.shape[:2])
    return padded[mask]


def unflatten(
    flat: Shaped[Tensor, " points *rest"], mask: Bool[Tensor, "clouds places"]
) -> Shaped[Tensor, "clouds places *rest"]:
    """Restore the padded layout, filled with zeros: ``[points, *]`` with mask ``[clouds, N]`` to ``[clouds, N, *]``."""
    check_is("flat", flat, Tensor)
    check_mask(mask, flat.device)
    rows = len(flat) if flat.ndim else 0
    if rows != int(mask.sum()):
        raise ValueError(f"flat: expected {int(mask.sum())} points as in mask, got {rows}")
    padded = flat.new_zeros(*mask.shape, *flat.shape[1:])
    padded[mask] = flat
    return padded


def check_mask(mask: Tensor, device: torch.device, shape: torch.Size | None = None) -> None:
    """Raise an error unless a value is a bool mask ``[clouds, N]`` on ``device``, of this shape (any if None)."""
    check_tensor("mask", mask, "a bool tensor [clouds, N]", torch.bool)
    if mask.ndim != 2:
        raise ValueError(f"mask: expected [clouds, N], got {tuple(mask.shape)}")
    if shape is not None and mask.shape != shape:
        raise ValueError(f"mask: expected shape {tuple(shape)}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"mask: expected on {device} as the points, got on {mask.device}")
    check_has_numbers("mask", mask)
