"""Directions in R^3 and rotations that take the first axis to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_UNIT_WITHIN = 1e-5


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Directions ``[*, d]`` and lengths ``[*]`` of vectors other than 0, without overflow or underflow."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    scaled = x / largest
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / length, (length * largest)[..., 0]


def at_origin(x: Tensor) -> Tensor:
    """Where vectors ``[*, d]`` are 0, or too short for their direction to be known."""
    return x.abs().amax(-1) < torch.finfo(x.dtype).tiny


def not_unit(n: Tensor) -> Tensor:
    """Where vectors ``[*, d]`` are not of unit length."""
    return (torch.linalg.vector_norm(n, dim=-1) - 1).abs() > _UNIT_WITHIN


def minimal_rotation(n: Tensor) -> Tensor:
    """Rotations ``[*, 3, 3]`` by the least angle that takes (1, 0, 0) to unit vectors n ``[*, 3]``.

    At n = (-1, 0, 0), where all half turns about axes across are as short, the one about (0, 0, 1) is taken. No
    choice of rotations is continuous on the whole sphere: this one jumps there and nowhere else.
    """
    a, across = n[..., 0], n[..., 1:]
    behind = (a < 0)[..., None]
    # So close to the antipode the direction across makes no difference, but its derivative would overflow.
    antipodal = (across.abs().amax(-1, keepdim=True) < torch.finfo(n.dtype).eps ** 2) & behind
    # (1 - a) u uᵀ = v vᵀ / (1 + a) for v = across and u its direction: each form where it does not cancel, the
    # other one with an argument that has a finite gradient.
    before = across / torch.where(behind, 1.0, 1 + a[..., None]).sqrt()
    direction = polar(torch.where(behind & ~antipodal, across, 1.0))[0]
    opposite = direction * torch.where(behind, 1 - a[..., None], 1.0).sqrt()
    half_turn = torch.tensor([math.sqrt(2.0), 0.0], dtype=n.dtype, device=n.device)
    root = torch.where(antipodal, half_turn, torch.where(behind, opposite, before))
    block = torch.eye(2, dtype=n.dtype, device=n.device) - root[..., :, None] * root[..., None, :]
    top = torch.cat([a[..., None], -across], dim=-1)
    bottom = torch.cat([across[..., :, None], block], dim=-1)
    return torch.cat([top[..., None, :], bottom], dim=-2)


def about_first_axis(h: Tensor) -> Tensor:
    """Rotations ``[*, 3, 3]`` about the first axis from rotations ``[*, 2, 2]`` of the plane across it."""
    padded = torch.nn.functional.pad(h, (1, 0, 1, 0))
    corner = torch.zeros_like(padded)
    corner[..., 0, 0] = 1
    return padded + corner
