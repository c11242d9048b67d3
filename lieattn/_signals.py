"""Signals to a process and its children. Windows has neither sessions nor masks of signals, and skips these steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SESSIONS, _MASKS = hasattr(os, "setsid"), hasattr(signal, "pthread_sigmask")


def leave_session() -> None:
    """Begin a session of its own, so that a terminal sends this process no signals."""
    if _SESSIONS:
        os.setsid()


def pass_signal(pid: int, signum: int) -> None:
    """Pass a signal on to a process that has left the session.

    Where there are no sessions the terminal has sent it to that process already, and sending another would kill it.
    """
    if _SESSIONS:
        os.kill(pid, signum)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back, here and in the processes that start within, until they :func:`release_interrupts`."""
    if not _MASKS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_interrupts() -> None:
    """Receive SIGINT from now on, and one that was held back."""
    if _MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
