"""Reading of triangle meshes, and sampling of points on their surfaces."""

import codecs
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lieattn_datasets._arrays import check_points, class_array, real_array
from lieattn_datasets._checks import check_arguments
from lieattn_datasets._ply import read_binary_ply

MESH_SUFFIXES = (".off", ".obj", ".stl", ".ply", ".glb")

_OFF = re.compile(rb"(?:ST)?C?N?OFF\s*([0-9].*)?")  # many files of ModelNet lack the line break after OFF
_STL_FACET = re.compile(rb"^\s*outer\s+loop", re.MULTILINE | re.IGNORECASE)
_PLY_ELEMENT = re.compile(rb"^element[ \t]+(\w+)[ \t]+(\d+)", re.MULTILINE)
_MOST_CORNERS = 100_000_000  # limit for the corners of all triangles of a GLB file
_SHOWN = 200  # characters of a problem in a message


class MeshError(ValueError):
    """An error in a mesh. The message names its file."""


def read_mesh(path: str | Path, content: bytes | None = None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read a triangle mesh. Polygons are divided into triangles, and the parts of a scene are merged.

    Parameters
    ----------
    path
        File whose name ends in ``.off``, ``.obj``, ``.stl``, ``.ply`` or ``.glb``. OFF files of ModelNet that lack the
        first line break are accepted.
    content
        The bytes of the file, if they are not read from the path (for members of archives).

    Returns
    -------
    tuple
        Vertices, float64 ``[vertices, 3]``, and faces, int64 ``[faces, 3]``.

    Raises
    ------
    ImportError
        If trimesh is not installed.
    MeshError
        If the format is unknown, the file is damaged or incomplete, or the mesh has no surface. It is a ValueError that
        names the file.
    """
    check_arguments(read_mesh, locals())
    suffix = Path(path).suffix.lower()
    if suffix not in MESH_SUFFIXES:
        raise MeshError(f"path: expected one that ends in {', '.join(MESH_SUFFIXES)}, got {path}")
    try:
        import trimesh  # noqa: F401
    except ImportError as error:
        raise ImportError("meshes need trimesh: pip install trimesh") from error
    try:
        data = Path(path).read_bytes() if content is None else content
        vertices, faces = _read_off(data) if suffix == ".off" else _read_by_trimesh(suffix[1:], data)
        if not len(faces):
            raise MeshError(f"{path} has no faces, so it has no surface; a cloud of points is no mesh")
        face_areas(vertices, faces)
    except (FileNotFoundError, MeshError):
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise MeshError(f"{path} is a broken mesh: {type(error).__name__}: {str(error)[:_SHOWN]}") from error
    return vertices, faces


def face_areas(vertices: ArrayLike, faces: ArrayLike) -> NDArray[np.float64]:
    """Return the area of each triangle, and check that there is a surface.

    Raises
    ------
    ValueError
        If shapes are wrong, a number is not finite, a face has a vertex that does not exist, or the total area is zero
        or not finite.
    """
    points, corners = real_array("vertices", vertices), class_array("faces", faces)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"vertices: expected [vertices, 3], got {list(points.shape)}")
    if corners.ndim != 2 or corners.shape[1] != 3 or not len(corners):
        raise ValueError(f"faces: expected [faces, 3] with at least one face, got {list(corners.shape)}")
    if corners.min() < 0 or corners.max() >= len(points):
        raise ValueError(
            f"faces: expected indices of vertices in 0 .. {len(points) - 1}, got {corners.min()} .. {corners.max()}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        areas = 0.5 * np.linalg.norm(_cross(points, corners), axis=1)
    if not 0 < areas.sum() < np.inf:
        raise ValueError("the area of the surface is zero or not finite")
    return np.asarray(areas)


def sample_surface(
    vertices: ArrayLike, faces: ArrayLike, points: int, stream: np.random.RandomState
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sample points on a surface, uniformly by area.

    Parameters
    ----------
    vertices, faces
        The mesh, ``[vertices, 3]`` and ``[faces, 3]``.
    points
        Number of points, at least one.
    stream
        Generator of the random numbers.

    Returns
    -------
    tuple
        Positions and the unit normals of their faces (right-handed with respect to the order of the corners), both
        float64 ``[points, 3]``.

    Raises
    ------
    ValueError
        If there is no surface, or ``points`` is less than one.
    TypeError
        If ``stream`` is not a ``numpy.random.RandomState``.
    """
    check_points(points)
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


def normalize_cloud(pos: ArrayLike) -> NDArray[np.float64]:
    """Shift the mean of a cloud to the origin, and scale the cloud so that its farthest point has distance 1.

    ``pos`` and the result, in float64, are ``[points, dim]``. If all points coincide, they are only shifted to the
    origin. ValueError is raised if there are no points, or a number is not finite.
    """
    points = real_array("pos", pos)
    if points.ndim != 2 or not len(points):
        raise ValueError(f"pos: expected [points, dim] with at least one point, got {list(points.shape)}")
    centered = points - points.mean(axis=0)
    radius = np.linalg.norm(centered, axis=1).max(initial=0.0)
    return np.asarray(centered / radius if radius > 0 else centered)


def _cross(points: NDArray[np.float64], corners: NDArray[Any]) -> NDArray[np.float64]:
    first, second, third = (points[corners[:, corner]] for corner in range(3))
    return np.asarray(np.cross(second - first, third - first))


def _read_off(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read an OFF file. Its number of lines must match the header, which other readers do not check."""
    data = data.removeprefix(codecs.BOM_UTF8)
    stripped = (line.split(b"#")[0].strip() for line in io.BytesIO(data))
    lines = [line for line in stripped if line]
    header = _OFF.fullmatch(lines[0]) if lines else None
    if header and header[1]:
        lines.insert(1, header[1])
    counts = [int(word) for word in lines[1].split()[:2] if word.isdigit()] if len(lines) > 1 else []
    if len(counts) < 2 or not header:
        raise ValueError("it does not begin with the header of an OFF file")
    vertices, faces = counts
    if len(lines) - 2 != vertices + faces:
        raise ValueError(f"{len(lines) - 2} lines for {vertices} vertices and {faces} faces")
    if not faces:
        return np.empty((vertices, 3)), np.empty((0, 3), dtype=np.int64)
    if not vertices:
        raise ValueError(f"it has no vertices and {faces} faces")
    places = np.loadtxt(lines[2 : 2 + vertices], usecols=(0, 1, 2), ndmin=2, comments=None)
    polygons = [line.split() for line in lines[2 + vertices :]]
    corners = [[int(word) for word in polygon[1 : int(polygon[0]) + 1]] for polygon in polygons]
    if any(len(corner) != int(polygon[0]) for corner, polygon in zip(corners, polygons, strict=True)):
        raise ValueError("a face has fewer corners than it states")
    return places, _triangles(corners)


def _triangles(polygons: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Divide polygons into triangles; raise ValueError if one has fewer than three corners."""
    from trimesh.geometry import triangulate_quads

    for number, corners in enumerate(polygons):
        if len(corners) < 3:
            raise ValueError(f"face {number}: expected at least 3 corners, got {len(corners)}")
    return np.asarray(triangulate_quads(polygons), dtype=np.int64).reshape(-1, 3)


def _read_by_trimesh(kind: str, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read another format. trimesh gets bytes without a path, so that it cannot open other files that they name."""
    import trimesh

    if kind == "ply" and (binary := read_binary_ply(data)) is not None:
        return binary[0], _triangles(binary[1])
    if kind == "glb":
        _check_glb(data)
    if kind == "obj":
        data = data.removeprefix(codecs.BOM_UTF8)
        _check_obj(data)
    loaded: Any = trimesh.load(io.BytesIO(data), file_type=kind, force="mesh", process=False, skip_materials=True)
    vertices, faces = np.asarray(loaded.vertices, dtype=np.float64), np.asarray(loaded.faces, dtype=np.int64)
    if kind == "stl":
        facets = len(_STL_FACET.findall(data)) or int.from_bytes(data[80:84], "little")
        if len(faces) != facets:
            raise ValueError(f"{len(faces)} triangles of {facets} can be read, so it is cut off or has further bytes")
    if kind == "ply":
        header, _, _ = data.partition(b"end_header")
        promised = {name: int(count) for name, count in _PLY_ELEMENT.findall(header)}
        corners, polygons = (promised.get(name, 0) for name in (b"vertex", b"face"))
        if polygons and (len(vertices) < corners or len(faces) < polygons):
            found = f"{len(vertices)} vertices and {len(faces)} faces"
            raise ValueError(f"{found}, but its header promises {corners} and {polygons}")
    return vertices, faces


def _check_obj(data: bytes) -> None:
    """Raise ValueError if a face has fewer than three corners, as in a truncated file. trimesh skips such faces."""
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words[:1] != [b"f"]:
            continue
        continued = number
        while words[-1] == b"\\" and continued < len(lines):  # the face continues on the next line
            words = [*words[:-1], *lines[continued].split()]
            continued += 1
        corners = len(words) - 1
        if corners < 3:
            raise ValueError(f"line {number}: expected a face with at least 3 corners, got {corners}")


def _check_glb(data: bytes) -> None:
    """Raise ValueError if a GLB file describes far more than it contains, by its counts or by repeating a mesh."""
    tree = json.loads(data[20 : 20 + int.from_bytes(data[12:16], "little")])
    counts = [accessor["count"] for accessor in tree["accessors"]]
    if any("bufferView" not in accessor for accessor in tree["accessors"]) or max(counts) > len(data):
        raise ValueError("it has accessors without data, or with less data than they promise")
    corners = [
        sum(counts[part["indices"]] for part in mesh["primitives"] if "indices" in part) for mesh in tree["meshes"]
    ]
    if sum(corners[node["mesh"]] for node in tree["nodes"] if "mesh" in node) > _MOST_CORNERS:
        raise ValueError(f"its repeated meshes have more than {_MOST_CORNERS} corners")
