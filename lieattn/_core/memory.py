"""Settings of the C library for memory that tensors on the CPU have freed."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

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
