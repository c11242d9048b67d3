"""Flight paths on the sphere."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Clouds, Transform
from lieattn_datasets._splits import SPLITS, Split, frozen_stream, split_size

EARTH_RADIUS = 6371.0  # km
_STEP = 1 / 60  # hours
_PAST = 2.0  # hours
_WIDTH = 0.1  # of a jet, in radians, 640 km
_FORGETTING = 0.1  # hours in which weights of fixes fall by a factor of e; 0.2 to 5 extrapolate worse


class Flights(Clouds):
    """Flights along great circles that drift in a jet stream, of which the past is known. No file is needed.

    An aircraft flies straight ahead, at 800 to 950 km/h, through air that moves along the parallels of a hidden axis,
    fastest on one of them: a jet of ``wind`` km/h to either side, 1,500 km wide at half its speed. The axes are
    uniformly distributed, and the jet is near the path, so that the wind shows only in the past of a flight, and not in
    its place on the Earth. ``fixes`` positions of the past two hours are known, at irregular times with one gap of 20
    to 40 minutes, with noise. The positions at times ahead are to be predicted.

    An item has ``pos`` float32 ``[fixes, 3]`` (unit vectors, the last one now), ``x`` float32 ``[fixes, 1]`` (times in
    hours, 0 now), ``ahead`` float32 ``[1, times]`` and ``y`` float32 ``[1, times, 3]`` (times in hours and the true
    positions). A great circle through the last fix is fitted to the past, with weights that fall by a factor of e in
    six minutes: ``vel`` float32 ``[1, 3]`` is its velocity there in radians per hour, and ``drift`` float32
    ``[fixes, 3]``, in hundreds of kilometers, are the tangent vectors at the fixes that lead to the places of this
    circle at their times. Extrapolation along it is the baseline.

    Parameters
    ----------
    split, size, seed
        As for :class:`Springs`; by default 3,000, 500 and 1,000 flights.
    fixes
        Number of known positions of a flight, at least 3.
    ahead
        Times in hours at which positions are to be predicted, positive and increasing.
    wind
        Speed of a jet in km/h.
    noise
        Standard deviation of the error of a fix, in km for each of two directions.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card("generated", "no rights reserved", "3,000 / 500 / 1,000 or any other sizes, 12 fixes in two hours")

    vectors: tuple[str, ...] = ("pos", "vel", "drift", "y")

    def __init__(
        self,
        split: Split = "train",
        size: int | None = None,
        *,
        fixes: int = 12,
        ahead: Sequence[float] = (0.25, 0.5, 1.0),
        wind: float = 200.0,
        noise: float = 0.3,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(Flights.__init__, locals())
        size = split_size(split, size, (3000, 500, 1000))
        require(fixes >= 3, "fixes", "an integer of at least 3", fixes)
        right = len(ahead) > 0 and ahead[0] > 0 and (np.diff(ahead) > 0).all() and ahead[-1] <= 10
        require(right, "ahead", "increasing times in hours, positive and at most 10", ahead)
        require(0 <= wind <= 500 and 0 <= noise <= 100, "wind, noise", "0 .. 500 km/h and 0 .. 100 km", (wind, noise))
        super().__init__(size, transform)
        self._ahead = np.array(ahead, dtype=np.float64)
        streams = [frozen_stream(seed, SPLITS.index(split), kind) for kind in range(3)]
        paths = _fly(streams[0].standard_normal((size, 9)), streams[1].uniform(size=(size, 3)), wind, ahead[-1])
        # Times are drawn without the gap, which is then inserted.
        draws = streams[2].uniform(size=(size, 2))
        gap, start = (1 + draws[:, :1]) / 3, -0.2 - draws[:, 1:]
        times = np.empty((size, fixes))
        errors = np.empty((size, fixes, 3))
        for flight in range(size):
            stream = frozen_stream(seed, SPLITS.index(split), 3, flight)
            times[flight] = np.sort(stream.uniform(gap[flight] - _PAST, 0, fixes))
            errors[flight] = stream.standard_normal((fixes, 3))
        times[:, 0], times[:, -1] = gap[:, 0] - _PAST, 0.0
        times -= np.where(times < start, gap, 0)
        self._times = times
        self._future = _at(paths, np.broadcast_to(self._ahead, (size, len(ahead))))
        self._fixes = _unit(_at(paths, times) + noise / EARTH_RADIUS * errors)
        here = self._fixes[:, -1:]
        weights = np.exp(times / _FORGETTING) * times
        seen = log_map(here, self._fixes)
        self._velocity = (weights[..., None] * seen).sum(axis=1) / (weights * times).sum(axis=1)[:, None]
        on_circle = exp_map(here, times[..., None] * self._velocity[:, None])
        self._drift = EARTH_RADIUS / 100 * log_map(self._fixes, on_circle)

    def _make(self, index: int) -> Data:
        def tensor(values: NDArray[np.float64]) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.float32))

        return Data(
            x=tensor(self._times[index, :, None]),
            pos=tensor(self._fixes[index]),
            drift=tensor(self._drift[index]),
            vel=tensor(self._velocity[index, None]),
            ahead=tensor(self._ahead[None]),
            y=tensor(self._future[index, None]),
        )


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def exp_map(pos: NDArray[np.float64], tangent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the points that tangent vectors ``[*, 3]`` at points ``[*, 3]`` of the unit sphere lead to."""
    length = np.linalg.norm(tangent, axis=-1, keepdims=True)
    return np.asarray(np.cos(length) * pos + np.sinc(length / np.pi) * tangent)


def log_map(pos: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tangent vectors ``[*, 3]`` at points that lead to others, which are not their antipodes."""
    cosine = (pos * other).sum(axis=-1, keepdims=True)
    across = other - cosine * pos
    length = np.linalg.norm(across, axis=-1, keepdims=True)
    return np.asarray(across * np.arctan2(length, cosine) / np.where(length > 0, length, 1.0))


def _fly(normal: NDArray[np.float64], uniform: NDArray[np.float64], wind: float, end: float) -> NDArray[np.float64]:
    """Return positions ``[flights, minutes, 3]`` from two hours ago to some minutes after ``end``."""
    place, heading, axis = (_unit(part) for part in np.split(normal, 3, axis=1))
    speed = (800 + 150 * uniform[:, :1]) / EARTH_RADIUS
    jet = np.where(uniform[:, 1:2] < 0.5, -wind, wind) / EARTH_RADIUS
    heading = _unit(heading - (heading * place).sum(axis=1, keepdims=True) * place)
    # The jet is where the flight would be, in still air, between an hour ago and in a quarter of an hour.
    middle = exp_map(place, speed * (1 + 1.25 * uniform[:, 2:]) * heading)
    center = (axis * middle).sum(axis=1, keepdims=True)
    path = [place]
    for _ in range(math.ceil((_PAST + end) / _STEP) + 1):
        off = (axis * place).sum(axis=1, keepdims=True) - center
        around = np.cross(axis, place)
        around /= np.linalg.norm(around, axis=1, keepdims=True) + 1e-3
        velocity = speed * heading + jet * np.exp(-0.5 * (off / _WIDTH) ** 2) * around
        place = exp_map(place, _STEP * velocity)
        heading = _unit(heading - (heading * place).sum(axis=1, keepdims=True) * place)
        path.append(place)
    return np.stack(path, axis=1)


def _at(paths: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the positions ``[flights, times, 3]`` at times in hours, interpolated between minutes."""
    minutes = (times + _PAST) / _STEP
    before = np.clip(np.floor(minutes).astype(np.int64), 0, paths.shape[1] - 2)
    rows = np.arange(len(paths))[:, None]
    share = (minutes - before)[..., None]
    return _unit((1 - share) * paths[rows, before] + share * paths[rows, before + 1])
