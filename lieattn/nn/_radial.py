"""Functions of the distance: Bessel functions, and a window that vanishes at the cutoff."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def bessel_functions(x: Tensor, count: int) -> Tensor:
    """The spherical Bessel functions sin(n π x) / x that vanish at 1, scaled to order one (DimeNet, Eq. 7).

    Parameters
    ----------
    x
        ``[*]``, distances as shares of the cutoff.
    count
        How many functions.

    Returns
    -------
    Tensor
        ``[*, count]``, smooth at 0 too.
    """
    order = torch.arange(1, count + 1, dtype=x.dtype, device=x.device)
    angle = math.pi * order * x[..., None]
    apart = angle != 0
    # torch.sinc has no second derivative at 0.
    angle = torch.where(apart, angle, 1.0)
    return math.sqrt(2) * order * torch.where(apart, angle.sin() / angle, 1.0)


def smooth_window(x: Tensor) -> Tensor:
    """1 at 0, and 0 from 1 on, with three continuous derivatives (DimeNet, Eq. 8, exponent 4 less its pole)."""
    inside = (1 - x.square()).clamp(min=0)
    return inside**4


def smooth_lengths(vectors: Tensor) -> Tensor:
    """Lengths ``[*]`` of vectors ``[*, dim]``, with derivatives 0 where a vector is 0."""
    square = vectors.square().sum(dim=-1)
    apart = square > 0
    # Both branches have finite derivatives.
    return torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0.0)


def keep_variance(linear: nn.Linear, factor: float = 1.0) -> None:
    """Draw weights anew so that signals keep their size through the swish, times a factor.

    In networks of distances: with torch's own weights their outputs begin small, beside those of the points.
    """
    nn.init.normal_(linear.weight, std=factor * math.sqrt(2 / linear.in_features))
