"""Squeeze-and-excite of fields on a group."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_counts, check_features
from lieattn.geometry import PointClouds


class GroupSqueezeExcite(nn.Module):
    r"""Group squeeze-and-excite (Affine Self Convolution, Eq. 15): every channel is scaled by what the cloud holds.

    .. math::  f'_c(x, h) = f_c(x, h) \, \operatorname{sigmoid}(W_1 \operatorname{relu}(W_2 m + b_2) + b_1)_c

    with m the mean of the field over the points of its cloud and over the fiber.

    **Equivariance.** The mean over points and frames is invariant, so it commutes with any group.

    Parameters
    ----------
    channels
        Channels of the field.
    reduction
        The hidden layer has channels // reduction units, at least 1; 16 on Z² and 4 on p4 in the paper.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        check_counts(channels=channels, reduction=reduction)
        self.squeeze = nn.Linear(channels, max(1, channels // reduction))
        self.excite = nn.Linear(self.squeeze.out_features, channels)

    def scale(self, x: Tensor, graph: PointClouds) -> Tensor:
        """Factors ``[clouds, channels]`` for a field ``[points, *, channels]``."""
        check_features(x, self.squeeze.weight)
        if x.ndim < 2 or x.shape[0] != graph.num_points or x.shape[-1] != self.squeeze.in_features:
            raise ValueError(
                f"x: expected [points={graph.num_points}, *, {self.squeeze.in_features}], got {tuple(x.shape)}"
            )
        mean = graph.mean(x.flatten(1, -2).mean(dim=1) if x.ndim > 2 else x)
        return self.excite(F.relu(self.squeeze(mean))).sigmoid()

    def forward(self, x: Tensor, graph: PointClouds) -> Tensor:
        """Scale a field ``[points, *, channels]``."""
        factors = self.scale(x, graph)[graph.batch]
        return x * factors.view(len(x), *[1] * (x.ndim - 2), factors.shape[1])
