"""Attention: one layer around the operator, and the layers of the papers as choices of its slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout, check_features
from lieattn.geometry import LiftedGraph, num_coordinates
from lieattn.groups import FiniteGroup
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative import (
    CoordinateEncoding,
    FeaturePart,
    Kernel,
    LocationPart,
    PerHeadMLP,
    RelativeFunction,
    SumOfTerms,
    pair_score,
)
from lieattn.nn.relative._base import check_lifted_to
from lieattn.ops import Activation, Normalization, Pattern, RelativeTerms, group_attention
from lieattn.spaces import HomogeneousSpace


class GroupAttention(nn.Module):
    r"""Attention of group elements to the elements over the neighbors of their points: ``layer(x, graph) -> x``.

    .. math::
        f'(g) = b + W \Big[ \sum_{g' \in N(g)} \operatorname{normalize}_{g'}
        \big( \langle q_e(g), k_e(g') \rangle / s + \text{terms}_e(g^{-1} g') \big)\, V_e f(g') \Big]_e

    with queries, keys and values linear in the field, and an *encoding* that says what the relative element adds to
    scores and values. The fiber pattern, the normalization and the encoding are the slots of
    :func:`lieattn.ops.group_attention`; with them this is the layer of each of the papers, which are named presets:

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

    **Equivariance.** If all elements move by one element of the group, g -> u g, and the field stays with them, the
    output stays with them too: only relative elements are seen. For a finite group H over the points, moving these by
    (t, h) in R^d ⋊ H and translating the field by h translates the output by h. Whether elements move with the points
    is up to the frames.

    Parameters
    ----------
    in_channels, out_channels
        Channels per frame.
    heads
        Attention heads.
    head_channels
        Channels of each head; out_channels / heads if absent.
    pattern
        How fibers are tied, see :func:`lieattn.ops.group_attention`.
    encoding
        What the relative element adds; several functions are summed. None for features alone.
    normalize
        See :func:`lieattn.ops.group_attention`.
    scale
        Factor of the products with the query; 1 / sqrt(head_channels) if absent.
    dropout
        On the attention weights.
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
        super().__init__()
        check_count("in_channels", in_channels)
        head_channels = _head_channels(out_channels, heads, head_channels)
        check_dropout("dropout", dropout)
        for argument, option, allowed in (("pattern", pattern, Pattern), ("normalize", normalize, Normalization)):
            if option not in get_args(allowed):
                raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {option!r}")
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
        self.in_channels, self.heads, self.head_channels = in_channels, heads, head_channels
        self.pattern: Pattern = pattern
        self.normalize: Normalization = normalize
        self.scale, self.dropout, self.lifting, self.group = scale, dropout, lifting, group
        self._build(heads * head_channels, out_channels)
        self.encoding = SumOfTerms(encoding) if isinstance(encoding, Sequence) else encoding
        if self.encoding is not None:
            self._check_encoding(self.encoding)

    def _build(self, channels: int, out_channels: int) -> None:
        """Make the projections."""
        for name in ("query", "key", "value"):
            setattr(self, name, self._linear(self.in_channels, channels))
        self.output = self._linear(channels, out_channels)

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
        terms = self._terms(x, graph) if terms is None else terms
        out, weights = self._operate(query, key, value, graph, terms, return_weights=return_weights)
        out = cast(Tensor, self.output(out.flatten(-2)))
        # Terms without a fiber give one frame, which stands for all.
        return (out.expand(-1, graph.fiber, -1) if out.shape[1] != graph.fiber else out), weights

    def weights(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Attention weights alone, in the layout of :func:`lieattn.ops.group_attention`."""
        return cast(Tensor, self.attend(x, graph, return_weights=True)[1])

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Query, key and value, ``[points, fiber, heads, head_channels]``."""
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        return query, key, value

    def _split(self, signal: Tensor) -> Tensor:
        return signal.unflatten(-1, (self.heads, -1))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        """Terms of the encoding; functions of positions, which autocast would round."""
        if self.encoding is None:
            return RelativeTerms()
        with torch.autocast(x.device.type, enabled=False):
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
        normalize = normalize or self.normalize
        return group_attention(
            query,
            key,
            value,
            edges.get("neighbors", graph.neighbors),
            pattern=self.pattern,
            normalize=normalize,
            terms=measured(terms, graph, normalize),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )

    def _checked(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """The field, with a fiber of 1 for features of points; raises for what does not fit layer and graph."""
        check_features(x, next(self.output.parameters()))
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
            raise ValueError(f"encoding: {name} is for {encoding.group}, this layer for {group}")
        if group is not None and encoding.dim not in (None, group.dim):
            raise ValueError(f"encoding: {name} is for {encoding.dim} dimensions, {group.name} acts on {group.dim}")


class LiftingSelfAttention(GroupAttention):
    r"""Lifting self-attention of GSA-Nets (Eq. 14): from features on points to a field on the group.

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_{j \in N(i)} \operatorname{softmax}_j
        \big( \langle q_e(x_i), k_e(x_j) + \rho(h^{-1}(x_j - x_i)) \rangle / \sqrt{C_{in}} \big) v_e(x_j)

    :class:`GroupAttention` in the pattern ``"query_sum"`` with keys of one frame. On a fiber of scales the features of
    a point are those of all its nodes.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the features stay with their points, the output
    is translated by h: f'(·, a) becomes f'(·, h⁻¹a). Exact for every H where neighborhoods are balls.

    Parameters
    ----------
    group
        H, or a homogeneous space, whose frames are chosen when points are lifted.
    in_channels, out_channels, heads, head_channels, normalize, dropout
        See :class:`GroupAttention`.
    encoding
        Positional encoding; GSA's network of each coordinate if absent.
    """

    def __init__(
        self,
        group: FiniteGroup | HomogeneousSpace,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 1,
        head_channels: int | None = None,
        encoding: RelativeFunction | Sequence[RelativeFunction] | None = None,
        normalize: Normalization = "softmax",
        dropout: float = 0.0,
    ) -> None:
        finite, dim = _finite_or_space(group)
        check_count("in_channels", in_channels)
        width = _head_channels(out_channels, heads, head_channels)
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            head_channels=width,
            pattern="query_sum",
            encoding=CoordinateEncoding(dim, width) if encoding is None else encoding,
            normalize=normalize,
            # The authors divide by the root of the layer's input channels, not of the channels of a head.
            scale=1 / math.sqrt(in_channels),
            dropout=dropout,
            lifting=True,
            group=finite,
        )

    def _linear(self, in_channels: int, out_channels: int) -> nn.Module:
        return nn.Linear(in_channels, out_channels)


class GroupSelfAttention(GroupAttention):
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
        H; or a homogeneous space, whose frames are chosen when points are lifted. Pairs of frames are then seen by a
        network of the relative element in place of a table.
    in_channels, out_channels, heads, head_channels, normalize, dropout
        See :class:`GroupAttention`.
    pattern
        See above.
    encoding
        Positional encoding; GSA's network if absent.
    """

    def __init__(
        self,
        group: FiniteGroup | HomogeneousSpace,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 1,
        head_channels: int | None = None,
        pattern: Literal["joint", "framewise", "query_sum"] = "query_sum",
        encoding: RelativeFunction | Sequence[RelativeFunction] | None = None,
        normalize: Normalization = "softmax",
        dropout: float = 0.0,
    ) -> None:
        if pattern not in ("joint", "framewise", "query_sum"):
            raise ValueError(f"pattern: expected 'joint', 'framewise' or 'query_sum', got {pattern!r}")
        finite, dim = _finite_or_space(group)
        check_count("in_channels", in_channels)
        width = _head_channels(out_channels, heads, head_channels)
        if encoding is None and finite is not None:
            encoding = CoordinateEncoding(dim, width, finite)
        elif encoding is None:
            pairs = PerHeadMLP(heads, num_coordinates(cast(HomogeneousSpace, group)))
            encoding = [CoordinateEncoding(dim, width), pairs]
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            head_channels=width,
            pattern=pattern,
            encoding=encoding,
            normalize=normalize,
            scale=1 / math.sqrt(in_channels),
            dropout=dropout,
            group=finite,
        )

    def _linear(self, in_channels: int, out_channels: int) -> nn.Module:
        return nn.Linear(in_channels, out_channels)


class FramewiseAttention(GroupAttention):
    r"""Rotary self-attention of every frame with itself, with group-tied projections.

    With :math:`R_a(x)` the rotation of channel pairs by the angles of :class:`RotaryPhases`, and q, k, v and the
    output group-tied linear maps,

    .. math::
        f'(x_i, a) = W_o R_a(x_i)^{-1} \sum_j \operatorname{softmax}_j
        \big( \langle R_a(x_i) q(x_i, a), R_a(x_j) k(x_j, a) \rangle / \sqrt d \big) R_a(x_j) v(x_j, a) .

    Scores and values see :math:`h_a^{-1}(x_j - x_i)` alone, so geometry counts where features are constant too.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, so is the output.

    **Cost.** That of attention with |H| heads on tokens of |H| channels; the maps cost less, see
    :class:`GroupLinear`. Over whole clouds (``AllPairs``) it is torch's scaled dot product attention.

    Parameters
    ----------
    group
        H.
    channels
        Channels per frame, divisible by ``heads`` into even numbers.
    heads
        Heads of each frame.
    encoding
        ``RotaryEncoding(group.dim, heads, channels // heads, values=True)``, or None where a network gives the terms.
    dropout
        On the attention weights.
    """

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        heads: int = 1,
        encoding: RelativeFunction | None = None,
        dropout: float = 0.0,
    ) -> None:
        check_count("channels", channels)
        check_count("heads", heads)
        if channels % (2 * heads):
            raise ValueError(f"heads: {channels} channels do not fall into {heads} heads of even width")
        super().__init__(
            channels, channels, heads=heads, pattern="framewise", encoding=encoding, dropout=dropout, group=group
        )

    def _build(self, channels: int, out_channels: int) -> None:
        group = cast(FiniteGroup, self.group)
        self.projection = GroupLinear(group, self.in_channels, 3 * channels)
        self.output = GroupLinear(group, channels, out_channels)

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        query, key, value = self.projection(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        return query, key, value


class LieSelfAttention(GroupAttention):
    r"""Self-attention of LieTransformer (arXiv 2012.10885, Algorithm 1), in the joint pattern.

    .. math::
        f'(g) = b + W \Big[ \sum_{g' \in N(g)} \operatorname{normalize}_{g'}
        \big( \operatorname{score}_e(f(g), f(g'), g^{-1} g') \big)\, V_e f(g') \Big]_e

    The kernels, choices of its score, are

    * ``"sum"``: ⟨q, k⟩ / √d + network(g⁻¹ g'), the authors' ``mlp``;
    * ``"content"``: the first summand alone, ``"location"`` the second;
    * ``"relative_position"``: (⟨q, k⟩ + ⟨E(g⁻¹ g'), q + v⟩ + ⟨u, k⟩) / √d;
    * ``"combined"``: a network of features and g⁻¹ g' together, see :class:`lieattn.nn.relative.CombinedScore`.

    :func:`lieattn.models.published_kernel` translates the authors' names and four-digit codes.

    **Equivariance.** That of :class:`GroupAttention`.

    Parameters
    ----------
    channels
        Channels of the field, divisible by ``heads``.
    coordinates
        Number of coordinates of a relative element, ``graph.relative.num_coordinates``.
    heads
        Attention heads.
    kernel
        See above.
    normalize
        ``"softmax"``, ``"mean"`` or ``"exp-mean"``, see :func:`lieattn.ops.group_attention`.
    hidden
        Units of the networks of each head.
    activation
        Of those networks, after each of their layers.
    features, location, feature_channels
        Of the kernel ``"combined"``.
    dropout
        On the attention weights.
    """

    def __init__(
        self,
        channels: int,
        coordinates: int,
        *,
        heads: int = 8,
        kernel: Kernel = "sum",
        normalize: Normalization = "softmax",
        hidden: int = 16,
        activation: Activation = "silu",
        features: FeaturePart = "mixed",
        location: LocationPart = "coordinates",
        feature_channels: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        check_count("channels", channels)
        check_count("coordinates", coordinates)
        check_count("heads", heads)
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of {channels} channels, got {heads}")
        if normalize not in ("softmax", "mean", "exp-mean"):
            raise ValueError(f"normalize: expected 'softmax', 'mean' or 'exp-mean', got {normalize!r}")
        if kernel not in get_args(Kernel):
            raise ValueError(f"kernel: expected one of {get_args(Kernel)}, got {kernel!r}")
        super().__init__(channels, channels, heads=heads, normalize=normalize, dropout=dropout)
        combined = {"features": features, "location": location, "feature_channels": feature_channels}
        self.score = pair_score(kernel, channels, coordinates, heads, hidden, activation, **combined)

    def _build(self, channels: int, out_channels: int) -> None:
        self.value, self.output = nn.Linear(self.in_channels, channels), nn.Linear(channels, out_channels)

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return *self.score.project(x), self._split(self.value(x))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        return self.score(graph, x)

    def scores(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Scores before they are normalized, ``[edges, fiber, fiber, heads]``."""
        x = self._checked(x, graph)
        found = self._operate(*self._project(x), graph, self._terms(x, graph), normalize="none", return_weights=True)
        return cast(Tensor, found[1])


def measured(terms: RelativeTerms, graph: LiftedGraph, normalize: Normalization) -> RelativeTerms:
    """Terms whose sums over the keys are integrals over the group (GSA-Nets, Eqs. 20 and 21).

    Weights that are exponentials of scores take the logarithm of the measure into the score, so that what they are
    divided by has it too; others are multiplied with it.
    """
    if graph.log_measure is None:
        return terms
    if terms.row is not None:
        raise ValueError("graph: a measure for each edge needs terms with a row for each edge, these share rows")
    if normalize in ("softmax", "exp-mean"):
        bias = graph.log_measure[:, None, None, None]
        if terms.displacement_bias is not None:
            bias = terms.displacement_bias + bias.to(terms.displacement_bias.dtype)
        return replace(terms, displacement_bias=bias)
    psi = graph.log_measure.exp()[:, None, None, None, None]
    return replace(terms, psi=psi if terms.psi is None else terms.psi * psi.to(terms.psi.dtype))


def check_field(x: Tensor, graph: LiftedGraph, channels: int) -> Tensor:
    """A field on a graph; raises ValueError for another shape."""
    expected = (graph.num_points, graph.fiber, channels)
    if x.shape != expected:
        raise ValueError(f"x: expected a field [points, fiber, channels] = {expected}, got {tuple(x.shape)}")
    return x


def spread_features(x: Tensor, graph: LiftedGraph, channels: int) -> Tensor:
    """Features of points ``[points, channels]``, on all scales of a graph, with a fiber of 1."""
    points = graph.num_points // graph.levels
    if x.shape != (points, channels):
        raise ValueError(f"x: expected features [points={points}, {channels}], got {tuple(x.shape)}")
    return graph.spread(x)[:, None]


def _finite_or_space(group: FiniteGroup | HomogeneousSpace) -> tuple[FiniteGroup | None, int]:
    """Finite group, if it is one, and dimension of the positions."""
    if isinstance(group, FiniteGroup):
        return group, group.dim
    if isinstance(group, HomogeneousSpace):
        return None, group.group.dim
    raise TypeError(f"group: expected a FiniteGroup such as cyclic(4), or a HomogeneousSpace, got {group!r}")


def _head_channels(out_channels: int, heads: int, head_channels: int | None) -> int:
    check_count("out_channels", out_channels)
    check_count("heads", heads)
    if head_channels is None and out_channels % heads:
        raise ValueError(f"head_channels: give it, since {heads} heads do not divide {out_channels} channels")
    head_channels = out_channels // heads if head_channels is None else head_channels
    check_count("head_channels", head_channels)
    return head_channels
