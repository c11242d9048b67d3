"""One message and one exit status of a command that Lightning runs in several processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch.distributed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lieattn.cli._options import usage_message
from lieattn.train import NonFiniteError, TrainingInterrupted

_FOLDER = "LIEATTN_PROCESSES"  # environment variable, which the processes inherit from the first one
# Seconds for another process to note its error. It does so before it closes its connections, and Lightning kills all
# processes some seconds after one was killed.
_WAIT = 0.2


class Together(Callback):
    """A folder in which the first process with an error notes its exit status; the others then say nothing.

    The first process makes the folder, and removes it at the end of a ``with`` block. Processes that were not started
    by it, such as those of torchrun, have folders of their own. As a callback of a trainer, it notes errors at once.
    """

    def __enter__(self) -> Together:
        self._noted = False
        started = os.environ.get("LOCAL_RANK", "0") != "0"
        given = os.environ.get(_FOLDER) if started else None
        self._owns = given is None
        self._folder = Path(given or tempfile.mkdtemp(prefix="lieattn-"))
        os.environ[_FOLDER] = str(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._owns:
            del os.environ[_FOLDER]
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note an error that ends the command, unless it is due to another process."""
        reaches_all = isinstance(exception, (NonFiniteError, TrainingInterrupted))
        if isinstance(exception, Exception) and not reaches_all and not is_lost(exception):
            self.is_first(exception)

    def is_first(self, error: Exception) -> bool:
        """Note the exit status of an error of this process, and return whether no other process has reported one."""
        if not self._noted:
            try:
                with (self._folder / "status").open("x", encoding="utf-8") as file:
                    file.write(str(status_of(error)))
            except OSError:  # the file exists, or the first process has ended and has removed the folder
                return False
            self._noted = True
        return True

    def reported(self) -> int | None:
        """The exit status of the process that has reported an error; None if there is none."""
        until = time.monotonic() + _WAIT
        while self._folder.exists() and time.monotonic() < until:
            try:
                return int((self._folder / "status").read_text(encoding="utf-8"))
            except (OSError, ValueError):  # not there, or not yet written
                time.sleep(0.05)
        return None if self._folder.exists() else 1


def status_of(error: Exception) -> int:
    """Return the exit status of an error: 2 if the user can correct it, else 1."""
    return 1 if usage_message(error) is None else 2


def is_lost(error: Exception) -> bool:
    """Return whether an error says that another process has ended, or cannot be reached."""
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)
