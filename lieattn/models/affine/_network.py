"""Bottleneck residual networks with Affine Self Convolution (Diaconu, Worrall 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import PointClouds, Raster
from lieattn.groups import FiniteGroup, trivial
from lieattn.models._images import ImageNetwork, plus_vectors
from lieattn.models._network import GroupField, Symmetry
from lieattn.models.affine._blocks import BottleneckBlock, Downsampling, PixelConvolution
from lieattn.nn import (
    AffineSelfConvolution,
    FieldBatchNorm,
    GridGroupConvolution,
    GridLiftingConvolution,
    GroupLinear,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
    from_grid,
)
from lieattn.nn.relative import RelativePositionTable

Layer = Literal["affine", "simple", "stand-alone", "convolution"]
_ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "affine": AffineSelfConvolution,
    "simple": SimpleAffineSelfConvolution,
    "stand-alone": StandAloneSelfAttention,
}
_STAGES, _EXPANSION, _HEADS = 3, 4, 8


class MeanReadout(nn.Linear):
    """Linear map of the mean over frames and pixels."""

    def forward(self, input: Tensor, graph: PointClouds) -> Tensor:  # type: ignore[override]
        """Field ``[points, fiber, channels]`` to ``[images, out_features]``."""
        return super().forward(graph.mean(input.mean(dim=1)))


class AffineSelfConvNet(ImageNetwork):
    """Bottleneck residual network of 9n + 2 layers around Affine Self Convolution: class scores of images.

    A lifting convolution of 3 x 3 pixels, batch normalization and relu; three stages of n bottleneck blocks with
    c, 2c, 4c channels inside and four times that outside, the first block of the second and of the third stage with
    half the rows and columns; the mean over frames and pixels; a linear map.

    **Equivariance.** The logits do not change under the quarter turns and mirrors of H, with ``downsampling="pooled"``
    exactly: convolution and attention work at full resolution, and the mean over 2 x 2 pixels follows. Sides must be
    multiples of 4.

    Parameters
    ----------
    group
        H: ``trivial(2)``, ``cyclic(4)``, ``dihedral(4)`` or another one that keeps the pixels' lattice.
    in_channels, out_channels
        Channels of the images, number of logits.
    layer
        ``"affine"``, ``"simple"`` (Affine Self Convolutions), ``"stand-alone"`` (the self-attention they are compared
        with) or ``"convolution"`` (3 x 3).
    blocks
        Blocks of a stage, n; 3 make ResNet29.
    channels
        Channels c per frame; 16 without and 8 with a group in the paper.
    window
        What the attention sees; 5 x 5 pixels with a border of zeros if absent.
    heads
        Attention heads; 8 if absent, and at most c / 2 for stand-alone attention, whose heads need two channels.
    scale
        Factor of the scores; 1 / channels of each layer if absent.
    squeeze_excite
        Whether each block ends with a group squeeze-and-excite, of reduction 16 without and 4 with a group.
    downsampling
        ``"pooled"``, or ``"strided"``: the shortcut takes every second pixel and a convolution has stride 2, as in
        residual networks elsewhere, which on even sides breaks quarter turns and mirrors.
    vector_inputs
        Attributes of the points with vectors ``[points, 2]``, whose components in the frames are added to the field
        of the lifting convolution.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 3,
        out_channels: int = 10,
        *,
        layer: Layer = "affine",
        blocks: int = 3,
        channels: int | None = None,
        window: RelativePositionTable | None = None,
        heads: int | None = None,
        scale: float | None = None,
        squeeze_excite: bool = False,
        downsampling: Downsampling = "pooled",
        vector_inputs: Sequence[str] = (),
    ) -> None:
        planar = isinstance(group, FiniteGroup) and group.order == 1
        channels = (16 if planar else 8) if channels is None else channels
        check_count("channels", channels)
        super().__init__(group, in_channels, out_channels, channels, vector_inputs)
        check_count("blocks", blocks)
        for argument, option, allowed in (("layer", layer, Layer), ("downsampling", downsampling, Downsampling)):
            if option not in get_args(allowed):
                raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {option!r}")
        if heads is None:
            heads = max(1, min(_HEADS, channels // 2)) if layer == "stand-alone" else _HEADS
        self.downsampling = downsampling
        window = RelativePositionTable.square(5, border="zero") if window is None else window
        self.stem = GridLiftingConvolution(group, in_channels, channels, 3, pad=1)
        self.stem_norm = FieldBatchNorm(channels)
        self.blocks = nn.ModuleList()
        before = channels
        for number in range(_STAGES * blocks):
            inside = channels * 2 ** (number // blocks)
            first, halves = number % blocks == 0, number % blocks == 0 and number > 0
            strided = halves and layer == "convolution" and downsampling == "strided"
            if layer == "convolution":
                middle: nn.Module = PixelConvolution(group, inside, stride=2 if strided else 1)
            else:
                middle = _ATTENTION[layer](group, inside, inside, window, heads=heads, scale=scale)
            block = BottleneckBlock(
                group,
                before,
                inside,
                _EXPANSION * inside,
                middle,
                size=3 if layer == "convolution" else _side(window),
                downsample=halves,
                strided_layer=strided,
                shortcut=downsampling,
                projection=first,
                reduction=(16 if planar else 4) if squeeze_excite else None,
            )
            self.blocks.append(block)
            before = _EXPANSION * inside
        self.head = MeanReadout(before, out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as in the paper.

        Linear maps and convolutions are normal with variance 2 / fan in (He), the fan counting frames; psi and beta are
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
    def symmetry(self) -> Symmetry:
        """The group, about the centers of the images; none where strides break it."""
        promised = super().symmetry
        if self.downsampling == "pooled" or not bool((self.group.elements.round() < 0).any()):
            return promised
        note = f"strided downsampling of even sides does not turn with {self.group.name}, use 'pooled'"
        return Symmetry(trivial(2), promised.acting, translations=False, notes=(note,))

    def field(self, data: Any, geometry: Any = None) -> GroupField:
        """Field behind the last block, in raster order, and the pixels of the raster that is left.

        Parameters
        ----------
        data
            Images ``[images, in_channels, rows, columns]``; or a torch_geometric ``Data`` or ``Batch`` of their pixels,
            see :func:`lieattn.nn.grid_images`.
        geometry
            None: images need none.
        """
        images = self.images(data)
        raster = Raster(len(images), *images.shape[-2:])
        x = from_grid(plus_vectors(self.stem(images), self.embedded_vectors(data)))
        x = F.relu(self.stem_norm(x))
        for block in self.blocks:
            x, raster = block(x, raster)
        return GroupField(x, raster.lift(self.group, 3, x.device))


def _side(window: RelativePositionTable) -> int:
    """Side in pixels of the square that holds a window."""
    return 2 * round(max(abs(coordinate) for offset in window.offsets for coordinate in offset)) + 1
