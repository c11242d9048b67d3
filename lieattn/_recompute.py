"""Activations that are computed again in the backward pass, in place of being kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast

from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
"""Whether what is computed has been computed before: running statistics have seen it already."""


def recomputed(function: Callable[..., T], *inputs: Any) -> T:
    """``function(*inputs)``, of which the inputs are kept alone; a gradient has the rest computed again."""
    return cast(T, checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts))


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Again()


class _Again(AbstractContextManager[None]):
    """Where activations are computed again; derivatives of gradients enter it more than once."""

    def __init__(self) -> None:
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(recomputing.set(True))

    def __exit__(self, *error: object) -> None:
        recomputing.reset(self._tokens.pop())
