"""Validations of a task, as the schedule ``Plateau`` sees them."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule


class WatchedValidation(LightningModule):
    """Shows each validation once to the scheduler of a plateau, even if the run is interrupted between the two."""

    monitor: tuple[str, str] = ("val/loss", "min")
    """Name of the logged number that measures the quality, and ``"max"`` or ``"min"`` for its best value."""

    _validated = False  # whether there was a validation that the plateau has not seen

    def on_validation_epoch_end(self) -> None:
        """Note that there is a new validation."""
        self._validated = self._validated or not self.trainer.sanity_checking

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler; the scheduler of a plateau only steps after a new validation."""
        if metric is not None:
            if not self._validated:
                return
            self._validated = False
        super().lr_scheduler_step(scheduler, metric)

    def _unseen(self) -> float | None:
        """The value of a validation that the plateau has not seen, to be stored in a checkpoint."""
        found = self.trainer.callback_metrics.get(self.monitor[0]) if self._validated else None
        return None if found is None else float(found)

    def _show(self, unseen: float | None) -> None:
        """Restore the unseen validation of a checkpoint, or NaN if there is none, since Lightning needs a value."""
        self._validated = unseen is not None
        self.trainer.callback_metrics[self.monitor[0]] = torch.tensor(math.nan if unseen is None else unseen)
