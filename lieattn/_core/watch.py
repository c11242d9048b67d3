"""Attention weights for a tool that watches a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SeenWeights(NamedTuple):
    """Weights of one call of :func:`lieattn.ops.group_attention`, in its layout, with its neighbors and pattern."""

    weights: Tensor
    neighbors: Any
    pattern: str
    keys: int  # frames over each key point


Watcher = Callable[[SeenWeights], None]
_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watching_weights(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` with the weights of every attention that this thread evaluates in the block.

    It is not called for convolutions (``normalize="none"``), whose weights do not depend on features, and in compiled
    networks.
    """
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def is_watched() -> bool:
    """Return whether there is a watcher; always False while a network is compiled."""
    return not torch.compiler.is_compiling() and _WATCHER.get() is not None


def show(seen: SeenWeights) -> None:
    """Pass weights to the watcher, if there is one."""
    watcher = _WATCHER.get() if is_watched() else None
    if watcher is not None:
        watcher(seen)
