"""Targets of a training, with their weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torchmetrics import Metric

from lieattn._core.checks import check_arguments, kind
from lieattn._core.machine import processes, summed
from lieattn._core.messages import warn
from lieattn.geometry import point_clouds
from lieattn.models import EnergyForceStress, Rescaled
from lieattn.train._data import REPEATED, PointSetData

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
        if isinstance(labels, list) and labels and isinstance(labels[0], str):
            found = f"words such as {labels[0]!r}; number the classes, and pass y as an int64 tensor"
        elif isinstance(labels, Tensor) and per == "cloud" and list(labels.shape) == [batch.num_nodes]:
            found = f"{found}; points have labels with per='point'"
        elif isinstance(labels, Tensor) and number == 1 and labels.ndim == 2 and len(labels) == rows:
            found = f"{found}; of one-hot rows, y.argmax(dim=1) is the labels"
        raise ValueError(f"data: expected {count} y per {per}, {shape}, got {found}")
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"data: expected labels y of an integer dtype, got {labels.dtype}; convert them, y.long()")
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


def read_for(targets: Iterable[str], shared: Iterable[str] = ("mask", "weight")) -> tuple[str, ...]:
    """Return the names of the targets, and of their masks and weights."""
    kinds = ("", "_mask", "_weight")
    return (*shared, *(f"{name}{kind}" for name in targets for kind in kinds))


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


def training_set(trainer: Any, measured: str) -> Any:
    """Return the items of the first epoch of a trainer; ValueError if its data are not a ``PointSetData``."""
    if not isinstance(data := trainer.datamodule, PointSetData):
        words = f"{measured} are measured on the training set of a lieattn.train.PointSetData"
        raise ValueError(f"datamodule: {words}; with other data, call task.measure(clouds) before the training")
    return data.items_of("train")


SHARED = ("mask", "weight")
"""Attributes with weights for all targets whose entries are of the same kind, clouds or points."""


def shared_weights(loss_weight: str | None) -> tuple[str, str]:
    """Return the names of the mask and of the weights of all targets, which ``loss_weight`` chooses."""
    if loss_weight is not None and not loss_weight.isidentifier():
        raise ValueError(f"loss_weight: expected the name of an attribute of the data, got {loss_weight!r}")
    return "mask", "weight" if loss_weight is None else loss_weight


def target_weights(
    data: Batch | Data,
    name: str,
    target: Tensor,
    others: Container[str] = (),
    shared: tuple[str, ...] = SHARED,
) -> Tensor | None:
    """Return the weights of the entries of a target, shaped like its first axes; None if the data have no weights.

    They are the product of the attributes ``mask``, ``weight``, ``NAME_mask`` and ``NAME_weight`` that the data have.
    ``mask`` and ``weight``, or other ``shared`` names, apply to all targets whose entries are of the same kind, clouds
    or points; see :func:`check_weights_apply` for those that apply to none. Clouds that only fill up a batch have the
    weight 0. Attributes in ``others`` are known to be of the other kind. ValueError is raised for other shapes, for
    weights that are negative or not finite, and if other shared names than ``mask`` and ``weight`` are missing.
    """
    found: Tensor | None = None
    for attribute in (*shared, f"{name}_mask", f"{name}_weight"):
        value = data.get(attribute)
        if not isinstance(value, Tensor):
            if attribute in shared and attribute not in SHARED:
                raise ValueError(f"data.{attribute}: expected weights of clouds or points (loss_weight), got none")
            continue
        if not _applies(data, attribute, name, target, others, shared):
            continue
        weights = value.to(target.dtype if target.is_floating_point() else torch.float32)
        good = (weights >= 0) & weights.isfinite()
        if not good.all():
            wrong = float(weights[~good][0])
            raise ValueError(f"data.{attribute}: expected finite weights of at least 0, got {wrong}")
        found = weights if found is None else _times(found, weights)
    repeated = data.get(REPEATED)
    if isinstance(data, Batch) and repeated is not None and bool(repeated.any()):
        counts = (~repeated).to(torch.float32 if found is None else found.dtype)
        counts = counts if len(target) == len(counts) else counts[data.batch]
        found = counts if found is None else _times(found, counts)
    return found


def check_weights_apply(data: Batch | Data, targets: Mapping[str, Tensor], shared: tuple[str, ...] = SHARED) -> None:
    """Raise ValueError for weights of clouds if all targets have entries for points, and the other way round."""
    for attribute in shared:
        value = data.get(attribute)
        if not isinstance(value, Tensor):
            continue
        if not any(_applies(data, attribute, *target, (), shared) for target in targets.items()):
            shapes = ", ".join(f"{name} {tuple(target.shape)}" for name, target in targets.items())
            raise ValueError(
                f"data.{attribute}: expected the first axes of a target ({shapes}), one entry for each cloud or one "
                f"for each point as there, got {tuple(value.shape)}"
            )


def _applies(
    data: Batch | Data, attribute: str, name: str, target: Tensor, others: Container[str], shared: tuple[str, ...]
) -> bool:
    """Whether weights belong to the entries of a target; ValueError if they have neither its shape nor are shared."""
    value = data[attribute]
    if value.shape != target.shape[: value.ndim]:
        levels = (data.num_nodes, data.num_graphs if isinstance(data, Batch) else 1)
        if attribute in shared and value.ndim == 1 and len(value) in levels:
            return False  # weights of clouds for a target of points, or the other way round
        raise ValueError(
            f"data.{attribute}: expected the first axes of {name} {tuple(target.shape)}, got {tuple(value.shape)}"
        )
    return attribute not in shared or _of_one_kind(data, attribute, name, others)


def _of_one_kind(data: Batch | Data, attribute: str, name: str, others: Container[str]) -> bool:
    """Whether two attributes may both be those of clouds, or both those of points.

    A batch may have as many clouds as points, so their numbers in each cloud are compared. If each cloud has one point,
    both may be of any kind.
    """
    if attribute in others:
        return False
    parts = getattr(data, "_slice_dict", {})
    return attribute not in parts or name not in parts or torch.equal(parts[attribute], parts[name])


def of_the_other_kind(clouds: Sequence[Data], name: str, shared: tuple[str, ...] = SHARED) -> list[str]:
    """Return shared attributes that differ from a target in their number of entries in any of the clouds."""
    found = []
    for attribute in shared:
        given = [(cloud.get(attribute), cloud.get(name)) for cloud in clouds]
        both = ((own, other) for own, other in given if isinstance(own, Tensor) and isinstance(other, Tensor))
        if any(len(torch.atleast_1d(own)) != len(torch.atleast_1d(other)) for own, other in both):
            found.append(attribute)
    return found


def counted(values: Tensor, weights: Tensor | None, entry_axes: int = 0) -> tuple[Tensor, Tensor]:
    """Return the entries of ``values`` whose weight is not 0, flattened to one axis, and their floating weights.

    Entries with weight 0 may be NaN: they enter no sum and give no gradient. The last ``entry_axes`` axes belong to a
    single entry, which has one weight; ValueError is raised for weights along these axes.
    """
    shape = values.shape[: values.ndim - entry_axes]
    dtype = values.dtype if values.is_floating_point() else torch.float32  # values may be numbers of rows
    if weights is None:
        entries = values.flatten(0, len(shape) - 1)
        return entries, values.new_ones((), dtype=dtype).expand(len(entries))
    if weights.ndim > len(shape):
        found = f"{tuple(shape)} of whole entries, got {tuple(weights.shape)}"
        raise ValueError(f"data: expected masks and weights {found}")
    spread = weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)).expand(shape)
    kept = spread > 0
    return values[kept], spread[kept].to(dtype)


def squared_sine(difference: Tensor) -> Tensor:
    """Squared sine of half the angle between two rotations, smooth everywhere.

    It is computed from the difference ``[*, 3, 3]`` of their matrices.
    """
    return difference.square().sum((-2, -1)) / 8


def degrees(difference: Float[Tensor, "*batch 3 3"]) -> Float[Tensor, "*batch"]:
    """Angle between two rotations in degrees, 0 .. 180, from the difference ``[*, 3, 3]`` of their matrices."""
    return torch.rad2deg(2 * squared_sine(difference).clamp(max=1).sqrt().asin())


class WeightedMeans(Metric):
    """Sum over targets of factor times mean, where the means are over the entries of all batches and processes.

    The sums stay in float32 when the task is cast, since bfloat16 counts to 256 only.
    """

    sums: Tensor
    weights: Tensor

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors
        for name in ("sums", "weights"):  # the default dtype is that of the weights where Lightning makes a module
            self.add_state(name, torch.zeros(len(factors), dtype=torch.float32), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        return super()._apply(lambda value: fn(value).to(value.dtype), exclude_state)

    def update(self, sums: Tensor, weights: Tensor) -> None:
        """Add the sums of weighted entries and the sums of weights of one batch, both ``[targets]``."""
        self.sums += sums.detach()
        self.weights += weights.detach()

    def compute(self) -> Tensor:
        """Return the sum for all batches so far; targets without entries contribute 0."""
        means = means_of(self.sums, self.weights)
        return (means * means.new_tensor(self.factors)).sum()


class WeightedMean(WeightedMeans):
    """Weighted mean of entries over all batches and processes; NaN if an entry is NaN, or if there are no entries.

    MeanMetric of torchmetrics ignores NaN, so that a network with NaN as outputs could have a small error.
    """

    def __init__(self) -> None:
        super().__init__([1.0])

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add the entries ``[n]`` of one batch with their weights ``[n]``."""
        super().update(*weighted_sums(values, weights)[:, None])

    def compute(self) -> Tensor:
        """Return the mean over all batches so far."""
        return (self.sums / self.weights)[0]


class Losses(nn.Module):
    """The loss of a task: the sum over its targets of factor times mean."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors
        self.val, self.test = WeightedMeans(factors), WeightedMeans(factors)

    def logged(self, log: Callable[..., None], batch: Batch, sums: Tensor, stage: str) -> Tensor:
        """Log and return the loss of a batch, given the results ``[2, targets]`` of :func:`weighted_sums`.

        In training, the loss is computed over the batches of all processes. In evaluation, the logged loss is computed
        over all batches.
        """
        if stage == "train":
            clouds = batch.num_graphs - int(batch[REPEATED].sum()) if REPEATED in batch else batch.num_graphs
            means, clouds = means_of_all_processes(sums, clouds)
            loss = (means * sums.new_tensor(self.factors)).sum()
            log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=clouds)
            return loss
        metric: WeightedMeans = getattr(self, stage)
        metric.update(*sums)
        log(f"{stage}/loss", metric, on_step=False, on_epoch=True, prog_bar=True)
        return (means_of(*sums) * sums.new_tensor(self.factors)).sum()


def weighted_sums(values: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Float[Tensor, " 2"]:
    """Return the weighted sum of values ``[n]`` and the sum of the weights ``[n]``, as one tensor ``[2]``.

    The sums are at least in float32, because half precision counts to 256 or 2048 only, and float16 to 65504.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    values, weights = values.to(wide), weights.to(wide)
    return torch.stack([(values * weights).sum() if len(values) else values.sum(), weights.sum()])


def means_of(sums: Tensor, weights: Tensor) -> Tensor:
    """Return the means; they are 0 where the weights are 0."""
    return sums / torch.where(weights > 0, weights, 1)


def means_of_all_processes(sums: Tensor, clouds: int) -> tuple[Tensor, int]:
    """Return the means ``[targets]`` of weighted sums and weights ``[2, targets]``, and the number of clouds.

    Both are computed over the batches of all processes of a training, as if these were one batch. Distributed training
    averages the gradients over the processes; the result is the gradient of the means, even if the total weights of
    the processes differ.
    """
    if processes() == 1:
        return means_of(*sums), clouds
    total = summed(torch.cat([sums.detach(), sums.new_full((2, 1), float(clouds), requires_grad=False)], dim=1))
    every = total[:, :-1]
    own = means_of(sums[0] * processes(), every[1])
    return own + (means_of(*every) - own).detach(), int(total[1, -1])


def _times(first: Tensor, second: Tensor) -> Tensor:
    """Product of two tensors of weights, one of which may have additional axes at the end."""
    few, many = sorted((first, second), key=lambda weights: weights.ndim)
    return few.reshape(*few.shape, *[1] * (many.ndim - few.ndim)) * many


def per_element(values: Tensor, clouds: Sequence[Data]) -> Tensor | None:
    """Fit numbers of clouds, ``[clouds]`` and NaN where they are not known, by sums over their atoms.

    Return a table ``[elements, 2]`` of the elements in ``data.z`` and what an atom adds, by least squares in float64.
    None is returned if there is no ``z``, or if the sums leave more than half of the deviations from a mean.
    """
    charges = [cloud.get("z") for cloud in clouds]
    if not all(isinstance(z, Tensor) and z.ndim == 1 and not z.is_floating_point() for z in charges):
        return None
    elements = torch.cat(cast(list[Tensor], charges)).unique()
    known = values.isfinite()
    counts = torch.stack([(cast(Tensor, z)[:, None] == elements).sum(dim=0) for z in charges]).to(values)[known]
    values = values[known]
    if not len(values) or bool((counts.sum(dim=0) == 0).any()):
        return None
    added = torch.linalg.lstsq(counts, values, driver="gelsd").solution  # the shortest of several solutions
    rest = values - counts @ added
    if float(rest.square().sum()) > 0.25 * float((values - values.mean()).square().sum()):
        return None
    return torch.stack([elements.to(added), added], dim=1)


def per_point(name: str, columns: Tensor, clouds: Sequence[Data]) -> tuple[Tensor, Tensor]:
    """Fit the contribution ``[*]`` of a point to sums ``[clouds, *]`` by least squares.

    Return it, and its multiples ``[clouds, *]`` by the number of points of each cloud. NaN are left out.
    """
    if len(columns) != len(clouds):
        found = f"{len(columns)} for {len(clouds)} clouds"
        raise ValueError(f"extensive: expected one {name} for each cloud, got {found}")
    counts = columns.new_tensor([cloud.num_nodes for cloud in clouds]).view(-1, *[1] * (columns.ndim - 1))
    points = counts.where(~columns.isnan(), 0.0)
    slope = (points * columns.nan_to_num()).sum(dim=0) / points.square().sum(dim=0).clamp(min=1)
    return slope, points * slope
