"""Picture of a comparison: error against seconds, parameters, and the size of the training set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lieattn.viz._draw import COLORS, INK, MARKERS, blank_figure, chart_axes, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL, _GAP, _BOTTOM, _HEIGHT = 3.2, 0.75, 0.55, 2.7  # inches


def comparison(report: Mapping[str, Any]) -> Figure:
    """Draw the report of ``lieattn compare``.

    Panels: the error on the validation set during training, against the seconds that were counted, with the error on
    the test set at the end; the test error against the number of parameters; and, where models were trained on several
    shares of the data, against the number of clouds. Points are means over seeds, bars standard deviations. For
    classification the error is the share of wrong labels.

    Parameters
    ----------
    report
        Content of the JSON file that the command writes.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If the report has no finished training.
    """
    require_matplotlib()
    rows = [row for row in report["summary"] if row["test"]["mean"] is not None]
    if not rows:
        raise ValueError("report: expected at least one finished training, got none")
    models = list(dict.fromkeys(row["model"] for row in rows))
    styles: dict[str, Any] = {
        model: {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        for number, model in enumerate(models)
    }
    largest = max(row["fraction"] for row in rows)
    final = [row for row in rows if row["fraction"] == largest]
    several = len({row["fraction"] for row in rows}) > 1
    figure, axes = _panels(3 if several else 2, models)
    _draw_training(axes[0], report, final, styles)
    _draw_points(axes[1], report, final, styles)
    if several:
        _draw_efficiency(axes[2], report, rows, styles)
    label = "error rate" if report["higher_is_better"] else report["metric"]
    axes[0].set_ylabel(label, size=9, color=INK)
    for panel in axes:
        _logarithmic(panel)
    handles = [axes[1].plot([], [], linestyle="", markersize=5, **styles[model])[0] for model in models]
    right = axes[-1].get_position().x1
    figure.legend(handles, models, loc="center left", bbox_to_anchor=(right + 0.01, 0.55), fontsize=8, frameon=False)
    return figure


def _panels(count: int, models: Sequence[str]) -> tuple[Figure, list[Axes]]:
    legend = 0.5 + 0.075 * max(len(model) for model in models)
    across, down = count * (_PANEL + _GAP) + 0.1 + legend, _BOTTOM + _HEIGHT + 0.3
    figure = blank_figure(across, down)
    lefts = [0.7 + number * (_PANEL + _GAP) for number in range(count)]
    return figure, [chart_axes(figure, left, _BOTTOM, _PANEL, _HEIGHT) for left in lefts]


def _draw_training(axes: Axes, report: Mapping[str, Any], rows: list[Any], styles: Mapping[str, Any]) -> None:
    axes.set_xlabel("seconds of training", size=9, color=INK)
    axes.set_title("validation during training, test at the end", size=8.5, color=INK)
    for row in rows:
        histories = [
            np.asarray(cell["history"], float)
            for cell in report["cells"]
            if (cell["model"], cell["fraction"]) == (row["model"], row["fraction"]) and cell["failed"] is None
        ]
        # Seeds may differ in the number of validations where these follow the clock.
        shared = min(len(history) for history in histories)
        mean = np.mean([history[:shared] for history in histories], axis=0)
        style = styles[row["model"]]
        axes.plot(mean[:, 1], _errors(report, mean[:, 2]), **style, markersize=3, linewidth=1.1, alpha=0.7)
        _point(axes, row["seconds"]["mean"], row, report, styles)


def _draw_points(axes: Axes, report: Mapping[str, Any], rows: list[Any], styles: Mapping[str, Any]) -> None:
    axes.set_xlabel("parameters", size=9, color=INK)
    axes.set_title("test", size=8.5, color=INK)
    for row in rows:
        _point(axes, row["parameters"], row, report, styles)
    axes.locator_params(axis="x", nbins=5)


def _draw_efficiency(axes: Axes, report: Mapping[str, Any], rows: list[Any], styles: Mapping[str, Any]) -> None:
    axes.set_xlabel("training clouds", size=9, color=INK)
    axes.set_title("test, by the size of the training set", size=8.5, color=INK)
    axes.set_xscale("log")
    for model, style in styles.items():
        mine = sorted((row for row in rows if row["model"] == model), key=lambda row: row["clouds"])
        errors = [float(_errors(report, row["test"]["mean"])) for row in mine]
        axes.plot([row["clouds"] for row in mine], errors, color=style["color"], linewidth=1.1, alpha=0.7)
        for row in mine:
            _point(axes, row["clouds"], row, report, styles)
    sizes = sorted({row["clouds"] for row in rows})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()


def _point(axes: Axes, x: float, row: Any, report: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
    value = row["test"]
    axes.errorbar(
        x,
        float(_errors(report, value["mean"])),
        yerr=value["std"] or 0.0,  # of a single seed there is none
        **styles[row["model"]],
        markersize=5,
        linewidth=1.2,
        capsize=2,
    )


def _errors(report: Mapping[str, Any], values: Any) -> Any:
    found = np.asarray(values, float)
    return 1 - found if report["higher_is_better"] else found


def _logarithmic(axes: Axes) -> None:
    """Errors over several orders of size on a logarithmic axis; one that is 0 needs the linear one."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low > 0 and high / low > 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        minor = FuncFormatter(lambda value, _: f"{value:g}") if high / low < 30 else NullFormatter()
        axes.yaxis.set_minor_formatter(minor)
        axes.tick_params(axis="y", which="minor", labelsize=7)
