"""The base of the Lightning modules that train networks on point sets."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Batch

from lieattn._core.checks import check_arguments, shown
from lieattn._core.numerics import WideStatistics
from lieattn.io import (
    FORMAT,
    KEY,
    Recorded,
    UsageError,
    add_digests,
    check_content,
    check_finite,
    check_group,
    describe,
    describe_group,
    settle,
)
from lieattn.models import Captured
from lieattn.train._callbacks import check_averaging
from lieattn.train._checkpoint import describe_input, loaded_from, with_features
from lieattn.train._data import PointSetData, random_state, set_random_states
from lieattn.train._inputs import note, note_inputs, spread_of_features
from lieattn.train._schedule import Constant, Plateau, Schedule
from lieattn.transforms import Standardize

OptimizerFactory = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]
_ADVICE = {
    "16-true": "trainer.precision 16-true has no loss scaling, and rounds small numbers such as the eps of Adam to 0: "
    "use bf16-mixed, 16-mixed or 32-true",
    "16-mixed": "Numbers in float16 end at 65504: use trainer.precision bf16-mixed, lower the learning rate, or clip "
    "gradients with trainer.gradient_clip_val",
}
_IN_GENERAL = "Lower the learning rate, or clip gradients with trainer.gradient_clip_val"
_OF_INPUTS = ("input_mean", "input_std")
_OTHER_RUN = "continue with the optimizer and no_decay of the run, or start from its weights: --weights FILE"


class NonFiniteError(FloatingPointError):
    """The loss or some weights became NaN or infinite in training."""


class _WatchedValidation(LightningModule):
    """Shows each validation once to the scheduler of a plateau, even if the run is interrupted between the two."""

    monitor: tuple[str, str] = ("val/loss", "min")
    """Name of the logged number that measures the quality, and ``"max"`` or ``"min"`` for its best value."""

    _validated = False  # whether there was a validation that the plateau has not seen
    _watches: str | None = None  # the logged number that the scheduler of a plateau is shown

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
        found = self.trainer.callback_metrics.get(self._watches or "") if self._validated else None
        return None if found is None else float(found)

    def _show(self, unseen: float | None) -> None:
        """Restore the unseen validation of a checkpoint, or NaN if there is none, since Lightning needs a value."""
        if self._watches is not None:
            self._validated = unseen is not None
            self.trainer.callback_metrics[self._watches] = torch.tensor(math.nan if unseen is None else unseen)


class _CapturedSteps(LightningModule):
    """Calls the network of a task, directly or captured."""

    network: nn.Module
    input_mean: Tensor | None  # of the features x
    input_std: Tensor | None
    read_apart: tuple[str, ...] = ()
    """Names of attributes of the data that the task reads, and not the network."""

    _captured: tuple[Captured, ...] = ()  # a tuple, so that torch does not register the network under a second name

    def capture(self) -> Self:
        """Replay training steps on a GPU as CUDA graphs, and return this task.

        The network is called through :class:`lieattn.models.Captured`. Batches may differ in the features ``x``, in the
        vector inputs of the network, and in the attributes that this task reads, such as targets and weights.
        """
        network: Any = self.network
        inputs = ("x", *getattr(network, "vector_inputs", ()), *getattr(network, "field_inputs", ()))
        inputs = tuple(name for name in inputs if name != "pos")  # the geometry belongs to the positions
        unread = [name for name in self.read_apart if name not in inputs]  # a target may be an input as well
        self._captured = (Captured(self.network, inputs, unread),)
        return self

    def outputs_of(self, batch: Any) -> Any:
        """Return the outputs of the network, for features that are standardized if the training asked for it."""
        batch = self._standardized(batch)
        if not self._captured:
            return self.network(batch)
        (captured,) = self._captured
        captured.training = self.network.training
        return captured(batch)

    def _standardized(self, batch: Any) -> Any:
        mean, std = self.input_mean, self.input_std
        return batch if mean is None or std is None else Standardize(mean, std)(batch)


class PointSetTask(WideStatistics, Recorded, _WatchedValidation, _CapturedSteps, ABC):
    """Train a network on point sets; subclasses define the targets and the loss.

    Checkpoints load with ``weights_only=True`` and are refused by a network on another group. They keep the states
    of the random generators, so that a continued run with a :class:`~lieattn.train.PointSetData` ends with the same
    weights as a run that was never interrupted.

    Parameters
    ----------
    network
        Module that is called with a ``torch_geometric.data.Batch``.
    optimizer
        Function that makes the optimizer from the parameters; Adam at 1e-3 with weight decay 1e-4 by default.
    schedule
        Schedule of the learning rate; constant by default.
    no_decay
        Patterns of names of parameters that get no weight decay, such as ``["*bias", "*norm*"]``. UsageError is raised
        in training if a pattern matches no parameter.

    Raises
    ------
    NonFiniteError
        In training, if the loss or weights to be saved are NaN or infinite; the last good checkpoint is kept.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__()
        advice = "tasks of your own pass options on, __init__(self, network, **options), or annotate them like this one"
        if not (optimizer is None or callable(optimizer)):
            raise TypeError(f"optimizer: expected a function of the parameters, got {shown(optimizer)}; {advice}")
        if not (schedule is None or isinstance(schedule, Schedule)):
            raise TypeError(f"schedule: expected a Schedule, got {shown(schedule)}; {advice}")
        self.network = network
        for name in _OF_INPUTS:
            self.register_buffer(name, None)
        self.make_optimizer = optimizer or partial(torch.optim.Adam, lr=1e-3, weight_decay=1e-4)
        self.schedule = schedule or Constant()
        self.no_decay = tuple(no_decay)
        self.config: dict[str, Any] = {}
        self._input: dict[str, Any] | None = None
        self._begins = False  # in the first step, until the size of the outputs has been measured
        self._random: list[dict[str, Any]] | None = None
        self._watched: float | None = None

    @property
    def _large_loss(self) -> float:
        """The loss of a first step above which its outputs are much larger than is usual."""
        return math.inf

    @property
    def model(self) -> nn.Module:
        """The network with inputs and outputs in the units of the data; pass this one to :func:`lieattn.save`."""
        return self._for_raw_inputs()

    def _for_raw_inputs(self) -> nn.Module:
        return with_features(self.network, self.input_mean, self.input_std)

    @abstractmethod
    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Return the loss of one batch, a scalar, and log it and the metrics with the prefix ``stage``."""

    def cast(self, batch: Batch) -> Batch:
        """Return the batch in float64 if the weights are in float64, and unchanged otherwise."""
        if self.dtype != torch.float64:
            return batch
        return copy.copy(batch).apply(lambda value: value.double() if value.is_floating_point() else value)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch, a scalar; UsageError if it depends on no weight that is trained."""
        begins = self._begins = self._input is None
        if begins:
            self._input = describe_input(batch)
        loss = self.evaluate(batch, "train")
        _check_loss(loss, self)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError("network: expected outputs that depend on weights with requires_grad, got constant ones")
        if begins:
            note_inputs(self.network, self._standardized(batch), note)
        if begins and float(loss.detach()) > self._large_loss:
            rank_zero_warn(
                f"network: its untrained outputs are so large that the first loss is {float(loss.detach()):.3g}, where "
                f"about 1 is usual, and training reduces them slowly. Scale the inputs to the order of 1, take fewer "
                f"neighbors, or lower the initial weights (DirectionConvNet: DirectionOptions(gain=0.1))"
            )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and metrics of one batch."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and metrics of one batch."""
        self.evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the outputs for one batch."""
        return self(batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer, and the schedule if the rate changes."""
        groups, self._watches = self._parameter_groups(), None
        try:
            optimizer = self.make_optimizer(groups)
        except (TypeError, ValueError) as error:
            raise UsageError(f"optimizer: {error}") from error
        optimizer.register_load_state_dict_pre_hook(_check_state)
        trainer: Any = self.trainer
        short = trainer.fast_dev_run or 0 in (trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps)
        if isinstance(self.schedule, Constant) or short:  # too short for a warm-up
            return optimizer
        self.trainer.fit_loop.setup_data()  # counts the batches
        if math.isinf(self.trainer.num_training_batches):
            advice = "set trainer.limit_train_batches to the number of batches in an epoch"
            raise UsageError(f"schedule: expected a training set with a length, since it counts epochs; {advice}")
        steps, batches = float(self.trainer.estimated_stepping_batches), int(self.trainer.num_training_batches)
        per_epoch = math.ceil(batches / self.trainer.accumulate_grad_batches)
        if isinstance(self.schedule, Plateau) and not self.trainer.enable_validation:
            found = "trainer.limit_val_batches 0" if self.trainer.limit_val_batches == 0 else "no data.val"
            raise UsageError(f"schedule: expected validations, which a plateau watches, got {found}")
        schedulers: Any = self.schedule.schedulers(optimizer, steps, per_epoch, batches, self.monitor)
        self._watches = schedulers[-1].get("monitor")
        return [optimizer], schedulers

    def _parameter_groups(self) -> list[Any]:
        """All parameters; the ones without weight decay form a group of their own."""
        named = dict(self.named_parameters())
        if not self.no_decay:
            return list(named.values())
        free: set[str] = set()
        for pattern in self.no_decay:
            if not (found := {name for name in named if fnmatchcase(name, pattern)}):
                raise UsageError(f"no_decay: no parameter matches {pattern!r}; one is {next(iter(named))!r}")
            free |= found
        decayed = {"params": [weight for name, weight in named.items() if name not in free]}
        return [decayed, {"params": [weight for name, weight in named.items() if name in free], "weight_decay": 0.0}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entry ``"lieattn"``: configuration, group, kind of input, random generators, validation, digests.

        Lightning calls this hook after all others. Entries that a subclass adds after it have no digest.
        """
        _check_weights(self)
        states, watched = self._random, self._watched
        if states is None:  # otherwise, a continued training has not begun yet
            states, watched = [random_state()], self._unseen()
            if self.trainer.world_size > 1:
                states *= self.trainer.world_size
                torch.distributed.all_gather_object(states, states[0])
        checkpoint[KEY] = {
            "format": FORMAT,
            "config": self.config,
            "made": None if self.config else self._made(),
            "group": describe_group(self.network),
            "input": self._input,
            "random": states,
            "watched": watched,
        }
        add_digests(checkpoint)

    def _made(self) -> Any:
        """Description from which this task can be rebuilt without a configuration, or the reason why it cannot."""
        try:
            return describe(self, without=("optimizer", "schedule", "no_decay"))
        except ValueError as error:
            return str(error)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, *args: Any, **options: Any) -> Self:  # type: ignore[override]
        """Rebuild the task of a checkpoint, as :func:`load_task`; with further arguments, do as Lightning does."""
        if args or options:
            return super().load_from_checkpoint(checkpoint_path, *args, **options)
        return loaded_from(checkpoint_path, cls, "task", ("model",), "")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check content, weights and group before any weight is loaded, and keep the random states for the start."""
        if KEY in checkpoint:
            # The arguments of load_from_checkpoint change the hyperparameters.
            check_content(checkpoint, "the checkpoint", apart=[self.CHECKPOINT_HYPER_PARAMS_KEY])
        if self._trainer is not None:
            check_averaging(self._trainer, checkpoint)
            self._trainer.precision_plugin.convert_module(self)  # otherwise float64 weights are rounded in loading
        check_finite(checkpoint["state_dict"], self)
        check_group(checkpoint, self.network)
        entry = checkpoint.get(KEY, {})
        self._input = entry.get("input", self._input)
        self._random = entry.get("random")
        self._watched = entry.get("watched")

    def on_fit_start(self) -> None:
        """Settle the choices that the network left open: a radius that was not made smooth is sharp from now on."""
        if self._trainer is not None:
            check_averaging(self._trainer, {})
            callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
            if any(isinstance(one, StochasticWeightAveraging) for one in callbacks):
                found = "StochasticWeightAveraging averages the weights after the last checkpoint, so no"
                advice = "lieattn.train.AveragedWeights (--ema) saves averages"
                rank_zero_warn(f"trainer.callbacks: {found} checkpoint has them; {advice}")
            data: Any = self._trainer.datamodule  # type: ignore[attr-defined]
            if isinstance(data, PointSetData) and data.standardize and self.input_mean is None:
                mean, std = spread_of_features(data.items_of("train"))
                self.input_mean, self.input_std = mean.to(self.device), std.to(self.device)
        settle(self.network)

    def on_train_start(self) -> None:
        """Restore the random generators from the checkpoint; each process draws its own numbers."""
        _resume_accumulation(self.trainer)
        set_random_states(self._random, self.trainer.global_rank)
        self._show(self._watched)
        self._random = self._watched = None

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        for name in _OF_INPUTS:  # their shapes are known after the features were measured
            value = state_dict.get(f"{prefix}{name}")
            setattr(self, name, None if value is None else value.to(self.device, torch.float32).clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


def load_task(path: str | Path, trust: Sequence[str] = ()) -> PointSetTask:
    """Rebuild the task of a checkpoint and load its weights. The task is on the CPU and in eval mode.

    Its predictions are in the units of the data. For ``path``, ``trust`` and the errors see :func:`load_network`.
    """
    check_arguments(load_task, locals())
    return loaded_from(path, PointSetTask, "task", ("model",), "", trust)  # type: ignore[type-abstract]


def _check_loss(loss: Tensor, task: LightningModule) -> None:
    """Raise NonFiniteError if the training loss of a task is NaN or infinite."""
    if not torch.isfinite(loss):
        raise NonFiniteError(
            f"the training loss is {float(loss.detach())} at step {task.global_step} (epoch {task.current_epoch}); "
            f"checkpoints, if there are any, are from before. {_advice(task)}"
        )


def _check_weights(task: LightningModule) -> None:
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


def _check_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raise UsageError for the state of another optimizer, for which torch names a missing setting in the first step.

    Torch itself refuses states with other groups of parameters.
    """
    for saved, present in zip(state["param_groups"], optimizer.param_groups, strict=False):
        # Schedules add settings, and new versions of torch do; another optimizer has others.
        added, missing = saved.keys() - present.keys(), optimizer.defaults.keys() - saved.keys()
        if added and missing:
            name = type(optimizer).__name__
            raise UsageError(
                f"optimizer: expected a checkpoint of {name}, got one of another optimizer, with {sorted(added)} and "
                f"without {sorted(missing)}; {_OTHER_RUN}"
            )


def _resume_accumulation(trainer: Trainer) -> None:
    """Accumulate as many batches as the scheduler of the trainer says, if there is one.

    Lightning calls the scheduler at the beginning of an epoch only, and never if a training continues within an epoch.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
