"""Options of GSA-Nets."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_dropout, check_length
from lieattn._core.contexts import as_without_autocast
from lieattn.geometry import Coarse, LiftedGraph, PointClouds, crop
from lieattn.groups import FiniteGroup
from lieattn.nn import CloudPool, FiberPool, GridPool, Inexact, Pooling

Order = Literal["points_first", "frames_first"]
Activation = Literal["silu", "relu", "gelu"]
Init = Literal["balanced", "paper"]
Positions = Literal["relative", "absolute", "none"]
FiberPattern = Literal["joint", "query_sum"]
_USUAL = "g⁻¹ m"


@dataclass(frozen=True)
class Stages:
    """Stages of a :class:`GSANet`. Pixels, or points of any clouds, are pooled between the stages.

    Attributes
    ----------
    blocks
        Number of blocks of each stage.
    expansions
        Factor by which each stage increases the channels; all 1 if absent.
    crops
        For each block of all stages, the number of pixels cut off at each side after the attention; 0 if absent.
    pool_last
        Whether a pooling also follows the last stage.
    norm_between
        Whether each block is followed by a further normalization and activation.
    inexact
        Treatment of images whose sides a pooling does not divide, see :class:`lieattn.nn.GridPool`.
    share
        Share of the points that each pooling keeps, see :func:`lieattn.geometry.coarsen`, for clouds that need not be
        images; 1/4 is about the number that 2 x 2 pooling leaves. None pools 2 x 2 pixels.
    """

    blocks: Sequence[int] = (2,)
    expansions: Sequence[int] | None = None
    crops: Sequence[int] | None = None
    pool_last: bool = False
    norm_between: bool = False
    inexact: Inexact = "refuse"
    share: float | None = None

    def __post_init__(self) -> None:
        check_arguments(Stages, vars(self))
        blocks, count = list(self.blocks), sum(self.blocks)
        if not blocks or any(number < 0 for number in blocks):
            raise ValueError(f"blocks: expected the number of blocks of each stage, got {blocks}")
        if len(self.widening) != len(blocks) or any(factor < 1 for factor in self.widening):
            raise ValueError(f"expansions: expected {len(blocks)} factors of at least 1, got {list(self.widening)}")
        crops = [] if self.crops is None else list(self.crops)
        if self.crops is not None and (len(crops) != count or any(margin < 0 for margin in crops)):
            raise ValueError(f"crops: expected {count} margins of at least 0, one for each block, got {crops}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share: expected a number in (0, 1], got {self.share!r}")
        if self.share is not None and any(crops):
            raise ValueError(f"crops: expected None with share, which is for clouds without pixels, got {crops}")

    @property
    def widening(self) -> list[int]:
        """Factor by which each stage increases the channels."""
        return [1] * len(self.blocks) if self.expansions is None else list(self.expansions)

    @property
    def margins(self) -> list[tuple[int, ...]]:
        """Number of pixels that each block cuts off, stage by stage."""
        left = iter([0] * sum(self.blocks) if self.crops is None else self.crops)
        return [tuple(islice(left, count)) for count in self.blocks]

    @property
    def pools(self) -> list[bool]:
        """For each stage, whether a pooling follows it."""
        return [True] * (len(self.blocks) - 1) + [self.pool_last]

    @property
    def coarsens(self) -> bool:
        """Whether points are cropped or pooled."""
        return any(self.pools) or any(map(any, self.margins))

    @property
    def follows_raster(self) -> bool:
        """Whether pixels are cropped or pooled."""
        return self.coarsens and self.share is None


@dataclass(frozen=True)
class Dropouts:
    """Dropout probabilities of a :class:`GSANet`.

    Attributes
    ----------
    attention, value, input, pool
        Dropout of the attention weights, after the attention, of the input, and after each pooling.
    """

    attention: float = 0.0
    value: float = 0.0
    input: float = 0.0
    pool: float = 0.0

    def __post_init__(self) -> None:
        check_arguments(Dropouts, vars(self))
        for name, probability in vars(self).items():
            check_dropout(f"{name} dropout", probability)


@dataclass(frozen=True)
class GSAReadout:
    """Read-out of a :class:`GSANet`, from the field to the outputs.

    Attributes
    ----------
    pool
        Pooling over the points: ``"sum"`` as in the authors' code, ``"mean"`` as in the paper, ``"max"``, or ``"none"``
        for outputs at the points that remain after crops and poolings. The first step of Adam changes each weight of
        the head by the learning rate, and so a sum by up to the rate times the number of points and channels and the
        size of the field. For clouds of hundreds of points, use ``"mean"`` or a smaller rate.
    order
        ``"points_first"`` pools over the points and then takes the maximum over the frames, as in the authors' code.
        ``"frames_first"`` takes the maximum over the frames of each point first, as in the paper. The default is the
        former if all points of a cloud have the same frames, and otherwise the latter.
    """

    pool: Pooling = "sum"
    order: Order | None = None

    def __post_init__(self) -> None:
        check_arguments(GSAReadout, vars(self))


@dataclass(frozen=True, eq=False)
class GSAOptions:
    """Further options of a :class:`GSANet`.

    Attributes
    ----------
    length
        Length by which positional encodings divide displacements; the length of the neighborhood if absent.
    values
        Whether the values of the lifting layer depend on positions (:class:`lieattn.nn.relative.PositionalValues`). In
        the paper only the scores do; positions then have no effect on constant features.
    positions
        Input of the encodings: ``"relative"`` positions h⁻¹(x_j - x_i); ``"absolute"`` positions h⁻¹ x_j, which change
        under translations; or ``"none"``, neither positions nor frames. In the last case the outputs are invariant to
        all motions that keep the neighborhoods, and over ``AllPairs`` to all permutations of the features (GSA-Nets,
        Propositions 4.1 and 4.2). ``"absolute"`` and ``"none"`` are for comparison and need ``values=False``.
    frame_table
        Rows of the encoding of pairs of frames, see :class:`lieattn.nn.relative.FiberEncoding`; those of g⁻¹ m if
        absent. :func:`lieattn.models.published_table`, which published weights need, is not equivariant.
    pattern
        Fiber pattern of the blocks, see :class:`lieattn.nn.GroupSelfAttention`: ``"joint"``, whose layer is uniquely
        equivariant and can express group convolutions, or ``"query_sum"`` as in the paper, with neither property. The
        presets of the paper have the latter, and networks that were saved while it was the default.
    activation
        Activation of the blocks: ``"silu"`` (swish), ``"relu"`` or ``"gelu"``.
    init_scale
        Factor of the standard deviation init_scale / sqrt(fan in) of the initial weights, which are normal.
    init
        ``"balanced"`` starts with outputs near 0 and attention that depends on positions, ``"paper"`` like the authors'
        code; see :meth:`GSANet.reset_parameters`.
    """

    length: float | None = None
    values: bool = True
    positions: Positions = "relative"
    frame_table: Tensor | None = None
    pattern: FiberPattern = "joint"
    activation: Activation = "silu"
    init_scale: float = math.sqrt(2)
    init: Init = "balanced"

    def __post_init__(self) -> None:
        check_arguments(GSAOptions, vars(self))
        if self.length is not None:
            check_length("length", self.length)
        if self.values and self.positions != "relative":
            raise ValueError(f"values: expected False with {self.positions} positions, since values need relative ones")
        if self.pattern == "joint" and self.frame_table is not None and self.frame_table.ndim == 3:
            need = "'query_sum' for a frame_table of (output, query, key) frames"
            raise ValueError(f"pattern: expected {need}, got 'joint', whose output and query frames are the same")
        if not 0 <= self.init_scale < math.inf:
            raise ValueError(f"init_scale: expected a finite standard deviation of at least 0, got {self.init_scale}")

    def equivariant(self, group: FiniteGroup | None) -> bool:
        """Whether the frame table does not change when an element of the group acts on all frames."""
        table = self.frame_table
        if table is None or group is None:
            return True
        return all(
            torch.equal(table[torch.meshgrid(*[row] * table.ndim, indexing="ij")], table) for row in group.cayley
        )

    def unique(self, group: FiniteGroup | None) -> bool | None:
        """Whether the layers between fields are uniquely equivariant; None if this was not examined."""
        usual = group is not None and self.table_for(group) == _USUAL and self.positions == "relative"
        return self.pattern == "joint" if usual else None

    def table_for(self, group: FiniteGroup) -> str:
        """Return a description of the frame table."""
        if self.frame_table is None or torch.equal(self.frame_table, group.relative_index):
            return _USUAL
        return f"the table {zlib.crc32(self.frame_table.cpu().numpy().tobytes()):08x}"


class GSAHead(nn.Linear):
    """Linear map of every element without bias, pooling over the points, and maximum over the frames and scales.

    **Equivariance.** The outputs are invariant to translations of the field by the group.

    Parameters
    ----------
    in_features, out_features
        Channels of the field, and number of outputs.
    pool, order
        See :class:`GSAReadout`.
    """

    def __init__(self, in_features: int, out_features: int, pool: Pooling, order: Order) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.cloud_pool = nn.Identity() if pool == "none" else CloudPool(pool)
        self.fiber_pool = FiberPool("max")
        self.pool, self.order = pool, order

    def forward(self, input: Tensor, graph: LiftedGraph) -> Tensor:  # type: ignore[override]
        """Map a field ``[points, fiber, in_features]`` to ``[clouds, out_features]`` or ``[points, out_features]``."""
        y = as_without_autocast(super().forward, input, self)
        if self.pool == "none":
            return self._maximum(y, graph)
        if self.order == "frames_first":
            pooled = self.cloud_pool(graph.spread(self._maximum(y, graph)), graph.scales)
            return graph.by_level(pooled)[:, 0]
        return self._maximum(self.cloud_pool(y, graph.scales), graph)

    def _maximum(self, y: Tensor, graph: LiftedGraph) -> Tensor:
        """Return the maximum over the frames of all scales, for points or clouds."""
        return self.fiber_pool(graph.by_level(y).flatten(1, 2))


POOL = 2


@dataclass(frozen=True, eq=False)
class GSAGeometry:
    """Geometry of a forward pass, computed by :meth:`GSANet.geometry`, possibly in a worker of the data loader.

    Attributes
    ----------
    lifting
        Graph of the lifting layer.
    stages
        For each stage, the graph of each block, with the points that its crop keeps.
    cells
        For each stage, the pooling cell ``[points]`` int64 of each pixel, or those of other clouds; None for stages
        without pooling.
    clouds
        The points after each stage; the last entry is ``graph``.
    graph
        Graph of the output field.
    """

    lifting: LiftedGraph
    stages: tuple[tuple[LiftedGraph, ...], ...]
    cells: tuple[Tensor | Coarse | None, ...]
    clouds: tuple[PointClouds, ...]
    graph: LiftedGraph


def cropped(clouds: PointClouds, margin: int) -> tuple[Tensor | None, PointClouds]:
    """Return the indices of the points that a crop keeps (None if it keeps all), and the clouds of these points."""
    if margin == 0:
        return None, clouds
    if clouds.grid is None:
        raise ValueError("data: cropping of pixels needs the size of each image, grid [clouds, 2], got None")
    kept, grid = crop(clouds.grid, margin)
    left = PointClouds(
        pos=clouds.pos[kept],
        batch=clouds.batch[kept],
        num_clouds=clouds.num_clouds,
        grid=grid,
    )
    return kept, left.with_each()


def pooled(clouds: PointClouds, pool: GridPool) -> tuple[Tensor, PointClouds]:
    """Return the pooling cell of each point, and the clouds whose points are the cells."""
    if clouds.grid is None:
        one = "for other clouds use Stages(..., share=0.25)"
        raise ValueError(f"data: pooling of pixels needs the size of each image, grid [clouds, 2], got None; {one}")
    cell, grid = pool.cells(clouds.grid)
    batch = torch.repeat_interleave(torch.arange(len(grid), device=grid.device), grid.prod(dim=1))
    pos = pool.centers(clouds.pos, cell, len(batch))
    return cell, PointClouds(pos=pos, batch=batch, num_clouds=clouds.num_clouds, grid=grid).with_each()
