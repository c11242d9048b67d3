"""Tests of the library. Settings that must come before all imports."""

import importlib.metadata
import os
import sys
from functools import cache
from pathlib import Path

# Tests start many processes. If the environment forbids files of bytecode beside the sources, which are then compiled
# in every process (5 seconds for Lightning and its packages), they are kept in a folder of their own.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).resolve().parents[1] / "build" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Inductor would start processes to compile on all cores, for tests that compile two small files of C++.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# It would first compile a file with each set of instructions of the processor, to see whether the compiler knows it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

from tests import shapes

# Lightning would read the files of all installed packages for each of hundreds of trainers, to find callbacks.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)

shapes.install()
