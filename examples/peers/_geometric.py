"""Molecular networks of PyTorch Geometric, with edges of :mod:`lieattn.geometry` instead of those of torch_cluster."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lieattn.geometry import Neighbors, Radius

from ._base import KINDS, FeaturePeer, Peer, Points


class GeometricSchNet(Peer):
    """SchNet of PyTorch Geometric, with edges from ``interaction_graph`` and its own read-out of one number."""

    directed = False

    def __init__(self, width: int = 48, *, layers: int = 4, basis: int = 20, **options: Any) -> None:
        from torch_geometric.nn.models import SchNet as Network

        super().__init__(width, **options)
        if self.kind != "invariant" or self.out_channels != 1:
            raise ValueError(
                "kind, out_channels: expected 'invariant' and 1 for SchNet of PyTorch Geometric, got "
                f"{self.kind!r} and {self.out_channels}"
            )
        self.network = Network(width, width, layers, basis, self.neighborhood.radius, self._edges)
        self.network.embedding = nn.Embedding(KINDS, width)
        self.network.readout = _WithoutPooling()

    def _edges(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        lists = self.neighborhood(pos, batch)
        return lists.edge_index, lists.displacements(pos).norm(dim=1)

    def outputs(self, points: Points) -> Tensor:
        """Return numbers ``[points, 1]``."""
        return cast(Tensor, self.network(points.kinds, points.pos, points.clouds.batch))


class _WithoutPooling(nn.Module):
    """Read-out that returns the numbers of the points instead of their sum over each cloud."""

    def forward(self, x: Tensor, batch: Tensor, dim: int = 0) -> Tensor:
        return x


class DimeNet(Peer):
    """DimeNet++ of PyTorch Geometric (Gasteiger et al. 2020): messages of edges with weights that depend on angles.

    Its own forward method finds edges with torch_cluster and pairs of edges with torch_sparse. Here both are computed
    from the neighbor lists, and its blocks are called one by one.

    Parameters
    ----------
    angles
        Number of spherical functions of the angle. sympy computes their formulas during construction.
    """

    directed = False

    def __init__(
        self, width: int = 32, *, layers: int = 2, embedding: int = 16, angles: int = 4, **options: Any
    ) -> None:
        from torch_geometric.nn.models import DimeNetPlusPlus as Network

        super().__init__(width, **options)
        if self.kind != "invariant":
            raise ValueError(f"kind: expected 'invariant' for DimeNet++, got {self.kind!r}")
        self.network = Network(
            width,
            self.out_channels,
            layers,
            int_emb_size=embedding,
            basis_emb_size=4,
            out_emb_channels=width,
            num_spherical=angles,
            num_radial=6,
            cutoff=self.neighborhood.radius,
            num_output_layers=1,
            output_initializer="glorot_orthogonal",
        )
        self.network.emb.emb = nn.Embedding(KINDS, width)

    def outputs(self, points: Points) -> Tensor:
        """Return numbers of the points, summed over the output blocks."""
        network, lists, between = self.network, points.lists, points.between
        first, second = edge_pairs(lists)
        # The angle at j between j - k and i - j, for edges k -> j and j -> i.
        along, before = -between[second], -between[first]
        angle = torch.atan2(torch.cross(along, before, dim=1).norm(dim=1), (along * before).sum(dim=1))
        length = between.norm(dim=1)
        radial, spherical = network.rbf(length), network.sbf(length, angle, first)
        x = network.emb(points.kinds, radial, lists.target, lists.source)
        total = network.output_blocks[0](x, radial, lists.target, num_nodes=len(points.pos))
        for interaction, output in zip(network.interaction_blocks, network.output_blocks[1:], strict=True):
            x = interaction(x, radial, spherical, first, second)
            total = total + output(x, radial, lists.target, num_nodes=len(points.pos))
        return cast(Tensor, total)


class ViSNet(FeaturePeer):
    """ViSNet of PyTorch Geometric (Wang et al. 2024): attention on numbers and vectors, on edges of neighbor lists.

    Its module ``distance``, which needs torch_cluster, is replaced by the neighborhood.
    """

    def __init__(self, width: int = 32, *, layers: int = 3, heads: int = 4, basis: int = 16, **options: Any) -> None:
        from torch_geometric.nn.models.visnet import ViSNetBlock

        super().__init__(width, **options)
        radius = self.neighborhood.radius
        sizes = {"num_heads": heads, "num_layers": layers, "hidden_channels": width, "num_rbf": basis}
        self.network = ViSNetBlock(lmax=1, cutoff=radius, max_z=KINDS, **sizes)
        self.network.distance = _WithLoops(radius)
        self.make_head(width, width)

    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return the features of the last layer."""
        return cast(tuple[Tensor, Tensor], self.network(points.kinds, points.pos, points.clouds.batch))


class _WithLoops(nn.Module):
    """Edges with loops, their lengths and vectors, in the form that ViSNet needs."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.neighborhood = Radius(radius)

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lists = self.neighborhood(pos, batch)
        between = lists.displacements(pos)
        apart = ~lists.is_loop
        # Lengths of loops have no derivative.
        length = between.new_zeros(len(between)).masked_scatter(apart, between[apart].norm(dim=1))
        return lists.edge_index, length, between


def edge_pairs(lists: Neighbors) -> tuple[Tensor, Tensor]:
    """Return all pairs of edges k -> j and j -> i with i ≠ k, as two tensors of indices of edges, int64 ``[pairs]``."""
    counts = lists.degree[lists.source]
    second = torch.arange(lists.num_edges, device=lists.device).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    inner = torch.arange(len(second), device=lists.device) - starts[second]
    first = lists.row_ptr[lists.source[second]] + inner
    kept = lists.source[first] != lists.target[second]
    return first[kept], second[kept]
