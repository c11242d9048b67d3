"""Signals of a process and of its child processes, also on systems with fewer features."""

import os
import signal
import threading

import pytest

from lieattn._core import signals as _signals


def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_interrupts_are_held():
    received = []

    def work():
        with _signals.interrupts_held():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # other threads cannot delay it
            received.append(blocked())
            _signals.release_interrupts()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [{signal.SIGINT}]
    assert blocked() == set()


def test_signals_are_passed_on():
    received, handler = [], signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda signum, frame: received.append(signum))
    try:
        _signals.pass_signal(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert received == [signal.SIGUSR1]


def test_systems_without_sessions_and_masks(monkeypatch):
    """As on Windows: sessions and signal masks are not used."""
    for module, name in ((os, "setsid"), (os, "kill"), (signal, "pthread_sigmask")):
        monkeypatch.delattr(module, name)
    monkeypatch.setattr(_signals, "_SESSIONS", False)
    monkeypatch.setattr(_signals, "_MASKS", False)
    _signals.leave_session()
    _signals.pass_signal(1, signal.SIGINT)
    _signals.release_interrupts()
    with _signals.interrupts_held():
        entered = True
    assert entered
