"""Pooling: over the fiber, over the points of a cloud, and over cells of pixels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_choice, check_count
from lieattn.geometry import PointClouds, pooling_cells

Reduction = Literal["sum", "mean", "max"]
Inexact = Literal["refuse", "warn", "allow"]


class FiberPool(nn.Module):
    """Reduce a field over its fiber, which makes it a scalar field.

    **Equivariance.** The group permutes the fiber, so the result does not turn.

    Parameters
    ----------
    reduction
        ``"max"``, ``"mean"`` or ``"sum"``.
    """

    def __init__(self, reduction: Reduction = "max") -> None:
        super().__init__()
        self.reduction = _checked_reduction(reduction)

    def forward(self, x: Tensor, graph: PointClouds | None = None) -> Tensor:
        """``[*, fiber, channels]`` to ``[*, channels]``."""
        if x.ndim < 2:
            raise ValueError(f"x: expected a field [*, fiber, channels], got {tuple(x.shape)}")
        return x.amax(dim=-2) if self.reduction == "max" else getattr(x, self.reduction)(dim=-2)


class CloudPool(nn.Module):
    """Reduce over the points of each cloud; an empty cloud gives zero.

    **Equivariance.** Invariant to permutations of the points; the fiber is left alone.

    Parameters
    ----------
    reduction
        ``"sum"``, ``"mean"`` or ``"max"``.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.reduction = _checked_reduction(reduction)

    def forward(self, x: Tensor, graph: PointClouds) -> Tensor:
        """``[points, *]`` to ``[clouds, *]``."""
        reduce: Callable[[Tensor], Tensor] = getattr(graph, self.reduction)
        return reduce(x)


class GridPool(nn.Module):
    """Pool size x size pixels of an image, with a stride as large as the window.

    Parameters
    ----------
    size
        Side of a cell in pixels.
    reduction
        ``"max"``, ``"mean"`` or ``"sum"``.
    inexact
        What to do with an image whose height or width is no multiple of ``size``: its last rows or columns would
        be dropped, and a turned image would lose others, so the result would not turn along. ``"refuse"`` raises
        ValueError, ``"warn"`` warns once a call, ``"allow"`` says nothing.

    **Equivariance.** To quarter turns and mirrors of the raster where no rows or columns are dropped; to every
    motion of the coordinates that keeps the raster.
    """

    def __init__(self, size: int = 2, reduction: Reduction = "max", *, inexact: Inexact = "refuse") -> None:
        super().__init__()
        check_count("size", size)
        check_choice("inexact", inexact, Inexact)
        self.size, self.inexact, self.reduction = size, inexact, _checked_reduction(reduction)

    def cells(self, grid: Tensor, advice: Callable[[], str] | None = None) -> tuple[Tensor, Tensor]:
        """Cell of each point (-1: dropped) and the pooled grid ``[clouds, 2]``; raises or warns as ``inexact`` says.

        ``advice`` gives a sentence to append to the message.
        """
        cell, pooled, exact = pooling_cells(grid, self.size)
        if not exact and self.inexact != "allow":
            rows, columns = grid[(grid % self.size != 0).any(dim=1)][0].tolist()
            message = _drops_pixels(rows, columns, self.size)
            complain(self.inexact, message if advice is None else f"{message}; {advice()}")
        return cell, pooled

    def forward(self, x: Tensor, graph: PointClouds) -> Tensor:
        """``[points, *]`` on the rasters of a graph to ``[cells, *]``."""
        if graph.grid is None:
            raise ValueError("graph: pooling pixels needs the raster of each cloud, grid [clouds, 2]")
        cell, grid = self.cells(graph.grid)
        return self.reduce(x, cell, int(grid.prod(dim=1).sum()))

    def reduce(self, x: Tensor, cell: Tensor, num_cells: int) -> Tensor:
        """``[points, *]`` to ``[cells, *]``, for cells that :meth:`cells` has found."""
        _check_index("cell", cell, x)
        kept = cell >= 0
        return _reduce(x[kept], cell[kept], num_cells, self.reduction)


def complain(inexact: Inexact, message: str) -> None:
    """Raise ValueError or warn, as ``inexact`` says, where an image breaks the symmetry."""
    if inexact == "refuse":
        raise ValueError(message)
    if inexact == "warn":
        warnings.warn(message, stacklevel=4)


def _drops_pixels(rows: int, columns: int, size: int) -> str:
    fits = [-(-side // size) * size for side in (rows, columns)]
    return (
        f"pooling {size} x {size} drops rows or columns of a {rows} x {columns} image, which breaks rotations; "
        f"{fits[0]} x {fits[1]} would be exact"
    )


def _reduce(x: Tensor, index: Tensor, size: int, reduction: Reduction) -> Tensor:
    from torch_geometric.utils import scatter

    return scatter(x, index, dim=0, dim_size=size, reduce=reduction)


def _check_index(argument: str, index: Tensor, x: Tensor) -> None:
    if index.shape != x.shape[:1]:
        raise ValueError(f"{argument}: expected one entry for each of {len(x)} points, got {tuple(index.shape)}")


def _checked_reduction(reduction: Reduction) -> Reduction:
    check_choice("reduction", reduction, Reduction)
    return reduction


def pooled_positions(pos: Tensor, cell: Tensor, num_cells: int) -> Tensor:
    """Centers of the cells: the mean ``[cells, dim]`` of their points' coordinates ``[points, dim]``."""
    _check_index("cell", cell, pos)
    kept = cell >= 0
    total = torch.zeros(num_cells, pos.shape[1], dtype=pos.dtype, device=pos.device)
    counts = torch.bincount(cell[kept], minlength=num_cells).to(pos.dtype)
    return total.index_add(0, cell[kept], pos[kept]) / counts[:, None]


class GridSpatialPool(nn.Module):
    """Pool size x size cells of the positions, pose by pose, with a stride as large as the cell.

    **Equivariance.** To quarter turns and mirrors where cells fill the image; other images would lose their last
    rows or columns, and a turned image others.

    Parameters
    ----------
    size
        Side of a cell in pixels.
    reduction
        ``"max"`` or ``"mean"``.
    inexact
        What to do with sides that are no multiples of ``size``: ``"refuse"`` raises ValueError, ``"warn"`` warns,
        ``"allow"`` says nothing.
    """

    def __init__(
        self, size: int = 2, reduction: Literal["max", "mean"] = "max", *, inexact: Inexact = "refuse"
    ) -> None:
        super().__init__()
        check_count("size", size)
        check_choice("reduction", reduction, ("max", "mean"))
        check_choice("inexact", inexact, Inexact)
        self.size, self.reduction, self.inexact = size, reduction, inexact

    def forward(self, x: Tensor) -> Tensor:
        """``[*, rows, columns]`` to ``[*, rows / size, columns / size]``."""
        if x.ndim < 3:
            raise ValueError(f"x: expected [*, rows, columns], got {tuple(x.shape)}")
        rows, columns = x.shape[-2:]
        if rows < self.size or columns < self.size:
            raise ValueError(f"x: no cell of {self.size} x {self.size} fits into {rows} x {columns} pixels")
        if rows % self.size or columns % self.size:
            complain(self.inexact, _drops_pixels(rows, columns, self.size))
        pool = F.max_pool2d if self.reduction == "max" else F.avg_pool2d
        pooled = pool(x.flatten(0, -4) if x.ndim > 4 else x, self.size)
        return pooled.unflatten(0, x.shape[:-3]) if x.ndim > 4 else pooled
