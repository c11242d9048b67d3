"""Outputs of a task's network, whose training steps may be replayed as CUDA graphs."""

from __future__ import annotations

from typing import Any, Self

from lightning.pytorch import LightningModule
from torch import nn

from lieattn.models import Captured


class CapturedSteps(LightningModule):
    """Calls the network of a task, directly or captured."""

    network: nn.Module
    read_apart: tuple[str, ...] = ()
    """Names of attributes of the data that the task reads, and not the network."""

    _captured: tuple[Captured, ...] = ()  # a tuple, so that torch does not register the network under a second name

    def capture(self) -> Self:
        """Replay training steps on a GPU as CUDA graphs, and return this task.

        The network is called through :class:`lieattn.models.Captured`. Batches may differ in the features ``x``, in the
        vector inputs of the network, and in the attributes that this task reads, such as targets and weights.
        """
        inputs = ("x", *getattr(self.network, "vector_inputs", ()))
        unread = [name for name in self.read_apart if name not in inputs]  # a target may be an input as well
        self._captured = (Captured(self.network, inputs, unread),)
        return self

    def outputs_of(self, batch: Any) -> Any:
        """Return the outputs of the network."""
        if not self._captured:
            return self.network(batch)
        (captured,) = self._captured
        captured.training = self.network.training
        return captured(batch)
