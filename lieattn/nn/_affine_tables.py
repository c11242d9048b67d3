"""What psi and beta of Affine Self Convolution are: tables of offsets, or networks of the displacement.

Both are functions of the relative element u = (h_a⁻¹(x_j - x_i), h_a⁻¹ h_b) alone: psi of all of it, beta of the
displacement. A *position* is a value that says which of the two a layer uses and finds the edges it needs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lieattn._checks import check_count, check_length
from lieattn.geometry import LiftedGraph, Neighbors
from lieattn.groups import FiniteGroup
from lieattn.nn._affine_maps import AffineMap, AxisKeys, AxisTable, AxisWaves, TableMap, WaveMap

Border = Literal["mask", "zero"]


@dataclass(frozen=True, eq=False)
class AffineEdges:
    """Edges with the row of the tables that each of them reads.

    Attributes
    ----------
    neighbors
        Neighbor lists; with ``ghost`` they have one point more than the graph, the last one, without neighbors of
        its own, which stands wherever a window has no point.
    index
        ``[edges]`` int64 rows of the tables; None: row e belongs to edge e.
    ghost
        Whether there is such a point.
    """

    neighbors: Neighbors
    index: Tensor | None
    ghost: bool = False


@dataclass(frozen=True)
class OffsetTable:
    """A trainable value for every offset of a window: for grids, where offsets repeat (the papers).

    The table has a row for each distinct h⁻¹ o, o one of the offsets and h in H: the offsets themselves where the
    group maps the window to itself, more of them otherwise, so that it is equivariant for every H. Rows are looked up
    once a graph and permuted by integers.

    Attributes
    ----------
    offsets
        Displacements x_j - x_i that occur, in the units of the points. :meth:`square` makes those of k x k pixels.
        They must be those of the graph's neighborhood: ``OffsetTable.square(5)`` with ``PixelSquare(5)``.
    border
        What a window sees where there is no point: ``"mask"`` nothing, so that the softmax is over fewer neighbors;
        ``"zero"`` an embedding of zero, so that beta alone takes part in the softmax.
    tolerance
        How far a displacement may be from its row, in the units of the points.
    """

    offsets: tuple[tuple[float, ...], ...]
    border: Border = "mask"
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.border not in get_args(Border):
            raise ValueError(f"border: expected one of {get_args(Border)}, got {self.border!r}")
        check_length("tolerance", self.tolerance)
        lengths = {len(offset) for offset in self.offsets}
        if len(lengths) != 1 or not all(math.isfinite(c) for offset in self.offsets for c in offset):
            raise ValueError(
                f"offsets: expected at least one finite displacement, all of one dimension, got {self.offsets!r}"
            )

    @classmethod
    def square(cls, size: int, *, dim: int = 2, spacing: float = 1.0, border: Border = "mask") -> OffsetTable:
        """Window of size x size pixels (in 3D, size³ voxels) around a point; ``size`` is odd."""
        check_count("size", size)
        check_count("dim", dim)
        check_length("spacing", spacing)
        if size % 2 == 0:
            raise ValueError(f"size: expected an odd number, since an even window has no center, got {size}")
        steps = [spacing * (step - size // 2) for step in range(size)]
        return cls(tuple(itertools.product(steps, repeat=dim)), border, 1e-3 * spacing)

    @classmethod
    def of(cls, offsets: Tensor, *, border: Border = "mask", tolerance: float = 1e-3) -> OffsetTable:
        """Window with the displacements ``[offsets, dim]``."""
        return cls(tuple(tuple(offset) for offset in offsets.tolist()), border, tolerance)

    def affine_map(self, group: FiniteGroup, channels: int, *, lifting: bool = False) -> AffineMap:
        """A new affine map; for ``lifting`` there is one key frame."""
        rows, turned = _rows(self, group)
        distance, zero = rows.norm(dim=1).min(dim=0)
        return TableMap(group, channels, lifting, turned, int(zero) if distance <= self.tolerance else None)

    def axis_keys(self, group: FiniteGroup, heads: int, channels: int) -> AxisKeys:
        """New keys made of the coordinates, ``channels`` for each head."""
        return AxisTable(heads, channels, *_rows(self, group), self.tolerance)

    def edges(self, graph: LiftedGraph) -> AffineEdges:
        """Edges of a graph and their rows; found once and remembered as long as the graph exists.

        Raises
        ------
        ValueError
            If a displacement is not in the table.
        """
        known = _EDGES.setdefault(graph, {})
        if self not in known:
            # What is remembered must serve training, even if it was found in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                known[self] = self._find(graph)
        return known[self]

    def _find(self, graph: LiftedGraph) -> AffineEdges:
        rows = _rows(self, graph.group)[0].to(graph.device)
        seen = graph.relative_positions[:, graph.group.identity_index].detach().to(torch.float64) * graph.scale
        distance, row = torch.cdist(seen, rows).min(dim=-1)
        if len(distance) and distance.max() > self.tolerance:
            stray = seen[distance.argmax()].tolist()
            raise ValueError(f"graph: displacement {stray} is not among the {len(rows)} rows of the table")
        index = row if graph.displacement_index is None else row[graph.displacement_index]
        if self.border == "mask":
            return AffineEdges(graph.neighbors, index)
        return _with_ghosts(graph.neighbors, index, len(rows))


@dataclass(frozen=True)
class SmoothDisplacements:
    """A small network of h_a⁻¹(x_j - x_i) / scale, for point clouds: one for every frame h_a⁻¹ h_b.

    psi and beta are linear in √2 cos(⟨ω, v⟩ + φ), and start with unit variance like a table of N(0, 1).

    Attributes
    ----------
    hidden
        Number of frequencies ω.
    spread
        Standard deviation of the frequencies at the start, in radians per scale.
    """

    hidden: int = 32
    spread: float = 3.0

    def __post_init__(self) -> None:
        check_count("hidden", self.hidden)
        check_length("spread", self.spread)

    def affine_map(self, group: FiniteGroup, channels: int, *, lifting: bool = False) -> AffineMap:
        """A new affine map; for ``lifting`` there is one key frame."""
        return WaveMap(group, channels, lifting, self.hidden, self.spread)

    def axis_keys(self, group: FiniteGroup, heads: int, channels: int) -> AxisKeys:
        """New keys made of the coordinates, ``channels`` for each head."""
        return AxisWaves(group.dim, heads, channels, self.hidden, self.spread)

    def edges(self, graph: LiftedGraph) -> AffineEdges:
        """The edges of the graph as they are."""
        return AffineEdges(graph.neighbors, graph.displacement_index)


AffinePositions = OffsetTable | SmoothDisplacements

_EDGES: WeakKeyDictionary[LiftedGraph, dict[OffsetTable, AffineEdges]] = WeakKeyDictionary()


@lru_cache(maxsize=128)
@torch.inference_mode(False)
def _rows(table: OffsetTable, group: FiniteGroup) -> tuple[Tensor, Tensor]:
    """Distinct h⁻¹ o ``[rows, dim]``, the offsets first, and the row of h_a⁻¹ times a row, ``[rows, order]`` int64."""
    offsets = torch.tensor(table.offsets, dtype=torch.float64)
    if offsets.shape[1] != group.dim:
        raise ValueError(f"offsets: have {offsets.shape[1]} coordinates, {group.name} acts on {group.dim}")
    inverses = group.elements[group.inverse_index]
    # The identity need not be the first element.
    seen = torch.cat([offsets, torch.einsum("aij,oj->aoi", inverses, offsets).flatten(0, 1)])
    first = (torch.cdist(seen, seen) < table.tolerance).to(torch.int8).argmax(dim=1)
    rows = seen[first == torch.arange(len(seen))]
    if table.border == "zero" and len(rows) != len(offsets):
        raise ValueError(
            f"border: 'zero' needs distinct offsets that {group.name} maps to each other, but the {len(offsets)} "
            f"offsets go to {len(rows)} places; use 'mask'"
        )
    turned = torch.einsum("aij,rj->rai", inverses, rows)
    return rows, torch.cdist(turned.flatten(0, 1), rows).argmin(dim=-1).view(len(rows), group.order)


def _with_ghosts(neighbors: Neighbors, index: Tensor, rows: int) -> AffineEdges:
    """An edge to the ghost, the last point, for every row that a point does not see."""
    points = neighbors.num_points
    missing = torch.ones(points, rows, dtype=torch.bool, device=index.device)
    missing[neighbors.target, index] = False
    at, row = missing.nonzero().unbind(1)
    target = torch.cat([neighbors.target, at])
    order = torch.argsort(target, stable=True)
    source = torch.cat([neighbors.source, torch.full_like(at, points)])[order]
    counts = torch.bincount(target, minlength=points + 1)
    row_ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return AffineEdges(Neighbors(row_ptr, source, target[order]), torch.cat([index, row])[order], ghost=True)
