"""How networks read their inputs: features and vectors of the points, in the precision of the weights."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lieattn._checks import check_arguments, check_counts, check_is, check_size, may_look
from lieattn.geometry import LiftedGraph, PointClouds
from lieattn.nn import lift_field
from lieattn.reps import Vector

_log = logging.getLogger(__name__)
_NARROW = (torch.float16, torch.bfloat16)


def in_precision_of_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method ``method(self, data, ...)`` of a network that computes in the precision of its weights.

    Floating inputs in another dtype are converted to that of the weights. With weights in half precision it gives
    what autocast gives for these weights in float32, so that geometry keeps single precision, in the dtype of the
    weights; statistics that it changes are kept.
    """
    names = tuple(inspect.signature(method).parameters)[2:]

    @functools.wraps(method)
    def converted(self: nn.Module, data: Any, *args: Any, **options: Any) -> Any:
        if (args or options) and not torch.compiler.is_compiling():
            check_arguments(method, {**dict(zip(names, args, strict=False)), **options})
        weight = next(self.parameters(), None)
        if weight is None:
            return method(self, data, *args, **options)
        if weight.dtype not in _NARROW:
            return method(self, _as_dtype(self, data, weight.dtype), *args, **options)
        if getattr(self, "recomputes", False) and torch.is_grad_enabled():
            advice = "keep them in float32 and use autocast"
            raise RuntimeError(f"network: activations of weights in {weight.dtype} cannot be computed again: {advice}")
        own = {name: value for name, value in _state(self) if value.is_floating_point()}
        wide = {name: value.float() for name, value in own.items()}
        data = _as_dtype(self, data, torch.float32)
        with torch.autocast(weight.device.type, dtype=weight.dtype):
            found = torch.func.functional_call(_Method(self, method), wide, (data, *args), options)
        with torch.no_grad():
            for name, value in own.items():
                if not isinstance(value, nn.Parameter) and self.training:
                    value.copy_(wide[name])
        return _rounded(found, weight.dtype)

    return converted


class VectorEmbedding(nn.Module):
    """Linear map to ``channels`` of the components in the frames of vectors ``[points, dim]``, attributes of the data.

    **Equivariance.** If points, frames and vectors turn together, the components stay with the frames.
    """

    def __init__(self, names: Sequence[str], dim: int, channels: int) -> None:
        check_arguments(VectorEmbedding.__init__, locals())
        super().__init__()
        check_counts(dim=dim, channels=channels)
        self.names = tuple(names)
        self.linear = nn.Linear(dim * len(self.names), channels, bias=False) if self.names else None

    def forward(self, data: Any, graph: LiftedGraph) -> Tensor | None:
        """``[points, fiber, channels]``, None without names."""
        if self.linear is None:
            return None
        check_is("graph", graph, LiftedGraph)
        found = graph.spread(vectors(data, self.names, graph))
        seen = lift_field(found.flatten(1), graph, len(self.names) * Vector(found.shape[2]))
        check_size(f"data: components of {', '.join(self.names)} in the frames", seen)
        return cast(Tensor, self.linear(seen))


def attribute(data: Any, name: str) -> Tensor:
    """A tensor of the data, by its name."""
    value = getattr(data, name, None)
    if not isinstance(value, Tensor):
        raise ValueError(f"data.{name}: expected a tensor, got {type(value).__name__}")
    return value


def features(data: Any, channels: int, clouds: PointClouds) -> Tensor:
    """Invariant features ``data.x`` ``[points, channels]``, checked; a constant one where data have none."""
    x, points = getattr(data, "x", None), _num_points(clouds)
    if x is None and getattr(data, "pos", None) is not None:
        if channels != 1:
            raise ValueError(
                f"data.x: expected [points={points}, {channels}], got none, for which in_channels must be 1"
            )
        if not torch.compiler.is_compiling():
            _say_constant()
        return clouds.pos.new_ones(points, 1)
    if not isinstance(x, Tensor):
        raise TypeError(f"data: expected a torch_geometric Data or Batch with features x, got {type(data).__name__}")
    if x.shape != (points, channels) or not x.is_floating_point():
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"data.x: expected floating features [points={points}, {channels}], got {got}")
    if may_look(x):
        check_size("data.x", x)
    return x


@functools.cache
def _say_constant() -> None:
    """Say once in a process that points get a feature."""
    _log.warning("data.x: the data have no features; every point gets the feature 1 (in_channels=1)")


def vectors(data: Any, names: tuple[str, ...], clouds: PointClouds) -> Tensor:
    """Vector inputs ``[points, names, dim]``, checked."""
    dim = clouds.space.group.dim if isinstance(clouds, LiftedGraph) else clouds.pos.shape[1]
    found, expected = [], (_num_points(clouds), dim)
    for name in names:
        value = getattr(data, name, None)
        if not isinstance(value, Tensor) or value.shape != expected:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"data.{name}: expected vectors {expected} as in pos, got {got}")
        check_size(f"data.{name}", value)
        found.append(value)
    return torch.stack(found, dim=1) if found else clouds.pos.new_zeros(expected[0], 0, dim)


def plus_vectors(x: Tensor, vectors: Tensor | None) -> Tensor:
    """A field plus the vectors at its pixels, whose images may have a wider border."""
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
    """A method of a network as the forward call of a module around it, so that its weights can be replaced."""

    def __init__(self, network: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.network, self.method = network, method

    def forward(self, data: Any, *args: Any, **options: Any) -> Any:
        return self.method(self.network, data, *args, **options)


def _state(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, with their names in :class:`_Method`."""
    yield from network.named_parameters(prefix="network")
    yield from network.named_buffers(prefix="network")


def _as_dtype(network: nn.Module, data: Any, dtype: torch.dtype) -> Any:
    """Images, or data whose inputs of the network are of a dtype; a copy if any were not."""
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, PointClouds):
        return data if data.pos.dtype == dtype else data.astype(dtype)
    names = ("pos", "x", "cell", *getattr(network, "vector_inputs", ()))
    found = {name: getattr(data, name, None) for name in names}
    others = {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}
    others = {name: x.to(dtype) for name, x in others.items() if x.dtype != dtype}
    if others:
        data = copy.copy(data)
        for name, value in others.items():
            setattr(data, name, value)
    return data


def _rounded(found: Any, dtype: torch.dtype) -> Any:
    """Outputs, or the field of what a network gives, in a dtype; its geometry is left alone."""
    if isinstance(found, Tensor):
        return found.to(dtype)
    return found._replace(x=found.x.to(dtype)) if hasattr(found, "_replace") and hasattr(found, "x") else found


def _num_points(clouds: PointClouds) -> int:
    """Points of clouds, which stand for several nodes of a graph on a fiber of scales."""
    return clouds.num_points // clouds.levels if isinstance(clouds, LiftedGraph) else clouds.num_points
