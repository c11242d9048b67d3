"""Targets of molecules in chosen units (CODATA 2018), relative to free atoms or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_choice

_ALLOWED = {
    "energy": ("eV", "meV", "Ha", "kcal/mol"),
    "dipole": ("D", "e angstrom", "e bohr"),
    "length": ("bohr", "angstrom"),
}

_FACTORS = {
    "eV": ("energy", 1.0),
    "meV": ("energy", 1e-3),
    "Ha": ("energy", 27.211386245988),
    "kcal/mol": ("energy", 4184.0 / 96485.33212331),
    "D": ("dipole", 1.0),
    "e angstrom": ("dipole", 2.5417464739 / 0.529177210903),
    "e bohr": ("dipole", 2.5417464739),
    "angstrom": ("length", 1.0),
    "bohr": ("length", 0.529177210903),
}


@dataclass(frozen=True)
class Units:
    """Units of the results. Quantities other than energies, dipoles and lengths are not converted."""

    energy: str = "eV"
    dipole: str = "D"
    length: str = "bohr"

    def __post_init__(self) -> None:
        for dimension, allowed in _ALLOWED.items():
            check_choice(f"{dimension}_unit", getattr(self, dimension), allowed)

    def convert(self, unit: str, power: int = 1) -> tuple[float, str]:
        """Return the factor that converts a number in ``unit ** power``, and the name of its new unit."""
        if unit not in _FACTORS:
            return 1.0, unit
        dimension, value = _FACTORS[unit]
        target: str = getattr(self, dimension)
        name = target if power == 1 else f"{target}^{power}"
        return float((value / _FACTORS[target][1]) ** power), name


def composition(z: NDArray[Any], offsets: NDArray[np.int64], species: Sequence[int]) -> NDArray[np.float64]:
    """Count the atoms of each species in each molecule, ``[molecules, species]``."""
    running = np.zeros((len(z) + 1, len(species)))
    np.cumsum(z[:, None] == np.asarray(species), axis=0, out=running[1:])
    return np.diff(running[offsets], axis=0)


def fit_atoms(
    energy: NDArray[np.float64], z: NDArray[Any], offsets: NDArray[np.int64], train: NDArray[np.int64]
) -> tuple[dict[int, float], NDArray[np.float64]]:
    """Fit one energy per species to the training molecules; return the energies and their sum over each molecule.

    ValueError is raised if a species does not occur in the training molecules.
    """
    species = [charge for charge in range(1, 119) if (z == charge).any()]
    counts = composition(z, offsets, species)
    if unseen := [charge for charge, of in zip(species, counts[train].T, strict=True) if not of.any()]:
        raise ValueError(
            f"references: expected training molecules with all elements, got none with the element {unseen[0]}; use "
            "more molecules, or references=False"
        )
    fitted, *_ = np.linalg.lstsq(counts[train], energy[train], rcond=None)
    return dict(zip(species, fitted.tolist(), strict=True)), counts @ fitted


SPECIES = (1, 6, 7, 8, 9)

_ATOM_HEAT_CAPACITY = 2.981  # 3/2 R in cal/(mol K) for every free atom, from the table of references of QM9
_FROM_ATOMS = {name: f"{name}_atom" for name in ("u0", "u298", "h298", "g298")}


def quantities(energy: str, atomization: str) -> dict[str, tuple[str, int]]:
    """Return unit and power of all targets, in the order of the files. Files store energies in different units."""
    total = energy, 1
    return {
        "mu": ("D", 1),
        "alpha": ("bohr", 3),
        "homo": total,
        "lumo": total,
        "gap": total,
        "r2": ("bohr", 2),
        "zpve": total,
        "u0": total,
        "u298": total,
        "h298": total,
        "g298": total,
        "cv": ("cal/(mol K)", 1),
        **dict.fromkeys(_FROM_ATOMS.values(), (atomization, 1)),
        **dict.fromkeys("ABC", ("GHz", 1)),
    }


TARGETS = tuple(quantities("eV", "eV"))


def select_names(targets: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the chosen targets: one name, several names, or ``"all"``."""
    names = (tuple(known) if targets == "all" else (targets,)) if isinstance(targets, str) else tuple(targets)
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) != len(names):
        allowed = ", ".join(map(repr, known))
        raise ValueError(f"targets: expected 'all' or different ones of {allowed}, got {targets!r}")
    return names


def select(
    table: NDArray[np.float64],
    stored: dict[str, tuple[str, int]],
    names: Sequence[str],
    atoms: NDArray[np.float64],
    units: Units,
    references: bool,
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Return chosen targets ``[molecules, names]`` of a table ``[molecules, 19]``, and the unit of each.

    The columns of the table have the units ``stored``. With ``references``, energies and heat capacities of the free
    atoms are subtracted, of which each molecule has ``atoms`` ``[molecules]``.
    """
    order = list(stored)
    columns, labels = [], []
    for name in names:
        column = _FROM_ATOMS.get(name, name) if references else name
        factor, label = units.convert(*stored[column])
        values = table[:, order.index(column)]
        if references and name == "cv":
            values = values - _ATOM_HEAT_CAPACITY * atoms
        columns.append(values * factor)
        labels.append(label)
    return np.stack(columns, axis=1), tuple(labels)
