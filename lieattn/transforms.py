"""Points in the format of PyTorch Geometric.

The functions for neighbors need no compiled extension, keep all neighbors, and return the same edges for the same
points on every device and in every batch. Functions and transforms have the names and the order of arguments of
``torch_geometric.nn`` and ``torch_geometric.transforms``, without ``max_num_neighbors``, ``num_workers``,
``batch_size`` and ``cosine``.

``flow`` is the order of the rows of ``edge_index``. If i is the center and j its neighbor, ``"source_to_target"`` gives
rows ``(j, i)``, for which a ``MessagePassing`` layer sums the messages of all neighbors j at i. ``"target_to_source"``
gives rows ``(i, j)``. Edges are sorted by center, then by neighbor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import BaseTransform

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_is,
    check_last,
    check_length,
    check_tensor,
    kind,
    may_read_values,
    shown,
)
from lieattn._core.values import attributes_of_points, entries, select_points
from lieattn.geometry import Nearest, Neighbors, Radius, farthest_points, find_neighbors, point_clouds

__all__ = [
    "FarthestPoints",
    "KNNGraph",
    "RadiusGraph",
    "Standardize",
    "fps",
    "from_offsets",
    "knn_graph",
    "periodic_radius_graph",
    "radius",
    "radius_graph",
]

Flow = Literal["source_to_target", "target_to_source"]
Ties = Literal["index", "all"]

_LABELS = ("segment", "category", "label")  # of points, of clouds, and of either in earlier versions


def from_offsets(item: Mapping[str, Any]) -> Batch:
    """Return clouds in the format of Pointcept and Point Transformer as a batch, with the points in the same order.

    Of the entries, ``coord`` becomes ``pos``, ``feat`` becomes ``x``, and the first of ``segment``, ``category`` and
    ``label`` becomes ``y``, int64. Negative labels, which are ignored there, get a ``mask`` that is false. All other
    entries keep their names. Outputs for points belong to the given offsets; those of a batch are ``batch.ptr[1:]``.

    Parameters
    ----------
    item
        ``coord`` ``[points, dim]`` floating, ``offset`` ``[clouds]`` int32 or int64, the index after the last point of
        each cloud, and, if present, ``feat`` ``[points, channels]`` and labels. Clouds may be empty.

    Raises
    ------
    TypeError
        If ``coord`` or ``offset`` is absent or no tensor of these dtypes.
    ValueError
        If the offsets descend, are negative, or do not end with the number of points; or if labels are no integers.

    Examples
    --------
    >>> item = {"coord": torch.zeros(5, 3), "feat": torch.ones(5, 1), "offset": torch.tensor([2, 5])}
    >>> from_offsets(item).batch.tolist()
    [0, 0, 1, 1, 1]
    """
    check_is("item", item, Mapping)
    coord: Any = item.get("coord")
    offset = item.get("offset")
    check_tensor("item['coord']", coord, "a floating tensor [points, dim]")
    if not isinstance(offset, Tensor) or offset.dtype not in (torch.int32, torch.int64) or offset.ndim != 1:
        got = f"{tuple(offset.shape)}, {offset.dtype}" if isinstance(offset, Tensor) else kind(offset)
        raise TypeError(f"item['offset']: expected an integer tensor [clouds], the ends of the clouds, got {got}")
    ptr = F.pad(offset.long(), (1, 0))
    if (ptr.diff() < 0).any() or ptr[-1] != len(coord):
        expected = f"expected the ends of the clouds, ascending to {len(coord)}, the number of points"
        raise ValueError(f"item['offset']: {expected}, got {shown(offset.tolist())}")
    clouds = point_clouds(coord, ptr=ptr)
    rest = {name: value for name, value in item.items() if name not in ("coord", "feat", "offset", "batch", "ptr")}
    batch = Batch(pos=coord, batch=clouds.batch, ptr=ptr, **rest)
    if (feat := item.get("feat")) is not None:
        batch.x = feat
    labels = next((rest[name] for name in _LABELS if name in rest), None)
    if labels is not None:
        check_is("item: labels", labels, Tensor)
        batch.y = labels.long()
        if not torch.equal(batch.y.to(labels.dtype), labels):
            raise ValueError(f"item: labels: expected integers, the classes, got {shown(labels.tolist())}")
        if (batch.y < 0).any():
            batch.mask = batch.y >= 0
    return batch


def radius_graph(
    pos: Float[Tensor, "points dim"],
    r: float,
    batch: Int[Tensor, " points"] | None = None,
    loop: bool = False,
    flow: Flow = "source_to_target",
) -> Int[Tensor, "2 edges"]:
    """Return all pairs of points of one cloud that are at most ``r`` apart, int64.

    See :class:`lieattn.geometry.Radius`.

    Parameters
    ----------
    pos
        The points. Distances are computed in float64.
    r
        The distance, a positive number, with a relative tolerance of 1e-5.
    batch
        Cloud of each point, int64, in any order.
    loop
        Whether a point is its own neighbor.
    flow
        Order of the rows of the result, see the module.

    Examples
    --------
    >>> radius_graph(torch.tensor([[0.0], [1.0], [3.0]]), 1.5).tolist()
    [[1, 0], [0, 1]]
    """
    check_arguments(radius_graph, locals())
    check_length("r", r)
    return _directed(Radius(r, include_self=loop)(pos, batch).edge_index, flow)


def periodic_radius_graph(
    pos: Float[Tensor, "points dim"],
    r: float,
    cell: Float[Tensor, "*clouds dim dim"],
    pbc: Bool[Tensor, "*clouds dim"] | None = None,
    batch: Int[Tensor, " points"] | None = None,
    loop: bool = False,
    flow: Flow = "source_to_target",
) -> tuple[Int[Tensor, "2 edges"], Float[Tensor, "edges dim"]]:
    """Return the pairs of :func:`radius_graph` in periodic clouds: ``edge_index`` and ``shift``.

    The neighbor of an edge is at ``pos[j] + shift``. All images within ``r`` are neighbors, including several images of
    one point and images of the center itself. ``loop`` adds the center at its own place. ``cell`` and ``pbc`` (by
    default all true) may be the same for all clouds. On the CPU, the package vesin searches the images if it is
    installed. The edges are the same as without it. Errors are those of :func:`lieattn.geometry.point_clouds`.

    Examples
    --------
    >>> edges, shift = periodic_radius_graph(torch.zeros(1, 3), 1.0, torch.diag(torch.tensor([1.0, 2.0, 2.0])))
    >>> edges.tolist(), shift.tolist()
    ([[0, 0], [0, 0]], [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    """
    check_arguments(periodic_radius_graph, locals())
    check_length("r", r)
    clouds = point_clouds(pos, batch=batch, cell=cell, pbc=pbc)
    found = find_neighbors(clouds, Radius(r, include_self=loop))
    shift = pos[found.source] * 0 if found.shift is None else found.shift.to(pos.dtype)
    return _directed(found.edge_index, flow), shift


def knn_graph(
    pos: Float[Tensor, "points dim"],
    k: int,
    batch: Int[Tensor, " points"] | None = None,
    loop: bool = False,
    flow: Flow = "source_to_target",
    *,
    ties: Ties = "index",
) -> Int[Tensor, "2 edges"]:
    """Return the pairs of each point and its ``k`` nearest neighbors in its cloud, int64.

    In a cloud of fewer points, all are neighbors. With ``loop``, the point itself is one of its ``k`` neighbors, as in
    PyTorch Geometric. Of several equally far points, up to a relative 1e-5, those with the lowest indices are chosen.
    With ``ties="all"``, all of them are chosen, and the edges do not depend on the order of the points. See
    :class:`lieattn.geometry.Nearest`. The other parameters and the errors are those of :func:`radius_graph`.

    Examples
    --------
    >>> knn_graph(torch.tensor([[0.0], [1.0], [3.0]]), 1).tolist()
    [[1, 0, 1], [0, 1, 2]]
    """
    check_arguments(knn_graph, locals())
    check_count("k", k)
    found = Nearest(max(1, k - loop), include_self=loop, ties=ties)(pos, batch)
    if loop and k == 1:
        found = found.select(found.is_loop.nonzero()[:, 0])
    return _directed(found.edge_index, flow)


def radius(
    x: Float[Tensor, "points dim"],
    y: Float[Tensor, "centers dim"],
    r: float,
    batch_x: Int[Tensor, " points"] | None = None,
    batch_y: Int[Tensor, " centers"] | None = None,
) -> Int[Tensor, "2 edges"]:
    """Return the pairs of points of ``y`` and of ``x`` in the same cloud at most ``r`` apart, int64.

    Row 0 contains indices of ``y``, and row 1 indices of ``x``, as in PyTorch Geometric. Edges are sorted by row 0,
    then by row 1. ``batch_x`` and ``batch_y`` are the clouds of the points, int64.

    Examples
    --------
    >>> radius(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[0.9], [9.0]]), 1.0).tolist()
    [[0, 0], [0, 1]]
    """
    check_arguments(radius, locals())
    check_length("r", r)
    if (batch_x is None) != (batch_y is None):
        raise ValueError("batch_x, batch_y: expected both or neither")
    if x.shape[1:] != y.shape[1:] or x.device != y.device:
        got = f"{tuple(x.shape)} on {x.device} and {tuple(y.shape)} on {y.device}"
        raise ValueError(f"x, y: expected points of the same dimension on the same device, got {got}")
    return Radius(r).between(x, y, batch_x, batch_y)


def fps(
    pos: Float[Tensor, "points dim"],
    batch: Int[Tensor, " points"] | None = None,
    ratio: float = 0.5,
    *,
    start: Literal["outermost", "first"] = "outermost",
    generator: torch.Generator | None = None,
) -> Int[Tensor, " chosen"]:
    """Choose a fraction ``ratio`` of the points of each cloud, rounded up, by farthest-point sampling.

    The result is int64 indices, cloud by cloud. PyTorch Geometric starts at a random point. This function starts at the
    point farthest from the mean, so it returns the same points at every call and for every order of the points.
    ``generator`` draws the first points instead, and ``start="first"`` corresponds to ``random_start=False``. See
    :func:`lieattn.geometry.farthest_points`.

    Examples
    --------
    >>> fps(torch.tensor([[0.0], [1.0], [2.0], [10.0]]), ratio=0.5).tolist()
    [3, 0]
    """
    check_arguments(fps, locals())
    _check_ratio(ratio)
    clouds = point_clouds(pos, batch=batch)
    if len(pos) == 0:
        return torch.zeros(0, dtype=torch.int64, device=pos.device)
    # The small number compensates for rounding, so that 0.07 of 100 points is 7.
    wanted = (ratio * clouds.counts.double() - 1e-9).ceil().long().clamp(min=1).minimum(clouds.counts)
    chosen = farthest_points(pos, batch=batch, count=int(wanted.max()), start=start, generator=generator)
    kept = clouds.counts.clamp(max=int(wanted.max()))
    place = torch.arange(len(chosen), device=pos.device) - (kept.cumsum(0) - kept).repeat_interleave(kept)
    return chosen[place < wanted.repeat_interleave(kept)]


class RadiusGraph(BaseTransform):
    """Transform that sets ``edge_index`` to all pairs of points at most ``r`` apart, and removes ``edge_attr``.

    For data with a ``cell`` (and ``pbc``), it also sets ``edge_shift`` ``[edges, dim]``: the neighbor is at
    ``pos[j] + edge_shift``, see :func:`periodic_radius_graph`. With ``displacements``, it sets ``edge_vec``
    ``[edges, dim]``, the vector from the center to the neighbor, a differentiable function of the positions. The other
    parameters are those of :func:`radius_graph`.
    """

    def __init__(
        self, r: float, loop: bool = False, flow: Flow = "source_to_target", *, displacements: bool = False
    ) -> None:
        check_arguments(RadiusGraph.__init__, locals())
        check_length("r", r)
        self.r, self.loop, self.flow, self.displacements = r, loop, flow, displacements

    def forward(self, data: Data) -> Data:
        """Add edges to the data and return it. Calling the transform changes a copy."""
        found = find_neighbors(point_clouds(data), Radius(self.r, include_self=self.loop))
        return _with_edges(data, found, self.flow, self.displacements)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(r={self.r})"


class KNNGraph(BaseTransform):
    """Transform that sets ``edge_index`` to pairs of each point and its ``k`` nearest, and removes ``edge_attr``.

    ``force_undirected`` adds the missing reverse edges. For ``displacements``, see :class:`RadiusGraph`; for the other
    parameters, :func:`knn_graph`. ValueError is raised for data with a ``cell``, since periodic images are not found.
    """

    def __init__(
        self,
        k: int = 6,
        loop: bool = False,
        force_undirected: bool = False,
        flow: Flow = "source_to_target",
        *,
        ties: Ties = "index",
        displacements: bool = False,
    ) -> None:
        check_arguments(KNNGraph.__init__, locals())
        check_count("k", k)
        self.k, self.loop, self.force_undirected, self.flow = k, loop, force_undirected, flow
        self.ties, self.displacements = ties, displacements

    def forward(self, data: Data) -> Data:
        """Add edges to the data and return it. Calling the transform changes a copy."""
        clouds = point_clouds(data)
        if clouds.cell is not None:
            raise ValueError("data.cell: KNNGraph does not find periodic images; use RadiusGraph, or remove the cell")
        edges = knn_graph(clouds.pos, self.k, clouds.batch, self.loop, ties=self.ties)
        if self.force_undirected:
            edges = torch.unique(torch.cat([edges, edges.flip(0)], dim=1), dim=1)
        found = Neighbors.from_edge_index(edges, clouds.num_points)
        return _with_edges(data, found, self.flow, self.displacements)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k})"


class FarthestPoints(BaseTransform):
    """Transform that keeps a fraction ``ratio`` of the points of each cloud, chosen by :func:`fps`.

    Points are kept in the order in which they are chosen, with all attributes of points; the ``grid`` of images is
    removed. ValueError is raised for data with edges or faces, which could lose their points.
    """

    def __init__(self, ratio: float = 0.5, *, start: Literal["outermost", "first"] = "outermost") -> None:
        check_arguments(FarthestPoints.__init__, locals())
        _check_ratio(ratio)
        self.ratio, self.start = ratio, start

    def forward(self, data: Data) -> Data:
        """Select the points of the data and return it. Calling the transform changes a copy."""
        if data.get("edge_index") is not None or data.get("face") is not None:
            raise ValueError("data: expected points without edges or faces; select points before making edges")
        chosen = fps(data.pos, data.get("batch"), self.ratio, start=self.start)
        names = attributes_of_points(data)
        if isinstance(data, Batch):
            names = [name for name in names if not _is_list_of_clouds(data, name)]
            _select_in_clouds(data, chosen)
        select_points(data, chosen, names)
        if data.get("ptr") is not None:
            counts = torch.bincount(data.batch, minlength=len(data.ptr) - 1)
            data.ptr = torch.cat([data.ptr.new_zeros(1), counts.cumsum(0)])
            _note_parts(data, counts, [name for name in names if name in getattr(data, "_slice_dict", ())])
            if hasattr(data._store, "_num_nodes"):
                data._store._num_nodes = counts.tolist()
        if data.get("num_nodes") is not None and "num_nodes" in data:
            data.num_nodes = len(chosen)
        if "grid" in data:  # chosen pixels are no image
            del data.grid
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ratio={self.ratio})"


class Standardize(BaseTransform):
    """Transform that subtracts ``mean`` ``[channels]`` from the features ``x`` and divides them by ``std``."""

    def __init__(self, mean: Float[Tensor, " channels"], std: Float[Tensor, " channels"]) -> None:
        check_arguments(Standardize.__init__, locals())
        if mean.shape != std.shape or (may_read_values(std) and not bool((std > 0).all())):
            raise ValueError(f"mean, std: expected positive numbers std, as many as mean, got {mean} and {std}")
        self.mean, self.std = mean, std

    def forward(self, data: Data) -> Data:
        """Scale the features and return the data. Calling the transform changes a copy."""
        check_last("data.x", data.x, tuple(self.mean.shape), "this mean")  # that of integers would be rounded
        data.x = (data.x - self.mean.to(data.x)) / self.std.to(data.x)
        return data


def _is_list_of_clouds(batch: Batch, name: str) -> bool:
    """Return whether an attribute of a batch is a list with the attributes of the clouds that the batch was made of."""
    return name in getattr(batch, "_slice_dict", ()) and isinstance(batch[name], list)


def _select_in_clouds(batch: Batch, chosen: Tensor) -> None:
    """Select the points in lists, tuples and arrays with an entry for each point, of which batches have one per cloud.

    ``chosen`` are the points of the batch, cloud by cloud.
    """
    names = [name for name in batch.keys() if _is_list_of_clouds(batch, name)]
    if not names:
        return
    sizes = torch.bincount(batch.batch, minlength=batch.num_graphs)
    cloud, starts = batch.batch[chosen], sizes.cumsum(0) - sizes
    parts = (chosen - starts[cloud]).split(torch.bincount(cloud, minlength=batch.num_graphs).tolist())
    for name in names:
        batch[name] = [
            entries(value, 0, part) if isinstance(value, list | tuple | np.ndarray) and len(value) == size else value
            for value, part, size in zip(batch[name], parts, sizes.tolist(), strict=True)
        ]


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio: expected a number in (0, 1], got {ratio!r}")


def _directed(edges: Tensor, flow: Flow) -> Tensor:
    return edges if flow == "source_to_target" else edges.flip(0)


def _with_edges(data: Data, found: Neighbors, flow: Flow, displacements: bool) -> Data:
    data.edge_index, data.edge_attr = _directed(found.edge_index, flow), None
    # Attributes of earlier edges are removed.
    data.edge_shift = None if found.shift is None else found.shift.to(data.pos.dtype)
    data.edge_vec = found.displacements(data.pos) if displacements else None
    if isinstance(data, Batch):
        counts = torch.bincount(data.batch[found.target], minlength=data.num_graphs)
        # Attributes of edges that are added later have the same parts.
        _note_parts(data, counts, ("edge_index", "edge_attr", "edge_shift", "edge_vec"))
        if (offsets := getattr(data, "_inc_dict", None)) is not None and data.get("ptr") is not None:
            data._inc_dict = {**offsets, "edge_index": data.ptr[:-1].cpu()}
    return data


def _note_parts(batch: Batch, counts: Tensor, names: Sequence[str]) -> None:
    """Record how many entries of batch attributes belong to each cloud, which ``to_data_list`` needs."""
    parts, offsets = getattr(batch, "_slice_dict", None), getattr(batch, "_inc_dict", None)
    if parts is None or offsets is None:  # the batch was not built from single clouds
        return
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
    # These are new dictionaries, since the present ones are shared with the batch that was transformed.
    batch._slice_dict = parts | dict.fromkeys(names, ends)
    batch._inc_dict = dict.fromkeys(names, torch.zeros(len(counts), dtype=torch.int64)) | offsets
