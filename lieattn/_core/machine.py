"""What this process may use of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor


def usable_accelerator(asked: str) -> str:
    """Return ``asked``, or ``"cpu"`` for ``"auto"`` where Lightning would choose Apple's GPU.

    That GPU has no float64, in which neighbors and frames are computed.
    """
    return "cpu" if asked == "auto" and torch.backends.mps.is_available() else asked


def usable_cores() -> int:
    """Return the number of cores on which this process may run, such as those of a job on a cluster."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_KEPT = 2**28  # largest number of free bytes at the end of the heap
_LARGEST = 2**25  # largest block in the heap, in bytes; glibc itself raises its limit up to this value over time
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the constants of malloc.h
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep up to 256 MiB of freed memory for the next tensors, and return whether it does.

    By default, glibc returns the free end of its heap to the system when it is longer than twice the largest block, and
    requests it again in pages of 4 kB in every training step. The function has no effect with other C libraries, or if
    an environment variable sets these limits.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _KEPT))


def processes() -> int:
    """Return the number of processes of this training according to torch.distributed, or 1 if it is not initialized."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def summed(values: Tensor) -> Tensor:
    """Return the sum of the values of all processes, each of which must call this function.

    Gradients flow from the sum in every process to the values of every process. The gradients of the losses, summed
    over the processes, are therefore those of the sum of the losses.
    """
    return _Sum.apply(values) if processes() > 1 else values


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.detach().clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return _Sum.apply(grad[0])
