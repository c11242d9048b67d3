"""Batches of point clouds, in whatever form they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import kind
from lieattn.geometry._clouds import as_coordinates, check_grid, cloud_index


@dataclass(frozen=True, eq=False, kw_only=True)
class PointClouds:
    """Points of several clouds one after another. Make one with :func:`point_clouds`.

    Attributes
    ----------
    pos
        ``[points, dim]`` floating coordinates.
    batch
        ``[points]`` int64, the cloud of each point, in any order.
    num_clouds
        How many clouds there are; a cloud may be empty.
    grid
        ``[clouds, 2]`` int64 height and width if the clouds are images in raster order, else None.
    """

    pos: Tensor
    batch: Tensor
    num_clouds: int
    grid: Tensor | None = None

    @property
    def num_points(self) -> int:
        """Number of points of all clouds."""
        return self.pos.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.pos.device


def point_clouds(
    points: Any,
    *,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
    grid: Tensor | None = None,
) -> PointClouds:
    """Read point clouds from tensors or a torch_geometric object.

    Parameters
    ----------
    points
        Coordinates ``[points, dim]``; or padded ones ``[clouds, N, dim]``, with a ``mask`` if some are padding;
        or a torch_geometric ``Data`` or ``Batch`` with ``pos`` and, where they are there, ``batch``, ``ptr`` and
        ``grid``; or :class:`PointClouds`, which are returned as they are.
    batch, ptr
        Cloud of each point ``[points]``, or first point of each cloud ``[clouds + 1]``; one cloud if absent.
    mask
        ``[clouds, N]`` bool, which padded points are there. Lay out features likewise with :func:`flatten`.
    grid
        ``[clouds, 2]`` int64 heights and widths if the clouds are images in raster order.

    Raises
    ------
    TypeError, ValueError
        If shapes, dtypes, devices or batch indices do not fit, or a coordinate is not finite.
    """
    if isinstance(points, PointClouds):
        if any(given is not None for given in (batch, ptr, mask, grid)):
            raise ValueError("batch, ptr, mask, grid: PointClouds have their clouds already; leave them out")
        return points
    if not isinstance(points, Tensor):
        pos = getattr(points, "pos", None)
        if pos is None:
            raise TypeError(
                f"points: expected a tensor, or a torch_geometric Data or Batch with pos, got {type(points).__name__}"
            )
        batch = getattr(points, "batch", None) if batch is None else batch
        ptr = getattr(points, "ptr", None) if ptr is None else ptr
        grid = getattr(points, "grid", None) if grid is None else grid
        points = pos
    if points.ndim == 3:
        if mask is None:
            mask = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
        if batch is not None or ptr is not None:
            raise ValueError("batch, ptr: padded points [clouds, N, dim] have their clouds already; leave both out")
        _check_mask(mask, points.device, points.shape[:2])
        counts = mask.sum(dim=1)
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        points = points[mask]
    elif mask is not None:
        raise ValueError(f"mask: needs padded points [clouds, N, dim], got points of shape {tuple(points.shape)}")
    as_coordinates(points)
    cloud, num_clouds = cloud_index(points, batch, ptr)
    if grid is not None:
        _check_grid(grid, cloud, num_clouds)
    return PointClouds(pos=points, batch=cloud, num_clouds=num_clouds, grid=grid)


def flatten(padded: Tensor, mask: Tensor) -> Tensor:
    """Points that are there, ``[clouds, N, *]`` with mask ``[clouds, N]`` to ``[points, *]``."""
    _check_mask(mask, padded.device, padded.shape[:2])
    return padded[mask]


def unflatten(flat: Tensor, mask: Tensor) -> Tensor:
    """Padded layout again, zero where no point is: ``[points, *]`` to ``[clouds, N, *]``."""
    _check_mask(mask, flat.device)
    if flat.shape[0] != int(mask.sum()):
        raise ValueError(f"flat: expected {int(mask.sum())} points as in mask, got {flat.shape[0]}")
    padded = flat.new_zeros(*mask.shape, *flat.shape[1:])
    padded[mask] = flat
    return padded


def _check_mask(mask: Tensor, device: torch.device, shape: torch.Size | None = None) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor [clouds, N], got {kind(mask)}")
    if shape is not None and mask.shape != shape:
        raise ValueError(f"mask: expected shape {tuple(shape)}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"mask: expected on {device} as the points, got on {mask.device}")


def _check_grid(grid: Tensor, cloud: Tensor, num_clouds: int) -> None:
    check_grid(grid, cloud.device)
    if len(grid) != num_clouds:
        raise ValueError(f"grid: expected [{num_clouds}, 2], one row for each cloud, got {tuple(grid.shape)}")
    counts = torch.bincount(cloud, minlength=num_clouds)
    wrong = (counts != grid.prod(dim=1)) | (grid < 1).any(dim=1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(f"grid: image {first} has {int(counts[first])} points, its grid is {grid[first].tolist()}")
    if (cloud[1:] < cloud[:-1]).any():
        raise ValueError("grid: images must be in raster order one after another, but batch is not sorted")
