"""Charts of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import isotonic_regression

from lieattn._core.checks import check_arguments, shown
from lieattn.viz._draw import COLORS, FAINT, GRAY, INK, MARKERS, blank_figure, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def accuracy_by_angle(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw accuracy against the angle by which the test set is rotated, with one labeled line for each entry.

    ``curves`` maps the name of a network or group to its angles in radians, in any order, and its accuracies in [0, 1].
    """
    check_arguments(accuracy_by_angle, locals())
    lines = {}
    for name, (angles, accuracies) in _curves(curves, "angles", "accuracies").items():
        lines[name] = np.rad2deg(angles), 100 * accuracies
        if not ((accuracies >= 0) & (accuracies <= 1)).all():
            raise ValueError(f"curves[{name!r}]: expected finite angles and accuracies in [0, 1]")
    from matplotlib.ticker import MultipleLocator

    figure, axes = _labeled_lines("rotation of the test set (degrees)", "accuracy (%)", lines, ylim=(0, 102))
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


def error_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str, ylabel: str, *, log: bool = False
) -> Figure:
    """Draw errors on a logarithmic axis against a number or a time, with one labeled line for each entry.

    ``curves`` maps the name of a method to the places where it was measured, in any order, and its errors; an error of
    0 is drawn at 1e-17. ``xlabel`` and ``ylabel`` are the names of both quantities. With ``log`` the axis of places is
    also logarithmic, and places must be positive.
    """
    check_arguments(error_curves, locals())
    lines = {}
    for name, (places, errors) in _curves(curves, "places", "errors").items():
        if not (errors >= 0).all():
            raise ValueError(f"curves[{name!r}]: expected errors of at least 0, got {errors.min():g}")
        if log and not (places > 0).all():
            raise ValueError(f"curves[{name!r}]: expected positive places on a logarithmic axis, got {places.min():g}")
        lines[name] = (places, np.maximum(errors, 1e-17))
    figure, axes = _labeled_lines(xlabel, ylabel, lines, log=("x", "y") if log else ("y",))
    from matplotlib.ticker import MaxNLocator, NullFormatter

    ticks = sorted({float(place) for places, _ in lines.values() for place in places})
    if log:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif all(tick.is_integer() for tick in ticks):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1, steps=[1, 2, 4, 10]))
    return figure


def charts(xlabels: Sequence[str], width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of a size in inches with charts side by side.

    They have faint horizontal lines, and no frame at the top and right.
    """
    figure = blank_figure(width, height)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    charts: list[Axes] = list(figure.subplots(1, len(xlabels), squeeze=False)[0])
    for axes, xlabel in zip(charts, xlabels, strict=True):
        axes.set_xlabel(xlabel, size=9, color=INK)
        axes.tick_params(labelsize=8, color=GRAY, labelcolor=INK, which="both")
        axes.grid(axis="y", color=FAINT, linewidth=0.6, which="both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, charts


def _labeled_lines(
    xlabel: str,
    ylabel: str,
    lines: Mapping[str, tuple[Any, Any]],
    ylim: tuple[float, float] | None = None,
    log: Sequence[str] = (),
) -> tuple[Figure, Axes]:
    """Draw lines with their names at their right ends, moved apart if they would overlap.

    ``log`` contains the names of the logarithmic axes.
    """
    figure, (axes,) = charts([xlabel], 4.85 + 0.1 * max(map(len, lines)), 3.4)
    axes.set_ylabel(ylabel, size=9, color=INK)
    axes.set(**{f"{axis}scale": "log" for axis in log})
    ends = []
    for number, (name, (x, y)) in enumerate(lines.items()):
        style = style_of(number)
        axes.plot(x, y, **style, markersize=3.5, markevery=max(1, len(x) // 25), linewidth=1.4, clip_on=False)
        ends.append((float(y[np.isfinite(y)][-1]), name, style["color"]))
    axes.set_ylim(axes.get_ylim() if ylim is None else ylim)
    ends.sort(key=lambda end: end[0])
    heights = (axes.transData - axes.transAxes).transform([(axes.get_xlim()[0], height) for height, _, _ in ends])
    places = _apart(heights[:, 1].tolist(), 0.065)
    for place, (_, name, color) in zip(places, ends, strict=True):
        axes.text(1.03, place, name, transform=axes.transAxes, color=color, size=9, va="center", weight="bold")
    return figure, axes


def _apart(places: Sequence[float], gap: float) -> Iterable[float]:
    """Move ascending places in [0, 1] as little as possible (least squares) so that they are at least a gap apart."""
    shifts = gap * np.arange(len(places))
    moved: Iterable[float] = shifts + np.clip(isotonic_regression(places - shifts).x, 0, max(0.0, 1 - shifts[-1]))
    return moved


def style_of(number: int) -> dict[str, Any]:
    """Return the color and marker of a line."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def logarithmic(axes: Axes) -> None:
    """Use a logarithmic axis for errors over several orders of magnitude, and a linear one if an error is 0."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low > 0 and high / low > 3:
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain if high / low < 30 else NullFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=7)


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
