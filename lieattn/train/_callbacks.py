"""Callbacks for the Trainer of Lightning."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, WeightAveraging
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn.certify import TOLERANCES, certify
from lieattn.groups import Group
from lieattn.io import UsageError, replacing

_TRAINED = "current_model_state"  # Lightning's entry for the weights that are not averages
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
    by a validation is saved after the validation. A signal in a step after which the training ends anyway, such as by
    early stopping, changes nothing. All checkpoints of the trainer are replaced atomically, so that a complete one
    exists even if the process is killed or the disk is full.

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
        stop = self._stop(trainer) and not _ends_early(trainer)
        if trainer.is_last_batch:
            self._save(trainer, stop)
            return
        # Lightning also calls this hook if the training stops within the epoch, perhaps after one more validation.
        with _unfinished_epoch(trainer):
            self._save(trainer, stop, again=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the signal handlers."""
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
        """Return no state; Lightning refuses two callbacks of a class that has one."""
        return {}

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
            self._save(trainer, stop and not ends)

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


class AveragedWeights(WeightAveraging):
    r"""Exponential moving average of the weights, which is validated, saved and left in the task after training.

    .. math::  \bar w_n = d_n \bar w_{n-1} + (1 - d_n) w_n, \qquad d_n = \min(d, (1 + n) / (10 + n))

    The averages are updated after each optimizer step, beginning with the weights :math:`\bar w_0 = w_0` after the
    first one. The decays grow to d, so that the initial weights are soon forgotten.

    This is a :class:`lightning.pytorch.callbacks.WeightAveraging`. A checkpoint stores the averages as
    ``"state_dict"``, which is loaded for tests and predictions, and the trained weights as ``"current_model_state"``,
    from which a run continues. Running statistics of normalizations are averaged like weights. Constant buffers, such
    as the tables of a group, stay bitwise equal, and integers are copied. Lightning's own EMAWeightAveraging is
    refused because it rounds integers down.

    UsageError is raised in training for weights in half precision, as with ``Trainer(precision="bf16-true")``, which
    cannot resolve the small steps of averages; ``"bf16-mixed"`` has weights in float32.

    Parameters
    ----------
    decay
        The decay d in [0, 1); ValueError is raised for other numbers. The average covers about 1 / (1 - d) steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_arguments(AveragedWeights.__init__, locals())
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number in [0, 1), got {decay}")
        super().__init__(multi_avg_fn=self._average)
        self.decay = decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the averages in the precision that the weights will have, which must resolve their steps."""
        if stage == "fit":
            # Lightning converts the module later, when the weights of a checkpoint have already been rounded.
            trainer.precision_plugin.convert_module(pl_module)
            for dtype in {weight.dtype for weight in pl_module.parameters() if weight.itemsize < 4}:
                expected = "expected weights in float32 or float64, such as those of trainer.precision bf16-mixed"
                raise UsageError(f"ema: {expected}, got {dtype}, in which averages stand still")
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the present state of the task, which may have measured its data since the averages were made."""
        average = self._average_model
        if average is not None and average.n_averaged == 0:
            average.module.load_state_dict(pl_module.state_dict())

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the averages as ``"state_dict"``, together with the metadata of the weights."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        averages = OrderedDict(checkpoint["state_dict"])
        vars(averages)["_metadata"] = getattr(pl_module.state_dict(), "_metadata", {})
        checkpoint["state_dict"] = averages

    def _average(self, averages: list[Tensor], weights: list[Tensor], steps: Tensor) -> None:
        """Move averages of one dtype toward the weights; an average that equals its weight does not change."""
        done = int(steps)
        decay = min(self.decay, (1 + done) / (10 + done))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, weights, 1 - decay)
        else:
            torch._foreach_copy_(averages, weights)

    def _swap_models(self, pl_module: LightningModule) -> None:
        """Swap weights and averages for a validation; before the first step there are no averages."""
        if self._average_model is not None and self._average_model.n_averaged:
            super()._swap_models(pl_module)


def check_averaging(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Raise UsageError if averaging would change tables of a network, or a run would drop its checkpoint's averages."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]
    for callback in found:
        if not isinstance(callback, AveragedWeights):
            name = type(callback).__name__
            raise UsageError(f"trainer.callbacks: {name} changes tables of networks, use lieattn.train.AveragedWeights")
    if trainer.training and _TRAINED in checkpoint and not found:
        expected = "continue with --ema, or in Python with lieattn.train.AveragedWeights among the callbacks"
        raise UsageError(f"ema: the checkpoint is of a training with averaged weights: {expected}")


class EquivarianceMonitor(Callback):
    """Logs ``equivariance_error`` at the end of each validation, measured on clouds of its first batch.

    It is the largest error in float32 under elements of the group, relative to max(1, largest output): about 1e-6 for
    an exactly equivariant network. Each element comes with a translation if the group has translations. The batches
    must be batches of PyTorch Geometric. A copy of the network in eval mode is evaluated about ten times.

    Parameters
    ----------
    group
        Group to measure; by default the group for which the network guarantees equivariance.
    clouds, elements
        Number of clouds, and number of random elements of a Lie group.
    every_n_epochs
        Measure in every n-th epoch only, or in the first validation after it.
    network
        Name of the attribute of the LightningModule that holds the network; ``""`` for the module itself.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        clouds: int = 2,
        elements: int = 2,
        every_n_epochs: int = 1,
        network: str = "network",
    ) -> None:
        check_arguments(EquivarianceMonitor.__init__, locals())
        check_counts(clouds=clouds, elements=elements, every_n_epochs=every_n_epochs)
        self.group, self.clouds, self.elements = group, clouds, elements
        self.every_n_epochs, self.network = every_n_epochs, network
        self._seen: list[Data] = []

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep clouds of the first batch that have points."""
        if batch_idx == 0 and dataloader_idx == 0:
            if not isinstance(batch, Batch):
                raise TypeError(f"batch: expected a torch_geometric Batch to measure on, got {type(batch).__name__}")
            self._seen = [cloud for cloud in batch.to_data_list() if cloud.num_nodes][: self.clouds]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the error and log it."""
        between = trainer.check_val_every_n_epoch or 1
        if trainer.sanity_checking or trainer.current_epoch % self.every_n_epochs >= between or not self._seen:
            return
        network = getattr(pl_module, self.network) if self.network else pl_module
        quick: dict[str, Any] = {"rotations": 0, "permute": False, "continuity": False, "elements": self.elements}
        (dtype,) = quick["dtypes"] = [min(TOLERANCES, key=lambda dtype: dtype.itemsize)]
        rows = certify(network, self._seen, self.group, tolerances=TOLERANCES, **quick).rows
        errors = [
            TOLERANCES[dtype] * row.max_error / row.allowed for row in rows if row.check == "element" and row.allowed
        ]
        if not errors:
            raise ValueError("group: expected a group, since the network has no exact guarantee, got None")
        pl_module.log("equivariance_error", max(errors), batch_size=len(self._seen), rank_zero_only=True)
