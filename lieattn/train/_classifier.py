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
    """Train a network on clouds with one label, or several, with cross entropy.

    Logged are ``loss`` and ``accuracy``, prefixed by ``train/``, ``val/`` and ``test/``. ValueError is raised in
    training if logits and labels do not have their shapes.

    Parameters
    ----------
    network
        Called with a ``torch_geometric.data.Batch``; returns logits ``[clouds, labels * classes]``, those of one label
        after the other.
    classes
        Number of classes, at least 2.
    labels
        Number of labels of each cloud, all with the same number of classes; ``data.y`` is ``[clouds, labels]`` for more
        than one. The loss is the mean over them, and the accuracy counts each by itself.
    optimizer, schedule
        See :class:`~lieattn.train.PointSetTask`, also for checkpoints and continuation.
    """

    monitor: ClassVar[tuple[str, str]] = ("val/accuracy", "max")

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
        labels: int = 1,
    ) -> None:
        super().__init__(network, optimizer, schedule)
        for name, count, least in (("classes", classes, 2), ("labels", labels, 1)):
            if count < least:
                raise ValueError(f"{name}: expected at least {least}, got {count}")
        self.classes, self.labels = classes, labels
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(num_classes=classes, average="micro") for _ in range(3)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[clouds, classes]``, or ``[clouds, labels, classes]`` for more than one label."""
        logits: Tensor = self.network(self.cast(batch))
        width = self.labels * self.classes
        if logits.shape != (batch.num_graphs, width):
            several = f"{self.labels} labels of " if self.labels > 1 else ""
            raise ValueError(
                f"network: expected logits [{batch.num_graphs}, {width}] for {batch.num_graphs} clouds and "
                f"{several}{self.classes} classes, got {list(logits.shape)}"
            )
        return logits if self.labels == 1 else logits.unflatten(1, (self.labels, self.classes))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Logits ``[clouds, classes]``, by label if there are several."""
        logits: Tensor = self(batch)
        if self.labels == 1:
            return logits
        return {f"label_{number}": part for number, part in enumerate(logits.unbind(dim=1))}

    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Cross entropy of one batch; logs it and the accuracy."""
        labels = batch.y
        shape = (batch.num_graphs,) if self.labels == 1 else (batch.num_graphs, self.labels)
        if labels is None or labels.shape != shape:
            found = "none" if labels is None else list(labels.shape)
            count = "one label" if self.labels == 1 else f"{self.labels} labels"
            raise ValueError(f"data: expected {count} y per cloud, {list(shape)}, got {found}")
        logits, labels = self(batch).flatten(0, -2), labels.flatten()
        loss = F.cross_entropy(logits, labels)
        accuracy: MulticlassAccuracy = getattr(self, f"{stage}_accuracy")
        accuracy(logits, labels)
        options: dict[str, Any] = {"batch_size": batch.num_graphs, "on_epoch": True, "prog_bar": True}
        self.log(f"{stage}/loss", loss, on_step=stage == "train", sync_dist=stage != "train", **options)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, **options)
        return loss
