"""Sums over the processes of a training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor


def processes() -> int:
    """Return the number of processes of this training according to torch.distributed, or 1 if it is not initialized."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def summed(values: Tensor) -> Tensor:
    """Return the sum of the values of all processes, each of which must call this function.

    Gradients flow from the sum in every process to the values of every process. The gradients of the losses, summed
    over the processes, are therefore those of the sum of the losses.
    """
    return _Sum.apply(values) if processes() > 1 else values


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.detach().clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return _Sum.apply(grad[0])
