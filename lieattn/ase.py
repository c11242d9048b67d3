"""A calculator of the Atomic Simulation Environment (ASE) for networks that predict energies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, kind
from lieattn._core.messages import needs_extra
from lieattn.io import settle, uncompiled
from lieattn.models import Captured, EnergyAndForce, EnergyForces, EnergyForceStress, Ensemble, Preprocessed, Rescaled
from lieattn.models.dynamics import differentiated, energy_among

with needs_extra("lieattn.ase", "chem"):
    from ase import Atoms, units
    from ase.calculators.calculator import Calculator as AseCalculator
    from ase.calculators.calculator import CalculatorSetupError, PropertyNotImplementedError, all_changes
    from ase.outputs import Properties
    from ase.stress import full_3x3_to_voigt_6_stress

__all__ = ["Calculator"]

EnergyUnit = Literal["eV", "meV", "kcal/mol", "kJ/mol", "Ha"]
LengthUnit = Literal["Å", "nm", "Bohr"]
DipoleUnit = Literal["e Å", "D", "e Bohr"]
Jumps = Literal["refuse", "allow"]
_ENERGIES = {"eV": 1.0, "meV": 1e-3, "kcal/mol": units.kcal / units.mol, "kJ/mol": units.kJ / units.mol, "Ha": units.Ha}
_LENGTHS = {"Å": 1.0, "nm": 10.0, "Bohr": units.Bohr}
_DIPOLES = {"e Å": 1.0, "D": units.Debye, "e Bohr": units.Bohr}
_OUTPUTS = {"dipole": ("dipole",), "charges": ("charges", "charge")}  # names of outputs for properties of ASE


class Calculator(AseCalculator):
    r"""ASE calculator for a network that predicts energies.

    Energies are in eV, forces :math:`-\partial E / \partial x_i` in eV/Å, and stresses
    :math:`(1 / V) \partial E / \partial \epsilon` in eV/Å³, where the strain ε moves atoms and cell. Stresses need
    cells that are periodic along all three vectors; for slabs, wires and molecules, ``get_stress`` raises ASE's
    ``PropertyNotImplementedError``. Forces and stresses are exact derivatives, so dynamics conserve energy up to the
    errors of time steps and rounding. Those of rounding are small in float32 (docs/trained.md), and smaller in float64,
    with ``network.double()``, which takes 1.2 to 2.5 times as long. If the model has references of atoms
    (:class:`lieattn.models.Rescaled`), as a regressor measures them, energies are at the level of its training data.
    Results do not depend on where atoms are, nor in which image: if the network is invariant to translations, its
    positions are rounded around the origin (:meth:`lieattn.geometry.PointClouds.around_origin`).

    Networks with several outputs also give dipole moments in e Å, from an output ``"dipole"`` ``[clouds, 3]``, and
    partial charges in e, from an output ``"charges"`` or ``"charge"`` of one number per atom. With other networks,
    ``atoms.get_dipole_moment()`` and ``atoms.get_charges()`` raise ASE's ``PropertyNotImplementedError``.

    Parameters
    ----------
    model
        Network with energies ``[clouds]`` or ``[clouds, 1]`` as outputs, in its own units: any invariant network with
        ``pool="sum"``, one with several outputs (:class:`lieattn.nn.Heads`), of which that named ``"energy"`` is used,
        or an :class:`lieattn.models.EnergyForces` around it. Either may be wrapped in
        :class:`lieattn.models.Rescaled`, as in ``task.model`` of a trained task, and in
        :class:`lieattn.models.Preprocessed`, or come from ``lieattn.load``. With an
        :class:`lieattn.models.Ensemble` of such networks, all results are means, and ``results`` also
        has the unbiased deviations ``"energy_std"`` (eV) and ``"forces_std"`` (eV/Å). The network is copied and put
        into eval mode. It reads ``data.pos``, ``data.z`` (int64 nuclear charges) and, for periodic atoms,
        ``data.cell`` and ``data.pbc``. Inputs for the whole structure (:class:`lieattn.models.CloudInputs`) are entries
        of ``atoms.info``, such as ``atoms.info["charge"] = 1``; ValueError is raised if they are missing. For an
        extensive energy, :class:`lieattn.models.LieTransformer` needs ``Readout(pool="sum", order="point_first")``;
        otherwise the forces in a crystal depend on the cell that describes it.
    transform
        Transform that adds further inputs of the network to the data, as in training:
        ``MoleculeFeatures((1, 6, 8), powers=1)`` of ``lieattn_datasets`` adds one-hot features ``data.x``. It is not
        needed for networks with :class:`lieattn.models.Species`, or with one constant feature that is 1.
    energy_unit, length_unit
        Units of the model: ``"eV"``, ``"meV"``, ``"kcal/mol"``, ``"kJ/mol"`` or ``"Ha"``, and ``"Å"``, ``"nm"`` or
        ``"Bohr"``.
    dipole_unit
        Unit of the output ``"dipole"``: ``"e Å"``, ``"D"`` (debye) or ``"e Bohr"``. Charges must be in e.
    jumps
        ``"refuse"`` raises ValueError for a model whose energies jump as atoms move, because dynamics would not
        conserve them; ``"allow"`` accepts it.
    compile
        Whether to compile energies, forces and stresses in the first calculation, which takes a minute, see
        :meth:`lieattn.models.EnergyForces.compile`.

    Raises
    ------
    ValueError
        If the energies jump, if energies and forces were trained with different scales, so that the forces are not the
        derivatives of the energies, or if an ensemble contains another one, whose mean counts as one network. If the
        model states that it has more than one number as output, or returns them when energies are computed, or if the
        energy of several outputs has no scale, because it was no target.
    ImportError
        When this module is imported, if ASE is not installed.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress", *_OUTPUTS]  # noqa: RUF012 - as in ASE

    def __init__(
        self,
        model: nn.Module,
        *,
        transform: Callable[[Data], Data] | None = None,
        energy_unit: EnergyUnit = "eV",
        length_unit: LengthUnit = "Å",
        dipole_unit: DipoleUnit = "e Å",
        jumps: Jumps = "refuse",
        compile: bool = False,
    ) -> None:
        check_arguments(Calculator.__init__, locals())
        super().__init__()
        with torch.inference_mode(False):  # otherwise the copies could not be differentiated
            first = [] if transform is None else [Preprocessed(nn.Identity(), transform)]
            self._members = [_Member(network, first + steps, jumps, compile) for network, steps in _networks(model)]
        self.model = self._members[0].model
        self.cloud_inputs = tuple(dict.fromkeys(name for one in self._members for name in one.model.cloud_inputs))
        if len(self._members) > 1:
            self.implemented_properties = [*type(self).implemented_properties, "energy_std", "forces_std"]
        self._energy, self._length = _ENERGIES[energy_unit], _LENGTHS[length_unit]
        self._factors = {"dipole": _DIPOLES[dipole_unit], "charges": 1.0}

    def __repr__(self) -> str:
        networks = ", ".join(type(one.model).__name__ for one in self._members)
        return f"{type(self).__name__}({networks})"

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """List the changes since the last calculation, including inputs in ``info``, which ASE does not compare."""
        changes: list[str] = super().check_state(atoms, tol=tol)
        known: Any = {} if self.atoms is None else self.atoms.info
        given: Any = atoms.info
        different = any(not np.array_equal(known.get(name), given.get(name)) for name in self.cloud_inputs)
        return [*changes, "info"] if different else changes

    @torch.inference_mode(False)
    def derivatives(
        self, data: Data, *, stress: bool
    ) -> list[tuple[EnergyAndForce | EnergyForceStress, dict[str, Tensor]]]:
        """Return the results of each network for a batch of structures in Å, and its other outputs by name.

        Energies ``[clouds]``, forces and, with ``stress``, stresses and virials are in float64, in eV and Å. Other
        outputs are in the units of the model. ``data`` has ``pos``, ``z`` and, for several structures, ``batch`` and
        ``ptr``; if they are periodic, ``cell`` and ``pbc``.
        """
        scaled, results = copy.copy(data), []
        for name in {"pos", "cell"} & set(data.keys()):
            scaled[name] = data[name].double() / self._length
        for one in self._members:
            found, others = differentiated(partial(one.outputs, unit=self._energy), scaled, stress=stress)
            found = found._replace(force=found.force.double() / self._length)
            if isinstance(found, EnergyForceStress):
                found = found._replace(stress=found.stress.double() / self._length**3)
            results.append((found, others))
        return results

    @torch.inference_mode(False)
    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Compute energy, forces and, for cells that are periodic along three vectors, the stress of the atoms.

        The results also have dipole and charges if the model has such outputs. Without ``atoms``, those of the last
        calculation are taken; ASE's ``CalculatorSetupError`` is raised if there are none.
        """
        super().calculate(atoms, properties, system_changes)
        if self.atoms is None:
            raise CalculatorSetupError("atoms: expected the atoms to compute, got None, and none were computed before")
        atoms = self.atoms
        whole = bool(atoms.pbc.all()) and atoms.cell.rank == 3
        if "stress" in properties and not whole:
            advice = (
                "for a slab whose vacuum is wider than the radius of the network, atoms.pbc = True changes nothing else"
            )
            raise PropertyNotImplementedError(
                f"stress: expected atoms that are periodic along all three cell vectors; {advice}"
            )
        weight = next(self.model.parameters(), torch.zeros(()))
        pos = torch.tensor(atoms.positions, device=weight.device)
        data = Data(pos=pos, z=torch.tensor(atoms.numbers, device=pos.device).long())
        if atoms.pbc.any():
            data.cell = torch.tensor(atoms.cell.array).to(pos)[None]
            data.pbc = torch.tensor(atoms.pbc, device=pos.device)[None]
        for name in self.cloud_inputs:
            data[name] = _number(atoms, name, pos)
        found = self.derivatives(data, stress=whole)
        each = [derivatives for derivatives, _ in found]
        energies = torch.stack([found.energy[0] for found in each])
        forces = torch.stack([found.force for found in each])
        energy = float(energies.mean())
        self.results = {"energy": energy, "free_energy": energy, "forces": _array(forces.mean(dim=0))}
        if len(each) > 1:
            self.results |= {"energy_std": float(energies.std()), "forces_std": _array(forces.std(dim=0))}
        if whole:
            stress = torch.stack([found.stress[0] for found in each if isinstance(found, EnergyForceStress)])
            self.results["stress"] = full_3x3_to_voigt_6_stress(_array(stress.mean(dim=0)))
        for name, factor in self._factors.items():
            values = [value for _, outputs in found if (value := _property(name, outputs, len(atoms))) is not None]
            if len(values) == len(found):
                self.results[name] = factor * _array(torch.stack(values).mean(dim=0))
            elif name in properties:
                shown = [{k: list(v.shape) for k, v in outputs.items()} or "only an energy" for _, outputs in found]
                what = "a dipole [1, 3]" if name == "dipole" else f"charges [{len(atoms)}] or [{len(atoms)}, 1]"
                raise PropertyNotImplementedError(
                    f"{name}: expected a model with {what} among its outputs, got {shown}"
                )

    def export_properties(self) -> Properties:
        """Return the results with names that ASE knows; deviations of ensembles are only in ``results``."""
        known = type(self).implemented_properties
        return Properties({name: value for name, value in self.results.items() if name in known})


class _Member:
    """A copy of one network, with the transforms of its inputs and the units of its outputs, outermost first."""

    def __init__(self, network: Any, steps: Sequence[Rescaled | Preprocessed], jumps: Jumps, compiled: bool) -> None:
        self.steps = copy.deepcopy(list(steps))
        network = copy.deepcopy(network)
        if isinstance(network, nn.Module):
            settle(network)  # a radius that was left open becomes sharp, as in training
        self.model, self.compiled = EnergyForces(network, jumps=jumps).eval().requires_grad_(False), compiled
        if compiled:
            self.model.compile()

    def outputs(self, given: Data, unit: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The energies ``[clouds]``, times a unit, and the other outputs of ``given`` data in float64.

        Transforms and the network compute in the precision of the weights, everything after them in float64.
        """
        # Networks in half precision compute distances in float32.
        dtype = torch.promote_types(next(self.model.parameters(), torch.zeros(())).dtype, torch.float32)
        data = rounded = copy.copy(given).apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
        units = list[tuple[Rescaled, str, Data]]()
        clouds = 1 if data.batch is None else len(data.ptr) - 1
        for step in self.steps:
            if isinstance(step, Rescaled):
                units.append((step, _energy_of(step), data))
            else:
                data = step(data)
        if data.pos is rounded.pos:  # transforms may depend on places, which the network need not know
            data = copy.copy(data)
            data.pos = self.model.rounded_positions(given, dtype)
        found = _compiled(self.model, data) if self.compiled else self.model.model(data)
        other = next((name for _, name, _ in units if name != "energy"), None)
        if isinstance(found, Mapping) and other is not None:
            raise ValueError(f"model: expected the scale of the output 'energy', got that of {other!r} alone")
        others = dict[str, Tensor]()
        if isinstance(found, Mapping):
            others = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        found = energy_among(found)
        if not isinstance(found, Tensor) or found.numel() != clouds:
            got = tuple(found.shape) if isinstance(found, Tensor) else kind(found)
            raise ValueError(f"model: expected one energy per cloud, [{clouds}] or [{clouds}, 1], got {got}")
        energy = found.double().reshape(clouds)
        for step, name, seen in reversed(units):
            energy = step.in_units(name, energy, seen).reshape(clouds)
            others = {
                other: step.in_units(other, x.double(), seen)
                for other, x in others.items()
                if other in step.names and other != name
            }
        return unit * energy, others


def _compiled(model: EnergyForces, data: Data) -> Any:
    """Return the outputs of the network in a model, which computes energies and derivatives as a compiled function."""
    fixed, cell = copy.copy(data), getattr(data, "cell", None)
    fixed.pos = data.pos.detach()
    model.stress = cell is not None and cell.requires_grad
    if cell is not None:
        fixed.cell = cell.detach()
    found: Any = model(fixed)
    outputs = dict(found) if isinstance(found, Mapping) else found._asdict()
    batch = data.z.new_zeros(data.num_nodes) if data.batch is None else data.batch
    # A linear function of the positions and the strain with this value and these derivatives.
    moved, energy = data.pos - fixed.pos, outputs["energy"]
    if model.stress:
        strain = torch.linalg.solve(fixed.cell, data.cell - fixed.cell)
        moved = moved - (fixed.pos[:, None] @ strain[batch])[:, 0]
        energy = energy - (outputs.pop("virial") * strain).sum(dim=(1, 2))
        del outputs["stress"]
    energy = energy.index_add(0, batch, -(outputs.pop("force") * moved).sum(dim=1))
    return {**outputs, "energy": energy} if isinstance(found, Mapping) else energy


def _networks(model: Any) -> list[tuple[Any, list[Rescaled | Preprocessed]]]:
    """The networks that give the energies (several for an ensemble), and what is between them and their results."""
    whole = uncompiled(model)
    if isinstance(whole, Ensemble):
        members = [_networks(network) for network in whole.networks]
        if any(len(found) > 1 for found in members):  # the mean of means is not the mean of all networks
            raise ValueError("model: expected an ensemble of networks, got one of ensembles; make one of all networks")
        return [found for (found,) in members]
    if isinstance(whole, EnergyForces):
        return _networks(whole.model)
    if not isinstance(whole, Captured | Preprocessed | Rescaled):
        return [(model, [])]
    steps: list[Rescaled | Preprocessed] = []
    if isinstance(whole, Rescaled):
        _energy_of(whole)
        scales, shifts = ({name: whole.units(name)[part] for name in whole.names} for part in (0, 1))
        tables = {name: table for name in whole.names if (table := whole.references(name)) is not None}
        # A copy without the network, which is copied by itself.
        steps = [Rescaled(nn.Identity(), scales, shifts, whole.extensive, tables)]
    if isinstance(whole, Preprocessed):
        steps = [Preprocessed(nn.Identity(), whole.transform)]
    return [(network, [*steps, *inner]) for network, inner in _networks(whole.network)]


def _property(name: str, outputs: Mapping[str, Any], atoms: int) -> Tensor | None:
    """A property of ASE among the outputs for one structure, ``[3]`` or ``[atoms]``; None if there is none."""
    shapes = ((1, 3),) if name == "dipole" else ((atoms,), (atoms, 1))
    for output in _OUTPUTS[name]:
        value = outputs.get(output)
        if isinstance(value, Tensor) and tuple(value.shape) in shapes:
            return value.double().reshape(-1)
    return None


def _number(atoms: Atoms, name: str, like: Tensor) -> Tensor:
    """A number in ``atoms.info`` that describes the whole structure, ``[1]``."""
    value = atoms.info.get(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"atoms.info[{name!r}]: expected a number, which is an input of the model, got {value!r}")
    return like.new_tensor([float(value)])


def _array(tensor: Tensor) -> Any:
    """Convert a tensor to an array in float64."""
    return tensor.double().cpu().numpy()


def _energy_of(model: Rescaled) -> str:
    """The name of the energies; ValueError if their derivatives were trained with another scale."""
    name = "energy" if "energy" in model.names else model.names[0]
    if name in ("force", "stress", "virial") or (len(model.names) > 1 and name != "energy"):
        raise ValueError(f"model: expected one with energies as outputs, got outputs {sorted(model.names)}")
    scale, shift = model.units(name)
    if (several := max(scale.numel(), shift.numel())) > 1:
        raise ValueError(f"model: expected one energy per cloud, got scales and shifts of {several} outputs")
    for derived in ("force", "stress", "virial"):
        if derived in model.names and not torch.equal(scale.reshape(()), model.units(derived)[0].reshape(())):
            what = f"its outputs {derived!r} are not in the units of the derivatives of its energies"
            pair = {derived: "force"} if derived != "force" and "force" in model.names else {name: derived}
            raise ValueError(f"model: {what}; train with scale_of={pair}")
    return name
