"""Activations that are computed again in the backward pass, in place of being kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint

from lieattn._functional import transformed

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Region:
    """What is computed at present and may be computed again.

    Attributes
    ----------
    function
        The same object each time.
    again
        Whether it has been computed before: running statistics have seen it already.
    found
        What was found in this computation, for its next use there.
    """

    function: object
    again: bool
    found: dict[Any, Any] = field(default_factory=dict)


_NOWHERE = Region(None, again=False)  # outside of any, of which nothing is computed again

region: ContextVar[Region] = ContextVar("region", default=_NOWHERE)
"""The region that is computed at present."""


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
        self._tokens: list[Token[Region]] = []

    def __enter__(self) -> None:
        again = self._again or region.get().again
        self._tokens.append(region.set(Region(self._function, again)))

    def __exit__(self, *error: object) -> None:
        region.reset(self._tokens.pop())
