"""Checks of arguments that all parts share. Each message names the argument, what is allowed, and what came."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor

_LARGEST = 1e15  # squares stay finite in float32, and there is room for sums and weights
_LENGTHS = (1e-100, 1e100)  # their squares are neither 0 nor infinite


def kind(value: object) -> str:
    """What a value is, in words."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_tensor(argument: str, value: object, expected: str, dtype: torch.dtype | None = None) -> None:
    """Raise TypeError unless a value is a tensor of the dtype, or of any floating dtype if it is absent."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() if dtype is None else value.dtype == dtype):
        raise TypeError(f"{argument}: expected {expected}, got {kind(value)}")


def check_count(argument: str, count: int, least: int = 1) -> None:
    """Raise ValueError unless a value is an integer of at least ``least``."""
    if not isinstance(count, Integral) or isinstance(count, bool) or count < least:
        raise ValueError(f"{argument}: expected an integer of at least {least}, got {count!r}")


def check_counts(least: int = 1, **counts: int) -> None:
    """Raise ValueError, naming the argument, unless all values are integers of at least ``least``."""
    for argument, count in counts.items():
        check_count(argument, count, least)


def check_choice(argument: str, value: object, allowed: Any) -> None:
    """Raise ValueError unless a value is one of those allowed, given as a tuple or a ``Literal`` type."""
    options = get_args(allowed) or allowed
    if value not in options:
        raise ValueError(f"{argument}: expected one of {options}, got {value!r}")


def check_length(argument: str, length: float) -> None:
    """Raise TypeError or ValueError unless a value is a positive finite number."""
    if isinstance(length, bool) or not isinstance(length, Real):
        raise TypeError(f"{argument}: expected a number, got {type(length).__name__}")
    if not (math.isfinite(length) and _LENGTHS[0] <= length <= _LENGTHS[1]):
        raise ValueError(f"{argument}: expected a positive finite length (1e-100 to 1e100), got {length}")


def check_size(argument: str, numbers: Tensor, unit: float = 1.0) -> None:
    """Raise ValueError if numbers, or these divided by a unit, are so large that sums of products overflow float32.

    The limit is that of float32 for all dtypes, since kernels have scores in it.
    """
    if torch.compiler.is_compiling() or numbers.numel() == 0:
        return
    largest = float(numbers.detach().abs().max()) * max(1.0, 1 / unit)
    if not largest <= _LARGEST:  # true for NaN
        divided = "" if unit >= 1 else f" after division by the length {unit:g}"
        allowed = f"expected at most {_LARGEST:.0e} in size, so that products stay finite"
        raise ValueError(f"{argument}: {allowed}, got {largest:.1e}{divided}; take a larger unit")


def check_dropout(argument: str, dropout: float) -> None:
    """Raise ValueError unless a value is a probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"{argument}: expected a probability in [0, 1), got {dropout}")


def check_floating(argument: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless a dtype is floating."""
    if not dtype.is_floating_point:
        raise ValueError(f"{argument}: expected a floating dtype, got {dtype}")


def check_neighborhood(neighborhood: object) -> None:
    """Raise TypeError unless a value is a neighborhood such as ``Radius(1.0)``; the class ``Radius`` is not one."""
    if isinstance(neighborhood, type) or not callable(neighborhood) or not hasattr(neighborhood, "length"):
        raise TypeError(f"neighborhood: expected a definition such as Radius(1.5), got {neighborhood!r}")


def check_none(argument: str, where: Tensor, fault: str) -> None:
    """Raise ValueError if ``where`` ``[*]`` holds anywhere, and say where first."""
    if where.any():
        first = where.nonzero()[0].tolist() if where.ndim else []
        place = f"{argument}[{', '.join(map(str, first))}]" if first else argument
        raise ValueError(f"{argument}: {place} {fault}")


def check_features(x: Tensor, weight: Tensor) -> None:
    """Raise an error unless features have the dtype and device of the weights; autocast converts dtypes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    device = weight.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.is_floating_point()
    fits = cast or x.dtype == weight.dtype
    if x.device != weight.device or not fits:
        raise ValueError(f"x: expected {weight.dtype} on {weight.device} like the weights, got {x.dtype} on {x.device}")
