"""The kernels of LieTransformer: scores of features and relative elements, as choices of the operator's slots."""

from __future__ import annotations

import abc
import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lieattn._checks import check_count
from lieattn.geometry import LiftedGraph, Neighbors
from lieattn.nn._location import HeadNetwork, RelativeGraph, pair_coordinates
from lieattn.ops import Activation, RelativeTerms

FeaturePart = Literal["product", "linear", "mixed"]
LocationPart = Literal["network", "coordinates"]

# Entries of hidden units that a kernel of features and coordinates keeps at a time.
_CHUNK = 1 << 22


class Scores(NamedTuple):
    """What a kernel hands to the operator: query and key or neither, the terms, and the row of each edge."""

    query: Tensor | None
    key: Tensor | None
    terms: RelativeTerms
    row: Tensor | None


class LieScore(nn.Module, abc.ABC):
    """Scores of pairs of elements (g_ia, g_jb) from their features and from the coordinates of g_ia⁻¹ g_jb.

    **Equivariance.** Nothing but features and relative elements is seen, so scores are invariant when all elements
    move by one element of the group.
    """

    @abc.abstractmethod
    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Scores:
        """Slots of the operator for a field ``[points, fiber, channels]``."""


class _HeadLinear(nn.Linear):
    """Linear map to ``[*, heads, channels of a head]``."""

    def __init__(self, channels: int, heads: int, width: int) -> None:
        super().__init__(channels, heads * width)
        self.heads = heads

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).unflatten(-1, (self.heads, -1))


class ContentScore(LieScore):
    """Scaled dot product of the features, ⟨q_i, k_j⟩ / √d: ``dot_product_only``.

    Parameters
    ----------
    channels, heads
        Channels of the field, divisible by the heads.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.query, self.key = (_HeadLinear(channels, heads, channels // heads) for _ in range(2))

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Scores:
        """Query and key."""
        return Scores(self.query(x), self.key(x), RelativeTerms(), None)


class LocationScore(LieScore):
    """A network of the relative element for each head: ``location_only``.

    Parameters
    ----------
    coordinates
        Number of coordinates of a relative element.
    heads, hidden, activation
        See :class:`HeadNetwork`.
    """

    def __init__(self, coordinates: int, heads: int, hidden: int = 16, activation: Activation = "silu") -> None:
        super().__init__()
        self.location = HeadNetwork(heads, coordinates, hidden, activation)

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Scores:
        """A bias for each pair of elements."""
        coordinates, row = pair_coordinates(graph)
        return Scores(None, None, RelativeTerms(displacement_bias=self.location(coordinates)), row)


class SumScore(LieScore):
    """Dot product of the features plus a network of the relative element: ``mlp``, the authors' default.

    Parameters are those of :class:`ContentScore` and :class:`LocationScore`.
    """

    def __init__(
        self, channels: int, coordinates: int, heads: int, hidden: int = 16, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.content = ContentScore(channels, heads)
        self.location = HeadNetwork(heads, coordinates, hidden, activation)

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Scores:
        """Query, key and a bias for each pair of elements."""
        coordinates, row = pair_coordinates(graph)
        scores = self.content(x, graph)
        return scores._replace(terms=RelativeTerms(displacement_bias=self.location(coordinates)), row=row)


class RelativePositionScore(LieScore):
    r"""Scores of Transformer-XL: ``relative_position``.

    .. math::
        \big( \langle q_i, k_j \rangle + \langle E p_{ij}, q_i + v \rangle + \langle u, k_j \rangle \big) / \sqrt d

    with p the coordinates of the relative element, E linear, u and v learned. E p is never made: the product with E
    is taken once for every query.

    Parameters
    ----------
    channels, coordinates, heads
        See :class:`SumScore`.
    """

    def __init__(self, channels: int, coordinates: int, heads: int) -> None:
        super().__init__()
        width = channels // heads
        self.content = ContentScore(channels, heads)
        self.position = nn.Linear(coordinates, channels)
        self.content_bias = nn.Parameter(torch.zeros(heads, width))
        self.position_bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Scores:
        """Query with u, key, and the product of positions with the query as a bias of each pair."""
        query, key, _, _ = self.content(x, graph)
        heads, width = self.content_bias.shape
        biased = (query + self.position_bias) / math.sqrt(width)
        matrix = self.position.weight.unflatten(0, (heads, width)).to(biased.dtype)
        pulled = torch.einsum("pahd,hdk->pahk", biased, matrix)
        constant = torch.einsum("pahd,hd->pah", biased, self.position.bias.view(heads, width).to(biased.dtype))
        coordinates, row = pair_coordinates(graph)
        if coordinates.shape[-1] != matrix.shape[-1]:
            raise ValueError(
                f"graph: expected {matrix.shape[-1]} coordinates of a relative element, got {coordinates.shape[-1]}"
            )
        if row is not None:
            coordinates = coordinates.index_select(0, row)
        target = graph.neighbors.target
        bias = coordinates.to(pulled.dtype) @ pulled.index_select(0, target).mT
        bias = bias + constant.index_select(0, target)[:, :, None]
        return Scores(query + self.content_bias, key, RelativeTerms(displacement_bias=bias), None)


class CombinedScore(LieScore):
    """A network of features and relative element together, for each head: the four-digit codes with C = 2.

    Both parts enter the first linear map of the network, which is applied to each before they meet: no pair of
    elements ever holds the features of both.

    Parameters
    ----------
    channels, coordinates, heads, hidden, activation
        See :class:`SumScore`.
    features
        ``"product"``: the number ⟨q_i, k_j⟩ / √d; ``"linear"``: linear maps of f_i and f_j side by side;
        ``"mixed"``: the same, then a linear map that the heads share.
    location
        ``"network"``: the number that a network makes of the coordinates; ``"coordinates"``: themselves.
    feature_channels
        Channels a head that the features of a pair take (``"linear"``: half of them from each element).
    """

    def __init__(
        self,
        channels: int,
        coordinates: int,
        heads: int,
        hidden: int = 16,
        activation: Activation = "silu",
        *,
        features: FeaturePart = "mixed",
        location: LocationPart = "coordinates",
        feature_channels: int | None = None,
    ) -> None:
        super().__init__()
        for argument, choice, allowed in (("features", features, FeaturePart), ("location", location, LocationPart)):
            if choice not in get_args(allowed):
                raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {choice!r}")
        if feature_channels is None:
            feature_channels = max(2, channels // (4 * heads) // 2 * 2)
        check_count("feature_channels", feature_channels)
        if features == "linear" and feature_channels % 2:
            raise ValueError(f"feature_channels: half of them come from each element, got {feature_channels}")
        self.features, self.heads = features, heads
        self.content = ContentScore(channels, heads) if features == "product" else None
        if features != "product":
            width = feature_channels // 2 if features == "linear" else feature_channels
            self.receiver, self.sender = (_HeadLinear(channels, heads, width) for _ in range(2))
        self.mix = nn.Linear(2 * feature_channels, feature_channels) if features == "mixed" else None
        self.location = HeadNetwork(heads, coordinates, hidden, activation) if location == "network" else None
        self.feature_width = 1 if features == "product" else feature_channels
        location_width = coordinates if self.location is None else 1
        self.combine = HeadNetwork(heads, self.feature_width + location_width, hidden, activation)

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Scores:
        """A bias for each pair of elements."""
        neighbors = graph.neighbors
        coordinates, row = pair_coordinates(graph)
        per_head = self.location is not None
        location = coordinates if self.location is None else self.location(coordinates)[..., None]
        expected = self.combine.weights[0].shape[1] - self.feature_width
        if location.shape[-1] != expected:
            raise ValueError(f"graph: expected {expected} coordinates of a relative element, got {location.shape[-1]}")
        parts = self._feature_parts(x)
        location = location.to(parts[0].dtype)
        size = max(1, _CHUNK // max(1, location[:1].numel() * self.heads * self.combine.biases[0].shape[1]))
        edges = torch.arange(neighbors.num_edges, device=neighbors.device)
        chunks = []
        for some in edges.split(size) if len(edges) else (edges,):
            if len(edges) > size and torch.is_grad_enabled():
                bias = checkpoint(self._bias, some, neighbors, location, row, per_head, *parts, use_reentrant=False)
            else:
                bias = self._bias(some, neighbors, location, row, per_head, *parts)
            chunks.append(bias)
        return Scores(None, None, RelativeTerms(displacement_bias=torch.cat(chunks)), None)

    def _feature_parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each element query and key, or its share of the first linear map's result as receiver and as sender."""
        if self.content is not None:
            query, key = self.content.query(x), self.content.key(x)
            return query / math.sqrt(query.shape[-1]), key
        receiver, sender = self.receiver(x), self.sender(x)
        first = self.combine.weights[0][:, : self.feature_width]
        if self.mix is not None:
            of_receiver, of_sender = self.mix.weight.chunk(2, dim=1)
            receiver = receiver @ of_receiver.mT + self.mix.bias
            sender = sender @ of_sender.mT
            return torch.einsum("pahe,hem->pahm", receiver, first), torch.einsum("pahe,hem->pahm", sender, first)
        of_receiver, of_sender = first.chunk(2, dim=1)
        return torch.einsum("pahe,hem->pahm", receiver, of_receiver), torch.einsum("pahe,hem->pahm", sender, of_sender)

    def _bias(
        self,
        edges: Tensor,
        neighbors: Neighbors,
        location: Tensor,
        row: Tensor | None,
        per_head: bool,
        receiver: Tensor,
        sender: Tensor,
    ) -> Tensor:
        """Scores ``[edges, fiber, fiber, heads]`` of some edges."""
        at_target = receiver.index_select(0, neighbors.target.index_select(0, edges))
        at_source = sender.index_select(0, neighbors.source.index_select(0, edges))
        here = location.index_select(0, edges if row is None else row.index_select(0, edges))
        weight = self.combine.weights[0]
        if self.content is not None:
            product = torch.einsum("eahd,ebhd->eabh", at_target, at_source)
            first = product[..., None] * weight[:, 0]
        else:
            first = at_target[:, :, None] + at_source[:, None]
        rest = weight[:, self.feature_width :]
        if per_head:
            first = first + here * rest[:, 0]
        else:
            first = first + torch.einsum("eabk,hkm->eabhm", here, rest)
        return self.combine.finish(first + self.combine.biases[0])
