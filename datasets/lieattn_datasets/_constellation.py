"""The constellation data set: patterns of points in the plane that are to be counted."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._clouds import Clouds, Transform
from lieattn_datasets._files import check_choice
from lieattn_datasets._nbody import split_size
from lieattn_datasets._streams import SPLITS, frozen_stream

_SIZES = (10_000, 1_000, 1_000)
_MOTIONS = ("none", "T2", "SE2")


def _polygon(corners: int) -> NDArray[np.float64]:
    angle = 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


_PATTERNS = {
    "triangle": _polygon(3),
    "square": _polygon(4),
    "pentagon": _polygon(5),
    "L": np.array([[-1.0, -1.0], [0.0, -1.0], [1.0, -1.0], [1.0, 0.0], [1.0, 1.0]]),
}


class Constellation(Clouds):
    """Triangles, squares, pentagons and L shapes that are scattered over the plane, to be counted.

    This is the classification task of LieTransformer (Hutchinson et al., 2021), after the constellations of stacked
    capsule autoencoders. Each pattern occurs up to ``repetitions`` times. Each occurrence is dropped with probability
    ``drop`` (at least one remains), rotated about its center and placed at random in a square, and its corners are
    perturbed.

    An item has three attributes: ``pos`` float32 ``[points, 2]``, in random order; ``y`` int64 ``[1, 4]``, the numbers
    of triangles, squares, pentagons and Ls, each in 0 .. repetitions, for four classifiers of ``repetitions + 1``
    classes; and ``x`` float32 ``[points, 17 repetitions - 1]``, the distances to all other points in increasing order,
    padded with zeros. These are the invariant features of the paper. One pattern unit is the circumradius of a polygon;
    ``pos`` is in units of half the side of the square.

    The data differ from the published generator, so that results are not comparable with published ones. Corners are
    scaled by a fixed number (published: each constellation, including dropped corners, is scaled to [-1, 1]), patterns
    rotate about their centers, and all patterns are placed in the same square (published: polygons in a square three
    times as wide as that of the Ls).

    Parameters
    ----------
    split
        ``"train"``, ``"valid"`` or ``"test"``: three different random streams of the same seed.
    size
        Number of constellations. Default: 10,000, 1,000 and 1,000. A smaller data set is the beginning of a larger one.
    repetitions
        Largest number of occurrences of each pattern.
    drop
        Probability that an occurrence is left out, in [0, 1].
    noise
        Standard deviation of the perturbation of the corners, in pattern units.
    max_angle
        Each pattern is rotated by an angle in ``[-max_angle, max_angle)``, in radians.
    side
        Side of the square that contains the centers, in pattern units.
    motion
        Motion of each whole constellation: ``"none"``, ``"T2"`` (a shift by up to half the side of the square in x
        and in y) or ``"SE2"`` (a rotation by any angle, then a shift as for ``"T2"``). The published comparison trains
        and tests on pairs of these.
    seed
        Non-negative integer. The constellations before the motion depend only on the seed.
    transform
        Function that is applied to each new ``Data``.
    """

    patterns = tuple(_PATTERNS)

    def __init__(
        self,
        split: Literal["train", "valid", "test"] = "train",
        size: int | None = None,
        *,
        repetitions: int = 2,
        drop: float = 0.5,
        noise: float = 0.1,
        max_angle: float = 0.33 * np.pi,
        side: float = 24.0,
        motion: Literal["none", "T2", "SE2"] = "none",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(Constellation.__init__, locals())
        size = split_size(split, size, _SIZES)
        check_choice("motion", motion, _MOTIONS)
        if repetitions < 1:
            raise ValueError(f"repetitions: expected an integer of at least 1, got {repetitions}")
        if not 0 <= drop <= 1:
            raise ValueError(f"drop: expected a probability in [0, 1], got {drop}")
        if not (noise >= 0 and max_angle >= 0 and side > 0 and np.isfinite([noise, max_angle, side]).all()):
            raise ValueError(
                "noise, max_angle, side: expected finite numbers, the first two not negative and the last positive, "
                f"got {noise}, {max_angle} and {side}"
            )
        super().__init__(size, transform)
        self.num_classes, self.motion = repetitions + 1, motion
        names = list(_PATTERNS) * repetitions
        streams = [frozen_stream(seed, SPLITS.index(split), kind) for kind in range(8)]
        present = streams[0].uniform(size=(size, len(names))) >= drop
        fallback = np.floor(streams[1].uniform(size=size) * len(names)).astype(np.int64)
        empty = ~present.any(axis=1)
        present[empty, fallback[empty]] = True
        angle = streams[2].uniform(-max_angle, max_angle, (size, len(names)))
        center = streams[3].uniform(-side / 2, side / 2, (size, len(names), 2))
        corners = [
            _turn(_PATTERNS[name], angle[:, number]) + center[:, number, None] for number, name in enumerate(names)
        ]
        owner = np.repeat(np.arange(len(names)), [len(_PATTERNS[name]) for name in names])
        places = np.concatenate(corners, axis=1)
        places += noise * streams[4].standard_normal(places.shape)
        places *= 2 / side
        if motion == "SE2":
            places = _turn(places, streams[5].uniform(-np.pi, np.pi, size))
        if motion != "none":
            places += streams[6].uniform(-1.0, 1.0, (size, 1, 2))
        order = np.argsort(streams[7].uniform(size=places.shape[:2]), axis=1, kind="stable")
        self._places = np.take_along_axis(places, order[:, :, None], axis=1).astype(np.float32)
        self._present = np.take_along_axis(present[:, owner], order, axis=1)
        self._counts = present.reshape(size, repetitions, len(_PATTERNS)).sum(axis=1)

    def _make(self, index: int) -> Data:
        pos = torch.from_numpy(self._places[index, self._present[index]])
        apart = torch.linalg.vector_norm(pos[:, None] - pos[None], dim=-1).sort(dim=1).values[:, 1:]
        x = torch.zeros(len(pos), self._places.shape[1] - 1)
        x[:, : len(pos) - 1] = apart
        return Data(x=x, pos=pos, y=torch.from_numpy(self._counts[index : index + 1].copy()))

    def __repr__(self) -> str:
        return f"Constellation({len(self)} constellations, motion {self.motion})"

    @property
    def labels(self) -> Tensor:
        """Number of occurrences of each pattern, int64 ``[constellations, 4]``, in the order of this data set."""
        return torch.from_numpy(self._counts[self._indices])


def _turn(points: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotate points ``[..., corners, 2]`` counter-clockwise by angles ``[items]``; return ``[items, corners, 2]``."""
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x, y = points[..., 0], points[..., 1]
    return np.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)
