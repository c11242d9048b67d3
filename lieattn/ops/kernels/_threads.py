"""The threads of the kernels for CPUs.

A second pool of threads would be slow: after an operator of torch, OpenMP's threads spin for milliseconds on the cores
that threads of the kernel need.
"""

from __future__ import annotations

import _thread
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from lieattn._core.machine import keep_freed_memory
from lieattn.ops.kernels._calls import IMPORTED_BY

_ADAPTS = os.path.exists("/proc/self/schedstat")  # Linux, where torch comes with libgomp
_REGION = ctypes.CFUNCTYPE(None)
_PERIOD, _CALM = 0.25, 3.0  # seconds between two measurements of the load, and until the machine counts as idle again
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # variables that libgomp reads when torch is imported
_LOST = 0.25  # lost seconds per second of a busy machine; up to 0.1 were measured on an idle one, and 0.4 on a busy one


def adapt_waiting() -> None:
    """Let the threads of torch spin or sleep while they wait, depending on the load. Call this function regularly."""
    if _ADAPTS and waiting_setting() is None and _several_threads():
        _waiting().adapt(torch.get_num_threads())


def run(kernel: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Call a kernel with each of these arguments, on the threads of torch.

    A thread that has finished a call takes the next one, so no work waits for a thread that has no core yet.
    """
    keep_freed_memory()
    adapt_waiting()
    if len(calls) < 2 or not _several_threads():
        for arguments in calls:
            kernel(*arguments)
        return
    threads, left, errors = torch.get_num_threads(), iter(calls), list[BaseException]()

    def work() -> Iterator[None]:
        try:
            yield
            for arguments in left:
                kernel(*arguments)
        except BaseException as error:
            errors.append(error)

    # Exceptions cannot pass through OpenMP, but Python raises interrupts at the start of any function. Every thread
    # therefore continues an iterator that is already in its `try`, and the calls on the way there are not Python code.
    iterators = [work() for _ in range(threads)]
    for iterator in iterators:
        next(iterator)
    _parallel()(_REGION(partial(next, map(next, iter(iterators)), None)), None, threads, 0)
    if errors:
        raise errors[0]


@cache
def _parallel() -> Any:
    """Return the function of torch's OpenMP library that starts a parallel region, or None (on Windows)."""
    return getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)


def _several_threads() -> bool:
    """Return whether several threads can be used. They do not survive a fork, and OpenMP would wait for them."""
    return torch.get_num_threads() > 1 and _parallel() is not None and IMPORTED_BY == os.getpid()


@cache
def waiting_setting() -> str | None:
    """Return the environment variable that controls waiting, such as ``"GOMP_SPINCOUNT=0"``, or None."""
    return next((f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ), None)


def threads_report() -> str:
    """Describe the number of threads of kernels, their way to wait for work, and how to change it."""
    threads, setting = torch.get_num_threads(), waiting_setting()
    if _parallel() is None:
        return "1, since torch's threads are not available to kernels on this system"
    if threads == 1:
        return "1, like torch"
    if setting is not None:
        return f"{threads}, those of torch, which wait for work as set by {setting}"
    if not _ADAPTS:
        return f"{threads}, those of torch; on a busy machine set OMP_WAIT_POLICY=passive before torch is imported"
    return (
        f"{threads}, those of torch; between operators they spin while the machine is idle and sleep while it is busy "
        "(set GOMP_SPINCOUNT=0 before torch is imported and they always sleep)"
    )


class _Waiting:
    """Control that lets threads of OpenMP spin only on an idle machine.

    On an idle machine, spinning saves the time to wake threads up. On a busy one, it takes the cores from threads that
    have work: a step of many small operators takes up to 40 times as long. libgomp reads the spin time only when it is
    loaded, but hardly spins if it has more threads than cores. A few idle threads therefore stop all others from
    spinning.
    """

    def __init__(self) -> None:
        self.checked, self.busy, self.lost = time.monotonic(), -math.inf, _lost()
        self.idle: Any = None  # a lock that keeps the idle threads alive

    def adapt(self, threads: int) -> None:
        """Check periodically whether the machine is busy, i.e. whether other processes use the cores of this one."""
        now = time.monotonic()
        passed = now - self.checked
        if passed < _PERIOD:
            return
        lost = _lost()
        if lost - self.lost > _LOST * passed:
            self.busy = now
        self.checked, self.lost = now, lost
        busy = now - self.busy < _CALM
        if busy and self.idle is None:
            self.idle = _thread.allocate_lock()
            self.idle.acquire()
            _thread.start_new_thread(_keep, (self.idle, len(os.sched_getaffinity(0)) - threads + 2))
        elif not busy and self.idle is not None:
            self.idle.release()
            self.idle = None


def _keep(lock: Any, threads: int) -> None:
    """Keep a team of at least two threads until the lock is released."""
    _parallel()(_REGION(_thread.get_ident), None, max(threads, 2), 0)
    lock.acquire()


def _lost() -> float:
    """Return the seconds that the threads of this process have waited for a core so far, summed over threads."""
    nanoseconds = 0
    with suppress(OSError):  # too many files may be open
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/schedstat", "rb") as file:  # it may have ended
                nanoseconds += int(file.read().split()[1])
    return nanoseconds / 1e9


@cache
def _waiting() -> _Waiting:
    return _Waiting()
