"""Relaxation and dynamics of many molecules in one batch: torch-sim beside ASE, with the trained network of ethanol.

It needs ``pip install "lieattn[torchsim]"``.
"""

from time import perf_counter

import torch
import torch_sim as ts
from ase import units
from ase.build import molecule
from ase.md.verlet import VelocityVerlet
from ase.optimize import FIRE

import lieattn
from lieattn.ase import Calculator
from lieattn.torchsim import Model


def main(molecules: int = 64, dynamics: int = 20) -> dict[str, float]:
    """Return molecules per second, and the largest difference of relaxed energies in eV."""
    calculator = Calculator(lieattn.load("ethanol-energy"), energy_unit="meV")
    shaken, times = [molecule("CH3CH2OH") for _ in range(molecules)], [perf_counter()]
    for seed, atoms in enumerate(shaken):
        atoms.rattle(0.03, seed=1000 + seed)
    # The names of optimizers and integrators are those of torch-sim 0.3, or of later versions.
    fire, nve = getattr(ts, "Optimizer", ts.optimizers).fire, getattr(ts, "Integrator", ts.integrators).nve
    model = Model(calculator, memory_scales_with="n_atoms")
    relaxed = ts.generate_force_convergence_fn(0.05, include_cell_forces=False)
    batch = ts.optimize(shaken, model, optimizer=fire, convergence_fn=relaxed, max_steps=200)
    times.append(perf_counter())
    ts.integrate(batch, model, integrator=nve, n_steps=dynamics, temperature=300, timestep=5e-4)  # in ps
    times.append(perf_counter())
    for atoms in shaken:
        atoms.calc = calculator
        FIRE(atoms, logfile=None).run(fmax=0.05, steps=200)
    energies = torch.tensor([atoms.get_potential_energy() for atoms in shaken])
    times.append(perf_counter())
    for atoms in shaken:
        VelocityVerlet(atoms, timestep=0.5 * units.fs).run(dynamics)
    times.append(perf_counter())
    names = ("relaxation, torch-sim", "dynamics, torch-sim", "relaxation, ASE", "dynamics, ASE")
    found = {name: molecules / (end - start) for name, start, end in zip(names, times, times[1:], strict=False)}
    print(", ".join(f"{name}: {value:.1f} molecules/s" for name, value in found.items()))
    return found | {"difference": float((batch.energy - energies).abs().max())}


if __name__ == "__main__":
    print(main())
