"""Hamiltonian dynamics with a learned potential, as in the spring experiments of LieConv and LieTransformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._checks import kind
from lieattn.geometry import PointClouds
from lieattn.models._network import Wrapper
from lieattn.models.dynamics._energy_forces import energy_and_force, per_cloud, usable


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States of a roll-out.

    Attributes
    ----------
    times
        ``[times]``.
    position, momentum
        ``[times, points, dim]``, or ``[times, clouds, points, dim]`` if the initial state was so given.
    """

    times: Tensor
    position: Tensor
    momentum: Tensor


@dataclass(frozen=True)
class EnergyDrift:
    """How far the energy strays on a roll-out, over all clouds.

    Attributes
    ----------
    initial
        Mean of the initial energies.
    largest
        Largest difference from the initial energy, at any time.
    final
        Largest difference at the last time.
    relative
        ``largest`` over the largest initial energy, in absolute values; infinite if that is zero and it strays.
    """

    initial: float
    largest: float
    final: float
    relative: float

    def __str__(self) -> str:
        return f"energy {self.initial:.6g}, drift at most {self.largest:.2e} ({self.relative:.2e} of it)"


def energy_drift(energy: Tensor) -> EnergyDrift:
    """Summarize the energies ``[times, clouds]`` or ``[times]`` of a roll-out.

    Raises
    ------
    ValueError
        If there is no time or no cloud.
    """
    if energy.ndim not in (1, 2) or energy.numel() == 0:
        raise ValueError(f"energy: expected [times] or [times, clouds] with entries, got {tuple(energy.shape)}")
    energy = energy.detach().to(torch.float64)
    strayed = (energy - energy[0]).abs()
    largest, size = float(strayed.max()), float(energy[0].abs().max())
    relative = largest / size if size else math.inf if largest else 0.0
    return EnergyDrift(float(energy[0].mean()), largest, float(strayed[-1].max()), relative)


class HamiltonianDynamics(Wrapper):
    r"""Dynamics with :math:`H(q, p) = \sum_i |p_i|^2 / (2 m_i) + V(q - \bar q)` and a learned potential V.

    .. math::  \dot q = \partial H / \partial p = p / m, \qquad \dot p = -\partial H / \partial q

    V is any invariant network on point clouds. It sees the positions relative to the mean of their cloud, so the
    total momentum is conserved.

    **Equivariance.** If V is invariant to a group of rotations and mirrors R, trajectories turn along: from
    (R q, R p) starts R times the trajectory from (q, p).

    States are given as ``[points, dim]`` with cloud indices, or as ``[clouds, points, dim]``; all arguments of a call
    in the same form. In units that fit together, for example positions in Å, masses in u, energies in u Å² / ps².

    Parameters
    ----------
    potential
        ``potential(data)`` gives one energy a cloud, ``[clouds]`` or ``[clouds, 1]``, from a torch_geometric ``Data``
        with ``pos`` (centered), ``mass``, ``batch``, ``x`` (the features, if given) and the attributes given.
    center
        Whether V sees positions relative to the mean.
    method
        Of ``torchdiffeq.odeint``: ``"rk4"`` is the 3/8 rule on the grid of times, ``"dopri5"`` adapts its steps.
    rtol, atol
        Tolerances of the methods that adapt their steps.
    options
        Further options of the method, for example ``{"step_size": 0.01}`` for steps finer than the times.
    """

    def __init__(
        self,
        potential: nn.Module | Callable[[Any], Tensor],
        *,
        center: bool = True,
        method: str = "rk4",
        rtol: float = 1e-7,
        atol: float = 1e-9,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(potential):
            raise TypeError(f"potential: expected a function of data, got {type(potential).__name__}")
        super().__init__(potential)
        self.potential, self.vector_inputs = potential, ("momentum", "vel")
        self.center, self.method, self.rtol, self.atol = center, method, rtol, atol
        self.options = dict(options or {})

    @property
    def kind(self) -> tuple[str, str]:
        """How the two halves of the output transform."""
        return "position", "vector"

    def hamiltonian(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        features: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Energies H ``[clouds]``; arguments as in :meth:`field`."""
        system = _System(position, momentum, mass, features, batch, attributes)
        q, p = system.flat(position), system.flat(momentum)
        return system.kinetic(p) + self._potential(q, system)

    def field(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        features: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The field J ∇H = (∂H/∂p, -∂H/∂q): velocities and forces, in the shape of the positions.

        The result carries gradients if the caller has them on, and is detached otherwise.

        Parameters
        ----------
        position, momentum
            q and p, ``[points, dim]`` or ``[clouds, points, dim]``.
        mass
            Positive, ``[points]`` or ``[clouds, points]``.
        features
            Features of the points that V takes as ``data.x``, ``[points, channels]`` or ``[clouds, points, channels]``.
        batch
            ``[points]`` int64 cloud of each point; one cloud if absent.
        attributes
            What else ``data`` should carry, by name, as it is.

        Raises
        ------
        TypeError, ValueError
            If shapes or dtypes do not fit, or a mass is not positive.
        """
        system = _System(position, momentum, mass, features, batch, attributes)
        velocity, force = self._field(system.flat(position), system.flat(momentum), system)
        return velocity.reshape(position.shape), force.reshape(position.shape)

    def trajectory(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        times: Tensor,
        features: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> Trajectory:
        """Roll the dynamics out; arguments as in :meth:`field`.

        Parameters
        ----------
        times
            ``[times]`` at least one, increasing or decreasing; the state given is that of the first.

        Raises
        ------
        ImportError
            If torchdiffeq is not installed (``pip install lieattn[dynamics]``).
        """
        _check_times(times)
        system = _System(position, momentum, mass, features, batch, attributes)
        q, p = system.flat(position), system.flat(momentum)
        times = times.to(q)
        if len(times) == 1:
            return Trajectory(times, position[None], momentum[None])

        def derivative(_: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self._field(*state, system)

        options = self.options or None
        q, p = _odeint()(derivative, (q, p), times, method=self.method, rtol=self.rtol, atol=self.atol, options=options)
        shape = (len(times), *position.shape)
        return Trajectory(times, q.reshape(shape), p.reshape(shape))

    def drift(
        self,
        trajectory: Trajectory,
        mass: Tensor,
        features: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> EnergyDrift:
        """How far H strays on a trajectory; arguments as in :meth:`field`."""
        with torch.no_grad():
            energies = [
                self.hamiltonian(q, p, mass, features, batch=batch, attributes=attributes)
                for q, p in zip(trajectory.position, trajectory.momentum, strict=True)
            ]
        return energy_drift(torch.stack(energies))

    def forward(self, data: Any) -> Tensor:
        """Roll out the clouds of a torch_geometric ``Data`` or ``Batch`` over their common times.

        Parameters
        ----------
        data
            With ``pos`` ``[points, dim]``, ``momentum`` likewise (or ``vel``, the velocities), ``mass`` ``[points]``,
            ``time`` ``[clouds, times]`` from the given state on, the same for all clouds, and perhaps features ``x``.
            Without ``mass``, masses are the first channel of ``x``, as in ``lieattn_datasets.Springs``.

        Returns
        -------
        Tensor
            Position, then momentum, ``[points, times, 2 dim]``, the state given included.

        Raises
        ------
        TypeError, ValueError
            If something is missing, or the clouds have different times.
        """
        for name in ("pos", "time"):
            if not isinstance(getattr(data, name, None), Tensor):
                raise TypeError(f"data: expected a torch_geometric Data or Batch with pos and time, got {data!r}")
        features, times = getattr(data, "x", None), data.time
        mass, momentum = getattr(data, "mass", None), getattr(data, "momentum", None)
        if mass is None and features is not None:
            mass = features[:, 0]
        if mass is not None and momentum is None and isinstance(getattr(data, "vel", None), Tensor):
            momentum = data.vel * mass.reshape(-1, 1)
        if mass is None or momentum is None:
            raise TypeError(f"data: expected momentum or vel, and mass or features x that begin with it, got {data!r}")
        if times.ndim != 2 or not torch.allclose(times, times[:1].expand_as(times), rtol=0, atol=1e-5):
            raise ValueError(f"data: expected time [clouds, times], alike in all clouds, got {tuple(times.shape)}")
        found = self.trajectory(
            data.pos, momentum, mass.reshape(-1), times[0], features, batch=getattr(data, "batch", None)
        )
        return torch.cat([found.position, found.momentum], dim=-1).transpose(0, 1)

    def _field(self, q: Tensor, p: Tensor, system: _System) -> tuple[Tensor, Tensor]:
        graph = torch.is_grad_enabled()
        _, force = energy_and_force(lambda x: self._potential(x, system), q, create_graph=graph)
        return p / system.mass[:, None], force

    def _potential(self, q: Tensor, system: _System) -> Tensor:
        clouds = system.clouds
        if self.center:
            q = q - clouds.mean(q)[clouds.batch]
        energy = per_cloud(self.potential(system.data(q)))
        if len(energy) != clouds.num_clouds:
            raise ValueError(
                f"potential: expected one energy for each of {clouds.num_clouds} clouds, got {len(energy)}"
            )
        return energy


def _check_times(times: Tensor) -> None:
    if not isinstance(times, Tensor) or times.ndim != 1 or len(times) == 0 or not times.is_floating_point():
        raise ValueError(f"times: expected a floating tensor [times] with at least one, got {times!r}")
    steps = times.diff()
    if not bool((steps > 0).all() or (steps < 0).all()):
        raise ValueError(f"times: expected increasing or decreasing ones, got {times.tolist()}")


def _odeint() -> Callable[..., Any]:
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise ImportError("trajectories need the package torchdiffeq: pip install lieattn[dynamics]") from error
    return odeint


class _System:
    """What does not change along a trajectory: masses, features and clouds, one point after another.

    Parameters are those of :meth:`HamiltonianDynamics.field`.
    """

    def __init__(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        features: Tensor | None,
        batch: Tensor | None,
        attributes: Mapping[str, Tensor] | None,
    ) -> None:
        _check_state(position, momentum, mass, features, batch)
        # Outside of inference mode, or gradients could not save what is made here.
        with torch.inference_mode(False):
            self.mass = usable(mass).reshape(-1).to(position.dtype)
            self.features = None if features is None else usable(features).reshape(-1, features.shape[-1])
            if batch is None:
                number = len(position) if position.ndim == 3 else 1
                batch = torch.arange(number, device=mass.device).repeat_interleave(position.shape[-2])
            else:
                batch, number = usable(batch), int(batch.max()) + 1 if len(batch) else 0
            self.clouds = PointClouds(pos=self.flat(usable(position)), batch=batch, num_clouds=number)
        self.attributes = dict(attributes or {})

    def flat(self, values: Tensor) -> Tensor:
        """One point after another, ``[points, dim]``."""
        return values.reshape(-1, values.shape[-1])

    def kinetic(self, momentum: Tensor) -> Tensor:
        """Kinetic energies ``[clouds]`` of momenta ``[points, dim]``."""
        return self.clouds.sum(momentum.square().sum(dim=1) / (2 * self.mass))

    def data(self, position: Tensor) -> Any:
        """What the potential sees, with positions ``[points, dim]``."""
        from torch_geometric.data import Data

        given = {"mass": self.mass, "batch": self.clouds.batch, **self.attributes}
        if self.features is not None:
            given["x"] = self.features
        return Data(pos=position, **given).apply(usable)


def _check_state(
    position: Tensor, momentum: Tensor, mass: Tensor, features: Tensor | None, batch: Tensor | None
) -> None:
    for argument, value in (("position", position), ("momentum", momentum), ("mass", mass)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{argument}: expected a floating tensor, got {kind(value)}")
    shape = tuple(position.shape)
    if position.ndim not in (2, 3):
        raise ValueError(f"position: expected [points, dim] or [clouds, points, dim], got {shape}")
    if momentum.shape != position.shape or momentum.dtype != position.dtype:
        raise ValueError(
            f"momentum: expected {position.dtype} {shape} as the positions, got {momentum.dtype} "
            f"{tuple(momentum.shape)}"
        )
    if mass.shape != shape[:-1]:
        raise ValueError(f"mass: expected {shape[:-1]}, one for each point, got {tuple(mass.shape)}")
    if not bool((mass > 0).all()):
        raise ValueError(f"mass: expected positive masses, got {float(mass.min())}")
    if features is not None and (features.shape[:-1] != shape[:-1] or features.ndim != position.ndim):
        raise ValueError(f"features: expected {shape[:-1]} and channels, got {tuple(features.shape)}")
    if batch is not None and (position.ndim != 2 or batch.shape != shape[:1] or batch.dtype != torch.int64):
        raise ValueError(f"batch: expected int64 [points] with positions [points, dim], got {tuple(batch.shape)}")
