"""Tables of predictions."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lieattn.io import replacing

Table = Mapping[str, Sequence[Any]]


class PointCounts(Callback):
    """The number of points of each cloud that was predicted, int64 ``[clouds]`` for each batch."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """Count the points of the clouds of one batch."""
        self.batches.append(batch.ptr.diff().cpu())


def prediction_tables(
    means: Sequence[Any], deviations: Sequence[Any], points: Sequence[Tensor], data: object, per: str | None = None
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return a table for each target, by the name of its file.

    Rows of clouds have the number of the cloud and, if the data set has the attribute ``files``, the name of its file.
    Rows of points have the numbers of cloud and point. Scores of classes have the most probable class, by its number
    and, if the data set has the attribute ``classes``, by its name.

    ``points`` has the number of points of each cloud, by batch. ``per`` is ``"cloud"`` or ``"point"`` if the task
    states what has predictions.
    """
    values, spreads = _by_name(means), _by_name(deviations)
    tables = {
        f"predictions_{name}": {
            **_rows([len(batch) for batch in value], points, data, per),
            **_columns(name, value),
            **_columns(f"{name}_std", spreads.get(name)),
        }
        for name, value in values.items()
    }
    if isinstance(means[0], dict):
        return tables
    columns = tables["predictions_logit"]  # logits of a single label
    logits = torch.cat(values["logit"])
    labels = logits.argmax(dim=1).tolist()
    found = {"label": labels}
    names = getattr(data, "classes", None)
    if isinstance(names, Sequence) and len(names) == logits.shape[1]:
        found["class"] = [names[label] for label in labels]
    first = [name for name in ("cloud", "file", "point") if name in columns]
    return {"predictions": {**{name: columns[name] for name in first}, **found, **columns}}


def write_tables(folder: Path, tables: Mapping[str, Table]) -> list[tuple[Path, int]]:
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
        files = getattr(data, "files", None)
        if isinstance(files, Sequence) and len(files) >= len(clouds):
            found["file"] = [str(file) for file in files[: len(clouds)]]
        return found
    if fits == ["point"]:
        first = counts.cumsum(0) - counts
        of_cloud = torch.arange(sum(lengths)) - first.repeat_interleave(counts)
        return {"cloud": clouds.repeat_interleave(counts).tolist(), "point": of_cloud.tolist()}
    return {}


def _columns(name: str, batches: Sequence[Tensor] | None) -> dict[str, Sequence[Any]]:
    if batches is None:
        return {}
    values = torch.cat(list(batches))
    columns = values.reshape(len(values), math.prod(values.shape[1:])).unbind(dim=1)
    return {f"{name}_{k}": column.tolist() for k, column in enumerate(columns)}
