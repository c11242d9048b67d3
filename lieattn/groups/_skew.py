"""Rotations as exponentials of skew matrices, written once for the plane and for space, and unit quaternions."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.groups._series import (
    integral_coefficients,
    inverse_integral_coefficients,
    norm,
    sine_ratio,
    turn_ratio,
    versine_ratio,
)


def skew(a: Tensor) -> Tensor:
    """Skew matrix ``[*, 2, 2]`` of an angle ``[*, 1]``, or ``[*, 3, 3]`` of a rotation vector ``[*, 3]``."""
    if a.shape[-1:] == (1,):
        angle = a[..., 0]
        zero = torch.zeros_like(angle)
        return torch.stack([zero, -angle, angle, zero], dim=-1).unflatten(-1, (2, 2))
    x, y, z = a.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))


def rotation_by(a: Tensor) -> Tensor:
    """Rotation by an angle ``[*, 1]`` or about a vector ``[*, 3]`` (Rodrigues)."""
    if a.shape[-1:] == (1,):
        cosine, sine = torch.cos(a[..., 0]), torch.sin(a[..., 0])
        return torch.stack([cosine, -sine, sine, cosine], dim=-1).unflatten(-1, (2, 2))
    s = _squared(a)[..., None, None]
    versine = versine_ratio(s)
    unit = torch.eye(3, dtype=a.dtype, device=a.device)
    return (1 - s * versine) * unit + sine_ratio(s) * skew(a) + versine * _outer(a)


def rotation_log(rotation: Tensor) -> Tensor:
    """Angle ``[*, 1]`` in (-π, π] or rotation vector ``[*, 3]`` of length at most π."""
    if rotation.shape[-1] == 2:
        return _plane_angle(rotation)[..., None]
    q = quaternion_from_rotation(rotation)
    return turn_ratio(_squared(q[..., 1:]), q[..., 0])[..., None] * q[..., 1:]


def turning_angle(rotation: Tensor) -> Tensor:
    """Angle ``[*]`` in [0, π] of rotations."""
    if rotation.shape[-1] == 2:
        return _plane_angle(rotation).abs()
    q = quaternion_from_rotation(rotation)
    return 2 * torch.atan2(norm(q[..., 1:]), q[..., 0])


def scaled_rotation_integral(log_scale: Tensor, a: Tensor, *, inverse: bool = False) -> Tensor:
    """``∫₀¹ exp(x(σ + K)) dx`` ``[*, d, d]`` for σ ``[*]`` and the skew matrix K of ``a``, or its inverse."""
    coefficients = inverse_integral_coefficients if inverse else integral_coefficients
    s = _squared(a)
    p, b, c = (value[..., None, None] for value in coefficients(log_scale, s))
    matrix = skew(a)
    unit = torch.eye(matrix.shape[-1], dtype=a.dtype, device=a.device)
    squared = -s[..., None, None] * unit
    if a.shape[-1] == 3:
        squared = squared + _outer(a)
    return p * unit + b * matrix + c * squared


def _plane_angle(rotation: Tensor) -> Tensor:
    # A sum of two entries doubles what rounding leaves of each; + 0.0 turns -0 into 0, so that a half turn is +π.
    sine = rotation[..., 1, 0] - rotation[..., 0, 1] + 0.0
    return torch.atan2(sine, rotation[..., 0, 0] + rotation[..., 1, 1])


def _squared(a: Tensor) -> Tensor:
    return (a * a).sum(-1)


def _outer(a: Tensor) -> Tensor:
    return a[..., :, None] * a[..., None, :]


def rotation_from_quaternion(q: Tensor) -> Tensor:
    """Rotations ``[*, 3, 3]`` from quaternions ``[*, 4]`` (w, x, y, z) of any length but 0."""
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
