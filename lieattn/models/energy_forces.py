"""Energies and forces from any invariant network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lieattn.models._forces import energy_and_force, per_cloud, usable


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


class EnergyForces(nn.Module):
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

    kind: ClassVar[Mapping[str, str]] = MappingProxyType({"energy": "invariant", "force": "vector"})

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not callable(model):
            raise TypeError(f"model: expected a network, got {type(model).__name__}")
        self.model = model

    @property
    def guarantee(self) -> str:
        """That of the network, for the energy."""
        return str(getattr(self.model, "guarantee", "the network states no guarantee"))

    @property
    def symmetry(self) -> Any:
        """That of the network, its ``symmetry`` or ``group``; no attribute where it has neither."""
        return self.model.symmetry if hasattr(self.model, "symmetry") else self.model.group

    @property
    def vector_inputs(self) -> tuple[str, ...]:
        """Names of attributes of the data that turn along: those of the network."""
        return tuple(getattr(self.model, "vector_inputs", ()))

    @property
    def sees_order(self) -> bool:
        """Whether the order of the points matters to the network."""
        return bool(getattr(self.model, "sees_order", False))

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
