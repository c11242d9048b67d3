"""The published networks, assembled from ``lieattn.nn``: one paper a file."""

from lieattn.models._gsa_geometry import GSAGeometry
from lieattn.models._published_gsa import published_table
from lieattn.models.gsa_net import GSANet

__all__ = ["GSAGeometry", "GSANet", "published_table"]
