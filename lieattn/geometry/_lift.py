"""The lift of point clouds to a graph of group elements over the points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lieattn._core.autocast import without_autocast
from lieattn._core.checks import (
    check_count,
    check_length,
    check_neighborhood,
    check_size,
    check_tensor,
)
from lieattn.geometry._clouds import PointClouds, point_clouds
from lieattn.geometry._frames import FiniteFrames, GivenFrames, check_moves_along, chosen_frames
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._neighbors import Neighborhood, find_neighbors, smooth_cutoff
from lieattn.geometry._principal_frames import PrincipalFrames
from lieattn.geometry._relative import Chart
from lieattn.geometry._scales import ScaleFrames
from lieattn.geometry._sites import Frames, GroupFrames, Sites
from lieattn.groups import SE, E, FiniteGroup, SemidirectProduct, Translations
from lieattn.spaces import Euclidean, HomogeneousSpace


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
    if frames is not None and (isinstance(frames, type) or not callable(frames)):
        raise TypeError(f"frames: expected a choice of frames such as PrincipalFrames(), got {frames!r}")
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
    if vectors is not None and (vectors.ndim != 3 or vectors.shape[::2] != (clouds.num_points, space.group.dim)):
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
    if dim is not None:
        check_count("dim", dim)
    else:
        dim = 3
        if isinstance(frames, FiniteFrames | ScaleFrames):
            dim = frames.group.dim
        elif isinstance(frames, GivenFrames):
            dim = frames.frames.shape[-1]
    if frames is None:
        return Euclidean(Translations(dim))
    if isinstance(frames, ScaleFrames) or (isinstance(frames, FiniteFrames) and frames.pose is None):
        own = frames.group.dim
        if own != dim:
            expected = f"acts on {own} coordinates, so expected [points, {own}]"
            raise ValueError(f"points: {frames.group.name} {expected}, got [points, {dim}]")
        return Euclidean(SemidirectProduct(frames.group))
    improper = isinstance(frames, PrincipalFrames) and bool(frames.improper)
    if isinstance(frames, FiniteFrames):
        improper = not frames.group.is_proper
    if isinstance(frames, GivenFrames):
        improper = bool((torch.linalg.det(frames.frames.detach().double()) < 0).any())
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
