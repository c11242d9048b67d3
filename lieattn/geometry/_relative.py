"""Coordinates of relative elements g_ia⁻¹ g_jb, and of no other combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.groups import Group, SemidirectProduct, Translations
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
        ``[edges, fiber, fiber, k + 2 q]``, in memory as :func:`join_coordinates` has it.
    """
    if coordinates not in get_args(Coordinates):
        raise ValueError(f"coordinates: expected one of {get_args(Coordinates)}, got {coordinates!r}")
    device = elements.device.type
    # Geometry keeps its precision under autocast.
    with torch.autocast(device, enabled=False):
        group = space.group
        find = _from_places if isinstance(space, Euclidean | PositionDirection) else _from_products
        seen, turned = find(group, elements, neighbors)
        if seen is not None:
            seen = (seen / scale).expand(*turned.shape[:3], -1)
        parts = _coordinates(group, seen, turned, coordinates)
    fiber = elements.shape[1]
    for end in (neighbors.target, neighbors.source):
        parts.append(invariants.index_select(0, end)[:, None, None].expand(-1, fiber, fiber, -1))
    return join_coordinates(parts)


def join_coordinates(parts: Sequence[Tensor]) -> Tensor:
    """Join coordinates of pairs along the last axis, which lies outermost in memory.

    Networks of the coordinates run over vectors of pairs, and most parts are the same for many pairs in a row.

    Parameters
    ----------
    parts
        ``[edges, fiber, fiber, k]`` each, alike but for k.

    Returns
    -------
    Tensor
        ``[edges, fiber, fiber, sum of k]``, in the dtype of the parts; not contiguous.
    """
    return torch.cat([part.movedim(-1, 0) for part in parts]).movedim(0, -1)


def _from_places(group: Group, elements: Tensor, neighbors: Neighbors) -> tuple[Tensor | None, Tensor]:
    """Parts A⁻¹ (s - t) and A⁻¹ B of g⁻¹ g' for g = (A, t), g' = (B, s), where t is the place of the point."""
    fiber, dim = elements.shape[1], group.dim
    displacement = neighbors.displacements(group.translation(elements)[:, 0])
    if isinstance(group, Translations):
        unit = torch.eye(dim, dtype=elements.dtype, device=elements.device)
        return displacement[:, None, None], unit.expand(len(displacement), 1, 1, dim, dim)
    inverse = _inverse(group, elements).contiguous().index_select(0, neighbors.target)
    seen = (inverse @ displacement[:, None, :, None])[..., 0]
    # For each edge and entry i, j of the result a product [fiber, dim] @ [dim, fiber], as `join_coordinates` wants it.
    rows = inverse.transpose(1, 2)[:, :, None].expand(-1, -1, dim, -1, -1)
    across = group.linear(elements).permute(0, 3, 2, 1).contiguous().index_select(0, neighbors.source)
    turned = rows.flatten(0, 2) @ across[:, None].expand(-1, dim, -1, -1, -1).flatten(0, 2)
    turned = turned.view(len(displacement), dim, dim, fiber, fiber).permute(0, 3, 4, 1, 2)
    return seen[:, :, None], turned


def _from_products(group: Group, elements: Tensor, neighbors: Neighbors) -> tuple[Tensor | None, Tensor]:
    """Parts of g⁻¹ g', whatever the group; no translation where it has none."""
    at_target, at_source = (elements.index_select(0, end) for end in (neighbors.target, neighbors.source))
    relative = group.relative(at_target[:, :, None], at_source[:, None])
    return (group.translation(relative) if group.is_affine else None), group.linear(relative)


def _coordinates(group: Group, seen: Tensor | None, turned: Tensor, coordinates: Coordinates) -> list[Tensor]:
    if isinstance(group, Translations) and seen is not None:
        return [seen]
    if coordinates == "log":
        return [group.log(turned if seen is None else _assembled(turned, seen))]
    if isinstance(group, SemidirectProduct):
        linear = group.stabilizer.coordinates(turned)
    else:
        linear = turned.flatten(-2) if group.is_affine else group.coordinates(turned)
    return [linear] if seen is None else [seen, linear]


def _inverse(group: Group, elements: Tensor) -> Tensor:
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
