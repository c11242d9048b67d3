"""Maxima of groups of rows, with correct gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def maxima(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the maxima of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    An index without rows gives zero. Equal maxima share the gradient.
    """
    trailing = [1] * (x.ndim - 1)
    places = index.view(-1, *trailing).expand_as(x)
    # An initial value that equals the maximum would get a share of the gradient, although it is excluded.
    start = x.new_full((count, *x.shape[1:]), math.nan if x.is_floating_point() else 0)
    found = start.scatter_reduce(0, places, x, "amax", include_self=False)
    rows = index.new_zeros(count).index_add(0, index, torch.ones_like(index))
    return torch.where((rows > 0).view(-1, *trailing), found, 0)
