"""Input features that the authors of LieTransformer make of molecules and of point patterns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lieattn._checks import kind


def species_features(z: Tensor, species: Sequence[int] = (1, 6, 7, 8, 9), *, powers: int = 3) -> Tensor:
    """One-hot species times powers 0, 1, 2 of the charge, ``[atoms, powers * species]``, in torch's default dtype.

    Channel ``powers * a + q`` is (z / largest z of the table)^q for atoms of species a, 0 for others.

    Raises
    ------
    TypeError, ValueError
        If z is no int64 tensor ``[atoms]``, or an atom is not in the table.
    """
    if not isinstance(z, Tensor) or z.dtype != torch.int64 or z.ndim != 1:
        raise TypeError(f"z: expected int64 nuclear charges [atoms], got {kind(z)}")
    table = torch.tensor(list(species), device=z.device)
    one_hot = z[:, None] == table
    unknown = ~one_hot.any(dim=1)
    if unknown.any():
        atom = int(unknown.nonzero()[0])
        raise ValueError(f"z: expected charges among {list(species)}, got {int(z[atom])} for atom {atom}")
    charge = z.to(torch.get_default_dtype()) / max(species)
    power = charge[:, None] ** torch.arange(powers, device=z.device)
    return (one_hot[:, :, None] * power[:, None]).flatten(1)


def sorted_distances(pos: Tensor, batch: Tensor, count: int) -> Tensor:
    """Distances of each point to the points of its cloud, largest first, ``[points, count]``.

    The smallest, a point's distance to itself, is left out; zeros follow where a cloud has fewer than count + 1
    points. Invariant under E(d) and permutations; where points coincide gradients are 0.

    Raises
    ------
    ValueError
        If a cloud has more than count + 1 points.
    """
    same = batch[:, None] == batch
    most = int(same.sum(dim=1).max()) if len(batch) else 0
    if most > count + 1:
        raise ValueError(f"data: expected at most {count + 1} points in a cloud, got {most}")
    squared = (pos[:, None] - pos).square().sum(-1)
    apart = same & (squared > 0)
    distance = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
    ordered = distance.sort(dim=1, descending=True).values
    missing = max(0, count - ordered.shape[1])
    return torch.nn.functional.pad(ordered, (0, missing))[:, :count]
