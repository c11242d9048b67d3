"""Convolutions with one kernel per frame, dense on rasters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.functional import transformed
from lieattn._core.kept_tables import ExactConstants
from lieattn.geometry import AllPairs, LiftedGraph, Neighborhood, PixelSquare, PointClouds, Radius, lift
from lieattn.groups import FiniteGroup
from lieattn.nn.relative import graph_attention
from lieattn.ops import RelativeTerms

_CONVOLUTIONS: dict[int, Any] = {2: F.conv2d, 3: F.conv3d}
_REGULAR = 1e-5  # largest deviation of a pixel from its lattice, in units of its spacing
_WIDEST = 4  # pixels from the center of a window to its sides, beyond which lists of neighbors are shorter


@dataclass(frozen=True, eq=False)
class Stencil:
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
        Number of neighbors ``[images | 1, 1, *sides]`` of the pixels, with the weights of smooth neighborhoods.
    """

    graph: LiftedGraph
    place: Tensor
    sides: tuple[int, ...]
    window: tuple[int, ...]
    degree: Tensor

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the means ``[points, fiber, out]`` over the neighbors of the products with a kernel ``[edges, ...]``.

        A kernel ``[edges, fiber, out]`` acts within frames on a field ``[points, fiber, out]``, and one of
        ``[edges, fiber, out, in]`` on features ``[points, in]``.
        """
        windows, images = len(self.degree), len(x) // math.prod(self.sides)
        fiber, out = kernel.shape[1:3]
        flat = kernel.flatten(1)
        dense = flat.new_zeros(windows * math.prod(self.window), flat.shape[1]).index_copy(0, self.place, flat)
        dense = dense.unflatten(0, (windows, -1)).mT.reshape(windows * fiber * out, -1, *self.window)
        planes = x.flatten(1).unflatten(0, (images, *self.sides)).movedim(-1, 1)
        # Windows that differ between images are those of separate channels of a single image.
        planes = planes if windows == 1 else planes.reshape(1, -1, *self.sides)
        options = {"padding": [side // 2 for side in self.window], "groups": planes.shape[1] // dense.shape[1]}
        summed = _CONVOLUTIONS[len(self.sides)](planes, dense, **options).view(images, -1, *self.sides)
        means = summed / self.degree.to(summed.dtype)
        return means.movedim(1, -1).flatten(0, len(self.sides)).unflatten(-1, (fiber, out))


def lifted(clouds: PointClouds, frames: Any, neighborhood: Neighborhood, space: Any) -> LiftedGraph:
    """Lift clouds; if they are alike rasters, the graph carries a :class:`Stencil` as terms in place of neighbors."""
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
    grid, dim = clouds.grid, clouds.pos.shape[1]
    recorded = clouds.pos.requires_grad or transformed() or torch.compiler.is_compiling()
    if grid is None or recorded or dim not in _CONVOLUTIONS or grid.shape[1] != dim or len(grid) == 0:
        return None
    if bool((grid != grid[0]).any() | (grid[0] < 2).any()):
        return None
    sides = grid[0].tolist()
    pos = clouds.pos.detach().double().unflatten(0, (len(grid), *sides))
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
    sides, window = clouds.grid[0].tolist(), [2 * half + 1] * dim  # type: ignore[index]
    offsets = torch.cartesian_prod(*[torch.arange(-half, half + 1, device=steps.device).double()] * dim)
    pos = (offsets @ steps).flatten(0, 1).to(clouds.pos)
    cloud = torch.arange(windows, device=pos.device).repeat_interleave(len(offsets))
    graph = lift(PointClouds(pos=pos, batch=cloud, num_clouds=windows), frames, neighborhood, space)
    graph = graph.select_edges((graph.neighbors.target % len(offsets) == len(offsets) // 2).nonzero()[:, 0])
    place, relative = graph.neighbors.source, graph.relative
    weight = pos.new_ones(len(place)) if relative.log_window is None else _by_edge(relative.log_window.exp(), graph)
    inside = pos.new_zeros(len(pos)).index_copy(0, place, weight.to(pos)).view(windows, 1, *window)
    ones, padding = pos.new_ones(1, windows, *sides), [half] * dim
    degree = _CONVOLUTIONS[dim](ones, inside, padding=padding, groups=windows).clamp(min=1).view(windows, 1, *sides)
    _ = relative.positions
    return Stencil(graph, place, tuple(sides), tuple(window), degree)


def _by_edge(x: Tensor, graph: LiftedGraph) -> Tensor:
    return x if graph.relative.row is None else x.index_select(0, graph.relative.row)


class BumpConvolution(ExactConstants):
    r"""Mean over the neighbors with kernels of Gaussian bumps on a small lattice that turns with the frame.

    .. math::  f'_c(x_i, a) = \frac{1}{|N(i)|} \sum_j \sum_m \phi_m(h_a^{-1}(x_j - x_i)) \, W_{mc} \, f_c(x_j, a)

    or, if the layer lifts, a matrix :math:`W_m` that acts on features without frames. In the plane there are 5 x 5
    bumps, so that on squares of 5 x 5 pixels upright frames have about a free number for each pixel.

    **Equivariance.** That of :class:`lieattn.nn.FrameMessages`.

    Parameters
    ----------
    group, channels
        Finite group, and channels of the result.
    in_channels
        Channels of features without frames that are lifted; None for a convolution within the channels of a field.
    """

    centers: Tensor

    def __init__(self, group: FiniteGroup, channels: int, in_channels: int | None = None) -> None:
        super().__init__()
        side = 5 if group.dim <= 2 else 3
        self.spacing, self.lifts = 2 / (side - 1), in_channels is not None
        line = torch.linspace(-1, 1, side, dtype=torch.float64, device="cpu")
        self.register_constant("centers", torch.cartesian_prod(*[line] * group.dim).reshape(-1, group.dim))
        weight = torch.randn(len(self.centers), channels, *([] if in_channels is None else [in_channels]))
        self.weight = nn.Parameter(weight / math.sqrt(in_channels or 1))

    def forward(self, x: Float[Tensor, "points *fiber inputs"], graph: LiftedGraph) -> Tensor:
        """Map a field ``[points, fiber, channels]``, or features ``[points, in_channels]``, to such a field."""
        if isinstance(stencil := graph.terms, Stencil):
            bumps, window = self._bumps(stencil.graph, x), stencil.graph.relative.log_window
            kernel = torch.einsum("eam,m...->ea...", bumps, self.weight)
            kernel = (
                kernel if window is None else kernel * window.exp().to(kernel.dtype).view(-1, *[1] * (kernel.ndim - 1))
            )
            return stencil.convolve(x, _by_edge(kernel, stencil.graph))
        bumps, row = self._bumps(graph, x), graph.relative.row
        if self.lifts:
            value, psi = x[:, None, None].expand(-1, graph.fiber, bumps.shape[-1], -1), bumps[:, :, None, :, None]
        else:
            value, psi = x[:, :, None], (bumps @ self.weight)[:, :, None, None]
        terms = RelativeTerms(psi=psi, row=row)
        summed, _ = graph_attention(None, None, value, graph, pattern="framewise", normalize="none", terms=terms)
        summed = torch.einsum("pamc,moc->pao", summed, self.weight) if self.lifts else summed[:, :, 0]
        return summed / graph.degree.clamp(min=1).to(summed.dtype)[:, None, None]

    def _bumps(self, graph: LiftedGraph, x: Tensor) -> Tensor:
        """Return the bumps ``[rows, fiber, bumps]``."""
        seen, centers = graph.relative.positions, self.centers
        square = (seen[:, :, None] - centers.to(seen)).square().sum(-1)
        return (square * (-2 / self.spacing**2)).exp().to(x.dtype)
