"""Deep networks of attentive group convolutions (Romero, Bekkers, Tomczak, Hoogendoorn, ICML 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_tensor
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import CloudInputs, VectorInputs
from lieattn.models._base.network import Downsampling
from lieattn.models.attentive._networks import DEEP, AttentionKind, AttentiveNetwork, batch_norm, convolution, width_for
from lieattn.nn import GridSpatialPool

# Of each dense layer: side and dilation of the spatial kernels, and dilation in the transition after it.
_DENSE_LAYERS = ((7, 4, 4), (7, 4, 4), (7, 3, 3), (7, 2, 1), (5, 1, None))


class AttentiveResidualBlock(nn.Module):
    """Pre-activation block: S(x) + conv2(relu bn2 P(conv1(relu bn1 x))).

    With ``down``, P is 2 x 2 max pooling, in place of strides, which would not be exact under rotations; otherwise it
    is the identity. S is a convolution of side 1 followed by P if the block goes down or changes the width, and
    otherwise the identity. See :class:`AttentiveResNet` for the parameters.

    **Equivariance.** That of its convolutions.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        attention: AttentionKind = "none",
        hidden: int = 2,
        spatial_size: int = 7,
        down: bool = False,
        downsampling: Downsampling = "pooled",
    ) -> None:
        check_arguments(AttentiveResidualBlock.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        make = partial(convolution, group, attention=attention, hidden=hidden, spatial_size=spatial_size, **DEEP)
        self.norm1, self.norm2 = batch_norm(in_channels), batch_norm(out_channels)
        strided = down and downsampling == "strided"
        self.layer1 = make(in_channels, out_channels, 3, pad=1, strided=strided)
        self.layer2 = make(out_channels, out_channels, 3, pad=1)
        widens = down or in_channels != out_channels
        self.shortcut = make(in_channels, out_channels, 1, strided=strided) if widens else nn.Identity()
        self.pool = GridSpatialPool(2, "max", dim=group.dim) if down and not strided else nn.Identity()

    def forward(self, x: Float[Tensor, "batch channels order *sides"]) -> Float[Tensor, "batch outputs order *after"]:
        """Map ``[batch, in_channels, order, *sides]`` to ``out_channels``; sides are halved if the block goes down."""
        y = self.pool(self.layer1(torch.relu(self.norm1(x))))
        return self.pool(self.shortcut(x)) + self.layer2(torch.relu(self.norm2(y)))


class AttentiveResNet(AttentiveNetwork):
    """Residual network of 6n + 2 layers with attention, for images; ResNet44 of the paper has n = 7 blocks per stage.

    The network has a lifting layer, three stages of :class:`AttentiveResidualBlock`, of which the second and third
    go down, normalization, relu, a mean over positions, a group convolution to the classes, and a mean over frames.

    **Equivariance.** As for :class:`AttentiveCNN`, for sides divisible by 4.

    Parameters
    ----------
    group, in_channels, out_channels, attention, downsampling, spatial_size, vector_inputs
        See :class:`AttentiveCNN` and :class:`AttentiveAllCNN`; shortcuts are also strided.
    blocks
        Number of blocks of each stage.
    channels
        Widths of the three stages; if absent 32, 64, 128 over sqrt(|H|), for p4m 11, 23, 45 as in the paper.
    hidden
        Hidden width of channel attention; in the lifting layer it is in_channels.
    """

    own_readout = ("norm",)

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs = 3,
        out_channels: int = 10,
        *,
        blocks: int = 7,
        channels: Sequence[int] | None = None,
        attention: AttentionKind = "none",
        downsampling: Downsampling = "pooled",
        hidden: int = 2,
        spatial_size: int = 7,
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AttentiveResNet.__init__, locals())
        widths = [width_for(group, planar) for planar in (32, 64, 128)] if channels is None else list(channels)
        if len(widths) != 3:
            raise ValueError(f"channels: expected the widths of three stages, got {widths}")
        check_counts(blocks=blocks)
        super().__init__(group, in_channels, out_channels, attention, widths[0], vector_inputs)
        make = partial(convolution, group, attention=attention, hidden=hidden, spatial_size=spatial_size, **DEEP)
        self.lifting = make(self.in_channels, widths[0], 3, lifting=True, pad=1)
        self.blocks, self.downsampling = nn.ModuleList(), downsampling
        options: Any = {"hidden": hidden, "spatial_size": spatial_size, "downsampling": downsampling}
        for number in range(3 * blocks):
            before, width = widths[max(0, number - 1) // blocks], widths[number // blocks]
            options["down"] = number > 0 and number % blocks == 0
            self.blocks.append(AttentiveResidualBlock(group, before, width, attention=attention, **options))
        self.norm = batch_norm(widths[-1])
        self.head = make(widths[-1], out_channels, 1)

    def logits(self, field: Tensor) -> Tensor:
        """Return means over frames of the last convolution, which is applied to means over positions."""
        positions = tuple(range(3, field.ndim))
        means = torch.relu(self.norm(field)).mean(dim=positions, keepdim=True)
        return cast(Tensor, self.head(means)).flatten(2).mean(dim=2)


class AttentiveDenseBlock(nn.Module):
    """One dense layer: conv(relu bn x), concatenated with x without its outermost pixels.

    The convolution ``layer(x) -> x`` of ``in_channels`` removes one pixel at each side.

    **Equivariance.** That of its convolution.
    """

    def __init__(self, layer: nn.Module, in_channels: int) -> None:
        check_arguments(AttentiveDenseBlock.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels)
        self.norm, self.layer = batch_norm(in_channels), layer

    def forward(self, x: Float[Tensor, "batch channels order *sides"]) -> Float[Tensor, "batch more order *inner"]:
        """Map ``[batch, in_channels, order, *sides]`` to more channels and sides that are two pixels shorter."""
        check_tensor("x", x, "a tensor [batch, in_channels, order, *sides]")
        return torch.cat([self.layer(torch.relu(self.norm(x))), nn.functional.pad(x, [-1, -1] * (x.ndim - 3))], dim=1)


class AttentiveTransition(nn.Module):
    """Layer between dense blocks: 2 x 2 mean of conv(relu bn x), equivariant like conv; sides must be even."""

    def __init__(self, layer: nn.Module, in_channels: int, dim: int = 2) -> None:
        check_arguments(AttentiveTransition.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels)
        self.norm, self.layer = batch_norm(in_channels), layer
        self.pool = GridSpatialPool(2, "mean", dim=dim)

    def forward(self, x: Float[Tensor, "batch channels order *sides"]) -> Float[Tensor, "batch outputs order *half"]:
        """Map ``[batch, in_channels, order, *sides]`` to half the sides."""
        return self.pool(self.layer(torch.relu(self.norm(x))))


class AttentiveDenseNet(AttentiveNetwork):
    """Densely connected network with attention, for images, without borders; its sizes stay even on 96 x 96 pixels.

    The network has a lifting layer to g channels; five :class:`AttentiveDenseBlock` with convolutions of side 3 to g
    channels, the first four followed by :class:`AttentiveTransition`; normalization, relu, a convolution of side 1 to
    the classes, and means over positions and frames. The sides are 96, 94, 92-46, 44-22, 20-10, 8-4, 2. Kernels of
    spatial attention are dilated on large images.

    **Equivariance.** As for :class:`AttentiveCNN`.

    Parameters
    ----------
    group, in_channels, out_channels, attention, hidden, vector_inputs
        See :class:`AttentiveResNet`.
    growth
        Number of channels g; if absent 26 / sqrt(|H|), that is 26 (planar), 13 (p4) or 9 (p4m) as in the paper.
    """

    own_readout = ("norm",)

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs = 3,
        out_channels: int = 2,
        *,
        growth: int | None = None,
        attention: AttentionKind = "none",
        hidden: int = 2,
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AttentiveDenseNet.__init__, locals())
        growth = width_for(group, 26) if growth is None else growth
        check_counts(growth=growth)
        super().__init__(group, in_channels, out_channels, attention, growth, vector_inputs)
        make = partial(convolution, group, attention=attention, hidden=hidden, **DEEP)
        self.lifting = make(self.in_channels, growth, 3, lifting=True, spatial_dilation=4)
        self.blocks = nn.ModuleList()
        width = growth
        for size, dilation, transition in _DENSE_LAYERS:
            layer = make(width, growth, 3, spatial_size=size, spatial_dilation=dilation)
            self.blocks.append(AttentiveDenseBlock(layer, width))
            width += growth
            if transition:
                layer = make(width, width, 1, spatial_dilation=transition)
                self.blocks.append(AttentiveTransition(layer, width, group.dim))
        self.norm = batch_norm(width)
        self.head = make(width, out_channels, 1, spatial_size=3)

    def logits(self, field: Tensor) -> Tensor:
        """Return means over positions and frames of the last convolution."""
        return cast(Tensor, self.head(torch.relu(self.norm(field)))).flatten(2).mean(dim=2)
