"""``lieattn info``: the backend that evaluates each operation."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import get_args

import torch

from lieattn._core.checks import counted
from lieattn._core.machine import usable_cores
from lieattn.cli._arguments import ArgumentParser
from lieattn.ops import Pattern, cpu_kernels

_PACKAGES = ("lieattn", "torch", "torch-geometric", "torch-scatter", "numba", "triton", "lightning", "e3nn", "numpy")


_DESCRIPTION = "Show versions, threads, and the backend that evaluates each operation, with reasons."


def run(name: str, arguments: Sequence[str]) -> int:
    """Print what the library found on this machine, and return the exit status 0; no option but ``--help`` is taken."""
    ArgumentParser(prog=f"lieattn {name}", description=_DESCRIPTION).parse_args(arguments)
    cores, threads = counted(usable_cores(), "core"), counted(torch.get_num_threads(), "thread")
    print(f"Python {platform.python_version()}, {cores}, torch uses {threads}")
    for about, found in cpu_kernels().items():
        print(f"{about} of the kernels for CPUs: {found}")
    print(f"CUDA: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'not available'}\n")
    for package in _PACKAGES:
        print(f"{package:16} {_version(package)}")
    print("\nbackend of each operation, and why not a faster one:")
    for case, choice in _cases().items():
        print(f"  {case:44} {choice}")
    print("to select another one: lieattn.ops.backend(...) or the environment variable LIEATTN_BACKEND")
    return 0


def _cases() -> dict[str, str]:
    """The backend for typical calls, in words."""
    from lieattn.geometry import AllPairs
    from lieattn.ops import RelativeTerms, explain, fused_kernel

    x = torch.zeros(1, 4, 2, 8)
    three = RelativeTerms(fiber_key=torch.zeros(4, 4, 4, 1, 8))
    choices = {f"pattern {pattern}": explain(x, x, x, pattern=pattern) for pattern in get_args(Pattern)}
    choices |= {
        "attention over whole clouds (AllPairs)": explain(x, x, x, AllPairs()(torch.zeros(1, 1))),
        "float64": explain(x.double(), x.double(), x.double()),
        "bfloat16": explain(x.bfloat16(), x.bfloat16(), x.bfloat16()),
        "convolution (no scores)": explain(None, None, x, normalize="none"),
        "attention weights returned": explain(x, x, x, return_weights=True),
        "published encoding of GSA-Nets": explain(x, x, x, pattern="query_sum", terms=three),
    }
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
        y = x.cuda()
        choices |= {f"CUDA, pattern {pattern}": explain(y, y, y, pattern=pattern) for pattern in get_args(Pattern)}
    layers = {
        f"networks of heads{' and of edges' * (device.type == 'cpu')}, attention on grids, {device.type}": fused_kernel(
            device
        )
        or "plain (another backend was selected, or this device has no kernels)"
        for device in devices
    }
    return {case: str(choice) for case, choice in choices.items()} | layers


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
