"""Residual networks with Affine Self Convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts
from lieattn.geometry import FiniteFrames, LiftedGraph, Neighborhood, PointClouds, Raster, lift, point_clouds
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
from lieattn.nn import (
    AffineSelfConvolution,
    FieldBatchNorm,
    GridGroupConvolution,
    GridLiftingConvolution,
    GroupConvolution,
    GroupLinear,
    GroupSqueezeExcite,
    InvariantHead,
    Pooling,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
    from_grid,
)
from lieattn.nn.relative import FourierFeatures, NetworkKernel, RelativePositionTable

Layer = Literal["affine", "simple", "stand-alone", "convolution"]
ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "affine": AffineSelfConvolution,
    "simple": SimpleAffineSelfConvolution,
    "stand-alone": StandAloneSelfAttention,
}
EXPANSION = 4  # outer channels of a block for each inner one
_STAGES, _HEADS = 3, 8
_MOST_GRAPHS = 4  # number of graphs that a block caches


class PixelConvolution(nn.Module):
    """Group convolution with 3 x 3 kernels and zero border, of a field on the pixels of a raster."""

    def __init__(self, group: FiniteGroup, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        options: dict[str, Any] = {"stride": stride, "pad": 1, "measure": 1.0, "inexact": "allow"}
        self.convolution = GridGroupConvolution(group, channels, channels, 3, **options)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], raster: Raster
    ) -> Float[Tensor, "after fiber channels"]:
        """Map a field to another one."""
        return from_grid(self.convolution(raster.unflatten(x).movedim((-1, -2), (1, 2))))


class _RasterGraphs:
    """Cache of lifted rasters; the keys are plain numbers, as torch.compile requires."""

    def __init__(self, group: FiniteGroup, size: int) -> None:
        self.group, self.size = group, size
        self.known: dict[tuple[object, ...], LiftedGraph] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "size": self.size, "known": {}}

    def __call__(self, raster: Raster, device: torch.device) -> LiftedGraph:
        """Return the raster lifted to the group, on a device."""
        key = (raster.images, *raster.sides, device.type, device.index)
        graph = self.known.get(key)
        if graph is None:
            if len(self.known) >= _MOST_GRAPHS:
                self.known.clear()
            graph = self.known[key] = raster.lift(self.group, self.size, device)
        return graph


class MeanReadout(nn.Linear):
    """Linear map of the mean over frames and pixels."""

    def forward(  # type: ignore[override]
        self, input: Float[Tensor, "points fiber channels"], graph: PointClouds
    ) -> Float[Tensor, "images outputs"]:
        """Map a field to an output for each image."""
        return super().forward(graph.mean(input.mean(dim=1)))


class BottleneckBlock(nn.Module):
    """Bottleneck residual block around a spatial layer (Affine Self Convolution, section 5).

    The block computes

        h = relu(norm(W x)),  h = layer(h),  h = norm(W relu(norm(h))),  h = squeeze_excite(h),
        out = relu(h + shortcut(x)),

    where the norms are batch normalizations and the W are group-tied linear maps without bias. Downsampling is the mean
    of 2 x 2 pixels after the layer.

    **Equivariance.** That of the layer, with pooled downsampling of even sides.

    Parameters
    ----------
    group, in_channels, width, out_channels
        H; channels of the input, of the layer, and of the output.
    layer, size
        ``layer(x, graph) -> x`` with ``width`` channels, and the side of its neighborhoods in pixels, for rasters.
    downsample, strided_layer
        Whether the output has half the rows and columns, and whether the layer itself halves them.
    shortcut
        Downsampling of x: ``"pooled"`` or ``"strided"``, see :class:`AffineSelfConvNet`.
    projection
        Whether the shortcut has a linear map and a normalization; otherwise input and output must have the same number
        of channels (or ValueError is raised).
    reduction
        Reduction of the squeeze-and-excite; None for a block without it.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        width: int,
        out_channels: int,
        layer: nn.Module,
        *,
        size: int = 1,
        downsample: bool = False,
        strided_layer: bool = False,
        shortcut: Downsampling = "pooled",
        projection: bool = True,
        reduction: int | None = None,
    ) -> None:
        check_arguments(BottleneckBlock.__init__, locals())
        super().__init__()
        if not projection and in_channels != out_channels:
            raise ValueError(
                f"projection: expected True, since there are {in_channels} input and {out_channels} output channels"
            )
        self.group, self.size, self.graphs = group, size, _RasterGraphs(group, size)
        self.downsample, self.strided_layer, self.shortcut = downsample, strided_layer, shortcut
        self.linear1 = GroupLinear(group, in_channels, width, bias=False)
        self.norm1 = FieldBatchNorm(width)
        self.layer = layer
        self.norm2 = FieldBatchNorm(width)
        self.linear2 = GroupLinear(group, width, out_channels, bias=False)
        self.norm3 = FieldBatchNorm(out_channels)
        self.squeeze_excite = None if reduction is None else GroupSqueezeExcite(out_channels, reduction)
        self.shortcut_linear = GroupLinear(group, in_channels, out_channels, bias=False) if projection else None
        self.shortcut_norm = FieldBatchNorm(out_channels) if projection else None

    def forward(
        self, x: Float[Tensor, "points order channels"], raster: Raster | LiftedGraph
    ) -> tuple[Float[Tensor, "after order outputs"], Raster | LiftedGraph]:
        """Map a field ``[points, order, in_channels]`` on a raster, or on a graph without downsampling, to both."""
        if self.downsample and not isinstance(raster, Raster):
            raise ValueError(f"raster: expected a Raster, whose sides downsampling halves, got {type(raster).__name__}")
        after = raster.halved() if self.downsample and isinstance(raster, Raster) else raster
        h = F.relu(self.norm1(self.linear1(x)))
        h = self.layer(h, raster if isinstance(self.layer, PixelConvolution) else self._graph(raster, x))
        if self.downsample and isinstance(raster, Raster):
            h = h if self.strided_layer else _pooled(h, raster)
            x = _pooled(x, raster) if self.shortcut == "pooled" else raster.unflatten(x)[:, ::2, ::2].flatten(0, 2)
        h = self.norm3(self.linear2(F.relu(self.norm2(h))))
        if self.squeeze_excite is not None:
            h = self.squeeze_excite(h, self._graph(after, x))
        if self.shortcut_linear is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut_linear(x))
        return F.relu(h + x), after

    def _graph(self, raster: Raster | LiftedGraph, x: Tensor) -> LiftedGraph:
        return self.graphs(raster, x.device) if isinstance(raster, Raster) else raster


class AffineSelfConvNet(ImageNetwork):
    """Bottleneck residual network with Affine Self Convolution (Diaconu, Worrall 2019): class scores of images.

    The network has 9n + 2 layers: a lifting convolution of 3 x 3 pixels with batch normalization and relu, three stages
    of n bottleneck blocks with c, 2c, 4c inner channels and four times as many outer channels, a mean over frames and
    pixels, and a linear map. The first blocks of the second and third stage halve the rows and columns.

    **Equivariance.** The logits are invariant to the quarter turns and reflections of H. This is exact with
    ``downsampling="pooled"``, where convolution and attention work at full resolution before the mean over 2 x 2
    pixels. Sides must be multiples of 4.

    Parameters
    ----------
    group
        H: ``trivial(2)``, ``cyclic(4)``, ``dihedral(4)`` or another planar group that preserves the lattice of pixels.
    in_channels, out_channels
        Channels of the images, and number of logits.
    layer
        ``"affine"`` or ``"simple"`` (Affine Self Convolutions), ``"stand-alone"`` (the self-attention with which the
        paper compares them) or ``"convolution"`` (3 x 3).
    blocks, channels
        Number n of blocks of a stage, 3 for ResNet29; channels c per frame, by default as in the paper: 16 for the
        trivial group and 8 for others.
    window
        Neighborhood of the attention; 5 x 5 pixels with a border of zeros if absent. ValueError is raised unless it
        contains all pixels of a square. A network with ``"convolution"`` has no attention, so ValueError is raised if
        it gets a window, ``heads`` or ``scale``.
    heads
        Number of attention heads. The default is the largest divisor of c that is at most 8, and for stand-alone
        attention also at most c / 2, so that each head has a channel for both coordinates.
    scale
        Factor of the scores; 1 / channels of each layer if absent.
    squeeze_excite
        Whether each block ends with a group squeeze-and-excite, with reduction 16 for the trivial group and 4 for
        others.
    downsampling
        ``"pooled"``, the mean of 2 x 2 pixels; or ``"strided"``, every second pixel in the shortcut and convolutions of
        stride 2, as in other residual networks. On even sides ``"strided"`` breaks quarter turns and reflections.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the first field.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs = 3,
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
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AffineSelfConvNet.__init__, locals())
        if group.dim != 2:
            raise ValueError(f"group: expected a planar group such as cyclic(4), got {group.name}")
        planar = group.order == 1
        channels = (16 if planar else 8) if channels is None else channels
        check_counts(channels=channels, blocks=blocks)
        if layer == "convolution":
            _check_absent(window=window, scale=scale)
        super().__init__(group, in_channels, out_channels, channels, vector_inputs)
        heads = heads_for(layer, channels, 2, heads)
        self.downsampling, self.scale = downsampling, scale
        self.tied = {"scale": "1 / channels" if scale is None else f"{scale:g}"}
        window = RelativePositionTable.square(5, border="zero") if window is None else window
        # Side in pixels of the square that holds the window.
        side = 2 * round(max(abs(coordinate) for offset in window.offsets for coordinate in offset)) + 1
        options: dict[str, Any] = {"size": 3 if layer == "convolution" else side, "shortcut": downsampling}
        options["reduction"] = reduction_of(group) if squeeze_excite else None
        self.stem = GridLiftingConvolution(group, self.in_channels, channels, 3, pad=1)
        self.stem_norm = FieldBatchNorm(channels)
        self.blocks = nn.ModuleList()
        before = channels
        for number in range(_STAGES * blocks):
            inside, first = channels * 2 ** (number // blocks), number % blocks == 0
            after, halves = EXPANSION * inside, first and number > 0
            strided = halves and layer == "convolution" and downsampling == "strided"
            if layer == "convolution":
                middle: nn.Module = PixelConvolution(group, inside, stride=2 if strided else 1)
            else:
                middle = ATTENTION[layer](group, inside, inside, window, heads=heads, scale=scale)
            options |= {"downsample": halves, "strided_layer": strided, "projection": first}
            self.blocks.append(BottleneckBlock(group, before, inside, after, middle, **options))
            before = after
        if layer != "convolution":
            _check_covers(window, group, side)
        self.graphs = _RasterGraphs(group, 3)
        self.head = MeanReadout(before, out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as in the paper.

        Linear maps and convolutions are normal with variance 2 / fan in (He et al.), where the fan includes frames. psi
        and beta keep their initial N(0, 1). The last normalization of each block has gain 0.
        """
        draw_weights(self)

    @in_precision_of_weights
    def field(self, data: Any, geometry: Any = None) -> GroupField:
        x, raster = self.last_field(data, self.embedded_vectors(data))
        return GroupField(x, self.graphs(raster, x.device))

    def last_field(self, images: Any, vectors: Tensor | None) -> tuple[Tensor, Raster]:
        images = self.images(images)
        raster = Raster(len(images), tuple(images.shape[-2:]))
        x = F.relu(self.stem_norm(from_grid(plus_vectors(self.stem(images), vectors))))
        for block in self.blocks:
            x, raster = self._through(block, x, raster)
        return x, raster


def draw_weights(network: nn.Module) -> None:
    """Draw the weights as in the paper, see :meth:`AffineSelfConvNet.reset_parameters`."""
    for module in network.modules():
        if isinstance(module, GroupLinear):
            order, _, fan = module.weight.shape
            nn.init.normal_(module.weight, std=math.sqrt(2 / (order * fan)))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, GridLiftingConvolution | GridGroupConvolution):
            nn.init.normal_(module.weight, std=math.sqrt(2 / module.weight[0].numel()))
        elif isinstance(module, BottleneckBlock):
            nn.init.zeros_(module.norm3.weight)


def heads_for(layer: Layer, channels: int, dim: int, heads: int | None) -> int:
    """Return the given heads, or the default; ValueError if a convolution has some."""
    if layer == "convolution":
        _check_absent(heads=heads)
    if heads is not None:
        return heads
    most = min(_HEADS, channels // dim) if layer == "stand-alone" else _HEADS
    return max((number for number in range(1, most + 1) if channels % number == 0), default=1)


def reduction_of(group: FiniteGroup) -> int:
    """Return the reduction of the squeeze-and-excite."""
    return 16 if group.order == 1 else 4


def _check_absent(**attention: Any) -> None:
    """Raise ValueError for options of the attention, which a convolution does not have."""
    for name, value in attention.items():
        if value is not None:
            raise ValueError(f"{name}: expected None for layer 'convolution', which has no attention, got {value!r}")


def _check_covers(window: RelativePositionTable, group: FiniteGroup, side: int) -> None:
    """Raise ValueError unless a window, moved by the group, contains all pixels of a square."""
    try:
        window.edges(Raster(1, (side, side)).lift(group, side))
    except ValueError as error:
        square = f"{side} x {side} pixels, as in RelativePositionTable.square({side})"
        raise ValueError(f"window: expected all {square}, got {len(window.offsets)} offsets without some") from error


def _pooled(x: Tensor, raster: Raster) -> Tensor:
    """Return the mean of 2 x 2 pixels: ``[points, *]`` to ``[points / 4, *]``."""
    return raster.unflatten(x).unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean(dim=(2, 4)).flatten(0, 2)


class AffineNet(LiftedNetwork):
    """Bottleneck residual network with Affine Self Convolution (Diaconu, Worrall 2019) on any point clouds.

    A lifting convolution with batch normalization and relu, bottleneck blocks with c inner and 4c outer channels, and
    a linear map after relu, pooled over frames and points. Where :class:`AffineSelfConvNet` has tables of offsets, psi
    and beta are networks of the displacement (:class:`lieattn.nn.relative.FourierFeatures`). Points are not pooled
    between the blocks.

    **Equivariance.** Outputs are invariant to translations and to H acting on the points, exactly up to rounding, if
    the neighborhoods rotate with the points. With ``FiniteFrames(H, PrincipalFrames())``, to all rotations.

    Parameters
    ----------
    frames
        A finite group H, or ``FiniteFrames(H, ...)``.
    in_channels, out_channels
        Number of input features, or an object that computes them (see :class:`lieattn.models.CloudInputs`); number of
        outputs.
    neighborhood
        Neighbors that the lifting and the blocks see.
    layer, squeeze_excite
        Layer of the blocks, and whether they end with a squeeze-and-excite, as for :class:`AffineSelfConvNet`. With
        ``"convolution"`` the kernels are networks of the displacement too.
    blocks, channels
        Number of blocks; inner channels c per frame.
    heads
        Attention heads; as for :class:`AffineSelfConvNet` if absent. With ``"convolution"`` they must be absent
        (otherwise ValueError).
    hidden
        Hidden units of the networks of the displacement.
    pool
        Pooling over the points, ``"mean"``, ``"sum"``, ``"max"`` or ``"none"``.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the lifted field.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import Radius
    >>> from lieattn.groups import octahedral
    >>> network = AffineNet(octahedral(), 1, 3, neighborhood=Radius(1.5), channels=4, blocks=1)
    >>> network(Data(x=torch.randn(9, 1), pos=torch.randn(9, 3))).shape
    torch.Size([1, 3])
    """

    has_kinks = True  # because of relu

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames,
        in_channels: PointInputs = 1,
        out_channels: int = 10,
        *,
        neighborhood: Neighborhood,
        layer: Layer = "affine",
        blocks: int = 3,
        channels: int = 8,
        heads: int | None = None,
        hidden: int = 32,
        squeeze_excite: bool = False,
        pool: Pooling = "mean",
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AffineNet.__init__, locals())
        super().__init__(frames, in_channels, neighborhood, None, vector_inputs)
        check_counts(out_channels=out_channels, blocks=blocks, channels=channels, hidden=hidden)
        self.group = group = frames if isinstance(frames, FiniteGroup) else frames.group
        heads = heads_for(layer, channels, group.dim, heads)
        self.lifting = self._convolution(self.in_channels, channels, hidden, lifting=True)
        self.lifting_norm = FieldBatchNorm(channels)
        self.vectors = VectorEmbedding(vector_inputs, group.dim, channels)
        self.blocks = nn.ModuleList()
        before, after = channels, EXPANSION * channels
        reduction = reduction_of(group) if squeeze_excite else None
        for number in range(blocks):
            if layer == "convolution":
                middle: nn.Module = self._convolution(channels, channels, hidden)
            else:
                middle = ATTENTION[layer](group, channels, channels, FourierFeatures(hidden), heads=heads)
            block = BottleneckBlock(group, before, channels, after, middle, projection=number == 0, reduction=reduction)
            self.blocks.append(block)
            before = after
        self.head = InvariantHead(after, out_channels, readout="point_first", pool=pool, activation="relu")
        draw_weights(self)

    def _convolution(self, inputs: int, outputs: int, hidden: int, *, lifting: bool = False) -> GroupConvolution:
        return GroupConvolution(
            NetworkKernel(self.group, inputs, outputs, hidden=hidden, lifting=lifting), reduction="mean"
        )

    @in_precision_of_weights
    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the clouds."""
        clouds = point_clouds(data)
        graph = lift(clouds, self.frames, self.neighborhood, self.space, vectors=self.seen_vectors(data, clouds))
        _ = graph.relative.row, graph.relative.positions  # evaluated by the workers of a loader
        return graph

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        graph = self.geometry(data) if geometry is None else geometry
        x = self._through(self.lifting, features(data, self.inputs, graph), graph)
        vectors: Tensor | None = self.vectors(data, graph)
        x = F.relu(self.lifting_norm(x if vectors is None else x + vectors))
        for block in self.blocks:
            x, _ = self._through(block, x, graph)
        return GroupField(x, graph)
