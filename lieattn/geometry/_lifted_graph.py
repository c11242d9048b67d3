"""The lifted point set: all geometry that the layers of a network share, computed once per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from lieattn.geometry._clouds import check_indices
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Neighborhood, find_neighbors
from lieattn.geometry._point_clouds import PointClouds, collate_clouds
from lieattn.geometry._relative import RelativeElements, in_frames
from lieattn.groups import FiniteGroup
from lieattn.spaces import HomogeneousSpace


@dataclass(frozen=True, eq=False, kw_only=True)
class LiftedGraph(PointClouds):
    """Point clouds lifted to a fiber of group elements over each point, with their neighbor lists.

    Over the point x_i stand the elements g_ia. A field on them is a tensor ``[points, fiber, channels]``, and every
    layer is ``layer(x, graph) -> x``. Make one with :func:`lift`.

    Attributes
    ----------
    pos, batch, num_clouds, grid, cell, pbc
        The clouds, see :class:`PointClouds`; ``pos`` are points of the space.
    relative
        Relative elements of all edges.
    log_measure
        ``[edges]``, logarithm of the Haar measure of the source as the target sees it, see :class:`ScaleFrames`; None
        where all weigh the same. It is to be added to the scores of a softmax; where weights are not normalized, its
        exponential multiplies the values.
    levels
        Scales over each point. Nodes are counted point by point, i · levels + k, and are the points of the graph.
    """

    relative: RelativeElements
    log_measure: Tensor | None = None
    levels: int = 1

    @classmethod
    def over(
        cls, clouds: PointClouds, *, log_measure: Tensor | None = None, levels: int = 1, **relative: Any
    ) -> LiftedGraph:
        """Graph over clouds with :class:`RelativeElements` of the given ``space``, ``neighbors`` and so on."""
        found = RelativeElements(pos=clouds.pos, batch=clouds.batch, **relative)
        own = {part.name: getattr(clouds, part.name) for part in fields(PointClouds)}
        return cls(**own, relative=found, log_measure=log_measure, levels=levels)

    @property
    def neighbors(self) -> Neighbors:
        """Neighbor lists, sorted by target, with their transpose."""
        return self.relative.neighbors

    @property
    def space(self) -> HomogeneousSpace:
        """X with its group G."""
        return self.relative.space

    @property
    def group(self) -> FiniteGroup | None:
        """Finite group whose elements are the fiber; None if the frames are not a finite group."""
        return self.relative.group

    @property
    def fiber(self) -> int:
        """Number of elements over each point."""
        return self.relative.fiber

    @property
    def length(self) -> float:
        """Length by which the translations of relative elements are divided."""
        return self.relative.length

    @property
    def frames(self) -> Tensor:
        """Linear parts of the elements, which turn vectors of a frame into space.

        ``[fiber, dim, dim]`` for the same frames over all points, else ``[points, fiber, dim, dim]``.
        """
        relative = self.relative
        if relative.elements is not None:
            return self.space.group.linear(relative.elements)
        matrices = cast(FiniteGroup, relative.group).matrices(self.pos)
        return matrices if relative.pose is None else relative.pose[:, None] @ matrices

    @property
    def elements(self) -> Tensor:
        """``[points, fiber, m, m]``, g_ia."""
        if self.relative.elements is not None:
            return self.relative.elements
        section = self.space.section(self.pos)[:, None]
        if self.space.stabilizer is None:
            return section
        frames = self.space.embed(self.frames)
        return self.space.group.product(section, frames if frames.ndim == 4 else frames[None])

    def frame_positions(self) -> Tensor:
        """Coordinates in each frame, relative to the mean of the cloud and over the length: ``[points, fiber, dim]``.

        Differences of the coordinates of two points of a cloud are :attr:`RelativeElements.positions` where all points
        have the same frames.
        """
        places = self.pos[:, : self.space.group.dim]
        centered = (places - self.mean(places)[self.batch]) / self.length
        if self.relative.tied:
            return in_frames(cast(FiniteGroup, self.group), self.relative.posed(centered))
        inverse = torch.linalg.inv(self.frames.double())
        return (inverse @ centered.double()[:, None, :, None])[..., 0].to(places.dtype)

    def seen_in_frames(self, vectors: Tensor, points: Tensor | None = None) -> Tensor:
        """Components of vectors ``[n, count, dim]`` in orthogonal frames, A_iaᵀ v: ``[n, fiber, count, dim]``.

        The frames of row i stand over the point ``points[i]``, or i if absent.
        """
        pose, group = self.relative.pose, self.group
        if not self.relative.tied or group is None:
            frames = self.frames if points is None else self.frames[points]
            return torch.einsum("paji,pkj->paki", frames, vectors)
        if pose is not None:
            # Turning into the pose of the cloud first leaves the same few matrices for all rows.
            vectors = torch.einsum("pji,pkj->pki", pose if points is None else pose[points], vectors)
        return torch.einsum("aji,pkj->paki", group.matrices(vectors), vectors)

    def spread(self, x: Tensor) -> Tensor:
        """Features of points on all scales alike: ``[points, *]`` to ``[nodes, *]``."""
        return x if self.levels == 1 else x.repeat_interleave(self.levels, dim=0)

    def by_level(self, x: Tensor) -> Tensor:
        """Fields scale by scale: ``[nodes, *]`` to ``[points, levels, *]``."""
        return x.unflatten(0, (-1, self.levels))

    def with_relative(self, relative: RelativeElements) -> LiftedGraph:
        """The same clouds with other relative elements."""
        return replace(self, relative=relative)

    def select_edges(self, kept: Tensor) -> LiftedGraph:
        """The same points with some of the edges, given by their indices ``[kept]`` in ascending order."""
        relative, given = self.relative, self.relative.given
        if given is not None:
            given = given[kept if relative.row is None else relative.row[kept]]
        levels_up, log_measure = (None if x is None else x[kept] for x in (relative.levels_up, self.log_measure))
        selected = replace(relative, neighbors=relative.neighbors.select(kept), given=given, levels_up=levels_up)
        return replace(self, relative=selected, log_measure=log_measure)

    def subset(self, kept: Tensor, neighborhood: Neighborhood) -> LiftedGraph:
        """The points ``kept`` (int64 indices, for example of :func:`farthest_points`) with the elements over them.

        They get neighbor lists of their own, from ``neighborhood``, and keep the length.
        """
        check_indices("kept", kept, dim=1, device=self.device)
        if self.levels > 1:
            raise ValueError("kept: a fiber of scales has no subset; lift the points that are kept")
        pos, batch, dim = self.pos[kept], self.batch[kept], self.space.group.dim
        clouds = PointClouds(pos=pos[:, :dim], batch=batch, num_clouds=self.num_clouds, cell=self.cell, pbc=self.pbc)
        pose, elements = (None if x is None else x[kept] for x in (self.relative.pose, self.relative.elements))
        found = replace(
            self.relative,
            pos=pos,
            batch=batch,
            neighbors=find_neighbors(clouds, neighborhood),
            pose=pose,
            elements=elements,
            given=None,
        )
        return replace(self, pos=pos, batch=batch, grid=None, log_measure=None, relative=found)

    @staticmethod
    def collate(graphs: Sequence[LiftedGraph]) -> LiftedGraph:
        """Disjoint union of graphs of one space with the same kind of frames, in their order.

        Displacements shared between the graphs are not merged again; the index is shifted. ValueError is raised if
        there are no graphs, or they differ in space, group, fiber, length, chart or levels, in dtype, device, or in
        having a raster.
        """
        clouds = collate_clouds("graphs", graphs, ("group", "space", "fiber", "length", "levels", "relative.chart"))
        parts = [graph.relative for graph in graphs]
        measures = [graph.log_measure for graph in graphs if graph.log_measure is not None]
        graph = LiftedGraph.over(
            clouds,
            neighbors=Neighbors.collate([part.neighbors for part in parts]),
            log_measure=torch.cat(measures) if measures else None,
            levels=graphs[0].levels,
            **{name: getattr(parts[0], name) for name in ("space", "length", "group", "chart")},
            **{name: _joined(name, parts) for name in ("pose", "elements", "dilation", "levels_up", "given")},
        )
        _join_rows(graph.relative, parts)
        return graph


def _joined(name: str, parts: Sequence[RelativeElements]) -> Tensor | None:
    values = [getattr(part, name) for part in parts]
    if any((value is None) != (values[0] is None) for value in values):
        raise ValueError(f"graphs: expected {name} of all graphs or of none")
    return None if values[0] is None else torch.cat(values)


def _join_rows(joined: RelativeElements, parts: Sequence[RelativeElements]) -> None:
    """Take over the rows that the graphs have found, and their positions where all have been computed."""
    kept, rows = vars(joined), [part.row for part in parts]
    kept["_rows_known"] = True
    if any(row is not None for row in rows):
        starts = accumulate((part.num_rows for part in parts), initial=0)
        edges = accumulate((part.neighbors.num_edges for part in parts), initial=0)
        own = [p._rows() if row is None else row for p, row in zip(parts, rows, strict=True)]
        kept["_row"] = torch.cat([row + first for row, first in zip(own, starts, strict=False)])
        kept["_representatives"] = torch.cat([p._rows() + first for p, first in zip(parts, edges, strict=False)])
    positions = [part._positions for part in parts]
    if all(position is not None for position in positions):
        kept["_positions"] = torch.cat(cast(list[Tensor], positions))
