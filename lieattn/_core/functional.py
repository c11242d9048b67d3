"""Support of ``torch.func``, which cannot differentiate searches or kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
