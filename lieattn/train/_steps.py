"""Outputs of a task's network, whose training steps may be replayed as CUDA graphs."""

from __future__ import annotations

from typing import Any, Self

from lightning.pytorch import LightningModule
from torch import nn

from lieattn.models import Captured


class CapturedSteps(LightningModule):
    """Calls the network of a task, directly or captured."""

    network: nn.Module
    _captured: tuple[Captured, ...] = ()  # a tuple, so that torch does not register the network under a second name

    read_apart: tuple[str, ...] = ()
    """Names of attributes of the data that the task reads, and not the network."""

    def capture(self) -> Self:
        """Replay training steps on a GPU as CUDA graphs, and return this task.

        The network is called through :class:`lieattn.models.Captured`. Batches may differ in the features ``x``, in the
        vector inputs of the network, and in the attributes that this task reads, such as targets and weights.
        """
        vectors = tuple(getattr(self.network, "vector_inputs", ()))
        self._captured = (Captured(self.network, ("x", *vectors), self.read_apart),)
        return self

    def outputs_of(self, batch: Any) -> Any:
        """Return the outputs of the network."""
        for captured in self._captured:
            captured.training = self.network.training
            return captured(batch)
        return self.network(batch)
