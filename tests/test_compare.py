"""Comparisons: matched widths, equal budgets, continued and joined runs, tests on rotated clouds, reports."""

from __future__ import annotations

import base64
import copy
import dataclasses
import html
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool

from lieattn import train
from lieattn.cli import main
from lieattn.compare import Cell, CellStore, ModelSettings, Sets, match_models, page, read_settings, tables
from lieattn.compare import _cell as budgets
from lieattn.compare import _cell as cells
from lieattn.compare._build import TurnedClouds, random_rotation, turned
from lieattn.compare._cell import EquivarianceProbe
from lieattn.compare._match import Meter, count_parameters
from lieattn.compare._records import _curve
from lieattn.compare._settings import BudgetSettings
from lieattn.groups import SO, FiniteGroup, LieGroup, cyclic, octahedral, trivial
from lieattn.models import AffineSelfConvNet
from lieattn.testing import randomize
from lieattn.viz import comparison

HERE = __name__
ROOT = Path(__file__).parents[1]


class Rods(Dataset):
    """Two pairs of points of different lengths, one along x and one along y; the label is which is longer."""

    vectors = ("pos", "arrow")
    tensors = ("outer",)

    def __init__(self, size: int = 24, dim: int = 3, root: str = "", empty: int = 0) -> None:
        self.size, self.dim, self.root, self.empty = size, dim, root, empty

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Data:
        generator = torch.Generator().manual_seed(index)
        pos = torch.randn(4, self.dim, generator=generator) * (1 + index % 2)
        arrow, points = pos[1] - pos[0], 0 if index < self.empty else 4
        return Data(
            x=torch.ones(points, 1),
            pos=pos[:points],
            y=torch.tensor([index % 2]),
            length=arrow.norm()[None, None],
            arrow=arrow[None],
            outer=torch.outer(arrow, arrow)[None],
            root=self.root,
        )


class Distances(nn.Module):
    """A network that depends only on distances from the center, with a fault that tests ask for."""

    guarantee = "invariant to all rotations"

    def __init__(
        self,
        outputs: int,
        channels: int = 8,
        heads: int = 1,
        group: FiniteGroup | LieGroup | None = None,
        fault: str = "",
        until: int = 0,
    ) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"heads: {heads} do not divide {channels} channels")
        if fault in ("here", "there") and (fault == "there") != ("OTHER_ENVIRONMENT" in os.environ):
            raise ModuleNotFoundError("No module named 'absent'")
        self.symmetry, self.fault = group, fault
        width = 8 if fault == "fixed" else channels
        self.mlp = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs))
        if fault == "lazy":
            self.first = nn.LazyLinear(channels)
        self.register_buffer("left", torch.tensor(until))
        if fault == "frozen":
            self.requires_grad_(False)

    def see(self, data: Batch) -> torch.Tensor:
        center = global_mean_pool(data.pos, data.batch)
        return (data.pos - center[data.batch]).norm(dim=1, keepdim=True)

    def forward(self, data: Batch) -> torch.Tensor:
        if self.fault == "broken":
            raise LookupError("broken on purpose")
        self.left -= int(self.training)
        out = global_mean_pool(self.mlp(torch.cat([data.x, self.see(data)], dim=1)), data.batch)
        blind = self.fault == "blind" and not self.training and self.left >= 0
        return out * float("nan") if blind or self.fault == "diverging" else out


class Coordinates(Distances):
    """A network that depends on the first coordinate."""

    def see(self, data: Batch) -> torch.Tensor:
        return data.pos[:, :1]


class Talkative(Distances):
    """A network with outputs that are no targets, and not all of which are trained."""

    def forward(self, data: Batch) -> dict:
        length = super().forward(data)
        return {
            "length": length.detach() if self.fault == "constant" else length,
            "points": data.ptr.diff(),
            "unit": "angstrom",
        }


class Arrows(nn.Module):
    """A network that returns a vector, which rotates with the points unless it is spoilt."""

    def __init__(self, spoil: float = 0.0) -> None:
        super().__init__()
        self.scale, self.symmetry = nn.Parameter(torch.tensor(0.5)), octahedral()
        self.spoil = spoil

    def forward(self, data: Batch) -> torch.Tensor:
        pos = data.pos.unflatten(0, (-1, 4))
        arrow = pos[:, 1] - pos[:, 0]
        return self.scale * arrow + self.spoil * arrow.abs()


class Interrupting(Distances):
    """Sends a signal to the parent process, once; the default signal asks it to stop."""

    def __init__(
        self, flag: str, outputs: int, channels: int = 8, after: int = 0, signum: int = signal.SIGTERM
    ) -> None:
        super().__init__(outputs, channels)
        self.flag, self.after, self.signum = Path(flag), after, signum

    def forward(self, data: Batch) -> torch.Tensor:
        self.after -= self.training
        if self.after < 0 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getppid(), self.signum)
        return super().forward(data)


class Wide(nn.Module):
    """A network whose time is that of its matrix products."""

    def __init__(self, outputs: int, channels: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, channels), *(nn.Linear(channels, channels) for _ in range(3)))
        self.head = nn.Linear(channels, outputs)

    def forward(self, data: Batch) -> torch.Tensor:
        return self.head(global_mean_pool(self.layers(data.x), data.batch))


class Own(train.PointSetTask):
    """A task of a user, which logs how often the label is right."""

    monitor = ("val/right", "max")

    def __init__(self, network: nn.Module, right: str = "right", **options) -> None:
        super().__init__(network, **options)
        self.right = right

    def evaluate(self, batch, stage):
        logits = self.network(batch)
        loss = nn.functional.cross_entropy(logits, batch.y)
        self.log(f"{stage}/loss", loss, batch_size=batch.num_graphs)
        self.log(f"{stage}/{self.right}", (logits.argmax(1) == batch.y).float().mean(), batch_size=batch.num_graphs)
        return loss


class OwnLoss(Own):
    monitor = train.PointSetTask.monitor


class Untyped(Own):
    def __init__(self, network: nn.Module, optimizer=None, schedule=None) -> None:
        super().__init__(network, optimizer=optimizer, schedule=schedule)


def spec(name: str, **arguments) -> dict:
    return {"class_path": f"{HERE}.{name}", "init_args": arguments}


def sized(name: str = "Distances", step: int = 1, **arguments) -> dict:
    return {**spec(name, outputs=2, **arguments), "width": "channels", "step": step}


REGRESSION = {"class_path": "lieattn.train.PointSetRegressor", "init_args": {"targets": "length"}}
QUICK = {"seeds": [0], "fractions": [1.0], "equivariance": {"clouds": 1, "elements": 1}}


def config(**changes) -> dict:
    content = {
        "task": {"class_path": "lieattn.train.PointSetClassifier", "init_args": {"classes": 2}},
        "models": {"distances": sized(channels=20), "first coordinate": sized("Coordinates", step=2)},
        "data": {
            "train": spec("Rods"),
            "val": spec("Rods", size=8),
            "test": spec("Rods", size=10),
            "batch_size": 4,
            "rotate_test": True,
        },
        "budget": {"steps": 10, "evaluations": 3},
        "seeds": [0, 1],
        "fractions": [0.5, 1.0],
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}},
        "schedule": {"class_path": "lieattn.train.WarmupCosine", "init_args": {"warmup_epochs": 0.2}},
        "trainer": {"accelerator": "cpu", "gradient_clip_val": 1.0},
        "equivariance": {"clouds": 3, "elements": 2},
        "memory": False,
    }
    for path, value in changes.items():
        inner = content
        *above, last = path.split("__")
        for key in above:
            inner = inner[key]
        inner[last] = value
    return content


def write(path: Path, content: dict) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def settings(tmp_path: Path, **changes):
    return read_settings([write(tmp_path / "settings.yaml", config(**changes))])


def compare(folder: Path, *, status: int = 0, arguments: tuple[str, ...] = (), **changes) -> dict:
    folder.mkdir(exist_ok=True)
    file = write(folder / "compare.yaml", config(**changes))
    assert main(["compare", "--config", str(file), "--out", str(folder), *arguments]) == status
    return reports(folder) if (folder / "comparison.json").is_file() else {}


def without_times(report: dict, seed: int | None = None, fraction: float | None = None) -> list[dict]:
    """Return the cells, of one seed and share if these are given, without what differs between two runs."""
    found = [cell for cell in copy.deepcopy(report["cells"]) if seed in (None, cell["seed"])]
    found = [cell for cell in found if fraction in (None, cell["fraction"])]
    for cell in found:
        for name in ("seconds", "processor_seconds", "train_clouds_per_s", "inference_clouds_per_s", "threads"):
            cell.pop(name)
        cell["history"] = [[step, value] for step, _, value in cell["history"]]
    return found


@pytest.fixture(autouse=True)
def pictures(request, monkeypatch):
    """Draw pictures for the tests of pictures only, since it takes longest."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("lieattn.viz.save", lambda figure, path: path.write_bytes(b"drawn") and path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    compare(folder)
    return folder


def reports(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


# Results


def test_every_cell_has_the_same_budget_and_its_share_of_the_data(finished):
    cells = reports(finished)["cells"]
    assert len(cells) == 8
    assert {(cell["fraction"], cell["clouds"], cell["steps"]) for cell in cells} == {(0.5, 12, 10), (1.0, 24, 10)}
    assert all([step for step, _, _ in cell["history"]] == [4, 7, 10] for cell in cells)
    assert all(cell["seconds"] > 0 and cell["inference_clouds_per_s"] > 0 for cell in cells)
    counts = {cell["parameters"] for cell in cells}
    assert max(counts) <= 1.05 * min(counts)


def test_summary_and_curves_are_means_and_spreads_over_seeds(finished):
    report = reports(finished)
    for row in report["summary"]:
        mine = [c for c in report["cells"] if (c["model"], c["fraction"]) == (row["model"], row["fraction"])]
        assert len(mine) == 2
        assert [(point["part"], point["steps"]) for point in row["curve"]] == [(1, 4), (2, 7), (3, 10)]
        found = [(row["test"], [cell["metrics"]["accuracy"] for cell in mine])]
        found += [(point, [cell["history"][k][2] for cell in mine]) for k, point in enumerate(row["curve"])]
        for summary, values in found:
            assert summary["mean"] == pytest.approx(np.mean(values))
            assert summary["std"] == pytest.approx(np.std(values, ddof=1))
        seconds = [np.mean([cell["history"][k][1] for cell in mine]) for k in range(3)]
        assert [point["seconds"] for point in row["curve"]] == pytest.approx(seconds)
        assert row["seconds_per_step"] == pytest.approx(np.mean([cell["seconds"] for cell in mine]) / 10)


def test_rotated_test_set_tells_who_is_equivariant(finished):
    rows = {row["model"]: row for row in reports(finished)["summary"] if row["fraction"] == 1}
    assert rows["distances"]["rotated"] == rows["distances"]["test"]
    assert rows["first coordinate"]["rotated"] != rows["first coordinate"]["test"]
    for when in ("before", "after"):
        errors = {name: row["equivariance"][when] for name, row in rows.items()}
        assert errors["distances"]["rotations"] < 1e-5
        assert errors["first coordinate"]["rotations"] > 1e-3
        assert errors["distances"]["own"] is None
    change = rows["first coordinate"]["equivariance"]
    assert change["before"]["rotations"] != change["after"]["rotations"]


def test_table_page_and_picture_are_written(finished, capsys):
    report = compare(finished)
    printed = capsys.readouterr()
    assert "8 of 8 cells are finished, 0 to run" in printed.err
    told = " ".join(printed.out.split())
    for words in (
        *("test accuracy", "rotated accuracy", "24 (100 %)", "error SO(d)", "first coordinate", "33.3 %", "s/step"),
        *("multiply-adds/step", "matched by the number of parameters"),
    ):
        assert words in told
    assert (finished / "comparison.png").stat().st_size > 10_000
    text = (finished / "comparison.html").read_text()
    picture = base64.b64encode((finished / "comparison.png").read_bytes()).decode()
    assert f'src="data:image/png;base64,{picture}"' in text
    shown = html.unescape(re.sub(r"<[^>]+>", " ", text)).split()
    lines = [line for line in printed.out.splitlines() if not line.startswith("---")]
    assert set(" ".join(lines).split()) <= set(shown)
    assert not re.search("http|<script|<link|url\\(", text.replace(picture, ""))
    assert text.count("<table>") == 4
    assert "<th>model</th><th>group</th><th>error own</th>" in text  # a table of its own, which is not cut off
    assert "prefers-color-scheme:dark" in text
    assert report["quantity"] == "share of wrong labels"
    assert {row["family"] for row in report["summary"]} <= {"frames", "tests", "lie", "gsa"}
    report["summary"][0]["model"] = "<script>alert(1)</script>"
    assert "<script>" not in page(report)
    assert "&lt;script&gt;" in page(report)
    assert "<img" not in page(report)


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/compare_*.json")), ids=lambda path: path.stem)
def test_reports_of_the_documentation_are_read(path):
    report = json.loads(path.read_text())
    assert len(comparison(report).axes) >= 3
    assert all(row["model"] in tables(report) for row in report["summary"])
    assert "others are as configured" in " ".join(tables(report).split())


@pytest.mark.parametrize(
    ("share", "clock", "told"), [(0.04, {}, True), (0.04, {"clock": "processor"}, False), (0.9, {}, False)]
)
def test_other_programs_are_told(share, clock, told):
    """Elapsed seconds on a busy machine are few steps."""
    report = json.loads((ROOT / "docs/records/compare_forces.json").read_text())
    rows = [{**row, "processor_share": share} for row in report["summary"]]
    text = " ".join(tables({**report, "summary": rows, "budget": {"seconds": 40, **clock}}).split())
    assert ("had 4 % of a core during their seconds" in text and "--budget.clock processor" in text) == told


def test_averages_of_the_weights_are_tested_and_kept(tmp_path):
    """There is only one validation, of the averages at the end. A model may have another decay, or no averages."""
    changes = {"usual": {}, "other": {"ema": 0.2}, "none": {"ema": 0}}
    models = {name: {**sized(channels=20), **change} for name, change in changes.items()}
    options = {"ema": 0.8, "models": models, "data__rotate_test": False, "budget__evaluations": 1}
    report, kept = compare(tmp_path, **QUICK, **options), []
    assert {cell["model"]: cell["ema"] for cell in report["cells"]} == {"usual": 0.8, "other": 0.2, "none": None}
    rods = Batch.from_data_list([Rods()[index] for index in range(10)])
    for cell in report["cells"]:
        file = tmp_path / f"cells/{cell['model']}-1-0/best.ckpt"
        assert "current_model_state" not in train.read_checkpoint(file)["state_dict"]
        network = train.load_network(file, [__name__.partition(".")[0]])
        accuracy = (network(rods).argmax(dim=1) == rods.y).float().mean()
        assert float(accuracy) == pytest.approx(cell["metrics"]["accuracy"])
        assert count_parameters(network) == cell["parameters"]
        kept.append(network.mlp[0].weight)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(kept, 2))
    assert not list(tmp_path.glob("cells/*/last.ckpt"))


def test_seconds_are_a_budget_too(tmp_path):
    report = compare(tmp_path, budget={"seconds": 0.1, "evaluations": 3}, models={"it": sized()}, **QUICK)
    (cell,) = report["cells"]
    # No upper bound: on a busy machine a single step may take longer than the whole budget.
    assert cell["seconds"] >= 0.1
    assert cell["steps"] >= 1
    assert 1 <= len(cell["history"]) <= 3
    assert cell["history"][-1][0] == cell["steps"]
    assert report["budget"] == {"seconds": 0.1}
    assert report["summary"][0]["processor_share"] == pytest.approx(cell["processor_seconds"] / cell["seconds"])


def test_diverging_training_is_reported(tmp_path, capsys):
    models = {"good": sized(), "bad": sized(fault="diverging")}
    report = compare(tmp_path, status=1, models=models, **QUICK)
    failed = next(cell for cell in report["cells"] if cell["model"] == "bad")
    assert "the training loss is nan at step 0" in failed["failed"]
    assert "1, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize("models", ["beside another model", "alone"])
def test_tests_that_are_nan_are_reported(tmp_path, capsys, models):
    chosen = {"blind": spec("Distances", outputs=1, fault="blind", until=10**6)}
    if models != "alone":
        chosen["seeing"] = spec("Distances", outputs=1)
    report = compare(tmp_path, models=chosen, task=REGRESSION, **QUICK)
    means = {row["model"]: (row["test"]["mean"], row["rotated"]["mean"]) for row in report["summary"]}
    assert means.pop("blind") == (None, None)
    assert all(value is not None for pair in means.values() for value in pair)
    printed = capsys.readouterr().out
    assert re.search(r"^blind .* 1 +nan +nan +10 ", printed, re.MULTILINE)
    assert re.search(r"^blind +nan +nan\n", printed, re.MULTILINE)  # the validations
    assert re.search(r"^blind .* - +nan -> nan +nan -> nan\n", printed, re.MULTILINE)  # it has no group of its own
    assert (tmp_path / "comparison.png").is_file() == bool(means)


def test_a_first_validation_that_is_nan_is_not_the_best(tmp_path):
    models = {"blind": spec("Distances", outputs=1, fault="blind", until=4)}
    (cell,) = compare(tmp_path, models=models, task=REGRESSION, **QUICK)["cells"]
    values = [value for *_, value in cell["history"]]
    assert values[0] is None
    assert cell["validation"] == min(values[1:])
    assert cell["metrics"]["error"] is not None


def test_outputs_that_are_no_targets(tmp_path, capsys):
    models = {"plain": spec("Distances", outputs=1), "talkative": spec("Talkative", outputs=1)}
    plain, talkative = compare(tmp_path, models=models, task=REGRESSION, **QUICK)["cells"]
    for name in ("metrics", "operations", "validation"):
        assert plain[name] == talkative[name]
    constant = {"constant": spec("Talkative", outputs=1, fault="constant")}
    compare(tmp_path, status=2, models=constant, task=REGRESSION, **QUICK)
    assert "network: expected outputs that depend on weights with requires_grad" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "monitor"), [("Own", ["val/right", "max"]), ("OwnLoss", ["val/loss", "min"])])
def test_tasks_of_users(tmp_path, name, monitor):
    report = compare(tmp_path, task={"class_path": f"{HERE}.{name}"}, models={"it": sized()}, **QUICK)
    assert report["cells"][0]["monitor"] == monitor
    assert report["metric"] == monitor[0].removeprefix("val/")
    assert {"loss", "right"} <= set(report["cells"][0]["metrics"])


def test_vectors_in_and_out(tmp_path):
    task = {"class_path": "lieattn.train.PointSetRegressor", "init_args": {"targets": "arrow"}}
    models = {"exact": spec("Arrows"), "spoilt": spec("Arrows", spoil=0.3)}
    report = compare(tmp_path, task=task, models=models, **{**QUICK, "equivariance": {"clouds": 3, "elements": 2}})
    assert report["metric"] == "error"
    exact, spoilt = (row["equivariance"]["after"] for row in report["summary"])
    assert all(exact[kind] < 1e-6 for kind in ("own", "rotations", "reflections"))
    assert all(spoilt[kind] > 1e-2 for kind in ("own", "rotations", "reflections"))
    assert report["summary"][0]["group"] == "O"
    for cell in report["cells"]:
        assert cell["rotated_metrics"]["error"] == pytest.approx(cell["metrics"]["error"], rel=0.9)


# Continued and joined runs


@pytest.mark.parametrize(
    ("step", "ema"), [(6, None), *(pytest.param(step, None, marks=pytest.mark.slow) for step in (3, 4, 10)), (6, 0.8)]
)
def test_interrupted_cell_continues_to_the_same_record(finished, tmp_path, monkeypatch, capsys, step, ema):
    """Step 4 is validated, step 6 ends an epoch, and step 10 ends the training."""
    real = budgets.Budget.on_train_batch_end

    def interrupted(self, trainer, *rest):
        if self.steps == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, trainer, *rest)

    options = {"seeds": [0], "fractions": [1.0], "ema": ema, "arguments": ("--models", "distances")}
    with monkeypatch.context() as patch:
        patch.setattr(budgets.Budget, "on_train_batch_end", interrupted)
        compare(tmp_path, status=130, **options)
    assert "To continue: the same command" in capsys.readouterr().err
    assert (tmp_path / "cells/distances-1-0/last.ckpt").is_file()
    whole = reports(finished) if ema is None else compare(tmp_path / "whole", **options)
    assert without_times(compare(tmp_path, **options)) == without_times(whole, 0, 1)[:1]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_cells_go_on_where_one_ends_with_an_error(tmp_path, capfd, jobs):
    models = {"broken": spec("Distances", outputs=2, fault="broken"), "distances": sized(channels=20)}
    options = {"models": models, "arguments": ("--jobs", str(jobs)), **QUICK}
    report = compare(tmp_path, status=1, **options)
    told = capfd.readouterr().err
    assert "LookupError: broken on purpose\nin the cell: broken, 100 % of the data, seed 0" in told
    assert "cells that ended with an error: 1; the report omits them" in told
    assert [(cell["model"], cell["failed"]) for cell in report["cells"]] == [("distances", None)]
    compare(tmp_path, status=1, **options)
    assert "1 of 2 cells are finished, 1 to run" in capfd.readouterr().err


@pytest.mark.slow  # processes that import everything; test_cells_are_shared_by_machines shares cells in this one
def test_jobs_share_the_cells(finished, tmp_path, capfd):
    """Each cell is run once, and the report is that of a single process. If a cell fails, the command fails."""
    models = {**config()["models"], "diverging": sized(fault="diverging", channels=20)}
    report = compare(tmp_path, status=1, arguments=("--jobs", "2"), models=models, fractions=[1.0], seeds=[0])
    assert [cell["model"] for cell in report["cells"] if cell["failed"]] == ["diverging"]
    run = [line.split("] ")[1].split(":")[0] for line in capfd.readouterr().err.splitlines() if line.startswith("[")]
    assert len(run) == len(set(run)) == len(report["cells"])
    report["cells"] = [cell for cell in report["cells"] if not cell["failed"]]
    assert without_times(report) == without_times(reports(finished), 0, 1)


def test_lines_of_several_processes_stay_whole(tmp_path, monkeypatch):
    """Every message is written in one call with its newline, so messages of several processes are not interleaved."""
    written = []
    stream = io.StringIO()
    stream.write = lambda text: written.append(text) or len(text)
    monkeypatch.setattr("sys.stderr", stream)
    compare(tmp_path, models={"it": sized()}, **QUICK)
    lines = [text for text in written if text]
    assert sum(text.startswith("[") for text in lines) == 1
    assert all(text.endswith("\n") for text in lines)


@pytest.mark.slow
def test_jobs_are_stopped_together_and_continue(tmp_path, capfd):
    models = {"interrupting": sized("Interrupting", flag=str(tmp_path / "flag"))}
    options = {"models": models, "seeds": [0, 1, 2], "fractions": [1.0]}
    assert compare(tmp_path, status=143, arguments=("--jobs", "2"), **options) == {}
    assert capfd.readouterr().err.count("To continue: the same command") == 1
    assert (tmp_path / "flag").exists()  # otherwise the next run would ask this process to stop
    assert len(compare(tmp_path, **options)["cells"]) == 3


@pytest.mark.slow
def test_jobs_end_with_a_command_that_is_killed(tmp_path):
    """If the command is killed, its jobs save their state and end; only then does their shared output stream close."""
    model = sized("Interrupting", flag=str(tmp_path / "flag"), after=20, signum=int(signal.SIGKILL))
    file = write(tmp_path / "compare.yaml", config(models={"killing": model}, budget__steps=10**9, fractions=[1.0]))
    command = [sys.executable, "-m", "lieattn", "compare", "--config", str(file), "--out", str(tmp_path), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert list(tmp_path.rglob("last.ckpt"))


def test_signal_outside_of_training(tmp_path, monkeypatch, capsys):
    # Processes started in the background ignore the signal, and the tests may run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(EquivarianceProbe, "measure", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert compare(tmp_path, status=130) == {}
    finally:
        signal.signal(signal.SIGINT, before)
    assert "To continue: the same command" in capsys.readouterr().err
    assert not list(tmp_path.rglob("cells/*.json"))


@pytest.mark.parametrize("content", ["damaged", "weights alone"])
def test_a_checkpoint_without_a_training_restarts_the_cell(finished, tmp_path, content):
    chosen, cell, store = settings(tmp_path), Cell("distances", 1.0, 0), CellStore(tmp_path, print)
    model = match_models(chosen)["distances"][0]
    weights = (finished / "cells/distances-1-0/best.ckpt").read_bytes()
    found = {"damaged": b"PK\x03\x04 cut off", "weights alone": weights}
    (store.progress(cell, chosen.key(cell, model)) / "last.ckpt").write_bytes(found[content])
    record = cells.CellRunner(chosen, Sets(chosen), store).run(cell, model)
    expected = without_times(reports(finished), 0, 1)[0]
    assert record["metrics"] == pytest.approx(expected["metrics"])
    assert record["steps"] == 10


def test_damaged_mark_of_a_cell_in_progress_empties_its_folder(tmp_path):
    store, cell = CellStore(tmp_path, print), Cell("distances", 1.0, 0)
    folder = store.progress(cell, "abc")
    for damaged in (b"", b"\xff\xfe"):
        (folder / "key").write_bytes(damaged)
        (folder / "last.ckpt").write_bytes(b"of unknown settings")
        assert store.progress(cell, "abc") == folder
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("key", "abc")]


def test_only_affected_cells_are_run_again(finished, tmp_path, capsys):
    shutil.copytree(finished / "cells", tmp_path / "cells")
    changed = copy.deepcopy(config()["models"])
    changed["first coordinate"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    for changes, done in (
        ({"models": changed}, "4 of 8"),
        ({"seeds": [0, 1, 2]}, "8 of 12"),
        ({"arguments": ("--plan", "--root", "elsewhere")}, "8 of 8"),
        ({"budget": {"steps": 11}}, "0 of 8"),
    ):
        compare(tmp_path, **{"arguments": ("--plan",), **changes})
        message = capsys.readouterr().err
        assert f"{done} cells are finished" in message
        assert ("first_coordinate-0.5-0.json was made with other settings" in message) == (done in ("4 of 8", "0 of 8"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            lambda text, other: '{"key": "',
            r"is damaged \(it was not written by `lieattn compare`: JSONDecodeError: Untermi",
        ),
        (lambda text, other: "[]", r"is damaged \(it was not written by"),
        (lambda text, other: other, "was made with other settings"),
        (
            lambda text, other: text.replace('"clouds": 24', '"clouds": 23'),
            r"is damaged \(the record differs from what was written",
        ),
        (
            lambda text, other: text.replace('"digest"', '"sum"'),
            r"is damaged \(it was not written by `lieattn compare`: KeyError: 'digest'",
        ),
    ],
    ids=["cut off", "a list", "of another cell", "changed", "without a digest"],
)
def test_damaged_records_are_named_and_not_read(finished, tmp_path, text, problem):
    shutil.copytree(finished / "cells", tmp_path / "cells")
    chosen, cell, told = settings(tmp_path), Cell("distances", 1.0, 0), []
    store, key = CellStore(tmp_path, told.append), chosen.key(cell, match_models(chosen)["distances"][0])
    assert store.load(cell, key)["steps"] == 10
    file = tmp_path / "cells/distances-1-0.json"
    file.write_text(text(file.read_text(), (tmp_path / "cells/distances-0.5-1.json").read_text()))
    assert store.load(cell, key) is None
    assert re.search(f"distances-1-0.json {problem}", "\n".join(told))


def test_models_of_another_environment_are_joined(tmp_path, monkeypatch, capsys):
    """The command runs in two environments with two folders. Neither can build the model of the other."""
    models = {"first": sized(channels=20, fault="here"), "second": sized(fault="there")}
    here, there, options = tmp_path / "here", tmp_path / "there", {"models": models, **QUICK}
    report = compare(here, arguments=("--models", "first"), **options)
    assert [row["test"]["std"] for row in report["summary"]] == [None]
    assert "±" not in capsys.readouterr().out
    compare(here, status=2, **options)
    assert "No module named 'absent'. Run its cells with --models in an environment" in capsys.readouterr().err
    there.mkdir()
    shutil.copy(here / "widths.json", there)  # with the size of the first model, to which the second is matched
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("OTHER_ENVIRONMENT", "1")
        report = compare(there, arguments=("--models", "second"), **options)
    assert [(cell["model"], cell["parameters"]) for cell in report["cells"]] == [("second", 102)]
    shutil.copytree(there, here, dirs_exist_ok=True)
    capsys.readouterr()
    report = compare(here, **options)
    assert "2 of 2 cells are finished, 0 to run" in capsys.readouterr().err
    assert [cell["model"] for cell in report["cells"]] == ["first", "second"]
    compare(here, status=2, arguments=("--models", "else"), **options)
    assert "--models: 'else' is not among first, second" in capsys.readouterr().err


def test_cells_are_shared_by_machines(finished, tmp_path, capsys):
    """Each machine runs its part and writes no report; a last call without `--cells` writes it.

    Control: another seed gives other results.
    """
    file = write(tmp_path / "compare.yaml", config(seeds=[0], fractions=[1.0]))
    base = ["compare", "--config", str(file), "--out", str(tmp_path)]
    for part in ("1/2", "2/2"):
        assert main([*base, "--cells", part]) == 0
    assert not (tmp_path / "comparison.json").exists()
    assert re.findall(r"(\d+) to run", capsys.readouterr().err) == ["1", "1"]
    assert main(base) == 0
    assert "2 of 2 cells are finished, 0 to run" in capsys.readouterr().err
    expected, others = (without_times(reports(finished), seed, 1) for seed in (0, 1))
    assert without_times(reports(tmp_path)) == expected
    assert [cell["history"] for cell in others] != [cell["history"] for cell in expected]
    for part in ("0/3", "4/3", "2", "a/b"):
        assert main([*base, "--cells", part]) == 2
        assert "expected I/N with I from 1 to N" in capsys.readouterr().err


# Parts of a cell


def test_shares_of_the_data_are_nested(tmp_path):
    sets = Sets(settings(tmp_path))
    chosen = {share: set(sets.data(Cell("distances", share, 0)).sets["train"].indices) for share in (0.1, 0.5, 1.0)}
    assert [len(one) for one in chosen.values()] == [2, 12, 24]
    assert chosen[0.1] < chosen[0.5] < chosen[1.0]
    assert chosen[0.5] != set(sets.data(Cell("distances", 0.5, 1)).sets["train"].indices)
    assert len(sets.data(Cell("distances", 1e-6, 0)).sets["train"]) == 1


def test_limits_choose_the_same_clouds_always(tmp_path):
    sets = Sets(settings(tmp_path, data__limit={"test": 4}))
    first, again = ([float(cloud.pos.sum()) for cloud in sets.clouds(9)] for _ in range(2))
    assert len(first) == 4
    assert first == again
    assert first != [float(cloud.pos.sum()) for cloud in Sets(settings(tmp_path)).clouds(4)]  # not those at the front


def test_turned_test_set_is_the_same_for_all(tmp_path):
    sets = Sets(settings(tmp_path))
    first, again = (next(iter(sets.test_data(rotated=True).test_dataloader())) for _ in range(2))
    upright = next(iter(sets.test_data(rotated=False).test_dataloader()))
    assert torch.equal(first.pos, again.pos)
    assert not torch.allclose(first.pos, upright.pos)
    torch.testing.assert_close(torch.cdist(first.pos, first.pos)[:4, :4], torch.cdist(upright.pos, upright.pos)[:4, :4])
    torch.testing.assert_close(first.arrow, first.pos[1::4] - first.pos[::4])
    torch.testing.assert_close(first.outer, first.arrow[:, :, None] * first.arrow[:, None])


@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_rotations_about_an_axis(axis):
    matrix = random_rotation(3, axis)
    kept = torch.zeros(3, dtype=torch.float64)
    kept["xyz".index(axis)] = 1
    torch.testing.assert_close(matrix @ kept, kept)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(3, dtype=torch.float64))
    assert not torch.allclose(matrix, torch.eye(3, dtype=torch.float64))


def test_training_turns_the_clouds_anew_in_every_epoch(tmp_path):
    data = Sets(settings(tmp_path, data__rotate_train="z")).data(Cell("distances", 1.0, 0))
    assert isinstance(data.sets["train"], TurnedClouds)
    assert isinstance(data.sets["val"], TurnedClouds)
    seeded = data.items_of("train")
    poses = [seeded[epoch, 0].pos for epoch in (0, 1, 0)]
    assert torch.equal(poses[0], poses[2])
    assert not torch.allclose(poses[0], poses[1])
    torch.testing.assert_close(poses[0][:, 2], poses[1][:, 2])


def test_flat_clouds_turn_too():
    cloud, matrix = Rods(dim=2)[3], random_rotation(2)
    moved = turned(cloud, matrix, ("pos", "arrow"), ())
    torch.testing.assert_close(moved.pos.double(), cloud.pos.double() @ matrix.mT)
    torch.testing.assert_close(moved.outer, cloud.outer)


class Signs(nn.Module):
    """A network that is invariant to sign changes and permutations of the axes, and not to translations."""

    def forward(self, data: Batch) -> torch.Tensor:
        return global_mean_pool(data.pos.abs().pow(3).sum(dim=1, keepdim=True), data.batch)


@pytest.mark.parametrize(
    ("group", "own"), [(None, None), (octahedral(), True), (SO(3), False), (cyclic(3), "refused")], ids=str
)
def test_own_group_is_measured_apart(tmp_path, group, own):
    """Without vectors, translations are tested too."""
    size = {"clouds": 3, "elements": 4}
    probe = EquivarianceProbe(Sets(settings(tmp_path, equivariance=size)), ["y"])
    if own == "refused":
        with pytest.raises(ValueError, match="C3 acts on 2 coordinates, the clouds have 3"):
            probe.measure(Signs(), group)
        return
    found = probe.measure(Signs(), group)
    assert found["rotations"] > 1e-3
    assert found["own"] is None if own is None else (found["own"] < 1e-5) == own
    free = EquivarianceProbe(Sets(settings(tmp_path, equivariance=size, data__vectors=[], data__tensors=[])), ["y"])
    assert free.measure(Signs(), group)["own"] is None if own is None else free.measure(Signs(), group)["own"] > 1e-2


@pytest.mark.parametrize("group", [trivial(2), cyclic(4)], ids=str)
def test_networks_of_images_turn_by_quarters(tmp_path, group):
    digits = {part: {"class_path": "lieattn_datasets.Digits"} for part in ("train", "val", "test")}
    sets = Sets(settings(tmp_path, data=digits, equivariance={"clouds": 2, "elements": 2}))
    network = randomize(AffineSelfConvNet(group, 1, 10, blocks=1, channels=4, heads=2))
    found = EquivarianceProbe(sets, ["y"]).measure(network, group)
    assert found["own"] < 1e-5
    assert (found["rotations"] < 1e-5) == (group.order == 4)
    assert found["reflections"] > 1e-3


def test_equivariance_is_measured_on_clouds_with_points(tmp_path):
    sets = Sets(settings(tmp_path, data__test=spec("Rods", empty=3)))
    assert [len(cloud.pos) for cloud in sets.clouds(4)] == [4] * 4
    with pytest.raises(train.UsageError, match=r"data\.test: expected clouds with positions pos.* not all empty"):
        Sets(settings(tmp_path, data__test=spec("Rods", empty=24)))


def test_schedule_spans_the_budget():
    budget = budgets.Budget(BudgetSettings(seconds=10.0))
    schedule = budgets.BudgetSchedule(train.WarmupCosine(warmup_epochs=0.1), budget)
    found = []
    for seconds in (0.0, 0.5, 1.0, 5.5, 10.0, 12.0):
        budget.seconds = seconds
        found.append(schedule.factor(999, float("inf"), 3))
    assert found == pytest.approx([0, 0.5, 1, 0.5, 0, 0], abs=1e-4)
    steps = budgets.BudgetSchedule(train.WarmupCosine(warmup_epochs=0.1), budgets.Budget(BudgetSettings(steps=20)))
    assert [steps.factor(step, float("inf"), 3) for step in (0, 1, 2, 11, 20)] == pytest.approx([0.5, 1, 1, 0.5, 0])


@pytest.mark.parametrize("clock", ["wall", "processor"])
def test_seconds_of_the_processor_do_not_pass_while_it_waits(clock):
    budget = budgets.Budget(BudgetSettings(seconds=10.0, clock=clock))
    trainer = SimpleNamespace(should_stop=False, is_last_batch=True, val_check_batch=1)
    module = SimpleNamespace(device=torch.device("cpu"))
    budget.on_train_batch_start(trainer, module)
    time.sleep(0.1)
    budget.on_train_batch_end(trainer, module, None, SimpleNamespace(num_graphs=1))
    assert (budget.seconds >= 0.1) == (clock == "wall")
    assert budget.steps == 1


def test_a_budget_counts_and_continues(monkeypatch):
    """With a simulated clock: two steps of 2 and 3 s with 4 clouds each."""
    now, reports = iter([10.0, 12.0, 20.0, 23.0, 30.0, 31.5]), []
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    budget = budgets.Budget(BudgetSettings(seconds=6.0), report=lambda *spent: reports.append(spent))
    trainer = SimpleNamespace(should_stop=False, is_last_batch=True, val_check_batch=1)
    module, batch = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(num_graphs=4)
    for _ in range(2):
        budget.on_train_batch_start(trainer, module)
        budget.on_train_batch_end(trainer, module, None, batch)
    assert reports == [(1, 2.0), (2, 5.0)]
    assert not trainer.should_stop
    budget.on_train_batch_start(trainer, module)
    assert budget.spent == 1  # 1.5 s of the step that runs count too, and more than all is never spent
    budget.history, budget.best, budget.best_value = [[1, 2.0, 0.5]], {"w": torch.ones(1)}, 0.5
    other = budgets.Budget(BudgetSettings(steps=20))
    other.load_state_dict(budget.state_dict())
    assert (other.steps, other.seconds, other.clouds, other.spent) == (2, 5.0, 8, 0.1)
    assert (other.history, other.best, other.best_value) == ([[1, 2.0, 0.5]], {"w": torch.ones(1)}, 0.5)


def test_the_rate_counts_clouds_of_all_batches_but_the_first(monkeypatch):
    now = iter([0.0, 9.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(budgets, "_now", lambda *_: next(now))
    clock = budgets.InferenceClock()
    for count in (8, 8, 4):
        clock.on_test_batch_start(None, None)
        clock.on_test_batch_end(None, None, None, SimpleNamespace(num_graphs=count))
    assert clock.rate == pytest.approx((8 + 4) / (1 + 3))


@pytest.mark.parametrize(
    ("histories", "budget", "expected"),
    [
        # The shares that all seeds have.
        (
            [[[5, 2.6, 0.5], [9, 5.1, 0.4], [14, 7.6, None], [20, 10.2, 0.2]], [[3, 6.0, 0.3], [5, 12.0, 0.1]]],
            {"seconds": 10, "evaluations": 4},
            [(2, 6, 0.35), (4, 12.5, 0.15)],
        ),
        # The share 29 / 100 times 100 is rounded to less than 29.
        (
            [[[step, 0.1 * step, 1.0] for step in range(1, 101)]],
            {"steps": 100, "evaluations": 100},
            [(step, step, 1.0) for step in range(1, 101)],
        ),
    ],
    ids=["seconds", "many validations"],
)
def test_curves_have_a_point_for_each_share(histories, budget, expected):
    curve = _curve([{"history": history} for history in histories], BudgetSettings(**budget))
    found = [(point["part"], point["steps"], point["mean"]) for point in curve]
    assert found == [pytest.approx(point) for point in expected]


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    batch = Batch.from_data_list([Rods()[0]] * 2000)
    found = cells.training_memory(spec("Distances", outputs=2, channels=1024), batch)
    hidden = 8000 * 1024 * 4 / 2**20
    assert hidden < found < 20 * hidden


@pytest.mark.slow
def test_memory_is_measured_with_the_first_seed(tmp_path, monkeypatch):
    measured = iter([12.0, 14.0])
    monkeypatch.setattr(cells, "training_memory", lambda network, batch: next(measured))
    content = compare(tmp_path, memory=True, seeds=[3, 0])
    found = {(cell["model"], cell["seed"]): cell["peak_memory_mib"] for cell in content["cells"]}
    assert set(found.values()) == {None, 12.0, 14.0}
    assert all((value is None) == (seed == 0) for (_, seed), value in found.items())
    assert {row["peak_memory_mib"] for row in content["summary"]} == {12.0, 14.0}


# Settings


def test_root_is_given_to_data_sets_that_take_one(tmp_path):
    for root, own, expected in ((None, {}, "here"), ("there", {}, "there"), ("there", {"root": "mine"}, "mine")):
        file = write(tmp_path / "a.yaml", config(root="here", data__test=spec("Rods", **own)))
        assert Sets(read_settings([file], root)).clouds(1)[0].root == expected
    short = write(tmp_path / "c.yaml", config(data__train={"class_path": "FashionMNIST900"}))
    with pytest.raises(train.UsageError, match="root='nowhere'"):
        Sets(read_settings([short], "nowhere"))


COSINE = {"class_path": "lieattn.train.WarmupCosine"}
ONE_EPOCH = "schedule: the whole budget counts as one epoch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dta": 1}, "unknown setting 'dta'; expected some of task, models"),
        ({"models": {}}, "models: expected names"),
        ({"models": {"a/b": spec("Arrows")}}, "models: expected names of letters.*'a/b'"),
        ({"models": {"a b": spec("Arrows"), "A_b": spec("Arrows")}}, "names must differ"),
        ({"models__distances__widht": "channels"}, "models.distances: unknown setting 'widht'"),
        ({"models__distances": {"init_args": {}}}, "models.distances: .* arguments are required: class_path"),
        ({"models__distances__step": 0}, "models.distances: step: expected an integer of at least 1, got 0"),
        ({"models__distances__adjust": {"outputs": 3}}, "models.distances: adjust: Expected a <class 'list'>.* 3"),
        (
            {"models__distances__group": {"class_path": "lieattn.groups.cyclic", "init_args": {"n": 0}}},
            "models.distances.group cannot be built: n: expected",
        ),
        ({"budget": {}}, "budget: expected either steps or seconds, got neither$"),
        ({"budget": {"steps": 3, "seconds": 4}}, "or seconds, got steps 3 and seconds 4; set one to null$"),
        ({"budget": {"seconds": -1}}, "budget: seconds: expected a positive number, got -1"),
        ({"budget": {"seconds": 1, "clock": "sun"}}, "budget: clock: Expected .*: sun"),
        ({"data__test": "Rods"}, "data: test: Expected a <class 'dict'>. Got value: Rods"),
        ({"data__limit": {"tests": 3}}, r"data: limit: expected some of .*, got \['tests'\]"),
        ({"data__rotate_test": "up"}, "data: rotate_test: expected true, false, or an axis"),
        *(({"seeds": seeds}, "seeds: expected a list of different integers of at least 0") for seeds in ([1, 1], [-1])),
        *(({"fractions": x}, "fractions: expected .* that differ in six digits") for x in ([0.5, 0.50000001], [0])),
        ({"match": {"tolerance": 2}}, r"match: tolerance: expected a number in \(0, 1\), got 2"),
        ({"match": {"by": "speed"}}, "match: by: Expected .*: speed"),
        ({"match": {"to": "else"}}, r"match: to: expected a number or one of .*, got 'else'"),
        ({"match": {"by": "seconds", "to": -1}}, "match: to: expected a positive number"),
        ({"ema": 1.5}, r"ema: expected a number in \[0, 1\), got 1.5"),
        ({"models__distances__ema": -1}, r"models.distances: ema: expected a number in \[0, 1\), got -1"),
        ({"trainer": {"max_epochs": 3}}, r"trainer: expected some of .*, got \['max_epochs'\]"),
        ({"trainer": {"devices": 2}}, "trainer.devices: cells train on one device"),
        ({"trainer": {"precision": "quarter"}}, "lieattn compare: trainer: Precision 'quarter' is invalid"),
        ({"data__vectors": ["length"]}, r"data.vectors: length must be \[..., 3\] to be turned, got \[1, 1\]"),
        ({"data__vectors": ["velocity"]}, r"data.vectors: expected attributes of the clouds, .*, got \['velocity'\]"),
        ({"data__tensors": ["arrow"]}, r"data.tensors: arrow must be \[..., 3, 3\] to be turned"),
        ({"data__train": spec("Rods", size=0)}, "data.train: the data set is empty"),
        ({"data__train": spec("Sticks")}, "data.train cannot be built"),
        ({"task__init_args": {"classes": 1}}, "classes: expected at least 2"),
        (
            {"task": {"class_path": f"{HERE}.Own", "init_args": {"right": "wrong"}}},
            "task: Own.monitor is 'val/right', but evaluate logs ",
        ),
        (
            {"task": {"class_path": f"{HERE}.Untyped"}},
            "optimizer: expected a function of the parameters, got Namespace",
        ),
        ({"schedule": COSINE}, ONE_EPOCH),
        (
            {"schedule": {**COSINE, "init_args": {"warmup_epochs": 0.9}}, "budget": {"steps": 3}},
            f"{ONE_EPOCH} .* got 3 steps: lower warmup_epochs, or train longer",
        ),
        ({"schedule": {"class_path": "lieattn.train.Plateau"}}, "schedule: expected another one than Plateau"),
    ],
    ids=str,
)
def test_bad_settings_are_named(tmp_path, capsys, changes, message):
    compare(tmp_path, status=2, seeds=changes.pop("seeds", [0]), **changes)
    assert re.search(message, capsys.readouterr().err)


def test_settings_can_be_replaced(tmp_path, capsys):
    file = write(tmp_path / "compare.yaml", config())
    changes = ["budget.steps=3", "seeds=[5]", "equivariance.clouds=1", "match.tolerance=0.5"]
    found = read_settings([file], changes=changes)
    assert (found.budget.steps, found.budget.evaluations, found.seeds, found.match.tolerance) == (3, 3, [5], 0.5)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- 1")
    for arguments, message in (
        (["--config", str(file), "--budget.steps", "0", "--seeds=[5]"], "steps"),  # both options are read
        (["--config", str(file), "--seeds"], "--seeds: expected one argument"),
        (["--config", str(file), "--seeds.first=1"], "--seeds.first: expected a setting, or"),
        (["--config", str(file), "--data.limit.val.first=1"], "data: limit: Expected a <class 'int'>.* {'first': 1}"),
        (["--config", str(file), "--seeds=["], "--seeds cannot be read: while parsing"),
        (["--config", str(file), "--data.seeed=1"], "unknown setting 'seeed'"),
        (["--config", str(file), "--jobs", "0"], "--jobs: expected an integer of at least 1"),
        *((["--config", str(tmp_path / f"{name}.yaml")], "cannot be read") for name in ("absent", "broken")),
        (["--config", str(tmp_path / "list.yaml")], "expected sections"),
    ):
        assert main(["compare", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["forces", "molecules", "dipoles", "shapes", "modelnet", "nbody"])
def test_example_configurations_are_read(name):
    found = read_settings([ROOT / f"examples/configs/compare_{part}.yaml" for part in ("base", name)], "folder")
    assert len(found.models) >= 6
    # Each model has the learning rate that the search found for it.
    assert all(model.optimizer is not None and model.width == "channels" for model in found.models.values())
    assert len(found.cells()) == 3 * len(found.models)


def test_arguments_and_options_of_them_are_adjusted():
    model = ModelSettings("a.B", {"basis": {"size": 8}}, width="channels", adjust={"basis.hidden": [16, 8]})
    assert model.chosen == {}
    changed = model.with_arguments(**{"basis.hidden": 16, "channels": 4})
    assert changed.init_args == {"basis": {"size": 8, "hidden": 16}, "channels": 4}
    assert changed.choice == "channels = 4, basis.hidden = 16"


def test_keys_of_cells(tmp_path):
    """They are those of version 0.1, and depend on averages and clocks."""
    content = {"task": {"class_path": "lieattn.train.PointSetClassifier", "init_args": {"classes": 2}}}
    content["models"] = {"a": {"class_path": "my.Net", "init_args": {"channels": 4}, "width": "channels"}}
    content["data"] = {name: {"class_path": "my.Data"} for name in ("train", "val", "test")}
    old = read_settings([write(tmp_path / "old.yaml", {**content, "budget": {"steps": 10}})])
    key = "5de2139d7c25f2c311bf78e7f1ead60f40b75700aab3b68f1696f8e20baf1382"
    assert old.key(Cell("a", 1.0, 0), old.models["a"]) == key
    plain, averaged = settings(tmp_path), settings(tmp_path, ema=0.9)
    cell, model = plain.cells()[0], plain.models["distances"]
    assert plain.key(cell, model) != averaged.key(cell, model)
    assert plain.key(cell, dataclasses.replace(model, ema=0.9)) == averaged.key(cell, model)
    assert averaged.key(cell, dataclasses.replace(model, ema=0.0)) == plain.key(cell, model)
    clocks = [settings(tmp_path, budget={"seconds": 1, "clock": clock}) for clock in ("wall", "processor")]
    assert clocks[0].key(cell, model) != clocks[1].key(cell, model)


# Ways to match


def test_widths_are_matched(tmp_path):
    for name, (model, count) in match_models(settings(tmp_path, match={"to": 1000})).items():
        assert count == count_parameters((Distances if name == "distances" else Coordinates)(**model.init_args))
        # The chosen width gives the nearest count among all multiples of the step.
        widths = range(model.step, 1000, model.step)
        assert abs(count - 1000) == min(abs(3 * w + 2 * w + 2 - 1000) for w in widths)
    (first, count), (_, other) = match_models(settings(tmp_path)).values()  # matched to the first model
    assert first.init_args["channels"] == 20
    assert count == other == 5 * 20 + 2
    b = {**sized(step=16), "adjust": {"outputs": [2, 5, 3]}}
    model, count = match_models(settings(tmp_path, match={"to": 102}, models={"b": b}))["b"]
    assert (model.chosen, count) == ({"channels": 16, "outputs": 3}, 3 * 16 + 3 * 16 + 3)


class Around(nn.Module):
    """Another network, and a layer of a width of its own."""

    def __init__(self, network: nn.Module, hidden: int = 1):
        super().__init__()
        self.network, self.layer = network, nn.Linear(hidden, 2)


def test_widths_of_networks_in_arguments(tmp_path):
    inner = {"class_path": f"{HERE}.Distances", "init_args": {"outputs": 2}}
    around = {**spec("Around", network=inner), "width": ["network.channels", "hidden"]}
    model, count = match_models(settings(tmp_path, match={"to": 704}, models={"b": around}))["b"]
    assert count == (5 * 100 + 2) + (2 * 100 + 2)
    assert model.chosen == {"network.channels": 100, "hidden": 100}
    assert model.init_args["network"]["init_args"] == {"outputs": 2, "channels": 100}
    full = {**around, "width": "network.init_args.channels", "init_args": {"network": inner, "hidden": 4}}
    assert match_models(settings(tmp_path, match={"to": 512}, models={"b": full}))["b"][1] == 5 * 100 + 2 + 10


@pytest.mark.parametrize(
    ("b", "message", "size"),
    [
        (sized(step=64), r"cannot be matched to 102 parameters within 5 %; the nearest are 322 \(channels = 64\)", 322),
        (sized(step=16), r"the nearest are 82 \(channels = 16\) and 162 \(channels = 32\), of which the first is", 82),
        (spec("Distances", outputs=2), r"the nearest are 42 \(as configured\)", 42),
    ],
)
def test_the_nearest_size_is_used_with_a_warning(tmp_path, b, message, size):
    a = {"class_path": f"{HERE}.Distances", "init_args": {"outputs": 2, "channels": 20}}
    with pytest.warns(UserWarning, match=f"models.b: .*{message}"):
        assert match_models(settings(tmp_path, models={"a": a, "b": b}))["b"][1] == size


FRAMEWISE = {
    "class_path": "lieattn.models.FramewiseTransformer",
    "width": "channels",
    "init_args": {
        "frames": {"class_path": "lieattn.geometry.PrincipalFrames"},
        **{"in_channels": 1, "out_channels": 2, "heads": 2, "channels": 8, "layers": 1, "vector_inputs": []},
        "neighborhood": {"class_path": "lieattn.geometry.Radius", "init_args": {"radius": 3.0}},
    },
}


@pytest.mark.parametrize(
    ("b", "message"),
    [
        # The width is that of the configuration, so it is not said to be tried.
        (sized(step=8, heads=3, channels=8), "heads: 3 do not divide 8 channels$"),
        (FRAMEWISE, r"per head.* got \d+\. channels = \d+ was tried to match the models; .* has a `step`"),
        ({**sized(), "width": "chanels"}, "chanels"),
        (
            sized(fault="fixed"),
            r"models.b.width: expected an argument that changes the size, got 42 parameters with channels = 8 and \d+$",
        ),
        (
            sized(fault="frozen"),
            r"models.b.width: expected an argument that changes the size, got 0 parameters with channels = 8$",
        ),
    ],
)
def test_counts_that_cannot_be_matched_are_named(tmp_path, b, message):
    a = {"class_path": f"{HERE}.Distances", "init_args": {"outputs": 2, "channels": 500 if b is FRAMEWISE else 20}}
    with pytest.raises(ValueError, match=message):
        match_models(settings(tmp_path, models={"a": a, "b": b}))


@pytest.mark.parametrize("by", ["parameters", "seconds", "operations"])
def test_weights_without_a_size_are_named(tmp_path, by):
    with pytest.raises(ValueError, match=r"models.a: expected weights .*, but first.weight gets its size from the fir"):
        match_models(settings(tmp_path, models={"a": sized(fault="lazy")}, match={"by": by, "to": 100}))


def wide(**options) -> dict:
    return sized("Wide", **options)


def test_operations_are_matched(tmp_path):
    """Operations are the products of the forward and the backward pass."""
    models = {"wide": wide(channels=40), "distances": sized()}
    found = match_models(settings(tmp_path, models=models, match={"by": "operations", "to": "wide"}))
    points, clouds, c = 16, 4, 40
    # The first layer has no gradient of its input. The loss at the end squares each output once.
    assert found["wide"][1] == points * (2 * c + 3 * 3 * c * c) + clouds * (3 * 2 * c + 2)
    per_channel = points * (2 * 2 + 3 * 2)  # outputs are computed at every point
    assert found["distances"][0].init_args["channels"] == pytest.approx(found["wide"][1] / per_channel, rel=0.05)
    assert found["distances"][1] == pytest.approx(found["wide"][1], rel=0.05)


@pytest.mark.parametrize(
    ("models", "match", "expected"),
    [
        ({"a": wide(channels=20), "b": wide(step=4)}, {"tolerance": 0.1}, [20, 20]),
        # Near enough as it is, since measurements are noisy.
        ({"a": wide(channels=20), "b": wide(channels=21)}, {"tolerance": 0.1}, [20, 21]),
        (
            {"a": wide(channels=20), "b": wide(channels=50), "c": wide()},
            {"to": "b", "tolerance": 0.04},
            pytest.approx([50, 50, 50], rel=0.05),
        ),
    ],
)
def test_seconds_are_matched(tmp_path, monkeypatch, models, match, expected):
    """With a simulated clock: the time of a step is linear in the width, on a machine that becomes busier."""
    load = np.linspace(1, 9, 10**4)
    load[::5] *= 3  # other programs take over for a moment
    load = iter(load)
    monkeypatch.setattr(
        Meter, "timed_step", lambda *given: lambda: next(load) * (0.01 + 0.002 * given[2].init_args["channels"])
    )
    found = match_models(settings(tmp_path, models=models, match={"by": "seconds", **match}))
    assert [model.init_args["channels"] for model, _ in found.values()] == expected


def test_seconds_are_measured(tmp_path):
    """A wider network is slower. The bound is loose because other processes may use the machine."""
    meter = Meter(settings(tmp_path, models={"a": wide()}))
    steps = [meter.timed_step("a", ModelSettings(**spec("Wide", outputs=2, channels=size))) for size in (16, 1024)]
    narrow, broad = (np.median([step() for _ in range(5)]) for step in steps)
    assert broad > 2 * narrow > 0


@pytest.mark.parametrize("by", ["operations", "parameters"])
def test_sizes_that_were_measured_are_valid_for_the_same_settings(tmp_path, monkeypatch, by):
    """With simulated measurements, which are proportional to the square of the width."""
    calls = []

    def size(self, name, model):
        calls.append((name, model.init_args["channels"]))
        return 100 * model.init_args["channels"] ** 2

    monkeypatch.setattr(Meter, by, size)
    models = {"a": wide(channels=400), "b": wide(channels=2)}

    def measured(expected, names=None, **changes):
        calls.clear()
        chosen = settings(tmp_path, **{"models": models, "match": {"by": by}, **changes})
        found = match_models(chosen, tmp_path, names)
        assert {name: model.init_args["channels"] for name, (model, _) in found.items()} == expected
        return {name for name, _ in calls}

    same = {"a": 400, "b": 400}
    assert measured(same) == {"a", "b"}
    tried = [channels for name, channels in calls if name == "b"]
    if by == "operations":
        assert all(later <= 4 * earlier for earlier, later in itertools.pairwise(tried))  # no step takes too long
    assert measured(same) == set()
    turned = {**models, "a": {**models["a"], "group": {"class_path": "lieattn.groups.octahedral"}}}
    assert measured(same, models=turned) == set()
    other = {**models, "b": wide(channels=3)}
    assert measured({"a": 400}, ["a"], models=other) == set()  # and the size of b stays in the file
    assert measured(same) == set()
    assert measured(same, data__batch_size=2) == measured(same) == {"a", "b"}
    assert measured({"a": 300, "b": 300}, models={**models, "a": wide(channels=300)}) == {"a", "b"}
    assert measured({"a": 300}, models={"a": wide(channels=300)}) == set()
    assert set(json.loads((tmp_path / "widths.json").read_text())["models"]) == {"a"}


def test_folders_do_not_mix_ways_to_match(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "out")
    message = "holds models that were matched by parameters, these are matched by operations: choose another folder"
    for _ in range(2):  # with widths.json, and without it, as in folders of earlier versions
        compare(tmp_path / "out", status=2, match={"by": "operations"})
        assert message in capsys.readouterr().err
        (tmp_path / "out" / "widths.json").unlink(missing_ok=True)
    for damaged in ("{", '{"models": {}}', '{"by": "parameters", "models": []}', '{"by": 1, "models": {"a": {}}}'):
        (tmp_path / "out" / "widths.json").write_text(damaged)
        compare(tmp_path / "out", status=2)
        assert "widths.json is damaged" in capsys.readouterr().err
