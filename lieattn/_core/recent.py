"""Values that were computed from the same tensors a short time ago."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Recent(Generic[T]):
    """The last values of a function of tensors, for inputs that often repeat. Copies and pickles of it are empty."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self._known: tuple[tuple[tuple[Tensor, ...], bool, T], ...] = ()

    def __reduce__(self) -> tuple[type[Recent[T]], tuple[int]]:
        return type(self), (self.most,)

    def get(self, inputs: Sequence[Tensor], compute: Callable[[tuple[Tensor, ...]], T]) -> T:
        """Return ``compute(inputs)``, or the same value as before if all inputs are equal.

        The function is called with copies of the inputs, so that later changes of these do not reach its values. Values
        of inference mode, which training cannot use, are kept apart.
        """
        mode = torch.is_inference_mode_enabled()
        for known, of_mode, value in self._known:
            if of_mode == mode and all(map(_equal, known, inputs)):
                return value
        copies = tuple(tensor.detach().clone() for tensor in inputs)
        value = compute(copies)
        self._known = ((copies, mode, value), *self._known)[: self.most]
        return value


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
