"""How far a network's outputs are from equivariant, under its own group and under all rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn.certify import Kind, certify
from lieattn.compare._data import Sets
from lieattn.compare._settings import ModelSettings
from lieattn.groups import SO, Group
from lieattn.train import UsageError, build


class EquivarianceProbe:
    """Measures the relative error ‖f(g x) - g f(x)‖ / ‖f(x)‖ of networks on clouds of the test set, in eval mode.

    Outputs for a target that transforms with the points (one of ``vectors`` or ``tensors``) should transform too, all
    others should stay. :func:`lieattn.certify.certify` moves the clouds and compares; every error is the largest over
    the elements: ``own`` over the model's own group (all elements of a finite one), ``rotations`` over elements of
    SO(d), ``reflections`` over random reflections. Translations are added to the own group unless the clouds have
    other vectors or tensors, such as later positions, for which a translation is not defined.

    Parameters
    ----------
    sets
        The data.
    clouds, elements
        Numbers of clouds, and of random elements of each kind.
    targets
        Names of what the outputs are for, in their order.
    """

    def __init__(self, sets: Sets, clouds: int, elements: int, targets: Sequence[str]) -> None:
        self.elements, self.targets = elements, tuple(targets)
        self.clouds = sets.clouds(clouds)
        self.dim = int(self.clouds[0].pos.shape[1])
        self.outputs = _kinds(sets, self.targets)
        self.inputs: dict[str, Kind] = {}
        for name, kind in _kinds(sets, {*sets.vectors, *sets.tensors} - {"pos"}).items():
            value = self.clouds[0].get(name)
            if value is not None:
                several = value.shape[-1] // self.dim
                self.inputs |= {"pos": "vector", name: (kind,) * several if several > 1 and kind == "vector" else kind}

    def measure(self, network: nn.Module, group: Group | None) -> dict[str, float | None]:
        """Errors by kind; ``own`` is None for a network without a group."""
        if group is not None and group.dim != self.dim:
            raise UsageError(f"group: {group.name} acts on {group.dim} coordinates, the clouds have {self.dim}")
        return {
            "own": None if group is None else self._worst(network, group, "element", 0),
            "rotations": self._worst(network, SO(self.dim), "element", 0),
            "reflections": self._worst(network, SO(self.dim), "outside", self.elements),
        }

    def _worst(self, network: nn.Module, group: Group, check: str, outside: int) -> float:
        dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
        certificate = certify(
            _Targets(network, self.targets),
            self.clouds,
            group,
            inputs=self.inputs,
            outputs=self.outputs,
            dtypes=[dtype],
            tolerances={dtype: math.inf},
            elements=self.elements,
            rotations=outside,
            permute=False,
        )
        errors = [row.relative for row in certificate.rows if row.check == check]
        return math.nan if any(map(math.isnan, errors)) else max(errors)


class _Targets(nn.Module):
    """The outputs of a network that are for targets, by their names."""

    def __init__(self, network: nn.Module, targets: Sequence[str]) -> None:
        super().__init__()
        self.network, self.targets = network, targets
        self.vector_inputs = getattr(network, "vector_inputs", ())

    def forward(self, data: Batch) -> dict[str, Tensor]:
        outputs: Any = self.network(data)
        outputs = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
        named = outputs if isinstance(outputs, Mapping) else {self.targets[0]: outputs}
        return {name: named[name] for name in self.targets}


def _kinds(sets: Sets, names: Sequence[str] | set[str]) -> dict[str, Kind]:
    return {
        name: "tensor" if name in sets.tensors else "vector" if name in sets.vectors else "invariant" for name in names
    }


def group_of(name: str, model: ModelSettings, network: nn.Module) -> Group | None:
    """The group given for a model, or the one its network has."""
    if model.group is not None:
        return build(Group, model.group, f"models.{name}.group")  # type: ignore[type-abstract]
    found = getattr(network, "group", None)
    return found if isinstance(found, Group) else None
