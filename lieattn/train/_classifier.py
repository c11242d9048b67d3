"""The Lightning module that trains a network to tell clouds apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch_geometric.data import Batch
from torchmetrics.classification import MulticlassAccuracy

from lieattn.train._checkpoint import KEY, check_group, describe_group
from lieattn.train._errors import NonFiniteError
from lieattn.train._generators import random_state, set_random_state
from lieattn.train._schedule import Constant, Schedule

OptimizerFactory = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]


class PointSetClassifier(LightningModule):
    """Train a network on labeled clouds with cross entropy.

    Checkpoints load with ``weights_only=True`` and are refused by a network on another group. They keep the states
    of the random generators, so that a run continued from one, with a :class:`~lieattn.train.PointSetData`, ends
    with the weights of a run that was never interrupted.

    Logged are ``loss`` and ``accuracy``, prefixed by ``train/``, ``val/`` and ``test/``.

    Parameters
    ----------
    network
        Called with a ``torch_geometric.data.Batch``; returns logits ``[clouds, classes]``.
    classes
        Number of classes, at least 2.
    optimizer
        Makes the optimizer from the parameters; Adam at 1e-3 with weight decay 1e-4 by default.
    schedule
        How the learning rate changes over the steps; constant by default.

    Raises
    ------
    ValueError
        If ``classes`` is less than 2; in training, if logits and labels do not have their shapes.
    NonFiniteError
        In training, if the loss is NaN or infinite, or if weights to be saved are: the last good checkpoint stays.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(f"classes: expected at least 2, got {classes}")
        self.network = network
        self.classes = classes
        self.make_optimizer = optimizer or _adam
        self.schedule = schedule or Constant()
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(num_classes=classes, average="micro") for _ in range(3)
        )
        self.config: dict[str, Any] = {}
        self._input: dict[str, Any] | None = None
        self._random: list[dict[str, Any]] | None = None

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[clouds, classes]``."""
        if self.dtype == torch.float64:  # which Lightning gives to weights, but to no Batch
            batch = copy.copy(batch).apply(lambda value: value.double() if value.is_floating_point() else value)
        logits: Tensor = self.network(batch)
        if logits.shape != (batch.num_graphs, self.classes):
            raise ValueError(
                f"network: expected logits [{batch.num_graphs}, {self.classes}] for {batch.num_graphs} clouds and "
                f"{self.classes} classes, got {list(logits.shape)}"
            )
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch, a scalar."""
        if self._input is None:
            self._input = _describe_input(batch)
        loss = self._evaluate(batch, "train", self.train_accuracy)
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the training loss is {float(loss.detach())} at step {self.global_step} (epoch "
                f"{self.current_epoch}); the last checkpoint is from before. Lower the learning rate, or clip "
                f"gradients with trainer.gradient_clip_val"
            )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of one batch."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of one batch."""
        self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits ``[clouds, classes]`` of one batch."""
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

    def _evaluate(self, batch: Batch, stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        labels = batch.y
        if labels is None or labels.shape != (batch.num_graphs,):
            found = "none" if labels is None else list(labels.shape)
            raise ValueError(f"data: expected one label y per cloud, [{batch.num_graphs}], got {found}")
        logits = self(batch)
        loss = F.cross_entropy(logits, labels)
        accuracy(logits, labels)
        options: dict[str, Any] = {"batch_size": len(labels), "on_epoch": True, "prog_bar": True}
        self.log(f"{stage}/loss", loss, on_step=stage == "train", sync_dist=stage != "train", **options)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, **options)
        return loss


def _adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-4)


def _describe_input(batch: Batch) -> dict[str, Any]:
    """Kind of clouds the network is trained on, so that such clouds can be drawn at random."""
    x, pos, grid = batch.get("x"), batch.get("pos"), batch.get("grid")
    return {
        "points": math.ceil((batch.num_nodes or 0) / batch.num_graphs),
        "channels": None if x is None else int(x[0].numel()),
        "dim": None if pos is None else int(pos.shape[1]),
        "grid": None if grid is None else grid[0].tolist(),
    }
