"""Crystals: train on energies, forces and stresses of strained argon, then relax its lattice with ASE."""

from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.filters import FrechetCellFilter
from ase.io import write
from ase.optimize import BFGS

from lieattn.ase import Calculator
from lieattn.cli import main as lieattn
from lieattn.train import load_task
from lieattn_datasets import ExtendedXYZ, MoleculeFeatures

CONFIG = Path(__file__).parent.parent / "configs" / "crystals.yaml"


def argon(seed: int, size: float = 0.1) -> Atoms:
    """Return four displaced atoms of argon in a randomly strained cell, with energy, forces and stress."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True)
    strain = np.random.default_rng(seed).normal(scale=size / 3, size=(3, 3))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    atoms.rattle(size, seed=seed)
    atoms.calc = LennardJones(epsilon=0.0104, sigma=3.4, rc=6.0)
    atoms.get_stress()
    return atoms


def main(frames: int = 200, epochs: int = 10) -> tuple[float, float]:
    """Return the mean absolute error of the entries of the stress in eV/Å³ and the error of the cell length in Å."""
    Path("data").mkdir(exist_ok=True)
    write("data/crystals.xyz", [argon(seed) for seed in range(frames)])
    lieattn(["fit", "--config", str(CONFIG), "--trainer.max_epochs", str(epochs)])
    task = load_task("runs/crystals/checkpoints/best.ckpt")
    features = MoleculeFeatures((18,), powers=1)
    held = ExtendedXYZ("data/crystals.xyz", "test", transform=features)
    errors = [float((task.model(held[i])["stress"] - held[i].stress).abs().mean()) for i in range(len(held))]
    sides = []
    for calculator in (Calculator(task.model, transform=features), LennardJones(epsilon=0.0104, sigma=3.4, rc=6.0)):
        atoms = argon(frames)
        atoms.calc = calculator
        BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=0.005, steps=100)  # type: ignore[arg-type]
        sides.append(atoms.cell.lengths().mean())
    print(f"stress error {np.mean(errors):.6f} eV/Å³; cell length {sides[0]:.3f} Å, reference {sides[1]:.3f} Å")
    return float(np.mean(errors)), float(abs(sides[0] - sides[1]))


if __name__ == "__main__":
    main()
