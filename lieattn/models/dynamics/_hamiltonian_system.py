"""Systems of points with masses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_none, check_tensor
from lieattn.geometry import PointClouds
from lieattn.models.dynamics._gradients import usable


class System:
    """Masses, clouds and attributes, which are constant along a trajectory, and the initial state ``[points, dim]``."""

    def __init__(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        features: Tensor | None,
        batch: Tensor | None = None,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_arguments(System.__init__, {"batch": batch, "attributes": attributes})
        tensors = {"position": position, "momentum": momentum, "mass": mass}
        for argument, value in (tensors if features is None else {**tensors, "features": features}).items():
            check_tensor(argument, value, "a floating tensor")
        shape = tuple(position.shape)
        if position.ndim not in (2, 3):
            raise ValueError(f"position: expected [points, dim] or [clouds, points, dim], got {shape}")
        if momentum.shape != position.shape or momentum.dtype != position.dtype:
            got = f"{momentum.dtype} {tuple(momentum.shape)}"
            raise ValueError(f"momentum: expected {position.dtype} {shape} like position, got {got}")
        if mass.shape != shape[:-1]:
            raise ValueError(f"mass: expected {shape[:-1]}, one for each point, got {tuple(mass.shape)}")
        if not bool((mass > 0).all()):
            raise ValueError(f"mass: expected positive masses, got {float(mass.min())}")
        if features is not None and (features.shape[:-1] != shape[:-1] or features.ndim != position.ndim):
            raise ValueError(f"features: expected {shape[:-1]} and channels, got {tuple(features.shape)}")
        if batch is not None and (position.ndim != 2 or batch.shape != shape[:1] or batch.dtype != torch.int64):
            raise ValueError(f"batch: expected int64 [points] with positions [points, dim], got {tuple(batch.shape)}")
        self.position, self.momentum = (value.reshape(-1, shape[-1]) for value in (position, momentum))
        given = dict(attributes or {})
        # Autograd cannot save tensors that are created in inference mode.
        with torch.inference_mode(False):
            self.mass = usable(mass).reshape(-1).to(position.dtype)
            if batch is None:
                number = len(position) if position.ndim == 3 else 1
                starts = torch.arange(number + 1, device=mass.device)
                batch, given["ptr"] = starts[:-1].repeat_interleave(shape[-2]), starts * shape[-2]
            else:
                check_none("batch", batch < 0, "is negative: expected ids from 0")
                batch, number = usable(batch), _number(batch, given.get("ptr"))
            self.clouds = PointClouds(pos=usable(position).reshape(-1, shape[-1]), batch=batch, num_clouds=number)
        self.given = {"mass": self.mass, "batch": self.clouds.batch, **given}
        if features is not None:
            self.given["x"] = features.reshape(-1, features.shape[-1])


def _number(batch: Tensor, ptr: Tensor | None) -> int:
    """Return the number of clouds. Only ``ptr``, if given, contains empty clouds at the end."""
    return max(int(batch.max()) + 1 if len(batch) else 0, 0 if ptr is None else len(ptr) - 1)
