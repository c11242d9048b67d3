"""The tasks of examples/tasks run with a little data, and are as short as stated."""

import importlib
import itertools
import re
import tokenize
from pathlib import Path

import pytest
import yaml

from lieattn.cli import main

TASKS = Path(__file__).parent.parent / "examples" / "tasks"
# Name: options of a short run, and a condition for its result
RUNS = {
    "batched_md": (
        {"molecules": 2, "dynamics": 2},
        lambda found: found.pop("difference") < 0.05 and min(found.values()) > 0,
    ),
    "crystals": ({"frames": 20, "epochs": 1}, lambda found: 0 < found[0] < 0.1 and found[1] < 5),
    "dipoles": ({"conformers": 1, "epochs": 1}, lambda error: 0 < error < 2),
    "flights": ({"flights": 50, "epochs": 1}, lambda found: 0 < found[0][2] < 200 and 30 < found[1][2] < 50),
    "layer_in_pyg": ({"epochs": 1, "digits": 32}, lambda accuracy: 0 <= accuracy <= 1),
    "molecules_md": ({"frames": 16, "steps": 20}, lambda found: found[0] < 3 and found[1] < 1),
    "own_group": ({"points": 3, "continuity": False}, lambda error: error < 1e-10),
    "own_images": ({"count": 60, "epochs": 1}, lambda accuracy: 0 <= accuracy <= 1),
    "own_meshes": ({"count": 12, "epochs": 1}, lambda accuracy: 0 <= accuracy <= 1),
    "scans": (
        {"solids": 40, "scenes": 10, "epochs": (1, 1)},
        lambda found: abs(found[0] - found[1]) < 0.1 and abs(found[2] - found[3]) < 0.1,
    ),
    "segmentation": ({"scenes": 16, "epochs": 1}, lambda iou: len(iou) == 3 and 0 <= min(iou) <= max(iou) <= 1),
    "ship_and_reload": ({"clouds": 32, "epochs": 1}, lambda error: 0 < error < 3),
    "slabs": ({"frames": 20, "epochs": 1}, lambda found: 0 < found[0] < 0.1 and found[1] < 5),
    "stations": ({"days": 8, "epochs": 1}, lambda error: 0 < error < 10),
    "trained_md": ({"picoseconds": 0.02}, lambda found: abs(found[0]) < 50 and 300 < found[1] < 1100),
    "own_training_loop": ({"clouds": 60, "epochs": 3}, lambda accuracy: accuracy > 0.3),
}

SLOW = {True: pytest.mark.slow, False: ()}  # it trains two networks
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def lines_of_code(path):
    """Return the number of lines of code, without comments and docstrings."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    idle = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    starts = (tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.NL)
    lines = set()
    for before, token in itertools.pairwise(tokens):
        alone = token.type == tokenize.STRING and before.type in starts
        if token.type not in idle and not alone:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


@pytest.mark.parametrize("path", sorted(TASKS.glob("*.py")), ids=lambda path: path.stem)
def test_tasks_are_short(path):
    assert lines_of_code(path) <= 40


def test_the_lines_of_ten_tasks_are_counted():
    page = (TASKS.parent / "README.md").read_text().split("### Ten tasks")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    assert len(rows[2:]) == 10
    for _, where, lines, _ in rows[2:]:
        files = re.findall(r"`tasks/(\w+\.py)`", where)
        assert [str(lines_of_code(TASKS / name)) for name in files] == ([] if lines == "none" else [lines])


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW[name == "scans"]) for name in RUNS])
def test_tasks_run(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(TASKS)
    monkeypatch.chdir(tmp_path)
    if name == "batched_md":
        pytest.importorskip("torch_sim", reason='torch-sim is not installed: pip install "lieattn[torchsim]"')
    options, good = RUNS[name]
    assert good(importlib.import_module(name).main(**options))


def test_own_network_in_a_comparison(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(TASKS)
    content = yaml.safe_load((TASKS / "own_e3nn.yaml").read_text())
    small = {"smiles": ["O", "C", "N"], "conformers": 1, "references": False}
    for split in ("train", "val", "test"):
        content["data"][split]["init_args"] |= {**small, "split": "all"}
    content |= {"match": {"tolerance": 0.9}, "memory": False}  # matching builds many networks
    for model in content["models"].values():
        model["init_args"]["channels"] = 16 if model is content["models"]["own"] else 4
        model.pop("width"), model.pop("adjust", None), model.pop("step", None)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content | {"budget": {"steps": 1}}))
    assert main(["compare", "--config", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert "own" in table
    assert "framewise exact frames" in table


def test_every_task_is_run():
    assert {path.stem for path in TASKS.glob("*.py")} == {*RUNS, "own_e3nn"}
