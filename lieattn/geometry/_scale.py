"""Dilations: point clouds lifted to a truncated fiber of scales, times the frames of a finite group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_count, check_floating, check_length
from lieattn.geometry._lifted_graph import find_neighbors, in_frames
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Radius
from lieattn.geometry._point_clouds import PointClouds, collate_clouds, point_clouds
from lieattn.groups import FiniteGroup, check_group


@dataclass(frozen=True)
class ScaleFiber:
    """Scales s_k = first · base^k for k = 0 ... levels - 1: a truncated piece of the group of dilations by base.

    Parameters
    ----------
    base
        Ratio of neighboring scales, above 1.
    levels
        How many there are.
    first
        The finest scale.
    """

    base: float = 2.0
    levels: int = 3
    first: float = 1.0

    def __post_init__(self) -> None:
        check_length("base", self.base)
        check_length("first", self.first)
        check_count("levels", self.levels)
        if self.base <= 1:
            raise ValueError(f"base: expected a ratio above 1, got {self.base}")
        check_length("the coarsest scale, first * base^(levels - 1)", self.factors[-1])

    @property
    def factors(self) -> list[float]:
        """s_k of each level."""
        return [float(self.first) * float(self.base) ** k for k in range(self.levels)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledGraph(PointClouds):
    """Point clouds lifted to elements (x_i, h_a, s_k): a node for every point and scale, the frames over each node.

    Nodes are counted point by point, i · levels + k. A field is a tensor ``[nodes, fiber, channels]``, and for
    every layer that sees relative elements alone this is a graph like any other: see :func:`lift_scales`.

    Attributes
    ----------
    pos, batch, num_clouds, grid, cell, pbc
        The clouds of nodes, see :class:`PointClouds`; each point is there once for every scale.
    group, scales
        H and the scales.
    neighbors
        Neighbor lists of the nodes.
    scale
        Radius of the neighborhoods at scale 1.
    relative_positions
        ``[edges, fiber, dim]``, h_a⁻¹ (x_j - x_i) / (s_k scale): seen from the frame and on the scale of the target.
    scale_offset
        ``[edges]`` int64, l - k, the steps from the scale of the target to that of the source.
    log_haar
        ``[edges]``, logarithm of the measure of the source as the target sees it, see :func:`lift_scales`.
    """

    group: FiniteGroup
    scales: ScaleFiber
    neighbors: Neighbors
    scale: float
    relative_positions: Tensor
    scale_offset: Tensor
    log_haar: Tensor

    @property
    def frames(self) -> Tensor:
        """Matrices h_a of the frames, the same over every node: ``[fiber, dim, dim]``."""
        return self.group.matrices(self.pos)

    @property
    def relative_coordinates(self) -> Tensor:
        """Relative positions, entries of h_a⁻¹ h_b, and l - k: ``[edges, fiber, fiber, dim + dim² + 1]``."""
        frames = self.group.elements[self.group.relative_index].to(self.relative_positions).flatten(-2)
        pairs = (len(self.relative_positions), *frames.shape[:2])
        offset = self.scale_offset.to(self.relative_positions)[:, None, None, None]
        position = self.relative_positions[:, :, None].expand(*pairs, -1)
        return torch.cat([position, frames.expand(*pairs, -1), offset.expand(*pairs, -1)], dim=-1)

    def spread(self, x: Tensor) -> Tensor:
        """Features of points on all scales alike: ``[points, *]`` to ``[nodes, *]``."""
        return x.repeat_interleave(self.scales.levels, dim=0)

    def by_level(self, x: Tensor) -> Tensor:
        """Fields scale by scale: ``[nodes, *]`` to ``[points, levels, *]``."""
        return x.unflatten(0, (-1, self.scales.levels))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ScaledGraph:
        """Same graph on another device."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ScaledGraph:
        """Same graph in page-locked memory, from which copies to a GPU overlap with work."""
        return self._map(lambda part: part.pin_memory())

    def astype(self, dtype: torch.dtype) -> ScaledGraph:
        """Same graph with its coordinates rounded to a floating dtype."""
        check_floating("dtype", dtype)
        names = ("pos", "relative_positions", "log_haar")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def _map(self, move: Callable[[Any], Any]) -> ScaledGraph:
        moved = {
            field.name: move(value) if isinstance(value := getattr(self, field.name), Tensor | Neighbors) else value
            for field in fields(self)
        }
        return ScaledGraph(**moved)

    @staticmethod
    def collate(graphs: Sequence[ScaledGraph]) -> ScaledGraph:
        """Disjoint union of graphs over the same group and scales, in their order; ValueError if they differ."""
        clouds = collate_clouds("graphs", graphs, ("group", "scales", "scale"))
        return ScaledGraph(
            **{field.name: getattr(clouds, field.name) for field in fields(PointClouds)},
            group=graphs[0].group,
            scales=graphs[0].scales,
            scale=graphs[0].scale,
            neighbors=Neighbors.collate([graph.neighbors for graph in graphs]),
            relative_positions=torch.cat([graph.relative_positions for graph in graphs]),
            scale_offset=torch.cat([graph.scale_offset for graph in graphs]),
            log_haar=torch.cat([graph.log_haar for graph in graphs]),
        )


def lift_scales(
    points: Any,
    group: FiniteGroup,
    radius: float,
    scales: ScaleFiber,
    *,
    reach: int = 1,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    volumes: Tensor | None = None,
) -> ScaledGraph:
    r"""Lift point clouds to R^d ⋊ (H x dilations), truncated: elements (x_i, h_a, s_k) with s_k from a finite fiber.

    The element (x_i, h_a, s_k) sees all (x_j, h_b, s_l) with \|x_j - x_i\| ≤ radius · s_k and \|l - k\| ≤ reach: the
    neighborhood grows with the element. What it sees of them are the coordinates of g⁻¹ g', which are
    (h_a⁻¹ (x_j - x_i) / s_k, h_a⁻¹ h_b, l - k).

    **Measure.** The Haar measure of the group is dx dh ds / s^(d + 1): on scales in geometric progression, a point
    that stands for the volume ω has ω / s^d. This is the factor 1/\|h\| of GSA-Nets' Eqs. 20 and 21. The target is
    to see a function of the relative element alone, so without ``volumes`` the source (j, l) has the measure
    (s_l / s_k)^-d: under a softmax that is the same, since what belongs to the target cancels. With ``reach=0``, which
    is lifting (Eq. 20), it is 1. With ``volumes`` it is ω_j / s_l^d, which does not change if the cloud and with
    it the volumes are dilated. Its logarithm, ``graph.log_haar``, is to be added to the scores of a softmax; where
    weights are not normalized, its exponential multiplies the values.

    **Equivariance.** To R^d ⋊ H exactly. Dilating the cloud by base moves a field up by one scale: out(k + 1) of
    the larger cloud is out(k) of the smaller one, for all scales that see no end of the fiber. A lifting layer
    sees none; every further layer sees ``reach`` more scales, so after lifting and n layers this is exact for
    n reach ≤ k and k + 1 ≤ levels - 1 - n reach. Nearer to the ends keys are missing; docs/exactness.md has the
    error measured. Dilations by other factors are as wrong as turns between the elements of H are.

    Parameters
    ----------
    points
        Point clouds in any of the forms that :func:`point_clouds` takes.
    group
        H, orthogonal; ``trivial(dim)`` for dilations alone.
    radius
        Of the neighborhoods on the scale 1.
    scales
        The fiber of scales.
    reach
        How many scales up and down an element sees.
    batch, ptr, mask, cell, pbc
        See :func:`point_clouds`.
    volumes
        ``[points]`` positive: what part of space each point stands for.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as above, or the group does not preserve distances or has another dimension.
    """
    check_group("group", group)
    check_length("radius", radius)
    check_count("reach", reach, least=0)
    if not isinstance(scales, ScaleFiber):
        raise TypeError(f"scales: expected a ScaleFiber, got {scales!r}")
    clouds = point_clouds(points, batch=batch, ptr=ptr, mask=mask, cell=cell, pbc=pbc)
    dim = clouds.pos.shape[1]
    if group.dim != dim or not group.is_orthogonal:
        raise ValueError(f"group: expected an orthogonal group that acts on {dim} coordinates, got {group!r}")
    edges = _edges(clouds, radius, scales, reach)
    log_haar = -dim * math.log(scales.base) * edges.offset.to(clouds.pos.dtype)
    if volumes is not None:
        sizes = torch.tensor(scales.factors, dtype=torch.float64, device=clouds.device).log()
        log_haar = _checked_volumes(volumes, clouds).log()[edges.point] - dim * sizes[edges.level + edges.offset]
        log_haar = log_haar.to(clouds.pos.dtype)
    seen = in_frames(group, edges.displacement) / radius
    return ScaledGraph(
        pos=clouds.pos.repeat_interleave(scales.levels, dim=0),
        batch=clouds.batch.repeat_interleave(scales.levels),
        num_clouds=clouds.num_clouds,
        cell=clouds.cell,
        pbc=clouds.pbc,
        group=group,
        scales=scales,
        neighbors=edges.neighbors,
        scale=float(radius),
        relative_positions=seen,
        scale_offset=edges.offset,
        log_haar=log_haar,
    )


@dataclass(frozen=True, eq=False)
class _Edges:
    """Edges between nodes, in the order of their lists."""

    neighbors: Neighbors
    displacement: Tensor  # [edges, dim], (x_j - x_i) / s_k
    level: Tensor  # k of the target
    offset: Tensor  # l - k
    point: Tensor  # j


def _edges(clouds: PointClouds, radius: float, scales: ScaleFiber, reach: int) -> _Edges:
    """Edges of all scales."""
    levels, nodes = scales.levels, clouds.num_points * scales.levels
    parts: list[tuple[Tensor, ...]] = []
    for k, factor in enumerate(scales.factors):
        found = find_neighbors(clouds, Radius(radius * factor))
        seen = found.displacements(clouds.pos) / factor
        shift = torch.zeros_like(seen) if found.shift is None else found.shift
        for step in range(max(-reach, -k), min(reach, levels - 1 - k) + 1):
            keys = (found.target * levels + k) * nodes + found.source * levels + k + step
            counts = torch.tensor([k, step], device=keys.device).expand(len(keys), 2)
            parts.append((keys, seen, shift, counts, found.source))
    keys, seen, shift, counts, point = (torch.cat(column) for column in zip(*parts, strict=True))
    order = keys.argsort(stable=True)
    neighbors = Neighbors.from_keys(keys[order], nodes)
    if clouds.cell is not None:
        neighbors = replace(neighbors, shift=shift[order])
    level, offset = counts[order].unbind(1)
    return _Edges(neighbors, seen[order], level, offset, point[order])


def _checked_volumes(volumes: Tensor, clouds: PointClouds) -> Tensor:
    if not isinstance(volumes, Tensor) or volumes.shape != (clouds.num_points,) or volumes.device != clouds.device:
        shape = tuple(volumes.shape) if isinstance(volumes, Tensor) else type(volumes).__name__
        raise ValueError(f"volumes: expected [points={clouds.num_points}] on {clouds.device}, got {shape}")
    bad = ~(torch.isfinite(volumes) & (volumes > 0))
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(f"volumes: expected positive numbers, got {float(volumes[first])} for point {first}")
    return volumes.double()
