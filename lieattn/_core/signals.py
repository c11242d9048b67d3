"""Signals to a process and its children. Windows has neither sessions nor masks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SESSIONS, _MASKS = hasattr(os, "setsid"), hasattr(signal, "pthread_sigmask")


def leave_session() -> None:
    """Start a new session, if there are any, so that a terminal sends no signals to this process."""
    if _SESSIONS:
        os.setsid()


def pass_signal(pid: int, signum: int) -> None:
    """Pass a signal on to a process that has left the session.

    On systems without sessions, the terminal has already sent the signal, and a second one would kill the process.
    """
    if _SESSIONS:
        os.kill(pid, signum)


def terminate() -> None:
    """Let this process receive SIGTERM, whose handler may save its state."""
    if _SESSIONS:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        signal.raise_signal(signal.SIGTERM)  # on Windows, os.kill would end the process at once


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT in this process, and in new processes until they call :func:`release_interrupts`."""
    if not _MASKS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_interrupts() -> None:
    """Unblock SIGINT. A signal that was blocked is received now."""
    if _MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
