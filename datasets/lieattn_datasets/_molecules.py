"""Molecules: concatenated arrays of atoms, with targets for each molecule and each atom."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn_datasets._arrays import plain_array, real_array
from lieattn_datasets._checks import check_arguments, check_attribute
from lieattn_datasets._clouds import Clouds, Transform
from lieattn_datasets._files import LARGEST
from lieattn_datasets._units import Units

HEAVIEST = 118  # nuclear charge of the heaviest element
_LISTED = 4


class Molecules(Clouds):
    """Molecules with scalar targets, and with any further numbers for each molecule or each atom.

    An item has ``z`` int64 ``[atoms]`` (nuclear charges), ``pos`` float32 ``[atoms, 3]`` in angstrom, ``y``
    float32 ``[1, targets]``, and one attribute for each entry of ``of_molecule`` and ``of_atom``.

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
    of_atom
        Map from attribute names to numbers ``[atoms, ...]``: forces, partial charges.
    transform
        Function that is applied to each new ``Data``.

    Raises
    ------
    ValueError
        If shapes do not match, a number is not finite, or a charge is not an atomic number.

    Examples
    --------
    >>> pos = [[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]]
    >>> water = Molecules([8, 1, 1], pos, [0, 3], [[1.85]], ["mu"], ["D"])
    >>> water[0]
    Data(y=[1, 1], pos=[3, 3], z=[3])
    """

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
        count = len(self._offsets) - 1
        super().__init__(count, transform)
        self._y = real_array("y", y)
        self.target_names, self.target_units = tuple(target_names), tuple(target_units)
        expected = (count, len(self.target_names))
        if self._y.shape != expected or len(self.target_units) != expected[1]:
            raise ValueError(
                f"y: expected {list(expected)}, and one of target_units for each of target_names, got "
                f"{list(self._y.shape)} and {len(self.target_units)} units"
            )
        self._of_molecule = _tables("of_molecule", of_molecule, count)
        self._of_atom = _tables("of_atom", of_atom, len(self._z))

    @staticmethod
    def from_ase(
        frames: Sequence[Any],
        *,
        energy_unit: str = "eV",
        references: bool = True,
        transform: Transform | None = None,
    ) -> "Molecules":
        """Create a data set of molecules or periodic structures from frames of the package ase.

        Energies (eV), forces (eV/angstrom) and stresses (eV/angstrom^3) are stored results of the frames' calculators,
        or entries of ``info`` and ``arrays`` with the names ``energy``, ``forces`` and ``stress``. Nothing is computed.
        Virials (eV, minus stress times volume), the total charge (e) and the spin multiplicity 2S + 1 are the entries
        ``virial``, ``charge`` and ``spin`` of ``info``. Each property must be known for all frames or for none.

        An item has ``z``, ``pos`` (angstrom) and, if they are known, ``y`` ``[1, 1]`` (the energy, also as ``energy``
        ``[1]``), ``force`` ``[atoms, 3]`` and ``stress`` ``[1, 3, 3]`` (the energy unit per angstrom and angstrom^3),
        ``virial`` ``[1, 3, 3]`` (the energy unit), ``charge`` and ``spin`` ``[1]`` float32. If any frame is periodic,
        all items have a ``cell`` ``[1, 3, 3]`` (angstrom, its vectors are the rows) and ``pbc`` bool ``[1, 3]`` (the
        periodic directions), which models with periodic neighbors accept.

        Parameters
        ----------
        frames
            ``ase.Atoms`` objects, for example ``ase.io.read(path, ":")``.
        energy_unit
            Unit of energies, forces and stresses: ``"eV"``, ``"meV"``, ``"Ha"`` or ``"kcal/mol"``.
        references
            Whether a sum over the atoms is subtracted from each energy, since items are float32, which has 7 digits.
            The sum has one number per element, fitted by least squares in float64 (``atom_energies`` of the result, in
            the energy unit).
        transform
            Function that is applied to each new ``Data``.

        Raises
        ------
        ImportError
            If ase is not installed.
        TypeError
            If a frame is not an ``ase.Atoms``.
        ValueError
            If there are no frames, only some frames have a property, or numbers are not finite.

        Examples
        --------
        >>> from ase import Atoms
        >>> frames = [Atoms("H2", [[0, 0, 0], [0, 0, d]], info={"energy": -31.7}) for d in (0.7, 0.8)]
        >>> Molecules.from_ase(frames)[0]
        Data(y=[1, 1], pos=[2, 3], z=[2], energy=[1])
        """
        check_arguments(Molecules.from_ase, locals())
        described, energies = describe_frames(frames, energy_unit, np.arange(len(frames)) if references else None)
        return Molecules(**described, transform=transform)._of_frames(energies)

    def _of_frames(self, atom_energies: dict[int, float]) -> Self:
        """Set the attributes that rotate with the atoms of frames, and the energies that were subtracted."""
        self.vectors, self.tensors = ("pos", "force", "cell"), ("stress", "virial")
        self.atom_energies: dict[int, float] = atom_energies
        return self

    def _make(self, index: int) -> Data:
        atoms = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        data = Data(
            z=torch.from_numpy(self._z[atoms].astype(np.int64)),
            pos=torch.from_numpy(self._pos[atoms].astype(np.float32)),
            y=torch.from_numpy(self._y[index : index + 1].astype(np.float32)),
        )
        for name, values in self._of_molecule.items():
            data[name] = _tensor(values[index : index + 1])
        for name, values in self._of_atom.items():
            data[name] = _tensor(values[atoms])
        return data

    def __repr__(self) -> str:
        names = (
            ", ".join(self.target_names) if len(self.target_names) <= _LISTED else f"{len(self.target_names)} targets"
        )
        return f"{type(self).__name__}({len(self)} molecules, {names or 'no targets'})"

    @property
    def targets(self) -> Tensor:
        """All targets, float64 ``[molecules, targets]``, in the order of this data set."""
        return torch.from_numpy(self._y[self._indices])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and standard deviation of each target, for ``StandardizeTargets(*train.statistics())``.

        They are computed in float64.

        Raises
        ------
        ValueError
            If there are no molecules.
        """
        if not len(self):
            raise ValueError("statistics need at least one molecule, but the data set is empty")
        values = self._y[self._indices]
        return tuple(values.mean(axis=0).tolist()), tuple(values.std(axis=0).tolist())


class MoleculeFeatures:
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

    Raises
    ------
    ValueError
        If the species are empty, repeated or not elements; or, when called, if an atom has another species.

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
        if not known or len(known) != len(self.species) or not all(1 <= charge <= HEAVIEST for charge in known):
            raise ValueError(f"species: expected different nuclear charges in 1 .. {HEAVIEST}, got {species}")
        if powers < 1:
            raise ValueError(f"powers: expected an integer of at least 1, got {powers}")
        self.powers = powers

    def __call__(self, data: Data) -> Data:
        check_arguments(MoleculeFeatures.__call__, locals())
        if data.get("z") is None:
            raise ValueError("data.z: expected the nuclear charges of the atoms, got nothing")
        check_attribute(data, "z")
        table = torch.tensor(self.species, device=data.z.device)
        one_hot = data.z[:, None] == table
        unknown = data.z[~one_hot.any(dim=1)]
        if len(unknown):
            raise ValueError(f"data.z: expected only the species {self.species}, got {int(unknown[0])}")
        scaled = data.z[:, None].float() / max(self.species)
        powers = scaled ** torch.arange(self.powers, device=data.z.device)
        described = data.__copy__()
        described.x = (one_hot[:, :, None] * powers[:, None, :]).flatten(1)
        return described

    def __repr__(self) -> str:
        return f"MoleculeFeatures({self.species}, powers={self.powers})"


class StandardizeTargets:
    """Subtract a mean from each target in ``y`` and divide it by a standard deviation.

    The method :meth:`restore` reverts this for predictions.

    Parameters
    ----------
    mean, std
        One number, or one per target; std must be positive. See ``StandardizeTargets(*train.statistics())``.

    Raises
    ------
    ValueError
        If a number is not finite, std is not positive, or the lengths differ.
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        check_arguments(StandardizeTargets.__init__, locals())
        self.mean = torch.atleast_1d(torch.as_tensor(real_array("mean", mean)))
        self.std = torch.atleast_1d(torch.as_tensor(real_array("std", std)))
        if self.mean.dim() != 1 or self.mean.shape != self.std.shape:
            raise ValueError(f"mean, std: expected the same length, got mean={mean} and std={std}")
        if not bool(self.mean.isfinite().all()) or not bool((self.std.isfinite() & (self.std > 0)).all()):
            raise ValueError(
                f"mean, std: expected finite numbers and positive finite numbers, got mean={mean} and std={std}"
            )

    def __call__(self, data: Data) -> Data:
        check_arguments(StandardizeTargets.__call__, locals())
        self._check("data.y", data.get("y"))
        scaled = data.__copy__()
        scaled.y = ((data.y.double() - self.mean.to(data.y.device)) / self.std.to(data.y.device)).to(data.y.dtype)
        return scaled

    def restore(self, y: Tensor) -> Tensor:
        """Return predictions ``[..., targets]`` in the units of the data set."""
        self._check("y", y)
        return (y.double() * self.std.to(y.device) + self.mean.to(y.device)).to(y.dtype)

    def _check(self, argument: str, y: Tensor) -> None:
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise TypeError(f"{argument}: expected a tensor [..., targets], got {type(y).__name__}")
        if len(self.mean) not in (1, y.shape[-1]):
            raise ValueError(f"{argument}: expected {len(self.mean)} targets, got {list(y.shape)}")

    def __repr__(self) -> str:
        return f"StandardizeTargets(mean={self.mean.tolist()}, std={self.std.tolist()})"


def check_atoms(
    z: ArrayLike, pos: ArrayLike, offsets: ArrayLike
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Return the three arrays; raise ValueError unless they describe molecules."""
    for argument, values in (("z", z), ("pos", pos), ("offsets", offsets)):
        real_array(argument, values)
    charges, places, ends = np.asarray(z), np.asarray(pos), np.asarray(offsets, dtype=np.int64)
    if charges.ndim != 1 or not np.issubdtype(charges.dtype, np.integer):
        raise ValueError(f"z: expected integers [atoms], got {charges.dtype} {list(charges.shape)}")
    if charges.size and not (1 <= int(charges.min()) and int(charges.max()) <= HEAVIEST):
        raise ValueError(f"z: expected nuclear charges in 1 .. {HEAVIEST}, got {charges.min()} .. {charges.max()}")
    if places.shape != (len(charges), 3):
        raise ValueError(
            f"pos: expected [{len(charges)}, 3] for the {len(charges)} atoms of z, got {list(places.shape)}"
        )
    if not np.isfinite(places).all():
        raise ValueError("pos: expected finite numbers, got NaN or infinity")
    ordered = ends.ndim == 1 and len(ends) > 0 and ends[0] == 0 and ends[-1] == len(charges)
    if not ordered or (np.diff(ends) < 0).any():
        raise ValueError(
            f"offsets: expected numbers that rise from 0 to the number of atoms, {len(charges)}, got "
            f"{ends.ravel()[:8].tolist()}"
        )
    return charges, places, ends


def composition(z: NDArray[Any], offsets: NDArray[np.int64], species: Sequence[int]) -> NDArray[np.float64]:
    """Count the atoms of each species in each molecule, ``[molecules, species]``."""
    running = np.zeros((len(z) + 1, len(species)))
    np.cumsum(z[:, None] == np.asarray(species), axis=0, out=running[1:])
    return np.diff(running[offsets], axis=0)


def fit_atoms(
    energy: NDArray[np.float64], z: NDArray[Any], offsets: NDArray[np.int64], train: NDArray[np.int64]
) -> tuple[dict[int, float], NDArray[np.float64]]:
    """Fit one energy per species to the training molecules; return the energies and their sum over each molecule."""
    species = [charge for charge in range(1, 119) if (z == charge).any()]
    counts = composition(z, offsets, species)
    fitted, *_ = np.linalg.lstsq(counts[train], energy[train], rcond=None)
    return dict(zip(species, fitted.tolist(), strict=True)), counts @ fitted


def describe_frames(
    frames: Sequence[Any], energy_unit: str, train: NDArray[np.int64] | None
) -> tuple[dict[str, Any], dict[int, float]]:
    """Return arguments for :class:`Molecules` from frames of ase, and the energies of atoms that were subtracted.

    The energies are fitted to the frames with the indices ``train``. If it is None, nothing is subtracted.
    """
    try:
        from ase import Atoms
        from ase.stress import voigt_6_to_full_3x3_stress
    except ImportError as error:
        raise ImportError("frames need ase: pip install 'lieattn[chem]'") from error
    for number, frame in enumerate(frames):
        if not isinstance(frame, Atoms):
            raise TypeError(f"frames: expected ase.Atoms, got {type(frame).__name__} for frame {number}")
    if not len(frames):
        raise ValueError("frames: expected at least one ase.Atoms, got none")
    factor, unit = Units(energy_unit).convert("eV")
    known = {name: _results(frames, name) for name in ("energy", "forces", "stress", "virial")}
    z = np.concatenate([frame.numbers for frame in frames])
    offsets = np.cumsum([0, *(len(frame) for frame in frames)])
    found: dict[str, Any] = {"z": z, "pos": _within(np.concatenate([frame.positions for frame in frames]), "pos")}
    found |= {"offsets": offsets, "y": np.empty((len(frames), 0)), "target_names": [], "target_units": []}
    found |= {"of_molecule": {}, "of_atom": {}}
    energies: dict[int, float] = {}
    if known["energy"]:
        energy = _within(known["energy"], "energy", (len(frames),))
        if train is not None:
            energies, free = fit_atoms(energy, z, offsets, train)
            energy = energy - free
        found |= {"y": factor * energy[:, None], "target_names": ["energy"], "target_units": [unit]}
        found["of_molecule"]["energy"] = factor * energy
    if known["forces"]:
        rows = [_within(force, "forces", (len(frame), 3)) for force, frame in zip(known["forces"], frames, strict=True)]
        found["of_atom"]["force"] = factor * np.concatenate(rows)
    for name in ("stress", "virial"):
        if known[name]:
            full = [voigt_6_to_full_3x3_stress(np.ravel(s)) if np.size(s) == 6 else s for s in known[name]]
            found["of_molecule"][name] = factor * np.stack([_within(s, name, (3, 3)) for s in full])
    found["of_molecule"] |= _of_whole(frames)
    return found, {charge: factor * value for charge, value in energies.items()}


def _of_whole(frames: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return the properties of whole frames that are known: charge, spin and cell."""
    found: dict[str, NDArray[Any]] = {}
    for name in ("charge", "spin"):
        if numbers := _complete([frame.info.get(name) for frame in frames], name):
            found[name] = _within(numbers, name, (len(frames),))
    if any(frame.pbc.any() for frame in frames):
        found["cell"] = _within([frame.cell.array for frame in frames], "cell")
        found["pbc"] = np.stack([frame.pbc for frame in frames])
    return found


def _results(frames: Sequence[Any], name: str) -> list[Any]:
    """Return a stored property of all frames, or an empty list if no frame has it."""
    found = []
    for frame in frames:
        value = frame.info.get(name, frame.arrays.get(name))
        try:
            held = None if frame.calc is None else frame.calc.get_property(name, frame, allow_calculation=False)
        except NotImplementedError:
            held = None
        found.append(value if held is None else held)
    return _complete(found, name)


def _complete(found: list[Any], name: str) -> list[Any]:
    """Return a property of all frames, or an empty list if no frame has it; raise ValueError if only some have it."""
    missing = [number for number, value in enumerate(found) if value is None]
    if 0 < len(missing) < len(found):
        raise ValueError(
            f"frames: expected {name} in all frames or in none, got {len(missing)} without it, the first is frame "
            f"{missing[0]}"
        )
    return [] if missing else found


def _within(values: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float64]:
    """Return numbers of frames; raise ValueError for another shape or numbers whose squares overflow in float32."""
    found = real_array(f"{name} of frames", values)
    if shape is not None and found.shape != shape:
        raise ValueError(f"{name} of frames: expected {list(shape)}, got {list(found.shape)}")
    if np.abs(found).max(initial=0) > LARGEST:
        raise ValueError(f"{name} of frames: expected at most {LARGEST:g} in size, got {np.abs(found).max():g}")
    return found


def _tables(argument: str, tables: Mapping[str, ArrayLike] | None, rows: int) -> dict[str, NDArray[Any]]:
    """Return numbers of molecules or atoms as arrays; raise ValueError unless there is a row for each."""
    found = {name: plain_array(f"{argument}[{name!r}]", values) for name, values in (tables or {}).items()}
    for name, values in found.items():
        if values.shape[:1] != (rows,):
            raise ValueError(f"{argument}[{name!r}]: expected {rows} rows, got {list(values.shape)}")
    return found


def _tensor(values: NDArray[Any]) -> Tensor:
    """Return a copy as a tensor: floating numbers as float32, integers as int64, booleans unchanged."""
    kind = {"f": np.float32, "i": np.int64, "u": np.int64}.get(values.dtype.kind, values.dtype)
    return torch.from_numpy(values.astype(kind))
