"""Normalizations that do not tell frames or points apart. Per token, use ``torch.nn.LayerNorm(channels)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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

    def forward(self, x: Tensor, graph: PointClouds) -> Tensor:
        """Normalize ``[points, *, channels]`` over the clouds of a graph."""
        if x.shape[0] != graph.num_points or x.shape[-1] != len(self.weight):
            raise ValueError(f"x: expected [points={graph.num_points}, *, {len(self.weight)}], got {tuple(x.shape)}")
        wide = x if x.dtype == torch.float64 else x.float()
        per_point = wide.flatten(1)
        counts = graph.counts.clamp(min=1) * per_point.shape[1]

        def mean(values: Tensor) -> Tensor:
            return (graph.sum(values.sum(dim=1)) / counts)[graph.batch][:, None]

        centered = per_point - mean(per_point)
        normal = centered * torch.rsqrt(mean(centered.square()) + self.eps)
        return normal.view_as(x).to(x.dtype) * self.weight + self.bias


class FiberNorm(nn.Module):
    """Layer normalization over the fiber and channels of each point, with one gain and shift for each channel.

    **Equivariance.** The group permutes the fiber, which leaves the statistics alone.

    Parameters
    ----------
    channels
        Channels per frame.
    eps
        Added to the variance.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_count("channels", channels)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[points, fiber, channels]``."""
        weight, bias = self.weight.expand(x.shape[-2:]), self.bias.expand(x.shape[-2:])
        return F.layer_norm(x, x.shape[-2:], weight, bias, self.eps)


class PointBatchNorm(nn.Module):
    """Batch normalization over all points and frames of a batch of clouds, as the authors have it.

    (x - mean) / sqrt(max(variance, eps)) times a gain plus a shift, with the population variance, which is also what
    the running average takes. In training mode statistics are those of the batch, otherwise the running ones. A
    batch without points leaves the running statistics alone.

    **Equivariance.** Statistics are sums over points and frames, so it commutes with any group and permutation.

    Parameters
    ----------
    channels
        Channels of the field.
    eps
        Least variance.
    momentum
        Share of the batch in the running averages.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        check_count("channels", channels)
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[points, *, channels]``."""
        if x.shape[-1] != len(self.weight):
            raise ValueError(f"x: expected {len(self.weight)} channels, got {x.shape[-1]}")
        mean, variance = self.running_mean, self.running_var
        if self.training and x.numel():
            wide = (x if x.dtype == torch.float64 else x.float()).reshape(-1, x.shape[-1])
            mean = wide.mean(dim=0)
            variance = (wide - mean).square().mean(dim=0)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
                self.running_var.lerp_(variance.to(self.running_var), self.momentum)
        normal = (x - mean) * torch.rsqrt(variance.clamp(min=self.eps))
        return normal.to(x.dtype) * self.weight + self.bias


def norm_layer(norm: str, channels: int, eps: float = 1e-5) -> nn.Module:
    """Normalization named ``"layer"``, ``"batch"`` or ``"none"``."""
    if norm == "layer":
        return nn.LayerNorm(channels, eps=eps)
    return PointBatchNorm(channels, eps) if norm == "batch" else nn.Identity()


class FieldBatchNorm(_BatchNorm):
    """Batch normalization with one gain, shift, mean and variance a channel, over all points, images and frames.

    **Equivariance.** Statistics are sums over poses and positions, so it commutes with the group.

    Parameters
    ----------
    channels
        Channels of the field.
    eps
        Added to the variance.
    momentum
        Weight of a batch in the running statistics.
    axis
        Of the channels: -1 for fields of points, ``[points, fiber, channels]``; 1 for fields on grids, ``[batch,
        channels, (fiber,) rows, columns]``.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1, axis: int = -1) -> None:
        check_count("channels", channels)
        super().__init__(channels, eps=eps, momentum=momentum)
        self.axis = axis

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"x: expected {self.num_features} channels on axis {self.axis}, got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a field."""
        if self.axis == 1:
            return super().forward(input)
        return super().forward(input.flatten(0, -2)).view_as(input)
