"""GSA-Nets: group equivariant stand-alone self-attention."""

from lieattn.models.gsa._network import GSANet
from lieattn.models.gsa._options import Dropouts, GSAGeometry, GSAOptions, GSAReadout, Stages

__all__ = ["Dropouts", "GSAGeometry", "GSANet", "GSAOptions", "GSAReadout", "Stages"]
