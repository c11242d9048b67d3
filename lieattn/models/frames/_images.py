"""A transformer on images as sets of points, with pooling between its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_dropout, check_length
from lieattn._core.contexts import transformed, without_autocast
from lieattn.geometry import (
    AllPairs,
    Coarse,
    Given,
    LiftedGraph,
    Neighborhood,
    PointClouds,
    coarsen,
    lift,
    lift_rasters,
    scaled,
)
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import PointInputs, VectorEmbedding, VectorInputs, features, in_precision_of_weights
from lieattn.models._base.lifted import LiftedNetwork, without_lattice
from lieattn.models._base.network import GroupField, OutputKind, PointOutputs
from lieattn.models._base.symmetry import JUMPS_OF_POOLINGS, Symmetry, jumps_of_neighbors, of_squares
from lieattn.models._base.tied import tied_repr
from lieattn.models.frames._framewise import FramewiseHead
from lieattn.nn import FieldBatchNorm, FramewiseBlock, GroupConvolution, GroupLinear, Pooling
from lieattn.nn.relative import BumpKernel, RotaryPhases
from lieattn.ops import RelativeTerms

_SHARE = 0.25  # of the points that a pooling of a cloud without raster keeps
_GAIN = 5.0  # of kernels, because means over some 25 neighbors are smaller than values by this factor


@dataclass(frozen=True)
class ImageOptions:
    """Options of :class:`ImageTransformer`.

    Attributes
    ----------
    mlp_ratio, dropout
        Ratio of the hidden channels of a block to its channels; dropout probability after both branches of a block, and
        for the attention weights.
    convolution
        ``"full"``, or ``"separable"``: a depthwise convolution, then a group-tied network with one hidden layer, at a
        smaller cost.
    reduction
        Reduction over the cells of a pooling, ``"max"`` or ``"mean"``.
    window
        Neighborhood of the attention, in units of the input points; None for the whole set, as one dense product.
    length
        Length, in units of the input points, over which rotary phases initially change by about one radian; twice the
        distance of the points of the last stage of a raster, if absent.
    """

    mlp_ratio: int = 2
    dropout: float = 0.0
    convolution: Literal["full", "separable"] = "full"
    reduction: Literal["max", "mean"] = "max"
    window: Neighborhood | None = None
    length: float | None = None

    def __post_init__(self) -> None:
        check_arguments(ImageOptions, vars(self))
        check_counts(mlp_ratio=self.mlp_ratio)
        check_dropout("dropout", self.dropout)
        if self.length is not None:
            check_length("length", self.length)


@dataclass(frozen=True, eq=False)
class ImageGeometry:
    """Geometry of a forward pass of an :class:`ImageTransformer`.

    Attributes
    ----------
    stages
        Graph of each stage with the neighborhoods of the convolutions.
    pools
        Cells of the poolings between the stages.
    whole, positions
        Graph of the last stage with the neighborhoods of the attention, and positions ``[points, fiber, dim]`` in the
        frames.
    """

    stages: tuple[LiftedGraph, ...]
    pools: tuple[Coarse, ...]
    whole: LiftedGraph
    positions: Tensor


class ImageTransformer(LiftedNetwork):
    """A vision transformer on sets of pixels, equivariant to R^d ⋊ H: convolutions near, attention far.

    A lifting convolution maps the points to a field ``[points, fiber, channels]``. The blocks of each stage are group
    convolutions over the neighborhood, with :class:`lieattn.nn.relative.BumpKernel`, and a pooling of the set follows
    all stages but the last. In the last stage, after each convolution each frame attends to the whole set, with rotary
    encodings, as in :class:`FramewiseTransformer`. Invariant outputs read the maximum over the frames.

    **Cost.** Convolutions of images whose pixels are on a lattice are dense ones on their raster, see
    :func:`lieattn.geometry.lift_rasters`. Other sets have lists of neighbors, with the same result to rounding.

    **Sets.** Images can differ in size, lack pixels or have any other points, and the group can be any finite
    orthogonal group of the plane (C_n, D_n), of space (T, O, I, for volumes) or of other dimensions. Images, which have
    ``grid``, or ``raster`` and ``pixel`` if they lack pixels (see :func:`lieattn.geometry.point_clouds`), are pooled by
    cells of 2 x 2 (x 2) pixels, other points by :func:`lieattn.geometry.coarsen`, whose points are further apart. A
    network that was trained with one of them is not meant for the other.

    **Equivariance.** When R^d ⋊ H acts on the coordinates of the points, outputs are invariant, exactly for every H if
    neighborhoods are balls. Images that are resampled on their raster are turned exactly by quarter turns and
    reflections only.

    Parameters
    ----------
    group
        H, such as ``cyclic(8)``.
    in_channels, out_channels
        Number of features ``data.x`` of the points, or an object that computes features, see
        :class:`lieattn.models.CloudInputs`; number of outputs.
    neighborhood
        Neighbors of the convolutions in the first stage. It grows with the distances after each pooling.
    channels
        Channels per frame: one number, or one for each stage.
    blocks
        Number of blocks of each stage, which have a convolution each, and in the last stage also attention. The
        poolings are between the stages.
    heads
        Heads of the attention in each frame; twice their number must divide the channels of the last stage.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the lifted field.
    kind
        ``"invariant"`` numbers or ``"vector"`` outputs, see :class:`FramewiseTransformer`.
    pool
        ``"mean"``, ``"sum"`` or ``"max"`` over the points of the last stage, or ``"none"`` for outputs at all points
        (segmentation): the field is then spread from each stage to the one before and added to the field there.
    options
        :class:`ImageOptions`.

    Raises
    ------
    ValueError
        If the group does not preserve distances, or numbers do not fit.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import Radius, pixel_positions
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import ImageTransformer
    >>> network = ImageTransformer(cyclic(8), 1, 10, neighborhood=Radius(2.3), channels=4, blocks=(0, 1))
    >>> network(Data(x=torch.randn(64, 1), pos=pixel_positions(8, 8), grid=torch.tensor([[8, 8]]))).shape
    torch.Size([1, 10])
    """

    group: FiniteGroup

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: PointInputs = 1,
        out_channels: int = 10,
        *,
        neighborhood: Neighborhood,
        channels: int | Sequence[int] = 16,
        blocks: Sequence[int] = (0, 2, 3),
        heads: int = 2,
        vector_inputs: VectorInputs = (),
        kind: OutputKind = "invariant",
        pool: Pooling = "mean",
        options: ImageOptions | None = None,
    ) -> None:
        check_arguments(ImageTransformer.__init__, locals())
        super().__init__(group, in_channels, neighborhood, None, vector_inputs)
        self.options = options = options or ImageOptions()
        if not group.is_orthogonal:
            raise ValueError(f"group: expected orthogonal matrices, since poolings compare distances, got {group.name}")
        widths = [channels] * len(blocks) if isinstance(channels, int) else list(channels)
        if not blocks:
            raise ValueError("blocks: expected a number of blocks for at least one stage, got ()")
        if len(widths) != len(blocks):
            raise ValueError(f"channels: expected one number for each of {len(blocks)} stages, got {widths}")
        for width in widths:
            check_counts(out_channels=out_channels, channels=width, heads=heads)
        check_counts(0, **{f"blocks[{stage}]": count for stage, count in enumerate(blocks)})
        self.group, self.has_kinks = group, kind == "invariant" or options.reduction == "max"
        self._recent: Recent[ImageGeometry] = Recent()
        self.vectors = VectorEmbedding(vector_inputs, group.dim, widths[0])
        kernel = BumpKernel(group, self.in_channels, widths[0], lifting=True)
        self.lifting = GroupConvolution(kernel, measure=_GAIN, reduction="mean")
        self.stem = FieldBatchNorm(widths[0])
        sizes: dict[str, Any] = {"mlp_ratio": options.mlp_ratio, "dropout": options.dropout}
        stages: list[list[nn.Module]] = [
            [_block(group, width, options) for _ in range(count)] for width, count in zip(widths, blocks, strict=True)
        ]
        attention = [FramewiseBlock(group, widths[-1], heads=heads, **sizes) for _ in stages[-1]]
        stages[-1] = [part for pair in zip(stages[-1], attention, strict=True) for part in pair]
        self.stages = nn.ModuleList(map(nn.ModuleList, stages))
        self.widening = nn.ModuleList(GroupLinear(group, small, large) for small, large in pairwise(widths))
        spreads = pairwise(widths) if pool == "none" else ()
        self.narrowing = nn.ModuleList(GroupLinear(group, large, small) for small, large in spreads)
        self.phases = RotaryPhases(group.dim, heads, widths[-1] // heads)
        self.length = options.length or 2.0 ** len(blocks)
        width = widths[0] if pool == "none" else widths[-1]
        self.norm = FieldBatchNorm(width)
        self.head = FramewiseHead(width, out_channels, group.dim, PointOutputs(kind, pool), group, "max")
        self.tied = {"window": tied_repr(options.window), "reduction": options.reduction}
        self.tied["length"] = repr(float(self.length))

    @property
    def symmetry(self) -> Symmetry:
        return of_squares(super().symmetry, self.options.window)

    @property
    def jumps(self) -> tuple[str, ...]:
        far = jumps_of_neighbors(self.options.window)
        return (*super().jumps, *far, *((JUMPS_OF_POOLINGS,) if len(self.widening) else ()))

    @in_precision_of_weights
    def geometry(self, data: Any) -> ImageGeometry:
        """Lift the points of all stages; ValueError is raised for periodic clouds.

        The last two geometries of batches of images of one size are kept, and used again for equal positions.
        """
        clouds: PointClouds = without_lattice(data, "an ImageTransformer")
        with without_autocast(clouds.device):
            recorded = clouds.pos.requires_grad or transformed() or torch.compiler.is_compiling()
            of_edges = isinstance(self.neighborhood, Given) or isinstance(self.options.window, Given)
            if clouds.grid is None or recorded or of_edges or clouds.sides is None:
                return self._geometry(clouds)
            return self._recent.get(
                (clouds.pos, clouds.batch, clouds.grid),
                lambda own: self._geometry(replace(clouds, pos=own[0], batch=own[1], grid=own[2])),
                self.neighborhood,  # weights and energies can make it smooth
            )

    def _geometry(self, clouds: PointClouds) -> ImageGeometry:
        near, pools = self.neighborhood, []
        stages = [lift_rasters(clouds, self.frames, near, self.space)]
        for _ in self.widening:
            points = clouds.grid is None and clouds.raster is None
            pools.append(coarsen(clouds, _SHARE) if points else Coarse.of_rasters(clouds))
            clouds, near = pools[-1].clouds, scaled(near, 2.0)
            stages.append(lift_rasters(clouds, self.frames, near, self.space))
        whole = lift(clouds, self.frames, self.options.window or AllPairs(), self.space, length=self.length)
        return ImageGeometry(tuple(stages), tuple(pools), whole, whole.frame_positions())

    @in_precision_of_weights
    def field(self, data: Any, geometry: ImageGeometry | None = None) -> GroupField:
        """Return the field of the last stage, or of all points with ``pool="none"``, and its graph."""
        geometry = self.geometry(data) if geometry is None else geometry
        first, last = geometry.stages[0], geometry.stages[-1]
        x = self.lifting(features(data, self.inputs, first), first)
        directed = self.vectors(data, first)
        x = F.gelu(self.stem(x if directed is None else x + directed))
        fields = []
        stages: list[Any] = list(self.stages)
        for blocks, graph_near, cells, widen in zip(
            stages[:-1], geometry.stages, geometry.pools, list(self.widening), strict=False
        ):
            for block in blocks:
                x = self._through(block, x, graph_near)
            fields.append(x)
            x = widen(cells.pool(x, self.options.reduction))
        rotary = RelativeTerms(rotary=self.phases(geometry.positions), rotary_values=True)
        whole = geometry.whole.carrying(terms=rotary)
        for block in stages[-1]:
            x = self._through(block, x, whole if isinstance(block, FramewiseBlock) else last)
        if not self.narrowing:
            return GroupField(self.norm(x), whole)
        for finer, cells, narrow in zip(fields[::-1], geometry.pools[::-1], list(self.narrowing)[::-1], strict=True):
            x = finer + cells.spread(narrow(x))
        return GroupField(self.norm(x), first)


def _block(group: FiniteGroup, channels: int, options: ImageOptions) -> nn.Module:
    if options.convolution == "full":
        return _ConvolutionBlock(group, channels, options.dropout)
    return _SeparableBlock(group, channels, options.mlp_ratio, options.dropout)


class _ConvolutionBlock(nn.Module):
    """Residual block: normalization, activation, and a group convolution over the neighborhood."""

    def __init__(self, group: FiniteGroup, channels: int, dropout: float) -> None:
        super().__init__()
        self.norm = FieldBatchNorm(channels)
        self.convolution = GroupConvolution(BumpKernel(group, channels, channels), measure=_GAIN, reduction="mean")
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        return x + self.dropout(self.convolution(F.gelu(self.norm(x)), graph))


class _SeparableBlock(nn.Module):
    """Residual block: a depthwise convolution over the neighborhood, then a group-tied network with a hidden layer."""

    def __init__(self, group: FiniteGroup, channels: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = FieldBatchNorm(channels), FieldBatchNorm(channels)
        kernel = BumpKernel(group, channels, channels, depthwise=True)
        self.convolution = GroupConvolution(kernel, measure=_GAIN, reduction="mean")
        self.linear1 = GroupLinear(group, channels, mlp_ratio * channels)
        self.linear2 = GroupLinear(group, mlp_ratio * channels, channels)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        y = self.norm2(self.convolution(self.norm1(x), graph))
        return x + self.dropout(self.linear2(F.gelu(self.linear1(y))))


T = TypeVar("T")


class Recent(Generic[T]):
    """The last values of a function of tensors, for inputs that often repeat. Copies and pickles of it are empty."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self._known: tuple[tuple[tuple[Tensor, ...], bool, object, T], ...] = ()

    def __reduce__(self) -> tuple[type[Recent[T]], tuple[int]]:
        return type(self), (self.most,)

    def get(self, inputs: Sequence[Tensor], compute: Callable[[tuple[Tensor, ...]], T], of: object = None) -> T:
        """Return ``compute(inputs)``, or the same value as before if all inputs are equal, and ``of`` is the same.

        The function is called with copies of the inputs, so that later changes of these do not reach its values. Values
        of inference mode, which training cannot use, are kept apart.
        """
        mode = torch.is_inference_mode_enabled()
        for known, of_mode, before, value in self._known:
            if of_mode == mode and before is of and all(map(_equal, known, inputs)):
                return value
        copies = tuple(tensor.detach().clone() for tensor in inputs)
        value = compute(copies)
        self._known = ((copies, mode, of, value), *self._known)[: self.most]
        return value


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
