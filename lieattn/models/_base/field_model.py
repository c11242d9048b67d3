"""Networks for vectors or tensors from the field of another network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from lieattn._core.checks import check_arguments
from lieattn.models._base.inputs import attribute, copied, in_precision_of_weights
from lieattn.models._base.network import GroupField, Network
from lieattn.models._base.symmetry import Symmetry


class FieldModel(Network):
    r"""A network for vectors and tensors, at points or of clouds, computed from the field of another network.

    .. math::  y = \sum_k c_k v_k + u \operatorname{head}(\operatorname{field}(\mathrm{data}))

    where :math:`v_k` are known vectors of the data, for example positions extrapolated along straight lines.

    **Equivariance.** That of the network and the head; the added attributes must transform as the outputs do.

    Parameters
    ----------
    network, head
        Any network with a field, whose weights are shared, and a head such as :class:`lieattn.nn.VectorHead`, which
        replaces its own. :class:`lieattn.nn.Heads` is for several outputs.
    start
        Names of the attributes :math:`v_k`, and their factors :math:`c_k`. That of ``pos`` is 1 (or ValueError).
    units
        Names of attributes and the numbers by which they are divided before the network sees them; a ``cell`` is
        divided like ``pos``. The :math:`v_k` themselves are not divided.
    unit
        Factor u > 0, chosen so that the outputs of the head are of the order of 1. ValueError is raised if ``start`` or
        ``unit`` is given with a head for rotations, or with several outputs (:class:`lieattn.nn.Heads`).

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
            raise TypeError(f"network: expected a lieattn.models.Network, got {type(network).__name__}")
        check_arguments(FieldModel.__init__, locals())
        self.start, self.units, self.unit = dict(start or {}), dict(units or {}), unit
        given = (("start", self.start), ("units", self.units))
        self.tied = {name: repr({key: float(of[key]) for key in sorted(of)}) for name, of in given}
        self.tied["unit"] = repr(float(unit))
        for argument, numbers in (("units", self.units), ("unit", {"unit": unit})):
            for name, number in numbers.items():
                if not 0 < number < math.inf:
                    raise ValueError(f"{argument}: expected positive numbers, got {number} for {name}")
        kind = getattr(head, "kind", None)
        if (self.start or unit != 1) and (kind == "rotation" or isinstance(kind, Mapping)):
            outputs = "rotations" if kind == "rotation" else "several outputs"
            raise ValueError(f"start, unit: expected none for {outputs}, got start={self.start}, unit={unit}")
        _check_start(self.start, kind, network.symmetry)
        network.check_head(head)  # that of the network would not be trained, so checkpoints should not include it
        self.network, self.head = network.with_head(nn.Identity()), head
        named = (*network.vector_inputs, *(() if kind == "invariant" else self.start))
        self.vector_inputs = tuple(name for name in dict.fromkeys(named) if name != "pos")
        self.field_inputs, self.cloud_inputs = dict(network.field_inputs), network.cloud_inputs
        self.sees_order = network.sees_order
        self.has_kinks = network.has_kinks or bool(getattr(head, "has_kinks", False))

    @property
    def symmetry(self) -> Symmetry:
        return self.network.symmetry

    @property
    def jumps(self) -> tuple[str, ...]:
        return self.network.jumps

    @property
    def kind(self) -> Any:
        """Kind of the head, or ``"position"`` if the outputs are the positions plus a correction."""
        return "position" if self.start.get("pos") == 1 else super().kind

    @in_precision_of_weights
    def geometry(self, data: Any) -> Any:
        """Return the geometry of the network, in its units; AttributeError if it has no such method."""
        return cast(Any, self.network).geometry(self._in_units(data))

    @in_precision_of_weights
    def field(self, data: Any, geometry: Any = None) -> GroupField:
        return self.network.field(self._in_units(data), geometry)

    def _in_units(self, data: Any) -> Any:
        """Return data whose attributes are divided by their units."""
        lattice = {"cell": self.units["pos"]} if "pos" in self.units and getattr(data, "cell", None) is not None else {}
        units = lattice | self.units
        return copied(data, **{name: attribute(data, name) / units[name] for name in units}) if units else data

    @in_precision_of_weights
    def forward(self, data: Any, geometry: Any = None) -> Any:
        """Return vectors ``[points, dim]``, or other outputs of the head, by name for :class:`lieattn.nn.Heads`.

        The data must also have the attributes of ``start``, in the shape of the outputs, and tangent at points of a
        sphere (otherwise ValueError). They are not changed.
        """
        output = super().forward(data, geometry)
        if not isinstance(output, Mapping):  # several outputs have neither unit nor start
            output = self.unit * output
        for name, factor in self.start.items():
            known = attribute(data, name)
            if (shape := tuple(known.shape)) != tuple(output.shape):
                raise ValueError(f"data.{name}: expected {tuple(output.shape)} like the output, got {shape}")
            if self.kind == "vector" and self.network.space is not None:
                several = known if known.ndim == 3 else known[:, None]
                self.network.space.check_tangent(f"data.{name}", data.pos, several)
            output = output + factor * known
        return output


def _check_start(start: Mapping[str, float], kind: Any, symmetry: Symmetry) -> None:
    """Raise ValueError if positions in ``start`` would give outputs that move in no known way."""
    if "pos" in start and (kind == "invariant" or (symmetry.group and symmetry.translations and start["pos"] != 1)):
        got = f"got {start['pos']} for {kind} outputs, which would move in no known way"
        raise ValueError(f"start: expected the factor 1 for pos, and none for invariant outputs, {got}")
