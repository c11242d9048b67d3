"""Lengths of vectors that can be differentiated everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(vectors: Tensor, *, keepdim: bool = False) -> Tensor:
    """Lengths ``[*]`` of vectors ``[*, dim]``, with derivatives 0 where a vector is 0. It can be traced."""
    square = vectors.square().sum(dim=-1, keepdim=keepdim)
    zero = square == 0
    # Both branches have finite derivatives: an infinite one, times the zero of the branch not taken, would be NaN.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())
