"""Relative elements g_ia⁻¹ g_jb of the edges of a lifted graph. Layers depend on the geometry only through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lieattn._core.checks import check_alike, check_choice, check_is, check_length, check_returned, check_tensor
from lieattn._core.contexts import region, transformed, without_autocast
from lieattn._core.numerics import lengths, sums
from lieattn.geometry._indices import Movable
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.groups import FiniteGroup, Group, SemidirectProduct, affine
from lieattn.spaces import Euclidean, HomogeneousSpace, PositionDirection

Chart = Literal["smooth", "log"]

_ROUNDING_STEPS = 16
# Mean squared difference of displacements in one bin, in units of its width. Rounding of rotated grids gives at most
# 0.008 in space, displacements that are spread over the bins 1/6 for each axis.
_MOST_SPREAD = 0.02
_NOTHING = 1e-12  # least 1 - x², where weights exp(-1e12) are 0


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class RelativeElements(Movable):
    r"""The elements :math:`g_{ia}^{-1} g_{jb}` of every edge from j to i, in the forms that layers use.

    Properties are computed on first use and then kept. Displacements that repeat, as on grids, are evaluated once: the
    properties have a *row* for each distinct displacement, and :attr:`row` is the row of each edge.

    **Equivariance.** No property changes if all elements are multiplied from the left by one g in G.

    Attributes
    ----------
    space, neighbors, length
        X with its group G, the edges, and the length by which translations are divided.
    pos, batch
        ``[points, *]``, points of X, and ``[points]`` int64, the cloud of each point.
    group, pose
        Finite group H whose elements are the frames, and the matrices ``[points, dim, dim]`` by which they are
        multiplied from the left, the same for all points of a cloud. They are None for other frames, and ``pose`` also
        for the elements of H themselves.
    elements
        ``[points, fiber, m, m]``, the elements g_ia, or None if ``group`` and ``pose`` determine them.
    chart
        ``"smooth"`` coordinates of elements, or ``"log"`` for those of the Lie algebra.
    dilation, levels_up
        For :class:`ScaleFrames`, the scale of each node ``[points]``, by which displacements are divided, and the
        number of steps from the scale of the target to that of the source, ``[edges]`` int64.
    given
        ``[rows, fiber, fiber, k]``, coordinates that replace those of the chart.
    cutoff
        Distance at which the weight of smooth neighbors vanishes, or None if all have the same weight.
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
    # Pairs of a property and the function that identifies the checkpointed part in which it was used first.
    _first_uses: tuple[tuple[str, object], ...] = field(default=(), init=False, repr=False)
    _rows_known: bool = field(default=False, init=False, repr=False)
    _row: Tensor | None = field(default=None, init=False, repr=False)
    _representatives: Tensor | None = field(default=None, init=False, repr=False)
    _positions: Tensor | None = field(default=None, init=False, repr=False)
    _coordinates: Tensor | None = field(default=None, init=False, repr=False)
    _log_window: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("coordinates", self.chart, Chart)  # the argument's name in lift
        if self.chart == "log" and not self.space.group.has_logarithm:
            raise ValueError(f"coordinates: expected 'smooth', since {self.space.group.name} defines no logarithm")

    # --- sizes ----------------------------------------------------------------------------------------------------

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
    def row(self) -> Int[Tensor, " edges"] | None:
        """``[edges]`` int64, the row of each edge, or None if every edge has its own row."""
        # The number of distinct displacements depends on the data, which are unknown in a trace.
        traced = torch.compiler.is_compiling() or transformed()
        if self._row is not None and self.given is None and self._differentiable():
            if traced:
                return None
            self._share_rows()  # the points have needed gradients only since the rows were found
        if not (self._rows_known or traced):
            self._share_rows()
        return self._row

    # --- positions and pairs of frames ----------------------------------------------------------------------------

    @property
    def positions(self) -> Float[Tensor, "rows fiber dim"]:
        r"""``[rows, fiber, dim]``, the position of the source as seen from each frame of the target.

        It is :math:`g_{ia}^{-1} x_j`. For affine groups, this is :math:`A_{ia}^{-1} (x_j - x_i)` divided by the length,
        where A is the linear part of the element.
        """
        return self._kept("_positions", self._seen)

    @property
    def pair_index(self) -> Int[Tensor, "fiber fiber"]:
        """``[fiber, fiber]`` int64, the index of h_a⁻¹ h_b in ``group``, which is the same for all edges.

        ValueError is raised unless the frames of all points of a cloud are the elements of one finite group.
        """
        if not self.tied or self.group is None:
            what = f"frames over different points of {self.space.name} are not related by a table of a finite group"
            raise ValueError(f"graph: {what}; use frames of a finite group, or an encoding of coordinates")
        return self.group.relative_index.to(self.pos.device)

    @property
    def coordinates(self) -> Float[Tensor, "rows fiber fiber k"]:
        """``[rows, fiber, fiber, k]``, the coordinates of the relative elements.

        Smooth coordinates are the position, the coordinates of the linear part (the entries of its matrix; none for
        translations), and, for several scales, the number of steps between the levels. Logarithms are coordinates of
        the Lie algebra. If the group is not transitive, the invariants of the orbits of both points follow.
        """
        if self.given is not None:
            return self.given
        return self._kept("_coordinates", self._all_coordinates)

    @property
    def log_window(self) -> Float[Tensor, " rows"] | None:
        """``[rows]``, the logarithm of each neighbor's weight, which vanishes at the cutoff; None without a cutoff."""
        return None if self.cutoff is None else self._kept("_log_window", self._faded)

    # --- transforms -----------------------------------------------------------------------------------------------

    def at(
        self, pos: Float[Tensor, "points dim"], deformation: Float[Tensor, "clouds dim dim"] | None = None
    ) -> RelativeElements:
        """Return the same neighbor lists and frames for new positions ``[points, dim]``, which can have gradients.

        A ``deformation`` D ``[clouds, dim, dim]`` replaces lattice vectors v of periodic clouds by v D; its gradients
        give stresses. ``pos`` are the deformed positions. The result equals a new lift as long as no further pairs have
        become neighbors. ValueError is raised for another shape, and for frames or coordinates that depend on the
        points.
        """
        check_tensor("pos", pos, "a floating tensor [points, dim]")
        if pos.shape != self.pos.shape:
            raise ValueError(f"pos: expected {tuple(self.pos.shape)} as before, got {tuple(pos.shape)}")
        if self.elements is not None or self.pose is not None or self.given is not None:
            raise ValueError("graph: its frames or coordinates depend on its points; lift the moved points instead")
        if deformation is None:
            return replace(self, pos=pos)
        neighbors = self.neighbors.deformed(deformation, self.batch)
        check_alike("deformation", deformation, "pos", pos)
        return replace(self, pos=pos, neighbors=neighbors)

    def restricted(self, neighbors: Neighbors, points: Tensor | None, edges: Tensor | None) -> RelativeElements:
        """Return the relative elements of some points and edges, see :meth:`LiftedGraph.restricted`."""
        own: dict[str, Any] = {}
        if points is not None:
            names = "pos", "batch", "pose", "elements", "dilation"
            own = {name: rows_of(getattr(self, name), points) for name in names}
        levels_up = given = None
        if edges is not None:
            row = edges if self.given is None or self.row is None else self.row[edges]
            levels_up, given = rows_of(self.levels_up, edges), rows_of(self.given, row)
        return replace(self, neighbors=neighbors, levels_up=levels_up, given=given, **own)

    def with_coordinates(self, coordinates: Float[Tensor, "rows fiber fiber k"]) -> RelativeElements:
        """Return the same relative elements with other coordinates ``[rows, fiber, fiber, k]``."""
        rows, fiber = self.num_rows, self.fiber
        if coordinates.ndim != 4 or coordinates.shape[:3] != (rows, fiber, fiber):
            raise ValueError(f"coordinates: expected [{rows}, {fiber}, {fiber}, k], got {tuple(coordinates.shape)}")
        changed = replace(self, given=coordinates)
        for name in ("_rows_known", "_row", "_representatives", "_positions", "_log_window"):
            object.__setattr__(changed, name, getattr(self, name))
        return changed

    def bounded(self, radius: float = 7.0) -> RelativeElements:
        """Replace coordinates p by p tanh(ν / radius) / ν with ν = |p| + 1e-6, whose length is below 1.

        Lengths far below ``radius``, a positive number, are divided by it.
        """
        check_length("radius", radius)
        pairs = self.coordinates
        length = lengths(pairs, keepdim=True) + 1e-6
        return self.with_coordinates(pairs * (torch.tanh(length / radius) / length))

    def joined(self, features: Float[Tensor, "rows q"]) -> RelativeElements:
        """Append further coordinates ``[rows, q]`` of each row, such as functions of the distance."""
        pairs = self.coordinates
        more = features.to(pairs.dtype)[:, None, None].expand(*pairs.shape[:3], -1)
        return self.with_coordinates(join_coordinates([pairs, more]))

    def displacements(self) -> Float[Tensor, "rows dim"]:
        """Return x_j - x_i ``[rows, dim]`` of each row, in the unit of the points."""
        places = self.pos[:, : self.space.group.dim]
        displacements = self.neighbors.displacements(places)
        return displacements if self.row is None else displacements[self._rows()]

    # --- evaluation -----------------------------------------------------------------------------------------------

    def _kept(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return the property that is kept as ``name``, computed on first use.

        There are three cases. In a trace or a transform, a known value is used, otherwise it is computed, but not kept.
        If a checkpointed part of a forward pass computed the property first and runs again, the property is computed
        again. Everywhere else, it is computed once and kept.
        """
        known: Tensor | None = getattr(self, name)
        if known is not None and not known.requires_grad and self._differentiable():
            known = None  # it was computed before the points needed gradients
        if torch.compiler.is_compiling() or transformed():
            # Tensors of a trace or a transform are invalid outside of it.
            return self._evaluated(compute) if known is None else known
        now = region.get()
        if now.again and (name, now.function) in self._first_uses:
            # In the backward pass, torch replaces the tensors saved in the first run by those of the second one by one.
            # If the second run used the value kept by the first, it would save fewer tensors.
            return now.once((self, name), lambda: self._evaluated(compute))
        if known is None:
            known = self._evaluated(compute)
            # A value computed without gradients (in torch.no_grad) would cut off the gradients of later uses.
            if known.requires_grad or not self._differentiable():
                object.__setattr__(self, name, known)
                if not now.again:
                    object.__setattr__(self, "_first_uses", (*self._first_uses, (name, now.function)))
        return known

    def _evaluated(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a property in full precision, and in inference mode only if the points are inference tensors."""
        if torch.compiler.is_dynamo_compiling():  # torch.compile cannot follow inference mode
            with without_autocast(self.pos.device):
                return compute()
        with without_autocast(self.pos.device), torch.inference_mode(self.pos.is_inference()):
            return compute()

    def _differentiable(self) -> bool:
        sources = (self.pos, self.pose, self.elements, self.neighbors.shift)
        return any(tensor is not None and tensor.requires_grad for tensor in sources)

    def _share_rows(self) -> None:
        """Find displacements that repeat, unless they have gradients, which would reach only the representatives."""
        index: Tensor | None = None
        if self.tied and self.dilation is None and self.given is None and not self._differentiable():
            with torch.no_grad(), torch.inference_mode(self.pos.is_inference()):
                displacements = self.posed(self.neighbors.displacements(self.pos), self.neighbors.target)
                if len(displacements):
                    cloud = self.batch[self.neighbors.target]
                    rows, index = _distinct(displacements, self._extents(cloud), cloud)
                    object.__setattr__(self, "_representatives", rows)
        object.__setattr__(self, "_row", index)
        object.__setattr__(self, "_rows_known", True)

    def _rows(self) -> Tensor:
        """Return one edge of each row."""
        if self._representatives is None or self.row is None:
            return torch.arange(self.neighbors.num_edges, device=self.pos.device)
        return self._representatives

    def _extents(self, cloud: Tensor) -> Tensor:
        """Return the largest absolute coordinate of each edge's ``cloud`` and of its shifts, ``[edges]``."""
        largest = self.pos.abs().amax(dim=1)
        extents = largest.new_zeros(int(self.batch.max()) + 1).scatter_reduce(0, self.batch, largest, "amax")
        if self.neighbors.shift is not None:
            longest = self.neighbors.shift.abs().amax(dim=1).to(extents)
            extents = extents.scatter_reduce(0, cloud, longest, "amax")
        return extents[cloud]

    def posed(self, vectors: Tensor, points: Tensor | None = None) -> Tensor:
        """Return vectors ``[n, dim]`` as seen from the pose of their cloud.

        Row i belongs to the cloud of point ``points[i]``, or of point i by default.
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
        # All derivatives of this weight vanish at the cutoff. Its logarithm diverges fast enough to outweigh scores of
        # any size; with a power of 1 - x², neighbors with large scores would fade only within rounding of the cutoff.
        square = displacements.square().sum(dim=-1)
        return -square / (1 - square).clamp(min=_NOTHING)

    def _linear_pairs(self) -> Tensor:
        """Return the linear parts of the relative elements, ``[rows | 1, fiber, fiber, dim, dim]``."""
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
        if not group.only_translates:
            linear = self._linear_pairs()
            smooth = self.chart == "smooth"
            if smooth and isinstance(group, SemidirectProduct):
                parts.append(group.stabilizer.coordinates(linear))
            elif smooth and group.is_affine and type(group).coordinates is Group.coordinates:
                parts.append(linear.flatten(-2))
            else:
                relative = affine(linear, parts[0].expand(*pairs, -1)) if parts else linear
                parts = [group.coordinates(relative) if smooth else group.log(relative)]
        if self.levels_up is not None:
            parts.append(self.levels_up.to(self.pos.dtype)[:, None, None, None])
        if self.space.num_invariants:
            invariants = self.space.invariants(self.pos)
            found = (len(self.pos), self.space.num_invariants)
            check_returned(f"invariants of {self.space.name}", invariants, "invariants", found, self.pos)
            for end in (self.neighbors.target, self.neighbors.source):
                parts.append(invariants.index_select(0, end)[:, None, None])
        return join_coordinates([part.expand(*pairs, -1) for part in parts])


def rows_of(value: Tensor | None, rows: Tensor) -> Tensor | None:
    """Return some rows of a tensor, or None for None."""
    return None if value is None else value[rows]


def _distinct(displacements: Tensor, extent: Tensor, cloud: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return one edge of each distinct displacement, int64 ``[types]``, and the type of each edge, int64 ``[edges]``.

    If fewer than half of the edges repeat, all edges and None are returned. A 28 x 28 image with 5 x 5 neighborhoods
    has 19,000 edges and 25 distinct displacements. Two displacements are equal if they fall into one bin, whose width
    is at most 16 rounding steps of the largest coordinate of their cloud, ``extent`` ``[edges]``; rotated grids are
    therefore recognized as well. Widths are powers of two, and only clouds with the same width share bins, so the
    resolution of a cloud does not depend on other clouds. If the displacements of a ``cloud`` ``[edges]`` are spread
    over their bins, as those of many points far from the origin, they are no repetitions, and nothing is shared.
    """
    edges = len(displacements)
    everything = torch.arange(edges, device=displacements.device)
    _, exponent = torch.frexp(_ROUNDING_STEPS / 2 * torch.finfo(displacements.dtype).eps * extent.double())
    # Shift by half a bin, since displacements on grids are often multiples of its width.
    places = torch.ldexp(displacements.detach().double(), -exponent[:, None])
    bins = torch.floor(places + 0.5).to(torch.int64)
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
    squares, repeats = (places - places[first[key]]).square().sum(dim=1), first[key] != everything
    total = sums(torch.stack([squares, repeats.to(squares.dtype)], dim=1), cloud, int(cloud.max()) + 1)
    spread = bool((total[:, 0] > _MOST_SPREAD * total[:, 1]).any())
    return (everything, None) if spread else (first, key)


def num_coordinates(space: HomogeneousSpace, chart: Chart = "smooth") -> int:
    """Return the number of :attr:`RelativeElements.coordinates` in a space, invariants of both points included."""
    check_is("space", space, HomogeneousSpace)
    check_choice("chart", chart, Chart)
    group = space.group
    return (group.algebra_dim if chart == "log" else group.num_coordinates) + 2 * space.num_invariants


def join_coordinates(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate coordinates ``[rows, fiber, fiber, k]`` of pairs along the last axis, which is outermost in memory.

    With this layout, networks of the coordinates process vectors of pairs.
    """
    return torch.cat([part.movedim(-1, 0) for part in parts]).movedim(0, -1)


def in_frames(group: FiniteGroup, vectors: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows fiber dim"]:
    """Return h_a⁻¹ v ``[vectors, fiber, dim]`` for vectors ``[vectors, dim]``, in their dtype, also under autocast."""
    inverse = group.elements[group.inverse_index].to(vectors.device)
    # The product is computed in float64, so that coordinates that should vanish are as small as possible.
    return torch.einsum("aij,pj->pai", inverse, vectors.to(torch.float64)).to(vectors.dtype)


def _taken(field: Tensor, points: Tensor) -> Tensor:
    """Return rows of a field ``[points, *]``. Flattened to a matrix first, this is several times as fast in torch."""
    return field.flatten(1).index_select(0, points).unflatten(1, field.shape[1:])


def _inverse(group: Group, linear: Tensor) -> Tensor:
    """Return the inverses ``[*, dim, dim]`` of linear parts."""
    if isinstance(group, SemidirectProduct) and not isinstance(group.stabilizer, FiniteGroup):
        return group.stabilizer.inverse(linear)
    if group.only_translates:
        return linear
    return torch.linalg.inv(linear)
