"""Contexts in which layers are evaluated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Region:
    """The checkpointed part of a forward pass that is being computed.

    Attributes
    ----------
    function
        An object that identifies the part, and is the same when the part is computed again.
    again
        Whether the part is computed for a second time, so that running statistics have already been updated.
    found
        Values computed in this evaluation, which it can use again.
    """

    function: object
    again: bool
    found: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the value of ``compute``, which is called once for each key in this evaluation."""
        if key not in self.found:
            self.found[key] = compute()
        return cast(T, self.found[key])


_NOWHERE = Region(None, again=False)  # outside of all checkpointed parts

region: ContextVar[Region] = ContextVar("region", default=_NOWHERE)
"""The checkpointed part that is being computed."""


Entered = Callable[[], AbstractContextManager[None]]
KEPT: list[Callable[[], Entered]] = []
"""Functions that return what a part must be computed in, to have the settings of its first evaluation again."""


def may_recompute() -> bool:
    """Return whether activations can be recomputed: gradients are enabled, and are not those of ``torch.func``."""
    return torch.is_grad_enabled() and not transformed()


def recomputed(function: Callable[..., T], *inputs: Any) -> T:
    """Return ``function(*inputs)``, and store only the inputs for the backward pass, which calls the function again.

    If activations cannot be recomputed (see :func:`may_recompute`), this is an ordinary call.
    """
    if not may_recompute():
        return function(*inputs)
    return cast(T, checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts))


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    function, kept = object(), () if torch.compiler.is_compiling() else tuple(keep() for keep in KEPT)
    return _Within(function, again=False), _Within(function, again=True, kept=kept)


class _Within(AbstractContextManager[None]):
    """Context in which a part is computed. For second derivatives, torch enters the same context several times."""

    def __init__(self, function: object, *, again: bool, kept: tuple[Entered, ...] = ()) -> None:
        self._function, self._again, self._kept = function, again, kept
        self._entered: list[tuple[Token[Region], ExitStack]] = []

    def __enter__(self) -> None:
        again, settings = self._again or region.get().again, ExitStack()
        for enter in self._kept:
            settings.enter_context(enter())
        self._entered.append((region.set(Region(self._function, again)), settings))

    def __exit__(self, *error: object) -> None:
        token, settings = self._entered.pop()
        region.reset(token)
        settings.close()


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


def has_autocast(device: torch.device) -> bool:
    """Return whether torch has autocast for a device; it does not for ``meta``, for example."""
    # torch.compile in torch 2.10 cannot evaluate the second condition, but it does not need it on these devices.
    return device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)


def in_autocast(device: torch.device) -> bool:
    """Return whether autocast is enabled on a device."""
    return has_autocast(device) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast on a device, so that products are computed in the dtype of their operands."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()


def as_without_autocast(function: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> Tensor:
    """Return ``function(x)``, under autocast in the dtype of the weights of a module, as if there were no autocast."""
    if not in_autocast(x.device):
        return function(x)
    with without_autocast(x.device):
        return function(x.to(next(module.parameters()).dtype))


_functorch = torch._C._functorch  # there are no public functions for these questions
P = ParamSpec("P")
R = TypeVar("R")


def transformed() -> bool:
    """Return whether a transform of ``torch.func`` or a level of ``torch.autograd.forward_ad`` is active.

    The result is False while torch compiles.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(x: Tensor) -> bool:
    """Return whether ``torch.func.vmap`` maps over a tensor."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def is_mapped(x: Tensor) -> bool:
    """Return whether a transform is active in which ``torch.func.vmap`` maps over a tensor, so it has no values."""
    return transformed() and is_batched(x)


def accumulates(node: Any) -> bool:
    """Return whether ``backward()`` is running, which executes a node of the graph that no requested gradient needs."""
    return node is not None and torch._C._will_engine_execute_node(node)


def outside_of_transforms(search: Callable[P, R]) -> Callable[P, R]:
    """Decorate a search so that it gets plain tensors with readable values, even if its caller is transformed.

    RuntimeError is raised if ``torch.func.vmap`` maps over an argument, because results would differ in size.
    """

    @functools.wraps(search)
    def found(*args: P.args, **options: P.kwargs) -> R:
        if not transformed():
            return search(*args, **options)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        given: Any = [_unwrapped(value) for value in args]
        named: Any = {name: _unwrapped(value) for name, value in options.items()}
        with temporarily_clear_interpreter_stack():
            return search(*given, **named)

    return found


def check_not_batched(pos: Tensor) -> None:
    """Raise RuntimeError if ``torch.func.vmap`` maps over positions."""
    if is_mapped(pos):
        reason = "torch.func.vmap cannot map over positions, since the numbers of their neighbors differ"
        advice = "use one Batch of clouds, or map over features or weights with geometry = network.geometry(data)"
        raise RuntimeError(f"pos: {reason}; {advice}")


def _unwrapped(x: Any) -> Any:
    """Return the tensor that a transform has wrapped, or any other argument unchanged."""
    if isinstance(x, Tensor):
        check_not_batched(x)
    while isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x
