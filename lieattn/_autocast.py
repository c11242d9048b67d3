"""Autocast, asked on any device: geometry keeps its precision, and layers take what autocast converts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def has_autocast(device: torch.device) -> bool:
    """Whether there is autocast on a device: there is none on ``meta``."""
    # The first half is for torch.compile, which in torch 2.10 cannot evaluate the second.
    return device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)


def in_autocast(device: torch.device) -> bool:
    """Whether autocast is enabled on a device."""
    return has_autocast(device) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which products are taken in the dtype of their operands."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()
