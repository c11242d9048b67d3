"""The training that a checkpoint describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lieattn import train
from lieattn.cli._arguments import values_of

HARMLESS = ("lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.callbacks.early_stopping")
"""A callback that the settings of a run may name, and its module. Others write files, or delete them."""


def described(
    name: str, arguments: Sequence[str]
) -> tuple[dict[str, Any] | None, Callable[[], train.PointSetTask] | None]:
    """The settings in the checkpoint of the arguments, or a function that builds the task that it describes.

    Both are None if the arguments have a configuration or no file of a checkpoint. The settings of the run are among
    them for ``fit`` only, since other commands may run on another machine. CheckpointError is raised if the checkpoint
    names classes or functions that are not trusted.
    """
    if any(word.startswith(("-c", "-h", "--config", "--help", "--print_config")) for word in arguments):
        return None, None
    path, trust = next(iter(values_of(arguments, "--ckpt_path")), "last"), values_of(arguments, "--trust")
    if path in ("last", "best"):
        return None, None
    if settings := train.read_checkpoint(path)["lieattn"].get("config"):
        settings = {key: value for key, value in settings.items() if key != "run"} | (
            _run_of(settings.get("run"), path) if name == "fit" else {}
        )
        train.check_trusted(settings, path, [*trust, *HARMLESS])
        return settings, None
    if any(word.startswith("--model") for word in arguments):
        return None, None

    def task() -> train.PointSetTask:
        return train.load_task(path, trust)

    task.__qualname__ = f"task_{id(task)}"  # the parser makes one class for each name
    return None, task


def _run_of(run: Any, path: str) -> dict[str, Any]:
    """The settings of the run of a checkpoint. Its folder is among them only if the checkpoint is still there."""
    if not isinstance(run, dict) or not isinstance(run.get("trainer"), dict):
        return {}  # a checkpoint without these settings
    trainer, last, folder = dict(run["trainer"]), dict(run.get("last") or {}), Path(path).resolve().parent
    if Path(trainer.get("default_root_dir") or "", "checkpoints").resolve() != folder:
        trainer.pop("default_root_dir", None)
    if last.get("dirpath") and Path(last["dirpath"]).resolve() != folder:
        last.pop("dirpath", None)
    return {**run, "trainer": trainer, "last": last}
