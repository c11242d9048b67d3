"""Plain attentive group convolutional networks: the p4-CNN of rotated MNIST, and All-CNN-C for CIFAR-10."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout
from lieattn.groups import FiniteGroup
from lieattn.models._images import plus_vectors
from lieattn.models.attentive._network import AttentionKind, AttentiveNetwork, batch_norm, convolution, width_for
from lieattn.nn import GridGroupConvolution, GridLiftingConvolution, GridSpatialPool

_PLANAR_SIDE = 4  # of the kernel that ends the network
_ALL_CNN_WIDTHS = {1: 96, 4: 48, 8: 32}  # of the paper; p4m is narrower than the rule gives
_ALL_CNN_SCALE = 0.035


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
        check_count("channels", channels)
        super().__init__(group, in_channels, out_channels, attention, channels, vector_inputs)
        check_count("reduction", reduction)
        check_dropout("dropout", dropout)
        widths = [in_channels, *[channels] * 6, out_channels]
        self.layers = nn.ModuleList()
        for number, (before, behind) in enumerate(itertools.pairwise(widths)):
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
        self.pool = GridSpatialPool(2, "max")
        self.dropout = nn.Dropout(dropout)
        if group.order == 1:
            _draw_normal(self)

    def with_head(self, head: nn.Module) -> Self:
        """The same network with another head in place of its last layer; all other weights are shared."""
        other = super().with_head(head)
        other.layers = self.layers[:-1]
        return other

    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields behind the six blocks."""
        fields = []
        x = images
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=False)):
            x = layer(x) if number else plus_vectors(layer(x), vectors)
            x = torch.relu(norm(x))
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

    **Equivariance.** The logits do not change under H acting on the image about its center, exactly, for sides
    divisible by 4.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels of the images, number of logits.
    channels
        c; that of the paper if absent: 96 planar, 48 on p4, 32 on p4m.
    attention, vector_inputs
        See :class:`AttentiveCNN`.
    reduction
        Hidden width of channel attention is channels / reduction; in the first layer all of them.
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
        check_count("channels", width)
        super().__init__(group, in_channels, out_channels, attention, width, vector_inputs)
        check_count("reduction", reduction)
        check_dropout("dropout", dropout)
        check_dropout("input_dropout", input_dropout)
        widths = [in_channels, *[width] * 3, *[2 * width] * 5, out_channels]
        self.layers = nn.ModuleList()
        for number, (before, behind) in enumerate(itertools.pairwise(widths)):
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
        fields = []
        x = self.input_dropout(images)
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


def _draw_normal(network: nn.Module) -> None:
    """Planar kernels start normal with deviation 1 / sqrt(fan in), as the authors' do."""
    for module in network.modules():
        if isinstance(module, GridLiftingConvolution | GridGroupConvolution):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
