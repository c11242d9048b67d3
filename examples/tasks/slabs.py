"""Slabs: train on energies, forces and stresses of films of argon in vacuum, then relax film and lattice with ASE."""

from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import fcc111
from ase.calculators.lj import LennardJones
from ase.filters import FrechetCellFilter
from ase.io import write
from ase.optimize import BFGS

from lieattn.ase import Calculator
from lieattn.cli import main as lieattn
from lieattn.train import load_task
from lieattn_datasets import ExtendedXYZ, MoleculeFeatures


def film(seed: int, size: float = 0.1) -> Atoms:
    """Return four layers of displaced atoms of argon, strained along the film, with energy, forces and stress."""
    atoms = fcc111("Ar", (1, 1, 4), a=5.3, vacuum=6.0)
    # The vacuum is wider than all cutoffs, and stresses are those of the cell with its vacuum.
    atoms.pbc, atoms.info = True, {}
    strain = np.pad(np.random.default_rng(seed).normal(scale=size / 3, size=(2, 2)), (0, 1))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    atoms.rattle(size, seed=seed)
    atoms.calc = LennardJones(epsilon=0.0104, sigma=3.4, rc=6.0)
    atoms.get_stress()
    return atoms


def main(frames: int = 200, epochs: int = 10) -> tuple[float, float]:
    """Return the mean absolute error of the stress along the film in eV/Å³, and that of its lattice constant in Å."""
    write("slabs.xyz", [film(seed) for seed in range(frames)])
    options = [f"--data.{part}.path=slabs.xyz" for part in ("train", "val", "test")]
    options += ["--trainer.default_root_dir=runs/slabs", f"--trainer.max_epochs={epochs}"]
    lieattn(["fit", f"--config={Path(__file__).parent.parent / 'configs' / 'crystals.yaml'}", *options])
    task, features = load_task("runs/slabs/checkpoints/best.ckpt"), MoleculeFeatures((18,), powers=1)
    held = ExtendedXYZ("slabs.xyz", "test", transform=features)
    errors = [(task.model(held[i])["stress"] - held[i].stress)[0, :2, :2].abs().mean().item() for i in range(len(held))]
    sides = []
    for calculator in (Calculator(task.model, transform=features), LennardJones(epsilon=0.0104, sigma=3.4, rc=6.0)):
        atoms = film(frames)
        atoms.calc = calculator
        along = FrechetCellFilter(atoms, mask=[True, True, False, False, False, True])  # the vacuum stays as it is
        BFGS(along, logfile=None).run(fmax=0.005, steps=100)  # type: ignore[arg-type]
        sides.append(atoms.cell.lengths()[:2].mean())
    print(f"stress error {np.mean(errors):.6f} eV/Å³; lattice constant {sides[0]:.3f} Å, reference {sides[1]:.3f} Å")
    return float(np.mean(errors)), float(abs(sides[0] - sides[1]))


if __name__ == "__main__":
    main()
