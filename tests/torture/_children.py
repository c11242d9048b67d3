"""A fork server: it runs work in a child, which is disturbed at a random moment and must leave no processes behind.

All imports happen before, and no code has used several threads, since only one thread survives a fork.
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

_SUBREAPER = 36  # option of prctl(2): children of a dead child become children of this process
LIMIT = 300.0  # time limit in seconds for a child
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class End:
    """The end of work: exit status (-n for signal n, None after the time limit), output, and remaining processes."""

    status: int | None
    said: str
    seconds: float
    left: int  # processes that had to be killed after it


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of a child ``after`` seconds.

    A second signal follows ``pause`` seconds later. A full disk has ``room`` for this number of bytes.
    """

    kind: str
    after: float
    pause: float = 0.0
    room: int = 0

    def happen(self, pid: int) -> None:
        """Disturb the process or, like a terminal, all processes of its group."""
        if self.kind == "full disk":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.room, self.room))
        elif self.kind == "Ctrl-C":
            os.killpg(pid, signal.SIGINT)
        else:
            os.kill(pid, signal.Signals[self.kind.split()[0]])


def adopt() -> None:
    """Make this process the parent of processes that children leave behind."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run(work: Callable[[], int], folder: Path, disturbance: Disturbance | None = None) -> End:
    """Run the work in a child, with ``folder/tmp`` for temporary files and ``folder/said`` for its output."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "said").write_text("")
    began = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child has its signal handlers
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
    """Wait for a child, and return its exit status, or None after the time limit."""
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
    """Wait for adopted processes, and return the number of those that must be killed.

    Worker processes of torch check every five seconds whether their parent is alive.
    """
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
