"""The Lightning module that learns numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import partial, reduce
from typing import Any, Literal, cast

import torch
import torch.distributed
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments
from lieattn._core.values import agreeing
from lieattn.models import EnergyForces, EnergyForceStress, Rescaled
from lieattn.train._inputs import USUAL, scale_messages, size_of
from lieattn.train._schedule import Schedule
from lieattn.train._targets import (
    Losses,
    WeightedMean,
    check_has_stress,
    check_known,
    check_targets,
    check_weights_apply,
    counted,
    degrees,
    entries_of,
    find_unused_weights,
    named_outputs,
    of_the_other_kind,
    per_element,
    per_point,
    read_for,
    shared_weights,
    shifted_targets,
    sources_of_scales,
    squared_sine,
    target_weights,
    targets_of,
    training_set,
    warn_of_offset,
    warn_of_units,
    weighted_sums,
)
from lieattn.train._tasks import OptimizerFactory, PointSetTask

_LOSSES = {"l1": torch.abs, "mse": torch.square, "rotation": lambda difference: 2 * squared_sine(difference)}
_LARGE = 100  # standard deviations of the targets
_OF_DERIVATIVES = 20  # usual size of untrained energies and forces, which need larger kernels
_STAGES = ("train", "val", "test")


class PointSetRegressor(PointSetTask):
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

    From targets in ``extensive`` and those called ``energy`` (also ``y`` if ``target_names`` of the data set says so),
    a sum over the atoms is subtracted, which is fitted with one number for each element of ``data.z``, if less than
    half of the deviation remains. These references belong to the model (:class:`lieattn.models.Rescaled`), which adds
    them in float64, so that energies in ASE are at the level of the training data.

    Initial outputs of a :class:`lieattn.models.DirectionConvNet` are of the order of one, whatever the number of layers
    and neighbors. If outputs in the first training step are more than five times as large as the scale, the kernels of
    :class:`lieattn.nn.FrameMessages` are scaled down so that messages are not larger than the fields to which they are
    added, and the last layer so that outputs are not larger than the scale. For energies and forces of
    :class:`lieattn.models.EnergyForces` the limit is twenty times the scale, and the last layer is not changed. If this
    is not enough, both are divided by their size, in all steps and in the model, and a warning says so. Layers whose
    weights are not trained, or come from a trained network, are not changed.

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
    loss_weight
        Name of the attribute with the weights of clouds or points, in place of ``weight``, such as ``"area"``. All data
        must have it.
    """

    measured: Tensor
    gain: Tensor

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
        loss_weight: str | None = None,
    ) -> None:
        check_arguments(PointSetRegressor.__init__, locals())
        super().__init__(network, optimizer, schedule, no_decay)
        self.shared = shared_weights(loss_weight)
        self.targets = {targets: 1.0} if isinstance(targets, str) else dict(targets)
        check_targets(self.targets)
        self.read_apart = read_for(self.targets, self.shared)
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
            self.register_buffer(f"references_{name}", None)
        self.register_buffer("measured", torch.tensor(False))
        self.register_buffer("gain", torch.ones(()))  # of energies and their derivatives
        self.losses = Losses(list(self.targets.values()))
        self.errors = nn.ModuleDict({f"{s}_{name}": WeightedMean() for s in _STAGES for name in self.targets})

    @property
    def model(self) -> Rescaled:
        """The network with inputs and outputs in the units of the data; it shares the weights."""
        return self._rescaled(self._for_raw_inputs())

    def _rescaled(self, network: nn.Module) -> Rescaled:
        shift, scale = ({name: self._statistic(kind, name) for name in self.targets} for kind in ("shift", "scale"))
        scale |= {name: scale[name] * self.gain for name in self.targets if name in EnergyForceStress._fields}
        tables = {name: self._buffers[f"references_{name}"] for name in self.targets}
        references = {name: table for name, table in tables.items() if table is not None}
        return Rescaled(network, scale, shift, self.extensive, references)

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
            self.measure(training_set(self.trainer, "the shifts and scales of the targets"))

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
        described: Any = data
        while described is not None and not hasattr(described, "target_names"):  # a Subset, for example
            described = getattr(described, "source", getattr(described, "dataset", None))
        named = getattr(described, "target_names", None)
        energies = {"energy", *self.extensive, *(["y"] if named == ("energy",) else [])}
        scales: dict[str, Tensor] = {}
        for name in self.targets:
            values = targets_of(items, name)
            others = of_the_other_kind(items, name, self.shared)
            for item, value in zip(items, values, strict=True):
                weights = target_weights(item, name, value, others, self.shared)
                check_known(name, value, weights)
                if weights is not None:
                    counts = weights.reshape(*weights.shape, *[1] * (value.ndim - weights.ndim)) > 0
                    value.masked_fill_(~counts, math.nan)
            columns = torch.cat([entries_of(item, name, value) for item, value in zip(items, values, strict=True)])
            if columns.isnan().all():
                raise ValueError(f"data.{name}: expected some targets in the training set, got only masked ones")
            columns -= self._of_atoms(name, columns, items if name in energies else [])
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
        model, sums = self._rescaled(self.network), []
        for name, output in self._outputs(batch).items():
            target = batch[name] if name in batch else None
            if isinstance(target, Tensor) and output.shape == (*target.shape, 1):
                output = output[..., 0]
            if not isinstance(target, Tensor) or target.shape != output.shape:
                found = "none" if target is None else tuple(target.shape)
                if isinstance(target, Tensor) and target.ndim == 1 and target.numel() == output.numel():
                    found = f"{found}; several numbers of a cloud are {name} [1, numbers]"
                raise ValueError(f"data.{name}: expected {tuple(output.shape)} like the output, got {found}")
            scale = self._statistic("scale", name)
            importance = target_weights(batch, name, target, shared=self.shared)
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
        check_weights_apply(batch, {name: batch[name] for name in self.targets}, self.shared)
        return self.losses.logged(self.log, batch, torch.stack(sums, dim=1), stage)

    def _outputs(self, batch: Batch) -> Mapping[str, Tensor]:
        """Outputs of the network by target, not yet scaled, for a batch in the precision of the weights."""
        found = self.outputs_of(batch)
        if isinstance(found, Tensor) and len(self.targets) > 1:
            raise ValueError(f"network: expected a mapping with {sorted(self.targets)} as output, got a tensor")
        outputs = named_outputs(found, next(iter(self.targets)))
        if missing := set(self.targets) - set(outputs):
            raise ValueError(f"network: has outputs {sorted(outputs)}, but {sorted(missing)} are missing")
        if self._begins:
            self._begins = False
            kinds = {type(one) for one in self.network.modules()}
            derives = any(issubclass(one, EnergyForces) for one in kinds)
            # Outputs of a trained network with units can be large, and are left as they are.
            plain: set[str] = set() if any(issubclass(one, Rescaled) for one in kinds) else {*self.targets}
            names = {"energy", "force"} if derives else plain
            found, usual = self._excess(outputs, batch, names), _OF_DERIVATIVES if derives else USUAL
            if found > usual and scale_messages(self.network, partial(self.outputs_of, batch), heads=not derives):
                outputs = named_outputs(self.outputs_of(batch), next(iter(self.targets)))
                found = self._excess(outputs, batch, names)
            if derives:
                self._measure_gain(found)
        derived = EnergyForceStress._fields
        return {name: outputs[name] * self.gain if name in derived else outputs[name] for name in self.targets}

    def _excess(self, outputs: Mapping[str, Tensor], batch: Batch, names: set[str]) -> float:
        """Return the size of the largest of these outputs, in units of those of the data, whose scale is 1."""
        found = 0.0
        for name in [name for name in self.targets if name in names and self.scale_of.get(name) != "none"]:
            values = outputs[name].detach().double().flatten()
            if name == "energy" and self.scale_of.get(name) == "force":
                values = values / batch.ptr.diff().clamp(min=1)
            found = max(found, size_of(values))
        return found

    def _measure_gain(self, found: float) -> None:
        """Divide energies and forces by their size if they are far larger than those of the data."""
        if _OF_DERIVATIVES < found < math.inf:
            self.gain.fill_(1 / found)
            rank_zero_warn(
                f"network: its first energies or forces are {found:.3g} times as large as those of the training "
                f"data, and are divided by this number from now on; {type(self).__name__} stores it with the weights"
            )

    def _statistic(self, kind: str, name: str) -> Tensor:
        return self.get_buffer(f"{kind}_{name}")

    def _of_atoms(self, name: str, columns: Tensor, items: Sequence[Data]) -> Tensor:
        """Measure the references of a target, if sums over atoms describe it, and return these sums, else 0."""
        table = None
        if name in self.shifted and columns.numel() == len(columns) == len(items):
            table = per_element(columns.flatten(), items)
        self._buffers[f"references_{name}"] = None if table is None else table.to(self.measured.device)
        if table is None:
            return columns.new_zeros(())
        return torch.cat([Rescaled.sum_over_atoms(table, item, 1) for item in items]).view_as(columns)

    def _set(self, kind: str, name: str, value: Tensor) -> None:
        setattr(self, f"{kind}_{name}", value.to(self.get_buffer(f"{kind}_{name}")))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        # The shape of statistics per component is only known after they were measured.
        for kind, name in itertools.product(("shift", "scale"), self.targets):
            if (key := f"{prefix}{kind}_{name}") in state_dict:
                self._set(kind, name, state_dict[key])
        state_dict.setdefault(f"{prefix}gain", torch.ones_like(self.gain))  # those of earlier versions have none
        for name in self.targets:  # those that were trained without references have none
            table = state_dict.get(f"{prefix}references_{name}")
            self._buffers[f"references_{name}"] = None if table is None else table.to(self.measured.device).clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)
