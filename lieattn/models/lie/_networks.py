"""LieTransformer (arXiv 2012.10885) beside LieConv (arXiv 2002.12880)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_tensor
from lieattn._core.numerics import LayerNorm
from lieattn.geometry import (
    AllPairs,
    LiftedGraph,
    Neighborhood,
    Radius,
    SampledFrames,
    farthest_points,
    pieces,
    pixel_positions,
    scaled,
)
from lieattn.groups import SE, Translations
from lieattn.models._base.inputs import PointInputs, SortedDistances, Species, VectorInputs, in_precision_of_weights
from lieattn.models._base.network import GroupField
from lieattn.models._base.symmetry import Symmetry
from lieattn.models.lie._network import AnyFrames, AttentionOptions, ConvolutionOptions, LieNetwork, Lifting, Readout
from lieattn.nn import LieBlock, LieBottleneck, PointBatchNorm
from lieattn.ops import kinked
from lieattn.spaces import Euclidean, HomogeneousSpace

_DISC = 15.0  # pixels; the disc of a 28 x 28 image that the authors keep
_PAPER: dict[str, Any] = {"neighborhood": AllPairs(), "lifting": Lifting(local=0)}


class LieTransformer(LieNetwork):
    r"""LieTransformer (Hutchinson et al. 2021): self-attention on points lifted to a group.

    Points x_i of X = G/H are lifted to group elements g_ia. A linear map embeds the features, with the same values on
    all elements of the fiber. A convolution adds the geometry of the neighbors as seen from each element. Then
    :class:`lieattn.nn.LieBlock` modules follow, and the field is pooled to outputs for each cloud or point.

    **Equivariance.** Outputs are invariant, or rotate, when one element of G acts on all lifted elements.
    :attr:`guarantee` states for which motions of the *points* this holds with the chosen frames: exactly for a finite
    group of frames and for frames computed from the data, and on average for sampled frames.

    Parameters
    ----------
    in_channels
        Number of features ``data.x`` of a point; or :class:`Species`, :class:`SortedDistances` or
        :class:`CloudInputs`, which compute features.
    out_channels
        Number of outputs, numbers or vectors, for each cloud or point.
    frames
        Frames of each point, see :func:`lieattn.geometry.lift`; None if the stabilizer H is trivial.
    neighborhood
        Neighbors that each point attends to.
    space
        X = G/H, for example ``Sphere()`` or ``Euclidean(SE(2))``; if absent, R^3 (for a finite group R^d) with the
        motions that the frames belong to, see :func:`lieattn.geometry.natural_space`.
    channels, layers, heads
        Sizes of the attention blocks.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the embedding of the features.
    lifting, attention, readout
        Further options, see :class:`Lifting`, :class:`AttentionOptions` and :class:`Readout`.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import PrincipalFrames, Radius
    >>> from lieattn.models import LieTransformer
    >>> network = LieTransformer(2, 1, frames=PrincipalFrames(), neighborhood=Radius(3.0), channels=32, layers=2)
    >>> network(Data(x=torch.randn(9, 2), pos=torch.randn(9, 3))).shape
    torch.Size([1, 1])
    """

    def __init__(
        self,
        in_channels: PointInputs,
        out_channels: int = 1,
        *,
        frames: AnyFrames | None = None,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None = None,
        channels: int = 512,
        layers: int = 6,
        heads: int = 8,
        vector_inputs: VectorInputs = (),
        lifting: Lifting | None = None,
        attention: AttentionOptions | None = None,
        readout: Readout | None = None,
    ) -> None:
        check_arguments(LieTransformer.__init__, locals())
        super().__init__(in_channels, channels, frames, neighborhood, space, vector_inputs, lifting)
        check_counts(out_channels=out_channels, layers=layers)
        attention, readout = attention or AttentionOptions(), readout or Readout()
        if self.lifting.piece is not None and attention.norm.startswith("batch"):
            raise ValueError(f"piece: norm={attention.norm!r} needs statistics of all points; use 'layer_pre'")
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            layer = self._attention(attention, channels, heads)
            block: Any = {"activation": attention.activation, "norm": attention.norm, "eps": attention.eps}
            self.blocks.append(LieBlock(layer, channels, **block))
        self.head = readout.head(channels, out_channels, self.space.group.dim, "pool_first")
        self.has_kinks = readout.pool == "max" or kinked(readout.activation) or kinked(attention.activation)
        self.local = self._local(channels)

    @classmethod
    def qm9(cls, out_channels: int = 1, **options: Any) -> LieTransformer:
        """Network for molecules with the widths of the paper, invariant to SE(3) on average."""
        return cls(Species(), out_channels, **{**_PAPER, "frames": SampledFrames(1), **options})

    @classmethod
    def constellation(cls, repetitions: int = 2, *, samples: int = 4, **options: Any) -> LieTransformer:
        """Network that counts four patterns among points of the plane; logits ``[clouds, 4 * (repetitions + 1)]``."""
        check_counts(repetitions=repetitions, samples=samples)
        preset = {**_PAPER, "space": Euclidean(SE(2)), "frames": SampledFrames(samples)}
        return cls(SortedDistances(17 * repetitions - 1), 4 * (repetitions + 1), **{**preset, **options})

    @classmethod
    def springs(cls, **options: Any) -> LieTransformer:
        """Potential of particles on springs, invariant to translations: 841,641 parameters. Inputs are (mass, k)."""
        preset = {"space": Euclidean(Translations(2)), "channels": 160, "layers": 5}
        return cls(2, 1, **{**_PAPER, **preset, "attention": AttentionOptions(normalize="mean"), **options})

    @in_precision_of_weights
    def geometry(self, data: Any, *, generator: torch.Generator | None = None) -> LiftedGraph:
        """Lift the clouds and compute the coordinates of all pairs.

        In training mode, random frames and dropped neighbors are drawn anew in every call, from the generator or from
        torch's default generator. In eval mode the same data gives the same graph.
        """
        graph = self._dropped(*self._lifted(data, generator))
        return graph if self.lifting.piece else self._prepared(graph)

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        if self.lifting.piece and torch.compiler.is_compiling():
            reason = f"pieces of {self.lifting.piece} points depend on the positions and cannot be compiled"
            message = f"piece: {reason}; compile or export a network with the same weights and piece=None"
            if torch.compiler.is_dynamo_compiling():  # at the error alone, the rest would run, slowly, in many graphs
                torch._dynamo.graph_break(msg=message)
            raise RuntimeError(message)
        graph = self.geometry(data) if geometry is None else geometry
        found = pieces(graph, self.lifting.piece) if self.lifting.piece else []
        x = self._embedded(data, graph, found)
        for block in self.blocks:
            x = self._piecewise(block, found, graph, x)
        return GroupField(x, graph)


@dataclass(frozen=True, eq=False)
class LieConvGeometry:
    """Geometry of a forward pass, computed by :meth:`LieConvNet.geometry`.

    Attributes
    ----------
    graphs
        Graph of the convolution of each block, with the points that remain after it.
    last
        Graph of the points after the last block.
    """

    graphs: tuple[LiftedGraph, ...]
    last: LiftedGraph


class LieConvNet(LieNetwork):
    """LieConv (Finzi et al. 2020): residual network of group convolutions on lifted points.

    A linear map embeds the features, :class:`lieattn.nn.LieBottleneck` blocks follow, and a normalization and a head
    give outputs for each cloud or point. After each block, farthest-point subsampling can reduce the number of points,
    while channels and neighborhoods grow.

    **Equivariance.** As for :class:`LieTransformer`. Subsampling starts at the outermost point and depends on distances
    only, which rotations preserve.

    Parameters
    ----------
    in_channels, out_channels, frames, neighborhood, space, vector_inputs, lifting, readout
        See :class:`LieTransformer`. The neighborhood is that of the first block. ``lifting.piece`` must be None
        (otherwise ValueError).
    channels, layers
        Channels of the first block, and number of blocks.
    convolution
        Options of the blocks and of the subsampling. With subsampling, outputs at points (``pool="none"``) raise
        ValueError.
    """

    def __init__(
        self,
        in_channels: PointInputs,
        out_channels: int = 1,
        *,
        frames: AnyFrames | None = None,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None = None,
        channels: int = 384,
        layers: int = 6,
        vector_inputs: VectorInputs = (),
        lifting: Lifting | None = None,
        convolution: ConvolutionOptions | None = None,
        readout: Readout | None = None,
    ) -> None:
        check_arguments(LieConvNet.__init__, locals())
        check_counts(layers=layers)
        super().__init__(in_channels, channels, frames, neighborhood, space, vector_inputs, lifting)
        convolution, readout = convolution or ConvolutionOptions(), readout or Readout()
        if self.lifting.piece is not None:
            raise ValueError(
                f"piece: expected None, since LieConvNet evaluates all points at once, got {self.lifting.piece}"
            )
        share = convolution.downsampling
        if readout.pool == "none" and share < 1:
            raise ValueError(f"pool: 'none' needs downsampling=1, got {share}; use this, or another pool")
        self.share = share ** (1 / layers)
        self.tied = {**self.tied, "downsampling": f"{self.share:g} of the points per block"}
        widths = [round(channels * self.share ** (-convolution.widening * number)) for number in range(layers + 1)]
        self.blocks, scores, chosen = nn.ModuleList(), convolution.attention, asdict(convolution)
        options = {name: chosen[name] for name in ("norm", "activation", "rank", "hidden")}
        for narrow, wide in pairwise(widths):
            attention = None if scores is None else self._attention(scores, max(1, wide // 4), convolution.heads)
            self.blocks.append(LieBottleneck(narrow, wide, self.num_coordinates, attention=attention, **options))
        norms: dict[str, type[nn.Module]] = {"batch": PointBatchNorm, "layer": LayerNorm, "none": nn.Identity}
        self.norm = norms[convolution.norm](widths[-1])
        self.head = readout.head(widths[-1], out_channels, self.space.group.dim, "point_first")
        activations = [part.activation for part in (readout, convolution, convolution.attention) if part is not None]
        self.has_kinks = readout.pool == "max" or any(map(kinked, activations))
        self.local = self._local(channels)

    @classmethod
    def qm9(cls, out_channels: int = 1, **options: Any) -> LieConvNet:
        """Network for molecules with the widths of the paper, invariant to translations: 21.3 M parameters.

        With ``frames`` it is also invariant to rotations, exactly or on average.
        """
        space = Euclidean(Translations(3)) if options.get("frames") is None else None
        return cls(Species(), out_channels, **{**_PAPER, "space": space, "channels": 1536, **options})

    @classmethod
    def images(cls, in_channels: int = 1, out_channels: int = 10, *, frames: AnyFrames, **options: Any) -> LieConvNet:
        """Network for images as points, see :func:`image_points`; a tenth of the pixels remain after the last block."""
        preset = {**_PAPER, "space": Euclidean(SE(2)), "frames": frames, "neighborhood": Radius(3.0), "channels": 128}
        preset["convolution"] = ConvolutionOptions(downsampling=0.1)
        return cls(in_channels, out_channels, **{**preset, **options})

    @property
    def symmetry(self) -> Symmetry:
        found = super().symmetry
        if self.share == 1:
            return found
        ties = "where distances are equal, as on grids, subsampling depends on the order of points"
        return replace(found, notes=(*found.notes, ties))

    @property
    def jumps(self) -> tuple[str, ...]:
        chosen = ("subsampling selects other points when points move: use downsampling=1",) if self.share < 1 else ()
        return (*super().jumps, *chosen)

    @in_precision_of_weights
    def geometry(self, data: Any, *, generator: torch.Generator | None = None) -> LieConvGeometry:
        """Lift the points once and return the graph of every block; random parts of training are drawn in each call.

        ValueError is raised for periodic clouds with subsampling, whose distances do not see periodic images.
        """
        graph, generator = self._lifted(data, generator)
        if self.share < 1 and graph.cell is not None:
            raise ValueError("data.cell: subsampling does not see periodic images; use downsampling=1")
        neighborhood, dim = self.neighborhood, self.space.group.dim
        graphs: list[LiftedGraph] = []
        for _ in self.blocks:
            graphs.append(self._prepared(self._dropped(graph, generator)))
            if self.share < 1:
                places = graph.pos.detach()[:, :dim]
                chosen = farthest_points(places, fraction=self.share, batch=graph.batch).sort().values
                neighborhood = scaled(neighborhood, self.share ** (-1 / dim))
                graph = graph.subset(chosen, neighborhood)
                graphs[-1] = graphs[-1].keeping(chosen, graph)
        return LieConvGeometry(tuple(graphs), graph)

    @in_precision_of_weights
    def field(self, data: Any, geometry: LieConvGeometry | None = None) -> GroupField:
        geometry = self.geometry(data) if geometry is None else geometry
        x = self._embedded(data, geometry.graphs[0], [])
        for block, graph in zip(self.blocks, geometry.graphs, strict=True):
            x = self._through(block, x, graph)
        return GroupField(self.norm(x), geometry.last)


def image_points(images: Tensor, radius: float | None = _DISC) -> tuple[Tensor, Tensor, Tensor]:
    """Convert images to point clouds about their centers, cut to a disc so that rotations do not move corners out.

    Parameters
    ----------
    images
        Floating images ``[images, channels, height, width]``.
    radius
        Radius of the disc in pixels; None keeps all pixels.

    Returns
    -------
    x, pos, batch
        Values ``[points, channels]``; positions ``[points, 2]`` in pixels, to the right and up, with the center at 0;
        and the image ``[points]`` int64 of each pixel.
    """
    check_arguments(image_points, locals())
    if images.ndim != 4:
        raise ValueError(f"images: expected [images, channels, height, width], got {tuple(images.shape)}")
    check_tensor("images", images, "floating images")
    pos = pixel_positions(*images.shape[2:], dtype=images.dtype).to(images.device)
    inside = pos.norm(dim=1) < (torch.inf if radius is None else radius)
    x = images.flatten(2).transpose(1, 2)[:, inside]
    batch = torch.arange(len(images), device=images.device).repeat_interleave(x.shape[1])
    return x.flatten(0, 1), pos[inside].repeat(len(images), 1), batch
