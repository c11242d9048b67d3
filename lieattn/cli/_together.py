"""One message and one exit status of a command that Lightning runs in several processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch.distributed

_FOLDER = "LIEATTN_PROCESSES"  # environment variable, which the processes inherit from the first one
_WAIT = 2.0  # seconds for another process to note its error


class Together:
    """A folder in which the first process with an error notes its exit status; the others then say nothing.

    The first process makes the folder, and removes it at the end of a ``with`` block. Processes that were not started
    by it, such as those of torchrun, have folders of their own.
    """

    def __enter__(self) -> Together:
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

    def is_first(self, status: int) -> bool:
        """Note the exit status of an error of this process, and return whether no other process has reported one."""
        try:
            with (self._folder / "status").open("x", encoding="utf-8") as file:
                file.write(str(status))
        except OSError:  # the file exists, or the first process has ended and has removed the folder
            return False
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


def is_lost(error: Exception) -> bool:
    """Return whether an error says that another process has ended, or cannot be reached."""
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)
