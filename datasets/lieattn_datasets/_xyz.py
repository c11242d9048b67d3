"""Your own molecules or crystals in extended XYZ files."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._clouds import Transform
from lieattn_datasets._frames import describe_frames
from lieattn_datasets._molecules import Molecules
from lieattn_datasets._splits import seeded

_MOST_COLUMNS = 1000  # for each atom
_SKEW = 0.01  # largest difference of a stress and its transpose, relative to its largest component
_SHOWN = 200  # characters of a problem in a message


class ExtendedXYZ(Molecules):
    """Frames of an extended XYZ file, with energies, forces, stress, virial, dipole and cell if the file has them.

    The file is read with the package ase, in its units angstrom, eV and e. Items are as in :meth:`Molecules.from_ase`.

    Parameters
    ----------
    path
        The file. Each frame consists of the number of atoms, a line of properties such as ``Lattice="..."``,
        ``Properties=species:S:1:pos:R:3:forces:R:3`` and ``energy=-31.7``, and a line for each atom.
    split
        ``"train"``, ``"valid"`` or ``"test"``, by a permutation of the frames; or ``"all"``. Successive frames of a
        simulation are correlated, so test on frames of another file.
    shares
        Shares of ``"train"`` and ``"valid"``. The other frames are ``"test"``.
    split_seed
        Seed of the permutation. Use the same for all splits.
    energy_unit
        Unit of energies, forces and stresses of the items, which are converted from eV: ``"eV"``, ``"meV"``, ``"Ha"``
        or ``"kcal/mol"``. Keep ``"eV"`` for a file in other units, whose numbers are then left as they are.
    references
        Whether a sum over the atoms is subtracted from the energy. It has one number per element, fitted to the frames
        of ``"train"``, or to all frames if the split is ``"all"`` (the attribute ``atom_energies``, in the energy
        unit).
    keys
        Names of properties in this file if it has others, such as ``{"energy": "REF_energy"}``; see
        :meth:`Molecules.from_ase`.
    transform
        Function that is applied to each new ``Data``.

    Warns
    -----
    UserWarning
        As :meth:`Molecules.from_ase`.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is damaged or incomplete, only some frames have an energy, a charge or a spin, no frame has one of
        the ``keys``, an element has no reference because no training frame contains it, or an argument is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        split: Literal["train", "valid", "test", "all"] = "train",
        *,
        shares: Sequence[float] = (0.8, 0.1),
        split_seed: int = 0,
        energy_unit: str = "eV",
        references: bool = True,
        keys: Mapping[str, str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ExtendedXYZ.__init__, locals())
        frames = _read(Path(path))
        alike = np.zeros(len(frames), dtype=np.int64)
        chosen = seeded(alike, split, shares, split_seed)
        train = chosen if split == "all" else seeded(alike, "train", shares, split_seed)
        try:
            described, energies = describe_frames(frames, energy_unit, train if references else None, keys)
            super().__init__(**described, transform=transform)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self._of_frames(energies)
        self._indices = chosen


def _read(path: Path) -> list[Any]:
    """Read all frames with ase, after a check that the file contains the atoms that its headers promise."""
    try:
        from ase.io import read
    except ImportError as error:
        raise ImportError("extended XYZ files need ase: pip install 'lieattn[chem]'") from error
    try:
        text = path.read_text(encoding="utf-8-sig")
        _check_frames(text)
        frames: Any = read(io.StringIO(text), index=":", format="extxyz", properties_parser=_properties)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        problem = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
        if isinstance(error, KeyError):
            number = str(error.args[0]).isdigit()
            problem += f" is no symbol of an element{'; name nuclear charges Z:I:1 in Properties' if number else ''}"
        raise ValueError(f"{path} is damaged, or is not an extended XYZ file: {problem}") from error
    return list(frames)


def _check_frames(text: str) -> None:
    """Raise ValueError unless all lines belong to frames and have the columns that ``Properties`` promises.

    ase ignores everything after an empty line and all further columns.
    """
    lines = text.rstrip().split("\n")
    at = 0
    while at < len(lines):
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", lines[at]) or int(lines[at]) == 0:
            raise ValueError(f"line {at + 1}: expected the number of atoms of a frame, got {lines[at]!r}")
        atoms, there = int(lines[at]), max(0, len(lines) - at - 2)
        if atoms > there:
            raise ValueError(
                f"lines are missing: line {at + 1} promises {atoms} atoms, but the file has lines for {there}"
            )
        columns = str(_properties(lines[at + 1]).get("Properties", "")).split(":")[2::3]
        for number in range(at + 2, at + 2 + atoms) if columns else ():
            if len(lines[number].split()) != sum(map(int, columns)):
                raise ValueError(f"line {number + 1}: expected the columns of Properties, got {lines[number]!r}")
        at += atoms + 2


def _properties(line: str) -> dict[str, Any]:
    """Return the properties of a frame; raise ValueError for those that ase would read as something else."""
    from ase.io.extxyz import key_val_str_to_dict

    found: dict[str, Any] = key_val_str_to_dict(line)
    for name in [other for other in found if other.lower() == "pbc"]:
        found["pbc"] = found.pop(name)
    for name in ("Properties", "Lattice"):
        if name not in found and re.search(rf"(?<![\w-]){name}\s*=", line, re.IGNORECASE):
            raise ValueError(f"expected {name}=..., got it in lower case or after an open quote: {line[:_SHOWN]!r}")
    given = str(found.get("Properties", "species:S:1:pos:R:3"))
    columns = given.split(":")
    if sum(int(size) for size in columns[2::3]) > _MOST_COLUMNS:
        raise ValueError(f"Properties has more than {_MOST_COLUMNS} columns")
    if len(columns) % 3 or not {"pos", "positions"} & {*columns[::3]}:  # ase would place all atoms at the origin
        raise ValueError(f"Properties: expected the column pos:R:3, got {given}")
    kinds = dict(zip(columns[::3], columns[1::3], strict=True))
    if kinds.get("species", "S") != "S" or not {"species", "symbols", "Z", "numbers"} & set(kinds):
        raise ValueError(f"Properties: expected species:S:1 for symbols or Z:I:1 for nuclear charges, got {given}")
    stress = found.get("stress")
    if stress is not None and np.abs(stress - stress.T).max() > _SKEW * np.abs(stress).max():
        raise ValueError(f"stress: expected a symmetric matrix, got {stress.T.tolist()}")  # ase reads one half of it
    return found
