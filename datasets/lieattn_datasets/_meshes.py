"""Triangle meshes: reading them, and spreading points over their surface."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MESH_SUFFIXES = (".off", ".obj", ".stl", ".ply", ".glb")

_HEADER = re.compile(rb"\A\s*OFF[ \t]*(?=[0-9])")  # many files of ModelNet lack the line break after OFF


class MeshError(ValueError):
    """What is wrong with a mesh, naming its file."""


def read_mesh(path: str | Path, content: bytes | None = None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read a triangle mesh; polygons are cut into triangles, the parts of a scene put together.

    Parameters
    ----------
    path
        File whose name ends in ``.off``, ``.obj``, ``.stl``, ``.ply`` or ``.glb``. OFF files of ModelNet whose first
        line runs into the second are read too.
    content
        The bytes of the file, if they are not to be read from the path (members of an archive).

    Returns
    -------
    tuple
        Vertices, float64 ``[vertices, 3]``, and faces, int64 ``[faces, 3]``.

    Raises
    ------
    ImportError
        If trimesh is not installed.
    MeshError
        A ValueError that names the file: the format is unknown, the file is damaged or incomplete, or the mesh has no
        surface.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in MESH_SUFFIXES:
        raise MeshError(f"{path} is no mesh: its name must end in {', '.join(MESH_SUFFIXES)}")
    try:
        import trimesh
    except ImportError as error:
        raise ImportError("meshes need trimesh: pip install trimesh") from error
    data = Path(path).read_bytes() if content is None else content
    if suffix == ".off":
        data = _HEADER.sub(b"OFF\n", data)
        _check_off(path, data)
    try:
        loaded: Any = trimesh.load(io.BytesIO(data), file_type=suffix[1:], force="mesh", process=False)
        vertices = np.asarray(loaded.vertices, dtype=np.float64)
        faces = np.asarray(loaded.faces, dtype=np.int64)
    except Exception as error:  # a damaged file can fail in any way
        raise MeshError(f"{path} is a broken mesh: {type(error).__name__}: {error}") from error
    try:
        face_areas(vertices, faces)
    except ValueError as error:
        raise MeshError(f"{path} is a broken mesh: {error}") from error
    return vertices, faces


def face_areas(vertices: ArrayLike, faces: ArrayLike) -> NDArray[np.float64]:
    """Area of each triangle, after checking that there is a surface.

    Raises
    ------
    ValueError
        If shapes are wrong, a number is not finite, a face has a vertex that does not exist, or the whole area is zero.
    """
    points, corners = np.asarray(vertices, dtype=np.float64), np.asarray(faces)
    if points.ndim != 2 or points.shape[1] != 3 or not np.isfinite(points).all():
        raise ValueError(f"vertices must be finite [vertices, 3], got {list(points.shape)}")
    if corners.ndim != 2 or corners.shape[1] != 3 or not len(corners):
        raise ValueError(f"faces must be [faces, 3] with at least one face, got {list(corners.shape)}")
    if corners.min() < 0 or corners.max() >= len(points):
        raise ValueError(f"faces must name vertices 0 .. {len(points) - 1}, got {corners.min()} .. {corners.max()}")
    areas = 0.5 * np.linalg.norm(_cross(points, corners), axis=1)
    if not areas.sum() > 0:
        raise ValueError("the surface has no area")
    return np.asarray(areas)


def sample_surface(
    vertices: ArrayLike, faces: ArrayLike, points: int, stream: np.random.RandomState
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Spread points over a surface, uniformly by area.

    Parameters
    ----------
    vertices, faces
        ``[vertices, 3]`` and ``[faces, 3]``.
    points
        How many, at least one.
    stream
        Where the random numbers come from.

    Returns
    -------
    tuple
        Positions, and the unit normals of their faces (right-handed with the order of the corners), float64
        ``[points, 3]`` both.

    Raises
    ------
    ValueError
        If there is no surface, or no point is asked for.
    """
    if points < 1:
        raise ValueError(f"points must be at least 1, got {points}")
    areas = face_areas(vertices, faces)
    places, corners = np.asarray(vertices, dtype=np.float64), np.asarray(faces)
    total = np.cumsum(areas)
    chosen = np.searchsorted(total, stream.uniform(0, total[-1], points), side="right")
    chosen = np.minimum(chosen, int(np.flatnonzero(areas)[-1]))
    along, across = stream.uniform(size=(2, points, 1))
    root = np.sqrt(along)  # makes the points uniform on the triangle
    first, second, third = (places[corners[chosen, corner]] for corner in range(3))
    pos = (1 - root) * first + root * (1 - across) * second + root * across * third
    normal = _cross(places, corners[chosen])
    return pos, normal / np.linalg.norm(normal, axis=1, keepdims=True)


def normalize_cloud(pos: ArrayLike) -> NDArray[np.float64]:
    """Shift a cloud's mean into the origin and scale it into the unit sphere, which its farthest point touches.

    A cloud whose points coincide becomes the origin.
    """
    points = np.asarray(pos, dtype=np.float64)
    centered = points - points.mean(axis=0)
    radius = np.linalg.norm(centered, axis=1).max(initial=0.0)
    return np.asarray(centered / radius if radius > 0 else centered)


def _cross(points: NDArray[np.float64], corners: NDArray[Any]) -> NDArray[np.float64]:
    first, second, third = (points[corners[:, corner]] for corner in range(3))
    return np.asarray(np.cross(second - first, third - first))


def _check_off(path: str | Path, data: bytes) -> None:
    """Compare the number of lines with what the header promises: readers do not notice an end that is missing."""
    lines = [line for line in (line.split(b"#")[0].strip() for line in data.splitlines()) if line]
    try:
        counts = [int(word) for word in lines[1].split()[:2]]
        if not lines[0].endswith(b"OFF") or len(counts) < 2:
            raise ValueError
    except (IndexError, ValueError) as error:
        raise MeshError(f"{path} is a broken mesh: it has no header of an OFF file") from error
    if len(lines) - 2 < sum(counts):
        raise MeshError(
            f"{path} is a broken mesh: {len(lines) - 2} lines for {counts[0]} vertices and {counts[1]} faces"
        )
