"""The Lightning module that learns labels of clouds or points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torchmetrics.classification import MulticlassConfusionMatrix

from lieattn._core.checks import check_arguments, check_is
from lieattn.train._data import PointSetData
from lieattn.train._inputs import USUAL, note, scale_messages, size_of
from lieattn.train._schedule import Schedule
from lieattn.train._targets import (
    Losses,
    WeightedMean,
    check_weights_apply,
    counted,
    labels_of,
    read_for,
    shared_weights,
    target_weights,
    targets_of,
    training_set,
    weighted_sums,
)
from lieattn.train._tasks import OptimizerFactory, PointSetTask


class PointSetClassifier(PointSetTask):
    """Train a network on clouds or points with one or several labels, with cross entropy.

    It logs ``loss``, ``accuracy`` and ``balanced_accuracy``, the mean over the classes of the share of their labels
    that is predicted, prefixed by ``train/``, ``val/`` and ``test/``. For labels of points it also logs intersection
    over union, ``iou_0``, ``iou_1``, ... of each class in validation and test, and their mean ``iou``. Means leave out
    classes that neither labels nor predictions contain, whose ``iou`` is NaN. Clouds, points or labels are masked by
    ``data.mask`` (bool) and weighted by ``data.weight``, shaped like ``data.y`` or its first axis, if the data have
    them; only loss and accuracy use weights other than 0. They are NaN if a counted logit is NaN. A note after the
    training says if all predictions are one class.
    ValueError is raised in training if logits or labels have another shape than expected, or if a label with a weight
    above 0 is not in 0 .. classes - 1.

    Logits that are far too large in the first training step are scaled down, as the outputs of a
    :class:`~lieattn.train.PointSetRegressor`.

    Parameters
    ----------
    network
        Module that is called with a ``torch_geometric.data.Batch`` and returns logits ``[clouds, labels * classes]``,
        or ``[points, labels * classes]``, one label after the other.
    classes
        Number of classes, at least 2.
    labels
        Number of labels of each cloud or point, all with the same number of classes; for more than one, ``data.y`` is
        ``[clouds, labels]`` or ``[points, labels]``. The loss is the mean over the labels, and the accuracy counts each
        label separately.
    label_smoothing
        Share of the probability of a label that is spread evenly over all classes in training.
    optimizer, schedule, no_decay
        See :class:`~lieattn.train.PointSetTask`, also for checkpoints and continuation.
    per
        What has labels: ``"cloud"``, or ``"point"`` for segmentation, with a network that has ``pool="none"``.
    class_weights
        Weight of each class in the loss, at least 0, or ``"balanced"``: the mean number of labels of a class in the
        training set, divided by that of the class, or 1 without labels. It is measured when training begins, or by
        :meth:`measure`, and the best balanced accuracy then decides which checkpoint is kept.
    loss_weight
        Name of the attribute with weights of clouds or points, instead of ``weight``. All data must have it.
    """

    weight_of_class: Tensor

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
        labels: int = 1,
        label_smoothing: float = 0.0,
        no_decay: Sequence[str] = (),
        per: Literal["cloud", "point"] = "cloud",
        class_weights: list[float] | Literal["balanced"] | None = None,
        loss_weight: str | None = None,
    ) -> None:
        check_arguments(PointSetClassifier.__init__, locals())
        super().__init__(network, optimizer, schedule, no_decay)
        self.shared = shared_weights(loss_weight)
        self.read_apart = read_for(["y"], self.shared)
        for name, count, least in (("classes", classes, 2), ("labels", labels, 1)):
            if count < least:
                raise ValueError(f"{name}: expected at least {least}, got {count}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing}")
        self.classes, self.labels, self.label_smoothing, self.per = classes, labels, label_smoothing, per
        self.class_weights = class_weights
        if isinstance(class_weights, list):
            if len(class_weights) != classes or not all(0 <= weight < math.inf for weight in class_weights):
                expected = f"{classes} finite numbers of at least 0, one for each class"
                raise ValueError(f"class_weights: expected {expected}, got {class_weights}")
            self.register_buffer("weight_of_class", torch.tensor(class_weights), persistent=False)
        elif class_weights == "balanced":
            self.register_buffer("weight_of_class", torch.zeros(classes))  # not measured yet
        self.losses = Losses([1.0])
        # Weighted means, because MulticlassAccuracy of torchmetrics takes no weights.
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (WeightedMean() for _ in range(3))
        stages = "train", "val", "test"
        self.confusion = nn.ModuleDict({f"of_{stage}": MulticlassConfusionMatrix(classes) for stage in stages})
        self._validated_counts: Tensor | None = None  # [labels, predictions] of the last validation

    @property
    def monitor(self) -> tuple[str, str]:  # type: ignore[override]
        """The accuracy, which is balanced like the weights of the classes; larger is better."""
        return f"val/{'balanced_' * (self.class_weights == 'balanced')}accuracy", "max"

    @property
    def _large_loss(self) -> float:
        return 100.0  # logits of the order of 1 have the logarithm of the number of classes

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[clouds | points, classes]``, or ``[..., labels, classes]`` for more than one label."""
        run = partial(self.outputs_of, self.cast(batch))
        logits: Tensor = run()
        check_is("network: output", logits, Tensor)
        rows, width = self._rows(batch), self.labels * self.classes
        if logits.shape != (rows, width):
            several = f"{self.labels} labels of " if self.labels > 1 else ""
            raise ValueError(
                f"network: expected logits [{rows}, {width}] for {rows} {self.per}s and {several}{self.classes} "
                f"classes, got {list(logits.shape)}"
                + ("; networks of points have pool='none'" if self.per == "point" else "")
            )
        begins, self._begins = self._begins, False
        if begins and size_of(logits) > USUAL and scale_messages(self.network, run, heads=True):
            logits = run()
        return logits if self.labels == 1 else logits.unflatten(1, (self.labels, self.classes))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return logits ``[clouds | points, classes]``; for several labels, a dictionary with those of each label."""
        logits: Tensor = self(batch)
        if self.labels == 1:
            return logits
        return {f"label_{number}": part for number, part in enumerate(logits.unbind(dim=1))}

    def on_fit_start(self) -> None:
        """Measure balanced weights of the classes on the training set, unless they come from a checkpoint."""
        super().on_fit_start()
        data = self._trainer and self._trainer.datamodule  # type: ignore[attr-defined]
        named = getattr(data.sets["train"], "classes", None) if isinstance(data, PointSetData) else None
        if isinstance(named, list | tuple) and self.labels == 1 and 0 < len(named) < self.classes:
            found = f"the training set has {len(named)} classes, {named[0]} to {named[-1]}"
            note(f"classes: {found}, and the task {self.classes}")
        if self.class_weights == "balanced" and not self.weight_of_class.any():
            self.measure(training_set(self.trainer, "the weights of the classes"))

    def measure(self, data: Sequence[Data]) -> None:
        """Set balanced weights of the classes from the labels of a training set, without those that are masked."""
        counts = torch.zeros(self.classes, dtype=torch.float64)
        items = [data[index] for index in range(len(data))]
        for item, labels in zip(items, targets_of(items, "y"), strict=True):
            found = counted(labels, target_weights(item, "y", labels, shared=self.shared))[0].long()
            self._check_labels(found)
            counts += torch.bincount(found, minlength=self.classes)
        balanced = counts.sum() / (self.classes * counts)
        self.weight_of_class.copy_(balanced.where(counts > 0, 1.0))

    def on_train_epoch_end(self) -> None:
        """Log the metrics of the classes."""
        self._log_classes("train")

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the classes."""
        super().on_validation_epoch_end()
        self._validated_counts = self._log_classes("val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the classes."""
        self._log_classes("test")

    def on_fit_end(self) -> None:
        """Note if the network gave the same class for everything in the last validation."""
        if self._validated_counts is None:
            return
        present, predicted = self._validated_counts.sum(dim=1), self._validated_counts.sum(dim=0)
        if int((predicted > 0).sum()) == 1 < int((present > 0).sum()):
            number, share = int(predicted.argmax()), float(present[predicted.argmax()] / present.sum())
            note(
                f"val/accuracy: the network gives class {number} for all of the last validation, so that the accuracy "
                f"is the share of this class, {share:.3g}"
            )

    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Return the cross entropy of one batch, and log it and the accuracy."""
        labels = labels_of(batch, self.labels, self._rows(batch), self.per)
        check_weights_apply(batch, {"y": labels}, self.shared)
        importance = target_weights(batch, "y", labels, shared=self.shared)
        rows = torch.arange(labels.numel(), device=labels.device).reshape(labels.shape)
        rows, weights = counted(rows, importance)
        labels = labels.flatten()[rows].long()
        self._check_labels(labels)
        logits = self(batch).flatten(0, -2)[rows]
        smoothing = self.label_smoothing if stage == "train" else 0.0
        entropy = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        accuracy: WeightedMean = getattr(self, f"{stage}_accuracy")
        predicted = logits.argmax(dim=1)
        right = (predicted == labels).float()
        self.confusion[f"of_{stage}"].update(predicted, labels)  # type: ignore[operator]
        # Of NaN among the logits, argmax is the first.
        accuracy.update(right.masked_fill(logits.isnan().any(dim=1), math.nan), weights)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        if self.class_weights is not None:
            weights = weights * self.weight_of_class.to(weights.dtype)[labels]
        return self.losses.logged(self.log, batch, weighted_sums(entropy, weights)[:, None], stage)

    def _log_classes(self, stage: str) -> Tensor:
        """Log the metrics of the classes, and return the counts ``[labels, predictions]`` of this epoch."""
        metric = cast(MulticlassConfusionMatrix, self.confusion[f"of_{stage}"])
        counts: Tensor = metric.compute().double()
        metric.reset()
        right, present = counts.diagonal(), counts.sum(dim=1)
        self.log(f"{stage}/balanced_accuracy", (right / present).nanmean())
        if self.per == "point":
            iou = right / (present + counts.sum(dim=0) - right)
            each = {f"{stage}/iou_{number}": value for number, value in enumerate(iou)} if stage != "train" else {}
            self.log_dict({f"{stage}/iou": iou.nanmean(), **each})
        return counts

    def _check_labels(self, labels: Tensor) -> None:
        """Raise ValueError unless all labels are numbers of classes."""
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            got = f"{int(labels.min())} .. {int(labels.max())}"
            raise ValueError(
                f"data: expected labels y in 0 .. {self.classes - 1}, got {got}; the task has {self.classes} classes"
            )

    def _rows(self, batch: Batch) -> int:
        return int(batch.num_graphs if self.per == "cloud" else batch.num_nodes)
