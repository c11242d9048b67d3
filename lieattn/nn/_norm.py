"""Normalizations that do not tell frames or points apart. Per token, use ``torch.nn.LayerNorm(channels)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import PointClouds


class CloudNorm(nn.Module):
    """Joint normalization of GSA-Nets: over all points, frames and channels of a cloud together.

    Population variance, eps inside the square root, then a gain and a shift for each channel. Statistics are
    taken in at least float32.

    **Equivariance.** Statistics are sums over points and frames, so it commutes with any group and permutation.

    Parameters
    ----------
    channels
        Channels of the field.
    eps
        Added to the variance.
    """

    def __init__(self, channels: int, eps: float = 1e-12) -> None:
        super().__init__()
        check_count("channels", channels)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, clouds: PointClouds) -> Tensor:
        """Normalize ``[points, *, channels]``."""
        if x.shape[0] != clouds.num_points or x.shape[-1] != len(self.weight):
            raise ValueError(f"x: expected [points={clouds.num_points}, *, {len(self.weight)}], got {tuple(x.shape)}")
        wide = x if x.dtype == torch.float64 else x.float()
        per_point = wide.flatten(1)
        counts = torch.bincount(clouds.batch, minlength=clouds.num_clouds).clamp(min=1) * per_point.shape[1]

        def mean(values: Tensor) -> Tensor:
            total = values.new_zeros(clouds.num_clouds).index_add(0, clouds.batch, values.sum(dim=1))
            return (total / counts)[clouds.batch][:, None]

        centered = per_point - mean(per_point)
        normal = centered * torch.rsqrt(mean(centered.square()) + self.eps)
        return normal.view_as(x).to(x.dtype) * self.weight + self.bias
