"""Training: a thin layer on PyTorch Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

from lieattn._core.messages import needs_extra

if TYPE_CHECKING:
    from lieattn.io import CheckpointError, UsageError, check_trusted, load_weights, read_checkpoint
    from lieattn.train._callbacks import AveragedWeights, EquivarianceMonitor, LastCheckpoint, TrainingInterrupted
    from lieattn.train._checkpoint import (
        build,
        load_data,
        load_network,
        parse_yaml,
        random_clouds,
        read_yaml,
        register_types,
        short_message,
    )
    from lieattn.train._classifier import PointSetClassifier
    from lieattn.train._data import EpochSampler, PointSetData, seed_generators
    from lieattn.train._muon import Muon
    from lieattn.train._regressor import PointSetRegressor
    from lieattn.train._schedule import Constant, MultiStep, Plateau, Schedule, WarmupCosine
    from lieattn.train._targets import named_outputs
    from lieattn.train._tasks import NonFiniteError, PointSetTask, load_task

__all__ = [
    "AveragedWeights",
    "CheckpointError",
    "Constant",
    "EpochSampler",
    "EquivarianceMonitor",
    "LastCheckpoint",
    "MultiStep",
    "Muon",
    "NonFiniteError",
    "Plateau",
    "PointSetClassifier",
    "PointSetData",
    "PointSetRegressor",
    "PointSetTask",
    "Schedule",
    "TrainingInterrupted",
    "UsageError",
    "WarmupCosine",
    "build",
    "check_trusted",
    "load_data",
    "load_network",
    "load_task",
    "load_weights",
    "named_outputs",
    "parse_yaml",
    "random_clouds",
    "read_checkpoint",
    "read_yaml",
    "register_types",
    "seed_generators",
    "short_message",
]

# The modules that do not import Lightning come first.
_OWN = "_checkpoint _schedule _muon _targets _callbacks _data _classifier _tasks _regressor".split()
_HOMES = ("lieattn.io", *(f"lieattn.train.{home}" for home in _OWN))


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        with needs_extra(f"{__name__}.{name}", "train"):
            module = importlib.import_module(home)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
