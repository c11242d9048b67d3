"""Properties of frames of the package ase, as arguments for :class:`Molecules`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lieattn._core.messages import needs_extra
from lieattn_datasets._checks import real_array, require
from lieattn_datasets._files import LARGEST
from lieattn_datasets._targets import Units, fit_atoms

# attributes of items by the names of ase; names in other files, such as REF_energy, contain them
_ATTRIBUTES = {"energy": "energy", "forces": "force", "stress": "stress", "virial": "virial", "dipole": "dipole"}
_STATES = ("charge", "spin")
_LARGEST_STRESS = 10.0  # eV/angstrom^3, 1,602 GPa
_CLOSEST = 0.3  # angstrom between two atoms
_NEAR, _MOST_NEAR = 0.3, 1000  # angstrom between the atoms of frames that are compared, and frames of a composition
_FEWEST = 3  # pairs of near frames for a ratio
_SHARE, _TIMES = 0.02, 100  # of frames that may be remote, and their distances in medians of all distances


def describe_frames(
    frames: Sequence[Any], energy_unit: str, train: NDArray[np.int64] | None, keys: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[int, float]]:
    """Return arguments for :class:`Molecules` from frames of ase, and the energies of atoms that were subtracted.

    The energies are fitted to the frames with the indices ``train``. If it is None, nothing is subtracted.
    """
    _check_frames(frames)
    factor, unit = Units(energy_unit).convert("eV")
    known = _properties(frames, keys or {})
    z = np.concatenate([frame.numbers for frame in frames])
    offsets = np.cumsum([0, *(len(frame) for frame in frames)])
    positions = [_known("pos", number, frame.positions) for number, frame in enumerate(frames)]
    found: dict[str, Any] = {"z": z, "pos": _within(np.concatenate(positions), "pos")}
    found |= {"offsets": offsets, "y": np.empty((len(frames), 0)), "target_names": [], "target_units": []}
    found |= {"of_molecule": {}, "of_atom": {}}
    energies: dict[int, float] = {}
    if given := _complete(known["energy"], "energy"):
        energy = _within(given, "energy", (len(frames),))
        if train is not None:
            energies, free = fit_atoms(energy, z, offsets, train)
            energy = energy - free
        found |= {"y": factor * energy[:, None], "target_names": ["energy"], "target_units": [unit]}
        found["of_molecule"]["energy"] = factor * energy
    found["of_atom"] |= _with_gaps("forces", known["forces"], [(len(frame), 3) for frame in frames], factor)
    _leave_out_stresses(frames, known["stress"])
    for name in ("stress", "virial"):
        full = [None if value is None else _full(value)[None] for value in known[name]]
        found["of_molecule"] |= _with_gaps(name, full, [(1, 3, 3)] * len(frames), factor)
    dipoles = [None if value is None else _shaped(value, "dipole", (3,))[None] for value in known["dipole"]]
    found["of_molecule"] |= _with_gaps("dipole", dipoles, [(1, 3)] * len(frames), 1.0)
    for name in _STATES:
        if given := _complete(known[name], name):
            found["of_molecule"][name] = _within(given, name, (len(frames),))
    if any(frame.pbc.any() for frame in frames):
        found["of_molecule"]["cell"] = _within([frame.cell.array for frame in frames], "cell")
        found["of_molecule"]["pbc"] = np.stack([frame.pbc for frame in frames])
    _warn_of_contradictions(frames, known, found["of_molecule"].get("energy"))
    return found, {charge: factor * value for charge, value in energies.items()}


def _check_frames(frames: Sequence[Any]) -> None:
    """Raise TypeError or ValueError unless there are frames, all of them of ase."""
    with needs_extra("Molecules.from_ase", "chem"):
        from ase import Atoms
    for number, frame in enumerate(frames):
        if not isinstance(frame, Atoms):
            raise TypeError(f"frames: expected ase.Atoms, got {type(frame).__name__} for frame {number}")
    require(len(frames), "frames", "at least one ase.Atoms", "none")


def _properties(frames: Sequence[Any], keys: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return each property of all frames, with None where it is missing; warn if it may be there by another name."""
    unknown = sorted(set(keys) - {*_ATTRIBUTES, *_STATES})
    require(not unknown, "keys", f"names for {', '.join((*_ATTRIBUTES, *_STATES))}", f"some for {unknown}")
    _warn_of_changes(frames)
    entries = [{**frame.arrays, **frame.info, **_results(frame)} for frame in frames]
    there = sorted(set().union(*entries))

    def read(name: str, key: str | None) -> list[Any]:
        held = entries if name in _ATTRIBUTES else [frame.info for frame in frames]
        return [_known(name, number, of_frame.get(key)) for number, of_frame in enumerate(held)]

    found = {name: read(name, key) for name, key in keys.items()}
    for name, key in keys.items():
        some = any(value is not None for value in found[name])
        require(some, "keys", f"a name that the frames have for {name}, some of {there}", repr(key))
    chosen = [key for name, key in keys.items() if name in _ATTRIBUTES]
    for name in (name for name in (*_ATTRIBUTES, *_STATES) if name not in keys):
        found[name] = read(name, name if not chosen or name in _STATES else None)
    read_already = {*chosen, *(() if chosen else _ATTRIBUTES), "free_energy"}
    others = {
        name: [other for other in there if stem in other.lower() and other not in read_already and not _is_unit(other)]
        for name, stem in _ATTRIBUTES.items()
    }
    absent = [name for name in _ATTRIBUTES if all(value is None for value in found[name])]
    for name in (name for name in absent if others[name]):
        hint = f"pass keys={{{name!r}: {others[name][0]!r}}} to read one"
        warnings.warn(f"frames: no {name} is read, but there is {', '.join(others[name])}; {hint}", stacklevel=4)
    if not chosen and all(others[name] and name not in absent for name in ("energy", "forces")):
        several = ", ".join((*others["energy"], *others["forces"]))
        warnings.warn(f"frames: besides those that are read, there are {several}; pass keys to read them", stacklevel=4)
    return found


def _is_unit(name: str) -> bool:
    return name.lower().endswith(("unit", "units"))


def _warn_of_contradictions(
    frames: Sequence[Any], known: Mapping[str, list[Any]], energy: NDArray[np.float64] | None
) -> None:
    """Warn of labels that are not in eV and angstrom, or not of one calculation, with their number and first frame."""
    missing = np.full((3, 3), np.nan)
    stress, virial = (
        np.stack([missing if value is None else _full(value) for value in known[name]]) for name in ("stress", "virial")
    )
    volume = np.array([frame.cell.volume or np.nan for frame in frames])[:, None, None]
    large = np.fmax(abs(stress), abs(virial / volume)) > _LARGEST_STRESS
    sizes = np.fmax(abs(virial), abs(stress * volume)).max(axis=(1, 2), keepdims=True)
    apart = abs(virial + stress * volume) > 0.05 * sizes + 1e-3
    problems = {
        "atoms are closer than 0.3 angstrom, so positions may be in another unit,": _touching(frames),
        "the stress is above 10 eV/angstrom^3, that is 1,602 GPa, so its unit may be another": large.any(axis=(1, 2)),
        "the virial is not minus the stress times the volume": apart.any(axis=(1, 2)),
        "the energy and that of a frame near it differ by another amount than by their forces": _apart(frames, known),
    }
    if energy is not None:
        distance = abs(energy - np.median(energy))
        remote = distance > _TIMES * np.median(distance)
        if np.median(distance) and remote.sum() <= _SHARE * len(frames):
            problems["the energy is a hundred times as far from the median as that of half of the frames"] = remote
    for number, frame in enumerate(frames):
        for name, value in frame.info.items():
            named = _is_unit(name) and any(stem in name.lower() for stem in _ATTRIBUTES.values())
            if named and "ev" not in str(value).lower():
                problem = f"{name}={value} is stated, but numbers are read as they are, in eV, angstrom and e,"
                problems.setdefault(problem, np.zeros(len(frames), dtype=bool))[number] = True
    for problem, where in problems.items():
        if where.any():
            first, count = int(where.argmax()), int(where.sum())
            warnings.warn(
                f"frames: {problem} in {count} of {len(frames)} frames, the first is frame {first}", stacklevel=4
            )


def _touching(frames: Sequence[Any]) -> NDArray[np.bool_]:
    """Return which frames have atoms that are closer to each other than the nuclei of any molecule."""
    from scipy.spatial import cKDTree

    nearest = (np.asarray(cKDTree(frame.positions).query(frame.positions, k=2)[0]) for frame in frames)
    return np.array([distances[:, 1].min(initial=np.inf) < _CLOSEST for distances in nearest])


def _apart(frames: Sequence[Any], known: Mapping[str, list[Any]]) -> NDArray[np.bool_]:
    """Return which frames have another energy than the forces give, from the frame next to them.

    Between frames i and j at a small distance d, the energy changes by -(F_i + F_j) d / 2. As long as the force grows
    or falls all the way, the error is at most abs((F_j - F_i) d) / 2. Forces in another unit, or with the other sign,
    also have another ratio in most pairs.
    """
    from scipy.spatial import cKDTree

    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, frame in enumerate(frames):
        if known["energy"][number] is not None and known["forces"][number] is not None:
            state = tuple(known[name][number] for name in _STATES)
            kind = (frame.numbers.tobytes(), frame.pbc.tobytes(), frame.cell.array.tobytes(), *state)
            alike.setdefault(kind, []).append(number)
    pairs = [np.empty((0, 5))]
    for numbers in (np.array(numbers[:_MOST_NEAR]) for numbers in alike.values() if len(numbers) > 1):
        pos = np.stack([frames[number].positions.ravel() for number in numbers])
        force = np.stack([np.ravel(known["forces"][number]) for number in numbers])
        energy = np.array([float(known["energy"][number]) for number in numbers])
        atoms, own = pos.shape[1] // 3, np.arange(len(pos))
        near = np.asarray(cKDTree(pos).query(pos, k=2, distance_upper_bound=_NEAR * np.sqrt(atoms))[1])
        other = np.where(near[:, 0] == own, near[:, 1], near[:, 0])
        own, other = own[other < len(pos)], other[other < len(pos)]
        step = pos[other] - pos[own]
        work = -0.5 * ((force[own] + force[other]) * step).sum(axis=1)
        bend = 0.5 * abs(((force[other] - force[own]) * step).sum(axis=1))
        noise = np.full(len(own), 5e-3 + 1e-4 * atoms)  # of self-consistent calculations, in eV
        columns = np.stack([numbers[own], energy[other] - energy[own], work, bend, noise], axis=1)
        pairs.append(columns[abs(step).max(axis=1, initial=0) < _NEAR])
    number, change, work, bend, noise = np.concatenate(pairs).T
    apart = abs(change - work) > bend + 0.2 * abs(work) + noise
    clear = (np.maximum(abs(change), abs(work)) > 4 * noise) & (abs(work) > 0.2 * bend)
    if clear.sum() >= _FEWEST and not 1 / 4 < np.median(change[clear] / (work[clear] + 1e-12)) < 4:
        apart |= clear
    return np.isin(np.arange(len(frames)), number[apart])


def _known(name: str, number: int, value: Any) -> Any:
    """Return a stored property of a frame. Numbers that are all NaN count as none, where frames may lack them."""
    right = value is None or np.asarray(value).dtype != bool
    require(right, f"{name} of frames", "numbers", f"{value} for frame {number}")
    if not (isinstance(value, float | np.ndarray) and np.asarray(value).dtype.kind == "f" and np.size(value)):
        return value
    if name in ("forces", "stress", "virial", "dipole") and np.isnan(value).all():
        return None
    require(np.isfinite(value).all(), f"{name} of frames", "finite numbers", f"NaN or infinity for frame {number}")
    return value


def _warn_of_changes(frames: Sequence[Any]) -> None:
    """Warn if calculators have results for other positions or cells, such as those before ``frame.center()``."""
    changed = [
        number
        for number, frame in enumerate(frames)
        if frame.calc is not None and frame.calc.results and frame.calc.check_state(frame)
    ]
    if changed:
        warnings.warn(
            f"frames: the results of {len(changed)} calculators are not read, because their atoms have changed since, "
            f"the first of frame {changed[0]}; copy results to frame.info and frame.arrays before a change",
            stacklevel=5,
        )


def _results(frame: Any) -> dict[str, Any]:
    """Return what the calculator of a frame knows about these positions. Nothing is computed."""
    if frame.calc is None:
        return {}
    held: dict[str, Any] = {}
    for name in frame.calc.results:
        try:
            value = frame.calc.get_property(name, frame, allow_calculation=False)
        except NotImplementedError:
            continue
        held |= {} if value is None else {name: value}
    return held


def _complete(found: list[Any], name: str) -> list[Any]:
    """Return a property of all frames, or an empty list if no frame has it; raise ValueError if only some have it."""
    missing = [number for number, value in enumerate(found) if value is None]
    got = f"{len(missing)} without it, the first is frame {min(missing, default=None)}"
    require(len(missing) in (0, len(found)), "frames", f"{name} in all frames or in none", got)
    return [] if missing else found


def _with_gaps(
    name: str, found: list[Any], shapes: Sequence[tuple[int, ...]], factor: float
) -> dict[str, NDArray[Any]]:
    """Return the rows of a property of all frames, times a factor. If only some have it, add a mask of the known rows.

    The other rows are NaN. Nothing is returned if no frame has the property.
    """
    if all(value is None for value in found):
        return {}
    rows = [
        np.full(shape, np.nan) if value is None else _shaped(value, name, shape)
        for value, shape in zip(found, shapes, strict=True)
    ]
    values = np.concatenate(rows)
    known = ~np.isnan(values).all(axis=tuple(range(1, values.ndim)))
    _within(values[known], name)
    attribute = _ATTRIBUTES[name]
    return {attribute: factor * values} | ({} if known.all() else {f"{attribute}_mask": known})


def _leave_out_stresses(frames: Sequence[Any], found: list[Any]) -> None:
    """Replace stresses of frames without a volume by None, and warn. Models have none for slabs and molecules."""
    flat = [number for number, frame in enumerate(frames) if found[number] is not None and not frame.pbc.all()]
    for number in flat:
        found[number] = None
    if flat:
        warnings.warn(
            f"frames: {len(flat)} stresses are left out, the first is of frame {flat[0]}, because these frames are not "
            "periodic along three vectors; networks have only virials for them. For slabs whose vacuum is wider than "
            "the radius of the network, pbc = True changes nothing else",
            stacklevel=4,
        )


def _full(stress: ArrayLike) -> NDArray[Any]:
    """Return the matrix of a stress with six components; other shapes as they are."""
    from ase.stress import voigt_6_to_full_3x3_stress

    full: NDArray[Any] = voigt_6_to_full_3x3_stress(np.ravel(stress)) if np.size(stress) == 6 else np.asarray(stress)
    return full


def _shaped(values: ArrayLike, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return numbers of frames, which may be NaN; raise ValueError for another shape."""
    found = real_array(f"{name} of frames", values, finite=False)
    require(found.shape == shape, f"{name} of frames", str(list(shape)), list(found.shape))
    return found


def _within(values: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float64]:
    """Return numbers of frames; raise ValueError for another shape or numbers whose squares overflow in float32."""
    found = real_array(f"{name} of frames", values)
    if shape is not None:
        _shaped(found, name, shape)
    largest = np.abs(found).max(initial=0)
    require(largest <= LARGEST, f"{name} of frames", f"at most {LARGEST:g} in size", f"{largest:g}")
    return found
