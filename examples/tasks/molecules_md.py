"""Molecular dynamics of your own molecules: train on forces of frames from ASE, then run dynamics with ASE."""

import torch
from ase import units
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from torch_geometric.data import Batch, Data

from lieattn.ase import Calculator
from lieattn.geometry import Radius
from lieattn.models import EnergyForces
from lieattn.models.irreps import DistanceTransformer


def features(data: Data) -> Data:
    """Add one-hot species as features. The calculator applies the same function."""
    return data.update({"x": (data.z[:, None] == torch.tensor([1, 6, 8])).double()})


def frame(seed: int) -> Data:
    """Return ethanol with random displacements, in Å, and forces in eV/Å."""
    atoms = molecule("CH3CH2OH", calculator=EMT())
    atoms.rattle(0.08, seed=seed)
    z, pos, force = (torch.tensor(x) for x in (atoms.numbers, atoms.positions, atoms.get_forces()))
    return features(Data(z=z, pos=pos, force=force))


def main(frames: int = 64, steps: int = 300) -> tuple[float, float]:
    """Return the mean absolute error of force components in eV/Å, and the energy drift in 25 fs in eV."""
    torch.manual_seed(0)
    data = [frame(seed) for seed in range(frames + 16)]
    network = DistanceTransformer(3, 1, neighborhood=Radius(4.0), channels=32, layers=2, heads=2, pool="sum")
    model = EnergyForces(network.double())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        batch = Batch.from_data_list([data[(8 * step + k) % frames] for k in range(8)])
        optimizer.zero_grad()
        (model(batch).force - batch.force).abs().mean().backward()
        optimizer.step()
    held = Batch.from_data_list(data[frames:])
    error = (model.eval()(held).force - held.force).abs().mean().item()
    atoms = molecule("CH3CH2OH", calculator=Calculator(model, transform=features))
    BFGS(atoms, logfile=None).run(fmax=0.05, steps=50)
    atoms.rattle(0.05)
    before = atoms.get_total_energy()
    VelocityVerlet(atoms, timestep=0.5 * units.fs).run(50)
    print(f"force error {error:.3f} eV/Å; energy {before:.4f} eV, after 25 fs {atoms.get_total_energy():.4f} eV")
    return error, abs(atoms.get_total_energy() - before)


if __name__ == "__main__":
    main()
