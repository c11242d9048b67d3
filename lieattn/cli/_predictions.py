"""Predictions of one or several checkpoints, as tables."""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn.cli import output_file
from lieattn.io import replacing
from lieattn.models import Ensemble, Rescaled, Spread
from lieattn.train import (
    CheckpointError,
    PointSetClassifier,
    PointSetData,
    PointSetRegressor,
    PointSetTask,
    UsageError,
    load_task,
)


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
        return task.model
    units = {name: first.model.units(name) for name in first.targets}
    scale = {name: 1 / scale for name, (scale, _) in units.items()}
    shift = {name: -shift / scale for name, (scale, shift) in units.items()}
    tables = {name: first.model.references(name) for name in first.targets}
    taken = {
        name: torch.stack([table[:, 0], -table[:, 1] / units[name][0].to(table)], dim=1)
        for name, table in tables.items()
        if table is not None
    }
    return Rescaled(task.model, scale, shift, first.extensive, taken)


class Seen(Callback):
    """What the batches had that were predicted: numbers of points of their clouds, and the targets with these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.points: list[Tensor] = []  # int64 [clouds] for each batch
        self.truth: dict[str, list[Tensor | None]] = {name: [] for name in names}

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """Keep the numbers and targets of one batch."""
        self.points.append(batch.ptr.diff().cpu())
        for name, values in self.truth.items():
            values.append(value.cpu() if isinstance(value := batch.get(name), Tensor) else None)


def write_predictions(trainer: Trainer, task: Any, others: Sequence[PointSetTask], data: PointSetData) -> None:
    """Predict, and write classes to ``predictions.csv`` in the root folder, others to ``predictions_NAME.csv``.

    With several tasks, these are means and standard deviations of their predictions. No file is replaced. A
    ``fast_dev_run`` writes no files.
    """
    if trainer.world_size > 1:
        found = trainer.world_size
        raise UsageError(f"trainer.devices: expected 1, since one process writes the table, got {found}")
    root, trial = Path(trainer.default_root_dir), trainer.fast_dev_run  # type: ignore[attr-defined]
    try:
        output_file(str(root / "predictions.csv"))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"trainer.default_root_dir: {error}") from error
    items = data.sets["test"] if data.sets["predict"] is None else data.sets["predict"]
    if isinstance(items, Sized) and not len(items):  # loggers make folders when predicting begins
        raise UsageError("data.predict: expected at least one item, got an empty data set")
    classes = isinstance(task, PointSetClassifier)
    trainer.callbacks.append(seen := Seen(["y"] if classes else [*getattr(task, "targets", ())]))  # type: ignore[attr-defined]
    model = EnsemblePredictions([task, *others]) if others else task
    batches = list[Any](trainer.predict(model, datamodule=data, return_predictions=True) or [])
    if not trial:
        means, deviations = zip(*batches, strict=True) if others else (batches, [])
        per = getattr(task, "per", None)
        tables = prediction_tables(means, deviations, seen.points, items, per, seen.truth, classes)
        for path, rows in write_tables(root, tables):
            print(f"predictions, {rows} rows: {path}", file=sys.stderr)


def prediction_tables(
    means: Sequence[Any],
    deviations: Sequence[Any],
    points: Sequence[Tensor],
    data: object,
    per: str | None = None,
    truth: Mapping[str, Sequence[Tensor | None]] | None = None,
    classes: bool = False,
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return a table for each target, by the name of its file.

    Rows of clouds have the number of the cloud and its entry in the attributes ``names`` and ``files`` of the data set,
    if it has them. Rows of points have the numbers of cloud and point. If ``classes``, the predictions are logits, and
    columns are the true and the most probable class, by its number and, if the data set has the attribute ``classes``,
    by its name, and the probabilities of all classes. Else they are the true and the predicted numbers.

    ``points`` has the number of points of each cloud, by batch, and ``truth`` the targets of the batches, by name.
    ``per`` is ``"cloud"`` or ``"point"`` if the task states what has predictions.
    """
    values, spreads, tables = _by_name(means), _by_name(deviations), {}
    classes = classes or "logit" in values
    for number, (name, value) in enumerate(values.items()):
        targets = (truth or {}).get("y" if classes else name, [])
        given = [target for target in targets if target is not None]
        known = torch.cat(given) if len(given) == len(value) else None
        if known is not None and classes:
            known = known if known.ndim == 1 else known[:, number]
        rows = _rows([len(batch) for batch in value], points, data, per)
        if classes:
            rows |= _class_columns(torch.cat(value), known, getattr(data, "classes", None))
        elif known is not None and known.numel() == sum(batch.numel() for batch in value):
            rows |= _columns(f"true_{name}", [known])
        short = "logit" if classes else name
        rows |= _columns(short, value) | _columns(f"{short}_std", spreads.get(name))
        tables["predictions" if list(values) == ["logit"] else f"predictions_{name}"] = rows
    return tables


def _class_columns(logits: Tensor, labels: Tensor | None, names: object) -> dict[str, Sequence[Any]]:
    """Columns with the true labels, if they are known, the most probable ones, and the probabilities of all classes."""
    found: dict[str, Sequence[Any]] = {}
    named = isinstance(names, Sequence) and len(names) == logits.shape[1]
    for kind, numbers in (("true", labels), ("predicted", logits.argmax(dim=1))):
        if numbers is not None and len(numbers) == len(logits):
            found[kind] = numbers.tolist()
            if named and isinstance(names, Sequence):  # labels that are masked may have no name
                found[f"{kind}_class"] = [names[k] if 0 <= k < len(names) else "" for k in numbers.tolist()]
    return found | _columns("probability", [logits.double().softmax(dim=1)])


def write_tables(folder: Path, tables: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[tuple[Path, int]]:
    """Write each table to a file, and return the files with their numbers of rows.

    If such files exist, all new names end with -v1, -v2, ..., as for Lightning's checkpoints.
    """
    endings = itertools.chain([""], (f"-v{number}" for number in itertools.count(1)))
    ending = next(end for end in endings if not any((folder / f"{name}{end}.csv").exists() for name in tables))
    written = []
    for name, columns in tables.items():
        path, rows = folder / f"{name}{ending}.csv", list(zip(*columns.values(), strict=True))
        with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(columns), *rows])
        written.append((path, len(rows)))
    return written


def _by_name(batches: Sequence[Any]) -> dict[str, list[Tensor]]:
    """Predictions of all batches by name; predictions without a name are logits."""
    named = [batch if isinstance(batch, dict) else {"logit": batch} for batch in batches]
    return {name: [batch[name] for batch in named] for name in (named[0] if named else ())}


def _rows(lengths: list[int], points: Sequence[Tensor], data: object, per: str | None) -> dict[str, Sequence[Any]]:
    """Columns that say to which cloud, file or point each row belongs; none if this cannot be known."""
    counts = torch.cat(list(points))
    clouds = torch.arange(len(counts))
    each = {"cloud": [len(batch) for batch in points], "point": [int(batch.sum()) for batch in points]}
    fits = [name for name, expected in each.items() if lengths == expected]
    if len(fits) > 1:  # with one point per cloud, both are the same; with empty clouds among others, they are not
        fits = [per] if per in fits else ["cloud"] * bool((counts == 1).all())
    if fits == ["cloud"]:
        found: dict[str, Sequence[Any]] = {"cloud": clouds.tolist()}
        for column, entries in (("name", getattr(data, "names", None)), ("file", getattr(data, "files", None))):
            if isinstance(entries, Sequence) and len(entries) >= len(clouds):
                found[column] = [str(entry) for entry in entries[: len(clouds)]]
        return found
    if fits == ["point"]:
        first = counts.cumsum(0) - counts
        of_cloud = torch.arange(sum(lengths)) - first.repeat_interleave(counts)
        return {"cloud": clouds.repeat_interleave(counts).tolist(), "point": of_cloud.tolist()}
    return {}


def _columns(name: str, batches: Sequence[Tensor] | None) -> dict[str, Sequence[Any]]:
    if batches is None:
        return {}
    values = torch.cat(list(batches)).cpu()
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    columns = values.reshape(len(values), math.prod(values.shape[1:])).unbind(dim=1)
    # Numbers of NumPy, since -1.4 in float32 is -1.399999976158142 as a number of Python.
    return {f"{name}_{k}": [*column.numpy()] for k, column in enumerate(columns)}
