"""Pictures show what was measured, for networks that are equivariant and for others."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn_datasets import Digits

pytest.importorskip("matplotlib")

from lieattn import viz
from lieattn.geometry import Nearest, Radius
from lieattn.groups import cyclic, dihedral, octahedral
from lieattn.models import (
    Dropouts,
    GSANet,
    GSAOptions,
    Stages,
)
from lieattn.models.published import published_table
from lieattn.testing import randomize
from lieattn.viz._draw import element_name, in_words

QUARTERS = [0.0, math.pi / 2]


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch):
    """Make any use of pyplot, and so of a GUI or global state, fail."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


@pytest.fixture(scope="module")
def digit():
    return Digits("test")[0]


def make(group, radius=1.5, **options):
    options = {"channels": 8, "blocks": (1,), "heads": 2, "neighborhood": Radius(radius), **options}
    return randomize(GSANet(group, 1, 10, **options))


@pytest.fixture(scope="module")
def c4():
    return make(cyclic(4))


def panels(figure):
    """Return the panels without the color scale."""
    return [axes for axes in figure.axes if axes.get_aspect() == 1]


def texts(figure):
    return [text.get_text() for text in figure.texts]


def measured(figure):
    """Return the differences between stabilized rows, as stated in the titles."""
    line = next(text for text in texts(figure) if text.startswith("largest difference"))
    return [float(number) for number in re.findall(r"(?:rows|channels|group): ([\d.e+-]+)", line)]


def spread(rows):
    return float((rows.amax(0) - rows.amin(0)).max())


def tiles(axes):
    return axes.collections[0].get_array(), np.array([path.vertices[:-1] for path in axes.collections[0].get_paths()])


@pytest.mark.parametrize(
    ("group", "radius", "angles"),
    [
        (cyclic(4), 1.5, QUARTERS),
        (cyclic(8), 2.1, [math.pi / 4, -math.pi / 2]),
        (dihedral(4), 1.5, QUARTERS),
    ],
    ids=["C4", "C8", "D4"],
)
@pytest.mark.parametrize("layer", [0, np.int64(1)])
def test_stabilized_rows_are_equal_in_the_group(digit, group, radius, angles, layer):
    network = make(group, radius)
    figure = viz.feature_fields(network, digit, angles, layer=layer)
    assert len(panels(figure)) == len(angles) * (1 + 2 * group.order)
    fields = viz.stabilized_fields(network, digit, angles, layer=layer)
    assert fields.shape == (len(angles), 64, group.order, 8)
    assert fields.std() > 0.01
    assert spread(fields) < 1e-5
    assert measured(figure) == pytest.approx([spread(fields)], rel=0.06)

    figure = viz.attention_maps(network, digit, angles, layer=layer, point=20)
    assert len(panels(figure)) == len(angles) * (1 + group.order)
    assert measured(figure)[0] < 1e-5


def test_rows_differ_outside_the_group(c4, digit):
    angles = [*QUARTERS, math.radians(30)]
    fields = viz.stabilized_fields(c4, digit, angles)
    assert spread(fields[[0, 2]]) > 1e-2
    for figure in (viz.feature_fields(c4, digit, angles), viz.attention_maps(c4, digit, angles)):
        everywhere, in_group = measured(figure)
        assert everywhere > 1e-3
        assert in_group < 1e-5
        assert [text for text in texts(figure) if "°" in text][:3] == ["0°", "90°", "30°\nnot in\nthe group"]


def test_without_equivariance_the_title_says_so(digit):
    network = randomize(make(cyclic(4), options=GSAOptions(frame_table=published_table(cyclic(4)))), spread=1.5)
    assert measured(viz.feature_fields(network, digit, QUARTERS))[0] > 1e-3


def test_panels_show_fields_at_turned_points(c4, digit):
    """Panels have squares of side 1 around the rotated points, colored by the field, with a shared color scale."""
    figure = viz.feature_fields(c4, digit, [math.pi / 2], channel=3)
    with torch.no_grad():
        turned = digit.clone()
        turned.pos = turned.pos @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        field = c4.features(turned.x, c4.geometry(turned))[1]
    drawn = panels(figure)
    for h in range(4):
        values, squares = tiles(drawn[1 + h])
        np.testing.assert_allclose(values, field[:, h, 3], atol=1e-6)
        np.testing.assert_allclose(squares.mean(axis=1), turned.pos, atol=1e-5)
        np.testing.assert_allclose(np.ptp(squares, axis=1), 1.0, atol=1e-5)
        # After a quarter turn, the next frame sees what frame h saw before.
        stable, upright = tiles(drawn[5 + h])
        np.testing.assert_allclose(stable, field[:, (h + 1) % 4, 3], atol=1e-6)
        np.testing.assert_allclose(upright.mean(axis=1), digit.pos, atol=1e-5)
    norms = {axes.collections[0].norm for axes in drawn[1:]}
    assert len(norms) == 1


@pytest.mark.parametrize("head", [0, None])
def test_attention_panels_show_normalized_weights(c4, digit, head):
    figure = viz.attention_maps(c4, digit, [0.0], point=0, head=head)
    for axes in panels(figure)[1:]:
        values, squares = tiles(axes)
        assert len(values) == 4  # a corner, its two neighbors and its diagonal neighbor
        assert values.sum() == pytest.approx(1, abs=1e-5)
        assert np.abs(squares.mean(axis=1) - digit.pos[0].numpy()).max() < 1.01


def test_points_that_attend_only_to_themselves_can_be_drawn(digit):
    figure = viz.attention_maps(make(cyclic(4), 0.5), digit, [0.0])
    for axes in panels(figure)[1:]:
        values, _ = tiles(axes)
        assert values.tolist() == pytest.approx([1.0])


def test_crops_and_pooling_move_the_points(digit):
    network = make(cyclic(4), blocks=Stages((1, 1), crops=(1, 0)))
    assert viz.stabilized_fields(network, digit, QUARTERS, layer=1).shape[1] == 36
    assert viz.stabilized_fields(network, digit, QUARTERS, layer=2).shape[1] == 9
    figure = viz.feature_fields(network, digit, QUARTERS)
    assert np.ptp(tiles(panels(figure)[1])[1], axis=1) == pytest.approx(2.0)
    assert measured(viz.attention_maps(network, digit, QUARTERS, point=8))[0] < 1e-5
    with pytest.raises(ValueError, match=r"point: expected one of the layer's points 0\.\.8, got 9"):
        viz.attention_maps(network, digit, QUARTERS, point=9)


def test_clouds_without_a_raster_and_norms(c4):
    cloud = Data(x=torch.rand(12, 1), pos=torch.randn(12, 2) + 4)
    network = make(cyclic(4), neighborhood=Nearest(4))
    figure = viz.feature_fields(network, cloud, QUARTERS, channel=None)
    values, discs = tiles(panels(figure)[1])
    assert discs.shape == (12, 24, 2)
    assert (values >= 0).all()
    assert measured(viz.attention_maps(network, cloud, QUARTERS))[0] < 1e-5


def test_observing_leaves_no_trace(digit):
    """Dropout is off only for the picture; data, gradients, hooks and training modes are unchanged."""
    network = make(cyclic(4), dropout=Dropouts(attention=0.5)).train()
    network.blocks[0].eval()
    pos = digit.pos.clone()
    modes = [module.training for module in network.modules()]
    figure = viz.attention_maps(network, digit, QUARTERS)
    assert measured(figure)[0] < 1e-5
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(digit.pos, pos)
    assert not network.blocks[0].attention._forward_pre_hooks
    assert all(parameter.grad is None for parameter in network.parameters())


def test_pictures_in_threads_and_files(c4, digit, tmp_path):
    def draw(number):
        return viz.save(viz.feature_fields(c4, digit, [0.0], layer=0), tmp_path / f"made/{number}.png")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(draw, range(2))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")


def test_accuracy_by_angle():
    angles = np.deg2rad([0, 90, 45])
    figure = viz.accuracy_by_angle({"Z2": (angles, [1.0, 0.2, 0.3]), "C4": (angles, [0.9, 0.9, 0.2])})
    (axes,) = figure.axes
    first, second = axes.lines
    np.testing.assert_allclose(first.get_xdata(), [0, 45, 90])
    np.testing.assert_allclose(first.get_ydata(), [100, 30, 20])
    np.testing.assert_allclose(second.get_ydata(), [90, 20, 90])
    assert [text.get_text() for text in axes.texts] == ["Z2", "C4"]  # counted from the bottom
    assert axes.get_ylim() == (0, 102)
    assert set(np.diff(axes.get_xticks())) == {15}


def test_more_curves_than_colors_have_other_markers():
    (axes,) = viz.error_curves({str(n): ([0, 10, 20], [1.0, 0.1, 0.01]) for n in range(9)}, "steps", "error").axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 9
    assert axes.get_xscale() == "linear"
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_error_curves_in_order_on_logarithmic_axes():
    figure = viz.error_curves({"a": ([4, 1], [1e-3, 0.1]), "b": ([1], [0.0])}, "frames", "error", log=True)
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.1], [4, 1e-3]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
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
    with pytest.raises(ValueError, match="curves\\['a'\\]: expected positive places on a logarithmic axis, got 0"):
        viz.error_curves({"a": ([0.0, 1.0], [0.1, 0.2])}, "side", "error", log=True)


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


def test_no_text_overlaps_or_leaves_the_picture(digit):
    figure = viz.feature_fields(make(dihedral(4)), digit, [0.3])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


FIELD_ERRORS = {
    "no angles": ({"angles": []}, ValueError, r"angles: expected at least one finite angle in radians, got \[\]"),
    "angle": ({"angles": [math.nan]}, ValueError, "angles: expected at least one finite angle"),
    "layer": ({"layer": 2}, ValueError, r"layer: expected 0 \(lifting\) to 1 \(the last block\) or -2 to -1, got 2"),
    "layer below": ({"layer": -3}, ValueError, "layer: expected 0 .* got -3"),
    "layer name": ({"layer": "lifting"}, ValueError, "layer: expected 0 .* got 'lifting'"),
}


@pytest.mark.parametrize("picture", [viz.feature_fields, viz.attention_maps, viz.stabilized_fields])
@pytest.mark.parametrize(("change", "error", "message"), FIELD_ERRORS.values(), ids=FIELD_ERRORS)
def test_bad_arguments(c4, digit, picture, change, error, message):
    with pytest.raises(error, match=message):
        picture(c4, digit, **{"angles": [0.0], **change})


def test_bad_choices(c4, digit):
    with pytest.raises(ValueError, match=r"channel: expected one of 0\.\.7, got 8"):
        viz.feature_fields(c4, digit, [0.0], channel=8)
    with pytest.raises(ValueError, match=r"head: expected one of 0\.\.1, got -1"):
        viz.attention_maps(c4, digit, [0.0], head=-1)
    with pytest.raises(ValueError, match=r"point: expected one of the layer's points 0\.\.63, got 64"):
        viz.attention_maps(c4, digit, [0.0], point=64)
    alone = make(cyclic(4), neighborhood=Radius(0.5, include_self=False))
    with pytest.raises(ValueError, match="point: expected one with neighbors in block 1, got 3"):
        viz.attention_maps(alone, digit, [0.0], point=3)


@pytest.mark.parametrize("picture", [viz.feature_fields, viz.attention_maps])
def test_bad_networks_and_data(c4, digit, picture):
    with pytest.raises(ValueError, match="data: expected one cloud with points, got 128 points in 2 clouds"):
        picture(c4, Batch.from_data_list([digit, digit]), [0.0])
    with pytest.raises(TypeError, match="data: expected a torch_geometric Data with x and pos"):
        picture(c4, digit.pos, [0.0])
    with pytest.raises(TypeError, match="network: expected a GSANet, got Linear"):
        picture(torch.nn.Linear(1, 1), digit, [0.0])
    with pytest.raises(ValueError, match=r"network: expected a group of the plane, got .*dim=3"):
        picture(make(octahedral()), digit, [0.0])


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


def test_without_matplotlib(c4, digit, monkeypatch):
    """The module can be imported; drawing functions raise an error that says what to install."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = importlib.util.spec_from_file_location("viz_without_matplotlib", viz.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for draw in (
        lambda: module.feature_fields(c4, digit, [0.0]),
        lambda: module.attention_maps(c4, digit, [0.0]),
        lambda: module.accuracy_by_angle({"C4": ([0.0], [1.0])}),
        lambda: module.training_curves({"C4": [1.0]}, "loss"),
    ):
        with pytest.raises(ImportError, match=r'pip install "lieattn\[viz\]"'):
            draw()
    assert len(module.stabilized_fields(c4, digit, [0.0])) == 1


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
    assert rates.axes[0].get_ylabel() == "error rate"
    np.testing.assert_allclose(rates.axes[0].lines[0].get_ydata(), [0.6, 0.7])


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
