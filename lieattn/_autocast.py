"""Whether autocast is enabled on a device, and how to switch it off for a block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def has_autocast(device: torch.device) -> bool:
    """Whether torch has autocast for a device: not for ``meta``, for example."""
    # The first half is for torch.compile, which in torch 2.10 cannot evaluate the second.
    return device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)


def in_autocast(device: torch.device) -> bool:
    """Whether autocast is enabled on a device."""
    return has_autocast(device) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which autocast is off on a device, so that products are computed in the dtype of their operands."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()
