"""The checkpoint from which a run continues."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lieattn.io import KEY, add_digests, replacing

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(Exception):  # noqa: N818 - it reports a wish of the user, not an error
    """The signal ``signum`` stopped the training after step ``step``, and the state was saved to ``path``."""

    def __init__(self, signum: int, step: int, path: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}; the state is in {path}")
        self.signum, self.step, self.path = signum, step, path


class _WholeFiles(TorchCheckpointIO):
    """Writes checkpoints atomically, even if the folder for temporary files is on another disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):  # not a file of this machine
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()  # torch reports a full disk by another kind of error when it writes a file itself
        torch.save(checkpoint, buffer)
        with replacing(path) as part:
            part.write_bytes(buffer.getbuffer())


class LastCheckpoint(Checkpoint):
    """Keep ``last.ckpt`` up to date: at the end of every epoch, every n steps, and on SIGINT or SIGTERM.

    On a signal, the step is finished, the state is saved and :class:`TrainingInterrupted` is raised; a second signal
    stops at once. If a training ends within an epoch, for example by ``max_steps`` or ``max_time``, its last step is
    finished and saved too, so that the training can be continued as if it had never stopped. A step that is followed
    by a validation is saved after the validation. If a signal arrives in a step after which the training ends anyway,
    such as by early stopping, the continued training ends there too. All checkpoints of the trainer are replaced
    atomically, so that a complete one exists even if the process is killed or the disk is full.

    Parameters
    ----------
    dirpath
        Folder of the file; ``checkpoints`` in the trainer's ``default_root_dir`` by default.
    every_n_train_steps
        Number of optimizer steps between two savings within an epoch; 0 for none.
    """

    def __init__(self, dirpath: str | None = None, every_n_train_steps: int = 0) -> None:
        if every_n_train_steps < 0:
            raise ValueError(f"every_n_train_steps: expected at least 0, got {every_n_train_steps}")
        self.dirpath = dirpath
        self.every_n_train_steps = every_n_train_steps
        self._received: int | None = None
        self._handlers: dict[int, Any] = {}
        self._batch = -1  # the last batch before the state was saved
        self._complete = True  # whether the last batch was the last one of its optimizer step
        self._due = False  # whether the settings of the trainer ask for a validation after it
        self._put_off = False  # whether the training is to end when the step is finished
        self._over = False  # whether a training that continues from the state is to end at once

    def path(self, trainer: Trainer) -> Path:
        """Path of the file for a trainer."""
        return Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints") / "last.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's default plugin for writing files, unless another one was chosen."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = _WholeFiles()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers; Lightning's own would stop in the middle of a step."""
        self._received, self._put_off, self._batch = None, False, -1
        trainer.should_stop = trainer.should_stop or self._over
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._receive) for signum in _SIGNALS}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is due, and stop if asked to, between two optimizer steps of an epoch."""
        self._complete = trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self._finish_step(trainer)
        within = self._complete and not trainer.is_last_batch
        self._due = within and _validation_is_due(trainer)
        if within and not self._due:
            self._save_within_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save or stop after the validation that belongs to a step; a continued training would leave it out."""
        self._finish_step(trainer)
        if self._due:
            self._due = False
            self._save_within_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and stop if asked to."""
        stop, known = self._stop(trainer), self._over
        self._over = stop and _ends_early(trainer)
        if trainer.is_last_batch:
            self._save(trainer, stop)
            return
        # Lightning also calls this hook if the training stops within the epoch, perhaps after one more validation.
        with _unfinished_epoch(trainer):
            self._save(trainer, stop, again=self._over and not known)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the signal handlers; a training that ended at once can be continued from now on."""
        if self._over:
            self._over = False
            # The trainer has other states by now, such as averaged weights.
            checkpoint = torch.load(trainer.ckpt_path, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
            del checkpoint["callbacks"][self.state_key]
            if KEY in checkpoint:
                add_digests(checkpoint)
            trainer.strategy.save_checkpoint(checkpoint, self.path(trainer))
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers, and raise an interrupt again, which Lightning would turn into exit status 1."""
        self._restore_handlers()
        if isinstance(exception, KeyboardInterrupt):
            raise exception

    def state_dict(self) -> dict[str, Any]:
        """Whether the training was over when a signal stopped it; empty otherwise."""
        return {"over": True} if self._over else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """End a training at once if it was over when a signal stopped it."""
        self._over = state_dict.get("over", False)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = signum
        # Not through sys.stderr, which this handler may have interrupted.
        os.write(2, b"\nstopping after this step; a second signal stops at once\n")

    def _stop(self, trainer: Trainer) -> bool:
        # The processes must agree, because saving is done together.
        return trainer.strategy.reduce_boolean_decision(self._received is not None, all=False)

    def _finish_step(self, trainer: Trainer) -> None:
        """Delay the end of the training until accumulated gradients are used, because checkpoints do not save them."""
        if not self._complete:
            self._put_off = self._put_off or trainer.should_stop
            trainer.should_stop = False
        elif self._put_off:
            self._put_off, trainer.should_stop = False, True

    def _save_within_epoch(self, trainer: Trainer) -> None:
        """Save if it is due or the training ends here, and stop if asked to."""
        stop, steps, ends = self._stop(trainer), trainer.global_step, _ends_early(trainer)
        due = self.every_n_train_steps and steps % self.every_n_train_steps == 0
        if stop or ends or due or steps == trainer.max_steps:
            self._over = stop and ends
            self._save(trainer, stop and not ends)  # the end of the training may still need a validation

    def _save(self, trainer: Trainer, stop: bool, *, again: bool = True) -> None:
        path, batch = self.path(trainer), trainer.fit_loop.total_batch_idx
        if again or batch != self._batch:
            trainer.save_checkpoint(path, weights_only=False)
            self._batch = batch
        if stop:
            raise TrainingInterrupted(self._received or signal.SIGTERM, trainer.global_step, path)


def _ends_early(trainer: Trainer) -> bool:
    """Whether a callback, such as early stopping, ends the training after the present step."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def _validation_is_due(trainer: Trainer) -> bool:
    """Whether a validation follows the present batch, other than the one at the end of the training."""
    stop, trainer.should_stop = trainer.should_stop, False
    due: bool = trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]
    trainer.should_stop = stop
    return due


@contextmanager
def _unfinished_epoch(trainer: Trainer) -> Iterator[None]:
    """Save the epoch as unfinished; Lightning has counted it already and would skip the rest of it after a restart."""
    progress = trainer.fit_loop.epoch_progress
    for count in (progress.total, progress.current):
        count.processed -= 1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for count in (progress.total, progress.current):
            count.processed += 1  # type: ignore[attr-defined]
