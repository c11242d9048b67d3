"""Normalization and pooling of fields on grids of pixels, ``[batch, channels, fiber, rows, columns]``."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lieattn._checks import check_count

Inexact = Literal["refuse", "warn", "allow"]


class GridBatchNorm(_BatchNorm):
    """Batch normalization with one gain, shift, mean and variance a channel, over batch, fiber and positions.

    **Equivariance.** Statistics are sums over poses and positions, so it commutes with the group.

    Parameters
    ----------
    channels
        Channels of the field.
    eps
        Added to the variance; 2e-5 in the networks of attentive group convolution.
    momentum
        Weight of a batch in the running statistics.
    """

    def __init__(self, channels: int, *, eps: float = 2e-5, momentum: float = 0.1) -> None:
        check_count("channels", channels)
        super().__init__(channels, eps=eps, momentum=momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim not in (4, 5) or input.shape[1] != self.num_features:
            raise ValueError(
                f"x: expected [batch, {self.num_features}, (fiber,) rows, columns], got {tuple(input.shape)}"
            )


class GridSpatialPool(nn.Module):
    """Pool size x size cells of the positions, pose by pose, with a stride as large as the cell.

    **Equivariance.** To quarter turns and mirrors where cells fill the image; other images would lose their last
    rows or columns, and a turned image others.

    Parameters
    ----------
    size
        Side of a cell in pixels.
    reduction
        ``"max"`` or ``"mean"``.
    inexact
        What to do with sides that are no multiples of ``size``: ``"refuse"`` raises ValueError, ``"warn"`` warns,
        ``"allow"`` says nothing.
    """

    def __init__(
        self, size: int = 2, reduction: Literal["max", "mean"] = "max", *, inexact: Inexact = "refuse"
    ) -> None:
        super().__init__()
        check_count("size", size)
        if reduction not in ("max", "mean"):
            raise ValueError(f"reduction: expected 'max' or 'mean', got {reduction!r}")
        if inexact not in get_args(Inexact):
            raise ValueError(f"inexact: expected one of {get_args(Inexact)}, got {inexact!r}")
        self.size, self.reduction, self.inexact = size, reduction, inexact

    def forward(self, x: Tensor) -> Tensor:
        """``[*, rows, columns]`` to ``[*, rows / size, columns / size]``."""
        if x.ndim < 3:
            raise ValueError(f"x: expected [*, rows, columns], got {tuple(x.shape)}")
        self._check_sides(*x.shape[-2:])
        pool = F.max_pool2d if self.reduction == "max" else F.avg_pool2d
        pooled = pool(x.flatten(0, -4) if x.ndim > 4 else x, self.size)
        return pooled.unflatten(0, x.shape[:-3]) if x.ndim > 4 else pooled

    def _check_sides(self, rows: int, columns: int) -> None:
        if rows < self.size or columns < self.size:
            raise ValueError(f"x: no cell of {self.size} x {self.size} fits into {rows} x {columns} pixels")
        if (rows % self.size or columns % self.size) and self.inexact != "allow":
            fits = [-(-side // self.size) * self.size for side in (rows, columns)]
            message = (
                f"pooling {self.size} x {self.size} drops rows or columns of a {rows} x {columns} image, which breaks "
                f"rotations; {fits[0]} x {fits[1]} would be exact"
            )
            if self.inexact == "refuse":
                raise ValueError(message)
            warnings.warn(message, stacklevel=3)
