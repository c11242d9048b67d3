"""Cells of a comparison in several processes at once, each with its share of the threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from lieattn.compare._models import Matched
from lieattn.compare._settings import Settings

_MODELS = "models.json"


def in_processes(command: Sequence[str], models: Matched, jobs: int) -> int:
    """Run a ``lieattn`` command in several processes, with ``--claims`` and a folder where they claim cells.

    They share the threads that torch may use. SIGINT and SIGTERM are passed on, once to each, so that all of them save
    their state. Returned is the highest exit status, 128 + n for a process that signal n ended.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as claims, _passing_on(children):
        chosen = {name: (model.chosen, count) for name, (model, count) in models.items()}
        Path(claims, _MODELS).write_text(json.dumps(chosen))
        program = [sys.executable, "-m", "lieattn", *command, "--claims", claims]
        for _ in range(jobs):
            # A session of its own: a terminal would send the signal once more.
            children.append(subprocess.Popen(program, env=environment, start_new_session=True))
        codes = [child.wait() for child in children]
        return max(code if code >= 0 else 128 - code for code in codes)


def given_models(settings: Settings, folder: Path) -> Matched:
    """The models as the process that distributes the cells has matched them."""
    chosen = json.loads((folder / _MODELS).read_text())
    return {name: (settings.models[name].with_arguments(**given), count) for name, (given, count) in chosen.items()}


def claim(folder: Path, number: int) -> bool:
    """Claim a cell for this process; False if another one has claimed it."""
    try:
        (folder / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def _passing_on(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send signals that ask to stop to the children, for which this process goes on waiting."""

    def send(signum: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {signum: signal.signal(signum, send) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
