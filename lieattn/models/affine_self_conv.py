"""Bottleneck residual networks with Affine Self Convolution (Diaconu, Worrall 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup, trivial
from lieattn.models._residual_blocks import BottleneckBlock, Downsampling, FieldBatchNorm, PixelConvolution, Raster
from lieattn.nn import (
    AffineSelfConvolution,
    GridGroupConvolution,
    GridLiftingConvolution,
    GroupLinear,
    OffsetTable,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
    from_grid,
    grid_images,
)

Layer = Literal["affine", "simple", "stand-alone", "convolution"]
_ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "affine": AffineSelfConvolution,
    "simple": SimpleAffineSelfConvolution,
    "stand-alone": StandAloneSelfAttention,
}
_STAGES, _EXPANSION = 3, 4


class BottleneckResNet(nn.Module):
    """Bottleneck residual network of 9n + 2 layers around Affine Self Convolution: class scores of images.

    A lifting convolution of 3 x 3 pixels, batch normalization and relu; three stages of n bottleneck blocks with widths
    w, 2w, 4w inside and four times that outside, the first block of the second and of the third stage with half the
    rows and columns; the mean over poses and pixels; a linear map.

    **Equivariance.** The logits do not change under the quarter turns and mirrors of H, with ``downsampling="pooled"``
    exactly: convolution and attention work at full resolution, and the mean over 2 x 2 pixels follows. Sides must be
    multiples of 4.

    Parameters
    ----------
    group
        H: ``trivial(2)``, ``cyclic(4)``, ``dihedral(4)`` or another one that keeps the pixels' lattice.
    in_channels, classes
        Channels of the images, number of logits.
    layer
        ``"affine"``, ``"simple"`` (Affine Self Convolutions), ``"stand-alone"`` (the self-attention they are compared
        with) or ``"convolution"`` (3 x 3).
    blocks
        Blocks of a stage, n; 3 make ResNet29.
    width
        Channels w per pose; 16 without and 8 with a group in the paper.
    size
        Side of the attention's window in pixels.
    heads
        Attention heads.
    scale
        Factor of the scores; 1 / channels of each layer if absent.
    border
        What the attention sees outside of the image, see :class:`lieattn.nn.OffsetTable`.
    squeeze_excite
        Whether each block ends with a group squeeze-and-excite, of reduction 16 without and 4 with a group.
    downsampling
        ``"pooled"``, or ``"strided"``: the shortcut takes every second pixel and a convolution has stride 2, as in
        residual networks elsewhere, which on even sides breaks quarter turns and mirrors.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 3,
        classes: int = 10,
        *,
        layer: Layer = "affine",
        blocks: int = 3,
        width: int | None = None,
        size: int = 5,
        heads: int = 8,
        scale: float | None = None,
        border: Literal["zero", "mask"] = "zero",
        squeeze_excite: bool = False,
        downsampling: Downsampling = "pooled",
    ) -> None:
        super().__init__()
        check_count("classes", classes)
        check_count("blocks", blocks)
        for argument, option, allowed in (("layer", layer, Layer), ("downsampling", downsampling, Downsampling)):
            if option not in get_args(allowed):
                raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {option!r}")
        self.group, self.downsampling = group, downsampling
        width = (16 if group.order == 1 else 8) if width is None else width
        reduction = (16 if group.order == 1 else 4) if squeeze_excite else None
        self.stem = GridLiftingConvolution(group, in_channels, width, 3, pad=1)
        self.stem_norm = FieldBatchNorm(width)
        self.blocks = nn.ModuleList()
        window = OffsetTable.square(size, border=border)
        channels = width
        for number in range(_STAGES * blocks):
            inside = width * 2 ** (number // blocks)
            first, halves = number % blocks == 0, number % blocks == 0 and number > 0
            strided = halves and layer == "convolution" and downsampling == "strided"
            if layer == "convolution":
                middle: nn.Module = PixelConvolution(group, inside, stride=2 if strided else 1)
            else:
                middle = _ATTENTION[layer](group, inside, inside, window, heads=heads, scale=scale)
            block = BottleneckBlock(
                group,
                channels,
                inside,
                _EXPANSION * inside,
                middle,
                size=3 if layer == "convolution" else size,
                downsample=halves,
                strided_layer=strided,
                shortcut=downsampling,
                projection=first,
                reduction=reduction,
            )
            self.blocks.append(block)
            channels = _EXPANSION * inside
        self.head = nn.Linear(channels, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as in the paper.

        Linear maps and convolutions are normal with variance 2 / fan in (He), the fan counting poses; psi and beta are
        N(0, 1) from their making; the last normalization of each block has gain 0.
        """
        for module in self.modules():
            if isinstance(module, GroupLinear):
                order, _, fan = module.weight.shape
                nn.init.normal_(module.weight, std=math.sqrt(2 / (order * fan)))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, GridLiftingConvolution | GridGroupConvolution):
                nn.init.normal_(module.weight, std=math.sqrt(2 / module.weight[0].numel()))
            elif isinstance(module, BottleneckBlock):
                nn.init.zeros_(module.norm3.weight)

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        strided = self.downsampling == "strided"
        if strided and bool((self.group.elements.round() < 0).any()):
            return f"none: strided downsampling of even sides does not turn with {self.group.name}; use 'pooled'"
        return f"logits are invariant to {self.group.name} acting on the pixels of the image, exactly up to rounding"

    @property
    def symmetry(self) -> FiniteGroup:
        """Group that leaves the logits alone exactly, acting on the image about its center."""
        return self.group if self.guarantee.startswith("logits") else trivial(2)

    def forward(self, data: Any) -> Tensor:
        """Logits ``[images, classes]``.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` of equally large images with ``x`` ``[points, in_channels]``, ``pos``
            and ``grid``, or a tensor ``[images, in_channels, rows, columns]``.
        """
        x, raster = self._run(grid_images(data))
        return self.head(x.unflatten(0, (raster.images, raster.rows * raster.columns)).mean(dim=(1, 2)))

    def features(self, images: Tensor) -> Tensor:
        """Field behind the last block ``[points, fiber, channels]`` of images ``[images, channels, rows, columns]``."""
        return self._run(images)[0]

    def _run(self, images: Tensor) -> tuple[Tensor, Raster]:
        raster = Raster(len(images), *images.shape[-2:])
        x = F.relu(self.stem_norm(from_grid(self.stem(images))))
        for block in self.blocks:
            x, raster = block(x, raster)
        return x, raster
