"""Reductions over groups of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def counts(index: Tensor, count: int) -> Tensor:
    """Return the number of rows with each index, ``[count]`` int64, from ``index`` ``[rows]`` int64.

    Unlike ``torch.bincount``, a GPU does this without waiting for the CPU.
    """
    return index.new_zeros(count).index_add(0, index, torch.ones_like(index))


def sums(x: Tensor, index: Tensor, count: int, at_least: torch.dtype = torch.float32) -> Tensor:
    """Return the sums of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    Integers and masks are summed in int64. Other numbers are summed ``at_least`` in this dtype, because torch may round
    after every row, so that a sum of ones in bfloat16 ends at 256.
    """
    kept = x.is_floating_point() or x.is_complex()
    wide = x.to(torch.promote_types(x.dtype, at_least) if kept else torch.int64)
    total = wide.new_zeros(count, *x.shape[1:]).index_add(0, index, wide)
    return total.to(x.dtype) if kept else total


def means(x: Tensor, index: Tensor, rows: Tensor, at_least: torch.dtype = torch.float32) -> Tensor:
    """Return the means of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    ``rows`` ``[count]`` are the :func:`counts`. An index without rows gives zero.
    """
    kept = x.is_floating_point() or x.is_complex()
    total = sums(x.to(torch.promote_types(x.dtype, at_least)) if kept else x, index, len(rows))  # halves may overflow
    mean = total / rows.clamp(min=1).to(total.dtype).view(-1, *[1] * (x.ndim - 1))
    return mean.to(x.dtype) if kept else mean


def maxima(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the maxima of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    An index without rows gives zero. Equal maxima share the gradient.
    """
    trailing = [1] * (x.ndim - 1)
    places = index.view(-1, *trailing).expand_as(x)
    # An initial value that equals the maximum would get a share of the gradient, although it is excluded.
    start = x.new_full((count, *x.shape[1:]), math.nan if x.is_floating_point() else 0)
    found = start.scatter_reduce(0, places, x, "amax", include_self=False)
    return torch.where((counts(index, count) > 0).view(-1, *trailing), found, 0)
