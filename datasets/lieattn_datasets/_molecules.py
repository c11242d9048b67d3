"""Molecules as concatenated arrays of atoms."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.messages import needs_extra
from lieattn_datasets._checks import check_attribute, dtype_of_places, plain_array, real_array, require
from lieattn_datasets._clouds import Card, Clouds, Transform
from lieattn_datasets._frames import describe_frames
from lieattn_datasets._splits import SplitOrAll, seeded
from lieattn_datasets._transforms import Configured

HEAVIEST = 118  # nuclear charge of the heaviest element
_LISTED = 4
_MOST_COLUMNS = 1000  # for each atom
_SKEW = 0.01  # largest difference of a stress and its transpose, relative to its largest component
_SHOWN = 200  # characters of a problem in a message


class Molecules(Clouds):
    """Molecules with scalar targets, and with any further numbers for each molecule or each atom.

    An item has ``z`` int64 ``[atoms]`` (nuclear charges), ``pos`` float32 ``[atoms, 3]`` in angstrom, ``y``
    float32 ``[1, targets]``, and one attribute for each entry of ``of_molecule`` and ``of_atom``. Positions and cells
    are float64 if they were given so and some are beyond 84 angstrom, where float32 loses the digits of distances.

    Parameters
    ----------
    z
        Nuclear charges of all atoms, molecule after molecule, ``[atoms]``, in 1 .. 118.
    pos
        Positions of all atoms ``[atoms, 3]``, in angstrom.
    offsets
        Offsets ``[molecules + 1]``: molecule i has the atoms ``offsets[i]:offsets[i + 1]``.
    y
        Scalar targets ``[molecules, targets]``. They are stored in float64 and returned in float32.
    target_names, target_units
        Name and unit of each target.
    of_molecule
        Map from attribute names to numbers ``[molecules, ...]``: vectors, tensors, masks. An item has ``[1, ...]``.
        If there is a mask ``NAME_mask`` (bool) for the attribute ``NAME``, its other rows may be NaN.
    of_atom
        Map from attribute names to numbers ``[atoms, ...]``: forces, partial charges; also with masks.
    transform
        Function that is applied to each new ``Data``.

    Examples
    --------
    >>> pos = [[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]]
    >>> water = Molecules([8, 1, 1], pos, [0, 3], [[1.85]], ["mu"], ["D"])
    >>> water[0]
    Data(y=[1, 1], pos=[3, 3], z=[3])
    """

    _total: tuple[str, ...] = ()  # names of attributes with total energies, which are float64

    def __init__(
        self,
        z: ArrayLike,
        pos: ArrayLike,
        offsets: ArrayLike,
        y: ArrayLike,
        target_names: Sequence[str],
        target_units: Sequence[str],
        *,
        of_molecule: Mapping[str, ArrayLike] | None = None,
        of_atom: Mapping[str, ArrayLike] | None = None,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(Molecules.__init__, locals())
        self._z, self._pos, self._offsets = check_atoms(z, pos, offsets)
        self._dtype = dtype_of_places(self._pos, 1.0)
        count = len(self._offsets) - 1
        super().__init__(count, transform)
        self._y = real_array("y", y, finite=False)
        self.target_names, self.target_units = tuple(target_names), tuple(target_units)
        expected = (count, len(self.target_names))
        alike = self._y.shape == expected and len(self.target_units) == expected[1]
        wanted = f"{list(expected)}, and one of target_units for each of target_names"
        require(alike, "y", wanted, f"{list(self._y.shape)} and {len(self.target_units)} units")
        advice = "targets that some molecules lack belong to of_molecule, with masks such as gap_mask"
        require(np.isfinite(self._y).all(), "y", "finite numbers", f"NaN or infinity; {advice}")
        _check_names(of_molecule or {}, of_atom or {})
        self._of_molecule = _tables("of_molecule", of_molecule, count)
        self._of_atom = _tables("of_atom", of_atom, len(self._z))

    @staticmethod
    def from_ase(
        frames: Sequence[Any],
        *,
        energy_unit: str = "eV",
        references: bool = False,
        keys: Mapping[str, str] | None = None,
        transform: Transform | None = None,
    ) -> "Molecules":
        """Create a data set of molecules or periodic structures from frames of the package ase.

        Energies (eV), forces (eV/angstrom), stresses (eV/angstrom^3), virials (eV, minus stress times volume) and
        dipole moments (e angstrom) are stored results of the frames' calculators, or entries of ``info`` and ``arrays``
        with the names ``energy``, ``forces``, ``stress``, ``virial`` and ``dipole``. Nothing is computed. The total
        charge (e) and the spin multiplicity 2S + 1 are the entries ``charge`` and ``spin`` of ``info``.

        An item has ``z``, ``pos`` (angstrom) and, if they are known, ``y`` ``[1, 1]`` (the energy, also as ``energy``
        ``[1]``), ``force`` ``[atoms, 3]`` and ``stress`` ``[1, 3, 3]`` (the energy unit per angstrom and angstrom^3),
        ``virial`` ``[1, 3, 3]`` (the energy unit), ``dipole`` ``[1, 3]`` (always e angstrom, the default unit of
        :class:`lieattn.ase.Calculator`), ``charge`` and ``spin`` ``[1]`` float32. If any frame is periodic, all items
        have a ``cell`` ``[1, 3, 3]`` (angstrom, its vectors are the rows) and ``pbc`` bool ``[1, 3]`` (the periodic
        directions), which models with periodic neighbors accept.

        Energy, charge and spin must be known for all frames or for none. If only some frames have forces, a stress, a
        virial or a dipole moment, all items have a mask of the known rows, such as ``stress_mask`` bool ``[1]`` and
        ``force_mask`` bool ``[atoms]``, which :class:`lieattn.train.PointSetRegressor` uses; the other rows are NaN.
        Stresses are those of frames that are periodic along three vectors; others, as of slabs and molecules, are left
        out, because :class:`lieattn.models.EnergyForces` has none for them.

        Parameters
        ----------
        frames
            ``ase.Atoms`` objects, for example ``ase.io.read(path, ":")``.
        energy_unit
            Unit of energies, forces and stresses of the items, which are converted from eV: ``"eV"``, ``"meV"``,
            ``"Ha"`` or ``"kcal/mol"``. Keep ``"eV"`` for frames in other units, whose numbers then stay as they are.
        references
            Whether a sum over the atoms is subtracted from each energy, for training loops in float32, which has 7
            digits. By default energies are as in the frames, in float64, and a
            :class:`lieattn.train.PointSetRegressor` measures such a sum and adds it in its model, so keep it False
            there. The sum has one number per element, fitted by least squares in float64 (``atom_energies`` of the
            result, in the energy unit).
        keys
            Names of properties in these frames if they have others, such as ``{"energy": "REF_energy", "forces":
            "REF_forces"}``. If energy, forces, stress, virial or dipole are among them, others of these are not read.
        transform
            Function that is applied to each new ``Data``.

        Warns
        -----
        UserWarning
            If no energy, force, stress, virial or dipole is read, but the frames have entries with similar names; if
            atoms have changed after the calculation, so that the results of their calculators are not read; if a frame
            that is not periodic along three vectors has a stress, which is left out; or if labels contradict each
            other: another unit is stated, a stress is above 10 eV/angstrom^3, a virial is not minus stress times
            volume, an energy differs from that of a frame less than 0.3 angstrom away by another amount than by the
            forces, or atoms are closer than 0.3 angstrom.

        Examples
        --------
        >>> from ase import Atoms
        >>> frames = [Atoms("H2", [[0, 0, 0], [0, 0, d]], info={"energy": -31.7}) for d in (0.7, 0.8)]
        >>> Molecules.from_ase(frames)[0]
        Data(y=[1, 1], pos=[2, 3], z=[2], energy=[1])
        """
        check_arguments(Molecules.from_ase, locals())
        train = np.arange(len(frames)) if references else None
        described, energies = describe_frames(frames, energy_unit, train, keys)
        return Molecules(**described, transform=transform)._of_frames(energies)

    def _of_frames(self, atom_energies: dict[int, float]) -> Self:
        """Set the attributes that rotate with the atoms of frames, and the energies that were subtracted, if any."""
        self.vectors, self.tensors = ("pos", "force", "dipole", "cell"), ("stress", "virial")
        self.atom_energies: dict[int, float] = atom_energies
        self._total = () if atom_energies else ("y", "energy")
        return self

    def _make(self, index: int) -> Data:
        atoms = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        data = Data(
            z=torch.from_numpy(self._z[atoms].astype(np.int64)),
            pos=torch.from_numpy(self._pos[atoms].astype(self._dtype)),
            y=torch.from_numpy(self._y[index : index + 1].astype(np.float64 if "y" in self._total else np.float32)),
        )
        for name, values in self._of_molecule.items():
            dtype = self._dtype if name == "cell" else np.float64 if name in self._total else np.float32
            data[name] = _tensor(values[index : index + 1], dtype)
        for name, values in self._of_atom.items():
            data[name] = _tensor(values[atoms])
        return data

    def __repr__(self) -> str:
        names = (
            ", ".join(self.target_names) if len(self.target_names) <= _LISTED else f"{len(self.target_names)} targets"
        )
        return f"{type(self).__name__}({len(self)} molecules, {names or 'no targets'})"

    @property
    def targets(self) -> Float[Tensor, "molecules targets"]:
        """All targets, float64 ``[molecules, targets]``, in the order of this data set."""
        return torch.from_numpy(self._y[self._indices])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and standard deviation of each target, computed in float64."""
        if not len(self):
            raise ValueError("statistics need at least one molecule, but the data set is empty")
        values = self._y[self._indices]
        return tuple(values.mean(axis=0).tolist()), tuple(values.std(axis=0).tolist())


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
    energy_unit, keys
        As for :meth:`Molecules.from_ase`.
    references
        As for :meth:`Molecules.from_ase`, fitted to the frames of ``"train"``, or to all frames if the split is
        ``"all"`` (the attribute ``atom_energies``, in the energy unit).
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

    card = Card("frames of ase, or an extended XYZ file", "those of your files", "all frames of the file")

    def __init__(
        self,
        path: str | Path,
        split: SplitOrAll = "train",
        *,
        shares: Sequence[float] = (0.8, 0.1),
        split_seed: int = 0,
        energy_unit: str = "eV",
        references: bool = False,
        keys: Mapping[str, str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ExtendedXYZ.__init__, locals())
        frames = _read_xyz(Path(path))
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


class MoleculeFeatures(Configured):
    r"""Add the features :math:`x_{3a + q} = [\,z = z_a\,]\,(z / z_\mathrm{max})^q` of the nuclear charge of each atom.

    They are a one-hot vector of the species times the powers 0, 1, 2 of the scaled charge, as in the input of Cormorant
    (Anderson, Hy and Kondor, 2019), LieConv and LieTransformer. With the five species of QM9 these are 15 numbers. They
    are scalars, so rotations do not change them.

    Parameters
    ----------
    species
        Nuclear charges that occur, without repetition.
    powers
        Number of powers, starting with 0.

    Examples
    --------
    >>> MoleculeFeatures()(Data(z=torch.tensor([1, 9]))).x[:, [0, 1, 12, 13]]
    tensor([[1.0000, 0.1111, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 1.0000]])
    """

    def __init__(self, species: Sequence[int] = (1, 6, 7, 8, 9), powers: int = 3) -> None:
        check_arguments(MoleculeFeatures.__init__, locals())
        self.species = tuple(int(charge) for charge in species)
        known = set(self.species)
        right = known and len(known) == len(self.species) and all(1 <= charge <= HEAVIEST for charge in known)
        require(right, "species", f"different nuclear charges in 1 .. {HEAVIEST}", species)
        check_counts(powers=powers)
        self.powers = powers

    def __call__(self, data: Data) -> Data:
        check_arguments(MoleculeFeatures.__call__, locals())
        require(check_attribute(data, "z").dim() == 1, "data.z", "nuclear charges [atoms]", list(data.z.shape))
        table = torch.tensor(self.species, device=data.z.device)
        one_hot = data.z[:, None] == table
        unknown = data.z[~one_hot.any(dim=1)]
        require(not len(unknown), "data.z", f"only the species {self.species}", unknown.tolist())
        scaled = data.z[:, None].float() / max(self.species)
        powers = scaled ** torch.arange(self.powers, device=data.z.device)
        described = data.__copy__()
        described.x = (one_hot[:, :, None] * powers[:, None, :]).flatten(1)
        return described


def check_atoms(
    z: ArrayLike, pos: ArrayLike, offsets: ArrayLike
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Return the three arrays; raise ValueError unless they describe molecules."""
    for argument, values in (("z", z), ("pos", pos), ("offsets", offsets)):
        real_array(argument, values)
    charges, places, ends = np.asarray(z), np.asarray(pos), np.asarray(offsets, dtype=np.int64)
    right = charges.ndim == 1 and np.issubdtype(charges.dtype, np.integer)
    require(right, "z", "integers [atoms]", f"{charges.dtype} {list(charges.shape)}")
    low, high, atoms = charges.min(initial=1), charges.max(initial=1), len(charges)
    require(low >= 1 and high <= HEAVIEST, "z", f"nuclear charges in 1 .. {HEAVIEST}", f"{low} .. {high}")
    require(places.shape == (atoms, 3), "pos", f"[{atoms}, 3] for the {atoms} atoms of z", list(places.shape))
    ordered = ends.ndim == 1 and len(ends) > 0 and ends[0] == 0 and ends[-1] == atoms and (np.diff(ends) >= 0).all()
    expected = f"numbers that rise from 0 to the number of atoms, {atoms}"
    require(ordered, "offsets", expected, ends.ravel()[:8].tolist())
    return charges, places, ends


def _check_names(of_molecule: Mapping[str, ArrayLike], of_atom: Mapping[str, ArrayLike]) -> None:
    """Raise ValueError if an attribute would replace one that items have already."""
    for argument, names in (("of_molecule", of_molecule), ("of_atom", of_atom)):
        for name in names:
            require(name not in ("z", "pos", "y"), argument, "other names than z, pos, y", repr(name))
    for name in of_atom:
        require(name not in of_molecule, "of_atom", "other names than those of of_molecule", repr(name))


def _tables(argument: str, tables: Mapping[str, ArrayLike] | None, rows: int) -> dict[str, NDArray[Any]]:
    """Return numbers of molecules or atoms as arrays; raise ValueError unless there is a row for each."""
    tables = tables or {}
    found = {}
    for name, values in tables.items():
        known = np.asarray(tables.get(f"{name}_mask", True))
        masked = known.dtype == bool and known.shape == (rows,)
        found[name] = plain_array(f"{argument}[{name!r}]", values, finite=not masked)
        shape = found[name].shape
        require(shape[:1] == (rows,), f"{argument}[{name!r}]", f"{rows} rows", list(shape))
        if masked:
            plain_array(f"known rows of {argument}[{name!r}]", found[name][known])
    return found


def _tensor(values: NDArray[Any], dtype: type[np.floating[Any]] = np.float32) -> Tensor:
    """Return a copy as a tensor: floating numbers in a dtype, integers as int64, booleans unchanged."""
    kind = {"f": dtype, "i": np.int64, "u": np.int64}.get(values.dtype.kind, values.dtype)
    return torch.from_numpy(values.astype(kind))


def _read_xyz(path: Path) -> list[Any]:
    """Read all frames with ase, after a check that the file contains the atoms that its headers promise."""
    with needs_extra("ExtendedXYZ", "chem"):
        from ase.io import read
    try:
        text = path.read_text(encoding="utf-8-sig")
        _check_lines(text)
        frames: Any = read(io.StringIO(text), index=":", format="extxyz", properties_parser=_xyz_properties)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        problem = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
        if isinstance(error, KeyError):
            number = str(error.args[0]).isdigit()
            problem += f" is no symbol of an element{'; name nuclear charges Z:I:1 in Properties' if number else ''}"
        raise ValueError(f"{path} is damaged, or is not an extended XYZ file: {problem}") from error
    return list(frames)


def _check_lines(text: str) -> None:
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
        columns = str(_xyz_properties(lines[at + 1]).get("Properties", "")).split(":")[2::3]
        for number in range(at + 2, at + 2 + atoms) if columns else ():
            if len(lines[number].split()) != sum(map(int, columns)):
                raise ValueError(f"line {number + 1}: expected the columns of Properties, got {lines[number]!r}")
        at += atoms + 2


def _xyz_properties(line: str) -> dict[str, Any]:
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
    few = sum(int(size) for size in columns[2::3]) <= _MOST_COLUMNS
    require(few, "Properties", f"at most {_MOST_COLUMNS} columns", given)
    placed = len(columns) % 3 == 0 and {"pos", "positions"} & {*columns[::3]}
    require(placed, "Properties", "the column pos:R:3", given)  # ase would place all atoms at the origin
    kinds = dict(zip(columns[::3], columns[1::3], strict=True))
    named = kinds.get("species", "S") == "S" and {"species", "symbols", "Z", "numbers"} & set(kinds)
    require(named, "Properties", "species:S:1 for symbols or Z:I:1 for nuclear charges", given)
    stress = found.get("stress")
    if stress is not None and np.abs(stress - stress.T).max() > _SKEW * np.abs(stress).max():
        raise ValueError(f"stress: expected a symmetric matrix, got {stress.T.tolist()}")  # ase reads one half of it
    return found
