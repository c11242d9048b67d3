"""Errors of a training that Lightning or torch would report later or not at all."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lieattn.io import UsageError

_ADVICE = {
    "16-true": "trainer.precision 16-true has no loss scaling, and rounds small numbers such as the eps of Adam to 0: "
    "use bf16-mixed, 16-mixed or 32-true",
    "16-mixed": "Numbers in float16 end at 65504: use trainer.precision bf16-mixed, lower the learning rate, or clip "
    "gradients with trainer.gradient_clip_val",
}
_IN_GENERAL = "Lower the learning rate, or clip gradients with trainer.gradient_clip_val"
_OTHER_RUN = "continue with the optimizer and no_decay of the run, or start from its weights: --weights FILE"


class NonFiniteError(FloatingPointError):
    """The loss or some weights became NaN or infinite in training."""


def check_loss(loss: Tensor, task: LightningModule) -> None:
    """Raise NonFiniteError if the training loss of a task is NaN or infinite."""
    if not torch.isfinite(loss):
        raise NonFiniteError(
            f"the training loss is {float(loss.detach())} at step {task.global_step} (epoch {task.current_epoch}); "
            f"checkpoints, if there are any, are from before. {_advice(task)}"
        )


def check_weights(task: LightningModule) -> None:
    """Raise NonFiniteError if weights of a task that are to be saved are NaN or infinite."""
    for name, weight in task.named_parameters():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(
                f"weights of {name} are not finite after step {task.global_step}: nothing is saved, the last "
                f"checkpoint stays. {_advice(task)}"
            )


def _advice(task: LightningModule) -> str:
    precision = "" if task._trainer is None else task._trainer.precision
    return _ADVICE.get(precision, _IN_GENERAL)


def refuse_other_states(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer raise UsageError for the state of another one, and return it.

    Torch raises errors about groups of parameters, or about a missing entry.
    """
    optimizer.register_load_state_dict_pre_hook(_check_state)
    return optimizer


def _check_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    found = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if found != wanted:
        raise UsageError(
            f"optimizer: expected a checkpoint with groups of {wanted} parameters, got one with {found}; {_OTHER_RUN}"
        )
    for saved, present in zip(state["param_groups"], optimizer.param_groups, strict=True):
        # Schedules add settings, and new versions of torch do; another optimizer has others.
        added, missing = saved.keys() - present.keys(), optimizer.defaults.keys() - saved.keys()
        if added and missing:
            name = type(optimizer).__name__
            raise UsageError(
                f"optimizer: expected a checkpoint of {name}, got one of another optimizer, with {sorted(added)} and "
                f"without {sorted(missing)}; {_OTHER_RUN}"
            )


def check_callbacks(trainer: Trainer, task: LightningModule) -> None:
    """Raise UsageError for BackboneFinetuning of other tasks, and ModelPruning beside averages, which have no masks.

    A warning says that averages of Lightning, which it computes after the last checkpoint, are in no checkpoint.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    averages = [type(one).__name__ for one in callbacks if isinstance(one, WeightAveraging)]
    if averages and any(isinstance(one, ModelPruning) for one in callbacks):
        found = f"ModelPruning, which adds masks to the weights, beside {averages[0]} (--ema)"
        raise UsageError(f"trainer.callbacks: expected one of pruning and averaging, got {found}")
    if any(isinstance(one, BackboneFinetuning) for one in callbacks) and not hasattr(task, "backbone"):
        advice = "to start from a trained network, use --weights"
        raise UsageError(f"trainer.callbacks: BackboneFinetuning needs a task with the attribute backbone; {advice}")
    if any(isinstance(one, StochasticWeightAveraging) for one in callbacks):
        lost = "StochasticWeightAveraging averages the weights after the last checkpoint, so no checkpoint has them"
        rank_zero_warn(f"trainer.callbacks: {lost}; lieattn.train.AveragedWeights (--ema) saves averages")


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
