"""Simulation of charged particles."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lieattn_datasets._arrays import check_number, real_array
from lieattn_datasets._streams import progress

SOFTENING = 0.1
_CHUNK = 256  # systems that are advanced together, so that their arrays stay in the cache
_MOST_DRIFT = 0.01


def charge_energy(
    charge: ArrayLike, pos: ArrayLike, vel: ArrayLike, softening: float = SOFTENING
) -> NDArray[np.float64]:
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

    Returns
    -------
    NDArray
        Energies ``[...]``, float64.
    """
    check_number("softening", softening)
    q = real_array("charge", charge, finite=False)
    x, v = real_array("pos", pos, finite=False), real_array("vel", vel, finite=False)
    if q.ndim == 0 or x.ndim < 2 or v.ndim < 2 or q.shape[-1] != x.shape[-2]:
        shapes = ", ".join(str(list(array.shape)) for array in (q, x, v))
        raise ValueError(f"charge, pos, vel: expected [..., particles] and twice [..., particles, 3], got {shapes}")
    first, second = np.triu_indices(x.shape[-2], 1)
    squared = np.square(x[..., first, :] - x[..., second, :]).sum(axis=-1)
    potential = (q[..., first] * q[..., second] / np.sqrt(squared + softening**2)).sum(axis=-1)
    return 0.5 * np.square(v).sum(axis=(-2, -1)) + potential


def simulate_charges(
    charge: ArrayLike,
    pos: ArrayLike,
    vel: ArrayLike,
    times: ArrayLike,
    *,
    step: float = 0.001,
    softening: float = SOFTENING,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Simulate charged particles of unit mass in free space.

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

    Returns
    -------
    tuple
        Positions and velocities, float64 ``[systems, times, particles, 3]``.

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
    if q.ndim != 2 or x.shape != (*q.shape, 3) or v.shape != x.shape:
        shapes = ", ".join(str(list(array.shape)) for array in (q, x, v))
        raise ValueError(
            f"charge, pos, vel: expected [systems, particles] and twice [systems, particles, 3], got {shapes}"
        )
    if not (step > 0 and softening > 0):
        raise ValueError(f"step, softening: expected positive numbers, got {step} and {softening}")
    ticks = np.rint(moments / step).astype(np.int64)
    if ticks.ndim != 1 or not np.allclose(ticks * step, moments, rtol=0, atol=1e-3 * step):
        raise ValueError(f"times: expected multiples of the step {step}, got {times!r}")
    if not ticks.size or ticks[0] < 0 or (np.diff(ticks) <= 0).any():
        raise ValueError(f"times: expected increasing numbers of at least 0, got {times!r}")
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
