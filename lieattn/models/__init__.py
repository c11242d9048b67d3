"""The published networks and ours, assembled from ``lieattn.nn``: a folder for each family."""

from lieattn.models._network import EquivariantModule, GroupField, Network, Symmetry, VectorEmbedding, Wrapper

__all__ = [
    "EquivariantModule",
    "GroupField",
    "Network",
    "Symmetry",
    "VectorEmbedding",
    "Wrapper",
]
