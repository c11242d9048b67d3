"""What a network does with a rotated cloud: its fields and attention, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lieattn.geometry import LiftedGraph, PointClouds, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.models import GSAGeometry, GSANet
from lieattn.nn import GroupSelfAttention, LiftingSelfAttention

_IN_GROUP = 1e-6


@dataclass(frozen=True, eq=False)
class View:
    """A cloud after a rotation, with the element of the group that the rotation is, or the nearest one."""

    angle: float
    element: int
    in_group: bool
    data: Any
    geometry: GSAGeometry


def rotated_views(network: GSANet, data: Any, angles: Sequence[float]) -> list[View]:
    if not isinstance(network, GSANet):
        raise TypeError(f"network: expected a GSANet, got {type(network).__name__}")
    if network.group.dim != 2:
        raise ValueError(f"network: expected a group of the plane, got {network.group!r}")
    angles = [float(angle) for angle in angles]
    if not angles or not all(math.isfinite(angle) for angle in angles):
        raise ValueError(f"angles: expected at least one finite angle in radians, got {angles}")
    if getattr(data, "x", None) is None:
        raise TypeError(f"data: expected a torch_geometric Data with x and pos, got {data!r}")
    clouds = point_clouds(data)
    if clouds.num_clouds != 1 or clouds.num_points == 0:
        raise ValueError(
            f"data: expected one cloud with points, got {clouds.num_points} points in {clouds.num_clouds} clouds; "
            f"take one with batch[i]"
        )
    return [rotated_view(network, data, angle) for angle in angles]


def rotated_view(network: GSANet, data: Any, angle: float) -> View:
    group = network.group
    cosine, sine = math.cos(angle), math.sin(angle)
    matrix = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
    distance = (group.elements - matrix).abs().amax(dim=(1, 2))
    # A rotation outside is compared with rotations only: a mirror may be nearer, but would turn the picture over.
    distance[torch.linalg.det(group.elements) < 0] = math.inf
    element = int(distance.argmin())
    in_group = bool(distance[element] < _IN_GROUP)
    if in_group:  # the group's own matrix: its quarter turns are exact
        matrix = group.elements[element]
    parameter = next(network.parameters())
    rotated = copy.copy(data)
    rotated.x = data.x.to(parameter)
    rotated.pos = (data.pos.to("cpu", torch.float64) @ matrix.T).to(parameter)
    rotated = rotated.to(parameter.device)
    return View(angle, element, in_group, rotated, network.geometry(rotated))


def layer_number(network: GSANet, layer: int) -> int:
    blocks = len(network.blocks)
    if not isinstance(layer, int) or not -blocks - 1 <= layer <= blocks:
        raise ValueError(
            f"layer: expected 0 (lifting) to {blocks} (the last block) or {-blocks - 1} to -1, got {layer!r}"
        )
    return layer % (blocks + 1)


def layer_name(layer: int) -> str:
    return f"block {layer}" if layer else "the lifting layer"


def layer_graph(geometry: GSAGeometry, layer: int) -> LiftedGraph:
    """The graph that the attention of a layer works on."""
    return _graph_and_clouds(geometry, layer)[0]


def layer_clouds(geometry: GSAGeometry, layer: int) -> PointClouds:
    """The points that a layer's output lives on, after its crop."""
    return _graph_and_clouds(geometry, layer)[1]


def _graph_and_clouds(geometry: GSAGeometry, layer: int) -> tuple[LiftedGraph, PointClouds]:
    if not layer:
        return geometry.lifting, geometry.lifting
    step = [step for stage in geometry.stages for step in stage][layer - 1]
    return step.graph, step.clouds


def layer_field(network: GSANet, view: View, layer: int) -> Tensor:
    with _observed(network):
        return network.features(view.data.x, view.geometry)[layer].cpu()


def layer_attention(network: GSANet, view: View, layer: int, point: int, head: int | None) -> Tensor:
    """Weights ``[points, fiber]`` of the keys of one query."""
    block: Any = network.blocks[layer - 1] if layer else None
    attention: LiftingSelfAttention | GroupSelfAttention = block.attention if layer else network.lifting
    check_choice("head", head, attention.heads)
    seen: list[tuple[Tensor, LiftedGraph]] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    try:
        with _observed(network):
            network.features(view.data.x, view.geometry)
    finally:
        hook.remove()
    x, graph = seen[0]
    with _observed(network):
        weights = attention.attend(x, graph, return_weights=True)[1]
    first, end = graph.neighbors.row_ptr[point : point + 2].tolist()
    if weights is None or first == end:
        raise ValueError(f"point: {point} has no neighbors in {layer_name(layer)}")
    by_key = weights[first:end].sum(dim=(2, 3))  # [neighbors, fiber, heads]
    by_key = (by_key / by_key.sum(dim=0)).cpu()
    dense = by_key.new_zeros(graph.num_points, by_key.shape[1])
    dense[neighbor_keys(graph, point)] = by_key.mean(dim=-1) if head is None else by_key[..., head]
    return dense


@contextmanager
def _observed(network: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def stabilized(fields: Tensor, views: Sequence[View], group: FiniteGroup) -> Tensor:
    """Fields ``[views, points, fiber, channels]`` with the fiber of each permuted back."""
    pairs = zip(fields, views, strict=True)
    return torch.stack([group.translate(int(group.inverse_index[view.element]), field) for field, view in pairs])


def query_point(graph: LiftedGraph, point: int | None) -> int:
    if point is None:
        return int((graph.pos - graph.pos.mean(dim=0)).norm(dim=1).argmin())
    if not 0 <= point < graph.num_points:
        raise ValueError(f"point: expected one of the layer's points 0..{graph.num_points - 1}, got {point}")
    return point


def neighbor_keys(graph: LiftedGraph, point: int) -> Tensor:
    first, end = graph.neighbors.row_ptr[point : point + 2].tolist()
    return graph.neighbors.source[first:end].cpu()


def check_choice(name: str, choice: int | None, count: int) -> None:
    if choice is not None and not 0 <= choice < count:
        raise ValueError(f"{name}: expected one of 0..{count - 1} or None, got {choice}")
