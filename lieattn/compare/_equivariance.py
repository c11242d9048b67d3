"""How far a network's outputs are from equivariant, under its own group and under all rotations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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

    Outputs for those ``targets`` that are among the vectors or tensors of the data should transform with the points,
    all others should stay. :func:`lieattn.certify.certify` moves the clouds and compares; every error is the largest
    over the elements: ``own`` over the model's own group (all elements of a finite one), ``rotations`` over elements of
    SO(d), ``reflections`` over random reflections. Translations are added to the own group unless the clouds have
    other vectors or tensors, such as later positions, for which a translation is not defined.
    """

    def __init__(self, sets: Sets, targets: Iterable[str]) -> None:
        self.sets, self.targets = sets, tuple(targets)
        self.elements = sets.settings.equivariance.elements
        self.clouds = sets.clouds(sets.settings.equivariance.clouds)
        self.dim = int(self.clouds[0].pos.shape[1])
        self.inputs: dict[str, Kind] = {}
        for name in {*sets.vectors, *sets.tensors} - {"pos"}:
            value = self.clouds[0].get(name)
            if value is not None:
                kind, several = self._kind(name), value.shape[-1] // self.dim
                self.inputs |= {"pos": "vector", name: (kind,) * several if several > 1 and kind == "vector" else kind}

    def measure(self, network: nn.Module, group: Group | None) -> dict[str, float | None]:
        """Errors by kind; ``own`` is None for a network without a group."""
        if group is not None and group.dim != self.dim:
            raise UsageError(f"group: {group.name} acts on {group.dim} coordinates, the clouds have {self.dim}")
        own = None if group is None else self._largest(network, group)["element"]
        free = self._largest(network, SO(self.dim), outside=self.elements)
        return {"own": own, "rotations": free["element"], "reflections": free["outside"]}

    def _largest(self, network: nn.Module, group: Group, outside: int = 0) -> dict[str, float]:
        """Largest errors under elements of the group, and under what is not in it."""
        dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
        certificate = certify(
            _Targets(network, self.targets),
            self.clouds,
            group,
            inputs=self.inputs,
            outputs={name: self._kind(name) for name in self.targets},
            dtypes=[dtype],
            tolerances={dtype: math.inf},
            elements=self.elements,
            rotations=outside,
            permute=False,
        )
        largest: dict[str, float] = {}
        for row in certificate.rows:
            largest[row.check] = max(largest.get(row.check, 0.0), row.relative, key=lambda x: (math.isnan(x), x))
        return largest

    def _kind(self, name: str) -> Kind:
        return "tensor" if name in self.sets.tensors else "vector" if name in self.sets.vectors else "invariant"


class _Targets(nn.Module):
    """The outputs of a network that are for targets, by their names."""

    def __init__(self, network: nn.Module, targets: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.targets = network, targets
        self.vector_inputs = getattr(network, "vector_inputs", ())

    def forward(self, data: Batch) -> dict[str, Tensor]:
        outputs: Any = self.network(data)
        outputs = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
        named = outputs if isinstance(outputs, Mapping) else {self.targets[0]: outputs}
        return {name: named[name] for name in self.targets}


def group_of(name: str, model: ModelSettings, network: nn.Module) -> Group | None:
    """The group given for a model, or the one its network has."""
    if model.group is not None:
        return build(Group, model.group, f"models.{name}.group")
    found = getattr(network, "group", None)
    return found if isinstance(found, Group) else None
