"""Values made of tensors that move to another device as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lieattn._checks import check_floating


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
