"""Networks that compute activations again in the backward pass, which takes less memory and more time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import nn

from lieattn._checks import check_arguments
from lieattn._recompute import recomputed

T = TypeVar("T")


class Recomputing(nn.Module):
    """A network whose blocks can be computed again.

    Attributes
    ----------
    recomputes
        Whether activations are computed again in the backward pass, see :meth:`checkpoint_activations`.
    """

    recomputes: bool = False

    def checkpoint_activations(self, enabled: bool = True) -> Self:
        """Keep the fields between the blocks alone in training, and compute the rest again in the backward pass.

        Gradients are the same, in less memory and about 4/3 of the time. Returns the network. RuntimeError is raised in
        training with weights in half precision; autocast works. Compiled networks keep what the compiler chooses.
        """
        check_arguments(Recomputing.checkpoint_activations, locals())
        for module in self.modules():
            if isinstance(module, Recomputing):
                module.recomputes = enabled
        return self

    def _through(self, block: Callable[..., T], *inputs: Any) -> T:
        """``block(*inputs)``, whose activations are computed again in the backward pass if the network says so."""
        if self.recomputes and not torch.compiler.is_compiling():
            return recomputed(block, *inputs)
        return block(*inputs)
