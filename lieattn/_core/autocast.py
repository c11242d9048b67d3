"""Regions without autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


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
