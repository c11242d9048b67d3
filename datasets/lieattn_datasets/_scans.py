"""Clouds of points in the files of scanners."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._checks import real_array, require
from lieattn_datasets._files import LARGEST, portable_name
from lieattn_datasets._meshes import MeshError, decoded, ply_header, read_ply

SCAN_SUFFIXES = (".pcd", ".xyz")  # besides .ply, which can have faces, and .txt, which needs names of columns

POSITION, NORMAL, CHANNELS, LABEL = ("x", "y", "z"), ("nx", "ny", "nz"), ("red", "green", "blue", "intensity"), "label"
_OTHER_NAMES = {
    **{f"normal_{axis}": f"n{axis}" for axis in "xyz"},
    **{color[0]: color for color in CHANNELS[:3]},
    **{"reflectance": "intensity", "class": LABEL, "classification": LABEL},
}
_NEIGHBORS = 16  # of a point, to which a plane is fitted
_FLAT = 1e-6  # share of the largest variance below which neighbors are on one line
_SHOWN = 200  # characters of a problem in a message

Columns = dict[str, NDArray[Any]]


def is_scan(name: str, data: bytes) -> bool:
    """Return whether a file contains points without faces, by its suffix and, for PLY, its header."""
    suffix = Path(portable_name(name)).suffix.lower()
    try:
        return suffix not in (".off", ".obj", ".stl", ".glb") and not (suffix == ".ply" and _has_faces(data))
    except Exception:  # the reader of meshes describes the problem
        return False


def read_scan(name: str, data: bytes, columns: Sequence[str] | None = None) -> Columns:
    """Read a cloud of points. MeshError, which names the file, is raised if it is damaged.

    Returns columns ``[points]`` by name, of :data:`POSITION`, :data:`NORMAL`, :data:`CHANNELS` and :data:`LABEL`. Other
    columns are left out, and so are points whose position is not finite, which depth cameras write where they see
    nothing. Integers of colors and intensities are divided by the largest one of their type; colors that are not
    integers by 255 if one is above 1. ``columns`` are the names in files of text without a header.
    """
    suffix = Path(portable_name(name)).suffix.lower()
    try:
        if suffix == ".ply":
            found = _vertices(decoded(data))
        else:
            found = _read_pcd(data) if suffix == ".pcd" else _read_text(decoded(data), columns)
        return _checked(found)
    except Exception as error:  # a damaged file can fail in any way
        raise MeshError(f"{name} cannot be read as a scan: {type(error).__name__}: {str(error)[:_SHOWN]}") from error


def estimate_normals(pos: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return unit normals ``[chosen, 3]`` of a cloud ``[points, 3]`` at chosen points.

    A normal is that of the plane through the 16 nearest points with the least squared distance, and points away from
    the mean of the cloud, so that normals turn with the cloud. They are zero where neighbors are on one line, or
    coincide.
    """
    from scipy.spatial import KDTree

    if len(pos) < 3:
        return np.zeros((len(at), 3))
    _, near = KDTree(pos).query(pos[at], k=min(_NEIGHBORS, len(pos)))
    around = pos[near] - pos[near].mean(axis=1, keepdims=True)
    variances, axes = np.linalg.eigh(around.transpose(0, 2, 1) @ around)
    normal = axes[:, :, 0]
    outward = np.where(((pos[at] - pos.mean(axis=0)) * normal).sum(axis=1) < 0, -1.0, 1.0)
    planar = variances[:, 1] > _FLAT * variances[:, 2]
    return np.asarray(normal * (outward * planar)[:, None])


def _has_faces(data: bytes) -> bool:
    elements, _, _ = ply_header(decoded(data))
    return any(elements.get(name, (0, []))[0] for name in ("face", "tristrips"))


def _vertices(content: bytes) -> dict[str, Any]:
    """Return the columns of the vertices of a PLY file, in their types."""
    elements, found = read_ply(content)
    codes = {name: code for name, code, length in elements["vertex"][1] if not length}
    numbers = {name: np.asarray(found["vertex"][name], dtype=np.float64) for name in codes}
    with np.errstate(invalid="ignore"):
        typed = {name: numbers[name] if codes[name] in "fd" else numbers[name].astype(codes[name]) for name in codes}
    for name in (name for name in codes if codes[name] not in "fd" and (typed[name] != numbers[name]).any()):
        raise ValueError(f"the column {name} has numbers that its type cannot hold")
    return typed


def _read_pcd(content: bytes) -> dict[str, Any]:
    """Read a PCD file of text or numbers; packages that do need further ones with compiled code."""
    parts = re.split(rb"^DATA[ \t]+(\w+)[ \t]*\r?\n", content, maxsplit=1, flags=re.MULTILINE)
    if len(parts) != 3:
        raise ValueError("it does not begin with the header of a PCD file")
    header = {words[0]: words[1:] for words in map(bytes.split, parts[0].splitlines()) if words}
    names, body, points = header[b"FIELDS"], parts[2], int(header[b"POINTS"][0])
    counts = [int(count) for count in header.get(b"COUNT", [b"1"] * len(names))]
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for name, kind, size, count in zip(names, header[b"TYPE"], header[b"SIZE"], counts, strict=True):
        unnamed = name == b"_" or count != 1  # padding and descriptors
        code = f"<{kind.decode().lower()}{int(size)}"
        fields.append((f"{len(fields)}" if unnamed else name.decode(), code, (count,)))
    found: dict[str, Any]
    if parts[1] == b"binary":
        row = np.dtype(fields)
        if len(body) != points * row.itemsize:
            raise ValueError(f"its header promises {points * row.itemsize} bytes, but there are {len(body)}")
        table = np.frombuffer(body, row, points)
        found = {label: table[label][:, 0] for label, _, _ in fields}
    elif parts[1] == b"ascii":
        values, starts = _table(body.splitlines()), np.cumsum([0, *counts])
        if values.shape != (points, starts[-1]):
            raise ValueError(f"its header promises {points} rows of {starts[-1]} numbers, but there are {values.shape}")
        found = {label: values[:, at].astype(code) for (label, code, _), at in zip(fields, starts[:-1], strict=True)}
    else:
        raise ValueError(f"its data are {parts[1].decode()}: write it as ascii or binary")
    for label in {"rgb", "rgba"} & {*found}:  # the bytes of a number: blue is the lowest
        packed = np.ascontiguousarray(found.pop(label)).view("<u4")
        found |= {color: (packed >> shift).astype(np.uint8) for color, shift in zip(CHANNELS, (16, 8, 0), strict=False)}
    return found


def _read_text(content: bytes, columns: Sequence[str] | None) -> dict[str, Any]:
    """Read a table of numbers, with commas, semicolons or blanks, which may begin with the names of its columns."""
    lines = [line for line in re.sub(rb"[,;\t]", b" ", content).splitlines() if line.strip()]
    head = lines[0].lstrip(b"#/ ").split() if lines else []
    if head and not re.match(rb"[-+.\d]|nan|inf", head[0].lower()):
        named, lines = [word.decode().lower() for word in head], lines[1:]
        columns = named if columns is None and {*POSITION} <= {*named} else columns
    table = _table([line for line in lines if not line.lstrip().startswith((b"#", b"//"))])
    if columns is None and table.shape[1] != 3:
        raise ValueError(
            f"it has {table.shape[1]} columns without names: pass columns, such as ['x', 'y', 'z', 'label']"
        )
    return dict(zip(POSITION if columns is None else columns, table.T, strict=True))


def _table(lines: Sequence[bytes]) -> NDArray[np.float64]:
    return np.loadtxt(lines, ndmin=2, comments=None) if any(map(bytes.strip, lines)) else np.empty((0, 3))


def _checked(found: Mapping[str, NDArray[Any]]) -> Columns:
    """Return the known columns of points with a finite position, in the units of :func:`read_scan`."""
    plain = {re.sub("^(scalar|diffuse)_", "", name.lower()): values for name, values in found.items()}
    first = sorted(plain, key=lambda name: name not in _OTHER_NAMES)  # so that label replaces class, if both are there
    known = {_OTHER_NAMES.get(name, name): plain[name] for name in first}
    if not {*POSITION} <= {*known}:
        raise ValueError(f"expected columns x, y and z, got {', '.join(found) or 'none'}")
    seen = np.isfinite([known[axis].astype(np.float64) for axis in POSITION]).all(axis=0)
    if not seen.any():
        raise ValueError("it has no points with finite positions")
    kept = {}
    for name in (*POSITION, *NORMAL, *CHANNELS, LABEL):
        if name in known:
            kind = known[name].dtype
            values = real_array(name, known[name][seen])
            require(
                np.abs(values).max() <= LARGEST, name, f"numbers of at most {LARGEST:g}", f"{np.abs(values).max():g}"
            )
            kept[name] = values / np.iinfo(kind).max if kind.kind in "iu" and name in CHANNELS else values
    colors = [kept[name] for name in CHANNELS[:3] if name in kept]
    if colors and max(color.max() for color in colors) > 1:
        kept |= {name: kept[name] / 255 for name in CHANNELS[:3] if name in kept}
    return kept
