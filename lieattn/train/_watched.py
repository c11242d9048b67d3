"""What a plateau of the validation sees at the end of an epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule


class WatchedValidation(LightningModule):
    """Shows each validation to a plateau once, also where a run is continued between the two."""

    monitor: tuple[str, str]
    """Logged number that is best where it is largest or smallest, and which of the two: ``"max"`` or ``"min"``."""

    _validated = False  # since a plateau has looked

    def on_validation_epoch_end(self) -> None:
        """Note that there is something to see."""
        self._validated = self._validated or not self.trainer.sanity_checking

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Change the rate; that of a plateau after epochs with a validation alone."""
        if metric is not None:
            if not self._validated:
                return
            self._validated = False
        super().lr_scheduler_step(scheduler, metric)

    def _unseen(self) -> float | None:
        """The validation that a plateau is to see, for a checkpoint."""
        found = self.trainer.callback_metrics.get(self.monitor[0]) if self._validated else None
        return None if found is None else float(found)

    def _show(self, unseen: float | None) -> None:
        """Begin with the validation of a checkpoint, or with a number in its place, without which Lightning stops."""
        self._validated = unseen is not None
        self.trainer.callback_metrics[self.monitor[0]] = torch.tensor(math.nan if unseen is None else unseen)
