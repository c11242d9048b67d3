"""Compilation on several cores: other processes compile the kernels that are needed next, during the first call.

Numba compiles one function at a time in a process. The other processes store compiled kernels in the cache of this one,
which compiles all kernels that it does not find there.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

_LONGEST = 300.0  # longest time in seconds to wait for another process, many times the usual one
# The processes get these packages without their imports, because importing torch takes longer than compiling a kernel.
_ABOVE = ("lieattn", "lieattn.ops")
_SCRIPT = """
import pickle, sys, types
sys.path[:], above = pickle.load(sys.stdin.buffer)
for name, folders in above.items():
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = folders
from lieattn.ops.kernels._ahead import compile_all
compile_all(pickle.load(sys.stdin.buffer))
"""
Call = tuple[Any, tuple[Any, ...]]  # a kernel, and arguments with the types of its call
_compiling: dict[str, subprocess.Popen[bytes]] = {}  # processes by the places of the kernels that they compile


def start(calls: Sequence[Call], processes: int) -> None:
    """Compile kernels that are neither in memory nor on disk on several processes, including this one.

    The calls are in the order in which their kernels are needed. This process compiles the first ones.
    """
    missing: dict[str, tuple[str, str, tuple[Any, ...], str]] = {}
    for kernel, arguments in calls:
        place = kernel._cache.missing(kernel, arguments) if hasattr(kernel._cache, "missing") else None
        if place is not None and place not in _compiling:
            missing[place] = kernel.__module__, kernel.__name__, arguments, place
    number = min(processes - sum(process.poll() is None for process in {*_compiling.values()}), len(missing))
    if number < 2 or not _is_python():
        return
    todo = list(missing.values())
    bounds = [len(todo) * part // number for part in range(1, number + 1)]
    for low, high in pairwise(bounds):
        _start(todo[low:high])


def _is_python() -> bool:
    """Return whether the interpreter can be started again, which is not possible in programs that embed Python."""
    return Path(sys.executable or "").name.lower().startswith("python") and not getattr(sys, "frozen", False)


def _start(todo: list[tuple[str, str, tuple[Any, ...], str]]) -> None:
    above = {name: list(sys.modules[name].__path__) for name in _ABOVE}
    told = pickle.dumps((sys.path, above)) + pickle.dumps(todo)
    # multiprocessing would import the user's script. Without -P, files in the same folder would hide modules.
    command = [sys.executable, "-P", "-c", _SCRIPT]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError):  # no process can be started, or it has already ended
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, **quiet, creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0)
        )
        _compiling.update({place: process for *_, place in todo})
        with process.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(told)


def compile_all(todo: list[tuple[str, str, tuple[Any, ...], str]]) -> None:
    """Compile and store kernels in another process, unless their place or their sources differ there."""
    for module, name, arguments, place in todo:
        kernel = getattr(import_module(module), name)
        if kernel._cache.missing(kernel, arguments) == place:
            kernel.compile(kernel._cache.signature(arguments))


def finish(place: str) -> bool:
    """Wait for the process that compiles the kernel of a place, or return False if there is none."""
    process = _compiling.get(place)
    if process is None:
        return False
    try:
        process.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        _end(process)
    for other, its in list(_compiling.items()):
        if its is process:
            _compiling.pop(other, None)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@atexit.register
def stop() -> None:
    """End all processes that are still compiling."""
    while _compiling:
        _end(_compiling.popitem()[1])
