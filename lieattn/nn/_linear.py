"""Linear maps that commute with the group."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_features
from lieattn.groups import FiniteGroup, check_group
from lieattn.ops import expand_kernel


class GroupLinear(nn.Module):
    r"""Linear map tied over the fiber: it mixes frames and channels at every point.

    .. math::  f'(x, g) = \sum_h W(g^{-1} h) f(x, h) + b

    evaluated as one dense matrix product.

    **Equivariance.** It commutes with the left regular representation of H.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels per frame.
    bias
        Whether to add b, the same for every frame.
    """

    relative: Tensor

    def __init__(self, group: FiniteGroup, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__()
        check_group("group", group)
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        self.group = group
        bound = 1 / math.sqrt(group.order * in_channels)
        self.weight = nn.Parameter(torch.empty(group.order, out_channels, in_channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_channels).uniform_(-bound, bound)) if bias else None
        self.register_buffer("relative", group.relative.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[*, fiber, in_channels]`` to ``[*, fiber, out_channels]``."""
        check_features(x, self.weight)
        order, out_channels, in_channels = self.weight.shape
        if x.ndim < 2 or x.shape[-2:] != (order, in_channels):
            raise ValueError(
                f"x: expected a field on {self.group.name} [*, {order}, {in_channels}], got {tuple(x.shape)}"
            )
        matrix = expand_kernel(self.weight, self.relative).reshape(order * out_channels, order * in_channels)
        y = F.linear(x.flatten(-2), matrix).unflatten(-1, (order, out_channels))
        return y if self.bias is None else y + self.bias
