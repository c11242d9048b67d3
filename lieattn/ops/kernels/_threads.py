"""The threads of the kernels for CPUs: those that torch has for its own operators, and how they wait for work.

With a pool beside torch's every change between the two costs time: threads of OpenMP spin for milliseconds after an
operator of torch, on the core that a thread of the kernel wants.
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

from lieattn._memory import keep_freed_memory

_ADAPTS = os.path.exists("/proc/self/schedstat")  # Linux, where torch comes with libgomp
_REGION = ctypes.CFUNCTYPE(None)
_PERIOD, _CALM = 0.25, 3.0  # seconds between looks at the machine, and until it counts as idle again
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # which libgomp reads when torch is imported
_LOST = 0.25  # seconds a second: up to 0.1 alone or beside a loader process, 0.4 and more beside one busy process


def adapt_waiting() -> None:
    """Let the threads of torch spin for work or sleep, by the load of the machine; to be called now and then."""
    if _ADAPTS and waiting_setting() is None and _several_threads():
        _waiting().adapt(torch.get_num_threads())


def run(kernel: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Call a kernel with each of these arguments, on the threads that torch may use.

    A thread takes the next call when it is done with one, so nobody waits for a thread that has no core yet.
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

    # Nothing can be raised through OpenMP, but Python raises interrupts wherever a function begins. So every thread
    # continues an iterator that is in its `try` already, and what leads there is not written in Python.
    iterators = [work() for _ in range(threads)]
    for iterator in iterators:
        next(iterator)
    _parallel()(_REGION(partial(next, map(next, iter(iterators)), None)), None, threads, 0)
    if errors:
        raise errors[0]


@cache
def _parallel() -> Any:
    """What compilers call for a parallel region, in torch's OpenMP library; None where it has none (Windows)."""
    return getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)


def _several_threads() -> bool:
    """Whether there are threads to share. They do not survive a fork, after which OpenMP would wait for them."""
    return torch.get_num_threads() > 1 and _parallel() is not None and _first_process() == os.getpid()


@cache
def waiting_setting() -> str | None:
    """What the environment says about how threads wait, such as ``"GOMP_SPINCOUNT=0"``; None where it says nothing."""
    return next((f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ), None)


def threads_report() -> str:
    """How many threads kernels run on and how they wait for work, and what to set instead."""
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


@cache
def _first_process() -> int:
    """The process that has, or will have, the threads: a fork sees the number of its parent."""
    return os.getpid()


class _Waiting:
    """Lets threads of OpenMP spin on an idle machine alone.

    There spinning saves the time to wake them. On a busy one it takes the cores from those that are waited for: a step
    of many small operators takes up to 40 times as long. libgomp reads how long to spin when it is loaded, but hardly
    spins at all where it has more threads than there are cores: so a few that do nothing stop all others from it.
    """

    def __init__(self) -> None:
        self.checked, self.busy, self.lost = time.monotonic(), -math.inf, _lost()
        self.idle: Any = None  # a lock that keeps the threads that do nothing

    def adapt(self, threads: int) -> None:
        """Look whether the machine is busy, now and then: whether other processes take the cores of this one."""
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
    """Have a team of so many threads, at least two, until the lock is released."""
    _parallel()(_REGION(_thread.get_ident), None, max(threads, 2), 0)
    lock.acquire()


def _lost() -> float:
    """Seconds that the threads of this process have waited for a core so far, each counted by itself."""
    nanoseconds = 0
    with suppress(OSError):  # a process may have no file left to open
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/schedstat", "rb") as file:  # it may have ended
                nanoseconds += int(file.read().split()[1])
    return nanoseconds / 1e9


@cache
def _waiting() -> _Waiting:
    return _Waiting()
