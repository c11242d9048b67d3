"""Pictures show what was measured, for networks that are equivariant and for others."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lieattn_datasets import Digits

pytest.importorskip("matplotlib")

from lieattn import viz
from lieattn.cli import main
from lieattn.geometry import Radius
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.viz._draw import element_name, in_words


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch):
    """Make any use of pyplot, and so of a GUI or global state, fail."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def small():
    return GSANet(cyclic(4), 1, 2, channels=8, blocks=(1,), heads=2, neighborhood=Radius(1.5))


def test_pictures_in_threads_and_files(tmp_path):
    microscope = viz.Microscope(small(), Digits("test")[0], turns=2)

    def draw(number):
        return viz.save(microscope.picture("field", layer=0), tmp_path / f"made/{number}.png")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(draw, range(2))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")


def test_fonts_in_pdf_files_are_those_that_journals_accept(tmp_path):
    written = viz.save(viz.accuracy_by_angle({"one": ([0.0, 1.0], [0.5, 0.6])}), tmp_path / "chart.pdf").read_bytes()
    assert b"/TrueType" in written or b"/Type0" in written
    assert b"/Type3" not in written


def test_accuracy_by_angle():
    angles = np.deg2rad([0, 90, 45])
    figure = viz.accuracy_by_angle({"Z2": (angles, [1.0, 0.2, 0.3]), "C4": (angles, [0.9, 0.9, 0.2])}, "digits")
    (axes,) = figure.axes
    first, second = axes.lines
    np.testing.assert_allclose(first.get_xdata(), [0, 45, 90])
    np.testing.assert_allclose(first.get_ydata(), [100, 30, 20])
    np.testing.assert_allclose(second.get_ydata(), [90, 20, 90])
    assert axes.get_title() == "digits"
    assert list(axes.get_yticks()) == [0, 20, 40, 60, 80, 100]
    assert set(np.diff(axes.get_xticks())) == {15}


def test_names_are_written_along_lines_without_overlap():
    angles = np.arange(17) * math.pi / 8
    flat, bent = np.full(17, 0.95), np.where(np.arange(17) % 4 == 2, 0.55, 0.95)
    curves = {
        "flat": (angles, flat),
        "bent": (angles, bent),
        "near": (angles, flat + 0.01),
        "low": (angles, flat - 0.8),
    }
    figure = viz.accuracy_by_angle(curves)
    (axes,) = figure.axes
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == list(curves)
    assert [text.get_color() for text in axes.texts] == [line.get_color() for line in axes.lines]
    for first, second in combinations(boxes, 2):
        assert not first.overlaps(second)
    for line in axes.lines:
        points = axes.transData.transform(np.column_stack([np.linspace(0, 360, 721)] * 2))
        points[:, 1] = np.interp(points[:, 0], *axes.transData.transform(line.get_xydata()).T)
        assert not any(box.count_contains(points) for box in boxes)


def test_more_curves_than_colors_have_other_markers():
    (axes,) = viz.error_curves({str(n): ([0, 10, 20], [1.0, 0.1, 0.01]) for n in range(9)}, "steps", "error").axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 9
    assert axes.get_xscale() == "linear"
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_error_curves_in_order_on_a_logarithmic_axis():
    figure = viz.error_curves({"a": ([4, 1], [1e-3, 0.1]), "b": ([1], [0.0])}, "frames", "error")
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.1], [4, 1e-3]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    bottom, top = np.log10(axes.get_ylim())
    assert bottom < -17
    assert heights == pytest.approx({"a": (-3 - bottom) / (top - bottom), "b": (-17 - bottom) / (top - bottom)})
    for curve, told in (
        (([8], []), "as many errors as places"),
        (([], []), "as many errors as places"),
        (([8], [math.nan]), "finite places and errors"),
        (([8], [-1.0]), "errors of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=rf"curves\['a'\]: expected {told}"):
            viz.error_curves({"a": curve}, "side", "error")


def test_training_curves_and_labels_that_would_overlap():
    curves = {"C8": [2.0, 0.5], "Z2": [2.0, 0.5001, math.nan], "C4": [2.0, 0.5]}
    figure = viz.training_curves(curves, "training loss")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "training loss"
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), [1, 2])
    assert axes.get_ylim()[0] <= 0.5 < 2.0 <= axes.get_ylim()[1]
    figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 3
    for below, above in pairwise(boxes):
        assert below.y1 <= above.y0
    assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


CURVE_ERRORS = {
    "none": ({}, "curves: expected at least one named entry, got none"),
    "uneven": ({"C4": ([0.0, 1.0], [0.5])}, r"curves\['C4'\]: expected as many accuracies as angles .* got 1 and 2"),
    "empty": ({"C4": ([], [])}, r"curves\['C4'\]: expected as many accuracies as angles and at least one"),
    "percent": ({"C4": ([0.0], [97.0])}, r"curves\['C4'\]: expected finite angles and accuracies in \[0, 1\]"),
    "nan": ({"C4": ([math.nan], [0.9])}, r"curves\['C4'\]: expected finite angles"),
    "negative": ({"C4": ([0.0], [-0.1])}, r"curves\['C4'\]: expected finite angles and accuracies in \[0, 1\]"),
}


@pytest.mark.parametrize(("curves", "message"), CURVE_ERRORS.values(), ids=CURVE_ERRORS)
def test_bad_curves(curves, message):
    with pytest.raises(ValueError, match=message):
        viz.accuracy_by_angle(curves)


@pytest.mark.parametrize("history", [[], [math.nan], [[1.0]]])
def test_bad_histories(history):
    with pytest.raises(ValueError, match=r"histories\['C4'\]: expected a list with a finite value"):
        viz.training_curves({"C4": history}, "loss")


def test_without_matplotlib(monkeypatch):
    """The module can be imported; drawing functions raise an error that says what to install."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = importlib.util.spec_from_file_location("viz_without_matplotlib", viz.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    microscope = module.Microscope(small(), Digits("test")[0])
    for draw in (
        microscope.picture,
        lambda: module.accuracy_by_angle({"C4": ([0.0], [1.0])}),
        lambda: module.training_curves({"C4": [1.0]}, "loss"),
    ):
        with pytest.raises(ImportError, match=r'pip install "lieattn\[viz\]"'):
            draw()
    assert microscope.deviation() < 1e-4


def test_ticks_of_costs_do_not_overlap():
    """Within less than a decade, matplotlib would label ticks close to each other."""
    report = json.loads((Path(__file__).parents[1] / "docs" / "records" / "compare_nbody.json").read_text())
    row = report["summary"][0]
    report["summary"] = [{**row, "operations": 5.6e12 / row["steps"]["mean"]}]
    figure = viz.comparison(report)
    figure.draw_without_rendering()
    for axes in figure.axes[:3]:
        shown = [text for text in (*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)) if text.get_text()]
        low, high = axes.get_xlim()
        seen = sorted(
            (text for text in shown if low <= text.get_position()[0] <= high), key=lambda t: t.get_position()[0]
        )
        boxes = [text.get_window_extent() for text in seen]
        assert len(boxes) >= 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def summary(model, fraction, errors, **more):
    """Return a row of a report: a model with errors of two seeds on average, in two validations and in the test."""
    points = [{"steps": 10, "seconds": 1.0}, {"steps": 20, "seconds": 2.0}]
    curve = [{**point, "mean": error, "std": 0.1} for point, error in zip(points, errors, strict=False)]
    test, cost = {"mean": errors[-1], "std": None}, {"steps": {"mean": 25}, "seconds": {"mean": 2.5}}
    row = {"model": model, "fraction": fraction, "parameters": 100, "operations": 1000, "curve": curve, "test": test}
    return {**row, "clouds": int(100 * fraction), **cost, **more}


def test_comparisons_show_errors_against_costs():
    rows = [summary("a", 1.0, (0.4, 0.3, 0.2)), summary("b", 1.0, (0.8, 0.1, 0.05), parameters=200)]
    rows += [summary("b", 0.5, (0.9, 0.8, 0.7)), summary("a", 0.5, (0.5, 0.5, 0.5), test={"mean": None})]
    figure = viz.comparison({"summary": rows, "higher_is_better": False, "metric": "distance"})
    names = ["seconds of training", "steps", "multiply-adds", "parameters", "training clouds"]
    assert [axes.get_xlabel() for axes in figure.axes] == names
    assert figure.axes[0].get_ylabel() == "distance"
    drawn = [[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes]
    places = ((1, 2, 2.5), (10, 20, 25), (1e4, 2e4, 2.5e4))
    for axes, lines, (first, second, end) in zip(figure.axes, drawn, places, strict=False):
        assert lines[:2] == [[[first, 0.4], [second, 0.3]], [[end, 0.2]]]
        bands = [set(part.get_paths()[0].vertices[:, 1].round(9)) for part in axes.collections[::2]]
        assert bands == [{0.3, 0.5, 0.2, 0.4}, {0.7, 0.9, 0.02, 0.2}]  # not below a fifth of the mean
    assert drawn[3][0] == [[100, 0.2]]
    assert [[50, 0.7], [100, 0.05]] in drawn[4]
    rows = [rows[0], summary("c", 1.0, (0.8, 0.1, 0.05), parameters=110)]  # with as many parameters, nearly
    rates = viz.comparison({"summary": rows, "higher_is_better": True, "metric": "accuracy"})
    assert [axes.get_xlabel() for axes in rates.axes] == names[:3]
    assert rates.axes[0].get_ylabel() == "share of wrong labels"
    np.testing.assert_allclose(rates.axes[0].lines[0].get_ydata(), [0.6, 0.7])
    with pytest.raises(ValueError, match="report: expected at least one finished training"):
        viz.comparison({"summary": []})


def test_comparisons_show_the_rotated_test_and_networks_by_family():
    """The upright test alone made the network that fails look best, and ten networks had seven colors."""
    names = [f"{family} {number}" for family in ("frames", "irreps", "lie") for number in range(4)]
    rows = [
        summary(name, 1.0, (0.4, 0.3, 0.2), family=name.split()[0], rotated={"mean": 0.9, "std": 0.1}) for name in names
    ]
    report = {
        "summary": rows,
        "higher_is_better": False,
        "metric": "error",
        "quantity": "mean absolute error of homo (meV)",
    }
    figure = viz.comparison(report)
    axes = figure.axes[0]
    assert axes.get_ylabel() == "mean absolute error of homo (meV)"
    assert "rotated test" in axes.get_title()
    ends = [line for line in axes.lines if list(line.get_xdata()) == [2.5] and line.get_marker() != "_"]
    hollow = [line.get_markerfacecolor() == "white" for line in ends]
    assert [float(line.get_ydata()[0]) for line in ends] == [0.2 if empty else 0.9 for empty in hollow]
    assert sum(hollow) == len(hollow) / 2 == len(names)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*names, "rotated test", "unrotated test"]
    colors = [handle.get_color() for handle in legend.legend_handles[: len(names)]]
    assert len(set(colors)) == len(names)
    hues = [np.argsort([int(color[k : k + 2], 16) for k in (1, 3, 5)]).tolist() for color in colors]
    assert all(hue == hues[4 * (number // 4)] for number, hue in enumerate(hues))
    assert hues[0] != hues[4]


@pytest.mark.parametrize(
    ("matrix", "words", "name"),
    [
        ([[0, -1], [1, 0]], "rotated by 90°", "90°"),
        ([[0, 1], [-1, 0]], "rotated by 270°", "270°"),
        ([[1, 0], [0, -1]], "reflected, axis at 0°", "0° m"),
        ([[-1, 0], [0, 1]], "reflected, axis at 90°", "180° m"),
        ([[0, -1, 0], [1, 0, 0], [0, 0, 1]], "rotated by 90°", None),
        ([[-1, 0, 0], [0, -1, 0], [0, 0, -1]], "rotated by 0°, inverted", None),
        ([[1, 0, 0], [0, 1, 0], [0, 0, -1]], "rotated by 180°, inverted", None),
    ],
)
def test_words_for_matrices(matrix, words, name):
    matrix = torch.tensor(matrix, dtype=torch.float64)
    assert in_words(matrix) == words
    assert name is None or element_name(matrix) == name


def test_pictures_of_a_run_show_its_last_training_and_its_predictions(tmp_path):
    """A continued part replaces what was logged after its start, a validation nothing; masked labels are no class."""
    for version, steps in ((2, (4, 9, 14)), (10, (9, 19))):
        folder = tmp_path / f"csv/version_{version}"
        folder.mkdir(parents=True)
        rows = [f"{step // 5},{step},{step + version / 100},,\n{step // 5},{step},,0.5,0.25" for step in steps]
        text = "\n".join(["epoch,step,train/loss_epoch,val/loss,val/accuracy", *rows])
        (folder / "metrics.csv").write_text(text + "\n")
    (tmp_path / "csv/version_12").mkdir()  # of a validation, whose step is 0
    (tmp_path / "csv/version_12/metrics.csv").write_text("epoch,step,val/accuracy,val/loss\n0,0,0.1,0.9\n")
    (tmp_path / "csv/version_11").mkdir()  # of a run that ended before its first number
    (tmp_path / "csv/version_11/metrics.csv").write_text("epoch,step,train/loss_epoch\n")
    labels = [(0, 0), (0, 1), (1, 1), (-1, 1)]
    lines = [f"{true},{['cat', 'dog'][true] if true >= 0 else ''},{guess},0.4,0.6" for true, guess in labels]
    table = "true,true_class,predicted,probability_0,probability_1"
    (tmp_path / "predictions.csv").write_text("\n".join([table, *lines]) + "\n")
    (tmp_path / "predictions_f.csv").write_text("true_f_0,true_f_1,f_0,f_1\n1,2,1.5,2\nnan,0,0,1\n")
    (tmp_path / "predictions_g.csv").write_text("g_0\n1\n")
    found = viz.run_pictures(tmp_path)
    assert list(found) == ["learning_curves", "predictions", "predictions_f"]
    loss, accuracy = found["learning_curves"].axes
    assert [axes.get_ylabel() for axes in (loss, accuracy)] == ["loss", "accuracy"]
    np.testing.assert_allclose(loss.lines[0].get_xydata(), [[5, 4.02], [10, 9.1], [20, 19.1]])
    np.testing.assert_allclose(accuracy.lines[0].get_xydata(), [[5, 0.25], [10, 0.25], [20, 0.25]])
    matrix = found["predictions"].axes[0]
    np.testing.assert_allclose(matrix.images[0].get_array(), [[0.5, 0.5], [0, 1]])
    assert [tick.get_text() for tick in matrix.get_yticklabels()] == ["cat", "dog"]
    assert matrix.get_title() == "66.7 % of 3 labels are right"
    parity = found["predictions_f"].axes[0]
    assert parity.get_title() == f"mean absolute error {1.5 / 3:.4g}"
    np.testing.assert_allclose(parity.lines[1].get_xydata()[0], [1, 1.5])
    with pytest.raises(ValueError, match=r"path: expected the folder of a run.*predictions_g.csv"):
        viz.run_pictures(tmp_path / "predictions_g.csv")
    assert main(["picture", str(tmp_path)]) == 0
    assert sorted(path.stem for path in (tmp_path / "pictures").iterdir()) == list(found)
    assert main(["picture", str(tmp_path / "predictions_g.csv")]) == 2
