"""All-CNN-C with attentive group convolutions, for CIFAR-10."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout
from lieattn.groups import FiniteGroup
from lieattn.models._attentive_network import AttentionKind, AttentiveNetwork, convolution, width_for
from lieattn.nn import GridBatchNorm, GridSpatialPool

_WIDTHS = {1: 96, 4: 48, 8: 32}  # of the paper; p4m is narrower than the rule gives
_SPREAD = 0.035


class AttentiveAllCNN(AttentiveNetwork):
    """All-CNN-C with attention: nine convolutions, the last three of them to positions that are averaged.

    Widths w, w, w, 2w, 2w, 2w, 2w, 2w, classes; kernels of side 3 with border 1, of side 1 in the last two. Layers 3
    and 6 end in a 2 x 2 maximum in place of a stride, which is exact under turns; batch normalization and relu follow
    every layer, the last one included. The logits are means over poses and positions.

    **Equivariance.** The logits do not change under H acting on the image about its center, exactly, for sides
    divisible by 4.

    Parameters
    ----------
    group
        H.
    in_channels, classes
        Channels of the images, number of logits.
    channels
        w; that of the paper if absent: 96 planar, 48 on p4, 32 on p4m.
    attention
        See :class:`lieattn.models.AttentiveCNN`.
    reduction
        Hidden width of channel attention is channels / reduction; in the first layer all of them.
    dropout, input_dropout
        Behind layers 3 and 6; of the image.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 3,
        classes: int = 10,
        *,
        channels: int | None = None,
        attention: AttentionKind = "none",
        reduction: int = 16,
        dropout: float = 0.5,
        input_dropout: float = 0.2,
    ) -> None:
        super().__init__(group, in_channels, classes, attention)
        width = _WIDTHS.get(group.order, width_for(group, 96)) if channels is None else channels
        check_count("channels", width)
        check_count("reduction", reduction)
        check_dropout("dropout", dropout)
        check_dropout("input_dropout", input_dropout)
        widths = [in_channels, *[width] * 3, *[2 * width] * 5, classes]
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
                spread=_SPREAD,
            )
            self.layers.append(layer)
        self.norms = nn.ModuleList(GridBatchNorm(behind) for behind in widths[1:])
        self.pool = GridSpatialPool(2, "max")
        self.dropout, self.input_dropout = nn.Dropout(dropout), nn.Dropout(input_dropout)

    def features(self, images: Tensor) -> list[Tensor]:
        """Fields behind the nine layers, then the logits."""
        fields = []
        x = self.input_dropout(images)
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = layer(x)
            pools = number in (2, 5)
            x = torch.relu(norm(self.pool(x) if pools else x))
            fields.append(x)
            x = self.dropout(x) if pools else x
        return [*fields, x.mean(dim=(2, 3, 4))]
