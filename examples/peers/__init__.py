"""Networks that other libraries have published, read and called as the networks of this one.

Each class here is an adapter: it hands kinds of points and the edges that :mod:`lieattn.geometry` finds to a network of
another library, and reads numbers of clouds, or vectors of clouds or points, from the features that come back. What is
learned besides the other library's own weights is a small read-out, the same for all. Packages are imported where a
network is made, so only those that are used must be installed: README.md.

Forces of networks without directed features are gradients of energies, of :class:`lieattn.models.EnergyForces` around
them.
"""

from ._base import BesideStraightLines, Peer, Points
from ._geometric import DimeNet, GeometricSchNet, ViSNet, edge_pairs
from ._published import EGNN, MACE, NequIP, PaiNN, SchNet
from ._shapes import PointNet, PointTransformer

__all__ = [
    "EGNN",
    "MACE",
    "BesideStraightLines",
    "DimeNet",
    "GeometricSchNet",
    "NequIP",
    "PaiNN",
    "Peer",
    "PointNet",
    "PointTransformer",
    "Points",
    "SchNet",
    "ViSNet",
    "edge_pairs",
]
