"""Accumulation of gradients over several batches, in a training that continues from a checkpoint."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def resume_accumulation(trainer: Trainer) -> None:
    """Accumulate as many batches as the scheduler of the trainer says, if there is one.

    Lightning calls the scheduler at the beginning of an epoch only, and never if a training continues within an epoch.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
