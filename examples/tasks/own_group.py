"""A group from generators: the symmetries of a hexagonal prism, with weights shared by all of them."""

import math

import torch
from torch_geometric.data import Data

from lieattn.certify import certify
from lieattn.geometry import Radius
from lieattn.groups import FiniteGroup
from lieattn.models import LieTransformer


def hexagonal_prism() -> FiniteGroup:
    """A sixth of a turn about the vertical, a mirror that holds it, and the mirror across it: 24 elements."""
    c, s = math.cos(math.pi / 3), math.sin(math.pi / 3)
    sixth = torch.tensor([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    mirrors = torch.diag_embed(torch.tensor([[-1.0, 1.0, 1.0], [1.0, 1.0, -1.0]], dtype=torch.float64))
    return FiniteGroup.generate(torch.stack([sixth, *mirrors]), "D6h")


def main(points: int = 6, continuity: bool = True) -> float:
    """Build a network on the group and return its largest error under an element, in float64."""
    torch.manual_seed(0)
    group = hexagonal_prism()
    print(f"{group.name}: {group.order} elements")
    near = Radius(1.5, smooth=True)
    network = LieTransformer(2, 3, frames=group, neighborhood=near, channels=8, layers=2, heads=2)
    cloud = Data(x=torch.randn(points, 2), pos=torch.randn(points, 3))
    certificate = certify(network, cloud, continuity=continuity)
    print(f"{certificate.verdict}; largest errors: {certificate.worst()}")
    return certificate.worst()["float64"]


if __name__ == "__main__":
    main()
