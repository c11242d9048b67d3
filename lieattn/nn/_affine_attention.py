"""The attention layers of Affine Self Convolution, as presets of :class:`GroupAttention`."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.contexts import without_autocast
from lieattn._core.numerics import KeptTables
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup
from lieattn.nn._attention import GroupAttention
from lieattn.nn._linear import GroupLinear
from lieattn.nn.relative._affine import AffineEdges, AffineMap, AffinePositions, AxisKeys, factors, for_keys
from lieattn.ops import Normalization, RelativeTerms


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

    def attend(self, x: Tensor, graph: LiftedGraph, *, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with ``return_weights``, the weights on the edges of ``positions.edges(graph)``.

        The weights are ``[edges, fiber, heads]``, or ``[edges, fiber, fiber, heads]`` with an axis of key frames if
        ``pairwise``.
        """
        x = self.checked(x, graph)
        edges = self.positions.edges(graph)
        query, key, value = self.project(x)
        values = _padded(value, edges)
        out, weights = self.operate(
            _padded(cast(Tensor, query), edges),
            values if key is value else _padded(cast(Tensor, key), edges),
            values,
            graph,
            replace(self.terms(x, graph), row=edges.index),
            return_weights=return_weights,
            neighbors=edges.neighbors,
        )
        return self.output(out[: graph.num_points].flatten(-2)), weights

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
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

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
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

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
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

    def forward(self, x: Float[Tensor, "points fiber channels"]) -> Float[Tensor, "points fiber outputs"]:
        return fiber_affine(x, self.psi, self.beta, self.relative)


def fiber_affine(x: Tensor, psi: Tensor, beta: Tensor, relative: Tensor) -> Tensor:
    """Return Σ_m ψ(h⁻¹m) x(m) + β for x ``[points, fiber, channels]``; ψ is ``[frames, channels]``, or has matrices."""
    return torch.einsum("pmc,hmc->phc" if psi.ndim == 2 else "pmd,hmcd->phc", x, psi[relative]) + beta
