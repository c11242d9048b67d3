"""Residual blocks of the papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_dropout,
    check_features,
    check_graph,
)
from lieattn.geometry import LiftedGraph, PointClouds
from lieattn.groups import FiniteGroup
from lieattn.nn._attention import GroupAttention
from lieattn.nn._convolution import AttentiveConvolution, FrameMessages, LieConvolution
from lieattn.nn._linear import GroupLinear
from lieattn.nn._paper_attention import FramewiseAttention
from lieattn.nn._statistics import CloudNorm, FiberNorm, norm_layer
from lieattn.nn.relative import RelativeFunction
from lieattn.ops import Activation
from lieattn.ops import activation as activation_named

BlockNorm = Literal["layer_pre", "layer_post", "batch_pre", "batch_post", "none"]
"""Normalization in a block and its place, see :class:`LieBlock`."""


class PreNormBlock(nn.Module):
    """Attention and MLP with residuals, normalized before the attention, as in GSA-Nets.

    The block computes

        y = dropout(act(norm(attention(act(norm(x)))))),   z = crop(y) + crop(skip(x)),
        out = z + norm(linear(act(norm(linear(z))))),

    where norm is the joint normalization (:class:`CloudNorm`) and act the ``activation``, by default swish. skip is a
    linear map if the channels change and the identity otherwise. The hidden layer of the MLP has half the channels of
    the output, so ``out_channels`` must be at least 2 (otherwise ValueError).

    **Equivariance.** That of ``attention(x, graph) -> x``, a layer from ``in_channels`` to ``out_channels``.
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
        check_arguments(PreNormBlock.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels)
        check_dropout("dropout", dropout)
        hidden = out_channels // 2
        if hidden < 1:
            raise ValueError(f"out_channels: expected at least 2, since the MLP is half as wide, got {out_channels}")
        self.activation = activation
        self.norm_in, self.attention, self.norm_attention = CloudNorm(in_channels), attention, CloudNorm(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Linear(in_channels, out_channels) if in_channels != out_channels else nn.Identity()
        self.linear1, self.norm1 = nn.Linear(out_channels, hidden), CloudNorm(hidden)
        self.linear2, self.norm2 = nn.Linear(hidden, out_channels), CloudNorm(out_channels)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "kept fiber outputs"]:
        """Map a field ``[points, fiber, in_channels]`` to ``[points kept, fiber, out_channels]``.

        If the graph has ``kept`` points, a crop removes the others after the attention.
        """
        y = self.attention(self.activation(self.norm_in(x, graph)), graph)
        y = self.dropout(self.activation(self.norm_attention(y, graph)))
        clouds: PointClouds = graph
        if graph.kept is not None:
            x, y, clouds = x[graph.kept.points], y[graph.kept.points], graph.kept.clouds
        z = y + self.skip(x)
        hidden = self.activation(self.norm1(self.linear1(z), clouds))
        return z + self.norm2(self.linear2(hidden), clouds)


class LieBlock(nn.Module):
    """Attention and MLP with residuals, as in LieTransformer.

    With ``norm`` equal to ``"layer_pre"`` or ``"batch_pre"`` the block computes f <- f + attention(norm(f)),
    f <- f + mlp(norm(f)). With ``"layer_post"`` or ``"batch_post"`` it computes f <- f + norm(attention(f)),
    f <- f + norm(mlp(f)). With ``"none"`` there is no normalization. The MLP does not change the number of channels,
    and both of its linear maps are followed by the activation.

    **Equivariance.** That of ``attention(x, graph) -> x``, a layer from ``channels`` to ``channels``.

    Parameters
    ----------
    attention, channels
        Attention layer, and channels of the field.
    norm, activation, eps
        Normalization as above, name of the activation, and ``eps`` of the normalization.
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
        check_arguments(LieBlock.__init__, locals())
        super().__init__()
        check_count("channels", channels)
        self.attention = attention
        self.post = norm.endswith("_post")
        kind = norm.split("_")[0]
        self.norm_attention, self.norm_mlp = (norm_layer(kind, channels, eps) for _ in range(2))
        self.linear1, self.linear2 = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.activation: Activation = activation

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        """Map a field ``[points, fiber, channels]`` to a field of the same shape."""
        return self.feed_forward(self.attend(x, graph))

    def attend(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        """Apply the first half of the block: the attention and its residual."""
        check_features(x, self.linear1.weight, self.linear1.in_features)
        if self.post:
            return cast(Tensor, x + self.norm_attention(self.attention(x, graph)))
        return cast(Tensor, x + self.attention(self.norm_attention(x), graph))

    def feed_forward(self, x: Float[Tensor, "points fiber channels"]) -> Float[Tensor, "points fiber channels"]:
        """Apply the second half of the block: the MLP and its residual."""
        check_features(x, self.linear1.weight, self.linear1.in_features)
        act = activation_named("activation", self.activation)
        y = x if self.post else self.norm_mlp(x)
        y = act(self.linear2(act(self.linear1(y))))
        return x + (self.norm_mlp(y) if self.post else y)


class LieBottleneck(nn.Module):
    """Residual block of LieConv: a linear map down, a convolution, and a linear map up.

    Each of the three follows a normalization and the activation. The input is added to the first ``in_channels``
    channels of the result, so ``out_channels`` cannot be less (otherwise ValueError).

    **Equivariance.** That of :class:`LieConvolution`.

    Parameters
    ----------
    in_channels, out_channels, coordinates
        Channels of the fields, and number of coordinates of a relative element.
    widths
        Channels of the input and output of the convolution; if absent, a quarter of ``in_channels`` and of
        ``out_channels``, or the channels of ``attention``.
    norm, activation
        ``"batch"`` (as the authors), ``"layer"`` or ``"none"``; name of the activation.
    attention
        If given, the convolution is an :class:`AttentiveConvolution` with this attention.
    **convolution
        Further options of :class:`LieConvolution` or :class:`AttentiveConvolution`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coordinates: int,
        *,
        widths: tuple[int, int] | None = None,
        norm: Literal["batch", "layer", "none"] = "batch",
        activation: Activation = "silu",
        attention: GroupAttention | None = None,
        **convolution: Any,
    ) -> None:
        check_arguments(LieBottleneck.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        if out_channels < in_channels:
            raise ValueError(f"out_channels: expected at least {in_channels}, the in_channels, got {out_channels}")
        if widths is None and attention is not None:
            widths = (attention.in_channels, cast(nn.Linear, attention.output).out_features)
        narrow_in, narrow_out = widths or (max(1, in_channels // 4), max(1, out_channels // 4))
        self.activation: Activation = activation
        normed = in_channels, narrow_in, narrow_out
        self.norm_in, self.norm_down, self.norm_up = (norm_layer(norm, width) for width in normed)
        self.down = nn.Linear(in_channels, narrow_in)
        self.convolution = (
            LieConvolution(narrow_in, narrow_out, coordinates, activation=activation, **convolution)
            if attention is None
            else AttentiveConvolution(attention, coordinates, activation=activation, **convolution)
        )
        self.up = nn.Linear(narrow_out, out_channels)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "kept fiber outputs"]:
        """Map a field ``[points, fiber, in_channels]`` to ``[points kept, fiber, out_channels]``.

        If the graph has ``kept`` points, the others are removed after the convolution.
        """
        check_graph(graph, LiftedGraph, x)
        check_features(x, self.down.weight, self.down.in_features)
        act = activation_named("activation", self.activation)
        y = self.convolution(act(self.norm_down(self.down(act(self.norm_in(x))))), graph)
        if graph.kept is not None:
            x, y = x[graph.kept.points], y[graph.kept.points]
        y = self.up(act(self.norm_up(y)))
        return torch.cat([y[..., : x.shape[-1]] + x, y[..., x.shape[-1] :]], dim=-1)


class FramewiseBlock(nn.Module):
    """Pre-norm transformer block: framewise attention, then a group-tied network with one hidden layer.

    **Equivariance.** That of :class:`FramewiseAttention`.

    Parameters
    ----------
    group, channels, heads, encoding
        See :class:`FramewiseAttention`.
    mlp_ratio
        Hidden channels of the network, divided by ``channels``.
    dropout
        Dropout probability of the attention weights, and after both branches.
    messages
        Hidden channels of the ``EdgeNetwork`` whose :class:`FrameMessages` are added to the result of the attention;
        None for a block without messages.
    attention
        Whether the block has attention. Without it, the block is a separable group convolution and needs messages.
    """

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        heads: int = 1,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        messages: int | None = None,
        encoding: RelativeFunction | None = None,
        attention: bool = True,
    ) -> None:
        check_arguments(FramewiseBlock.__init__, locals())
        super().__init__()
        check_counts(channels=channels, mlp_ratio=mlp_ratio)
        self.norm1, self.norm2 = FiberNorm(channels), FiberNorm(channels)
        if not attention and (messages is None or encoding is not None):
            raise ValueError("attention: a block without attention needs messages, and takes no encoding")
        self.attention = (
            FramewiseAttention(group, channels, heads=heads, encoding=encoding, dropout=dropout) if attention else None
        )
        self.linear1 = GroupLinear(group, channels, mlp_ratio * channels)
        self.linear2 = GroupLinear(group, mlp_ratio * channels, channels)
        self.dropout = nn.Dropout(dropout)
        self.messages = None if messages is None else FrameMessages(messages, channels)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        """Map a field to a field of the same shape.

        Blocks with messages need ``graph.local`` (otherwise TypeError), the graph of :class:`FrameMessages`.
        """
        check_features(x, self.norm1.weight, len(self.norm1.weight))
        y = self.norm1(x)
        parts = [] if self.attention is None else [self.attention(y, graph)]
        if self.messages is not None:
            if graph.local is None:
                raise TypeError("graph.local: expected a graph with terms, since the block has messages, got None")
            parts.append(self.messages(y, graph.local))
        x = x + self.dropout(sum(parts))
        return x + self.dropout(self.linear2(F.gelu(self.linear1(self.norm2(x)))))
