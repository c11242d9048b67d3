"""The residual block of GSA-Nets."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_dropout
from lieattn.geometry import LiftedGraph, PointClouds
from lieattn.nn._norm import CloudNorm


class PreNormBlock(nn.Module):
    """Attention and MLP with residuals, normalized before the attention, as in GSA-Nets.

    With norm the joint normalization and act the swish,

        y = dropout(act(norm(attention(act(norm(x)))))),   z = crop(y) + crop(skip(x)),
        out = z + norm(linear(act(norm(linear(z))))),

    where skip is a linear map if the channels change and the identity otherwise, and the MLP is half as wide.

    **Equivariance.** That of its attention layer.

    Parameters
    ----------
    attention
        ``attention(x, graph) -> x`` from ``in_channels`` to ``out_channels``.
    in_channels, out_channels
        Channels per frame.
    dropout
        On the output of the attention, after its activation.
    activation
        Function of a tensor, entry by entry.
    """

    def __init__(
        self,
        attention: nn.Module,
        in_channels: int,
        out_channels: int,
        *,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        check_dropout("dropout", dropout)
        hidden = out_channels // 2
        if hidden < 1:
            raise ValueError(f"out_channels: the MLP is half as wide, so expected at least 2, got {out_channels}")
        self.activation = activation
        self.norm_in = CloudNorm(in_channels)
        self.attention = attention
        self.norm_attention = CloudNorm(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Linear(in_channels, out_channels) if in_channels != out_channels else nn.Identity()
        self.linear1 = nn.Linear(out_channels, hidden)
        self.norm1 = CloudNorm(hidden)
        self.linear2 = nn.Linear(hidden, out_channels)
        self.norm2 = CloudNorm(out_channels)

    def forward(
        self,
        x: Tensor,
        graph: LiftedGraph,
        kept: Tensor | None = None,
        kept_clouds: PointClouds | None = None,
    ) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points kept, fiber, out_channels]``.

        Parameters
        ----------
        x
            Field on ``graph``.
        graph
            Geometry of the attention.
        kept, kept_clouds
            ``[points kept]`` int64 indices of the points that a crop keeps after the attention, and the clouds
            they make; all points if absent.
        """
        y = self.attention(self.activation(self.norm_in(x, graph)), graph)
        y = self.dropout(self.activation(self.norm_attention(y, graph)))
        clouds: PointClouds = graph
        if kept is not None and kept_clouds is not None:
            x, y, clouds = x[kept], y[kept], kept_clouds
        z = y + self.skip(x)
        hidden = self.activation(self.norm1(self.linear1(z), clouds))
        return z + self.norm2(self.linear2(hidden), clouds)
