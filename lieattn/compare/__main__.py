"""The process that an :class:`~lieattn.compare._interpreter.Interpreter` starts; it is not a command for users."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lieattn._core.signals import terminate
from lieattn.compare._cell import CellRunner
from lieattn.compare._interpreter import version
from lieattn.compare._meter import LocalMeter
from lieattn.compare._records import CellStore
from lieattn.compare._settings import Cell, ModelSettings, parsed, settings_from
from lieattn.train import TrainingInterrupted, UsageError

_CATALOG = ("lieattn.models", "lieattn.models.irreps", "lieattn_datasets")
_EVERY = 1.0  # seconds between two messages about the budget spent


class _Answers:
    """Reads requests from standard input and sends answers, which output printed by a model does not disturb."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._requests.put(json.loads(line))
        self._requests.put(None)
        if self.busy:  # the parent process has ended: save the cell in progress and stop
            terminate()

    def next(self) -> Any:
        """Return the next request, or None if there are no more."""
        return self._requests.get()

    def send(self, *content: Any) -> None:
        """Send an answer."""
        self._out.write(json.dumps(content[0] if len(content) == 1 else content) + "\n")
        self._out.flush()


class _Service:
    """Carries out the methods that requests name."""

    def __init__(self, content: Any, answers: _Answers) -> None:
        self.settings, self.answers = settings_from(content), answers
        self.meter = LocalMeter(self.settings)
        self._runner: CellRunner | None = None  # all cells of a comparison are in one folder
        self._told = 0.0

    def answer(self, method: str, arguments: list[Any]) -> Any:
        """Return the result of a method, called with plain arguments."""
        if method == "step":
            return self.meter.step(*arguments)
        name, model, *others = arguments
        sized = parsed(ModelSettings, {**model, "python": None}, f"models.{name}: ")
        if method == "run":
            cell, folder = others
            if self._runner is None:
                self._runner = CellRunner(self.settings, self.meter.sets, CellStore(Path(folder), self._warn))
            return self._runner.run(Cell(**cell), sized, self._report)
        if method == "prepare":
            return self.meter.prepare(str(others[0]), name, sized)
        return getattr(self.meter, method)(name, sized)

    def _report(self, steps: int, seconds: float) -> None:
        if time.monotonic() - self._told > _EVERY:
            self._told = time.monotonic()
            self.answers.send("spent", steps, seconds)

    def _warn(self, message: str) -> None:
        sys.stderr.write(f"{message}\n")


def main() -> None:
    """Answer requests until standard input ends."""
    answers = _Answers()
    content, threads, folder = answers.next()
    torch.set_num_threads(threads)
    sys.path.append(folder)
    for name in _CATALOG:  # their classes may be named without the package, if they can be imported
        try:
            import_module(name)
        except Exception:  # e3nn 0.4.4 cannot read its own constants until mace is imported
            pass
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*`max_epochs` was not set|.*GPU available but not used")
    answers.send(version())
    service = _Service(content, answers)
    while (request := answers.next()) is not None:
        answers.busy = True
        try:
            answers.send("done", service.answer(*request))
        except TrainingInterrupted as stop:
            answers.send("stopped", stop.signum, stop.step, str(stop.path))
        except KeyboardInterrupt:
            answers.send("stopped", signal.SIGINT, 0, folder)
        except UsageError as error:
            answers.send("failed", str(error), True)
        except Exception as error:
            traceback.print_exc()
            answers.send("failed", f"{type(error).__name__}: {error}", False)
        answers.busy = False


if __name__ == "__main__":
    main()
