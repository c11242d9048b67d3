"""Geometry of a GSA-Net: neighbor lists, crops and pooling cells of every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.geometry import LiftedGraph, PointClouds, crop
from lieattn.nn import GridPool, pooled_positions

POOL = 2


@dataclass(frozen=True, eq=False)
class Step:
    """Geometry of one block: where it attends, what its crop keeps, and the points that are left."""

    graph: LiftedGraph
    kept: Tensor | None
    clouds: PointClouds


@dataclass(frozen=True, eq=False)
class GSAGeometry:
    """All geometry of a forward pass: build it with :meth:`GSANet.geometry`, in a loader worker if you like.

    Attributes
    ----------
    lifting
        Graph of the lifting layer.
    stages
        The steps of the blocks of each stage.
    cells
        Cell of each point for the pooling behind each stage, None where there is none.
    clouds
        The points behind each stage; the last entry is :attr:`graph`.
    """

    lifting: LiftedGraph
    stages: tuple[tuple[Step, ...], ...]
    cells: tuple[Tensor | None, ...]
    clouds: tuple[PointClouds, ...]
    graph: LiftedGraph


def cropped(clouds: PointClouds, margin: int) -> tuple[Tensor | None, PointClouds]:
    """What a crop keeps, None if that is everything, and the clouds that are left."""
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
        cell=clouds.cell,
        pbc=clouds.pbc,
    )
    return kept, left


def pooled(clouds: PointClouds, pool: GridPool, advice: Callable[[], str]) -> tuple[Tensor, PointClouds]:
    """Cell of each point, and the clouds that the cells make."""
    if clouds.grid is None:
        raise ValueError("data: pooling of pixels needs the size of each image, grid [clouds, 2], got None")
    cell, grid = pool.cells(clouds.grid, advice)
    batch = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), grid.prod(dim=1))
    pos = pooled_positions(clouds.pos, cell, len(batch))
    return cell, PointClouds(pos=pos, batch=batch, num_clouds=clouds.num_clouds, grid=grid)


def exact_inputs(grid: Tensor, crops: Sequence[Sequence[int]], pools: Sequence[bool]) -> str:
    """Which square images near the first that does not would divide at all poolings, in words.

    Parameters
    ----------
    grid
        ``[clouds, 2]`` sizes of the input, one of them not exact.
    crops
        Margins that the blocks of each stage cut off.
    pools
        Whether a pooling follows each stage.
    """
    # Backwards from an output of side k, the sides of exact inputs are smallest + step * k.
    step, smallest = 1, 0
    for margins, pool in zip(reversed(crops), reversed(pools), strict=True):
        if pool:
            step, smallest = step * POOL, smallest * POOL
        smallest += 2 * sum(margins)
    side = int(grid[(grid - smallest) % step != 0][0])
    below = smallest + step * max(1, (side - smallest) // step)
    above = below + step
    return f"inputs of {below} x {below} or {above} x {above} keep all sizes exact"
