"""The attention of the papers as presets of :class:`GroupAttention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_choice, check_count, check_counts
from lieattn._core.contexts import without_autocast
from lieattn.geometry import LiftedGraph, num_coordinates
from lieattn.groups import FiniteGroup
from lieattn.nn._attention import GroupAttention, checked_head_channels
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative import CoordinateEncoding, Kernel, PerHeadMLP, RelativeFunction
from lieattn.nn.relative._pair_scores import FeaturePart, LocationPart, pair_score
from lieattn.ops import Activation, Normalization, RelativeTerms
from lieattn.spaces import HomogeneousSpace


class GroupSelfAttention(GroupAttention):
    r"""Self-attention on the group, from a field to a field.

    With ``pattern="query_sum"`` it is the layer of GSA-Nets (Eq. 16, corrected): the sum is over the query frames g,
    and the output frame h enters through the positional encoding,

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_g \sum_{(j, m)} \operatorname{softmax}_{(j, m)}
        \big( \langle q_e(x_i, g), k_e(x_j, m) + \rho(h^{-1}(x_j - x_i), g^{-1} m) \rangle / \sqrt{C_{in}} \big)
        v_e(x_j, m) .

    With ``"joint"`` the output frame is the query frame, g = h (LieTransformer); ``"framewise"`` attends within each
    frame.

    **Equivariance.** That of :class:`GroupAttention`. It is exact for every H if neighborhoods are balls. With
    ``"joint"`` it is unique (GSA-Nets, Definition 4.3). With ``"query_sum"`` it is not, although the paper says so:
    the sum over g loses the orientation of the fibers relative to the positions. Therefore the output does not change
    if all fibers are translated and the points stay, the layer cannot express a group convolution (section 5.3), and
    for a single point its output is constant on the fiber. A table of h⁻¹ m in the encoding avoids this, but costs
    |H|³ per edge. Eq. 16 as printed, with h⁻¹ g⁻¹ m, is not equivariant.

    Parameters
    ----------
    group
        H; or a homogeneous space, for which the frames are chosen in the lift. For a space, pairs of frames are encoded
        by a network of the relative element in place of a table.
    encoding
        Positional encoding; if absent, the network of GSA-Nets for each coordinate. With ``[]`` there is no encoding:
        the layer does not depend on positions, and on whole clouds it commutes with all permutations (GSA-Nets,
        Proposition 4.1).
    encoded
        ``"key"`` adds the encoding ρ to the keys, the same for all heads, as in the authors' code. ``"features"`` adds
        it to the features before the key map, k(f + ρ), as Eqs. 5, 11, 14 and 16 print it, so that each head projects
        it; the encoding then has ``in_channels``. Absolute encodings (``CoordinateEncoding(absolute=True)``) are then
        also added before the query map, ⟨q(f(i) + ρ(i)), k(f(j) + ρ(j))⟩ as in Eqs. 4 and 10, where each query frame h
        sees h⁻¹ x_i; a lifting layer then has the pattern ``"framewise"``, and others need ``"joint"`` or
        ``"framewise"``, which the fused kernels evaluate.
    in_channels, out_channels, heads, head_channels, pattern, normalize, dropout
        See :class:`GroupAttention` and above. The scores are divided by sqrt(in_channels), as in the authors' code.
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
        encoded: Literal["key", "features"] = "key",
    ) -> None:
        check_arguments(GroupSelfAttention.__init__, locals())
        check_choice("pattern", pattern, ("query_sum",) if self.lifts else ("joint", "framewise", "query_sum"))
        finite, dim = (group, group.dim) if isinstance(group, FiniteGroup) else (None, group.group.dim)
        check_count("in_channels", in_channels)
        width = checked_head_channels(out_channels, heads, head_channels)
        codes = width if encoded == "key" else in_channels
        if encoding is None and isinstance(group, HomogeneousSpace) and not self.lifts:
            encoding = [CoordinateEncoding(dim, codes), PerHeadMLP(heads, num_coordinates(group))]
        elif encoding is None:
            encoding = CoordinateEncoding(dim, codes, None if self.lifts else finite)
        self.encoded = encoded
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            head_channels=width,
            pattern=pattern,
            encoding=encoding,
            normalize=normalize,
            # The authors divide by the square root of the input channels of the layer, not of the channels of a head.
            scale=1 / math.sqrt(in_channels),
            dropout=dropout,
            lifting=self.lifts,
            group=finite,
        )
        if self._places and self.lifts:
            self.pattern = "framewise"  # the query differs between the frames of the output
        elif self._places and pattern == "query_sum":
            need = "'joint' or 'framewise' for absolute encodings of queries (encoded='features')"
            raise ValueError(f"pattern: expected {need}, got 'query_sum'")

    @property
    def _places(self) -> list[CoordinateEncoding]:
        """Encodings of the positions of queries and keys, in place of relative ones."""
        parts = () if self.encoding is None or self.encoded == "key" else self.encoding.modules()
        return [part for part in parts if isinstance(part, CoordinateEncoding) and part.absolute]

    def operate(
        self, query: Tensor | None, key: Tensor | None, value: Tensor, graph: LiftedGraph, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        for part in self._places:
            with without_autocast(value.device):
                code = cast(Tensor, part(graph).positional_key)[:, :, 0] @ cast(nn.Linear, self.query).weight.T
            query = cast(Tensor, query) + self._split(code).to(value.dtype)
            key, value = (cast(Tensor, x).expand(-1, graph.fiber, -1, -1) for x in (key, value))
        return super().operate(query, key, value, graph, *args, **options)

    def _linear(self, in_channels: int, out_channels: int) -> nn.Module:
        return nn.Linear(in_channels, out_channels)

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        terms = super()._terms(x, graph)
        if self.encoded == "key":
            return terms
        weight = cast(nn.Linear, self.key).weight
        with without_autocast(x.device):
            names = ("positional_key", "fiber_key")
            found = {name: code for name in names if (code := getattr(terms, name)) is not None}
            codes: Any = {name: self._split(code[..., 0, :] @ weight.T) for name, code in found.items()}
            return replace(terms, **codes)


class LiftingSelfAttention(GroupSelfAttention):
    r"""Lifting self-attention of GSA-Nets (Eq. 14), from features of points to a field on the group.

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_{j \in N(i)} \operatorname{softmax}_j
        \big( \langle q_e(x_i), k_e(x_j) + \rho(h^{-1}(x_j - x_i)) \rangle / \sqrt{C_{in}} \big) v_e(x_j)

    The parameters are those of :class:`GroupSelfAttention`, with the pattern ``"query_sum"``. On a fiber of scales, all
    nodes of a point have its features. The values are features alone, so the output is constant if these are, wherever
    the points are. For such data, ``encoding=[CoordinateEncoding(dim, width), PositionalValues(dim, heads, width)]``
    adds values that depend on positions, as in ``GSANet``; ``width`` is the channels of a head.

    **Equivariance.** If (t, h) in R^d ⋊ H acts on the points and the features stay with their points, f'(·, a) becomes
    f'(·, h⁻¹a). This is exact for every H if neighborhoods are balls.
    """

    lifts = True


class FramewiseAttention(GroupAttention):
    r"""Rotary self-attention within each frame, with group-tied projections.

    If :math:`R_a(x)` rotates pairs of channels by the angles of :class:`lieattn.nn.relative.RotaryPhases`, the layer
    computes

    .. math::
        f'(x_i, a) = W_o R_a(x_i)^{-1} \sum_j \operatorname{softmax}_j
        \big( \langle R_a(x_i) q(x_i, a), R_a(x_j) k(x_j, a) \rangle / \sqrt d \big) R_a(x_j) v(x_j, a) .

    Scores and values depend on positions through :math:`h_a^{-1}(x_j - x_i)`. Since the values do, the output depends
    on the geometry even if features are constant.

    **Equivariance.** That of :class:`GroupAttention`.

    **Cost.** On whole clouds (``AllPairs``) it is torch's scaled dot product attention with |H| times as many heads.

    Parameters
    ----------
    group, channels, heads, dropout
        See :class:`GroupAttention`. The number of channels of a head must be even (otherwise ValueError).
    encoding
        ``RotaryEncoding(group.dim, heads, channels // heads, values=True)``, or None if a network sets ``graph.terms``.
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
        check_arguments(FramewiseAttention.__init__, locals())
        check_counts(channels=channels, heads=heads)
        if channels % (2 * heads):
            raise ValueError(f"heads: {channels} channels cannot be split into {heads} heads of even width")
        super().__init__(
            channels, channels, heads=heads, pattern="framewise", encoding=encoding, dropout=dropout, group=group
        )

    def _build(self, channels: int, out_channels: int) -> None:
        group = cast(FiniteGroup, self.group)
        self.projection = GroupLinear(group, self.in_channels, 3 * channels)
        self.output = GroupLinear(group, channels, out_channels)

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return cast(tuple[Tensor, Tensor, Tensor], self.projection(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2))


class LieSelfAttention(GroupAttention):
    r"""Self-attention of LieTransformer (arXiv 2012.10885, Algorithm 1): :class:`GroupAttention` in the joint pattern.

    The kernel is the score before normalization:

    * ``"sum"``: ⟨q, k⟩ / √d + network(g⁻¹ g'), ``mlp`` in the authors' code;
    * ``"content"``: only the first summand; ``"location"``: only the second summand;
    * ``"relative_position"``: (⟨q, k⟩ + ⟨E(g⁻¹ g'), q + v⟩ + ⟨u, k⟩) / √d;
    * ``"combined"``: a network of features and g⁻¹ g' together, see :class:`lieattn.nn.relative.CombinedScore`.

    ``lieattn.models.published.published_kernel`` translates the authors' names and four-digit codes.

    **Equivariance.** That of :class:`GroupAttention`.

    Parameters
    ----------
    channels, heads, dropout
        See :class:`GroupAttention`. ``heads`` must divide ``channels`` (otherwise ValueError).
    coordinates, kernel
        Number of coordinates of a relative element, ``graph.relative.num_coordinates``; kernel as above.
    normalize
        ``"softmax"``, ``"mean"`` or ``"exp-mean"``, see :func:`lieattn.ops.group_attention`.
    hidden, activation
        See :class:`lieattn.nn.relative.PerHeadMLP`.
    features, location, feature_channels
        Options of the kernel ``"combined"``.
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
        check_arguments(LieSelfAttention.__init__, locals())
        check_counts(channels=channels, coordinates=coordinates, heads=heads)
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of {channels} channels, got {heads}")
        check_choice("normalize", normalize, ("softmax", "mean", "exp-mean"))
        super().__init__(channels, channels, heads=heads, normalize=normalize, dropout=dropout)
        combined = {"features": features, "location": location, "feature_channels": feature_channels}
        self.score = pair_score(kernel, channels, coordinates, heads, hidden, activation, **combined)
        self.value, self.output = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def _build(self, channels: int, out_channels: int) -> None:
        """Do nothing, since the score has queries and keys, and its parameters are registered first."""

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return *self.score.project(x), self._split(self.value(x))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        return self.score(graph, x)

    def scores(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Return the scores before normalization, ``[edges, fiber, fiber, heads]``."""
        x = self.checked(x, graph)
        found = self.operate(*self.project(x), graph, self.terms(x, graph), normalize="none", return_weights=True)
        return cast(Tensor, found[1])
