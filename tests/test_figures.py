"""Figures of the papers by name: each is drawn from the command line, in a small version."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("matplotlib")

from lieattn import viz
from lieattn.cli import _picture, main
from lieattn.cli._picture import FIGURES
from lieattn.groups import cyclic
from lieattn.models import AffineSelfConvNet
from lieattn.testing import randomize
from tests.cases import short_training

ROOT = Path(__file__).parent.parent
ATTENTIVE = ROOT / "tests" / "goldens" / "attentive_gconv"

# Options that make each figure small, and its files.
SMALL = {
    "asc-filters": ([], ["asc-filters_maps.png", "asc-filters_attention.png"]),
    "gsa-steerability": (["--size", "3"], ["gsa-steerability.png"]),
    "gsa-fields": (["--side", "5"], ["gsa-fields_lifting.png", "gsa-fields_self-attention.png"]),
    "attention-maps": (
        ["--weights", str(ATTENTIVE / "trained_rotmnist_f_att_p4cnn.npz"), "--image", "1"],
        ["attention-maps_subtracted.png", "attention-maps_passed.png"],
    ),
    "stride-parity": ([], ["stride-parity.png"]),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_picture, "_SIZES", {"steps": 0, "sides": (8, 9), "channels": 1})


@short_training
@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn(name, tmp_path, monkeypatch, capsys):
    options, files = SMALL[name]
    monkeypatch.chdir(tmp_path)
    assert main(["picture", name, *options]) == 0, capsys.readouterr().err
    drawn = list(Path("pictures").iterdir())
    assert sorted(path.name for path in drawn) == sorted(files)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


ATTENTIVE_RUN = {
    "model": {
        "class_path": "PointSetClassifier",
        "init_args": {
            "classes": 10,
            "network": {
                "class_path": "AttentiveAllCNN",
                "init_args": {
                    "group": {"class_path": "lieattn.groups.cyclic", "init_args": {"n": 4}},
                    "in_channels": 1,
                    "channels": 1,
                    "attention": "input",
                },
            },
        },
    },
    "data": {split: {"class_path": "Digits", "init_args": {"split": split}} for split in ("train", "test")},
    "trainer": {"max_steps": 1, "default_root_dir": "runs", "logger": False, "accelerator": "cpu"},
}


@short_training
def test_pictures_of_a_checkpoint_with_its_attention(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(ATTENTIVE_RUN))
    assert main(["fit", "--config", "run.yaml"]) == 0, capsys.readouterr().err
    checkpoint = "runs/checkpoints/last.ckpt"
    assert main(["picture", checkpoint, "--clouds", "2", "--out", "drawn"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    names = {f"last_cloud_{number}{what}.png" for number in range(2) for what in ("", "_attention")}
    assert {path.name for path in Path("drawn").iterdir()} == names
    assert all(f"picture: drawn/{name}" in told for name in names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path("drawn").iterdir())
    assert main(["picture", "asc-filters", "--checkpoint", checkpoint]) == 2
    assert "checkpoint: expected one of an AffineSelfConvNet, got AttentiveAllCNN" in capsys.readouterr().err


def test_image_chooses_among_the_letters(monkeypatch):
    drawn = []
    monkeypatch.setattr(viz, "affine_maps", lambda *given, **options: None)
    monkeypatch.setattr(viz, "effective_filters", lambda network, shown, **options: drawn.append(shown))
    for image in (0, 3):
        FIGURES["asc-filters"](image=image)
    assert drawn[0].shape == drawn[1].shape
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("layer", ["affine", "simple"])
def test_filters_of_attention_turn_with_the_image(layer):
    torch.manual_seed(0)
    network = AffineSelfConvNet(cyclic(4), 1, 2, layer=layer, blocks=1, channels=2, heads=1).double()
    figure = viz.effective_filters(network, torch.randn(1, 8, 8), block=1, channel=1)
    measured = next(text.get_text() for text in figure.texts if "differ by" in text.get_text())
    apart, largest = map(float, re.findall(r"[\d.]+e[-+]\d+|(?<=value )[\d.]+", measured))
    assert apart < 1e-6 < 1e-3 < largest
    rows, columns = 4, 1 + 3 * 2
    assert len(figure.axes) == rows * (columns + 2)
    # The weights of each pixel sum to 1, in every row.
    sums = [float(axes.collections[0].get_array().sum()) for axes in figure.axes[: rows * columns]]
    assert [sums[row * columns + 1 + 2 * pixel] for row in range(rows) for pixel in range(3)] == pytest.approx(
        [1.0] * 12
    )
    maps = viz.affine_maps(network, block=1, channels=3)
    tables = 1 if layer == "simple" else 2
    assert len(maps.axes) == 3 * (tables * 5 + 1)  # three channels, with a color scale each


def test_filters_are_attention_times_the_factors_that_the_maps_show():
    network = randomize(AffineSelfConvNet(cyclic(2), 1, 2, blocks=1, channels=2, heads=2)).double().train()
    layer, image = network.blocks[1].layer, torch.randn(1, 8, 8)
    drawn = [viz.affine_maps(network, block=1, channels=9)]
    drawn += [viz.effective_filters(network, image, block=1, channel=channel) for channel in (1, 2)]
    maps, *filters = (
        [np.asarray(axes.collections[0].get_array()) for axes in figure.axes if axes.get_xlim() != (0, 1)]
        for figure in drawn
    )
    assert network.training
    tables = [torch.cat([table.psi, table.beta[None]]).movedim(2, 1) for table in (layer.key_map, layer.value_map)]
    tables = torch.stack(tables, 2).detach()  # frames and summand, channels, keys and values, displacements
    drawn = tables.permute(1, 2, 0, 3).flatten(0, 2)[:, : maps[0].size]
    np.testing.assert_allclose(np.stack(maps), drawn, rtol=1e-6)
    for channel, panels in enumerate(filters, 1):
        factors = tables[0, channel, 1, : maps[0].size]
        for pixel in range(3):
            alpha, weighted = panels[1 + 2 * pixel : 3 + 2 * pixel]
            np.testing.assert_allclose(weighted, alpha * factors.numpy(), rtol=1e-5)
    assert not np.allclose(filters[0][1], filters[1][1])  # attention of two heads


def test_networks_without_affine_maps_have_no_filters():
    network = AffineSelfConvNet(cyclic(4), 1, 2, layer="stand-alone", blocks=1, channels=2)
    with pytest.raises(ValueError, match="network: expected the layer 'affine' or 'simple', got StandAloneSelf"):
        viz.affine_maps(network)
    network = AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=2)
    with pytest.raises(ValueError, match=r"block: expected one of 0\.\.2, got 3"):
        viz.affine_maps(network, block=3)
    with pytest.raises(ValueError, match=r"channel: expected one of 0\.\.1, got 2"):
        viz.effective_filters(network, torch.randn(1, 8, 8), channel=2)
    with pytest.raises(ValueError, match="image: expected one image"):
        viz.effective_filters(network, torch.randn(8, 8))
    with pytest.raises(TypeError, match=r"network: expected an? AffineSelfConvNet"):
        viz.affine_maps(torch.nn.Identity())


def test_scores_of_attention_turn_exactly_and_interpolated_weights_do_not():
    """GSA-Nets, Figure 2: the content of the chart."""
    chart = viz.steerability(size=5, order=8).axes[0]
    attention, convolution = (line.get_ydata() for line in chart.lines)
    assert max(attention) < 1e-13
    assert max(convolution[0], convolution[-1]) < 1e-13
    assert convolution[1] > 1e-2


@pytest.mark.slow
def test_a_figure_goes_where_it_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for out, start in (("p.png", b"\x89PNG"), ("drawn/p.svg", b"<?xml"), ("p.pdf", b"%PDF")):
        assert main(["picture", "stride-parity", "--out", out]) == 0
        assert f"picture: {out}\n" in capsys.readouterr().out
        assert Path(out).read_bytes().startswith(start)
    Path("folder.png").mkdir()
    for out in ("folder.png", "new"):
        assert main(["picture", "stride-parity", "--out", out]) == 0
        assert Path(out, "stride-parity.png").is_file()


@pytest.mark.parametrize("name", ["picture", "picture.xyz", "picture.part"])
def test_formats_that_matplotlib_does_not_have(name, tmp_path):
    figure = viz.error_curves({"one": ([1.0, 2.0], [0.1, 0.2])}, "x", "y")
    with pytest.raises(ValueError, match=rf"path: expected a name that ends in one of .* png, .* got '{name}'"):
        viz.save(figure, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_help_lists_every_figure_and_its_options(capsys):
    assert main(["picture", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in FIGURES)
    for name in FIGURES:
        assert main(["picture", name, "--help"]) == 0
        assert not re.search(r"``|:\w+:`", told := capsys.readouterr().out)
        assert ("--order ORDER" in told) == name.startswith("gsa-")


def test_the_angles_of_weights_do_not_overlap():
    figure = viz.steerability(size=3, order=64)
    figure.draw_without_rendering()
    texts = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(texts))


@pytest.mark.parametrize(("order", "columns"), [(16, 5), (32, 9), (44, 9), (64, 9)])
def test_up_to_nine_angles_of_weights_are_drawn(order, columns):
    figure = viz.steerability(size=3, order=order)
    chart, *images = figure.axes
    titles = [axes.get_title() for axes in images[:columns]]
    assert (titles[0], titles[-1], len(images)) == ("0°", "90°", 2 * columns)
    assert len(chart.lines[0].get_xdata()) == order // 4 + 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.ckpt"], "nowhere.ckpt is not a file, a figure or a trained network; figures are gsa-fields, "),
        (["gsa-fields", "--order", "x"], "order: Expected a <class 'int'>. Got value: x"),
        (["gsa-fields", "--order", "0"], "order: expected an integer of at least 1, got 0"),
        (["gsa-fields", "--out", "p.gif"], "--out: expected a file .png, .pdf, .svg, or a folder, got 'p.gif'"),
        (
            ["gsa-fields", "--side", "7", "--out", "p.png"],
            "--out: gsa-fields draws 2 pictures, gsa-fields_lifting and gsa-fields_self-attention; expected a folder",
        ),
        (["gsa-fields", "--angle", "3"], "unrecognized arguments: --angle 3"),
        (["attention-maps"], "the following arguments are required: --weights"),
        (
            ["attention-maps", "--weights", str(ATTENTIVE / "trained_rotmnist_f_att_p4cnn.npz"), "--image", "9"],
            "image: expected one of 0..5, got 9",
        ),
        (["attention-maps", "--weights", __file__], f"weights: expected an .npz file with arrays, got '{__file__}'"),
    ],
)
def test_faults_are_one_message(words, message, capsys):
    assert main(["picture", *words]) == 2
    assert capsys.readouterr().err.startswith(f"lieattn picture: {message}")
