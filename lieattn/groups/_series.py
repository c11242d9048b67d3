"""Scalar functions behind exp and log, smooth and accurate over their whole range, also in their derivatives.

All of them are analytic in the squared angle s = θ², so nothing is lost at θ = 0: below a threshold a power series
in s is summed to rounding, above it the closed form is used. The branch that is not taken sees a harmless
argument, because a gradient of 0 times infinity would be NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SERIES_BELOW = 1.0
_SERIES_TERMS = 10
_PLANE_TERMS = 20
_ATAN_BELOW = 0.05
_ATAN_TERMS = 13


def sine_ratio(s: Tensor) -> Tensor:
    """``sin θ / θ``."""
    small = s < _SERIES_BELOW
    coefficients = [(-1) ** k / math.factorial(2 * k + 1) for k in range(_SERIES_TERMS)]
    series = _horner(torch.where(small, s, 0.0), coefficients)
    angle = torch.where(small, 1.0, s).sqrt()
    return torch.where(small, series, torch.sin(angle) / angle)


def versine_ratio(s: Tensor) -> Tensor:
    """``(1 - cos θ) / θ²``, by the half angle, which cancels nowhere."""
    return 0.5 * sine_ratio(0.25 * s) ** 2


def expm1_ratio(x: Tensor) -> Tensor:
    """``(eˣ - 1) / x`` for x of either sign."""
    small = x.abs() < 0.5
    near, far = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = _horner(near, [1 / math.factorial(k + 1) for k in range(_PLANE_TERMS)])
    return torch.where(small, series, torch.expm1(far) / far)


def turn_ratio(sine_squared: Tensor, cosine: Tensor) -> Tensor:
    """``θ / sin(θ/2)`` for a half angle in [0, π/2] given by the square of its sine and by its cosine."""
    small = sine_squared < _ATAN_BELOW * cosine**2
    cosine_near = torch.where(small, cosine, 1.0)
    tangent_squared = torch.where(small, sine_squared, 0.0) / cosine_near**2
    series = _horner(tangent_squared, [(-1) ** k / (2 * k + 1) for k in range(_ATAN_TERMS)]) / cosine_near
    sine = torch.where(small, 1.0, sine_squared).sqrt()
    return 2 * torch.where(small, series, torch.atan2(sine, cosine) / sine)


def integral_coefficients(log_scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients (p, b, c) of ``∫₀¹ exp(x(σ + K)) dx = p + b K + c K²`` for K³ = -s K.

    With λ = σ + iθ and φ(λ) = (e^λ - 1)/λ these are φ(σ), Im φ(λ)/θ and (φ(σ) - Re φ(λ))/θ².
    """
    small = log_scale**2 + s < _SERIES_BELOW
    near = _integral_series(torch.where(small, log_scale, 0.0), torch.where(small, s, 0.0))
    # Away from λ = 0 the closed forms divide by |λ|² alone.
    far = _integral_closed(torch.where(small, 0.0, log_scale), torch.where(small, 4.0, s))
    b, c = (torch.where(small, *pair) for pair in zip(near, far, strict=True))
    return expm1_ratio(log_scale), b, c


def inverse_integral_coefficients(log_scale: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the inverse of the integral, which exists while φ(λ) is not 0: up to θ < 2π at scale 1."""
    p, b, c = integral_coefficients(log_scale, s)
    real = p - c * s
    squared = real**2 + s * b**2
    return 1 / p, -b / squared, (b**2 - real * c) / (p * squared)


def norm(x: Tensor) -> Tensor:
    """Length of vectors ``[*, k]``; its gradient at 0 is 0."""
    squared = (x * x).sum(-1)
    zero = squared == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squared).sqrt())


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
