"""What a network does with a rotated cloud: its fields and attention, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lieattn.certify import moved
from lieattn.geometry import LiftedGraph, PointClouds, point_clouds
from lieattn.groups import SO, FiniteGroup
from lieattn.models import GSAGeometry, GSANet

_IN_GROUP = 1e-6


@dataclass(frozen=True, eq=False)
class View:
    """A cloud after a rotation, with the element of the group that the rotation is, or the nearest one."""

    angle: float
    element: int
    in_group: bool
    data: Any
    geometry: GSAGeometry

    def graph(self, layer: int) -> LiftedGraph:
        """The graph that the attention of a layer works on."""
        return self._steps[layer - 1].graph if layer else self.geometry.lifting

    def clouds(self, layer: int) -> PointClouds:
        """The points that a layer's output lives on, after its crop."""
        return self._steps[layer - 1].clouds if layer else self.geometry.lifting

    @property
    def _steps(self) -> list[Any]:
        return [step for stage in self.geometry.stages for step in stage]

    def keys(self, layer: int, point: int) -> Tensor:
        """The neighbors of a point."""
        neighbors = self.graph(layer).neighbors
        first, end = neighbors.row_ptr[point : point + 2].tolist()
        return neighbors.source[first:end].cpu()


class Observer:
    """Views of one cloud under rotations, and what a layer of a network makes of them.

    Parameters
    ----------
    network, data, angles, layer
        See :func:`lieattn.viz.feature_fields`.
    """

    def __init__(self, network: GSANet, data: Any, angles: Sequence[float], layer: int) -> None:
        if not isinstance(network, GSANet):
            raise TypeError(f"network: expected a GSANet, got {type(network).__name__}")
        if network.group is None or network.group.dim != 2:
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
        blocks = len(network.blocks)
        if not isinstance(layer, int) or not -blocks - 1 <= layer <= blocks:
            raise ValueError(
                f"layer: expected 0 (lifting) to {blocks} (the last block) or {-blocks - 1} to -1, got {layer!r}"
            )
        self.network, self.data, self.layer = network, data, layer % (blocks + 1)
        self.group: FiniteGroup = network.group
        self.views = [self.view(angle) for angle in angles]

    @property
    def name(self) -> str:
        """Name of the layer."""
        return f"block {self.layer}" if self.layer else "the lifting layer"

    def view(self, angle: float) -> View:
        """The cloud after a rotation."""
        matrix = SO(2).exp(torch.tensor([angle], dtype=torch.float64))
        distance = (self.group.elements - matrix).abs().amax(dim=(1, 2))
        # A rotation outside is compared with rotations only: a mirror may be nearer, but would turn the picture over.
        distance[torch.linalg.det(self.group.elements) < 0] = math.inf
        element = int(distance.argmin())
        in_group = bool(distance[element] < _IN_GROUP)
        # The group's own matrix where there is one: its quarter turns are exact.
        rotated = moved(self.data, self.group.elements[element] if in_group else matrix)
        parameter = next(self.network.parameters())
        rotated.x, rotated.pos = self.data.x.to(parameter), rotated.pos.to(parameter)
        rotated = rotated.to(parameter.device)
        return View(angle, element, in_group, rotated, self.network.geometry(rotated))

    def fields(self) -> Tensor:
        """``[views, points, fiber, channels]`` on the CPU."""
        with observed(self.network):
            found = [self.network.features(view.data.x, view.geometry)[self.layer].cpu() for view in self.views]
        return torch.stack(found)

    def attention(self, point: int, head: int | None) -> Tensor:
        """Weights ``[views, points, fiber]`` of the keys of one query, normalized to 1."""
        layer: Any = self.network.blocks[self.layer - 1].attention if self.layer else self.network.lifting
        check_choice("head", head, layer.heads)
        return torch.stack([self._attention(layer, view, point, head) for view in self.views])

    def _attention(self, layer: Any, view: View, point: int, head: int | None) -> Tensor:
        seen: list[tuple[Tensor, LiftedGraph]] = []
        with observed(self.network), layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs)):
            self.network.features(view.data.x, view.geometry)
            weights = layer.weights(*seen[0])
        graph = seen[0][1]
        first, end = graph.neighbors.row_ptr[point : point + 2].tolist()
        if first == end:
            raise ValueError(f"point: {point} has no neighbors in {self.name}")
        by_key = weights[first:end].sum(dim=(2, 3))  # [neighbors, fiber, heads]
        by_key = (by_key / by_key.sum(dim=0)).cpu()
        dense = by_key.new_zeros(graph.num_points, by_key.shape[1])
        dense[view.keys(self.layer, point)] = by_key.mean(dim=-1) if head is None else by_key[..., head]
        return dense

    def stabilized(self, fields: Tensor) -> Tensor:
        """Fields ``[views, points, fiber, channels]`` with the fiber of each permuted back."""
        back = [int(self.group.inverse_index[view.element]) for view in self.views]
        return torch.stack([self.group.translate(h, field) for h, field in zip(back, fields, strict=True)])


@contextmanager
def observed(network: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def query_point(graph: LiftedGraph, point: int | None) -> int:
    """The point that is asked for, or the one nearest to the center."""
    if point is None:
        return int((graph.pos - graph.pos.mean(dim=0)).norm(dim=1).argmin())
    if not 0 <= point < graph.num_points:
        raise ValueError(f"point: expected one of the layer's points 0..{graph.num_points - 1}, got {point}")
    return point


def check_choice(name: str, choice: int | None, count: int) -> None:
    """Raise ValueError for what is no index below a count."""
    if choice is not None and not 0 <= choice < count:
        raise ValueError(f"{name}: expected one of 0..{count - 1} or None, got {choice}")
