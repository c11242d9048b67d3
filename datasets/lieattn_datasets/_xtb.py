"""Generated molecules: conformers from rdkit, labels from tblite's GFN2-xTB. No file is needed."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike, NDArray

from lieattn._core.checks import check_arguments, check_counts, check_number
from lieattn._core.messages import needs_extra
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._molecules import Molecules, check_atoms
from lieattn_datasets._splits import SPLITS, SplitOrAll, frozen_stream, progress
from lieattn_datasets._targets import Units, fit_atoms

SMALL_MOLECULES = tuple(
    """
    C CC CCC CCCC CC(C)C C1CC1 C1CCC1 C1CCCC1 C=C CC=C C=CC=C C1=CC1 C1=CCCC1 C#C CC#C C#CC#C c1ccccc1 Cc1ccccc1 O
    CO CCO CC(C)O OCCO COC CCOCC C1CO1 C1CCOC1 c1ccoc1 Oc1ccccc1 C=O CC=O CCC=O CC(C)=O O=CC=O C=CC=O OC=O CC(=O)O
    COC=O CC(=O)OC OCC=O OO N CN CCN CNC CN(C)C NCCN NCCO C1CN1 C1CCNC1 c1cc[nH]c1 c1ccncc1 c1cnccn1 c1c[nH]cn1 C#N
    CC#N C=CC#N CN=C NC=O CC(N)=O CNC=O NC(N)=O NCC(=O)O CC(N)C(=O)O NO CON C[N+](=O)[O-] c1cnoc1 CF FCF FC(F)F CCF
    CC(F)F C=CF FC=C(F)F Fc1ccccc1 OCCF NCC(F)F CC(=O)F FC(F)C=O N#CCF
    """.split()
)
"""SMILES of 81 small organic molecules of C, N, O, F and hydrogen, with at most seven heavy atoms."""

_ACCURACY = 0.01  # of the self-consistent charges, in tblite's scale: the same as for the labels of QM9GFN2
_SHARES = (0.8, 0.1)
_BOHR = Units(length="angstrom").convert("bohr")[0]
_HARTREE = Units().convert("Ha")[0]
_DEBYE = Units().convert("e bohr")[0]
_OPEN = {*range(21, 31), *range(39, 49), *range(57, 81), *range(89, 119)}  # metals whose shells may be open
_IONS = (3, 4, 11, 12, 19, 20, 37, 38, 55, 56, 87, 88)  # metals of which GFN2-xTB makes too short bonds, up to 0.4 A
_EMBEDDINGS: tuple[dict[str, bool], ...] = ({}, {"useRandomCoords": True, "enforceChirality": False})
_MMFF_STEPS, _GFN2_STEPS = 20_000, 500
_UNKNOWN = -1  # status of a molecule with atoms that MMFF does not know; 0: at the minimum, 1: not there
_STRAINED, _AT_REST = 2.7, 0.05  # eV/angstrom: at an MMFF minimum with wrong bonds, and at a minimum of GFN2-xTB
_BOND = (0.6, 1.4)  # lengths of bonds, by the sum of covalent radii
_APART = (1.1, 0.8)  # shortest other distance within a fragment and between fragments, such as ions
_GAP = 3.0  # angstrom, between fragments before they relax together
_LARGEST_FORCE = 200.0  # eV/angstrom. With a noise of 0.1 angstrom, the largest one of SMALL_MOLECULES is 93


@dataclass(frozen=True)
class GFN2Labels:
    """Result of a single-point calculation.

    Parameters
    ----------
    energy, force
        Total energy in eV, and forces ``[atoms, 3]`` in eV/angstrom.
    dipole, charge
        Dipole moment ``[3]`` in debye, and partial charges ``[atoms]`` in e.
    """

    energy: float
    force: Float64[np.ndarray, "atoms 3"]
    dipole: Float64[np.ndarray, "3"]
    charge: Float64[np.ndarray, " atoms"]

    @property
    def largest_force(self) -> float:
        """Length of the largest force, in eV/angstrom."""
        return float(np.linalg.norm(self.force, axis=1).max())


class GFN2Molecules(Molecules):
    """Small organic molecules with GFN2-xTB energies, forces and dipoles, computed during construction.

    This is a real molecular task that needs no file. Conformers are those of :func:`embed_molecule`, their atoms are
    displaced at random, and tblite computes the labels. This takes about 20 ms per conformer, and results are cached in
    the process. The same seed gives the same molecules with the same version of rdkit.

    An item has ``z``, ``pos`` (angstrom), ``y`` ``[1, 1]`` (the energy, also as ``energy`` ``[1]``), ``force`` float32
    ``[atoms, 3]`` (the energy unit per angstrom), ``dipole`` ``[1, 3]``, ``charge`` ``[atoms]`` (partial charges in e)
    and ``molecule`` ``[1]`` (the index of its SMILES). All conformers of a molecule are in the same split.

    Parameters
    ----------
    split
        ``"train"``, ``"valid"`` or ``"test"``: 80, 10 and 10 % of the molecules, by a permutation with a fixed seed; or
        ``"all"``.
    smiles
        SMILES of the molecules, which must be closed-shell. Default: 81 molecules of up to 7 atoms of C, N, O and F.
    conformers
        Number of conformers of each molecule.
    noise
        Standard deviation of the displacement of each coordinate, in angstrom. Without displacements forces are small.
    seed
        Seed of conformers and displacements.
    energy_unit, dipole_unit
        As for :class:`QM9`.
    references
        As for :meth:`Molecules.from_ase`, fitted to the training molecules (the attribute ``atom_energies``).
    transform
        Function that is applied to each new ``Data``.

    Raises
    ------
    ValueError
        If a SMILES cannot be parsed, embedded or computed, a force is above 200 eV/angstrom, there are too few for the
        split, or an argument is out of range.
    """

    card = Card("generated from SMILES with rdkit", "no rights reserved", "81 molecules of H, C, N, O, F")

    vectors: tuple[str, ...] = ("pos", "force", "dipole")

    def __init__(
        self,
        split: SplitOrAll = "train",
        *,
        smiles: Sequence[str] = SMALL_MOLECULES,
        conformers: int = 4,
        noise: float = 0.05,
        seed: int = 0,
        energy_unit: str = "eV",
        dipole_unit: str = "D",
        references: bool = False,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(GFN2Molecules.__init__, locals())
        units = Units(energy_unit, dipole_unit)
        require(len(smiles), "smiles", "a sequence of at least one SMILES", "none")
        check_number("noise", noise)
        check_counts(conformers=conformers)
        require(noise >= 0, "noise", "a number of at least 0", noise)
        enough = split == "all" or _shares(len(smiles))[split].size
        require(enough, "smiles", f"at least one molecule for split={split!r}", f"{len(smiles)} for all splits")
        jobs = [(text, number) for text in smiles for number in range(conformers)]
        made = [_labeled(*job, seed, noise) for job in progress(jobs, "GFN2-xTB", len(jobs))]
        z = np.concatenate([item[0] for item in made])
        offsets = np.cumsum([0, *(len(item[0]) for item in made)])
        labels = [item[2] for item in made]
        energy = np.array([label.energy for label in labels])
        number = np.repeat(np.arange(len(smiles)), conformers)
        parts = _split(number, len(smiles))
        factor, _ = units.convert("eV")
        self.smiles = tuple(smiles)
        self.atom_energies: dict[int, float] = {}
        if references:
            fitted, free = fit_atoms(energy, z, offsets, parts["train"])
            energy = energy - free
            self.atom_energies = {charge: value * factor for charge, value in fitted.items()}
        super().__init__(
            z,
            np.concatenate([item[1] for item in made]),
            offsets,
            energy[:, None] * factor,
            ["energy"],
            [energy_unit],
            of_molecule={
                "energy": energy * factor,
                "dipole": np.stack([label.dipole for label in labels]) * units.convert("D")[0],
                "molecule": number,
            },
            of_atom={
                "force": np.concatenate([label.force for label in labels]) * factor,
                "charge": np.concatenate([label.charge for label in labels]),
            },
            transform=transform,
        )
        self._indices = parts[split]
        self._total = () if references else ("y", "energy")


def embed_molecule(smiles: str, seed: int = 0) -> tuple[Int64[np.ndarray, " atoms"], Float64[np.ndarray, "atoms 3"]]:
    """Generate one conformer of a molecule with hydrogens, by ETKDG from the seed and then MMFF to a minimum.

    The results are nuclear charges and positions in angstrom.
    If MMFF has no parameters or finds no minimum, or GFN2-xTB finds a force above 2.7 eV/angstrom there, GFN2-xTB goes
    on to its own minimum: MMFF makes some bonds 0.1 to 0.3 angstrom too long, as in CO2, N2, CS2 and diacetylene. Then
    bond lengths agree to about 0.05 angstrom with those of the molecules of ``ase.collections.g2``. The largest
    difference is that of the N-Cl bond of nitrosyl chloride, which is 0.24 angstrom too short. Fragments, such as
    ``"CO.O"``, are laid apart and then relax together. Every molecule is a closed shell: ``"O=O"`` is singlet oxygen.

    Raises
    ------
    ValueError
        If the SMILES cannot be parsed, has metals of the d or f block, unpaired electrons or a charge, rdkit finds no
        conformer, a minimum is not found, or the atoms at the minimum have other bonds or another stereochemistry.
    """
    check_arguments(embed_molecule, locals())
    require(0 <= seed < 2**31, "seed", f"an integer in 0 .. {2**31 - 1}", seed)
    with needs_extra("embed_molecule", "chem"):
        from rdkit import Chem, rdBase
        from rdkit.Chem import AllChem
    chemistry: Any = AllChem
    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(smiles)
        _check_smiles(smiles, molecule)
        molecule = Chem.AddHs(molecule)
        if all(chemistry.EmbedMolecule(molecule, randomSeed=seed, **options) for options in _EMBEDDINGS):
            raise ValueError(f"SMILES {smiles!r} could not be embedded in three dimensions")
        _lay_apart(molecule, Chem.GetMolFrags(molecule))
        status = chemistry.MMFFOptimizeMolecule(molecule, maxIters=_MMFF_STEPS, ignoreInterfragInteractions=False)
    z = np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()], dtype=np.int64)
    pos = np.asarray(molecule.GetConformer().GetPositions(), dtype=np.float64)
    try:
        if status == _UNKNOWN and np.isin(z, _IONS).any():
            raise ValueError("MMFF has no parameters for its metal, only for some ions")
        if status != 0 or label_gfn2(z, pos).largest_force > _STRAINED:
            pos = _relax(z, pos)
        _check_geometry(molecule, z, pos)
    except ValueError as error:
        raise ValueError(f"SMILES {smiles!r} has no usable conformer: {error}") from error
    return z, pos


def _check_smiles(smiles: str, molecule: Any) -> None:
    """Raise ValueError unless a molecule of rdkit is neutral, and its elements are those of closed shells."""
    from rdkit import Chem
    from rdkit.Chem import Descriptors

    if molecule is None or not molecule.GetNumAtoms() or not all(a.GetAtomicNum() for a in molecule.GetAtoms()):
        raise ValueError(f"SMILES {smiles!r} is not a molecule")
    if Chem.GetFormalCharge(molecule) or Descriptors.NumRadicalElectrons(molecule):
        raise ValueError(f"SMILES {smiles!r} has a charge or unpaired electrons, which are not supported")
    if metals := [atom.GetSymbol() for atom in molecule.GetAtoms() if atom.GetAtomicNum() in _OPEN]:
        raise ValueError(f"SMILES {smiles!r} has {metals[0]}, a metal of the d or f block, which are not supported")


def _lay_apart(molecule: Any, fragments: Sequence[Sequence[int]]) -> None:
    """Lay the fragments of an embedded molecule of rdkit in a row. They are embedded on top of each other."""
    pos = molecule.GetConformer().GetPositions()
    for before, after in itertools.pairwise(fragments):
        pos[list(after), 0] += pos[list(before), 0].max() + _GAP - pos[list(after), 0].min()
    if len(fragments) > 1:
        molecule.GetConformer().SetPositions(pos)


def _relax(z: NDArray[np.int64], pos: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the positions of the next minimum of GFN2-xTB; raise ValueError if it is not reached."""
    from ase import Atoms
    from ase.calculators.calculator import CalculationFailed
    from ase.optimize import BFGS
    from tblite.ase import TBLite

    atoms = Atoms(z, pos, calculator=TBLite(method="GFN2-xTB", verbosity=0))
    try:
        reached = BFGS(atoms, logfile=None).run(fmax=_AT_REST, steps=_GFN2_STEPS)
    except (CalculationFailed, RuntimeError) as error:
        raise ValueError(f"GFN2-xTB failed: {error}") from error
    if not reached:
        raise ValueError(f"{_GFN2_STEPS} steps of GFN2-xTB do not reach a minimum")
    found: NDArray[np.float64] = atoms.positions
    return found


def _check_geometry(molecule: Any, z: NDArray[np.int64], pos: NDArray[np.float64]) -> None:
    """Raise ValueError unless its bonds are the atoms that are close, and its stereochemistry is as specified."""
    from ase.data import covalent_radii
    from rdkit import Chem

    bonded = Chem.GetAdjacencyMatrix(molecule).astype(bool)
    fragment = np.zeros(len(z), dtype=np.int64)
    for number, atoms in enumerate(Chem.GetMolFrags(molecule)):
        fragment[list(atoms)] = number
    ratio = np.linalg.norm(pos[:, None] - pos, axis=-1) / (covalent_radii[z][:, None] + covalent_radii[z])
    np.fill_diagonal(ratio, np.inf)
    least = np.where(fragment[:, None] == fragment, *_APART)
    wrong = np.where(bonded, (ratio < _BOND[0]) | (ratio > _BOND[1]), ratio < least)
    np.fill_diagonal(wrong, False)
    for first, second in np.argwhere(wrong):
        pair = "-".join(molecule.GetAtomWithIdx(int(atom)).GetSymbol() for atom in (first, second))
        raise ValueError(
            f"the {'bond' if bonded[first, second] else 'distance without a bond'} {pair} of the atoms {first} and "
            f"{second} is {ratio[first, second]:.2f} times the sum of their covalent radii"
        )
    found = Chem.Mol(molecule)
    found.GetConformer().SetPositions(pos)
    Chem.AssignStereochemistryFrom3D(found)
    if not found.HasSubstructMatch(molecule, useChirality=True):
        raise ValueError("the minimum has other stereochemistry; use another seed or leave it open")


def label_gfn2(z: ArrayLike, pos: ArrayLike) -> GFN2Labels:
    """Compute energy, forces, dipole and charges of a neutral closed-shell molecule with GFN2-xTB.

    Parameters
    ----------
    z
        Nuclear charges ``[atoms]``.
    pos
        Positions ``[atoms, 3]`` in angstrom.

    Raises
    ------
    ValueError
        If the self-consistent charges do not converge, or the input is not a molecule with an even number of electrons.
    """
    with needs_extra("GFN2-xTB", "chem"):
        from tblite.interface import Calculator
    charges, places, _ = check_atoms(z, pos, [0, np.size(z)])
    electrons = int(charges.sum())
    require(electrons % 2 == 0, "z", "a closed shell", f"{electrons} electrons, an odd number")
    try:
        calculator = Calculator("GFN2-xTB", charges, places.astype(np.float64) / _BOHR)
        calculator.set("verbosity", 0)
        calculator.set("accuracy", _ACCURACY)
        result = calculator.singlepoint()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"GFN2-xTB failed for these z and pos: {error}") from error
    supported = np.isfinite(result.get("energy"))
    require(supported, "z, pos", "a molecule of elements that GFN2-xTB supports", f"z={charges.tolist()}")
    return GFN2Labels(
        energy=float(result.get("energy")) * _HARTREE,
        force=-np.asarray(result.get("gradient")) * _HARTREE / _BOHR,
        dipole=np.asarray(result.get("dipole")) * _DEBYE,
        charge=np.asarray(result.get("charges")),
    )


@functools.lru_cache(maxsize=20_000)
def _labeled(
    smiles: str, number: int, seed: int, noise: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], GFN2Labels]:
    """Generate one conformer, displace its atoms, and label it. The splits of a data set share the cached results."""
    stream = frozen_stream(seed, number)
    z, pos = embed_molecule(smiles, int(stream.randint(2**31 - 1)))
    pos = pos - pos.mean(axis=0) + noise * stream.standard_normal(pos.shape)
    try:
        label = label_gfn2(z, pos)
        expected = f"forces of at most {_LARGEST_FORCE:.0f} eV/angstrom; use less"
        require(label.largest_force <= _LARGEST_FORCE, f"noise={noise}", expected, f"{label.largest_force:.0f}")
    except ValueError as error:
        raise ValueError(f"SMILES {smiles!r}, conformer {number}: {error}") from error
    return z, pos, label


def _split(number: NDArray[np.int64], size: int) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the items of each split. Molecules are never divided between splits."""
    parts = {split: np.flatnonzero(np.isin(number, part)) for split, part in _shares(size).items()}
    return parts | {"all": np.arange(len(number))}


def _shares(size: int) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the molecules of each split."""
    ends = np.rint(np.cumsum(_SHARES) * size).astype(np.int64)
    return dict(zip(SPLITS, np.split(frozen_stream(2024).permutation(size), ends), strict=True))
