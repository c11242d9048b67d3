"""The Lightning module that trains a network to tell clouds apart."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch
from torchmetrics.classification import MulticlassAccuracy

from lieattn.train._schedule import Schedule
from lieattn.train._task import OptimizerFactory, PointSetTask


class PointSetClassifier(PointSetTask):
    """Train a network on labeled clouds with cross entropy.

    Logged are ``loss`` and ``accuracy``, prefixed by ``train/``, ``val/`` and ``test/``. See
    :class:`~lieattn.train.PointSetTask` for checkpoints and continuation.

    Parameters
    ----------
    network
        Called with a ``torch_geometric.data.Batch``; returns logits ``[clouds, classes]``.
    classes
        Number of classes, at least 2.
    optimizer, schedule
        See :class:`~lieattn.train.PointSetTask`.

    Raises
    ------
    ValueError
        If ``classes`` is less than 2; in training, if logits and labels do not have their shapes.
    """

    monitor: ClassVar[tuple[str, str]] = ("val/accuracy", "max")

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(network, optimizer, schedule)
        if classes < 2:
            raise ValueError(f"classes: expected at least 2, got {classes}")
        self.classes = classes
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(num_classes=classes, average="micro") for _ in range(3)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[clouds, classes]``."""
        logits: Tensor = self.network(self.cast(batch))
        if logits.shape != (batch.num_graphs, self.classes):
            raise ValueError(
                f"network: expected logits [{batch.num_graphs}, {self.classes}] for {batch.num_graphs} clouds and "
                f"{self.classes} classes, got {list(logits.shape)}"
            )
        return logits

    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Cross entropy of one batch; logs it and the accuracy."""
        labels = batch.y
        if labels is None or labels.shape != (batch.num_graphs,):
            found = "none" if labels is None else list(labels.shape)
            raise ValueError(f"data: expected one label y per cloud, [{batch.num_graphs}], got {found}")
        logits = self(batch)
        loss = F.cross_entropy(logits, labels)
        accuracy: MulticlassAccuracy = getattr(self, f"{stage}_accuracy")
        accuracy(logits, labels)
        options: dict[str, Any] = {"batch_size": len(labels), "on_epoch": True, "prog_bar": True}
        self.log(f"{stage}/loss", loss, on_step=stage == "train", sync_dist=stage != "train", **options)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, **options)
        return loss
