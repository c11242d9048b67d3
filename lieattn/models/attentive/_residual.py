"""Residual network with attentive group convolutions, for CIFAR-10."""

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

_INIT_SCALE = math.sqrt(2)


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
        make = partial(convolution, attention=attention, hidden=hidden, init_scale=_INIT_SCALE)
        self.norm1, self.norm2 = batch_norm(in_channels), batch_norm(out_channels)
        self.layer1 = make(group, in_channels, out_channels, 3, pad=1)
        self.layer2 = make(group, out_channels, out_channels, 3, pad=1)
        self.shortcut = make(group, in_channels, out_channels, 1) if changes else nn.Identity()
        self.pool = GridSpatialPool(2, "max") if down else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, order, rows, columns]`` to as many frames, halved where the block goes down."""
        y = self.pool(self.layer1(torch.relu(self.norm1(x))))
        return self.pool(self.shortcut(x)) + self.layer2(torch.relu(self.norm2(y)))


class AttentiveResNet(AttentiveNetwork):
    """Residual network of 6n + 2 layers with attention; the paper's ResNet44 has n = 7 blocks a stage.

    A lifting layer; three stages of pre-activation blocks, the second and third going down by a 2 x 2 maximum;
    normalization, relu, mean over positions, a group convolution of side 1 to the classes, mean over frames.

    **Equivariance.** The logits do not change under H acting on the image about its center, exactly, for sides
    divisible by 4.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels of the images, number of logits.
    blocks
        Blocks of each stage.
    channels
        Widths of the three stages; if absent 32, 64, 128 over sqrt(|H|), which on p4m are 11, 23, 45 as in the paper.
    attention, vector_inputs
        See :class:`lieattn.models.AttentiveCNN`.
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
        check_count("blocks", blocks)
        super().__init__(group, in_channels, out_channels, attention, widths[0], vector_inputs)
        self.lifting = convolution(
            group,
            in_channels,
            widths[0],
            3,
            attention=attention,
            hidden=in_channels,
            lifting=True,
            pad=1,
            init_scale=_INIT_SCALE,
        )
        self.blocks = nn.ModuleList()
        before = widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks):
                down = stage > 0 and number == 0
                block = AttentiveResidualBlock(group, before, width, attention=attention, hidden=hidden, down=down)
                self.blocks.append(block)
                before = width
        self.norm = batch_norm(before)
        self.head = convolution(
            group, before, out_channels, 1, attention=attention, hidden=hidden, init_scale=_INIT_SCALE
        )

    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields behind the lifting layer and every block."""
        fields = [plus_vectors(self.lifting(images), vectors)]
        for block in self.blocks:
            fields.append(block(fields[-1]))
        return fields

    def logits(self, field: Tensor) -> Tensor:
        """Means over frames of the last convolution of means over positions."""
        x = torch.relu(self.norm(field)).mean(dim=(-2, -1), keepdim=True)
        logits: Tensor = self.head(x)
        return logits.mean(dim=(2, 3, 4))
