"""A network of fields on the group with a head for vectors or tensors, in the units of the data."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lieattn.models._network import GroupField, Network, Symmetry


class FieldModel(Network):
    r"""Vectors and tensors, at points or of clouds, from the field of a network.

    .. math::  y = \sum_k c_k v_k + u \operatorname{head}(\operatorname{field}(\mathrm{data}))

    with known vectors :math:`v_k` of the data: what would be predicted without a network, such as the wind of today,
    or positions after motion on straight lines.

    **Equivariance.** That of network and head; what is added turns with the data.

    Parameters
    ----------
    network
        Any network of the library with a field; its weights are shared, its own head is left out.
    head
        ``head(x, graph)``: :class:`lieattn.nn.VectorHead`, ``DipoleHead``, ``PolarizabilityHead`` or any of the same
        form.
    start
        Names of attributes :math:`v_k` and their factors c.
    units
        Names of attributes and the numbers that they are divided by before the network sees them, so that inputs are
        of the order of 1; :math:`v_k` are not divided.
    unit
        u, so that outputs of the network are of the order of 1.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.groups import tetrahedral
    >>> from lieattn.models import FieldModel, FramewiseTransformer
    >>> from lieattn.nn import VectorHead
    >>> network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, vector_inputs=("vel",))
    >>> model = FieldModel(network, VectorHead(4), start={"pos": 1.0, "vel": 0.5})
    >>> model(Data(x=torch.ones(5, 1), pos=torch.randn(5, 3), vel=torch.randn(5, 3))).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        network: Network,
        head: nn.Module,
        *,
        start: Mapping[str, float] | None = None,
        units: Mapping[str, float] | None = None,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(network, Network):
            raise TypeError(f"network: expected a Network, which has a field, got {type(network).__name__}")
        self.start, self.units, self.unit = dict(start or {}), dict(units or {}), unit
        for argument, numbers in (("units", self.units.items()), ("unit", [("unit", unit)])):
            for name, number in numbers:
                if not 0 < number < math.inf:
                    raise ValueError(f"{argument}: expected positive numbers, got {number} for {name}")
        # Weights that nothing trains are of no use in checkpoints and counts.
        self.network, self.head = network.with_head(nn.Identity()), head
        named = dict.fromkeys((*network.vector_inputs, *self.start))
        self.vector_inputs = tuple(name for name in named if name != "pos")
        self.sees_order = network.sees_order

    @property
    def symmetry(self) -> Symmetry:
        """That of the network, for fields on the group."""
        return self.network.symmetry

    @property
    def kind(self) -> Any:
        """How the output transforms: as the head says, or as a position where it starts from one."""
        return "position" if self.start.get("pos") == 1 else super().kind

    def field(self, data: Any, geometry: Any = None) -> GroupField:
        """That of the network, on data in its units."""
        if self.units:
            data, given = copy.copy(data), data
            for name, number in self.units.items():
                data[name] = _attribute(given, name) / number
        return self.network.field(data, geometry)

    def forward(self, data: Any, geometry: Any = None) -> Tensor:
        """Vectors ``[points, dim]`` or what else the head gives.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with what the network sees and the attributes of ``start``; it is not
            changed.
        geometry
            See :meth:`Network.field`.

        Raises
        ------
        ValueError
            If an attribute of ``start`` or ``units`` is missing, or one of ``start`` has not the shape of the output.
        """
        output = self.unit * super().forward(data, geometry)
        for name, factor in self.start.items():
            known = _attribute(data, name)
            if known.shape != output.shape:
                raise ValueError(f"data.{name}: expected {tuple(output.shape)} as the output, got {tuple(known.shape)}")
            output = output + factor * known
        return output


def _attribute(data: Any, name: str) -> Tensor:
    value = getattr(data, name, None)
    if not isinstance(value, Tensor):
        raise ValueError(f"data.{name}: expected a tensor, got {type(value).__name__}")
    return value
