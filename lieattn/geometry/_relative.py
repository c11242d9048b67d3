"""Relative elements g_ia⁻¹ g_jb of the edges of a lifted graph: all that a layer ever sees of the geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, cast

import torch
from torch import Tensor

from lieattn._autocast import without_autocast
from lieattn._checks import check_choice, check_is, check_tensor
from lieattn._functional import transformed
from lieattn._lengths import lengths
from lieattn._recompute import region
from lieattn.geometry._clouds import Movable
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.groups import FiniteGroup, Group, SemidirectProduct, Translations, affine
from lieattn.spaces import Euclidean, HomogeneousSpace, PositionDirection

Chart = Literal["smooth", "log"]

_ROUNDING_STEPS = 16
_NOTHING = 1e-12  # of the squared cutoff: nearer to it weights, exp(-1e12), have long become 0


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class RelativeElements(Movable):
    r"""The elements :math:`g_{ia}^{-1} g_{jb}` for every edge from j to i, in the forms that layers ask for.

    Properties are computed on first use and then kept. Displacements that repeat, as on grids, are evaluated once: the
    properties have a *row* for each distinct displacement, and :attr:`row` says which one an edge reads.

    **Equivariance.** Moving all elements by one g in G leaves every property alone.

    Attributes
    ----------
    space, neighbors, length
        X with its group G, the edges, and the length by which translations are divided.
    pos, batch
        ``[points, *]``, points of X, and ``[points]`` int64, the cloud of each.
    group, pose
        Finite group H whose elements stand over the points, and ``[points, dim, dim]``, by which they are multiplied
        from the left, the same for all points of a cloud; None for other frames, and for none.
    elements
        ``[points, fiber, m, m]``, g_ia, where they are not made of ``group`` and ``pose``.
    chart
        Coordinates of elements: ``"smooth"`` ones, or ``"log"`` for those of the Lie algebra.
    dilation, levels_up
        Of fibers of scales: ``[points]``, by which what an element sees is divided, and ``[edges]`` int64, the steps
        from the scale of the target to that of the source.
    given
        ``[rows, fiber, fiber, k]`` coordinates from outside, in place of those of the chart.
    cutoff
        Distance at which neighbors count nothing, of smooth neighborhoods; None where all count alike.
    """

    space: HomogeneousSpace
    pos: Tensor
    batch: Tensor
    neighbors: Neighbors
    length: float = 1.0
    group: FiniteGroup | None = None
    pose: Tensor | None = None
    elements: Tensor | None = None
    chart: Chart = "smooth"
    dilation: Tensor | None = None
    levels_up: Tensor | None = None
    given: Tensor | None = None
    cutoff: float | None = None
    # Which property each checkpointed part was the first to use, and the function that identifies the part.
    _first_uses: tuple[tuple[str, object], ...] = field(default=(), init=False, repr=False)
    _rows_known: bool = field(default=False, init=False, repr=False)
    _row: Tensor | None = field(default=None, init=False, repr=False)
    _representatives: Tensor | None = field(default=None, init=False, repr=False)
    _positions: Tensor | None = field(default=None, init=False, repr=False)
    _coordinates: Tensor | None = field(default=None, init=False, repr=False)
    _log_window: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("coordinates", self.chart, Chart)  # the name that the argument has in lift

    # --- what there is --------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fiber={self.fiber}, edges={self.neighbors.num_edges}, space={self.space.name})"

    @property
    def tied(self) -> bool:
        """Whether all points of a cloud have the same frames, so that pairs of frames are elements of ``group``."""
        return self.elements is None

    @property
    def fiber(self) -> int:
        """Number of elements over each point."""
        if self.elements is not None:
            return self.elements.shape[1]
        return cast(FiniteGroup, self.group).order

    @property
    def num_rows(self) -> int:
        """Number of rows of the properties."""
        if self.given is not None:
            return len(self.given)
        return len(self.neighbors.source) if self.row is None else len(self._rows())

    @property
    def num_coordinates(self) -> int:
        """Length k of :attr:`coordinates`."""
        if self.given is not None:
            return self.given.shape[-1]
        return num_coordinates(self.space, self.chart) + (self.levels_up is not None)

    @property
    def row(self) -> Tensor | None:
        """``[edges]`` int64, the row that each edge reads; None where every edge has its own."""
        # How many displacements are distinct depends on the data, which a trace does not know.
        if not (self._rows_known or torch.compiler.is_compiling() or transformed()):
            self._share_rows()
        return self._row

    # --- positions and pairs of frames ----------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        r"""``[rows, fiber, dim]``, the source as each frame of the target sees it: :math:`g_{ia}^{-1} x_j`.

        For affine groups this is :math:`A_{ia}^{-1} (x_j - x_i)`, A the linear part of the element, over the length.
        """
        return self._kept("_positions", self._seen)

    @property
    def pair_index(self) -> Tensor:
        """``[fiber, fiber]`` int64, the index in ``group`` of h_a⁻¹ h_b, which is the same for all edges.

        ValueError is raised unless the frames over all points are elements of one finite group.
        """
        if not self.tied or self.group is None:
            what = f"frames over different points of {self.space.name} are not related by a table of a finite group"
            raise ValueError(f"graph: {what}; use frames of a finite group, or an encoding of coordinates")
        return self.group.relative_index.to(self.pos.device)

    @property
    def coordinates(self) -> Tensor:
        """``[rows, fiber, fiber, k]``, coordinates of the relative elements.

        Smooth ones are the position, the coordinates of the linear part (entries of its matrix; none for
        translations), and for fibers of scales the steps between the levels; logarithms are those of the Lie algebra.
        Invariants of the orbits of both points follow, if the group is not transitive.
        """
        if self.given is not None:
            return self.given
        return self._kept("_coordinates", self._all_coordinates)

    @property
    def log_window(self) -> Tensor | None:
        """``[rows]``, logarithm of the weight of each neighbor, which vanishes at the cutoff; None without one."""
        return None if self.cutoff is None else self._kept("_log_window", self._faded)

    # --- transforms -----------------------------------------------------------------------------------------------

    def at(self, pos: Tensor, deformation: Tensor | None = None) -> RelativeElements:
        """The same neighbor lists and frames with the points elsewhere, ``[points, dim]``, to which gradients flow.

        With a ``deformation`` ``[clouds, dim, dim]`` lattice vectors v of clouds that repeat become v D, from which
        stresses follow; the positions are given as they are deformed. It is what lifting gives there as long as no
        further pair has become neighbors. ValueError is raised for another shape, and for frames that are made of the
        points or given with them.
        """
        check_tensor("pos", pos, "a floating tensor [points, dim]")
        if pos.shape != self.pos.shape:
            raise ValueError(f"pos: expected {tuple(self.pos.shape)} as before, got {tuple(pos.shape)}")
        if self.elements is not None or self.pose is not None or self.given is not None:
            raise ValueError("graph: its frames or coordinates depend on its points; lift the moved points instead")
        if deformation is None:
            return replace(self, pos=pos)
        return replace(self, pos=pos, neighbors=self.neighbors.deformed(deformation, self.batch))

    def with_coordinates(self, coordinates: Tensor) -> RelativeElements:
        """The same relative elements with other coordinates, ``[rows, fiber, fiber, k]``."""
        rows, fiber = self.num_rows, self.fiber
        if coordinates.ndim != 4 or coordinates.shape[:3] != (rows, fiber, fiber):
            raise ValueError(f"coordinates: expected [{rows}, {fiber}, {fiber}, k], got {tuple(coordinates.shape)}")
        changed = replace(self, given=coordinates)
        for name in ("_rows_known", "_row", "_representatives", "_positions", "_log_window"):
            object.__setattr__(changed, name, getattr(self, name))
        return changed

    def bounded(self, radius: float = 7.0) -> RelativeElements:
        """Coordinates p become p tanh(ν / radius) / ν with ν = |p| + 1e-6, so that none is longer than ``radius``."""
        pairs = self.coordinates
        length = lengths(pairs, keepdim=True) + 1e-6
        return self.with_coordinates(pairs * (torch.tanh(length / radius) / length))

    def joined(self, features: Tensor) -> RelativeElements:
        """Further coordinates ``[rows, q]`` of each row, such as functions of the distance, behind the others."""
        pairs = self.coordinates
        more = features.to(pairs.dtype)[:, None, None].expand(*pairs.shape[:3], -1)
        return self.with_coordinates(join_coordinates([pairs, more]))

    def displacements(self) -> Tensor:
        """``[rows, dim]``, x_j - x_i of each row, in the unit of the points."""
        places = self.pos[:, : self.space.group.dim]
        displacements = self.neighbors.displacements(places)
        return displacements if self.row is None else displacements[self._rows()]

    # --- evaluation -----------------------------------------------------------------------------------------------

    def _kept(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The property that is kept as ``name``, computed on first use.

        There are three cases. Within a trace or a transform it is read, and computed where it is not known, but not
        kept. In a checkpointed part of a forward pass that computed it first and runs for a second time, it is
        computed again. Everywhere else it is computed once and kept.
        """
        if torch.compiler.is_compiling() or transformed():
            # Tensors of a trace or a transform mean nothing outside of it.
            known: Tensor | None = getattr(self, name)
            return self._evaluated(compute) if known is None else known
        now = region.get()
        if now.again and (name, now.function) in self._first_uses:
            # In the backward pass torch replaces the tensors that were saved in the first run by those of the second,
            # one by one. If the second run read what the first has kept, it would save fewer of them.
            return now.once((self, name), lambda: self._evaluated(compute))
        known = getattr(self, name)
        if known is None:
            known = self._evaluated(compute)
            # Computed without gradients (in torch.no_grad), it would cut off the gradients of later uses.
            if known.requires_grad or not self._differentiable():
                object.__setattr__(self, name, known)
                if not now.again:
                    object.__setattr__(self, "_first_uses", (*self._first_uses, (name, now.function)))
        return known

    def _evaluated(self, compute: Callable[[], Tensor]) -> Tensor:
        """A property in full precision under autocast, and one that training can use unless the points cannot."""
        with without_autocast(self.pos.device), torch.inference_mode(self.pos.is_inference()):
            return compute()

    def _differentiable(self) -> bool:
        sources = (self.pos, self.pose, self.elements, self.neighbors.shift)
        return any(tensor is not None and tensor.requires_grad for tensor in sources)

    def _share_rows(self) -> None:
        """Find displacements that repeat, unless gradients flow: they would reach a representative only."""
        index: Tensor | None = None
        if self.tied and self.dilation is None and self.given is None and not self._differentiable():
            with torch.no_grad(), torch.inference_mode(self.pos.is_inference()):
                displacements = self.posed(self.neighbors.displacements(self.pos), self.neighbors.target)
                if len(displacements):
                    rows, index = _distinct(displacements, self._extents())
                    object.__setattr__(self, "_representatives", rows)
        object.__setattr__(self, "_row", index)
        object.__setattr__(self, "_rows_known", True)

    def _rows(self) -> Tensor:
        """An edge of each row."""
        if self._representatives is None or self.row is None:
            return torch.arange(self.neighbors.num_edges, device=self.pos.device)
        return self._representatives

    def _extents(self) -> Tensor:
        """``[edges]``, the largest absolute coordinate of the cloud of each edge and of its shifts."""
        largest = self.pos.abs().amax(dim=1)
        target = self.neighbors.target
        extents = largest.new_zeros(int(self.batch.max()) + 1).scatter_reduce(0, self.batch, largest, "amax")
        if self.neighbors.shift is not None:
            longest = self.neighbors.shift.abs().amax(dim=1).to(extents)
            extents = extents.scatter_reduce(0, self.batch[target], longest, "amax")
        return extents[self.batch[target]]

    def posed(self, vectors: Tensor, points: Tensor | None = None) -> Tensor:
        """Vectors ``[n, dim]`` as they are seen in the pose of their cloud, by which the elements are multiplied.

        Row i belongs to the cloud of the point ``points[i]``, or i if absent.
        """
        if self.pose is None:
            return vectors
        inverse = _inverse(self.space.group, self.pose.double())
        inverse = inverse if points is None else _taken(inverse, points)
        return (inverse @ vectors.double()[..., None])[..., 0].to(vectors.dtype)

    def _seen(self) -> Tensor:
        group, neighbors = self.space.group, self.neighbors
        if not group.is_affine and self.elements is not None:
            inverse = _taken(group.inverse(self.elements), neighbors.target)
            return (inverse @ self.pos.index_select(0, neighbors.source)[:, None, :, None])[..., 0]
        if self.elements is not None and not isinstance(self.space, Euclidean | PositionDirection):
            at_target = _taken(self.elements, neighbors.target)
            at_source = _taken(self.elements[:, :1], neighbors.source)
            return group.translation(group.relative(at_target, at_source)) / self.length
        displacements = neighbors.displacements(self.pos[:, : group.dim])
        if self.dilation is not None:
            displacements = displacements / self.dilation[neighbors.target, None]
        if self.elements is None:
            displacements = self.posed(displacements, neighbors.target)
            if self.row is not None:
                displacements = displacements[self._rows()]
            return in_frames(cast(FiniteGroup, self.group), displacements) / self.length
        inverse = _taken(_inverse(group, group.linear(self.elements)), neighbors.target)
        return (inverse @ displacements[:, None, :, None])[..., 0] / self.length

    def _faded(self) -> Tensor:
        displacements = self.displacements() / cast(float, self.cutoff)
        if self.dilation is not None:
            displacements = displacements / self.dilation[self.neighbors.target, None]
        # Derivatives of any order of this weight vanish at the cutoff. In a softmax its logarithm outweighs scores of
        # any size, the larger the earlier: a power of 1 - x² would leave large ones to end within rounding of it.
        square = displacements.square().sum(dim=-1)
        return -square / (1 - square).clamp(min=_NOTHING)

    def _linear_pairs(self) -> Tensor:
        """Linear parts of the relative elements, ``[rows | 1, fiber, fiber, dim, dim]``."""
        group, neighbors = self.space.group, self.neighbors
        if self.elements is None:
            return cast(FiniteGroup, self.group).matrices(self.pos)[self.pair_index][None]
        if not isinstance(self.space, Euclidean | PositionDirection):
            at_target, at_source = (_taken(self.elements, end) for end in (neighbors.target, neighbors.source))
            return group.linear(group.relative(at_target[:, :, None], at_source[:, None]))
        linear = group.linear(self.elements)
        at_target, at_source = _taken(_inverse(group, linear), neighbors.target), _taken(linear, neighbors.source)
        return torch.einsum("eaij,ebjk->eabik", at_target, at_source)

    def _all_coordinates(self) -> Tensor:
        group = self.space.group
        pairs = (self.num_rows, self.fiber, self.fiber)
        parts = [self.positions[:, :, None]] if group.is_affine else []
        if not isinstance(group, Translations):
            linear = self._linear_pairs()
            if self.chart == "log":
                parts = [group.log(affine(linear, parts[0].expand(*pairs, -1)) if parts else linear)]
            elif isinstance(group, SemidirectProduct):
                parts.append(group.stabilizer.coordinates(linear))
            else:
                parts.append(linear.flatten(-2) if group.is_affine else group.coordinates(linear))
        if self.levels_up is not None:
            parts.append(self.levels_up.to(self.pos.dtype)[:, None, None, None])
        if self.space.num_invariants:
            invariants = self.space.invariants(self.pos)
            for end in (self.neighbors.target, self.neighbors.source):
                parts.append(invariants.index_select(0, end)[:, None, None])
        return join_coordinates([part.expand(*pairs, -1) for part in parts])


def collated(name: str, parts: Sequence[RelativeElements]) -> Tensor | None:
    """A tensor of several relative elements in one, None where there is none."""
    values = [getattr(part, name) for part in parts]
    if any((value is None) != (values[0] is None) for value in values):
        raise ValueError(f"graphs: expected {name} in all graphs or in none")
    return None if values[0] is None else torch.cat(values)


def join_rows(whole: RelativeElements, parts: Sequence[RelativeElements]) -> None:
    """Take over the rows that the graphs have found, and their positions where all have been computed."""
    kept, rows = vars(whole), [part.row for part in parts]
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


def _distinct(displacements: Tensor, extent: Tensor) -> tuple[Tensor, Tensor | None]:
    """One edge of each distinct displacement, int64 ``[types]``, and the type of each edge, int64 ``[edges]``.

    All edges and None if fewer than half of them repeat. A 28 x 28 image with 5 x 5 neighborhoods has 19,000 edges and
    25 distinct displacements. Two are the same if they fall into one bin of at most 16 rounding steps of the largest
    coordinate of their cloud, ``extent`` ``[edges]``, so a turned grid is recognized too. Bins are powers of two wide
    and shared by clouds of the same width only: how finely a cloud is resolved does not depend on the clouds beside it.
    """
    edges = len(displacements)
    everything = torch.arange(edges, device=displacements.device)
    _, exponent = torch.frexp(_ROUNDING_STEPS / 2 * torch.finfo(displacements.dtype).eps * extent.double())
    # Half a step off, since grids like to sit on multiples of it.
    bins = torch.floor(torch.ldexp(displacements.detach().double(), -exponent[:, None]) + 0.5).to(torch.int64)
    key = torch.zeros_like(everything)
    types = 1
    for axis in (exponent, *bins.unbind(dim=1)):
        values, axis_key = torch.unique(axis, return_inverse=True)
        # Both factors are at most the number of edges, so the product fits int64.
        key = key * len(values) + axis_key
        distinct, key = torch.unique(key, return_inverse=True)
        types = len(distinct)
        if 2 * types > edges:
            return everything, None
    first = torch.full((types,), edges, dtype=torch.int64, device=key.device)
    first.scatter_reduce_(0, key, everything, reduce="amin")
    return first, key


def num_coordinates(space: HomogeneousSpace, chart: Chart = "smooth") -> int:
    """How many numbers :attr:`RelativeElements.coordinates` has in a space, invariants of both points included."""
    check_is("space", space, HomogeneousSpace)
    check_choice("chart", chart, Chart)
    group = space.group
    return (group.algebra_dim if chart == "log" else group.num_coordinates) + 2 * space.num_invariants


def join_coordinates(parts: Sequence[Tensor]) -> Tensor:
    """Join coordinates ``[rows, fiber, fiber, k]`` of pairs along the last axis, which lies outermost in memory.

    Networks of the coordinates run over vectors of pairs, and most parts are the same for many pairs in a row.
    """
    return torch.cat([part.movedim(-1, 0) for part in parts]).movedim(0, -1)


def in_frames(group: FiniteGroup, vectors: Tensor) -> Tensor:
    """h_a⁻¹ v for each frame: ``[vectors, dim]`` to ``[vectors, fiber, dim]``, in their dtype, under autocast too."""
    inverse = group.elements[group.inverse_index].to(vectors.device)
    # The product is taken in float64 so that a coordinate which should vanish does, as nearly as it can.
    return torch.einsum("aij,pj->pai", inverse, vectors.to(torch.float64)).to(vectors.dtype)


def _taken(field: Tensor, points: Tensor) -> Tensor:
    """Rows of a field ``[points, *]``; torch takes those of matrices several times as fast."""
    return field.flatten(1).index_select(0, points).unflatten(1, field.shape[1:])


def _inverse(group: Group, linear: Tensor) -> Tensor:
    """Inverses ``[*, dim, dim]`` of linear parts."""
    if isinstance(group, SemidirectProduct) and not isinstance(group.stabilizer, FiniteGroup):
        return group.stabilizer.inverse(linear)
    if isinstance(group, Translations):
        return linear
    return torch.linalg.inv(linear)
