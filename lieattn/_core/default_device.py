"""Support of torch's default device, ``torch.set_default_device`` and ``with torch.device(...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

_of_caller = ContextVar[torch.device | None]("_of_caller", default=None)  # the device that ``on_cpu`` has replaced


def made_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate the constructor of a module so that it works on the CPU, and then moves to the default device.

    Tables and weights are then on one device, and the tables can be computed from those of a group. Modules that the
    constructor is given stay on their device.
    """

    @functools.wraps(init)
    def made(self: nn.Module, *args: Any, **options: Any) -> None:
        device = torch.get_default_device()
        if device.type == "cpu":
            init(self, *args, **options)
            return
        with torch.device("cpu"):
            init(self, *args, **options)
        modules = _modules([args, options])
        given = {id(value) for module in modules for value in (*module.parameters(), *module.buffers())}
        self._apply(lambda value: value if id(value) in given else value.to(device))

    return made


def _modules(arguments: Any) -> Iterator[nn.Module]:
    """Yield the modules in nested arguments."""
    if isinstance(arguments, nn.Module):
        yield arguments
    elif isinstance(arguments, list | tuple | dict):
        for entry in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _modules(entry)


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose new tensors are on the CPU, such as tables of groups, for every default device."""

    @functools.wraps(function)
    def computed(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling() or torch.get_default_device().type == "cpu":
            return function(*args, **options)
        token = _of_caller.set(torch.get_default_device())
        try:
            with torch.device("cpu"):
                return function(*args, **options)
        finally:
            _of_caller.reset(token)

    return computed


@contextmanager
def as_for_caller() -> Iterator[None]:
    """Restore the default device of the caller of an :func:`on_cpu` function, for calls of functions of the user."""
    device = _of_caller.get()
    if device is None:
        yield
        return
    with device:
        yield
