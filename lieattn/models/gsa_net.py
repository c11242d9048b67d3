"""GSA-Nets: group equivariant stand-alone self-attention (Romero & Cordonnier, ICLR 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout, check_length, check_neighborhood
from lieattn.geometry import Neighborhood, PixelSquare, lift, point_clouds
from lieattn.groups import FiniteGroup, check_group, trivial
from lieattn.models._gsa_geometry import POOL, GSAGeometry, Step, coarser, cropped, exact_inputs, pooled
from lieattn.models._published_gsa import published_table
from lieattn.nn import (
    CloudNorm,
    CloudPool,
    CoordinateEncoding,
    CoordinateNetwork,
    FiberEncoding,
    FiberPool,
    GridPool,
    GroupSelfAttention,
    LiftingSelfAttention,
    PreNormBlock,
)


class GSANet(nn.Module):
    """Group self-attention network: invariant class scores of images or other point clouds.

    Lifting attention, joint normalization and swish; then stages of blocks with group self-attention, between
    stages a 2 x 2 max pooling of pixels; then a linear map to the classes at every element, the sum over the points
    and the maximum over the fiber.

    **Equivariance.** The logits do not change when the points are moved by R^d ⋊ H; :attr:`guarantee` says in words
    for which H this holds exactly with the neighborhoods and poolings chosen.

    Parameters
    ----------
    group
        H.
    in_channels, classes
        Channels of the input features, number of logits.
    channels
        Channels of the first stage.
    blocks
        Blocks of each stage.
    expansions
        Factor by which each stage widens the channels; all 1 if absent.
    crops
        Pixels cut off at each side after the attention of every block; none if absent.
    heads
        Attention heads, each with half the channels of its layer's output.
    neighborhood
        Of the first stage; it grows with the pixels behind each pooling.
    scale
        Length by which positional encodings divide displacements; the neighborhood's own if absent.
    pool_last
        Whether a pooling follows the last stage too.
    norm_between
        Whether another normalization and swish follow each block.
    attention_dropout, value_dropout, input_dropout, pool_dropout
        Dropout of attention weights, behind the attention, of the input, behind each pooling.
    frame_encoding
        ``"relative"`` encodes pairs of frames by g⁻¹ m; ``"published"`` is the table of the authors' code, which is
        *not* equivariant (relative error 5e-2 to 4e-1) and there to import weights trained with it; or a table.
    point_pool
        Reduction over the points in the read-out: ``"sum"`` as in the authors' code, or ``"mean"`` as in the paper.
    activation
        Name of the activation, ``"silu"`` (swish), ``"relu"`` or ``"gelu"``.
    inexact_pooling
        See :class:`lieattn.nn.GridPool`.
    whitening
        Weights start normal with deviation whitening / sqrt(fan in).
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 1,
        classes: int = 10,
        *,
        channels: int = 20,
        blocks: Sequence[int] = (2,),
        expansions: Sequence[int] | None = None,
        crops: Sequence[int] | None = None,
        heads: int = 9,
        neighborhood: Neighborhood,
        scale: float | None = None,
        pool_last: bool = False,
        norm_between: bool = False,
        attention_dropout: float = 0.0,
        value_dropout: float = 0.0,
        input_dropout: float = 0.0,
        pool_dropout: float = 0.0,
        frame_encoding: Literal["relative", "published"] | Tensor = "relative",
        point_pool: Literal["sum", "mean", "max"] = "sum",
        activation: Literal["silu", "relu", "gelu"] = "silu",
        inexact_pooling: Literal["refuse", "warn", "allow"] = "refuse",
        whitening: float = math.sqrt(2),
    ) -> None:
        super().__init__()
        check_group("group", group)
        check_neighborhood(neighborhood)
        check_count("classes", classes)
        if scale is not None:
            check_length("scale", scale)
        if not 0 <= whitening < math.inf:
            raise ValueError(f"whitening: expected a finite deviation of at least 0, got {whitening}")
        check_dropout("value_dropout", value_dropout)
        check_dropout("attention_dropout", attention_dropout)
        check_dropout("input_dropout", input_dropout)
        check_dropout("pool_dropout", pool_dropout)
        expansions = [1] * len(blocks) if expansions is None else list(expansions)
        crops = [0] * sum(blocks) if crops is None else list(crops)
        _check_layout(blocks, expansions, crops, channels)
        self.group, self.neighborhood, self.scale = group, neighborhood, scale
        self.in_channels = in_channels
        margins = iter(crops)
        self.crops = [tuple(islice(margins, count)) for count in blocks]
        if activation not in ("silu", "relu", "gelu"):
            raise ValueError(f"activation: expected 'silu', 'relu' or 'gelu', got {activation!r}")
        self.activation: Callable[[Tensor], Tensor] = getattr(F, activation)
        self.pools = [True] * (len(blocks) - 1) + [pool_last]
        table = _frame_table(group, frame_encoding)
        self.frame_table_published = table is not None
        self.input_dropout, self.pool_dropout = nn.Dropout(input_dropout), nn.Dropout(pool_dropout)
        self.lifting = LiftingSelfAttention(
            group, in_channels, channels, heads=heads, head_channels=channels // 2, dropout=attention_dropout
        )
        self.lifting_norm = CloudNorm(channels)
        self.blocks = nn.ModuleList()
        self.between = nn.ModuleList()
        width = channels
        for count, expansion in zip(blocks, expansions, strict=True):
            for number in range(count):
                wider = width * expansion if number == 0 else width
                encoding = CoordinateEncoding(group.dim, wider // 2, group, table)
                attention = GroupSelfAttention(
                    group,
                    width,
                    wider,
                    heads=heads,
                    head_channels=wider // 2,
                    encoding=encoding,
                    dropout=attention_dropout,
                )
                block = PreNormBlock(attention, width, wider, dropout=value_dropout, activation=self.activation)
                self.blocks.append(block)
                self.between.append(CloudNorm(wider) if norm_between else nn.Identity())
                width = wider
        self.norm_between = norm_between
        self.grid_pool = GridPool(POOL, "max", inexact=inexact_pooling)
        self.head = nn.Linear(width, classes, bias=False)
        self.cloud_pool, self.fiber_pool = CloudPool(point_pool), FiberPool("max")
        self.reset_parameters(whitening)

    @classmethod
    def rot_mnist(cls, group: FiniteGroup, *, size: int = 5, **options: Any) -> GSANet:
        """Network for 28 x 28 rotated MNIST (Appendix F.1): 44,428 parameters for C4."""
        preset = {"channels": 20, "blocks": (2, 3), "crops": (2, 0, 2, 1, 1), **_PAPER_DROPOUT}
        return cls(group, 1, 10, **{**preset, "neighborhood": PixelSquare(size), "whitening": 1.0, **options})

    @classmethod
    def cifar10(cls, group: FiniteGroup, *, size: int = 5, **options: Any) -> GSANet:
        """Network for 32 x 32 CIFAR-10 (Appendix F.2): 3,001,648 parameters without rotations."""
        preset = {"channels": 96, "blocks": (2, 2, 2), "expansions": (1, 2, 1), "norm_between": True}
        dropout = {**_PAPER_DROPOUT, "input_dropout": 0.2, "pool_dropout": 0.3}
        return cls(group, 3, 10, **{**preset, **dropout, "neighborhood": PixelSquare(size), **options})

    @classmethod
    def pcam(cls, group: FiniteGroup, *, size: int = 5, **options: Any) -> GSANet:
        """Network for PatchCamelyon (Appendix F.3): 206,926 parameters without rotations.

        At the paper's 96 x 96 the last pooling drops a row and a column, which breaks rotations: the preset warns.
        At 88 x 88 all sizes stay even and the network is exact.
        """
        preset = {"channels": 12, "blocks": (0, 1, 2, 1), "expansions": (1, 2, 2, 2), "crops": (0, 2, 1, 1)}
        layout = {"norm_between": True, "pool_last": True, "inexact_pooling": "warn"}
        where = {"neighborhood": PixelSquare(size)}
        return cls(group, 3, 2, **{**preset, **layout, **_PAPER_DROPOUT, **where, **options})

    def reset_parameters(self, whitening: float) -> None:
        """Draw the weights of all linear maps from N(0, whitening² / fan in); biases start at 0.

        The first biases of the coordinate networks are the exception: at 0, as in the paper's code, these
        networks see the sign of a coordinate only and turn rounding errors into differences of per cents.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=whitening / math.sqrt(module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, CloudNorm | nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, FiberEncoding):
                nn.init.normal_(module.weight)
        for module in self.modules():
            if isinstance(module, CoordinateNetwork):
                nn.init.normal_(module.linear1.bias)

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        moves = f"R^{self.group.dim} x| {self.group.name}"
        if self.frame_table_published:
            return f"none beyond translations: the published table of frames is not equivariant to {self.group.name}"
        square = isinstance(self.neighborhood, PixelSquare)
        if square and not bool((self.group.elements == self.group.elements.round()).all()):
            return (
                f"none beyond translations and quarter turns: pixel squares do not turn with {self.group.name}; use "
                f"a Radius neighborhood"
            )
        text = f"logits are invariant to {moves} acting on the coordinates, exactly up to rounding"
        if any(self.pools) or any(map(any, self.crops)):
            text += "; crops and poolings follow the raster, whose sizes must stay even"
        return text

    @property
    def symmetry(self) -> FiniteGroup:
        """Subgroup of H that, with all translations, leaves the logits alone exactly."""
        if self.frame_table_published:
            return trivial(self.group.dim)
        whole = (self.group.elements == self.group.elements.round()).flatten(1).all(dim=1)
        if not isinstance(self.neighborhood, PixelSquare) or bool(whole.all()):
            return self.group
        return FiniteGroup(f"{self.group.name} on pixels", self.group.elements[whole])

    def geometry(self, data: Any) -> GSAGeometry:
        """Neighbor lists, crops and pooling cells of a batch, for every stage.

        Raises
        ------
        ValueError
            If the network crops or pools and the clouds have no raster, or a size would not be exact.
        """
        clouds = point_clouds(data)
        # Asked for only where there is a raster to pool.
        advice = partial(exact_inputs, cast(Tensor, clouds.grid), self.crops, self.pools)
        neighborhood, scale = self.neighborhood, self.scale
        graph = lift(clouds, self.group, neighborhood, scale=scale)
        lifting = graph
        stages, cells, clouds_between = [], [], []
        for margins, pools in zip(self.crops, self.pools, strict=True):
            steps = []
            for margin in margins:
                if graph.pos is not clouds.pos:
                    graph = lift(clouds, self.group, neighborhood, scale=scale)
                kept, clouds = cropped(clouds, margin)
                steps.append(Step(graph, kept, clouds))
            stages.append(tuple(steps))
            cell = None
            if pools:
                cell, clouds = pooled(clouds, self.grid_pool, advice)
                neighborhood, scale = coarser(neighborhood), None if scale is None else scale * POOL
            cells.append(cell)
            clouds_between.append(clouds)
        return GSAGeometry(lifting, tuple(stages), tuple(cells), tuple(clouds_between))

    def forward(self, data: Any, geometry: GSAGeometry | None = None) -> Tensor:
        """Logits ``[clouds, classes]``.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with features ``x`` ``[points, in_channels]``, coordinates ``pos``
            ``[points, dim]`` and, for images in raster order, ``grid`` ``[clouds, 2]``.
        geometry
            What :meth:`geometry` gives for ``data``; built here if absent.
        """
        geometry = self.geometry(data) if geometry is None else geometry
        x = getattr(data, "x", None)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"data: expected a torch_geometric Data or Batch with features x, got {type(data).__name__}"
            )
        field = self.features(x, geometry)[-1]
        clouds = geometry.clouds[-1]
        return self.fiber_pool(self.cloud_pool(self.head(field), clouds.batch, clouds.num_clouds))

    def features(self, x: Tensor, geometry: GSAGeometry) -> list[Tensor]:
        """Fields ``[points, fiber, channels]``: behind the lifting, behind every block, behind the last pooling."""
        if x.ndim != 2 or x.shape[1] != self.in_channels or not x.is_floating_point():
            raise ValueError(
                f"x: expected floating features [points, {self.in_channels}], got {x.dtype} {tuple(x.shape)}"
            )
        lifted = self.lifting(self.input_dropout(x), geometry.lifting)
        fields = [lifted]
        x = self.activation(self.lifting_norm(lifted, geometry.lifting))
        layers = zip(self.blocks, self.between, strict=True)
        for steps, cell, clouds in zip(geometry.stages, geometry.cells, geometry.clouds, strict=True):
            for step in steps:
                block, between = next(layers)
                x = block(x, step.graph, step.kept, step.clouds)
                fields.append(x)
                if self.norm_between:
                    x = self.activation(between(x, step.clouds))
            if cell is not None:
                x = self.pool_dropout(self.grid_pool(x, cell, clouds.num_points))
        return [*fields, x]


_PAPER_DROPOUT = {"attention_dropout": 0.1, "value_dropout": 0.1}


def _check_layout(blocks: Sequence[int], expansions: Sequence[int], crops: Sequence[int], channels: int) -> None:
    if not blocks or any(count < 0 for count in blocks):
        raise ValueError(f"blocks: expected the number of blocks of each stage, got {list(blocks)}")
    if len(expansions) != len(blocks) or any(factor < 1 for factor in expansions):
        raise ValueError(f"expansions: expected {len(blocks)} factors of at least 1, got {list(expansions)}")
    if len(crops) != sum(blocks) or any(margin < 0 for margin in crops):
        raise ValueError(f"crops: expected {sum(blocks)} margins of at least 0, one a block, got {list(crops)}")
    if channels < 2:
        raise ValueError(f"channels: expected at least 2, got {channels}")


def _frame_table(group: FiniteGroup, encoding: str | Tensor) -> Tensor | None:
    if isinstance(encoding, Tensor):
        return encoding
    if encoding == "published":
        return published_table(group)
    if encoding != "relative":
        raise ValueError(f"frame_encoding: expected 'relative', 'published' or a table, got {encoding!r}")
    return None
