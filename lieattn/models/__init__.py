"""The published networks and ours, assembled from ``lieattn.nn``: a folder for each family."""

from lieattn.models._network import GroupField, Network, Symmetry, VectorEmbedding

__all__ = [
    "GroupField",
    "Network",
    "Symmetry",
    "VectorEmbedding",
]
