"""Labeled shapes that are generated."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._meshes import face_areas, normalize_cloud, sample_surface
from lieattn_datasets._shapes import Rotate, ShapePoints, Task
from lieattn_datasets._splits import SPLITS, Split, frozen_stream, progress, split_size
from lieattn_datasets._transforms import rotation_matrix

_SIZES = (1_600, 320, 480)
_SCENES = (800, 160, 240)
_LONGEST_EDGE = 0.35  # of the triangles before bending, for shapes with a diameter of about 2
_LEAST_LEFT = 0.5  # share of the surface that holes leave
_STRAIGHT = 1e-6

_Stream = np.random.RandomState


def _prism(creation: Any, outline: ArrayLike, height: float) -> Any:
    """Extrude a polygon that is star-shaped about the origin."""
    corners = np.asarray(outline, dtype=np.float64)
    count = len(corners)
    fan = [[0, 1 + number, 1 + (number + 1) % count] for number in range(count)]
    return creation.extrude_triangulation(np.concatenate([[[0.0, 0.0]], corners]), fan, height)


def _lathe(creation: Any, stream: _Stream, profile: Sequence[tuple[float, float]], spread: float = 0.15) -> Any:
    """Revolve a closed profile of (radius, height). Its radii are scaled at random by up to a share."""
    line = np.array(profile)
    line[:, 0] *= stream.uniform(1 - spread, 1 + spread)
    return creation.revolve(line, sections=24)


def _star(creation: Any, stream: _Stream) -> Any:
    spikes = int(stream.randint(4, 8))
    angle = np.pi * np.arange(2 * spikes) / spikes
    radius = np.where(np.arange(2 * spikes) % 2, stream.uniform(0.35, 0.55), 1.0)
    return _prism(
        creation, np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), stream.uniform(0.3, 0.7)
    )


def _cross(creation: Any, stream: _Stream) -> Any:
    width = stream.uniform(0.2, 0.4)
    quarter = np.array([[1.0, -width], [1.0, width], [width, width]])
    turns = [np.linalg.matrix_power(np.array([[0.0, -1.0], [1.0, 0.0]]), turn) for turn in range(4)]
    return _prism(creation, np.concatenate([quarter @ turn.T for turn in turns]), stream.uniform(0.3, 0.7))


def _bracket(creation: Any, stream: _Stream) -> Any:
    width, arm = stream.uniform(0.3, 0.5), stream.uniform(1.3, 2.0)
    outline = np.array([[0, 0], [2, 0], [2, width], [width, width], [width, arm], [0, arm]])
    return _prism(creation, outline - width / 2, stream.uniform(0.4, 0.9))


def _arch(creation: Any, stream: _Stream) -> Any:
    angle = np.linspace(0, 2 * np.pi, 17)
    thick = stream.uniform(0.2, 0.35)
    circle = np.stack([0.8 + thick * np.cos(angle), thick * np.sin(angle)], axis=1)
    circle[-1] = circle[0]
    return creation.revolve(circle, angle=np.pi, cap=False, sections=24)


# Functions of trimesh.creation and a stream. Shapes have a diameter of about 2, and stand on the xy plane or lie in it.
_MAKERS: dict[str, Callable[[Any, _Stream], Any]] = {
    "ball": lambda c, s: c.icosphere(subdivisions=2),
    "box": lambda c, s: c.box(extents=s.uniform(0.8, 2.0, 3)),
    "cylinder": lambda c, s: c.cylinder(radius=s.uniform(0.4, 0.9), height=s.uniform(1.0, 2.2), sections=24),
    "cone": lambda c, s: c.cone(radius=s.uniform(0.6, 1.1), height=s.uniform(1.2, 2.2), sections=24),
    "capsule": lambda c, s: c.capsule(height=s.uniform(1.0, 1.8), radius=s.uniform(0.3, 0.6), count=[16, 16]),
    "torus": lambda c, s: c.torus(1.0, s.uniform(0.2, 0.45), major_sections=24, minor_sections=12),
    "tube": lambda c, s: c.annulus(r_min=s.uniform(0.4, 0.7), r_max=0.95, height=s.uniform(0.8, 2.0), sections=24),
    "pyramid": lambda c, s: c.cone(radius=s.uniform(0.8, 1.3), height=s.uniform(1.0, 2.0), sections=4),
    "wedge": lambda c, s: c.cylinder(radius=s.uniform(0.7, 1.1), height=s.uniform(1.0, 2.2), sections=3),
    "bowl": lambda c, s: _lathe(
        c, s, [(0, 0), (0.5, 0), (0.9, 0.4), (1, 0.9), (0.9, 0.9), (0.8, 0.45), (0.45, 0.12), (0, 0.12)]
    ),
    "vase": lambda c, s: _lathe(
        c, s, [(0, 0), (0.5, 0), (0.75, 0.5), (0.6, 1.1), (0.25, 1.6), (0.4, 2), (0.3, 2), (0.15, 1.6), (0, 1.4)]
    ),
    "hourglass": lambda c, s: _lathe(c, s, [(0, 0), (0.9, 0), (0.2, 1), (0.9, 2), (0, 2)]),
    "star": _star,
    "cross": _cross,
    "bracket": _bracket,
    "arch": _arch,
}

SHAPE_CLASSES = tuple(_MAKERS)
"""Names of the kinds of solids, in the order of their labels."""


class ProceduralShapes(ShapePoints):
    """Sixteen kinds of solids of random size, bent, with holes and noise. No file is needed.

    The kinds are ball, box, cylinder, cone, capsule, torus, tube, pyramid, wedge, bowl, vase, hourglass, star, cross,
    bracket and arch, and all are equally frequent. All kinds except the bracket are mapped to themselves by some
    rotations, before bends and holes break this symmetry. Each solid (the arch is a tube with open ends) is made by
    trimesh, scaled by up to ``stretch`` along each axis, bent along its height, and pierced. Then points are sampled on
    the surface by area, centered, scaled into the unit sphere, and moved along their normals at random. Normals point
    outwards and are computed before the noise is added.

    Items are as in :class:`ShapePoints`. Construction takes about 3 ms per shape. The same seed gives the same shapes
    with the same version of trimesh.

    Parameters
    ----------
    split, size, seed
        As for :class:`Springs`; by default 1,600, 320 and 480 shapes.
    points
        Number of points per shape.
    stretch
        Each axis is scaled by a factor in [1 - stretch, 1 + stretch].
    bend
        Largest angle between the two ends of a bent shape, in radians.
    holes
        Largest number of holes. Each removes a patch of the surface with a radius of 0.2 to 0.4, while shapes have a
        diameter of about 2.
    noise
        Standard deviation of the shifts of points along their normals, relative to the radius of the unit sphere.
    kinds
        Names of the kinds that are made. Default: all. Labels are indices into ``SHAPE_CLASSES`` in any case.
    task, rotate, transform
        As for :class:`ShapePoints`. Shapes stand upright, with the z axis up, unless they are rotated.
    """

    card = Card("generated with trimesh", "no rights reserved", "1,600 / 320 / 480 or any other sizes, sixteen classes")

    def __init__(
        self,
        split: Split = "train",
        size: int | None = None,
        *,
        points: int = 512,
        stretch: float = 0.3,
        bend: float = 1.0,
        holes: int = 2,
        noise: float = 0.01,
        kinds: Sequence[str] = SHAPE_CLASSES,
        task: Task = "classification",
        rotate: Rotate = "none",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ProceduralShapes.__init__, locals())
        size = split_size(split, size, _SIZES)
        _check_options(points, kinds)
        if not (0 <= stretch < 1 and 0 <= bend <= 2 and holes >= 0 and 0 <= noise < 1):
            raise ValueError(
                "stretch, noise, bend, holes: expected numbers in [0, 1), [0, 1), [0, 2] and at least 0, got "
                f"stretch={stretch}, noise={noise}, bend={bend}, holes={holes}"
            )
        pos, normal = [], []
        for number in progress(range(size), "making shapes", size):
            stream = frozen_stream(seed, SPLITS.index(split), number)
            vertices, faces = make_shape(kinds[number % len(kinds)], stream, stretch, bend, holes)
            places, normals = sample_surface(vertices, faces, points, stream)
            moved = normalize_cloud(places) + noise * stream.standard_normal((points, 1)) * normals
            pos.append(moved.astype(np.float32))
            normal.append(normals.astype(np.float32))
        labels = np.array([SHAPE_CLASSES.index(kinds[number % len(kinds)]) for number in range(size)])
        shapes = np.stack(pos), np.stack(normal), labels
        super().__init__(*shapes, SHAPE_CLASSES, task=task, rotate=rotate, seed=seed, transform=transform)


class ProceduralScenes(ShapePoints):
    """Solids that stand beside each other, where each point has the kind of its solid as label. No file is needed.

    The solids are those of :class:`ProceduralShapes` with its default ``stretch``, ``bend`` and ``noise``, without
    holes. Each is scaled by 0.6 to 1, rotated about the z axis and placed at random, so that the unit spheres around
    them do not overlap. Kinds are drawn independently, and each solid has the same number of points, up to one. Scenes
    are centered and scaled into the unit sphere.

    An item has ``pos``, ``normal``, ``y`` int64 ``[points]`` (an index into ``classes``) and ``solid`` int64
    ``[points]``, the number of the solid. Construction takes about 15 ms per scene.

    Parameters
    ----------
    split, size, seed
        As for :class:`Springs`; by default 800, 160 and 240 scenes.
    solids
        Number of solids in a scene.
    points
        Number of points in a scene, at least one for each solid.
    kinds
        Names of the kinds that occur, from ``SHAPE_CLASSES``.
    task, rotate, transform
        As for :class:`ShapePoints`. Scenes stand upright, with the z axis up, unless they are rotated.
    """

    card = Card(
        "generated with trimesh", "no rights reserved", "800 / 160 / 240 or any other sizes, three solids of six kinds"
    )

    def __init__(
        self,
        split: Split = "train",
        size: int | None = None,
        *,
        solids: int = 3,
        points: int = 256,
        kinds: Sequence[str] = ("ball", "box", "cone", "torus", "tube", "star"),
        task: Task = "classification",
        rotate: Rotate = "none",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ProceduralScenes.__init__, locals())
        size = split_size(split, size, _SCENES)
        _check_options(points, kinds)
        require(1 <= solids <= points, "solids", f"an integer in 1 .. {points}, the number of points", solids)
        streams = (frozen_stream(seed, SPLITS.index(split), number) for number in progress(range(size), "scenes", size))
        scenes = [_make_scene(kinds, solids, points, stream) for stream in streams]
        pos, normal, labels, numbers = (np.stack(part) for part in zip(*scenes, strict=True))
        super().__init__(pos, normal, labels, kinds, task=task, rotate=rotate, seed=seed, transform=transform)
        self._numbers = numbers

    def _make(self, index: int) -> Data:
        data = super()._make(index)
        data.solid = torch.from_numpy(self._numbers[index].copy())
        return data


def _check_options(points: int, kinds: Sequence[str]) -> None:
    """Raise ValueError, naming the argument, before any shape is made."""
    check_counts(points=points)
    require(kinds and set(kinds) <= set(SHAPE_CLASSES), "kinds", f"some of {SHAPE_CLASSES}", kinds)


def _make_scene(
    kinds: Sequence[str], solids: int, points: int, stream: _Stream
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return positions, normals, kinds and solids of the points of one scene."""
    numbers = np.sort(np.arange(points) % solids)
    labels = stream.randint(len(kinds), size=solids)
    centers = np.zeros((solids, 3))
    side = 1.6 * np.sqrt(solids)
    for number in range(solids):
        while True:  # in a square that grows until there is room
            centers[number, :2] = stream.uniform(-side / 2, side / 2, 2)
            if (np.linalg.norm(centers[:number] - centers[number], axis=1) >= 2).all():
                break
            side *= 1.02
    pos, normal = np.empty((points, 3)), np.empty((points, 3))
    for number, (label, center) in enumerate(zip(labels, centers, strict=True)):
        chosen = numbers == number
        vertices, faces = make_shape(kinds[label], stream, 0.3, 1.0)
        places, normals = sample_surface(vertices, faces, int(chosen.sum()), stream)
        places = _inside(vertices, places) + 0.01 * stream.standard_normal((len(places), 1)) * normals
        angle = stream.uniform(0, 2 * np.pi)
        turn = rotation_matrix(np.array([np.cos(angle / 2), 0.0, 0.0, np.sin(angle / 2)]))
        pos[chosen] = stream.uniform(0.6, 1) * places @ turn.T + center
        normal[chosen] = normals @ turn.T
    return normalize_cloud(pos), normal, labels[numbers], numbers


def _inside(vertices: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shift and scale points as the shape to whose surface they belong is moved into the unit sphere."""
    center = (vertices.max(axis=0) + vertices.min(axis=0)) / 2
    return np.asarray((places - center) / np.linalg.norm(vertices - center, axis=1).max())


def make_shape(
    kind: str, stream: _Stream, stretch: float = 0.0, bend: float = 0.0, holes: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return vertices ``[vertices, 3]`` and faces ``[faces, 3]`` of one solid, whose normals point outwards."""
    from trimesh import creation
    from trimesh.remesh import subdivide_to_size

    mesh = _MAKERS[kind](creation, stream)
    vertices, faces = subdivide_to_size(mesh.vertices, mesh.faces, _LONGEST_EDGE, max_iter=20)
    vertices = vertices - (vertices.max(axis=0) + vertices.min(axis=0)) / 2
    vertices = vertices * stream.uniform(1 - stretch, 1 + stretch, 3)
    vertices = _bend(vertices, stream.uniform(-bend, bend), stream.uniform(0, 2 * np.pi))
    count = int(stream.randint(holes + 1))
    return vertices, _pierce(vertices, np.asarray(faces, dtype=np.int64), count, stream)


def _bend(vertices: NDArray[np.float64], angle: float, heading: float) -> NDArray[np.float64]:
    """Bend the z axis to an arc with this angle between its ends, towards a direction in the xy plane."""
    low, high = vertices[:, 2].min(), vertices[:, 2].max()
    curvature = angle / max(high - low, np.abs(vertices).max())  # flat shapes bend less, to avoid self-intersections
    if abs(curvature) < _STRAIGHT:
        return vertices
    cosine, sine = np.cos(heading), np.sin(heading)
    along = cosine * vertices[:, 0] + sine * vertices[:, 1]
    across = cosine * vertices[:, 1] - sine * vertices[:, 0]
    turn, radius = curvature * vertices[:, 2], along + 1 / curvature
    along, height = radius * np.cos(turn) - 1 / curvature, radius * np.sin(turn)
    return np.stack([cosine * along - sine * across, sine * along + cosine * across, height], axis=1)


def _pierce(vertices: NDArray[np.float64], faces: NDArray[np.int64], count: int, stream: _Stream) -> NDArray[np.int64]:
    """Remove the faces near random points of the surface, unless too little of the surface would remain."""
    areas = face_areas(vertices, faces)
    centers = vertices[faces].mean(axis=1)
    kept = np.ones(len(faces), dtype=bool)
    for _ in range(count):
        place = centers[stream.choice(len(faces), p=areas / areas.sum())]
        rest = kept & (np.linalg.norm(centers - place, axis=1) > stream.uniform(0.2, 0.4))
        if areas[rest].sum() >= _LEAST_LEFT * areas.sum():
            kept = rest
    return faces[kept]
