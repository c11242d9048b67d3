"""Dilations: point clouds lifted to a truncated fiber of scales, times the frames of a finite group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lieattn._checks import check_count, check_length
from lieattn.geometry._clouds import point_weights
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Neighborhood, find_neighbors, scaled
from lieattn.geometry._point_clouds import PointClouds
from lieattn.groups import FiniteGroup, check_group
from lieattn.spaces import HomogeneousSpace


@dataclass(frozen=True)
class ScaleFrames:
    r"""The elements of a finite group on several scales: :math:`h_a s_k` with :math:`s_k = first \cdot base^k`.

    The scales are a truncated piece of the group of dilations by ``base``. A graph lifted to them has a node for every
    point and scale, i · levels + k, with the frames h_a over each node. The element (x_i, h_a, s_k) sees all
    (x_j, h_b, s_l) with x_j in its neighborhood, which grows with s_k, and \|l - k\| ≤ reach. What it sees of them are
    the coordinates of g⁻¹ g', which are (h_a⁻¹ (x_j - x_i) / s_k, h_a⁻¹ h_b, l - k).

    **Measure.** The Haar measure of the group is dx dh ds / s^(d + 1): on scales in geometric progression, a point
    that stands for the volume ω has ω / s^d. This is the factor 1/\|h\| of GSA-Nets' Eqs. 20 and 21. The target is
    to see a function of the relative element alone, so without volumes the source (j, l) has the measure
    (s_l / s_k)^-d: under a softmax that is the same, since what belongs to the target cancels. With ``reach=0``, which
    is lifting (Eq. 20), it is 1. With volumes, the ``weights`` of :func:`lift`, it is ω_j / s_l^d, which does not
    change if the cloud and with it the volumes are dilated.

    **Equivariance.** To R^d ⋊ H exactly. Dilating the cloud by base moves a field up by one scale: out(k + 1) of
    the larger cloud is out(k) of the smaller one, for all scales that see no end of the fiber. A lifting layer
    sees none; every further layer sees ``reach`` more scales, so after lifting and n layers this is exact for
    n reach ≤ k and k + 1 ≤ levels - 1 - n reach. Nearer to the ends keys are missing; docs/exactness.md has the
    error measured. Dilations by other factors are as wrong as turns between the elements of H are.

    H is orthogonal, ``trivial(dim)`` for dilations alone. There are ``levels`` scales with the ratio ``base``, above 1;
    on the scale 1 the neighborhood is as it is given.
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
        """s_k of each level."""
        return [float(self.first) * float(self.base) ** k for k in range(self.levels)]

    def __call__(
        self,
        clouds: PointClouds,
        neighborhood: Neighborhood,
        space: HomogeneousSpace,
        length: float,
        volumes: Tensor | None = None,
    ) -> LiftedGraph:
        """Graph of the nodes over clouds, with the neighborhood and the length on the scale 1: see :func:`lift`.

        The ``volumes`` ``[points]``, positive, say what part of space each point stands for.
        """
        dim = clouds.pos.shape[1]
        if self.group.dim != dim:
            raise ValueError(f"points: {self.group.name} acts on {self.group.dim} coordinates, got points with {dim}")
        neighbors, level, levels_up, point = self._edges(clouds, neighborhood)
        log_measure = -dim * math.log(self.base) * levels_up.to(clouds.pos.dtype)
        factors = torch.tensor(self.factors, dtype=torch.float64, device=clouds.device)
        if volumes is not None:
            log_measure = point_weights(volumes, clouds.pos, positive=True).log()[point]
            log_measure = (log_measure - dim * factors.log()[level + levels_up]).to(clouds.pos.dtype)
        pos, batch = (x.repeat_interleave(self.levels, dim=0) for x in (clouds.pos, clouds.batch))
        return LiftedGraph.over(
            replace(clouds, pos=pos, batch=batch, grid=None),
            space=space,
            neighbors=neighbors,
            length=length,
            group=self.group,
            dilation=factors.to(pos.dtype).repeat(clouds.num_points),
            levels_up=levels_up,
            log_measure=log_measure,
            levels=self.levels,
        )

    def _edges(self, clouds: PointClouds, neighborhood: Neighborhood) -> tuple[Neighbors, Tensor, Tensor, Tensor]:
        """Edges between nodes of all scales, and for each the level of the target, the levels up, and the source."""
        levels, nodes = self.levels, clouds.num_points * self.levels
        parts: list[tuple[Tensor, ...]] = []
        for k, factor in enumerate(self.factors):
            found = find_neighbors(clouds, scaled(neighborhood, factor))
            shift = clouds.pos.new_zeros(found.num_edges, clouds.pos.shape[1]) if found.shift is None else found.shift
            for step in range(max(-self.reach, -k), min(self.reach, levels - 1 - k) + 1):
                keys = (found.target * levels + k) * nodes + found.source * levels + k + step
                counts = torch.tensor([k, step], device=keys.device).expand(len(keys), 2)
                parts.append((keys, shift, counts, found.source))
        keys, shift, counts, point = (torch.cat(column) for column in zip(*parts, strict=True))
        order = keys.argsort(stable=True)
        neighbors = Neighbors.from_keys(keys[order], nodes)
        if clouds.cell is not None:
            neighbors = replace(neighbors, shift=shift[order])
        level, levels_up = counts[order].unbind(1)
        return neighbors, level, levels_up, point[order]
