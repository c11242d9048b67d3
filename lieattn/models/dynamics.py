"""Forces and stresses from energies, and Hamiltonian dynamics, for any network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from lieattn._checks import LARGEST, check_arguments, check_choice, check_has_numbers, kind
from lieattn._extras import needs_extra
from lieattn.geometry import point_clouds
from lieattn.models._energies import ONE, check_energies
from lieattn.models._energies import energy_among as energy_among  # lieattn.ase imports it from here
from lieattn.models._gradients import Outputs, check_derivatives, energy_and_gradients, symmetry_of_gradients, usable
from lieattn.models._hamiltonian_system import System
from lieattn.models._jumps import Jumps, make_continuous
from lieattn.models._network import Symmetry
from lieattn.models._poses import without_lattice
from lieattn.models._wrapper import Wrapper

_FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")
_ADAPTIVE = ("dopri8", "dopri5", "bosh3", "fehlberg2", "adaptive_heun", "scipy_solver")
_STATE = ("pos", "momentum", "vel", "mass", "x", "time", "batch")  # data that the potential gets in another way


class EnergyAndForce(NamedTuple):
    """Energies ``[clouds]``, and forces ``[points, dim]`` in units of energy over length."""

    energy: Tensor
    force: Tensor


class EnergyForceStress(NamedTuple):
    """Outputs of :class:`EnergyForces` with ``stress``.

    Energies ``[clouds]``; forces ``[points, dim]`` in units of energy over length; stresses ``[clouds, dim, dim]`` in
    units of energy over length to the power of dim; virials ``[clouds, dim, dim]`` in units of energy.
    """

    energy: Tensor
    force: Tensor
    stress: Tensor
    virial: Tensor


class EnergyForces(Wrapper):
    r"""Energy of every cloud, and the conservative forces :math:`F_i = -\partial E / \partial x_i`.

    If ``stress`` is true, the outputs include stress and virial of clouds that are periodic along all vectors of
    ``data.cell``,

    .. math::  \sigma = \frac{1}{V} \frac{\partial E}{\partial \epsilon}, \qquad W = -V \sigma,

    where the symmetric strain ε deforms points and cell, x ↦ (1 + ε) x, and V is the volume of the cell. With energies
    in eV and lengths in Å, stresses are in eV/Å³. They are full symmetric matrices with the sign convention of ASE's
    ``atoms.get_stress(voigt=False)``: the trace is negative under pressure.

    **Equivariance.** If the network is invariant to a group of motions, the forces rotate with the points, F ↦ R F, and
    stresses and virials transform as tensors, σ ↦ R σ Rᵀ. If the network is invariant to translations, the forces of a
    cloud sum to zero. If it is invariant to dilations too, these divide the forces by their factor, so the
    :attr:`symmetry` has only the motions that preserve distances.

    In training mode the results are differentiable, so that losses on forces are differentiated twice; in eval mode
    they are detached. Gradients are computed even under ``torch.no_grad`` and ``torch.inference_mode``.

    Parameters
    ----------
    model
        ``model(data)`` returns one energy for each cloud, ``[clouds]`` or ``[clouds, 1]``, and reads the positions from
        ``data.pos``. It may return several outputs by name (:class:`lieattn.nn.Heads`), one of them ``"energy"``; then
        the outputs here are a mapping too, of energies, forces and all others. A neighborhood that does not specify
        whether it is smooth, such as ``Radius(3.0)``, is made smooth in the model itself, so wrap the model before
        training. Models with windows of their own are not changed. ValueError is raised if the model states that it has
        other outputs, such as two numbers or vectors.
    stress
        Whether to return an :class:`EnergyForceStress` in place of an :class:`EnergyAndForce`.
    jumps
        With ``"refuse"``, ValueError is raised if the energies of the network are discontinuous as points move
        (:attr:`Network.jumps`), for example with ``Radius(3.0, smooth=False)``, because dynamics would not conserve
        energy. ``"allow"`` accepts discontinuous energies.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> class Spring(torch.nn.Module):
    ...     def forward(self, data):
    ...         return 0.5 * (data.pos[0] - data.pos[1]).square().sum().reshape(1)
    >>> EnergyForces(Spring()).eval()(Data(pos=torch.tensor([[0.0], [2.0]]))).force
    tensor([[ 2.],
            [-2.]])
    """

    def __init__(
        self, model: nn.Module | Callable[[Any], Tensor], *, stress: bool = False, jumps: Jumps = "refuse"
    ) -> None:
        check_arguments(EnergyForces.__init__, locals())
        check_energies("model", model)
        make_continuous("model", model, jumps)
        super().__init__(model)
        self.model, self.stress = model, stress

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the energy without dilations, which multiply vectors by a factor and divide forces by it."""
        return symmetry_of_gradients(super().symmetry)

    @property
    def jumps(self) -> tuple[str, ...] | None:
        """Discontinuities of the energy, and its kinks, at which forces are discontinuous; None if not known."""
        found = super().jumps
        if found is None or not self.has_kinks:
            return found
        return (*found, "the energy has kinks, from maxima or relu, where forces jump")

    @property
    def kind(self) -> Mapping[str, Any]:
        """Energies are invariant, forces are vectors, stresses and virials are tensors; others as in the model."""
        others = getattr(self.model, "kind", None)
        return {
            **(others if isinstance(others, Mapping) else {}),
            "energy": "invariant",
            "force": "vector",
            **(dict.fromkeys(("stress", "virial"), "tensor") if self.stress else {}),
        }

    def forward(
        self, data: Any, *, create_graph: bool | None = None
    ) -> EnergyAndForce | EnergyForceStress | dict[str, Tensor]:
        """Return energies and forces of data and, with ``stress``, stresses and virials.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch``. It is not changed.
        create_graph
            Whether the results are differentiable. The default is true in training mode with gradients enabled.

        Raises
        ------
        TypeError
            If the data have no floating positions, or if the model does not return tensors.
        ValueError
            If the model does not return one energy per cloud, or if ``stress`` is true and a cloud is not periodic
            along all cell vectors.
        RuntimeError
            If the results are differentiable and the model, or a part of it, is compiled.
        """
        check_arguments(EnergyForces.forward, locals())
        if create_graph is None:
            create_graph = self.training and torch.is_grad_enabled()
        check_derivatives("model", self.model, create_graph)
        given = copy.copy(data).apply(usable) if hasattr(data, "apply") else data
        expected = _known_clouds(given)

        def energy(moved: Any) -> Outputs:
            outputs = self.model(moved)
            others = dict(outputs) if isinstance(outputs, Mapping) else {}
            for name, output in others.items():
                if not isinstance(output, Tensor):
                    raise TypeError(f"model: expected tensors as outputs, got {kind(output)} for {name!r}")
            return _per_cloud(energy_among(outputs), expected), others

        found, others = differentiated(energy, given, self.stress, create_graph)
        return {**others, **found._asdict()} if others else found


def differentiated(
    energy: Callable[[Any], Outputs], data: Any, stress: bool, create_graph: bool = False
) -> tuple[EnergyAndForce | EnergyForceStress, dict[str, Tensor]]:
    """Return energies ``[clouds]`` of data with their derivatives, and all other outputs by name.

    They are detached unless a graph is created.
    """
    pos = getattr(data, "pos", None)
    if not isinstance(pos, Tensor) or not pos.is_floating_point():
        raise TypeError(f"data: expected a torch_geometric Data or Batch with floating pos, got {data!r}")
    if not stress:
        values, others, (gradient,) = energy_and_gradients(
            lambda x: energy(_with(data, pos=x)), pos, create_graph=create_graph
        )
        return EnergyAndForce(values, -gradient), others
    with torch.inference_mode(False):  # autograd cannot save tensors that are created in inference mode
        clouds = point_clouds(data)
        strain = pos.new_zeros(clouds.num_clouds, pos.shape[1], pos.shape[1])
    cell, pbc = clouds.cell, clouds.pbc
    if cell is None or pbc is None or not bool(pbc.all()):
        which = "no cloud is" if pbc is None else f"cloud {int((~pbc.all(dim=1)).nonzero()[0])} is not"
        raise ValueError(f"data.cell: stress needs clouds that are periodic along all cell vectors, but {which}")

    def of_strain(x: Tensor, strain: Tensor) -> Outputs:
        # The rows are vectors, so the matrix acts from the right; it is symmetric.
        deformation = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) + (strain + strain.mT) / 2
        moved = (x[:, None] @ deformation[clouds.batch])[:, 0]
        return energy(_with(data, pos=moved, cell=cell @ deformation.to(cell)))

    values, others, (by_pos, by_strain) = energy_and_gradients(of_strain, pos, strain, create_graph=create_graph)
    volume = torch.linalg.det(cell.double()).abs()[:, None, None].to(by_strain)
    return EnergyForceStress(values, -by_pos, by_strain / volume, -by_strain), others


def _with(data: Any, **changed: Tensor) -> Any:
    """Return a shallow copy of data with changed attributes."""
    data = copy.copy(data)
    for name, value in changed.items():
        setattr(data, name, value)
    return data


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
        steps to the tolerances; ``options={"step_size": 0.01}`` makes steps finer than the times.
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
        self.potential = potential
        self.vector_inputs = tuple(dict.fromkeys(("momentum", "vel", *self.vector_inputs)))
        self.center, self.method, self.rtol, self.atol = center, method, rtol, atol
        self.options = dict(options or {})

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the potential, without dilations."""
        return symmetry_of_gradients(super().symmetry)

    def tied_to(self) -> dict[str, str]:
        """Return whether the potential, on which the weights depend, sees positions relative to the mean."""
        return {**super().tied_to(), "center": repr(self.center)}

    @property
    def kind(self) -> tuple[str, str]:
        """Kinds of the two halves of the outputs, position and momentum."""
        return "position", "vector"

    def hamiltonian(
        self, position: Tensor, momentum: Tensor, mass: Tensor, features: Tensor | None = None, **given: Unpack[Given]
    ) -> Tensor:
        """Return the energies H ``[clouds]``; arguments as in :meth:`field`."""
        system = System(position, momentum, mass, features, **given)
        kinetic = system.clouds.sum(system.momentum.square().sum(dim=1) / (2 * system.mass))
        return kinetic + self._potential(system.position, system)

    def field(
        self, position: Tensor, momentum: Tensor, mass: Tensor, features: Tensor | None = None, **given: Unpack[Given]
    ) -> tuple[Tensor, Tensor]:
        """Return J ∇H = (∂H/∂p, -∂H/∂q): velocities and forces, in the shape of the positions.

        The result is differentiable if gradients are enabled, and detached otherwise.

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
        torchdiffeq (``pip install lieattn[dynamics]``). With a method of fixed steps, a trajectory that leaves the
        coordinates that V accepts, as in a training that diverges, is NaN from there on.
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
        states = odeint(lambda _, state: self._change(state[0], state[1], system), start, times, **solver)
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
            if stays or not started or self.method in _ADAPTIVE:
                raise
            return p * math.nan, q * math.nan

    def _field(self, q: Tensor, p: Tensor, system: System) -> tuple[Tensor, Tensor]:
        graph = torch.is_grad_enabled()
        check_derivatives("potential", self.potential, graph)
        _, _, (gradient,) = energy_and_gradients(lambda x: (self._potential(x, system), {}), q, create_graph=graph)
        return p / system.mass[:, None], -gradient

    def _potential(self, q: Tensor, system: System) -> Tensor:
        from torch_geometric.data import Data

        clouds = system.clouds
        q = q - clouds.mean(q)[clouds.batch] if self.center else q
        found = energy_among(self.potential(Data(pos=q, **system.given).apply(usable)), "potential")
        return _per_cloud(found, clouds.num_clouds, "potential")


def _known_clouds(data: Any) -> int | None:
    """Return the number of clouds, or None if it is in tensors that would have to be read."""
    batch, ptr = getattr(data, "batch", None), getattr(data, "ptr", None)
    if torch.compiler.is_compiling():
        return None
    return len(ptr) - 1 if isinstance(ptr, Tensor) else 1 if batch is None else None


def _per_cloud(values: Any, clouds: int | None = None, argument: str = "model") -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{argument}: expected {ONE}, got {kind(values)}")
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1:
        raise ValueError(f"{argument}: expected {ONE}, got {tuple(values.shape)}")
    if clouds is not None and len(values) != clouds:
        raise ValueError(f"{argument}: expected one energy for each of {clouds} clouds, got {len(values)}")
    return values
