"""Geometry of a GSA-Net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.geometry import Coarse, LiftedGraph, PointClouds, crop
from lieattn.nn import GridPool

POOL = 2


@dataclass(frozen=True, eq=False)
class GSAGeometry:
    """Geometry of a forward pass, computed by :meth:`GSANet.geometry`, possibly in a worker of the data loader.

    Attributes
    ----------
    lifting
        Graph of the lifting layer.
    stages
        For each stage, the graph of each block, with the points that its crop keeps.
    cells
        For each stage, the pooling cell ``[points]`` int64 of each pixel, or those of other clouds; None for stages
        without pooling.
    clouds
        The points after each stage; the last entry is ``graph``.
    graph
        Graph of the output field.
    """

    lifting: LiftedGraph
    stages: tuple[tuple[LiftedGraph, ...], ...]
    cells: tuple[Tensor | Coarse | None, ...]
    clouds: tuple[PointClouds, ...]
    graph: LiftedGraph


def cropped(clouds: PointClouds, margin: int) -> tuple[Tensor | None, PointClouds]:
    """Return the indices of the points that a crop keeps (None if it keeps all), and the clouds of these points."""
    if margin == 0:
        return None, clouds
    if clouds.grid is None:
        raise ValueError("data: cropping of pixels needs the size of each image, grid [clouds, 2], got None")
    kept, grid = crop(clouds.grid, margin)
    left = PointClouds(
        pos=clouds.pos[kept],
        batch=clouds.batch[kept],
        num_clouds=clouds.num_clouds,
        grid=grid,
    )
    return kept, left.with_each()


def pooled(clouds: PointClouds, pool: GridPool) -> tuple[Tensor, PointClouds]:
    """Return the pooling cell of each point, and the clouds whose points are the cells."""
    if clouds.grid is None:
        one = "for other clouds use Stages(..., share=0.25)"
        raise ValueError(f"data: pooling of pixels needs the size of each image, grid [clouds, 2], got None; {one}")
    cell, grid = pool.cells(clouds.grid)
    batch = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), grid.prod(dim=1))
    pos = pool.centers(clouds.pos, cell, len(batch))
    return cell, PointClouds(pos=pos, batch=batch, num_clouds=clouds.num_clouds, grid=grid).with_each()
