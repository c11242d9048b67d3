"""Energies of clouds, differentiated by positions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import kind
from lieattn._core.contexts import transformed
from lieattn.groups import SE, SO, FiniteGroup, Group, Translations, linear_part
from lieattn.io import uncompiled
from lieattn.models._base.network import EquivariantModule, Wrapper
from lieattn.models._base.rescaled import Rescaled
from lieattn.models._base.symmetry import Symmetry
from lieattn.models._base.tied import pool_of
from lieattn.nn import Heads

_ONE = "one energy per cloud, [clouds] or [clouds, 1]"


def energy_among(outputs: Any, argument: str = "model") -> Any:
    """Return the output named energy of several outputs by name, or a single output; ValueError if there is none."""
    if not isinstance(outputs, Mapping):
        return outputs
    if "energy" not in outputs or not outputs.keys().isdisjoint(("force", "stress", "virial")):
        what = "an output 'energy', and none with the names of its derivatives, force, stress and virial"
        raise ValueError(f"{argument}: expected {what}, got {sorted(outputs)}")
    return outputs["energy"]


def check_energies(argument: str, model: Any) -> None:
    """Raise ValueError if a model states other outputs than one energy per cloud; otherwise the first call does."""
    energy_among(getattr(model, "kind", None), argument)
    if Rescaled.turning(model, ("energy",)):
        raise ValueError(f"{argument}: expected {_ONE}, got outputs that change under rotations")
    while isinstance(model, Wrapper):
        model = model.wrapped
    if not isinstance(model, EquivariantModule):  # what follows the head of another network is not known
        return
    head = getattr(model, "head", None)
    head = head.heads["energy"] if isinstance(head, Heads) else head
    found = (getattr(head, name, None) for name in ("outputs", "out_channels", "out_features"))
    count = next((number for number in found if isinstance(number, int)), 1)
    if count != 1:
        raise ValueError(f"{argument}: expected {_ONE}, got a network with {count} outputs")
    if pool_of(head) == "none":
        raise ValueError(f"{argument}: expected {_ONE}, got a network with outputs at the points, pool='none'")


def per_cloud(values: Any, clouds: int | None = None, argument: str = "model") -> Float[Tensor, " clouds"]:
    """Return one energy for each cloud, ``[clouds]``; TypeError or ValueError is raised for other values."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{argument}: expected {_ONE}, got {kind(values)}")
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1:
        raise ValueError(f"{argument}: expected {_ONE}, got {tuple(values.shape)}")
    if clouds is not None and len(values) != clouds:
        raise ValueError(f"{argument}: expected one energy for each of {clouds} clouds, got {len(values)}")
    return values


Outputs = tuple[Tensor, dict[str, Tensor]]  # energies [clouds], and other outputs by name
Gradients = tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]  # outputs, and gradients of the sum of the energies


def energy_and_gradients(energy: Callable[..., Outputs], *inputs: Tensor, create_graph: bool) -> Gradients:
    """Return energies, other outputs, and the gradients of the sum of the energies by all inputs.

    They are detached unless a graph is created. The function is never compiled, because torch computes wrong second
    derivatives of partially compiled functions.
    """
    gradients = _gradients
    if "torch._dynamo" in sys.modules:  # importing it takes a second, and nothing can be compiled without it
        gradients = torch.compiler.disable(_gradients)
    values, others, found = gradients(energy, inputs, create_graph)
    if create_graph:
        return values, others, found
    detached = {name: value.detach() for name, value in others.items()}
    return values.detach(), detached, tuple(gradient.detach() for gradient in found)


def deformed(pos: Tensor, strain: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions under the symmetric part of the strain ``[clouds, dim, dim]`` of their cloud, and 1 + strain."""
    # The rows are vectors, so the matrix acts from the right; it is symmetric.
    deformation = torch.eye(pos.shape[1], dtype=pos.dtype, device=pos.device) + (strain + strain.mT) / 2
    return (pos[:, None] @ deformation[batch])[:, 0], deformation


def check_derivatives(argument: str, model: Any, create_graph: bool) -> None:
    """Raise RuntimeError if a graph is created and a module in a model is compiled: it has one derivative only."""
    for module in model.modules() if create_graph and isinstance(model, nn.Module) else ():
        if module._compiled_call_impl is not None or uncompiled(module) is not module:
            reason = "torch differentiates compiled networks only once, and differentiable forces need two derivatives"
            advice = "use compiled networks in eval mode and under torch.no_grad()"
            got = f"got a compiled {type(module).__name__}"
            raise RuntimeError(f"{argument}: expected a network that is not compiled, {got}; {reason}; {advice}")


def _gradients(energy: Callable[..., Outputs], inputs: Sequence[Tensor], create_graph: bool) -> Gradients:
    with torch.inference_mode(False), torch.enable_grad():
        variables = [usable(value) for value in inputs]
        if transformed():  # torch.func refuses requires_grad_, and detach would drop derivatives in forward mode
            values, pull_back, others = cast(Any, torch.func.vjp)(energy, *variables, has_aux=True)
            return values, others, pull_back(torch.ones_like(values))
        variables = [x if x.requires_grad else x.detach().requires_grad_() for x in variables]
        values, others = energy(*variables)
        found: Sequence[Tensor | None] = [None] * len(variables)
        if values.requires_grad:
            found = torch.autograd.grad(values.sum(), variables, create_graph=create_graph, allow_unused=True)
        pairs = zip(variables, found, strict=True)
        return values, others, tuple(torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs)


def usable(value: Any) -> Any:
    """Return a copy of a tensor that was created in inference mode, which autograd cannot save, or the value itself."""
    if isinstance(value, Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value


def symmetry_of_gradients(energy: Symmetry) -> Symmetry:
    """Return the part of the symmetry of an energy under which its gradients are vectors: motions without dilations.

    If positions are multiplied by r and the energy does not change, vectors are multiplied by r, and gradients divided.
    """
    group, average = (_without_dilations(found, energy.translations) for found in (energy.group, energy.on_average))
    if group is energy.group and average is energy.on_average:
        return energy
    note = "gradients are divided by the factor of a dilation, so they are no vectors under dilations"
    return replace(energy, group=group, on_average=average, notes=(*energy.notes, note))


def _without_dilations(group: Group | None, translations: bool) -> Group | None:
    """Return the group, or its rotations and translations if it does not preserve distances."""
    if group is None or group.is_orthogonal is not False:
        return group
    moves = group.is_affine or (isinstance(group, FiniteGroup) and translations)
    if linear_part(group).has_rotations:
        return SE(group.dim) if moves else SO(group.dim)
    return Translations(group.dim) if moves else None
