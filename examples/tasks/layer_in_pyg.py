"""Layers of lieattn before layers of PyTorch Geometric: digits as graphs of pixels, tested rotated by 90 degrees."""

import math

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SAGEConv, global_max_pool

from lieattn.geometry import Radius, lift
from lieattn.groups import cyclic
from lieattn.nn import FiberPool, GroupConvolution, GroupSelfAttention, PreNormBlock
from lieattn.nn.relative import NetworkKernel
from lieattn_datasets import Digits, RotatePoints


class Network(torch.nn.Module):
    """Lift, attend and pool the fiber; the invariant features are inputs of SAGEConv on the same edges."""

    def __init__(self) -> None:
        super().__init__()
        self.lifting = GroupConvolution(NetworkKernel(cyclic(4), 1, 16, lifting=True))
        self.block = PreNormBlock(GroupSelfAttention(cyclic(4), 16, 32, heads=8), 16, 32)
        self.pool, self.sage, self.head = FiberPool("max"), SAGEConv(32, 64), torch.nn.Linear(64, 10)

    def forward(self, data: Data) -> Tensor:
        """Return class scores ``[images, 10]`` of a batch of images as points."""
        graph = lift(data.pos, cyclic(4), Radius(3.0), batch=data.batch, length=1.0)
        x = self.pool(self.block(self.lifting(data.x, graph), graph))
        edge_index = torch.stack([graph.neighbors.source, graph.neighbors.target])
        return self.head(global_max_pool(self.sage(x, edge_index).relu(), data.batch))


def main(epochs: int = 10, digits: int = 1078) -> float:
    """Train on upright digits and return the accuracy on digits rotated by 90 degrees."""
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in DataLoader(Digits("train").subset(range(digits)), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(batch), batch.y).backward()
            optimizer.step()
    turned = DataLoader(Digits("test").with_transform(RotatePoints(math.pi / 2)), batch_size=100)
    with torch.no_grad():
        accuracy = torch.cat([network(batch).argmax(dim=1) == batch.y for batch in turned]).float().mean().item()
    print(f"accuracy on digits rotated by 90 degrees: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
