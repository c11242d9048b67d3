"""Results of comparisons."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import platform
import shutil
import statistics
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import torch

from lieattn._core.messages import aligned, table
from lieattn._core.messages import page as html_page
from lieattn._core.values import with_finite
from lieattn.compare._settings import BudgetSettings, Cell, Settings
from lieattn.io import digest_of_json, replace_text

Record = dict[str, Any]
"""The results of a finished cell, as plain values only."""

_BUSY = 0.7  # share of the elapsed seconds that one thread computes on a machine without other work, with a margin
_CLOCK = "`--budget.clock processor` counts seconds of the processor instead"
_WIDTH = 120
_KINDS = {"own": "error own", "rotations": "error SO(d)", "reflections": "error O(d)"}
_RESULTS = "Means and standard deviations over seeds, with the best weights of the validation."
_POINTS = (0.1, 0.25, 0.5, 1.0)  # shares of the budget at which the tables show the validation
_MATCHED = {
    "parameters": "number of parameters",
    "seconds": "time of a training step",
    "operations": "number of multiply-adds in a training step",
}
_SHARES = "Validation after shares of the budget:"
_ERRORS = (
    "Equivariance errors are relative, and the largest over elements and seeds, before -> after training. The elements "
    "are those of the model's own group, rotations, and reflections."
)
_COUNTED = (
    "Seconds are those of forward passes, backward passes and updates, without preparation of data and batches, "
    "compilation, validation and checkpoints."
)


class CellStore:
    """The folder ``cells`` of a comparison.

    Each finished cell has a file ``NAME.json`` with its record, and with the key of the settings with which it was
    made. While a cell is in progress, the folder ``NAME`` contains its last checkpoint; afterwards, its best weights.
    ``warn`` is called with a message if a file is damaged or belongs to other settings.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder / "cells"
        self.warn = warn

    def load(self, cell: Cell, key: str) -> Record | None:
        """Return the record of a cell; None if the record is missing or damaged, or belongs to other settings."""
        path = self.folder / f"{cell.name}.json"
        if not path.is_file():
            return None
        problem = ""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            record: Record = content["record"]
            if content["digest"] != digest_of_json(record):
                problem = "is damaged (the record differs from what was written)"
            elif content["key"] != key or Cell(record["model"], record["fraction"], record["seed"]) != cell:
                problem = "was made with other settings"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"is damaged (it was not written by `lieattn compare`: {type(error).__name__}: {error})"
        if problem:
            self.warn(f"{path} {problem}: the cell is run again")
            return None
        return record

    def save(self, cell: Cell, key: str, record: Record) -> None:
        """Write the record of a finished cell, and remove its files of progress except the best weights."""
        plain = with_finite(record)
        content = {"key": key, "record": plain, "digest": digest_of_json(plain)}
        write_json(self.folder / f"{cell.name}.json", content)
        for name in ("last.ckpt", "key"):
            (self.folder / cell.name / name).unlink(missing_ok=True)

    def progress(self, cell: Cell, key: str) -> Path:
        """Return the folder of a cell in progress; it is emptied if its content belongs to other settings."""
        folder = self.folder / cell.name
        mark = folder / "key"
        if folder.exists() and (not mark.is_file() or mark.read_bytes() != key.encode()):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.is_file():
            replace_text(mark, key)
        return folder


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    replace_text(path, json.dumps(with_finite(content), indent=2, allow_nan=False) + "\n")


def report(settings: Settings, records: Sequence[Record]) -> dict[str, Any]:
    """Return the content of the JSON file: the records, and a summary for each model and share of the data.

    The values are plain, with None for NaN and infinity.
    """
    groups = {(fraction, model): list[Record]() for fraction in settings.fractions for model in settings.models}
    for record in records:
        groups[record["fraction"], record["model"]].append(record)
    monitor, mode = records[0]["monitor"]
    metric = monitor.removeprefix("val/")
    budget = {name: getattr(settings.budget, name) for name in ("steps", "seconds", "clock")}
    content = {
        "metric": metric,
        "quantity": _quantity(metric, records[0].get("target")),
        "higher_is_better": mode == "max",
        "budget": {name: value for name, value in budget.items() if value not in (None, "wall")},
        "evaluations": settings.budget.evaluations,
        "match": dataclasses.asdict(settings.match),
        "counted": _COUNTED,
        "environment": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        "summary": [_summary(metric, found, settings.budget) for found in groups.values() if found],
        "cells": list(records),
    }
    return cast(dict[str, Any], with_finite(content))


def tables(content: dict[str, Any]) -> str:
    """Return the tables as aligned text: results for each share of the data, validations, costs and equivariance."""
    parts = _parts(content)
    return "\n\n".join(textwrap.fill(part, _WIDTH) if isinstance(part, str) else aligned(part) for part in parts)


def page(content: dict[str, Any], picture: bytes | None = None) -> str:
    """Return the tables of :func:`tables` as a self-contained HTML page, with the ``picture`` (PNG) if one is given."""
    metric, budget, environment = content["metric"], content["budget"], content["environment"]
    facts = {
        "Models": ", ".join(dict.fromkeys(row["model"] for row in content["summary"])),
        "Budget of each training": ", ".join(f"{name} {value}" for name, value in budget.items()),
        "Environment": ", ".join(f"{name} {value}" for name, value in environment.items()),
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    wide = "<style>.lieattn{max-width:78rem}</style>"
    shown = [f"{wide}<h1>Comparison of networks</h1>\n<dl>{listed}</dl>"]
    if picture is not None:
        source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        told = f"Validation and test, {content.get('quantity', metric)}, against what training costs"
        image = f'<img src="{source}" alt="{escape(told)}" style="width:100%;min-width:48rem;background:#fff">'
        shown.append(f'<div style="overflow-x:auto" tabindex="0">{image}</div>')
    for part in _parts(content):
        if isinstance(part, str):
            shown.append(f'<p class="idle">{escape(part)}</p>')
        else:
            rows = table(part[1:], part[0])
            shown.append(f'<div style="overflow-x:auto;white-space:nowrap;margin:1rem 0" tabindex="0">{rows}</div>')
    return html_page("Comparison of networks", "\n".join(shown))


def _parts(content: dict[str, Any]) -> list[str | list[list[str]]]:
    """Notes as texts, and tables as rows of cells, where the first row is the header."""
    metric, rows, evaluations = content["metric"], content["summary"], content["evaluations"]
    rotated = [f"rotated {metric}"] if any(row["rotated"] is not None for row in rows) else []
    whole = [row for row in rows if row["fraction"] == max(other["fraction"] for other in rows)]
    points = sorted({max(1, int(share * evaluations)) for share in _POINTS})
    results = [
        {
            "model": row["model"],
            "clouds": f"{row['clouds']} ({100 * row['fraction']:g} %)",
            "seeds": f"{row['seeds']}" + (f", {row['failed']} failed" if row["failed"] else ""),
            f"test {metric}": _spread(metric, row, row["test"]),
            **{name: _spread(metric, row, row["rotated"]) for name in rotated},
            "steps": f"{row['steps']['mean']:.0f}",
            "seconds": f"{row['seconds']['mean']:.1f}",
        }
        for row in rows
    ]
    shares = [
        {"model": row["model"]}
        | {f"{100 * part / evaluations:.3g} %": _after_share(metric, part, row) for part in points}
        for row in whole
    ]
    costs = [
        {
            "model": row["model"],
            "parameters": str(row["parameters"]),
            "multiply-adds/step": f"{row['operations']:.3g}",
            "s/step": _number(row["seconds_per_step"]),
            "chosen": ", ".join(f"{name} {value}" for name, value in row["chosen"].items()),
            "train clouds/s": _number(row["train_clouds_per_s"]),
            "inference clouds/s": _number(row["inference_clouds_per_s"]),
            "peak MiB": _number(row["peak_memory_mib"]),
        }
        for row in whole
    ]
    errors = [
        {"model": row["model"], "group": row["group"] or ""}
        | {title: _change(kind, row) for kind, title in _KINDS.items()}
        for row in whole
    ]
    matched = f"Models with chosen arguments were matched by the {_MATCHED[content['match']['by']]}"
    remarks = f"{_RESULTS} {_COUNTED} {matched}, the others are as configured."
    slowed = {row["model"]: row["processor_share"] for row in rows if (row.get("processor_share") or 1.0) < _BUSY}
    if slowed and "seconds" in content["budget"] and "clock" not in content["budget"]:
        least = f"{', '.join(slowed)} had {100 * min(slowed.values()):.0f} % of a core during their seconds"
        remarks += f" Other programs ran: {least}. Their steps are those of a slower machine; {_CLOCK}."
    first, second, third, fourth = (
        [list(found[0]), *(list(row.values()) for row in found)] for found in (results, shares, costs, errors)
    )
    return [first, remarks, _SHARES, second, third, fourth, _ERRORS]


def _summary(metric: str, records: list[Record], budget: BudgetSettings) -> Record:
    done, first = [one for one in records if one["failed"] is None], records[0]
    kept = ("model", "family", "fraction", "clouds", "parameters", "chosen", "group", "guarantee")
    summary = {name: first.get(name) for name in kept} | {"seeds": len(records), "failed": len(records) - len(done)}
    summary["test"] = _statistics([one["metrics"][metric] for one in done])
    rotated = [one["rotated_metrics"][metric] for one in done if "rotated_metrics" in one]
    summary["rotated"] = _statistics(rotated) if rotated else None
    others = sorted({name for one in done for name in one["metrics"]} - {metric})
    summary["other_metrics"] = {name: _statistics([one["metrics"][name] for one in done]) for name in others}
    for name in ("steps", "seconds"):
        summary[name] = _statistics([one[name] for one in records])
    summary["seconds_per_step"] = sum(one["seconds"] for one in records) / max(1, sum(one["steps"] for one in records))
    used = [(one.get("processor_seconds") or math.nan) / max(one["seconds"], 1e-9) for one in records]
    summary["processor_share"] = min(used) if all(one["device"] == "cpu" for one in records) else math.nan
    summary["operations"] = round(statistics.fmean(one["operations"] for one in records))
    summary["curve"] = _curve(done, budget)
    for name in ("train_clouds_per_s", "inference_clouds_per_s", "peak_memory_mib"):
        values = [one[name] for one in done if one[name] is not None and math.isfinite(one[name])]
        summary[name] = statistics.fmean(values) if values else math.nan
    summary["equivariance"] = {
        when: {kind: _largest([one["equivariance"][when][kind] for one in done]) for kind in _KINDS}
        for when in ("before", "after")
    }
    return summary


def _quantity(metric: str, target: str | None) -> str:
    """Return what the axis of errors in the picture shows, and its unit; ``target`` has the name and unit, if known."""
    words = {"accuracy": "share of wrong labels", "error": f"mean absolute error of {target or 'y'}"}
    words["balanced_accuracy"] = f"{words['accuracy']}, mean over the classes"
    return words.get(metric, metric)


def _curve(records: list[Record], budget: BudgetSettings) -> list[dict[str, float]]:
    """Return means over seeds of steps, seconds and validation, and its deviation, after each share of the budget."""
    found = []
    for record in records:
        total = budget.steps or budget.seconds or 1
        spent = [row[0 if budget.steps else 1] for row in record["history"]]
        # The last step may exceed the seconds of the budget, and a slow step may skip a validation. The order of the
        # operations is that of the training, so that their rounding is the same.
        parts = [min(budget.evaluations, int(number * budget.evaluations / total)) for number in spent]
        found.append(dict(zip(parts, record["history"], strict=True)))
    shared = sorted(set.intersection(*map(set, found))) if found else []
    curve = []
    for part in shared:
        steps, seconds, values = zip(*(history[part] for history in found), strict=True)
        means = {"steps": statistics.fmean(steps), "seconds": statistics.fmean(seconds)}
        curve.append({"part": part, **means, **_statistics(values)})
    return curve


def _statistics(values: Sequence[float | None]) -> dict[str, float]:
    """Return the mean and sample standard deviation of values, or NaN if there are too few or one is None."""
    known = [value for value in values if value is not None]  # files of cells have None for NaN and infinity
    whole = len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if whole and known else math.nan,
        "std": statistics.stdev(known) if whole and len(known) > 1 else math.nan,
    }


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest error, or None if one is NaN, for which files of cells have None, or if there are none."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _spread(metric: str, row: Record, value: dict[str, Any] | None) -> str:
    """Return mean and deviation as text: ``"nan"`` if a measured value is not finite, ``"-"`` if none is measured."""
    if value is None or row["failed"] == row["seeds"]:
        return "-"
    mean, std = value["mean"], value["std"]
    if mean is None:
        return "nan"
    if metric.endswith("accuracy"):
        return (f"{100 * mean:.1f}" if std is None else f"{100 * mean:.1f} ± {100 * std:.1f}") + " %"
    return f"{mean:.4g}" if std is None else f"{mean:.4g} ± {std:.2g}"


def _after_share(metric: str, part: int, row: Record) -> str:
    """Return the validation after ``part`` parts of the budget as text."""
    return next((_spread(metric, row, point) for point in row["curve"] if point["part"] == part), "-")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _change(kind: str, row: Record) -> str:
    """Return the errors before and after training as text, ``"-"`` if they are not measured: there is no group."""
    if row["failed"] == row["seeds"] or (kind == "own" and row["group"] is None):
        return "-"
    before, after = (row["equivariance"][when][kind] for when in ("before", "after"))
    return " -> ".join("nan" if error is None else f"{error:.0e}" for error in (before, after))
