"""Checkpoints of an earlier run in the folder of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lieattn.cli._announced import say
from lieattn.train import NonFiniteError, TrainingInterrupted


class EarlierBest(Callback):
    """Says when a run ends without a validation that has replaced the best checkpoint of an earlier run."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, _identity(path)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if the file is still the same."""
        if self._before is not None and _identity(self._path) == self._before:
            say(f"{self._path} is of an earlier run, since no validation of this one has replaced it")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say so as well if a signal or numbers that are not finite have ended the run."""
        if isinstance(exception, TrainingInterrupted | NonFiniteError):
            self.on_fit_end(trainer, pl_module)


def _identity(path: Path) -> Any:
    """What changes when a file is replaced; None if there is no file."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
