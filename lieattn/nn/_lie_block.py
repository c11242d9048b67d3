"""The residual block of LieTransformer, and batch normalization over the points that are there."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import LiftedGraph
from lieattn.nn._location import RelativeGraph
from lieattn.ops import Activation, activation

BlockNorm = Literal["layer_pre", "layer_post", "batch_pre", "batch_post", "none"]


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


class LieBlock(nn.Module):
    """Attention and MLP with residuals, as in LieTransformer.

    With norm as asked for, ``"..._pre"`` is

        f <- f + attention(norm(f)),   f <- f + mlp(norm(f)),

    and ``"..._post"`` is f <- f + norm(attention(f)), f <- f + norm(mlp(f)). The MLP keeps the width and has an
    activation after both of its linear maps.

    **Equivariance.** That of its attention layer.

    Parameters
    ----------
    attention
        ``attention(x, graph) -> x``, from ``channels`` to ``channels``.
    channels
        Channels of the field.
    norm
        ``"layer_pre"``, ``"layer_post"``, ``"batch_pre"``, ``"batch_post"`` or ``"none"``.
    activation
        Of the MLP.
    eps
        Of the normalization.
    """

    def __init__(
        self,
        attention: nn.Module,
        channels: int,
        *,
        norm: BlockNorm = "layer_pre",
        activation: Activation = "silu",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if norm not in get_args(BlockNorm):
            raise ValueError(f"norm: expected one of {get_args(BlockNorm)}, got {norm!r}")
        self.attention = attention
        self.post = norm.endswith("_post")
        kind = norm.split("_")[0]
        self.norm_attention, self.norm_mlp = (norm_layer(kind, channels, eps) for _ in range(2))
        self.linear1, self.linear2 = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.activation = _checked_activation(activation)

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """Field ``[points, fiber, channels]`` to a field of the same shape."""
        return self.feed_forward(self.attend(x, graph))

    def attend(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """First half of the block: the attention and its residual."""
        if self.post:
            return cast(Tensor, x + self.norm_attention(self.attention(x, graph)))
        return cast(Tensor, x + self.attention(self.norm_attention(x), graph))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Second half of the block: the MLP and its residual."""
        act = activation("activation", self.activation)
        y = x if self.post else self.norm_mlp(x)
        y = act(self.linear2(act(self.linear1(y))))
        return x + (self.norm_mlp(y) if self.post else y)


def _checked_activation(name: Activation) -> Activation:
    activation("activation", name)
    return name
