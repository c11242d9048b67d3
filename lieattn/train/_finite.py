"""Losses and weights that are not finite: errors that say what helps."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

_ADVICE = {
    "16-true": "trainer.precision 16-true has no loss scaling, and rounds small numbers such as the eps of Adam to 0: "
    "use bf16-mixed, 16-mixed or 32-true",
    "16-mixed": "Numbers in float16 end at 65504: use trainer.precision bf16-mixed, lower the learning rate, or clip "
    "gradients with trainer.gradient_clip_val",
}
_ADVICE_IN_GENERAL = "Lower the learning rate, or clip gradients with trainer.gradient_clip_val"


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
    return _ADVICE.get(precision, _ADVICE_IN_GENERAL)
