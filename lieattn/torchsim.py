"""A model of torch-sim for networks that predict energies."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments
from lieattn._core.messages import needs_extra
from lieattn.ase import Calculator
from lieattn.models import EnergyForceStress

with needs_extra("lieattn.torchsim", "torchsim"):
    from torch_sim import SimState
    from torch_sim.models.interface import ModelInterface

__all__ = ["Model"]


class Model(ModelInterface):
    """Model of torch-sim, which simulates many systems in one batch.

    Energies are in eV, forces in eV/Å, and stresses in eV/Å³, those of the calculator for each system alone up to
    rounding. Results have the dtype of the state. Of an ensemble, they are means.

    Parameters
    ----------
    calculator
        The network with its units, transforms and checks, as for ASE.
    stress
        Whether to compute stresses. They are NaN unless the systems are periodic along all three cell vectors.
    memory_scales_with
        What torch-sim estimates the memory of a batch by. For molecules, which have no density, and for a network with
        a fixed number of neighbors, choose ``"n_atoms"``.

    Raises
    ------
    ImportError
        When this module is imported, if torch-sim or ASE is not installed.

    Examples
    --------
    >>> from ase.build import molecule
    >>> import torch_sim
    >>> from lieattn.ase import Calculator
    >>> from lieattn.models import LieTransformer, Readout, Species
    >>> network = LieTransformer(Species((1, 8)), 1, channels=8, layers=1, readout=Readout(pool="sum"))
    >>> model = Model(Calculator(network.double()), memory_scales_with="n_atoms")
    >>> state = torch_sim.initialize_state([molecule("H2O"), molecule("H2")], model.device, model.dtype)
    >>> model(state)["energy"].shape
    torch.Size([2])
    """

    def __init__(
        self,
        calculator: Calculator,
        *,
        stress: bool = False,
        memory_scales_with: Literal["n_atoms", "n_atoms_x_density"] = "n_atoms_x_density",
    ) -> None:
        check_arguments(Model.__init__, locals())
        super().__init__()
        self.calculator = calculator
        weight = next(calculator.model.parameters(), torch.zeros((), dtype=torch.float64))
        self._device, self._dtype = weight.device, torch.promote_types(weight.dtype, torch.float32)
        self._compute_stress, self._compute_forces, self._memory_scales_with = stress, True, memory_scales_with

    def forward(self, state: SimState, **kwargs: Any) -> dict[str, Tensor]:
        """Return ``energy`` ``[systems]``, ``forces`` ``[atoms, 3]`` and perhaps ``stress`` ``[systems, 3, 3]``.

        Inputs for whole systems (:class:`lieattn.models.CloudInputs`) are attributes of the state, ``[systems]``, such
        as ``charge``; ValueError is raised if they are missing. Further arguments are not used.
        """
        position, systems = state.positions, state.n_systems
        ptr = torch.bincount(state.system_idx, minlength=systems).cumsum(0)
        data = Data(pos=position.double(), z=state.atomic_numbers.long(), batch=state.system_idx)
        data.ptr = torch.cat([ptr.new_zeros(1), ptr])
        periodic = torch.as_tensor(state.pbc, device=position.device)
        if periodic.any():
            data.cell, data.pbc = state.row_vector_cell.double(), periodic.expand(systems, 3)
        for name in self.calculator.cloud_inputs:
            if not isinstance(value := getattr(state, name, None), Tensor):
                raise ValueError(f"state.{name}: expected numbers [{systems}], an input of the model, got {value!r}")
            data[name] = value.double()
        found = [each for each, _ in self.calculator.derivatives(data, stress=self._compute_stress)]
        results = {
            "energy": torch.stack([each.energy for each in found]),
            "forces": torch.stack([each.force for each in found]),
        }
        if self._compute_stress:
            results["stress"] = torch.stack([each.stress for each in found if isinstance(each, EnergyForceStress)])
        return {name: values.mean(dim=0).to(position) for name, values in results.items()}
