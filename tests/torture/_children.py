"""A fork server: work in a child of this process, which is disturbed at a random moment and leaves nobody behind.

Everything is imported before, and nothing has used several threads, since only one survives a fork.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SUBREAPER = 36  # of prctl(2): children of a process that died become our children
LIMIT = 300.0  # seconds that a child may take, and its children after its end
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class End:
    """How work ended: its exit status (-n for signal n), what it said, and what went wrong with the process itself."""

    status: int | None
    said: str
    seconds: float
    left: int  # processes that had to be killed after it


@dataclass(frozen=True)
class Disturbance:
    """What happens to a child, and when; a second signal ``pause`` later; a disk that is full after so many bytes."""

    kind: str
    after: float
    pause: float = 0.0
    room: int = 0

    def happen(self, pid: int) -> None:
        """To the process, or, as a terminal does it, to all of its group."""
        if self.kind == "full disk":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.room, self.room))
        elif self.kind == "Ctrl-C":
            os.killpg(pid, signal.SIGINT)
        else:
            os.kill(pid, signal.Signals[self.kind.split()[0]])


def adopt() -> None:
    """Become the parent of processes that children leave behind."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run(work: Callable[[], int], folder: Path, disturbance: Disturbance | None = None) -> End:
    """Do the work in a child, with ``folder/tmp`` for temporary files and ``folder/said`` for what it prints."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "said").write_text("")
    began = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child is one that can take them
    pid = os.fork()
    if pid == 0:
        _be_the_child(work, folder)
    os.setpgid(pid, pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = _until_its_end(pid, began, disturbance)
    left = _end_all() if status is not None else 0
    if status is None:
        os.killpg(pid, signal.SIGKILL)
        left = _end_all(0.0)
    return End(status, (folder / "said").read_text(errors="replace"), time.monotonic() - began, left)


def _be_the_child(work: Callable[[], int], folder: Path) -> None:
    for signum in _SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    said = os.open(folder / "said", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    status, began = 130, False
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        began = True
        status = work()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        if began:
            traceback.print_exc()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work has ended
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        try:
            end()
        except BaseException:
            status = status or 1
    os._exit(status)


def _until_its_end(pid: int, began: float, disturbance: Disturbance | None) -> int | None:
    """Its exit status; None if it takes too long."""
    pending = [] if disturbance is None else [(began + disturbance.after, disturbance)]
    if disturbance is not None and disturbance.kind == "SIGINT twice":
        pending.append((pending[0][0] + disturbance.pause, disturbance))
    while time.monotonic() - began < LIMIT:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if pending and time.monotonic() >= pending[0][0]:
            pending.pop(0)[1].happen(pid)
        time.sleep(0.002)
    return None


def _end_all(patience: float = 15.0) -> int:
    """Wait for adopted processes; how many did not end by themselves. Loaders of torch look every five seconds."""
    until, killed = time.monotonic() + patience, set()
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return len(killed)
        if found:
            continue
        if time.monotonic() > until:
            for child in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
                os.kill(child, signal.SIGKILL)
                killed.add(child)
        time.sleep(0.02)
