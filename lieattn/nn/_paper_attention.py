"""The attention layers of the papers: thin presets of :class:`GroupAttention`, with the parameters of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, cast

from torch import Tensor, nn

from lieattn._checks import check_choice, check_count, check_counts
from lieattn.geometry import LiftedGraph, num_coordinates
from lieattn.groups import FiniteGroup
from lieattn.nn._attention import GroupAttention, checked_head_channels
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative import (
    CoordinateEncoding,
    FeaturePart,
    Kernel,
    LocationPart,
    PerHeadMLP,
    RelativeFunction,
    pair_score,
)
from lieattn.ops import Activation, Normalization, RelativeTerms
from lieattn.spaces import HomogeneousSpace


class GroupSelfAttention(GroupAttention):
    r"""Self-attention on the group, from a field to a field.

    With ``pattern="query_sum"`` it is that of GSA-Nets (Eq. 16, corrected): queries of all frames g are summed, and the
    output frame h enters by the positional encoding,

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_g \sum_{(j, m)} \operatorname{softmax}_{(j, m)}
        \big( \langle q_e(x_i, g), k_e(x_j, m) + \rho(h^{-1}(x_j - x_i), g^{-1} m) \rangle / \sqrt{C_{in}} \big)
        v_e(x_j, m) .

    ``"joint"`` keeps the query frame as the output frame (LieTransformer); ``"framewise"`` attends within each frame.

    **Equivariance.** That of :class:`GroupAttention`, exact for every H where neighborhoods are balls.

    Parameters
    ----------
    group
        H; or a homogeneous space, whose frames are chosen when points are lifted. Pairs of frames are then seen by a
        network of the relative element in place of a table.
    encoding
        Positional encoding; GSA's network of each coordinate if absent.
    in_channels, out_channels, heads, head_channels, pattern, normalize, dropout
        See :class:`GroupAttention`, and above.
    """

    lifts: ClassVar[bool] = False

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
        check_choice("pattern", pattern, ("query_sum",) if self.lifts else ("joint", "framewise", "query_sum"))
        if not isinstance(group, FiniteGroup | HomogeneousSpace):
            raise TypeError(f"group: expected a FiniteGroup such as cyclic(4), or a HomogeneousSpace, got {group!r}")
        finite, dim = (group, group.dim) if isinstance(group, FiniteGroup) else (None, group.group.dim)
        check_count("in_channels", in_channels)
        width = checked_head_channels(out_channels, heads, head_channels)
        if encoding is None and isinstance(group, HomogeneousSpace) and not self.lifts:
            encoding = [CoordinateEncoding(dim, width), PerHeadMLP(heads, num_coordinates(group))]
        elif encoding is None:
            encoding = CoordinateEncoding(dim, width, None if self.lifts else finite)
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            head_channels=width,
            pattern=pattern,
            encoding=encoding,
            normalize=normalize,
            # The authors divide by the root of the layer's input channels, not of the channels of a head.
            scale=1 / math.sqrt(in_channels),
            dropout=dropout,
            lifting=self.lifts,
            group=finite,
        )

    def _linear(self, in_channels: int, out_channels: int) -> nn.Module:
        return nn.Linear(in_channels, out_channels)


class LiftingSelfAttention(GroupSelfAttention):
    r"""Lifting self-attention of GSA-Nets (Eq. 14): from features on points to a field on the group.

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_{j \in N(i)} \operatorname{softmax}_j
        \big( \langle q_e(x_i), k_e(x_j) + \rho(h^{-1}(x_j - x_i)) \rangle / \sqrt{C_{in}} \big) v_e(x_j)

    Parameters are those of :class:`GroupSelfAttention`, the pattern is ``"query_sum"``. On a fiber of scales the
    features of a point are those of all its nodes.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the features stay with their points, the output
    is translated by h: f'(·, a) becomes f'(·, h⁻¹a). Exact for every H where neighborhoods are balls.
    """

    lifts = True


class FramewiseAttention(GroupAttention):
    r"""Rotary self-attention of every frame with itself, with group-tied projections.

    With :math:`R_a(x)` the rotation of channel pairs by the angles of :class:`RotaryPhases`,

    .. math::
        f'(x_i, a) = W_o R_a(x_i)^{-1} \sum_j \operatorname{softmax}_j
        \big( \langle R_a(x_i) q(x_i, a), R_a(x_j) k(x_j, a) \rangle / \sqrt d \big) R_a(x_j) v(x_j, a) .

    Scores and values see :math:`h_a^{-1}(x_j - x_i)` alone, so geometry counts where features are constant too.

    **Equivariance.** That of :class:`GroupAttention`.

    **Cost.** Over whole clouds (``AllPairs``) it is torch's scaled dot product attention with |H| heads.

    Parameters
    ----------
    group, channels, heads, dropout
        See :class:`GroupAttention`; channels fall into heads by even numbers.
    encoding
        ``RotaryEncoding(group.dim, heads, channels // heads, values=True)``, or None where a network gives the terms.
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
        check_counts(channels=channels, heads=heads)
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
        return cast(tuple[Tensor, Tensor, Tensor], self.projection(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2))


class LieSelfAttention(GroupAttention):
    r"""Self-attention of LieTransformer (arXiv 2012.10885, Algorithm 1): :class:`GroupAttention` in the joint pattern.

    The kernels, choices of the score before it is normalized, are

    * ``"sum"``: ⟨q, k⟩ / √d + network(g⁻¹ g'), the authors' ``mlp``;
    * ``"content"``: the first summand alone, ``"location"`` the second;
    * ``"relative_position"``: (⟨q, k⟩ + ⟨E(g⁻¹ g'), q + v⟩ + ⟨u, k⟩) / √d;
    * ``"combined"``: a network of features and g⁻¹ g' together, see :class:`lieattn.nn.relative.CombinedScore`.

    :func:`lieattn.models.published_kernel` translates the authors' names and four-digit codes.

    **Equivariance.** That of :class:`GroupAttention`.

    Parameters
    ----------
    channels, heads, dropout
        See :class:`GroupAttention`; the heads divide the channels.
    coordinates
        Number of coordinates of a relative element, ``graph.relative.num_coordinates``.
    kernel
        See above.
    normalize
        ``"softmax"``, ``"mean"`` or ``"exp-mean"``, see :func:`lieattn.ops.group_attention`.
    hidden, activation
        See :class:`lieattn.nn.relative.PerHeadMLP`.
    features, location, feature_channels
        Of the kernel ``"combined"``.
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
        check_counts(channels=channels, coordinates=coordinates, heads=heads)
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of {channels} channels, got {heads}")
        check_choice("normalize", normalize, ("softmax", "mean", "exp-mean"))
        check_choice("kernel", kernel, Kernel)
        super().__init__(channels, channels, heads=heads, normalize=normalize, dropout=dropout)
        combined = {"features": features, "location": location, "feature_channels": feature_channels}
        self.score = pair_score(kernel, channels, coordinates, heads, hidden, activation, **combined)
        self.value, self.output = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def _build(self, channels: int, out_channels: int) -> None:
        """Make nothing: the score has queries and keys, and its parameters come first."""

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return *self.score.project(x), self._split(self.value(x))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        return self.score(graph, x)

    def scores(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Scores before they are normalized, ``[edges, fiber, fiber, heads]``."""
        x = self._checked(x, graph)
        found = self._operate(*self._project(x), graph, self._terms(x, graph), normalize="none", return_weights=True)
        return cast(Tensor, found[1])
