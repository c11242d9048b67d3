"""Support of torch's default device, ``torch.set_default_device`` and ``with torch.device(...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def made_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate the constructor of a module so that it works on the CPU, and then moves to the default device.

    Tables and weights are then on one device, and the tables can be computed from those of a group.
    """

    @functools.wraps(init)
    def made(self: nn.Module, *args: Any, **options: Any) -> None:
        device = torch.get_default_device()
        if device.type == "cpu":
            init(self, *args, **options)
            return
        with torch.device("cpu"):
            init(self, *args, **options)
        self.to(device)

    return made


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose new tensors are on the CPU, such as tables of groups, for every default device."""

    @functools.wraps(function)
    def computed(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling() or torch.get_default_device().type == "cpu":
            return function(*args, **options)
        with torch.device("cpu"):
            return function(*args, **options)

    return computed
