"""Networks of PyTorch Geometric for shapes, with neighborhoods and farthest points of :mod:`lieattn.geometry`.

They are not equivariant, since the coordinates of positions and normals are features. The layers are those of PyTorch
Geometric. The selection of centers and neighbors, which would need torch_cluster, is that of this library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MLP, EdgeConv, PointNetConv, PointTransformerConv
from torch_geometric.utils import scatter

from lieattn.geometry import Nearest, Neighborhood, PointClouds, Radius, farthest_points, find_neighbors, point_clouds


class PointNet(nn.Module):
    """PointNet++ (Qi et al. 2017): features of balls around a decreasing number of centers, then a maximum.

    Parameters
    ----------
    in_channels, out_channels
        Number of channels of ``data.x``, and of outputs of a cloud.
    width
        Number of channels of the first level. It doubles from level to level.
    shares, radii
        Share of the points that are kept as centers, and radius of their balls, for each level.
    vector_inputs
        Attributes with vectors, whose coordinates are further channels.
    """

    kind = "invariant"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        width: int = 32,
        *,
        shares: Sequence[float] = (0.5, 0.25),
        radii: Sequence[float] = (0.4, 0.8),
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.shares, self.radii, self.vector_inputs = tuple(shares), tuple(radii), tuple(vector_inputs)
        channels, sizes = in_channels + 3 * len(self.vector_inputs), [width * 2**level for level in range(len(shares))]
        self.levels = nn.ModuleList()
        for size in sizes:
            self.levels.append(PointNetConv(MLP([channels + 3, size, size]), add_self_loops=False))
            channels = size
        self.whole = MLP([channels + 3, 2 * channels])
        self.head = MLP([2 * channels, channels, out_channels], norm=None, dropout=0.0)

    def forward(self, data: Data) -> Tensor:
        """Return numbers ``[clouds, out_channels]``."""
        x, clouds = _features(data, self.vector_inputs), point_clouds(data)
        for level, share, radius in zip(self.levels, self.shares, self.radii, strict=True):
            edges, centers = _around_centers(clouds, Radius(radius), share)
            x = level((x, None), (clouds.pos, centers.pos), edges)
            clouds = centers
        x = self.whole(torch.cat([x, clouds.pos], dim=1))
        return cast(Tensor, self.head(clouds.max(x)))


class DGCNN(nn.Module):
    """Dynamic graph CNN (Wang et al. 2019): edge convolutions between points with similar features, then pooling.

    Parameters
    ----------
    in_channels, out_channels, vector_inputs
        As for :class:`PointNet`.
    width
        Number of channels of each level.
    levels
        Number of edge convolutions. The first one is between nearest points in space.
    neighbors
        Number of neighbors of a point, in addition to itself.
    """

    kind = "invariant"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        width: int = 32,
        *,
        levels: int = 3,
        neighbors: int = 12,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.neighborhood, self.vector_inputs = Nearest(neighbors), tuple(vector_inputs)
        sizes = [in_channels + 3 * len(self.vector_inputs) + 3, *levels * [width]]
        self.levels = nn.ModuleList(
            EdgeConv(MLP([2 * size, width], plain_last=False), aggr="max") for size in sizes[:-1]
        )
        self.whole = MLP([levels * width, 2 * width], plain_last=False)
        self.head = MLP([4 * width, width, out_channels], norm=None)

    def forward(self, data: Data) -> Tensor:
        """Return numbers ``[clouds, out_channels]``."""
        clouds = point_clouds(data)
        x, seen = torch.cat([_features(data, self.vector_inputs), clouds.pos], dim=1), clouds.pos
        found: list[Tensor] = []
        for level in self.levels:
            edges = find_neighbors(point_clouds(seen, batch=clouds.batch), self.neighborhood)
            x = level(x, edges.edge_index)
            seen = x.detach()
            found.append(x)
        x = self.whole(torch.cat(found, dim=1))
        return cast(Tensor, self.head(torch.cat([clouds.max(x), clouds.mean(x)], dim=1)))


class PointTransformer(nn.Module):
    """Point Transformer (Zhao et al. 2021): vector attention on nearest points, at several levels.

    Parameters
    ----------
    in_channels, out_channels, vector_inputs
        As for :class:`PointNet`.
    width
        Number of channels of the first level. It doubles from level to level.
    shares
        Share of the points that are kept before each further level.
    neighbors
        Number of nearest points to which a point attends, in addition to itself.
    """

    kind = "invariant"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        width: int = 32,
        *,
        shares: Sequence[float] = (0.25,),
        neighbors: int = 12,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.shares, self.neighborhood, self.vector_inputs = tuple(shares), Nearest(neighbors), tuple(vector_inputs)
        self.embed = MLP([in_channels + 3 * len(self.vector_inputs) + 3, width])
        self.first = _PointBlock(width)
        self.down, self.blocks = nn.ModuleList(), nn.ModuleList()
        for _ in self.shares:
            self.down.append(MLP([width, 2 * width]))
            width = 2 * width
            self.blocks.append(_PointBlock(width))
        self.head = MLP([width, width, out_channels], norm=None)

    def forward(self, data: Data) -> Tensor:
        """Return numbers ``[clouds, out_channels]``."""
        clouds = point_clouds(data)
        x = self.embed(torch.cat([_features(data, self.vector_inputs), clouds.pos], dim=1))
        x = self.first(x, clouds.pos, find_neighbors(clouds, self.neighborhood).edge_index)
        for down, block, share in zip(self.down, self.blocks, self.shares, strict=True):
            edges, centers = _around_centers(clouds, self.neighborhood, share)
            x = scatter(down(x)[edges[0]], edges[1], dim_size=len(centers.pos), reduce="max")
            clouds = centers
            x = block(x, clouds.pos, find_neighbors(clouds, self.neighborhood).edge_index)
        return cast(Tensor, self.head(clouds.mean(x)))


class _PointBlock(nn.Module):
    """Residual block: attention between two linear maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        position = MLP([3, 16, width], norm=None, plain_last=False)
        scores = MLP([width, 16, width], norm=None, plain_last=False)
        self.attention = PointTransformerConv(width, width, position, scores, add_self_loops=False)
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, pos: Tensor, edges: Tensor) -> Tensor:
        inner = self.attention(self.before(x).relu(), pos, edges)
        return cast(Tensor, (x + self.after(inner.relu())).relu())


def _features(data: Data, vector_inputs: Sequence[str]) -> Tensor:
    return torch.cat([data.x, *(data[name].reshape(len(data.x), -1) for name in vector_inputs)], dim=1)


def _around_centers(clouds: PointClouds, neighborhood: Neighborhood, share: float) -> tuple[Tensor, PointClouds]:
    """Select a share of the points as centers that are far apart; return edges ``[2, edges]`` to them, and them."""
    chosen = farthest_points(clouds.pos, fraction=share, batch=clouds.batch)
    edges = find_neighbors(clouds, neighborhood).edge_index
    number = edges.new_full((len(clouds.pos),), -1)
    number[chosen] = torch.arange(len(chosen), device=edges.device)
    target = number[edges[1]]
    kept = target >= 0
    centers = point_clouds(clouds.pos[chosen], batch=clouds.batch[chosen])
    return torch.stack([edges[0, kept], target[kept]]), centers
