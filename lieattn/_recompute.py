"""Activations that are computed again in the backward pass, in place of being kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint

from lieattn._functional import transformed

T = TypeVar("T")

recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
"""Whether what is computed has been computed before: running statistics have seen it already."""

region: ContextVar[object | None] = ContextVar("region", default=None)
"""What is computed at present and may be computed again, the same object each time; None for nothing of the kind."""

found_again: ContextVar[dict[Any, Any]] = ContextVar("found_again")
"""What was found while activations are computed again, for its next use in the same computation."""


def may_recompute() -> bool:
    """Whether gradients may be wanted that let activations be computed again: transforms of ``torch.func`` do not."""
    return torch.is_grad_enabled() and not transformed()


def recomputed(function: Callable[..., T], *inputs: Any) -> T:
    """``function(*inputs)``, of which the inputs are kept alone; a gradient has the rest computed again.

    All is kept where no gradient can have it computed again.
    """
    if not may_recompute():
        return function(*inputs)
    return cast(T, checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts))


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    function = object()
    return _Within(function, again=False), _Within(function, again=True)


class _Within(AbstractContextManager[None]):
    """Where activations are computed; derivatives of gradients enter it more than once to compute them again."""

    def __init__(self, function: object, *, again: bool) -> None:
        self._function, self._again = function, again
        self._tokens: list[tuple[Token[bool], Token[object | None], Token[dict[Any, Any]]]] = []

    def __enter__(self) -> None:
        again = recomputing.set(self._again or recomputing.get())
        self._tokens.append((again, region.set(self._function), found_again.set({})))

    def __exit__(self, *error: object) -> None:
        again, function, found = self._tokens.pop()
        recomputing.reset(again)
        region.reset(function)
        found_again.reset(found)
