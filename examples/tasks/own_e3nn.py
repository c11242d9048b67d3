"""Your own network based on e3nn, for `lieattn compare --config own_e3nn.yaml` in this folder."""

import itertools

import torch
from e3nn import o3
from torch import Tensor
from torch.nn import Linear, Sequential, SiLU
from torch_geometric.data import Data

from lieattn.geometry import Radius, find_neighbors, point_clouds
from lieattn.ops import bessel_functions


class TwoConvolutions(torch.nn.Module):
    """Two tensor-product convolutions, whose l = 1 part is summed to one vector per cloud."""

    kind = "vector"  # how the outputs transform, for `compare` and `certify`

    def __init__(self, in_channels: int, channels: int = 16, cutoff: float = 4.0) -> None:
        super().__init__()
        self.neighborhood, self.harmonics = Radius(cutoff), o3.Irreps("0e + 1o")
        irreps = [o3.Irreps(text) for text in (f"{in_channels}x0e", f"{channels}x0e + {channels}x1o", "1x1o")]
        products = [
            o3.FullyConnectedTensorProduct(one, self.harmonics, other, shared_weights=False)
            for one, other in itertools.pairwise(irreps)
        ]
        radial = [Sequential(Linear(8, 16), SiLU(), Linear(16, product.weight_numel)) for product in products]
        self.products, self.radial = torch.nn.ModuleList(products), torch.nn.ModuleList(radial)

    def forward(self, data: Data) -> Tensor:
        """Return vectors ``[clouds, 3]`` of a batch with features x ``[points, in_channels]``."""
        clouds = point_clouds(data)
        edges = find_neighbors(clouds, self.neighborhood)
        arrow = edges.displacements(clouds.pos)
        angles = o3.spherical_harmonics(self.harmonics, arrow, normalize=True, normalization="component")
        distances = bessel_functions(arrow.norm(dim=1) / self.neighborhood.length, 8)
        x = data.x
        for product, radial in zip(self.products, self.radial, strict=True):
            x = edges.sum_to_targets(product(x[edges.source], angles, radial(distances))) / edges.degree.mean(
                dtype=x.dtype
            )
        return clouds.sum(x)
