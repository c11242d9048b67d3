"""What this process may use of the machine."""

from __future__ import annotations

import os

import torch


def usable_accelerator(asked: str) -> str:
    """Return ``asked``, or ``"cpu"`` for ``"auto"`` where Lightning would choose Apple's GPU.

    That GPU has no float64, in which neighbors and frames are computed.
    """
    return "cpu" if asked == "auto" and torch.backends.mps.is_available() else asked


def usable_cores() -> int:
    """Return the number of cores on which this process may run, such as those of a job on a cluster."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
