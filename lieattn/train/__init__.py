"""Training: a thin layer on PyTorch Lightning, and the command ``lieattn``.

The names below bring Lightning with them, which is imported when one of them is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lieattn.train._checkpoint import load_data, load_network, load_task, read_checkpoint
    from lieattn.train._classifier import PointSetClassifier
    from lieattn.train._data import EpochSampler, PointSetData
    from lieattn.train._errors import CheckpointError, NonFiniteError, UsageError
    from lieattn.train._last_checkpoint import LastCheckpoint, TrainingInterrupted
    from lieattn.train._regressor import PointSetRegressor
    from lieattn.train._schedule import Constant, Schedule, WarmupCosine
    from lieattn.train._task import PointSetTask

__all__ = [
    "CheckpointError",
    "Constant",
    "EpochSampler",
    "LastCheckpoint",
    "NonFiniteError",
    "PointSetClassifier",
    "PointSetData",
    "PointSetRegressor",
    "PointSetTask",
    "Schedule",
    "TrainingInterrupted",
    "UsageError",
    "WarmupCosine",
    "load_data",
    "load_network",
    "load_task",
    "read_checkpoint",
]

_HOMES = {
    "_checkpoint": ("load_data", "load_network", "load_task", "read_checkpoint"),
    "_classifier": ("PointSetClassifier",),
    "_data": ("EpochSampler", "PointSetData"),
    "_errors": ("CheckpointError", "NonFiniteError", "UsageError"),
    "_last_checkpoint": ("LastCheckpoint", "TrainingInterrupted"),
    "_regressor": ("PointSetRegressor",),
    "_schedule": ("Constant", "Schedule", "WarmupCosine"),
    "_task": ("PointSetTask",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"lieattn.train.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
