"""The disturbed work: commands on tiny configurations that save very often, writers of files, calls of kernels."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data

from lieattn.cli import main
from lieattn.compare import _cell as budgets
from lieattn.geometry import Radius, lift
from lieattn.groups import cyclic
from lieattn.io import replace_text
from lieattn.nn import GroupSelfAttention, LiftingSelfAttention

BATCH, EPOCHS = 3, 3


class Clouds(Dataset):
    """Clouds with new noise on each access. A continued run must draw the same noise as an uninterrupted one."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Data:
        generator = torch.Generator().manual_seed(index)
        pos = (1 + index % 2) * torch.randn(8, 2, generator=generator) + 0.1 * torch.randn(8, 2)
        return Data(x=torch.ones(8, 1), pos=pos, y=torch.tensor([index % 2]))


class Journal(Callback):
    """Callback that notes every step whose checkpoint is already written."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step:
            note(Path(self.path), trainer.global_step)


def note(path: Path, number: int) -> None:
    """Record a number so that it survives the end of this process, also with a full disk."""
    (path.parent / f"{path.name}.{number}").touch()


def noted(path: Path) -> int:
    """Return the highest recorded number, or 0."""
    return max((int(file.name.rpartition(".")[2]) for file in path.parent.glob(f"{path.name}.*")), default=0)


def _spec(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


def _network() -> dict[str, Any]:
    group, near = _spec("lieattn.groups.cyclic", n=4), _spec("lieattn.geometry.Radius", radius=2.0)
    small = {"channels": 8, "layers": 1, "heads": 2, "vector_inputs": []}
    given = {"frames": group, "in_channels": 1, "out_channels": 2, "neighborhood": near}
    return _spec("lieattn.models.FramewiseTransformer", **given, **small)


def write_fit(folder: Path, workers: int) -> None:
    """Write the configuration of a run of one or two seconds, which saves after every step."""
    clouds = _spec(f"{__name__}.Clouds")
    task = {
        "classes": 2,
        "network": _network(),
        "optimizer": _spec("torch.optim.SGD", lr=0.1, momentum=0.9),
        "schedule": _spec("lieattn.train.WarmupCosine", warmup_epochs=1),
    }
    content = {
        "seed_everything": 3,
        "model": _spec("lieattn.train.PointSetClassifier", **task),
        "data": {"train": clouds, "val": _spec(f"{__name__}.Clouds", size=6), "batch_size": BATCH, "workers": workers},
        "last": {"every_n_train_steps": 1},
        "trainer": {
            "default_root_dir": str(folder),
            "accelerator": "cpu",
            "max_epochs": EPOCHS,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "callbacks": [_spec(f"{__name__}.Journal", path=str(folder / "notes" / "step"))],
        },
    }
    (folder / "notes").mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(content))


def fit(folder: Path, threads: int) -> int:
    """Start the run, or continue it if there is a checkpoint."""
    torch.set_num_threads(threads)
    last = folder / "checkpoints/last.ckpt"
    return main(["fit", "--config", str(folder / "run.yaml"), *(["--ckpt_path", "last"] if last.exists() else [])])


def write_compare(folder: Path) -> None:
    """Write the configuration of a comparison with four cells of a few steps."""
    content = {
        "task": _spec("lieattn.train.PointSetClassifier", classes=2),
        "models": {"narrow": _network(), "two heads": _network()},
        "data": {name: _spec(f"{__name__}.Clouds") for name in ("train", "val", "test")} | {"batch_size": BATCH},
        "budget": {"steps": 6, "evaluations": 2},
        "seeds": [0, 1],
        "trainer": {"accelerator": "cpu"},
        "equivariance": {"clouds": 2, "elements": 2},
        "memory": False,
    }
    (folder / "compare.yaml").write_text(yaml.safe_dump(content))


def compare(folder: Path, jobs: int) -> int:
    """Run the missing cells, with a checkpoint after every step."""
    budgets._SAVE_EVERY = 0.0
    return main(["compare", "--config", str(folder / "compare.yaml"), "--out", str(folder), "--jobs", str(jobs)])


def certify(folder: Path, checkpoint: Path) -> int:
    """Write a certificate over another file."""
    return main(["certify", str(checkpoint), "--random", "--clouds", "2", "--json", str(folder / "report.json")])


def predict(folder: Path, checkpoint: Path) -> int:
    """Write a table of predictions beside another one."""
    words = [
        "--ckpt_path",
        str(checkpoint),
        "--config",
        str(folder / "run.yaml"),
        "--data.predict",
        f"{__name__}.Clouds",
    ]
    return main(["predict", *words])


def report_of(number: int) -> str:
    """Return a report whose content shows whether it is complete."""
    return json.dumps({"number": number, "rows": [number] * (500 + 977 * number % 20_000)})


def write_reports(folder: Path) -> int:
    """Replace a report repeatedly, and record the numbers of completed reports."""
    number = noted(folder / "notes" / "report")
    while True:
        number += 1
        try:
            replace_text(folder / "report.json", report_of(number))
        except OSError as error:  # reported like an error of a command
            sys.stderr.write(f"{error}\n")
            return 2
        note(folder / "notes" / "report", number)


def write_pictures(folder: Path) -> int:
    """Replace a picture repeatedly."""
    from lieattn.viz import save, training_curves

    number = 0
    while True:
        number += 1
        save(training_curves({"loss": [1.0] * (1 + number % 9)}, "loss"), folder / "picture.png")
        note(folder / "notes" / "picture", number)


def interrupt_kernels(folder: Path, threads: int, seed: int, number: int) -> int:
    """Interrupt forward and backward calls of kernels, and check whether the following calls are correct.

    A line is written for each interrupt. A timer interrupts at random moments within the duration of a call.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    calls = [_attention(points) for points in (40, 80, 160)]
    expected, durations = [], []
    for call in calls:
        call()
        began = time.perf_counter()
        expected.append([part.clone() for part in call()])
        durations.append(time.perf_counter() - began)
    draw = random.Random(seed)
    with (folder / "calls").open("w") as lines:
        for _ in range(number):
            at, after = draw.randrange(len(calls)), draw.randrange(len(calls))
            interrupted = False
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, draw.random() * durations[at]))
                calls[at]()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted = True
            right = all(map(torch.equal, calls[after](), expected[after]))
            lines.write(f"{int(interrupted)} {int(right)}\n")
            lines.flush()
    return 0


def _attention(points: int) -> Callable[[], list[Tensor]]:
    """Return a function that computes the outputs and all gradients of two layers on a cloud."""
    group = cyclic(4)
    graph = lift(torch.rand(points, 2) * points**0.5, group, Radius(1.5))
    x = torch.randn(points, 2)
    lifting, attention = LiftingSelfAttention(group, 2, 16, heads=4), GroupSelfAttention(group, 16, 16, heads=4)
    parameters = [*lifting.parameters(), *attention.parameters()]

    def call() -> list[Tensor]:
        out = attention(lifting(x, graph), graph)
        return [out, *torch.autograd.grad(out.square().mean(), parameters, allow_unused=False)]

    return call


def warm_up(names: set[str]) -> None:
    """Import all modules and compile the kernels of the disturbed work, with one thread."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if names != {"kernels"}:
            write_fit(folder, 0)
            with contextlib.redirect_stdout(sys.stderr):
                fit(folder, 1)
        if "kernels" in names:
            interrupt_kernels(folder, 1, 0, 0)


def is_alone() -> bool:
    """Return whether this process has only one thread, so that it can fork."""
    return len(os.listdir("/proc/self/task")) == 1
