"""Figures of the papers by name: each is drawn, small, from the command line."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from lieattn.cli import main
from lieattn.cli._figures import FIGURES

ATTENTIVE = Path(__file__).parent / "goldens" / "attentive_gconv"
# Options that make each figure small, and the files that it has.
SMALL = {
    "gsa-fields": (["--side", "5"], ["gsa-fields_lifting.png", "gsa-fields_self-attention.png"]),
    "attention-maps": (
        ["--weights", str(ATTENTIVE / "trained_rotmnist_f_att_p4cnn.npz"), "--image", "1"],
        ["attention-maps_subtracted.png", "attention-maps_passed.png"],
    ),
    "stride-parity": (["--smallest", "8", "--largest", "9", "--channels", "1"], ["stride-parity.png"]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn(name, tmp_path, capsys):
    options, files = SMALL[name]
    assert main(["picture", name, *options, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_the_help_lists_every_figure_and_its_options(capsys):
    assert main(["picture", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in FIGURES)
    assert main(["picture", "gsa-fields", "--help"]) == 0
    assert "--order ORDER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.ckpt"], "nowhere.ckpt is neither a file nor a figure; figures are gsa-fields"),
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
