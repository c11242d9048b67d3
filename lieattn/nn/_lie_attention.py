"""Self-attention of LieTransformer on lifted points."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast, get_args

from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout, check_features
from lieattn.geometry import LiftedGraph
from lieattn.nn._lie_scores import (
    CombinedScore,
    ContentScore,
    FeaturePart,
    LieScore,
    LocationPart,
    LocationScore,
    RelativePositionScore,
    SumScore,
)
from lieattn.nn._location import RelativeGraph
from lieattn.nn._measure import measured
from lieattn.ops import Activation, Normalization, group_attention

Kernel = Literal["sum", "content", "location", "relative_position", "combined"]


class LieSelfAttention(nn.Module):
    r"""Self-attention on group elements that lie above points (LieTransformer, arXiv 2012.10885, Algorithm 1).

    .. math::
        f'(g) = b + W \Big[ \sum_{g' \in N(g)} \operatorname{normalize}_{g'}
        \big( \operatorname{score}_e(f(g), f(g'), g^{-1} g') \big)\, V_e f(g') \Big]_e

    over all elements g' above the neighbors of the point of g: the joint pattern of
    :func:`lieattn.ops.group_attention`. On a :class:`lieattn.geometry.ScaledGraph` keys weigh what the Haar measure of
    the group says (GSA-Nets, Eqs. 20 and 21). The kernels are

    * ``"sum"``: ⟨q, k⟩ / √d + network(g⁻¹ g'), the authors' ``mlp``;
    * ``"content"``: the first summand alone, ``"location"`` the second;
    * ``"relative_position"``: (⟨q, k⟩ + ⟨E(g⁻¹ g'), q + v⟩ + ⟨u, k⟩) / √d;
    * ``"combined"``: a network of features and g⁻¹ g' together, see :class:`lieattn.nn.CombinedScore`.

    :func:`lieattn.models.published_kernel` translates the authors' names and four-digit codes.

    **Equivariance.** If all elements move by one element of the group, g -> u g, and the field stays with them, the
    output stays with them too, up to rounding: only relative elements are seen. Whether elements move with the
    points is up to the frames of the lift.

    Parameters
    ----------
    channels
        Channels of the field, divisible by ``heads``.
    coordinates
        Number k of coordinates of a relative element, ``graph.relative_coordinates.shape[-1]``.
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
        Of the kernel ``"combined"``, see :class:`lieattn.nn.CombinedScore`.
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
        super().__init__()
        check_count("channels", channels)
        check_count("coordinates", coordinates)
        check_count("heads", heads)
        check_dropout("dropout", dropout)
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of {channels} channels, got {heads}")
        if normalize not in ("softmax", "mean", "exp-mean"):
            raise ValueError(f"normalize: expected 'softmax', 'mean' or 'exp-mean', got {normalize!r}")
        self.channels, self.heads, self.dropout = channels, heads, dropout
        self.normalize: Normalization = normalize
        self.score: LieScore
        if kernel == "sum":
            self.score = SumScore(channels, coordinates, heads, hidden, activation)
        elif kernel == "content":
            self.score = ContentScore(channels, heads)
        elif kernel == "location":
            self.score = LocationScore(coordinates, heads, hidden, activation)
        elif kernel == "relative_position":
            self.score = RelativePositionScore(channels, coordinates, heads)
        elif kernel == "combined":
            self.score = CombinedScore(
                channels,
                coordinates,
                heads,
                hidden,
                activation,
                features=features,
                location=location,
                feature_channels=feature_channels,
            )
        else:
            raise ValueError(f"kernel: expected one of {get_args(Kernel)}, got {kernel!r}")
        self.value = nn.Linear(channels, channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """Field ``[points, fiber, channels]`` to a field of the same shape."""
        return self.attend(x, graph)[0]

    def attend(
        self, x: Tensor, graph: RelativeGraph | LiftedGraph, *, return_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Field and, if asked for, the weights ``[edges, fiber, fiber, heads]``."""
        out, weights = self._operate(x, graph, self.normalize, return_weights)
        return self.output(out.flatten(-2)), weights

    def weights(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """Attention weights ``[edges, fiber, fiber, heads]`` alone."""
        return cast(Tensor, self._operate(x, graph, self.normalize, True)[1])

    def scores(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """Scores before they are normalized, ``[edges, fiber, fiber, heads]``."""
        return cast(Tensor, self._operate(x, graph, "none", True)[1])

    def _operate(
        self, x: Tensor, graph: RelativeGraph | LiftedGraph, normalize: Normalization, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        check_features(x, self.value.weight)
        if x.ndim != 3 or x.shape[0] != graph.neighbors.num_points or x.shape[2] != self.channels:
            raise ValueError(
                f"x: expected a field [points={graph.neighbors.num_points}, fiber, {self.channels}], got "
                f"{tuple(x.shape)}"
            )
        query, key, terms, row = self.score(x, graph)
        terms = measured(terms, graph, normalize)
        return group_attention(
            query,
            key,
            self.value(x).unflatten(-1, (self.heads, -1)),
            graph.neighbors,
            pattern="joint",
            normalize=normalize,
            terms=replace(terms, row=row),
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )
