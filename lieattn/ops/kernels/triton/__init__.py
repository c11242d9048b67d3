"""Fused kernels in Triton, for CUDA.

The constants of a kernel are the same objects in every call, so that Triton finds compiled kernels quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import triton.language as tl

T = TypeVar("T")


def constants(kind: Callable[..., T], **values: Any) -> T:
    """Return a named tuple of compile-time constants; tuples become tuples of constants."""
    return _made(kind, tuple(values), *values.values())


@lru_cache(maxsize=1024, typed=True)  # typed, because True is not the constant 1
def _made(kind: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    found = (tuple(map(tl.constexpr, value)) if isinstance(value, tuple) else tl.constexpr(value) for value in values)
    return kind(**dict(zip(names, found, strict=True)))
