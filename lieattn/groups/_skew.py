"""Rotations as exponentials of skew matrices.

The scalar functions and their derivatives are accurate over the whole range. They are analytic in the squared angle
s = θ², so there is no loss of accuracy at θ = 0: a power series in s is used below a threshold, and the closed form
above it. Each branch gets a harmless argument where the other one is selected, because 0 times an infinite gradient
would be NaN.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_last
from lieattn._core.numerics import lengths

_SERIES_BELOW = 1.0
_SERIES_TERMS = 10
_PLANE_TERMS = 20
_ATAN_BELOW = 0.05
_ATAN_TERMS = 13
# Rounding moves half turns slightly away from π. Angles within this number of rounding steps count as half turns.
_HALF_TURN_STEPS = 64


def sine_ratio(s: Tensor) -> Tensor:
    """Return ``sin θ / θ`` for s = θ²."""
    small = s < _SERIES_BELOW
    coefficients = [(-1) ** k / math.factorial(2 * k + 1) for k in range(_SERIES_TERMS)]
    series = _horner(torch.where(small, s, 0.0), coefficients)
    angle = torch.where(small, 1.0, s).sqrt()
    return torch.where(small, series, torch.sin(angle) / angle)


def versine_ratio(s: Tensor) -> Tensor:
    """Return ``(1 - cos θ) / θ²`` for s = θ², computed from the half angle, which avoids cancellation."""
    return 0.5 * sine_ratio(0.25 * s) ** 2


def expm1_ratio(x: Tensor) -> Tensor:
    """Return ``(eˣ - 1) / x`` for x of either sign."""
    small = x.abs() < 0.5
    near, far = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = _horner(near, [1 / math.factorial(k + 1) for k in range(_PLANE_TERMS)])
    return torch.where(small, series, torch.expm1(far) / far)


def turn_ratio(sine_squared: Tensor, cosine: Tensor) -> Tensor:
    """Return ``θ / sin(θ/2)`` for a half angle θ/2 in [0, π/2], given by its squared sine and its cosine."""
    small = sine_squared < _ATAN_BELOW * cosine**2
    cosine_near = torch.where(small, cosine, 1.0)
    tangent_squared = torch.where(small, sine_squared, 0.0) / cosine_near**2
    series = _horner(tangent_squared, [(-1) ** k / (2 * k + 1) for k in range(_ATAN_TERMS)]) / cosine_near
    sine = torch.where(small, 1.0, sine_squared).sqrt()
    return 2 * torch.where(small, series, torch.atan2(sine, cosine) / sine)


def integral_coefficients(log_scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients (p, b, c) of ``∫₀¹ exp(x(σ + K)) dx = p + b K + c K²`` for K³ = -s K.

    With λ = σ + iθ and φ(λ) = (e^λ - 1)/λ, they are φ(σ), Im φ(λ)/θ and (φ(σ) - Re φ(λ))/θ².
    """
    small = log_scale**2 + s < _SERIES_BELOW
    near = _integral_series(torch.where(small, log_scale, 0.0), torch.where(small, s, 0.0))
    # The closed forms divide only by |λ|², which is not small here.
    far = _integral_closed(torch.where(small, 0.0, log_scale), torch.where(small, 4.0, s))
    b, c = (torch.where(small, *pair) for pair in zip(near, far, strict=True))
    return expm1_ratio(log_scale), b, c


def inverse_integral_coefficients(log_scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients of the inverse of the integral, which exists if φ(λ) ≠ 0: for θ < 2π at scale 1."""
    p, b, c = integral_coefficients(log_scale, s)
    real = p - c * s
    squared = real**2 + s * b**2
    return 1 / p, -b / squared, (b**2 - real * c) / (p * squared)


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _integral_series(log_scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    # λᵏ = p + iθ q and (σᵏ - p)/s = r obey recurrences without division.
    p, q, r = torch.ones_like(s), torch.zeros_like(s), torch.zeros_like(s)
    b, c = torch.zeros_like(s), torch.zeros_like(s)
    for k in range(1, _PLANE_TERMS):
        p, q, r = log_scale * p - s * q, p + log_scale * q, log_scale * r + q
        b = b + q / math.factorial(k + 1)
        c = c + r / math.factorial(k + 1)
    return b, c


def _integral_closed(log_scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale, sine, versine = torch.exp(log_scale), sine_ratio(s), versine_ratio(s)
    squared = log_scale**2 + s
    b = (scale * (log_scale * sine + s * versine) - torch.expm1(log_scale)) / squared
    c = (scale * (log_scale * versine - sine) + expm1_ratio(log_scale)) / squared
    return b, c


def skew(a: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch d d"]:
    """Return the skew matrix ``[*, 2, 2]`` of an angle ``[*, 1]``, or ``[*, 3, 3]`` of a rotation vector ``[*, 3]``."""
    if a.shape[-1:] == (1,):
        angle = a[..., 0]
        zero = torch.zeros_like(angle)
        return torch.stack([zero, -angle, angle, zero], dim=-1).unflatten(-1, (2, 2))
    x, y, z = a.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))


def rotation_by(a: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch d d"]:
    """Return the rotation by an angle ``[*, 1]``, or by a rotation vector ``[*, 3]`` (Rodrigues' formula)."""
    if a.shape[-1:] == (1,):
        cosine, sine = torch.cos(a[..., 0]), torch.sin(a[..., 0])
        return torch.stack([cosine, -sine, sine, cosine], dim=-1).unflatten(-1, (2, 2))
    s = _squared(a)[..., None, None]
    versine = versine_ratio(s)
    unit = torch.eye(3, dtype=a.dtype, device=a.device)
    return (1 - s * versine) * unit + sine_ratio(s) * skew(a) + versine * _outer(a)


def rotation_log(rotation: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch k"]:
    """Return the angle ``[*, 1]`` in (-π, π] or the rotation vector ``[*, 3]`` of length at most π, up to rounding."""
    if rotation.shape[-1] == 2:
        angle = _plane_angle(rotation)[..., None]
        return torch.where(angle < _half_turn(angle.dtype) - math.pi, angle + 2 * math.pi, angle)
    q = quaternion_from_rotation(rotation)
    return turn_ratio(_squared(q[..., 1:]), q[..., 0])[..., None] * q[..., 1:]


def turning_angle(rotation: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return the angle ``[*]`` in [0, π] of rotations."""
    if rotation.shape[-1] == 2:
        return _plane_angle(rotation).abs()
    q = quaternion_from_rotation(rotation)
    return 2 * torch.atan2(lengths(q[..., 1:]), q[..., 0].abs())


def scaled_rotation_integral(log_scale: Tensor, a: Tensor, *, inverse: bool = False) -> Tensor:
    """Return ``∫₀¹ exp(x(σ + K)) dx`` ``[*, d, d]`` for σ ``[*]`` and the skew matrix K of ``a``, or its inverse."""
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
    return torch.atan2(rotation[..., 1, 0] - rotation[..., 0, 1], rotation[..., 0, 0] + rotation[..., 1, 1])


def _half_turn(dtype: torch.dtype) -> float:
    """Return the largest distance from π at which an angle counts as a half turn."""
    return _HALF_TURN_STEPS * torch.finfo(dtype).eps


def _squared(a: Tensor) -> Tensor:
    return (a * a).sum(-1)


def _outer(a: Tensor) -> Tensor:
    return a[..., :, None] * a[..., None, :]


def rotation_from_quaternion(q: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 3 3"]:
    """Convert quaternions ``[*, 4]`` (w, x, y, z) of any length but 0 to rotations ``[*, 3, 3]``."""
    check_last("q", q, (4,), "quaternions (w, x, y, z)")
    # Scale by a power of two, which does not round, so that squares do not overflow or underflow. The power itself may
    # overflow, so there are two factors. The gradient of torch.ldexp by q is 0 if the exponent is negative.
    largest = q.detach().abs().amax(-1, keepdim=True)
    exponent = -torch.frexp(largest)[1]
    for part in (exponent // 2, exponent - exponent // 2):
        q = q * torch.ldexp(torch.ones_like(largest), part)
    w, x, y, z = (q / torch.linalg.vector_norm(q, dim=-1, keepdim=True)).unbind(-1)
    entries = [
        *(w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z),
    ]
    return torch.stack(entries, dim=-1).unflatten(-1, (3, 3))


def quaternion_from_rotation(rotation: Float[Tensor, "*batch 3 3"]) -> Float[Tensor, "*batch 4"]:
    """Convert rotations ``[*, 3, 3]`` to unit quaternions ``[*, 4]`` (w, x, y, z) with w >= 0.

    The entries of a rotation give the matrix 4 q qᵀ without cancellation. Its row with the largest diagonal entry gives
    q, up to rounding, at every angle. The sign is chosen so that w > 0. If the rotation is by π up to rounding, w
    vanishes, and the sign is chosen so that the largest component is positive (the first one if several are equal up to
    rounding); w may then be negative by a rounding error.
    """
    check_last("rotation", rotation, (3, 3), "rotations of space")
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
    near = _half_turn(q.dtype)
    size = q.detach()[..., 1:].abs()
    first = (size > size.amax(-1, keepdim=True) - near).long().argmax(-1, keepdim=True)
    turned = q[..., :1].abs() <= near
    return torch.where(torch.where(turned, q[..., 1:].gather(-1, first), q[..., :1]) < 0, -q, q)
