"""QM9."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._clouds import Transform
from lieattn_datasets._files import Release, read_text
from lieattn_datasets._molecules import Molecules, check_atoms
from lieattn_datasets._qm9_files import CITATION, QM9_FILES, load_qm9
from lieattn_datasets._splits import SPLITS, SplitOrAll
from lieattn_datasets._targets import SPECIES, TARGETS, Units, fit_atoms, quantities, select, select_names

_MOLECULES = 130_831
_TRAIN = 100_000
_SCALARS = ("energy", "homo", "gap")  # scalar labels of GFN2-xTB
SUBSET = Release(
    dataset="QM9, 14,308 molecules",
    origin=(
        "The files are qm9_subset.npz, a sample of QM9 with its targets, and qm9_subset_gfn2.npz, GFN2-xTB labels "
        f"of the same molecules. {CITATION}"
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
        Folder of ``torch_geometric.datasets.QM9``. Its raw files are read: ``raw/gdb9.sdf``, ``raw/gdb9.sdf.csv`` and
        ``raw/uncharacterized.txt``, or otherwise ``raw/qm9_v3.pt``. The result is cached as plain arrays in
        ``processed/lieattn_qm9.npz``, which is written again if the raw files change or it is damaged.
        torch_geometric's own ``processed/data_v3.pt`` is a pickle, which could run any code, and is never opened.
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
        path, arrays = load_qm9(root, download)
        offsets, table = arrays["offsets"], arrays["y"].astype(np.float64)
        if verify:
            QM9_FILES.check_count(path, len(table), _MOLECULES, "molecules")
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
        Whether a sum over the atoms is subtracted from the energy. It has one number per species, fitted by least
        squares to the training molecules in float64 (the attribute ``atom_energies``, in the energy unit).
    verify
        Whether to compare the digests of the files. The computed labels are not part of the digest, since they depend
        on the machine that computed them. If False, any files in the same format are read.
    transform
        As for :class:`QM9Subset`.
    """

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
