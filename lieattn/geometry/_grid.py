"""Images as point sets: pixel positions, rasters, and which points a crop or a pooling keeps.

The raster of a cloud is ``grid = (height, width)`` with its points in raster order, row by row from the top.
It belongs to the cloud like its coordinates and stays with it when these are turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lieattn._checks import check_count, check_floating
from lieattn.geometry._clouds import PointClouds, check_grid, first_true, ranges
from lieattn.geometry._lift import LiftedGraph, lift
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import OFF_LATTICE, PixelSquare
from lieattn.groups import FiniteGroup


def pixel_positions(height: int, width: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pixel centers ``[height * width, 2]`` with unit spacing and the image center at the origin.

    The first coordinate points right and the second one up, so that a positive angle turns counter-clockwise as
    displayed; points are in raster order.
    """
    check_count("height", height)
    check_count("width", width)
    check_floating("dtype", dtype)
    rows = torch.arange(height, dtype=dtype) - (height - 1) / 2
    columns = torch.arange(width, dtype=dtype) - (width - 1) / 2
    up, right = torch.meshgrid(-rows, columns, indexing="ij")
    return torch.stack([right, up], dim=-1).reshape(-1, 2)


@dataclass(frozen=True)
class Raster:
    """Equally large images of ``rows`` x ``columns`` pixels, which are points in raster order, image after image."""

    images: int
    rows: int
    columns: int

    @classmethod
    def read(cls, clouds: PointClouds) -> tuple[Raster, Tensor]:
        """Raster on which points of images lie by their coordinates, and the point ``[points]`` at each pixel.

        Points that were moved by quarter turns, mirrors and translations lie on the raster of the moved images.
        ValueError is raised if the clouds are no images of one size, or points are on no upright lattice.
        """
        if clouds.grid is None or clouds.pos.shape[1] != 2:
            raise ValueError("data: expected points of images, with grid [images, 2] and pos [points, 2]")
        grid = clouds.grid
        if len(grid) == 0 or bool((grid != grid[0]).any()):
            raise ValueError(f"data: expected images of one size, got grid {grid.tolist()}")
        pos, sides = clouds.pos.detach().unflatten(0, (len(grid), -1)), grid[0].tolist()
        from_corner = (pos - pos.amin(dim=1, keepdim=True)).double()
        steps = from_corner / (float(from_corner.max()) / max(max(sides) - 1, 1) or 1.0)
        cells = steps.round().long()
        rows, columns = int(cells[..., 1].max()) + 1, int(cells[..., 0].max()) + 1
        pixel, order = ((rows - 1 - cells[..., 1]) * columns + cells[..., 0]).sort(dim=1)
        pixels = torch.arange(rows * columns, device=pos.device)
        filled = len(pixels) == pos.shape[1] and bool((pixel == pixels).all())
        if not filled or float((steps - cells).abs().max()) > OFF_LATTICE:
            lattice = f"an upright lattice of {sides[0]} x {sides[1]} pixels"
            raise ValueError(f"data: points are not on {lattice}; turn images by quarter turns only, or resample them")
        first = len(pixels) * torch.arange(len(grid), device=pos.device)
        return cls(len(grid), rows, columns), (order + first[:, None]).flatten()

    def unflatten(self, x: Tensor) -> Tensor:
        """``[points, *]`` to ``[images, rows, columns, *]``."""
        return x.view(self.images, self.rows, self.columns, *x.shape[1:])

    def halved(self) -> Raster:
        """Raster after a 2 x 2 pooling; raises ValueError for odd sides, which would lose rows or columns."""
        if self.rows % 2 or self.columns % 2:
            got = f"got {self.rows} x {self.columns} pixels before one"
            expected = "expected images whose sides are multiples of the poolings together"
            raise ValueError(f"data: a 2 x 2 pooling needs even sides, {got}; {expected}")
        return Raster(self.images, self.rows // 2, self.columns // 2)

    def lift(self, group: FiniteGroup, size: int, device: torch.device | None = None) -> LiftedGraph:
        """Pixels lifted to a planar group, with size x size pixels as neighbors, unit spacing and centered images.

        Graphs are remembered, for batches of one size share theirs.
        """
        return _lifted_raster(self, group, size, torch.device("cpu") if device is None else device)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _lifted_raster(raster: Raster, group: FiniteGroup, size: int, device: torch.device) -> LiftedGraph:
    images, sides = raster.images, (raster.rows, raster.columns)
    one = lift(pixel_positions(*sides).to(device), group, PixelSquare(size))
    clouds = PointClouds(
        pos=one.pos.repeat(images, 1),
        batch=torch.arange(images, device=device).repeat_interleave(one.num_points),
        num_clouds=images,
        grid=torch.tensor([sides], device=device).repeat(images, 1),
    )
    found = one.neighbors
    none = Neighbors(found.row_ptr[:1], found.source[:0], found.target[:0])
    lists = Neighbors.collate([found] * images) if images else none
    return LiftedGraph.over(clouds, space=one.space, neighbors=lists, length=one.length, group=one.group)


def crop(grid: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """Points that are left when ``margin`` pixels are cut off at each side, and the sizes left.

    ``grid`` ``[clouds, 2]`` int64 has the height and width of each image. Returns indices ``[points left]`` int64 and
    the new grid. ValueError is raised if nothing would be left of an image.
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


def pooling_cells(grid: Tensor, size: int) -> tuple[Tensor, Tensor, bool]:
    """Cell of size x size pixels of each point, for pooling with a stride as large as the window.

    Returns the index of each point's cell among those of all clouds, ``[points]`` int64, with -1 for rows and columns
    beyond the last full cell; the numbers of cells ``[clouds, 2]``; and whether no image has such rows and columns,
    which exactness for quarter turns and mirrors requires.
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
    """Row, column, size of the image ``[points, 2]`` and number of the image, for each point."""
    cloud, within = ranges(grid.new_zeros(len(grid)), grid.prod(dim=1))
    size = grid[cloud]
    return within // size[:, 1], within % size[:, 1], size, cloud
