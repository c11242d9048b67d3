"""Bottleneck blocks on rasters: fields ``[points, fiber, channels]`` in raster order, image after image."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn.geometry import LiftedGraph, Raster
from lieattn.groups import FiniteGroup
from lieattn.nn import FieldBatchNorm, GridGroupConvolution, GroupLinear, GroupSqueezeExcite, from_grid, to_grid

Downsampling = Literal["pooled", "strided"]


class PixelConvolution(nn.Module):
    """Group convolution of a field on the pixels of a graph, of 3 x 3 pixels with zero border."""

    def __init__(self, group: FiniteGroup, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.convolution = GridGroupConvolution(
            group, channels, channels, 3, stride=stride, pad=1, measure=1.0, inexact="allow"
        )

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, channels]``."""
        if graph.grid is None:
            raise ValueError("graph: a convolution of pixels needs the raster of each image, grid [clouds, 2]")
        return from_grid(self.convolution(to_grid(x, graph.grid)))


class BottleneckBlock(nn.Module):
    """Bottleneck residual block around a layer of space (Affine Self Convolution, section 5).

    With norm a batch normalization and W group-tied linear maps without bias,

        h = relu(norm(W x)),  h = layer(h),  h = norm(W relu(norm(h))),  h = squeeze_excite(h),
        out = relu(h + shortcut(x)),

    where downsampling takes the mean of 2 x 2 pixels behind the layer.

    Parameters
    ----------
    group
        H.
    in_channels, width, out_channels
        Channels of the input, of the layer, and of the output.
    layer
        ``layer(x, graph) -> x`` with ``width`` channels.
    size
        Side of its neighborhoods in pixels.
    downsample
        Whether the output has half the rows and columns.
    strided_layer
        Whether the layer halves them by itself.
    shortcut
        How x is thinned: ``"pooled"`` takes the mean of 2 x 2 pixels, which is exact; ``"strided"`` every second
        pixel, which on even sides is not equivariant to quarter turns.
    projection
        Whether the shortcut has a linear map and a normalization; without, the channels must agree.
    reduction
        Of the squeeze-and-excite; None for none.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        width: int,
        out_channels: int,
        layer: nn.Module,
        *,
        size: int,
        downsample: bool = False,
        strided_layer: bool = False,
        shortcut: Downsampling = "pooled",
        projection: bool = True,
        reduction: int | None = None,
    ) -> None:
        super().__init__()
        if not projection and in_channels != out_channels:
            raise ValueError(f"projection: needed from {in_channels} to {out_channels} channels")
        self.group, self.size = group, size
        self.downsample, self.strided_layer, self.shortcut = downsample, strided_layer, shortcut
        self.linear1 = GroupLinear(group, in_channels, width, bias=False)
        self.norm1 = FieldBatchNorm(width)
        self.layer = layer
        self.norm2 = FieldBatchNorm(width)
        self.linear2 = GroupLinear(group, width, out_channels, bias=False)
        self.norm3 = FieldBatchNorm(out_channels)
        self.squeeze_excite = None if reduction is None else GroupSqueezeExcite(out_channels, reduction)
        self.shortcut_linear = GroupLinear(group, in_channels, out_channels, bias=False) if projection else None
        self.shortcut_norm = FieldBatchNorm(out_channels) if projection else None

    def forward(self, x: Tensor, raster: Raster) -> tuple[Tensor, Raster]:
        """Field on a raster to a field on the raster that is returned with it."""
        after = raster.halved() if self.downsample else raster
        h = F.relu(self.norm1(self.linear1(x)))
        h = self.layer(h, raster.lift(self.group, self.size, x.device))
        if self.downsample:
            h = h if self.strided_layer else _pooled(h, raster)
            x = _pooled(x, raster) if self.shortcut == "pooled" else raster.unflatten(x)[:, ::2, ::2].flatten(0, 2)
        h = self.norm3(self.linear2(F.relu(self.norm2(h))))
        if self.squeeze_excite is not None:
            h = self.squeeze_excite(h, after.lift(self.group, self.size, x.device))
        if self.shortcut_linear is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut_linear(x))
        return F.relu(h + x), after


def _pooled(x: Tensor, raster: Raster) -> Tensor:
    """Mean of 2 x 2 pixels: ``[points, *]`` to ``[points / 4, *]``."""
    return raster.unflatten(x).unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean(dim=(2, 4)).flatten(0, 2)
