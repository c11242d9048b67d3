"""Attention: the layer with projections around the operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_dropout,
    check_features,
    check_field,
    check_graph,
    check_is,
)
from lieattn._core.contexts import without_autocast
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup
from lieattn.io import TiedWeights
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative._affine import OfEdges
from lieattn.nn.relative._base import RelativeFunction, SumOfTerms, check_lifted_to, graph_attention, terms_of
from lieattn.ops import Normalization, Pattern, RelativeTerms


class GroupAttention(TiedWeights):
    r"""Attention from group elements to the elements of neighboring points: ``layer(x, graph) -> x``.

    .. math::
        f'(g) = b + W \Big[ \sum_{g' \in N(g)} \operatorname{normalize}_{g'}
        \big( \langle q_e(g), k_e(g') \rangle / s + \text{terms}_e(g^{-1} g') \big)\, V_e f(g') \Big]_e

    Queries, keys and values are linear in the field. An *encoding* computes the terms that are functions of the
    relative element and enter scores and values. The layers of the papers are presets:

    ============================ ============= =========================================== =====================
    preset                       pattern       encoding                                    normalization
    ============================ ============= =========================================== =====================
    :class:`GroupSelfAttention`  query sum     a key computed from u (CoordinateEncoding)  softmax
    :class:`LieSelfAttention`    joint         a network for each head (PerHeadMLP, ...)   softmax, mean, exp-mean
    ``AffineSelfConvolution``    pooled        affine maps psi, beta of keys and values    softmax
    :class:`FramewiseAttention`  framewise     rotary phases that rotate with the frame    softmax
    ============================ ============= =========================================== =====================

    Here u = g⁻¹ g' is the relative element. The layer works on every graph: with finite groups and Lie groups, with
    sampled, given and principal frames, on any homogeneous space, and on fibers of scales, where keys are weighted by
    the Haar measure (GSA-Nets, Eqs. 20 and 21, with the measure inside of the softmax; outside, as printed, dilations
    have errors of 0.4 to 0.7).

    **Equivariance.** If one element u of the group acts on all elements, g -> u g, and the field stays with them, the
    output also stays with them. For a finite group H as the fiber, if (t, h) in R^d ⋊ H acts on the points and the
    field is translated by h, the output is translated by h. The frames determine whether elements move with the points.

    Parameters
    ----------
    in_channels, out_channels
        Channels per frame.
    heads, head_channels
        Number of attention heads, and channels of each head; out_channels / heads if absent.
    pattern, normalize
        Fiber pattern and normalization of the scores, see :func:`lieattn.ops.group_attention`.
    encoding
        Function of the relative element; the terms of several functions are summed. None for attention to features
        alone.
    scale, dropout
        Factor of the products with the query, 1 / sqrt(head_channels) if absent; dropout of the weights.
    lifting
        Whether the input consists of features of points, ``[points, in_channels]``, in place of a field.
    group
        Finite group H for projections that are tied over its fiber (:class:`GroupLinear`); if absent, projections map
        each frame separately.

    Raises
    ------
    ValueError
        If the heads do not divide the channels and ``head_channels`` is absent, or the encoding is not equivariant with
        the pattern or is for another group or dimension.

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

    def forward(
        self, x: Float[Tensor, "points ... channels"], graph: LiftedGraph
    ) -> Float[Tensor, "nodes fiber outputs"]:
        """Map a field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``.

        For lifting, the input is ``[points, in_channels]``.
        """
        return self.attend(x, graph)[0]

    def attend(
        self, x: Float[Tensor, "points ... channels"], graph: LiftedGraph, *, return_weights: bool = False
    ) -> tuple[Float[Tensor, "nodes fiber outputs"], Float[Tensor, "edges ... heads"] | None]:
        """Return the output and, with ``return_weights``, the weights as :func:`lieattn.ops.group_attention` does."""
        x = self.checked(x, graph)
        query, key, value = self.project(x)
        out, weights = self.operate(query, key, value, graph, self.terms(x, graph), return_weights=return_weights)
        # Terms in a wider dtype, such as that of the positions, widen the result of the operator.
        out = cast(Tensor, self.output(out.flatten(-2).to(x.dtype)))
        # The result is the same for all frames if no term depends on the output frame.
        return (out.expand(-1, graph.fiber, -1) if out.shape[1] != graph.fiber else out), weights

    def weights(self, x: Float[Tensor, "points ... channels"], graph: LiftedGraph) -> Float[Tensor, "edges ... heads"]:
        """Return the attention weights, in the layout of :func:`lieattn.ops.group_attention`."""
        return cast(Tensor, self.attend(x, graph, return_weights=True)[1])

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return query, key and value, ``[points, fiber, heads, head_channels]``."""
        return self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))

    def _split(self, signal: Tensor) -> Tensor:
        return signal.unflatten(-1, (self.heads, -1))

    def terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        """Return ``graph.terms``, which a network evaluates once for several layers, or else those of the encoding."""
        if graph.terms is None:
            return self._terms(x, graph)
        check_is("graph.terms", graph.terms, RelativeTerms)
        return cast(RelativeTerms, graph.terms)

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        """Return the terms of the encoding, evaluated without autocast, which would round positions."""
        if self.encoding is None:
            return RelativeTerms()
        with without_autocast(x.device):
            return terms_of(self.encoding, graph, x)

    def operate(
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
        """Call the operator; ``edges`` can contain ``neighbors`` that replace those of the graph."""
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

    def checked(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Return the field, with a fiber of 1 for features of points; ValueError if it does not fit layer or graph."""
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
        if any(isinstance(part, OfEdges) and part.pads for part in encoding.modules()):
            advice = "use border='mask', or a layer such as AffineSelfConvolution"
            raise ValueError(f"encoding: border 'zero' needs edges to points that do not exist; {advice}")
        if group is not None and encoding.group not in (None, group):
            raise ValueError(f"encoding: {name} is for {encoding.group}, but this layer is for {group}")
        if group is not None and encoding.dim not in (None, group.dim):
            raise ValueError(f"encoding: {name} is for {encoding.dim} dimensions, but {group.name} acts on {group.dim}")


def spread_features(
    x: Float[Tensor, "points {channels}"], graph: LiftedGraph, channels: int
) -> Float[Tensor, "nodes 1 {channels}"]:
    """Spread features of points ``[points, channels]`` over all scales of a graph, and add a fiber of 1."""
    points = graph.num_points // graph.levels
    if x.shape != (points, channels):
        raise ValueError(f"x: expected features [points={points}, {channels}], got {tuple(x.shape)}")
    return graph.spread(x)[:, None]


def checked_head_channels(out_channels: int, heads: int, head_channels: int | None) -> int:
    """Return ``head_channels``, or out_channels / heads if absent; ValueError if that is not a whole number."""
    check_counts(out_channels=out_channels, heads=heads)
    if head_channels is None and out_channels % heads:
        raise ValueError(f"head_channels: must be given, since {heads} heads do not divide {out_channels} channels")
    check_counts(head_channels=out_channels // heads if head_channels is None else head_channels)
    return head_channels or out_channels // heads
