"""Coordinates of relative elements g_ia⁻¹ g_jb, and of no other combination."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.groups import LieGroup, SemidirectProduct, Translations
from lieattn.spaces import Euclidean, HomogeneousSpace, PositionDirection

Coordinates = Literal["smooth", "log"]


def relative_coordinates(
    space: HomogeneousSpace,
    elements: Tensor,
    invariants: Tensor,
    neighbors: Neighbors,
    scale: float,
    coordinates: Coordinates,
) -> Tensor:
    """Coordinates of g_ia⁻¹ g_jb for each edge from j to i, then the invariants of i and of j.

    Parameters
    ----------
    space
        X with its group.
    elements
        ``[points, fiber, m, m]``.
    invariants
        ``[points, q]``.
    neighbors
        The edges. Their shifts, if any, move g_jb to the image that is meant.
    scale
        What translations are divided by.
    coordinates
        ``"smooth"``: translation, then coordinates of the linear part; ``"log"``: those of the Lie algebra.

    Returns
    -------
    Tensor
        ``[edges, fiber, fiber, k + 2 q]``.
    """
    if coordinates not in get_args(Coordinates):
        raise ValueError(f"coordinates: expected one of {get_args(Coordinates)}, got {coordinates!r}")
    device = elements.device.type
    # Geometry keeps its precision under autocast.
    with torch.autocast(device, enabled=False):
        group = space.group
        find = _from_places if isinstance(space, Euclidean | PositionDirection) else _from_products
        seen, turned = find(group, elements, neighbors)
        parts = _coordinates(group, None if seen is None else seen / scale, turned, coordinates)
    fiber = elements.shape[1]
    for end in (neighbors.target, neighbors.source):
        parts.append(invariants.index_select(0, end)[:, None, None].expand(-1, fiber, fiber, -1))
    return torch.cat(parts, dim=-1)


def _from_places(group: LieGroup, elements: Tensor, neighbors: Neighbors) -> tuple[Tensor | None, Tensor]:
    """Parts A⁻¹ (s - t) and A⁻¹ B of g⁻¹ g' for g = (A, t), g' = (B, s), where t is the place of the point."""
    fiber, dim = elements.shape[1], group.dim
    displacement = neighbors.displacements(group.translation(elements)[:, 0])
    if isinstance(group, Translations):
        unit = torch.eye(dim, dtype=elements.dtype, device=elements.device)
        return displacement[:, None, None], unit.expand(len(displacement), 1, 1, dim, dim)
    inverse = _inverse(group, elements).contiguous().index_select(0, neighbors.target)
    seen = (inverse @ displacement[:, None, :, None])[..., 0]
    # One product of [fiber * dim, dim] and [dim, fiber * dim] an edge.
    across = group.linear(elements).transpose(1, 2).flatten(2).contiguous().index_select(0, neighbors.source)
    turned = (inverse.flatten(1, 2) @ across).unflatten(-1, (fiber, dim)).unflatten(1, (fiber, dim)).transpose(2, 3)
    return seen[:, :, None].expand(-1, -1, fiber, -1), turned


def _from_products(group: LieGroup, elements: Tensor, neighbors: Neighbors) -> tuple[Tensor | None, Tensor]:
    """Parts of g⁻¹ g', whatever the group; no translation where it has none."""
    at_target, at_source = (elements.index_select(0, end) for end in (neighbors.target, neighbors.source))
    relative = group.relative(at_target[:, :, None], at_source[:, None])
    return (group.translation(relative) if group.is_affine else None), group.linear(relative)


def _coordinates(group: LieGroup, seen: Tensor | None, turned: Tensor, coordinates: Coordinates) -> list[Tensor]:
    if isinstance(group, Translations) and seen is not None:
        return [seen]
    if coordinates == "log":
        return [group.log(turned if seen is None else _assembled(turned, seen))]
    if isinstance(group, SemidirectProduct):
        linear = group.stabilizer.coordinates(turned)
    else:
        linear = turned.flatten(-2) if group.is_affine else group.coordinates(turned)
    return [linear] if seen is None else [seen, linear]


def _inverse(group: LieGroup, elements: Tensor) -> Tensor:
    """Inverses of the linear parts, ``[points, fiber, dim, dim]``."""
    if isinstance(group, SemidirectProduct):
        return group.stabilizer.inverse(group.linear(elements))
    return group.linear(group.inverse(elements))


def _assembled(linear: Tensor, translation: Tensor) -> Tensor:
    """Matrices [[A, t], [0, 1]]."""
    top = torch.cat([linear, translation[..., None]], dim=-1)
    bottom = torch.zeros_like(top[..., :1, :])
    bottom[..., -1] = 1
    return torch.cat([top, bottom], dim=-2)
