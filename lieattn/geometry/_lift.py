"""Lifting: from point clouds to a graph of group elements over the points, for every kind of group and frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_length, check_neighborhood
from lieattn.geometry._frames import FiniteFrames, Frames, GivenFrames, GroupFrames, Sites, keeps_lengths
from lieattn.geometry._lifted_graph import LiftedGraph
from lieattn.geometry._neighbors import Nearest, Neighborhood, PixelSquare, Radius, find_neighbors
from lieattn.geometry._point_clouds import PointClouds, point_clouds
from lieattn.geometry._principal_frames import PrincipalFrames
from lieattn.geometry._relative import Chart
from lieattn.geometry._scales import ScaleFrames
from lieattn.groups import SE, E, FiniteGroup, SemidirectProduct, Translations, trivial
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
) -> LiftedGraph:
    """Lift point clouds to a group: over each point x stand the elements s(x) h with the frames h.

    **Equivariance.** Moving points and frames by g in G multiplies all elements by g from the left and leaves neighbor
    lists and relative elements alone. Whether frames move with the points is up to their choice: the elements of a
    finite group H stay, and moving the points by (t, h) in R^d ⋊ H permutes the fiber; principal axes move along
    exactly; sampled ones in distribution.

    TypeError or ValueError is raised if shapes, dtypes, devices, batch indices or the dimension do not fit, a point is
    not in the space (such as 0 under rotations), frames are not in the stabilizer, or the group does not preserve
    the distances on which the neighborhood is based.

    Parameters
    ----------
    points
        Point clouds in any of the forms that :func:`point_clouds` takes, which also reads rasters and periodic cells;
        points of the space, so for positions with directions 6 numbers each.
    frames
        What stands over each point: ``FiniteFrames``, ``PrincipalFrames``, ``SampledFrames``, ``GivenFrames`` or
        ``ScaleFrames``; a finite group is short for ``FiniteFrames(group)``. None where the stabilizer is trivial, and
        only there.
    neighborhood
        For example ``Radius(1.5)`` or ``AllPairs()``; of the positions, where points have directions too.
    space
        X with its group, for example ``Euclidean(SE(3))``, ``Orbits(SO(3))`` or ``Sphere()``. If absent, R^d under
        the motions that the frames belong to: R^d ⋊ H for a finite group, SE(d) otherwise (E(d) for improper frames),
        the translations for None.
    batch, ptr, mask
        See :func:`point_clouds`.
    length
        Length by which translations of relative elements are divided; the neighborhood's own if absent, or 1.
    coordinates
        ``"smooth"`` or ``"log"``, see :class:`RelativeElements`. Logarithms jump where an angle is π; they are here
        for weights that were trained with them.
    weights
        ``[points]`` nonnegative: masses, for frames that average over points; volumes, for fibers of scales.
    generator
        Where random frames are drawn from; their own seed if absent.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import AllPairs, PrincipalFrames, Radius, lift
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
        raise ValueError(f"cell: {space.name} has no translations, so its clouds cannot repeat")
    if length is None:
        length = 1.0 if neighborhood.length is None else neighborhood.length
    check_length("length", length)
    if isinstance(frames, ScaleFrames):
        if coordinates != "smooth":
            raise ValueError(f"coordinates: fibers of scales have smooth ones, got {coordinates!r}")
        return frames(clouds, neighborhood, space, float(length), weights)
    neighbors = find_neighbors(replace(clouds, pos=clouds.pos[:, : space.group.dim]), neighborhood)
    # Geometry keeps its precision under autocast.
    with torch.autocast(clouds.device.type, enabled=False):
        chosen = _chosen(frames, Sites(clouds, neighbors, space, weights, generator))
        group, pose, elements = _laid_out(chosen, clouds, space)
    return LiftedGraph.over(
        clouds,
        space=space,
        neighbors=neighbors,
        length=float(length),
        group=group,
        pose=pose,
        elements=elements,
        chart=coordinates,
    )


def natural_space(frames: Frames | ScaleFrames | None, dim: int | None = None) -> HomogeneousSpace:
    """R^d under the motions that frames belong to; d is that of their matrices, or 3, where ``dim`` is absent."""
    if dim is None:
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
        raise ValueError(f"space: give one, since SE(d) and E(d) are known for 2 and 3 dimensions, not for {dim}")
    return Euclidean(E(dim) if improper else SE(dim))


def _chosen(frames: Frames | None, sites: Sites) -> Tensor | GroupFrames | None:
    """Frames of the clouds; None where there are none to choose."""
    space = sites.space
    if frames is not None:
        return frames(sites)
    if space.stabilizer is not None:
        raise TypeError(f"frames: expected some, since points of {space.name} have frames in {space.stabilizer.name}")
    return GroupFrames(trivial(space.dim)) if isinstance(space.group, Translations) else None


def _laid_out(
    chosen: Tensor | GroupFrames | None, clouds: PointClouds, space: HomogeneousSpace
) -> tuple[FiniteGroup | None, Tensor | None, Tensor | None]:
    """Group, pose and elements of relative elements; elements only where points of a cloud have frames of their own."""
    if not isinstance(chosen, GroupFrames):
        return None, None, space.lift(clouds.pos, chosen)
    if isinstance(space, Euclidean):
        return chosen.group, chosen.pose, None
    matrices = chosen.group.matrices(clouds.pos)
    frames = matrices if chosen.pose is None else chosen.pose[:, None] @ matrices
    return chosen.group, None, space.lift(clouds.pos, frames)


def check_moves_along(neighborhood: Neighborhood, space: HomogeneousSpace, frames: object = None) -> None:
    """Raise ValueError for neighborhoods made of distances that the group of a space does not preserve."""
    check_neighborhood(neighborhood)
    if not isinstance(neighborhood, Radius | Nearest | PixelSquare):
        return
    group = space.group
    finite = isinstance(group, SemidirectProduct) and isinstance(group.stabilizer, FiniteGroup)
    if isinstance(neighborhood, PixelSquare):
        # A finite group may keep the square: which of its elements do is part of what a network promises.
        if not (finite or isinstance(group, Translations) or isinstance(frames, FiniteFrames)):
            raise ValueError(f"neighborhood: {neighborhood} does not turn with {group.name}; take a Radius")
        return
    if not keeps_lengths(group, ratios=isinstance(neighborhood, Nearest)):
        advice = "AllPairs, Nearest where all distances change alike, or give the matrices in an orthonormal basis"
        what = f"{group.name} does not preserve distances, so {neighborhood} would not move along"
        raise ValueError(f"neighborhood: {what}; take {advice}")
