"""The Lightning module that trains a network on numbers, vectors and tensors: energies, dipoles, forces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torchmetrics import MeanMetric

from lieattn.train._schedule import Schedule
from lieattn.train._task import OptimizerFactory, PointSetTask

_LOSSES = {"l1": torch.abs, "mse": torch.square}
_STAGES = ("train", "val", "test")


class PointSetRegressor(PointSetTask):
    """Train a network on one or several attributes of the data.

    Every target t is brought to (t - shift) / scale before the loss is taken, and predictions come in the units of the
    data: prediction = shift + scale * output. Shifts and scales are measured on the training set when training
    begins, and are kept in checkpoints. The error logged is the mean absolute one in the units of the data, over
    all components.

    Logged are ``loss`` and ``error`` (for several targets also ``error_NAME``), prefixed by ``train/``, ``val/`` and
    ``test/``. ValueError is raised if options do not fit together; in training, if a target is missing or has another
    shape than its prediction.

    Parameters
    ----------
    network
        Called with a ``torch_geometric.data.Batch``; returns a tensor shaped like the target, or a mapping from
        names of targets to tensors, or a named tuple (:class:`lieattn.models.EnergyForces`).
    targets
        Name of an attribute of the data, or a mapping from names to their weights in the loss.
    loss
        ``"l1"`` or ``"mse"``.
    shift
        Names of the targets whose mean over the training set is subtracted: invariant numbers only, since a vector
        minus a constant would not turn. All targets called ``y`` or ``energy`` if absent.
    scale_of
        Target whose scale another one takes instead of its own, such as ``{"energy": "force"}``, which a force that
        is a gradient of the energy needs; ``{"y": "none"}`` leaves the unit of y alone.
    optimizer, schedule
        See :class:`~lieattn.train.PointSetTask`, also for checkpoints and continuation.
    """

    monitor: ClassVar[tuple[str, str]] = ("val/error", "min")
    measured: Tensor

    def __init__(
        self,
        network: nn.Module,
        targets: str | dict[str, float] = "y",
        loss: Literal["l1", "mse"] = "l1",
        shift: list[str] | None = None,
        scale_of: dict[str, str] | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(network, optimizer, schedule)
        self.targets = {targets: 1.0} if isinstance(targets, str) else dict(targets)
        if loss not in _LOSSES:
            raise ValueError(f"loss: expected one of {sorted(_LOSSES)}, got {loss!r}")
        if not self.targets or any(not weight >= 0 for weight in self.targets.values()):
            raise ValueError(f"targets: expected names with weights of at least 0, got {self.targets}")
        shift = [name for name in self.targets if name in ("y", "energy")] if shift is None else shift
        scale_of = scale_of or {}
        for argument, names in (("shift", shift), ("scale_of", scale_of)):
            if unknown := set(names) - set(self.targets):
                raise ValueError(f"{argument}: {sorted(unknown)} are not among the targets {sorted(self.targets)}")
        if unknown := set(scale_of.values()) - set(self.targets) - {"none"}:
            raise ValueError(f"scale_of: {sorted(unknown)} are neither targets nor 'none'")
        self.loss, self.shifted, self.scale_of = loss, tuple(shift), scale_of
        for name in self.targets:
            self.register_buffer(f"shift_{name}", torch.zeros(()))
            self.register_buffer(f"scale_{name}", torch.ones(()))
        self.register_buffer("measured", torch.tensor(False))
        self.errors = nn.ModuleDict({f"{s}_{name}": MeanMetric() for s in _STAGES for name in self.targets})

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Predictions by target, in the units of the data."""
        return {
            name: self._statistic("shift", name) + self._statistic("scale", name) * value
            for name, value in self._outputs(batch).items()
        }

    def on_fit_start(self) -> None:
        """Measure shifts and scales on the training set, unless a checkpoint has brought them."""
        if not self.measured:
            self.measure(self.trainer.datamodule.sets["train"])  # type: ignore[attr-defined]

    def measure(self, data: Iterable[Data]) -> None:
        """Take shifts and scales from a training set.

        The scale is the deviation from the shift (the root mean square, where nothing is subtracted); a target
        that does not vary keeps the scale 1.
        """
        items = [cast(Any, data)[index] for index in range(len(cast(Sized, data)))]
        scales: dict[str, Tensor] = {}
        for name in self.targets:
            values = [item[name].double() for item in items if isinstance(item.get(name), Tensor)]
            if len(values) != len(items):
                raise ValueError(f"data: {len(items) - len(values)} of {len(items)} training clouds have no {name}")
            columns = torch.cat([value.reshape(1, -1) if value.ndim <= 1 else value for value in values])
            # Per component: numbers of the same cloud may differ in unit, so each has a shift and scale of its own.
            axes = [0] if name in self.shifted else list(range(columns.ndim))
            mean = columns.mean(dim=axes) if name in self.shifted else columns.new_zeros(())
            spread = (columns - mean).square().mean(dim=axes).sqrt()
            scales[name] = torch.where(spread > 0, spread, 1.0)
            self._set("shift", name, mean)
        for name in self.targets:
            source = self.scale_of.get(name, name)
            self._set("scale", name, torch.ones(()) if source == "none" else scales[source])
        self.measured.fill_(True)

    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Weighted loss of one batch; logs it and the mean absolute errors."""
        batch = self.cast(batch)
        total = torch.zeros((), device=self.device)
        options: dict[str, Any] = {"batch_size": batch.num_graphs, "on_epoch": True, "prog_bar": True}
        for name, output in self._outputs(batch).items():
            target = batch[name] if name in batch else None
            if not isinstance(target, Tensor) or target.shape != output.shape:
                found = "none" if target is None else tuple(target.shape)
                raise ValueError(f"data.{name}: the network gives {tuple(output.shape)}, the target is {found}")
            scale = self._statistic("scale", name)
            difference = output - (target.to(output.dtype) - self._statistic("shift", name)) / scale
            total = total + self.targets[name] * _LOSSES[self.loss](difference).mean()
            error = cast(MeanMetric, self.errors[f"{stage}_{name}"])
            error((difference.detach() * scale).abs())
            label = "error" if len(self.targets) == 1 else f"error_{name}"
            self.log(f"{stage}/{label}", error, on_step=False, **options)
        self.log(f"{stage}/loss", total, on_step=stage == "train", sync_dist=stage != "train", **options)
        if len(self.targets) > 1:
            self.log(f"{stage}/error", total.detach(), on_step=False, sync_dist=True, **{**options, "prog_bar": False})
        return total

    def _outputs(self, batch: Batch) -> Mapping[str, Tensor]:
        """Outputs of the network by target, before they are scaled."""
        outputs = self.network(self.cast(batch))
        if hasattr(outputs, "_asdict"):
            outputs = outputs._asdict()
        if isinstance(outputs, Tensor):
            if len(self.targets) > 1:
                raise ValueError(f"network: expected a mapping with {sorted(self.targets)}, got a tensor")
            outputs = {next(iter(self.targets)): outputs}
        if missing := set(self.targets) - set(outputs):
            raise ValueError(f"network: gives {sorted(outputs)}, but {sorted(missing)} are to be learned")
        return {name: outputs[name] for name in self.targets}

    def _statistic(self, kind: str, name: str) -> Tensor:
        statistic: Tensor = getattr(self, f"{kind}_{name}")
        return statistic.to(self.dtype)

    def _set(self, kind: str, name: str, value: Tensor) -> None:
        present: Tensor = getattr(self, f"{kind}_{name}")
        setattr(self, f"{kind}_{name}", value.to(present))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        # Statistics per component have a shape that is known only once they were measured.
        for kind in ("shift", "scale"):
            for name in self.targets:
                key = f"{prefix}{kind}_{name}"
                if key in state_dict:
                    self._set(kind, name, state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *rest)
