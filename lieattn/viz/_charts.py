"""Charts of results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import isotonic_regression

from lieattn._core.checks import check_arguments, shown
from lieattn.viz._draw import COLORS, FAINT, GRAY, INK, MARKERS, blank_figure, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDING = 1e-17  # errors of 0 on a logarithmic axis
_ALIKE = 1.15  # ratio up to which numbers of parameters count as equal
_WIDE = 4  # ratio from which the axis of costs is logarithmic
_HOLLOW: dict[str, Any] = {"markerfacecolor": "white"}
_POWERS = 1e5  # number from which ticks are labeled with powers of ten

# --- lines --------------------------------------------------------------------------------------------------------


def accuracy_by_angle(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str = "") -> Figure:
    """Draw accuracy against the angle by which the test set is rotated, with one named line for each entry.

    ``curves`` maps the name of a network or group to its angles in radians, in any order, and its accuracies in [0, 1].
    Names are written along the lines, where there is room.
    """
    check_arguments(accuracy_by_angle, locals())
    lines = {}
    for name, (angles, accuracies) in _curves(curves, "angles", "accuracies").items():
        lines[name] = np.rad2deg(angles), 100 * accuracies
        if not ((accuracies >= 0) & (accuracies <= 1)).all():
            raise ValueError(f"curves[{name!r}]: expected finite angles and accuracies in [0, 1]")
    from matplotlib.ticker import MultipleLocator

    figure, axes = _labeled_lines(
        "rotation of the test set (degrees)", "accuracy (%)", lines, ylim=(0, 112), beside=False
    )
    axes.set_title(title, size=10, color=INK)
    axes.set_yticks(range(0, 101, 20))
    axes.spines["left"].set_bounds(0, 100)
    _write_along(axes, lines)
    span = max(x[-1] for x, _ in lines.values()) - min(x[0] for x, _ in lines.values())
    if span > 0:
        steps = (1, 5, 15, 45, 90, 180, 360)
        axes.xaxis.set_major_locator(MultipleLocator(next((s for s in steps if span / s <= 9), span / 4)))
    return figure


def training_curves(histories: Mapping[str, Sequence[float]], ylabel: str) -> Figure:
    """Draw a quantity against the epoch, with one labeled line for each entry.

    ``histories`` maps the name of a network or group to the values after epochs 1, 2, ..., with NaN for missing ones;
    ``ylabel`` is the name of the quantity.
    """
    check_arguments(training_curves, locals())
    lines = {}
    for name, values in _at_least_one("histories", histories).items():
        history = _numbers(f"histories[{name!r}]", values)
        if history.ndim != 1 or not np.isfinite(history).any():
            raise ValueError(f"histories[{name!r}]: expected a list with a finite value, got {values!r}")
        lines[name] = (np.arange(1, len(history) + 1), history)
    from matplotlib.ticker import MaxNLocator

    figure, axes = _labeled_lines("epoch", ylabel, lines)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    return figure


def error_curves(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str, ylabel: str) -> Figure:
    """Draw errors on a logarithmic axis against a number or a time, with one labeled line for each entry.

    ``curves`` maps the name of a method to the places where it was measured, in any order, and its errors; an error of
    0 is drawn at 1e-17. ``xlabel`` and ``ylabel`` are the names of both quantities.
    """
    check_arguments(error_curves, locals())
    lines = {}
    for name, (places, errors) in _curves(curves, "places", "errors").items():
        if not (errors >= 0).all():
            raise ValueError(f"curves[{name!r}]: expected errors of at least 0, got {errors.min():g}")
        lines[name] = (places, np.maximum(errors, ROUNDING))
    figure, axes = _labeled_lines(xlabel, ylabel, lines, scale="log")
    if all(float(place).is_integer() for places, _ in lines.values() for place in places):
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1, steps=[1, 2, 4, 10]))
    return figure


def _labeled_lines(
    xlabel: str,
    ylabel: str,
    lines: Mapping[str, tuple[Any, Any]],
    ylim: tuple[float, float] | None = None,
    scale: str = "linear",
    beside: bool = True,
) -> tuple[Figure, Axes]:
    """Draw lines, with their names ``beside`` their right ends, moved apart if they would overlap, or without names."""
    figure, (axes,) = charts([xlabel], 4.85 + 0.1 * max(map(len, lines)) * beside, 3.4)
    axes.set_ylabel(ylabel, size=9, color=INK)
    axes.set_yscale(scale)
    ends = []
    for number, (name, (x, y)) in enumerate(lines.items()):
        style = line_style(number)
        axes.plot(x, y, **style, markersize=3.5, markevery=max(1, len(x) // 25), linewidth=1.4, clip_on=False)
        ends.append((float(y[np.isfinite(y)][-1]), name, style["color"]))
    axes.set_ylim(axes.get_ylim() if ylim is None else ylim)
    if not beside:
        return figure, axes
    ends.sort(key=lambda end: end[0])
    heights = (axes.transData - axes.transAxes).transform([(axes.get_xlim()[0], height) for height, _, _ in ends])
    # The least squares of shifts for which neighbors are at least a gap apart.
    gaps = 0.065 * np.arange(len(ends))
    places = gaps + np.clip(isotonic_regression(heights[:, 1] - gaps).x, 0, max(0.0, 1 - gaps[-1]))
    for place, (_, name, color) in zip(places, ends, strict=True):
        axes.text(1.03, place, name, transform=axes.transAxes, color=color, size=9, va="center", weight="bold")
    return figure, axes


def _write_along(axes: Axes, lines: Mapping[str, tuple[Any, Any]]) -> None:
    """Write the name of each line above or below it, where the other lines and the names leave most room."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    high = 0.07 * (top - bottom)
    places = np.linspace(left, right, 201)
    heights = {name: np.interp(places, x, y) for name, (x, y) in lines.items()}
    taken: list[tuple[float, float, float]] = []  # ends of a name, and its height
    for number, (name, own) in enumerate(heights.items()):
        half = 1 + int(1.2 * len(name))  # places on each side of the middle of the name
        others = [other for key, other in heights.items() if key != name]
        best = (-np.inf, 0.0, 0.0)
        for middle, side in itertools.product(range(half, len(places) - half), (1, -1)):
            span = slice(middle - half, middle + half + 1)
            first, last = places[span][[0, -1]]
            edge, steep = (side * own[span]).max(), np.ptp(own[span])
            above = [side * other[span] for other in others]
            above += [side * y + np.array([-high, high]) / 2 for a, b, y in taken if a < last and b > first]
            # What ends below the line, or hardly above it, is not in the way; what crosses the name leaves no room.
            ceiling = min((y.min() for y in above if y.max() > edge + high / 2), default=np.inf)
            room = min(ceiling, side * (top if side == 1 else bottom)) - edge
            alone = min((abs(other[middle] - own[middle]) for other in others), default=high)
            score = min(room, 1.5 * high) + min(alone, high) - steep / 2
            best = max(best, (score, places[middle], side * (edge + 0.7 * high)), key=lambda one: one[0])
        _, x, y = best
        reach = half * (places[1] - places[0])
        taken.append((x - reach, x + reach, y))
        axes.text(x, y, name, ha="center", va="center", color=line_style(number)["color"], size=9, weight="bold")


def charts(xlabels: Sequence[str], width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of a size in inches with charts side by side."""
    figure = blank_figure(width, height, "constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr,call-arg]
    charts: list[Axes] = list(figure.subplots(1, len(xlabels), squeeze=False)[0])
    for axes, xlabel in zip(charts, xlabels, strict=True):
        plain_chart(axes, xlabel)
    return figure, charts


def plain_chart(axes: Axes, xlabel: str) -> None:
    """Give a chart faint horizontal lines, and no frame at the top and right."""
    axes.set_xlabel(xlabel, size=9, color=INK)
    axes.tick_params(labelsize=8, color=GRAY, labelcolor=INK, which="both")
    axes.grid(axis="y", color=FAINT, linewidth=0.6, which="both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def line_style(number: int) -> dict[str, Any]:
    """Return the color and marker of a line."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def _styles(families: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the styles of networks, by the names of their families: a marker each, and a color for each family.

    Networks of a family have shades of its color. If all are of one family, each has a color of its own.
    """
    from matplotlib.colors import to_hex, to_rgb

    names, kinds = list(families), list(dict.fromkeys(families.values()))
    if len(kinds) == 1 and len(names) <= len(COLORS):
        return {name: line_style(number) for number, name in enumerate(names)}
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        alike = [other for other in names if families[other] == families[name]]
        white = 0.5 * alike.index(name) / max(1, len(alike) - 1)
        red, green, blue = (
            part + white * (1 - part) for part in to_rgb(COLORS[kinds.index(families[name]) % len(COLORS)])
        )
        found[name] = {"color": to_hex((red, green, blue)), "marker": MARKERS[number % len(MARKERS)]}
    return found


def _at_least_one(argument: str, entries: Mapping[str, Any]) -> Mapping[str, Any]:
    require_matplotlib()
    if not entries:
        raise ValueError(f"{argument}: expected at least one named entry, got none")
    return entries


def _curves(curves: Mapping[str, Any], places: str, values: str) -> dict[str, tuple[Any, Any]]:
    """Return arrays of ascending places and of the values at these places, for each name."""
    found = {}
    for name, curve in _at_least_one("curves", curves).items():
        if not isinstance(curve, tuple | list) or len(curve) != 2:
            raise TypeError(f"curves[{name!r}]: expected a pair of {places} and {values}, got {shown(curve)}")
        x, y = (_numbers(f"curves[{name!r}]", part) for part in curve)
        if x.ndim != 1 or x.shape != y.shape or not len(x):
            expected = f"expected as many {values} as {places} and at least one"
            raise ValueError(f"curves[{name!r}]: {expected}, got {y.size} and {x.size}")
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise ValueError(f"curves[{name!r}]: expected finite {places} and {values}")
        order = np.argsort(x, kind="stable")
        found[name] = (x[order], y[order])
    return found


def _numbers(argument: str, values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return values as an array."""
    try:
        return np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument}: expected a list of numbers, got {shown(values)}") from error


# --- comparisons --------------------------------------------------------------------------------------------------


def comparison(report: Mapping[str, Any]) -> Figure:
    """Draw the report of ``lieattn compare``.

    The panels show the error on the validation set during training against the measured seconds, against steps and
    against multiply-adds, with the error on the test set at the end; the test error against the number of parameters,
    if these differ; and the test error against the number of training clouds, if models were trained on several shares
    of the data. Lines and points are means over seeds, bands and bars are standard deviations. For classification the
    error is the share of wrong labels. If the test set was rotated too, full markers are for it, and hollow ones for
    the set as it is. Networks of one family have shades of one color, if there are several families.

    ``report`` is the content of the JSON file that the command writes. ValueError is raised if it has no finished
    training.
    """
    require_matplotlib()
    rows = [row for row in report["summary"] if row["test"]["mean"] is not None]
    if not rows:
        raise ValueError("report: expected at least one finished training, got none")
    drawing = _Comparison(rows, report["higher_is_better"])
    panels: dict[str, Callable[[Axes], None]] = {
        "seconds of training": lambda axes: drawing.along(axes, lambda row, steps, seconds: seconds),
        "steps": lambda axes: drawing.along(axes, lambda row, steps, seconds: steps),
    }
    if all(row["operations"] for row in drawing.whole):  # earlier versions did not count them
        panels["multiply-adds"] = lambda axes: drawing.along(
            axes, lambda row, steps, seconds: steps * row["operations"]
        )
    counts = [row["parameters"] for row in drawing.whole]
    if max(counts) > _ALIKE * min(counts):
        panels["parameters"] = drawing.by_parameters
    if len({row["fraction"] for row in rows}) > 1:
        panels["training clouds"] = drawing.by_clouds
    figure, axes = charts(list(panels), 3.4 * len(panels) + 0.5 + 0.075 * max(map(len, drawing.styles)), 3.55)
    quantity = report.get("quantity") or ("share of wrong labels" if drawing.rates else report["metric"])
    axes[0].set_ylabel(quantity, size=9, color=INK)
    for panel, draw in zip(axes, panels.values(), strict=True):
        draw(panel)
        _logarithmic(panel)
    entries: list[tuple[str, dict[str, Any]]] = [*drawing.styles.items()]
    if drawing.turned:
        entries += [("rotated test", {"color": GRAY, "marker": "o"}), ("unrotated test", _HOLLOW | {"color": GRAY})]
    plain: dict[str, Any] = {"linestyle": "", "markersize": 5, "marker": "o"}
    handles = [axes[0].plot([], [], **plain | style)[0] for _, style in entries]
    figure.legend(handles, [name for name, _ in entries], loc="outside right center", fontsize=8, frameon=False)
    return figure


class _Comparison:
    """Drawing of the rows of a summary. Each row is a model that was trained on a share of the data."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], rates: bool) -> None:
        self.rows, self.rates, self.turned = rows, rates, any(row.get("rotated") for row in rows)
        self.styles = _styles({row["model"]: row.get("family") or "" for row in rows})
        largest = max(row["fraction"] for row in rows)
        self.whole = [row for row in rows if row["fraction"] == largest]

    def errors(self, values: Any) -> Any:
        return 1 - np.asarray(values, float) if self.rates else np.asarray(values, float)

    def end(self, axes: Axes, x: float, row: Mapping[str, Any]) -> None:
        style = {"markersize": 5, "linewidth": 1.2, "capsize": 2, **self.styles[row["model"]]}
        tests = [(row["test"], _HOLLOW), (row["rotated"], {})] if row.get("rotated") else [(row["test"], {})]
        for test, more in tests:
            spread = test["std"] or 0.0  # a single seed has no standard deviation
            if test["mean"] is not None:
                axes.errorbar(x, float(self.errors(test["mean"])), yerr=spread, **style | more)

    def along(self, axes: Axes, cost: Callable[[Mapping[str, Any], float, float], float]) -> None:
        """Draw the validation error during training against a cost, and the test error at the end."""
        end = "rotated test" if self.turned else "test"
        axes.set_title(f"validation during training, {end} at the end", size=8.5, color=INK)
        everywhere = []
        for row in self.whole:
            style, curve = self.styles[row["model"]], row["curve"]
            places = [cost(row, point["steps"], point["seconds"]) for point in curve]
            means = self.errors([point["mean"] for point in curve])
            spread = np.nan_to_num(np.asarray([point["std"] for point in curve], float))  # NaN for a single seed
            axes.plot(places, means, **{"markersize": 2.5, "linewidth": 1.1, "alpha": 0.7, **style})
            low = np.maximum(means - spread, 0.2 * means)  # a logarithmic axis cannot show negative numbers
            axes.fill_between(places, low, means + spread, color=style["color"], alpha=0.13, linewidth=0)
            self.end(axes, cost(row, row["steps"]["mean"], row["seconds"]["mean"]), row)
            everywhere += places
        if everywhere and max(everywhere) > _WIDE * min(everywhere) > 0:
            _label_ticks(axes, powers=max(everywhere) >= _POWERS)

    def by_parameters(self, axes: Axes) -> None:
        axes.set_title("rotated test" if self.turned else "test", size=8.5, color=INK)
        for row in self.whole:
            self.end(axes, row["parameters"], row)
        axes.locator_params(axis="x", nbins=5)

    def by_clouds(self, axes: Axes) -> None:
        """Draw the test error against the size of the training set."""
        axes.set(xscale="log")
        what = "rotated test" if self.turned else "test"
        axes.set_title(f"{what}, for several sizes of the training set", size=8.5, color=INK)
        for model, style in self.styles.items():
            mine = sorted((row for row in self.rows if row["model"] == model), key=lambda row: row["clouds"])
            means = self.errors([(row.get("rotated") or row["test"])["mean"] for row in mine])
            axes.plot([row["clouds"] for row in mine], means, color=style["color"], linewidth=1.1, alpha=0.7)
            for row in mine:
                self.end(axes, row["clouds"], row)
        sizes = sorted({row["clouds"] for row in self.rows})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()


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


def _logarithmic(axes: Axes) -> None:
    """Use a logarithmic axis for errors over several orders of magnitude, and a linear one if an error is 0."""
    from matplotlib.ticker import NullFormatter

    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low > 0 and high / low > 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter((lambda value, _: f"{value:g}") if high / low < 30 else NullFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=7)
