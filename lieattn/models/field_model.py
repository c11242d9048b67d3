"""A network of fields on the group with a head for vectors or tensors, in the units of the data."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from lieattn.models._lifted_field import LiftedField
from lieattn.nn import FieldHead


class FieldNetwork(Protocol):
    """What gives a field over the frames of points: ``LieTransformer`` and ``FramewiseTransformer`` do."""

    def lifted_field(self, data: Any) -> LiftedField:
        """Field, clouds and frames."""


class FieldModel(nn.Module):
    r"""Vectors and tensors, at points or of clouds, from the field of a network.

    .. math::  y = \sum_k c_k v_k + u \operatorname{head}(\operatorname{field}(\mathrm{data}))

    with known vectors :math:`v_k` of the data: what would be predicted without a network, such as the wind of today,
    or positions after motion on straight lines.

    **Equivariance.** That of network and head; what is added turns with the data.

    Parameters
    ----------
    network
        :class:`LieTransformer` or :class:`FramewiseTransformer`, or any with ``lifted_field(data)``. Its own read-out
        is dropped.
    head
        :class:`lieattn.nn.VectorHead`, ``DipoleHead``, ``PolarizabilityHead`` or any of the same form.
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
    >>> from lieattn.models import FramewiseTransformer
    >>> from lieattn.nn import VectorHead
    >>> network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, vector_inputs=("vel",))
    >>> model = FieldModel(network, VectorHead(4), start={"pos": 1.0, "vel": 0.5})
    >>> model(Data(x=torch.ones(5, 1), pos=torch.randn(5, 3), vel=torch.randn(5, 3))).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        *,
        start: Mapping[str, float] | None = None,
        units: Mapping[str, float] | None = None,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        if not callable(getattr(network, "lifted_field", None)):
            raise TypeError(f"network: expected one with lifted_field(data), got {type(network).__name__}")
        self.start, self.units = dict(start or {}), dict(units or {})
        for argument, numbers in (("units", self.units.items()), ("unit", [("unit", unit)])):
            for name, number in numbers:
                if not 0 < number < math.inf:
                    raise ValueError(f"{argument}: expected positive numbers, got {number} for {name}")
        self.network, self.head, self.unit = network, head, unit
        if hasattr(network, "head"):
            # Weights that nothing trains are of no use in checkpoints and counts.
            network.head = nn.Identity()

    @property
    def group(self) -> Any:
        """The finite group of the network, None where it has none."""
        return getattr(self.network, "group", None)

    @property
    def guarantee(self) -> str:
        """That of the network, for fields on the group."""
        return str(getattr(self.network, "guarantee", "the network states no guarantee"))

    @property
    def symmetry(self) -> Any:
        """That of the network, its ``symmetry`` or ``group``; no attribute where it has neither."""
        return self.network.symmetry if hasattr(self.network, "symmetry") else self.network.group

    @property
    def sees_order(self) -> bool:
        """Whether the order of the points matters to the network."""
        return bool(getattr(self.network, "sees_order", False))

    @property
    def vector_inputs(self) -> tuple[str, ...]:
        """Names of attributes of the data that turn along: those of the network, and those that are added."""
        named = (*getattr(self.network, "vector_inputs", ()), *self.start)
        return tuple(name for name in dict.fromkeys(named) if name != "pos")

    @property
    def kind(self) -> Any:
        """How the output transforms: as the head says, or as a position where it starts from one."""
        return "position" if self.start.get("pos") == 1 else self.head.kind

    def forward(self, data: Any) -> Tensor:
        """Vectors ``[points, dim]`` or what else the head gives.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with what the network sees and the attributes of ``start``; it is not
            changed.

        Raises
        ------
        ValueError
            If an attribute of ``start`` or ``units`` is missing, or one of ``start`` has not the shape of the output.
        """
        lifted: LiftedField = self.network.lifted_field(self._scaled(data))  # type: ignore[operator]
        if isinstance(self.head, FieldHead):
            output = self.head(lifted.field, lifted.frames)
        else:
            output = self.head(lifted.field, lifted.clouds, lifted.frames)
        output = self.unit * output
        for name, factor in self.start.items():
            known = _attribute(data, name)
            if known.shape != output.shape:
                raise ValueError(f"data.{name}: expected {tuple(output.shape)} as the output, got {tuple(known.shape)}")
            output = output + factor * known
        return output

    def _scaled(self, data: Any) -> Any:
        if not self.units:
            return data
        scaled = copy.copy(data)
        for name, number in self.units.items():
            scaled[name] = _attribute(data, name) / number
        return scaled


def _attribute(data: Any, name: str) -> Tensor:
    value = getattr(data, name, None)
    if not isinstance(value, Tensor):
        raise ValueError(f"data.{name}: expected a tensor, got {type(value).__name__}")
    return value
