"""Images as point sets.

The raster of a cloud is ``grid = (height, width)``, with its points in raster order, row by row from the top. The
raster of voxels in space is ``(depth, height, width)``, layer by layer. It does not change when the coordinates of the
cloud are rotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lieattn._core.checks import check_count, check_counts, check_floating
from lieattn._core.contexts import outside_of_transforms
from lieattn.geometry._clouds import PointClouds, check_grid
from lieattn.geometry._indices import first_true, ranges
from lieattn.geometry._lift import lift
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import OFF_LATTICE, PixelSquare
from lieattn.groups import FiniteGroup


def pixel_positions(*sides: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "pixels dim"]:
    """Return pixel centers ``[height * width, 2]`` with unit spacing and the image center at the origin.

    ``sides`` are height and width, or depth, height and width of voxels, which give ``[depth * height * width, 3]``.
    The first coordinate points to the right and the second one up, so that positive angles are counter-clockwise as
    displayed. The third one points along the layers. Points are in raster order.
    """
    if len(sides) not in (2, 3):
        raise ValueError(f"sides: expected height and width, or depth, height and width, got {sides}")
    check_counts(**dict(zip(("width", "height", "depth"), reversed(sides), strict=False)))
    check_floating("dtype", dtype)
    steps = [torch.arange(side, dtype=dtype) - (side - 1) / 2 for side in sides]
    steps[-2] = -steps[-2]
    return torch.stack(torch.meshgrid(*steps, indexing="ij")[::-1], dim=-1).flatten(0, -2)


@dataclass(frozen=True)
class Raster:
    """The raster of ``images`` images of pixels or voxels of one size, whose points are in raster order.

    ``sides`` are rows and columns, or layers, rows and columns.
    """

    images: int
    sides: tuple[int, ...]

    @classmethod
    def read(cls, clouds: PointClouds) -> tuple[Raster, Tensor]:
        """Return the raster given by the coordinates of the points, and the index of the point at each pixel.

        Points moved by quarter turns, reflections and translations lie on the raster of the moved images. The indices
        are ``[points]`` int64. ValueError is raised if the clouds are not images of one size, or if their points do not
        lie on an upright lattice.
        """
        if clouds.grid is None or clouds.pos.shape[1] != clouds.grid.shape[1]:
            raise ValueError("data: expected points of images, with grid [images, dim] and pos [points, dim]")
        grid = clouds.grid
        if len(grid) == 0 or bool((grid != grid[0]).any()):
            raise ValueError(f"data: expected images of one size, got grid {grid.tolist()}")
        pos, expected = clouds.pos.detach().unflatten(0, (len(grid), -1)), grid[0].tolist()
        from_corner = (pos - pos.amin(dim=1, keepdim=True)).double()
        steps = from_corner / (float(from_corner.max()) / max(max(expected) - 1, 1) or 1.0)
        cells = steps.round().long()
        place = cells.flip(-1)  # in the order of the axes of arrays
        sides = [int(side) + 1 for side in place.amax(dim=(0, 1))]
        place[..., -2] = sides[-2] - 1 - place[..., -2]
        number = place[..., 0]
        for axis, side in enumerate(sides[1:], start=1):
            number = number * side + place[..., axis]
        pixel, order = number.sort(dim=1)
        pixels = torch.arange(math.prod(sides), device=pos.device)
        filled = len(pixels) == pos.shape[1] and bool((pixel == pixels).all())
        if not filled or float((steps - cells).abs().max()) > OFF_LATTICE:
            lattice = f"an upright lattice of {' x '.join(map(str, expected))} pixels"
            raise ValueError(f"data: points are not on {lattice}; rotate images only by quarter turns or resample them")
        first = len(pixels) * torch.arange(len(grid), device=pos.device)
        return cls(len(grid), tuple(sides)), (order + first[:, None]).flatten()

    def unflatten(self, x: Tensor) -> Tensor:
        """Convert ``[points, *]`` to ``[images, *sides, *]``."""
        return x.view(self.images, *self.sides, *x.shape[1:])

    def halved(self) -> Raster:
        """Return the raster after a 2 x 2 pooling, or raise ValueError for odd sides, which would lose rows."""
        if any(side % 2 for side in self.sides):
            got = f"got {' x '.join(map(str, self.sides))} pixels before one"
            expected = "expected images whose sides are multiples of the product of the poolings"
            raise ValueError(f"data: a 2 x 2 pooling needs even sides, {got}; {expected}")
        return Raster(self.images, tuple(side // 2 for side in self.sides))

    def lift(self, group: FiniteGroup, size: int, device: torch.device | None = None) -> LiftedGraph:
        """Lift the pixels of centered images with unit spacing, with size x size (x size) pixels as neighborhoods.

        Graphs are cached, so that batches of the same size share one.
        """
        return _lifted_raster(self, group, size, torch.device("cpu") if device is None else device, id(group))


@lru_cache(maxsize=16)
@torch.inference_mode(False)
@outside_of_transforms
def _lifted_raster(raster: Raster, group: FiniteGroup, size: int, device: torch.device, identity: int) -> LiftedGraph:
    # The id separates equal groups in the cache, because torch.compile cannot compare their tables.
    images, sides = raster.images, raster.sides
    one = lift(pixel_positions(*sides).to(device), group, PixelSquare(size))
    clouds = PointClouds(
        pos=one.pos.repeat(images, 1),
        batch=torch.arange(images, device=device).repeat_interleave(one.num_points),
        num_clouds=images,
        grid=torch.tensor([sides], device=device).repeat(images, 1),
        each=one.num_points if images else None,
    )
    first = one.num_points * torch.arange(images, device=device)[:, None]
    target, source = (end + first for end in (one.neighbors.target, one.neighbors.source))
    found = Neighbors.from_keys((target * clouds.num_points + source).flatten(), clouds.num_points)
    return LiftedGraph.over(clouds, space=one.space, neighbors=found, length=one.length, group=one.group)


def crop(grid: Int[Tensor, "clouds dim"], margin: int) -> tuple[Int[Tensor, " kept"], Int[Tensor, "clouds dim"]]:
    """Return the points that remain when ``margin`` pixels are cut off at each side, and the new sizes.

    ``grid`` ``[clouds, 2]`` int64 contains the height and width of each image. The result is the indices ``[remaining
    points]`` int64 and the new grid. ValueError is raised if no pixel of an image remains.
    """
    check_grid(grid)
    check_count("margin", margin, least=0)
    left = grid - 2 * margin
    gone = (left < 1).any(dim=1)
    if gone.any():
        nothing = f"leaves nothing of image {first_true(gone)}, {grid[first_true(gone)].tolist()}"
        raise ValueError(f"margin: cutting {margin} pixels at each side {nothing}")
    row, column, size, _ = _raster(grid)
    inside = (row >= margin) & (row < size[:, 0] - margin) & (column >= margin) & (column < size[:, 1] - margin)
    return inside.nonzero()[:, 0], left


def pooling_cells(
    grid: Int[Tensor, "clouds dim"], size: int
) -> tuple[Int[Tensor, " points"], Int[Tensor, "clouds dim"], bool]:
    """Return the cell of size x size pixels of each point, for pooling with a stride equal to the window.

    The result has three parts: the index of each point's cell among the cells of all clouds, ``[points]`` int64, with
    -1 for rows and columns beyond the last full cell; the numbers of cells ``[clouds, 2]``; and whether no image has
    incomplete cells, which exact equivariance to quarter turns and reflections requires.
    """
    check_grid(grid)
    check_count("size", size)
    cells = grid // size
    row, column, _, cloud = _raster(grid)
    first = torch.cat([cells.new_zeros(1), cells.prod(dim=1).cumsum(0)])[cloud]
    cell_row, cell_column = row // size, column // size
    inside = (cell_row < cells[cloud, 0]) & (cell_column < cells[cloud, 1])
    cell = torch.where(inside, first + cell_row * cells[cloud, 1] + cell_column, -1)
    return cell, cells, bool((cells * size == grid).all())


def _raster(grid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the row, the column, the size of the image ``[points, 2]`` and the index of the image of each point."""
    cloud, within = ranges(grid.new_zeros(len(grid)), grid.prod(dim=1))
    size = grid[cloud]
    return within // size[:, 1], within % size[:, 1], size, cloud
