"""Lines about a run: those of Lightning, such as its seed and devices, which are printed when it begins, and notes."""

from __future__ import annotations

import logging
import sys

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only

_LOGGERS = (
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.callbacks.model_summary",
)


class Announcements(Callback):
    """Keeps the lines back while settings are checked, so that an error about them is the only message.

    Lines are kept in a ``with`` block, until a trainer with this callback begins. Without one they are dropped.
    """

    def __init__(self) -> None:
        self._kept: list[logging.LogRecord] = []

    def __enter__(self) -> Announcements:
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._keep)

    def _keep(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            self._kept.append(record)
        return record.levelno >= logging.WARNING

    def _release(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.__exit__()
        for record in self._kept:
            logging.getLogger(record.name).handle(record)
        self._kept.clear()

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _release


@rank_zero_only
def say(message: str) -> None:
    """Print a note for the user; of several processes, only the first one does."""
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
