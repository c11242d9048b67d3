"""Transforms of ``torch.func`` and forward-mode derivatives, which see nothing of what searches and kernels do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch = torch._C._functorch  # which has no public names for what is asked here
P = ParamSpec("P")
R = TypeVar("R")


def transformed() -> bool:
    """Whether a transform of ``torch.func`` or a level of ``torch.autograd.forward_ad`` is evaluated.

    Not while torch compiles.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(x: Tensor) -> bool:
    """Whether ``torch.func.vmap`` has a tensor stand for several."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def outside_of_transforms(search: Callable[P, R]) -> Callable[P, R]:
    """A search that sees the numbers of tensors, whatever differentiates or batches the function that calls it.

    RuntimeError is raised where ``torch.func.vmap`` goes over what is searched: results would differ in size.
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


def check_not_batched(argument: str, x: Tensor) -> None:
    """Raise RuntimeError for positions that ``torch.func.vmap`` goes over."""
    if transformed() and is_batched(x):
        reason = "torch.func.vmap goes over positions, each of which has neighbors of its own, in other numbers"
        advice = "put clouds into one Batch, or go over features or weights with geometry = network.geometry(data)"
        raise RuntimeError(f"{argument}: {reason}; {advice}")


def _unwrapped(x: Any) -> Any:
    """What a transform has wrapped, and other arguments as they are."""
    if isinstance(x, Tensor):
        check_not_batched("pos", x)
    while isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x
