"""Properties of frames of the package ase, as arguments for :class:`Molecules`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lieattn_datasets._arrays import real_array
from lieattn_datasets._atom_energies import fit_atoms
from lieattn_datasets._files import LARGEST
from lieattn_datasets._units import Units

# attributes of items by the names of ase; names in other files, such as REF_energy, contain them
_ATTRIBUTES = {"energy": "energy", "forces": "force", "stress": "stress", "virial": "virial", "dipole": "dipole"}
_STATES = ("charge", "spin")


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
    found: dict[str, Any] = {"z": z, "pos": _within(np.concatenate([frame.positions for frame in frames]), "pos")}
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
    return found, {charge: factor * value for charge, value in energies.items()}


def _check_frames(frames: Sequence[Any]) -> None:
    """Raise TypeError or ValueError unless there are frames, all of them of ase."""
    try:
        from ase import Atoms
    except ImportError as error:
        raise ImportError("frames need ase: pip install 'lieattn[chem]'") from error
    for number, frame in enumerate(frames):
        if not isinstance(frame, Atoms):
            raise TypeError(f"frames: expected ase.Atoms, got {type(frame).__name__} for frame {number}")
    if not len(frames):
        raise ValueError("frames: expected at least one ase.Atoms, got none")


def _properties(frames: Sequence[Any], keys: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return each property of all frames, with None where it is missing; warn if it may be there by another name."""
    if unknown := sorted(set(keys) - {*_ATTRIBUTES, *_STATES}):
        raise ValueError(f"keys: expected names for {', '.join((*_ATTRIBUTES, *_STATES))}, got one for {unknown[0]!r}")
    _warn_of_changes(frames)
    entries = [{**frame.arrays, **frame.info, **_results(frame)} for frame in frames]
    found = {name: [_known(name, held.get(keys.get(name, name))) for held in entries] for name in _ATTRIBUTES}
    found |= {name: [frame.info.get(keys.get(name, name)) for frame in frames] for name in _STATES}
    there = sorted(set().union(*entries))
    for name, key in keys.items():
        if all(value is None for value in found[name]):
            raise ValueError(f"keys: expected a name that the frames have for {name}, some of {there}, got {key!r}")
    for name, stem in _ATTRIBUTES.items():
        others = [other for other in there if stem in other.lower() and other not in (name, *keys.values())]
        if others and all(value is None for value in found[name]):
            hint = f"pass keys={{{name!r}: {others[0]!r}}} to read it"
            warnings.warn(f"frames: expected {name!r}, got only {', '.join(others)}; {hint}", stacklevel=4)
    return found


def _known(name: str, value: Any) -> Any:
    """Return a stored property of a frame. Numbers that are all NaN count as none, except for energies."""
    missing = isinstance(value, float | np.ndarray) and np.asarray(value).dtype.kind == "f" and np.size(value)
    return None if missing and name != "energy" and np.isnan(value).all() else value


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
    if 0 < len(missing) < len(found):
        raise ValueError(
            f"frames: expected {name} in all frames or in none, got {len(missing)} without it, the first is frame "
            f"{missing[0]}"
        )
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


def _full(stress: ArrayLike) -> NDArray[Any]:
    """Return the matrix of a stress with six components; other shapes as they are."""
    from ase.stress import voigt_6_to_full_3x3_stress

    full: NDArray[Any] = voigt_6_to_full_3x3_stress(np.ravel(stress)) if np.size(stress) == 6 else np.asarray(stress)
    return full


def _shaped(values: ArrayLike, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return numbers of frames, which may be NaN; raise ValueError for another shape."""
    found = real_array(f"{name} of frames", values, finite=False)
    if found.shape != shape:
        raise ValueError(f"{name} of frames: expected {list(shape)}, got {list(found.shape)}")
    return found


def _within(values: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float64]:
    """Return numbers of frames; raise ValueError for another shape or numbers whose squares overflow in float32."""
    found = real_array(f"{name} of frames", values)
    if shape is not None:
        _shaped(found, name, shape)
    if np.abs(found).max(initial=0) > LARGEST:
        raise ValueError(f"{name} of frames: expected at most {LARGEST:g} in size, got {np.abs(found).max():g}")
    return found
