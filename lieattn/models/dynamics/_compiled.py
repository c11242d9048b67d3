"""Energies of clouds, differentiated by positions, also as one compiled function."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.fx.experimental import _config

from lieattn._core.checks import kind
from lieattn._core.contexts import transformed
from lieattn._core.messages import warn
from lieattn.geometry import LiftedGraph
from lieattn.groups import SE, SO, FiniteGroup, Group, Translations, linear_part
from lieattn.io import uncompiled
from lieattn.models._base.network import EquivariantModule, Network, Wrapper
from lieattn.models._base.rescaled import Rescaled
from lieattn.models._base.symmetry import Symmetry
from lieattn.models._base.tied import pool_of
from lieattn.nn import Heads
from lieattn.ops import backend

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


_TIMES = 4  # allowed errors, in those of eager evaluation
_FLOOR = {torch.float32: 1e-5, torch.float64: 1e-9}  # relative errors that are allowed in any case
_OF_ALL = 1e-2  # share of the floor for weights whose gradient is far smaller than those of others

Eager = Callable[[Any, Any, tuple[Tensor, ...]], Gradients]  # of a network, data, and positions and strains


class CompiledGradients:
    """Energies of a network and their gradients as one compiled function, or the reason why they are not compiled.

    Gradients are by positions and strains. torch differentiates compiled functions only once, so they are a part of the
    function, whose results are then differentiated by the weights. The function is traced at its first call, once for
    batches of any size; Inductor may compile it again for much larger ones. Only batches of a single cloud need a trace
    of their own, so they are compiled until there are several clouds for the first time. Copies are compiled anew.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.reason = options, ""
        self._function: Callable[..., Gradients] | None = None
        self._of: tuple[Any, bool] = (None, False)  # the network, and if it is compiled for several clouds

    def __reduce__(self) -> Any:
        return functools.partial(CompiledGradients, **self.options), ()

    def __call__(self, model: Any, data: Any, eager: Eager, *inputs: Tensor) -> Gradients | None:
        """Return the results of ``eager(model, data, inputs)``, or None if it has to compute them.

        The results of the first call are compared with eager ones in float64. If errors are larger than rounding, or if
        torch cannot compile the function, a warning says so, and nothing is compiled from then on.
        """
        hooked = any(part._forward_hooks for part in model.modules())
        if self.reason or hooked or transformed() or torch.compiler.is_compiling() or inputs[0].requires_grad:
            return None
        began, checked = time.perf_counter(), None
        try:
            given, several = _given(model, data, inputs)
            first = self._of[0] is not model or several > self._of[1]
            if given is None or not (first or several == self._of[1]):
                return None
            if first:
                _check_model(model, self.options)
                given[1].at(given[2])  # torch would hide why a geometry cannot be moved
        except (TypeError, ValueError, RuntimeError) as error:
            self._refuse(model, error)
            return None
        if first:  # outside of what follows, so that errors in the data are raised as usual
            checked = _Checked(model, data, inputs, eager)
        try:
            if checked is not None:
                self._function, self._of = _function(model, self.options), (model, several)
                checked.compare(self._run(given))
            found = self._run(given)
        except Exception as error:  # torch raises errors of many classes
            self._refuse(model, error)
            return None
        if first:
            what, took = type(model).__name__, time.perf_counter() - began
            logging.getLogger("lieattn").warning("compile: compiled energies and forces of %s in %.0f s", what, took)
        return found

    def _run(self, given: tuple[Any, ...]) -> Gradients:
        # Without the patch, sizes that are equal in the first batch would have to be equal in all others.
        of_any_size = cast(Any, _config).patch(use_duck_shape=False)
        with torch.inference_mode(False), torch.enable_grad(), backend("plain"), of_any_size:
            return cast(Callable[..., Gradients], self._function)(*given)

    def _refuse(self, model: Any, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        self.reason = " ".join(lines[: 1 + lines[0].endswith(":")])  # backends say in the second line what they raised
        warn(f"compile: energies and forces of {type(model).__name__} run uncompiled, because {self.reason}")


class _Cloud:
    """Attributes of data, as an object that torch can follow."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def _given(model: Any, data: Any, inputs: tuple[Tensor, ...]) -> tuple[tuple[Any, ...] | None, bool]:
    """Return the arguments of the function, None for fewer than two points or edges; and if there are several clouds.

    Sizes below two would be constants of the compiled function.
    """
    if not isinstance(model, Network) or not hasattr(model, "geometry"):
        raise TypeError(f"it is no lieattn.models.Network on points, but {type(model).__name__}")
    dtype = next(model.parameters()).dtype
    values = {name: value for name, value in data.to_dict().items() if isinstance(value, Tensor)}
    values = {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}
    pos = data.pos if data.pos.dtype == dtype else model.rounded_positions(data, dtype)
    with torch.no_grad():
        geometry = cast(Any, model).geometry(data)
    parts = geometry if isinstance(geometry, tuple) else (geometry,)
    graphs = [part for part in parts if isinstance(part, LiftedGraph)]
    if not graphs or not hasattr(geometry, "at"):
        raise TypeError(f"the geometry of {type(model).__name__} cannot be moved with the points")
    few = any(graph.num_points < 2 or graph.neighbors.num_edges < 2 for graph in graphs)
    values["batch"] = graphs[0].batch
    return (None if few else (values, geometry, pos, *inputs[1:])), graphs[0].num_clouds > 1


def _function(model: Any, options: Mapping[str, Any]) -> Callable[..., Gradients]:
    """Return the compiled function of the attributes of data, their geometry, positions and strains."""

    def gradients(values: dict[str, Tensor], geometry: Any, *inputs: Tensor) -> Gradients:
        def energies(pos: Tensor, *strains: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            pos, deformation = deformed(pos, strains[0], values["batch"]) if strains else (pos, None)
            outputs = model(_Cloud(**{**values, "pos": pos}), geometry.at(pos, deformation))
            energy = per_cloud(energy_among(outputs))
            return energy.sum(), (energy, dict(outputs) if isinstance(outputs, dict) else {})

        derived = torch.func.grad(energies, argnums=tuple(range(len(inputs))), has_aux=True)
        found, (energy, others) = derived(*inputs)
        return energy, others, found

    # torch limits compilations for each code object, so each network has its own.
    gradients.__code__ = gradients.__code__.replace()
    return torch.compile(gradients, fullgraph=True, dynamic=True, **options)


def _check_model(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise an error if results cannot be compared, or if Inductor has no C++ compiler."""
    if any(isinstance(part, nn.Dropout) and part.p and part.training for part in model.modules()):
        raise ValueError("compiled dropout draws other numbers, so results cannot be compared")
    weight = next(model.parameters())
    if weight.dtype not in _FLOOR:
        raise TypeError(f"weights are in {weight.dtype}; keep them in float32 and use autocast")
    if weight.device.type == "cpu" and options.get("backend", "inductor") == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise RuntimeError("Inductor needs a C++ compiler: install g++ or clang++, or set CXX") from error


class _Checked:
    """Eager results for a batch, and those of the network in float64: outputs, gradients, and gradients of weights."""

    def __init__(self, model: nn.Module, data: Any, inputs: tuple[Tensor, ...], eager: Eager) -> None:
        wide, exact = copy.deepcopy(model).double(), copy.copy(data).apply(_widened)
        with torch.autocast(data.pos.device.type, enabled=False):
            found = eager(wide, exact, tuple(map(_widened, inputs)))
        generator = torch.Generator().manual_seed(0)
        outputs, self.outputs = _named(found).values(), frozenset(_named(found))
        # The sum of all outputs times these factors is differentiated: any loss has such gradients.
        self.factors = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in outputs]
        sizes = [float(one.detach().square().mean().sqrt()) or 1.0 for one in outputs]
        self.factors = [factor.to(data.pos.device) / size for factor, size in zip(self.factors, sizes, strict=True)]
        self.weights = dict(model.named_parameters())
        self.exact = self._results(found, dict(wide.named_parameters()))
        self.eager = self._results(eager(model, data, inputs), self.weights)
        self.floor = _FLOOR[next(model.parameters()).dtype]

    def _results(self, found: Gradients, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs, trained = _named(found), {name: one for name, one in weights.items() if one.requires_grad}
        loss = sum((one * part).sum() for one, part in zip(outputs.values(), self.factors, strict=True))
        grads = torch.autograd.grad(cast(Tensor, loss), list(trained.values()), allow_unused=True) if trained else ()
        named = {f"the gradient of {name}": one for name, one in zip(trained, grads, strict=True) if one is not None}
        return {name: one.detach().double() for name, one in {**outputs, **named}.items()}

    def compare(self, found: Gradients) -> None:
        """Raise ArithmeticError if an error is larger than a few times that of eager evaluation."""
        compiled = self._results(found, self.weights)
        largest = max((float(self.exact[name].abs().max()) for name in self.exact.keys() - self.outputs), default=0.0)
        for name, exact in self.exact.items():
            ours, theirs = (float((one[name] - exact).abs().max()) for one in (compiled, self.eager))
            size = float(exact.abs().max())
            floor = self.floor * max(size, 0.0 if name in self.outputs else _OF_ALL * largest)
            if not ours <= _TIMES * theirs + floor:
                errors = f"errors of compiled and eager evaluation are {ours:.1e} and {theirs:.1e}"
                raise ArithmeticError(f"{name} is wrong: {errors}, of {size:.1e}")


def _named(found: Gradients) -> dict[str, Tensor]:
    energy, others, gradients = found
    derived = dict(zip(("force", "virial"), gradients, strict=False))
    return {"energy": energy, **others, **derived}


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
