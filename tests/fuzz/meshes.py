"""Meshes of convex and concave polygons in the forms that text formats allow, and polygons that cross themselves."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import lieattn_datasets as ld
from tests.fuzz._target import Finding, Target, Verdict
from tests.test_data_shapes import CROSSING, newell, normals, polygon_file

_Array = NDArray[np.float64]
_Change = Callable[[str], str]


def _radial(rng: np.random.Generator) -> _Array:
    size = rng.integers(3, 12)
    angles = (np.arange(size) + rng.uniform(0, 0.9, size)) * 2 * np.pi / size
    return rng.uniform(0.1, 1, (size, 1)) * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _comb(rng: np.random.Generator) -> _Array:
    teeth = rng.integers(1, 6)
    tips = [place for x in range(teeth)[::-1] for place in ((x + 0.9, 0.2), (x + 0.5, rng.uniform(1, 3)))]
    return np.array([(0, 0), (teeth, 0), *tips, (0, 0.1)])


def _spiral(rng: np.random.Generator) -> _Array:
    angles = np.arange(0, rng.uniform(2, 12), 0.4)
    curve = (1 + angles[:, None]) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return np.concatenate([1.3 * curve, curve[::-1]])


def _holes(rng: np.random.Generator) -> _Array:
    """A frame with two holes. The outline goes to them and returns on the same edge."""
    square = np.array([(1.0, 1.0), (1.0, 3.0), (2.5, 3.0), (2.5, 1.0)])
    left, right = square + rng.uniform(-0.4, 0.4, (2, 4, 2))
    right = np.roll(right + np.array([2.5, 0]), 1, axis=0)
    return np.array([(0, 0), *left, left[0], (0, 0), (6, 0), *right, right[0], (6, 0), (6, 4), (0, 4)])


def _repeated(rng: np.random.Generator, ring: _Array) -> _Array:
    """Repeat corners, put corners on edges, and add needles without an area."""
    for _ in range(rng.integers(3)):
        at = rng.integers(len(ring))
        there, middle = ring[at], (ring[at] + ring[(at + 1) % len(ring)]) / 2
        ring = np.insert(ring, at + 1, ([there], [middle], [middle, there])[rng.integers(3)], axis=0)
    return ring


def _placed(rng: np.random.Generator, ring: _Array) -> _Array:
    """Place a ring in space, with another first corner, orientation and size, and nine digits."""
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    flat = np.roll(np.pad(ring, ((0, 0), (0, 1))), rng.integers(len(ring)), axis=0)[:: rng.choice([1, -1])]
    places = 10 ** rng.uniform(-2, 1) * flat @ turn + rng.normal(size=3) * 9
    return np.vectorize(lambda value: float(f"{value:.9g}"))(places)


def _texture(text: str) -> str:
    """Add texture coordinates to the faces of a PLY file."""
    header, body = text.split("end_header\n")
    vertices = int(re.search(r"vertex (\d+)", header)[1])  # type: ignore[index]
    rows = [row + " 2 0.5 0.5" * (number >= vertices) for number, row in enumerate(body.splitlines())]
    return f"{header}property list uchar float texcoord\nend_header\n" + "\n".join([*rows, ""])


def _corners(text: str, change: Callable[[int, int], str]) -> str:
    """Change the indices of an OBJ file, by a function of an index and the number of vertices."""
    size = len(re.findall(r"(?m)^v ", text))
    return re.sub(r"(?m)^f .*$", lambda face: re.sub(r"\d+", lambda word: change(int(word[0]), size), face[0]), text)


# Changes of a text that do not change its mesh, in the order in which some of them are made.
_SPACES: tuple[_Change, ...] = (
    lambda text: text.replace(" ", "\t "),
    lambda text: text.replace("\n", " \n\n"),
    lambda text: text.replace("\n", "\r\n"),
)
_COMMENTS: tuple[_Change, ...] = (
    lambda text: "# OFF 3 1 0\n" + text,
    lambda text: text.replace("\n", " # f 1 2 3 v 9 9 9\n"),
    *_SPACES,
)
CHANGES: dict[str, tuple[_Change, ...]] = {
    "off": (lambda text: text.replace("OFF\n", "OFF"), lambda text: text.replace("OFF", "NOFF"), *_COMMENTS),
    "obj": (
        lambda text: _corners(text, lambda index, size: f"{index}/7/7"),
        lambda text: _corners(text, lambda index, size: f"{index - size - 1}") if "/" not in text else text,
        lambda text: "o v 1 2 3\ng f 1 2\nusemtl f\n" + text.replace("\nf ", "\ng f\nf ", 1),
        *_COMMENTS,
        lambda text: re.sub(r"(?m)^(f\s+\S+)[ \t]", r"\1 \\\n", text),
    ),
    "ply": (
        _texture,
        lambda text: text.replace("vertex_indices", "vertex_index"),
        lambda text: text.replace("vertex_ind", "corner"),
        lambda text: text.replace("list int int", "list uint8 int64"),
        lambda text: text.replace("element face", "comment element face 7\nobj_info end_header\nelement face"),
        *_SPACES,
    ),
    "ply binary": (),
    "stl": (
        str.upper,
        lambda text: re.sub("(?i)solid", r"\g<0> vertex 1 2 3 facet normal outer loop", text),
        lambda text: text.replace("\n", "\r"),
        *_SPACES[:2],
        lambda text: text.replace("\n", " "),
    ),
}


def _stl(places: _Array) -> str:
    corners = [
        "\n".join(f"vertex {x!r} {y!r} {z!r}" for x, y, z in facet) for facet in places.reshape(-1, 3, 3).tolist()
    ]
    facets = (f"facet normal 0 0 0\nouter loop\n{corner}\nendloop\nendfacet\n" for corner in corners)
    return f"solid\n{''.join(facets)}endsolid\n"


def _check(case: tuple[str, int]) -> Finding | Verdict:
    kind, seed = case
    rng = np.random.default_rng(seed)
    makers = (_radial, _comb, _spiral, _holes)
    rings = [_placed(rng, _repeated(rng, makers[rng.integers(4)](rng))) for _ in range(rng.integers(1, 5))]
    crossing = kind != "stl" and rng.random() < 0.2
    if kind == "stl":
        rings = list(rng.normal(size=(rng.integers(1, 5), 3, 3)))
    elif crossing:
        ring = _placed(rng, np.array(list(CROSSING.values())[rng.integers(len(CROSSING))], dtype=float))
        sizes = [np.ptp(places, axis=0).max() for places in (rings[0], ring)]
        rings = [rings[0], ring * sizes[0] / sizes[1]]  # smaller ones would be accepted
    places = np.concatenate(rings)
    ends = np.cumsum([len(ring) for ring in rings])
    polygons = [list(range(end - len(ring), end)) for ring, end in zip(rings, ends.tolist(), strict=True)]
    content = _stl(places).encode() if kind == "stl" else polygon_file(kind, places, polygons)
    changes = [change for change in CHANGES[kind] if rng.random() < 0.3]
    for change in changes:
        content = change(content.decode()).encode()
    try:
        found = normals(*ld.read_mesh(f"a.{kind[:3]}", content))
    except ld.MeshError as error:
        if crossing and f"face {len(rings) - 1} crosses itself" in str(error):
            return Verdict.NAMED
        return Finding(Verdict.UNNAMED, f"{case}: {error}")
    wanted = np.array([newell(places, polygon) for polygon in polygons])
    area, found_area = (np.linalg.norm(normal, axis=1).sum() for normal in (wanted, found))
    same = np.allclose(found.sum(axis=0), wanted.sum(axis=0), rtol=0, atol=1e-5 * area)
    if crossing or not same or abs(found_area - area) > 1e-5 * area:
        return Finding(Verdict.SILENT, f"{case}: area {found_area} for {area}, crossing {crossing}")
    return Verdict.CORRECT


_CASES = st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 2**32))
TARGETS = {"meshes": Target("meshes of polygons", _CASES, _check, long=10_000, quick=100)}
