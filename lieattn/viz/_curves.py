"""Pictures of numbers: accuracy against the angle of the test set, quantities against the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lieattn.viz._draw import COLORS, INK, MARKERS, blank_figure, chart_axes, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def accuracy_by_angle(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw accuracy against the angle by which the test set is rotated, one labeled line an entry.

    Parameters
    ----------
    curves
        From the name of a network or group to its angles in radians, in any order, and its accuracies in [0, 1].

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If there are no curves, or one is empty, uneven, or not an accuracy.
    """
    lines = {}
    for name, (angles, accuracies) in _named("curves", curves).items():
        degrees, percent = np.rad2deg(np.asarray(angles, float)), 100 * np.asarray(accuracies, float)
        if degrees.ndim != 1 or degrees.shape != percent.shape or not len(degrees):
            raise ValueError(
                f"curves[{name!r}]: expected as many accuracies as angles and at least one, got "
                f"{percent.size} and {degrees.size}"
            )
        if not (np.isfinite(degrees).all() and ((percent >= 0) & (percent <= 100)).all()):
            raise ValueError(f"curves[{name!r}]: expected finite angles and accuracies in [0, 1]")
        order = np.argsort(degrees, kind="stable")
        lines[name] = (degrees[order], percent[order])
    figure, axes = _chart("rotation of the test set (degrees)", "accuracy (%)", lines)
    axes.set_ylim(0, 102)
    from matplotlib.ticker import MultipleLocator

    span = max(x[-1] for x, _ in lines.values()) - min(x[0] for x, _ in lines.values())
    if span > 0:
        steps = (1, 5, 15, 45, 90, 180, 360)
        axes.xaxis.set_major_locator(MultipleLocator(next((s for s in steps if span / s <= 9), span / 4)))
    _draw_lines(axes, lines)
    return figure


def training_curves(histories: Mapping[str, Sequence[float]], ylabel: str) -> Figure:
    """Draw a quantity against the epoch, one labeled line an entry.

    Parameters
    ----------
    histories
        From the name of a network or group to its values after epochs 1, 2, ...; NaN where there is none.
    ylabel
        What the values are.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If there are no histories, or one has no finite value.
    """
    lines = {}
    for name, values in _named("histories", histories).items():
        history = np.asarray(values, float)
        if history.ndim != 1 or not np.isfinite(history).any():
            raise ValueError(f"histories[{name!r}]: expected a list with a finite value, got {values!r}")
        lines[name] = (np.arange(1, len(history) + 1), history)
    figure, axes = _chart("epoch", ylabel, lines)
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    _draw_lines(axes, lines)
    return figure


def _chart(xlabel: str, ylabel: str, names: Iterable[str]) -> tuple[Figure, Axes]:
    """One pair of axes with room for the names of its lines at the right."""
    left, width, right = 0.65, 3.9, 0.3 + 0.1 * max(len(name) for name in names)
    figure = blank_figure(left + width + right, 3.4)
    axes = chart_axes(figure, left, 0.51, width, 2.72)
    axes.set_xlabel(xlabel, size=9, color=INK)
    axes.set_ylabel(ylabel, size=9, color=INK)
    return figure, axes


def _draw_lines(axes: Axes, lines: Mapping[str, tuple[Any, Any]]) -> None:
    """Lines with their names at their right ends, moved apart where they would overlap."""
    ends = {}
    for number, (name, (x, y)) in enumerate(lines.items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        axes.plot(x, y, color=color, marker=marker, markersize=3.5, linewidth=1.4, clip_on=False)
        ends[name] = (float(y[np.isfinite(y)][-1]), color)
    axes.autoscale_view()
    bottom, top = axes.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][0])
    places = _apart([(ends[name][0] - bottom) / (top - bottom) for name in names], 0.065)
    for name, place in zip(names, places, strict=True):
        color = ends[name][1]
        axes.text(1.03, place, name, transform=axes.transAxes, color=color, size=9, va="center", weight="bold")


def _apart(places: list[float], gap: float) -> list[float]:
    """Ascending places in [0, 1] moved as little as possible (least squares) to be at least a gap apart."""
    groups: list[list[float]] = []
    for index, place in enumerate(places):
        groups.append([place - index * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    room = max(0.0, 1 - (len(places) - 1) * gap)
    moved = [min(max(float(np.mean(group)), 0.0), room) for group in groups for _ in group]
    return [place + index * gap for index, place in enumerate(moved)]


def _named(argument: str, entries: Mapping[str, Any]) -> Mapping[str, Any]:
    require_matplotlib()
    if not entries:
        raise ValueError(f"{argument}: expected at least one named entry, got none")
    return entries
