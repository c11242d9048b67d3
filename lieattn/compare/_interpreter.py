"""Models with their own interpreter: ``python -m lieattn.compare`` in another environment measures and trains them.

Both processes exchange lines of JSON. First the settings are sent, and answered by the version of lieattn. Requests
``[method, arguments]`` follow. Each is answered by any number of ``["spent", steps, seconds]`` and one of
``["done", result]``, ``["stopped", signal, step, path]`` and ``["failed", message, usage]``, where ``usage`` says
whether the user can correct the error.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from lieattn._core.signals import pass_signal
from lieattn.compare._settings import Cell, ModelSettings, Settings
from lieattn.train import TrainingInterrupted, UsageError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 10.0  # seconds that the other process has to end


class Interpreter:
    """A process of another Python that runs cells and measures models, as a :class:`~lieattn.compare._meter.Meter`.

    It is started by the first request, in the working directory, with the environment and the number of threads of
    this process. InterpreterError is raised if it cannot import ``lieattn.compare``, or has another version of it.
    """

    def __init__(self, python: str, settings: Settings) -> None:
        self.python, self.settings = python, settings
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        _pipes(self._process)[0].close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipes(self._process)[1].close()
        self._process = None

    def parameters(self, name: str, model: ModelSettings) -> int:
        """See :class:`~lieattn.compare._meter.Meter`, also for the following methods."""
        return int(self._ask("parameters", name, model))

    def operations(self, name: str, model: ModelSettings) -> int:
        """Multiply-adds of a step."""
        return int(self._ask("operations", name, model))

    def width(self, name: str, model: ModelSettings) -> int:
        """Channels times frames."""
        return int(self._ask("width", name, model))

    def prepare(self, slot: str, name: str, model: ModelSettings) -> None:
        """Build a model."""
        self._ask("prepare", name, model, slot)

    def step(self, slot: str) -> float:
        """Seconds of a step."""
        return float(self._ask("step", slot))

    def run(
        self, cell: Cell, model: ModelSettings, folder: Path, report: Callable[[int, float], None] | None = None
    ) -> dict[str, Any]:
        """Train and measure a cell like :meth:`lieattn.compare.CellRunner.run`, with records in the ``folder``.

        SIGINT and SIGTERM are passed on, so that the training saves its state. TrainingInterrupted is then raised.
        """
        received: list[int] = []

        def pass_on(signum: int, frame: FrameType | None) -> None:
            received.append(signum)
            if self._process is not None and self._process.poll() is None:
                pass_signal(self._process.pid, signum)

        main = threading.current_thread() is threading.main_thread()
        before = {signum: signal.signal(signum, pass_on) for signum in _SIGNALS} if main else {}
        try:
            arguments = dataclasses.asdict(cell), str(folder)
            record: dict[str, Any] = self._ask("run", cell.model, model, *arguments, report=report)
        except _GoneError as error:
            if received:
                raise TrainingInterrupted(received[0], 0, folder) from error
            raise
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return record

    def _ask(self, method: str, *arguments: Any, report: Callable[[int, float], None] | None = None) -> Any:
        """Send a request and return the answer; ModelSettings are sent as plain values."""
        if self._process is None:
            self._process = self._started()
        plain = [dataclasses.asdict(one) if isinstance(one, ModelSettings) else one for one in arguments]
        self._send([method, plain])
        while True:
            kind, *content = self._receive()
            if kind == "spent" and report is not None:
                report(*content)
            elif kind == "done":
                return content[0]
            elif kind == "stopped":
                raise TrainingInterrupted(content[0], content[1], Path(content[2]))
            elif kind == "failed":
                message, usage = content
                raise UsageError(message) if usage else RuntimeError(f"in {self.python}: {message}")

    def _started(self) -> subprocess.Popen[str]:
        path = shutil.which(Path(self.python).expanduser())
        # -P: the working directory is searched last, as for `lieattn` itself. In a session of its own, the process does
        # not get the signals of a terminal twice.
        command = [path or self.python, "-P", "-m", "lieattn.compare"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, start_new_session=True, **pipes)
        try:
            self._send([dataclasses.asdict(self.settings), torch.get_num_threads(), os.getcwd()])
            theirs = self._receive()
        except _GoneError as error:
            raise InterpreterError(
                f"python: {self.python} cannot run `python -m lieattn.compare` (its message is above): lieattn and "
                f'what training needs must be installed there, pip install "lieattn[train]"'
            ) from error
        if theirs != (ours := version()):
            found = f"{self.python} has lieattn {theirs}, this one has {ours}"
            raise InterpreterError(f"python: {found}: expected the same")
        return self._process

    def _send(self, content: Any) -> None:
        process = self._process
        try:
            writer = _pipes(process)[0]
            writer.write(json.dumps(content, default=str) + "\n")
            writer.flush()
        except BrokenPipeError as error:
            raise self._gone() from error

    def _receive(self) -> Any:
        line = _pipes(self._process)[1].readline()
        if not line:
            raise self._gone()
        return json.loads(line)

    def _gone(self) -> _GoneError:
        process, self._process = self._process, None
        writer, reader = _pipes(process)
        reader.close()
        with suppress(BrokenPipeError):
            writer.close()
        status = process.wait() if process is not None else None
        return _GoneError(f"{self.python} ended with exit status {status}; its message is above")


class InterpreterError(UsageError):
    """An interpreter cannot run the same version of ``lieattn.compare``."""


class _GoneError(RuntimeError):
    """The other process has ended."""


def _pipes(process: subprocess.Popen[str] | None) -> tuple[Any, Any]:
    """The streams for writing to a process and reading from it."""
    if process is None:
        raise _GoneError("the interpreter was closed")
    return process.stdin, process.stdout


def version() -> str:
    """The version of lieattn, or ``"of source files"`` if it is not installed as a package."""
    try:
        return importlib.metadata.version("lieattn")
    except importlib.metadata.PackageNotFoundError:
        return "of source files"
