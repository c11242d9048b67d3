"""The settings of a run that is continued, or evaluated, from its checkpoint alone, which is not trusted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace

from lieattn import train
from lieattn.cli._options import ArgumentParser

_LOGGERS = "lightning.pytorch.loggers"
# Loggers that write to a folder of this machine; others send what they log to an address.
_WRITERS = ("CSVLogger", "csv_logs", "TensorBoardLogger", "tensorboard")
RUN_CLASSES = ("lightning.pytorch.callbacks", *(f"{_LOGGERS}.{name}" for name in _WRITERS))
"""Packages and classes, besides those that are always trusted, that the settings of a run may name."""
_FOLDERS = ("dirpath", "save_dir")


def of_checkpoint(
    name: str, arguments: Sequence[str], trust: Sequence[str]
) -> tuple[Any, Callable[[], train.PointSetTask] | None]:
    """The configuration of the checkpoint if none is given, or a function that builds the task that it describes.

    The settings of the run are part of it for ``fit`` only, since others may run on another machine.
    CheckpointError is raised if the checkpoint has neither, or names classes or functions that are not trusted.
    """
    if any(word in ("-c", "-h") or word.startswith(("--config", "--help", "--print_config")) for word in arguments):
        return None, None
    path, _ = option(arguments, "--ckpt_path", nargs="?")
    if path in ("last", "best", None):
        return None, None
    if found := train.read_checkpoint(path)["lieattn"].get("config"):
        config = {key: value for key, value in found.items() if key != "run"}
        train.check_trusted(config, path, trust)
        return (config | _run_of(found.get("run"), path, trust) if name == "fit" else config), None
    if any(word.startswith("--model") for word in arguments):
        return None, None

    def task() -> train.PointSetTask:
        return train.load_task(path, trust)

    task.__qualname__ = f"task_{id(task)}"  # jsonargparse makes one class for each name
    return None, task


def _run_of(run: Any, path: str, trust: Sequence[str]) -> dict[str, Any]:
    """The settings of the run of a checkpoint. Its folder is among them only if the checkpoint is still there."""
    if not isinstance(run, dict) or not isinstance(run.get("trainer"), dict):
        return {}  # a checkpoint without these settings
    train.check_trusted(run, path, (*trust, *RUN_CLASSES))
    trainer, last, folder = dict(run["trainer"]), dict(run.get("last") or {}), Path(path).resolve().parent
    own: list[Path] = []
    if Path(trainer.get("default_root_dir") or "", "checkpoints").resolve() == folder:
        own.append(folder.parent)
    else:
        trainer.pop("default_root_dir", None)
    if last.get("dirpath") and Path(last["dirpath"]).resolve() == folder:
        own.append(folder)
    else:
        last.pop("dirpath", None)
    if "lightning" not in trust:
        for name in ("callbacks", "logger"):
            _check_folders(trainer.get(name), own, path)
    return {**run, "trainer": trainer, "last": last}


def _check_folders(specs: Any, own: Sequence[Path], path: str) -> None:
    """Raise CheckpointError if callbacks or loggers would write to other folders than those of the run.

    The callback ModelCheckpoint also deletes files there.
    """
    for spec in specs if isinstance(specs, list) else [specs]:
        if isinstance(spec, str):  # a file would be read later
            raise train.CheckpointError(f"{path} is damaged: expected the settings of a class, got {spec!r}")
        arguments = spec.get("init_args") if isinstance(spec, dict) else None
        for folder in _folders(arguments):
            place = Path(os.path.expandvars(os.path.expanduser(folder))).resolve()
            if "://" in folder or not any(place.is_relative_to(one) for one in own):
                raise train.CheckpointError(
                    f"{path} names the folder {folder!r}, to which {spec['class_path']} would write, and which is not "
                    f"that of its run. If you trust it: --trust lightning"
                )


def _folders(arguments: Any) -> Iterator[str]:
    """Yield the folders among the arguments of a callback or logger, and file names that lead out of its folder."""
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        if isinstance(value, str) and (name in _FOLDERS or Path(value).is_absolute() or ".." in Path(value).parts):
            yield value


def one_checkpoint(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off all checkpoints but the first: return the arguments with the first one, and the others."""
    paths, rest = option(arguments, "--ckpt_path", nargs="*")
    if not paths or len(paths) == 1:
        return list(arguments), []
    if name == "fit":
        raise train.UsageError(f"--ckpt_path: expected one checkpoint, since fit continues one run, got {len(paths)}")
    return [*rest, "--ckpt_path", paths[0]], paths[1:]


def plain(value: Any) -> Any:
    """Replace defaults of Lightning's callbacks that YAML cannot write by the texts that mean the same, in place."""
    if isinstance(value, Namespace):
        for name, entry in vars(value).items():
            setattr(value, name, plain(entry))
    elif isinstance(value, list):
        value[:] = map(plain, value)
    elif isinstance(value, torch.device):
        return str(value)
    elif isinstance(value, Enum) and isinstance(value, str):
        return str(value.value)
    return value


def written(config: Any, folder: Path) -> list[str]:
    """Write a configuration to a file, and return the option that names it."""
    if config is None:
        return []
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return ["--config", str(file)]


def option(arguments: Sequence[str], *names: str, **settings: Any) -> tuple[Any, list[str]]:
    """Return the value of one option, and the other arguments."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument(*names, dest="value", **settings)
    found, others = parser.parse_known_args(arguments)
    return found.value, others
