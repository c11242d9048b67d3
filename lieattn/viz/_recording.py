"""The recording of a forward pass of any network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._core.contexts import SeenWeights, watching_weights
from lieattn._core.numerics import sums
from lieattn.geometry import LiftedGraph, PointClouds, Raster, pixel_positions, point_clouds
from lieattn.models import (
    AttentiveNet,
    AttentiveNetwork,
    DirectionConvNet,
    EquivariantModule,
    FieldModel,
    Network,
    Wrapper,
)
from lieattn.nn import CloudNorm, FieldBatchNorm, GroupAttention, from_grid
from lieattn.reps import Irreps

_APART = 1e-3  # relative to the size of a cloud: points with a smaller distance are the same point
_PAIRS = 2**22  # of points, whose distances are in memory at a time
_NOT_LAYERS = (nn.Identity, nn.Linear, nn.LayerNorm, nn.Dropout, nn.ModuleList, CloudNorm, FieldBatchNorm)


@dataclass(frozen=True, eq=False)
class Places:
    """Elements of a group over points, on the CPU.

    ``frames`` are the linear parts of the elements: ``[1, fiber, dim, dim]`` if they are the same over all points,
    ``[points, fiber, dim, dim]`` otherwise, and None for a fiber of 1.
    """

    clouds: PointClouds
    frames: Tensor | None = None

    @property
    def fiber(self) -> int:
        """Number of elements over each point."""
        return 1 if self.frames is None else self.frames.shape[1]

    @property
    def pos(self) -> Tensor:
        """Positions ``[points, dim]`` float64."""
        return self.clouds.pos


@dataclass(frozen=True, eq=False)
class Attention:
    """Weights of a layer of attention.

    Attributes
    ----------
    name
        Name of the module.
    places
        Points and frames of the queries. The keys are over the same points.
    target, source
        Point of the query and of the key of each edge, int64 ``[edges]``.
    weights
        Weights ``[edges, fiber, keys, heads]`` with which a frame of the query attends to a frame of the key. The axis
        of the keys is 1 if each frame attends only to itself (``tied``), or if all frames of a key point share one
        weight.
    total
        Sum of the weights of each query, ``[points, fiber, heads]``: 1 for a softmax. It includes the weights of zeros
        outside of an image, which belong to no edge.
    keys
        Number of frames over a key point.
    tied, lifting
        Whether each frame attends only to itself, and whether the layer lifts features of points.
    """

    name: str
    places: Places
    target: Tensor
    source: Tensor
    weights: Tensor
    total: Tensor
    keys: int
    tied: bool
    lifting: bool

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.weights.shape[-1]

    def of_query(self, point: int, frame: int | None, head: int | None) -> Tensor:
        """Return the weights ``[points, keys]`` of a query; the mean over its frames and over heads if None is given.

        They are ``[points, 1]`` if all frames of a key point share one weight.
        """
        chosen = self.target == point
        weights = self.weights[chosen]
        weights = weights.mean(dim=-1) if head is None else weights[..., head]
        if self.tied:
            own = weights[..., 0]
            weights = own / self.places.fiber if frame is None else own * (torch.arange(self.places.fiber) == frame)
        else:
            weights = weights.mean(dim=1) if frame is None else weights[:, frame]
        return sums(weights, self.source[chosen], len(self.places.pos))

    def step(self, flow: Tensor) -> Tensor:
        """Propagate weights of queries ``[*, points, fiber]`` to keys, ``[*, points, keys]``; see ``rolled_out``."""
        if bool((self.weights < 0).any()):
            raise ValueError(
                "view: expected 'attention' or 'field', got 'rollout', which multiplies probabilities; weights of "
                f"{self.name} are negative, since they are not normalized by a softmax"
            )
        seen = self.total > 0
        share = self.weights / torch.where(seen, self.total, 1.0)[self.target][:, :, None]
        share = share.mean(dim=-1)  # over heads
        leaving = flow[..., self.target, :]
        if self.tied:
            sent = leaving * share[..., 0]
        else:
            sent = torch.einsum("...ef,efk->...ek", leaving, share)
            if sent.shape[-1] != self.keys:
                sent = (sent / self.keys).expand(*sent.shape[:-1], self.keys)
        received = flow.new_zeros(*flow.shape[:-1], self.keys)
        received.index_add_(flow.ndim - 2, self.source, sent)
        if self.lifting or self.keys != self.places.fiber:
            return received
        alone = ~seen.all(dim=-1)  # queries without neighbors keep their whole weight
        return (received + flow) / 2 + flow * alone / 2


@dataclass(frozen=True, eq=False)
class Field:
    """Values ``x`` ``[points, fiber, channels]`` after a layer, and the ``irreps`` of the channels, if there are any.

    For modules without a graph and without irreps, the values are norms over the channels, ``[points, 1, 1]``.
    """

    name: str
    places: Places
    x: Tensor
    irreps: Irreps | None = None


@dataclass(frozen=True, eq=False)
class Recording:
    """Layers of attention and fields, in the order of the forward pass, the input data of the network, its output."""

    attention: tuple[Attention, ...]
    fields: tuple[Field, ...]
    data: Data
    output: Any


class Recorder:
    """Records a network while it is evaluated. Its hooks remain on the network, so pass a copy."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        inner = (m for m in network.modules() if isinstance(m, EquivariantModule))
        self.inner = next((m for m in inner if not isinstance(m, Wrapper | FieldModel)), network)
        self.names = {module: name for name, module in network.named_modules()}
        self.parts = set(self.inner.modules())  # in an ensemble only those of the first network
        named = ((module, name) for module, name in self.names.items() if module in self.parts)
        self.layers = {module: self._short(name) for module, name in named if self._is_layer(module, name)}
        self.heads = {getattr(m, "head", None) for m in network.modules() if isinstance(m, Network)} - {None}
        self._calls: list[tuple[nn.Module, Any]] = []
        self._seen: dict[nn.Module, Attention] = {}
        self._fields: dict[str, Field] = {}
        self._data: Any = None
        for module in network.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def __call__(self, data: Data) -> Recording:
        """Evaluate the network and return the recording. Only the first call of each module is recorded."""
        self._calls, self._seen, self._fields, self._data = [], {}, {}, data
        with torch.no_grad(), watching_weights(self._watch):
            output = self.network(Batch.from_data_list([data]))
            if isinstance(self.inner, AttentiveNet):
                self._fields |= {field.name: field for field in self._gates(self.inner)}
            if isinstance(self.inner, AttentiveNetwork):
                fields = list(self._grids(self.inner))
                self._fields = {field.name: field for field in fields}
        return Recording(tuple(self._seen.values()), tuple(self._fields.values()), self._data, output)

    def _is_layer(self, module: nn.Module, name: str) -> bool:
        parent, _, last = name.rpartition(".")
        owner = self.network.get_submodule(parent)
        if isinstance(owner, nn.ModuleList):
            around = self.network.get_submodule(parent.rpartition(".")[0])
            # The activations within a gate of e3nn are no layers of our networks.
            part = isinstance(self.inner, EquivariantModule) and type(around).__module__.startswith("e3nn.")
            return not part and not isinstance(module, _NOT_LAYERS)
        return owner is self.inner and bool(last) and isinstance(module, GroupAttention)

    def _short(self, name: str) -> str:
        """Return the name of a module without that of the network that wraps it."""
        return name.removeprefix(f"{self.names[self.inner]}.").removesuffix(".attention")

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if inputs and getattr(inputs[0], "pos", None) is not None and not isinstance(inputs[0], PointClouds):
            self._data = inputs[0]
        if module in self.heads and len(inputs) == 2:
            self._keep("last", inputs[0], inputs[1:])
        self._calls.append((module, inputs))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._calls.pop()
        if module in self.layers:
            self._keep(self.layers[module], output, inputs)

    def _keep(self, name: str, output: Any, inputs: Any) -> None:
        if name not in self._fields and (field := self._field(name, output, inputs)) is not None:
            self._fields[name] = field

    def _field(self, name: str, output: Any, inputs: Any) -> Field | None:
        """Return the values of an output at points, or None if it has none."""
        x, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(x, Tensor) or x.ndim not in (2, 3) or not x.is_floating_point():
            return None
        raster = next((one for one in rest if isinstance(one, Raster)), None)
        graph = next(_graphs(inputs), None) if raster is None else raster.lift(self.inner.group, 3)  # type: ignore[arg-type]
        if graph is None or x.ndim == 2:
            clouds = point_clouds(self._data)
            if len(x) != clouds.num_points or x.ndim != 2:
                return None
            irreps = getattr(self.inner, "irreps", None)
            if irreps is not None and irreps.dim == x.shape[1]:
                return Field(name, _places(clouds), _plain(x)[:, None], Irreps(str(irreps)))
            return Field(name, _places(clouds), _plain(x).norm(dim=1)[:, None, None])
        found = self._lifted(graph)
        if len(x) == graph.num_points:
            if isinstance(self.inner, DirectionConvNet) and x.shape[1] == self.inner.edges.fiber:
                x = self.inner.on_frames(x)
            return Field(name, found, _plain(x).unflatten(0, (-1, graph.levels)).flatten(1, 2))
        if graph.kept is None:
            return None
        kept, grid = graph.kept.points.cpu(), graph.kept.clouds.grid
        frames = found.frames if found.frames is None or len(found.frames) == 1 else found.frames[kept]
        return Field(name, Places(_cloud(found.pos[kept], grid), frames), _plain(x))

    def _watch(self, seen: SeenWeights) -> None:
        module = self._calls[-1][0]
        if module in self._seen or module not in self.parts:
            return
        graph = next((g for _, inputs in reversed(self._calls) for g in _graphs(inputs)), None)
        places = _places(point_clouds(self._data)) if graph is None else self._lifted(graph)
        levels = 1 if graph is None else graph.levels
        name, lifting = self._short(self.names[module]), bool(getattr(module, "lifting", False))
        images = None if graph is None else graph.neighbors.images
        if images is not None and seen.neighbors.num_points == images.neighbors.num_points:
            # Rotary phases differ between the periodic images of a point, which are keys of their own.
            points = images.point[seen.neighbors.source]
            seen = seen._replace(neighbors=replace(seen.neighbors, source=points))
        self._seen[module] = _attention(name, places, seen, levels, lifting=lifting)

    def _lifted(self, graph: LiftedGraph) -> Places:
        """Return the points and frames of a graph. Positions in images are in pixels of the input image."""
        if not isinstance(self.inner, AttentiveNetwork) and hasattr(self.inner, "images") and graph.grid is not None:
            side = Raster.read(point_clouds(self._data))[0].sides[0]
            return _places(graph, side / int(graph.grid[0, 0]))
        return _places(graph)

    def _gates(self, network: AttentiveNet) -> Iterator[Field]:
        """Yield the gates of the layers on points, their means over frames of the input and output channels."""
        graph = network.geometry(self._data)
        for name, maps in network.attention_maps(self._data).items():
            if (gate := maps.spatial) is not None:
                gate = gate.mean(dim=(2, 3)) if gate.ndim == 5 else gate
                places = self._lifted(graph) if gate.shape[1] > 1 else Places(_places(graph).clouds)
                yield Field(f"{name} gate", places, _plain(gate))

    def _grids(self, network: AttentiveNetwork) -> Iterator[Field]:
        """Yield the fields after the blocks, and the gates of the layers that have one gate for all channels."""
        data = self._data
        for number, x in enumerate(network.fields(data, network.embedded_vectors(data))):
            yield _on_grid(network, f"block {number}", x)
        for name, maps in network.attention_maps(data).items():
            if (gate := maps.spatial) is not None:
                # Shapes are [images, 1, *sides] (lifting), [images, 1, order, *sides], or one gate per pair of frames.
                dim = network.group.dim
                gate = gate.mean(dim=(1, 3, 4))[:, None] if gate.ndim == 5 + dim else gate
                gate = gate if gate.ndim == 3 + dim else gate[:, :, None]
                yield _on_grid(network, f"{name.removesuffix('.gate')} gate", gate)


def rolled_out(layers: tuple[Attention, ...], flow: Tensor) -> Tensor:
    r"""Roll out attention over layers (Abnar, Zuidema 2020), for queries of the last layer.

    Let A be the mean of the weights of a layer over its heads, a matrix of group elements (point, frame) whose rows sum
    to 1. The rollout is

    .. math::  R = \tilde A_L P_L \tilde A_{L-1} \cdots P_2 \tilde A_1, \qquad \tilde A = (A + I) / 2,

    where half the identity represents the residual connection. It is left out, Ã = A, if keys are features of points
    (lifting). A weight that all frames of a key point share is divided evenly between them. Between layers on different
    points, as after crops and poolings, P maps each point to the nearest ones, in equal shares.

    **Equivariance.** If the weights are equivariant, R(u g, u g') of the transformed cloud equals R(g, g').

    Parameters
    ----------
    layers
        Layers in the order of the forward pass. ValueError is raised if a weight is negative.
    flow
        Share of each element of the last layer in a query, ``[queries, points, fiber]``.

    Returns
    -------
    Tensor
        Weights ``[queries, points, keys]`` over the keys of the first layer. Rows have the same sums as those of
        ``flow``, minus the attention to zeros outside of an image.
    """
    above: Attention | None = None
    for layer in reversed(layers):
        if above is not None:
            flow = _moved_to(layer.places, above.places.pos, flow)
        flow, above = layer.step(flow), layer
    return flow


def pulled_back(before: Field, after: Field, turn: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the field of a transformed cloud, raw and pulled back by the map u, both ``[points, fiber, channels]``.

    Both have the points in the order of ``before``. In the field that is pulled back, the value at g is the one at u g,
    or at the frame of the transformed cloud that is nearest to u g. The result is None if the points of the two fields
    do not match.
    """
    pos, frames = before.places.pos @ turn.mT, before.places.frames
    if after.x.shape[0] != len(pos) or after.x.shape[1:] != before.x.shape[1:]:
        return None
    partner = _partners(pos, after.places.pos)
    if partner is None:
        return None
    x = after.x[partner]
    if before.irreps is not None:
        return x, before.irreps.act(turn.mT.contiguous(), x)
    other = after.places.frames
    if frames is None or other is None:
        return x, x
    wanted = turn @ frames
    there = other if len(other) == 1 else other[partner]
    index = (wanted[:, :, None] - there[:, None]).abs().amax(dim=(-2, -1)).argmin(dim=2)
    return x, x.gather(1, index.expand(len(x), -1)[:, :, None].expand_as(x))


def _partners(pos: Tensor, other: Tensor) -> Tensor | None:
    """Return the index of the same point in ``other`` for each point; None if a point is missing there.

    Points at one place are told apart by their order, if all points have the same order.
    """
    from scipy.spatial import cKDTree

    most = _APART * (float(pos.abs().max()) or 1.0) if len(pos) else 0.0
    if bool(((pos - other).norm(dim=1) <= most).all()):
        return torch.arange(len(pos))
    distance, nearest = cKDTree(other.numpy()).query(pos.numpy())
    return torch.from_numpy(nearest) if float(np.max(distance)) <= most else None


def _moved_to(places: Places, pos: Tensor, flow: Tensor) -> Tensor:
    """Map weights ``[*, points, fiber]`` at ``pos`` to the points of a previous layer."""
    if pos.shape == places.pos.shape and torch.equal(pos, places.pos):
        return flow
    size = 2 * torch.cat([pos, places.pos]).sub(places.pos.mean(dim=0)).norm(dim=1).max()
    moved, rows = flow.new_zeros(*flow.shape[:-2], len(places.pos), flow.shape[-1]), max(1, _PAIRS // len(places.pos))
    for part, weights in zip(pos.split(rows), flow.split(rows, dim=-2), strict=True):
        distance = torch.cdist(part, places.pos)
        nearest = distance <= distance.amin(dim=1, keepdim=True) + _APART * size
        share = nearest / nearest.sum(dim=1, keepdim=True, dtype=flow.dtype)
        moved += torch.einsum("...pf,pq->...qf", weights, share)
    return moved


def _attention(name: str, places: Places, seen: SeenWeights, levels: int, *, lifting: bool) -> Attention:
    """Return the attention of a layer, with weights ``[edges, fiber, keys, heads]``.

    ``levels`` is the number of scales. If points have nodes at several scales, these are treated as frames.
    """
    weights = _plain(seen.weights)
    if seen.pattern == "query_sum":
        weights = weights.mean(dim=2)  # over the query frames that are summed
    elif seen.pattern in ("framewise", "pooled"):
        weights = weights[:, :, None]
    target, source = seen.neighbors.target.cpu(), seen.neighbors.source.cpu()
    if levels > 1:
        edges, fiber, keys, heads = weights.shape
        spread = weights.new_zeros(edges, levels, fiber, levels, keys, heads)
        spread[torch.arange(edges), target % levels, :, source % levels] = weights
        weights = spread.flatten(3, 4).flatten(1, 2)
        target, source = target // levels, source // levels
    total = sums(weights.sum(dim=2), target, len(places.pos))
    inside = source < len(places.pos)  # with zeros at borders there is one more point outside of the image
    tied = seen.pattern == "framewise"
    kept = weights[inside]
    return Attention(name, places, target[inside], source[inside], kept, total, seen.keys * levels, tied, lifting)


def _places(clouds: PointClouds, unit: float = 1.0) -> Places:
    frames, levels = None, 1
    if isinstance(clouds, LiftedGraph) and clouds.fiber * clouds.levels > 1:
        levels, frames = clouds.levels, _plain(clouds.frames)
        frames = frames if frames.ndim == 4 else frames[None]
        if levels > 1:
            scales = _plain(clouds.relative.dilation)[:levels]
            frames = (scales[:, None, None, None] * frames[:1]).flatten(0, 1)[None]
    return Places(_cloud(unit * _plain(clouds.pos[::levels]), clouds.grid), frames)


def _cloud(pos: Tensor, grid: Tensor | None) -> PointClouds:
    batch = torch.zeros(len(pos), dtype=torch.int64)
    return PointClouds(pos=pos, batch=batch, num_clouds=1, grid=None if grid is None else grid.cpu())


def _on_grid(network: AttentiveNetwork, name: str, x: Tensor) -> Field:
    """Return a field ``[1, channels, order, *sides]`` with its pixels as points."""
    group, sides = network.group, tuple(x.shape[3:])
    pos = pixel_positions(*sides, dtype=torch.float64)
    frames = group.elements[None] if x.shape[2] > 1 else None
    return Field(name, Places(_cloud(pos, torch.tensor([sides])), frames), _plain(from_grid(x, group.dim)))


def _graphs(value: Any) -> Iterator[LiftedGraph]:
    """Yield the graphs within nested tuples."""
    if isinstance(value, LiftedGraph):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _graphs(part)


def _plain(x: Any) -> Tensor:
    """Return a tensor in float64 on the CPU."""
    found: Tensor = x.detach().cpu().double()
    return found
