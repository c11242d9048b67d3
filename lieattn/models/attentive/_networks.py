"""Attentive group convolutional networks."""

from __future__ import annotations

import abc
import math
from collections import OrderedDict
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_choice, check_counts, check_dropout
from lieattn.geometry import FiniteFrames, LiftedGraph, Neighborhood, Raster, lift, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import (
    CloudInputs,
    PointInputs,
    VectorEmbedding,
    VectorInputs,
    features,
    in_precision_of_weights,
    plus_vectors,
)
from lieattn.models._base.lifted import LiftedNetwork
from lieattn.models._base.network import Downsampling, GroupField, ImageNetwork
from lieattn.models._base.symmetry import Symmetry, decided, jumps_of_neighbors, of_squares
from lieattn.models._base.tied import tied_repr
from lieattn.nn import (
    AttentiveGroupConvolution,
    FieldBatchNorm,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridLiftingConvolution,
    GridPoseAttention,
    GridSpatialPool,
    GroupConvolution,
    InvariantHead,
    PointBatchNorm,
    Pooling,
    from_grid,
)
from lieattn.nn.relative import NetworkKernel
from lieattn.ops import AttentionMaps

AttentionKind = Literal["none", "full", "channel", "spatial", "input", "pose"]
"""Attention of the convolutions of a network, see :class:`AttentiveCNN`."""

_ATTENTIVE = (
    AttentiveGroupConvolution,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridInputAttention,
    GridPoseAttention,
)
_LAST_SIDE = 4  # side of the last kernel of the p4-CNN
_ALL_CNN_WIDTHS = {1: 96, 4: 48, 8: 32}  # widths of the paper; that of p4m is smaller than planar / sqrt(|H|)
_ALL_CNN_SCALE = 0.035
DEEP: Any = {"init_scale": math.sqrt(2)}
batch_norm = partial(FieldBatchNorm, eps=2e-5, axis=1)  # the authors' ε


class ShowsAttention(nn.Module):
    """A network with attentive layers."""

    def attention_maps(self, data: Any) -> dict[str, AttentionMaps]:
        """Return the attention maps of every attentive layer by its name; call ``eval()`` first to disable dropout.

        The maps are the residual attention α⁻: responses are multiplied by 1 - α⁻.
        """
        found: dict[str, AttentionMaps] = {}

        def observe(name: str, layer: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            found[name] = layer.attend(*inputs, return_maps=True)[1]

        with ExitStack() as hooks:
            for name, module in self.named_modules():
                if isinstance(module, _ATTENTIVE):
                    hooks.enter_context(module.register_forward_hook(partial(observe, name)))
            self(data)
        return found


class AttentiveNetwork(ShowsAttention, ImageNetwork):
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
        vector_inputs: VectorInputs = (),
    ) -> None:
        super().__init__(group, in_channels, out_channels, stem_channels, vector_inputs)
        check_choice("attention", attention, AttentionKind)
        self.attention: AttentionKind = attention

    def with_head(self, head: nn.Module) -> Self:
        """Return this network with another head in place of its last layers; all other weights are shared."""
        other = super().with_head(head)
        for name in self.own_readout:
            other._modules.pop(name, None)  # it may already have another head
        return other

    @in_precision_of_weights
    def forward(self, data: Any, geometry: Any = None) -> Tensor:
        """Return logits ``[images, out_channels]``, or outputs of another head; arguments as in :meth:`field`."""
        if self._has_other_head:
            return super().forward(data, geometry)
        return self.logits(self.fields(data, self.embedded_vectors(data))[-1])

    def last_field(self, images: Any, vectors: Tensor | None) -> tuple[Tensor, Raster]:
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
    def logits(self, field: Float[Tensor, "images channels order *sides"]) -> Float[Tensor, "images outputs"]:
        """Return logits ``[images, out_channels]`` of the last field."""


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
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the first responses.
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
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AttentiveCNN.__init__, locals())
        check_counts(channels=channels, reduction=reduction)
        check_dropout("dropout", dropout)
        super().__init__(group, in_channels, out_channels, attention, channels, vector_inputs)
        hidden = max(1, channels // reduction)
        make = partial(convolution, group, attention=attention, hidden=hidden, spatial_size=spatial_size)
        layers = [make(self.in_channels, channels, 3, lifting=True, spatial_dilation=4 if attention == "input" else 1)]
        for behind, size in [*[(channels, 3)] * 5, (out_channels, _LAST_SIDE)]:
            layers.append(make(channels, behind, size))
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(batch_norm(channels) for _ in range(6))
        self.pool, self.dropout = GridSpatialPool(2, "max", dim=group.dim), nn.Dropout(dropout)
        if group.order == 1:
            # In the authors' code, planar kernels start normal with standard deviation 1 / sqrt(fan in).
            for module in self.modules():
                if isinstance(module, GridLiftingConvolution | GridGroupConvolution):
                    nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)

    def with_head(self, head: nn.Module) -> Self:
        """Return this network with another head in place of its last layer; all other weights are shared."""
        other = super().with_head(head)
        other.layers = self.layers[: len(self.norms)]
        return other

    def fields(self, images: Any, vectors: Tensor | None = None) -> list[Tensor]:
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
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AttentiveAllCNN.__init__, locals())
        width = _ALL_CNN_WIDTHS.get(group.order, width_for(group, 96)) if channels is None else channels
        check_counts(channels=width, reduction=reduction)
        check_dropout("dropout", dropout)
        check_dropout("input_dropout", input_dropout)
        super().__init__(group, in_channels, out_channels, attention, width, vector_inputs)
        widths = [self.in_channels, *[width] * 3, *[2 * width] * 5, out_channels]
        make = partial(convolution, group, attention=attention, init_scale=_ALL_CNN_SCALE)
        self.layers = nn.ModuleList([make(self.in_channels, width, 3, lifting=True, pad=1)])
        self.downsampling = downsampling
        for number, ((before, behind), size) in enumerate(zip(pairwise(widths[1:]), [3] * 6 + [1] * 2, strict=True), 1):
            options: Any = {"pad": size // 2, "strided": downsampling == "strided" and number in (2, 5)}
            self.layers.append(make(before, behind, size, hidden=max(1, before // reduction), **options))
        self.norms = nn.ModuleList(batch_norm(behind) for behind in widths[1:])
        self.pool = GridSpatialPool(2, "max", dim=group.dim) if downsampling == "pooled" else nn.Identity()
        self.dropout, self.input_dropout = nn.Dropout(dropout), nn.Dropout(input_dropout)

    def fields(self, images: Any, vectors: Tensor | None = None) -> list[Tensor]:
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


def convolution(
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


def width_for(group: FiniteGroup, planar: int) -> int:
    """Return planar / sqrt(|H|), the channels per frame with about as many parameters as the planar network."""
    return max(1, round(planar / group.order**0.5))


class AttentiveNet(ShowsAttention, LiftedNetwork):
    """Attentive group convolutional network on any point clouds and any finite group (Romero et al. 2020).

    A lifting convolution and residual blocks, x + relu(norm(convolution(x))), whose kernels are networks of the
    relative element; then a linear map after relu, pooled over frames and points.

    **Equivariance.** Outputs are invariant to translations and to H acting on the points, exactly up to rounding, if
    the neighborhoods rotate with the points. With ``FiniteFrames(H, PrincipalFrames())``, to all rotations.

    Parameters
    ----------
    frames
        A finite group H, or ``FiniteFrames(H, ...)``.
    in_channels, out_channels
        Number of input features, or an object that computes them (see :class:`lieattn.models.CloudInputs`); number of
        outputs.
    neighborhood, local
        Neighbors that the spatial attention sees, and those that the kernels see; the same if ``local`` is absent.
    channels, layers
        Channels per frame, and number of convolutions, with the lifting.
    attention
        Attention of every convolution, as for :class:`AttentiveCNN`; ``"none"`` for group convolutions.
    hidden
        Hidden units of the kernels.
    dropout, pool
        Dropout probability after each block; pooling over the points, ``"mean"``, ``"sum"``, ``"max"`` or ``"none"``.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the lifted field.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import Radius
    >>> from lieattn.groups import cyclic
    >>> network = AttentiveNet(cyclic(8), 1, 3, neighborhood=Radius(1.5), channels=4)
    >>> network(Data(x=torch.randn(9, 1), pos=torch.randn(9, 2))).shape
    torch.Size([1, 3])
    """

    has_kinks = True  # because of relu and maxima

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames,
        in_channels: PointInputs = 1,
        out_channels: int = 10,
        *,
        neighborhood: Neighborhood,
        local: Neighborhood | None = None,
        channels: int = 12,
        layers: int = 3,
        attention: AttentionKind = "full",
        hidden: int = 12,
        dropout: float = 0.0,
        pool: Pooling = "mean",
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AttentiveNet.__init__, locals())
        super().__init__(frames, in_channels, neighborhood, None, vector_inputs)
        check_counts(out_channels=out_channels, channels=channels, layers=layers, hidden=hidden)
        check_dropout("dropout", dropout)
        self.group = frames if isinstance(frames, FiniteGroup) else frames.group
        self.local, self.attention, self.dropout = local, attention, dropout
        self.lifting = self._convolution(self.in_channels, channels, hidden, lifting=True)
        self.blocks = nn.ModuleList(self._convolution(channels, channels, hidden) for _ in range(layers - 1))
        self.norms = nn.ModuleList(PointBatchNorm(channels) for _ in range(layers))
        self.vectors = VectorEmbedding(vector_inputs, self.group.dim, channels)
        self.head = InvariantHead(channels, out_channels, readout="point_first", pool=pool, activation="relu")

    def _convolution(
        self, inputs: int, outputs: int, hidden: int, *, lifting: bool = False
    ) -> GroupConvolution | AttentiveGroupConvolution:
        kernel = NetworkKernel(self.group, inputs, outputs, hidden=hidden, lifting=lifting)
        if self.attention == "none":
            return GroupConvolution(kernel, reduction="mean")
        wide = None
        if self.attention in ("full", "spatial", "input"):
            maps = 1 if self.attention == "input" else outputs
            wide = NetworkKernel(self.group, 2, maps, hidden=hidden, lifting=lifting)
        return AttentiveGroupConvolution(kernel, attention=self.attention, spatial=wide, reduction="mean")

    @property
    def symmetry(self) -> Symmetry:
        return of_squares(super().symmetry, self.local)

    @property
    def jumps(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().jumps, *jumps_of_neighbors(self.local))))

    def tied_to(self) -> dict[str, str]:
        return {**super().tied_to(), "local": tied_repr(decided(self.local or self.neighborhood))}

    @in_precision_of_weights
    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the clouds, with a local graph if the kernels see other neighbors than the attention."""
        clouds = point_clouds(data)
        seen = self.seen_vectors(data, clouds)
        graph = lift(clouds, self.frames, self.neighborhood, self.space, vectors=seen)
        if self.local is not None:
            graph = graph.carrying(
                local=lift(clouds, self.frames, self.local, self.space, length=graph.length, vectors=seen)
            )
        for part in (graph, graph.local):
            if part is not None:
                _ = part.relative.row, part.relative.positions  # evaluated by the workers of a loader
        return graph

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        graph = self.geometry(data) if geometry is None else geometry
        x = self._through(self.lifting, features(data, self.inputs, graph), graph)
        vectors = self.vectors(data, graph)
        x = self._after(self.norms[0](x if vectors is None else x + vectors))
        for block, norm in zip(self.blocks, list(self.norms)[1:], strict=True):
            x = x + self._after(norm(self._through(block, x, graph)))
        return GroupField(x, graph)

    def _after(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(x), self.dropout, self.training)
