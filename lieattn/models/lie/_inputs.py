"""Features that the authors of LieTransformer make of molecules and of point patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_count, kind
from lieattn.geometry import PointClouds


@dataclass(frozen=True)
class Species:
    """One-hot species times powers 0, 1, 2 of the charge, made of ``data.z``.

    Channel ``3 a + q`` is (z / largest z of the table)^q for atoms of species a, 0 for others.

    Attributes
    ----------
    species
        Nuclear charges that are known.
    """

    species: Sequence[int] = (1, 6, 7, 8, 9)

    @property
    def channels(self) -> int:
        """Number of features."""
        return 3 * len(self.species)

    def __call__(self, data: Any, clouds: PointClouds) -> Tensor:
        """Features ``[points, channels]`` in torch's default dtype.

        Raises
        ------
        TypeError, ValueError
            If z is no int64 tensor ``[points]``, or an atom is not in the table.
        """
        z = getattr(data, "z", None)
        if not isinstance(z, Tensor) or z.dtype != torch.int64 or z.ndim != 1:
            raise TypeError(f"data.z: expected int64 nuclear charges [points], got {kind(z)}")
        one_hot = z[:, None] == torch.tensor(list(self.species), device=z.device)
        unknown = ~one_hot.any(dim=1)
        if unknown.any():
            atom = int(unknown.nonzero()[0])
            raise ValueError(f"data.z: expected charges among {list(self.species)}, got {int(z[atom])} for atom {atom}")
        charge = z.to(torch.get_default_dtype()) / max(self.species)
        power = charge[:, None] ** torch.arange(3, device=z.device)
        return (one_hot[:, :, None] * power[:, None]).flatten(1)


@dataclass(frozen=True)
class SortedDistances:
    """Distances of each point to the others of its cloud, largest first, zeros where there are fewer.

    Invariant under E(d) and permutations; where points coincide gradients are 0.

    Attributes
    ----------
    channels
        Number of features; a cloud has at most one point more.
    """

    channels: int

    def __post_init__(self) -> None:
        check_count("channels", self.channels)

    def __call__(self, data: Any, clouds: PointClouds) -> Tensor:
        """Features ``[points, channels]``; ValueError if a cloud has more points."""
        batch = clouds.batch
        same = batch[:, None] == batch
        most = int(same.sum(dim=1).max()) if len(batch) else 0
        if most > self.channels + 1:
            raise ValueError(f"data: expected at most {self.channels + 1} points in a cloud, got {most}")
        squared = (clouds.pos[:, None] - clouds.pos).square().sum(-1)
        apart = same & (squared > 0)
        distance = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
        ordered = distance.sort(dim=1, descending=True).values
        missing = max(0, self.channels - ordered.shape[1])
        return torch.nn.functional.pad(ordered, (0, missing))[:, : self.channels]
