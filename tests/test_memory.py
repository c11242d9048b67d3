"""Freed CPU memory is kept for the next tensors."""

import os
import platform
import subprocess
import sys

import pytest

from lieattn._core import machine as _memory

FAULTS = """
import ctypes, os, resource, sys
from unittest.mock import MagicMock

sys.modules.update(dict.fromkeys(("torch", "torch.distributed"), MagicMock()))  # not used here, and slow to import
from lieattn._core.machine import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def use():
    blocks = [library.malloc(2**20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 2**20)
    for block in reversed(blocks):
        library.free(ctypes.c_void_p(block))

for way in ("keep", "leave", "setting"):
    if os.fork() == 0:
        if way == "setting":
            os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
        kept = way != "leave" and keep_freed_memory()
        for _ in range(3):
            use()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            use()
        print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
        os._exit(0)
    os.wait()
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def test_memory_is_not_handed_back_in_each_step_unless_the_environment_says_so():
    """Three processes say whether they keep memory, and how many pages ten rounds of 40 MiB request from the system."""
    environment = {name: value for name, value in os.environ.items() if name not in _memory._SETTINGS}
    run = [sys.executable, "-c", FAULTS]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    found = [int(number) for number in done.stdout.split()]
    assert found[::2] == [1, 0, 0]
    few, many, still = found[1::2]
    assert few < 1000
    assert min(many, still) > 50_000
