"""Densely connected network with attentive group convolutions, for PatchCamelyon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup
from lieattn.models._images import plus_vectors
from lieattn.models.attentive._network import AttentionKind, AttentiveNetwork, batch_norm, convolution, width_for
from lieattn.nn import GridSpatialPool

_DENSE_DILATIONS, _TRANSITION_DILATIONS = (4, 4, 3, 2, 1), (4, 4, 3, 1)
_LIFTING_DILATION = 4
_INIT_SCALE = math.sqrt(2)


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
    """Between dense blocks: the 2 x 2 mean of conv(relu bn x).

    **Equivariance.** That of its convolution, for even sides.

    Parameters
    ----------
    layer
        ``layer(x) -> x``.
    in_channels
        Channels per frame of the input.
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
    positions and frames. Sides are 96, 94, 92-46, 44-22, 20-10, 8-4, 2.

    **Equivariance.** The logits do not change under H acting on the image about its center, exactly.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels of the images, number of logits.
    growth
        g; 26 / sqrt(|H|) if absent: 26 planar, 13 on p4, 9 on p4m as in the paper.
    attention, vector_inputs
        See :class:`lieattn.models.AttentiveCNN`. Spatial kernels are dilated where images are large.
    hidden
        Hidden width of channel attention; in the lifting layer that of the image.
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
        check_count("growth", growth)
        super().__init__(group, in_channels, out_channels, attention, growth, vector_inputs)
        make = partial(convolution, group, attention=attention, init_scale=_INIT_SCALE)
        self.lifting = make(
            in_channels, growth, 3, hidden=in_channels, lifting=True, spatial_dilation=_LIFTING_DILATION
        )
        self.blocks = nn.ModuleList()
        for number, dilation in enumerate(_DENSE_DILATIONS):
            width = growth * (number + 1)
            last = number == len(_DENSE_DILATIONS) - 1
            layer = make(width, growth, 3, hidden=hidden, spatial_size=5 if last else 7, spatial_dilation=dilation)
            self.blocks.append(AttentiveDenseBlock(layer, width))
            if not last:
                width += growth
                layer = make(width, width, 1, hidden=hidden, spatial_dilation=_TRANSITION_DILATIONS[number])
                self.blocks.append(AttentiveTransition(layer, width))
        self.norm = batch_norm(6 * growth)
        self.head = make(6 * growth, out_channels, 1, hidden=hidden, spatial_size=3)

    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields behind the lifting layer, every dense block and every transition."""
        fields = [plus_vectors(self.lifting(images), vectors)]
        for block in self.blocks:
            fields.append(block(fields[-1]))
        return fields

    def logits(self, field: Tensor) -> Tensor:
        """Means over positions and frames of the last convolution."""
        logits: Tensor = self.head(torch.relu(self.norm(field)))
        return logits.mean(dim=(2, 3, 4))
