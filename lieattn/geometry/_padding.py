"""Padded layouts of clouds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from lieattn._core.checks import check_has_numbers, check_is, check_tensor
from lieattn.geometry._indices import ranks
from lieattn.geometry._movable import Movable


@dataclass(frozen=True, eq=False)
class Padding(Movable):
    """The layout of points in a padded tensor, in which every cloud has the size of the largest. See :func:`padding`.

    ``shape`` is (clouds, places per cloud), and ``cloud`` ``[points]`` int64 is the cloud of each point. ``place``
    ``[points]`` int64 is the index of each point in the flattened layout, and ``mask`` ``[clouds, places]`` bool is
    true at points. Both are None if the clouds have equal sizes and are sorted, so that padding needs no copy.
    """

    shape: tuple[int, int]
    cloud: Tensor
    place: Tensor | None = None
    mask: Tensor | None = None

    def pad(self, x: Shaped[Tensor, points * rest]) -> Shaped[Tensor, "clouds places *rest"]:
        """Convert ``[points, *]`` to ``[clouds, places, *]``, filled up with zeros."""
        if self.place is None:
            return x.unflatten(0, self.shape)
        flat = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return flat.index_copy(0, self.place, x).unflatten(0, self.shape)

    def unpad(self, x: Shaped[Tensor, "clouds places *rest"]) -> Shaped[Tensor, points * rest]:
        """Convert ``[clouds, places, *]`` to ``[points, *]``."""
        flat = x.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


def padding(batch: Tensor, num_clouds: int) -> Padding:
    """Return the padded layout of points with the clouds ``batch`` ``[points]`` int64, in any order.

    Clouds may be empty.
    """
    counts = torch.bincount(batch, minlength=num_clouds)
    places = int(counts.max()) if num_clouds else 0
    regular = len(batch) == num_clouds * places
    if regular and not bool((batch[1:] < batch[:-1]).any()):
        return Padding((num_clouds, places), batch)
    mask = torch.arange(places, device=batch.device) < counts[:, None]
    return Padding((num_clouds, places), batch, batch * places + ranks(batch, num_clouds), mask)


def flatten(
    padded: Shaped[Tensor, "clouds places *rest"], mask: Bool[Tensor, "clouds places"]
) -> Shaped[Tensor, points * rest]:
    """Select the points of a padded layout: ``[clouds, N, *]`` with mask ``[clouds, N]`` to ``[points, *]``."""
    check_is("padded", padded, Tensor)
    check_mask(mask, padded.device, padded.shape[:2])
    return padded[mask]


def unflatten(
    flat: Shaped[Tensor, points * rest], mask: Bool[Tensor, "clouds places"]
) -> Shaped[Tensor, "clouds places *rest"]:
    """Restore the padded layout, filled with zeros: ``[points, *]`` with mask ``[clouds, N]`` to ``[clouds, N, *]``."""
    check_is("flat", flat, Tensor)
    check_mask(mask, flat.device)
    rows = len(flat) if flat.ndim else 0
    if rows != int(mask.sum()):
        raise ValueError(f"flat: expected {int(mask.sum())} points as in mask, got {rows}")
    padded = flat.new_zeros(*mask.shape, *flat.shape[1:])
    padded[mask] = flat
    return padded


def check_mask(mask: Tensor, device: torch.device, shape: torch.Size | None = None) -> None:
    """Raise an error unless a value is a bool mask ``[clouds, N]`` on ``device``, of this shape (any if None)."""
    check_tensor("mask", mask, "a bool tensor [clouds, N]", torch.bool)
    if mask.ndim != 2:
        raise ValueError(f"mask: expected [clouds, N], got {tuple(mask.shape)}")
    if shape is not None and mask.shape != shape:
        raise ValueError(f"mask: expected shape {tuple(shape)}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"mask: expected on {device} as the points, got on {mask.device}")
    check_has_numbers("mask", mask)
