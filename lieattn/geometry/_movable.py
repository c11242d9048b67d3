"""Values of tensors that move between devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from lieattn._core.checks import check_device, check_flag, check_floating

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
