"""Figures of the papers by name: each is drawn, small, from the command line."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("matplotlib")

from lieattn import viz
from lieattn.cli import main
from lieattn.cli._figures import FIGURES

ROOT = Path(__file__).parent.parent
ATTENTIVE = ROOT / "tests" / "goldens" / "attentive_gconv"

# Options that make each figure small, and the files that it has.
SMALL = {
    "gsa-steerability": (["--size", "3"], ["gsa-steerability.png"]),
    "lift-errors": (["--most", "1", "--repeats", "1"], ["lift-errors.png"]),
    "roll-outs": (["--checkpoint", "runs/checkpoints/last.ckpt", "--clouds", "2", "--steps", "3"], ["roll-outs.png"]),
    "gsa-fields": (["--side", "5"], ["gsa-fields_lifting.png", "gsa-fields_self-attention.png"]),
    "attention-maps": (
        ["--weights", str(ATTENTIVE / "trained_rotmnist_f_att_p4cnn.npz"), "--image", "1"],
        ["attention-maps_subtracted.png", "attention-maps_passed.png"],
    ),
    "stride-parity": (["--smallest", "8", "--largest", "9", "--channels", "1"], ["stride-parity.png"]),
}


# A checkpoint of dynamics on springs, for those that need one.
SPRINGS = ROOT / "examples/configs/springs.yaml"
SETTINGS = {
    "trainer": {"max_steps": 1, "default_root_dir": "runs", "logger": False, "accelerator": "cpu"},
    "data": {split: {"class_path": "Springs", "init_args": {"size": 2}} for split in ("train", "val", "test")},
}


@pytest.mark.filterwarnings("ignore:.*JsonargparseDeprecationWarning.*", "ignore:.*does not have many workers.*")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "roll-outs")) for name in FIGURES]
)
def test_figures_are_drawn(name, tmp_path, monkeypatch, capsys):
    options, files = SMALL[name]
    monkeypatch.chdir(tmp_path)
    if "--checkpoint" in options:
        Path("small.yaml").write_text(yaml.safe_dump(SETTINGS))
        assert main(["fit", "--config", str(SPRINGS), "--config", "small.yaml"]) == 0, capsys.readouterr().err
    assert main(["picture", name, *options]) == 0, capsys.readouterr().err
    drawn = list(Path("pictures").iterdir())
    assert sorted(path.name for path in drawn) == sorted(files)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_scores_of_attention_turn_exactly_and_interpolated_weights_do_not():
    """GSA-Nets, Figure 2: what the chart shows."""
    chart = viz.steerability(size=5, order=8).axes[0]
    attention, convolution = (line.get_ydata() for line in chart.lines)
    assert max(attention) < 1e-13
    assert max(convolution[0], convolution[-1]) < 1e-13
    assert convolution[1] > 1e-2


def test_the_help_lists_every_figure_and_its_options(capsys):
    assert main(["picture", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in FIGURES)
    assert main(["picture", "gsa-fields", "--help"]) == 0
    assert "--order ORDER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.ckpt"], "nowhere.ckpt is neither a file nor a figure; figures are gsa-fields, "),
        (["gsa-fields", "--order", "x"], "order: expected int, got x"),
        (["gsa-fields", "--order", "0"], "n: expected an integer of at least 1, got 0"),
        (["gsa-fields", "--angle", "3"], "unrecognized arguments: --angle 3"),
        (
            ["attention-maps", "--weights", str(ATTENTIVE / "trained_rotmnist_f_att_p4cnn.npz"), "--image", "9"],
            "image: expected one of the images x in",
        ),
    ],
)
def test_faults_are_one_message(words, message, capsys):
    assert main(["picture", *words]) == 2
    assert capsys.readouterr().err.startswith(f"lieattn picture: {message}")
