"""Dynamics of ethanol at constant energy, with a trained network of the library.

Without arguments it runs 1 ps. ``python examples/tasks/trained_md.py 10 data aspirin`` runs 10 ps of aspirin, and draws
the distances of atoms beside those of ``rmd17_split01.npz`` in the folder ``data``, as ``aspirin_distances.png``.
"""

import sys

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from matplotlib import pyplot
from scipy.spatial.distance import pdist

import lieattn
from lieattn.ase import Calculator
from lieattn_datasets import RMD17Subset


def main(picoseconds: float = 1.0, root: str | None = None, name: str = "ethanol") -> tuple[float, float]:
    """Return the drift of the energy in meV per atom and ps, and the mean temperature in K."""
    frames = None if root is None else RMD17Subset(root, name, "train", validation=0)
    atoms = molecule("CH3CH2OH") if frames is None else Atoms(frames[0].z.numpy(), frames[0].pos.double().numpy())
    # Compiling takes a minute.
    atoms.calc = Calculator(lieattn.load(f"{name}-energy").double(), energy_unit="meV", compile=picoseconds > 10)
    BFGS(atoms, logfile=None).run(fmax=0.01, steps=100)
    # Half of the kinetic energy becomes potential energy, so that the mean temperature is about 500 K.
    MaxwellBoltzmannDistribution(atoms, temperature_K=1000, force_temp=True, rng=np.random.default_rng(0))
    Stationary(atoms)
    ZeroRotation(atoms)
    dynamics, energies, kelvin = VelocityVerlet(atoms, timestep=0.5 * units.fs), list[float](), list[float]()
    distances = {f"{picoseconds:g} ps of dynamics": list[np.ndarray]()}
    for _ in range(round(200 * picoseconds)):
        dynamics.run(10)
        energies.append(1000 * atoms.get_total_energy() / len(atoms))
        kelvin.append(atoms.get_temperature())
        distances[f"{picoseconds:g} ps of dynamics"].append(pdist(atoms.positions))
    drift = float(np.polyfit(np.linspace(0, picoseconds, len(energies)), energies, 1)[0])
    print(f"{np.mean(kelvin):.0f} K; energy per atom: drift {drift:.4f} meV/ps, spread {np.std(energies):.4f} meV")
    if frames is not None:
        distances["frames of revised MD17"] = [pdist(frames[index].pos.numpy()) for index in range(len(frames))]
        values = [np.concatenate(one) for one in distances.values()]
        found = pyplot.hist(values, [i / 20 for i in range(16, 200)], density=True, histtype="step", label=[*distances])
        pyplot.gca().set(xlabel=f"distance of two atoms of {name}, Å", ylabel="density, 1/Å")
        pyplot.legend()
        pyplot.savefig(f"{name}_distances.png", dpi=80)
        print(f"{2.5 * abs(np.diff(np.array(found[0]), axis=0)).sum():.1f} % of the distances are at other places")
    return drift, float(np.mean(kelvin))


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:]) if sys.argv[1:] else main()
