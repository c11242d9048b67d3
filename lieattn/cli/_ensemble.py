"""Ensembles of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch_geometric.data import Batch

from lieattn.models import Ensemble, Rescaled, Spread
from lieattn.train import CheckpointError, PointSetRegressor, PointSetTask, UsageError, load_task


def load_members(paths: Sequence[str], trust: Sequence[str]) -> dict[str, PointSetTask]:
    """Load the tasks of checkpoints, by file; CheckpointError names the file if one cannot be loaded."""
    found = {}
    for path in paths:
        try:
            found[path] = load_task(path, trust)
        except UsageError as error:
            raise error if path in str(error) else CheckpointError(f"{path}: {error}") from error
    return found


def check_alike(tasks: Mapping[str, PointSetTask]) -> None:
    """Raise UsageError, naming both files, if a task was trained for another purpose than the first one."""
    (first_path, first), *others = tasks.items()
    wanted = _purpose(first)
    for path, task in others:
        for name, found in _purpose(task).items():
            if found != wanted.get(name):
                got = f"{name} {wanted.get(name)!r} of {first_path} and {found!r} of {path}"
                raise UsageError(f"--ckpt_path: expected networks that were trained for the same task, got {got}")
    if isinstance(first, PointSetRegressor) and first.loss == "rotation":
        raise UsageError("--ckpt_path: expected one checkpoint, since the mean of rotations is not a rotation")


def mean_network(first: PointSetTask, others: Sequence[PointSetTask]) -> Ensemble:
    """Return the mean of the networks of all tasks, in the units in which the first task computes its loss."""
    return Ensemble([_in_units_of(first, task).to(first.dtype) for task in (first, *others)])


class EnsemblePredictions(LightningModule):
    """Means and standard deviations of the predictions of several tasks."""

    def __init__(self, tasks: Sequence[PointSetTask]) -> None:
        super().__init__()
        self.ensemble = Ensemble([_Predicting(task.to(tasks[0].dtype)) for task in tasks])

    def predict_step(self, batch: Batch, batch_idx: int) -> Spread:
        """Return mean and standard deviation, each shaped like the predictions of one task."""
        return self.ensemble.spread(batch)


class _Predicting(nn.Module):
    """A module whose outputs are the predictions of a task."""

    def __init__(self, task: PointSetTask) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Batch) -> Any:
        return self.task.predict_step(batch, 0)


def _purpose(task: PointSetTask) -> dict[str, Any]:
    """The properties in which tasks must agree, by the words that describe them in messages."""
    found = {
        "the task": type(task).__name__,
        **{name: getattr(task, name) for name in ("classes", "labels", "per") if hasattr(task, name)},
    }
    if isinstance(task, PointSetRegressor):
        found["targets"] = sorted(task.targets)
    return {**found, "the guarantee": str(getattr(task.network, "guarantee", "none"))}


def _in_units_of(first: PointSetTask, task: PointSetTask) -> nn.Module:
    """The network of a task, in the units in which the first task computes its loss."""
    if not isinstance(first, PointSetRegressor):
        return task.network
    units = {name: first.model.units(name) for name in first.targets}
    scale = {name: 1 / scale for name, (scale, _) in units.items()}
    shift = {name: -shift / scale for name, (scale, shift) in units.items()}
    return Rescaled(task.model, scale, shift, first.extensive)
