"""Attentive group convolutional networks on images (Romero, Bekkers, Tomczak, Hoogendoorn, ICML 2020)."""

from __future__ import annotations

import abc
import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_choice, check_counts, check_dropout, check_tensor
from lieattn.geometry import Raster
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import CloudInputs, plus_vectors
from lieattn.models._base.network import Downsampling, ImageNetwork
from lieattn.nn import (
    FieldBatchNorm,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridLiftingConvolution,
    GridPoseAttention,
    GridSpatialPool,
    from_grid,
)
from lieattn.ops import AttentionMaps

AttentionKind = Literal["none", "full", "channel", "spatial", "input", "pose"]
"""Attention of the convolutions of a network, see :class:`AttentiveCNN`."""

_ATTENTIVE = (GridAttentiveConvolution, GridAttentiveLifting, GridInputAttention, GridPoseAttention)
_LAST_SIDE = 4  # side of the last kernel of the p4-CNN
_ALL_CNN_WIDTHS = {1: 96, 4: 48, 8: 32}  # widths of the paper; that of p4m is smaller than planar / sqrt(|H|)
_ALL_CNN_SCALE = 0.035
_DEEP: Any = {"init_scale": math.sqrt(2)}
# Side and dilation of the spatial kernels of each dense layer, and dilation in the transition after it.
_DENSE_LAYERS = ((7, 4, 4), (7, 4, 4), (7, 3, 3), (7, 2, 1), (5, 1, None))
_batch_norm = partial(FieldBatchNorm, eps=2e-5, axis=1)  # the authors' ε


class AttentiveNetwork(ImageNetwork):
    """Base class of attentive networks on grids (Romero et al. 2020), with invariant logits.

    With a group of the plane the inputs are images; with a group of space, such as ``octahedral()``, they are voxels.
    Logits are computed by the last layers of the network, or by another head that is set by :meth:`with_head`. See
    :class:`AttentiveCNN` for the parameters.
    """

    limits = ("sides of images must be divisible by the poolings",)
    own_readout: ClassVar[tuple[str, ...]] = ()
    lifting: nn.Module
    blocks: nn.ModuleList

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs,
        out_channels: int,
        attention: AttentionKind,
        stem_channels: int,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__(group, in_channels, out_channels, stem_channels, vector_inputs)
        check_choice("attention", attention, AttentionKind)
        self.attention: AttentionKind = attention
        self.reads_itself = True

    def with_head(self, head: nn.Module) -> Self:
        """Return this network with another head in place of its last layers; all other weights are shared."""
        other = super().with_head(head)
        other.reads_itself = False
        for name in self.own_readout:
            other._modules.pop(name)
        return other

    def forward(self, data: Any, geometry: Any = None) -> Tensor:
        """Return logits ``[images, out_channels]``, or outputs of another head; arguments as in :meth:`field`."""
        if not self.reads_itself:
            return super().forward(data, geometry)
        return self.logits(self.fields(data, self.embedded_vectors(data))[-1])

    def last_field(self, images: Any, vectors: Tensor | None) -> tuple[Tensor, Raster]:
        """Return the field ``[points, order, channels]`` after the last block, and its raster."""
        x = self.fields(images, vectors)[-1]
        return from_grid(x, self.group.dim), Raster(len(x), tuple(x.shape[3:]))

    def features(self, images: Any) -> list[Tensor]:
        """Return the fields after every block, and the logits."""
        fields = self.fields(images)
        return [*fields, self.logits(fields[-1])]

    def fields(self, images: Any, vectors: Tensor | None = None) -> list[Tensor]:
        """Return the fields ``[images, channels, order, *sides]`` after the first layer and every block.

        ``vectors`` ``[images, stem_channels, order, *sides]`` are added to the responses of the first layer.
        """
        fields = [plus_vectors(self.lifting(self.images(images)), vectors)]
        for block in self.blocks:
            fields.append(self._through(block, fields[-1]))
        return fields

    @abc.abstractmethod
    def logits(self, field: Tensor) -> Tensor:
        """Return logits ``[images, out_channels]`` of the last field."""

    def attention_maps(self, data: Any) -> dict[str, AttentionMaps]:
        """Return the attention maps of every attentive layer by its name; call ``eval()`` first to disable dropout.

        The maps are the residual attention α⁻: responses are multiplied by 1 - α⁻.
        """
        found: dict[str, AttentionMaps] = {}

        def observe(name: str, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = layer.attend(inputs[0], return_maps=True)[1]

        with ExitStack() as hooks:
            for name, module in self.named_modules():
                if isinstance(module, _ATTENTIVE):
                    hooks.enter_context(module.register_forward_hook(partial(observe, name)))
            self(data)
        return found


class AttentiveCNN(AttentiveNetwork):
    """The p4-CNN of rotated MNIST with attention, for images: a lifting layer and six convolutions without border.

    Layers 1 to 6 have kernels of side 3, batch normalization and relu, with 2 x 2 max pooling after the second. Kernels
    of side 4 map to the classes, and logits are maxima over frames. Fields have sides 28, 26, 24-12, 10, 8, 6, 4, 1.

    **Equivariance.** The logits are exactly invariant under H acting on the image about its center.

    Parameters
    ----------
    group
        H; ``lieattn.groups.trivial(2)`` gives the planar network (20 channels in the paper).
    in_channels, out_channels, channels
        Channels of the images, number of logits, and channels per frame.
    attention
        Attention of every convolution: ``"none"``; ``"full"`` (α), ``"channel"`` (α_CH) or ``"spatial"`` (α_SP) to its
        responses; ``"input"`` (α_F) to its input; or ``"pose"`` (α_RH) to the frames of its input.
    reduction
        The hidden width of channel attention is channels / reduction; in the first layer it is in_channels.
    spatial_size
        Side of the kernels of spatial attention.
    dropout
        Dropout probability after layers 1, 3, 4, 5 and 6.
    vector_inputs
        Attributes of the points with vectors ``[points, 2]``, embedded in the frames and added to the first responses.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs = 1,
        out_channels: int = 10,
        *,
        channels: int = 10,
        attention: AttentionKind = "none",
        reduction: int = 2,
        spatial_size: int = 7,
        dropout: float = 0.3,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        check_arguments(AttentiveCNN.__init__, locals())
        check_counts(channels=channels, reduction=reduction)
        check_dropout("dropout", dropout)
        super().__init__(group, in_channels, out_channels, attention, channels, vector_inputs)
        hidden = max(1, channels // reduction)
        make = partial(_convolution, group, attention=attention, hidden=hidden, spatial_size=spatial_size)
        layers = [make(self.in_channels, channels, 3, lifting=True, spatial_dilation=4 if attention == "input" else 1)]
        for behind, size in [*[(channels, 3)] * 5, (out_channels, _LAST_SIDE)]:
            layers.append(make(channels, behind, size))
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(_batch_norm(channels) for _ in range(6))
        self.pool, self.dropout = GridSpatialPool(2, "max", dim=group.dim), nn.Dropout(dropout)
        if group.order == 1:
            # In the authors' code, planar kernels start normal with standard deviation 1 / sqrt(fan in).
            for module in self.modules():
                if isinstance(module, GridLiftingConvolution | GridGroupConvolution):
                    nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)

    def with_head(self, head: nn.Module) -> Self:
        """Return this network with another head in place of its last layer; all other weights are shared."""
        other = super().with_head(head)
        other.layers = self.layers[:-1]
        return other

    def fields(self, images: Any, vectors: Tensor | None = None) -> list[Tensor]:
        """Return the fields after the six blocks."""
        fields, x = [], self.images(images)
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=False)):
            x = torch.relu(norm(plus_vectors(self._through(layer, x), None if number else vectors)))
            fields.append(x)
            if number < 5:
                x = self.pool(x) if number == 1 else self.dropout(x)
        return fields

    def logits(self, field: Tensor) -> Tensor:
        """Return the logits of the last field; ValueError if its sides are not those of the last kernel."""
        sides = tuple(field.shape[3:])
        if any(side != _LAST_SIDE for side in sides):
            wanted, got = (" x ".join(map(str, n)) for n in ([28] * len(sides), [2 * (side + 8) + 4 for side in sides]))
            raise ValueError(f"data: expected images of {wanted} pixels, got images whose fields are those of {got}")
        return cast(Tensor, self.layers[-1](self.dropout(field))).flatten(2).amax(dim=-1)


class AttentiveAllCNN(AttentiveNetwork):
    """All-CNN-C with attention, for images: nine convolutions, and a mean over positions.

    The widths are c, c, c, 2c, 2c, 2c, 2c, 2c, classes. Kernels have side 3 and border 1, or side 1 in the last two.
    Layers 3 and 6 end with 2 x 2 max pooling in place of a stride, which is exact under rotations. Batch normalization
    and relu follow every layer, including the last one. The logits are means over frames and positions.

    **Equivariance.** As for :class:`AttentiveCNN`, for sides divisible by 4.

    Parameters
    ----------
    group, in_channels, out_channels, attention, reduction, vector_inputs
        See :class:`AttentiveCNN`.
    downsampling
        ``"pooled"`` as above, or ``"strided"``: convolutions with stride 2 in place of the pooling, which breaks the
        symmetry on images with even sides.
    channels
        Width c; if absent, that of the paper: 96 for the planar network, 48 for p4, 32 for p4m.
    dropout, input_dropout
        Dropout probabilities after layers 3 and 6, and of the image.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs = 3,
        out_channels: int = 10,
        *,
        channels: int | None = None,
        attention: AttentionKind = "none",
        downsampling: Downsampling = "pooled",
        reduction: int = 16,
        dropout: float = 0.5,
        input_dropout: float = 0.2,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        check_arguments(AttentiveAllCNN.__init__, locals())
        width = _ALL_CNN_WIDTHS.get(group.order, _width_for(group, 96)) if channels is None else channels
        check_counts(channels=width, reduction=reduction)
        check_dropout("dropout", dropout)
        check_dropout("input_dropout", input_dropout)
        super().__init__(group, in_channels, out_channels, attention, width, vector_inputs)
        widths = [self.in_channels, *[width] * 3, *[2 * width] * 5, out_channels]
        make = partial(_convolution, group, attention=attention, init_scale=_ALL_CNN_SCALE)
        self.layers = nn.ModuleList([make(self.in_channels, width, 3, lifting=True, pad=1)])
        self.downsampling = downsampling
        for number, ((before, behind), size) in enumerate(zip(pairwise(widths[1:]), [3] * 6 + [1] * 2, strict=True), 1):
            options: Any = {"pad": size // 2, "strided": downsampling == "strided" and number in (2, 5)}
            self.layers.append(make(before, behind, size, hidden=max(1, before // reduction), **options))
        self.norms = nn.ModuleList(_batch_norm(behind) for behind in widths[1:])
        self.pool = GridSpatialPool(2, "max", dim=group.dim) if downsampling == "pooled" else nn.Identity()
        self.dropout, self.input_dropout = nn.Dropout(dropout), nn.Dropout(input_dropout)

    def fields(self, images: Any, vectors: Tensor | None = None) -> list[Tensor]:
        """Return the fields after the nine layers."""
        fields, x = [], self.input_dropout(self.images(images))
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = plus_vectors(self._through(layer, x), None if number else vectors)
            pools = number in (2, 5)
            x = torch.relu(norm(self.pool(x) if pools else x))
            fields.append(x)
            x = self.dropout(x) if pools else x
        return fields

    def logits(self, field: Tensor) -> Tensor:
        """Return the means of the last field, which has a channel for each class."""
        return field.flatten(2).mean(dim=2)


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
        make = partial(_convolution, group, attention=attention, hidden=hidden, spatial_size=spatial_size, **_DEEP)
        self.norm1, self.norm2 = _batch_norm(in_channels), _batch_norm(out_channels)
        strided = down and downsampling == "strided"
        self.layer1 = make(in_channels, out_channels, 3, pad=1, strided=strided)
        self.layer2 = make(out_channels, out_channels, 3, pad=1)
        widens = down or in_channels != out_channels
        self.shortcut = make(in_channels, out_channels, 1, strided=strided) if widens else nn.Identity()
        self.pool = GridSpatialPool(2, "max", dim=group.dim) if down and not strided else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
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
        vector_inputs: Sequence[str] = (),
    ) -> None:
        check_arguments(AttentiveResNet.__init__, locals())
        widths = [_width_for(group, planar) for planar in (32, 64, 128)] if channels is None else list(channels)
        if len(widths) != 3:
            raise ValueError(f"channels: expected the widths of three stages, got {widths}")
        check_counts(blocks=blocks)
        super().__init__(group, in_channels, out_channels, attention, widths[0], vector_inputs)
        make = partial(_convolution, group, attention=attention, hidden=hidden, spatial_size=spatial_size, **_DEEP)
        self.lifting = make(self.in_channels, widths[0], 3, lifting=True, pad=1)
        self.blocks, self.downsampling = nn.ModuleList(), downsampling
        options: Any = {"hidden": hidden, "spatial_size": spatial_size, "downsampling": downsampling}
        for number in range(3 * blocks):
            before, width = widths[max(0, number - 1) // blocks], widths[number // blocks]
            options["down"] = number > 0 and number % blocks == 0
            self.blocks.append(AttentiveResidualBlock(group, before, width, attention=attention, **options))
        self.norm = _batch_norm(widths[-1])
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
        self.norm, self.layer = _batch_norm(in_channels), layer

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, in_channels, order, *sides]`` to more channels and sides that are two pixels shorter."""
        check_tensor("x", x, "a tensor [batch, in_channels, order, *sides]")
        return torch.cat([self.layer(torch.relu(self.norm(x))), nn.functional.pad(x, [-1, -1] * (x.ndim - 3))], dim=1)


class AttentiveTransition(nn.Module):
    """Layer between dense blocks: 2 x 2 mean of conv(relu bn x), equivariant like conv; sides must be even."""

    def __init__(self, layer: nn.Module, in_channels: int, dim: int = 2) -> None:
        check_arguments(AttentiveTransition.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels)
        self.norm, self.layer = _batch_norm(in_channels), layer
        self.pool = GridSpatialPool(2, "mean", dim=dim)

    def forward(self, x: Tensor) -> Tensor:
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
        vector_inputs: Sequence[str] = (),
    ) -> None:
        check_arguments(AttentiveDenseNet.__init__, locals())
        growth = _width_for(group, 26) if growth is None else growth
        check_counts(growth=growth)
        super().__init__(group, in_channels, out_channels, attention, growth, vector_inputs)
        make = partial(_convolution, group, attention=attention, hidden=hidden, **_DEEP)
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
        self.norm = _batch_norm(width)
        self.head = make(width, out_channels, 1, spatial_size=3)

    def logits(self, field: Tensor) -> Tensor:
        """Return means over positions and frames of the last convolution."""
        return cast(Tensor, self.head(torch.relu(self.norm(field)))).flatten(2).mean(dim=2)


def _convolution(
    *sizes: Any,
    attention: AttentionKind,
    lifting: bool = False,
    pad: int = 0,
    init_scale: float = 1.0,
    strided: bool = False,
    hidden: int = 1,
    **spatial: Any,
) -> nn.Module:
    """Return a lifting or group convolution with a kind of attention; sizes that it does not have are ignored."""
    group, in_channels, *_ = sizes
    options: Any = {"pad": pad, "init_scale": init_scale, "stride": 1 + strided, "inexact": "allow"}
    spatial["hidden"] = in_channels if lifting else hidden
    if attention in ("full", "channel", "spatial"):
        attentive: Any = GridAttentiveLifting if lifting else GridAttentiveConvolution
        return cast(nn.Module, attentive(*sizes, attention=attention, **spatial, **options))
    plain: Any = (GridLiftingConvolution if lifting else GridGroupConvolution)(*sizes, **options)
    if attention == "none":
        return plain
    gate: Any = GridPoseAttention if attention == "pose" else partial(GridInputAttention, **spatial)
    gated = gate(group, in_channels, lifting=lifting, init_scale=init_scale)
    return nn.Sequential(OrderedDict(gate=gated, convolution=plain))


def _width_for(group: FiniteGroup, planar: int) -> int:
    """Return planar / sqrt(|H|), the channels per frame with about as many parameters as the planar network."""
    return max(1, round(planar / group.order**0.5))
