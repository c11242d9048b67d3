"""The picture of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lieattn.viz._charts import charts, logarithmic, style_of
from lieattn.viz._draw import INK, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALIKE = 1.15  # ratio up to which numbers of parameters count as equal
_WIDE = 4  # ratio from which the axis of costs is logarithmic
_POWERS = 1e5  # number from which ticks are labeled with powers of ten
_Row = Mapping[str, Any]


def comparison(report: Mapping[str, Any]) -> Figure:
    """Draw the report of ``lieattn compare``.

    The panels show the error on the validation set during training against the measured seconds, against steps and
    against multiply-adds, with the error on the test set at the end; the test error against the number of parameters,
    if these differ; and the test error against the number of training clouds, if models were trained on several shares
    of the data. Lines and points are means over seeds, bands and bars are standard deviations. For classification the
    error is the share of wrong labels.

    ``report`` is the content of the JSON file that the command writes. ValueError is raised if it has no finished
    training.
    """
    require_matplotlib()
    rows = [row for row in report["summary"] if row["test"]["mean"] is not None]
    if not rows:
        raise ValueError("report: expected at least one finished training, got none")
    drawing = _Drawing(rows, higher_is_better=report["higher_is_better"])
    panels: dict[str, Callable[[Axes], None]] = {name: drawing.along(name) for name in drawing.costs()}
    counts = [row["parameters"] for row in drawing.whole]
    if max(counts) > _ALIKE * min(counts):
        panels["parameters"] = drawing.by_parameters
    if len({row["fraction"] for row in rows}) > 1:
        panels["training clouds"] = drawing.by_clouds
    legend = 0.5 + 0.075 * max(map(len, drawing.styles))
    figure, axes = charts(list(panels), 3.4 * len(panels) + legend, 3.55)
    axes[0].set_ylabel("error rate" if report["higher_is_better"] else report["metric"], size=9, color=INK)
    for panel, draw in zip(axes, panels.values(), strict=True):
        draw(panel)
        logarithmic(panel)
    handles = [axes[0].plot([], [], linestyle="", markersize=5, **style)[0] for style in drawing.styles.values()]
    figure.legend(handles, list(drawing.styles), loc="outside right center", fontsize=8, frameon=False)
    return figure


def _label_ticks(axes: Axes, powers: bool) -> None:
    """Use a logarithmic axis of costs, with labels at 1, 2 and 5 times powers of ten, so that they do not overlap."""

    def text(value: float, _: Any) -> str:
        digit, exponent = f"{value:.0e}".split("e")
        if digit not in "125":
            return ""
        factor = "" if digit == "1" else rf"{digit}\cdot"
        return f"${factor}10^{{{int(exponent)}}}$" if powers else f"{value:g}"

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(text)
    axes.xaxis.set_minor_formatter(text)


@dataclass(frozen=True)
class _Drawing:
    """Drawing of the rows of a summary. Each row is a model that was trained on a share of the data."""

    rows: Sequence[_Row]
    higher_is_better: bool

    @property
    def styles(self) -> dict[str, dict[str, Any]]:
        """Color and marker of each model."""
        return {name: style_of(number) for number, name in enumerate(dict.fromkeys(row["model"] for row in self.rows))}

    @property
    def whole(self) -> list[_Row]:
        """The rows of the largest share of the data."""
        largest = max(row["fraction"] for row in self.rows)
        return [row for row in self.rows if row["fraction"] == largest]

    def costs(self) -> dict[str, Callable[[_Row, float, float], float]]:
        """Return functions that compute each cost of training from a row, a number of steps, and seconds."""
        found: dict[str, Callable[[_Row, float, float], float]] = {
            "seconds of training": lambda row, steps, seconds: seconds,
            "steps": lambda row, steps, seconds: steps,
        }
        if all(row["operations"] for row in self.whole):  # earlier versions did not count them
            found["multiply-adds"] = lambda row, steps, seconds: steps * row["operations"]
        return found

    def along(self, name: str) -> Callable[[Axes], None]:
        """Return a function that draws the validation error during training against a cost, and the test error."""
        cost = self.costs()[name]

        def draw(axes: Axes) -> None:
            axes.set_title("validation during training, test at the end", size=8.5, color=INK)
            places = [[cost(row, point["steps"], point["seconds"]) for point in row["curve"]] for row in self.whole]
            for row, x in zip(self.whole, places, strict=True):
                self._band(axes, x, row)
                self._end(axes, cost(row, row["steps"]["mean"], row["seconds"]["mean"]), row)
            everywhere = [place for x in places for place in x]
            if everywhere and max(everywhere) > _WIDE * min(everywhere) > 0:
                _label_ticks(axes, powers=max(everywhere) >= _POWERS)

        return draw

    def by_parameters(self, axes: Axes) -> None:
        """Draw the test error against the number of parameters."""
        axes.set_title("test", size=8.5, color=INK)
        for row in self.whole:
            self._end(axes, row["parameters"], row)
        axes.locator_params(axis="x", nbins=5)

    def by_clouds(self, axes: Axes) -> None:
        """Draw the test error against the size of the training set."""
        axes.set(xscale="log")
        axes.set_title("test, for several sizes of the training set", size=8.5, color=INK)
        for model, style in self.styles.items():
            mine = sorted((row for row in self.rows if row["model"] == model), key=lambda row: row["clouds"])
            means = self._errors([row["test"]["mean"] for row in mine])
            axes.plot([row["clouds"] for row in mine], means, color=style["color"], linewidth=1.1, alpha=0.7)
            for row in mine:
                self._end(axes, row["clouds"], row)
        sizes = sorted({row["clouds"] for row in self.rows})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()

    def _errors(self, values: Any) -> Any:
        return 1 - np.asarray(values, float) if self.higher_is_better else np.asarray(values, float)

    def _end(self, axes: Axes, x: float, row: _Row) -> None:
        spread = row["test"]["std"] or 0.0  # a single seed has no standard deviation
        style = {"markersize": 5, "linewidth": 1.2, "capsize": 2, **self.styles[row["model"]]}
        axes.errorbar(x, float(self._errors(row["test"]["mean"])), yerr=spread, **style)

    def _band(self, axes: Axes, places: Sequence[float], row: _Row) -> None:
        """Draw a line through the means of a curve, and a band of one standard deviation to both sides."""
        style, means = self.styles[row["model"]], self._errors([point["mean"] for point in row["curve"]])
        spread = np.nan_to_num(np.asarray([point["std"] for point in row["curve"]], float))  # NaN for a single seed
        axes.plot(places, means, **{"markersize": 2.5, "linewidth": 1.1, "alpha": 0.7, **style})
        low = np.maximum(means - spread, 0.2 * means)  # a logarithmic axis cannot show negative numbers
        axes.fill_between(places, low, means + spread, color=style["color"], alpha=0.13, linewidth=0)
