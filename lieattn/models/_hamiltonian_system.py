"""The fixed part of a Hamiltonian system, and the checks of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import kind
from lieattn.models._forces import usable


class System:
    """What does not change along a trajectory: masses, features and clouds, one point after another.

    Parameters are those of :meth:`lieattn.models.HamiltonianDynamics.field`.
    """

    def __init__(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        features: Tensor | None,
        batch: Tensor | None,
        attributes: Mapping[str, Tensor] | None,
    ) -> None:
        _check_state(position, momentum, mass, features, batch)
        # Outside of inference mode, or gradients could not save what is made here.
        with torch.inference_mode(False):
            mass, features, batch = usable(mass), usable(features), usable(batch)
            self._lay_out(position.shape, position.dtype, mass, features, batch)
        self.attributes = dict(attributes or {})

    def _lay_out(
        self, shape: torch.Size, dtype: torch.dtype, mass: Tensor, features: Tensor | None, batch: Tensor | None
    ) -> None:
        self.mass = mass.reshape(-1).to(dtype)
        self.features = None if features is None else features.reshape(-1, features.shape[-1])
        if batch is not None:
            self.batch, self.num_clouds = batch, int(batch.max()) + 1 if len(batch) else 0
        else:
            self.num_clouds = shape[0] if len(shape) == 3 else 1
            index = torch.arange(self.num_clouds, device=mass.device)
            self.batch = index.repeat_interleave(shape[-2])
        self.counts = torch.bincount(self.batch, minlength=self.num_clouds).clamp(min=1)

    def flat(self, values: Tensor) -> Tensor:
        """One point after another, ``[points, dim]``."""
        return values.reshape(-1, values.shape[-1])

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the points of each cloud, ``[points, *]`` to ``[clouds, *]``."""
        return values.new_zeros(self.num_clouds, *values.shape[1:]).index_add(0, self.batch, values)

    def kinetic(self, momentum: Tensor) -> Tensor:
        """Kinetic energies ``[clouds]`` of momenta ``[points, dim]``."""
        return self.sum(momentum.square().sum(dim=1) / (2 * self.mass))

    def data(self, position: Tensor) -> Any:
        """What the potential sees, with positions ``[points, dim]``."""
        from torch_geometric.data import Data

        given = {"mass": self.mass, "batch": self.batch, **self.attributes}
        if self.features is not None:
            given["x"] = self.features
        return Data(pos=position, **given).apply(usable)


def _check_state(
    position: Tensor, momentum: Tensor, mass: Tensor, features: Tensor | None, batch: Tensor | None
) -> None:
    for argument, value in (("position", position), ("momentum", momentum), ("mass", mass)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{argument}: expected a floating tensor, got {kind(value)}")
    shape = tuple(position.shape)
    if position.ndim not in (2, 3):
        raise ValueError(f"position: expected [points, dim] or [clouds, points, dim], got {shape}")
    if momentum.shape != position.shape or momentum.dtype != position.dtype:
        raise ValueError(
            f"momentum: expected {position.dtype} {shape} as the positions, got {momentum.dtype} "
            f"{tuple(momentum.shape)}"
        )
    if mass.shape != shape[:-1]:
        raise ValueError(f"mass: expected {shape[:-1]}, one for each point, got {tuple(mass.shape)}")
    if not bool((mass > 0).all()):
        raise ValueError(f"mass: expected positive masses, got {float(mass.min())}")
    if features is not None and (features.shape[:-1] != shape[:-1] or features.ndim != position.ndim):
        raise ValueError(f"features: expected {shape[:-1]} and channels, got {tuple(features.shape)}")
    if batch is not None and (position.ndim != 2 or batch.shape != shape[:1] or batch.dtype != torch.int64):
        raise ValueError(f"batch: expected int64 [points] with positions [points, dim], got {tuple(batch.shape)}")
