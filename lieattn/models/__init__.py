"""The published networks and ours, assembled from ``lieattn.nn``: a folder for each family."""

from lieattn.models._network import EquivariantModule, GroupField, Network, Symmetry, VectorEmbedding, Wrapper
from lieattn.models.affine import AffineSelfConvNet, BottleneckBlock

__all__ = [
    "AffineSelfConvNet",
    "BottleneckBlock",
    "EquivariantModule",
    "GroupField",
    "Network",
    "Symmetry",
    "VectorEmbedding",
    "Wrapper",
]
