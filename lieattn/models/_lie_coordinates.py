"""Coordinates of relative elements: smooth ones, logarithms, and the conventions of the authors of LieTransformer."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.groups import SO, Group, RotationDilations, SemidirectProduct, quaternion_from_rotation
from lieattn.spaces import HomogeneousSpace

Coordinates = Literal["smooth", "log", "published", "quaternion", "grid"]

_ALPHA = 0.2
_HALF_TURN = 1e-7  # how far from -π an angle counts as a half turn


def check_coordinates(space: HomogeneousSpace, coordinates: Coordinates) -> None:
    """Raise ValueError for coordinates that do not exist, or not for this space."""
    if coordinates not in get_args(Coordinates):
        raise ValueError(f"coordinates: expected one of {get_args(Coordinates)}, got {coordinates!r}")
    group = space.group
    if coordinates == "quaternion" and not (_has_rotations(group) and group.dim == 3):
        raise ValueError(f"coordinates: 'quaternion' is for SO(3) and SE(3), not for {group.name}")
    if coordinates == "grid" and not (group.is_affine and _has_rotations(group) and group.dim == 2):
        raise ValueError(f"coordinates: 'grid' is for SE(2) with a cyclic fiber, not for {group.name}")


def num_coordinates(space: HomogeneousSpace, coordinates: Coordinates) -> int:
    """How many numbers describe a relative element, invariants of both points included."""
    check_coordinates(space, coordinates)
    group = space.group
    invariants = 2 * space.num_invariants
    if coordinates == "smooth":
        return group.num_coordinates + invariants
    if coordinates == "quaternion":
        return (7 if group.is_affine else 4) + invariants
    return (3 if coordinates == "grid" else group.algebra_dim) + invariants


def published_pairs(
    space: HomogeneousSpace,
    elements: Tensor,
    invariants: Tensor,
    neighbors: Neighbors,
    coordinates: Coordinates = "published",
) -> Tensor:
    """Coordinates of relative elements in the conventions of the authors of LieTransformer and LieConv.

    Invariant under g -> u g for all elements, and then followed by the invariants of both points.

    Parameters
    ----------
    space
        X = G/H.
    elements
        ``[points, fiber, m, m]`` of G.
    invariants
        ``[points, q]``, of the orbits.
    neighbors
        Edges from j to i.
    coordinates
        ``"published"``: the logarithm of g_j⁻¹ g_i, angles of the plane in (-π, π]. ``"quaternion"``, for SO(3) and
        SE(3): the quaternion of g_j⁻¹ g_i with w >= 0, and its translation. ``"grid"``, for SE(2) with the same cyclic
        fiber over all points: the translation of g_i⁻¹ g_j and its number of steps, 0 to fiber - 1.

    Returns
    -------
    Tensor
        ``[edges, fiber, fiber, k]``.

    Raises
    ------
    ValueError
        For coordinates that the space does not have, and for clouds that repeat.
    """
    check_coordinates(space, coordinates)
    if coordinates in ("smooth", "log"):
        raise ValueError(f"coordinates: expected a convention of the authors, got {coordinates!r}")
    if neighbors.shift is not None:
        raise ValueError(f"neighbors: clouds that repeat have coordinates 'smooth' and 'log', not {coordinates!r}")
    group = space.group
    elements = elements.contiguous()
    at_target = elements.index_select(0, neighbors.target)[:, :, None]
    at_source = elements.index_select(0, neighbors.source)[:, None]
    if coordinates == "grid":
        relative = group.relative(at_target, at_source)
        parts = [group.translation(relative), grid_steps(group.linear(relative), elements.shape[1])[..., None]]
    else:
        relative = group.relative(at_source, at_target)
        if coordinates == "quaternion":
            parts = [quaternion_from_rotation(group.linear(relative))]
            parts += [group.translation(relative)] if group.is_affine else []
        else:
            parts = [_published_log(group, relative)]
    for index in (neighbors.target, neighbors.source):
        parts.append(invariants.index_select(0, index)[:, None, None].expand(*parts[0].shape[:3], -1))
    return torch.cat(parts, dim=-1)


def _published_log(group: Group, g: Tensor) -> Tensor:
    """Logarithm ``[*, algebra_dim]`` in which a half turn of the plane is +π, however it was rounded."""
    linear = group.stabilizer if isinstance(group, SemidirectProduct) else group
    if group.dim != 2 or not isinstance(linear, SO | RotationDilations):
        return group.log(g)
    log = linear.log(group.linear(g))
    angle = log[..., -1:]
    log = torch.cat([log[..., :-1], torch.where(angle < _HALF_TURN - math.pi, angle + 2 * math.pi, angle)], dim=-1)
    if not group.is_affine:
        return log
    shift = linear.inverse_exp_integral(log) @ group.translation(g)[..., None]
    return torch.cat([log, shift[..., 0]], dim=-1)


def grid_steps(rotation: Tensor, count: int) -> Tensor:
    """Steps of 2π / count that rotations ``[*, 2, 2]`` turn by, in 0 ... count - 1, in their dtype."""
    angle = torch.atan2(rotation[..., 1, 0], rotation[..., 0, 0]).detach()
    return (angle * (count / (2 * math.pi))).round() % count


def published_distance(space: HomogeneousSpace, pairs: Tensor, alpha: float = _ALPHA) -> Tensor:
    """Distance ``[*]`` by which the authors choose neighbors, from coordinates ``"published"`` or ``"log"``.

    alpha times the rotation plus 1 - alpha times the translation of the logarithm or the difference of the orbits.
    Their group of translations alone has no such mixture: its distance is alpha times the length.
    """
    group = space.group
    log = pairs[..., : group.algebra_dim]
    invariants = pairs[..., group.algebra_dim :]
    if isinstance(group, SemidirectProduct):
        turn, shift = log[..., : -group.dim], log[..., -group.dim :].norm(dim=-1)
        return alpha * turn.norm(dim=-1) + (1 - alpha) * shift
    if isinstance(group, RotationDilations):
        return alpha * log[..., 1:].norm(dim=-1) + (1 - alpha) * log[..., 0].abs()
    if isinstance(group, SO):
        mine, theirs = invariants.chunk(2, dim=-1)
        apart = (mine - theirs).norm(dim=-1)
        if group.dim == 2:
            apart = apart / ((mine + theirs).sum(dim=-1) + 1e-3)
        return alpha * log.norm(dim=-1) + (1 - alpha) * apart
    return alpha * log.norm(dim=-1)


def _has_rotations(group: Group) -> bool:
    linear = group.stabilizer if isinstance(group, SemidirectProduct) else group
    return isinstance(linear, SO)
