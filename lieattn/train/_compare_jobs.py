"""Cells of a comparison in several processes at once, each on its share of the threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch


def in_processes(command: Sequence[str], cells: Sequence[int], jobs: int) -> int:
    """Run a ``lieattn`` command with ``--cells`` and a part of the numbers in each of several processes.

    SIGINT and SIGTERM are passed on, once to each process, so that all of them save what they are at.

    Parameters
    ----------
    command
        What follows ``lieattn``.
    cells
        Numbers of the cells to run.
    jobs
        Processes; they divide the threads that torch may use.

    Returns
    -------
    int
        The highest exit status, 128 + n for a process that signal n ended.
    """
    shares = [cells[start::jobs] for start in range(min(jobs, len(cells)))]
    threads = max(1, torch.get_num_threads() // len(shares))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    children: list[subprocess.Popen[bytes]] = []
    with _passing_on(children):
        for share in shares:
            program = [sys.executable, "-m", "lieattn", *command, "--cells", *map(str, share)]
            # A session of its own: a terminal would send the signal once more.
            children.append(subprocess.Popen(program, env=environment, start_new_session=True))
        return max(_status(child.wait()) for child in children)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_on(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send signals that ask to stop to the children, for which this process goes on waiting."""

    def send(signum: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, send) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
