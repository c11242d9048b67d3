"""Neighbor lists."""

from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lieattn._core.checks import check_tensor, counted, kind, may_read_values
from lieattn._core.numerics import counts, sums
from lieattn.geometry._indices import Movable, OnFirstUse, Padding, check_indices, first_true, padding
from lieattn.geometry._search import sort_keys

# Clouds are padded to the largest one if the number of pairs grows at most by this factor. Otherwise lists are cheaper.
_MOST_FILLED = 4


@dataclass(frozen=True, eq=False)
class Images(Movable):
    """All points, and the periodic images of points that occur in neighbor lists, numbered like further points.

    Attributes
    ----------
    point
        int64 ``[images]``, the point of each image: first all points themselves, then their periodic images.
    edge
        int64 ``[images - points]``, for each periodic image, an edge that has its shift.
    neighbors
        The same edges in the same order, with images as sources. Periodic images have no neighbors.
    """

    point: Tensor
    edge: Tensor
    neighbors: "Neighbors"


@dataclass(frozen=True, eq=False, repr=False)
class Neighbors(Movable):
    """Neighbor lists in CSR form, sorted by target, then by source.

    The lists are an immutable value, whose tensors must not be modified. The constructor raises TypeError or ValueError
    for wrong shapes, dtypes and devices, and does not check the entries; :meth:`from_edge_index` sorts and checks edges
    in any order.

    Attributes
    ----------
    row_ptr
        int64 ``[points + 1]``: the keys of target i are ``source[row_ptr[i]:row_ptr[i + 1]]``.
    source, target
        Key and query point of each edge, int64 ``[edges]``.
    whole_clouds
        Padded layout of the clouds if every point is known to attend to all points of its cloud, itself included. None
        if this is not known, or if padding would need too much memory.
    shift
        For periodic clouds, the lattice vector that moves the source of each edge to its image: floating
        ``[edges, dim]``, float64 from a search, see :meth:`displacements`. Several images of one point, and images of
        the target itself, are separate edges. None if no source is shifted.

    Examples
    --------
    >>> neighbors = Neighbors.from_edge_index(torch.tensor([[1, 2, 0], [0, 1, 1]]), num_points=3)
    >>> neighbors
    Neighbors(points=3, edges=3, device=cpu)
    >>> neighbors.row_ptr.tolist(), neighbors.source.tolist()
    ([0, 1, 3, 3], [1, 0, 2])
    """

    row_ptr: Tensor
    source: Tensor
    target: Tensor
    whole_clouds: Padding | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        check_indices("row_ptr", self.row_ptr, dim=1)
        check_indices("source", self.source, dim=1, device=self.row_ptr.device)
        check_indices("target", self.target, dim=1, device=self.row_ptr.device)
        if self.row_ptr.shape[0] == 0:
            raise ValueError("row_ptr: expected one entry more than there are points, got no entries")
        if self.num_edges != self.target.shape[0]:
            got = f"got {self.num_edges} and {self.target.shape[0]}"
            raise ValueError(f"source, target: expected one entry per edge, {got}")
        if self.shift is not None:
            check_tensor("shift", self.shift, "a floating tensor [edges, dim]")
            if self.shift.dim() != 2 or self.shift.shape[0] != self.num_edges or self.shift.device != self.device:
                got = f"{tuple(self.shift.shape)} on {self.shift.device}"
                raise ValueError(f"shift: expected [edges={self.num_edges}, dim] on {self.device}, got {got}")

    def __repr__(self) -> str:
        return f"Neighbors(points={self.num_points}, edges={self.num_edges}, device={self.device})"

    @property
    def num_points(self) -> int:
        """Number of points."""
        return self.row_ptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.source.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.row_ptr.device

    @property
    def degree(self) -> Int[Tensor, " {self.num_points}"]:
        """Number of keys of each target, int64 ``[points]``."""
        return self.row_ptr.diff()

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """Edges in the format of PyTorch Geometric, int64 ``[2, edges]``: sources, then targets."""
        return torch.stack([self.source, self.target])

    @property
    def is_loop(self) -> Bool[Tensor, " edges"]:
        """Whether an edge connects a point with itself, and not with its periodic image: bool ``[edges]``."""
        same = self.source == self.target
        return same if self.shift is None else same & (self.shift == 0).all(dim=1)

    @OnFirstUse
    def col_edge(self) -> Int[Tensor, " edges"]:
        """Edges sorted by source, int64 ``[edges]``; computed on first use.

        ``col_edge[col_ptr[j]:col_ptr[j + 1]]`` are the edges with source j, ascending.
        """
        return self.source.argsort(stable=True)

    @OnFirstUse
    def col_ptr(self) -> Int[Tensor, " starts"]:
        """First edge of each source in :attr:`col_edge`, int64 ``[points + 1]``; computed on first use."""
        return _pointers(self.source[self.col_edge], self.num_points)

    @OnFirstUse
    def images(self) -> Images | None:
        """Points and periodic images that are sources of edges, or None if no source is shifted."""
        if self.shift is None:
            return None
        moved = (self.shift.detach() != 0).any(dim=1).nonzero()[:, 0]
        number = self.source[moved]
        for column in self.shift.detach()[moved].unbind(1):
            values, place = torch.unique(column, return_inverse=True)
            # Both factors are at most the number of edges, so the product fits int64.
            number = torch.unique(number * len(values) + place, return_inverse=True)[1]
        count = int(number.max()) + 1 if len(number) else 0
        edge = number.new_zeros(count).index_copy(0, number, moved)
        source = self.source.index_copy(0, moved, self.num_points + number)
        row_ptr = torch.cat([self.row_ptr, self.row_ptr[-1:].expand(count)])
        points = torch.arange(self.num_points, device=self.device)
        return Images(torch.cat([points, self.source[edge]]), edge, Neighbors(row_ptr, source, self.target))

    def at_images(self, pos: Float[Tensor, "points dim"]) -> Float[Tensor, "images dim"]:
        """Return the positions ``[images, dim]`` of all :attr:`images` of points at ``pos`` ``[points, dim]``."""
        check_tensor("pos", pos, "a floating tensor [points, dim]")
        if self.images is None or self.shift is None:
            return pos
        if pos.shape != (self.num_points, self.shift.shape[1]):
            raise ValueError(f"pos: expected {(self.num_points, self.shift.shape[1])}, got {tuple(pos.shape)}")
        moved = pos.index_select(0, self.images.point[len(pos) :]) + self.shift[self.images.edge]
        return torch.cat([pos, moved.to(pos.dtype)])

    def deformed(self, deformation: Float[Tensor, "clouds dim dim"], batch: Int[Tensor, " points"]) -> "Neighbors":
        """Return the same edges with shifts v D, for D ``[clouds, dim, dim]`` and the cloud ``batch`` of each point."""
        check_tensor("deformation", deformation, "a floating tensor [clouds, dim, dim]")
        below = len(deformation) if may_read_values(batch) else None
        check_indices("batch", batch, dim=1, device=self.device, below=below)
        if len(batch) != self.num_points:
            raise ValueError(f"batch: expected one entry for each of {self.num_points} points, got {len(batch)}")
        if self.shift is None:
            return self
        dim = self.shift.shape[1]
        if deformation.shape[1:] != (dim, dim):
            raise ValueError(f"deformation: expected [clouds, {dim}, {dim}], got {tuple(deformation.shape)}")
        if deformation.device != self.device:
            raise ValueError(f"deformation: expected on {self.device} as the lists, got on {deformation.device}")
        shift = (self.shift[:, None] @ deformation.to(self.shift.dtype).index_select(0, batch[self.target]))[:, 0]
        changed = replace(self, shift=shift)
        # The deformation does not change which shifts are equal. Exported programs cannot look for equal ones.
        if "images" in vars(self) or not torch.compiler.is_compiling():
            vars(changed)["images"] = self.images
        return changed

    def displacements(self, pos: Float[Tensor, "points dim"]) -> Float[Tensor, "{self.num_edges} dim"]:
        """Return ``pos[source] + shift - pos[target]`` ``[edges, dim]`` for positions ``[points, dim]``.

        In periodic clouds, positions and shifts are long, so only the sum is rounded to the dtype of the positions.
        """
        wide = pos.contiguous()  # gathering from other layouts is many times slower
        wide = wide if self.shift is None else wide.to(torch.promote_types(wide.dtype, self.shift.dtype))
        difference = wide.index_select(0, self.source) - wide.index_select(0, self.target)
        return difference if self.shift is None else (difference + self.shift).to(pos.dtype)

    def sum_to_targets(
        self, messages: Shaped[Tensor, "{self.num_edges} *rest"]
    ) -> Shaped[Tensor, "{self.num_points} *rest"]:
        """Sum messages ``[edges, *]`` at their targets, to ``[points, *]``. Sums of integers and masks are int64."""
        return sums(messages, self.target, self.num_points)

    def is_symmetric(self) -> bool:
        """Return whether the reverse of every edge is also an edge. Shifts are ignored."""
        # Sorted by source, the reversed edges are in the order of the lists if the two sets are equal.
        source, target = self.source[self.col_edge], self.target[self.col_edge]
        return torch.equal(source, self.target) and torch.equal(target, self.source)

    def select(self, edges: Int[Tensor, " edges"]) -> "Neighbors":
        """Return the lists with some of the edges, given by their indices in ascending order."""
        target = self.target[edges]
        shift = None if self.shift is None else self.shift[edges]
        return Neighbors(_pointers(target, self.num_points), self.source[edges], target, shift=shift)

    @classmethod
    def from_edge_index(cls, edge_index: Int[Tensor, "2 edges"], num_points: int) -> Self:
        """Build neighbor lists from edges in any order, int64 ``[2, edges]``: sources, then targets.

        TypeError or ValueError is raised for other shapes and dtypes, for a point that does not exist, and for an edge
        that occurs twice.
        """
        check_edge_index(edge_index)
        outside = ((edge_index < 0) | (edge_index >= num_points)).any(dim=0)
        if outside.any():
            edge = first_true(outside)
            got = f"got edge {edge} from {int(edge_index[0, edge])} to {int(edge_index[1, edge])}"
            raise ValueError(f"edge_index: expected points from 0 to {num_points - 1}, {got}")
        keys = sort_keys(edge_index[1] * num_points + edge_index[0])
        repeated = keys.diff() == 0
        if repeated.any():
            target, source = divmod(int(keys[first_true(repeated)]), num_points)
            advice = "torch_geometric.utils.coalesce removes repetitions"
            got = f"got the edge from {source} to {target} again"
            raise ValueError(f"edge_index: expected every edge once, {got}; {advice}")
        return cls.from_keys(keys, num_points)

    @classmethod
    def from_keys(cls, keys: Tensor, num_points: int) -> Self:
        """Build neighbor lists from sorted edge numbers, ``target * num_points + source``, without checks."""
        target = keys // max(num_points, 1)
        return cls(_pointers(target, num_points), keys - target * num_points, target)


class _AllOfClouds(Neighbors):
    """All pairs of points of each cloud. The lists are built on first use, since attention over clouds needs none."""

    _num_edges: int

    def __init__(self, degree: Tensor, layout: Padding, num_edges: int) -> None:
        row_ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        vars(self).update(row_ptr=row_ptr, whole_clouds=layout, _num_edges=num_edges)

    @property
    def num_edges(self) -> int:
        return self._num_edges

    @OnFirstUse
    def source(self) -> Tensor:
        layout = cast(Padding, self.whole_clouds)
        members = layout.pad(torch.arange(self.num_points, device=self.device))
        if layout.mask is None:
            return members[layout.cloud].flatten()
        # The mask is not used, because the number of points that it selects is unknown when torch exports.
        place = torch.arange(self.num_edges, device=self.device) - self.row_ptr[self.target]
        return members[layout.cloud[self.target], place]

    @OnFirstUse
    def target(self) -> Tensor:
        # ONNX has no repeat_interleave to a known size, so the targets are counted where their lists begin.
        begins = self.row_ptr[1:-1]
        return counts(begins, self.num_edges).cumsum(0)


def all_pairs_of_clouds(cloud: Tensor) -> Neighbors | None:
    """Return all pairs of points of each cloud ``[points]``, or None if padding would need too much memory."""
    number, cloud = torch.unique(cloud, return_inverse=True)
    degree = torch.bincount(cloud, minlength=len(number))[cloud]
    edges = int(degree.sum())
    layout = padding(cloud, len(number))
    filled = layout.shape[0] * layout.shape[1] ** 2
    return _AllOfClouds(degree, layout, edges) if filled <= _MOST_FILLED * edges else None


def check_edge_index(edge_index: Tensor) -> None:
    """Raise TypeError or ValueError unless edges are an int64 tensor ``[2, edges]``."""
    check_indices("edge_index", edge_index, dim=2)
    if len(edge_index) != 2:
        raise ValueError(f"edge_index: expected shape [2, edges], got {tuple(edge_index.shape)}")


def check_lists(neighbors: object, batch: Tensor) -> None:
    """Raise TypeError or ValueError unless a user's neighborhood returned valid lists of points.

    ``batch`` ``[points]`` int64 is the cloud of each point. Lists of whole clouds are not built.
    """
    name = "neighborhood: expected to return"
    if not isinstance(neighbors, Neighbors):
        raise TypeError(f"{name} Neighbors, as Neighbors.from_edge_index does, got {kind(neighbors)}")
    if neighbors.num_points != len(batch) or neighbors.device != batch.device:
        got = f"{counted(neighbors.num_points, 'point')} on {neighbors.device}"
        raise ValueError(f"{name} lists of {counted(len(batch), 'point')} on {batch.device}, got {got}")
    if isinstance(neighbors, _AllOfClouds):
        found = cast(Padding, neighbors.whole_clouds).cloud
        if torch.unique(torch.stack([found, batch]), dim=1).shape[1] > len(torch.unique(found)):
            raise ValueError(f"{name} edges within clouds, got all pairs of several clouds; use the argument batch")
        return
    source, target, points = neighbors.source, neighbors.target, len(batch)
    steps = (target * points + source).diff()
    ascending = bool((steps > 0).all() if neighbors.shift is None else (steps >= 0).all())
    if not ascending or not torch.equal(_pointers(target, points), neighbors.row_ptr):
        raise ValueError(f"{name} distinct edges, sorted by target, then by source; use Neighbors.from_edge_index")
    outside = (source < 0) | (source >= points)
    if outside.any():
        got = f"got an edge from point {int(source[first_true(outside)])}"
        raise ValueError(f"{name} edges between points from 0 to {points - 1}, {got}")
    check_within_clouds(f"{name} edges within clouds", neighbors, batch)


def check_within_clouds(expected: str, neighbors: Neighbors, batch: Tensor) -> None:
    """Raise ValueError if an edge connects points of two clouds."""
    crossing = batch[neighbors.source] != batch[neighbors.target]
    if crossing.any():
        source, target = (int(end[first_true(crossing)]) for end in (neighbors.source, neighbors.target))
        raise ValueError(f"{expected}, got one from point {source} to point {target} of another cloud")


def _pointers(ascending: Tensor, number: int) -> Tensor:
    """Return the first place of each of 0 ... number - 1 in an ascending tensor, and the end."""
    return torch.searchsorted(ascending, torch.arange(number + 1, device=ascending.device))
