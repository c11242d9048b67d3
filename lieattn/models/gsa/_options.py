"""Options of GSA-Nets, in small values, and the read-out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from torch import Tensor, nn

from lieattn._checks import check_arguments, check_dropout, check_length
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup
from lieattn.nn import CloudPool, FiberPool, Inexact, Pooling

Order = Literal["points_first", "frames_first"]
Activation = Literal["silu", "relu", "gelu"]
Init = Literal["balanced", "paper"]
Positions = Literal["relative", "absolute", "none"]


@dataclass(frozen=True)
class Stages:
    """Blocks of a :class:`GSANet`, stage by stage; between stages pixels are pooled.

    Attributes
    ----------
    blocks
        Blocks of each stage.
    expansions
        Factor by which each stage widens the channels; all 1 if absent.
    crops
        Pixels cut off at each side after the attention of every block; none if absent.
    pool_last
        Whether a pooling follows the last stage too.
    norm_between
        Whether another normalization and activation follow each block.
    inexact
        What to do with images whose sides a pooling does not divide, see :class:`lieattn.nn.GridPool`.
    """

    blocks: Sequence[int] = (2,)
    expansions: Sequence[int] | None = None
    crops: Sequence[int] | None = None
    pool_last: bool = False
    norm_between: bool = False
    inexact: Inexact = "refuse"

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

    @property
    def widening(self) -> list[int]:
        """Factor of each stage."""
        return [1] * len(self.blocks) if self.expansions is None else list(self.expansions)

    @property
    def margins(self) -> list[tuple[int, ...]]:
        """Pixels that the blocks of each stage cut off."""
        left = iter([0] * sum(self.blocks) if self.crops is None else self.crops)
        return [tuple(islice(left, count)) for count in self.blocks]

    @property
    def pools(self) -> list[bool]:
        """Whether a pooling follows each stage."""
        return [True] * (len(self.blocks) - 1) + [self.pool_last]

    @property
    def follows_raster(self) -> bool:
        """Whether pixels are cropped or pooled."""
        return any(self.pools) or any(map(any, self.margins))


@dataclass(frozen=True)
class Dropouts:
    """Dropout of a :class:`GSANet`.

    Attributes
    ----------
    attention, value, input, pool
        Of attention weights, behind the attention, of the input, and behind each pooling.
    """

    attention: float = 0.0
    value: float = 0.0
    input: float = 0.0
    pool: float = 0.0

    def __post_init__(self) -> None:
        check_arguments(Dropouts, vars(self))
        for name in ("attention", "value", "input", "pool"):
            check_dropout(f"{name} dropout", getattr(self, name))


@dataclass(frozen=True)
class GSAReadout:
    """How a :class:`GSANet` makes one output of a field.

    Attributes
    ----------
    pool
        Over the points: ``"sum"`` as in the authors' code, ``"mean"`` as in the paper, ``"max"``, or ``"none"`` for
        outputs at the points.
    order
        ``"points_first"`` pools over the points and takes the maximum over the frames of the result, as in the authors'
        code; ``"frames_first"`` takes the maximum over the frames of each point first, as in the paper. If absent, the
        former where all points of a cloud have the same frames, and the latter otherwise.
    """

    pool: Pooling = "sum"
    order: Order | None = None

    def __post_init__(self) -> None:
        check_arguments(GSAReadout, vars(self))


@dataclass(frozen=True, eq=False)
class GSAOptions:
    """Options of a :class:`GSANet` that are changed less often.

    Attributes
    ----------
    length
        Length by which positional encodings divide displacements; the neighborhood's own if absent.
    values
        Whether the values of the lifting layer see positions (:class:`lieattn.nn.relative.PositionalValues`). The paper
        has geometry in the scores alone, where constant features hide it.
    positions
        What the encodings see: ``"relative"`` positions h⁻¹(x_j - x_i); ``"absolute"`` ones, h⁻¹ x_j, which
        translations change; or ``"none"``, no positions and no frames, so that any motion that keeps the neighborhoods,
        and over ``AllPairs`` any permutation of the features, leaves the outputs alone (GSA-Nets, Propositions 4.1 and
        4.2). The last two are for comparison and need ``values=False``.
    frame_table
        Rows of the encoding of pairs of frames, see :class:`lieattn.nn.relative.FiberEncoding`; g⁻¹ m if absent. Others
        are not equivariant and there to import weights, such as :func:`lieattn.models.published_table`.
    activation
        Of the blocks: ``"silu"`` (swish), ``"relu"`` or ``"gelu"``.
    init_scale
        Weights start normal with deviation init_scale / sqrt(fan in).
    init
        ``"balanced"`` starts with outputs near 0 and attention that depends on positions, ``"paper"`` as the authors'
        code does; see :meth:`GSANet.reset_parameters`.
    """

    length: float | None = None
    values: bool = True
    positions: Positions = "relative"
    frame_table: Tensor | None = None
    activation: Activation = "silu"
    init_scale: float = math.sqrt(2)
    init: Init = "balanced"

    def __post_init__(self) -> None:
        check_arguments(GSAOptions, vars(self))
        if self.length is not None:
            check_length("length", self.length)
        if self.values and self.positions != "relative":
            raise ValueError(f"values: expected False with {self.positions} positions, since values need relative ones")
        if not 0 <= self.init_scale < math.inf:
            raise ValueError(f"init_scale: expected a finite standard deviation of at least 0, got {self.init_scale}")

    def equivariant(self, group: FiniteGroup | None) -> bool:
        """Whether pairs of frames are told apart by g⁻¹ m alone."""
        table = self.frame_table
        return table is None or group is None or bool((table == group.relative_index).all())


class GSAHead(nn.Linear):
    """Linear map of every element without bias, pooled over the points, and the maximum over the frames and scales.

    Parameters
    ----------
    in_features, out_features
        Channels of the field, number of outputs.
    pool, order
        See :class:`GSAReadout`.
    """

    def __init__(self, in_features: int, out_features: int, pool: Pooling, order: Order) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.cloud_pool = nn.Identity() if pool == "none" else CloudPool(pool)
        self.fiber_pool = FiberPool("max")
        self.pool, self.order = pool, order

    def forward(self, input: Tensor, graph: LiftedGraph) -> Tensor:  # type: ignore[override]
        """Field ``[points, fiber, in_features]`` to ``[clouds, out_features]``, or ``[points, out_features]``."""
        y: Tensor = super().forward(input)
        if self.pool == "none":
            return self._maximum(y, graph)
        if self.order == "frames_first":
            pooled = self.cloud_pool(graph.spread(self._maximum(y, graph)), graph.scales)
            return graph.by_level(pooled)[:, 0]
        return self._maximum(self.cloud_pool(y, graph.scales), graph)

    def _maximum(self, y: Tensor, graph: LiftedGraph) -> Tensor:
        """Over the frames of all scales of the points or clouds."""
        return self.fiber_pool(graph.by_level(y).flatten(1, 2))
