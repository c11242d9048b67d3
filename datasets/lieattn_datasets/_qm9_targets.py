"""The nineteen targets of QM9."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._units import Units

SPECIES = (1, 6, 7, 8, 9)

_ATOM_HEAT_CAPACITY = 2.981  # 3/2 R in cal/(mol K) for every free atom, from the table of references of QM9
_FROM_ATOMS = {name: f"{name}_atom" for name in ("u0", "u298", "h298", "g298")}


@dataclass(frozen=True)
class Quantity:
    """Unit of a stored target: ``unit ** power``."""

    unit: str
    power: int = 1


def quantities(energy: str, atomization: str) -> dict[str, Quantity]:
    """Return the units of all targets, in the order of the files. Files store energies in different units."""
    total, bohr = Quantity(energy), "bohr"
    return {
        "mu": Quantity("D"),
        "alpha": Quantity(bohr, 3),
        "homo": total,
        "lumo": total,
        "gap": total,
        "r2": Quantity(bohr, 2),
        "zpve": total,
        "u0": total,
        "u298": total,
        "h298": total,
        "g298": total,
        "cv": Quantity("cal/(mol K)"),
        **dict.fromkeys(_FROM_ATOMS.values(), Quantity(atomization)),
        **dict.fromkeys("ABC", Quantity("GHz")),
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
    stored: dict[str, Quantity],
    names: Sequence[str],
    atoms: NDArray[np.float64],
    units: Units,
    references: bool,
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Select targets from the stored table, subtract contributions of free atoms, and convert the units.

    Parameters
    ----------
    table
        All targets ``[molecules, 19]``, in the units of ``stored``.
    stored
        Unit of each column.
    names
        Names of the selected targets.
    atoms
        Number of atoms of each molecule, ``[molecules]``.
    units
        Units of the result.
    references
        Whether energies and heat capacities of the free atoms are subtracted.

    Returns
    -------
    tuple
        Targets ``[molecules, names]`` and the unit of each.
    """
    order = list(stored)
    columns, labels = [], []
    for name in names:
        column = _FROM_ATOMS.get(name, name) if references else name
        factor, label = units.convert(stored[column].unit, stored[column].power)
        values = table[:, order.index(column)]
        if references and name == "cv":
            values = values - _ATOM_HEAT_CAPACITY * atoms
        columns.append(values * factor)
        labels.append(label)
    return np.stack(columns, axis=1), tuple(labels)
