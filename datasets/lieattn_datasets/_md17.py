"""Revised MD17: energies and forces along molecular dynamics of ten small molecules.

torch_geometric's reader has no official splits, and rounds total energies to float32, that is, to 0.02 kcal/mol.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_arguments, check_choice
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release
from lieattn_datasets._molecules import HEAVIEST, Molecules
from lieattn_datasets._splits import Split, half_of, hold_out
from lieattn_datasets._targets import Units

_Frames = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]  # charges, positions, energies, forces

_FRAMES = 1000  # in each half, training and test, of an official split
_STORED = "kcal/mol"
_CITATION = "rMD17: Christensen, von Lilienfeld, Machine Learning: Science and Technology 1, 045018 (2020)."

MD17_MOLECULES = (
    "aspirin",
    "azobenzene",
    "benzene",
    "ethanol",
    "malonaldehyde",
    "naphthalene",
    "paracetamol",
    "salicylic",
    "toluene",
    "uracil",
)
"""Names of the ten molecules of revised MD17."""

_HALVES = ("train", "test")
_INDICES = "index_{}_{:02d}.csv"  # name of the file for a half and a split
_FILES = (
    *(f"rmd17_{molecule}.npz" for molecule in MD17_MOLECULES),
    *(_INDICES.format(half, number) for half in _HALVES for number in range(1, 6)),
)

_OFFICIAL = Release(
    dataset="rMD17",
    origin=(
        "The files are rmd17_MOLECULE.npz, index_train_0K.csv and index_test_0K.csv, unpacked from rmd17.tar.bz2. "
        f"{_CITATION}"
    ),
    folders=("npz_data", "splits", "rmd17/npz_data", "rmd17/splits"),
    sources=(replace(SOURCES["rMD17"][0], members=_FILES),),
)
SUBSET = Release(
    dataset="rMD17, split 1",
    origin=f"The file is rmd17_split01.npz, the frames of the first official split. {_CITATION}",
    digests={"rmd17_split01.npz": "content:d4bd64186f7eceb8d80b5f48794293d8db103ae571d69d6a4ecfdb3d6f31e0a0"},
)


class _Trajectory(Molecules):
    """Frames of one molecule. With ``references`` their energies are relative to the mean of the training frames.

    The mean is computed and subtracted in float64. Total energies are about 1e5 kcal/mol, which float32 would round to
    0.02 kcal/mol.
    """

    vectors: tuple[str, ...] = ("pos", "force")

    def __init__(
        self,
        frames: _Frames,
        halves: dict[str, NDArray[np.int64]],
        split: str,
        validation: int,
        energy_unit: str,
        center: bool,
        references: bool,
        transform: Transform | None,
    ) -> None:
        z, pos, energy, force = frames
        train, half = halves["train"], halves[half_of(split)]
        train = train[hold_out(len(train), validation, "train")]
        chosen = half[hold_out(len(half), validation, split)]
        factor, _ = Units(energy=energy_unit).convert(_STORED)
        self.energy_shift = float(energy[train].mean(dtype=np.float64) * factor)
        self.force_scale = float(np.sqrt(np.square(force[train], dtype=np.float64).mean()) * factor)
        pos, force = pos[chosen].astype(np.float64), force[chosen].astype(np.float64) * factor
        if center:
            pos -= pos.mean(axis=1, keepdims=True)
        count, atoms = pos.shape[:2]
        shifted = energy[chosen] * factor - (self.energy_shift if references else 0.0)
        self._total = () if references else ("y", "energy")
        super().__init__(
            np.tile(z, count),
            pos.reshape(-1, 3),
            atoms * np.arange(count + 1),
            shifted[:, None],
            ["energy"],
            [energy_unit],
            of_molecule={"energy": shifted},
            of_atom={"force": force.reshape(-1, 3)},
            transform=transform,
        )


class RMD17(_Trajectory):
    """Revised MD17 from its official files: 100,000 frames of each of ten molecules, PBE/def2-SVP.

    An item has ``z`` ``[atoms]``, ``pos`` ``[atoms, 3]`` in angstrom, ``y`` ``[1, 1]`` (the energy minus the mean of
    the training frames), ``energy`` ``[1]`` (the same number as ``y``), and ``force`` ``[atoms, 3]`` in the energy unit
    per angstrom.

    Only the frames of the chosen official split are used: 1,000 for training and 1,000 for testing. Frames are
    correlated in time; the authors advise against training on more than 1,000.

    Parameters
    ----------
    root
        Folder that contains ``rmd17_MOLECULE.npz`` and the ``index_*.csv``, directly or in the subfolders of the
        archive: ``npz_data``, ``splits``, ``rmd17/npz_data``, ``rmd17/splits``.
    molecule
        aspirin, azobenzene, benzene, ethanol, malonaldehyde, naphthalene, paracetamol, salicylic, toluene, uracil.
    split
        ``"train"``, ``"valid"`` or ``"test"``.
    number
        Number of the official split, 1 .. 5.
    validation
        Number of the 1,000 training frames that are set aside as ``"valid"``, by a permutation with a fixed seed: 50,
        as in the literature, leaves 950. Give the same number for all three splits, since the mean of the remaining
        training frames is subtracted from all energies.
    energy_unit
        ``"kcal/mol"`` (as stored), ``"eV"``, ``"meV"`` or ``"Ha"``.
    center
        Whether to shift the mean of the atoms' positions to the origin, in float64. Some trajectories drift away by 100
        angstrom.
    references
        Whether the mean energy of the training frames is subtracted. If False, energies are as in the file, in float64,
        so that those of a :class:`lieattn.ase.Calculator` are too: a :class:`lieattn.train.PointSetRegressor` measures
        the mean and adds it in its model.
    download
        Whether to download the archive, 1.1 GB, if files are missing, and unpack all molecules into the subfolder
        ``npz_data`` of the root. Nothing is downloaded otherwise.
    verify
        Whether to check the number of frames of each split. If False, any files in the same format are read.
    transform
        Function that is applied to each new ``Data``.

    Attributes
    ----------
    energy_shift : float
        Mean energy of the training frames, in the energy unit.
    force_scale : float
        Root mean square of the components of the training forces.
    """

    card = Card(
        "A. Christensen, O. A. von Lilienfeld",
        "CC0",
        "100,000 frames (azobenzene 99,988) of each of ten molecules of 9 to 24 atoms",
    )

    def __init__(
        self,
        root: str | Path,
        molecule: str = "ethanol",
        split: Split = "train",
        *,
        number: int = 1,
        validation: int = 50,
        energy_unit: str = _STORED,
        center: bool = True,
        references: bool = True,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(RMD17.__init__, locals())
        check_choice("molecule", molecule, MD17_MOLECULES)
        require(1 <= number <= 5, "number", "1, 2, 3, 4 or 5", number)
        frames, halves = read_official(root, molecule, number, download, verify)
        super().__init__(frames, halves, split, validation, energy_unit, center, references, transform)


class RMD17Subset(_Trajectory):
    """The frames of the first official split of revised MD17, for all ten molecules, in one file.

    Frames, items and attributes are the same as in ``RMD17(..., number=1)``.

    Parameters
    ----------
    root
        Folder with ``rmd17_split01.npz``.
    molecule, split, validation, energy_unit, center, references, transform
        As for :class:`RMD17`.
    verify
        Whether to compare the digest of the file. If False, any file in the same format is read; the first half of its
        frames is for training and the second for testing.
    """

    card = Card("A. Christensen, O. A. von Lilienfeld", "CC0", "1,000 + 1,000 frames of each of ten molecules")

    def __init__(
        self,
        root: str | Path,
        molecule: str = "ethanol",
        split: Split = "train",
        *,
        validation: int = 50,
        energy_unit: str = _STORED,
        center: bool = True,
        references: bool = True,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(RMD17Subset.__init__, locals())
        check_choice("molecule", molecule, MD17_MOLECULES)
        path = SUBSET.locate(root, *SUBSET.digests, verify=verify)
        frames = _read_frames(SUBSET, path, tuple(f"{molecule}_{key}" for key in "zREF"))
        size = len(frames[1])
        problem = f"holds {size} frames of {molecule}, expected some for training and some for testing"
        SUBSET.require(size > 1, path, problem)
        halves = dict(zip(_HALVES, np.split(np.arange(size), [size // 2]), strict=True))
        super().__init__(frames, halves, split, validation, energy_unit, center, references, transform)


def read_official(
    root: str | Path, molecule: str, number: int, download: bool, verify: bool = True
) -> tuple[_Frames, dict[str, NDArray[np.int64]]]:
    """Read charges, positions, energies and forces of all frames, and the indices of both halves of a split."""
    if download:
        fetch(_OFFICIAL, root, f"rmd17_{molecule}.npz", *(_INDICES.format(half, number) for half in _HALVES))
    path = _OFFICIAL.locate(root, f"rmd17_{molecule}.npz")
    frames = _read_frames(_OFFICIAL, path, ("nuclear_charges", "coords", "energies", "forces"))
    paths = {half: _OFFICIAL.locate(root, _INDICES.format(half, number)) for half in _HALVES}
    halves = {half: _read_indices(path, len(frames[1])) for half, path in paths.items()}
    for half, indices in halves.items() if verify else ():
        _OFFICIAL.check_count(paths[half], len(indices), _FRAMES, "frames")
    problem = f"and {paths['train'].name} have frames in common"
    _OFFICIAL.require(not np.isin(halves["train"], halves["test"]).any(), paths["test"], problem)
    return frames, halves


def _read_frames(release: Release, path: Path, keys: tuple[str, ...]) -> _Frames:
    """Read charges, positions, energies and forces of one molecule. Energies need the precision of float64."""
    vectors = "number [frames, atoms, 3]"
    expected = zip(keys, ("integer [atoms]", vectors, "float64 [frames]", vectors), strict=True)
    z, pos, energy, force = release.read_npz(path, dict(expected))
    right = z.size and z.min() >= 1 and z.max() <= HEAVIEST
    problem = f"has {keys[0]} {z.tolist()[:8]}, expected nuclear charges in 1 .. {HEAVIEST}"
    release.require(right, path, problem)
    return z, pos, energy, force


def _read_indices(path: Path, frames: int) -> NDArray[np.int64]:
    try:
        indices = np.array(path.read_text(encoding="ascii").replace(",", " ").split(), dtype=np.int64)
    except (ValueError, OverflowError, OSError) as error:
        raise _OFFICIAL.damaged(path, f"is not a list of integers ({error})") from error
    right = indices.size and indices.min() >= 0 and indices.max() < frames and len(np.unique(indices)) == len(indices)
    _OFFICIAL.require(right, path, f"does not hold different frame numbers in 0 .. {frames - 1}")
    return indices
