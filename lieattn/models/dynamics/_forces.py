"""Forces as derivatives of energies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, kind
from lieattn._core.contexts import transformed
from lieattn.geometry import PointClouds, point_clouds
from lieattn.models._base.inputs import copied
from lieattn.models._base.network import Wrapper
from lieattn.models._base.symmetry import Jumps, Symmetry, make_continuous
from lieattn.models.dynamics._compiled import (
    CompiledGradients,
    Gradients,
    Outputs,
    check_derivatives,
    check_energies,
    deformed,
    energy_among,
    energy_and_gradients,
    per_cloud,
    symmetry_of_gradients,
    usable,
)


class EnergyAndForce(NamedTuple):
    """Energies ``[clouds]``, and forces ``[points, dim]`` in units of energy over length."""

    energy: Tensor
    force: Tensor


class EnergyForceStress(NamedTuple):
    """Outputs of :class:`EnergyForces` with ``stress``.

    Energies ``[clouds]``; forces ``[points, dim]`` in units of energy over length; stresses ``[clouds, dim, dim]`` in
    units of energy over length to the power of dim, NaN for clouds that are not periodic along all dim cell vectors;
    virials ``[clouds, dim, dim]`` in units of energy.
    """

    energy: Tensor
    force: Tensor
    stress: Tensor
    virial: Tensor


class EnergyForces(Wrapper):
    r"""Energy of every cloud, and the conservative forces :math:`F_i = -\partial E / \partial x_i`.

    If ``stress`` is true, the outputs include virial and stress,

    .. math::  W = -\frac{\partial E}{\partial \epsilon}, \qquad \sigma = -\frac{W}{V},

    where the symmetric strain ε deforms points and cell, x ↦ (1 + ε) x, and V is the volume of the cell. With energies
    in eV and lengths in Å, stresses are in eV/Å³. They are full symmetric matrices with the sign convention of ASE's
    ``atoms.get_stress(voigt=False)``: the trace is negative under pressure.

    A batch may mix crystals, slabs, wires and molecules. All have a virial. The stress is NaN for clouds that are not
    periodic along all vectors of ``data.cell``, since a slab has no thickness and a molecule no volume; divide the
    virial of a slab by the area of its cell, or that of a wire by the length, for stresses per area or length. Data for
    training mark these clouds by False in ``stress_mask``, and then their stresses have no part in loss and gradient.

    **Equivariance.** If the network is invariant to a group of motions, the forces rotate with the points, F ↦ R F, and
    stresses and virials transform as tensors, σ ↦ R σ Rᵀ. If the network is invariant to translations, the forces of a
    cloud sum to zero. If it is invariant to dilations too, these divide the forces by their factor, so the
    :attr:`symmetry` has only the motions that preserve distances.

    In training mode the results are differentiable, so that losses on forces are differentiated twice; in eval mode
    they are detached, except within transforms of ``torch.func`` such as ``hessian``. Gradients are computed even under
    ``torch.no_grad`` and ``torch.inference_mode``.

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

    _compiled: CompiledGradients | None = None

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

    def compile(self, **options: Any) -> None:
        """Compile energies and forces, with their gradients by the weights, as one function at the first training step.

        The model has to be a :class:`Network` whose frames do not depend on the points; ``options`` are those of
        ``torch.compile``. It is traced once for all batches, and attention over whole clouds again for clouds of equal
        size. Batches with a single cloud, after one with several, and batches with less than two points or edges are
        computed as usual. In eval mode the function is used if no weight is trained. For the first batch, its
        results and the gradients of all weights are compared with those in float64. If errors are larger than four
        times those of usual evaluation, or if torch cannot compile the function, a warning says so, and everything is
        computed as usual.
        """
        self._compiled = CompiledGradients(**options)

    def forward(
        self, data: Any, *, create_graph: bool | None = None
    ) -> EnergyAndForce | EnergyForceStress | dict[str, Tensor]:
        """Return energies and forces of data and, with ``stress``, stresses and virials.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch``. It is not changed.
        create_graph
            Whether the results are differentiable. The default is true in training mode with gradients enabled, and
            within transforms of ``torch.func``.

        Raises
        ------
        TypeError
            If the data have no floating positions, or if the model does not return tensors.
        ValueError
            If the model does not return one energy per cloud.
        RuntimeError
            If the results are differentiable and the model, or a part of it, is compiled.
        """
        check_arguments(EnergyForces.forward, locals())
        if create_graph is None:
            create_graph = transformed() or (self.training and torch.is_grad_enabled())
        check_derivatives("model", self.model, create_graph)
        given = copy.copy(data).apply(usable) if hasattr(data, "apply") else data
        expected = _known_clouds(given)

        def energies(model: Any, moved: Any) -> Outputs:
            outputs = model(moved)
            others = dict(outputs) if isinstance(outputs, Mapping) else {}
            for name, output in others.items():
                if not isinstance(output, Tensor):
                    raise TypeError(f"model: expected tensors as outputs, got {kind(output)} for {name!r}")
            return per_cloud(energy_among(outputs), expected), others

        def eager(model: Any, data: Any, inputs: tuple[Tensor, ...]) -> Gradients:
            return energy_and_gradients(partial(_at, partial(energies, model), data), *inputs, create_graph=True)

        compiled = None
        # Validation during a training is not worth a function of its own.
        if self._compiled and (create_graph or not any(weight.requires_grad for weight in self.parameters())):
            compiled = partial(self._compiled, self.model, given, eager)
        found, others = differentiated(partial(energies, self.model), given, self.stress, create_graph, compiled)
        return {**others, **found._asdict()} if others else found


def differentiated(
    energy: Callable[[Any], Outputs],
    data: Any,
    stress: bool,
    create_graph: bool = False,
    compiled: Callable[..., Gradients | None] | None = None,
) -> tuple[EnergyAndForce | EnergyForceStress, dict[str, Tensor]]:
    """Return energies ``[clouds]`` of data with their derivatives, and all other outputs by name.

    They are detached unless a graph is created. If ``compiled(pos)``, or ``compiled(pos, strain)``, returns energies,
    other outputs and gradients instead of None, these are taken.
    """
    pos = getattr(data, "pos", None)
    if not isinstance(pos, Tensor) or not pos.is_floating_point():
        raise TypeError(f"data: expected a torch_geometric Data or Batch with floating pos, got {data!r}")
    inputs, clouds = [pos], None
    if stress:
        with torch.inference_mode(False):  # autograd cannot save tensors that are created in inference mode
            clouds = point_clouds(data)
            inputs.append(pos.new_zeros(clouds.num_clouds, pos.shape[1], pos.shape[1]))
    found = None if compiled is None else compiled(*inputs)
    if found is None:
        found = energy_and_gradients(partial(_at, energy, data), *inputs, create_graph=create_graph)
    values, others, (by_pos, *by_strain) = found
    if clouds is None:
        return EnergyAndForce(values, -by_pos), others
    return EnergyForceStress(values, -by_pos, _stresses(by_strain[0], clouds), -by_strain[0]), others


def _at(energy: Callable[[Any], Outputs], data: Any, pos: Tensor, strain: Tensor | None = None) -> Outputs:
    """Return the energies of data at other positions and, if there is one, under a strain."""
    if strain is None:
        return energy(copied(data, pos=pos))
    clouds = point_clouds(data)
    pos, deformation = deformed(pos, strain, clouds.batch)
    strained = {} if clouds.cell is None else {"cell": clouds.cell @ deformation.to(clouds.cell)}
    return energy(copied(data, pos=pos, **strained))


def _stresses(by_strain: Tensor, clouds: PointClouds) -> Tensor:
    """Divide derivatives ``[clouds, dim, dim]`` by the volumes of the cells; without a volume, the result is NaN.

    If NaN are left out of a loss, its gradient is finite: the division is by 1 there.
    """
    whole = torch.zeros_like(by_strain[:, 0, 0], dtype=torch.bool) if clouds.pbc is None else clouds.pbc.all(dim=1)
    whole, unit = whole[:, None, None], torch.eye(by_strain.shape[1], dtype=torch.float64, device=by_strain.device)
    cells = unit if clouds.cell is None else torch.where(whole, clouds.cell.double(), unit)
    volumes = torch.linalg.det(cells).abs().reshape(-1, 1, 1).to(by_strain)
    return torch.where(whole, by_strain / volumes, torch.nan)


def _known_clouds(data: Any) -> int | None:
    """Return the number of clouds, or None if it is in tensors that would have to be read."""
    batch, ptr = getattr(data, "batch", None), getattr(data, "ptr", None)
    if torch.compiler.is_compiling():
        return None
    return len(ptr) - 1 if isinstance(ptr, Tensor) else 1 if batch is None else None
