"""Sums of groups of rows, in sufficient precision."""

from __future__ import annotations

import torch
from torch import Tensor


def sums(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sums of the rows of x ``[rows, *]`` with equal ``index`` ``[rows]`` int64, as ``[count, *]``.

    Integers and masks are summed in int64. Half precision is summed in float32, because torch may round to it after
    every row, so that a sum of ones in bfloat16 ends at 256.
    """
    kept = x.is_floating_point() or x.is_complex()
    wide = x.to(torch.promote_types(x.dtype, torch.float32) if kept else torch.int64)
    total = wide.new_zeros(count, *x.shape[1:]).index_add(0, index, wide)
    return total.to(x.dtype) if kept else total
