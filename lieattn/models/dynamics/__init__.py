"""Forces of energies, and dynamics of Hamiltonians, for any network."""

from lieattn.models.dynamics._energy_forces import EnergyAndForce, EnergyForces
from lieattn.models.dynamics._hamiltonian import EnergyDrift, HamiltonianDynamics, Trajectory, energy_drift

__all__ = [
    "EnergyAndForce",
    "EnergyDrift",
    "EnergyForces",
    "HamiltonianDynamics",
    "Trajectory",
    "energy_drift",
]
