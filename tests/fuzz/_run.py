"""A small real run of ``lieattn fit``, once per process, from which damaged checkpoints and command lines are made."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import logging
import shutil
import tempfile
from pathlib import Path

import yaml

from lieattn.cli import main
from lieattn.ops import backend


@functools.cache
def folder() -> Path:
    """Return a folder of this process, which is removed at its end."""
    path = Path(tempfile.mkdtemp(prefix="lieattn-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def config(root: Path) -> dict:
    """Return the configuration of a classifier of constellations: one epoch of two batches."""

    def spec(name: str, **arguments) -> dict:
        return {"class_path": name, "init_args": arguments}

    network = spec(
        "lieattn.models.LieTransformer",
        in_channels=33,
        out_channels=12,
        channels=4,
        layers=1,
        heads=2,
        frames=spec("lieattn.groups.cyclic", n=2),
        neighborhood=spec("lieattn.geometry.Radius", radius=1.0),
    )
    optimizer = spec("torch.optim.Adam", lr=1e-3)
    clouds = {name: spec("lieattn_datasets.Constellation", split=name, size=4) for name in ("train", "valid", "test")}
    return {
        "seed_everything": 0,
        "model": spec("lieattn.train.PointSetClassifier", network=network, classes=3, labels=4, optimizer=optimizer),
        "data": {"train": clouds["train"], "val": clouds["valid"], "test": clouds["test"], "batch_size": 2},
        "trainer": {
            "default_root_dir": str(root),
            "max_epochs": 1,
            "max_steps": 4,  # a limit, since random numbers of epochs can be large
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }


@functools.cache
def checkpoint() -> Path:
    """Return the checkpoint of the run."""
    file = folder() / "run.yaml"
    file.write_text(yaml.safe_dump(config(folder())))
    status, _, errors = command("fit", "--config", str(file))
    if status != 0:
        raise RuntimeError(errors)
    return folder() / "checkpoints/last.ckpt"


def command(*arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command line in this process, in the folder with plain operations."""
    out, errors = io.StringIO(), io.StringIO()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    quiet = contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors)
    with contextlib.chdir(folder()), backend("plain"), quiet[0], quiet[1]:
        status = main(arguments)
    return status, out.getvalue(), errors.getvalue()
