"""Memory that a call of a kernel works in, kept for the next call."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

NUMPY_TYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 64
_MOST_KEPT = 2**28
# The largest block that is not in use; a thread that finds none makes its own.
_free: list[np.ndarray] = []


class Workspace:
    """Memory for the ``with`` block of one call; its tensors must not be used behind it.

    New memory costs more than the copies of signals that are made in it, since the system clears every page at its
    first touch. So up to 256 MB are kept for the next call.
    """

    def __enter__(self) -> Self:
        try:
            self.block = _free.pop()
        except IndexError:  # gradients are computed in threads of their own
            self.block = np.empty(0, np.uint8)
        self.start, self.needed = 0, 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if len(self.block) < self.needed <= _MOST_KEPT:
            self.block = np.empty(self.needed, np.uint8)  # takes no memory before it is used
        kept = _free[:1]
        if not kept or len(kept[0]) < len(self.block):
            _free[:] = [self.block]

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory that is not set, from the start of a cache line on: a vector that crosses lines takes two loads."""
        size = math.prod(shape) * dtype.itemsize
        self.needed += size + 2 * _LINE
        if self.start + size + _LINE > len(self.block):
            return new_empty(dtype, *shape)
        memory, after = _cut(self.block, self.start, size)
        self.start = after
        return torch.from_numpy(memory.view(NUMPY_TYPES[dtype])).view(shape)

    def zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory set to zero."""
        return self.empty(dtype, *shape).zero_()


def release_memory() -> None:
    """Give back what the kernels for CPUs keep from one call to the next, at most 256 MB."""
    _free.clear()


def new_empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """Memory that outlives the call, not set.

    NumPy asks for large pages, which torch does not: the first touch of 10 MB takes 0.3 ms rather than 4.
    """
    size = math.prod(shape) * dtype.itemsize
    memory, _ = _cut(np.empty(size + _LINE, np.uint8), 0, size)
    return torch.from_numpy(memory.view(NUMPY_TYPES[dtype])).view(shape)


def _cut(block: np.ndarray, start: int, size: int) -> tuple[np.ndarray, int]:
    """So many bytes of a block, from the next cache line on, and where they end."""
    first = start + -(block.ctypes.data + start) % _LINE
    return block[first : first + size], first + size
