"""QM9."""

import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_arguments
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import LARGEST, Release, read_text, within_bounds
from lieattn_datasets._molecules import Molecules, check_atoms
from lieattn_datasets._splits import SPLITS, SplitOrAll, progress
from lieattn_datasets._targets import SPECIES, TARGETS, Units, fit_atoms, quantities, select, select_names

_CITATION = "QM9: Ramakrishnan, Dral, Rupp, von Lilienfeld, Scientific Data 1, 140022 (2014)."

_SDF = ("gdb9.sdf", "gdb9.sdf.csv", "uncharacterized.txt")
_COLUMNS = ("mol_id", *TARGETS[-3:], *TARGETS[:-3])
_SYMBOLS = {b"H": 1, b"C": 6, b"N": 7, b"O": 8, b"F": 9}
_HARTREE, _KCAL = 27.211386246, 0.04336414  # in eV, the values of torch_geometric
_UNITS = {name: _HARTREE for name in ("homo", "lumo", "gap", "zpve", "u0", "u298", "h298", "g298")}
_UNITS |= {name: _KCAL for name in TARGETS if name.endswith("_atom")}
_LINE = 1 << 12  # characters of a line; lines of the files have fewer than 300
_HEADER_LINES = 9  # in uncharacterized.txt

OFFICIAL = Release(
    dataset="QM9",
    origin=(
        f"The files are raw/{_SDF[0]}, raw/{_SDF[1]} and raw/{_SDF[2]}. raw/qm9_v3.pt and processed/data_v3.pt of "
        f"torch_geometric are not read; the latter is a pickle, which could run any code. {_CITATION}"
    ),
    sources=SOURCES["QM9"],
)

_Arrays = dict[str, NDArray[Any]]


_MOLECULES = 130_831
_TRAIN = 100_000
_SCALARS = ("energy", "homo", "gap")  # scalar labels of GFN2-xTB
SUBSET = Release(
    dataset="QM9, 14,308 molecules",
    origin=(
        "The files are qm9_subset.npz, a sample of QM9 with its targets, and qm9_subset_gfn2.npz, GFN2-xTB labels "
        f"of the same molecules. {_CITATION}"
    ),
    computed=(*_SCALARS, "dipole", "quadrupole", "polarizability", "polarizability_ok", "charges", "forces"),
    digests={
        "qm9_subset.npz": "content:119a038f0a3d5ea2025c983f8a9aca452c27de7ba489a8581d2eee3ae374d4f8",
        "qm9_subset_gfn2.npz": "content:b62977fa6c6d772a63ee3fe4b4c8b259a33bd67033ea187aef96d6275532025c",
    },
)
_SUBSET_FILE, _GFN2_FILE = SUBSET.digests

_Described = tuple[dict[str, Any], dict[str, NDArray[np.int64]]]


class _Quantities(Molecules):
    """Molecules with several targets, some of which are chosen, in chosen units."""

    _known: ClassVar[tuple[str, ...]]

    def _load(
        self, split: str, targets: str | Sequence[str], units: Units, transform: Transform | None, **options: Any
    ) -> None:
        names = select_names(targets, self._known)
        described, parts = self._describe(names, units, **options)
        super().__init__(**described, target_names=names, transform=transform)
        self._indices = parts[split]

    def _describe(self, names: tuple[str, ...], units: Units, *options: Any, **others: Any) -> _Described:
        """Return arguments of :class:`Molecules` and the indices of each split."""
        raise NotImplementedError


class QM9(_Quantities):
    """QM9: 130,831 molecules of up to 9 atoms C, N, O, F and their hydrogens, with DFT geometries and targets.

    As usual, the 3,054 molecules that failed QM9's own consistency check are left out. The split is that of Cormorant,
    which LieConv, LieTransformer, EGNN and many others use: 100,000 / 17,748 / 13,083. Published numbers on other
    splits (110,000 for training) are not comparable.

    An item has ``z`` ``[atoms]``, ``pos`` ``[atoms, 3]`` in angstrom (B3LYP/6-31G(2df,p) minimum), ``y``
    ``[1, targets]`` and ``gdb_number`` ``[1]`` (the official number, from 1).

    Parameters
    ----------
    root
        Folder of ``torch_geometric.datasets.QM9``. Its original files are read: ``raw/gdb9.sdf``, ``raw/gdb9.sdf.csv``
        and ``raw/uncharacterized.txt``, once per process. torch_geometric's own ``raw/qm9_v3.pt`` and
        ``processed/data_v3.pt`` are not read; the latter is a pickle, which could run any code.
    split
        ``"train"``, ``"valid"``, ``"test"`` or ``"all"`` (in the order of QM9).
    targets
        One name, several names, or ``"all"``: mu (dipole moment), alpha (isotropic polarizability), homo, lumo, gap, r2
        (electronic spatial extent), zpve, u0, u298, h298, g298, cv (heat capacity, cal/(mol K)), u0_atom ..
        g298_atom (atomization energies), A, B, C (rotational constants, GHz).
    energy_unit
        Unit of all energies: ``"eV"``, ``"meV"``, ``"Ha"`` or ``"kcal/mol"``.
    dipole_unit
        Unit of mu: ``"D"``, ``"e angstrom"`` or ``"e bohr"``.
    length_unit
        ``"bohr"`` or ``"angstrom"``. The unit of alpha is its cube, that of r2 its square.
    references
        Whether the energies of the free atoms are subtracted from u0, u298, h298, g298 (which gives the atomization
        energies) and 2.981 cal/(mol K) per atom from cv, as Cormorant and LieTransformer do. Errors do not depend on
        this. If False, energies near -11,000 eV have a precision of 1 meV in the float32 of ``y``.
    download
        Whether to download missing raw files into the subfolder ``raw`` of the root. Nothing is downloaded otherwise.
    verify
        Whether to check the number of molecules. If False, any files in the same format are read, and split in the same
        proportions.
    transform
        Function that is applied to each new ``Data``, for example :class:`MoleculeFeatures`.
    """

    card = Card(
        "R. Ramakrishnan, P. Dral, M. Rupp, O. A. von Lilienfeld, Scientific Data 1, 140022 (2014)",
        "CC0",
        "130,831 molecules of H, C, N, O, F, up to 29 atoms",
    )

    _known = TARGETS

    def __init__(
        self,
        root: str | Path,
        split: SplitOrAll = "train",
        *,
        targets: str | Sequence[str] = "all",
        energy_unit: str = "eV",
        dipole_unit: str = "D",
        length_unit: str = "bohr",
        references: bool = True,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(QM9.__init__, locals())
        units = Units(energy_unit, dipole_unit, length_unit)
        self._load(split, targets, units, transform, root=root, references=references, download=download, verify=verify)

    def _describe(
        self, names: tuple[str, ...], units: Units, root: str | Path, references: bool, download: bool, verify: bool
    ) -> _Described:
        path, arrays = _load_official(root, download)
        offsets, table = arrays["offsets"], arrays["y"].astype(np.float64)
        if verify:
            OFFICIAL.check_count(path, len(table), _MOLECULES, "molecules")
        y, labels = select(table, quantities("eV", "eV"), names, np.diff(offsets), units, references)
        of_molecule = {"gdb_number": arrays["gdb_number"]}
        described = {"z": arrays["z"], "pos": arrays["pos"], "offsets": offsets, "y": y, "of_molecule": of_molecule}
        return {**described, "target_units": labels}, cormorant_split(len(table))


class _Subset(_Quantities):
    """Molecules of the subset, whose files have the splits."""

    def __init__(
        self,
        root: str | Path,
        split: SplitOrAll = "train",
        *,
        targets: str | Sequence[str] = "all",
        energy_unit: str = "eV",
        dipole_unit: str = "D",
        length_unit: str = "bohr",
        references: bool = True,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(_Subset.__init__, locals())
        units = Units(energy_unit, dipole_unit, length_unit)
        self._load(split, targets, units, transform, root=root, references=references, verify=verify)


class QM9Subset(_Subset):
    """A subset of QM9: 14,308 molecules of H, C, N and O with 6 to 29 atoms, and all 19 targets of QM9.

    It is a uniform sample of one molecule in nine, without molecules that contain fluorine or failed QM9's consistency
    check. Targets, units and attributes are those of :class:`QM9`; errors on this subset are not comparable with
    published ones.

    Parameters
    ----------
    root
        Folder with ``qm9_subset.npz``.
    split
        ``"train"`` (10,000), ``"valid"`` (2,000), ``"test"`` (2,308), which are the splits of the file, or ``"all"``.
    targets, energy_unit, dipole_unit, length_unit, references, transform
        As for :class:`QM9`.
    verify
        Whether to compare the digest of the file. If False, any file in the same format is read.
    """

    card = Card("a sample of QM9", "CC0", "14,308 molecules, 258,945 atoms, H, C, N, O")

    _known = TARGETS

    def _describe(
        self, names: tuple[str, ...], units: Units, root: str | Path, references: bool, verify: bool
    ) -> _Described:
        targeted = {"targets": "number [molecules, 19]", "target_names": "text [19]"}
        path, described, parts, (table, columns) = _load_subset(root, verify, targeted)
        found = read_text(columns)
        problem = f"has targets named {', '.join(found)}, expected {', '.join(TARGETS)}"
        SUBSET.require(tuple(found) == TARGETS, path, problem)
        atoms = np.diff(described["offsets"])
        y, labels = select(table, quantities("Ha", "kcal/mol"), names, atoms, units, references)
        return {**described, "y": y, "target_units": labels}, parts


class QM9GFN2(_Subset):
    """The molecules of :class:`QM9Subset` with GFN2-xTB labels: scalars, vectors and tensors.

    The labels are single points of a semi-empirical method at the DFT geometries. They are targets for invariant and
    equivariant outputs, and must **not** be confused with the values of QM9. Forces are small, since the geometries are
    near minima.

    An item has ``z``, ``pos`` (angstrom), ``gdb_number``, ``y`` ``[1, targets]``, and in the frame of ``pos``:

    * ``dipole`` float32 ``[1, 3]``, in the dipole unit,
    * ``quadrupole`` float32 ``[1, 3, 3]``, symmetric and traceless, in e times the length unit squared,
    * ``polarizability`` float32 ``[1, 3, 3]``, symmetric, in the length unit cubed; ``polarizability_ok`` bool ``[1]``
      is False if the finite differences from which it was computed disagree, and such molecules should be left out of a
      loss,
    * ``charge`` float32 ``[atoms]``, partial charges in e,
    * ``force`` float32 ``[atoms, 3]``, in the energy unit per angstrom.

    Parameters
    ----------
    root
        Folder with ``qm9_subset.npz`` (geometries) and ``qm9_subset_gfn2.npz`` (labels).
    split
        As for :class:`QM9Subset`.
    targets
        One name, several names, or ``"all"``: energy, homo, gap.
    energy_unit, dipole_unit, length_unit
        As for :class:`QM9`.
    references
        As for :meth:`Molecules.from_ase`, fitted to the training molecules (the attribute ``atom_energies``).
    verify
        Whether to compare the digests of the files. The computed labels are not part of the digest, since they depend
        on the machine that computed them. If False, any files in the same format are read.
    transform
        As for :class:`QM9Subset`.
    """

    card = Card("GFN2-xTB single points (tblite 0.8.0, accuracy 0.01)", "no rights reserved", "those of `QM9Subset`")

    vectors: tuple[str, ...] = ("pos", "dipole", "force")
    tensors: tuple[str, ...] = ("quadrupole", "polarizability")

    _known = _SCALARS

    def _describe(
        self, names: tuple[str, ...], units: Units, root: str | Path, references: bool, verify: bool
    ) -> _Described:
        _, described, parts, _ = _load_subset(root, verify, {})
        z, offsets, of_molecule = described["z"], described["offsets"], described["of_molecule"]
        expected = {
            "gdb_index": "integer [molecules]",
            "dipole": "number [molecules, 3]",
            "quadrupole": "number [molecules, 6]",
            "polarizability": "number [molecules, 3, 3]",
            "polarizability_ok": "boolean [molecules]",
            "charges": "number [atoms]",
            "forces": "number [atoms, 3]",
            **dict.fromkeys(names, "number [molecules]"),
        }
        path, arrays = SUBSET.read(root, expected, verify, _GFN2_FILE)
        same, dipole, quadrupole, polarizability, good, charge, force, *values = arrays
        same_molecules = np.array_equal(same, of_molecule["gdb_number"]) and len(charge) == len(z)
        SUBSET.require(same_molecules, path, f"has labels of different molecules than {_SUBSET_FILE}")
        hartree, _ = units.convert("Ha")
        scalars = {name: column * hartree for name, column in zip(names, values, strict=True)}
        self.atom_energies: dict[int, float] = {}
        self._total = ("y",) if "energy" in scalars and not references else ()
        if references and "energy" in scalars:
            self.atom_energies, free = fit_atoms(scalars["energy"], z, offsets, parts["train"])
            scalars["energy"] = scalars["energy"] - free
        length, _ = units.convert("bohr")
        of_molecule |= {
            "dipole": dipole * units.convert("D")[0],
            "quadrupole": quadrupole[:, [[0, 1, 3], [1, 2, 4], [3, 4, 5]]] * length**2,
            "polarizability": polarizability * length**3,
            "polarizability_ok": good,
        }
        described["of_atom"] = {"charge": charge, "force": force * units.convert("eV")[0]}
        described["y"] = np.stack([scalars[name] for name in names], axis=1)
        return {**described, "target_units": [units.energy] * len(names)}, parts


def cormorant_split(size: int) -> dict[str, NDArray[np.int64]]:
    """Return the indices of each split of QM9 by Cormorant's rule.

    The rule uses a permutation by NumPy's legacy generator with seed 0: the first 100,000 molecules are for training,
    the last tenth is for testing, and those between are for validation. For numbers of molecules other than 130,831 the
    number of training molecules is proportional.
    """
    train = size * _TRAIN // _MOLECULES
    test = size // 10
    order = np.random.RandomState(0).permutation(size).astype(np.int64)
    parts = np.split(order, [train, size - test])
    return {**dict(zip(SPLITS, parts, strict=True)), "all": np.arange(size)}


def _load_subset(root: str | Path, verify: bool, targeted: dict[str, str]) -> tuple[Any, ...]:
    """Read the subset; return path, arguments of :class:`Molecules`, indices of each split, and further arrays."""
    expected = {
        "z": "integer [atoms]",
        "pos": "number [atoms, 3]",
        "offsets": "integer [ends]",
        "gdb_index": "integer [molecules]",
        **{f"split_{part}": f"integer [{part}]" for part in SPLITS},
    }
    path, arrays = SUBSET.read(root, expected | targeted, verify, _SUBSET_FILE)
    z, pos, offsets, number, *chosen = arrays[: len(expected)]
    try:
        z, pos, offsets = check_atoms(z, pos, offsets)
    except ValueError as error:
        raise SUBSET.damaged(path, f"does not hold molecules: {error}") from error
    size = len(offsets) - 1
    once = len(number) == size and np.array_equal(np.sort(np.concatenate(chosen)), np.arange(size))
    SUBSET.require(once, path, f"does not have each of its {size} molecules in exactly one split")
    SUBSET.require(np.isin(z, SPECIES).all(), path, f"holds atoms other than {SPECIES}")
    parts = dict(zip(SPLITS, (part.astype(np.int64) for part in chosen), strict=True))
    described = {"z": z, "pos": pos, "offsets": offsets, "of_molecule": {"gdb_number": number}}
    return path, described, {**parts, "all": np.arange(size)}, arrays[len(expected) :]


def _load_official(root: str | Path, download: bool) -> tuple[Path, _Arrays]:
    """Return the path of the molecules, and what :func:`_read_sdf` reads there, once per process for all splits."""
    raw = Path(root) / "raw"
    if download:
        fetch(OFFICIAL, raw, *_SDF)
    paths = [OFFICIAL.locate(raw, name) for name in _SDF]
    states = [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return paths[0], _read_sdf(*paths, *states)


@functools.lru_cache(maxsize=1)
def _read_sdf(sdf: Path, table: Path, left_out: Path, *states: tuple[int, int]) -> _Arrays:
    """Read the original files. In other states, sizes and times of change, they are read again.

    The arrays are z ``[atoms]``, pos ``[atoms, 3]``, offsets ``[molecules + 1]``, y ``[molecules, 19]`` (float32, eV)
    and gdb_number ``[molecules]``. They are equal to those of ``torch_geometric.datasets.QM9``, bit by bit, since
    targets are multiplied in float32 by the same factors. torch_geometric needs rdkit, and its cache is a pickle.
    """
    names, y = _read_table(table)
    skipped = read_left_out(left_out)
    z, pos, sizes = array("B"), array("f"), []
    with sdf.open("rb") as file:
        for number, name in enumerate(progress(names, "reading QM9", len(names)), 1):
            try:
                atoms, rows = _read_molecule(file, name)
            except ValueError as error:
                raise OFFICIAL.damaged(sdf, f"is broken at molecule {number}: {error}") from error
            if number not in skipped:
                z.extend(atoms)
                pos.extend(rows)
                sizes.append(len(atoms))
        end = not file.readline(_LINE).strip()
        OFFICIAL.require(end, sdf, f"has more molecules than the {len(names)} of {table.name}")
    numbers = np.array([number for number in range(1, len(names) + 1) if number not in skipped], dtype=np.int64)
    found = np.frombuffer(z, dtype=np.uint8), np.frombuffer(pos, dtype=np.float32).reshape(-1, 3)
    try:
        charges, places, offsets = check_atoms(*found, np.cumsum([0, *sizes]))
    except ValueError as error:
        raise OFFICIAL.damaged(sdf, f"does not hold molecules: {error}") from error
    problem = f"or its table has numbers that are not finite, or beyond {LARGEST:g}"
    chosen = y[numbers - 1]
    OFFICIAL.require(within_bounds(places) and within_bounds(chosen), sdf, problem)
    return {"z": charges, "pos": places, "offsets": offsets, "y": chosen, "gdb_number": numbers}


def _read_molecule(file: IO[bytes], name: bytes) -> tuple[list[int], list[float]]:
    """Read one molecule of a V2000 file; return charges and a flat list of coordinates."""
    title, _, _, counts = (file.readline(_LINE) for _ in range(4))
    if title.strip() != name:
        raise ValueError(f"it is named {_shown(title)}, but the table has {_shown(name)}")
    if not counts.rstrip().endswith(b"V2000"):
        raise ValueError(f"its fourth line is {_shown(counts)}, which does not end with V2000")
    charges, places = [], []
    for _ in range(_count(counts[:3])):
        line = file.readline(_LINE)
        symbol = line[31:34].strip()
        if symbol not in _SYMBOLS:
            raise ValueError(f"the line {_shown(line)} is not an atom of {', '.join(map(bytes.decode, _SYMBOLS))}")
        charges.append(_SYMBOLS[symbol])
        places += [float(line[:10]), float(line[10:20]), float(line[20:30])]
    for _ in range(_count(counts[3:6])):
        _count(file.readline(_LINE)[:3])
    line = file.readline(_LINE)
    while line.startswith(b"M  ") and line.rstrip() != b"M  END":
        line = file.readline(_LINE)
    end = file.readline(_LINE)
    if line.rstrip() != b"M  END" or end.rstrip() != b"$$$$":
        raise ValueError(f"it ends with {_shown(line)} and {_shown(end)}, expected 'M  END' and '$$$$'")
    return charges, places


def _count(field: bytes) -> int:
    """Read a number of atoms or bonds."""
    if not field.strip().isdigit():
        raise ValueError(f"there is {_shown(field)} instead of a count")
    return int(field)


def _shown(text: bytes) -> str:
    return repr(text.decode("ascii", "backslashreplace").rstrip()[:40])


def _read_table(path: Path) -> tuple[list[bytes], NDArray[np.float32]]:
    """Read the names of the molecules, and their targets in the order of :data:`TARGETS` with energies in eV."""
    header, *rows = path.read_bytes().split(b"\n")
    columns = tuple(header.decode("ascii", "replace").strip().split(","))
    OFFICIAL.require(columns == _COLUMNS, path, f"does not begin with the line {','.join(_COLUMNS)}")
    OFFICIAL.require(rows and not rows.pop(), path, "is truncated: its last line has no line break")
    names, values = [], array("f")
    for number, row in enumerate(rows, 2):
        name, *cells = row.split(b",")
        try:
            values.extend(map(float, cells))
        except ValueError as error:
            raise OFFICIAL.damaged(path, f"is not a table of numbers in line {number} ({error})") from error
        found = f"has {len(cells)} targets in line {number}, expected {len(TARGETS)}"
        OFFICIAL.require(len(cells) == len(TARGETS), path, found)
        names.append(name)
    stored = np.frombuffer(values, dtype=np.float32).reshape(-1, len(TARGETS))
    factors = np.array([_UNITS.get(name, 1.0) for name in TARGETS], dtype=np.float32)
    return names, np.roll(stored, -3, axis=1) * factors


def read_left_out(path: Path) -> set[int]:
    """Read the official numbers of the molecules that failed the consistency check."""
    rows = path.read_bytes().split(b"\n")[_HEADER_LINES:-2]  # the last line contains words
    try:
        return {_count(row.split()[0]) for row in rows}
    except (ValueError, IndexError) as error:
        problem = f"does not have a number in each line from the {_HEADER_LINES + 1}th to the last but one ({error})"
        raise OFFICIAL.damaged(path, problem) from error
