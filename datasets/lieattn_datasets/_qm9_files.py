"""A reader of the raw files of QM9 that never runs code in them, and a cache of the result.

The numbers are equal to those of ``torch_geometric.datasets.QM9``, bit by bit, since targets are multiplied in float32
by the same factors. torch_geometric needs rdkit for the raw files, and its cache is a pickle that could run code. This
reader needs neither.
"""

import functools
import hashlib
import logging
from array import array
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import LARGEST, Archive, Release, within_bounds, write_atomically
from lieattn_datasets._molecules import check_atoms
from lieattn_datasets._splits import progress
from lieattn_datasets._targets import SPECIES, TARGETS

CITATION = "QM9: Ramakrishnan, Dral, Rupp, von Lilienfeld, Scientific Data 1, 140022 (2014)."

_SDF = ("gdb9.sdf", "gdb9.sdf.csv", "uncharacterized.txt")
_PREPARED, _CACHE = "qm9_v3.pt", "lieattn_qm9.npz"
_PICKLE = Path("processed", "data_v3.pt")
_COLUMNS = ("mol_id", *TARGETS[-3:], *TARGETS[:-3])
_SYMBOLS = {b"H": 1, b"C": 6, b"N": 7, b"O": 8, b"F": 9}
_HARTREE, _KCAL = 27.211386246, 0.04336414  # in eV, the values of torch_geometric
_UNITS = {name: _HARTREE for name in ("homo", "lumo", "gap", "zpve", "u0", "u298", "h298", "g298")}
_UNITS |= {name: _KCAL for name in TARGETS if name.endswith("_atom")}
_LINE = 1 << 12  # characters of a line; lines of the files have fewer than 300
_HEADER_LINES = 9  # in uncharacterized.txt
_MOST_ATOMS = 999  # in a molecule, by the format of gdb9.sdf

QM9_FILES = Release(
    dataset="QM9",
    origin=(
        f"The files are either raw/{_SDF[0]}, raw/{_SDF[1]} and raw/{_SDF[2]}, or raw/{_PREPARED} (unpacked from "
        f"torch_geometric's qm9_v3.zip). {_PICKLE.as_posix()} of torch_geometric is a pickle, which could run any "
        f"code, and is not read. {CITATION}"
    ),
    sources=SOURCES["QM9"],
)

_Arrays = dict[str, NDArray[Any]]

_log = logging.getLogger(__name__)


def load_qm9(root: str | Path, download: bool = False) -> tuple[Path, _Arrays]:
    """Read QM9 from the cache, if it was made from the existing raw files, or otherwise from the raw files.

    If ``download`` is True, missing raw files are downloaded, unless the prepared file of torch_geometric exists.

    Returns
    -------
    tuple
        The raw file that contains the molecules, and the arrays z ``[atoms]``, pos ``[atoms, 3]``, offsets
        ``[molecules + 1]``, y ``[molecules, 19]`` (float32, eV) and gdb_number ``[molecules]``.
    """
    raw, cache = Path(root) / "raw", Path(root) / "processed" / _CACHE
    if download and QM9_FILES.find(raw, _PREPARED) is None:
        fetch(QM9_FILES, raw, *_SDF)
    path = QM9_FILES.locate(raw, _SDF[0], _PREPARED)
    paths = [path, *(QM9_FILES.locate(raw, name) for name in _SDF[1:])] if path.name == _SDF[0] else [path]
    source = " ".join(QM9_FILES.file_digest(each) for each in paths)
    arrays = _read_cache(cache, source)
    if arrays is None:
        arrays = _read_prepared(path) if path.name == _PREPARED else _read_sdf(*paths)
        _check(path, arrays)
        arrays["z"] = arrays["z"].astype(np.uint8)
        try:
            content: dict[str, Any] = {"digest": np.array(_digest(source, arrays)), **arrays}
            write_atomically(cache, lambda file: np.savez(file, **content))
        except OSError as error:
            _log.warning("QM9 will be read from its raw files each time, since %s cannot be written (%s)", cache, error)
    return path, arrays


def _digest(source: str, arrays: _Arrays) -> str:
    """Return the SHA-256 of the digests of the raw files and of the arrays that were made from them."""
    digest = hashlib.sha256(source.encode())
    for name, values in arrays.items():
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _check(path: Path, arrays: _Arrays) -> None:
    """Raise ValueError if the arrays are not molecules of QM9."""
    try:
        check_atoms(arrays["z"], arrays["pos"], arrays["offsets"])
    except ValueError as error:
        raise QM9_FILES.damaged(path, f"does not hold molecules: {error}") from error
    if not all(within_bounds(arrays[key]) for key in ("pos", "y")):
        raise QM9_FILES.damaged(path, f"or its table has numbers that are not finite, or beyond {LARGEST:g}")
    if not np.isin(arrays["z"], SPECIES).all():
        raise QM9_FILES.damaged(path, f"holds atoms other than {SPECIES}")


def _read_cache(path: Path, source: str) -> _Arrays | None:
    """Return the arrays of the cache, or None if there is no cache, it is damaged, or it belongs to other raw files."""
    if not path.is_file():
        return None
    expected = {
        "digest": "text []",
        "z": "integer [atoms]",
        "pos": "number [atoms, 3]",
        "offsets": "integer [ends]",
        "y": "number [molecules, 19]",
        "gdb_number": "integer [molecules]",
    }
    try:
        arrays = dict(zip(expected, QM9_FILES.read_npz(path, expected), strict=True))
        if str(arrays.pop("digest")) != _digest(source, arrays):
            raise QM9_FILES.damaged(path, "was made from other raw files, or changed")
    except ValueError:
        _log.warning("%s is damaged or was made from other raw files, and is written again", path)
        return None
    return arrays


def _read_sdf(sdf: Path, table: Path, left_out: Path) -> _Arrays:
    """Read the three original files."""
    names, y = _read_table(table)
    skipped = read_left_out(left_out)
    z, pos, sizes = array("B"), array("f"), []
    with sdf.open("rb") as file:
        for number, name in enumerate(progress(names, "reading QM9", len(names)), 1):
            try:
                charges, places = _read_molecule(file, name)
            except ValueError as error:
                raise QM9_FILES.damaged(sdf, f"is broken at molecule {number}: {error}") from error
            if number not in skipped:
                z.extend(charges)
                pos.extend(places)
                sizes.append(len(charges))
        if file.readline(_LINE).strip():
            raise QM9_FILES.damaged(sdf, f"has more molecules than the {len(names)} of {table.name}")
    numbers = np.array([number for number in range(1, len(names) + 1) if number not in skipped], dtype=np.int64)
    return {
        "z": np.frombuffer(z, dtype=np.uint8),
        "pos": np.frombuffer(pos, dtype=np.float32).reshape(-1, 3),
        "offsets": np.cumsum([0, *sizes]),
        "y": y[numbers - 1],
        "gdb_number": numbers,
    }


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
    if tuple(header.decode("ascii", "replace").strip().split(",")) != _COLUMNS:
        raise QM9_FILES.damaged(path, f"does not begin with the line {','.join(_COLUMNS)}")
    if not rows or rows.pop():
        raise QM9_FILES.damaged(path, "is truncated: its last line has no line break")
    names, values = [], array("f")
    for number, row in enumerate(rows, 2):
        name, *cells = row.split(b",")
        try:
            values.extend(map(float, cells))
        except ValueError as error:
            raise QM9_FILES.damaged(path, f"is not a table of numbers in line {number} ({error})") from error
        if len(cells) != len(TARGETS):
            raise QM9_FILES.damaged(path, f"has {len(cells)} targets in line {number}, expected {len(TARGETS)}")
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
        raise QM9_FILES.damaged(path, problem) from error


def _read_prepared(path: Path) -> _Arrays:
    """Read torch_geometric's list of dictionaries of tensors. torch refuses to load other objects."""
    with Archive(path, functools.partial(QM9_FILES.damaged, path)) as archive:
        archive.check_stored()
    try:
        molecules = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way; no code in it has run
        problem = str(error).partition("\n")[0]
        raise QM9_FILES.damaged(path, f"is not a complete torch file of tensors ({problem})") from error
    if not isinstance(molecules, list) or not molecules:
        raise QM9_FILES.damaged(path, f"holds a {type(molecules).__name__}, expected a list of molecules")
    z, pos, y, numbers = [], [], [], []
    for place, molecule in enumerate(molecules):
        if not _is_molecule(molecule):
            raise QM9_FILES.damaged(path, f"has no z, pos, y and idx of a molecule at index {place}")
        z.append(molecule["z"].numpy())
        pos.append(molecule["pos"].numpy())
        y.append(molecule["y"].numpy())
        numbers.append(molecule["idx"] + 1)
    return {
        "z": np.concatenate(z),
        "pos": np.concatenate(pos),
        "offsets": np.cumsum([0, *map(len, z)]),
        "y": np.concatenate(y),
        "gdb_number": np.array(numbers, dtype=np.int64),
    }


def _is_molecule(molecule: Any) -> bool:
    """Return whether a value is a dictionary with the tensors of one molecule and its index in QM9."""
    if not isinstance(molecule, dict) or type(molecule.get("idx")) is not int or not 0 <= molecule["idx"] < 2**31:
        return False
    z, pos, y = tensors = [molecule.get(key, torch.empty(0)) for key in ("z", "pos", "y")]
    return (
        all(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided for tensor in tensors)
        and (z.dtype, pos.dtype, y.dtype) == (torch.int64, torch.float32, torch.float32)
        and z.dim() == 1
        and 1 <= len(z) <= _MOST_ATOMS
        and pos.shape == (len(z), 3)
        and y.shape == (1, len(TARGETS))
    )
