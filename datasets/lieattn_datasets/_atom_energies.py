"""Energies of free atoms, fitted to the energies of molecules."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
