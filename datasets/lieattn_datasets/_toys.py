"""Toy tasks, generated from a seed."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import ArrayLike, NDArray
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn_datasets._checks import real_array, require, shapes_of
from lieattn_datasets._clouds import Card, Clouds, LabeledClouds, Transform
from lieattn_datasets._splits import SPLITS, Split, frozen_stream, split_size

_SIZES = (10_000, 1_000, 1_000)
_POINTS, _DURATION = 500, 5.0
_MASS, _STIFFNESS = (0.1, 3.1), (0.0, 5.0)
_POSITION, _MOMENTUM = 0.4, 0.6


def _polygon(corners: int) -> NDArray[np.float64]:
    angle = 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


_PATTERNS = {
    "triangle": _polygon(3),
    "square": _polygon(4),
    "pentagon": _polygon(5),
    "L": np.array([[-1.0, -1.0], [0.0, -1.0], [1.0, -1.0], [1.0, 0.0], [1.0, 1.0]]),
}


class Constellation(LabeledClouds):
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
    split, size, transform
        As for :class:`Springs`; by default 10,000, 1,000 and 1,000 constellations.
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
    """

    card = Card(
        "generated, following LieTransformer",
        "no rights reserved",
        "10,000 / 1,000 / 1,000 or any other sizes, 3 to 34 points",
    )

    patterns = tuple(_PATTERNS)

    def __init__(
        self,
        split: Split = "train",
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
        check_counts(repetitions=repetitions)
        require(0 <= drop <= 1, "drop", "a probability in [0, 1]", drop)
        right = noise >= 0 and max_angle >= 0 and side > 0 and np.isfinite([noise, max_angle, side]).all()
        expected = "finite numbers, the first two not negative and the last positive"
        require(right, "noise, max_angle, side", expected, f"{noise}, {max_angle} and {side}")
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
        self._labels = present.reshape(size, repetitions, len(_PATTERNS)).sum(axis=1)

    def _make(self, index: int) -> Data:
        pos = torch.from_numpy(self._places[index, self._present[index]])
        apart = torch.linalg.vector_norm(pos[:, None] - pos[None], dim=-1).sort(dim=1).values[:, 1:]
        x = torch.zeros(len(pos), self._places.shape[1] - 1)
        x[:, : len(pos) - 1] = apart
        return Data(x=x, pos=pos, y=torch.from_numpy(self._labels[index : index + 1].copy()))


def _turn(points: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotate points ``[..., corners, 2]`` counter-clockwise by angles ``[items]``; return ``[items, corners, 2]``."""
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x, y = points[..., 0], points[..., 1]
    return np.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)


class Springs(Clouds):
    r"""Six particles in the plane, each pair joined by a spring: the dynamics task of LieConv and LieTransformer.

    .. math:: H = \sum_i \frac{|p_i|^2}{2 m_i} + \frac12 \sum_i \sum_j k_i k_j |q_i - q_j|^2

    Masses are uniform in [0.1, 3.1) and stiffnesses in [0, 5); positions are normal with standard deviation 0.4, and
    momenta with 0.6. The published generator subtracts the mean momentum of the *batch*. Here that of each *system* is
    subtracted, so that every center of mass rests and a system does not depend on the others. Trajectories have 500
    points on ``linspace(0, 5)``; as published, one chunk of five points is drawn from each.

    The equations are linear, so each trajectory is computed exactly from the normal modes of its system (the original
    integrates numerically), and the energy is constant up to rounding.

    An item has ``pos`` and ``momentum`` float32 ``[6, 2]`` at the first point of the chunk, ``x`` ``[6, 2]`` (mass,
    stiffness), ``time`` ``[1, chunk]`` since the first point, ``y`` float32 ``[6, chunk, 4]`` (position, then momentum,
    at all points including the first), and ``energy`` ``[1]``. Units are those of the equations.

    Parameters
    ----------
    split
        ``"train"``, ``"valid"`` or ``"test"``: three different random streams of the same seed.
    size
        Number of trajectories. Default: 3,000, 2,000 and 2,000. A smaller data set is the beginning of a larger one.
    chunk
        Number of points per item. None gives whole trajectories, for roll-outs.
    particles
        Number of particles of each system.
    seed
        Non-negative integer.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card(
        "simulated, following LieConv and LieTransformer",
        "no rights reserved",
        "3,000 / 2,000 / 2,000 or any other sizes",
    )

    vectors: tuple[str, ...] = ("pos", "momentum", "y")

    def __init__(
        self,
        split: Split = "train",
        size: int | None = None,
        *,
        chunk: int | None = 5,
        particles: int = 6,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(Springs.__init__, locals())
        size = split_size(split, size)
        right = chunk is None or 1 <= chunk <= _POINTS
        require(right, "chunk", f"None or an integer in 1 .. {_POINTS}", chunk)
        check_counts(particles=particles)
        super().__init__(size, transform)
        streams = [frozen_stream(seed, SPLITS.index(split), kind) for kind in range(5)]
        self._mass = streams[0].uniform(*_MASS, (size, particles))
        self._stiffness = streams[1].uniform(*_STIFFNESS, (size, particles))
        self._q = _POSITION * streams[2].standard_normal((size, particles, 2))
        self._p = _MOMENTUM * streams[3].standard_normal((size, particles, 2))
        self._p -= self._p.mean(axis=1, keepdims=True)
        self._points = chunk or _POINTS
        self._first = self._points * np.floor(streams[4].uniform(size=size) * (_POINTS // self._points)).astype(
            np.int64
        )

    def _make(self, index: int) -> Data:
        mass, stiffness = self._mass[index], self._stiffness[index]
        first = int(self._first[index])
        times = np.linspace(0, _DURATION, _POINTS)[first : first + self._points]
        q, p = simulate_springs(mass, stiffness, self._q[index], self._p[index], times)
        energy = spring_energy(mass, stiffness, q[0], p[0])
        return Data(
            x=torch.from_numpy(np.stack([mass, stiffness], axis=1).astype(np.float32)),
            pos=torch.from_numpy(q[0].astype(np.float32)),
            momentum=torch.from_numpy(p[0].astype(np.float32)),
            y=torch.from_numpy(np.concatenate([q, p], axis=-1).swapaxes(0, 1).astype(np.float32)),
            time=torch.from_numpy((times - times[0])[None].astype(np.float32)),
            energy=torch.from_numpy(energy[None].astype(np.float32)),
        )


def spring_energy(
    mass: ArrayLike, stiffness: ArrayLike, pos: ArrayLike, momentum: ArrayLike
) -> Float64[np.ndarray, "*systems"]:
    """Return the Hamiltonian of :class:`Springs`, ``[...]``.

    Masses and stiffnesses are ``[..., particles]``, positions and momenta ``[..., particles, dim]``.
    """
    m, k = real_array("mass", mass), real_array("stiffness", stiffness)
    q, p = real_array("pos", pos), real_array("momentum", momentum)
    alike = q.ndim >= 2 and p.ndim >= 2 and all(a.shape[-1:] == q.shape[-2:-1] for a in (m, k, p[..., 0]))
    expected = "twice [..., particles] and twice [..., particles, dim]"
    require(alike, "mass, stiffness, pos, momentum", expected, shapes_of(m, k, q, p))
    require((m > 0).all(), "mass", "positive numbers", m.min(initial=np.inf))
    squared = np.square(q[..., :, None, :] - q[..., None, :, :]).sum(axis=-1)
    kinetic = (np.square(p).sum(axis=-1) / (2 * m)).sum(axis=-1)
    return np.asarray(kinetic + 0.5 * (k[..., :, None] * k[..., None, :] * squared).sum(axis=(-2, -1)))


def simulate_springs(
    mass: ArrayLike, stiffness: ArrayLike, pos: ArrayLike, momentum: ArrayLike, times: ArrayLike
) -> tuple[Float64[np.ndarray, "times particles dim"], Float64[np.ndarray, "times particles dim"]]:
    """Compute exact positions and momenta of one system of :class:`Springs` from its normal modes.

    Parameters
    ----------
    mass, stiffness
        Positive masses and non-negative stiffnesses ``[particles]``.
    pos, momentum
        Positions and momenta at time 0, ``[particles, dim]``.
    times
        Times of the results ``[times]``.
    """
    m, k = real_array("mass", mass), real_array("stiffness", stiffness)
    q, p = real_array("pos", pos), real_array("momentum", momentum)
    t = real_array("times", times)
    alike = m.ndim == t.ndim == 1 and k.shape == m.shape and q.ndim == 2 and len(q) == len(m) and p.shape == q.shape
    expected = "twice [particles], twice [particles, dim] and [times]"
    require(alike, "mass, stiffness, pos, momentum, times", expected, shapes_of(m, k, q, p, t))
    positive = (m > 0).all() and (k >= 0).all()
    require(positive, "mass, stiffness", "positive and non-negative numbers", f"{m} and {k}")
    root = np.sqrt(m)[:, None]
    pulls = 2 * (np.diag(k * k.sum()) - np.outer(k, k))  # minus the force, per displacement
    squared, modes = np.linalg.eigh(pulls / (root * root.T))
    frequency = np.sqrt(np.maximum(squared, 0.0))  # rounding can make the zero of the center of mass negative
    phase = t[:, None] * frequency
    cosine, sine = np.cos(phase)[..., None], np.sin(phase)[..., None]
    over = (t[:, None] * np.sinc(phase / np.pi))[..., None]  # sin(w t) / w, also at w = 0
    amplitude, speed = modes.T @ (root * q), modes.T @ (p / root)
    path = modes @ (cosine * amplitude + over * speed)
    push = modes @ (cosine * speed - frequency[:, None] * sine * amplitude)
    return path / root, push * root


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
