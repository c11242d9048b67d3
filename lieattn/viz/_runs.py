"""Pictures of a training: learning curves, or predictions beside what is true."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lieattn._core.checks import check_arguments
from lieattn.viz._charts import charts, line_style, plain_chart
from lieattn.viz._draw import COLORS, GRAY, INK, blank_figure, color_bar, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PER_ROW = 4  # charts side by side
_NAMED = 30  # classes up to which ticks have their names, and cells their numbers
_OTHERS = re.compile(r"(iou_\d+|.*_step)$")  # logged numbers without a chart


def run_pictures(path: str | Path) -> dict[str, Figure]:
    """Draw the run of ``lieattn fit`` in a folder, or a table that ``lieattn predict`` wrote.

    The pictures by name are ``learning_curves`` of the numbers that were logged, over all parts of a training that was
    continued; and for each table of predictions with a column of true values the matrix of confusion of classes,
    ``predictions``, or the predicted numbers against the true ones, ``predictions_NAME``. ValueError is raised if there
    is nothing to draw.
    """
    check_arguments(run_pictures, locals())
    require_matplotlib()
    path = Path(path)
    tables = sorted(path.glob("predictions*.csv")) if path.is_dir() else [path]
    history = _history(sorted(path.glob("csv/version_[0-9]*/metrics.csv"), key=_version)) if path.is_dir() else {}
    found = {"learning_curves": _learning_curves(history)} if history else {}
    for table in tables:
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if rows and {"true", "predicted"} <= rows[0].keys():
            found[table.stem] = _confusion(rows)
        elif rows and (pairs := [name for name in rows[0] if name.startswith("true_")]):
            found[table.stem] = _parity(rows, pairs)
    if not found:
        wanted = "csv/version_*/metrics.csv, or predictions*.csv with columns of true values"
        raise ValueError(f"path: expected the folder of a run with {wanted}, or such a table, got {path}")
    return found


def _version(path: Path) -> int:
    return int(path.parent.name.removeprefix("version_"))


def _history(parts: Sequence[Path]) -> dict[str, list[tuple[float, float]]]:
    """Steps and values of all logged numbers. A part replaces what earlier parts logged from its first step on.

    Parts that are no training, such as those of ``lieattn validate``, are left out.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        with part.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        logged = {
            name: [(float(row["step"]) + 1, float(row[name])) for row in rows if row[name]]
            for name in (rows[0] if rows else ())
        }
        names = [name for name in logged if name.startswith(("train/", "val/")) and logged[name]]
        if not any(name.startswith("train/") for name in names):
            continue
        first = min(logged[name][0][0] for name in names)
        found = {name: [pair for pair in pairs if pair[0] < first] for name, pairs in found.items()}
        for name in names:
            found.setdefault(name.removesuffix("_epoch"), []).extend(logged[name])
    return {name: pairs for name, pairs in found.items() if pairs}


def _learning_curves(history: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """A chart for each quantity, with a line for the training set and one for the validation set."""
    kinds = [name.partition("/")[2] for name in history]
    kinds = [kind for kind in dict.fromkeys(kinds) if not _OTHERS.match(kind)][:_PER_ROW]
    figure, axes = charts(["step"] * len(kinds), 3.1 * len(kinds) + 0.4, 2.9)
    for chart, kind in zip(axes, kinds, strict=True):
        chart.set_ylabel(kind.replace("_", " "), size=9, color=INK)
        for number, stage in enumerate(("train", "val")):
            if pairs := history.get(f"{stage}/{kind}"):
                x, y = np.array(pairs).T
                chart.plot(x, y, **line_style(number), markersize=3, linewidth=1.3, label=stage)
        values = np.array([value for stage in ("train", "val") for _, value in history.get(f"{stage}/{kind}", [])])
        if (values > 0).all() and values.max() > 20 * values.min():
            chart.set_yscale("log")
        chart.legend(frameon=False, fontsize=8)
    return figure


def _confusion(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Share of the labels of each class that is predicted as each class, without labels that are no class."""
    from matplotlib.colors import Normalize

    number = sum(name.startswith("probability_") for name in rows[0])
    pairs = [(int(row["true"]), int(row["predicted"])) for row in rows]
    counts = np.zeros((number, number))
    for true, predicted in pairs:
        if 0 <= true < number:
            counts[true, predicted] += 1
    names = [str(label) for label in range(number)]
    for row in rows:
        for kind in ("true", "predicted"):
            if row.get(f"{kind}_class"):
                names[int(row[kind])] = row[f"{kind}_class"]
    side = min(8.0, 2.6 + 0.34 * number)
    figure = blank_figure(side + 0.7, side, "constrained")
    axes, norm = figure.subplots(), Normalize(0, 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", norm=norm)
    if number <= _NAMED:
        axes.set_xticks(range(number), names, rotation=90, size=7)
        axes.set_yticks(range(number), names, size=7)
        for (true, predicted), count in np.ndenumerate(counts):
            if count:
                color = "white" if shares[true, predicted] > 0.5 else INK
                axes.text(predicted, true, f"{count:g}", ha="center", va="center", size=6, color=color)
    right = counts.trace() / max(counts.sum(), 1)
    axes.set_title(f"{100 * right:.1f} % of {counts.sum():g} labels are right", size=9, color=INK)
    axes.set_xlabel("predicted class", size=9, color=INK)
    axes.set_ylabel("true class", size=9, color=INK)
    color_bar(figure, "Blues", norm, "share of the true class", ax=axes, shrink=0.8)
    return figure


def _parity(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> Figure:
    """Predicted against true numbers, a chart for all components of a target."""
    target = names[0].removeprefix("true_").rpartition("_")[0]
    arrays: list[Any] = []
    for kind in ("true_", ""):
        arrays.append(np.array([[float(row[kind + name.removeprefix("true_")]) for name in names] for row in rows]).T)
    figure = blank_figure(3.8, 3.6, "constrained")
    axes = figure.subplots()
    plain_chart(axes, f"true {target}")
    known = np.isfinite(arrays[0])
    if known.any():
        ends = [arrays[0][known].min(), arrays[0][known].max()]
        axes.plot(ends, ends, color=GRAY, linewidth=0.8)
    for number, (true, predicted) in enumerate(zip(*arrays, strict=True)):
        color = COLORS[number % len(COLORS)]
        axes.plot(true, predicted, ".", markersize=3, alpha=0.6, color=color, label=f"component {number}")
    error = np.abs(arrays[0] - arrays[1])[known].mean() if known.any() else np.nan
    axes.set_title(f"mean absolute error {error:.4g}", size=9, color=INK)
    axes.set_ylabel(f"predicted {target}", size=9, color=INK)
    if len(names) > 1:
        axes.legend(frameon=False, fontsize=7)
    return figure
