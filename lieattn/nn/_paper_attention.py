"""The attention layers of the papers, as presets of :class:`GroupAttention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._autocast import without_autocast
from lieattn._checks import check_arguments, check_choice, check_count, check_counts, check_is
from lieattn._exact import KeptTables
from lieattn.geometry import LiftedGraph, num_coordinates
from lieattn.groups import FiniteGroup
from lieattn.nn._attention import GroupAttention, checked_head_channels
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative import (
    AffineMap,
    AffinePositions,
    AxisKeys,
    CoordinateEncoding,
    FeaturePart,
    Kernel,
    LocationPart,
    PerHeadMLP,
    RelativeFunction,
    pair_score,
)
from lieattn.nn.relative._affine import AffineEdges, factors, for_keys
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

    With ``"joint"`` the output frame is the query frame (LieTransformer); ``"framewise"`` attends within each frame.

    **Equivariance.** That of :class:`GroupAttention`. It is exact for every H if neighborhoods are balls.

    Parameters
    ----------
    group
        H; or a homogeneous space, for which the frames are chosen in the lift. For a space, pairs of frames are encoded
        by a network of the relative element in place of a table.
    encoding
        Positional encoding; if absent, the network of GSA-Nets for each coordinate. With ``[]`` there is no encoding:
        the layer does not depend on positions, and on whole clouds it commutes with all permutations (GSA-Nets,
        Proposition 4.1).
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
    ) -> None:
        check_arguments(GroupSelfAttention.__init__, locals())
        check_choice("pattern", pattern, ("query_sum",) if self.lifts else ("joint", "framewise", "query_sum"))
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
            # The authors divide by the square root of the input channels of the layer, not of the channels of a head.
            scale=1 / math.sqrt(in_channels),
            dropout=dropout,
            lifting=self.lifts,
            group=finite,
        )

    def _linear(self, in_channels: int, out_channels: int) -> nn.Module:
        return nn.Linear(in_channels, out_channels)


class LiftingSelfAttention(GroupSelfAttention):
    r"""Lifting self-attention of GSA-Nets (Eq. 14), from features of points to a field on the group.

    .. math::
        f'(x_i, h) = b + \sum_e W_e \sum_{j \in N(i)} \operatorname{softmax}_j
        \big( \langle q_e(x_i), k_e(x_j) + \rho(h^{-1}(x_j - x_i)) \rangle / \sqrt{C_{in}} \big) v_e(x_j)

    The parameters are those of :class:`GroupSelfAttention`, with the pattern ``"query_sum"``. On a fiber of scales, all
    nodes of a point have its features.

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
        ``RotaryEncoding(group.dim, heads, channels // heads, values=True)``, or None if a network passes the terms to
        :meth:`forward`.
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

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
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

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return *self.score.project(x), self._split(self.value(x))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        return self.score(graph, x)

    def scores(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Return the scores before normalization, ``[edges, fiber, fiber, heads]``."""
        x = self._checked(x, graph)
        found = self._operate(*self._project(x), graph, self._terms(x, graph), normalize="none", return_weights=True)
        return cast(Tensor, found[1])


class _AffineAttention(GroupAttention):
    """Base class of Affine Self Convolutions: the pooled pattern with affine maps, and a group-tied output."""

    lifts: ClassVar[bool] = False
    group: FiniteGroup

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        positions: AffinePositions,
        *,
        channels: int | None = None,
        heads: int = 1,
        scale: float | None = None,
        normalize: Normalization = "softmax",
        dropout: float = 0.0,
        full_psi: bool = False,
        pairwise: bool = False,
    ) -> None:
        check_arguments(_AffineAttention.__init__, locals())
        check_counts(in_channels=in_channels, out_channels=out_channels)
        self.channels = out_channels if channels is None else channels
        check_counts(channels=self.channels, heads=heads)
        if self.channels % heads:
            raise ValueError(f"heads: {heads} heads do not divide {self.channels} channels")
        self.positions, self.full_psi = positions, full_psi
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            head_channels=self.channels // heads,
            # Features of points have no frames to distinguish.
            pattern="joint" if pairwise and not self.lifts else "pooled",
            normalize=normalize,
            # The paper divides by the number of all channels, not by its square root or by the channels of a head.
            scale=1 / self.channels if scale is None else scale,
            dropout=dropout,
            lifting=self.lifts,
            group=group,
        )

    def _build(self, channels: int, out_channels: int) -> None:
        self._embed(channels)
        self.output = GroupLinear(self.group, channels, out_channels, bias=False)

    def _embed(self, channels: int) -> None:
        """Create embeddings and affine maps."""
        self._build_projections(channels)
        self.query_map = FiberAffine(self.group, channels, lifting=self.lifting, full=self.full_psi)
        self.key_map, self.value_map = (self._affine_map(channels) for _ in range(2))

    def _affine_map(self, channels: int) -> AffineMap:
        options = {"lifting": self.lifting, "full": self.full_psi}
        return self.positions.affine_map(self.group, channels, heads=self.heads, **options)

    def attend(
        self, x: Tensor, graph: LiftedGraph, terms: RelativeTerms | None = None, *, return_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with ``return_weights``, the weights on the edges of ``positions.edges(graph)``.

        The weights are ``[edges, fiber, heads]``, or ``[edges, fiber, fiber, heads]`` with an axis of key frames if
        ``pairwise``.
        """
        x = self._checked(x, graph)
        if terms is not None:
            check_is("terms", terms, RelativeTerms)
        edges = self.positions.edges(graph)
        query, key, value = self._project(x)
        terms = self._terms(x, graph) if terms is None else terms
        values = _padded(value, edges)
        out, weights = self._operate(
            _padded(cast(Tensor, query), edges),
            values if key is value else _padded(cast(Tensor, key), edges),
            values,
            graph,
            replace(terms, row=edges.index),
            return_weights=return_weights,
            neighbors=edges.neighbors,
        )
        return self.output(out[: graph.num_points].flatten(-2)), weights

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        query, key, value = self.query_map(self.query(x)), self.key(x), self.value(x)
        return self._split(query), self._split(key), self._split(value)

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        with without_autocast(x.device):
            return self.value_map(graph).plus(for_keys(self.key_map(graph)))


def _padded(signal: Tensor, edges: AffineEdges) -> Tensor:
    # The padding is an additional point whose embedding is zero.
    return F.pad(signal, (0, 0, 0, 0, 0, 0, 0, 1)) if edges.padding else signal


class AffineSelfConvolution(_AffineAttention):
    r"""Affine Self Convolution on the group (Diaconu, Worrall 2019, Eqs. 8-11 and 17-20), from a field to a field.

    Q, K and V are group-tied linear maps of the field, each followed by its own affine map, channel by channel,

    .. math::
        A(h, x; y) = \sum_m \psi(h^{-1} m, h^{-1}(y - x)) f(m, y) + \beta(h^{-1}(y - x)),

    where beta is added once for each neighbor (Eq. 24). A head computes

    .. math::
        z(h, x) = \sum_{y \in N(x)} \operatorname{softmax}_y
        \big( s \langle A^Q(h, x; x), A^K(h, x; y) \rangle \big) A^V(h, x; y)

    with one weight for a neighbor and all of its frames. A group-tied linear map joins the heads.

    With ``pairwise`` scores, the softmax is over pairs (y, m), and each term of the sum over frames has its own beta:

    .. math::
        z(h, x) = \sum_{y \in N(x)} \sum_m \operatorname{softmax}_{y, m}
        \big( s \langle A^Q(h, x; x), A^K_m(h, x; y) \rangle \big) A^V_m(h, x; y), \qquad
        A_m(h, x; y) = \psi(h^{-1} m, h^{-1}(y - x)) f(m, y) + \beta(h^{-1}(y - x)) .

    **Equivariance.** If (t, h) in R^d ⋊ H acts on the points and the field is translated by h, the output is translated
    by h. This is exact for every H if neighborhoods are balls, and on grids for every H that preserves the window.

    **Cost.** The time is O(edges |H|² channels). If psi is a network, its table has edges x |H|² x channels entries.
    With full matrices as psi, both are larger by the number of channels. Pairwise scores store a key and a value for
    each pair of frames.

    Parameters
    ----------
    group, in_channels, out_channels, heads, normalize, dropout
        See :class:`GroupAttention`.
    positions
        Form of psi and beta: :class:`lieattn.nn.relative.RelativePositionTable` for grids, or
        :class:`lieattn.nn.relative.FourierFeatures` for point clouds.
    channels
        Channels of queries, keys and values, over all heads; out_channels if absent.
    scale
        Factor s of the scores; 1 / channels if absent, as in the paper.
    full_psi
        Whether psi is a matrix that mixes the channels, in place of a factor for each channel as in the paper, which
        costs less.
    pairwise
        Whether each frame of a neighbor has its own score. The parameters are the same.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import PixelSquare, lift, pixel_positions
    >>> from lieattn.groups import cyclic
    >>> from lieattn.nn import AffineSelfConvolution
    >>> from lieattn.nn.relative import RelativePositionTable
    >>> layer = AffineSelfConvolution(cyclic(4), 3, 8, RelativePositionTable.square(5, border="zero"), heads=2)
    >>> graph = lift(pixel_positions(6, 6), cyclic(4), PixelSquare(5))
    >>> layer(torch.randn(36, 4, 3), graph).shape
    torch.Size([36, 4, 8])
    """


class LiftingAffineSelfConvolution(_AffineAttention):
    """:class:`AffineSelfConvolution` from features of points to a field; psi depends on the displacement only.

    **Equivariance.** If (t, h) in R^d ⋊ H acts on the points and the features stay with their points, the output is
    translated by h.
    """

    lifts = True


class SimpleAffineSelfConvolution(_AffineAttention):
    r"""Simple Affine Self Convolution (Diaconu, Worrall 2019, Eqs. 7 and 12-14), from a field to a field.

    Query, key and value are the same affine map A of one embedding:

    .. math::
        z(h, x) = \sum_{y \in N(x)} \operatorname{softmax}_y
        \big( s \langle A(h, x; x), A(h, x; y) \rangle \big) A(h, x; y) .

    The parameters are those of :class:`AffineSelfConvolution`. ValueError is raised if the window does not contain
    displacement 0.

    **Equivariance.** That of :class:`AffineSelfConvolution`.
    """

    def _embed(self, channels: int) -> None:
        self.embedding = GroupLinear(self.group, self.in_channels, channels)
        self.affine_map = self._affine_map(channels)
        self.affine_map.center()  # raises ValueError if the window has no center

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        embedded = self.embedding(x)
        query = fiber_affine(embedded, *self.affine_map.center(), self.affine_map.relative)
        shared = self._split(embedded)
        return self._split(query), shared, shared

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        with without_autocast(x.device):
            values = self.affine_map(graph)
        return values.plus(for_keys(values))


class StandAloneSelfAttention(_AffineAttention):
    r"""Stand-alone self-attention, the baseline of Affine Self Convolution: psi is 1, and only keys have a beta.

    .. math::
        z(h, x) = \sum_{y \in N(x)} \operatorname{softmax}_y
        \big( s \langle \textstyle\sum_m q(m, x), \sum_m k(m, y) + \beta(h^{-1}(y - x)) \rangle \big)
        \sum_m v(m, y)

    The first channels of the beta of a head depend on the first coordinate of the displacement only, the next ones on
    the second coordinate, and so on. The parameters are those of :class:`AffineSelfConvolution`; ``full_psi`` raises
    ValueError.

    **Equivariance.** That of :class:`AffineSelfConvolution`.
    """

    def _embed(self, channels: int) -> None:
        if self.full_psi:
            raise ValueError("full_psi: expected False, since here psi is 1; for others use AffineSelfConvolution")
        self._build_projections(channels)
        self.axis_keys: AxisKeys = self.positions.axis_keys(self.group, self.heads, channels // self.heads)

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        query = self.query(x).sum(dim=1, keepdim=True)
        if self.pattern == "joint":  # this pattern needs a query for each frame
            query = query.expand(-1, self.group.order, -1)
        return self._split(query), self._split(self.key(x)), self._split(self.value(x))

    def _terms(self, x: Tensor, graph: LiftedGraph) -> RelativeTerms:
        with without_autocast(x.device):
            return self.axis_keys(graph)


class FiberAffine(KeptTables):
    """The affine map of a query, at displacement 0; for ``lifting`` there is one key frame."""

    relative: Tensor

    def __init__(self, group: FiniteGroup, channels: int, *, lifting: bool = False, full: bool = False) -> None:
        super().__init__()
        self.psi = nn.Parameter(factors(1 if lifting else group.order, channels, full=full))
        self.beta = nn.Parameter(torch.randn(channels))
        relative = torch.zeros(1, 1, dtype=torch.int64) if lifting else group.relative_index.clone()
        self.register_buffer("relative", relative, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return fiber_affine(x, self.psi, self.beta, self.relative)


def fiber_affine(x: Tensor, psi: Tensor, beta: Tensor, relative: Tensor) -> Tensor:
    """Return Σ_m ψ(h⁻¹m) x(m) + β for x ``[points, fiber, channels]``; ψ is ``[frames, channels]``, or has matrices."""
    return torch.einsum("pmc,hmc->phc" if psi.ndim == 2 else "pmd,hmcd->phc", x, psi[relative]) + beta
