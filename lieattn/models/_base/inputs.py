"""Inputs of the networks."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_is, check_size, kind, may_read_values
from lieattn.geometry import LiftedGraph, PointClouds, padding
from lieattn.groups import FiniteGroup
from lieattn.nn import lift_field
from lieattn.ops import smooth_lengths
from lieattn.reps import DirectSum, Irreps, Multiple, Representation, Vector, check_representation

_log = logging.getLogger(__name__)
_NARROW = (torch.float16, torch.bfloat16)
_NUMBERS = (int, float, np.number)


def in_precision_of_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method ``method(self, data, ...)`` of a network so that it computes in the precision of the weights.

    Floating inputs are converted to the dtype of the weights. With weights in half precision, the result is that of
    autocast with these weights in float32, rounded to the dtype of the weights, so that geometry keeps single
    precision. Buffers that the method updates, such as running statistics, are updated in the network.

    The method ``geometry`` runs outside of compiled graphs, because the search for neighbors depends on values.
    """
    names = tuple(inspect.signature(method).parameters)[2:]
    searches = names[:1] == ("geometry",)

    @functools.wraps(method)
    def converted(self: Any, data: Any, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_data(data)
            if args or options:
                check_arguments(method, {**dict(zip(names, args, strict=False)), **options})
        weight = next(self.parameters(), None)
        if weight is None:
            return method(self, data, *args, **options)
        if weight.dtype not in _NARROW:
            missing = searches and (args[0] if args else options.get("geometry")) is None
            if missing and torch.compiler.is_dynamo_compiling() and has_geometry(self):
                options.pop("geometry", None)
                args = (self.geometry(data), *args[1:])
            return method(self, _as_dtype(self, data, weight.dtype), *args, **options)
        if self.recomputes and torch.is_grad_enabled():
            advice = "keep the weights in float32 and use autocast"
            raise RuntimeError(f"network: checkpointed activations cannot be in {weight.dtype}: {advice}")
        own = {name: value for name, value in _state(self) if value.dtype in _NARROW}
        wide = {name: value.float() for name, value in own.items()}
        data = _as_dtype(self, data, torch.float32)
        with torch.autocast(weight.device.type, dtype=weight.dtype):
            found = torch.func.functional_call(_Method(self, method), wide, (data, *args), options)
        with torch.no_grad():
            for name, value in own.items():
                if not isinstance(value, nn.Parameter) and self.training:
                    value.copy_(wide[name])
        return _rounded(found, weight.dtype)

    return _outside_of_graphs(converted) if method.__name__ == "geometry" else converted


def _outside_of_graphs(search: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that searches for neighbors, which depends on values, so that it never runs compiled."""

    @functools.wraps(search)
    def uncompiled(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(search, reason="pass geometry=network.geometry(data)")(*args, **options)
        return search(*args, **options)

    return uncompiled


def check_data(data: Any) -> None:
    """Raise TypeError for values that are neither data nor a tensor, such as None, a list or an array."""
    if type(data) in (list, tuple, dict, np.ndarray) or data is None or isinstance(data, str | bytes | int | float):
        raise TypeError(f"data: expected a torch_geometric Data or Batch, or images as a tensor, got {kind(data)}")


def has_geometry(network: Any) -> bool:
    """Return whether a network, or all networks within it, search for neighbors; networks on images do not.

    Modules around other networks have the method ``geometry`` in any case.
    """
    inner = getattr(network, "network", None)
    within = [*(() if inner is None else (inner,)), *getattr(network, "networks", ())]
    return hasattr(network, "geometry") and all(has_geometry(one) for one in within)


VectorInputs = Sequence[str] | Mapping[str, Representation | str]
"""Names of attributes with vectors, or representations by name; a string names irreps of e3nn, such as ``"1e"``."""


def read_fields(inputs: VectorInputs, dim: int) -> tuple[tuple[str, ...], dict[str, Representation]]:
    """Return the names of the vectors, and the representations of all other input fields by name.

    TypeError or ValueError is raised for an entry that is no representation on ``dim`` coordinates.
    """
    if not isinstance(inputs, Mapping):
        return tuple(inputs), {}
    fields: dict[str, Representation] = {}
    for name, given in inputs.items():
        try:
            rep = Irreps(given) if isinstance(given, str) else given
        except ValueError as error:
            raise ValueError(f"vector_inputs[{name!r}]: {error}") from error
        check_representation(f"vector_inputs[{name!r}]", rep)
        if name == "pos" and rep != Vector(dim):
            raise ValueError(f"vector_inputs['pos']: expected Vector({dim}) for positions, got {rep.name}")
        if rep.space_dim not in (None, dim):
            advice = "; in the plane, axial vectors are Pseudoscalar()" if dim == 2 else ""
            expected = f"a representation on {dim} coordinates, such as Vector({dim})"
            raise ValueError(f"vector_inputs[{name!r}]: expected {expected}, got {rep.name}{advice}")
        fields[name] = rep
    names = tuple(name for name, rep in fields.items() if rep == Vector(dim))
    return names, {name: rep for name, rep in fields.items() if name not in names}


def check_domains(fields: Mapping[str, Representation], frames: FiniteGroup | None) -> None:
    """Raise ValueError for a field of a finite group that does not contain the frames of a network.

    ``frames`` is None if they are not the elements of a finite group.
    """
    for name, rep in fields.items():
        if rep.domain is not None and frames is None:
            need = f"the elements of {rep.domain.name} or a subgroup as frames, in a Euclidean space"
            raise ValueError(f"vector_inputs[{name!r}]: {rep.name} needs {need}, got others")
        if frames is not None:
            rep.check_domain(f"vector_inputs[{name!r}], frames {frames.name}", frames.elements)


class VectorEmbedding(nn.Module):
    """Linear map to ``channels`` of the components of vectors, and of fields of any type, in the frames.

    The fields are the attributes ``names`` of the data: vectors ``[points, dim]``, or a mapping with the representation
    of each, ``{"spin": Pseudovector()}``, for values ``[points, rep.dim]``. Values ``[clouds, rep.dim]`` belong to all
    points of a cloud. On a sphere, vectors ``[points, 3]`` must be tangent; any others have the type ``"1o"``.

    **Equivariance.** If points, frames and fields move together, the components ρ(h)⁻¹ v in the frames do not change.
    """

    def __init__(self, names: VectorInputs, dim: int, channels: int) -> None:
        check_arguments(VectorEmbedding.__init__, locals())
        super().__init__()
        check_counts(dim=dim, channels=channels)
        self.names, others = read_fields(names, dim)
        self.fields: dict[str, Representation] = {**dict.fromkeys(self.names, Vector(dim)), **others}
        components = sum(rep.dim for rep in self.fields.values())
        self.linear = nn.Linear(components, channels, bias=False) if self.fields else None

    def forward(self, data: Any, graph: LiftedGraph) -> Tensor | None:
        """Return a field ``[points, fiber, channels]``, or None if there are no names."""
        return None if self.linear is None else self.linear(lifted_fields(data, self.fields, graph))


@dataclass(frozen=True)
class Species:
    """One-hot species times the powers 0, 1, 2 of the nuclear charge ``data.z``; ``species`` are the known charges.

    Channel ``3 a + q`` is (z / largest charge in ``species``)^q for atoms of species a, and 0 for other atoms.
    """

    species: Sequence[int] = (1, 6, 7, 8, 9)

    def __post_init__(self) -> None:
        check_arguments(Species, vars(self))

    @property
    def channels(self) -> int:
        """Number of features."""
        return 3 * len(self.species)

    def __call__(self, data: Any, clouds: PointClouds) -> Float[Tensor, "points {self.channels}"]:
        """Return features ``[points, channels]`` in torch's default dtype.

        TypeError is raised if ``data.z`` is not an int64 tensor ``[points]``, ValueError if a species is unknown.
        """
        z = getattr(data, "z", None)
        if not isinstance(z, Tensor) or z.dtype != torch.int64 or z.ndim != 1:
            raise TypeError(f"data.z: expected int64 nuclear charges [points], got {kind(z)}")
        one_hot = torch.stack([z == species for species in self.species], dim=1)
        unknown = ~one_hot.any(dim=1)
        if may_read_values(z) and unknown.any():
            atom = int(unknown.nonzero()[0])
            raise ValueError(f"data.z: expected charges among {list(self.species)}, got {int(z[atom])} for atom {atom}")
        charge = z.to(torch.get_default_dtype()) / max(self.species)
        power = charge[:, None] ** torch.arange(3, device=z.device)
        power = power.masked_fill(unknown[:, None], torch.nan)  # visible in the output if the check was skipped
        return (one_hot[:, :, None] * power[:, None]).flatten(1)


@dataclass(frozen=True)
class SortedDistances:
    """Distances of each point to the other points of its cloud, largest first, padded with zeros to ``channels``.

    They are invariant to E(d) and to permutations. Gradients of the distance of coincident points are 0.
    """

    channels: int

    def __post_init__(self) -> None:
        check_arguments(SortedDistances, vars(self))
        check_counts(channels=self.channels)

    def __call__(self, data: Any, clouds: PointClouds) -> Float[Tensor, "points {self.channels}"]:
        """Return features ``[points, channels]``.

        ValueError is raised if a cloud has more than ``channels + 1`` points, or is periodic.
        """
        check_is("clouds", clouds, PointClouds)
        if clouds.cell is not None:
            raise ValueError("data.cell: SortedDistances do not see periodic images; use other inputs of the points")
        most = int(clouds.counts.max()) if clouds.num_points else 0
        if most > self.channels + 1:
            raise ValueError(f"data: expected clouds of at most {self.channels + 1} points, got {most}")
        layout = padding(clouds.batch, clouds.num_clouds)
        places = layout.pad(clouds.pos)
        distance = smooth_lengths(places[:, :, None] - places[:, None])
        if layout.mask is not None:
            distance = torch.where(layout.mask[:, None], distance, 0.0)
        ordered = layout.unpad(distance.sort(dim=2, descending=True).values)
        return F.pad(ordered, (0, self.channels - ordered.shape[1]))


@dataclass(frozen=True)
class CloudInputs:
    """Features of the points followed by numbers of their whole cloud, such as its total charge and its spin.

    Pass it to a network in place of the number of features: ``FramewiseTransformer(frames, CloudInputs(("charge",
    "spin"), 5), 1)``. The first linear map of the network embeds the numbers of the cloud and adds the result to the
    embedding of every point.

    **Equivariance.** The numbers of a cloud do not change when its points move, so the symmetry of the network is kept.

    Attributes
    ----------
    names
        Attributes of the data with a number for each cloud, ``[clouds]`` or ``[clouds, 1]``, of any real dtype; a
        plain number is accepted for a single cloud. By the convention of ASE's ``info``, ``"charge"`` is the total
        charge in units of e, and ``"spin"`` the multiplicity 2S + 1.
    points
        Number of features ``data.x`` of each point, or an object that computes features.
    """

    names: Sequence[str]
    points: int | Species | SortedDistances = 1

    def __post_init__(self) -> None:
        check_arguments(CloudInputs, vars(self))
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"names: expected different attributes of the data, at least one, got {self.names!r}")
        if isinstance(self.points, Integral):
            object.__setattr__(self, "points", int(self.points))

    @property
    def channels(self) -> int:
        """Number of features."""
        return (self.points if isinstance(self.points, int) else self.points.channels) + len(self.names)

    def __call__(self, data: Any, clouds: PointClouds) -> Tensor:
        """Return features ``[points, channels]``; ValueError if a number of the clouds is missing."""
        check_is("clouds", clouds, PointClouds)
        own = features(data, self.points, clouds)
        batch = clouds.batch[:: clouds.levels] if isinstance(clouds, LiftedGraph) else clouds.batch
        return torch.cat([own, self.of_clouds(data, clouds.num_clouds).to(own)[batch]], dim=1)

    def of_clouds(self, data: Any, clouds: int) -> Float[Tensor, "{clouds} names"]:
        """Return the numbers of the clouds, ``[clouds, names]``, in a floating dtype."""
        check_counts(0, clouds=clouds)
        found = []
        for name in self.names:
            value = getattr(data, name, None)
            value = torch.tensor([value]) if isinstance(value, _NUMBERS) else value
            shapes = ((clouds,), (clouds, 1), *([()] if clouds == 1 else []))
            if not isinstance(value, Tensor) or value.is_complex() or value.shape not in shapes:
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else kind(value)
                expected = f"a number for each cloud, [clouds={clouds}] or [{clouds}, 1]"
                raise ValueError(f"data.{name}: expected {expected}, got {got}")
            check_size(f"data.{name}", value)
            found.append(value.reshape(clouds))
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in found), torch.float32)
        return torch.stack([value.to(dtype) for value in found], dim=1)


PointInputs = int | Species | SortedDistances | CloudInputs
"""Input features of the points: a number of features ``data.x``, or an object that computes features."""


def read_inputs(inputs: PointInputs) -> tuple[PointInputs, int, tuple[str, ...]]:
    """Return the inputs, the number of features, and the names of attributes with numbers of the clouds."""
    inputs = int(inputs) if isinstance(inputs, Integral) else inputs
    count = inputs if isinstance(inputs, int) else inputs.channels
    check_counts(in_channels=count)
    return inputs, count, tuple(inputs.names) if isinstance(inputs, CloudInputs) else ()


def attribute(data: Any, name: str) -> Tensor:
    """Return a tensor of the data by its name; ValueError if it is missing."""
    value = getattr(data, name, None)
    if not isinstance(value, Tensor):
        raise ValueError(f"data.{name}: expected a tensor, got {type(value).__name__}")
    return value


def copied(data: Any, **changed: Any) -> Any:
    """Return a shallow copy of data with changed attributes.

    While torch compiles, which can follow neither ``copy`` nor attributes, it is of the class ``Data``.
    """
    if not torch.compiler.is_dynamo_compiling():
        found = copy.copy(data)
        for name, value in changed.items():
            setattr(found, name, value)
        return found
    from torch_geometric.data import Data

    found = Data()
    for name in (*data.keys(), *changed):
        found[name] = changed[name] if name in changed else data[name]
    return found


def features(data: Any, inputs: PointInputs, clouds: PointClouds) -> Float[Tensor, "points channels"]:
    """Return invariant features ``[points, channels]``.

    If ``inputs`` is a number, the features are ``data.x``, or the constant 1 if the data have none.
    """
    points, pos = _num_points(clouds), getattr(data, "pos", None)
    if isinstance(pos, Tensor) and pos.ndim == 2 and len(pos) != points:
        raise ValueError(f"geometry: expected that of these {len(pos)} points, got one of {points} points")
    if not isinstance(inputs, int):
        return inputs(data, clouds).to(clouds.pos)
    channels, x = inputs, getattr(data, "x", None)
    if x is None and getattr(data, "pos", None) is not None:
        if channels != 1:
            raise ValueError(f"data.x: expected [points={points}, {channels}], got None, which needs in_channels=1")
        if not torch.compiler.is_compiling():
            _say_constant()
        return clouds.pos.new_ones(points, 1)
    if x is None:
        raise TypeError(f"data: expected a torch_geometric Data or Batch with features x, got {type(data).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"data.x: expected floating features as a tensor, got {kind(x)}")
    if x.shape != (points, channels) or not x.is_floating_point():
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"data.x: expected floating features [points={points}, {channels}], got {got}")
    check_size("data.x", x)
    return x


@functools.cache
def _say_constant() -> None:
    """Log a warning, once per process, that points get a constant feature."""
    _log.warning("data.x: the data have no features; every point gets the feature 1 (in_channels=1)")


def vectors(data: Any, names: tuple[str, ...], clouds: PointClouds) -> Float[Tensor, "points names dim"]:
    """Return the vector inputs ``[points, names, dim]``, see :func:`field_values`."""
    dim = clouds.space.group.dim if isinstance(clouds, LiftedGraph) else clouds.pos.shape[1]
    return field_values(data, dict.fromkeys(names, Vector(dim)), clouds).unflatten(1, (len(names), dim))


def field_values(data: Any, fields: Mapping[str, Representation], clouds: PointClouds) -> Float[Tensor, "points n"]:
    """Return the components of input fields side by side; those of whole clouds are repeated for their points.

    ValueError or TypeError is raised if a field is missing or has another shape or dtype.
    """
    points, number = _num_points(clouds), clouds.num_clouds
    found = [] if fields else [clouds.pos.new_zeros(points, 0)]
    batch = clouds.batch[:: clouds.levels] if isinstance(clouds, LiftedGraph) else clouds.batch
    for name, rep in fields.items():
        if name == "pos" and clouds.cell is not None:
            raise ValueError("data.cell: vector_inputs with 'pos' need clouds that are not periodic, with one origin")
        value = getattr(data, name, None)
        if not isinstance(value, Tensor) or value.shape[1:] != (rep.dim,) or len(value) not in (points, number):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            expected = f"[points={points}, {rep.dim}] or [clouds={number}, {rep.dim}]"
            raise ValueError(f"data.{name}: expected a field of type {rep.name}, {expected}, got {got}")
        if not value.is_floating_point():
            raise TypeError(f"data.{name}: expected floating components of {rep.name}, got {value.dtype}")
        check_size(f"data.{name}", value)
        of_clouds = len(value) != points or (points == number and _has_one_each(data, name, clouds))
        part = rep.part if isinstance(rep, Multiple) else rep
        if isinstance(part, Vector) and isinstance(clouds, LiftedGraph) and not of_clouds and name != "pos":
            clouds.space.check_tangent(f"data.{name}", clouds.pos[:: clouds.levels], value.unflatten(1, (-1, part.dim)))
        found.append(value[batch] if of_clouds else value)
    return torch.cat(found, dim=1)


def _has_one_each(data: Any, name: str, clouds: PointClouds) -> bool:
    """Return whether a value for each point or cloud, of which there are as many, is one for each cloud.

    Only a batch with empty clouds tells the difference, by the rows that it has for an empty cloud.
    """
    if torch.compiler.is_compiling() or not may_read_values(clouds.batch) or bool((clouds.counts == 1).all()):
        return False
    with suppress(RuntimeError, AttributeError):  # not made from a list of clouds
        return len(data.get_example(int(clouds.counts.argmin()))[name]) == 1
    return False


def lifted_fields(
    data: Any, fields: Mapping[str, Representation], graph: LiftedGraph
) -> Float[Tensor, "points fiber components"]:
    """Return the components of input fields in the frames, ρ(h)⁻¹ v, side by side; vectors come first."""
    check_is("graph", graph, LiftedGraph)
    reps = list(fields.values())
    count = sum(isinstance(rep, Vector) for rep in reps)
    rep = DirectSum((*([count * reps[0]] if count else []), *reps[count:]))
    seen = lift_field(graph.spread(field_values(data, fields, graph)), graph, rep)
    check_size(f"data: components of {', '.join(fields)} in the frames", seen)
    return seen


def plus_vectors(x: Tensor, vectors: Tensor | None) -> Tensor:
    """Add to a field the vectors at its pixels; the vectors may have a wider border, which is cut off."""
    if vectors is None:
        return x
    check_is("vectors", vectors, Tensor)
    if vectors.ndim != x.ndim:
        expected = "[images, channels, order, *sides]"
        raise ValueError(f"vectors: expected {expected} with {x.ndim} axes, got {tuple(vectors.shape)}")
    border = (vectors.shape[-1] - x.shape[-1]) // 2
    inner: Any = (..., *(slice(border, side - border) for side in vectors.shape[3:]))
    return x + vectors[inner]


class _Method(nn.Module):
    """A module whose forward call is a method of a network, so that ``functional_call`` can replace the weights."""

    def __init__(self, network: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.network, self.method = network, method

    def forward(self, data: Any, *args: Any, **options: Any) -> Any:
        return self.method(self.network, data, *args, **options)


def _state(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names in :class:`_Method`."""
    yield from network.named_parameters(prefix="network")
    yield from network.named_buffers(prefix="network")


def _as_dtype(network: Any, data: Any, dtype: torch.dtype) -> Any:
    """Convert images, or the attributes of data that are inputs of the network; return a copy if any dtype changes."""
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, PointClouds):
        if data.pos.dtype == dtype:
            return data
        return replace(data.astype(dtype), pos=network.rounded_positions(data, dtype))
    names = ("pos", "x", "cell", "edge_attr", *network.vector_inputs, *network.field_inputs)
    found = {name: getattr(data, name, None) for name in names}
    others = {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}
    others = {name: x.to(dtype) for name, x in others.items() if x.dtype != dtype}
    if "pos" in others:
        others["pos"] = network.rounded_positions(data, dtype)
    return copied(data, **others) if others else data


def _rounded(found: Any, dtype: torch.dtype) -> Any:
    """Convert floating outputs, or the field ``x`` of a result, to a dtype; its geometry is not converted."""
    if isinstance(found, Tensor):
        return found.to(dtype) if found.is_floating_point() else found
    if isinstance(found, Mapping):
        return {name: _rounded(output, dtype) for name, output in found.items()}
    return found._replace(x=found.x.to(dtype)) if hasattr(found, "_replace") and hasattr(found, "x") else found


def with_planes(images: Tensor, inputs: PointInputs, data: Any) -> Tensor:
    """Append the numbers of each image as constant planes to the channels of images ``[images, channels, *sides]``."""
    if not isinstance(inputs, CloudInputs):
        return images
    if isinstance(data, Tensor):
        raise TypeError(f"data: expected a Batch with the attributes {inputs.names}, got images as a tensor")
    numbers = inputs.of_clouds(data, len(images)).to(images)
    planes = numbers.reshape(*numbers.shape, *[1] * (images.ndim - 2)).expand(-1, -1, *images.shape[2:])
    return torch.cat([images, planes], dim=1)


def _num_points(clouds: PointClouds) -> int:
    """Return the number of points of clouds; each point is several nodes of a graph with a fiber of scales."""
    return clouds.num_points // clouds.levels if isinstance(clouds, LiftedGraph) else clouds.num_points
