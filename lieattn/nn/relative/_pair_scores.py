"""The kernels of LieTransformer."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_features,
    check_field,
    check_graph,
    check_is,
    check_tensor,
    weight_of,
)
from lieattn._core.contexts import may_recompute, without_autocast
from lieattn.geometry import LiftedGraph, Neighbors
from lieattn.nn.relative._base import RelativeFunction, check_coordinates, networks_of_coordinates
from lieattn.ops import Activation, RelativeTerms
from lieattn.ops import activation as activation_named


class PerHeadMLP(RelativeFunction):
    """A network for every head on the coordinates of the relative element, whose output is added to the scores.

    Each network has three linear maps. All of them are followed by the activation, also the last one as in the authors'
    code. It needs only the memory of the result.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    heads, in_channels, hidden
        Number of heads, number of coordinates (``graph.relative.num_coordinates``), and number of units in both hidden
        layers.
    activation
        Name of an activation of :func:`lieattn.ops.head_networks`.
    """

    def __init__(self, heads: int, in_channels: int, hidden: int = 16, activation: Activation = "silu") -> None:
        check_arguments(PerHeadMLP.__init__, locals())
        super().__init__()
        check_counts(heads=heads, in_channels=in_channels, hidden=hidden)
        self.activation: Activation = activation
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise((in_channels, hidden, hidden, 1)):
            bound = 1 / math.sqrt(fan_in)
            self.weights.append(torch.empty(heads, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(heads, fan_out).uniform_(-bound, bound))

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``displacement_bias`` ``[rows, fiber, fiber, heads]``."""
        check_graph(graph, LiftedGraph, self.weights[0], "the weights")
        return RelativeTerms(displacement_bias=self.numbers(graph.relative.coordinates), row=graph.relative.row)

    def numbers(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch heads"]:
        """Return the outputs ``[*, heads]`` for inputs ``[*, in_channels]``, in the dtype of the weights."""
        check_tensor("x", x, "floating coordinates [*, in_channels]")
        return networks_of_coordinates(x, list(self.weights), list(self.biases), self.activation)

    def finish(self, first: Float[Tensor, "*batch heads hidden"]) -> Float[Tensor, "*batch heads"]:
        """Apply the network after its first linear map, from ``[*, heads, hidden]`` to ``[*, heads]``."""
        check_features(first, self.weights[0], self.weights[0].shape[2], "first")
        act = activation_named("activation", self.activation)
        x = act(first.flatten(0, -3)).transpose(0, 1)
        for weight, bias in zip(list(self.weights)[1:], list(self.biases)[1:], strict=True):
            x = act(torch.baddbmm(bias[:, None], x, weight))
        return x[..., 0].T.unflatten(0, first.shape[:-2])


Kernel = Literal["sum", "content", "location", "relative_position", "combined"]
"""Score before normalization, see :class:`lieattn.nn.LieSelfAttention`."""
FeaturePart = Literal["product", "linear", "mixed"]
"""Features that enter a :class:`CombinedScore`."""
LocationPart = Literal["network", "coordinates"]
"""Form in which the relative element enters a :class:`CombinedScore`."""

# Largest number of hidden units that a combined score computes at a time.
_CHUNK = 1 << 22


class PairScore(RelativeFunction):
    """A relative function that can have its own queries and keys."""

    patterns = ("joint",)

    def project(
        self, x: Float[Tensor, "points fiber channels"]
    ) -> tuple[Float[Tensor, "points fiber heads dim"] | None, Float[Tensor, "points fiber heads dim"] | None]:
        """Return query and key ``[points, fiber, heads, dim]`` of a field, or None for both."""
        return None, None


class _HeadLinear(nn.Linear):
    """Linear map to ``[*, heads, channels of a head]``."""

    def __init__(self, channels: int, heads: int, width: int) -> None:
        super().__init__(channels, heads * width)
        self.heads = heads

    def forward(self, input: Tensor) -> Tensor:
        check_features(input, self.weight, self.in_features)
        return super().forward(input).unflatten(-1, (self.heads, -1))


class ContentScore(PairScore):
    """Scaled dot product of the features, ⟨q_i, k_j⟩ / √d (``dot_product_only`` in the authors' code)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of {channels} channels, got {heads}")
        self.query, self.key = (_HeadLinear(channels, heads, channels // heads) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.query(x), self.key(x)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        return RelativeTerms()


class SumScore(PairScore):
    """Dot product of the features plus :class:`PerHeadMLP` (``mlp``), or the latter without ``channels``.

    The latter is ``location_only`` in the authors' code.
    """

    def __init__(
        self, channels: int | None, coordinates: int, heads: int, hidden: int = 16, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.content = None if channels is None else ContentScore(channels, heads)
        self.location = PerHeadMLP(heads, coordinates, hidden, activation)

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.content is None else self.content.project(x)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        return self.location(graph)


class RelativePositionScore(PairScore):
    r"""Scores as in Transformer-XL (``relative_position`` in the authors' code).

    .. math::
        \big( \langle q_i, k_j \rangle + \langle E p_{ij}, q_i + v \rangle + \langle u, k_j \rangle \big) / \sqrt d

    where p are the coordinates of the relative element, E is a linear map, and u and v are learned.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    channels, coordinates, heads
        Channels of the field, number of coordinates of a relative element, and number of heads, a divisor of the
        channels.
    """

    def __init__(self, channels: int, coordinates: int, heads: int) -> None:
        super().__init__()
        width = channels // heads
        self.content = ContentScore(channels, heads)
        self.position = nn.Linear(coordinates, channels)
        self.content_bias, self.position_bias = (nn.Parameter(torch.zeros(heads, width)) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.content.query(x) + self.content_bias, self.content.key(x)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        check_is("graph", graph, LiftedGraph)
        heads, width = self.content_bias.shape
        biased = (self.content.query(x) + self.position_bias) / math.sqrt(width)
        matrix = weight_of("position", self.position).unflatten(0, (heads, width)).to(biased.dtype)
        coordinates, row = graph.relative.coordinates, graph.relative.row
        check_coordinates(coordinates, matrix.shape[-1])
        with without_autocast(graph.device):  # it would round coordinates
            # The products of the queries with E are computed once for every query, so E p is never stored.
            pulled = torch.einsum("pahd,hdk->pahk", biased, matrix)
            constant = torch.einsum("pahd,hd->pah", biased, self.position.bias.view(heads, width).to(biased.dtype))
            if row is not None:
                coordinates = coordinates.index_select(0, row)
            target = graph.neighbors.target
            bias = coordinates.to(pulled.dtype) @ pulled.index_select(0, target).mT
            return RelativeTerms(displacement_bias=bias + constant.index_select(0, target)[:, :, None])


class CombinedScore(PairScore):
    """A network for each head on features and relative element together: the four-digit codes with C = 2.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    channels
        Channels of the field, a multiple of the heads for ``"product"`` (otherwise ValueError).
    coordinates, heads, hidden, activation
        See :class:`PerHeadMLP`.
    features
        Features as input of the network: ``"product"``, the number ⟨q_i, k_j⟩ / √d; ``"linear"``, linear maps of f_i
        and f_j side by side; ``"mixed"``, the same followed by a linear map that the heads share.
    feature_channels
        Number of these features for each head, even for ``"linear"`` and None for ``"product"`` (otherwise ValueError).
    location
        Relative element as input of the network: ``"network"``, the output of a network on the coordinates, or
        ``"coordinates"``, the coordinates themselves.
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
        check_arguments(CombinedScore.__init__, locals())
        super().__init__()
        check_counts(channels=channels, coordinates=coordinates, heads=heads)
        if features == "product" and feature_channels is not None:
            raise ValueError(f"feature_channels: expected None with 'product', a single number, got {feature_channels}")
        if feature_channels is None:
            feature_channels = max(2, channels // (4 * heads) // 2 * 2)
        check_count("feature_channels", feature_channels)
        if features == "linear" and feature_channels % 2:
            raise ValueError(f"feature_channels: expected an even number with 'linear', got {feature_channels}")
        self.features, self.heads = features, heads
        self.content = ContentScore(channels, heads) if features == "product" else None
        if features != "product":
            width = feature_channels // 2 if features == "linear" else feature_channels
            self.receiver, self.sender = (_HeadLinear(channels, heads, width) for _ in range(2))
        self.mix = nn.Linear(2 * feature_channels, feature_channels) if features == "mixed" else None
        self.location = PerHeadMLP(heads, coordinates, hidden, activation) if location == "network" else None
        self.feature_width = 1 if features == "product" else feature_channels
        location_width = coordinates if self.location is None else 1
        self.combine = PerHeadMLP(heads, self.feature_width + location_width, hidden, activation)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        check_is("graph", graph, LiftedGraph)
        if x is None:
            raise TypeError("x: expected a field, since the score depends on features, got None")
        check_graph(graph, LiftedGraph, x)
        check_field(x, graph, (self.receiver if self.content is None else self.content.query).in_features)
        neighbors = graph.neighbors
        coordinates, row = graph.relative.coordinates, graph.relative.row
        per_head = self.location is not None
        location = coordinates if self.location is None else self.location.numbers(coordinates)[..., None]
        check_coordinates(location, self.combine.weights[0].shape[1] - self.feature_width)
        dtype = self.combine.weights[0].dtype
        location, receiver, sender = (part.to(dtype) for part in (location, *self._feature_parts(x)))
        size = max(1, _CHUNK // max(1, location[:1].numel() * self.heads * self.combine.biases[0].shape[1]))
        edges = torch.arange(neighbors.num_edges, device=neighbors.device)
        chunks = []
        with without_autocast(graph.device):  # it would round coordinates
            for some in edges.split(size) if len(edges) else (edges,):
                given = (some, neighbors, location, row, per_head, receiver, sender)
                again = len(edges) > size and may_recompute()
                chunks.append(checkpoint(self._bias, *given, use_reentrant=False) if again else self._bias(*given))
        return RelativeTerms(displacement_bias=torch.cat(chunks))

    def _feature_parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and key of each element, or its contributions to the first linear map as query and as key.

        The first linear map is thus evaluated for elements, not for pairs.
        """
        if self.content is not None:
            query, key = self.content.query(x), self.content.key(x)
            return query / math.sqrt(query.shape[-1]), key
        receiver, sender = self.receiver(x), self.sender(x)
        first = self.combine.weights[0][:, : self.feature_width]
        if self.mix is not None:
            of_receiver, of_sender = weight_of("mix", self.mix).chunk(2, dim=1)
            receiver = receiver @ of_receiver.mT + self.mix.bias
            sender = sender @ of_sender.mT
            of_receiver, of_sender = first, first
        else:
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
        """Return scores ``[edges, fiber, fiber, heads]`` of some edges."""
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


def pair_score(
    kernel: Kernel,
    channels: int,
    coordinates: int,
    heads: int,
    hidden: int = 16,
    activation: Activation = "silu",
    **combined: Any,
) -> PairScore:
    """Return the score of a kernel of :class:`lieattn.nn.LieSelfAttention`.

    Parameters
    ----------
    kernel, channels, coordinates, heads, hidden, activation
        See :class:`lieattn.nn.LieSelfAttention`.
    **combined
        Further options of :class:`CombinedScore`.
    """
    if kernel == "content":
        return ContentScore(channels, heads)
    if kernel == "relative_position":
        return RelativePositionScore(channels, coordinates, heads)
    if kernel in ("sum", "location"):
        return SumScore(channels if kernel == "sum" else None, coordinates, heads, hidden, activation)
    return CombinedScore(channels, coordinates, heads, hidden, activation, **combined)
