"""What every geometric function is given: points and the cloud of each; and values that move as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lieattn._checks import check_floating, check_tensor

# Sums of squares of coordinates up to here stay finite in float64.
COORDINATE_LIMIT = 1e100


@dataclass(frozen=True, eq=False)
class Movable:
    """What frozen dataclasses of tensors share: moving all of their tensors, and those of the values they hold."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Same value on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Same value in page-locked memory, from which copies to a GPU overlap with work."""
        return self.map(lambda tensor: tensor.pin_memory())

    def astype(self, dtype: torch.dtype) -> Self:
        """Same value with its coordinates rounded to a floating dtype."""
        check_floating("dtype", dtype)
        return self.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def map(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Same value with every tensor replaced by what ``move`` makes of it; a tensor held twice is moved once."""
        return _moved(self, move, {})


def _moved(value: Any, move: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    if not isinstance(value, Tensor | Movable):
        return value
    if id(value) not in known:
        if isinstance(value, Tensor):
            known[id(value)] = move(value)
        else:
            # The constructor has checked these tensors already, and what is cached on the value moves along.
            known[id(value)] = copy = object.__new__(type(value))
            vars(copy).update({name: _moved(part, move, known) for name, part in vars(value).items()})
    return known[id(value)]


def as_coordinates(pos: Tensor) -> Tensor:
    """Coordinates ``[points, dim]`` of any floating dtype in float64, without gradient, on the device of ``pos``.

    TypeError or ValueError is raised if ``pos`` has another form, or a point is NaN, infinite or beyond 1e100.
    """
    check_tensor("pos", pos, "a floating tensor [points, dim]")
    if pos.dim() != 2 or pos.shape[1] == 0:
        raise ValueError(f"pos: expected shape [points, dim] with dim >= 1, got {tuple(pos.shape)}")
    pos = pos.detach().to(torch.float64)
    good = (pos.abs() <= COORDINATE_LIMIT).all(dim=1)  # false for NaN
    if not good.all():
        i = first_true(~good)
        limit = f"expected finite coordinates, at most {COORDINATE_LIMIT:g} in size"
        raise ValueError(f"pos: {limit}, got {pos[i].tolist()} for point {i}")
    return pos


def cloud_index(points: Tensor | int, batch: Tensor | None = None, ptr: Tensor | None = None) -> tuple[Tensor, int]:
    """Return the cloud of each point, int64 ``[points]``, and the number of clouds.

    The ``points`` are a tensor ``[points, ...]`` or their number. ``batch`` is the cloud of each point, int64
    ``[points]``, in any order; an id may be without points. ``ptr`` is the first point of each cloud and, last, the
    number of points, int64 ``[clouds + 1]``, which counts empty clouds at the end. All points are one cloud without
    both; if both are given they must describe the same clouds. TypeError or ValueError is raised if they do not fit.
    """
    number, device = (len(points), points.device) if isinstance(points, Tensor) else (points, None)
    if batch is not None:
        check_indices("batch", batch, dim=1, device=device)
        _check_batch(batch, number)
        device = batch.device
    if ptr is None:
        if batch is None:
            return torch.zeros(number, dtype=torch.int64, device=device), 1
        return batch, int(batch.max()) + 1 if number else 0
    check_indices("ptr", ptr, dim=1, device=device)
    _check_ptr(ptr, number)
    num_clouds = len(ptr) - 1
    of_ptr = torch.repeat_interleave(torch.arange(num_clouds, device=ptr.device), ptr.diff(), output_size=number)
    if batch is not None and not torch.equal(batch, of_ptr):
        i = first_true(batch != of_ptr)
        got = f"got batch[{i}] = {int(batch[i])} where ptr puts point {i} in cloud {int(of_ptr[i])}"
        raise ValueError(f"batch, ptr: expected the same clouds from both, or only one of them, {got}")
    return of_ptr, num_clouds


def check_grid(grid: Tensor, device: torch.device | None = None) -> None:
    """Raise an error unless a value is an int64 tensor ``[clouds, 2]`` on ``device`` (any if None)."""
    check_indices("grid", grid, dim=2, device=device)
    if grid.shape[1] != 2:
        raise ValueError(f"grid: expected [clouds, 2], height and width of each image, got {tuple(grid.shape)}")


def check_indices(name: str, value: Tensor, dim: int, device: torch.device | None = None) -> None:
    """Raise an error unless a value is an int64 tensor with ``dim`` dimensions on ``device`` (any if None)."""
    check_tensor(name, value, "an int64 tensor", torch.int64)
    if value.dim() != dim:
        raise ValueError(f"{name}: expected {dim} dimension(s), got shape {tuple(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected on {device} as the other inputs, got on {value.device}")


def first_true(mask: Tensor) -> int:
    """Return the first index at which ``mask`` [n] is true."""
    return int(mask.nonzero()[0])


def point_weights(weights: Tensor, pos: Tensor, *, positive: bool = False) -> Tensor:
    """Weights ``[points]`` in float64; ValueError unless they are finite numbers from 0, one for each point."""
    if not isinstance(weights, Tensor) or weights.shape != (len(pos),) or weights.device != pos.device:
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights: expected [points={len(pos)}] on {pos.device}, got {shape}")
    bad = ~(torch.isfinite(weights) & ((weights > 0) if positive else (weights >= 0)))
    if bad.any():
        i, expected = first_true(bad), "positive volumes" if positive else "finite numbers from 0"
        raise ValueError(f"weights: expected {expected}, got {float(weights[i])} for point {i}")
    return weights.double()


def members(batch: Tensor, num_clouds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the points sorted by cloud ``[points]``, and the start and size of each cloud among them."""
    size = torch.bincount(batch, minlength=num_clouds)
    return batch.argsort(stable=True), size.cumsum(0) - size, size


def ranks(batch: Tensor, num_clouds: int) -> Tensor:
    """Rank of each point among those of its cloud, in their order: ``[points]`` int64."""
    order, first, _ = members(batch, num_clouds)
    place = torch.empty_like(batch)
    place[order] = torch.arange(len(order), device=order.device)
    return place - first[batch]


def ranges(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the ranges ``first[s] ... first[s] + count[s] - 1``: the s of each number, and the numbers."""
    segment = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    position = torch.arange(len(segment), device=count.device) + (first - count.cumsum(0) + count)[segment]
    return segment, position


@dataclass(frozen=True, eq=False)
class Padding(Movable):
    """Where each point stands when every cloud gets as many places as the largest one. See :func:`padding`.

    Attributes
    ----------
    shape
        (clouds, places of each).
    place, mask
        ``[points]`` int64, the place of each point, counted through all clouds, and ``[clouds, places]`` bool, where
        points are. None if all clouds have the same size and follow one another: then nothing is copied.
    """

    shape: tuple[int, int]
    place: Tensor | None
    mask: Tensor | None

    @property
    def cloud(self) -> Tensor:
        """Cloud of each point, int64 ``[points]``."""
        place = torch.arange(self.shape[0] * self.shape[1]) if self.place is None else self.place
        return place // max(self.shape[1], 1)

    def pad(self, x: Tensor) -> Tensor:
        """``[points, *]`` to ``[clouds, places, *]``, zero where no point is."""
        if self.place is None:
            return x.unflatten(0, self.shape)
        flat = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return flat.index_copy(0, self.place, x).unflatten(0, self.shape)

    def unpad(self, x: Tensor) -> Tensor:
        """``[clouds, places, *]`` to ``[points, *]``."""
        flat = x.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


def padding(batch: Tensor, num_clouds: int) -> Padding:
    """Lay out points by the cloud they belong to, ``batch`` ``[points]`` int64 in any order; clouds may be empty."""
    counts = torch.bincount(batch, minlength=num_clouds)
    places = int(counts.max()) if num_clouds else 0
    regular = len(batch) == num_clouds * places
    if regular and not bool((batch[1:] < batch[:-1]).any()):
        return Padding((num_clouds, places), None, None)
    mask = torch.arange(places, device=batch.device) < counts[:, None]
    return Padding((num_clouds, places), batch * places + ranks(batch, num_clouds), mask)


def _check_batch(batch: Tensor, number: int) -> None:
    if len(batch) != number:
        raise ValueError(f"batch: expected one entry for each of {number} points, got {len(batch)}")
    if number and batch.min() < 0:
        i = first_true(batch < 0)
        raise ValueError(f"batch: expected ids from 0, got batch[{i}] = {int(batch[i])}")


def _check_ptr(ptr: Tensor, number: int) -> None:
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != number:
        got = f"from {int(ptr[0])} to {int(ptr[-1])}" if len(ptr) else "no entries"
        raise ValueError(f"ptr: expected to go from 0 to {number}, the number of points, got {got}")
    if (ptr.diff() < 0).any():
        i = first_true(ptr.diff() < 0)
        raise ValueError(f"ptr: expected ascending, got {int(ptr[i])} before {int(ptr[i + 1])} at entry {i + 1}")
