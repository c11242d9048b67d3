"""What every geometric function is given: points, and the cloud of each."""

import torch
from torch import Tensor

from lieattn._checks import kind

# Sums of squares of coordinates up to here stay finite in float64.
COORDINATE_LIMIT = 1e100


def as_coordinates(pos: Tensor) -> Tensor:
    """Check coordinates and return them in float64, without gradient.

    Parameters
    ----------
    pos
        Coordinates ``[points, dim]`` of any floating dtype.

    Returns
    -------
    Tensor
        The same numbers, float64 ``[points, dim]``, on the device of ``pos``.

    Raises
    ------
    TypeError
        ``pos`` is no floating tensor.
    ValueError
        ``pos`` is not two-dimensional or has no columns, or a point is NaN, infinite or beyond 1e100.
    """
    if not isinstance(pos, Tensor) or not pos.is_floating_point():
        raise TypeError(f"pos: expected a floating tensor [points, dim], got {kind(pos)}")
    if pos.dim() != 2 or pos.shape[1] == 0:
        raise ValueError(f"pos: expected shape [points, dim] with dim >= 1, got {tuple(pos.shape)}")
    pos = pos.detach().to(torch.float64)
    good = (pos.abs() <= COORDINATE_LIMIT).all(dim=1)  # false for NaN
    if not good.all():
        i = first_true(~good)
        raise ValueError(
            f"pos: expected finite coordinates, at most {COORDINATE_LIMIT:g} in size, got {pos[i].tolist()} "
            f"for point {i}"
        )
    return pos


def cloud_index(points: Tensor | int, batch: Tensor | None = None, ptr: Tensor | None = None) -> tuple[Tensor, int]:
    """Return the cloud of each point and the number of clouds.

    Parameters
    ----------
    points
        The points (a tensor ``[points, ...]``) or their number.
    batch
        Cloud of each point, int64 ``[points]``, in any order; an id may be without points.
    ptr
        First point of each cloud and, last, the number of points: int64 ``[clouds + 1]``. If ``batch`` is
        given too, both must describe the same clouds. If neither is given, all points are one cloud.

    Returns
    -------
    batch : Tensor
        Cloud of each point, int64 ``[points]``.
    num_clouds : int
        That of ``ptr`` where it is given (it counts empty clouds at the end), otherwise one more than the
        largest id.

    Raises
    ------
    TypeError
        ``batch`` or ``ptr`` is no int64 tensor.
    ValueError
        A wrong shape or device, a negative id, a ``ptr`` that does not ascend from 0 to the number of points,
        or ``batch`` and ``ptr`` that contradict each other.
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
        raise ValueError(
            f"batch, ptr: expected the same clouds from both, or only one of them, got batch[{i}] = "
            f"{int(batch[i])} where ptr puts point {i} in cloud {int(of_ptr[i])}"
        )
    return of_ptr, num_clouds


def check_grid(grid: Tensor, device: torch.device | None = None) -> None:
    """Refuse what is no int64 tensor ``[clouds, 2]`` on ``device`` (None: on any)."""
    check_indices("grid", grid, dim=2, device=device)
    if grid.shape[1] != 2:
        raise ValueError(f"grid: expected [clouds, 2], height and width of each image, got {tuple(grid.shape)}")


def check_indices(name: str, value: Tensor, dim: int, device: torch.device | None = None) -> None:
    """Refuse what is no int64 tensor with ``dim`` dimensions on ``device`` (None: on any)."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        raise TypeError(f"{name}: expected an int64 tensor, got {kind(value)}")
    if value.dim() != dim:
        raise ValueError(f"{name}: expected {dim} dimension(s), got shape {tuple(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected on {device} as the other inputs, got on {value.device}")


def first_true(mask: Tensor) -> int:
    """Return the first index at which ``mask`` [n] is true."""
    return int(mask.nonzero()[0])


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
