"""Masks and weights of clouds and points: how much each counts in losses and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torchmetrics import Metric

from lieattn._processes import processes, summed

REPEATED = "repeated"
"""Attribute bool ``[clouds]`` of batches in several processes: the cloud fills up a batch, and counts elsewhere."""


def target_weights(data: Batch | Data, name: str, target: Tensor) -> Tensor | None:
    """Weights of the entries of a target, shaped like its first axes; None if the data say nothing about them.

    They are the product of the attributes ``mask``, ``weight``, ``NAME_mask`` and ``NAME_weight``, as far as the data
    have them. The first two are for all targets, those of points for targets of points, those of clouds for others.
    Clouds that fill up a batch have the weight 0. ValueError is raised for other shapes, and for weights that are
    negative or not finite.
    """
    found: Tensor | None = None
    for attribute in ("mask", "weight", f"{name}_mask", f"{name}_weight"):
        value = data.get(attribute)
        if not isinstance(value, Tensor):
            continue
        if value.shape != target.shape[: value.ndim]:
            levels = (data.num_nodes, data.num_graphs if isinstance(data, Batch) else 1)
            if attribute in ("mask", "weight") and value.ndim == 1 and len(value) in levels:
                continue  # of the clouds, where the target is of points, or the other way round
            raise ValueError(
                f"data.{attribute}: expected the first axes of {name} {tuple(target.shape)}, got {tuple(value.shape)}"
            )
        weights = value.to(target.dtype if target.is_floating_point() else torch.float32)
        if not ((weights >= 0) & weights.isfinite()).all():
            raise ValueError(f"data.{attribute}: expected finite weights of at least 0, got {float(weights.min())}")
        found = weights if found is None else _times(found, weights)
    repeated = data.get(REPEATED)
    if isinstance(data, Batch) and repeated is not None and bool(repeated.any()):
        counts = (~repeated).to(torch.float32 if found is None else found.dtype)
        counts = counts if len(target) == len(counts) else counts[data.batch]
        found = counts if found is None else _times(found, counts)
    return found


def counted(values: Tensor, weights: Tensor | None, entry_axes: int = 0) -> tuple[Tensor, Tensor]:
    """Those entries of ``values`` whose weight is not 0, in one axis, and their weights.

    What does not count may be NaN: it is in no sum, and gives no gradient. The last ``entry_axes`` axes are those of an
    entry, which counts as a whole; ValueError is raised for weights within it.
    """
    shape = values.shape[: values.ndim - entry_axes]
    if weights is None:
        entries = values.flatten(0, len(shape) - 1)
        return entries, values.new_ones(()).expand(len(entries))
    if weights.ndim > len(shape):
        found = f"{tuple(shape)} of whole entries, got {tuple(weights.shape)}"
        raise ValueError(f"data: expected masks and weights {found}")
    spread = weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)).expand(shape)
    kept = spread > 0
    return values[kept], spread[kept].to(values.dtype)


def squared_sine(difference: Tensor) -> Tensor:
    """Squared sine of half the angle between rotations, of their difference ``[*, 3, 3]``; smooth everywhere."""
    return difference.square().sum((-2, -1)) / 8


def degrees(difference: Tensor) -> Tensor:
    """The angle between rotations of difference ``[*, 3, 3]``, 0 .. 180 degrees."""
    return torch.rad2deg(2 * squared_sine(difference).clamp(max=1).sqrt().asin())


class WeightedMean(Metric):
    """Mean of entries with weights, whatever the batches and processes; NaN where an entry is, or if there are none.

    torchmetrics' MeanMetric leaves out what is NaN, and a network without an answer would have a good error.
    """

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "weight"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Take the entries ``[n]`` of one batch, and their weights ``[n]``."""
        total, weight = weighted_sums(values, weights)
        self.total += total
        self.weight += weight

    def compute(self) -> Tensor:
        """The mean of all batches."""
        return self.total / self.weight


class WeightedMeans(Metric):
    """Sum over targets of their factors times the mean of all their entries, whatever the batches and processes."""

    sums: Tensor
    weights: Tensor

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors
        for name in ("sums", "weights"):
            self.add_state(name, torch.zeros(len(factors)), dist_reduce_fx="sum")

    def update(self, sums: Tensor, weights: Tensor) -> None:
        """Take the sums ``[targets]`` of weighted entries, and of their weights, of one batch."""
        self.sums += sums.detach()
        self.weights += weights.detach()

    def compute(self) -> Tensor:
        """The sum for all batches so far; targets without entries count 0."""
        means = means_of(self.sums, self.weights)
        return (means * means.new_tensor(self.factors)).sum()


class Losses(nn.Module):
    """The loss of a task: the sum over its targets of their factors times their means."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors
        self.val, self.test = WeightedMeans(factors), WeightedMeans(factors)

    def logged(self, log: Callable[..., None], batch: Batch, sums: Tensor, stage: str) -> Tensor:
        """Log and return the loss of :func:`weighted_sums` ``[2, targets]``.

        In training it is that of the batches of all processes, and in evaluation that of all batches is logged.
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


def weighted_sums(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values ``[n]`` with weights ``[n]``, and of the weights: ``[2]``."""
    return torch.stack([(values * weights).sum() if len(values) else values.sum(), weights.sum().to(values.dtype)])


def means_of(sums: Tensor, weights: Tensor) -> Tensor:
    """Means, 0 where there is nothing to average."""
    return sums / torch.where(weights > 0, weights, 1)


def means_of_all_processes(sums: Tensor, clouds: int) -> tuple[Tensor, int]:
    """Means ``[targets]`` of weighted sums and weights ``[2, targets]``, and the number of clouds.

    Both are of the batches of all processes of a training, which are one batch in parts. Gradients are such that their
    mean over the processes, which is what distributed training takes, is the gradient of the means, also where the
    parts differ in what they count.
    """
    if processes() == 1:
        return means_of(*sums), clouds
    total = summed(torch.cat([sums.detach(), sums.new_full((2, 1), float(clouds), requires_grad=False)], dim=1))
    every = total[:, :-1]
    own = means_of(sums[0] * processes(), every[1])
    return own + (means_of(*every) - own).detach(), int(total[1, -1])


def _times(first: Tensor, second: Tensor) -> Tensor:
    """Product of weights of which one may have more axes."""
    few, many = sorted((first, second), key=lambda weights: weights.ndim)
    return few.reshape(*few.shape, *[1] * (many.ndim - few.ndim)) * many


def per_point(name: str, columns: Tensor, clouds: Sequence[Data]) -> tuple[Tensor, Tensor]:
    """What a point adds to sums ``[clouds, numbers]``, ``[numbers]`` by least squares, and all points of each cloud.

    NaN are left out. ValueError is raised if there is not one row for each of the clouds.
    """
    if len(columns) != len(clouds):
        found = f"{len(columns)} for {len(clouds)} clouds"
        raise ValueError(f"extensive: expected one {name} for each cloud, got {found}")
    points = columns.new_tensor([cloud.num_nodes for cloud in clouds])[:, None].where(~columns.isnan(), 0.0)
    slope = (points * columns.nan_to_num()).sum(dim=0) / points.square().sum(dim=0).clamp(min=1)
    return slope, points * slope
