"""Networks that are derivatives of an energy."""

from lieattn.models.dynamics._compiled import energy_among
from lieattn.models.dynamics._forces import EnergyAndForce, EnergyForces, EnergyForceStress, differentiated
from lieattn.models.dynamics._trajectories import EnergyDrift, HamiltonianDynamics, Trajectory, energy_drift

__all__ = [
    "EnergyAndForce",
    "EnergyDrift",
    "EnergyForceStress",
    "EnergyForces",
    "HamiltonianDynamics",
    "Trajectory",
    "differentiated",
    "energy_among",
    "energy_drift",
]
