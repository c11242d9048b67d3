"""Farthest-point subsampling of clouds."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lieattn._core.checks import check_arguments, check_choice, check_count, check_is, check_tensor
from lieattn._core.contexts import outside_of_transforms
from lieattn._core.numerics import counts, maxima, reduced
from lieattn.geometry._clouds import PointClouds, as_coordinates, pixel_steps, point_clouds
from lieattn.geometry._indices import Movable, check_indices, check_mask, first_true, members
from lieattn.geometry._search import TIE_TOLERANCE, pairs_between

# Distances of points that were chosen, and of padding: below those of all other points, padding last.
_CHOSEN, _PADDING = -1.0, -100.0


@outside_of_transforms
def farthest_points(
    points: Any,
    *,
    count: int | None = None,
    fraction: float | None = None,
    batch: Int[Tensor, " points"] | None = None,
    ptr: Int[Tensor, " starts"] | None = None,
    start: Literal["outermost", "first"] = "outermost",
    generator: torch.Generator | None = None,
) -> Int[Tensor, " kept"]:
    """Subsample each cloud by repeatedly choosing the point that is farthest from all points chosen before.

    The result is indices ``[points kept]`` int64, cloud by cloud, in the order in which points were chosen. Of several
    equally far points, up to a relative 1e-5, the first one is chosen.

    **Equivariance.** The choice depends only on distances, so it commutes with rotations, reflections and translations.
    With the outermost point as start, it also commutes with permutations of points, unless points are equally far.

    Parameters
    ----------
    points, batch, ptr
        Point clouds in any form that :func:`point_clouds` accepts. Periodic images are ignored.
    count, fraction
        Number of points to keep of each cloud (all points of smaller clouds), or their fraction, rounded, but at least
        one point.
    start
        First point of each cloud: the point farthest from the mean, or the first one.
    generator
        Generator that draws the first points instead.

    Examples
    --------
    >>> farthest_points(torch.tensor([[0.0], [1.0], [2.0], [10.0]]), count=3).tolist()
    [3, 0, 2]
    """
    clouds = point_clouds(points, batch=batch, ptr=ptr)
    pos = as_coordinates(clouds.pos)
    wanted = _wanted(clouds.counts, count, fraction)
    most = int(wanted.max()) if len(wanted) else 0
    chosen = torch.full((clouds.num_clouds, most), -1, dtype=torch.int64, device=clouds.device)
    if most:
        current = _starts(clouds, pos, start, generator)
        nearest = torch.full((len(pos),), torch.inf, dtype=pos.dtype, device=pos.device)
        columns = pos.T.contiguous().unbind(0)  # sums over a short last axis would be slow
        for step in range(most):
            chosen[:, step] = current
            centers = pos[current.clamp(min=0)].unbind(1)
            squares = [(x - y.index_select(0, clouds.batch)).square() for x, y in zip(columns, centers, strict=True)]
            nearest = torch.minimum(nearest, sum(squares[1:], start=squares[0]))
            nearest[current[current >= 0]] = _CHOSEN  # no point is chosen twice if points coincide
            current = _first(_farthest(nearest, clouds), clouds)
    place = torch.arange(most, device=clouds.device)
    return chosen[place < wanted[:, None]]


@dataclass(frozen=True, eq=False)
class Coarse(Movable):
    """A coarser cloud, and the cell of each of its points in the fine one, see :func:`coarsen`.

    Attributes
    ----------
    clouds
        The points that were kept.
    points, cells
        ``[pairs]`` int64: a fine point, and a kept point in whose cell it lies. Each fine point occurs at least once.
    num_points
        Number of fine points.
    sides
        Sides of the fine images if these are alike and have even sides, so that the cells are views; otherwise None.
    """

    clouds: PointClouds
    points: Tensor
    cells: Tensor
    num_points: int
    sides: tuple[int, ...] | None = None

    @classmethod
    def of_rasters(cls, clouds: PointClouds) -> Coarse:
        """Halve the sides of images of pixels or voxels, which need ``grid``, or ``raster`` and ``pixel``.

        Cells of even sides are 2 pixels wide. On odd sides every second pixel is kept from the first to the last one,
        and the pixels between two of them lie in the cells of both. The raster is thus divided alike from all ends.
        Points of the coarse clouds are the means of their cells. In cells that lack pixels, the means are moved to
        where those of all pixels would be on a lattice, and cells without any pixel are not kept. ValueError is raised
        for clouds that are no images.

        **Equivariance.** Cells commute with quarter turns and reflections of the raster, and with all motions of the
        coordinates, which do not change the raster.
        """
        if (image := clouds.on_raster()) is None:
            needed = "grid [clouds, dim], or raster [clouds, dim] and pixel [points, dim]"
            raise ValueError(f"clouds: halving the sides of images needs the size of each, {needed}, got None")
        (grid, place), cloud = image, clouds.batch
        halved, odd = (grid + 1) // 2, grid % 2
        sizes = halved.prod(dim=1)
        first, stride = sizes.cumsum(0) - sizes, halved.flip(1).cumprod(1).flip(1) // halved
        ends, splits = torch.stack([place // 2, (place + odd[cloud]) // 2], dim=-1), bool(odd.any())
        ends, cells = ends[..., : 1 + splits] * stride[cloud, :, None], first[cloud, None]
        for along in ends.unbind(1):
            cells = (cells[:, :, None] + along[:, None]).flatten(1)
        point = torch.arange(len(cloud), device=grid.device)[:, None].expand_as(cells)
        pairs = torch.stack([point.flatten(), cells.flatten()], dim=1)
        points, cells = (torch.unique(pairs, dim=0) if splits else pairs).unbind(1)
        if clouds.raster is not None:
            filled, cells = torch.unique(cells, return_inverse=True)
            batch = torch.searchsorted(first, filled, right=True) - 1
            pixel = (filled - first[batch])[:, None] // stride[batch] % halved[batch]
            pos = _centers(clouds, place, points, cells, batch, pixel, grid[batch])
            some = PointClouds(pos=pos, batch=batch, num_clouds=clouds.num_clouds, raster=halved, pixel=pixel)
            return cls(some, points, cells, clouds.num_points)
        pos = reduced(clouds.pos[points], cells, int(sizes.sum()), "mean")
        batch = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), sizes)
        kept = PointClouds(pos=pos, batch=batch, num_clouds=clouds.num_clouds, grid=halved)
        sides = clouds.sides
        even = sides is not None and not any(side % 2 for side in sides)
        return cls(kept.with_each(), points, cells, clouds.num_points, sides if even else None)

    def pool(
        self, x: Float[Tensor, " points *rest"], reduction: Literal["max", "mean", "sum"] = "max"
    ) -> Float[Tensor, " kept *rest"]:
        """Reduce ``[points, *]`` over each cell to ``[kept, *]``. Fibers are not reduced."""
        if not torch.compiler.is_compiling():
            check_arguments(Coarse.pool, locals())
        x = self._rows("x", x, self.num_points)
        if self.sides is None:
            return reduced(x[self.points], self.cells, self.clouds.num_points, reduction)
        pixels = range(2, 2 + 2 * len(self.sides), 2)
        # A copy with these axes first takes half the time of a maximum over several axes.
        inside = x.unflatten(0, (-1, *self._halves())).movedim(list(pixels), list(range(len(pixels))))
        inside = inside.flatten(0, len(pixels) - 1).flatten(1, len(pixels) + 1)
        return inside.amax(dim=0) if reduction == "max" else getattr(inside, reduction)(dim=0)

    def spread(self, x: Float[Tensor, " kept *rest"]) -> Float[Tensor, " points *rest"]:
        """Return the mean of ``[kept, *]`` over the cells in which each fine point lies, ``[points, *]``."""
        if not torch.compiler.is_compiling():
            check_arguments(Coarse.spread, locals())
        x = self._rows("x", x, self.clouds.num_points)
        if self.sides is None:
            return reduced(x[self.cells], self.points, self.num_points, "mean")
        halves = [1 if place % 2 else side for place, side in enumerate(self._halves())]
        return x.unflatten(0, (-1, *halves)).expand(-1, *self._halves(), *x.shape[1:]).flatten(0, len(halves))

    def _halves(self) -> list[int]:
        return [size for side in self.sides or () for size in (side // 2, 2)]

    @staticmethod
    def _rows(name: str, x: Tensor, rows: int) -> Tensor:
        check_tensor(name, x, "floating features [points, *]")
        if x.shape[:1] != (rows,):
            raise ValueError(f"{name}: expected one row for each of {rows} points, got {tuple(x.shape)}")
        return x


def _centers(
    clouds: PointClouds, place: Tensor, points: Tensor, cells: Tensor, batch: Tensor, pixel: Tensor, sides: Tensor
) -> Tensor:
    """Return the mean of each cell ``[cells, dim]``, moved by the steps from the pixels that it has to all of them."""
    # On odd sides, cells overlap: those at the ends have 2 pixels, the others 3.
    first, last = (pixel == 0).double(), (2 * pixel == sides - 1).double()
    middle = 2 * pixel + torch.where(sides % 2 == 1, (first - last) / 2, 0.5)
    found, there = (reduced(x.double()[points], cells, len(batch), "mean") for x in (clouds.pos, place))
    return (found + ((middle - there)[:, None] @ pixel_steps(clouds, place)[batch])[:, 0]).to(clouds.pos.dtype)


@outside_of_transforms
def coarsen(points: Any, fraction: float) -> Coarse:
    """Keep the ``fraction`` of the points of each cloud that are farthest apart, with the nearest others as cells.

    The points are chosen as by :func:`farthest_points`, except that all equally far points are chosen at once, so the
    fraction is only approximate; in a cloud whose points are all alike, such as a ring, all are kept. Of coincident
    points one is kept. A point lies in the cell of the nearest kept point, or of each of them if several are equally
    near. Distances count as equal up to a relative 1e-5.

    **Equivariance.** Kept points and cells commute with rotations, reflections and translations, and with permutations
    of the points, also on lattices. Pooled fields therefore move with the points if the fiber is that of a finite
    group, whose elements are the same at all points.

    ``points`` are point clouds in any form that :func:`point_clouds` accepts. ValueError is raised for periodic clouds,
    whose distances do not see periodic images.

    Examples
    --------
    >>> coarse = coarsen(torch.tensor([[0.0], [1.0], [2.0], [10.0]]), 0.5)
    >>> coarse.clouds.pos[:, 0].tolist(), coarse.pool(torch.arange(4.0)).tolist()
    ([0.0, 10.0], [2.0, 3.0])
    """
    clouds = point_clouds(points)
    if clouds.cell is not None:
        raise ValueError("cell: subsampling does not see periodic images; remove the cell")
    pos, wanted = as_coordinates(clouds.pos), _wanted(clouds.counts, None, fraction)
    kept, nearest, same = _spread_out(clouds, pos, wanted)
    # Each cloud is searched in units of its own largest distance to a kept point.
    cover = maxima(nearest, clouds.batch, clouds.num_clouds).sqrt()
    scaled = pos / torch.where(cover > 0, cover, 1.0)[clouds.batch, None]
    left = PointClouds(pos=clouds.pos[kept], batch=clouds.batch[kept], num_clouds=clouds.num_clouds).with_each()
    pairs = pairs_between(scaled[kept], scaled, left.batch, clouds.batch, 1.0)
    point, cell = pairs // max(len(kept), 1), pairs % max(len(kept), 1)
    squared = (pos[point] - pos[kept[cell]]).square().sum(-1)
    near = squared <= torch.maximum(nearest * (1 + TIE_TOLERANCE) ** 2, same[clouds.batch])[point]
    return Coarse(left, point[near], cell[near], clouds.num_points)


def _spread_out(clouds: PointClouds, pos: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose farthest points, all of equally far ones.

    Returns their ascending indices ``[kept]``, the squared distance ``[points]`` of each point to the nearest of them,
    and the squared distance ``[clouds]`` up to which points are at one place.
    """
    columns, outward = pos.T.contiguous().unbind(0), (pos - clouds.mean(pos)[clouds.batch]).square().sum(-1)
    same = maxima(outward, clouds.batch, clouds.num_clouds) * TIE_TOLERANCE**2
    nearest, number, chosen = torch.full_like(outward, torch.inf), torch.zeros_like(wanted), clouds.batch[:0]
    ties = _farthest(outward, clouds)  # those of equally far points that are not chosen yet
    while len(ties):
        current = _first(ties, clouds)
        found = current >= 0
        centers = torch.where(found[:, None], pos[current.clamp(min=0)], torch.inf).unbind(1)
        squares = [(x - y.index_select(0, clouds.batch)).square() for x, y in zip(columns, centers, strict=True)]
        nearest = torch.minimum(nearest, sum(squares[1:], start=squares[0]))
        chosen, number = torch.cat([chosen, current[found]]), number + found
        ties = ties[nearest[ties] > same[clouds.batch[ties]]]
        fewer = (counts(clouds.batch[ties], clouds.num_clouds) == 0) & (number < wanted)
        if fewer.any():
            farthest = _farthest(nearest, clouds)
            farthest = farthest[(nearest[farthest] > same[clouds.batch[farthest]]) & fewer[clouds.batch[farthest]]]
            # The last ones are chosen if the number is then closer to what is wanted.
            more = counts(clouds.batch[farthest], clouds.num_clouds)
            done = fewer & ((more == 0) | (2 * number + more > 2 * wanted))
            number = torch.where(done, wanted, number)
            ties = torch.cat([ties, farthest[~done[clouds.batch[farthest]]]])
    return chosen.sort().values, nearest, same


def farthest_by_distance(
    distance: Float[Tensor, "clouds n n"],
    count: int,
    start: Int[Tensor, " clouds"],
    mask: Bool[Tensor, "clouds n"] | None = None,
) -> Int[Tensor, "clouds {count}"]:
    """Subsample padded clouds by given distances, for example distances of group elements.

    ``distance`` is ``[clouds, N, N]``, ``start`` ``[clouds]`` int64 is the first point of each cloud, and ``mask``
    ``[clouds, N]`` bool is false for padding. The result is ``[clouds, count]`` int64, in the order in which points
    were chosen. Of several equally far points, the first one is chosen. If a cloud has fewer than ``count`` distinct
    points, those that coincide with chosen ones follow. If it has fewer than ``count`` points, its first one is
    repeated at the end.
    """
    check_tensor("distance", distance, "a floating tensor [clouds, N, N]")
    if distance.ndim != 3 or distance.shape[1] != distance.shape[2]:
        raise ValueError(f"distance: expected [clouds, N, N], got {tuple(distance.shape)}")
    clouds, size = distance.shape[:2]
    check_count("count", count)
    if count > size:
        raise ValueError(f"count: expected at most {size}, the number of points of a cloud, got {count}")
    check_indices("start", start, dim=1, device=distance.device, below=size)
    if len(start) != clouds:
        raise ValueError(f"start: expected one point for each of {clouds} clouds, got {len(start)}")
    if mask is None:
        mask = torch.ones(clouds, size, dtype=torch.bool, device=distance.device)
    check_mask(mask, distance.device, distance.shape[:2])
    rows = torch.arange(clouds, device=distance.device)
    padded = mask.any(dim=1) & ~mask[rows, start]
    if padded.any():
        cloud = first_true(padded)
        raise ValueError(f"start: expected a point of cloud {cloud}, got {int(start[cloud])}, which is padding")
    nearest = torch.full_like(distance[:, 0], torch.inf)
    chosen = [start]
    for _ in range(count - 1):
        reached = torch.where(mask, distance[rows, chosen[-1]], _PADDING)
        nearest = torch.minimum(nearest, reached)
        nearest[rows, chosen[-1]] = _CHOSEN  # no point is chosen twice before all are, even if points coincide
        largest = nearest == nearest.amax(1, keepdim=True)
        chosen.append(largest.long().argmax(1))
    return torch.stack(chosen, dim=1)


def _wanted(size: Tensor, count: int | None, fraction: float | None) -> Tensor:
    if (count is None) == (fraction is None):
        raise ValueError(f"count, fraction: expected exactly one of them, got {count!r} and {fraction!r}")
    if count is not None:
        check_count("count", count)
        return size.clamp(max=count)
    if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < fraction <= 1:
        raise ValueError(f"fraction: expected a number in (0, 1], got {fraction!r}")
    return torch.minimum((fraction * size.double()).round().long().clamp(min=1), size)


def _starts(clouds: PointClouds, pos: Tensor, start: str, generator: torch.Generator | None) -> Tensor:
    """Return the first point of each cloud, or -1 for empty clouds."""
    order, first, size = members(clouds.batch, clouds.num_clouds)
    check_choice("start", start, ("outermost", "first"))
    if generator is not None:
        check_is("generator", generator, torch.Generator)
        draw = torch.rand(len(size), generator=generator, dtype=torch.float64, device=generator.device).to(pos.device)
        place = torch.minimum((draw * size).long(), size - 1)
    elif start == "first":
        place = torch.zeros_like(size)
    else:
        return _first(_farthest((pos - clouds.mean(pos)[clouds.batch]).square().sum(-1), clouds), clouds)
    return torch.where(size > 0, order[(first + place).clamp(0, len(order) - 1)], -1)


def _farthest(squared: Tensor, clouds: PointClouds) -> Tensor:
    """Return the points whose squared distance is the largest of their cloud, up to the tolerance."""
    largest = squared.new_full((clouds.num_clouds,), -torch.inf).scatter_reduce(0, clouds.batch, squared, "amax")
    limit = torch.where(largest > 0, largest * (1 - TIE_TOLERANCE) ** 2, largest)
    return (squared >= limit.index_select(0, clouds.batch)).nonzero()[:, 0]


def _first(points: Tensor, clouds: PointClouds) -> Tensor:
    """Return the first of the given points in each cloud ``[clouds]``, or -1 for clouds with none."""
    number = clouds.num_points
    first = torch.full((clouds.num_clouds,), number, dtype=torch.int64, device=clouds.device)
    first.scatter_reduce_(0, clouds.batch[points], points, "amin")
    return torch.where(first < number, first, -1)
