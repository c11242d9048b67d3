"""Callbacks of Lightning that a task or other callbacks do not allow, and trainings that they end too early."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import lightning_hasattr

from lieattn.train._configuration import UsageError


def check_callbacks(trainer: Trainer, task: LightningModule) -> None:
    """Raise UsageError if a callback of the trainer needs an attribute that the task does not have.

    It is also raised for ModelPruning beside averages of the weights, which have no masks. A warning says that averages
    of Lightning, which it computes after the last checkpoint, are in no checkpoint.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder):
            names = (callback._attr_name,) if callback._attr_name else ("lr", "learning_rate")
            advice = "the rate is an argument of the optimizer, such as --model.optimizer.lr"
        elif isinstance(callback, BackboneFinetuning):
            names, advice = ("backbone",), "to start from a trained network, use --weights"
        elif isinstance(callback, StochasticWeightAveraging):
            lost = "StochasticWeightAveraging averages the weights after the last checkpoint, so no checkpoint has them"
            rank_zero_warn(f"trainer.callbacks: {lost}; lieattn.train.AveragedWeights (--ema) saves averages")
            continue
        else:
            _check_masks(trainer, callback)
            continue
        if not any(lightning_hasattr(task, name) for name in names):
            found = f"{type(callback).__name__} needs a task with the attribute {' or '.join(names)}"
            raise UsageError(f"trainer.callbacks: {found}, and {type(task).__name__} has none; {advice}")


def _check_masks(trainer: Trainer, callback: Callback) -> None:
    averages = [other for other in trainer.callbacks if isinstance(other, WeightAveraging)]  # type: ignore[attr-defined]
    if averages and isinstance(callback, ModelPruning):
        found = f"ModelPruning, which adds masks to the weights, beside {type(averages[0]).__name__} (--ema)"
        raise UsageError(f"trainer.callbacks: expected one of pruning and averaging, got {found}")


def resume_accumulation(trainer: Trainer) -> None:
    """Accumulate as many batches as the scheduler of the trainer says, if there is one.

    Lightning calls the scheduler at the beginning of an epoch only, and never if a training continues within an epoch.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def setting_of_no_step(trainer: Trainer) -> str:
    """Return the setting of a trainer with which a training has no step, such as ``trainer.max_epochs``, or ``""``."""
    names = ("limit_train_batches", "max_epochs", "max_steps")
    return next((f"trainer.{name}" for name in names if getattr(trainer, name) == 0), "")


def warn_of_no_step(trainer: Trainer) -> None:
    """Warn if a training has ended without any step, and say why."""
    setting = setting_of_no_step(trainer)
    if setting or trainer.global_step == 0:
        reason = f"{setting} is 0" if setting else "trainer.max_time is over, or a callback has stopped it"
        rank_zero_warn(f"no training step was made: {reason}")
