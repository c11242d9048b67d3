"""The search for neighbors: pairs of points of one cloud that are close to each other.

The arguments are float64 coordinates ``pos`` ``[points, dim]`` and the cloud of each point, ``cloud`` int64
``[points]``, with ids from 0 that are not much larger than the number of points. Pairs are returned as sorted int64
keys ``target * points + source``.

There are two methods: SciPy's k-d tree (``"tree"``) on the CPU, and a cell list in torch (``"cells"``) on any device.
Both only propose candidates, which the same float64 arithmetic then tests, so they return the same pairs. In periodic
clouds, images of the points are found with the cell list, or on the CPU with the package vesin if it is installed.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from lieattn._core.contexts import outside_of_transforms
from lieattn.geometry._indices import members, ranges, ranks

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

Method = Literal["tree", "cells"]
Norm = Literal["euclidean", "chebyshev"]
Ties = Literal["index", "all"]

# Relative tolerance of distances. Without it, rounding of a rotation in float32 would remove some points at exactly the
# radius, which are common on grids.
TIE_TOLERANCE = 1e-5
# Enlarges searches, so that rounding in float64 cannot lose candidates.
_MARGIN = 1 + 1e-9
# Chunk sizes that bound the memory of the cell list.
_CHUNK_POINTS = 2**16
_CHUNK_PAIRS = 2**22
# Largest number of cells along an axis, at which rounding of a cell coordinate is below the margin.
_MAX_CELLS = 2**20

# Largest extent of partly periodic clouds in units of the radius (area, for two directions), up to which vesin is fast.
_MOST_REACH = 100

# (points, row, source, reach): source contains candidates of points[row], and all points closer than reach[row].
# Rows are ascending.
_Proposal = tuple[Tensor, Tensor, Tensor, Tensor]


def pairs_within(
    pos: Tensor, cloud: Tensor, radius: float, norm: Norm, include_self: bool, method: Method | None = None
) -> Tensor:
    """Return all pairs no farther apart than ``radius``, up to the tie tolerance."""
    n = len(pos)
    radius = radius * (1 + TIE_TOLERANCE)
    keys = [_self_keys(pos, include_self)]
    if n and _uses_tree(pos, method):
        p = 2.0 if norm == "euclidean" else np.inf
        found = _tree_of(_apart(pos, cloud, 3 * radius)).query_pairs(radius * _MARGIN, p=p, output_type="ndarray")
        i, j = torch.from_numpy(found).unbind(1)
        keep = _is_within(pos, cloud, i, j, radius, norm)
        i, j = i[keep], j[keep]
        keys += [i * n + j, j * n + i]
    elif n:
        for points, row, j in candidates_within(pos, cloud, radius, torch.arange(n, device=pos.device)):
            i = points[row]
            keep = _is_within(pos, cloud, i, j, radius, norm) & (i != j)
            keys.append(i[keep] * n + j[keep])
    return sort_keys(torch.cat(keys))


def pairs_between(
    x: Tensor, y: Tensor, cloud_x: Tensor, cloud_y: Tensor, radius: float, method: Method | None = None
) -> Tensor:
    """Return all pairs of points of ``y`` and of ``x`` within the radius, as sorted keys ``y * len(x) + x``.

    The tolerance is that of :func:`pairs_within`. Pairs within ``x`` or within ``y`` are not searched.
    """
    n, pos, cloud = len(x), torch.cat([x, y]), torch.cat([cloud_x, cloud_y])
    radius = radius * (1 + TIE_TOLERANCE)
    keys = [cloud[:0]]
    if n and len(y) and _uses_tree(pos, method):
        trees = [_tree_of(part) for part in _apart(pos, cloud, 3 * radius).split([n, len(y)])]
        found = trees[1].sparse_distance_matrix(trees[0], radius * _MARGIN, output_type="ndarray")
        i, j = torch.from_numpy(found["i"].astype(np.int64)), torch.from_numpy(found["j"].astype(np.int64))
        keep = _is_within(pos, cloud, n + i, j, radius, "euclidean")
        keys.append(i[keep] * n + j[keep])
    elif n and len(y):
        for points, row, j in candidates_within(pos, cloud, radius, torch.arange(n, len(pos), device=pos.device)):
            i = points[row]
            keep = (j < n) & _is_within(pos, cloud, i, j, radius, "euclidean")
            keys.append((i[keep] - n) * n + j[keep])
    return sort_keys(torch.cat(keys))


def pairs_nearest(
    pos: Tensor, cloud: Tensor, k: int, ties: Ties, include_self: bool, method: Method | None = None
) -> Tensor:
    """Return the pairs of each point with the ``k`` nearest other points, or all others if they are fewer."""
    if ties == "all" or not _is_crowded(pos, k):
        return sort_keys(torch.cat([_self_keys(pos, include_self), *_nearest(pos, cloud, k, ties, method)]))
    # Of the points at one place, only the first k others can be neighbors, so the search needs only k + 1 of them.
    n, places = len(pos), torch.unique(torch.cat([cloud[:, None].to(pos), pos], dim=1), dim=0, return_inverse=True)[1]
    order, first, _ = members(places, 0)
    late = ranks(places, 0) > k
    target, searched = late.nonzero()[:, 0], (~late).nonzero()[:, 0]
    source = order[first[places[target], None] + torch.arange(k, device=pos.device)]
    keys = [_self_keys(pos, include_self), (target[:, None] * n + source).flatten()]
    for found in _nearest(pos[searched], cloud[searched], k, ties, method):
        i, j = found // len(searched), found % len(searched)
        keys.append(searched[i] * n + searched[j])
    return sort_keys(torch.cat(keys))


def _is_crowded(pos: Tensor, k: int) -> bool:
    """Return whether more than k + 1 points may lie at one place."""
    # A number for each point, which is equal for equal coordinates, and rarely for different ones.
    mixed = pos.new_zeros(len(pos))
    for axis, coordinate in enumerate(pos.unbind(1)):
        mixed = mixed + coordinate * math.sqrt(axis + 2)
    mixed = mixed.sort().values
    return bool((mixed[k + 1 :] == mixed[: max(0, len(mixed) - k - 1)]).any())


def _nearest(pos: Tensor, cloud: Tensor, k: int, ties: Ties, method: Method | None) -> list[Tensor]:
    """Return the unsorted keys of each point and the ``k`` nearest others."""
    keys: list[Tensor] = []
    others = torch.bincount(cloud)[cloud] - 1
    remaining = others.nonzero().squeeze(1)
    if len(remaining):
        proposer = _tree_proposer if _uses_tree(pos, method) else _cell_proposer
        propose = proposer(pos, cloud, k)
        for effort in itertools.count():
            left = []
            for proposal in propose(remaining, effort):
                chosen, done = _choose(pos, proposal, others, k, ties)
                keys.append(chosen)
                left.append(proposal[0][~done])
            remaining = torch.cat(left)
            if len(remaining) == 0:
                break
    return keys


def pairs_all(pos: Tensor, cloud: Tensor, include_self: bool) -> Tensor:
    """Return all pairs within each cloud."""
    n = len(pos)
    order, first, size = members(cloud, 0)
    i, position = ranges(first[cloud], size[cloud])
    j = order[position]
    keys = i * n + j
    return keys if include_self else keys[i != j]


def sort_keys(keys: Tensor) -> Tensor:
    """Sort int64 numbers; on the CPU with NumPy, whose vectorized sort is several times faster."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy()))
    return keys.sort().values


def _uses_tree(pos: Tensor, method: Method | None) -> bool:
    return method == "tree" or (method is None and pos.device.type == "cpu")


def _self_keys(pos: Tensor, include_self: bool) -> Tensor:
    number = len(pos) if include_self else 0
    return torch.arange(number, device=pos.device) * (len(pos) + 1)


def _squared_distance(pos: Tensor, i: Tensor, j: Tensor) -> Tensor:
    # Separate operations give the same bits on every device, and for (i, j) and (j, i).
    total = torch.zeros(len(i), dtype=pos.dtype, device=pos.device)
    for coordinate in pos.unbind(1):
        difference = coordinate[j] - coordinate[i]
        total += difference * difference
    return total


def _is_within(pos: Tensor, cloud: Tensor, i: Tensor, j: Tensor, radius: float, norm: Norm) -> Tensor:
    same_cloud = cloud[i] == cloud[j]
    if norm == "euclidean":
        return same_cloud & (_squared_distance(pos, i, j) <= radius * radius)
    for coordinate in pos.unbind(1):
        same_cloud &= (coordinate[j] - coordinate[i]).abs() <= radius
    return same_cloud


def _choose(pos: Tensor, proposal: _Proposal, others: Tensor, k: int, ties: Ties) -> tuple[Tensor, Tensor]:
    """Return the keys of the k nearest candidates of points whose search is complete, and the mask of these points.

    The search of a point is complete if its candidates reach beyond all points tied with the k-th, or if they are all
    points of the cloud.
    """
    points, row, source, reach = proposal
    n, rows = len(pos), len(points)
    distance2 = _squared_distance(pos, points[row], source)
    count = torch.bincount(row, minlength=rows)
    order = distance2.argsort()
    order = order[row[order].argsort(stable=True)]  # by row, then by distance
    kth = torch.full_like(reach, torch.inf)
    enough = count >= k
    kth[enough] = distance2[order[(count.cumsum(0) - count)[enough] + k - 1]]
    limit = kth * (1 + TIE_TOLERANCE) ** 2
    # The inequality is strict, because candidates may contain only some of the points at exactly their reach.
    done = (limit < reach * reach) | (count == others[points])
    keep = done[row] & (distance2 <= limit[row])
    row, source, distance2 = row[keep], source[keep], distance2[keep]
    if ties == "all":
        return points[row] * n + source, done
    tied = distance2 >= kth[row] * (1 - TIE_TOLERANCE) ** 2
    ranked = sort_keys((row * 2 + tied) * n + source)
    row, source = ranked // (2 * n), ranked % n
    count = torch.bincount(row, minlength=rows)
    rank = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    return (points[row] * n + source)[rank < k], done


def _apart(pos: Tensor, cloud: Tensor, gap: float) -> Tensor:
    """Return points with an extra coordinate along which clouds lie ``gap`` apart, if there are several of them."""
    return torch.cat([pos, cloud[:, None].to(pos.dtype) * (gap or 1.0)], dim=1) if cloud.any() else pos


def _tree_of(pos: Tensor) -> "cKDTree":
    from scipy.spatial import cKDTree

    # Split cells in the middle, because medians give slow trees if many coordinates are equal, as on grids.
    return cKDTree(pos.numpy(), balanced_tree=False)


def _tree_proposer(pos: Tensor, cloud: Tensor, k: int) -> Callable[[Tensor, int], Iterator[_Proposal]]:
    n = len(pos)
    diameter = float((pos.amax(0) - pos.amin(0)).norm())
    tree = _tree_of(_apart(pos, cloud, 2 * diameter))

    def propose(points: Tensor, effort: int) -> Iterator[_Proposal]:
        # The point itself, k others, and some more to find the end of the ties with the k-th.
        number = min((k + 5) << effort, n + 1)
        for part in points.split(_CHUNK_PAIRS // number + 1):
            distance, index = (torch.from_numpy(found) for found in tree.query(tree.data[part.numpy()], number))
            row, column = ((index < n) & (index != part[:, None])).nonzero().unbind(1)
            source = index[row, column]
            same_cloud = cloud[source] == cloud[part[row]]
            yield part, row[same_cloud], source[same_cloud], distance[:, -1] / _MARGIN

    return propose


def _cell_proposer(pos: Tensor, cloud: Tensor, k: int) -> Callable[[Tensor, int], Iterator[_Proposal]]:
    start = _typical_reach(pos, cloud, k)

    def propose(points: Tensor, effort: int) -> Iterator[_Proposal]:
        radius = start * 2.0**effort
        for part, row, source in candidates_within(pos, cloud, radius, points):
            keep = _is_within(pos, cloud, part[row], source, radius * _MARGIN, "euclidean") & (source != part[row])
            yield part, row[keep], source[keep], torch.full_like(part, radius, dtype=pos.dtype)

    return propose


def _typical_reach(pos: Tensor, cloud: Tensor, k: int) -> float:
    """Return a radius that contains k neighbors where points are dense, since large initial radii are expensive."""
    n = len(pos)
    sample = torch.arange(0, n, max(1, n * n // _CHUNK_PAIRS), device=pos.device)
    distance = torch.cdist(pos[sample], pos, compute_mode="donot_use_mm_for_euclid_dist")
    distance[cloud[sample, None] != cloud] = torch.inf
    smallest = distance.topk(min(k + 1, n), largest=False).values
    kth = torch.where(smallest.isfinite(), smallest, 0.0).amax(1)
    positive = kth[kth > 0].sort().values
    return 1.5 * float(positive[len(positive) // 10]) if len(positive) else 1.0


def candidates_within(
    pos: Tensor, cloud: Tensor, radius: float, points: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield parts of ``points`` with all points in the 3^dim cells around each of them: (part, row, source).

    The candidates of ``part[row]`` are ``source``. Rows are ascending.
    """
    key, steps = _cell_keys(pos[:, :3], cloud, radius)  # close points are also close in the first three coordinates
    sorted_key, order = key.sort()
    # Adjacent cells along the last axis have consecutive keys, so one range covers all three.
    around = torch.tensor([sum(s) for s in itertools.product(*([-step, 0, step] for step in steps))], device=key.device)
    for block in points.split(_CHUNK_POINTS):
        center = key[block][:, None] + around
        first = torch.searchsorted(sorted_key, center - 1)
        count = torch.searchsorted(sorted_key, center + 1, right=True) - first
        chunk = (count.sum(1).cumsum(0) - 1) // _CHUNK_PAIRS
        sizes = torch.unique_consecutive(chunk, return_counts=True)[1].tolist()
        for part, start, length in zip(block.split(sizes), first.split(sizes), count.split(sizes), strict=True):
            segment, position = ranges(start.flatten(), length.flatten())
            yield part, segment // len(around), order[position]


def _cell_keys(pos: Tensor, cloud: Tensor, radius: float) -> tuple[Tensor, list[int]]:
    """Return the key of each point's cell, and the step of the key along each axis but the last.

    Cells are at least ``radius`` wide. Keys are ordered by cloud, then by cell. An empty cell at both ends of every
    axis separates the cells at the border from the next row or cloud.
    """
    shape, index = (int(cloud.max()) + 1, pos.shape[1]), cloud[:, None].expand_as(pos)
    low = pos.new_zeros(shape).scatter_reduce(0, index, pos, "amin", include_self=False)
    high = pos.new_zeros(shape).scatter_reduce(0, index, pos, "amax", include_self=False)
    extent = (high - low).amax(0)
    dim = pos.shape[1]
    most = min(_MAX_CELLS, int((2.0**62 / len(low)) ** (1 / dim)) - 4)
    width = max(radius * _MARGIN, float(extent.max()) / most) or 1.0
    spans = [int(e / width) + 3 for e in extent.tolist()]
    cell = ((pos - low[cloud]) / width).long() + 1
    key = cloud
    for axis in range(dim):
        key = key * spans[axis] + cell[:, axis]
    steps = [int(np.prod(spans[axis + 1 :], dtype=np.int64)) for axis in range(dim - 1)]
    return key, steps


@outside_of_transforms
def images_within(
    pos: Tensor,
    cloud: Tensor,
    radius: float,
    include_self: bool,
    cell: Tensor,
    pbc: Tensor,
    method: Literal["vesin", "cells"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Find all pairs of a point and an image of another point, or of itself, no farther apart than ``radius``.

    The radius may exceed the cell, so that several images of a point are found. Points ``[points, dim]``, inside or
    outside of the cell, and cells are float64. The tolerance is that of :func:`pairs_within`. The result is sorted
    keys, int64 ``[edges]``, and the number of times that each lattice vector is added to the source, int64
    ``[edges, dim]``, ascending for equal keys.
    """
    n = len(pos)
    if n == 0:
        return cloud, pos.long()
    radius = radius * (1 + TIE_TOLERANCE)
    whole = complete_cells(cell, pbc)
    if method is None:
        method = "vesin" if _prefers_vesin(pos, cloud, radius, whole, pbc) else "cells"
    propose = _images_of_vesin if method == "vesin" else _images_of_cells
    found = []
    for i, j, steps in propose(pos, cloud, radius * _MARGIN, whole, pbc):
        keep = _squared_distance_to_images(pos, i, j, steps, cell[cloud[i]]) <= radius * radius
        keep &= include_self | (i != j) | (steps != 0).any(1)
        found.append((i[keep] * n + j[keep], steps[keep]))
    keys, steps = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = torch.arange(len(keys), device=keys.device)
    for axis in (*reversed(steps.unbind(1)), keys):
        order = order[axis[order].argsort(stable=True)]
    return keys[order], steps[order]


def complete_cells(cell: Tensor, pbc: Tensor) -> Tensor:
    """Return cells ``[clouds, dim, dim]`` whose unused vectors are unit vectors perpendicular to the used ones."""
    used = torch.where(pbc[..., None], cell, 0.0)
    # Right singular vectors of vanishing singular values come last and span the complement of the used vectors.
    across = torch.linalg.svd(used).Vh
    rank = (~pbc).long().cumsum(1) - 1 + pbc.sum(1, keepdim=True)
    filled = across.gather(1, rank.clamp(min=0)[..., None].expand_as(across))
    return torch.where(pbc[..., None], cell, filled)


def _images_of_cells(
    pos: Tensor, cloud: Tensor, radius: float, cell: Tensor, pbc: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield targets, sources and steps of candidate pairs from the cell list, which include all within the radius."""
    fractional, home = _wrapped(pos, cloud, cell, pbc)
    owner, image = _ghosts(fractional, cloud, cell, pbc, radius)
    places = (fractional[owner] + image)[:, None] @ cell[cloud[owner]]
    everything = torch.arange(len(pos), device=pos.device)
    for target, row, ghost in candidates_within(places[:, 0], cloud[owner], radius, everything):
        i, j = target[row], owner[ghost]
        same = cloud[i] == cloud[j]
        # Steps are relative to the given points, which may lie outside their cell.
        yield i[same], j[same], (image[ghost] + home[i] - home[j])[same]


def _wrapped(pos: Tensor, cloud: Tensor, cell: Tensor, pbc: Tensor) -> tuple[Tensor, Tensor]:
    """Return fractional coordinates, in [0, 1) along periodic vectors, and the integer steps that are subtracted."""
    fractional = (pos[:, None] @ torch.linalg.inv(cell)[cloud])[:, 0]
    home = torch.where(pbc[cloud], fractional.floor(), 0.0)
    return fractional - home, home.long()


def _images_of_vesin(
    pos: Tensor, cloud: Tensor, radius: float, cell: Tensor, pbc: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the same pairs from the package vesin, cloud by cloud, and the pairs of each point with itself."""
    from vesin import NeighborList

    search = NeighborList(cutoff=radius, full_list=True, n_threads=torch.get_num_threads())
    # Its steps are 32-bit integers, so the points are moved into their cells.
    home = _wrapped(pos, cloud, cell, pbc)[1]
    inside = pos - (home.to(pos.dtype)[:, None] @ cell[cloud])[:, 0]
    order, _, size = members(cloud, len(cell))
    for number, points in enumerate(order.split(size.tolist())):
        if len(points):
            box, periodic = cell[number].numpy(), pbc[number].numpy()
            pairs, steps = search.compute(inside[points].numpy(), box, periodic, "PS")
            i, j = points[torch.from_numpy(pairs.astype(np.int64))].unbind(1)
            yield i, j, torch.from_numpy(steps.astype(np.int64)) + home[i] - home[j]
    everything = torch.arange(len(pos), device=pos.device)
    yield everything, everything, torch.zeros_like(pos, dtype=torch.int64)


def _prefers_vesin(pos: Tensor, cloud: Tensor, radius: float, cell: Tensor, pbc: Tensor) -> bool:
    """Return whether vesin is installed, and clouds do not reach far along directions in which they are not periodic.

    For such clouds, vesin takes many times as long as the cell list, or ends the process.
    """
    if pos.device.type != "cpu" or pos.shape[1] != 3 or find_spec("vesin") is None:
        return False
    partly = pbc.any(dim=1) & ~pbc.all(dim=1)
    if not partly.any():
        return True
    places = _wrapped(pos, cloud, cell, pbc)[0]  # lengths, where clouds are not periodic
    index, empty = cloud[:, None].expand_as(places), torch.zeros_like(cell[:, 0])
    low = empty.scatter_reduce(0, index, places, "amin", include_self=False)
    high = empty.scatter_reduce(0, index, places, "amax", include_self=False)
    reach = torch.where(pbc, 1.0, ((high - low) / radius).clamp(min=1)).prod(dim=1)
    return not bool((reach[partly] > _MOST_REACH).any())


def _ghosts(fractional: Tensor, cloud: Tensor, cell: Tensor, pbc: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Return the points and images within the radius of the cells: the point of each, and its steps ``[*, dim]``."""
    reach = radius * torch.linalg.vector_norm(torch.linalg.inv(cell), dim=1)  # as a fraction of each height
    most = torch.where(pbc, reach.floor() + 1, 0.0).amax(0).long().tolist()
    around = sorted(itertools.product(*(range(-m, m + 1) for m in most)), key=any)  # no step first
    steps = torch.tensor(around, device=cell.device)[:, None]
    reach = reach[cloud] * _MARGIN + 1e-9
    moved = fractional + steps
    inside = torch.where(pbc[cloud], (moved >= -reach) & (moved <= 1 + reach), steps == 0)
    step, owner = inside.all(-1).nonzero().unbind(1)
    return owner, steps[step, 0]


def _squared_distance_to_images(pos: Tensor, i: Tensor, j: Tensor, steps: Tensor, cell: Tensor) -> Tensor:
    # Exchanging i and j changes the sign of every result exactly, so the lists are exactly symmetric.
    shift = (steps.to(pos.dtype)[..., None] * torch.where((steps != 0)[..., None], cell, 0.0)).unbind(1)
    return (pos[j] - pos[i] + sum(shift[1:], start=shift[0])).square().sum(1)
