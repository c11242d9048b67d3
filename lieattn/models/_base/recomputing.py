"""Networks that can recompute activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import nn

from lieattn._core.checks import check_arguments
from lieattn._core.recompute import recomputed

T = TypeVar("T")


class Recomputing(nn.Module):
    """A network whose blocks can be recomputed.

    Attributes
    ----------
    recomputes
        Whether activations are recomputed in the backward pass, see :meth:`checkpoint_activations`.
    """

    recomputes: bool = False

    def checkpoint_activations(self, enabled: bool = True) -> Self:
        """Keep only the fields between the blocks in training, and recompute other activations in the backward pass.

        Gradients are the same, in less memory and about 4/3 of the time. Return the network itself. Training with
        weights in half precision raises RuntimeError; autocast works. In compiled networks this has no effect, since
        the compiler chooses the activations to keep.
        """
        check_arguments(Recomputing.checkpoint_activations, locals())
        for module in self.modules():
            if isinstance(module, Recomputing):
                module.recomputes = enabled
        return self

    def _through(self, block: Callable[..., T], *inputs: Any) -> T:
        """Return ``block(*inputs)``; its activations are recomputed in the backward pass if :attr:`recomputes`."""
        if self.recomputes and not torch.compiler.is_compiling():
            return recomputed(block, *inputs)
        return block(*inputs)
