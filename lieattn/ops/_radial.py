"""Functions of the distance."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_count, check_tensor
from lieattn._core.lengths import lengths


def bessel_functions(
    x: Float[Tensor, "*batch"], count: int, *, squared: bool = False
) -> Float[Tensor, "*batch {count}"]:
    """Return spherical Bessel functions sin(n π x) / x, which vanish at 1, scaled to order one (DimeNet, Eq. 7).

    ``x`` ``[*]`` are distances as fractions of the cutoff or, if ``squared``, their squares. The result is
    ``[*, count]`` for n = 1..count. It is a smooth function of the square, so all derivatives by a vector exist, also
    where the vector is 0.
    """
    check_tensor("x", x, "a floating tensor")
    check_count("count", count)
    square = x if squared else x.square()
    wave = math.pi * torch.arange(1, count + 1, dtype=x.dtype, device=x.device)
    # Relative errors of derivatives are near eps / angle² for the quotient, and angle⁶ / 15120 for four terms of the
    # series. Where one of them is chosen, the other needs finite derivatives: an infinite one times 0 would be NaN.
    curve = wave.square()
    near = square[..., None] < (15120 * torch.finfo(x.dtype).eps) ** 0.25 / curve
    small = torch.where(near[..., 0], square, 0.0)[..., None]
    first = math.sqrt(2) / math.pi * wave
    second, third, fourth = first * curve / -6, first * curve**2 / 120, first * curve**3 / -5040
    series = torch.addcmul(first, small, torch.addcmul(second, small, torch.addcmul(third, small, fourth)))
    distance = torch.where(near[..., -1], 1.0, square).sqrt()[..., None]
    return torch.where(near, series, (wave * distance).sin() * (math.sqrt(2) / math.pi / distance))


def smooth_window(x: Float[Tensor, "*batch"], power: int = 4, *, squared: bool = False) -> Float[Tensor, "*batch"]:
    """Return a window ``[*]`` of ``x`` ``[*]``: 1 at 0 and 0 for x >= 1, with ``power`` - 1 continuous derivatives.

    It is (1 - x²)^power and serves as the window of DimeNet, Eq. 8. If ``squared``, the argument is x², of which it is
    a polynomial.
    """
    check_tensor("x", x, "a floating tensor")
    check_count("power", power)
    inside = (1 - (x if squared else x.square())).clamp(min=0)
    return inside**power


def smooth_lengths(vectors: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"]:
    """Return the lengths ``[*]`` of vectors ``[*, dim]``, whose derivatives are 0 for vectors that are 0."""
    check_tensor("vectors", vectors, "a floating tensor [*, dim]")
    return lengths(vectors)
