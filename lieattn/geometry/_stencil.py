"""Neighborhoods of the pixels of images of one size, as one window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.contexts import transformed
from lieattn.geometry._clouds import PointClouds
from lieattn.geometry._lift import lift
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._movable import Movable
from lieattn.geometry._neighbors import AllPairs, Neighborhood, PixelSquare, Radius

CONVOLUTIONS: dict[int, Any] = {2: F.conv2d, 3: F.conv3d}
_REGULAR = 1e-5  # largest deviation of a pixel from its lattice, in units of its spacing
_WIDEST = 4  # pixels from the center of a window to its sides, beyond which lists of neighbors are shorter


@dataclass(frozen=True, eq=False)
class Stencil(Movable):
    """The neighborhood of a pixel in images of one size, which stands for those of all pixels.

    Attributes
    ----------
    graph
        Edges from the pixels of a window to its center: for each image, or for all images if their lattices are alike.
    place
        Index ``[edges]`` int64 of the pixel of each edge among those of all windows.
    sides, window
        Sides of the images and of the windows, in pixels.
    degree
        Number of neighbors ``[images | 1, pixels]`` of each pixel, with the weights of smooth neighborhoods.
    """

    graph: LiftedGraph
    place: Tensor
    sides: tuple[int, ...]
    window: tuple[int, ...]
    degree: Tensor

    def convolve(
        self, x: Float[Tensor, "points frames inputs"], kernel: Float[Tensor, "rows fiber frames outputs inputs"]
    ) -> Float[Tensor, "points fiber outputs"]:
        """Return the sums over the neighbors of the products with a kernel, which has a row for each edge, or kind."""
        windows, images = len(self.degree), len(x) // math.prod(self.sides)
        fiber, frames, out, width = kernel.shape[1:]
        rows = kernel.permute(0, 1, 3, 2, 4).flatten(1)
        if (row := self.graph.relative.row) is not None:
            rows = rows.index_select(0, row)
        dense = rows.new_zeros(windows * math.prod(self.window), rows.shape[1]).index_copy(0, self.place, rows)
        dense = dense.view(windows, -1, fiber * out, frames * width).permute(0, 2, 3, 1)
        dense = dense.reshape(windows * fiber * out, frames * width, *self.window)
        # The channels stay innermost in memory, as in a field of points.
        planes = x.reshape(images, *self.sides, -1).movedim(-1, 1)
        # Windows that differ between images are those of separate channels of a single image.
        planes = planes if windows == 1 else planes.reshape(1, -1, *self.sides)
        padding = [side // 2 for side in self.window]
        summed = CONVOLUTIONS[len(self.sides)](planes, dense, padding=padding, groups=windows)
        return summed.view(images, -1, *self.sides).movedim(1, -1).reshape(-1, fiber, out)


def lift_rasters(clouds: PointClouds, frames: Any, neighborhood: Neighborhood, space: Any) -> LiftedGraph:
    """Lift clouds; for images of one size the graph carries a :class:`Stencil` as terms, and has no neighbor lists."""
    steps = _steps(clouds)
    if steps is not None and isinstance(neighborhood, Radius | PixelSquare):
        reach = neighborhood.length * (math.sqrt(steps.shape[-1]) if isinstance(neighborhood, PixelSquare) else 1.0)
        half = math.floor(reach / float(torch.linalg.svdvals(steps).min().clamp(min=1e-30)) + 0.01)
        if 1 <= half <= _WIDEST:
            graph = lift(clouds, frames, AllPairs(), space, length=neighborhood.length)
            return graph.carrying(terms=_stencil(clouds, steps, half, frames, neighborhood, space))
    graph = lift(clouds, frames, neighborhood, space)
    # Evaluated here, so that loader workers compute them and compiled networks do not have to.
    _ = graph.relative.row, graph.relative.positions
    return graph


def _steps(clouds: PointClouds) -> Tensor | None:
    """Return steps ``[images | 1, axes, dim]`` float64 between pixels along the axes of images of one size.

    None for other clouds, and if derivatives by the positions are wanted.
    """
    dim = clouds.pos.shape[1]
    if clouds.pos.requires_grad or transformed() or torch.compiler.is_compiling() or dim not in CONVOLUTIONS:
        return None
    sides = clouds.sides
    if sides is None or len(sides) != dim or min(sides) < 2:
        return None
    pos = clouds.pos.detach().double().unflatten(0, (clouds.num_clouds, *sides))
    corner = pos[(slice(None), *[0] * dim)]
    last = [pos[(slice(None), *[-int(axis == other) for other in range(dim)])] for axis in range(dim)]
    steps = torch.stack([(end - corner) / (side - 1) for end, side in zip(last, sides, strict=True)], dim=1)
    near = _REGULAR * steps.norm(dim=-1).min() + 4 * torch.finfo(clouds.pos.dtype).eps * pos.abs().max()
    places = torch.cartesian_prod(*(torch.arange(side, device=pos.device).double() for side in sides))
    if bool(((pos.flatten(1, dim) - corner[:, None] - places @ steps).abs() > near).any()):
        return None
    return steps[:1] if bool(((steps - steps[0]).abs() <= near / max(sides)).all()) else steps


def _stencil(
    clouds: PointClouds, steps: Tensor, half: int, frames: Any, neighborhood: Neighborhood, space: Any
) -> Stencil:
    windows, dim = steps.shape[:2]
    sides, window = cast(tuple[int, ...], clouds.sides), (2 * half + 1,) * dim
    offsets = torch.cartesian_prod(*[torch.arange(-half, half + 1, device=steps.device).double()] * dim)
    pos = (offsets @ steps).flatten(0, 1).to(clouds.pos)
    cloud = torch.arange(windows, device=pos.device).repeat_interleave(len(offsets))
    graph = lift(PointClouds(pos=pos, batch=cloud, num_clouds=windows), frames, neighborhood, space)
    graph = graph.select_edges((graph.neighbors.target % len(offsets) == len(offsets) // 2).nonzero()[:, 0])
    place, log_weight, row = graph.neighbors.source, graph.relative.log_window, graph.relative.row
    weight = pos.new_ones(len(place))
    if log_weight is not None:
        weight = (log_weight if row is None else log_weight.index_select(0, row)).exp().to(pos)
    inside = pos.new_zeros(len(pos)).index_copy(0, place, weight).view(windows, 1, *window)
    ones, padding = pos.new_ones(1, windows, *sides), [half] * dim
    degree = CONVOLUTIONS[dim](ones, inside, padding=padding, groups=windows).clamp(min=1).view(windows, -1)
    _ = graph.relative.positions
    return Stencil(graph, place, sides, window, degree)
