"""Networks of other libraries for ``lieattn certify examples.certificates:NAME``, see the table in docs/certify.md."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP, PointNetConv, SchNet, global_max_pool

from lieattn.transforms import fps, radius, radius_graph


def _edges_and_distances(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    edges = radius_graph(pos, 5.0, batch)
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=1)


def schnet() -> nn.Module:
    """Return SchNet of PyTorch Geometric with random weights and edges of lieattn: energies, invariant to E(3)."""
    return _schnet(_edges_and_distances)


def _schnet(graph: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> nn.Module:
    return SchNet(32, 32, num_interactions=2, num_gaussians=16, cutoff=5.0, interaction_graph=graph)


def _first_neighbors(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    edges, distances = _edges_and_distances(pos, batch)
    rank = torch.arange(len(edges[1])) - torch.searchsorted(edges[1].contiguous(), edges[1].contiguous())
    return edges[:, rank < 4], distances[rank < 4]


def schnet_capped() -> nn.Module:
    """Return the same network with at most the first four neighbors, as with a cap on the number of neighbors."""
    return _schnet(_first_neighbors)


class PointNet2(nn.Module):
    """PointNet++ with one local and one global set abstraction, as in the examples of PyTorch Geometric."""

    def __init__(self) -> None:
        super().__init__()
        self.local = PointNetConv(MLP([3, 32, 32], norm=None), add_self_loops=False)
        self.all = MLP([32 + 3, 64], norm=None)
        self.head = nn.Linear(64, 4)

    def forward(self, pos: Tensor, batch: Tensor) -> Tensor:
        """Return logits ``[clouds, 4]``."""
        chosen = fps(pos, batch, ratio=0.5)
        row, col = radius(pos, pos[chosen], 2.0, batch, batch[chosen])
        x = self.local((None, None), (pos, pos[chosen]), torch.stack([col, row]))
        x = self.all(torch.cat([x, pos[chosen]], dim=1))
        return self.head(global_max_pool(x, batch[chosen]))


def pointnet2() -> nn.Module:
    """Return PointNet++ with random weights. It reads components of vectors, and positions in the last level."""
    return PointNet2()


def e3nn() -> nn.Module:
    """Return a network of e3nn with random weights: vectors, equivariant to E(3)."""
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    class Vectors(nn.Module):
        """A network of e3nn that returns a vector for each cloud. Its inputs are atomic numbers."""

        kind = "vector"

        def __init__(self) -> None:
            super().__init__()
            self.network = SimpleNetwork("0e", "1o", max_radius=3.0, num_neighbors=6, num_nodes=12, mul=4, layers=1)

        def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
            """Return vectors ``[clouds, 3]``."""
            data: dict[str, Any] = {"pos": pos, "batch": batch, "x": z[:, None].to(pos)}
            return self.network(data)

    return Vectors()
