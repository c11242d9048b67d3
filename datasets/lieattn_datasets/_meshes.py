"""Triangle meshes as points on their surfaces."""

import codecs
import io
import itertools
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike, NDArray

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.messages import needs_extra
from lieattn_datasets._checks import class_array, real_array, require
from lieattn_datasets._files import portable_name

MESH_SUFFIXES = (".off", ".obj", ".stl", ".ply", ".glb")

_OFF = re.compile(rb"(?:ST)?C?N?OFF\s*([0-9].*)?")  # many files of ModelNet lack the line break after OFF
_NUMBERS = rb"((?:\s+\S+){3})"
_FACET = re.compile(
    rb"facet\s+normal" + _NUMBERS + rb"\s+outer\s+loop" + 3 * (rb"\s+vertex" + _NUMBERS) + rb"\s+endloop\s+endfacet",
    re.IGNORECASE,
)
# The name of a solid ends with its line, or before the first facet in files of a single line.
_SOLID = re.compile(rb"(?:end)?solid(?:(?!(?<!\S)(?:facet\s+normal\s+[-+.\d]|endsolid))[^\n])*", re.IGNORECASE)
_EXTENSIONS = ("KHR_draco_mesh_compression", "EXT_meshopt_compression", "EXT_mesh_gpu_instancing")
_MOST_CORNERS = 100_000_000  # limit for the corners of all triangles of a GLB file
_MOST_CORNERS_OF_ONE = 4000  # limit for a concave polygon, whose edges are compared with each other
_SMALL = 1e-6  # distances that do not count, as a share of the size of a mesh: files round to about 7 digits
_FEW = 1e-3  # share of the area that faces may have whose surface is not clear
_ROUNDING = 1e-9  # distances that are rounding errors of float64, as a share of the size of a polygon
_PLY = re.compile(rb"ply[ \t]*[\r\n]+(.*?[\r\n])end_header[ \t]*(?:\r\n|\r|\n|$)", re.DOTALL)
_PLY_ORDERS = {b"ascii": "", b"binary_little_endian": "<", b"binary_big_endian": ">"}
_PLY_NAMES = "char uchar short ushort int uint float double int8 uint8 int16 uint16 int32 uint32 float32 float64"
_PLY_CODES = {**dict(zip(_PLY_NAMES.encode().split(), 2 * "bBhHiIfd", strict=True)), b"int64": "q", b"uint64": "Q"}
_PLY_CORNERS = ("vertex_indices", "vertex_index")  # usual names of the list of a face

# The name of a property, the code of its numbers and, for lists, the code of their length.
_PlyProperty = tuple[str, str, str]
_Polygons = tuple[NDArray[np.float64], Sequence[Sequence[int]]]  # vertices, and the corners of each face
_SHOWN = 200  # characters of a problem in a message


class MeshError(ValueError):
    """An error in a mesh. The message names its file."""


def read_mesh(
    path: str | Path, content: bytes | None = None
) -> tuple[Float64[np.ndarray, "vertices 3"], Int64[np.ndarray, "faces 3"]]:
    """Read vertices and faces of a mesh. Polygons are divided into triangles, and the parts of a scene are merged.

    The triangles of a polygon lie inside its outline and have its orientation. Polygons that are not planar are divided
    as they appear along their mean normal (Newell's). Those that cross themselves there are refused; if they have less
    than a thousandth of the area, they become fans. Distances below a millionth of the size of the mesh are rounding.

    Parameters
    ----------
    path
        File whose name ends in ``.off``, ``.obj``, ``.stl``, ``.ply`` or ``.glb``. OFF files of ModelNet that lack the
        first line break are accepted.
    content
        The bytes of the file, if they are not read from the path (for members of archives).

    Raises
    ------
    MeshError
        If the format is unknown, the file is damaged or incomplete, or the mesh has no surface. It is a ValueError that
        names the file.
    """
    check_arguments(read_mesh, locals())
    suffix = Path(portable_name(str(path))).suffix.lower()
    if suffix not in MESH_SUFFIXES:
        raise MeshError(f"path: expected one that ends in {', '.join(MESH_SUFFIXES)}, got {path}")
    try:
        data = Path(path).read_bytes() if content is None else content
        vertices, faces = _read(suffix[1:], data)
        if not len(faces):
            raise MeshError(f"{path} has no faces, so it has no surface; a cloud of points is no mesh")
        face_areas(vertices, faces)
    except (FileNotFoundError, ImportError, MeshError):
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise MeshError(f"{path} cannot be read as a mesh: {type(error).__name__}: {str(error)[:_SHOWN]}") from error
    return vertices, faces


def face_areas(vertices: ArrayLike, faces: ArrayLike) -> Float64[np.ndarray, " faces"]:
    """Return the area of each triangle, and check that there is a surface."""
    points, corners = real_array("vertices", vertices), class_array("faces", faces)
    require(points.ndim == 2 and points.shape[1] == 3, "vertices", "[vertices, 3]", list(points.shape))
    right = corners.ndim == 2 and corners.shape[1] == 3 and len(corners)
    require(right, "faces", "[faces, 3] with at least one face", list(corners.shape))
    low, high = corners.min(), corners.max()
    expected = f"indices of vertices in 0 .. {len(points) - 1}"
    require(low >= 0 and high < len(points), "faces", expected, f"{low} .. {high}")
    with np.errstate(over="ignore", invalid="ignore"):
        areas = 0.5 * np.linalg.norm(_cross(points, corners), axis=1)
    if not 0 < areas.sum() < np.inf:
        raise ValueError("the area of the surface is zero or not finite")
    return np.asarray(areas)


def sample_surface(
    vertices: ArrayLike, faces: ArrayLike, points: int, stream: np.random.RandomState
) -> tuple[Float64[np.ndarray, "points 3"], Float64[np.ndarray, "points 3"]]:
    """Sample points on a surface, uniformly by area, with the unit normals of their faces.

    Normals are right-handed with respect to the order of the corners.

    Parameters
    ----------
    vertices, faces
        The mesh, ``[vertices, 3]`` and ``[faces, 3]``.
    points
        Number of points, at least one.
    stream
        Generator of the random numbers.
    """
    check_arguments(sample_surface, locals())
    check_counts(points=points)
    if not isinstance(stream, np.random.RandomState):
        raise TypeError(f"stream: expected a numpy.random.RandomState, got {type(stream).__name__}")
    areas = face_areas(vertices, faces)
    places, corners = np.asarray(vertices, dtype=np.float64), np.asarray(faces)
    total = np.cumsum(areas)
    chosen = np.searchsorted(total, stream.uniform(0, total[-1], points), side="right")
    chosen = np.minimum(chosen, int(np.flatnonzero(areas)[-1]))
    along, across = stream.uniform(size=(2, points, 1))
    root = np.sqrt(along)  # the root makes the points uniform on the triangle
    first, second, third = (places[corners[chosen, corner]] for corner in range(3))
    pos = (1 - root) * first + root * (1 - across) * second + root * across * third
    normal = _cross(places, corners[chosen])
    return pos, normal / np.linalg.norm(normal, axis=1, keepdims=True)


def normalize_cloud(pos: ArrayLike) -> Float64[np.ndarray, "points dim"]:
    """Shift the mean of a cloud to the origin, and scale the cloud so that its farthest point has distance 1.

    ``pos`` and the result, in float64, are ``[points, dim]``. If all points coincide, they are only shifted to the
    origin. ValueError is raised if there are no points, or a number is not finite.
    """
    points = real_array("pos", pos)
    right = points.ndim == 2 and len(points)
    require(right, "pos", "[points, dim] with at least one point", list(points.shape))
    centered = points - points.mean(axis=0)
    radius = np.linalg.norm(centered, axis=1).max(initial=0.0)
    return np.asarray(centered / radius if radius > 0 else centered)


def _cross(points: NDArray[np.float64], corners: NDArray[Any]) -> NDArray[np.float64]:
    first, second, third = (points[corners[:, corner]] for corner in range(3))
    return np.asarray(np.cross(second - first, third - first))


def _read(kind: str, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read a mesh without checking its numbers.

    OFF, OBJ, PLY and STL of text have their own readers, since trimesh divides concave polygons as fans, and takes
    keywords in names and comments for data.
    """
    if kind == "glb":
        _check_glb(data)
        return _read_by_trimesh(kind, data)
    facets = int.from_bytes(data[80:84], "little")
    if kind == "stl" and len(data) == 84 + 50 * facets:
        return _read_by_trimesh(kind, data)
    text = decoded(data)
    if kind != "stl":
        places, polygons = {"off": _read_off, "obj": _read_obj, "ply": _read_ply}[kind](text)
        return places, _triangles(places, polygons)
    if text.lstrip()[:5].lower() == b"solid":
        return _read_stl(text)
    found = max(0, len(data) - 84) // 50
    raise ValueError(f"{found} triangles of {facets} can be read, so it is cut off or has further bytes")


def decoded(data: bytes) -> bytes:
    """Return the content of a file without the marks of encodings, as written by editors and shells of Windows."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16").encode() if wide else data.removeprefix(codecs.BOM_UTF8)


def _read_off(data: bytes) -> _Polygons:
    """Read an OFF file. Its number of lines must match the header, which other readers do not check."""
    stripped = (line.split(b"#")[0].strip() for line in data.splitlines())
    lines = [line for line in stripped if line]
    header = _OFF.fullmatch(lines[0]) if lines else None
    if header and header[1]:
        lines.insert(1, header[1])
    counts = [int(word) for word in lines[1].split()[:2] if word.isdigit()] if len(lines) > 1 else []
    if len(counts) < 2 or not header:
        raise ValueError("it does not begin with the header of an OFF file of text in three dimensions")
    vertices, faces = counts
    corners, rest = list[list[int]](), iter(lines[2 + vertices :])
    for line in rest if len(lines) - 2 >= vertices + faces else ():
        words = line.split()
        while len(words) <= int(words[0]) and (more := next(rest, b"")):  # corners may continue on the next lines
            words += more.split()
        corners.append([int(word) for word in words[1 : int(words[0]) + 1]])
        if len(corners[-1]) != int(words[0]):
            raise ValueError("a face has fewer corners than it states")
    if len(corners) != faces:
        raise ValueError(f"{len(lines) - 2} lines for {vertices} vertices and {faces} faces")
    if not vertices and faces:
        raise ValueError(f"it has no vertices and {faces} faces")
    places = (
        np.loadtxt(lines[2 : 2 + vertices], usecols=(0, 1, 2), ndmin=2, comments=None) if faces else np.empty((0, 3))
    )
    return places, corners


def _read_obj(data: bytes) -> _Polygons:
    """Read the vertices and faces of an OBJ file; all other statements, such as groups and materials, are skipped."""
    places: list[tuple[float, float, float]] = []
    polygons: list[list[int]] = []
    lines = iter(enumerate(data.splitlines(), 1))
    for number, line in lines:
        words = line.partition(b"#")[0].split()
        while words and words[-1].endswith(b"\\"):  # the statement continues on the next line
            words[-1:] = [*words[-1][:-1].split(), *next(lines, (0, b""))[1].partition(b"#")[0].split()]
        kind = words[0] if words else b""
        try:
            if kind == b"v":
                x, y, z = map(float, words[1:4])
                places.append((x, y, z))
            elif kind == b"f":
                corners = [int(word.split(b"/", 1)[0]) for word in words[1:]]
                if len(corners) < 3 or 0 in corners:
                    counted = "at least 3 corners" if len(corners) < 3 else "corners that are counted from 1"
                    raise ValueError(f"expected a face with {counted}, got {len(corners) if len(corners) < 3 else 0}")
                polygons.append([corner - 1 if corner > 0 else len(places) + corner for corner in corners])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return np.array(places, dtype=np.float64).reshape(-1, 3), polygons


def _read_stl(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read an STL file of text. trimesh takes names of solids for coordinates, and needs line breaks."""
    text = data.replace(b"\r", b"\n")
    facets = _FACET.findall(text)
    names = _FACET.sub(b"", text)
    rest = _SOLID.sub(b"", names).strip()
    if rest or not _SOLID.findall(names)[-1].lower().startswith(b"endsolid"):
        problem = f"the rest begins with {rest[:40]!r}" if rest else "it does not end with endsolid"
        raise ValueError(f"{len(facets)} triangles can be read, but {problem}")
    words = b" ".join(number for facet in facets for number in facet[1:]).split()
    return np.array(words).astype(np.float64).reshape(-1, 3), np.arange(3 * len(facets)).reshape(-1, 3)


def ply_header(content: bytes) -> tuple[dict[str, tuple[int, list[_PlyProperty]]], str, bytes]:
    """Return the elements of a PLY file, the order of its bytes (empty for text) and what follows the header."""
    header = _PLY.match(content)
    lines = [line.split() for line in header[1].splitlines()] if header else []
    order = next((_PLY_ORDERS.get(line[1]) for line in lines if line[:1] == [b"format"]), None)
    if header is None or order is None:
        raise ValueError("it does not begin with the header of a PLY file, with one of its three formats")
    return _ply_elements(lines), order, content[header.end() :]


def read_ply(content: bytes) -> tuple[dict[str, tuple[int, list[_PlyProperty]]], dict[str, dict[str, Any]]]:
    """Return the elements of a PLY file of text or numbers, and the columns of each by name.

    trimesh reads each binary face as if it had as many corners as the first one, and only some names.
    """
    elements, order, body = ply_header(content)
    at, found = 0, dict[str, dict[str, Any]]()
    rows = [] if order else [line for line in body.splitlines() if line.strip()]
    for name, (count, properties) in elements.items():
        if order:
            found[name], at = _ply_numbers(body, at, count, properties, order)
        else:
            found[name], at = _ply_text(name, rows[at : at + count], count, properties), at + count
    if order and at != len(body):
        raise ValueError(f"its header promises {at} bytes, but there are {len(body)}")
    return elements, found


def _read_ply(content: bytes) -> _Polygons:
    elements, found = read_ply(content)
    number, properties = elements.get("face", (0, []))
    if not number and elements.get("tristrips", (0,))[0]:
        raise ValueError("it has strips of triangles, which are not read: export it with faces")
    if not number:
        return np.empty((0, 3)), []
    if not {*"xyz"} <= {*found.get("vertex", {})}:
        raise ValueError("it has faces, but no vertices with x, y and z")
    lists = [name for name, code, length in properties if length and code not in "fd"]
    usual = [name for name in lists if name in _PLY_CORNERS] or lists
    if len(usual) != 1:
        names = ", ".join(lists) or "none"
        raise ValueError(f"expected one list of vertices for each face, as {_PLY_CORNERS[0]}, got {names}")
    vertices = np.stack([np.asarray(found["vertex"][axis], dtype=np.float64) for axis in "xyz"], axis=1)
    polygons = found["face"][usual[0]]
    numbers = isinstance(polygons, np.ndarray)
    return vertices, polygons if numbers else [[int(word) for word in polygon] for polygon in polygons]


def _ply_elements(lines: Sequence[Sequence[bytes]]) -> dict[str, tuple[int, list[_PlyProperty]]]:
    """Return the number of rows and the properties of each element of a header."""
    found: dict[str, tuple[int, list[_PlyProperty]]] = {}
    properties: list[_PlyProperty] = []
    for line in lines:
        if line[:1] == [b"element"]:
            properties = []
            found[line[1].decode()] = int(line[2]), properties
        elif line[:1] == [b"property"]:
            kinds = line[2:-1] if line[1] == b"list" else line[1:-1]
            for unknown in {*kinds} - {*_PLY_CODES}:
                raise ValueError(f"the property {line[-1].decode()} has the unknown type {unknown.decode()}")
            codes = [_PLY_CODES[kind] for kind in kinds]
            properties.append((line[-1].decode(), codes[-1], codes[0] if len(codes) > 1 else ""))
    return found


def _ply_text(name: str, rows: Sequence[bytes], count: int, properties: Sequence[_PlyProperty]) -> dict[str, Any]:
    """Return the column of each property of an element of text. Rows may have further numbers, as those of MeshLab."""
    if len(rows) < count:
        raise ValueError(f"its header promises {count} rows of {name}, but there are {len(rows)}")
    if not count or not properties:
        return {}
    columns: dict[str, Any] = {name: [] for name, _, _ in properties}
    if not any(length for _, _, length in properties):
        table = np.loadtxt(rows, usecols=range(len(properties)), ndmin=2, comments=None)
        return dict(zip(columns, table.T, strict=True))
    for row in rows:
        words, at = row.split(), 0
        for column, _, length in properties:
            first = at + bool(length)
            size = int(words[at]) if length and at < len(words) else 1
            if not first <= (at := first + size) <= len(words):
                raise ValueError(f"a row of {name} has {len(words)} numbers, fewer than its properties need")
            columns[column].append(words[first:at] if length else words[first])
    return columns


def _ply_numbers(
    body: bytes, at: int, count: int, properties: Sequence[_PlyProperty], order: str
) -> tuple[dict[str, Any], int]:
    """Return the column of each property, and the end of the element."""
    if not count or not properties:
        return {}, at
    fields: list[Any] = []
    end = at
    for name, code, length in properties:
        size: tuple[int, ...] = ()
        if length:
            size = struct.unpack_from(order + length, body, end)
            fields.append((f"length of {name}", order + length))
        fields.append((name, order + code, size))
        end = at + np.dtype(fields).itemsize
    row = np.dtype(fields)
    if at + count * row.itemsize <= len(body):
        table = np.frombuffer(body, row, count, at)
        lengths = [name for name, _, length in properties if length]
        if all((table[f"length of {name}"] == table[name].shape[1]).all() for name in lengths):
            return {name: table[name] for name, _, _ in properties}, at + count * row.itemsize
    columns: dict[str, list[Any]] = {name: [] for name, _, _ in properties}
    for _ in range(count):
        for name, code, length in properties:
            size = (1,)
            if length:
                size = struct.unpack_from(order + length, body, at)
                at += struct.calcsize(order + length)
            values = struct.unpack_from(f"{order}{size[0]}{code}", body, at)
            at += struct.calcsize(f"{order}{size[0]}{code}")
            columns[name].append(values if length else values[0])
    return columns, at


def _triangles(places: NDArray[np.float64], polygons: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Divide polygons into triangles inside their outlines, with the orientation of the polygon.

    Fans are used where they are right, as for convex polygons.

    Raises
    ------
    ValueError
        If a polygon has fewer than three corners or a vertex that does not exist, or more than a few cross themselves.
    """
    from trimesh.geometry import triangulate_quads

    lengths = np.fromiter(map(len, polygons), dtype=np.int64, count=len(polygons))
    for number in np.flatnonzero(lengths < 3).tolist()[:1]:
        raise ValueError(f"face {number}: expected at least 3 corners, got {lengths[number]}")
    fans = np.ones(len(lengths), dtype=bool)
    for length in np.unique(lengths[lengths > 3]):
        chosen = np.flatnonzero(lengths == length)
        corners = np.array([polygons[number] for number in chosen.tolist()], dtype=np.int64)
        for number in chosen[((corners < 0) | (corners >= len(places))).any(axis=1)].tolist()[:1]:
            raise ValueError(f"face {number}: expected vertices in 0 .. {len(places) - 1}, got {[*polygons[number]]}")
        with np.errstate(over="ignore", invalid="ignore"):  # areas that are not finite are refused later
            doubled, rays = _fan(places[corners])
            normal, sizes = doubled.sum(axis=1, keepdims=True), np.linalg.norm(doubled, axis=2)
            squares = (normal**2).sum(axis=2)[:, 0]
            backward = (doubled * normal).sum(axis=2).min(axis=1) < -_ROUNDING * squares
            around = np.arctan2(sizes, (rays[:, :-1] * rays[:, 1:]).sum(axis=2)).sum(axis=1) > 2 * np.pi + _SMALL
            fans[chosen] = ~(backward | around | (np.sqrt(squares) < _SMALL * sizes.sum(axis=1)))
    others = np.flatnonzero(~fans).tolist()
    tolerance = _SMALL * np.ptp(places, axis=0).max() if others else 0.0
    divided = {number: _divide(places, polygons[number], number, tolerance) for number in others}
    crossing = [number for number, found in divided.items() if found is None]
    fans[crossing] = True
    faces = triangulate_quads(list(itertools.compress(polygons, fans))).reshape(-1, 3)
    faces = np.concatenate([faces, *(found for found in divided.values() if found is not None)])
    unclear = sum(np.linalg.norm(_fan(places[[*polygons[number]]])[0], axis=1).sum() for number in crossing)
    if unclear > _FEW * np.linalg.norm(_cross(places, faces), axis=1).sum():
        beside = f" ({len(crossing)} faces do)" if len(crossing) > 1 else ""
        raise ValueError(
            f"face {crossing[0]} crosses itself, seen along its mean normal{beside}: divide it into triangles"
        )
    return faces


def _fan(corners: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the triangles of fans as normals of twice their areas, and the vectors from the first corners."""
    rays = corners[..., 1:, :] - corners[..., :1, :]
    return np.cross(rays[..., :-1, :], rays[..., 1:, :]), rays


def _divide(
    places: NDArray[np.float64], polygon: Sequence[int], number: int, tolerance: float
) -> NDArray[np.int64] | None:
    """Divide a polygon whose fan is wrong; return None if it crosses itself by more than a distance."""
    with needs_extra("a mesh with concave faces", "data"):
        from manifold3d import triangulate
    if len(polygon) > _MOST_CORNERS_OF_ONE:
        raise ValueError(f"face {number} is concave and has {len(polygon)} corners, more than {_MOST_CORNERS_OF_ONE}")
    corners = np.array(polygon, dtype=np.int64)
    doubled, rays = _fan(places[corners])
    normal, covered = doubled.sum(axis=0), np.linalg.norm(doubled, axis=1).sum()
    area = np.linalg.norm(normal)
    axes = np.linalg.svd(normal[None])[2][1:]
    axes = axes if np.cross(*axes) @ normal >= 0 else axes[::-1]
    # Sums, unlike a matrix product, give repeated corners the same place bit by bit.
    flat = np.pad((rays[:, None] * axes).sum(axis=2), ((1, 0), (0, 0)))
    edges = np.diff(flat, axis=0, append=flat[:1])
    sides = edges[:, :1] * (flat[:, 1] - flat[:, 1:]) - edges[:, 1:] * (flat[:, 0] - flat[:, :1])
    lengths = np.hypot(*edges.T)
    sides[np.abs(sides) <= tolerance * lengths[:, None]] = 0  # of each corner, seen along each edge
    apart = sides * np.roll(sides, -1, axis=1) < 0  # edges with ends on both sides of another one
    faces = corners[triangulate([flat], _ROUNDING * lengths.sum())]
    if area >= _SMALL * covered:  # not the parts of a bow tie, which cancel, so that it has no normal
        covered = np.abs(_cross(places, faces) @ normal).sum() / area
    crosses = (apart & apart.T).any() or abs(covered - area) > 2 * tolerance * lengths.sum()
    return None if crosses else faces


def _read_by_trimesh(kind: str, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read binary STL or GLB. trimesh gets bytes without a path, so that it cannot open other files that they name."""
    import trimesh

    loaded: Any = trimesh.load(io.BytesIO(data), file_type=kind, force="mesh", process=False, skip_materials=True)
    return np.asarray(loaded.vertices, dtype=np.float64), np.asarray(loaded.faces, dtype=np.int64)


def _check_glb(data: bytes) -> None:
    """Raise ValueError if a GLB file has what trimesh does not read, or describes far more than it contains."""
    if data[:8] != b"glTF\2\0\0\0":
        raise ValueError("it does not begin with the header of a GLB file of glTF 2.0")
    tree = json.loads(data[20 : 20 + int.from_bytes(data[12:16], "little")])
    meshes, accessors = tree.get("meshes", []), tree.get("accessors", [])
    counts = [accessor["count"] for accessor in accessors]
    parts = [part for mesh in meshes for part in mesh["primitives"]]
    if any("POSITION" not in part["attributes"] for part in parts):
        raise ValueError("it has a mesh without positions")
    places = [accessors[part["attributes"]["POSITION"]] for part in parts]
    unread = {
        **{name: name in tree.get("extensionsUsed", ()) for name in _EXTENSIONS},
        "fans of triangles": any(part.get("mode") == 6 for part in parts),
        "sparse or normalized positions": any("sparse" in place or place.get("normalized") for place in places),
        "meshes without a scene": bool(meshes) and not tree.get("scenes"),
    }
    for name in (name for name, present in unread.items() if present):
        raise ValueError(f"it has {name}, which cannot be read: export it without")
    if any("bufferView" not in accessor for accessor in accessors) or max(counts, default=0) > len(data):
        raise ValueError("it has accessors without data, or with less data than they promise")
    corners = [
        sum(counts[part.get("indices", part["attributes"]["POSITION"])] for part in mesh["primitives"])
        for mesh in meshes
    ]
    if sum(corners[node["mesh"]] for node in tree.get("nodes", []) if "mesh" in node) > _MOST_CORNERS:
        raise ValueError(f"its repeated meshes have more than {_MOST_CORNERS} corners")
