"""The Lightning modules: their base, and the module that learns numbers, vectors and tensors."""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any, Literal, cast

import torch
import torch.distributed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Batch, Data

from lieattn._core.agreement import agreeing
from lieattn._core.checks import check_arguments, shown
from lieattn._core.kept_tables import WideStatistics
from lieattn.io import KEY, Recorded, add_digests, describe, settle
from lieattn.models import Rescaled
from lieattn.train._averaging import check_averaging
from lieattn.train._capture import CapturedSteps
from lieattn.train._checkpoint import FORMAT, check_content, check_finite, check_group, describe_group, describe_input
from lieattn.train._checks import (
    check_callbacks,
    check_loss,
    check_weights,
    refuse_other_states,
    resume_accumulation,
    setting_of_no_step,
    warn_of_no_step,
)
from lieattn.train._configuration import UsageError
from lieattn.train._data import random_state, set_random_states
from lieattn.train._plateau import WatchedValidation
from lieattn.train._schedule import Constant, Plateau, Schedule
from lieattn.train._targets import (
    check_has_stress,
    check_known,
    check_targets,
    entries_of,
    find_unused_weights,
    named_outputs,
    read_for,
    shifted_targets,
    sources_of_scales,
    targets_of,
    training_set,
    warn_of_offset,
    warn_of_units,
)
from lieattn.train._weights import (
    Losses,
    WeightedMean,
    check_weights_apply,
    counted,
    degrees,
    of_the_other_kind,
    per_point,
    squared_sine,
    target_weights,
    weighted_sums,
)

OptimizerFactory = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]
_LOSSES = {"l1": torch.abs, "mse": torch.square, "rotation": lambda difference: 2 * squared_sine(difference)}
_LARGE = 100  # standard deviations of the targets
_STAGES = ("train", "val", "test")


class PointSetTask(Recorded, WatchedValidation, CapturedSteps, ABC):
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
        self.make_optimizer = optimizer or partial(torch.optim.Adam, lr=1e-3, weight_decay=1e-4)
        self.schedule = schedule or Constant()
        self.no_decay = tuple(no_decay)
        self.config: dict[str, Any] = {}
        self._input: dict[str, Any] | None = None
        self._random: list[dict[str, Any]] | None = None
        self._watched: float | None = None

    @property
    def _large_loss(self) -> float:
        """The loss of a first step above which its outputs are much larger than is usual."""
        return math.inf

    @property
    def model(self) -> nn.Module:
        """The network with its outputs in the units of the data; pass this one to :func:`lieattn.save`."""
        return self.network

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
        begins = self._input is None
        if begins:
            self._input = describe_input(batch)
        loss = self.evaluate(batch, "train")
        check_loss(loss, self)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError("network: expected outputs that depend on weights with requires_grad, got constant ones")
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
        groups = self._parameter_groups()
        try:
            optimizer = refuse_other_states(self.make_optimizer(groups))
        except (TypeError, ValueError) as error:
            raise UsageError(f"optimizer: {error}") from error
        short = cast(Any, self.trainer).fast_dev_run or setting_of_no_step(self.trainer)  # too short for a warm-up
        if isinstance(self.schedule, Constant) or short:
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
        schedulers: Any = self.schedule._schedulers(optimizer, steps, per_epoch, batches, self.monitor)
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
        check_weights(self)
        states: list[dict[str, Any]] = [random_state()]
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
            "watched": self._unseen(),
        }
        add_digests(checkpoint)

    def _made(self) -> Any:
        """Description from which this task can be rebuilt without a configuration, or the reason why it cannot."""
        try:
            return describe(self, without=("optimizer", "schedule", "no_decay"))
        except ValueError as error:
            return str(error)

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

    def configure_callbacks(self) -> list[Callback]:
        """Add no callbacks; UsageError if those of the trainer do not fit."""
        check_callbacks(self.trainer, self)  # before their own hooks, which would raise other errors
        return []

    def on_fit_start(self) -> None:
        """Settle the choices that the network left open: a radius that was not made smooth is sharp from now on."""
        if self._trainer is not None:
            check_averaging(self._trainer, {})
        settle(self.network)

    def on_fit_end(self) -> None:
        """Warn if the training had no step."""
        warn_of_no_step(self.trainer)

    def on_train_start(self) -> None:
        """Restore the random generators from the checkpoint; each process draws its own numbers."""
        resume_accumulation(self.trainer)
        set_random_states(self._random, self.trainer.global_rank)
        if isinstance(self.schedule, Plateau):
            self._show(self._watched)
        self._random = self._watched = None


class PointSetRegressor(WideStatistics, PointSetTask):
    """Train a network on one or several attributes of the data.

    The loss compares the outputs with (t - shift) / scale for every target t. Predictions are in the units of the
    data: prediction = shift + scale * output. Shifts and scales are measured on the training set when training
    begins, and are kept in checkpoints. Without a :class:`PointSetData`, call :meth:`measure` before.

    It logs ``loss`` and the mean absolute ``error`` in the units of the data (``error_NAME`` for each of several
    targets), prefixed by ``train/``, ``val/`` and ``test/``. All targets are masked by ``data.mask`` (bool) and
    weighted by ``data.weight``, ``[clouds]`` or ``[points]`` like the target, and a single target by
    ``data.NAME_mask`` and ``data.NAME_weight``, if the data have them; masked entries may be NaN. In a batch whose
    clouds have one point each, such as isolated atoms, ``data.mask`` and ``data.weight`` apply to targets of clouds and
    of points alike, so give such data those with names. ValueError is raised if options contradict each other, or in
    training if a target is missing or not shaped like its prediction, or if ``data.mask`` or ``data.weight`` fits no
    target.

    Parameters
    ----------
    network
        Module that is called with a ``torch_geometric.data.Batch`` and returns a tensor shaped like the target, a
        mapping from names of targets to tensors, or a named tuple (:class:`lieattn.models.EnergyForces`). Numbers
        ``[points, 1]`` or ``[clouds, 1]`` may have targets without the last axis.
    targets
        Name of an attribute of the data, or a mapping from names to their weights in the loss.
    loss
        ``"l1"``, ``"mse"``, or ``"rotation"`` for rotation matrices ``[clouds, 3, 3]``
        (:class:`lieattn.nn.RotationHead`): 1 - cos of the angle between prediction and target, where ``error`` is the
        mean angle in degrees.
    shift
        Names of the targets whose mean over the training set is subtracted. They must be invariant numbers, since a
        vector minus a constant is not equivariant. By default the targets called ``y`` or ``energy``, except for
        outputs that the ``kind`` of the network states to be vectors, tensors, ...
    scale_of
        Mapping from a target to another one whose scale it uses, such as ``{"energy": "force"}``, which is needed if
        the force is a gradient of the energy; ``{"y": "none"}`` leaves y unscaled, which is the default for positions
        (``FieldModel(start={"pos": 1.0})``). ValueError is raised when they are measured if the other target has scales
        for components that the target does not have.
    optimizer, schedule, no_decay
        See :class:`~lieattn.train.PointSetTask`, also for checkpoints and continuation.
    extensive
        Targets that are sums over the points, such as energies with ``pool="sum"``; they have a shift for each point.
    """

    measured: Tensor

    def __init__(
        self,
        network: nn.Module,
        targets: str | dict[str, float] = "y",
        loss: Literal["l1", "mse", "rotation"] = "l1",
        shift: list[str] | None = None,
        scale_of: dict[str, str] | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
        no_decay: Sequence[str] = (),
        extensive: Sequence[str] = (),
    ) -> None:
        check_arguments(PointSetRegressor.__init__, locals())
        super().__init__(network, optimizer, schedule, no_decay)
        self.targets = {targets: 1.0} if isinstance(targets, str) else dict(targets)
        check_targets(self.targets)
        self.read_apart = read_for(self.targets)
        if loss == "rotation":
            scale_of = dict.fromkeys(self.targets, "none") | (scale_of or {})
            if shift or set(scale_of.values()) != {"none"}:
                raise ValueError(f"shift, scale_of: expected none for rotations, got {shift or scale_of}")
            shift = []
        self._chosen = shift is not None
        shift = shifted_targets(network, self.targets, shift)
        scale_of = sources_of_scales(network, self.targets, scale_of)
        for argument, names in (("shift", shift), ("scale_of", scale_of), ("extensive", extensive)):
            if unknown := set(names) - set(self.targets):
                raise ValueError(f"{argument}: {sorted(unknown)} are not among the targets {sorted(self.targets)}")
        if unknown := set(extensive) - set(shift):
            raise ValueError(f"extensive: {sorted(unknown)} have no shift, expected some of {sorted(shift)}")
        if unknown := set(scale_of.values()) - set(self.targets) - {"none"}:
            raise ValueError(f"scale_of: {sorted(unknown)} are neither targets nor 'none'")
        self.loss, self.shifted, self.scale_of = loss, tuple(shift), scale_of
        self.extensive = tuple(extensive)
        for name in self.targets:
            self.register_buffer(f"shift_{name}", torch.zeros(()))
            self.register_buffer(f"scale_{name}", torch.ones(()))
        self.register_buffer("measured", torch.tensor(False))
        self.losses = Losses(list(self.targets.values()))
        self.errors = nn.ModuleDict({f"{s}_{name}": WeightedMean() for s in _STAGES for name in self.targets})

    @property
    def model(self) -> Rescaled:
        """The network with its outputs in the units of the data; it shares the weights."""
        shift, scale = ({name: self._statistic(kind, name) for name in self.targets} for kind in ("shift", "scale"))
        return Rescaled(self.network, scale, shift, self.extensive)

    @property
    def _large_loss(self) -> float:
        if "none" in self.scale_of.values():
            return math.inf
        return sum(self.targets.values()) * (_LARGE if self.loss == "l1" else _LARGE**2)

    @property
    def monitor(self) -> tuple[str, str]:  # type: ignore[override]
        """The error of a single target, or the loss of several targets, whose units differ."""
        return ("val/error" if len(self.targets) == 1 else "val/loss"), "min"

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the predictions by target, in the units of the data."""
        return named_outputs(self.model(self.cast(batch)), next(iter(self.targets)))

    def setup(self, stage: str) -> None:
        """Prepare several processes for outputs of the network that are no targets."""
        find_unused_weights(self.trainer.strategy, self.network, self.targets)

    def on_fit_start(self) -> None:
        """Measure shifts and scales on the training set, unless they come from a checkpoint."""
        super().on_fit_start()
        if not self.measured:
            self.measure(training_set(self.trainer))

    def measure(self, data: Iterable[Data]) -> None:
        """Measure shifts and scales on a training set.

        The scale is the root mean square deviation from the shift, which is 0 for targets that are not shifted. A
        target that does not vary has the scale 1. The shift of an extensive target is the one of a single point.
        A warning is issued if the network contains a :class:`~lieattn.models.Rescaled`, whose outputs already have
        units, or if numbers that by default have no shift are far from 0.
        """
        scaled = [name for name in self.targets if name in self.shifted or self.scale_of.get(name) != "none"]
        warn_of_units(self.network, scaled)
        items = [cast(Any, data)[index] for index in range(len(cast(Sized, data)))]
        if not items:
            raise ValueError("data: expected clouds to measure the targets on, got an empty training set")
        items = agreeing(items)
        scales: dict[str, Tensor] = {}
        for name in self.targets:
            values = targets_of(items, name)
            others = of_the_other_kind(items, name)
            for item, value in zip(items, values, strict=True):
                weights = target_weights(item, name, value, others)
                check_known(name, value, weights)
                if weights is not None:
                    counts = weights.reshape(*weights.shape, *[1] * (value.ndim - weights.ndim)) > 0
                    value.masked_fill_(~counts, math.nan)
            columns = torch.cat([entries_of(item, name, value) for item, value in zip(items, values, strict=True)])
            if columns.isnan().all():
                raise ValueError(f"data.{name}: expected some targets in the training set, got only masked ones")
            # Each component has its own shift and scale, because the components of a target may differ in unit.
            axes = [0] if name in self.shifted else list(range(columns.ndim))
            mean = columns.nanmean(dim=axes).nan_to_num() if name in self.shifted else columns.new_zeros(())
            mean, shifts = per_point(name, columns, items) if name in self.extensive else (mean, mean)
            if name in scaled and not (self._chosen or name in self.shifted):
                warn_of_offset(self.network, name, columns)
            spread = (columns - shifts).square().nanmean(dim=axes).sqrt()
            scales[name] = torch.where(spread > 0, spread, 1.0)
            self._set("shift", name, mean)
        for name in self.targets:
            source = self.scale_of.get(name, name)
            scale = torch.ones(()) if source == "none" else scales[source]
            if scale.numel() > 1 and scale.shape != scales[name].shape:
                found = f"one for each component of {source}, {tuple(scale.shape)}"
                raise ValueError(f"scale_of: expected a single scale for {name}, or one as its own, got {found}")
            self._set("scale", name, scale)
        self.measured.fill_(True)

    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        """Return the weighted loss of one batch, and log it and the mean absolute errors."""
        batch = self.cast(batch)
        model, sums = self.model, []
        for name, output in self._outputs(batch).items():
            target = batch[name] if name in batch else None
            if isinstance(target, Tensor) and output.shape == (*target.shape, 1):
                output = output[..., 0]
            if not isinstance(target, Tensor) or target.shape != output.shape:
                found = "none" if target is None else tuple(target.shape)
                raise ValueError(f"data.{name}: expected {tuple(output.shape)} like the output, got {found}")
            scale = self._statistic("scale", name)
            importance = target_weights(batch, name, target)
            # Energies far from 0 have a spread that a smaller dtype would round away before the shift is subtracted.
            dtypes = target.dtype, output.dtype, torch.float32
            wide = target.to(reduce(torch.promote_types, dtypes))
            difference = output.to(wide.dtype) - (wide - model.shift_of(name, wide, batch)) / scale
            turns = self.loss == "rotation"
            if turns and output.shape[1:] != (3, 3):
                raise ValueError(f"data.{name}: expected rotations [clouds, 3, 3], got {tuple(target.shape)}")
            axes = 2 if turns else 0
            values, weights = counted(difference, importance, axes)
            sums.append(weighted_sums(_LOSSES[self.loss](values), weights))
            if not sums[-1].isfinite().all():
                check_known(name, target, importance)
                if name == "stress":
                    check_has_stress(batch, output, importance)
            error = cast(WeightedMean, self.errors[f"{stage}_{name}"])
            values, weights = counted(difference.detach() * scale, importance, axes)
            error.update(degrees(values) if turns else values.abs(), weights)
            label = "error" if len(self.targets) == 1 else f"error_{name}"
            self.log(f"{stage}/{label}", error, on_step=False, on_epoch=True, prog_bar=True)
        check_weights_apply(batch, {name: batch[name] for name in self.targets})
        return self.losses.logged(self.log, batch, torch.stack(sums, dim=1), stage)

    def _outputs(self, batch: Batch) -> Mapping[str, Tensor]:
        """Outputs of the network by target, not yet scaled, for a batch in the precision of the weights."""
        found = self.outputs_of(batch)
        if isinstance(found, Tensor) and len(self.targets) > 1:
            raise ValueError(f"network: expected a mapping with {sorted(self.targets)} as output, got a tensor")
        outputs = named_outputs(found, next(iter(self.targets)))
        if missing := set(self.targets) - set(outputs):
            raise ValueError(f"network: has outputs {sorted(outputs)}, but {sorted(missing)} are missing")
        return {name: outputs[name] for name in self.targets}

    def _statistic(self, kind: str, name: str) -> Tensor:
        return self.get_buffer(f"{kind}_{name}")

    def _set(self, kind: str, name: str, value: Tensor) -> None:
        setattr(self, f"{kind}_{name}", value.to(self.get_buffer(f"{kind}_{name}")))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        # The shape of statistics per component is only known after they were measured.
        for kind, name in itertools.product(("shift", "scale"), self.targets):
            if (key := f"{prefix}{kind}_{name}") in state_dict:
                self._set(kind, name, state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *rest)
