"""Figures of the papers by name: each is drawn from the command line, in a small version."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("matplotlib")

from lieattn import viz
from lieattn.cli import _picture, main
from lieattn.cli._picture import FIGURES
from tests.cases import short_training

ROOT = Path(__file__).parent.parent
ATTENTIVE = ROOT / "tests" / "goldens" / "attentive_gconv"

# Options that make each figure small, and its files.
SMALL = {
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
    monkeypatch.setattr(_picture, "_SIZES", {"sides": (8, 9), "channels": 1})


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
