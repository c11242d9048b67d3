"""Freed CPU memory is kept for the next tensors."""

import os
import platform
import subprocess
import sys

import pytest

from lieattn._core import machine as _memory

FAULTS = """
import ctypes, resource, sys
from lieattn._core.machine import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def use():
    blocks = [library.malloc(2**20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 2**20)
    for block in reversed(blocks):
        library.free(ctypes.c_void_p(block))

for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(bool(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def pages(way, **settings):
    """Return whether memory is kept, and how many pages ten rounds of 40 MiB request from the system."""
    environment = {name: value for name, value in os.environ.items() if name not in _memory._SETTINGS}
    run = [sys.executable, "-c", FAULTS, way]
    done = subprocess.run(run, env=environment | settings, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


def test_memory_is_not_handed_back_in_each_step():
    kept, few = pages("keep")
    _, many = pages("leave")
    assert kept
    assert few < 1000 < 50_000 < many


def test_settings_of_the_environment_stay():
    kept, many = pages("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert many > 50_000
