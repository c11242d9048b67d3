"""Frames of a finite group on several scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lieattn._core.checks import (
    check_count,
    check_is,
    check_length,
)
from lieattn.geometry._clouds import PointClouds, point_weights
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Neighborhood, find_neighbors, scaled, smooth_cutoff
from lieattn.groups import FiniteGroup, check_group, trivial
from lieattn.spaces import Euclidean, HomogeneousSpace


@dataclass(frozen=True)
class ScaleFrames:
    r"""The elements of a finite group on several scales: :math:`h_a s_k` with :math:`s_k = first \cdot base^k`.

    The scales are a finite part of the dilations by powers of ``base``. The lifted graph has one node for each point
    and scale, with the index i · levels + k, and the frames h_a over it. The element (x_i, h_a, s_k) attends to all
    (x_j, h_b, s_l) with \|l - k\| ≤ ``reach`` for which x_j is in the neighborhood of x_i. The neighborhood that is
    passed to :func:`lift` is scaled by s_k. The coordinates of g⁻¹ g' are (h_a⁻¹ (x_j - x_i) / s_k, h_a⁻¹ h_b, l - k).

    **Measure.** The Haar measure is dx dh ds / s^(d + 1). A point that represents the volume ω therefore has the
    measure ω / s^d, which contains the factor 1/\|h\| of Eqs. 20 and 21 of GSA-Nets. If volumes are given, as the
    ``weights`` of :func:`lift`, the source (j, l) has the measure ω_j / s_l^d, which does not change if the cloud and
    its volumes are dilated. Otherwise it has the measure (s_l / s_k)^-d, which depends only on the relative element and
    gives the same softmax. With ``reach=0``, which is lifting (Eq. 20), it is 1.

    **Equivariance.** Exact for R^d ⋊ H. Dilating a cloud by ``base`` shifts a field by one scale: the output of the
    larger cloud on scale k + 1 is that of the smaller cloud on scale k, unless it depends on scales beyond the first or
    last one. Lifting layers do not mix scales, and each further layer reaches ``reach`` scales more. After lifting and
    n layers, the equation is therefore exact for n reach ≤ k and k + 1 ≤ levels - 1 - n reach. Nearer to the ends, some
    keys are missing: see docs/exactness.md. For dilations by other factors, errors are as large as for rotations
    between the elements of H. Rotary encodings and edge networks read positions that are not divided by the scale, so
    dilations do not shift the output of layers with them.

    Parameters
    ----------
    group
        The group H, which must be orthogonal; use ``trivial(dim)`` for dilations alone.
    base, levels, first
        The ratio of adjacent scales, above 1; the number of scales; and the smallest scale, s_0.
    reach
        Largest difference \|l - k\| between the scales of a query and a key.
    """

    group: FiniteGroup
    base: float = 2.0
    levels: int = 3
    first: float = 1.0
    reach: int = 1

    def __post_init__(self) -> None:
        check_group("group", self.group)
        check_length("base", self.base)
        check_length("first", self.first)
        check_count("levels", self.levels)
        check_count("reach", self.reach, least=0)
        if self.base <= 1:
            raise ValueError(f"base: expected a ratio above 1, got {self.base}")
        if not self.group.is_orthogonal:
            raise ValueError(f"group: expected an orthogonal group, got {self.group!r}")
        check_length("the coarsest scale, first * base^(levels - 1)", self.factors[-1])

    @property
    def factors(self) -> list[float]:
        """The scale s_k of each level."""
        return [float(self.first) * float(self.base) ** k for k in range(self.levels)]

    def __call__(
        self,
        clouds: PointClouds,
        neighborhood: Neighborhood,
        space: HomogeneousSpace,
        length: float,
        volumes: Tensor | None = None,
    ) -> LiftedGraph:
        """Return the graph of the nodes, for neighborhood and length on scale 1, and positive ``volumes`` [points]."""
        check_is("clouds", clouds, PointClouds)
        dim, levels = clouds.pos.shape[1], self.levels
        if self.group.dim != dim:
            raise ValueError(f"points: {self.group.name} acts on {self.group.dim} coordinates, got points with {dim}")
        if not isinstance(space, Euclidean):
            raise ValueError(f"space: expected a Euclidean space for ScaleFrames, got {space!r}")
        (space.stabilizer or trivial(dim)).check("frames", self.group.matrices(clouds.pos))
        nodes = clouds.num_points * levels
        parts = []
        for k, factor in enumerate(self.factors):
            found = find_neighbors(clouds, scaled(neighborhood, factor))
            shift = clouds.pos.new_zeros(found.num_edges, dim) if found.shift is None else found.shift
            for step in range(max(-self.reach, -k), min(self.reach, levels - 1 - k) + 1):
                parts.append(((found.target * levels + k) * nodes + found.source * levels + k + step, shift))
        keys, shift = (torch.cat(column) for column in zip(*parts, strict=True))
        order = keys.argsort(stable=True)
        neighbors = Neighbors.from_keys(keys[order], nodes)
        if clouds.cell is not None:
            neighbors = replace(neighbors, shift=shift[order])
        level = neighbors.source % levels
        levels_up = level - neighbors.target % levels
        log_measure = -dim * math.log(self.base) * levels_up.to(clouds.pos.dtype)
        factors = torch.tensor(self.factors, dtype=torch.float64, device=clouds.device)
        if volumes is not None:
            log_volumes = point_weights(volumes, clouds.pos, positive=True).log()
            log_measure = log_volumes[neighbors.source // levels] - dim * factors.log()[level]
        pos, batch = (x.repeat_interleave(levels, dim=0) for x in (clouds.pos, clouds.batch))
        return LiftedGraph.over(
            replace(clouds, pos=pos, batch=batch, grid=None, edge_index=None, each=None),
            space=space,
            neighbors=neighbors,
            length=length,
            cutoff=smooth_cutoff(neighborhood),
            group=self.group,
            dilation=factors.to(pos.dtype).repeat(clouds.num_points),
            levels_up=levels_up,
            log_measure=log_measure.to(pos.dtype),
            levels=levels,
        )
