"""Comparisons: matched widths, equal budgets, continued and repeated runs, tests on rotated clouds, reports."""

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
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool

from lieattn import train
from lieattn.cli import main
from lieattn.compare import Cell, CellStore, ModelSettings, Sets, match_models, page, read_settings
from lieattn.compare import _budget as budgets
from lieattn.compare import _cell as cells
from lieattn.compare._build import TurnedClouds, random_rotation, turned
from lieattn.compare._cell import EquivarianceProbe
from lieattn.compare._meter import LocalMeter, count_parameters, scalar
from lieattn.compare._records import _curve
from lieattn.compare._settings import BudgetSettings
from lieattn.groups import SO, FiniteGroup, LieGroup, cyclic, octahedral, trivial
from lieattn.models import AffineSelfConvNet
from lieattn.testing import randomize
from lieattn.viz import comparison, save
from tests.cases import some

HERE = __name__


class Rods(Dataset):
    """Two pairs of points of different lengths, one along x and one along y; the label is which is longer."""

    vectors = ("pos", "arrow")
    tensors = ("outer",)

    def __init__(self, size: int = 24, dim: int = 3, root: str = "", noise: float = 0.0) -> None:
        self.size, self.dim, self.root, self.noise = size, dim, root, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Data:
        generator = torch.Generator().manual_seed(index)
        pos = torch.randn(4, self.dim, generator=generator) * (1 + index % 2)
        arrow = pos[1] - pos[0] + self.noise * torch.randn(self.dim)
        return Data(
            x=torch.ones(4, 1),
            pos=pos,
            y=torch.tensor([index % 2]),
            length=arrow.norm()[None, None],
            arrow=arrow[None],
            outer=torch.outer(arrow, arrow)[None],
        )


class Distances(nn.Module):
    """A network that depends only on distances from the center."""

    guarantee = "invariant to all rotations"

    def __init__(
        self, outputs: int, channels: int = 8, heads: int = 1, group: FiniteGroup | LieGroup | None = None
    ) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"heads: {heads} do not divide {channels} channels")
        self.symmetry = group
        self.mlp = nn.Sequential(nn.Linear(2, channels), nn.Tanh(), nn.Linear(channels, outputs))

    def see(self, data: Batch) -> torch.Tensor:
        center = global_mean_pool(data.pos, data.batch)
        return (data.pos - center[data.batch]).norm(dim=1, keepdim=True)

    def forward(self, data: Batch) -> torch.Tensor:
        return global_mean_pool(self.mlp(torch.cat([data.x, self.see(data)], dim=1)), data.batch)


class Fixed(Distances):
    """A network whose size does not depend on its argument ``channels``."""

    def __init__(self, outputs: int, channels: int = 8) -> None:
        super().__init__(outputs)


class Frozen(Distances):
    """A network without trainable parameters."""

    def __init__(self, outputs: int, channels: int = 8) -> None:
        super().__init__(outputs, channels)
        self.requires_grad_(False)


class Coordinates(Distances):
    """A network that depends on the first coordinate."""

    def see(self, data: Batch) -> torch.Tensor:
        return data.pos[:, :1]


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


class Diverging(Distances):
    def forward(self, data: Batch) -> torch.Tensor:
        return super().forward(data) * float("nan")


class Interrupting(Distances):
    """Sends a signal to the parent process, once; the default signal asks it to stop."""

    def __init__(
        self, flag: str, outputs: int, channels: int = 8, after: int = 0, signum: int = signal.SIGTERM
    ) -> None:
        super().__init__(outputs, channels)
        self.flag, self.left, self.signum = Path(flag), after, signum

    def forward(self, data: Batch) -> torch.Tensor:
        self.left -= self.training
        if self.left < 0 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getppid(), self.signum)
        return super().forward(data)


class Broken(Distances):
    def forward(self, data: Batch) -> torch.Tensor:
        raise LookupError("broken on purpose")


class Stop(Exception):
    pass


def spec(name: str, **arguments) -> dict:
    return {"class_path": f"{HERE}.{name}", "init_args": arguments}


def config(**changes) -> dict:
    content = {
        "task": {"class_path": "lieattn.train.PointSetClassifier", "init_args": {"classes": 2}},
        "models": {
            "distances": {**spec("Distances", outputs=2, channels=20), "width": "channels"},
            "first coordinate": {**spec("Coordinates", outputs=2), "width": "channels", "step": 2},
        },
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
    path = folder / "comparison.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def without_times(report: dict) -> list[dict]:
    found = copy.deepcopy(report["cells"])
    for cell in found:
        for name in ("seconds", "train_clouds_per_s", "inference_clouds_per_s"):
            cell.pop(name)
        cell["history"] = [[step, value] for step, _, value in cell["history"]]
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    compare(folder)
    return folder


def reports(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


# Results


def test_every_cell_has_the_same_budget_and_its_share_of_the_data(finished):
    report = reports(finished)
    cells = report["cells"]
    assert len(cells) == 8
    assert {cell["steps"] for cell in cells} == {10}
    assert {(cell["fraction"], cell["clouds"]) for cell in cells} == {(0.5, 12), (1.0, 24)}
    assert all([step for step, _, _ in cell["history"]] == [4, 7, 10] for cell in cells)
    assert all(cell["seconds"] > 0 and cell["inference_clouds_per_s"] > 0 for cell in cells)
    counts = {cell["parameters"] for cell in cells}
    assert max(counts) <= 1.05 * min(counts)


def test_summary_is_the_mean_and_spread_over_seeds(finished):
    report = reports(finished)
    for row in report["summary"]:
        mine = [
            cell["metrics"]["accuracy"]
            for cell in report["cells"]
            if (cell["model"], cell["fraction"]) == (row["model"], row["fraction"])
        ]
        assert row["test"]["mean"] == pytest.approx(np.mean(mine))
        assert row["test"]["std"] == pytest.approx(np.std(mine, ddof=1))


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


def test_same_seeds_give_the_same_table(finished, tmp_path):
    again = without_times(compare(tmp_path, seeds=[1], fractions=[0.5]))
    assert again == [cell for cell in without_times(reports(finished)) if (cell["seed"], cell["fraction"]) == (1, 0.5)]


@pytest.mark.slow
def test_other_seeds_give_another_table(finished, tmp_path):
    """Control: results depend on the seed."""
    other = compare(tmp_path, seeds=[2], fractions=[1.0])
    values = [[cell["history"] for cell in without_times(r)[-2:]] for r in (other, reports(finished))]
    assert values[0] != values[1]


def test_best_weights_are_a_checkpoint_of_the_library(finished):
    from lieattn.train import load_network

    record = next(cell for cell in reports(finished)["cells"] if cell["model"] == "distances")
    network = load_network(finished / "cells" / "distances-0.5-0" / "best.ckpt", [__name__.partition(".")[0]])
    assert count_parameters(network) == record["parameters"]
    rods = Batch.from_data_list([Rods()[index] for index in range(10)])
    accuracy = (network(rods).argmax(dim=1) == rods.y).float().mean()
    assert float(accuracy) == pytest.approx(record["metrics"]["accuracy"])
    assert not list(finished.glob("cells/*/last.ckpt"))


def test_table_and_picture_are_written(finished, capsys):
    report = compare(finished)
    printed = capsys.readouterr()
    assert "8 of 8 cells are finished, 0 to run" in printed.err
    for words in ("test accuracy", "rotated accuracy", "24 (100 %)", "error SO(d)", "first coordinate"):
        assert words in printed.out
    assert (finished / "comparison.png").stat().st_size > 10_000
    assert report["counted"].startswith("Seconds are those of forward passes")
    page = (finished / "comparison.html").read_text()
    picture = base64.b64encode((finished / "comparison.png").read_bytes()).decode()
    assert f'src="data:image/png;base64,{picture}"' in page
    shown = html.unescape(re.sub(r"<[^>]+>", " ", page)).split()
    for line in printed.out.splitlines():  # everything that is printed, except the horizontal lines of the tables
        for word in line.split() if not line.startswith("---") else ():
            assert word in shown
    rest = page.replace(picture, "")
    assert not re.search("http|<script|<link|url\\(", rest)
    assert page.count("<table>") == 3


class Trained(Callback):
    """Records the weights after each training step."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.states.append({name: value.clone() for name, value in pl_module.state_dict().items()})


def test_averages_of_the_weights_are_tested_and_kept(tmp_path, monkeypatch):
    """There is only one validation, of the averages at the end. A model can turn averaging off."""
    seen, real = [], cells.make_trainer

    def watched(settings, callbacks, **options):
        seen.append(Trained())
        return real(settings, callbacks=[*callbacks, seen[-1]], **options)

    monkeypatch.setattr(cells, "make_trainer", watched)
    options = {"ema": 0.8, "seeds": [0], "fractions": [1.0], "data__rotate_test": False, "budget__evaluations": 1}
    report = compare(tmp_path, **options, **{"models__first coordinate__ema": 0})
    trained = [callback.states for callback in seen if callback.states]
    assert [cell["ema"] for cell in report["cells"]] == [0.8, None]
    for cell, states in zip(report["cells"], trained, strict=True):
        wanted, last = states[0], states[-1]
        for n, state in enumerate(states[1:], 1):
            decay = min(cell["ema"] or 0.0, (1 + n) / (10 + n))
            wanted = {name: decay * wanted[name] + (1 - decay) * state[name] for name in state}
        name = cell["model"].replace(" ", "_")
        saved = train.read_checkpoint(tmp_path / f"cells/{name}-1-0/best.ckpt")["state_dict"]
        assert "current_model_state" not in saved
        for key, value in saved.items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-6)
            assert cell["ema"] is None or not torch.allclose(value, last[key], rtol=0, atol=1e-4)
        task = train.load_task(tmp_path / f"cells/{name}-1-0/best.ckpt", [__name__.partition(".")[0]])
        rods = Batch.from_data_list([Rods()[index] for index in range(10)])
        accuracy = (task(rods).argmax(dim=1) == rods.y).float().mean()
        assert float(accuracy) == pytest.approx(cell["metrics"]["accuracy"])


@pytest.mark.slow
def test_averages_in_the_precision_of_the_weights(tmp_path):
    options = {"ema": 0.8, "seeds": [0], "fractions": [1.0], "budget__steps": 4}
    report = compare(tmp_path, **options, trainer__precision="64-true")
    assert [cell["failed"] for cell in report["cells"]] == [None, None]
    weights = train.read_checkpoint(next(tmp_path.rglob("best.ckpt")))["state_dict"].values()
    assert {weight.dtype for weight in weights} == {torch.float64}


def test_cells_with_averages_are_others(tmp_path):
    plain, averaged = settings(tmp_path), settings(tmp_path, ema=0.9)
    cell, model = plain.cells()[0], plain.models["distances"]
    assert plain.key(cell, model) != averaged.key(cell, model)
    own = dataclasses.replace(model, ema=0.9)
    assert plain.key(cell, own) == averaged.key(cell, model)
    assert averaged.key(cell, dataclasses.replace(model, ema=0.0)) == plain.key(cell, model)


def test_page_has_no_markup_of_names(finished):
    content = reports(finished)
    content["summary"][0]["model"] = "<script>alert(1)</script>"
    assert "<script>" not in page(content)
    assert "&lt;script&gt;" in page(content)
    assert "<img" not in page(content)


# Continued runs


@pytest.mark.slow
def test_interrupted_averages_continue_to_the_same_record(tmp_path, monkeypatch):
    real = budgets.Budget.on_train_batch_end

    def interrupted(self, trainer, *rest):
        if self.steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, trainer, *rest)

    options = {"ema": 0.8, "seeds": [0], "fractions": [1.0], "data__rotate_test": False}
    whole = without_times(compare(tmp_path / "whole", **options))
    with monkeypatch.context() as patch:
        patch.setattr(budgets.Budget, "on_train_batch_end", interrupted)
        compare(tmp_path / "parts", status=130, **options)
    assert without_times(compare(tmp_path / "parts", **options)) == whole


@pytest.mark.parametrize("step", some([3, 4, 6, 10], [6]))
def test_interrupted_cell_continues_to_the_same_record(finished, tmp_path, monkeypatch, capsys, step):
    """Step 4 is validated, step 6 ends an epoch, and step 10 ends the training."""
    real = budgets.Budget.on_train_batch_end

    def interrupted(self, trainer, *rest):
        if self.steps == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, trainer, *rest)

    options = {"seeds": [0], "fractions": [1.0]}
    with monkeypatch.context() as patch:
        patch.setattr(budgets.Budget, "on_train_batch_end", interrupted)
        compare(tmp_path, status=130, **options)
    assert "To continue: lieattn compare" in capsys.readouterr().err
    assert (tmp_path / "cells/distances-1-0/last.ckpt").is_file()
    again = without_times(compare(tmp_path, **options))
    whole = [cell for cell in without_times(reports(finished)) if (cell["seed"], cell["fraction"]) == (0, 1)]
    assert again == whole


def test_killed_run_repeats_no_finished_cell(finished, tmp_path, monkeypatch, capsys):
    real, runs = cells.CellRunner.run, []

    def counted(self, cell, *rest):
        if len(runs) == 1:
            raise Stop
        runs.append(cell)
        return real(self, cell, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(cells.CellRunner, "run", counted)
        compare(tmp_path, status=1, seeds=[0], fractions=[1.0])
    assert "Stop: \nin the cell: first coordinate, 100 % of the data, seed 0\n" in capsys.readouterr().err
    again = compare(tmp_path, seeds=[0], fractions=[1.0])
    assert "1 of 2 cells are finished, 1 to run" in capsys.readouterr().err
    expected = [cell for cell in without_times(reports(finished)) if (cell["seed"], cell["fraction"]) == (0, 1)]
    assert without_times(again) == expected


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_cells_go_on_where_one_ends_with_an_error(tmp_path, capfd, jobs):
    models = {"broken": spec("Broken", outputs=2), "distances": config()["models"]["distances"]}
    options = {"models": models, "seeds": [0], "fractions": [1.0], "arguments": ("--jobs", str(jobs))}
    report = compare(tmp_path, status=1, **options)
    told = capfd.readouterr().err
    assert "in the cell: broken, 100 % of the data, seed 0" in told
    assert "cells that ended with an error: 1; the report omits them" in told
    assert [(cell["model"], cell["failed"]) for cell in report["cells"]] == [("distances", None)]
    compare(tmp_path, status=1, **options)
    assert "1 of 2 cells are finished, 1 to run" in capfd.readouterr().err


def test_jobs_share_the_cells(finished, tmp_path, capfd):
    """Each cell is run once, and the report is that of a single process. If a cell fails, the command fails."""
    models = {**config()["models"], "diverging": spec("Diverging", outputs=2, channels=20)}
    report = compare(tmp_path, status=1, arguments=("--jobs", "2"), models=models, fractions=[1.0])
    failed = [cell for cell in report["cells"] if cell["failed"]]
    assert [(cell["model"], cell["seed"]) for cell in failed] == [("diverging", seed) for seed in (0, 1)]
    run = [line.split("] ")[1].split(":")[0] for line in capfd.readouterr().err.splitlines() if line.startswith("[")]
    assert len(run) == len(set(run)) == len(report["cells"])
    whole = {"cells": [cell for cell in report["cells"] if not cell["failed"]]}
    found = without_times(whole)
    expected = [cell for cell in without_times(reports(finished)) if cell["fraction"] == 1]
    for cell in [*found, *expected]:
        cell.pop("threads")
    assert found == expected
    assert main(["compare", "--config", str(tmp_path / "compare.yaml"), "--jobs", "0"]) == 2


def test_lines_of_several_processes_stay_whole(tmp_path, monkeypatch):
    """Every message is written in one call with its newline, so messages of several processes are not interleaved."""
    written = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Stream())
    compare(tmp_path, seeds=[0], fractions=[1.0])
    lines = [text for text in written if text]
    assert sum(text.startswith("[") for text in lines) == 2
    assert all(text.endswith("\n") for text in lines)


@pytest.mark.slow
def test_jobs_are_stopped_together_and_continue(tmp_path, capfd):
    model = {**spec("Interrupting", flag=str(tmp_path / "flag"), outputs=2), "width": "channels"}
    options = {"models": {"interrupting": model}, "seeds": [0, 1, 2], "fractions": [1.0]}
    assert compare(tmp_path, status=143, arguments=("--jobs", "2"), **options) == {}
    assert capfd.readouterr().err.count("To continue: lieattn compare") == 1
    assert (tmp_path / "flag").exists()  # otherwise the next run would ask this process to stop
    assert len(compare(tmp_path, **options)["cells"]) == 3


@pytest.mark.slow
def test_jobs_end_with_a_command_that_is_killed(tmp_path):
    """If the command is killed, its jobs save their state and end; only then does their shared output stream close."""
    network = spec("Interrupting", flag=str(tmp_path / "flag"), outputs=2, after=20, signum=int(signal.SIGKILL))
    model = {**network, "width": "channels"}
    file = write(tmp_path / "compare.yaml", config(models={"killing": model}, budget__steps=10**9, fractions=[1.0]))
    command = [sys.executable, "-m", "lieattn", "compare", "--config", str(file), "--out", str(tmp_path), "--jobs", "2"]
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert list(tmp_path.rglob("last.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.6])
def test_jobs_are_stopped_while_they_start(tmp_path, monkeypatch, capfd, seconds):
    """The interrupt arrives between the starts of two processes, or while they import modules."""
    start, started = BaseProcess.start, []

    def interrupted(process):
        start(process)
        started.append(process)
        if seconds == 0 and len(started) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        elif seconds > 0 and len(started) == 2:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    models = {"distances": spec("Distances", outputs=2)}
    assert compare(tmp_path, status=130, arguments=("--jobs", "2"), models=models, fractions=[1.0]) == {}
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert errors.count("To continue: lieattn compare") == 1
    assert not list(tmp_path.rglob("cells/*.json"))
    assert not list(tmp_path.rglob("comparison.json"))


def test_signal_outside_of_training(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)

    # Processes started in the background ignore the signal, and the tests may run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(EquivarianceProbe, "measure", interrupted)
            compare(tmp_path, status=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "To continue: lieattn compare" in capsys.readouterr().err
    assert not list(tmp_path.rglob("cells/*.json"))
    assert not list(tmp_path.rglob("comparison.json"))


@pytest.mark.parametrize("content", ["damaged", "weights alone"])
def test_a_checkpoint_without_a_training_restarts_the_cell(finished, tmp_path, content):
    chosen = settings(tmp_path)
    cell = Cell("distances", 1.0, 0)
    model = match_models(chosen)["distances"][0]
    store = CellStore(tmp_path, print)
    weights = (finished / "cells/distances-1-0/best.ckpt").read_bytes()
    found = {"damaged": b"PK\x03\x04 cut off", "weights alone": weights}
    (store.progress(cell, chosen.key(cell, model)) / "last.ckpt").write_bytes(found[content])
    record = cells.CellRunner(chosen, Sets(chosen), store).run(cell, model)
    expected = next(
        c for c in reports(finished)["cells"] if (c["model"], c["fraction"], c["seed"]) == ("distances", 1, 0)
    )
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
    import shutil

    shutil.copytree(finished / "cells", tmp_path / "cells")
    changed = copy.deepcopy(config()["models"])
    changed["first coordinate"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    compare(tmp_path, arguments=("--plan",), models=changed)
    message = capsys.readouterr().err
    assert "4 of 8 cells are finished, 4 to run" in message
    assert "first_coordinate-0.5-0.json was made with other settings" in message
    compare(tmp_path, arguments=("--plan",), seeds=[0, 1, 2])
    assert "8 of 12 cells are finished, 4 to run" in capsys.readouterr().err
    compare(tmp_path, arguments=("--plan", "--root", "elsewhere"))
    assert "8 of 8 cells are finished" in capsys.readouterr().err
    compare(tmp_path, arguments=("--plan",), budget={"steps": 11})
    assert "0 of 8 cells are finished" in capsys.readouterr().err


def test_a_plan_constructs_the_groups(tmp_path, capsys):
    changed = copy.deepcopy(config()["models"])
    changed["distances"]["group"] = {"class_path": "lieattn.groups.cyclic", "init_args": {"n": 0}}
    compare(tmp_path, status=2, arguments=("--plan",), models=changed)
    assert "models.distances.group cannot be built: n: expected" in capsys.readouterr().err


def test_damaged_cell_file_is_named_and_run_again(finished, tmp_path, capsys):
    import shutil

    shutil.copytree(finished / "cells", tmp_path / "cells")
    for name, text in (("distances-0.5-0", '{"key": "'), ("distances-1-1", "[]")):
        (tmp_path / "cells" / f"{name}.json").write_text(text)
    changed = tmp_path / "cells/first_coordinate-1-0.json"
    changed.write_text(
        re.sub(r'("accuracy": 0\.)(\d)', lambda found: found[1] + str((int(found[2]) + 1) % 10), changed.read_text())
    )
    report = compare(tmp_path)
    message = capsys.readouterr().err
    assert re.search(r"distances-0.5-0.json is damaged \(Unterminated string", message)
    assert re.search(r"distances-1-1.json is damaged \(it was not written by", message)
    assert "first_coordinate-1-0.json is damaged (the record differs from what was written)" in message
    assert "5 of 8 cells are finished, 3 to run" in message
    assert without_times(report) == without_times(reports(finished))


def test_records_made_by_hand_are_named_and_run_again(finished, tmp_path, capsys):
    """Records without a digest, which earlier versions wrote too, have all that the report reads."""
    for source in (finished / "cells").glob("*.json"):
        content = json.loads(source.read_text())
        content.pop("digest")
        if source.name == "distances-0.5-0.json":
            content["record"] = {"model": "distances", "fraction": 0.5, "seed": 0, "failed": None}
        if source.name == "distances-0.5-1.json":
            content["record"] = ["distances"]
        if source.name == "distances-1-0.json":
            content["record"]["model"] = "another"
        if source.name == "distances-1-1.json":
            del content["record"]["equivariance"]
        (tmp_path / "cells").mkdir(exist_ok=True)
        (tmp_path / "cells" / source.name).write_text(json.dumps(content))
    compare(tmp_path, arguments=("--plan",))
    message = capsys.readouterr().err
    assert "distances-0.5-0.json is damaged (the record has no 'clouds', " in message
    assert "distances-0.5-1.json is damaged (it was not written by" in message
    assert "distances-1-0.json is damaged (the record is that of another cell)" in message
    assert "distances-1-1.json is damaged (the record has no 'equivariance')" in message
    assert "4 of 8 cells are finished, 4 to run" in message


def test_models_can_be_chosen(tmp_path, capsys):
    options = {"seeds": [0], "fractions": [1.0]}
    report = compare(tmp_path, arguments=("--models", "distances"), **options)
    assert [cell["model"] for cell in report["cells"]] == ["distances"]
    assert report["summary"][0]["test"]["std"] is None
    assert "±" not in capsys.readouterr().out
    compare(tmp_path, status=2, arguments=("--models", "else"), **options)
    assert "--models: 'else' is not among distances, first coordinate" in capsys.readouterr().err


class Absent(Distances):
    """Needs a package that is not installed at first."""

    installed = False

    def __init__(self, outputs: int, channels: int = 8) -> None:
        if not self.installed:
            raise ModuleNotFoundError("No module named 'absent'")
        super().__init__(outputs, channels)


@pytest.mark.slow
def test_models_that_are_not_asked_for_are_not_built(tmp_path, monkeypatch, capsys):
    """A model whose package is missing does not prevent the others from running; its finished cells are reported."""
    models = {"distances": spec("Distances", outputs=2), "missing": spec("Absent", outputs=2)}
    nowhere = {"class_path": "absent_package.Network", "init_args": {}}
    options = {"seeds": [0], "fractions": [1.0], "budget": {"steps": 2}, "models": models | {"nowhere": nowhere}}
    asked = ("--models", "distances")
    assert [cell["model"] for cell in compare(tmp_path, arguments=asked, **options)["cells"]] == ["distances"]
    compare(tmp_path, status=2, arguments=("--models", "nowhere"), **options)
    assert "absent_package" in capsys.readouterr().err
    monkeypatch.setattr(Absent, "installed", True)
    both = compare(tmp_path, arguments=("--models", "missing"), **options)
    assert [cell["model"] for cell in both["cells"]] == ["distances", "missing"]
    monkeypatch.setattr(Absent, "installed", False)
    assert [cell["model"] for cell in compare(tmp_path, arguments=asked, **options)["cells"]] == ["distances"]


@pytest.mark.slow
def test_cells_are_shared_by_machines(tmp_path, capsys):
    """Each machine runs its part and writes no report; a last call without `--cells` writes it."""
    changes = {"seeds": [0], "budget": {"steps": 2}}
    path = write(tmp_path / "compare.yaml", config(**changes))
    base = ["compare", "--config", str(path), "--out", str(tmp_path)]
    for part in ("1/3", "2/3", "3/3"):
        assert not (tmp_path / "comparison.json").exists()
        assert main([*base, "--cells", part]) == 0
    assert re.findall(r"(\d+) to run", capsys.readouterr().err) == ["2", "1", "1"]
    assert main(base) == 0
    assert "4 of 4 cells are finished, 0 to run" in capsys.readouterr().err
    assert (tmp_path / "comparison.json").exists()
    for part in ("0/3", "4/3", "2", "a/b"):
        assert main([*base, "--cells", part]) == 2
        assert "expected I/N with I from 1 to N" in capsys.readouterr().err


def test_seconds_are_a_budget_too(tmp_path):
    report = compare(tmp_path, budget={"seconds": 0.3, "evaluations": 3}, seeds=[0], fractions=[1.0])
    for cell in report["cells"]:
        # No upper bound: on a busy machine a single step may take longer than the whole budget.
        assert cell["seconds"] >= 0.3
        assert cell["steps"] >= 1
        assert 1 <= len(cell["history"]) <= 3
        assert cell["history"][-1][0] == cell["steps"]
    assert report["budget"] == {"seconds": 0.3}


def test_diverging_training_is_reported(tmp_path, capsys):
    models = {"good": spec("Distances", outputs=2), "bad": spec("Diverging", outputs=2)}
    report = compare(tmp_path, status=1, models=models, seeds=[0], fractions=[1.0], equivariance={"clouds": 1})
    failed = next(cell for cell in report["cells"] if cell["model"] == "bad")
    assert "the training loss is nan at step 0" in failed["failed"]
    assert "1, 1 failed" in capsys.readouterr().out


class Blind(Distances):
    """A network that returns NaN in evaluation, at least before its first few training steps."""

    def __init__(self, outputs: int, channels: int = 8, until: int = 10**6) -> None:
        super().__init__(outputs, channels)
        self.register_buffer("left", torch.tensor(until))

    def forward(self, data: Batch) -> torch.Tensor:
        self.left -= int(self.training)
        return super().forward(data) * (1.0 if self.training or self.left < 0 else float("nan"))


@pytest.mark.parametrize("models", ["beside another model", "alone"])
def test_tests_that_are_nan_are_reported(tmp_path, capsys, models):
    chosen = {"blind": spec("Blind", outputs=1)}
    if models != "alone":
        chosen["seeing"] = spec("Distances", outputs=1)
    task = {"class_path": "lieattn.train.PointSetRegressor", "init_args": {"targets": "length"}}
    report = compare(tmp_path, models=chosen, task=task, fractions=[1.0], equivariance={"clouds": 1})
    means = {row["model"]: (row["test"]["mean"], row["rotated"]["mean"]) for row in report["summary"]}
    assert means.pop("blind") == (None, None)
    assert all(value is not None for pair in means.values() for value in pair)
    printed = capsys.readouterr().out
    assert re.search(r"^blind .* 2 +nan +nan +10 ", printed, re.MULTILINE)
    assert re.search(r"^blind +nan +nan\n", printed, re.MULTILINE)  # the validations
    assert re.search(r"^blind .* - +nan -> nan +nan -> nan\n", printed, re.MULTILINE)  # it has no group of its own
    assert (tmp_path / "comparison.png").is_file() == bool(means)


def test_a_first_validation_that_is_nan_is_not_the_best(tmp_path):
    task = {"class_path": "lieattn.train.PointSetRegressor", "init_args": {"targets": "length"}}
    models = {"blind": spec("Blind", outputs=1, until=4)}
    report = compare(tmp_path, models=models, task=task, seeds=[0], fractions=[1.0], equivariance={"clouds": 1})
    (cell,) = report["cells"]
    values = [value for *_, value in cell["history"]]
    assert values[0] is None
    assert cell["validation"] == min(values[1:])
    assert cell["metrics"]["error"] is not None


class Talkative(Distances):
    """A network with outputs that are no targets, and not all of which are trained."""

    def __init__(self, outputs: int, channels: int = 8, trained: bool = True) -> None:
        super().__init__(outputs, channels)
        self.trained = trained

    def forward(self, data: Batch) -> dict:
        length = super().forward(data)
        counts = data.ptr.diff()
        return {"length": length if self.trained else length.detach(), "points": counts, "unit": "angstrom"}


@pytest.mark.slow
def test_outputs_that_are_no_targets(tmp_path, capsys):
    task = {"class_path": "lieattn.train.PointSetRegressor", "init_args": {"targets": "length"}}
    options = {"task": task, "seeds": [0], "fractions": [1.0], "equivariance": {"clouds": 1}}
    models = {"plain": spec("Distances", outputs=1), "talkative": spec("Talkative", outputs=1)}
    plain, talkative = compare(tmp_path, models=models, **options)["cells"]
    for name in ("metrics", "operations", "validation"):
        assert plain[name] == talkative[name]
    constant = {"constant": spec("Talkative", outputs=1, trained=False)}
    compare(tmp_path, status=2, models=constant, **options)
    assert "network: expected outputs that depend on weights with requires_grad" in capsys.readouterr().err


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


def test_tasks_of_users(tmp_path, capsys):
    """Without a monitor or its number they ended with an AttributeError or a KeyError."""
    models = {"it": spec("Distances", outputs=2)}
    options = {"seeds": [0], "fractions": [1.0], "equivariance": {"clouds": 1}, "models": models}
    for name, monitor in (("Own", ["val/right", "max"]), ("OwnLoss", ["val/loss", "min"])):
        report = compare(tmp_path / name, task={"class_path": f"{HERE}.{name}"}, **options)
        assert report["cells"][0]["monitor"] == monitor
        assert report["metric"] == monitor[0].removeprefix("val/")
        assert {"loss", "right"} <= set(report["cells"][0]["metrics"])
    for name, settings, message in (
        ("Own", {"init_args": {"right": "wrong"}}, "task: Own.monitor is 'val/right', but evaluate logs "),
        ("Untyped", {}, "optimizer: expected a function of the parameters, got Namespace"),
    ):
        task = {"class_path": f"{HERE}.{name}", **settings}
        compare(tmp_path / f"{name} fails", status=2, task=task, **options)
        assert message in capsys.readouterr().err


# Regression


def test_vectors_in_and_out(tmp_path):
    report = compare(
        tmp_path,
        task={"class_path": "lieattn.train.PointSetRegressor", "init_args": {"targets": "arrow"}},
        models={"exact": spec("Arrows"), "spoilt": spec("Arrows", spoil=0.3)},
        seeds=[0],
        fractions=[1.0],
    )
    assert report["metric"] == "error"
    exact, spoilt = (row["equivariance"]["after"] for row in report["summary"])
    assert all(exact[kind] < 1e-6 for kind in ("own", "rotations", "reflections"))
    assert all(spoilt[kind] > 1e-2 for kind in ("own", "rotations", "reflections"))
    assert report["summary"][0]["group"] == "O"
    for cell in report["cells"]:
        assert cell["rotated_metrics"]["error"] == pytest.approx(cell["metrics"]["error"], rel=0.9)


# Parts


def test_widths_are_matched(tmp_path):
    chosen = settings(tmp_path, match={"to": 1000})
    for name, (model, count) in match_models(chosen).items():
        assert abs(count - 1000) <= 50, name
        assert count == count_parameters((Distances if name == "distances" else Coordinates)(**model.init_args))
        # The chosen width gives the nearest count among all multiples of the step.
        widths = range(model.step, 1000, model.step)
        assert abs(count - 1000) == min(abs(3 * w + 2 * w + 2 - 1000) for w in widths)


def test_first_model_is_the_measure_if_no_count_is_given(tmp_path):
    (first, count), (_, other) = match_models(settings(tmp_path)).values()
    assert first.init_args["channels"] == 20
    assert count == 5 * 20 + 2
    assert other == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"step": 64},
            r"models.b: cannot be matched to 102 parameters within 5 %; the nearest are 322 \(channels = 64\)",
        ),
        (
            {"step": 16},
            r"the nearest are 82 \(channels = 16\) and 162 \(channels = 32\). Choose a smaller step, let",
        ),
        ({"width": None}, r"the nearest are 42 \(as configured\)"),
        # The width is that of the configuration, so it is not said to be tried.
        ({"step": 8, "init_args": {"outputs": 2, "heads": 3, "channels": 8}}, "heads: 3 do not divide 8 channels$"),
        ({"width": "chanels"}, "chanels"),
        (
            {"class_path": f"{HERE}.Fixed", "init_args": {"outputs": 2}},
            r"models.b.width: expected an argument that changes the size, got 42 parameters with channels = 8 and \d+$",
        ),
        (
            {"class_path": f"{HERE}.Frozen", "init_args": {"outputs": 2}},
            r"models.b.width: expected an argument that changes the size, got 0 parameters with channels = 8$",
        ),
    ],
)
def test_counts_that_cannot_be_matched_are_named(tmp_path, changes, message):
    b = {**spec("Distances", outputs=2), "width": "channels", **changes}
    with pytest.raises(ValueError, match=message):
        match_models(settings(tmp_path, models={"a": spec("Distances", outputs=2, channels=20), "b": b}))


def test_further_arguments_are_adjusted_where_the_width_does_not_do(tmp_path):
    b = {**spec("Distances", outputs=2), "width": "channels", "step": 16, "adjust": {"outputs": [2, 5, 3]}}
    chosen = settings(tmp_path, match={"to": 102}, models={"b": b})
    model, count = match_models(chosen)["b"]
    assert model.chosen == {"channels": 16, "outputs": 3}
    assert count == 3 * 16 + 3 * 16 + 3


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
    items = data.sets["train"]
    assert isinstance(items, TurnedClouds)
    assert isinstance(data.sets["val"], TurnedClouds)
    seeded = data._items("train")
    poses = [seeded[epoch, 0].pos for epoch in (0, 1, 0)]
    assert torch.equal(poses[0], poses[2])
    assert not torch.allclose(poses[0], poses[1])
    torch.testing.assert_close(poses[0][:, 2], poses[1][:, 2])


def test_flat_clouds_turn_too():
    cloud = Rods(dim=2)[3]
    matrix = random_rotation(2)
    moved = turned(cloud, matrix, ("pos", "arrow"), ())
    torch.testing.assert_close(moved.pos.double(), cloud.pos.double() @ matrix.mT)
    torch.testing.assert_close(moved.outer, cloud.outer)


@pytest.mark.parametrize(
    ("group", "own"),
    [(None, None), (octahedral(), "small"), (SO(3), "large"), (cyclic(3), "refused")],
    ids=str,
)
def test_own_group_is_measured_apart(tmp_path, group, own):
    """The network is invariant only to sign changes and permutations of the axes."""

    class Signs(nn.Module):
        def forward(self, data):
            return global_mean_pool(data.pos.abs().pow(3).sum(dim=1, keepdim=True), data.batch)

    probe = EquivarianceProbe(Sets(settings(tmp_path, equivariance={"clouds": 3, "elements": 4})), ["y"])
    if own == "refused":
        with pytest.raises(ValueError, match="C3 acts on 2 coordinates, the clouds have 3"):
            probe.measure(Signs(), group)
        return
    found = probe.measure(Signs(), group)
    assert found["rotations"] > 1e-3
    assert found["own"] is None if own is None else (found["own"] < 1e-5) == (own == "small")


def test_finite_groups_are_certified(tmp_path):
    """Without vectors, the certificate also tests translations, to which this network is not invariant."""

    class Radius(nn.Module):
        def forward(self, data):
            return global_mean_pool(data.pos.norm(dim=1, keepdim=True), data.batch)

    sets = Sets(settings(tmp_path, data__vectors=[], data__tensors=[], equivariance={"clouds": 2, "elements": 2}))
    found = EquivarianceProbe(sets, ["y"]).measure(Radius(), octahedral())
    assert found["rotations"] < 1e-6
    assert found["own"] > 1e-2


@pytest.mark.parametrize("group", [trivial(2), cyclic(4)], ids=str)
def test_networks_of_images_turn_by_quarters(tmp_path, group):
    digits = {part: {"class_path": "lieattn_datasets.Digits"} for part in ("train", "val", "test")}
    data = {**digits, "rotate_test": False}
    sets = Sets(settings(tmp_path, data=data, equivariance={"clouds": 2, "elements": 2}))
    network = randomize(AffineSelfConvNet(group, 1, 10, blocks=1, channels=4, heads=2))
    found = EquivarianceProbe(sets, ["y"]).measure(network, group)
    assert found["own"] < 1e-5
    assert (found["rotations"] < 1e-5) == (group.order == 4)
    assert found["reflections"] > 1e-3


def test_schedule_spans_the_budget():
    from lieattn.train import WarmupCosine

    budget = budgets.Budget(BudgetSettings(seconds=10.0))
    schedule = budgets.BudgetSchedule(WarmupCosine(warmup_epochs=0.1), budget)
    found = []
    for seconds in (0.0, 0.5, 1.0, 5.5, 10.0, 12.0):
        budget.seconds = seconds
        found.append(schedule.factor(999, float("inf"), 3))
    assert found == pytest.approx([0, 0.5, 1, 0.5, 0, 0], abs=1e-4)
    steps = budgets.BudgetSchedule(WarmupCosine(warmup_epochs=0.1), budgets.Budget(BudgetSettings(steps=20)))
    assert [steps.factor(step, float("inf"), 3) for step in (0, 1, 2, 11, 20)] == pytest.approx([0.5, 1, 1, 0.5, 0])


@pytest.mark.parametrize("clock", ["wall", "processor"])
def test_seconds_of_the_processor_do_not_pass_while_it_waits(clock):
    budget = budgets.Budget(BudgetSettings(seconds=10.0, clock=clock))
    trainer = SimpleNamespace(should_stop=False, is_last_batch=True, val_check_batch=1)
    module = SimpleNamespace(device=torch.device("cpu"))
    budget.on_train_batch_start(trainer, module)
    time.sleep(0.5)
    budget.on_train_batch_end(trainer, module, None, SimpleNamespace(num_graphs=1))
    assert (budget.seconds >= 0.5) == (clock == "wall")
    assert budget.steps == 1


def test_a_budget_counts_and_continues():
    """With a simulated clock: two steps of 2 and 3 s with 4 clouds each."""
    now = iter([10.0, 12.0, 20.0, 23.0, 30.0, 31.5])
    reports = []
    budget = budgets.Budget(BudgetSettings(seconds=6.0, clock="wall"), report=lambda *spent: reports.append(spent))
    budget._clock = lambda: next(now)
    trainer = SimpleNamespace(should_stop=False, is_last_batch=True, val_check_batch=1)
    module, batch = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(num_graphs=4)
    for _ in range(2):
        budget.on_train_batch_start(trainer, module)
        budget.on_train_batch_end(trainer, module, None, batch)
    assert reports == [(1, 2.0), (2, 5.0)]
    assert not trainer.should_stop
    budget.on_train_batch_start(trainer, module)
    assert budget.spent == 1  # 1.5 s of the step that runs count too, and more than all is never spent
    steps = budgets.Budget(BudgetSettings(steps=20))
    steps.steps, steps.seconds = 5, 100.0
    assert steps.spent == 0.25
    budget.history, budget.best, budget.best_value = [[1, 2.0, 0.5]], {"w": torch.ones(1)}, 0.5
    other = budgets.Budget(BudgetSettings(seconds=6.0))
    other.load_state_dict(budget.state_dict())
    assert (other.steps, other.seconds, other.clouds) == (2, 5.0, 8)
    assert (other.history, other.best, other.best_value) == ([[1, 2.0, 0.5]], {"w": torch.ones(1)}, 0.5)


def test_the_rate_counts_clouds_of_all_batches_but_the_first(monkeypatch):
    now = iter([0.0, 9.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(budgets, "_now", lambda *_: next(now))
    clock = budgets.InferenceClock()
    for count in (8, 8, 4):
        clock.on_test_batch_start(None, None)
        clock.on_test_batch_end(None, None, None, SimpleNamespace(num_graphs=count))
    assert clock.rate == pytest.approx((8 + 4) / (1 + 3))


def test_losses_of_measured_steps_use_outputs_with_gradients_only():
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    assert scalar({"a": weight, "b": torch.full((2,), 9.0), "c": "text"}) == 2.5


def test_clocks_are_those_that_there_are(tmp_path):
    with pytest.raises(ValueError, match="clock"):
        BudgetSettings(seconds=1, clock="sun")
    cell, chosen = Cell("distances", 1.0, 0), settings(tmp_path).models["distances"]
    keys = {
        settings(tmp_path, budget={"seconds": 1, "clock": clock}).key(cell, chosen) for clock in ("wall", "processor")
    }
    assert len(keys) == 2


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    batch = Batch.from_data_list([Rods()[0]] * 2000)
    found = cells.training_memory(spec("Distances", outputs=2, channels=1024), batch)
    hidden = 8000 * 1024 * 4 / 2**20
    assert hidden < found < 20 * hidden


@pytest.mark.slow
def test_memory_is_measured_with_the_first_seed(tmp_path, monkeypatch):
    calls = []

    def measured(network, batch):
        calls.append(network["class_path"])
        return 12.0 if len(calls) == 1 else 14.0

    monkeypatch.setattr(cells, "training_memory", measured)
    content = compare(tmp_path, memory=True, seeds=[3, 0])
    assert len(calls) == len(set(calls)) == len(content["summary"]) / 2
    found = {(cell["model"], cell["seed"]): cell["peak_memory_mib"] for cell in content["cells"]}
    assert set(found.values()) == {None, 12.0, 14.0}
    assert all((value is None) == (seed == 0) for (_, seed), value in found.items())
    assert {row["peak_memory_mib"] for row in content["summary"]} == {12.0, 14.0}


def test_root_is_given_to_data_sets_that_take_one(tmp_path):
    file = write(tmp_path / "a.yaml", config(root="here"))
    assert Sets(read_settings([file]))._sets["train"].root == "here"
    assert Sets(read_settings([file], "there"))._sets["train"].root == "there"
    own = config(root="here")
    own["data"]["train"]["init_args"]["root"] = "mine"
    assert Sets(read_settings([write(tmp_path / "b.yaml", own)]))._sets["train"].root == "mine"
    short = write(tmp_path / "c.yaml", config(data__train={"class_path": "FashionMNIST900"}))
    with pytest.raises(train.UsageError, match="root='nowhere'"):
        Sets(read_settings([short], "nowhere"))


class Gaps(Rods):
    """The first clouds have no points."""

    def __init__(self, size: int = 10, empty: int = 3) -> None:
        super().__init__(size)
        self.empty = empty

    def __getitem__(self, index: int) -> Data:
        cloud = super().__getitem__(index)
        if index < self.empty:
            cloud.x, cloud.pos = cloud.x[:0], cloud.pos[:0]
        return cloud


def test_equivariance_is_measured_on_clouds_with_points(tmp_path):
    sets = Sets(settings(tmp_path, data__test=spec("Gaps")))
    assert [len(cloud.pos) for cloud in sets.clouds(4)] == [4] * 4
    probe = EquivarianceProbe(sets, ["y"])
    assert max(probe.measure(Distances(2), None)[kind] for kind in ("rotations", "reflections")) < 1e-5
    with pytest.raises(train.UsageError, match=r"data\.test: expected clouds with positions pos.* not all empty"):
        Sets(settings(tmp_path, data__test=spec("Gaps", empty=10)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dta": 1}, "unknown setting 'dta'; expected some of task, models"),
        ({"models": {}}, "models: expected names"),
        ({"models": {"a/b": spec("Arrows")}}, "models: expected names of letters.*'a/b'"),
        ({"models": {"a b": spec("Arrows"), "A_b": spec("Arrows")}}, "names must differ"),
        ({"models__distances__widht": "channels"}, "models.distances: unknown setting 'widht'"),
        (
            {"models__distances": {"init_args": {}}},
            "models.distances: .* arguments are required: class_path",
        ),
        ({"models__distances__step": 0}, "models.distances: step: expected an integer of at least 1, got 0"),
        ({"models__distances__adjust": {"outputs": 3}}, "models.distances: adjust: expected list, got 3"),
        ({"budget": {}}, "budget: expected either steps or seconds, got neither$"),
        ({"budget": {"steps": 3, "seconds": 4}}, "or seconds, got steps 3 and seconds 4; set one to null$"),
        ({"budget": {"seconds": -1}}, "budget: seconds: expected a positive number, got -1"),
        ({"data__test": "Rods"}, "data: test: expected dict, got Rods"),
        ({"data__limit": {"tests": 3}}, r"data: limit: expected some of .*, got \['tests'\]"),
        ({"data__rotate_test": "up"}, "data: rotate_test: expected true, false, or an axis"),
        ({"seeds": [1, 1]}, "seeds: expected different ones"),
        ({"seeds": [-1]}, "seeds: expected a list of integers of at least 0"),
        ({"fractions": [0.5, 0.50000001]}, "fractions: expected numbers that differ in six digits"),
        ({"fractions": [0]}, r"fractions: expected a list of numbers in \(0, 1\]"),
        ({"match": {"tolerance": 2}}, r"match: tolerance: expected a number in \(0, 1\), got 2"),
        ({"match": {"by": "speed"}}, "match: by: expected one of .*, got 'speed'"),
        ({"match": {"to": "else"}}, r"match: to: expected a number or one of .*, got 'else'"),
        ({"match": {"to": 1.5}}, "match: to: expected an integer of at least 1, got 1.5"),
        ({"match": {"by": "seconds", "to": -1}}, "match: to: expected a positive number"),
        ({"parameters": 1000}, "parameters: write `match: {by: parameters, to: 1000}` instead"),
        ({"tolerance": 0.1}, "tolerance: write `match: {tolerance: 0.1}` instead"),
        ({"ema": 1.5}, r"ema: expected a number in \[0, 1\), got 1.5"),
        ({"models__distances__ema": -1}, r"models.distances: ema: expected a number in \[0, 1\), got -1"),
        ({"models__distances__python": "no such"}, "models.distances: python: expected the path of a Python"),
        ({"trainer": {"max_epochs": 3}}, r"trainer: expected some of .*, got \['max_epochs'\]"),
        ({"trainer": {"devices": 2}}, "trainer.devices: cells train on one device"),
        ({"data__vectors": ["length"]}, r"data.vectors: length must be \[..., 3\] to be turned, got \[1, 1\]"),
        ({"data__vectors": ["velocity"]}, r"data.vectors: expected attributes of the clouds, .*, got \['velocity'\]"),
        ({"data__tensors": ["arrow"]}, r"data.tensors: arrow must be \[..., 3, 3\] to be turned"),
        ({"data__train": spec("Rods", size=0)}, "data.train: the data set is empty"),
        ({"data__train": spec("Sticks")}, "data.train cannot be built"),
        ({"task__init_args": {"classes": 1}}, "classes: expected at least 2"),
        ({"schedule": {"class_path": "lieattn.train.WarmupCosine"}}, "schedule: the whole budget counts as one epoch"),
        (
            {
                "schedule": {"class_path": "lieattn.train.WarmupCosine", "init_args": {"warmup_epochs": 0.9}},
                "budget": {"steps": 3},
            },
            "schedule: the whole budget counts as one epoch .* got 3 steps: lower warmup_epochs, or train longer",
        ),
        ({"schedule": {"class_path": "lieattn.train.Plateau"}}, "schedule: expected another one than Plateau"),
    ],
    ids=str,
)
def test_bad_settings_are_named(tmp_path, capsys, changes, message):
    compare(tmp_path, status=2, seeds=changes.pop("seeds", [0]), **changes)
    assert re.search(message, capsys.readouterr().err)


class Unsized(Distances):
    def __init__(self, outputs: int, channels: int = 8) -> None:
        super().__init__(outputs, channels)
        self.first = nn.LazyLinear(channels)


@pytest.mark.parametrize("by", ["parameters", "seconds", "operations", "width"])
def test_weights_without_a_size_are_named(tmp_path, capsys, by):
    models = {"unsized": {**spec("Unsized", outputs=2), "width": "channels"}}
    compare(tmp_path, status=2, models=models, match={"by": by, "to": 100}, arguments=("--plan",))
    assert re.search(r"models.unsized: expected weights .*, but first.weight gets its size", capsys.readouterr().err)


def test_settings_can_be_replaced(tmp_path, capsys):
    file = write(tmp_path / "compare.yaml", config())
    found = read_settings(
        [file], changes=["budget.steps=3", "seeds=[5]", "equivariance.clouds=1", "match.tolerance=0.5"]
    )
    assert (found.budget.steps, found.budget.evaluations, found.seeds, found.match.tolerance) == (3, 3, [5], 0.5)
    twice = ["--budget.steps", "0", "--seeds=[5]"]
    assert main(["compare", "--config", str(file), *twice]) == 2  # both options are read
    assert "steps" in capsys.readouterr().err
    for change, message in (
        ("seeds", "--seeds: expected one argument"),
        ("seeds.first=1", "--seeds.first: expected a setting, or"),
        ("data.limit.val.first=1", "data: limit: expected int, got {'first': 1}"),
        ("seeds=[", "--seeds cannot be read: while parsing"),
        ("data.seeed=1", "unknown setting 'seeed'"),
    ):
        assert main(["compare", "--config", str(file), f"--{change}"]) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["forces", "molecules", "dipoles", "shapes", "modelnet", "nbody"])
def test_example_configurations_are_read(name):
    folder = Path(__file__).parent.parent / "examples/configs"
    found = read_settings([folder / f"compare_{part}.yaml" for part in ("base", name)], "folder")
    assert len(found.models) >= 6
    # Each model has the learning rate that the search found for it.
    assert all(model.optimizer is not None for model in found.models.values())
    assert len(found.cells()) == 3 * len(found.models)
    assert all(model.width == "channels" for model in found.models.values())


def test_files_that_are_no_configuration(tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- 1")
    for name, message in (("absent", "cannot be read"), ("broken", "cannot be read"), ("list", "expected sections")):
        assert main(["compare", "--config", str(tmp_path / f"{name}.yaml")]) == 2
        assert message in capsys.readouterr().err


def test_picture_of_one_share_has_three_panels(finished, tmp_path):
    report = reports(finished)
    assert len(comparison(report).axes) == 4
    assert [axes.get_xlabel() for axes in comparison(report).axes[:3]] == [
        "seconds of training",
        "steps",
        "multiply-adds",
    ]
    report["summary"] = [row for row in report["summary"] if row["fraction"] == 1]
    report["summary"][0]["parameters"] *= 2
    figure = comparison(report)
    assert [axes.get_xlabel() for axes in figure.axes[2:]] == ["multiply-adds", "parameters"]
    assert save(figure, tmp_path / "one.png").is_file()
    with pytest.raises(ValueError, match="report: expected at least one finished training"):
        comparison({**report, "summary": []})


def test_model_settings_keep_their_other_arguments():
    model = ModelSettings("a.B", {"heads": 2}, width="channels", step=2)
    changed = model.with_arguments(channels=8)
    assert changed.init_args == {"heads": 2, "channels": 8}
    assert changed.chosen == {"channels": 8}


def test_options_of_arguments_are_adjusted_too():
    model = ModelSettings("a.B", {"options": {"basis": 8}}, width="channels", adjust={"options.hidden": [16, 8]})
    assert model.chosen == {}
    changed = model.with_arguments(**{"options.hidden": 16})
    assert changed.init_args == {"options": {"basis": 8, "hidden": 16}}
    assert changed.choice == "options.hidden = 16"


# Ways to match


class Wide(nn.Module):
    """A network whose time is that of its matrix products."""

    def __init__(self, outputs: int, channels: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, channels), *(nn.Linear(channels, channels) for _ in range(3)))
        self.head = nn.Linear(channels, outputs)

    def forward(self, data: Batch) -> torch.Tensor:
        return self.head(global_mean_pool(self.layers(data.x), data.batch))


def wide(**options) -> dict:
    return {**spec("Wide", outputs=2, **options), "width": "channels"}


def test_operations_are_matched(tmp_path):
    """Operations are the products of the forward and the backward pass."""
    models = {"wide": wide(channels=40), "distances": {**spec("Distances", outputs=2), "width": "channels"}}
    found = match_models(settings(tmp_path, models=models, match={"by": "operations", "to": "wide"}))
    points, clouds, c = 16, 4, 40
    # The first layer has no gradient of its input. The loss at the end squares each output once.
    assert found["wide"][1] == points * (2 * c + 3 * 3 * c * c) + clouds * (3 * 2 * c + 2)
    per_channel = points * (2 * 2 + 3 * 2)  # outputs are computed at every point
    assert found["distances"][0].init_args["channels"] == pytest.approx(found["wide"][1] / per_channel, rel=0.05)
    assert found["distances"][1] == pytest.approx(found["wide"][1], rel=0.05)


def test_seconds_are_matched(tmp_path, monkeypatch):
    """With a simulated clock: the time of a step is linear in the width, on a machine that becomes busier."""
    load = np.linspace(1, 9, 10**4)
    load[::5] *= 3  # other programs take over for a moment
    load = iter(load)

    def step(self, slot):
        return next(load) * self._slots[slot]

    def prepare(self, slot, name, model):
        self._slots[slot] = 0.01 + 0.002 * model.init_args["channels"]

    monkeypatch.setattr(LocalMeter, "step", step)
    monkeypatch.setattr(LocalMeter, "prepare", prepare)
    models = {"a": wide(channels=20), "b": {**wide(), "step": 4}}
    found = match_models(settings(tmp_path, models=models, match={"by": "seconds", "tolerance": 0.1}))
    assert found["b"][0].init_args["channels"] == 20
    models = {"a": wide(channels=20), "b": wide(channels=21)}  # near enough as it is, since measurements are noisy
    found = match_models(settings(tmp_path, models=models, match={"by": "seconds", "tolerance": 0.1}))
    assert found["b"][0].init_args["channels"] == 21
    models = {"a": wide(channels=20), "b": wide(channels=50), "c": wide()}
    found = match_models(settings(tmp_path, models=models, match={"by": "seconds", "to": "b", "tolerance": 0.04}))
    assert [model.init_args["channels"] for model, _ in found.values()] == pytest.approx([50, 50, 50], rel=0.05)


def test_seconds_are_measured(tmp_path):
    """A wider network is slower. The bound is loose because other processes may use the machine."""
    meter = LocalMeter(settings(tmp_path, models={"a": wide()}))
    for slot, channels in (("narrow", 16), ("wide", 1024)):
        meter.prepare(slot, "a", ModelSettings(f"{HERE}.Wide", {"outputs": 2, "channels": channels}))
    found = {slot: np.median([meter.step(slot) for _ in range(5)]) for slot in ("narrow", "wide")}
    assert found["wide"] > 2 * found["narrow"] > 0


def test_width_of_the_fiber_is_matched(tmp_path):
    """The width is channels times frames: with 24 frames, a sixth of the channels with 4; without frames, channels."""
    near = {"class_path": "lieattn.geometry.Radius", "init_args": {"radius": 3.0}}

    def network(frames: dict, **options) -> dict:
        given = {
            "in_channels": 1,
            "out_channels": 2,
            "layers": 1,
            "heads": 2,
            "neighborhood": near,
            "vector_inputs": [],
        }
        model = {
            "class_path": "lieattn.models.FramewiseTransformer",
            "init_args": {"frames": frames, **given, **options},
        }
        return {**model, "width": "channels", "step": 4}

    models = {
        "exact": network({"class_path": "lieattn.geometry.PrincipalFrames"}, channels=24),
        "O": network({"class_path": "lieattn.groups.octahedral"}),
        "plain": {**spec("Distances", outputs=2), "width": "channels"},
    }
    found = match_models(settings(tmp_path, models=models, match={"by": "width", "to": "exact"}))
    assert {name: model.init_args["channels"] for name, (model, _) in found.items()} == {
        "exact": 24,
        "O": 4,
        "plain": 96,
    }
    assert {value for _, value in found.values()} == {96}
    plain = {"plain": models["plain"], "other": {**models["plain"], "init_args": {"outputs": 2, "channels": 32}}}
    found = match_models(settings(tmp_path, models=plain, match={"by": "width", "to": "plain"}))
    assert {value for _, value in found.values()} == {8}, "the default of an argument is its value"
    models["fixed"] = spec("Distances", outputs=2)
    with pytest.raises(ValueError, match=r"models\.fixed: cannot be matched by width: it has no field"):
        match_models(settings(tmp_path, models=models, match={"by": "width", "to": 96}))


def test_a_width_that_a_model_refuses_is_said_to_be_tried(tmp_path):
    """It is not in the file of the user."""
    arguments = {"in_channels": 1, "out_channels": 2, "heads": 2, "channels": 8, "layers": 1}
    network = {"class_path": "lieattn.models.FramewiseTransformer", "width": "channels"}
    frames = {"class_path": "lieattn.geometry.PrincipalFrames"}
    network["init_args"] = {"frames": frames, **arguments}
    message = r"per head.* got \d+\. channels = \d+ was tried to match the models; .* has a `step`"
    with pytest.raises(ValueError, match=message):
        match_models(settings(tmp_path, models={"odd": network}, match={"to": 2500}))


def test_wrong_options_of_the_trainer_are_named(tmp_path, capsys):
    compare(tmp_path, status=2, trainer__precision="quarter", arguments=("--models", "distances"))
    assert "lieattn compare: trainer: Precision 'quarter' is invalid" in capsys.readouterr().err


def test_sizes_that_were_measured_are_valid_for_the_same_settings(tmp_path, monkeypatch):
    """With simulated measurements, which are proportional to the square of the width."""
    calls = []

    def operations(self, name, model):
        calls.append((name, model.init_args["channels"]))
        return 100 * model.init_args["channels"] ** 2

    monkeypatch.setattr(LocalMeter, "operations", operations)
    models = {"a": wide(channels=400), "b": wide(channels=2)}

    def measured(expected, names=None, **changes):
        calls.clear()
        chosen = settings(tmp_path, **{"models": models, "match": {"by": "operations"}, **changes})
        found = match_models(chosen, tmp_path, names)
        assert {name: model.init_args["channels"] for name, (model, _) in found.items()} == expected
        return {name for name, _ in calls}

    same = {"a": 400, "b": 400}
    assert measured(same) == {"a", "b"}
    tried = [channels for name, channels in calls if name == "b"]
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


@pytest.mark.slow
def test_sizes_that_were_measured_are_kept(tmp_path, monkeypatch, capsys):
    """Sizes are kept when a comparison is continued, and measured again if settings that affect them change."""
    calls = []
    real = LocalMeter.operations

    def counted(self, name, model):
        calls.append(name)
        return real(self, name, model)

    monkeypatch.setattr(LocalMeter, "operations", counted)
    models = {"wide": wide(channels=20), "other": wide()}
    options = {"match": {"by": "operations", "to": "wide"}, "seeds": [0], "fractions": [1.0]}
    first = compare(tmp_path, models=models, **options)
    assert {"wide", "other"} == set(calls)
    kept = json.loads((tmp_path / "widths.json").read_text())
    assert (kept["by"], kept["models"]["other"]["chosen"]) == ("operations", {"channels": 20})
    calls.clear()
    compare(tmp_path, models=models, arguments=("--plan",), **options)
    assert calls == []
    assert "other: 5.873e+04 multiply-adds a step with channels = 20" in capsys.readouterr().err
    changed = {**models, "wide": wide(channels=30)}
    compare(tmp_path, models=changed, arguments=("--plan",), **options)
    assert set(calls) == {"wide", "other"}
    assert all(cell["operations"] == 58728 for cell in first["cells"])


def test_folders_do_not_mix_ways_to_match(finished, tmp_path, capsys):
    import shutil

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


def test_records_of_earlier_versions_are_read(finished, tmp_path):
    """Earlier records have no operations and no metric to compare; their other keys are the same."""
    content = {"task": {"class_path": "lieattn.train.PointSetClassifier", "init_args": {"classes": 2}}}
    content["models"] = {"a": {"class_path": "my.Net", "init_args": {"channels": 4}, "width": "channels"}}
    content["data"] = {name: {"class_path": "my.Data"} for name in ("train", "val", "test")}
    old = read_settings([write(tmp_path / "old.yaml", {**content, "budget": {"steps": 10}})])
    key = "5de2139d7c25f2c311bf78e7f1ead60f40b75700aab3b68f1696f8e20baf1382"  # of version 0.1
    assert old.key(Cell("a", 1.0, 0), old.models["a"]) == key
    cells = tmp_path / "out" / "cells"
    cells.mkdir(parents=True)
    for path in (finished / "cells").glob("*.json"):
        record = json.loads(path.read_text())
        for name in ("operations", "monitor", "versions", "machine"):
            record["record"].pop(name)
        record.pop("digest")
        (cells / path.name).write_text(json.dumps(record))
    report = compare(tmp_path / "out")
    assert all(row["operations"] is None for row in report["summary"])
    assert [row["test"] for row in report["summary"]] == [row["test"] for row in reports(finished)["summary"]]
    assert len(comparison(report).axes) == 3  # without multiply-adds
    for row in report["summary"]:
        row.pop("curve")
    with pytest.raises(
        ValueError, match="report: expected curves, got a report of an earlier version; run the same command again"
    ):
        comparison(report)


def test_parts_of_a_comparison_are_merged(finished, tmp_path, capsys):
    """Cells of several folders that are copied into one folder form one comparison."""
    import shutil

    for seed in (0, 1):
        compare(tmp_path / f"part{seed}", seeds=[seed], fractions=[1.0])
        shutil.copytree(tmp_path / f"part{seed}" / "cells", tmp_path / "whole" / "cells", dirs_exist_ok=True)
    capsys.readouterr()
    found = without_times(compare(tmp_path / "whole", fractions=[1.0]))
    assert "4 of 4 cells are finished, 0 to run" in capsys.readouterr().err
    assert found == [cell for cell in without_times(reports(finished)) if cell["fraction"] == 1]


def test_curves_are_means_over_seeds(finished, capsys):
    report = reports(finished)
    for row in report["summary"]:
        mine = [c for c in report["cells"] if (c["model"], c["fraction"]) == (row["model"], row["fraction"])]
        assert [point["part"] for point in row["curve"]] == [1, 2, 3]
        assert [point["steps"] for point in row["curve"]] == [4, 7, 10]
        for number, point in enumerate(row["curve"]):
            values = [cell["history"][number][2] for cell in mine]
            assert point["mean"] == pytest.approx(np.mean(values))
            assert point["std"] == pytest.approx(np.std(values, ddof=1))
            assert point["seconds"] == pytest.approx(np.mean([cell["history"][number][1] for cell in mine]))
        assert row["seconds_per_step"] == pytest.approx(np.mean([cell["seconds"] for cell in mine]) / 10)
    compare(finished)
    printed = capsys.readouterr().out
    for words in ("33.3 %", "100 %", "multiply-adds/step", "s/step", "matched by the number of parameters"):
        assert words in " ".join(printed.split())


def test_curves_of_seconds_have_the_shares_that_all_seeds_have():
    records = [
        {"history": [[5, 2.6, 0.5], [9, 5.1, 0.4], [14, 7.6, None], [20, 10.2, 0.2]]},
        {"history": [[3, 6.0, 0.3], [5, 12.0, 0.1]]},
    ]
    curve = _curve(records, BudgetSettings(seconds=10, evaluations=4))
    assert [point["part"] for point in curve] == [2, 4]
    assert [point["steps"] for point in curve] == [6, 12.5]
    assert [point["mean"] for point in curve] == pytest.approx([0.35, 0.15])


def test_curves_have_a_point_for_each_of_many_validations():
    """The share 29 / 100 times 100 is rounded to less than 29."""
    budget = BudgetSettings(steps=100, evaluations=100)
    curve = _curve([{"history": [[step, 0.1 * step, 1.0] for step in range(1, 101)]}], budget)
    assert [(point["part"], point["steps"]) for point in curve] == [(step, step) for step in range(1, 101)]


# Other interpreters


@pytest.fixture
def other_python(tmp_path) -> Path:
    """Return this interpreter under another path, like the interpreter of a separate environment."""
    path = tmp_path / "environment" / "python"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nOTHER_ENVIRONMENT=1 exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_cells_run_in_other_interpreters(finished, tmp_path, other_python, capfd):
    """Cells run in another interpreter have the same widths, batches and results."""
    models = copy.deepcopy(config()["models"])
    models["first coordinate"]["python"] = str(other_python)
    options = {"seeds": [0], "fractions": [1.0], "match": {"to": 102}}
    found = without_times(compare(tmp_path / "out", models=models, **options))
    expected = [cell for cell in without_times(reports(finished)) if (cell["seed"], cell["fraction"]) == (0, 1)]
    assert found == expected
    assert "first coordinate: 102 parameters with channels = 20" in capfd.readouterr().err
    kept = json.loads((tmp_path / "out" / "widths.json").read_text())
    assert {name: one["chosen"] for name, one in kept["models"].items()} == {"first coordinate": {"channels": 20}}
    other_python.write_text("#!/bin/sh\nexit 3\n")  # all cells are finished, so it is not needed
    assert without_times(compare(tmp_path / "out", models=models, **options)) == expected


@pytest.mark.slow
def test_averages_of_weights_in_other_interpreters(tmp_path, other_python):
    """Averages give the same results in another interpreter as in this one."""
    options = {"ema": 0.8, "seeds": [0], "fractions": [1.0], "data__rotate_test": False}
    model = spec("Distances", outputs=2, channels=8)
    here = compare(tmp_path / "here", models={"distances": model}, **options)
    there = compare(tmp_path / "there", models={"distances": model | {"python": str(other_python)}}, **options)
    assert without_times(there) == without_times(here)
    assert [cell["ema"] for cell in there["cells"]] == [0.8]


class Elsewhere(Distances):
    """A network that can only be built in the other environment."""

    def __init__(self, outputs: int, channels: int = 8) -> None:
        super().__init__(outputs, channels)
        sys.stdout.write("printed while it is made\n")  # must not be mistaken for an answer to the parent process
        if "OTHER_ENVIRONMENT" not in os.environ:
            raise ModuleNotFoundError("No module named 'elsewhere'")


@pytest.mark.slow
def test_models_that_other_interpreters_alone_can_make(tmp_path, other_python, capfd):
    """Models of another interpreter can come first in the file, their output is passed on, and they are reported."""
    models = {
        "elsewhere": {**spec("Elsewhere", outputs=2, channels=8), "python": str(other_python)},
        "here": {**spec("Distances", outputs=2), "width": "channels"},
    }
    options = {"models": models, "seeds": [0], "fractions": [1.0]}
    report = compare(tmp_path / "out", arguments=("--jobs", "2"), **options)
    assert [cell["model"] for cell in report["cells"]] == ["elsewhere", "here"]
    assert [cell["parameters"] for cell in report["cells"]] == [42, 42]
    assert "printed while it is made" in capfd.readouterr().err
    models["elsewhere"].pop("python")
    compare(tmp_path / "none", status=2, **options)
    assert "No module named 'elsewhere'" in capfd.readouterr().err


@pytest.mark.slow
def test_steps_in_other_interpreters_are_interrupted_and_continue(finished, tmp_path, other_python, capfd):
    """The signal arrives in this process, which passes it on."""
    network = spec("Interrupting", flag=str(tmp_path / "flag"), outputs=2, channels=20, after=5)  # 2 warm-up steps
    model = {**network, "width": "channels", "python": str(other_python)}
    options = {"models": {"distances": model}, "seeds": [0], "fractions": [1.0]}
    assert compare(tmp_path / "out", status=143, **options) == {}
    assert (tmp_path / "out/cells/distances-1-0/last.ckpt").is_file()
    assert "To continue: lieattn compare" in capfd.readouterr().err
    (cell,) = without_times(compare(tmp_path / "out", **options))
    (expected,) = (
        one
        for one in without_times(reports(finished))
        if one["model"] == "distances" and (one["seed"], one["fraction"]) == (0, 1)
    )
    assert cell == expected


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "cannot run `python -m lieattn.compare` \\(its message is above\\): lieattn and what"),
        ("read line; echo '\"0.0.1\"'", "has lieattn 0.0.1, this one has .*: expected the same"),
    ],
    ids=["no lieattn", "another version"],
)
def test_interpreters_that_cannot_do_it(tmp_path, other_python, capfd, script, message):
    other_python.write_text(f"#!/bin/sh\n{script}\n")
    model = {**spec("Distances", outputs=2), "python": str(other_python), "width": "channels"}
    to = {"by": "parameters", "to": 100}
    compare(tmp_path, status=2, models={"distances": model}, seeds=[0], fractions=[1.0], match=to)
    told = capfd.readouterr().err
    assert re.search(message, told)
    assert "was tried to match" not in told


@pytest.mark.slow
def test_faults_in_other_interpreters_are_told(tmp_path, other_python, capfd):
    model = {**spec("Broken", outputs=2), "python": str(other_python)}
    compare(tmp_path, status=1, models={"broken": model}, seeds=[0], fractions=[1.0])
    assert "in the cell: broken, 100 % of the data, seed 0" in capfd.readouterr().err
