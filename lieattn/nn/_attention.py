"""Attention: one layer around the operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from lieattn._autocast import without_autocast
from lieattn._checks import (
    check_arguments,
    check_count,
    check_counts,
    check_dropout,
    check_features,
    check_graph,
    check_is,
)
from lieattn._tied import TiedWeights
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative import RelativeFunction, SumOfTerms, graph_attention
from lieattn.nn.relative._base import check_lifted_to
from lieattn.ops import Normalization, Pattern, RelativeTerms


class GroupAttention(TiedWeights):
    r"""Attention of group elements to the elements over the neighbors of their points: ``layer(x, graph) -> x``.

    .. math::
        f'(g) = b + W \Big[ \sum_{g' \in N(g)} \operatorname{normalize}_{g'}
        \big( \langle q_e(g), k_e(g') \rangle / s + \text{terms}_e(g^{-1} g') \big)\, V_e f(g') \Big]_e

    with queries, keys and values linear in the field, and an *encoding* that says what the relative element adds to
    scores and values. The layers of the papers are presets of it:

    ============================ ============= =========================================== =====================
    preset                       pattern       encoding                                    normalization
    ============================ ============= =========================================== =====================
    :class:`GroupSelfAttention`  query sum     a key made of u (CoordinateEncoding)        softmax
    :class:`LieSelfAttention`    joint         a network for each head (PerHeadMLP, ...)   softmax, mean, exp-mean
    ``AffineSelfConvolution``    pooled        affine maps psi, beta of keys and values    softmax
    :class:`FramewiseAttention`  framewise     rotary phases that turn with the frame      softmax
    ============================ ============= =========================================== =====================

    It works on every graph: over finite groups and Lie groups, sampled, given and principal frames, on any homogeneous
    space and on fibers of scales, where keys weigh what the Haar measure says (GSA-Nets, Eqs. 20 and 21).

    **Equivariance.** If all elements move by one element of the group, g -> u g, and the field stays with them, so does
    the output. For a finite group H over the points, moving these by (t, h) in R^d ⋊ H and translating the field by h
    translates the output by h. Whether elements move with the points is up to the frames.

    Parameters
    ----------
    in_channels, out_channels
        Channels per frame.
    heads, head_channels
        Number of attention heads, and the channels of each; out_channels / heads if absent.
    pattern, normalize
        How fibers are tied and scores become weights, see :func:`lieattn.ops.group_attention`.
    encoding
        What the relative element adds; several functions are summed. None for features alone.
    scale, dropout
        Factor of the products with the query, 1 / sqrt(head_channels) if absent; dropout of the weights.
    lifting
        Whether the input are features of points, ``[points, in_channels]``, in place of a field.
    group
        H, for projections tied over its fiber (:class:`GroupLinear`) in place of maps of each frame.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import PrincipalFrames, Radius, lift
    >>> from lieattn.nn import GroupAttention
    >>> from lieattn.nn.relative import PerHeadMLP
    >>> graph = lift(torch.randn(9, 3), PrincipalFrames(), Radius(2.0))
    >>> layer = GroupAttention(8, 8, heads=2, encoding=PerHeadMLP(2, graph.relative.num_coordinates))
    >>> layer(torch.randn(9, graph.fiber, 8), graph).shape
    torch.Size([9, 4, 8])
    """

    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 1,
        head_channels: int | None = None,
        pattern: Pattern = "joint",
        encoding: RelativeFunction | Sequence[RelativeFunction] | None = None,
        normalize: Normalization = "softmax",
        scale: float | None = None,
        dropout: float = 0.0,
        lifting: bool = False,
        group: FiniteGroup | None = None,
    ) -> None:
        check_arguments(GroupAttention.__init__, locals())
        super().__init__()
        check_count("in_channels", in_channels)
        head_channels = checked_head_channels(out_channels, heads, head_channels)
        check_dropout("dropout", dropout)
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
        self.in_channels, self.heads, self.head_channels = in_channels, heads, head_channels
        self.pattern: Pattern = pattern
        self.normalize: Normalization = normalize
        self.scale, self.dropout, self.lifting, self.group = scale, dropout, lifting, group
        self._build(heads * head_channels, out_channels)
        self.encoding = (SumOfTerms(encoding) if encoding else None) if isinstance(encoding, Sequence) else encoding
        if self.encoding is not None:
            self._check_encoding(self.encoding)

    def _build(self, channels: int, out_channels: int) -> None:
        self._build_projections(channels)
        self.output = self._linear(channels, out_channels)

    def _build_projections(self, channels: int) -> None:
        for name in ("query", "key", "value"):
            setattr(self, name, self._linear(self.in_channels, channels))

    def _linear(self, in_channels: int, out_channels: int) -> nn.Module:
        if self.group is None or self.lifting:
            return nn.Linear(in_channels, out_channels)
        return GroupLinear(self.group, in_channels, out_channels)

    def forward(self, x: Tensor, graph: LiftedGraph, terms: RelativeTerms | None = None) -> Tensor:
        """Field ``[points, fiber, in_channels]`` (for lifting, without fiber) to ``[points, fiber, out_channels]``.

        ``terms`` are those that a network has evaluated once for several layers, in place of the encoding's.
        """
        return self.attend(x, graph, terms)[0]

    def attend(
        self, x: Tensor, graph: LiftedGraph, terms: RelativeTerms | None = None, *, return_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Field and, if asked for, the weights in the layout of :func:`lieattn.ops.group_attention`."""
        x = self._checked(x, graph)
        query, key, value = self._project(x)
        if terms is None:
            terms = self._terms(x, graph)
        check_is("terms", terms, RelativeTerms)
        out, weights = self._operate(query, key, value, graph, terms, return_weights=return_weights)
        out = cast(Tensor, self.output(out.flatten(-2)))
        # The result is the same for all frames if no term depends on the output frame.
        return (out.expand(-1, graph.fiber, -1) if out.shape[1] != graph.fiber else out), weights

    def weights(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Attention weights alone, in the layout of :func:`lieattn.ops.group_attention`."""
        return cast(Tensor, self.attend(x, graph, return_weights=True)[1])

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Query, key and value, ``[points, fiber, heads, head_channels]``."""
        return self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))

    def _split(self, signal: Tensor) -> Tensor:
        return signal.unflatten(-1, (self.heads, -1))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        """Terms of the encoding; functions of positions, which autocast would round."""
        if self.encoding is None:
            return RelativeTerms()
        with without_autocast(x.device):
            return cast(RelativeTerms, self.encoding(graph, x))

    def _operate(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        graph: LiftedGraph,
        terms: RelativeTerms,
        *,
        normalize: Normalization | None = None,
        return_weights: bool = False,
        **edges: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the operator; ``edges`` may give other neighbor lists than the graph's."""
        return graph_attention(
            query,
            key,
            value,
            graph,
            pattern=self.pattern,
            normalize=normalize or self.normalize,
            terms=terms,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
            **edges,
        )

    def _checked(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """The field, with a fiber of 1 for features of points; raises for what does not fit layer and graph."""
        check_features(x, next(self.output.parameters()))
        check_graph(graph, LiftedGraph, x)
        check_lifted_to(graph, self.group)
        if self.lifting:
            return spread_features(x, graph, self.in_channels)
        return check_field(x, graph, self.in_channels)

    def _check_encoding(self, encoding: RelativeFunction) -> None:
        name, group = type(encoding).__name__, self.group
        if self.pattern not in encoding.patterns:
            raise ValueError(
                f"encoding: {name} is equivariant with patterns {encoding.patterns}, not with pattern {self.pattern!r}"
            )
        if group is not None and encoding.group not in (None, group):
            raise ValueError(f"encoding: {name} is for {encoding.group}, but this layer is for {group}")
        if group is not None and encoding.dim not in (None, group.dim):
            raise ValueError(f"encoding: {name} is for {encoding.dim} dimensions, but {group.name} acts on {group.dim}")


def check_field(x: Tensor, graph: LiftedGraph, channels: int, fiber: int | None = None) -> Tensor:
    """A field on a graph, over its frames or a fiber of another size; raises ValueError for another shape."""
    expected = (graph.num_points, graph.fiber if fiber is None else fiber, channels)
    if x.shape != expected:
        raise ValueError(f"x: expected a field [points, fiber, channels] = {expected}, got {tuple(x.shape)}")
    return x


def spread_features(x: Tensor, graph: LiftedGraph, channels: int) -> Tensor:
    """Features of points ``[points, channels]``, on all scales of a graph, with a fiber of 1."""
    points = graph.num_points // graph.levels
    if x.shape != (points, channels):
        raise ValueError(f"x: expected features [points={points}, {channels}], got {tuple(x.shape)}")
    return graph.spread(x)[:, None]


def checked_head_channels(out_channels: int, heads: int, head_channels: int | None) -> int:
    """Channels of each head: those given, or out_channels / heads; ValueError if that is not a whole number."""
    check_counts(out_channels=out_channels, heads=heads)
    if head_channels is None and out_channels % heads:
        raise ValueError(f"head_channels: must be given, since {heads} heads do not divide {out_channels} channels")
    check_counts(head_channels=out_channels // heads if head_channels is None else head_channels)
    return head_channels or out_channels // heads
