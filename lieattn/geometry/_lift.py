"""The lift of point clouds to a graph of group elements over the points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import (
    check_count,
    check_is,
    check_length,
    check_neighborhood,
    check_size,
    check_tensor,
    is_maker,
    shown,
)
from lieattn._core.contexts import transformed, without_autocast
from lieattn.geometry._clouds import PointClouds, pixel_steps, point_clouds, point_weights
from lieattn.geometry._frames import (
    FiniteFrames,
    Frames,
    GivenFrames,
    GroupFrames,
    Sites,
    check_moves_along,
    chosen_frames,
)
from lieattn.geometry._indices import Movable
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import (
    AllPairs,
    Neighborhood,
    PixelSquare,
    Radius,
    find_neighbors,
    scaled,
    smooth_cutoff,
)
from lieattn.geometry._principal_frames import PrincipalFrames
from lieattn.geometry._relative import Chart
from lieattn.groups import SE, E, FiniteGroup, SemidirectProduct, Translations, check_group, trivial
from lieattn.spaces import Euclidean, HomogeneousSpace


@dataclass(frozen=True)
class ScaleFrames:
    r"""The elements of a finite group on several scales: :math:`h_a s_k` with :math:`s_k = first \cdot base^k`.

    The scales are a finite part of the dilations by powers of ``base``. The lifted graph has one node for each point
    and scale, with the index i · levels + k, and the frames h_a over it. The element (x_i, h_a, s_k) attends to all
    (x_j, h_b, s_l) with \|l - k\| ≤ ``reach`` for which x_j is in the neighborhood of x_i. The neighborhood that is
    passed to :func:`lift` is scaled by s_k. The coordinates of g⁻¹ g' are (h_a⁻¹ (x_j - x_i) / s_k, h_a⁻¹ h_b, l - k).

    **Measure.** The Haar measure is dx dh ds / s^(d + 1). A point that represents the volume ω therefore has the
    measure ω / s^d, which contains the factor 1/\|h\| of Eqs. 20 and 21 of GSA-Nets. If volumes are given, as the
    ``weights`` of :func:`lift`, the source (j, l) has the measure ω_j / s_l^d, which does not change if the cloud and
    its volumes are dilated. Otherwise it has the measure (s_l / s_k)^-d, which depends only on the relative element and
    gives the same softmax. With ``reach=0``, which is lifting (Eq. 20), it is 1.

    **Equivariance.** Exact for R^d ⋊ H. Dilating a cloud by ``base`` shifts a field by one scale, unless its values
    depend on keys beyond the first or last scale: after lifting and n layers, the shift from scale k to k + 1 is exact
    for n reach ≤ k and k + 1 ≤ levels - 1 - n reach, see docs/exactness.md. For dilations by other factors, errors are
    as large as for rotations between the elements of H. Rotary encodings and edge networks read positions that are not
    divided by the scale, so dilations do not shift the output of layers with them.

    Parameters
    ----------
    group
        The group H, which must be orthogonal; use ``trivial(dim)`` for dilations alone.
    base, levels, first
        The ratio of adjacent scales, above 1; the number of scales; and the smallest scale, s_0.
    reach
        Largest difference \|l - k\| between the scales of a query and a key.

    Examples
    --------
    Dilated squares have the same number of pixels on every scale, here 3 x 3 that are 1, 2 and 4 pixels apart:

    >>> from lieattn.geometry import PixelSquare, pixel_positions
    >>> from lieattn.groups import cyclic
    >>> frames = ScaleFrames(cyclic(4), first=0.5, reach=0)
    >>> graph = lift(pixel_positions(9, 9), frames, PixelSquare(3, dilation=2))
    >>> center = graph.neighbors.target // 3 == 40
    >>> steps = (graph.pos[graph.neighbors.source] - graph.pos[graph.neighbors.target])[center, 0]
    >>> steps.unique().tolist()
    [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0]
    """

    group: FiniteGroup
    base: float = 2.0
    levels: int = 3
    first: float = 1.0
    reach: int = 1

    def __post_init__(self) -> None:
        check_group("group", self.group)
        check_length("base", self.base)
        check_length("first", self.first)
        check_count("levels", self.levels)
        check_count("reach", self.reach, least=0)
        if self.base <= 1:
            raise ValueError(f"base: expected a ratio above 1, got {self.base}")
        if not self.group.is_orthogonal:
            raise ValueError(f"group: expected an orthogonal group, got {self.group!r}")
        check_length("the coarsest scale, first * base^(levels - 1)", self.factors[-1])

    @property
    def factors(self) -> list[float]:
        """The scale s_k of each level."""
        return [float(self.first) * float(self.base) ** k for k in range(self.levels)]

    def __call__(
        self,
        clouds: PointClouds,
        neighborhood: Neighborhood,
        space: HomogeneousSpace,
        length: float,
        volumes: Float[Tensor, " points"] | None = None,
    ) -> LiftedGraph:
        """Return the graph of the nodes, for neighborhood and length on scale 1, and positive ``volumes`` [points]."""
        check_is("clouds", clouds, PointClouds)
        dim, levels = clouds.pos.shape[1], self.levels
        if self.group.dim != dim:
            raise ValueError(f"points: {self.group.name} acts on {self.group.dim} coordinates, got points with {dim}")
        if not isinstance(space, Euclidean):
            raise ValueError(f"space: expected a Euclidean space for ScaleFrames, got {space!r}")
        (space.stabilizer or trivial(dim)).check("frames", self.group.matrices(clouds.pos))
        nodes = clouds.num_points * levels
        parts = []
        for k, factor in enumerate(self.factors):
            found = find_neighbors(clouds, scaled(neighborhood, factor))
            shift = clouds.pos.new_zeros(found.num_edges, dim) if found.shift is None else found.shift
            for step in range(max(-self.reach, -k), min(self.reach, levels - 1 - k) + 1):
                parts.append(((found.target * levels + k) * nodes + found.source * levels + k + step, shift))
        keys, shift = (torch.cat(column) for column in zip(*parts, strict=True))
        order = keys.argsort(stable=True)
        neighbors = Neighbors.from_keys(keys[order], nodes)
        if clouds.cell is not None:
            neighbors = replace(neighbors, shift=shift[order])
        level = neighbors.source % levels
        levels_up = level - neighbors.target % levels
        log_measure = -dim * math.log(self.base) * levels_up.to(clouds.pos.dtype)
        factors = torch.tensor(self.factors, dtype=torch.float64, device=clouds.device)
        if volumes is not None:
            log_volumes = point_weights(volumes, clouds.pos, positive=True).log()
            log_measure = log_volumes[neighbors.source // levels] - dim * factors.log()[level]
        pos, batch = (x.repeat_interleave(levels, dim=0) for x in (clouds.pos, clouds.batch))
        return LiftedGraph.over(
            replace(clouds, pos=pos, batch=batch, grid=None, raster=None, pixel=None, edge_index=None, each=None),
            space=space,
            neighbors=neighbors,
            length=length,
            cutoff=smooth_cutoff(neighborhood),
            group=self.group,
            dilation=factors.to(pos.dtype).repeat(clouds.num_points),
            levels_up=levels_up,
            log_measure=log_measure.to(pos.dtype),
            levels=levels,
        )


def lift(
    points: Any,
    frames: Frames | FiniteGroup | ScaleFrames | None,
    neighborhood: Neighborhood,
    space: HomogeneousSpace | None = None,
    *,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
    length: float | None = None,
    coordinates: Chart = "smooth",
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
    vectors: Tensor | None = None,
) -> LiftedGraph:
    """Lift point clouds to a group: the elements over each point x are s(x) h, where h are the frames.

    **Equivariance.** If g in G moves points and frames, all elements are multiplied by g from the left, and neighbor
    lists and relative elements do not change. Whether frames move with the points depends on the choice of frames. The
    elements of a finite group H do not move; instead, moving the points by (t, h) in R^d ⋊ H permutes the fiber.

    TypeError or ValueError is raised as by :func:`point_clouds`, and if coordinates exceed 1e15, a point is not in the
    space (such as 0 under rotations), frames are not in the stabilizer, or the group does not preserve the distances on
    which the neighborhood is based.

    Parameters
    ----------
    points, batch, ptr, mask
        Point clouds in any form that :func:`point_clouds` accepts, rasters and periodic cells included. Points belong
        to the space; for example, positions with directions have 6 components. The graph does not copy positions.
    frames
        ``FiniteFrames``, ``PrincipalFrames``, ``SampledFrames``, ``GivenFrames`` or ``ScaleFrames``. A finite group
        stands for ``FiniteFrames(group)``. It must be None if, and only if, the stabilizer is trivial.
    neighborhood
        For example ``Radius(1.5)`` or ``AllPairs()``. If points have directions, it applies to their positions.
    space
        X with its group, for example ``Euclidean(SE(3))``, ``Orbits(SO(3))`` or ``Sphere()``. The default is
        :func:`natural_space`: R^d under R^d ⋊ H for a finite group, translations for None, else SE(d) or E(d).
    length
        Length by which translations of relative elements are divided. The default is the length of the neighborhood, or
        1 if it has none.
    coordinates
        ``"smooth"`` or ``"log"``, see :class:`RelativeElements`. Logarithms are discontinuous at angles of π.
    weights
        ``[points]`` nonnegative: masses for frames that average over points, or volumes for :class:`ScaleFrames`.
    generator
        Generator of random frames. By default, they are drawn from their own seed.
    vectors
        ``[points, count, dim]``, input vectors, for principal axes that the points do not determine.

    Examples
    --------
    >>> from lieattn.geometry import AllPairs, Radius
    >>> from lieattn.groups import octahedral
    >>> lift(torch.randn(5, 3), octahedral(), Radius(1.0)).fiber
    24
    >>> graph = lift(torch.randn(5, 3), PrincipalFrames(), AllPairs())
    >>> graph.elements.shape, graph.relative.coordinates.shape
    (torch.Size([5, 4, 4, 4]), torch.Size([25, 4, 4, 12]))
    """
    check_neighborhood(neighborhood)
    clouds = point_clouds(points, batch=batch, ptr=ptr, mask=mask)
    if isinstance(frames, FiniteGroup):
        frames = FiniteFrames(frames)
    if frames is not None and (isinstance(frames, type) or not callable(frames) or is_maker(frames)):
        raise TypeError(f"frames: expected a choice of frames such as PrincipalFrames(), got {shown(frames)}")
    space = natural_space(frames, clouds.pos.shape[1]) if space is None else space
    if not isinstance(space, HomogeneousSpace):
        raise TypeError(f"space: expected a homogeneous space such as Euclidean(SE(3)), got {space!r}")
    space.check("points", clouds.pos)
    check_moves_along(neighborhood, space, frames)
    if clouds.cell is not None and not space.group.is_affine:
        raise ValueError(f"cell: expected None, since {space.name} has no translations")
    if length is None:
        length = 1.0 if neighborhood.length is None else neighborhood.length
    check_length("length", length)
    check_size("pos", clouds.pos, float(length), always=True)
    if isinstance(frames, ScaleFrames):
        if coordinates != "smooth":
            raise ValueError(f"coordinates: expected 'smooth' with ScaleFrames, got {coordinates!r}")
        return frames(clouds, neighborhood, space, float(length), weights)
    if vectors is not None:
        check_tensor("vectors", vectors, "a floating tensor [points, count, dim]")
        if vectors.ndim != 3 or vectors.shape[::2] != (clouds.num_points, space.group.dim):
            expected = f"[points={clouds.num_points}, count, {space.group.dim}]"
            raise ValueError(f"vectors: expected {expected}, got {tuple(vectors.shape)}")
    neighbors = find_neighbors(replace(clouds, pos=clouds.pos[:, : space.group.dim]), neighborhood)
    # Geometry needs full precision, also under autocast.
    with without_autocast(clouds.device):
        chosen = chosen_frames(frames, Sites(clouds, neighbors, space, weights, generator, vectors))
        group, pose, elements = _laid_out(chosen, clouds, space)
    found: Any = {"neighbors": neighbors, "group": group, "pose": pose, "elements": elements, "chart": coordinates}
    return LiftedGraph.over(clouds, space=space, length=float(length), cutoff=smooth_cutoff(neighborhood), **found)


def natural_space(frames: Frames | ScaleFrames | None, dim: int | None = None) -> HomogeneousSpace:
    """Return R^d under the motions that frames belong to, the default space of :func:`lift`.

    If ``dim`` is absent, d is the dimension of the frames' matrices, or 3 if they have none. ValueError is raised if
    frames act on another dimension, or if R^d has no default group, since SE(d) and E(d) are defined for d = 2 and 3.
    """
    own, improper = 3, isinstance(frames, PrincipalFrames) and bool(frames.improper)
    if isinstance(frames, FiniteFrames | ScaleFrames):
        own, improper = frames.group.dim, not frames.group.is_proper
    elif isinstance(frames, GivenFrames):
        own, improper = frames.frames.shape[-1], bool((torch.linalg.det(frames.frames.detach().double()) < 0).any())
    dim = own if dim is None else dim
    check_count("dim", dim)
    if frames is None:
        return Euclidean(Translations(dim))
    if isinstance(frames, ScaleFrames) or (isinstance(frames, FiniteFrames) and frames.pose is None):
        if own != dim:
            expected = f"acts on {own} coordinates, so expected [points, {own}]"
            raise ValueError(f"points: {frames.group.name} {expected}, got [points, {dim}]")
        return Euclidean(SemidirectProduct(frames.group))
    if dim not in (2, 3):
        raise ValueError(f"space: must be given for {dim} dimensions, since SE(d) and E(d) are defined for 2 and 3")
    return Euclidean(E(dim) if improper else SE(dim))


def _laid_out(
    chosen: Tensor | GroupFrames | None, clouds: PointClouds, space: HomogeneousSpace
) -> tuple[FiniteGroup | None, Tensor | None, Tensor | None]:
    """Return group, pose and elements. Elements are None if group and pose determine them."""
    if not isinstance(chosen, GroupFrames):
        return None, None, space.lift(clouds.pos, chosen)
    if isinstance(space, Euclidean):
        return chosen.group, chosen.pose, None
    matrices = chosen.group.matrices(clouds.pos)
    frames = matrices if chosen.pose is None else chosen.pose[:, None] @ matrices
    return chosen.group, None, space.lift(clouds.pos, frames)


CONVOLUTIONS: dict[int, Any] = {2: F.conv2d, 3: F.conv3d}
_REGULAR = 1e-5  # largest deviation of a pixel from its lattice, in units of its spacing; less in float64, see below
_SPARSEST = 2.5  # pixels for each point, above which lists of neighbors are faster
_WIDEST = 4  # pixels from the center of a window to its sides, beyond which lists of neighbors are shorter


@dataclass(frozen=True, eq=False)
class Stencil(Movable):
    """The neighborhood of a pixel in images, which stands for those of all pixels.

    Attributes
    ----------
    graph
        Edges from the pixels of a window to its center: for each image, or for all images if their lattices are alike.
    place
        Index ``[edges]`` int64 of the pixel of each edge among those of all windows.
    sides, window
        Sides of the images, or of the largest one, and of the windows, in pixels.
    degree
        Number of neighbors ``[images | 1, pixels]`` of each pixel, with the weights of smooth neighborhoods.
    pixel
        Index ``[points]`` int64 of the pixel of each point among those of all images; None if points are in that order
        and no pixel is missing.
    """

    graph: LiftedGraph
    place: Tensor
    sides: tuple[int, ...]
    window: tuple[int, ...]
    degree: Tensor
    pixel: Tensor | None

    def convolve(
        self, x: Float[Tensor, "points frames inputs"], kernel: Float[Tensor, "rows fiber *channels"]
    ) -> Float[Tensor, "points fiber outputs"]:
        """Return the sums over the neighbors of the products with a kernel, which has a row for each edge, or kind.

        It is ``[rows, fiber, frames, outputs, inputs]``, or ``[rows, fiber, channels]`` for products within each frame
        and channel.
        """
        windows = self.graph.num_points // math.prod(self.window)
        fiber, within = kernel.shape[1], kernel.ndim == 3
        if (row := self.graph.relative.row) is not None:
            kernel = kernel.index_select(0, row)
        rows = kernel.flatten(1) if within else kernel.permute(0, 1, 3, 2, 4).flatten(1)
        dense = rows.new_zeros(windows * math.prod(self.window), rows.shape[1]).index_copy(0, self.place, rows)
        outputs = fiber * kernel.shape[2 if within else 3]
        dense = dense.view(windows, -1, outputs, rows.shape[1] // outputs).permute(0, 2, 3, 1)
        dense = dense.reshape(windows * outputs, -1, *self.window)
        pixels = x.expand(-1, fiber, -1).flatten(1) if within else x.flatten(1)
        if self.pixel is not None:  # missing pixels are zeros, which add nothing
            pixels = pixels.new_zeros(self.degree.numel(), pixels.shape[1]).index_copy(0, self.pixel, pixels)
        # The channels stay innermost in memory, as in a field of points.
        planes = pixels.view(-1, *self.sides, pixels.shape[1]).movedim(-1, 1)
        # Windows that differ between images are those of separate channels of a single image.
        planes = planes if windows == 1 else planes.reshape(1, -1, *self.sides)
        padding, groups = [side // 2 for side in self.window], windows * (outputs if within else 1)
        summed = CONVOLUTIONS[len(self.sides)](planes, dense, padding=padding, groups=groups)
        found = summed.view(-1, outputs, *self.sides).movedim(1, -1).reshape(-1, fiber, outputs // fiber)
        return found if self.pixel is None else found.index_select(0, self.pixel)

    def degrees(self, points: int) -> Float[Tensor, " points"]:
        """Return the number of neighbors of each point."""
        if self.pixel is None:
            return self.degree.expand(points // self.degree.shape[1], -1).flatten()
        return self.degree.flatten().index_select(0, self.pixel)


def lift_rasters(clouds: PointClouds, frames: Any, neighborhood: Neighborhood, space: Any) -> LiftedGraph:
    """Lift clouds; for images on lattices the graph carries a :class:`Stencil` as terms, and has no neighbor lists."""
    lattice = _lattice(clouds)
    if lattice is not None and isinstance(neighborhood, Radius | PixelSquare):
        steps, sides, pixel = lattice
        reach = neighborhood.length * (math.sqrt(steps.shape[-1]) if isinstance(neighborhood, PixelSquare) else 1.0)
        half = math.floor(reach / float(torch.linalg.svdvals(steps).min().clamp(min=1e-30)) + 0.01)
        if 1 <= half <= _WIDEST:
            graph = lift(clouds, frames, AllPairs(), space, length=neighborhood.length)
            window = _window(clouds.pos, steps, half, frames, neighborhood, space)
            return graph.carrying(terms=_stencil(*window, clouds.num_clouds, sides, pixel))
    graph = lift(clouds, frames, neighborhood, space)
    # Evaluated here, so that loader workers compute them and compiled networks do not have to.
    _ = graph.relative.row, graph.relative.positions
    return graph


def _lattice(clouds: PointClouds) -> tuple[Tensor, tuple[int, ...], Tensor | None] | None:
    """Return steps between pixels along the axes of images, the largest sides, and the pixel of each point.

    Steps are ``[images | 1, axes, dim]`` float64, and pixels ``[points]`` int64, or None if all are in raster order.
    None for other clouds, for images of which few pixels are left, and if derivatives by the positions are wanted.
    """
    dim, image = clouds.pos.shape[1], clouds.on_raster()
    if clouds.pos.requires_grad or transformed() or torch.compiler.is_compiling() or dim not in CONVOLUTIONS:
        return None
    if image is None or clouds.num_points == 0 or image[0].shape[1] != dim:
        return None
    (whole, places), sides, pixel = image, clouds.sides, None
    if sides is None:
        sides = tuple(whole.amax(dim=0).tolist())
        pixel = clouds.batch
        for axis, side in enumerate(sides):
            pixel = pixel * side + places[:, axis]
        number = clouds.num_clouds * math.prod(sides)
        if number > _SPARSEST * len(pixel) or int(torch.bincount(pixel, minlength=number).max()) > 1:
            return None
    if min(sides) < 2:
        return None
    steps, pos = pixel_steps(clouds, places), clouds.pos.detach().double()
    # Only as far as rounding goes, since the images of a batch have the outputs that they have alone.
    rounding = torch.finfo(clouds.pos.dtype).eps
    near = min(_REGULAR, 64 * rounding) * steps.norm(dim=-1).min() + 4 * rounding * pos.abs().max()
    found = pos - (places.double()[:, None] @ steps[clouds.batch])[:, 0]
    if bool(((found - clouds.mean(found)[clouds.batch]).abs() > near).any()):
        return None
    alike = bool(((steps - steps[0]).abs() <= near / max(sides)).all())
    return (steps[:1] if alike else steps), sides, pixel


def _window(
    pos: Tensor, steps: Tensor, half: int, frames: Any, neighborhood: Neighborhood, space: Any
) -> tuple[LiftedGraph, tuple[int, ...]]:
    """Return the edges from the pixels of a window to its center, for each lattice, and the sides of the window."""
    windows, dim = steps.shape[:2]
    offsets = torch.cartesian_prod(*[torch.arange(-half, half + 1, device=steps.device).double()] * dim)
    places = (offsets @ steps).flatten(0, 1).to(pos)
    cloud = torch.arange(windows, device=pos.device).repeat_interleave(len(offsets))
    graph = lift(PointClouds(pos=places, batch=cloud, num_clouds=windows), frames, neighborhood, space)
    graph = graph.select_edges((graph.neighbors.target % len(offsets) == len(offsets) // 2).nonzero()[:, 0])
    _ = graph.relative.positions
    return graph, (2 * half + 1,) * dim


def _stencil(
    graph: LiftedGraph, window: tuple[int, ...], images: int, sides: tuple[int, ...], pixel: Tensor | None
) -> Stencil:
    place, log_weight, row = graph.neighbors.source, graph.relative.log_window, graph.relative.row
    weight = graph.pos.new_ones(len(place))
    if log_weight is not None:
        weight = (log_weight if row is None else log_weight.index_select(0, row)).exp().to(graph.pos)
    inside = weight.new_zeros(graph.num_points).index_copy(0, place, weight).view(-1, 1, *window)
    there = weight.new_ones(len(inside), *sides)
    if pixel is not None:
        there = weight.new_zeros(images * math.prod(sides)).index_fill(0, pixel, 1.0).view(-1, *sides)
    there = there[:, None] if len(inside) == 1 else there[None]
    padding = [side // 2 for side in window]
    degree = CONVOLUTIONS[len(sides)](there, inside, padding=padding, groups=len(inside))
    return Stencil(graph, place, sides, window, degree.clamp(min=1).view(-1, math.prod(sides)), pixel)
