"""Affine Self Convolution: attention whose queries, keys and values are affine functions of the relative element."""

from __future__ import annotations

import abc
import math
from dataclasses import replace
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout, check_features
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn._affine_tables import AffinePositions, OffsetTable, SmoothDisplacements
from lieattn.nn._linear import GroupLinear
from lieattn.ops import Normalization, RelativeTerms, group_attention


class _AffineAttention(nn.Module, abc.ABC):
    """What the layers of this file share: their sizes, and the call of the operator.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels per frame.
    positions
        What psi and beta are: :class:`OffsetTable` for grids, :class:`SmoothDisplacements` for point clouds.
    channels
        Channels of queries, keys and values, over all heads; out_channels if absent.
    heads
        Heads, which take consecutive channels.
    scale
        Factor s of the scores; 1 / channels if absent, as in the paper.
    normalize
        See :func:`lieattn.ops.group_attention`.
    dropout
        On the attention weights.
    """

    lifting: ClassVar[bool] = False

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
    ) -> None:
        super().__init__()
        check_group("group", group)
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        channels = out_channels if channels is None else channels
        check_count("channels", channels)
        check_count("heads", heads)
        if channels % heads:
            raise ValueError(f"heads: {heads} heads do not divide {channels} channels")
        if not isinstance(positions, OffsetTable | SmoothDisplacements):
            raise TypeError(f"positions: expected an OffsetTable or SmoothDisplacements, got {positions!r}")
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
        if normalize not in get_args(Normalization):
            raise ValueError(f"normalize: expected one of {get_args(Normalization)}, got {normalize!r}")
        check_dropout("dropout", dropout)
        self.group, self.positions = group, positions
        self.in_channels, self.channels, self.heads = in_channels, channels, heads
        # The paper divides by all channels, neither by their root nor by those of a head.
        self.scale = 1 / channels if scale is None else scale
        self.normalize: Normalization = normalize
        self.dropout = dropout
        self._build()
        self.output = GroupLinear(group, channels, out_channels, bias=False)

    @abc.abstractmethod
    def _build(self) -> None:
        """Make embeddings and affine maps."""

    @abc.abstractmethod
    def _operands(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, Tensor, Tensor, RelativeTerms]:
        """Query, key and value ``[points, fiber, channels]``, and terms with heads apart."""

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, in_channels]`` (for lifting, without fiber) to ``[points, fiber, out_channels]``."""
        return self.attend(x, graph)[0]

    def attend(self, x: Tensor, graph: LiftedGraph, *, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Field and, if asked for, weights ``[edges, fiber, heads]`` on the edges of ``positions.edges(graph)``."""
        self._check(x, graph)
        query, key, value, terms = self._operands(x[:, None] if self.lifting else x, graph)
        edges = self.positions.edges(graph)

        def prepared(signal: Tensor) -> Tensor:
            # The ghost, one point more, has an embedding of zero.
            padded = F.pad(signal, (0, 0, 0, 0, 0, 1)) if edges.ghost else signal
            return padded.unflatten(-1, (self.heads, -1))

        values = prepared(value)
        out, weights = group_attention(
            prepared(query),
            values if key is value else prepared(key),
            values,
            edges.neighbors,
            pattern="pooled",
            normalize=self.normalize,
            terms=replace(terms, row=edges.index),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )
        return self.output(out[: graph.num_points].flatten(-2)), weights

    def _check(self, x: Tensor, graph: LiftedGraph) -> None:
        check_features(x, self.output.weight)
        if graph.group != self.group:
            raise ValueError(f"graph: is lifted to {graph.group.name}, this layer is for {self.group.name}")
        fiber = () if self.lifting else (self.group.order,)
        expected = (graph.num_points, *fiber, self.in_channels)
        if x.shape != expected:
            what = "features [points, channels]" if self.lifting else "a field [points, fiber, channels]"
            raise ValueError(f"x: expected {what} = {expected}, got {tuple(x.shape)}")

    def _terms(self, key: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor]) -> RelativeTerms:
        """Tables psi ``[types, out, key, channels]`` and beta ``[types, out, channels]`` as terms."""
        psi, beta = (table.unflatten(-1, (self.heads, -1)) for table in value)
        key_psi, key_beta = (psi, beta) if key is value else (table.unflatten(-1, (self.heads, -1)) for table in key)
        return RelativeTerms(key_psi=key_psi, positional_key=key_beta, psi=psi, beta=beta[:, :, None])


class AffineSelfConvolution(_AffineAttention):
    r"""Affine Self Convolution on the group (Diaconu, Worrall 2019, Eqs. 8-11 and 17-20), from a field to a field.

    With Q, K and V group-tied linear maps of the field, each with an affine map of its own,

    .. math::
        A(h, x; y) = \sum_m \psi(h^{-1} m, h^{-1}(y - x)) f(m, y) + \beta(h^{-1}(y - x))

    channel by channel, where beta is added once for each neighbor (Eq. 24), a head computes

    .. math::
        z(h, x) = \sum_{y \in N(x)} \operatorname{softmax}_y
        \big( s \langle A^Q(h, x; x), A^K(h, x; y) \rangle \big) A^V(h, x; y)

    with one weight for a neighbor and all of its frames, and the heads are joined by a group-tied linear map.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, the output is
    translated by h. Exact for every H where neighborhoods are balls, and on grids for those that keep the window.

    **Cost.** Time O(edges |H|² channels). Memory of a few points' edges, since portions are computed again for the
    gradient; but a network as psi has a table of edges x |H|² x channels where displacements do not repeat.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels per frame.
    positions
        What psi and beta are: :class:`OffsetTable` for grids, :class:`SmoothDisplacements` for point clouds.
    channels
        Channels of queries, keys and values, over all heads; out_channels if absent.
    heads
        Heads, which take consecutive channels.
    scale
        Factor s of the scores; 1 / channels if absent, as in the paper.
    normalize
        See :func:`lieattn.ops.group_attention`.
    dropout
        On the attention weights.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import PixelSquare, lift, pixel_positions
    >>> from lieattn.groups import cyclic
    >>> from lieattn.nn import AffineSelfConvolution, OffsetTable
    >>> layer = AffineSelfConvolution(cyclic(4), 3, 8, OffsetTable.square(5, border="zero"), heads=2)
    >>> graph = lift(pixel_positions(6, 6), cyclic(4), PixelSquare(5))
    >>> layer(torch.randn(36, 4, 3), graph).shape
    torch.Size([36, 4, 8])
    """

    def _build(self) -> None:
        self.query = GroupLinear(self.group, self.in_channels, self.channels)
        self.key = GroupLinear(self.group, self.in_channels, self.channels)
        self.value = GroupLinear(self.group, self.in_channels, self.channels)
        self.query_map = FiberAffine(self.group, self.channels)
        self.key_map = self.positions.affine_map(self.group, self.channels)
        self.value_map = self.positions.affine_map(self.group, self.channels)

    def _operands(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, Tensor, Tensor, RelativeTerms]:
        terms = self._terms(self.key_map(graph), self.value_map(graph))
        return self.query_map(self.query(x)), self.key(x), self.value(x), terms


class LiftingAffineSelfConvolution(_AffineAttention):
    r"""Affine Self Convolution from features on points to a field on the group.

    As :class:`AffineSelfConvolution`, whose parameters it has, with one frame of queries, keys and values: psi depends
    on the displacement :math:`h^{-1}(y - x)` alone, and the frame h of the output enters by it.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the features stay with their points, the output
    is translated by h.
    """

    lifting = True

    def _build(self) -> None:
        self.query = nn.Linear(self.in_channels, self.channels)
        self.key = nn.Linear(self.in_channels, self.channels)
        self.value = nn.Linear(self.in_channels, self.channels)
        self.query_map = FiberAffine(self.group, self.channels, lifting=True)
        self.key_map = self.positions.affine_map(self.group, self.channels, lifting=True)
        self.value_map = self.positions.affine_map(self.group, self.channels, lifting=True)

    def _operands(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, Tensor, Tensor, RelativeTerms]:
        terms = self._terms(self.key_map(graph), self.value_map(graph))
        return self.query_map(self.query(x)), self.key(x), self.value(x), terms


class SimpleAffineSelfConvolution(_AffineAttention):
    r"""Simple Affine Self Convolution (Diaconu, Worrall 2019, Eqs. 7 and 12-14), from a field to a field.

    One affine map A of one embedding is query, key and value:

    .. math::
        z(h, x) = \sum_{y \in N(x)} \operatorname{softmax}_y
        \big( s \langle A(h, x; x), A(h, x; y) \rangle \big) A(h, x; y) .

    **Equivariance.** That of :class:`AffineSelfConvolution`, whose parameters it has.
    """

    def _build(self) -> None:
        self.embedding = GroupLinear(self.group, self.in_channels, self.channels)
        self.affine_map = self.positions.affine_map(self.group, self.channels)
        self.affine_map.center()  # refuses windows without it

    def _operands(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, Tensor, Tensor, RelativeTerms]:
        embedded, tables = self.embedding(x), self.affine_map(graph)
        psi, beta = self.affine_map.center()
        query = fiber_affine(embedded, psi, beta, self.affine_map.relative)
        return query, embedded, embedded, self._terms(tables, tables)


class StandAloneSelfAttention(_AffineAttention):
    r"""Stand-alone self-attention, the baseline of the paper: psi = 1, and beta for the keys alone.

    .. math::
        z(h, x) = \sum_{y \in N(x)} \operatorname{softmax}_y
        \big( s \langle \textstyle\sum_m q(m, x), \sum_m k(m, y) + \beta(h^{-1}(y - x)) \rangle \big)
        \sum_m v(m, y)

    The first channels of a head's beta depend on the first coordinate of the displacement alone, the next ones on the
    second, and so on.

    **Equivariance.** That of :class:`AffineSelfConvolution`, whose parameters it has.
    """

    def _build(self) -> None:
        self.query = GroupLinear(self.group, self.in_channels, self.channels)
        self.key = GroupLinear(self.group, self.in_channels, self.channels)
        self.value = GroupLinear(self.group, self.in_channels, self.channels)
        self.axis_keys = self.positions.axis_keys(self.group, self.heads, self.channels // self.heads)

    def _operands(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, Tensor, Tensor, RelativeTerms]:
        query = self.query(x).sum(dim=1, keepdim=True)
        return query, self.key(x), self.value(x), RelativeTerms(positional_key=self.axis_keys(graph))


class FiberAffine(nn.Module):
    r"""The affine map of a query, at displacement 0: channel by channel, over the fiber of one point.

    .. math::  f'_c(x, h) = \sum_m \psi_c(h^{-1} m) f_c(x, m) + \beta_c

    **Equivariance.** It commutes with the left regular representation of H.

    Parameters
    ----------
    group
        H.
    channels
        Channels per frame.
    lifting
        Whether there is one frame, psi then being a number for each channel.
    """

    relative: Tensor

    def __init__(self, group: FiniteGroup, channels: int, *, lifting: bool = False) -> None:
        super().__init__()
        check_group("group", group)
        check_count("channels", channels)
        self.psi = nn.Parameter(torch.randn(1 if lifting else group.order, channels))
        self.beta = nn.Parameter(torch.randn(channels))
        relative = torch.zeros(1, 1, dtype=torch.int64) if lifting else group.relative_index.clone()
        self.register_buffer("relative", relative, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Field ``[points, fiber, channels]`` to one of the same shape."""
        return fiber_affine(x, self.psi, self.beta, self.relative)


def fiber_affine(x: Tensor, psi: Tensor, beta: Tensor, relative: Tensor) -> Tensor:
    """Field ``[points, fiber, channels]`` times psi ``[frames, channels]`` at h⁻¹m, summed over m, plus beta."""
    return torch.einsum("pmc,hmc->phc", x, psi[relative]) + beta
