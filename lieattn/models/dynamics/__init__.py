"""Networks that are derivatives of an energy."""

from lieattn.models.dynamics._compiled import energy_among
from lieattn.models.dynamics._forces import differentiated

__all__ = ["differentiated", "energy_among"]
