"""What counts of the data: masks and weights of clouds and points."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data


def target_weights(data: Batch | Data, name: str, target: Tensor) -> Tensor | None:
    """Weights of the entries of a target, shaped like its first axes; None if the data say nothing about them.

    They are the product of the attributes ``mask``, ``weight``, ``NAME_mask`` and ``NAME_weight``, as far as the data
    have them. The first two are for all targets, those of points for targets of points, those of clouds for others.
    ValueError is raised for other shapes, and for weights that are negative or not finite.
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


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean of values ``[n]`` with weights ``[n]``; 0 with a gradient of 0 if there are none."""
    return (values * weights).sum() / weights.sum() if len(values) else values.sum()


def _times(first: Tensor, second: Tensor) -> Tensor:
    """Product of weights of which one may have more axes."""
    few, many = sorted((first, second), key=lambda weights: weights.ndim)
    return few.reshape(*few.shape, *[1] * (many.ndim - few.ndim)) * many
