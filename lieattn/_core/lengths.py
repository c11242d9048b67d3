"""Lengths of vectors that can be differentiated everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(vectors: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return the lengths ``[*]`` of vectors ``[*, dim]``, whose derivatives are 0 at 0. The function can be traced."""
    square = vectors.square().sum(dim=-1, keepdim=keepdim)
    zero = square == 0
    # Both branches need finite derivatives, because an infinite one times the zero of the other branch would be NaN.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())
