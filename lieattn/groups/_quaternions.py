"""Unit quaternions (w, x, y, z) and the rotations of R^3 they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.groups._series import turn_ratio


def rotation_from_quaternion(q: Tensor) -> Tensor:
    """Rotations ``[*, 3, 3]`` from quaternions ``[*, 4]`` (w, x, y, z) of any length but 0.

    Raises
    ------
    ValueError
        If the last axis is not of length 4.
    """
    if q.shape[-1:] != (4,):
        raise ValueError(f"q: expected quaternions [*, 4] (w, x, y, z), got {tuple(q.shape)}")
    w, x, y, z = (q / torch.linalg.vector_norm(q, dim=-1, keepdim=True)).unbind(-1)
    entries = [
        *(w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z),
    ]
    return torch.stack(entries, dim=-1).unflatten(-1, (3, 3))


def quaternion_from_rotation(rotation: Tensor) -> Tensor:
    """Unit quaternions ``[*, 4]`` (w, x, y, z) with w >= 0 from rotations ``[*, 3, 3]``.

    The entries of a rotation give the matrix 4 q qᵀ without cancellation; its row through the largest component
    of q gives q to rounding at every angle. Of the two signs the one with w > 0 is taken; a rotation by exactly π,
    where w = 0, gets the sign with its largest component positive (the first of them, if several are equal).

    Raises
    ------
    ValueError
        If the last two axes are not 3 by 3.
    """
    if rotation.shape[-2:] != (3, 3):
        raise ValueError(f"rotation: expected [*, 3, 3], got {tuple(rotation.shape)}")
    r = rotation
    xx, yy, zz = r[..., 0, 0], r[..., 1, 1], r[..., 2, 2]
    wx, wy, wz = r[..., 2, 1] - r[..., 1, 2], r[..., 0, 2] - r[..., 2, 0], r[..., 1, 0] - r[..., 0, 1]
    xy, xz, yz = r[..., 0, 1] + r[..., 1, 0], r[..., 0, 2] + r[..., 2, 0], r[..., 1, 2] + r[..., 2, 1]
    entries = [
        *(1 + xx + yy + zz, wx, wy, wz),
        *(wx, 1 + xx - yy - zz, xy, xz),
        *(wy, xy, 1 - xx + yy - zz, yz),
        *(wz, xz, yz, 1 - xx - yy + zz),
    ]
    outer = torch.stack(entries, dim=-1).unflatten(-1, (4, 4))
    largest = torch.diagonal(outer, dim1=-2, dim2=-1).argmax(-1)
    row = torch.take_along_dim(outer, largest[..., None, None], dim=-2)[..., 0, :]
    q = row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return torch.where(q[..., :1] < 0, -q, q)


def rotation_vector(rotation: Tensor) -> Tensor:
    """Logarithm ``[*, 3]`` of rotations ``[*, 3, 3]``: axis times angle in [0, π]."""
    q = quaternion_from_rotation(rotation)
    axis = q[..., 1:]
    return turn_ratio((axis * axis).sum(-1), q[..., 0])[..., None] * axis
