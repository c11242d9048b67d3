"""What the Lightning modules of this library share: optimizer, schedule, checkpoints, random generators."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch_geometric.data import Batch

from lieattn.train._checkpoint import KEY, check_group, describe_group
from lieattn.train._errors import NonFiniteError
from lieattn.train._generators import random_state, set_random_state
from lieattn.train._input import describe_input
from lieattn.train._schedule import Constant, Schedule

OptimizerFactory = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]


class PointSetTask(LightningModule, ABC):
    """Train a network on point sets; subclasses say what its outputs are compared with.

    Checkpoints load with ``weights_only=True`` and are refused by a network on another group. They keep the states
    of the random generators, so that a run continued from one, with a :class:`~lieattn.train.PointSetData`, ends
    with the weights of a run that was never interrupted.

    Parameters
    ----------
    network
        Called with a ``torch_geometric.data.Batch``.
    optimizer
        Makes the optimizer from the parameters; Adam at 1e-3 with weight decay 1e-4 by default.
    schedule
        How the learning rate changes over the steps; constant by default.

    Raises
    ------
    NonFiniteError
        In training, if the loss is NaN or infinite, or if weights to be saved are: the last good checkpoint stays.
    """

    monitor: ClassVar[tuple[str, str]]
    """Logged number that is best where it is largest or smallest, and which of the two: ``"max"`` or ``"min"``."""

    def __init__(
        self, network: nn.Module, optimizer: OptimizerFactory | None = None, schedule: Schedule | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer or _adam
        self.schedule = schedule or Constant()
        self.config: dict[str, Any] = {}
        self._input: dict[str, Any] | None = None
        self._random: list[dict[str, Any]] | None = None

    @abstractmethod
    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Loss of one batch, a scalar; logs it and the metrics under the prefix ``stage``."""

    def cast(self, batch: Batch) -> Batch:
        """Return the batch in the precision of the weights, where Lightning gave these another than float32."""
        if self.dtype != torch.float64:
            return batch
        return copy.copy(batch).apply(lambda value: value.double() if value.is_floating_point() else value)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch, a scalar."""
        if self._input is None:
            self._input = describe_input(batch)
        loss = self.evaluate(batch, "train")
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the training loss is {float(loss.detach())} at step {self.global_step} (epoch "
                f"{self.current_epoch}); the last checkpoint is from before. Lower the learning rate, or clip "
                f"gradients with trainer.gradient_clip_val"
            )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and metrics of one batch."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and metrics of one batch."""
        self.evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Outputs for one batch."""
        return self(batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer, and the schedule if the rate changes."""
        optimizer = self.make_optimizer(self.parameters())
        if isinstance(self.schedule, Constant):
            return optimizer
        self.trainer.fit_loop.setup_data()  # which counts the batches
        steps = float(self.trainer.estimated_stepping_batches)
        per_epoch = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.factor(step, steps, per_epoch))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entry ``"lieattn"``: configuration, group, kind of input, random generators."""
        for name, weight in self.network.named_parameters():
            if not torch.isfinite(weight).all():
                raise NonFiniteError(
                    f"weights of network.{name} are not finite after step {self.global_step}: nothing is saved, "
                    f"the last checkpoint stays"
                )
        states: list[dict[str, Any]] = [random_state()]
        if self.trainer.world_size > 1:
            states *= self.trainer.world_size
            torch.distributed.all_gather_object(states, states[0])
        checkpoint[KEY] = {
            "format": 1,
            "config": self.config,
            "group": describe_group(self.network),
            "input": self._input,
            "random": states,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the group, before any weight is loaded, and take the random generators."""
        check_group(checkpoint, self.network)
        entry = checkpoint.get(KEY, {})
        self._input = entry.get("input", self._input)
        self._random = entry.get("random")

    def on_train_start(self) -> None:
        """Set the random generators to their states of the checkpoint, if the processes are as many."""
        if self._random is not None and len(self._random) == self.trainer.world_size:
            set_random_state(self._random[self.trainer.global_rank])
        self._random = None


def _adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-4)
