"""Networks of the relative element: what an attention layer knows about where a key is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import LiftedGraph, Neighbors

Activation = Literal["silu", "relu", "gelu", "elu", "none"]

# Entries of the layers' activations that are computed at a time: they should fit into a core's cache.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}


class RelativeGraph(Protocol):
    """What the layers of LieTransformer and LieConv need of a graph; ``LiftedElements`` is one.

    Attributes
    ----------
    neighbors
        Neighbor lists of the points.
    relative_coordinates
        ``[edges, fiber, fiber, k]``, coordinates of g_ia⁻¹ g_jb for each edge from j to i.
    batch
        ``[points]`` int64, the cloud of each point.
    num_clouds
        Number of clouds.
    """

    @property
    def neighbors(self) -> Neighbors:
        """Neighbor lists."""

    @property
    def relative_coordinates(self) -> Tensor:
        """Coordinates of the relative elements."""

    @property
    def batch(self) -> Tensor:
        """Cloud of each point."""

    @property
    def num_clouds(self) -> int:
        """Number of clouds."""


@dataclass(frozen=True, eq=False)
class PairGraph:
    """A graph whose pair coordinates are given, wherever they come from. Attributes as in :class:`RelativeGraph`.

    Group elements with neighbors of their own, rather than those of the point below them, are points with a fiber
    of 1 here.
    """

    neighbors: Neighbors
    relative_coordinates: Tensor
    batch: Tensor
    num_clouds: int

    def __post_init__(self) -> None:
        shape = self.relative_coordinates.shape
        edges = self.neighbors.num_edges
        if len(shape) != 4 or shape[0] != edges or shape[1] != shape[2]:
            raise ValueError(f"relative_coordinates: expected [edges={edges}, fiber, fiber, k], got {tuple(shape)}")
        if self.batch.shape != (self.neighbors.num_points,):
            raise ValueError(f"batch: expected [points={self.neighbors.num_points}], got {tuple(self.batch.shape)}")


class _Slope(NamedTuple):
    """An activation f and the product of its derivative with a gradient, both differentiable."""

    value: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]  # (gradient, argument)


_aten = torch.ops.aten


def _pull_silu(grad: Tensor, u: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(grad, u)
    # Torch's own is one pass over memory, but has no derivative.
    share = torch.sigmoid(u)
    return grad * (share * (1 + u * (1 - share)))


_SLOPES: dict[str, _Slope] = {
    "silu": _Slope(F.silu, _pull_silu),
    "relu": _Slope(F.relu, lambda grad, u: _aten.threshold_backward(grad, u, 0)),
    "gelu": _Slope(F.gelu, lambda grad, u: _aten.gelu_backward(grad, u)),
    "elu": _Slope(F.elu, lambda grad, u: grad * torch.where(u > 0, 1.0, u.clamp(max=0).exp())),
    "none": _Slope(lambda u: u, lambda grad, u: grad),
}


def activation(argument: str, name: str) -> Callable[[Tensor], Tensor]:
    """Function of an activation's name; raises ValueError, naming the argument, for an unknown one."""
    if name not in _SLOPES:
        raise ValueError(f"{argument}: expected one of {get_args(Activation)}, got {name!r}")
    return _SLOPES[name].value


def pair_coordinates(graph: RelativeGraph | LiftedGraph) -> tuple[Tensor, Tensor | None]:
    """Coordinates ``[rows, fiber, fiber, k]`` of relative elements, and the row of each edge (None: its own).

    For the fiber of a finite group they are h_a⁻¹ (x_j - x_i) / scale and the entries of h_a⁻¹ h_b, a row for every
    distinct displacement.
    """
    if not isinstance(graph, LiftedGraph):
        return graph.relative_coordinates, None
    group = graph.group
    position = graph.relative_positions
    frames = group.elements[group.relative].to(position).flatten(-2)
    order = group.order
    pairs = (len(position), order, order)
    parts = [position[:, :, None].expand(*pairs, -1), frames.expand(*pairs, -1)]
    return torch.cat(parts, dim=-1), graph.displacement_index


class HeadNetwork(nn.Module):
    """A network for every head: linear maps from in_channels to the widths, each followed by the activation.

    The activation after the *last* map too is the authors': with the swish a score is then at least -0.28.

    Between the maps it keeps nothing: rows are evaluated in blocks that fit into the cache, and once more in the
    backward pass, so that memory is that of the result and not of the hidden units. The result can be
    differentiated as often as one likes.

    Parameters
    ----------
    heads
        Number of networks.
    in_channels
        Channels of the input, which all networks see.
    hidden
        Units of both hidden layers.
    activation
        ``"silu"`` (swish), ``"relu"``, ``"gelu"``, ``"elu"`` or ``"none"``.
    """

    def __init__(self, heads: int, in_channels: int, hidden: int = 16, activation: Activation = "silu") -> None:
        super().__init__()
        for name, count in (("heads", heads), ("in_channels", in_channels), ("hidden", hidden)):
            check_count(name, count)
        if activation not in _SLOPES:
            raise ValueError(f"activation: expected one of {get_args(Activation)}, got {activation!r}")
        self.activation: Activation = activation
        widths = (in_channels, hidden, hidden, 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            bound = 1 / math.sqrt(fan_in)
            self.weights.append(torch.empty(heads, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(heads, fan_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Numbers ``[*, heads]`` for inputs ``[*, in_channels]``, in the dtype of the weights."""
        weight = self.weights[0]
        if x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"x: expected {weight.shape[1]} coordinates of a relative element, got {x.shape[-1]}; the graph and "
                f"the layer must agree on the group and the kind of coordinates"
            )
        with torch.autocast(weight.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(weight.dtype)
            parameters = [tensor for layer in zip(self.weights, self.biases, strict=True) for tensor in layer]
            out = _HeadNetwork.apply(self.activation, rows, *parameters)
        return out.unflatten(0, x.shape[:-1]) if x.ndim != 2 else out

    def finish(self, first: Tensor) -> Tensor:
        """What follows the first linear map: ``[*, heads, hidden]`` before its activation to ``[*, heads]``."""
        act = _SLOPES[self.activation].value
        x = act(first.flatten(0, -3)).transpose(0, 1)
        for weight, bias in zip(list(self.weights)[1:], list(self.biases)[1:], strict=True):
            x = act(torch.baddbmm(bias[:, None], x, weight))
        return x[..., 0].T.unflatten(0, first.shape[:-2])


class _HeadNetwork(torch.autograd.Function):
    """The three maps on rows ``[rows, k]``: to ``[rows, heads]``, in blocks, recomputed backwards."""

    @staticmethod
    def forward(ctx: Any, name: str, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(rows, *parameters)
        heads, _, hidden = parameters[0].shape
        act = _SLOPES[name].value
        out = rows.new_empty(heads, len(rows))
        for begin, block in _blocks(rows, heads * hidden):
            x = block.expand(heads, *block.shape)
            for weight, bias in _layers(parameters):
                x = act(torch.baddbmm(bias[:, None], x, weight))
            out[:, begin : begin + len(block)] = x[..., 0]
        return out.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters = ctx.saved_tensors
        value, pull = _SLOPES[ctx.name]
        grad = grads[0].T[..., None]
        layers = _layers(parameters)
        heads, _, hidden = parameters[0].shape
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        to_rows = []
        for begin, block in _blocks(rows, heads * hidden):
            inputs, sums = [block.expand(heads, *block.shape)], []
            for weight, bias in layers:
                sums.append(torch.baddbmm(bias[:, None], inputs[-1], weight))
                if len(sums) < len(layers):
                    inputs.append(value(sums[-1]))
            change = grad[:, begin : begin + len(block)]
            for number in reversed(range(len(layers))):
                change = pull(change.contiguous(), sums[number])
                totals[2 * number] = torch.baddbmm(totals[2 * number], inputs[number].mT, change)
                totals[2 * number + 1] = totals[2 * number + 1] + change.sum(dim=1)
                if number or ctx.needs_input_grad[1]:
                    change = change @ layers[number][0].mT
            if ctx.needs_input_grad[1]:
                to_rows.append(change.sum(dim=0))
        grad_rows = None
        if ctx.needs_input_grad[1]:
            grad_rows = torch.cat(to_rows) if to_rows else torch.zeros_like(rows)
        return (None, grad_rows, *totals)


def _layers(parameters: tuple[Tensor, ...] | list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def _blocks(rows: Tensor, width: int) -> list[tuple[int, Tensor]]:
    """First row and rows of each block."""
    size = max(64, _BLOCK.get(rows.device.type, 1 << 20) // width)
    return [(begin, rows[begin : begin + size]) for begin in range(0, len(rows), size)]
