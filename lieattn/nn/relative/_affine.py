"""The affine maps psi, beta of Affine Self Convolution."""

from __future__ import annotations

import abc
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_has_numbers,
    check_is,
    check_length,
    check_tensor,
)
from lieattn._core.contexts import outside_of_transforms
from lieattn.geometry import LiftedGraph, Neighbors, Radius
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn.relative._base import RelativeFunction, check_lifted_to, rows_of_table, seen_offsets
from lieattn.ops import RelativeTerms

Border = Literal["mask", "zero"]


@dataclass(frozen=True, eq=False)
class AffineEdges:
    """Edges, and the row of the tables for each edge (None: its own); with ``padding`` there is an additional point."""

    neighbors: Neighbors
    index: Tensor | None
    padding: bool = False


@dataclass(frozen=True)
class RelativePositionTable:
    """A trainable value for every offset of a window, for grids, where offsets repeat (as in the paper).

    The table has a row for each distinct h⁻¹ o with o an offset and h in H, so that it is equivariant for every H.

    Attributes
    ----------
    offsets
        Displacements x_j - x_i of the neighborhood, in the units of the points, for example
        ``RelativePositionTable.square(5)`` for ``PixelSquare(5)``.
    border
        Treatment of offsets without a point: ``"mask"`` omits them, and ``"zero"`` gives them an embedding of zero, so
        that only beta contributes. Neighborhoods must then contain the window.
    tolerance
        Largest distance of a displacement from its row, in the units of the points.
    """

    offsets: tuple[tuple[float, ...], ...]
    border: Border = "mask"
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        check_arguments(RelativePositionTable, vars(self))
        check_length("tolerance", self.tolerance)
        lengths = {len(offset) for offset in self.offsets}
        if len(lengths) != 1 or not all(math.isfinite(c) for offset in self.offsets for c in offset):
            raise ValueError(
                f"offsets: expected at least one finite displacement, all of one dimension, got {self.offsets!r}"
            )

    @classmethod
    def square(cls, size: int, *, dim: int = 2, spacing: float = 1.0, border: Border = "mask") -> RelativePositionTable:
        """Return the window of size x size pixels (in 3D, size³ voxels) around a point; ValueError for even sizes."""
        check_counts(size=size, dim=dim)
        check_length("spacing", spacing)
        if size % 2 == 0:
            raise ValueError(f"size: expected an odd number, since an even window has no center, got {size}")
        steps = [spacing * (step - size // 2) for step in range(size)]
        return cls(tuple(itertools.product(steps, repeat=dim)), border, 1e-3 * spacing)

    @classmethod
    def of(
        cls, offsets: Float[Tensor, "offsets dim"], *, border: Border = "mask", tolerance: float = 1e-3
    ) -> RelativePositionTable:
        """Return the window with the displacements ``[offsets, dim]``."""
        check_tensor("offsets", offsets, "floating displacements [offsets, dim]")
        if offsets.ndim != 2:
            raise ValueError(f"offsets: expected [offsets, dim], got {tuple(offsets.shape)}")
        check_has_numbers("offsets", offsets)
        return cls(tuple(map(tuple, offsets.tolist())), border, tolerance)

    def affine_map(
        self, group: FiniteGroup, channels: int, *, lifting: bool = False, heads: int = 1, full: bool = False
    ) -> AffineMap:
        """Return a new affine map; for ``lifting`` there is one key frame, and with ``full`` psi mixes the channels."""
        check_group("group", group)
        return TableMap(self, group, channels, lifting, heads, full=full)

    def axis_keys(self, group: FiniteGroup, heads: int, channels: int) -> AxisKeys:
        """Return a new function that computes keys from the coordinates, with ``channels`` for each head."""
        check_group("group", group)
        return AxisTable(group, heads, channels, self)

    def edges(self, graph: LiftedGraph) -> AffineEdges:
        """Return the edges of a graph and their rows, computed once per graph and device.

        ValueError is raised if a displacement is not in the table, if the frames are not those of a finite group, or if
        border ``"zero"`` would take points for absent because no neighborhood reaches an offset.
        """
        check_is("graph", graph, LiftedGraph)
        if graph.group is None:
            raise ValueError(f"graph: tables need the frames of a finite group, got a graph on {graph.space.name}")
        # Cached on the graph itself, where torch.compile finds them.
        known: tuple[tuple[RelativePositionTable, AffineEdges], ...] = getattr(graph, _EDGES, ())
        for table, edges in known:
            if (table is self or table == self) and edges.neighbors.device == graph.device:
                return edges
        # Cached tensors must be usable in training, even if they are computed in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            rows = _rows(self, graph.group)[0].to(graph.device)
            row = rows_of_table(graph, rows, self.tolerance)[:, graph.group.identity_index]
            shared = graph.relative.row
            index = row if shared is None else row[shared]
            found = AffineEdges(graph.neighbors, index)
            found = found if self.border == "mask" else _with_padding(graph, index, rows, self.tolerance)
        vars(graph)[_EDGES] = (*known, (self, found))
        return found


@dataclass(frozen=True)
class FourierFeatures:
    """A small network of v = h_a⁻¹(x_j - x_i) / length, for point clouds, with a psi for every frame h_a⁻¹ h_b.

    psi and beta are linear in √2 cos(⟨ω, v⟩ + φ) with ``hidden`` frequencies ω. The initial standard deviation of the
    frequencies is ``init_scale``, in radians per ``graph.length``. psi and beta initially have unit variance, like a
    table of N(0, 1).
    """

    hidden: int = 32
    init_scale: float = 3.0

    def __post_init__(self) -> None:
        check_arguments(FourierFeatures, vars(self))
        check_count("hidden", self.hidden)
        check_length("init_scale", self.init_scale)

    def affine_map(
        self, group: FiniteGroup, channels: int, *, lifting: bool = False, heads: int = 1, full: bool = False
    ) -> AffineMap:
        """See :meth:`RelativePositionTable.affine_map`."""
        check_group("group", group)
        waves = Waves(group.dim, self.hidden, self.init_scale)
        return WaveMap(waves, group, channels, lifting, heads, full=full)

    def axis_keys(self, group: FiniteGroup, heads: int, channels: int) -> AxisKeys:
        """See :meth:`RelativePositionTable.axis_keys`."""
        check_group("group", group)
        return AxisWaves(group.dim, heads, channels, self.hidden, self.init_scale)

    def edges(self, graph: LiftedGraph) -> AffineEdges:
        """Return the edges of the graph."""
        check_is("graph", graph, LiftedGraph)
        return AffineEdges(graph.neighbors, graph.relative.row)


AffinePositions = RelativePositionTable | FourierFeatures
"""Form of psi and beta of an Affine Self Convolution, for grids or for point clouds."""

_EDGES = "_affine_edges"  # attribute of graphs with a cache of tables and their edges


@lru_cache(maxsize=128)
@torch.inference_mode(False)
@outside_of_transforms
def _rows(
    table: RelativePositionTable, group: FiniteGroup
) -> tuple[Float[Tensor, "rows dim"], Int[Tensor, "rows order"]]:
    """Return distinct h⁻¹ o ``[rows, dim]``, offsets first, and the row of h_a⁻¹ times each ``[rows, order]`` int64."""
    rows = seen_offsets(torch.tensor(table.offsets, dtype=torch.float64), group, table.tolerance)
    if table.border == "zero" and len(rows) != len(table.offsets):
        raise ValueError(
            f"border: 'zero' needs distinct offsets that {group.name} maps to each other, but it maps the "
            f"{len(table.offsets)} offsets to {len(rows)} places; use 'mask'"
        )
    turned = torch.einsum("aij,rj->rai", group.elements[group.inverse_index], rows)
    return rows, torch.cdist(turned.flatten(0, 1), rows).argmin(dim=-1).view(len(rows), group.order)


def _with_padding(graph: LiftedGraph, index: Tensor, rows: Tensor, tolerance: float) -> AffineEdges:
    """Add an edge from the padding, the last point, for every row without a neighbor."""
    neighbors, points = graph.neighbors, graph.num_points
    missing = torch.ones(points, len(rows), dtype=torch.bool, device=index.device)
    missing[neighbors.target, index] = False
    _check_reached(graph, rows[missing.all(dim=0)], tolerance)
    at, row = missing.nonzero().unbind(1)
    target = torch.cat([neighbors.target, at])
    order = torch.argsort(target, stable=True)
    source = torch.cat([neighbors.source, torch.full_like(at, points)])[order]
    counts = torch.bincount(target, minlength=points + 1)
    row_ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return AffineEdges(Neighbors(row_ptr, source, target[order]), torch.cat([index, row])[order], padding=True)


def _check_reached(graph: LiftedGraph, offsets: Tensor, tolerance: float) -> None:
    """Raise ValueError if a point of a cloud lies at one of the offsets ``[n, dim]`` from another one."""
    for offset in offsets if graph.num_points else ():
        pos = graph.pos.to(offset)
        clouds = {"batch_x": graph.batch, "batch_y": graph.batch}
        if Radius(tolerance).between(pos, pos + offset, **clouds).numel():
            raise ValueError(
                f"graph: its neighborhoods lack the points at the offset {offset.tolist()} of the window, which border "
                "'zero' would take for absent; use neighborhoods that contain the window, such as PixelSquare"
            )


class OfEdges(RelativeFunction):
    """Base class of affine maps and keys, which have a row for each displacement, or for each offset of a ``table``."""

    table: RelativePositionTable | None = None

    @property
    def pads(self) -> bool:
        """Whether offsets without a point have edges, which only the layers of Affine Self Convolution add."""
        return self.table is not None and self.table.border == "zero"

    def edge_rows(self, graph: LiftedGraph) -> Int[Tensor, " edges"] | None:
        """Return the row of each edge, as :class:`AffineEdges` do; ValueError for graphs of another group."""
        check_is("graph", graph, LiftedGraph)
        if self.table is None:
            return graph.relative.row
        check_lifted_to(graph, self.group, "encoding")
        return self.table.edges(graph).index


class AffineMap(OfEdges):
    """Psi and beta of one affine map, with a value for each channel; for lifting there is one key frame.

    If psi is ``full``, it is a matrix that mixes the channels.

    **Equivariance.** That of :class:`RelativeFunction`.
    """

    patterns = ("pooled", "joint")
    relative: Tensor

    def __init__(self, group: FiniteGroup, channels: int, lifting: bool, heads: int, *, full: bool = False) -> None:
        check_arguments(AffineMap.__init__, locals())
        super().__init__()
        check_counts(channels=channels, heads=heads)
        self.group, self.heads, self.full = group, heads, full
        self.frames = 1 if lifting else group.order
        relative = torch.zeros(group.order, 1, dtype=torch.int64) if lifting else group.relative_index.clone()
        self.register_buffer("relative", relative, persistent=False)

    @abc.abstractmethod
    def tables(
        self, graph: LiftedGraph
    ) -> tuple[Float[Tensor, "rows fiber frames channels *inputs"], Float[Tensor, "rows fiber channels"]]:
        """Return psi ``[rows, out, key, channels]`` and beta ``[rows, out, channels]``, with the rows of the edges.

        A full psi has one more axis at the end, for the channels of its input.
        """

    @abc.abstractmethod
    def center(self) -> tuple[Float[Tensor, "frames channels *inputs"], Float[Tensor, " channels"]]:
        """Return psi ``[frames, channels]`` of h_a⁻¹ h_b and beta ``[channels]`` at displacement 0.

        A full psi has one more axis, as in :meth:`tables`. ValueError is raised if a table has no row for displacement
        0.
        """

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``psi`` and ``beta``, for values."""
        row = self.edge_rows(graph)
        psi, beta = (table.unflatten(3 - axis, (self.heads, -1)) for axis, table in enumerate(self.tables(graph)))
        return RelativeTerms(psi=psi, beta=beta[:, :, None], row=row)


def factors(*shape: int, full: bool) -> Tensor:
    """Draw a psi whose last axis is channels from N(0, 1), or draw ``full`` matrices that preserve the variance."""
    return torch.randn(*shape, shape[-1]) / math.sqrt(shape[-1]) if full else torch.randn(*shape)


def for_keys(terms: RelativeTerms) -> RelativeTerms:
    """Return the terms of an affine map for keys in place of values."""
    return RelativeTerms(key_psi=terms.psi, positional_key=cast(Tensor, terms.beta)[:, :, 0], row=terms.row)


class AxisKeys(OfEdges):
    """Keys whose channels depend on one coordinate of the displacement each; narrow heads share the coordinates.

    **Equivariance.** That of :class:`RelativeFunction`.
    """

    patterns = ("pooled",)
    heads: int

    @abc.abstractmethod
    def codes(self, graph: LiftedGraph) -> list[Float[Tensor, "rows fiber sharing width"]]:
        """Return the keys for each coordinate, ``[rows, out, heads that share it, channels]``."""

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``positional_key``."""
        row = self.edge_rows(graph)
        key = torch.cat(self.codes(graph), dim=-1).flatten(-2).unflatten(-1, (self.heads, -1))
        return RelativeTerms(positional_key=key, row=row)


class TableMap(AffineMap):
    """Tables; ``turned`` ``[rows, order]`` is the row of h_a⁻¹ o, and ``zero`` the row of displacement 0, if any."""

    turned: Tensor

    def __init__(
        self, table: RelativePositionTable, group: FiniteGroup, channels: int, *sizes: Any, full: bool = False
    ) -> None:
        super().__init__(group, channels, *sizes, full=full)
        self.table = table
        rows, turned = _rows(table, group)
        distance, zero = rows.norm(dim=1).min(dim=0)
        self.psi = nn.Parameter(factors(self.frames, len(turned), channels, full=full))
        self.beta = nn.Parameter(torch.randn(len(turned), channels))
        self.zero = int(zero) if distance <= table.tolerance else None
        self.register_buffer("turned", turned.clone(), persistent=False)

    def tables(self, graph: LiftedGraph) -> tuple[Tensor, Tensor]:
        return self.psi[self.relative, self.turned[:, :, None]], self.beta[self.turned]

    def center(self) -> tuple[Tensor, Tensor]:
        if self.zero is None:
            raise ValueError("offsets: expected displacement 0 among them, whose affine map makes the query")
        return self.psi[:, self.zero], self.beta[self.zero]


class WaveMap(AffineMap):
    """Psi and beta as sums of waves; the amplitudes of psi depend on the frame h_a⁻¹ h_b."""

    def __init__(self, waves: Waves, group: FiniteGroup, channels: int, *sizes: Any, full: bool = False) -> None:
        super().__init__(group, channels, *sizes, full=full)
        self.waves, hidden = waves, len(waves.phases)
        mapped = (channels,) if full else ()
        amplitudes = torch.randn(self.frames, channels, *mapped, hidden)
        self.psi = nn.Parameter(amplitudes / math.sqrt(hidden * math.prod(mapped)))
        self.beta = nn.Parameter(torch.randn(channels, hidden) / math.sqrt(hidden))

    def tables(self, graph: LiftedGraph) -> tuple[Tensor, Tensor]:
        check_is("graph", graph, LiftedGraph)
        waves = self.waves(graph.relative.positions)
        return torch.einsum("tam,ab...m->tab...", waves, self.psi[self.relative]), waves @ self.beta.mT

    def center(self) -> tuple[Tensor, Tensor]:
        waves = self.waves(self.waves.frequencies.new_zeros(self.waves.frequencies.shape[1]))
        return self.psi @ waves, self.beta @ waves


class Waves(nn.Module):
    """Waves √2 cos(⟨ω, v⟩ + φ), with unit variance over the phases for every v."""

    def __init__(self, dim: int, hidden: int, init_scale: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(init_scale * torch.randn(hidden, dim))
        self.phases = nn.Parameter(2 * math.pi * torch.rand(hidden))

    def forward(self, displacements: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch hidden"]:
        angle = displacements.to(self.frequencies.dtype) @ self.frequencies.mT + self.phases
        return math.sqrt(2) * angle.cos()


class AxisTable(AxisKeys):
    """A value for each distinct coordinate along each axis of the rows of a table; see :class:`TableMap`."""

    turned: Tensor

    def __init__(self, group: FiniteGroup, heads: int, channels: int, table: RelativePositionTable) -> None:
        super().__init__()
        self.group, self.table = group, table
        rows, turned = _rows(table, group)
        self.heads, self.axes, places = heads, nn.ParameterList(), []
        sharing, widths = _axis_widths(rows.shape[1], heads, channels)
        for coordinate, width in zip(rows.unbind(1), widths, strict=True):
            ascending = coordinate.sort().values
            values = ascending[torch.cat([ascending.new_ones(1, dtype=torch.bool), ascending.diff() > table.tolerance])]
            places.append((coordinate[:, None] - values).abs().argmin(dim=1))
            self.axes.append(nn.Parameter(torch.randn(len(values), heads // sharing, width)))
        self.register_buffer("turned", torch.stack(places)[:, turned], persistent=False)

    def codes(self, graph: LiftedGraph) -> list[Tensor]:
        return [axis[place] for axis, place in zip(self.axes, self.turned, strict=True)]


class AxisWaves(AxisKeys):
    """A sum of waves for each coordinate."""

    def __init__(self, dim: int, heads: int, channels: int, hidden: int, init_scale: float) -> None:
        super().__init__()
        self.heads, self.waves, self.amplitudes = heads, nn.ModuleList(), nn.ParameterList()
        sharing, widths = _axis_widths(dim, heads, channels)
        for width in widths:
            self.waves.append(Waves(1, hidden, init_scale))
            self.amplitudes.append(nn.Parameter(torch.randn(heads // sharing, width, hidden) / math.sqrt(hidden)))

    def codes(self, graph: LiftedGraph) -> list[Tensor]:
        coordinates = graph.relative.positions.split(1, dim=-1)
        return [
            torch.einsum("tam,ecm->taec", waves(coordinate), amplitude)
            for waves, amplitude, coordinate in zip(self.waves, self.amplitudes, coordinates, strict=True)
        ]


def _axis_widths(dim: int, heads: int, channels: int) -> tuple[int, list[int]]:
    """Return the number of heads that share the coordinates, and their channels for each coordinate.

    The last coordinate gets the remainder. Heads with fewer channels than coordinates share the coordinates with the
    next heads.
    """
    check_counts(heads=heads, channels=channels)
    fits = (number for number in range(1, heads + 1) if heads % number == 0 and number * channels >= dim)
    sharing = next(fits, None)
    if sharing is None:
        raise ValueError(
            f"channels: {dim} coordinates need at least {dim} channels over all heads, got {heads * channels}"
        )
    shared = sharing * channels
    return sharing, [shared // dim] * (dim - 1) + [shared - shared // dim * (dim - 1)]
