"""Networks of the relative element: what an attention layer knows about where a key is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import LiftedGraph, Neighbors
from lieattn.ops import Activation, head_networks
from lieattn.ops import activation as activation_named


class RelativeGraph(Protocol):
    """What the layers of LieTransformer and LieConv need of a graph; ``LiftedElements`` is one.

    Attributes
    ----------
    neighbors
        Neighbor lists of the points.
    relative_coordinates
        ``[edges, fiber, fiber, k]``, coordinates of g_ia⁻¹ g_jb for each edge from j to i.
    batch
        ``[points]`` int64, the cloud of each point.
    num_clouds
        Number of clouds.
    """

    @property
    def neighbors(self) -> Neighbors:
        """Neighbor lists."""

    @property
    def relative_coordinates(self) -> Tensor:
        """Coordinates of the relative elements."""

    @property
    def batch(self) -> Tensor:
        """Cloud of each point."""

    @property
    def num_clouds(self) -> int:
        """Number of clouds."""


@dataclass(frozen=True, eq=False)
class PairGraph:
    """A graph whose pair coordinates are given, wherever they come from. Attributes as in :class:`RelativeGraph`.

    Group elements with neighbors of their own, rather than those of the point below them, are points with a fiber
    of 1 here.
    """

    neighbors: Neighbors
    relative_coordinates: Tensor
    batch: Tensor
    num_clouds: int

    def __post_init__(self) -> None:
        shape = self.relative_coordinates.shape
        edges = self.neighbors.num_edges
        if len(shape) != 4 or shape[0] != edges or shape[1] != shape[2]:
            raise ValueError(f"relative_coordinates: expected [edges={edges}, fiber, fiber, k], got {tuple(shape)}")
        if self.batch.shape != (self.neighbors.num_points,):
            raise ValueError(f"batch: expected [points={self.neighbors.num_points}], got {tuple(self.batch.shape)}")


def pair_coordinates(graph: RelativeGraph | LiftedGraph) -> tuple[Tensor, Tensor | None]:
    """Coordinates ``[rows, fiber, fiber, k]`` of relative elements, and the row of each edge (None: its own).

    For the fiber of a finite group they are h_a⁻¹ (x_j - x_i) / scale and the entries of h_a⁻¹ h_b, a row for every
    distinct displacement.
    """
    if not isinstance(graph, LiftedGraph):
        return graph.relative_coordinates, None
    group = graph.group
    position = graph.relative_positions
    frames = group.elements[group.relative_index].to(position).flatten(-2)
    order = group.order
    pairs = (len(position), order, order)
    parts = [position[:, :, None].expand(*pairs, -1), frames.expand(*pairs, -1)]
    return torch.cat(parts, dim=-1), graph.displacement_index


class HeadNetwork(nn.Module):
    """A network for every head: linear maps from in_channels to the widths, each followed by the activation.

    The activation after the *last* map too is the authors': with the swish a score is then at least -0.28.

    Between the maps it keeps nothing, see :func:`lieattn.ops.head_networks`: memory is that of the result and not of
    the hidden units.

    Parameters
    ----------
    heads
        Number of networks.
    in_channels
        Channels of the input, which all networks see.
    hidden
        Units of both hidden layers.
    activation
        ``"silu"`` (swish), ``"relu"``, ``"gelu"``, ``"elu"`` or ``"none"``.
    """

    def __init__(self, heads: int, in_channels: int, hidden: int = 16, activation: Activation = "silu") -> None:
        super().__init__()
        for name, count in (("heads", heads), ("in_channels", in_channels), ("hidden", hidden)):
            check_count(name, count)
        activation_named("activation", activation)
        self.activation: Activation = activation
        widths = (in_channels, hidden, hidden, 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            bound = 1 / math.sqrt(fan_in)
            self.weights.append(torch.empty(heads, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(heads, fan_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Numbers ``[*, heads]`` for inputs ``[*, in_channels]``, in the dtype of the weights."""
        weight = self.weights[0]
        if x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"x: expected {weight.shape[1]} coordinates of a relative element, got {x.shape[-1]}; the graph and "
                f"the layer must agree on the group and the kind of coordinates"
            )
        with torch.autocast(weight.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(weight.dtype)
            out = head_networks(rows, list(self.weights), list(self.biases), self.activation)
        return out.unflatten(0, x.shape[:-1]) if x.ndim != 2 else out

    def finish(self, first: Tensor) -> Tensor:
        """What follows the first linear map: ``[*, heads, hidden]`` before its activation to ``[*, heads]``."""
        act = activation_named("activation", self.activation)
        x = act(first.flatten(0, -3)).transpose(0, 1)
        for weight, bias in zip(list(self.weights)[1:], list(self.biases)[1:], strict=True):
            x = act(torch.baddbmm(bias[:, None], x, weight))
        return x[..., 0].T.unflatten(0, first.shape[:-2])
