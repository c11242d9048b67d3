"""Images as point sets: pixel positions, and which points a crop or a pooling keeps.

The raster of a cloud is ``grid = (height, width)`` with its points in raster order, row by row from the top.
It belongs to the cloud like its coordinates and stays with it when these are turned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn._checks import check_count, check_floating
from lieattn.geometry._clouds import check_grid


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


def crop(grid: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """Points that are left when ``margin`` pixels are cut off at each side.

    Parameters
    ----------
    grid
        ``[clouds, 2]`` int64, height and width of each image.
    margin
        Pixels to cut off at each of the four sides.

    Returns
    -------
    kept
        ``[points left]`` int64, indices into the points.
    grid
        ``[clouds, 2]``, the sizes left.

    Raises
    ------
    TypeError, ValueError
        If ``grid`` or ``margin`` are not as above, or nothing would be left of an image.
    """
    check_grid(grid)
    check_count("margin", margin, least=0)
    left = grid - 2 * margin
    gone = (left < 1).any(dim=1)
    if gone.any():
        first = int(gone.nonzero()[0])
        raise ValueError(
            f"margin: cutting {margin} pixels at each side leaves nothing of image {first}, {grid[first].tolist()}"
        )
    row, column, size, _ = _raster(grid)
    inside = (row >= margin) & (row < size[:, 0] - margin) & (column >= margin) & (column < size[:, 1] - margin)
    return inside.nonzero()[:, 0], left


def pooling_cells(grid: Tensor, size: int) -> tuple[Tensor, Tensor, bool]:
    """Cell of size x size pixels of each point, for pooling with a stride as large as the window.

    Returns
    -------
    cell
        ``[points]`` int64, index of the point's cell among the cells of all clouds; -1 for rows and columns
        beyond the last full cell.
    grid
        ``[clouds, 2]``, the numbers of cells.
    exact
        Whether no image has such rows and columns, which quarter turns and mirrors ask for.

    Raises
    ------
    TypeError, ValueError
        If ``grid`` is no int64 tensor ``[clouds, 2]``, or ``size`` no integer of at least 1.
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
    counts = grid.prod(dim=1)
    cloud = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), counts)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])[cloud]
    within = torch.arange(len(cloud), device=grid.device) - first
    size = grid[cloud]
    return within // size[:, 1], within % size[:, 1], size, cloud
