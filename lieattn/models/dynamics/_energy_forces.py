"""Energies and forces from any invariant network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lieattn.models._network import Wrapper


class EnergyAndForce(NamedTuple):
    """What :class:`EnergyForces` gives.

    Attributes
    ----------
    energy
        ``[clouds]``.
    force
        ``[points, dim]``, in the unit of the energy over that of the positions: eV / Å for eV and Å.
    """

    energy: Tensor
    force: Tensor


class EnergyForces(Wrapper):
    r"""Energy of every cloud, and the conservative forces :math:`F_i = -\partial E / \partial x_i`.

    **Equivariance.** If the network is invariant to a group of motions, the forces turn with the points, F ↦ R F. If
    it is invariant to translations, the forces of a cloud sum to zero.

    Losses on forces are differentiated twice; every layer of the library can be. In training the results carry
    gradients; in eval mode they are detached. Gradients are switched on inside where the caller has them off
    (``torch.no_grad``, ``torch.inference_mode``).

    Parameters
    ----------
    model
        ``model(data)`` gives one energy for each cloud, ``[clouds]`` or ``[clouds, 1]``, and reads the positions from
        ``data.pos``.

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

    def __init__(self, model: nn.Module) -> None:
        if not callable(model):
            raise TypeError(f"model: expected a network, got {type(model).__name__}")
        super().__init__(model)
        self.model = model

    @property
    def kind(self) -> Mapping[str, str]:
        """How the outputs transform."""
        return {"energy": "invariant", "force": "vector"}

    def forward(self, data: Any, *, create_graph: bool | None = None) -> EnergyAndForce:
        """Energies ``[clouds]`` and forces ``[points, dim]``.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with floating ``pos``; it is not changed. Positions that require
            gradients are used as they are.
        create_graph
            Whether the results can be differentiated further; in training mode and where gradients are on, if absent.

        Raises
        ------
        TypeError, ValueError
            If there are no floating positions, or the model does not give one energy a cloud.
        """
        pos = getattr(data, "pos", None)
        if not isinstance(pos, Tensor) or not pos.is_floating_point():
            raise TypeError(f"data: expected a torch_geometric Data or Batch with floating pos, got {data!r}")
        if create_graph is None:
            create_graph = self.training and torch.is_grad_enabled()

        def energy(positions: Tensor) -> Tensor:
            moved = copy.copy(data).apply(usable)
            moved.pos = positions
            return per_cloud(self.model(moved))

        return EnergyAndForce(*energy_and_force(energy, pos, create_graph=create_graph))


def energy_and_force(energy: Callable[[Tensor], Tensor], pos: Tensor, *, create_graph: bool) -> tuple[Tensor, Tensor]:
    """Energies and minus the gradient of their sum with respect to positions.

    Parameters
    ----------
    energy
        From positions ``[points, dim]`` to energies ``[clouds]``, where each point counts for one cloud only.
    pos
        ``[points, dim]``.
    create_graph
        Whether both can be differentiated further; otherwise both are detached.

    Returns
    -------
    energy
        ``[clouds]``.
    force
        ``[points, dim]``, zero where the energy does not depend on a position.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = pos.clone() if pos.is_inference() else pos
        x = x if x.requires_grad else x.detach().requires_grad_()
        values = energy(x)
        gradient = None
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), x, create_graph=create_graph, allow_unused=True)
        force = torch.zeros_like(x) if gradient is None else -gradient
    if not create_graph:
        return values.detach(), force.detach()
    return values, force


def usable(value: Any) -> Any:
    """A tensor that gradients may save: one made in inference mode is copied, anything else is left alone."""
    if isinstance(value, Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value


def per_cloud(values: Tensor) -> Tensor:
    """Energies ``[clouds]`` of what a model gives, ``[clouds]`` or ``[clouds, 1]``.

    Raises
    ------
    ValueError
        For other shapes.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(f"model: expected one energy a cloud, [clouds] or [clouds, 1], got {tuple(values.shape)}")
    return values
