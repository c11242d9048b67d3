"""Charged particles: prediction of later positions."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import ArrayLike, NDArray
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts, check_number
from lieattn_datasets._checks import plain_array, real_array, require, shapes_of
from lieattn_datasets._clouds import Card, Clouds, Transform
from lieattn_datasets._files import Release
from lieattn_datasets._splits import SPLITS, Split, frozen_stream, progress, split_size

SOFTENING = 0.1
_CHUNK = 256  # systems that are advanced together, so that their arrays stay in the cache
_MOST_DRIFT = 0.01
_SPEED = 0.5
_LONGEST = 1e6  # longest simulated time, with a thousand steps per unit of time
_START, _END = 3, 4  # the task of the literature: one unit of time, after three units of equilibration
_FILE_DRIFT = 0.005  # relative drift of energies in the file, including the rounding of positions to float32

RELEASE = Release(
    dataset="Charged N-body",
    origin="The file is nbody_charged5.npz, 7,000 simulated systems of 5 charged particles.",
    computed=("pos", "vel", "energy", "traj_pos", "traj_vel"),
    digests={"nbody_charged5.npz": "content:23cc6dd99b87fa7bf780ec9b6860126e8184acb1d4e9e4e2d34891d8cdff1bb6"},
)


class ChargedParticles(Clouds):
    """Snapshots of charged particles: positions at a later time from positions and velocities at an earlier time.

    An item has ``pos`` and ``vel`` float32 ``[particles, 3]`` at the start, ``x`` float32 ``[particles, 1]`` (the
    charges), ``mass`` ``[particles]`` (ones), ``y`` float32 ``[particles, 3]`` (positions at the end), ``time`` ``[1]``
    between start and end, and ``energy`` ``[1]``, which is conserved. All numbers are in the natural units of the
    simulation: unit masses, unit charges, and unit force between unit charges at unit distance.

    Parameters
    ----------
    charge
        Charges ``[systems, particles]``.
    pos, vel
        Positions and velocities of the snapshots, ``[systems, times, particles, 3]``.
    times
        Times of the snapshots ``[times]``.
    start, end
        Indices of the snapshots that are input and target.
    transform
        Function that is applied to each new ``Data``.
    """

    vectors: tuple[str, ...] = ("pos", "vel", "y")

    def __init__(
        self,
        charge: ArrayLike,
        pos: ArrayLike,
        vel: ArrayLike,
        times: ArrayLike,
        *,
        start: int = _START,
        end: int = _END,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ChargedParticles.__init__, locals())
        self._charge, self._pos, self._vel = (
            plain_array(name, array) for name, array in (("charge", charge), ("pos", pos), ("vel", vel))
        )
        self._times = real_array("times", times)
        right = self._charge.ndim == 2 and self._times.ndim == 1
        shapes = shapes_of(self._charge, self._times)
        require(right, "charge, times", "[systems, particles] and [times]", shapes)
        systems, particles = self._charge.shape
        expected = (systems, len(self._times), particles, 3)
        right = self._pos.shape == self._vel.shape == expected
        require(right, "pos, vel", str(list(expected)), shapes_of(self._pos, self._vel))
        snapshots = f"increasing snapshots in 0 .. {len(self._times) - 1}"
        require(0 <= start < end < len(self._times), "start, end", snapshots, f"{start} and {end}")
        super().__init__(systems, transform)
        self.start, self.end = start, end
        self._energy: NDArray[np.float64] = charge_energy(self._charge, self._pos[:, start], self._vel[:, start])

    @property
    def energy(self) -> Float64[np.ndarray, " systems"]:
        """Energies ``[systems]`` of the systems in this data set, which may be a split or a subset."""
        return self._energy[self._indices]

    def _make(self, index: int) -> Data:
        return Data(
            x=torch.from_numpy(self._charge[index, :, None].astype(np.float32)),
            mass=torch.ones(self._charge.shape[1]),
            pos=torch.from_numpy(self._pos[index, self.start].astype(np.float32)),
            vel=torch.from_numpy(self._vel[index, self.start].astype(np.float32)),
            y=torch.from_numpy(self._pos[index, self.end].astype(np.float32)),
            time=torch.tensor([self._times[self.end] - self._times[self.start]], dtype=torch.float32),
            energy=torch.tensor([self._energy[index]], dtype=torch.float32),
        )


class NBody(ChargedParticles):
    """Five charged particles: 3,000 / 2,000 / 2,000 simulated systems, similar to those of the literature.

    The default task is that of the literature, from time 3 to time 4. The simulation differs from those of
    SE(3)-Transformer, EGNN and SEGNN, so errors are not comparable with published ones.

    Parameters
    ----------
    root
        Folder with ``nbody_charged5.npz``.
    split
        ``"train"``, ``"valid"`` or ``"test"``: the splits of the file.
    start, end
        Times of input and target, 0 .. 5.
    verify
        Whether to compare the digest, and compare the energies at all times with the stored ones. If False, any file in
        the same format is read.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card("simulated", "no rights reserved", "7,000 systems of 5 particles at times 0 .. 5")

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        start: int = _START,
        end: int = _END,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(NBody.__init__, locals())
        part = f"split_{split}"
        snapshots = "number [systems, times, particles, 3]"
        expected = {
            "charge": "number [systems, particles]",
            "pos": snapshots,
            "vel": snapshots,
            "times": "number [times]",
            "energy": "number [systems]",
            part: "integer [chosen]",
        }
        path, (charge, pos, vel, times, energy, chosen) = RELEASE.read(root, expected, verify)
        try:
            if verify:
                check_drift(energy[:, None], charge_energy(charge[:, None], pos, vel), _FILE_DRIFT)
            super().__init__(charge, pos, vel, times, start=start, end=end, transform=transform)
        except ValueError as error:
            if str(error).startswith("start, end:"):
                raise
            raise RELEASE.damaged(path, f"does not hold charged particles: {error}") from error
        self._indices = RELEASE.check_indices(path, part, chosen, len(charge))


class NBodySimulated(ChargedParticles):
    """Charged particles that are simulated when the data set is constructed. No file is needed.

    Any number of systems and particles is possible. The physics is that of :class:`NBody`: charges are +1 or -1 at
    random, positions are standard normal, velocities have random directions and speed 0.5, and the center of mass rests
    at the origin. The velocity Verlet method has step 0.001, and its conservation of energy is checked. The simulation
    of 1,000 systems of five particles takes about 0.6 s.

    Parameters
    ----------
    split, size, seed, transform
        As for :class:`Springs`.
    particles
        Number of particles of each system.
    start_time, end_time
        Times of input and target, multiples of 0.001.
    """

    card = NBody.card

    def __init__(
        self,
        split: Split = "train",
        size: int | None = None,
        *,
        particles: int = 5,
        start_time: float = 3.0,
        end_time: float = 4.0,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(NBodySimulated.__init__, locals())
        size = split_size(split, size)
        check_counts(particles=particles)
        right = 0 <= start_time < end_time <= _LONGEST
        expected = f"increasing times in 0 .. {_LONGEST:g}"
        require(right, "start_time, end_time", expected, f"{start_time} and {end_time}")
        charge, pos, vel = random_charges(size, particles, seed, SPLITS.index(split))
        times = [start_time, end_time]
        path, speed = simulate_charges(charge, pos, vel, times, softening=SOFTENING)
        super().__init__(charge, path, speed, times, start=0, end=1, transform=transform)


def random_charges(
    size: int, particles: int, seed: int, split: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Draw charges, positions and velocities at time 0, with the center of mass at rest at the origin."""
    charge, pos, heading = (frozen_stream(seed, split, kind) for kind in range(3))
    q = np.where(charge.uniform(size=(size, particles)) < 0.5, -1.0, 1.0)
    x = pos.standard_normal((size, particles, 3))
    v = heading.standard_normal((size, particles, 3))
    v *= _SPEED / np.linalg.norm(v, axis=-1, keepdims=True)
    return q, x - x.mean(axis=1, keepdims=True), v - v.mean(axis=1, keepdims=True)


def charge_energy(
    charge: ArrayLike, pos: ArrayLike, vel: ArrayLike, softening: float = SOFTENING
) -> Float64[np.ndarray, "*systems"]:
    """Return the total energy of charged particles of unit mass.

    It is the kinetic energy plus ``q_i q_j / sqrt(r^2 + softening^2)`` for each pair.

    Parameters
    ----------
    charge
        Charges ``[..., particles]``.
    pos, vel
        Positions and velocities ``[..., particles, 3]``.
    softening
        Softening length of the potential.
    """
    check_number("softening", softening)
    q = real_array("charge", charge, finite=False)
    x, v = real_array("pos", pos, finite=False), real_array("vel", vel, finite=False)
    right = q.ndim and x.ndim >= 2 and v.ndim >= 2 and q.shape[-1] == x.shape[-2]
    require(right, "charge, pos, vel", "[..., particles] and twice [..., particles, 3]", shapes_of(q, x, v))
    first, second = np.triu_indices(x.shape[-2], 1)
    squared = np.square(x[..., first, :] - x[..., second, :]).sum(axis=-1)
    potential = (q[..., first] * q[..., second] / np.sqrt(squared + softening**2)).sum(axis=-1)
    return np.asarray(0.5 * np.square(v).sum(axis=(-2, -1)) + potential)


def simulate_charges(
    charge: ArrayLike,
    pos: ArrayLike,
    vel: ArrayLike,
    times: ArrayLike,
    *,
    step: float = 0.001,
    softening: float = SOFTENING,
) -> tuple[Float64[np.ndarray, "systems times particles 3"], Float64[np.ndarray, "systems times particles 3"]]:
    """Simulate positions and velocities of charged particles of unit mass in free space.

    The force on i is the sum over j of ``q_i q_j r_ij / (r_ij^2 + softening^2)^1.5``. It is integrated in float64 with
    the velocity Verlet method, which conserves momentum and angular momentum up to rounding, and the energy up to
    bounded oscillations.

    Parameters
    ----------
    charge
        Charges ``[systems, particles]``.
    pos, vel
        Positions and velocities at time 0, ``[systems, particles, 3]``.
    times
        Times of the results: increasing, non-negative multiples of the step.
    step
        Duration of one step.
    softening
        Distance below which the force does not grow further.

    Raises
    ------
    ValueError
        If the shapes do not match, the times are not increasing multiples of the step, or the energy of a system
        changes by more than 1 % of max(abs(energy), 1), which means that the step is too long.
    """
    q, x, v = real_array("charge", charge), real_array("pos", pos), real_array("vel", vel)
    moments = real_array("times", times)
    check_number("step", step)
    check_number("softening", softening)
    alike = q.ndim == 2 and x.shape == v.shape == (*q.shape, 3)
    require(alike, "charge, pos, vel", "[systems, particles] and twice [systems, particles, 3]", shapes_of(q, x, v))
    require(step > 0 and softening > 0, "step, softening", "positive numbers", f"{step} and {softening}")
    ticks = np.rint(moments / step).astype(np.int64)
    right = ticks.ndim == 1 and np.allclose(ticks * step, moments, rtol=0, atol=1e-3 * step)
    require(right, "times", f"multiples of the step {step}", repr(times))
    right = ticks.size > 0 and ticks[0] >= 0 and bool((np.diff(ticks) > 0).all())
    require(right, "times", "increasing numbers of at least 0", repr(times))
    starts = range(0, len(q), _CHUNK)
    pieces = [
        _follow(q[start : start + _CHUNK], x[start : start + _CHUNK], v[start : start + _CHUNK], ticks, step, softening)
        for start in progress(starts, "simulating", len(starts))
    ]
    path = np.concatenate([piece[0] for piece in pieces]) if pieces else np.zeros((0, len(ticks), *x.shape[1:]))
    speed = np.concatenate([piece[1] for piece in pieces]) if pieces else path.copy()
    check_drift(charge_energy(q, x, v, softening)[:, None], charge_energy(q[:, None], path, speed, softening))
    return path, speed


def check_drift(before: NDArray[np.float64], after: NDArray[np.float64], most: float = _MOST_DRIFT) -> float:
    """Return the largest change of energy relative to max(abs(energy), 1); raise ValueError if it exceeds ``most``."""
    drift = np.abs(after - before) / np.maximum(np.abs(before), 1.0)
    worst = float(drift.max(initial=0.0))
    if not worst <= most:
        raise ValueError(
            f"the energy changes by {worst:.1e} of max(abs(energy), 1), more than {most:.0e}; use a smaller step"
        )
    return worst


def _follow(
    q: NDArray[np.float64],
    x: NDArray[np.float64],
    v: NDArray[np.float64],
    ticks: NDArray[np.int64],
    step: float,
    softening: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advance several systems together. Inside, the systems are the last, contiguous axis."""
    first, second = np.triu_indices(q.shape[1], 1)
    product = (q[:, first] * q[:, second]).T[:, None, :]
    incidence = np.zeros((q.shape[1], len(first)))
    incidence[first, np.arange(len(first))] = 1.0
    incidence[second, np.arange(len(first))] = -1.0
    place, speed = (np.ascontiguousarray(array.transpose(1, 2, 0)) for array in (x, v))

    def force() -> NDArray[np.float64]:
        apart = place[first] - place[second]
        softened = np.square(apart).sum(axis=1, keepdims=True) + softening**2
        pull = apart * (product / (softened * np.sqrt(softened)))
        return (incidence @ pull.reshape(len(first), place[0].size)).reshape(place.shape)

    paths, speeds = [], []
    tick, push = 0, force()
    for until in ticks:
        for _ in range(tick, until):
            speed += 0.5 * step * push
            place += step * speed
            push = force()
            speed += 0.5 * step * push
        tick = until
        paths.append(place.transpose(2, 0, 1).copy())
        speeds.append(speed.transpose(2, 0, 1).copy())
    return np.stack(paths, axis=1), np.stack(speeds, axis=1)
