"""Models in an interpreter of their own: measured and trained by ``python -m lieattn.compare`` of another environment.

Both processes exchange lines of JSON: first the settings, answered by what the other process is; then requests
``[method, arguments]``, each answered by any number of ``["spent", steps, seconds]`` and one of ``["done", result]``,
``["stopped", signal]`` and ``["failed", message, whether the user can mend it]``.
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

from lieattn._signals import pass_signal
from lieattn.compare._settings import Cell, ModelSettings, Settings
from lieattn.train import TrainingInterrupted, UsageError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 10.0  # seconds for the other process to end when it is left


class Interpreter:
    """A process of another Python that measures models, as :class:`~lieattn.compare._meter.Meter`, and runs cells.

    It is started when it is first asked, in the working directory, with the environment and the number of threads of
    this process. UsageError is raised if it cannot import ``lieattn.compare``, or has another version of it.
    """

    def __init__(self, python: str, settings: Settings) -> None:
        self.python, self.settings = python, settings
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the process end."""
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
        """See :class:`~lieattn.compare._meter.Meter`, as for the next ones."""
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
        """Train and measure a cell, with records in the ``folder``; as :meth:`lieattn.compare.CellRunner.run`.

        SIGINT and SIGTERM are passed on, so that the training saves its state: TrainingInterrupted is raised then.
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
        """The answer to a request; ModelSettings go as plain values."""
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
        # -P: the working directory comes last, as for `lieattn` itself. A group of its own gets no signal of a terminal
        # twice.
        command = [path or self.python, "-P", "-m", "lieattn.compare"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, start_new_session=True, **pipes)
        try:
            self._send([dataclasses.asdict(self.settings), torch.get_num_threads(), os.getcwd()])
            theirs = self._receive()
        except _GoneError as error:
            raise UsageError(
                f"python: {self.python} cannot run `python -m lieattn.compare` (its message is above): lieattn and "
                f'what training needs must be installed there, pip install "lieattn[train]"'
            ) from error
        if theirs != (ours := version()):
            raise UsageError(f"python: {self.python} has lieattn {theirs}, this one has {ours}: expected the same")
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


class _GoneError(RuntimeError):
    """The other process is no more."""


def _pipes(process: subprocess.Popen[str] | None) -> tuple[Any, Any]:
    """Where to write to a process and read from it."""
    if process is None:
        raise _GoneError("the interpreter was closed")
    return process.stdin, process.stdout


def version() -> str:
    """Version of lieattn; of a tree of files that is not installed there is none."""
    try:
        return importlib.metadata.version("lieattn")
    except importlib.metadata.PackageNotFoundError:
        return "of source files"
