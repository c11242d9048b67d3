"""Self-attention layers: projections around the one operator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout, check_features
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn._positional import CoordinateEncoding, PositionalEncoding
from lieattn.ops import Normalization, RelativeTerms, group_attention

_Pattern = Literal["joint", "framewise", "query_sum"]


class _SelfAttention(nn.Module):
    """What lifting and group attention share: projections, heads, and the call of the operator."""

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        heads: int,
        head_channels: int | None,
        pattern: _Pattern,
        encoding: PositionalEncoding | None,
        normalize: Normalization,
        dropout: float,
    ) -> None:
        super().__init__()
        check_group("group", group)
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        check_count("heads", heads)
        if head_channels is None:
            if out_channels % heads:
                raise ValueError(f"head_channels: give it, since {heads} heads do not divide {out_channels} channels")
            head_channels = out_channels // heads
        check_count("head_channels", head_channels)
        check_dropout("dropout", dropout)
        if normalize not in get_args(Normalization):
            raise ValueError(f"normalize: expected one of {get_args(Normalization)}, got {normalize!r}")
        if encoding is not None:
            _check_encoding(encoding, group, pattern)
        self.group, self.heads, self.head_channels = group, heads, head_channels
        self.pattern: _Pattern = pattern
        self.normalize: Normalization = normalize
        self.dropout = dropout
        # The authors divide by the root of the layer's input channels, not of the channels of a head.
        self.scale = 1 / math.sqrt(in_channels)
        self.query = nn.Linear(in_channels, heads * head_channels)
        self.key = nn.Linear(in_channels, heads * head_channels)
        self.value = nn.Linear(in_channels, heads * head_channels)
        self.output = nn.Linear(heads * head_channels, out_channels)
        self.encoding = encoding

    def _attend(
        self,
        x: Tensor,
        graph: LiftedGraph,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if graph.group != self.group:
            raise ValueError(f"graph: is lifted to {graph.group.name}, this layer is for {self.group.name}")
        size = (self.heads, self.head_channels)
        query, key, value = (linear(x).unflatten(-1, size) for linear in (self.query, self.key, self.value))
        terms = RelativeTerms()
        if self.encoding is not None:
            # Functions of positions, which autocast would round.
            with torch.autocast(x.device.type, enabled=False):
                query, key = self.encoding.rotate(query, key, graph)
                terms = self.encoding(graph)
        out, weights = group_attention(
            query,
            key,
            value,
            graph.neighbors,
            pattern=self.pattern,
            normalize=self.normalize,
            terms=replace(terms, row=graph.displacement_index),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )
        out = self.output(out.flatten(-2))
        # Terms without a fiber give one frame, which stands for all.
        return out.expand(-1, self.group.order, -1), weights


class LiftingSelfAttention(_SelfAttention):
    r"""Lifting self-attention of GSA-Nets (Eq. 14): from features on points to a field on the group.

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_{j \in N(i)} \operatorname{softmax}_j
        \big( \langle q_e(x_i), k_e(x_j) + \rho(h^{-1}(x_j - x_i)) \rangle / \sqrt{C_{in}} \big) v_e(x_j)

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the features stay with their points, the output
    is translated by h: f'(·, a) becomes f'(·, h⁻¹a). Exact for every H where neighborhoods are balls.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels of the features and of the field.
    heads
        Attention heads.
    head_channels
        Channels of each head; out_channels / heads if absent.
    encoding
        Positional encoding; GSA's network if absent.
    normalize
        See :func:`lieattn.ops.group_attention`.
    dropout
        On the attention weights.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 1,
        head_channels: int | None = None,
        encoding: PositionalEncoding | None = None,
        normalize: Normalization = "softmax",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            group, in_channels, out_channels, heads, head_channels, "query_sum", encoding, normalize, dropout
        )
        if encoding is None:
            self.encoding = CoordinateEncoding(group.dim, self.head_channels)

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Features ``[points, in_channels]`` to a field ``[points, fiber, out_channels]``."""
        return self.attend(x, graph)[0]

    def attend(self, x: Tensor, graph: LiftedGraph, *, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Field and, if asked for, weights ``[edges, fiber, 1, 1, heads]``."""
        check_features(x, self.query.weight)
        if x.shape != (graph.num_points, self.query.in_features):
            raise ValueError(
                f"x: expected features [points={graph.num_points}, {self.query.in_features}], got {tuple(x.shape)}"
            )
        return self._attend(x[:, None], graph, return_weights)


class GroupSelfAttention(_SelfAttention):
    r"""Self-attention on the group, from a field to a field.

    With ``pattern="query_sum"`` it is the group self-attention of GSA-Nets (Eq. 16, corrected): queries of all
    frames g are summed, and the output frame h enters by the positional encoding,

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_g \sum_{(j, m)} \operatorname{softmax}_{(j, m)}
        \big( \langle q_e(x_i, g), k_e(x_j, m) + \rho(h^{-1}(x_j - x_i), g^{-1} m) \rangle / \sqrt{C_{in}} \big)
        v_e(x_j, m) .

    ``"joint"`` keeps the query frame as the output frame (LieTransformer); ``"framewise"`` attends within each
    frame, with frames mixed elsewhere by :class:`lieattn.nn.GroupLinear`.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, the output is
    translated by h. Exact for every H where neighborhoods are balls.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels per frame.
    heads
        Attention heads.
    head_channels
        Channels of each head; out_channels / heads if absent.
    pattern
        See above.
    encoding
        Positional encoding; GSA's network if absent.
    normalize
        See :func:`lieattn.ops.group_attention`.
    dropout
        On the attention weights.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 1,
        head_channels: int | None = None,
        pattern: _Pattern = "query_sum",
        encoding: PositionalEncoding | None = None,
        normalize: Normalization = "softmax",
        dropout: float = 0.0,
    ) -> None:
        if pattern not in get_args(_Pattern):
            raise ValueError(f"pattern: expected 'joint', 'framewise' or 'query_sum', got {pattern!r}")
        super().__init__(group, in_channels, out_channels, heads, head_channels, pattern, encoding, normalize, dropout)
        if encoding is None:
            self.encoding = CoordinateEncoding(group.dim, self.head_channels, group)

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``."""
        return self.attend(x, graph)[0]

    def attend(self, x: Tensor, graph: LiftedGraph, *, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Field and, if asked for, the weights in the layout of :func:`lieattn.ops.group_attention`."""
        check_features(x, self.query.weight)
        expected = (graph.num_points, self.group.order, self.query.in_features)
        if x.shape != expected:
            raise ValueError(f"x: expected a field [points, fiber, channels] = {expected}, got {tuple(x.shape)}")
        return self._attend(x, graph, return_weights)


def _check_encoding(encoding: PositionalEncoding, group: FiniteGroup, pattern: str) -> None:
    name = type(encoding).__name__
    if pattern not in encoding.patterns:
        raise ValueError(
            f"encoding: {name} is equivariant with patterns {encoding.patterns}, not with pattern {pattern!r}"
        )
    if encoding.group not in (None, group):
        raise ValueError(f"encoding: {name} is for {encoding.group}, this layer for {group}")
    if encoding.dim not in (None, group.dim):
        raise ValueError(f"encoding: {name} is for {encoding.dim} dimensions, {group.name} acts on {group.dim}")
