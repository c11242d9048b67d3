"""Hamiltonian dynamics with any network as the potential."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import LARGEST, check_arguments, check_choice, check_has_numbers, check_none, check_tensor
from lieattn._core.contexts import transformed
from lieattn._core.messages import needs_extra, warn
from lieattn.geometry import PointClouds
from lieattn.models._base.lifted import without_lattice
from lieattn.models._base.network import Wrapper
from lieattn.models._base.symmetry import Jumps, Symmetry, make_continuous
from lieattn.models.dynamics._compiled import (
    check_derivatives,
    check_energies,
    energy_among,
    energy_and_gradients,
    per_cloud,
    symmetry_of_gradients,
    usable,
)

_FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")
_ADAPTIVE = ("dopri8", "dopri5", "bosh3", "fehlberg2", "adaptive_heun", "scipy_solver")
_STATE = ("pos", "momentum", "vel", "mass", "x", "time", "batch")  # data that the potential gets in another way


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States at ``times`` ``[times]``: position and momentum ``[times, *]``, where ``*`` is the initial shape."""

    times: Tensor
    position: Tensor
    momentum: Tensor


@dataclass(frozen=True)
class EnergyDrift:
    """Deviation of the energy from its initial value along trajectories, over all clouds.

    Attributes
    ----------
    initial
        Mean of the initial energies.
    largest, final
        Largest absolute difference from the initial energy of a cloud, over all times and at the last time.
    relative
        ``largest`` over the largest absolute initial energy; infinite if the latter is zero and the former is not.
    """

    initial: float
    largest: float
    final: float
    relative: float

    def __str__(self) -> str:
        return f"energy {self.initial:.6g}, drift at most {self.largest:.2e} (relative: {self.relative:.2e})"


def energy_drift(energy: Tensor) -> EnergyDrift:
    """Summarize the energies ``[times, clouds]`` or ``[times]`` of trajectories; ValueError if there are none."""
    check_arguments(energy_drift, locals())
    if energy.ndim not in (1, 2) or energy.numel() == 0:
        raise ValueError(f"energy: expected [times] or [times, clouds] with entries, got {tuple(energy.shape)}")
    check_has_numbers("energy", energy)
    energy = energy.detach().to(torch.float64)
    strayed = (energy - energy[0]).abs()
    largest, size = float(strayed.max()), float(energy[0].abs().max())
    relative = largest / size if size else math.inf if largest else 0.0
    return EnergyDrift(float(energy[0].mean()), largest, float(strayed[-1].max()), relative)


class Given(TypedDict, total=False):
    """Optional arguments: ``batch`` ``[points]`` int64 (one cloud if absent), and further ``attributes`` for V."""

    batch: Tensor | None
    attributes: Mapping[str, Tensor] | None


class System:
    """Masses, clouds and attributes, which are constant along a trajectory, and the initial state ``[points, dim]``."""

    def __init__(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        features: Tensor | None,
        batch: Tensor | None = None,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_arguments(System.__init__, {"batch": batch, "attributes": attributes})
        tensors = {"position": position, "momentum": momentum, "mass": mass}
        for argument, value in (tensors if features is None else {**tensors, "features": features}).items():
            check_tensor(argument, value, "a floating tensor")
        shape = tuple(position.shape)
        if position.ndim not in (2, 3):
            raise ValueError(f"position: expected [points, dim] or [clouds, points, dim], got {shape}")
        if momentum.shape != position.shape or momentum.dtype != position.dtype:
            got = f"{momentum.dtype} {tuple(momentum.shape)}"
            raise ValueError(f"momentum: expected {position.dtype} {shape} like position, got {got}")
        if mass.shape != shape[:-1]:
            raise ValueError(f"mass: expected {shape[:-1]}, one for each point, got {tuple(mass.shape)}")
        if not bool((mass > 0).all()):
            raise ValueError(f"mass: expected positive masses, got {float(mass.min())}")
        if features is not None and (features.shape[:-1] != shape[:-1] or features.ndim != position.ndim):
            raise ValueError(f"features: expected {shape[:-1]} and channels, got {tuple(features.shape)}")
        if batch is not None and (position.ndim != 2 or batch.shape != shape[:1] or batch.dtype != torch.int64):
            raise ValueError(f"batch: expected int64 [points] with positions [points, dim], got {tuple(batch.shape)}")
        self.position, self.momentum = (value.reshape(-1, shape[-1]) for value in (position, momentum))
        given = dict(attributes or {})
        # Autograd cannot save tensors that are created in inference mode.
        with torch.inference_mode(False):
            self.mass = usable(mass).reshape(-1).to(position.dtype)
            if batch is None:
                number = len(position) if position.ndim == 3 else 1
                starts = torch.arange(number + 1, device=mass.device)
                batch, given["ptr"] = starts[:-1].repeat_interleave(shape[-2]), starts * shape[-2]
            else:
                check_none("batch", batch < 0, "is negative: expected ids from 0")
                batch, number = usable(batch), _number(batch, given.get("ptr"))
            self.clouds = PointClouds(pos=usable(position).reshape(-1, shape[-1]), batch=batch, num_clouds=number)
        self.given = {"mass": self.mass, "batch": self.clouds.batch, **given}
        if features is not None:
            self.given["x"] = features.reshape(-1, features.shape[-1])


def _number(batch: Tensor, ptr: Tensor | None) -> int:
    """Return the number of clouds. Only ``ptr``, if given, contains empty clouds at the end."""
    return max(int(batch.max()) + 1 if len(batch) else 0, 0 if ptr is None else len(ptr) - 1)


class HamiltonianDynamics(Wrapper):
    r"""Dynamics with :math:`H(q, p) = \sum_i |p_i|^2 / (2 m_i) + V(q - \bar q)` and a learned potential V.

    .. math::  \dot q = \partial H / \partial p = p / m, \qquad \dot p = -\partial H / \partial q

    V is any invariant network on point clouds. Its positions are relative to the mean of their cloud, so the total
    momentum is conserved.

    **Equivariance.** If V is invariant to a group of rotations and reflections R, trajectories are equivariant: the
    trajectory that starts at (R q, R p) is R times the trajectory that starts at (q, p).

    States are given as ``[points, dim]`` with cloud indices, or as ``[clouds, points, dim]``, in consistent units, for
    example positions in Å, masses in u, energies in u Å² / ps².

    Parameters
    ----------
    potential
        ``potential(data)`` returns one energy per cloud, ``[clouds]`` or ``[clouds, 1]``, for a torch_geometric
        ``Data`` with ``pos`` (centered), ``mass``, ``batch``, ``x`` (the features, if given) and the given attributes.
        It may return several outputs by name, of which that named ``"energy"`` is used.
        Radii that do not specify whether they are smooth are made smooth, as by :class:`EnergyForces`.
    center
        Whether positions for V are relative to the mean of the cloud.
    method, rtol, atol, options
        Arguments of ``torchdiffeq.odeint``. ``"rk4"`` is the 3/8 rule on the grid of times, ``"dopri5"`` adapts its
        steps to the tolerances; ``options={"step_size": 0.01}`` makes steps finer than the times. Trajectories of
        ``"scipy_solver"`` are not differentiable.
    jumps
        See :class:`EnergyForces`.
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
        jumps: Jumps = "refuse",
    ) -> None:
        check_arguments(HamiltonianDynamics.__init__, locals())
        check_choice("method", method, (*_FIXED, *_ADAPTIVE))
        check_energies("potential", potential)
        make_continuous("potential", potential, jumps)
        super().__init__(potential)
        if center and "pos" in self.vector_inputs:
            raise ValueError("center: expected False for a potential that sees the origin (vector_inputs), got True")
        self.potential = potential
        self.vector_inputs = tuple(dict.fromkeys(("momentum", "vel", *self.vector_inputs)))
        self.center, self.method, self.rtol, self.atol = center, method, rtol, atol
        self.options, self.tied = dict(options or {}), {"center": repr(center)}

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the potential, without dilations."""
        return symmetry_of_gradients(super().symmetry)

    @property
    def kind(self) -> tuple[str, str]:
        """Kinds of the two halves of the outputs, position and momentum."""
        return "position", "vector"

    def hamiltonian(
        self,
        position: Float[Tensor, "*points dim"],
        momentum: Float[Tensor, "*points dim"],
        mass: Tensor,
        features: Tensor | None = None,
        **given: Unpack[Given],
    ) -> Float[Tensor, " clouds"]:
        """Return the energies H ``[clouds]``; arguments as in :meth:`field`."""
        system = System(position, momentum, mass, features, **given)
        kinetic = system.clouds.sum(system.momentum.square().sum(dim=1) / (2 * system.mass))
        return kinetic + self._potential(system.position, system)

    def field(
        self,
        position: Float[Tensor, "*points dim"],
        momentum: Float[Tensor, "*points dim"],
        mass: Tensor,
        features: Tensor | None = None,
        **given: Unpack[Given],
    ) -> tuple[Float[Tensor, "*points dim"], Float[Tensor, "*points dim"]]:
        """Return J ∇H = (∂H/∂p, -∂H/∂q): velocities and forces, in the shape of the positions.

        The result is differentiable if gradients are enabled or within transforms of ``torch.func``, else detached.

        Parameters
        ----------
        position, momentum
            q and p, ``[points, dim]`` or ``[clouds, points, dim]``.
        mass
            Positive masses, ``[points]`` or ``[clouds, points]``.
        features
            ``data.x`` for V, ``[points, channels]`` or ``[clouds, points, channels]``.
        **given
            ``batch`` ``[points]`` int64, if the state is ``[points, dim]`` and has several clouds, and ``attributes``,
            a mapping of tensors by name that V reads from the data.

        Raises
        ------
        ValueError
            If shapes or dtypes do not agree, or a mass is not positive.
        TypeError
            If an argument is not a tensor, or has an unknown name.
        RuntimeError
            If gradients are enabled and the potential, or a part of it, is compiled.
        """
        system = System(position, momentum, mass, features, **given)
        velocity, force = self._field(system.position, system.momentum, system)
        return velocity.reshape(position.shape), force.reshape(position.shape)

    def trajectory(
        self,
        position: Tensor,
        momentum: Tensor,
        mass: Tensor,
        times: Tensor,
        features: Tensor | None = None,
        **given: Unpack[Given],
    ) -> Trajectory:
        """Integrate the equations of motion.

        The arguments are those of :meth:`field` and floating ``times`` ``[times]``, strictly increasing or decreasing
        (otherwise ValueError). The given state is that of the first time. ImportError is raised without the package
        torchdiffeq (``pip install lieattn[dynamics]``). A trajectory that leaves the coordinates that V accepts, as in
        a training that diverges, is NaN: with a method of fixed steps from there on, with an adaptive one from the
        first step on and for all clouds, with a warning. ``"scipy_solver"`` raises ValueError.
        """
        if not isinstance(times, Tensor) or times.ndim != 1 or len(times) == 0 or not times.is_floating_point():
            raise ValueError(f"times: expected a floating tensor [times] with at least one, got {times!r}")
        check_has_numbers("times", times)
        system = System(position, momentum, mass, features, **given)
        times = times.to(position)  # in lower precision, different times may become equal
        steps = times.diff()
        if not bool((steps > 0).all() or (steps < 0).all()):
            raise ValueError(f"times: expected increasing or decreasing times, got {times.tolist()}")
        if len(times) == 1:
            return Trajectory(times, position[None], momentum[None])
        with needs_extra("HamiltonianDynamics.trajectory", "dynamics"):
            from torchdiffeq import odeint
        solver = {"method": self.method, "rtol": self.rtol, "atol": self.atol, "options": self.options or None}
        start = (system.position, system.momentum)
        try:
            states = odeint(lambda _, state: self._change(state[0], state[1], system), start, times, **solver)
        except AssertionError as error:  # of adaptive steps
            if "max_num_steps" in str(error):
                raise ValueError(f"options: {error}") from error
            found = "as the potential is too steep or not finite"
            warn(f"{self.method} finds no step within its tolerances, {found}: trajectories are NaN")
            states = tuple(torch.stack([x, *[x * math.nan] * len(steps)]) for x in start)
        return Trajectory(times, *(state.reshape(len(times), *position.shape) for state in states))

    def drift(
        self, trajectory: Trajectory, mass: Tensor, features: Tensor | None = None, **given: Unpack[Given]
    ) -> EnergyDrift:
        """Return the deviation of H from its initial value on a trajectory; arguments as in :meth:`field`."""
        check_arguments(HamiltonianDynamics.drift, locals())
        states = zip(trajectory.position, trajectory.momentum, strict=True)
        with torch.no_grad():
            return energy_drift(torch.stack([self.hamiltonian(*state, mass, features, **given) for state in states]))

    def forward(self, data: Any) -> Tensor:
        """Return the trajectory of clouds over their common times: position and momentum, ``[points, times, 2 dim]``.

        The data have ``pos`` ``[points, dim]``, ``momentum`` or velocities ``vel`` of the same shape, ``mass``
        ``[points]``, ``time`` ``[clouds, times]`` with the same times for all clouds, starting at the given state, and
        optionally features ``x``. Without ``mass``, the masses are the first channel of ``x``, as in
        ``lieattn_datasets.Springs``. All other tensors of the data, such as ``z``, are attributes for V. TypeError is
        raised for missing attributes, ValueError for other times or a cell.
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
            raise TypeError(f"data: expected momentum or vel, and mass or x with mass as channel 0, got {data!r}")
        if times.ndim != 2 or not torch.allclose(times, times[:1].expand_as(times), rtol=0, atol=1e-5):
            raise ValueError(f"data: expected time [clouds, times], the same in all clouds, got {tuple(times.shape)}")
        clouds = without_lattice(data, type(self).__name__)
        others = {name: value for name, value in data if isinstance(value, Tensor) and name not in _STATE}
        given = Given(batch=clouds.batch, attributes=others)
        found = self.trajectory(data.pos, momentum, mass.reshape(-1), times[0], features, **given)
        return torch.cat([found.position, found.momentum], dim=-1).transpose(0, 1)

    def _change(self, q: Tensor, p: Tensor, system: System) -> tuple[Tensor, Tensor]:
        """The field at a state of a trajectory, NaN where the positions are larger than networks accept."""
        try:
            return self._field(q, p, system)
        except ValueError:
            started, stays = (bool((x.detach().abs() <= LARGEST).all()) for x in (system.position, q))
            if stays or not started or self.method == "scipy_solver":  # which is not used in training
                raise
            return p * math.nan, q * math.nan

    def _field(self, q: Tensor, p: Tensor, system: System) -> tuple[Tensor, Tensor]:
        graph = transformed() or torch.is_grad_enabled()
        check_derivatives("potential", self.potential, graph)
        _, _, (gradient,) = energy_and_gradients(lambda x: (self._potential(x, system), {}), q, create_graph=graph)
        return p / system.mass[:, None], -gradient

    def _potential(self, q: Tensor, system: System) -> Tensor:
        from torch_geometric.data import Data

        clouds = system.clouds
        q = q - clouds.mean(q)[clouds.batch] if self.center else q
        found = energy_among(self.potential(Data(pos=q, **system.given).apply(usable)), "potential")
        return per_cloud(found, clouds.num_clouds, "potential")
