"""Targets of a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments, kind
from lieattn._core.messages import warn
from lieattn.geometry import point_clouds
from lieattn.models import EnergyForceStress, Rescaled
from lieattn.train._data import PointSetData

_FAR = 10  # standard deviations of a target


def named_outputs(outputs: Any, name: str) -> dict[str, Tensor]:
    """Return the outputs of a network by name, from a mapping, a named tuple, or one tensor, which gets ``name``."""
    check_arguments(named_outputs, locals())
    if isinstance(outputs, Tensor):
        return {name: outputs}
    outputs = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
    if not isinstance(outputs, Mapping):
        raise TypeError(f"outputs of the network: expected a tensor, a mapping or a named tuple, got {kind(outputs)}")
    return dict(outputs)


def labels_of(batch: Batch, number: int, rows: int, per: str) -> Tensor:
    """Return the labels y of a batch, ``[rows]`` or ``[rows, number]``; ValueError if they do not fit.

    ``per`` is the word for a row, ``"cloud"`` or ``"point"``.
    """
    labels = batch.get("y")
    shape = [rows] if number == 1 else [rows, number]
    if not isinstance(labels, Tensor) or list(labels.shape) != shape:
        found = "none" if labels is None else list(labels.shape) if isinstance(labels, Tensor) else kind(labels)
        count = "one label" if number == 1 else f"{number} labels"
        raise ValueError(f"data: expected {count} y per {per}, {shape}, got {found}")
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"data: expected labels y of an integer dtype, got {labels.dtype}")
    return labels


def targets_of(items: Sequence[Data], name: str) -> list[Tensor]:
    """Return copies of a target of all training clouds in float64, with at least one axis; ValueError if one has none.

    Numbers of Python, which batches collect in tensors, and tensors without axes are one entry.
    """
    values = [torch.as_tensor(value) if isinstance(value := item.get(name), int | float) else value for item in items]
    if missing := sum(value is None for value in values):
        raise ValueError(f"data: {missing} of {len(items)} training clouds have no {name}")
    for number, value in enumerate(values):
        if not isinstance(value, Tensor):
            found = f"{kind(value)} in training cloud {number}"
            raise ValueError(f"data.{name}: expected a tensor or a number, got {found}")
    return [torch.atleast_1d(value).double().clone() for value in values]


def check_known(name: str, target: Tensor, weights: Tensor | None) -> None:
    """Raise ValueError if a target is NaN or infinite where its weight is not 0; weights may lack its last axes."""
    bad = ~target.isfinite()
    if weights is not None:
        bad &= weights.reshape(*weights.shape, *[1] * (target.ndim - weights.ndim)) > 0
    if bad.any():
        advice = f"entries without a target are marked by False in data.{name}_mask"
        raise ValueError(f"data.{name}: expected finite targets, got {float(target[bad][0])}; {advice}")


def check_has_stress(batch: Batch, stress: Tensor, weights: Tensor | None) -> None:
    """Raise ValueError if a stress ``[clouds, dim, dim]`` of a network is undefined (NaN) where its weight is not 0."""
    pbc, missing = point_clouds(batch).pbc, stress.isnan().flatten(1).all(dim=1)
    if pbc is not None:
        missing &= ~pbc.all(dim=1)
    if weights is not None:
        missing &= (weights.flatten(1) if weights.ndim > 1 else weights[:, None]).any(dim=1)
    if missing.any():
        found = f"cloud {int(missing.nonzero()[0])} of a batch is not periodic along all cell vectors"
        raise ValueError(f"data.stress: {found}, so it has no stress; mark such clouds by False in data.stress_mask")


def entries_of(cloud: Data, name: str, value: Tensor) -> Tensor:
    """Return an attribute ``[n, ...]`` of a cloud as entries ``[entries, ..., numbers]``, as a batch has them.

    The first axis counts entries, clouds or points, unless the class of the cloud says that batches stack the
    attribute. Then the whole attribute is one entry.
    """
    if cloud.__cat_dim__(name, value) is None:
        return value[None]
    return value if value.ndim > 1 else value[:, None]


def shifted_targets(network: nn.Module, targets: Iterable[str], shift: list[str] | None) -> list[str]:
    """Return ``shift``, by default the targets ``y`` and ``energy`` that may be shifted.

    ValueError is raised for outputs that change under rotations according to the ``kind`` of the network.
    """
    turning = Rescaled.turning(network, shift or targets)
    if shift is None:
        return [name for name in targets if name in ("y", "energy") and name not in turning]
    if turning and shift:
        raise ValueError(f"shift: expected invariant numbers, but {turning} of the network change under rotations")
    return shift


def find_unused_weights(strategy: Any, network: nn.Module, targets: Iterable[str]) -> None:
    """Let torch look for weights without gradients, if a network with copies has outputs that are no targets.

    Otherwise the processes would wait for these gradients. A choice of the user is kept.
    """
    stated, used = getattr(network, "kind", None), set(targets)
    if not used.isdisjoint(EnergyForceStress._fields):  # all of these have the weights of the energy
        used.update(EnergyForceStress._fields)
    if isinstance(strategy, DDPStrategy) and isinstance(stated, Mapping) and set(stated) - used:
        strategy._ddp_kwargs.setdefault("find_unused_parameters", True)


def sources_of_scales(network: nn.Module, targets: Iterable[str], scale_of: Mapping[str, str] | None) -> dict[str, str]:
    """Return ``scale_of``, with ``"none"`` by default for targets that are positions according to the ``kind``."""
    return {**dict.fromkeys(Rescaled.placed(network, targets), "none"), **(scale_of or {})}


def check_targets(targets: Mapping[str, float]) -> None:
    """Raise ValueError unless ``targets`` maps names of attributes to their weights in the loss."""
    if not targets or any(not weight >= 0 for weight in targets.values()):
        raise ValueError(f"targets: expected names with weights of at least 0, got {targets}")
    for name in targets:
        if not name or "." in name:  # names of buffers may not contain dots
            raise ValueError(f"targets: expected names of attributes without dots, got {name!r}")


def read_for(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the targets, and of their masks and weights."""
    kinds = ("", "_mask", "_weight")
    return ("mask", "weight", *(f"{name}{kind}" for name in targets for kind in kinds))


def warn_of_units(network: nn.Module, names: Sequence[str]) -> None:
    """Warn if outputs of a network are in the units of the data already, and targets are to be rescaled."""
    if names and any(isinstance(module, Rescaled) for module in network.modules()):
        again = f"shift=[] and scale_of={dict.fromkeys(names, 'none')}"
        warn(
            "network: outputs of Rescaled are in the units of the data already, and PointSetRegressor measures shifts "
            f"and scales of {', '.join(names)} to apply them again; use {again} to train them as they are"
        )


def warn_of_offset(network: nn.Module, name: str, columns: Tensor) -> None:
    """Warn if the entries ``[entries, ..., numbers]`` of a target are far from 0, although it may have a shift."""
    mean = columns.nanmean(dim=0)
    spread = (columns - mean).square().nanmean(dim=0).sqrt()
    far = (mean.abs() > _FAR * spread) & (spread > 0)
    if bool(far.any()) and name not in Rescaled.turning(network, [name]):
        found = f"{float(mean[far][0]):.3g} with deviations of {float(spread[far][0]):.3g}"
        warn(
            f"data.{name}: its mean over the training set is {found}, and by default only targets called y or energy "
            f"are shifted. For numbers that do not change under rotations, add shift=[..., {name!r}]"
        )


def training_set(trainer: Any) -> Any:
    """Return the items of the first epoch of a trainer; ValueError if its data are not a ``PointSetData``."""
    if not isinstance(data := trainer.datamodule, PointSetData):
        words = "the shifts and scales of the targets are measured on the training set of a lieattn.train.PointSetData"
        raise ValueError(f"datamodule: {words}; with other data, call task.measure(clouds) before the training")
    return data.items_of("train")
