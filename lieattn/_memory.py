"""What the C library does with memory that tensors on the CPU no longer need."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

_KEPT = 2**28  # bytes at the end of the heap that are kept
_LARGEST = 2**25  # bytes of a block that is part of the heap: as much as glibc takes by itself in the course of time
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # their numbers in malloc.h
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep up to 256 MiB of freed memory for the next tensors, and return whether it does.

    By default glibc returns the free end of its heap to the system once that is longer than twice the largest block,
    and gets it back page by page, 4 kB at a time, in every training step. Nothing is changed with other C libraries,
    or if an environment variable has set these limits.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _KEPT))
