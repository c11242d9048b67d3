"""Functions of the distance: Bessel functions, and a window that vanishes at the cutoff."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lieattn._checks import check_count, check_tensor
from lieattn._lengths import lengths


def bessel_functions(x: Tensor, count: int) -> Tensor:
    """Return spherical Bessel functions sin(n π x) / x, which vanish at 1, scaled to order one (DimeNet, Eq. 7).

    ``x`` ``[*]`` are distances as fractions of the cutoff. The result is ``[*, count]`` for n = 1..count, and smooth at
    0. TypeError or ValueError is raised if ``x`` is not a floating tensor, or ``count`` is not positive.
    """
    check_tensor("x", x, "a floating tensor")
    check_count("count", count)
    order = torch.arange(1, count + 1, dtype=x.dtype, device=x.device)
    angle = math.pi * order * x[..., None]
    apart = angle != 0
    # torch.sinc has no second derivative at 0.
    angle = torch.where(apart, angle, 1.0)
    return math.sqrt(2) * order * torch.where(apart, angle.sin() / angle, 1.0)


def smooth_window(x: Tensor, power: int = 4) -> Tensor:
    """Return a window ``[*]`` of ``x`` ``[*]``: 1 at 0 and 0 for x >= 1, with ``power`` - 1 continuous derivatives.

    It is (1 - x²)^power, by default with power 4, and has the purpose of the window in DimeNet, Eq. 8.
    TypeError or ValueError is raised if ``x`` is not a floating tensor, or ``power`` is not positive.
    """
    check_tensor("x", x, "a floating tensor")
    check_count("power", power)
    inside = (1 - x.square()).clamp(min=0)
    return inside**power


def smooth_lengths(vectors: Tensor) -> Tensor:
    """Return the lengths ``[*]`` of vectors ``[*, dim]``, whose derivatives are 0 for vectors that are 0."""
    check_tensor("vectors", vectors, "a floating tensor [*, dim]")
    return lengths(vectors)
