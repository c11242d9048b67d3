"""The finite SE(2) variant of LieTransformer: set-transformer blocks on R^2 ⋊ C_n."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_choice, check_counts, check_size
from lieattn._core.numerics import LayerNorm
from lieattn.geometry import AllPairs, LiftedGraph, Neighborhood, lift, padding
from lieattn.groups import cyclic
from lieattn.models._base.inputs import in_precision_of_weights
from lieattn.models._base.lifted import without_lattice
from lieattn.models._base.network import GroupField, Network
from lieattn.models._base.symmetry import Symmetry, of_squares
from lieattn.nn.relative import graph_attention
from lieattn.ops import Normalization, RelativeTerms, smooth_lengths

Content = Literal["constant", "pairwise_distances", "centroidal"]


class FiniteSE2Transformer(Network):
    """Attention on R^2 ⋊ C_n with blocks as in set transformers, from positions alone (arXiv 2012.10885, code).

    Every layer computes o = V f + Σ A V f and then o + relu(W o), each optionally followed by a layer normalization.
    The scores are q k / √channels plus a network, for each head, of (h_a⁻¹ (x_j - x_i), index of h_a⁻¹ h_b).

    **Equivariance.** Outputs are invariant to translations and to C_n acting on the positions, exactly up to rounding,
    if the neighborhoods rotate with the points.

    Parameters
    ----------
    rotations
        Order n of C_n.
    out_channels
        Number of outputs for each cloud, or for each seed.
    channels, layers, heads, normalize, layer_norm, hidden
        Sizes and options of the attention layers. ``hidden`` is the number of hidden units in the score network of each
        head; ``normalize`` is ``"softmax"`` or ``"mean"``.
    content, moments
        Initial features of an element: ``"pairwise_distances"``, a network of the mean of the powers 1 ... moments of
        the distances from its point to those of the cloud; ``"centroidal"``, a network of h_a⁻¹ (x_i - center);
        ``"constant"``, one learned vector, with which layers with a softmax do not depend on positions.
    seeds
        With 0, the read-out is the mean over all elements followed by two linear maps (``only_eqv_sa``). Otherwise this
        number of learned queries attends to all elements, followed by a set block and a linear map (``set_transf``).
    neighborhood
        Neighbors that each point attends to; whole clouds if absent.
    """

    has_kinks = True  # because of relu

    def __init__(
        self,
        rotations: int = 4,
        out_channels: int = 1,
        *,
        channels: int = 64,
        layers: int = 4,
        heads: int = 4,
        content: Content = "pairwise_distances",
        moments: int = 5,
        normalize: Normalization = "softmax",
        layer_norm: bool = False,
        seeds: int = 0,
        neighborhood: Neighborhood | None = None,
        hidden: int = 3,
    ) -> None:
        check_arguments(FiniteSE2Transformer.__init__, locals())
        super().__init__()
        check_counts(rotations=rotations, out_channels=out_channels, channels=channels, layers=layers)
        check_counts(heads=heads, moments=moments, hidden=hidden)
        check_counts(0, seeds=seeds)
        check_choice("normalize", normalize, ("softmax", "mean"))
        self.group = cyclic(rotations)
        self.neighborhood: Neighborhood = AllPairs() if neighborhood is None else neighborhood
        self.content, self.moments = content, moments
        if content == "constant":
            self.constant = nn.Parameter(torch.randn(channels))
        else:
            self.embed = _two_linears(moments if content == "pairwise_distances" else 2, channels, channels)
        self.layers = nn.ModuleList(
            FiniteSE2Layer(channels, heads, normalize, layer_norm, hidden) for _ in range(layers)
        )
        self.seeds = nn.Parameter(torch.randn(seeds, channels) / math.sqrt(channels)) if seeds else None
        if self.seeds is None:
            self.head: nn.Module = _two_linears(channels, channels, out_channels)
        else:
            self.pool, self.decoder = (SetBlock(channels, heads, layer_norm) for _ in range(2))
            self.head = nn.Linear(channels, out_channels)

    @property
    def symmetry(self) -> Symmetry:
        return of_squares(Symmetry(self.group, acting="the positions"), self.neighborhood)

    def rounded_positions(self, data: Any, dtype: torch.dtype) -> Tensor:
        """Return the positions of data in a dtype; contents of centers see padded points at the origin, ``slots``."""
        return (
            cast(Tensor, data.pos.to(dtype)) if self.content == "centroidal" else super().rounded_positions(data, dtype)
        )

    @in_precision_of_weights
    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the positions to R^2 ⋊ C_n; ValueError is raised for periodic clouds."""
        return lift(without_lattice(data, type(self).__name__), self.group, self.neighborhood, length=1.0)

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None, slots: int | None = None) -> GroupField:
        if slots is not None:
            check_counts(slots=slots)
        graph = self.geometry(data) if geometry is None else geometry
        x = self._contents(graph, slots)
        for layer in self.layers:
            x = self._through(layer, x, graph)
        return GroupField(x, graph)

    @in_precision_of_weights
    def forward(self, data: Any, geometry: LiftedGraph | None = None, slots: int | None = None) -> Tensor:
        """Return outputs ``[clouds, out_channels]`` or ``[clouds, seeds, out_channels]``; see :meth:`Network.field`.

        If ``slots`` is given, means over a cloud are sums divided by ``slots``, as in the authors' code, which counts
        padded points at the origin.
        """
        x, graph = self.field(data, geometry, slots)
        pooled = _mean(x.mean(dim=1), graph, slots) if self.seeds is None else self._attended(self.seeds, x, graph)
        return cast(Tensor, self.head(pooled))

    def _contents(self, graph: LiftedGraph, slots: int | None) -> Tensor:
        shape = (graph.num_points, self.group.order, -1)
        if self.content == "constant":
            return self.constant.expand(shape)
        dtype = next(self.embed.parameters()).dtype
        if self.content == "centroidal":
            centered = graph.pos - _mean(graph.pos, graph, slots)[graph.batch]
            return self.embed(graph.seen_in_frames(centered[:, None])[:, :, 0].to(dtype))
        known = self.neighborhood == AllPairs()
        whole = graph.neighbors if known else AllPairs()(graph.pos.detach(), graph.batch)
        distance = smooth_lengths(whole.displacements(graph.pos))
        powers = distance[:, None] ** torch.arange(1, self.moments + 1, device=distance.device)
        mean = whole.sum_to_targets(powers) / whole.degree[:, None]
        check_size(f"data.pos: {self.moments} powers of distances", mean)
        return self.embed(mean.to(dtype))[:, None].expand(shape)

    def _attended(self, seeds: Tensor, x: Tensor, graph: LiftedGraph) -> Tensor:
        layout = padding(graph.batch, graph.num_clouds)
        mask = None if layout.mask is None else layout.mask.repeat_interleave(self.group.order, dim=1)
        pooled = self.pool(seeds.expand(graph.num_clouds, -1, -1), layout.pad(x).flatten(1, 2), mask)
        return self.decoder(pooled, pooled)


class FiniteSE2Layer(nn.Module):
    """Attention and linear map of :class:`FiniteSE2Transformer`, on fields ``[points, rotations, channels]``."""

    def __init__(
        self, channels: int, heads: int, normalize: Normalization, layer_norm: bool = False, hidden: int = 3
    ) -> None:
        super().__init__()
        self.normalize: Normalization = normalize
        self.attend = _SetProjections(channels, heads, layer_norm)
        self.location1 = nn.Parameter(torch.empty(heads, hidden, 3).uniform_(-1, 1) / math.sqrt(3))
        self.location_bias1 = nn.Parameter(torch.empty(heads, hidden).uniform_(-1, 1) / math.sqrt(3))
        self.location2 = nn.Parameter(torch.empty(heads, hidden).uniform_(-1, 1) / math.sqrt(hidden))
        self.location_bias2 = nn.Parameter(torch.empty(heads).uniform_(-1, 1) / math.sqrt(hidden))

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        terms = RelativeTerms(displacement_bias=self._location(graph, x.dtype), row=graph.relative.row)
        q, k, v = self.attend.signals(x, x)
        scale = 1 / math.sqrt(x.shape[-1])
        out, _ = graph_attention(q, k, v, graph, normalize=self.normalize, terms=terms, scale=scale)
        return self.attend.finish(v + out)

    def _location(self, graph: LiftedGraph, dtype: torch.dtype) -> Tensor:
        """Return scores ``[rows, rotations, rotations, heads]``; the first map is linear in translation and index."""
        position = graph.relative.positions.to(dtype)
        index = graph.relative.pair_index.to(position)
        first = torch.einsum("hmk,tak->tahm", self.location1[..., :2], position) + self.location_bias1
        hidden = F.relu(first[:, :, None] + index[..., None, None] * self.location1[..., 2])
        return (hidden * self.location2).sum(-1) + self.location_bias2


class SetBlock(nn.Module):
    """Attention block of the set transformer (arXiv 1810.00825), with a residual connection of the queries."""

    def __init__(self, channels: int, heads: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.attend = _SetProjections(channels, heads, layer_norm)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from ``[clouds, q, channels]`` to ``[clouds, k, channels]`` where the mask ``[clouds, k]`` is true."""
        q, k, v = (signal.transpose(1, 2) for signal in self.attend.signals(queries, keys))
        score = q @ k.mT / math.sqrt(queries.shape[-1])
        if mask is not None:
            # An empty cloud attends to its padding, whose entries are all equal.
            attended = mask | ~mask.any(dim=1, keepdim=True)
            score = score.masked_fill(~attended[:, None, None], -math.inf)
        return self.attend.finish((q + score.softmax(dim=-1) @ v).transpose(1, 2))


class _SetProjections(nn.Module):
    """Projections, output map and normalizations of a block."""

    def __init__(self, channels: int, heads: int, layer_norm: bool) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of {channels} channels, got {heads}")
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(channels, channels) for _ in range(4))
        self.norm0, self.norm1 = (LayerNorm(channels) if layer_norm else nn.Identity() for _ in range(2))

    def signals(self, queries: Tensor, keys: Tensor) -> list[Tensor]:
        """Return queries, keys and values ``[*, heads, channels of a head]``."""
        made = (self.query(queries), self.key(keys), self.value(keys))
        return [signal.unflatten(-1, (self.heads, -1)) for signal in made]

    def finish(self, x: Tensor) -> Tensor:
        """Apply the normalizations and the output map to the attended values ``[*, heads, channels of a head]``."""
        x = self.norm0(x.flatten(-2))
        y: Tensor = self.norm1(x + F.relu(self.output(x)))
        return y


def _two_linears(in_channels: int, hidden: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_channels, hidden), nn.ReLU(), nn.Linear(hidden, out_channels))


def _mean(x: Tensor, graph: LiftedGraph, slots: int | None) -> Tensor:
    """Return the mean over the points of each cloud, ``[clouds, *]``, or the sum divided by slots."""
    return graph.mean(x) if slots is None else graph.sum(x) / slots
