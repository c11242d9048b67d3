"""Weights of clouds or points in losses."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torchmetrics import Metric

from lieattn._core.machine import processes, summed

REPEATED = "repeated"
"""Attribute bool ``[clouds]`` of batches in several processes: marks clouds that only fill up a batch."""


SHARED = ("mask", "weight")
"""Attributes with weights for all targets whose entries are of the same kind, clouds or points."""


def target_weights(data: Batch | Data, name: str, target: Tensor, others: Container[str] = ()) -> Tensor | None:
    """Return the weights of the entries of a target, shaped like its first axes; None if the data have no weights.

    They are the product of the attributes ``mask``, ``weight``, ``NAME_mask`` and ``NAME_weight`` that the data have.
    ``mask`` and ``weight`` apply to all targets whose entries are of the same kind, clouds or points; see
    :func:`check_weights_apply` for those that apply to none. Clouds that only fill up a batch have the weight 0.
    Attributes in ``others`` are known to be of the other kind. ValueError is raised for other shapes, and for weights
    that are negative or not finite.
    """
    found: Tensor | None = None
    for attribute in (*SHARED, f"{name}_mask", f"{name}_weight"):
        value = data.get(attribute)
        if not isinstance(value, Tensor):
            continue
        if not _applies(data, attribute, name, target, others):
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


def check_weights_apply(data: Batch | Data, targets: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights of clouds if all targets have entries for points, and the other way round."""
    for attribute in SHARED:
        value = data.get(attribute)
        if isinstance(value, Tensor) and not any(_applies(data, attribute, *target) for target in targets.items()):
            shapes = ", ".join(f"{name} {tuple(target.shape)}" for name, target in targets.items())
            raise ValueError(
                f"data.{attribute}: expected the first axes of a target ({shapes}), one entry for each cloud or one "
                f"for each point as there, got {tuple(value.shape)}"
            )


def _applies(data: Batch | Data, attribute: str, name: str, target: Tensor, others: Container[str] = ()) -> bool:
    """Whether weights belong to the entries of a target; ValueError if they have neither its shape nor are shared."""
    value = data[attribute]
    if value.shape != target.shape[: value.ndim]:
        levels = (data.num_nodes, data.num_graphs if isinstance(data, Batch) else 1)
        if attribute in SHARED and value.ndim == 1 and len(value) in levels:
            return False  # weights of clouds for a target of points, or the other way round
        raise ValueError(
            f"data.{attribute}: expected the first axes of {name} {tuple(target.shape)}, got {tuple(value.shape)}"
        )
    return attribute not in SHARED or _of_one_kind(data, attribute, name, others)


def _of_one_kind(data: Batch | Data, attribute: str, name: str, others: Container[str]) -> bool:
    """Whether two attributes may both be those of clouds, or both those of points.

    A batch may have as many clouds as points, so their numbers in each cloud are compared. If each cloud has one point,
    both may be of any kind.
    """
    if attribute in others:
        return False
    parts = getattr(data, "_slice_dict", {})
    return attribute not in parts or name not in parts or torch.equal(parts[attribute], parts[name])


def of_the_other_kind(clouds: Sequence[Data], name: str) -> list[str]:
    """Return shared attributes that differ from a target in their number of entries in any of the clouds."""
    found = []
    for attribute in SHARED:
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


class _WideSums(Metric):
    """A metric whose sums stay in float32 when its task is cast, since bfloat16 counts to 256 only."""

    def _add_sums(self, first: str, second: str, shape: tuple[int, ...]) -> None:
        for name in (first, second):
            # The default dtype is that of the weights where Lightning makes a module.
            self.add_state(name, torch.zeros(shape, dtype=torch.float32), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        return super()._apply(lambda value: fn(value).to(value.dtype), exclude_state)


class WeightedMean(_WideSums):
    """Weighted mean of entries over all batches and processes; NaN if an entry is NaN, or if there are no entries.

    MeanMetric of torchmetrics ignores NaN, so that a network with NaN as outputs could have a small error.
    """

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._add_sums("total", "weight", ())

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add the entries ``[n]`` of one batch with their weights ``[n]``."""
        total, weight = weighted_sums(values, weights)
        self.total += total
        self.weight += weight

    def compute(self) -> Tensor:
        """Return the mean over all batches so far."""
        return self.total / self.weight


class WeightedMeans(_WideSums):
    """Sum over targets of factor times mean, where the means are over the entries of all batches and processes."""

    sums: Tensor
    weights: Tensor

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors
        self._add_sums("sums", "weights", (len(factors),))

    def update(self, sums: Tensor, weights: Tensor) -> None:
        """Add the sums of weighted entries and the sums of weights of one batch, both ``[targets]``."""
        self.sums += sums.detach()
        self.weights += weights.detach()

    def compute(self) -> Tensor:
        """Return the sum for all batches so far; targets without entries contribute 0."""
        means = means_of(self.sums, self.weights)
        return (means * means.new_tensor(self.factors)).sum()


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
