"""Published networks of other libraries, with the interface of the networks of this library.

Each class is an adapter. It passes kinds of points and the edges of :mod:`lieattn.geometry` to a network of another
library, and computes numbers of clouds, or vectors of clouds or points, from the resulting features. In addition to the
weights of the other library it has a small read-out, which is the same for all networks. Packages are imported when a
network is constructed, so only the packages of used networks must be installed: see README.md.

Forces of networks without directed features are gradients of energies, computed by
:class:`lieattn.models.EnergyForces`.
"""

from ._base import BesideStraightLines, FeaturePeer, Peer, Points
from ._geometric import DimeNet, GeometricSchNet, ViSNet, edge_pairs
from ._images import PlainViT, SmallCNN, SteerableCNN, raster
from ._published import EGNN, MACE, NequIP, PaiNN, SchNet
from ._shapes import DGCNN, PointNet, PointTransformer

__all__ = [
    "DGCNN",
    "EGNN",
    "MACE",
    "BesideStraightLines",
    "DimeNet",
    "FeaturePeer",
    "GeometricSchNet",
    "NequIP",
    "PaiNN",
    "Peer",
    "PlainViT",
    "PointNet",
    "PointTransformer",
    "Points",
    "SchNet",
    "SmallCNN",
    "SteerableCNN",
    "ViSNet",
    "edge_pairs",
    "raster",
]
