"""Particles that are joined by springs: a linear system, which is solved exactly."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch_geometric.data import Data

from lieattn_datasets._arrays import real_array
from lieattn_datasets._checks import check_arguments
from lieattn_datasets._clouds import Clouds, Transform
from lieattn_datasets._nbody import split_size
from lieattn_datasets._streams import SPLITS, Split, frozen_stream

_POINTS, _DURATION = 500, 5.0
_MASS, _STIFFNESS = (0.1, 3.1), (0.0, 5.0)
_POSITION, _MOMENTUM = 0.4, 0.6


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
        if chunk is not None and not 1 <= chunk <= _POINTS:
            raise ValueError(f"chunk: expected None or an integer in 1 .. {_POINTS}, got {chunk}")
        if particles < 1:
            raise ValueError(f"particles: expected an integer of at least 1, got {particles}")
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

    def __repr__(self) -> str:
        return f"Springs({len(self)} systems of {self._mass.shape[1]} particles, {self._points} points)"


def spring_energy(mass: ArrayLike, stiffness: ArrayLike, pos: ArrayLike, momentum: ArrayLike) -> NDArray[np.float64]:
    """Return the Hamiltonian of :class:`Springs`, ``[...]``.

    Masses and stiffnesses are ``[..., particles]``, positions and momenta ``[..., particles, dim]``.
    """
    m, k = real_array("mass", mass), real_array("stiffness", stiffness)
    q, p = real_array("pos", pos), real_array("momentum", momentum)
    if q.ndim < 2 or p.ndim < 2 or any(array.shape[-1:] != q.shape[-2:-1] for array in (m, k, p[..., 0])):
        shapes = ", ".join(str(list(array.shape)) for array in (m, k, q, p))
        expected = "twice [..., particles] and twice [..., particles, dim]"
        raise ValueError(f"mass, stiffness, pos, momentum: expected {expected}, got {shapes}")
    if not (m > 0).all():
        raise ValueError(f"mass: expected positive numbers, got {m.min():g}")
    squared = np.square(q[..., :, None, :] - q[..., None, :, :]).sum(axis=-1)
    kinetic = (np.square(p).sum(axis=-1) / (2 * m)).sum(axis=-1)
    return np.asarray(kinetic + 0.5 * (k[..., :, None] * k[..., None, :] * squared).sum(axis=(-2, -1)))


def simulate_springs(
    mass: ArrayLike, stiffness: ArrayLike, pos: ArrayLike, momentum: ArrayLike, times: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the exact trajectory of one system of :class:`Springs` from its normal modes.

    Parameters
    ----------
    mass, stiffness
        Positive masses and non-negative stiffnesses ``[particles]``.
    pos, momentum
        Positions and momenta at time 0, ``[particles, dim]``.
    times
        Times of the results ``[times]``.

    Returns
    -------
    tuple
        Positions and momenta, float64 ``[times, particles, dim]``.
    """
    m, k = real_array("mass", mass), real_array("stiffness", stiffness)
    q, p = real_array("pos", pos), real_array("momentum", momentum)
    t = real_array("times", times)
    if m.ndim != 1 or k.shape != m.shape or q.ndim != 2 or len(q) != len(m) or p.shape != q.shape or t.ndim != 1:
        shapes = ", ".join(str(list(array.shape)) for array in (m, k, q, p, t))
        expected = "twice [particles], twice [particles, dim] and [times]"
        raise ValueError(f"mass, stiffness, pos, momentum, times: expected {expected}, got {shapes}")
    if not ((m > 0).all() and (k >= 0).all()):
        raise ValueError(
            f"mass, stiffness: expected positive and non-negative numbers, got {m.min():g} and {k.min():g}"
        )
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
