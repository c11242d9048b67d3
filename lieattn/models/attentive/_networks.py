"""The networks of the paper: the p4-CNN of rotated MNIST, All-CNN-C, a residual and a densely connected network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from lieattn._checks import check_counts, check_dropout
from lieattn.groups import FiniteGroup
from lieattn.models._images import plus_vectors
from lieattn.models.attentive._network import AttentionKind, AttentiveNetwork, batch_norm, convolution, width_for
from lieattn.nn import GridGroupConvolution, GridLiftingConvolution, GridSpatialPool

_PLANAR_SIDE = 4  # of the kernel that ends the p4-CNN
_ALL_CNN_WIDTHS = {1: 96, 4: 48, 8: 32}  # of the paper; p4m is narrower than the rule gives
_ALL_CNN_SCALE = 0.035
_DENSE_DILATIONS, _TRANSITION_DILATIONS, _LIFTING_DILATION = (4, 4, 3, 2, 1), (4, 4, 3, 1), 4
_deep_convolution = partial(convolution, init_scale=math.sqrt(2))


class AttentiveCNN(AttentiveNetwork):
    """The p4-CNN of rotated MNIST with attention: a lifting layer and six group convolutions, without border.

    Layers 1 to 6 with kernels of side 3, each with batch normalization and relu, 2 x 2 maximum pooling behind the
    second; a layer with kernels of side 4 to the classes; the maximum over the frames. An image of 28 x 28 pixels
    becomes 26, 24, 12, 10, 8, 6, 4, 1.

    **Equivariance.** The logits do not change under H acting on the image about its center, exactly.

    Parameters
    ----------
    group
        H; ``lieattn.groups.trivial(2)`` gives the planar network (20 channels in the paper).
    in_channels, out_channels
        Channels of the images, number of logits.
    channels
        Channels per frame.
    attention
        ``"none"``, ``"full"`` (α), ``"channel"`` (α_CH), ``"spatial"`` (α_SP), ``"input"`` (α_F) or ``"pose"``
        (α_RH).
    reduction
        Hidden width of channel attention is channels / reduction; in the first layer all of them.
    spatial_size
        Side of the kernels of spatial attention.
    dropout
        Behind layers 1, 3, 4, 5 and 6.
    vector_inputs
        Attributes of the points with vectors ``[points, 2]``, whose components in the frames are added to the responses
        of the first layer.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 1,
        out_channels: int = 10,
        *,
        channels: int = 10,
        attention: AttentionKind = "none",
        reduction: int = 2,
        spatial_size: int = 7,
        dropout: float = 0.3,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        check_counts(channels=channels, reduction=reduction)
        check_dropout("dropout", dropout)
        super().__init__(group, in_channels, out_channels, attention, channels, vector_inputs)
        self.layers = nn.ModuleList()
        for number, (before, behind) in enumerate(pairwise([in_channels, *[channels] * 6, out_channels])):
            layer = convolution(
                group,
                before,
                behind,
                _PLANAR_SIDE if number == 6 else 3,
                attention=attention,
                hidden=before if number == 0 else max(1, before // reduction),
                lifting=number == 0,
                spatial_size=spatial_size,
                spatial_dilation=4 if number == 0 and attention == "input" else 1,
            )
            self.layers.append(layer)
        self.norms = nn.ModuleList(batch_norm(channels) for _ in range(6))
        self.pool, self.dropout = GridSpatialPool(2, "max"), nn.Dropout(dropout)
        if group.order == 1:
            # Planar kernels start normal with deviation 1 / sqrt(fan in), as the authors' do.
            for module in self.modules():
                if isinstance(module, GridLiftingConvolution | GridGroupConvolution):
                    nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)

    def with_head(self, head: nn.Module) -> Self:
        """The same network with another head in place of its last layer; all other weights are shared."""
        other = super().with_head(head)
        other.layers = self.layers[:-1]
        return other

    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields behind the six blocks."""
        fields, x = [], images
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=False)):
            x = torch.relu(norm(layer(x) if number else plus_vectors(layer(x), vectors)))
            fields.append(x)
            if number < 5:
                x = self.pool(x) if number == 1 else self.dropout(x)
        return fields

    def logits(self, field: Tensor) -> Tensor:
        """Logits of the last field, whose side is that of the last kernel."""
        if field.shape[-2:] != (_PLANAR_SIDE, _PLANAR_SIDE):
            raise ValueError(f"data: expected images of 28 x 28 pixels, got fields of {tuple(field.shape[-2:])}")
        logits: Tensor = self.layers[-1](self.dropout(field))
        return logits.flatten(2).amax(dim=-1)


class AttentiveAllCNN(AttentiveNetwork):
    """All-CNN-C with attention: nine convolutions, the last three of them to positions that are averaged.

    Widths c, c, c, 2c, 2c, 2c, 2c, 2c, classes; kernels of side 3 with border 1, of side 1 in the last two. Layers 3
    and 6 end in a 2 x 2 maximum in place of a stride, which is exact under turns; batch normalization and relu follow
    every layer, the last one included. The logits are means over frames and positions.

    **Equivariance.** As :class:`AttentiveCNN`, for sides divisible by 4.

    Parameters
    ----------
    group, in_channels, out_channels, attention, reduction, vector_inputs
        See :class:`AttentiveCNN`.
    channels
        c; that of the paper if absent: 96 planar, 48 on p4, 32 on p4m.
    dropout, input_dropout
        Behind layers 3 and 6; of the image.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 3,
        out_channels: int = 10,
        *,
        channels: int | None = None,
        attention: AttentionKind = "none",
        reduction: int = 16,
        dropout: float = 0.5,
        input_dropout: float = 0.2,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        width = _ALL_CNN_WIDTHS.get(group.order, width_for(group, 96)) if channels is None else channels
        check_counts(channels=width, reduction=reduction)
        check_dropout("dropout", dropout)
        check_dropout("input_dropout", input_dropout)
        super().__init__(group, in_channels, out_channels, attention, width, vector_inputs)
        widths = [in_channels, *[width] * 3, *[2 * width] * 5, out_channels]
        self.layers = nn.ModuleList()
        for number, (before, behind) in enumerate(pairwise(widths)):
            layer = convolution(
                group,
                before,
                behind,
                3 if number < 7 else 1,
                attention=attention,
                hidden=before if number == 0 else max(1, before // reduction),
                lifting=number == 0,
                pad=1 if number < 7 else 0,
                init_scale=_ALL_CNN_SCALE,
            )
            self.layers.append(layer)
        self.norms = nn.ModuleList(batch_norm(behind) for behind in widths[1:])
        self.pool = GridSpatialPool(2, "max")
        self.dropout, self.input_dropout = nn.Dropout(dropout), nn.Dropout(input_dropout)

    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields behind the nine layers."""
        fields, x = [], self.input_dropout(images)
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = layer(x) if number else plus_vectors(layer(x), vectors)
            pools = number in (2, 5)
            x = torch.relu(norm(self.pool(x) if pools else x))
            fields.append(x)
            x = self.dropout(x) if pools else x
        return fields

    def logits(self, field: Tensor) -> Tensor:
        """Means of the last field, which has a channel for each class."""
        return field.mean(dim=(2, 3, 4))


class AttentiveResidualBlock(nn.Module):
    """Pre-activation block: S(x) + conv2(relu bn2 P(conv1(relu bn1 x))).

    Where it goes down, P is the 2 x 2 maximum, in place of strides, which would not be exact under turns; elsewhere it
    is the identity. S is a convolution of side 1 of the raw input followed by P where the block goes down or widens,
    and the identity elsewhere.

    **Equivariance.** That of its convolutions.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels per frame.
    attention, hidden
        Kind of attention of every convolution, and the hidden width of its channel attention.
    down
        Whether to halve rows and columns.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        attention: AttentionKind = "none",
        hidden: int = 2,
        down: bool = False,
    ) -> None:
        super().__init__()
        changes = down or in_channels != out_channels
        make = partial(_deep_convolution, group, attention=attention, hidden=hidden)
        self.norm1, self.norm2 = batch_norm(in_channels), batch_norm(out_channels)
        self.layer1 = make(in_channels, out_channels, 3, pad=1)
        self.layer2 = make(out_channels, out_channels, 3, pad=1)
        self.shortcut = make(in_channels, out_channels, 1) if changes else nn.Identity()
        self.pool = GridSpatialPool(2, "max") if down else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, order, rows, columns]`` to as many frames, halved where the block goes down."""
        y = self.pool(self.layer1(torch.relu(self.norm1(x))))
        return self.pool(self.shortcut(x)) + self.layer2(torch.relu(self.norm2(y)))


class AttentiveResNet(AttentiveNetwork):
    """Residual network of 6n + 2 layers with attention; the paper's ResNet44 has n = 7 blocks a stage.

    A lifting layer; three stages of pre-activation blocks, the second and third going down by a 2 x 2 maximum;
    normalization, relu, mean over positions, a group convolution of side 1 to the classes, mean over frames.

    **Equivariance.** As :class:`AttentiveCNN`, for sides divisible by 4.

    Parameters
    ----------
    group, in_channels, out_channels, attention, vector_inputs
        See :class:`AttentiveCNN`.
    blocks
        Blocks of each stage.
    channels
        Widths of the three stages; if absent 32, 64, 128 over sqrt(|H|), which on p4m are 11, 23, 45 as in the paper.
    hidden
        Hidden width of channel attention; in the lifting layer that of the image.
    """

    own_readout = ("norm",)

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 3,
        out_channels: int = 10,
        *,
        blocks: int = 7,
        channels: Sequence[int] | None = None,
        attention: AttentionKind = "none",
        hidden: int = 2,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        widths = [width_for(group, planar) for planar in (32, 64, 128)] if channels is None else list(channels)
        if len(widths) != 3:
            raise ValueError(f"channels: expected the widths of three stages, got {widths}")
        check_counts(blocks=blocks)
        super().__init__(group, in_channels, out_channels, attention, widths[0], vector_inputs)
        make = partial(_deep_convolution, group, attention=attention)
        self.lifting = make(in_channels, widths[0], 3, hidden=in_channels, lifting=True, pad=1)
        self.blocks = nn.ModuleList()
        before = widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks):
                down = stage > 0 and number == 0
                block = AttentiveResidualBlock(group, before, width, attention=attention, hidden=hidden, down=down)
                self.blocks.append(block)
                before = width
        self.norm = batch_norm(before)
        self.head = make(before, out_channels, 1, hidden=hidden)

    def logits(self, field: Tensor) -> Tensor:
        """Means over frames of the last convolution of means over positions."""
        x = torch.relu(self.norm(field)).mean(dim=(-2, -1), keepdim=True)
        logits: Tensor = self.head(x)
        return logits.mean(dim=(2, 3, 4))


class AttentiveDenseBlock(nn.Module):
    """One dense layer: conv(relu bn x), put before x less its outermost pixels.

    **Equivariance.** That of its convolution.

    Parameters
    ----------
    layer
        ``layer(x) -> x`` that takes one pixel off each side.
    in_channels
        Channels per frame of the input.
    """

    def __init__(self, layer: nn.Module, in_channels: int) -> None:
        super().__init__()
        self.norm, self.layer = batch_norm(in_channels), layer

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, order, rows, columns]`` to more channels and two rows and columns less."""
        return torch.cat([self.layer(torch.relu(self.norm(x))), x[..., 1:-1, 1:-1]], dim=1)


class AttentiveTransition(nn.Module):
    """Between dense blocks: the 2 x 2 mean of conv(relu bn x); parameters as of :class:`AttentiveDenseBlock`.

    **Equivariance.** That of its convolution, for even sides.
    """

    def __init__(self, layer: nn.Module, in_channels: int) -> None:
        super().__init__()
        self.norm, self.layer, self.pool = batch_norm(in_channels), layer, GridSpatialPool(2, "mean")

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, order, rows, columns]`` to half the rows and columns."""
        return self.pool(self.layer(torch.relu(self.norm(x))))


class AttentiveDenseNet(AttentiveNetwork):
    """Densely connected network with attention, without borders; on 96 x 96 pixels all its sizes stay even.

    A lifting layer to g channels; five dense blocks of one layer (normalization, relu, convolution of side 3 to g
    channels, put before the input less its outermost pixels); behind the first four a transition (normalization,
    relu, convolution of side 1, 2 x 2 mean); normalization, relu, a convolution of side 1 to the classes, means over
    positions and frames. Sides are 96, 94, 92-46, 44-22, 20-10, 8-4, 2. Spatial kernels are dilated where images are
    large.

    **Equivariance.** As :class:`AttentiveCNN`.

    Parameters
    ----------
    group, in_channels, out_channels, attention, vector_inputs
        See :class:`AttentiveCNN`.
    growth
        g; 26 / sqrt(|H|) if absent: 26 planar, 13 on p4, 9 on p4m as in the paper.
    hidden
        See :class:`AttentiveResNet`.
    """

    own_readout = ("norm",)

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 3,
        out_channels: int = 2,
        *,
        growth: int | None = None,
        attention: AttentionKind = "none",
        hidden: int = 2,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        growth = width_for(group, 26) if growth is None else growth
        check_counts(growth=growth)
        super().__init__(group, in_channels, out_channels, attention, growth, vector_inputs)
        lift = partial(_deep_convolution, group, attention=attention, hidden=in_channels, lifting=True)
        self.lifting = lift(in_channels, growth, 3, spatial_dilation=_LIFTING_DILATION)
        make = partial(_deep_convolution, group, attention=attention, hidden=hidden)
        self.blocks = nn.ModuleList()
        for number, dilation in enumerate(_DENSE_DILATIONS):
            width = growth * (number + 1)
            last = number == len(_DENSE_DILATIONS) - 1
            layer = make(width, growth, 3, spatial_size=5 if last else 7, spatial_dilation=dilation)
            self.blocks.append(AttentiveDenseBlock(layer, width))
            if not last:
                width += growth
                layer = make(width, width, 1, spatial_dilation=_TRANSITION_DILATIONS[number])
                self.blocks.append(AttentiveTransition(layer, width))
        self.norm = batch_norm(6 * growth)
        self.head = make(6 * growth, out_channels, 1, spatial_size=3)

    def logits(self, field: Tensor) -> Tensor:
        """Means over positions and frames of the last convolution."""
        logits: Tensor = self.head(torch.relu(self.norm(field)))
        return logits.mean(dim=(2, 3, 4))
