"""Clouds of different sizes side by side, for evaluations that want rectangles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.geometry._movable import Movable


@dataclass(frozen=True, eq=False)
class Padding(Movable):
    """Where each point stands when every cloud gets as many places as the largest one. See :func:`padding`.

    Attributes
    ----------
    shape
        (clouds, places of each).
    place
        ``[points]`` int64, the place of each point, counted through all clouds; None if all clouds have the same
        size and follow one another: then points and places are the same and nothing is copied.
    mask
        ``[clouds, places]`` bool, where points are; None if everywhere.
    """

    shape: tuple[int, int]
    place: Tensor | None
    mask: Tensor | None

    @property
    def cloud(self) -> Tensor:
        """Cloud of each point, int64 ``[points]``."""
        place = torch.arange(self.shape[0] * self.shape[1]) if self.place is None else self.place
        return place // max(self.shape[1], 1)

    def pad(self, x: Tensor) -> Tensor:
        """``[points, *]`` to ``[clouds, places, *]``, zero where no point is."""
        if self.place is None:
            return x.unflatten(0, self.shape)
        flat = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return flat.index_copy(0, self.place, x).unflatten(0, self.shape)

    def unpad(self, x: Tensor) -> Tensor:
        """``[clouds, places, *]`` to ``[points, *]``."""
        flat = x.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


def padding(batch: Tensor, num_clouds: int) -> Padding:
    """Lay out points by the cloud they belong to.

    Parameters
    ----------
    batch
        ``[points]`` int64, the cloud of each point, in any order.
    num_clouds
        How many clouds there are; clouds may be empty.
    """
    counts = torch.bincount(batch, minlength=num_clouds)
    places = int(counts.max()) if num_clouds else 0
    regular = len(batch) == num_clouds * places
    if regular and not bool((batch[1:] < batch[:-1]).any()):
        return Padding((num_clouds, places), None, None)
    order = torch.argsort(batch, stable=True)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(batch)
    rank[order] = torch.arange(len(batch), device=batch.device)
    place = batch * places + rank - first[batch]
    mask = torch.arange(places, device=batch.device) < counts[:, None]
    return Padding((num_clouds, places), place, mask)
