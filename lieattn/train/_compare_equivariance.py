"""How far a network's outputs fail to turn with the clouds, under its own group and under all rotations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn.certify import certify
from lieattn.groups import FiniteGroup, LieGroup
from lieattn.train._checkpoint import build
from lieattn.train._compare_config import ModelSettings
from lieattn.train._compare_data import Sets, random_rotation, turned
from lieattn.train._errors import UsageError

Group = FiniteGroup | LieGroup


class EquivarianceProbe:
    """Measures the relative error ‖f(g x) - g f(x)‖ / ‖f(x)‖ of networks on clouds of the test set, in eval mode.

    Outputs for a target that turns with the points (one of ``vectors`` or ``tensors``) should turn too, all others
    should stay. Every error is the largest over the elements: ``own`` over the model's own group, by
    :func:`lieattn.certify.certify` (which adds translations) where the group is finite and outputs and inputs are
    invariant numbers; ``rotations`` over random elements of SO(d); ``reflections`` over random ones of O(d) of
    determinant -1.

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
        self.sets, self.elements, self.targets = sets, elements, tuple(targets)
        self.clouds = sets.clouds(clouds)
        self.dim = self.clouds[0].pos.shape[1]

    def measure(self, network: nn.Module, group: Group | None) -> dict[str, float | None]:
        """Errors by kind; ``own`` is None for a network without a group."""
        generator = torch.Generator().manual_seed(0)
        rotations = [random_rotation(self.dim, generator=generator) for _ in range(self.elements)]
        mirror = torch.diag(torch.tensor([-1.0] + [1.0] * (self.dim - 1), dtype=torch.float64))
        training = network.training
        network.eval()
        try:
            return {
                "own": self._own(network, group, generator),
                "rotations": self._largest(network, rotations),
                "reflections": self._largest(network, [matrix @ mirror for matrix in rotations]),
            }
        finally:
            network.train(training)

    def _own(self, network: nn.Module, group: Group | None, generator: torch.Generator) -> float | None:
        if group is None:
            return None
        if group.dim != self.dim:
            raise UsageError(f"group: {group.name} acts on {group.dim} coordinates, the clouds have {self.dim}")
        if isinstance(group, FiniteGroup):
            if not self._moving():
                return self._certified(network, group)
            return self._largest(network, group.elements)
        drawn = group.sample(self.elements, generator=generator, dtype=torch.float64)
        return self._largest(network, group.linear(drawn))

    def _moving(self) -> set[str]:
        """Attributes beside the positions that turn: outputs may turn too, or see them turn."""
        named = {*self.sets.vectors, *self.sets.tensors} - {"pos"}
        return {name for name in named if any(cloud.get(name) is not None for cloud in self.clouds)}

    def _certified(self, network: nn.Module, group: FiniteGroup) -> float:
        dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
        certificate = certify(network, self.clouds, group, dtypes=[dtype], rotations=0)
        return _worst(row.relative for row in certificate.rows if row.check == "element")

    def _largest(self, network: nn.Module, matrices: Iterable[Tensor]) -> float:
        reference = self._outputs(network, self.clouds)
        return _worst(self._error(network, reference, matrix) for matrix in matrices)

    def _error(self, network: nn.Module, reference: Mapping[str, Tensor], matrix: Tensor) -> float:
        vectors, tensors = self.sets.vectors, self.sets.tensors
        found = self._outputs(network, [turned(cloud, matrix, vectors, tensors) for cloud in self.clouds])
        errors = []
        for name, value in reference.items():
            expected = value
            if name in tensors:
                expected = matrix @ value @ matrix.mT
            elif name in vectors:
                expected = value @ matrix.mT
            size, error = float(value.norm()), float((found[name] - expected).norm())
            errors.append(error / size if size else math.inf if error else 0.0)
        return _worst(errors)

    def _outputs(self, network: nn.Module, clouds: list[Data]) -> dict[str, Tensor]:
        weight = next(network.parameters(), torch.zeros(()))
        batch = Batch.from_data_list(clouds).to(weight.device)
        batch = batch.apply(lambda value: value.to(weight.dtype) if value.is_floating_point() else value)
        with torch.no_grad():
            outputs = network(batch)
        named = outputs if isinstance(outputs, Mapping) else {self.targets[0]: outputs}
        return {name: named[name].detach().double().cpu() for name in self.targets}


def group_of(name: str, model: ModelSettings, network: nn.Module) -> Group | None:
    """The group given for a model, or the one its network has.

    Raises
    ------
    UsageError
        If the group cannot be built.
    """
    if model.group is not None:
        try:
            return build(LieGroup, model.group, f"models.{name}.group")
        except UsageError:
            return build(FiniteGroup, model.group, f"models.{name}.group")
    found = getattr(network, "group", None)
    return found if isinstance(found, Group) else None


def _worst(errors: Iterable[float]) -> float:
    """The largest; NaN if any is."""
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found)
