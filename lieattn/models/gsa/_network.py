"""GSA-Nets: group equivariant stand-alone self-attention (Romero & Cordonnier, ICLR 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_count
from lieattn.geometry import (
    Coarse,
    FiniteFrames,
    Frames,
    LiftedGraph,
    Neighborhood,
    PixelSquare,
    PointClouds,
    ScaleFrames,
    coarsen,
    lift,
    num_coordinates,
    point_clouds,
    scaled,
)
from lieattn.groups import FiniteGroup, trivial
from lieattn.models._base.inputs import (
    PointInputs,
    VectorEmbedding,
    VectorInputs,
    features,
    in_precision_of_weights,
)
from lieattn.models._base.lifted import LiftedNetwork, without_lattice
from lieattn.models._base.network import GroupField
from lieattn.models._base.symmetry import JUMPS_OF_POOLINGS, Symmetry
from lieattn.models._base.tied import tied_lengths
from lieattn.models.gsa._options import (
    POOL,
    Dropouts,
    GSAGeometry,
    GSAHead,
    GSAOptions,
    GSAReadout,
    Stages,
    cropped,
    pooled,
)
from lieattn.nn import CloudNorm, GridPool, GroupSelfAttention, Inexact, LiftingSelfAttention, PreNormBlock
from lieattn.nn.relative import (
    CoordinateEncoding,
    CoordinateNetwork,
    FiberEncoding,
    PerHeadMLP,
    PositionalValues,
    RelativeFunction,
)
from lieattn.spaces import Euclidean, HomogeneousSpace

_PAPER_DROPOUT = Dropouts(attention=0.1, value=0.1)
_CIFAR10_DROPOUT = Dropouts(attention=0.1, value=0.1, input=0.2, pool=0.3)


class GSANet(LiftedNetwork):
    """Group self-attention network (GSA-Nets, Romero & Cordonnier 2021): class scores of images or point clouds.

    The network consists of lifting attention, joint normalization and swish; stages of blocks with group
    self-attention, with max pooling of 2 x 2 pixels or of nearby points between the stages; and a linear map to the
    outputs at every element, pooling over the points, and the maximum over the frames.

    **Equivariance.** The outputs are invariant when R^d ⋊ H acts on the points. :attr:`guarantee` states for which H
    this is exact with the chosen neighborhoods and poolings. With frames that move with the points, the outputs are
    invariant to all motions of the space.

    Parameters
    ----------
    frames
        Frames of each point: a finite group H, short for ``FiniteFrames(H)``; ``FiniteFrames(H, PrincipalFrames())``,
        ``PrincipalFrames()`` or other frames; or ``ScaleFrames(H)``, where the keys of the lifting layer are on the
        scale of the query only. Crops and poolings need the same frames in every stage, and therefore H. They are for
        images in the plane, or with ``Stages.share`` for all clouds.
    in_channels, out_channels
        Number of input features, or an object that computes them (see :class:`lieattn.models.CloudInputs`); number of
        outputs.
    neighborhood
        Neighborhood in the first stage. It grows with the pixels or the distances of points after each pooling.
    space
        Space of the points; R^d if absent, see :func:`lieattn.geometry.natural_space`.
    channels
        Channels of the first stage.
    blocks
        Number of blocks of each stage, or :class:`Stages` with crops and wider stages.
    heads
        Attention heads, each with half the output channels of its layer.
    dropout
        :class:`Dropouts`; none if absent.
    readout
        :class:`GSAReadout`.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the field of the lifting layer.
    options
        :class:`GSAOptions`.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import Radius
    >>> from lieattn.groups import tetrahedral
    >>> network = GSANet(tetrahedral(), 2, 3, neighborhood=Radius(1.5), channels=8, heads=2)
    >>> network(Data(x=torch.randn(9, 2), pos=torch.randn(9, 3))).shape
    torch.Size([1, 3])
    """

    has_kinks = True  # because of the maximum over the frames
    earlier: ClassVar = {"pattern": "query_sum"}

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames | ScaleFrames | Frames,
        in_channels: PointInputs = 1,
        out_channels: int = 10,
        *,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None = None,
        channels: int = 20,
        blocks: Sequence[int] | Stages = (2,),
        heads: int = 9,
        dropout: Dropouts | None = None,
        readout: GSAReadout | None = None,
        vector_inputs: VectorInputs = (),
        options: GSAOptions | None = None,
    ) -> None:
        check_arguments(GSANet.__init__, locals())
        super().__init__(frames, in_channels, neighborhood, space, vector_inputs)
        frames = self.frames
        check_count("out_channels", out_channels)
        check_count("channels", channels, least=2)
        self.stages = stages = blocks if isinstance(blocks, Stages) else Stages(blocks)
        self.options = options = options or GSAOptions()
        dropout, readout = dropout or Dropouts(), readout or GSAReadout()
        self.group = frames.group if isinstance(frames, FiniteFrames | ScaleFrames) else None
        if stages.coarsens:
            if not (isinstance(frames, FiniteFrames) and frames.pose is None):
                raise ValueError(f"blocks: crops and poolings need the frames of a finite group, got {frames}")
            if stages.follows_raster and frames.group.dim != 2:
                found = f"{frames.group.name} in {frames.group.dim} dimensions; for points use Stages(..., share=0.25)"
                raise ValueError(f"blocks: crops and poolings are for pixels in the plane, got {found}")
            if not (stages.follows_raster or (frames.group.is_orthogonal and isinstance(self.space, Euclidean))):
                found = f"{frames.group.name} on {self.space.name}"
                raise ValueError(f"blocks: poolings of points need motions that preserve distances, got {found}")
        self.activation: Callable[[Tensor], Tensor] = getattr(F, options.activation)
        self.input_dropout, self.pool_dropout = nn.Dropout(dropout.input), nn.Dropout(dropout.pool)
        made_for, dim = self.group or self.space, self.space.group.dim
        self.vectors = VectorEmbedding(vector_inputs, dim, channels)
        half = channels // 2
        if isinstance(frames, ScaleFrames) and options.positions != "relative":
            raise ValueError(f"positions: expected 'relative' with ScaleFrames, got {options.positions!r}")
        absolute = options.positions == "absolute"
        seen: list[RelativeFunction] = [CoordinateEncoding(dim, half, absolute=absolute)]
        if options.values:
            seen.append(PositionalValues(dim, heads, half))
        self.lifting = LiftingSelfAttention(
            made_for,
            self.in_channels,
            channels,
            heads=heads,
            head_channels=half,
            encoding=seen if options.values else seen[0] if options.positions != "none" else [],
            dropout=dropout.attention,
        )
        self.lifting_norm = CloudNorm(channels)
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        width = channels
        for count, expansion in zip(stages.blocks, stages.widening, strict=True):
            for number in range(count):
                wider = width * expansion if number == 0 else width
                self.blocks.append(self._block(width, wider, heads, dropout))
                self.between.append(CloudNorm(wider) if stages.norm_between else nn.Identity())
                width = wider
        self.grid_pool = GridPool(POOL, "max", inexact=stages.inexact)
        order = readout.order or ("frames_first" if self.group is None else "points_first")
        self.head = GSAHead(width, out_channels, readout.pool, order)
        self.reset_parameters()

    @classmethod
    def rot_mnist(
        cls, group: FiniteGroup, *, size: int = 5, dropout: Dropouts = _PAPER_DROPOUT, **options: Any
    ) -> GSANet:
        """Network for 28 x 28 rotated MNIST (Appendix F.1): 44,428 parameters for C4.

        Two settings differ from the paper: weights start balanced (:meth:`reset_parameters`), and the read-out is that
        of the authors' code, a sum over the points before the maximum over the frames. The paper takes the maximum
        first, and then the mean: ``readout=GSAReadout("mean", "frames_first")``.
        """
        preset = {"channels": 20, "blocks": Stages((2, 3), crops=(2, 0, 2, 1, 1)), "dropout": dropout}
        return cls(group, 1, 10, **{**preset, "neighborhood": PixelSquare(size), "options": _ROT_MNIST, **options})

    @classmethod
    def cifar10(
        cls,
        group: FiniteGroup,
        *,
        size: int = 5,
        dropout: Dropouts = _CIFAR10_DROPOUT,
        **options: Any,
    ) -> GSANet:
        """Network for 32 x 32 CIFAR-10 (Appendix F.2): 3,001,648 parameters without rotations.

        The settings are those of the authors' code, with its initialization after He. The paper states 2.99 M
        parameters, exchanges the dropouts of the input and of the poolings (0.3 and 0.2), and has another read-out, see
        :meth:`rot_mnist`.
        """
        stages = Stages((2, 2, 2), expansions=(1, 2, 1), norm_between=True)
        preset = {"channels": 96, "blocks": stages, "dropout": dropout}
        return cls(group, 3, 10, **{**preset, "neighborhood": PixelSquare(size), "options": _PAPER, **options})

    @classmethod
    def pcam(
        cls,
        group: FiniteGroup,
        *,
        size: int = 5,
        inexact: Inexact = "warn",
        dropout: Dropouts = _PAPER_DROPOUT,
        **options: Any,
    ) -> GSANet:
        """Network for PatchCamelyon (Appendix F.3): 206,926 parameters without rotations.

        The settings are those of the authors' code, with its initialization after He. The paper states 205.66 K
        parameters, which is the number with tables of nine offsets in place of the networks of coordinates, and has
        another read-out, see :meth:`rot_mnist`.

        On the 96 x 96 images of the paper, the last pooling drops a row and a column, which breaks rotations; the
        preset issues a warning. On 88 x 88 images all sizes stay even, and the network is exact.
        """
        stages = Stages((0, 1, 2, 1), (1, 2, 2, 2), (0, 2, 1, 1), pool_last=True, norm_between=True, inexact=inexact)
        preset = {"channels": 12, "blocks": stages, "dropout": dropout}
        return cls(group, 3, 2, **{**preset, "neighborhood": PixelSquare(size), "options": _PAPER, **options})

    def _block(self, channels: int, wider: int, heads: int, dropout: Dropouts) -> PreNormBlock:
        """Return a block that maps fields of ``channels`` to fields of ``wider`` channels."""
        attention = GroupSelfAttention(
            self.group or self.space,
            channels,
            wider,
            heads=heads,
            head_channels=wider // 2,
            pattern=self.options.pattern,
            encoding=self._encoding(heads, wider // 2),
            dropout=dropout.attention,
        )
        return PreNormBlock(attention, channels, wider, dropout=dropout.value, activation=self.activation)

    def _encoding(self, heads: int, channels: int) -> RelativeFunction | list[RelativeFunction] | None:
        """Return the positional encoding of a group attention layer; None for the default of the layer."""
        positions, dim = self.options.positions, self.space.group.dim
        if positions == "none":
            return []
        absolute = positions == "absolute"
        if self.group is None:
            return CoordinateEncoding(dim, channels, absolute=True) if absolute else None
        encoding = CoordinateEncoding(dim, channels, self.group, self.options.frame_table, absolute=absolute)
        if isinstance(self.frames, ScaleFrames):
            # The second encoding adds the steps between scales, which positions and frames do not contain.
            return [encoding, PerHeadMLP(heads, num_coordinates(self.space) + 1)]
        return encoding

    def reset_parameters(self) -> None:
        """Draw the weights of all linear maps from N(0, init_scale² / fan in), and set biases to 0.

        The only exception are the first biases of the coordinate networks. If they are 0, as in the authors' code,
        these networks depend only on the sign of a coordinate, and rounding errors become differences of several per
        cent.

        With ``init="paper"`` this is all: initially the attention hardly depends on positions, and outputs are large.
        ``"balanced"`` makes three changes:

        - Query biases and codes of coordinates start with a standard deviation of order one, so that scores depend on
          positions.
        - Linear maps after an activation have weights of mean 0, since otherwise the positive mean of the activations
          dominates.
        - The head is scaled down, so that outputs start near 0, also as sums over about a thousand points.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.options.init_scale / math.sqrt(module.in_features))
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
        if self.options.init == "balanced":
            self._balance()

    @torch.no_grad()
    def _balance(self) -> None:
        head = cast(GSAHead, self.head)
        for module in (*self.blocks.modules(), head):
            if isinstance(module, nn.Linear) and module.in_features > 1:
                module.weight -= module.weight.mean(dim=1, keepdim=True)
        for module in self.modules():
            if isinstance(module, LiftingSelfAttention | GroupSelfAttention):
                nn.init.normal_(cast(nn.Linear, module.query).bias, std=_SPREAD)
            elif isinstance(module, CoordinateNetwork):
                nn.init.normal_(module.linear2.weight, std=_SPREAD)
        head.weight *= _HEAD_OF_SUM if head.pool == "sum" else _HEAD

    @property
    def symmetry(self) -> Symmetry:
        """Motions of the points under which the outputs are exactly invariant."""
        positions = self.options.positions
        if self.group is not None and not self.options.equivariant(self.group):
            note = f"frame_table is not a function of g⁻¹ m, which breaks equivariance to {self.group.name}"
            found = Symmetry(trivial(self.group.dim), translations=positions != "absolute", notes=(note,))
            return found.seeing(self.vector_inputs)
        found = super().symmetry
        notes = [*found.notes]
        if positions == "none":
            notes.append("no layer sees positions, so all motions that keep the neighborhoods keep the outputs")
        elif positions == "absolute":
            found = replace(found.seeing(("pos",)), on_average=None)
            notes.append("absolute positions break invariance to translations")
        if (unique := self.options.unique(self.group)) is not None and len(self.blocks):
            how = "are uniquely equivariant" if unique else "are not uniquely equivariant, see GSAOptions.pattern"
            notes.append(f"its layers between fields {how}")
        if self.stages.follows_raster:
            notes.append("sides of images must stay even at all crops and poolings")
        return replace(found, notes=tuple(notes))

    @property
    def jumps(self) -> tuple[str, ...]:
        pools = self.stages.coarsens and self.stages.share is not None
        return (*super().jumps, *((JUMPS_OF_POOLINGS,) if pools else ()))

    def tied_to(self) -> dict[str, str]:
        own = {"crops": repr(self.stages.margins), "pools": repr(self.stages.pools)}
        own |= {"positions": self.options.positions, "pattern": self.options.pattern}
        own |= tied_lengths(self.neighborhood, length=self.options.length)
        if self.stages.share is not None:
            own["share"] = f"{self.stages.share:g}"
        if self.group is not None:
            own["frame_table"] = self.options.table_for(self.group)
        return {**super().tied_to(), **own}

    @in_precision_of_weights
    def geometry(self, data: Any) -> GSAGeometry:
        """Compute neighbor lists, crops and pooling cells of a batch, for all stages.

        Raises
        ------
        ValueError
            If the network crops or pools but the clouds are periodic, or have no raster and ``Stages.share`` is None,
            or if a pooling does not divide a size and ``Stages.inexact`` is ``"refuse"``.
        """
        coarsens, share = self.stages.coarsens, self.stages.share
        clouds = without_lattice(data, "a GSANet with crops or poolings") if coarsens else point_clouds(data)
        neighborhood, length = self.neighborhood, self.options.length
        factor = POOL if share is None else share ** (-1 / clouds.pos.shape[1])
        # After crops and poolings the vectors would not fit the points, but finite frames do not need them.
        seen = None if coarsens else self.seen_vectors(data, clouds)
        lifting = self._lift(clouds, neighborhood, length, seen, lifting=True)
        graph: LiftedGraph | None = None if isinstance(self.frames, ScaleFrames) else lifting
        stages, behind = [], []
        cells: list[Tensor | Coarse | None] = []
        for margins, pools in zip(self.stages.margins, self.stages.pools, strict=True):
            steps = []
            for margin in margins:
                graph = self._lift(clouds, neighborhood, length, seen) if graph is None else graph
                kept, left = cropped(clouds, margin)
                steps.append(graph if kept is None else graph.keeping(kept, left))
                clouds, graph = left, graph if kept is None else None
            stages.append(tuple(steps))
            cell: Tensor | Coarse | None = None
            if pools:
                if share is None:
                    cell, clouds = pooled(clouds, self.grid_pool)
                else:
                    cell = coarsen(clouds, share)
                    clouds = cell.clouds
                neighborhood, length = scaled(neighborhood, factor), None if length is None else length * factor
                graph = None
            cells.append(cell)
            behind.append(clouds)
        graph = self._lift(clouds, neighborhood, length, seen) if graph is None else graph
        return GSAGeometry(lifting, tuple(stages), tuple(cells), (*behind[:-1], graph), graph)

    def _lift(
        self,
        clouds: PointClouds,
        neighborhood: Neighborhood,
        length: float | None,
        seen: Tensor | None,
        *,
        lifting: bool = False,
    ) -> LiftedGraph:
        frames = self.frames
        if lifting and isinstance(frames, ScaleFrames):
            frames = replace(frames, reach=0)
        graph = lift(clouds, frames, neighborhood, self.space, length=length, vectors=seen)
        # Evaluated here, so that loader workers compute them and compiled networks do not have to.
        _ = graph.relative.row, graph.relative.positions
        if not lifting and (self.group is None or graph.levels > 1):
            _ = graph.relative.coordinates
        return graph

    @in_precision_of_weights
    def field(self, data: Any, geometry: GSAGeometry | None = None) -> GroupField:
        """Return the field after the last block or pooling, and its graph.

        Images in raster order have ``grid`` ``[clouds, 2]`` in their data; see also :meth:`Network.field`.
        """
        geometry = self.geometry(data) if geometry is None else geometry
        x = features(data, self.inputs, geometry.lifting)
        return GroupField(self.features(x, geometry, self.vectors(data, geometry.lifting))[-1], geometry.graph)

    def features(self, x: Tensor, geometry: GSAGeometry, vectors: Tensor | None = None) -> list[Tensor]:
        """Return the fields ``[points, fiber, channels]`` after the lifting, after every block, and at the end.

        ``x`` are features ``[points, in_channels]``, and ``vectors`` ``[points, fiber, channels]`` are added to the
        field of the lifting layer.
        """
        if not torch.compiler.is_compiling():
            check_arguments(GSANet.features, locals())
        lifted = self.lifting(self.input_dropout(x), geometry.lifting)
        lifted = lifted if vectors is None else lifted + vectors
        fields = [lifted]
        x = self.activation(self.lifting_norm(lifted, geometry.lifting))
        layers = zip(self.blocks, self.between, strict=True)
        for steps, cell, clouds in zip(geometry.stages, geometry.cells, geometry.clouds, strict=True):
            for graph in steps:
                block, between = next(layers)
                x = self._through(block, x, graph)
                fields.append(x)
                if self.stages.norm_between:
                    x = self.activation(between(x, graph if graph.kept is None else graph.kept.clouds))
            if isinstance(cell, Coarse):
                x = self.pool_dropout(cell.pool(x))
            elif cell is not None:
                x = self.pool_dropout(self.grid_pool.reduce(x, cell, clouds.num_points))
        return [*fields, x]


# For init="balanced": standard deviation of query biases and of codes of coordinates, and factors of the head.
_SPREAD, _HEAD, _HEAD_OF_SUM = 2.0, 0.1, 1 / 4096
_PAPER = GSAOptions(values=False, pattern="query_sum", init="paper")
_ROT_MNIST = replace(_PAPER, init_scale=1.0, init="balanced")
