"""The base class of LieTransformer or LieConv networks."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_counts,
    check_dropout,
    check_is,
    check_length,
)
from lieattn._core.contexts import is_batched, recomputed, transformed, without_autocast
from lieattn._core.numerics import keep_variance
from lieattn.geometry import (
    FiniteFrames,
    Frames,
    GivenFrames,
    LiftedGraph,
    Neighborhood,
    Neighbors,
    Piece,
    PrincipalFrames,
    Radius,
    SampledFrames,
    ScaleFrames,
    lift,
    num_coordinates,
    point_clouds,
)
from lieattn.groups import FiniteGroup, Translations
from lieattn.models._base.inputs import PointInputs, VectorEmbedding, VectorInputs, features, vectors
from lieattn.models._base.lifted import LiftedNetwork, new_generator
from lieattn.models._base.network import OutputKind, cutoff_of
from lieattn.models._base.symmetry import Symmetry, jumps_of_neighbors
from lieattn.models._base.tied import tied_lengths, tied_repr
from lieattn.nn import (
    BlockNorm,
    InvariantHead,
    LieConvolution,
    LieSelfAttention,
    LiftingConvolution,
    Pooling,
    VectorHead,
)
from lieattn.nn.relative import EdgeNetwork, Kernel
from lieattn.ops import Activation, Normalization, bessel_functions, smooth_window
from lieattn.spaces import Euclidean, HomogeneousSpace

# The classes of frames are listed because the parser of configuration files does not match classes to a protocol.
AnyFrames = FiniteGroup | FiniteFrames | PrincipalFrames | SampledFrames | GivenFrames | ScaleFrames | Frames
Order = Literal["pool_first", "point_first"]


class PairCoordinates(abc.ABC):
    """Coordinates of relative elements, such as ``PublishedCoordinates``."""

    @property
    def continuous(self) -> bool:
        """Whether the coordinates depend continuously on the relative element."""
        return True

    @abc.abstractmethod
    def count(self, space: HomogeneousSpace) -> int:
        """Number of coordinates in a space, including invariants of both points; ValueError if they do not exist."""

    @abc.abstractmethod
    def __call__(self, graph: LiftedGraph) -> Tensor:
        """Return the coordinates ``[rows, fiber, fiber, k]``, with the rows of ``graph.relative``."""


@dataclass(frozen=True)
class Lifting:
    """Options of the lift, and coordinates of the relative elements as inputs of the network.

    Attributes
    ----------
    coordinates
        ``"smooth"``, ``"log"`` (see :class:`lieattn.geometry.RelativeElements`), or an object that computes others.
    length
        Length by which translations are divided; if absent, the length of the neighborhood, or 1 if it has none.
    bound
        Whether coordinates p are replaced by p tanh(|p| / 7) / |p|.
    neighbor_dropout
        Share of the neighbors of a point, other than the point itself, that are dropped at random in each training
        step.
    radial
        Number of Bessel functions of the distance that are appended to the coordinates, for groups of rigid motions.
    local
        Size of a convolution before the blocks, so that the field depends on the geometry even if features are
        constant; 0 for none. If the group preserves distances and there is a cutoff, it is a
        :class:`lieattn.nn.LiftingConvolution` of an edge network with this number of hidden units; otherwise it is a
        :class:`lieattn.nn.LieConvolution` of the coordinates with this rank.
    cutoff
        Distance at which the Bessel functions and this convolution vanish; the length of the neighborhood if absent.
    piece
        Number of points that :class:`LieTransformer` evaluates at a time, for clouds that do not fit into memory at
        once. Relative elements and activations are computed piece by piece (see :func:`lieattn.geometry.pieces`), and
        computed again in the backward pass; the results are the same. None for all points at once, which is necessary
        to compile or export.
    """

    coordinates: Literal["smooth", "log"] | PairCoordinates = "smooth"
    length: float | None = None
    bound: bool = False
    neighbor_dropout: float = 0.0
    radial: int = 0
    local: int = 16
    cutoff: float | None = None
    piece: int | None = None

    def __post_init__(self) -> None:
        check_arguments(Lifting, vars(self))
        if self.piece is not None:
            check_counts(piece=self.piece)
        check_dropout("neighbor_dropout", self.neighbor_dropout)
        check_counts(0, radial=self.radial, local=self.local)
        for argument, length in (("length", self.length), ("cutoff", self.cutoff)):
            if length is not None:
                check_length(argument, length)
        if self.length is not None and isinstance(self.coordinates, PairCoordinates):
            raise ValueError(f"length: expected None with {self.coordinates}, got {self.length}")

    @property
    def continuous(self) -> bool:
        """Whether the coordinates are continuous functions of relative elements; logarithms jump at half turns."""
        return self.coordinates != "log" if isinstance(self.coordinates, str) else self.coordinates.continuous


@dataclass(frozen=True)
class AttentionOptions:
    """Options of the attention and of its block.

    Attributes
    ----------
    kernel, normalize, hidden, features, location, feature_channels, dropout
        See :class:`lieattn.nn.LieSelfAttention`.
    activation
        Activation of the networks of the scores and of the MLPs of the blocks.
    norm, eps
        See :class:`lieattn.nn.LieBlock`.
    """

    kernel: Kernel = "sum"
    normalize: Normalization = "softmax"
    hidden: int = 16
    features: Literal["product", "linear", "mixed"] = "mixed"
    location: Literal["network", "coordinates"] = "coordinates"
    feature_channels: int | None = None
    dropout: float = 0.0
    activation: Activation = "silu"
    norm: BlockNorm = "layer_pre"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_arguments(AttentionOptions, vars(self))


@dataclass(frozen=True)
class ConvolutionOptions:
    """Options of the blocks of LieConv, see :class:`lieattn.nn.LieBottleneck`.

    Attributes
    ----------
    rank, hidden, norm, activation
        Options of the kernels and blocks. A normalization also follows the last block.
    downsampling
        Share of the points that remain after all blocks. Each block keeps the same share.
    widening
        Exponent w. If a block keeps a share s of the points, channels grow by the factor s^-w (w = ½ in the paper's
        image network), and the radius of the neighborhoods by s^(-1 / dim).
    attention, heads
        Scores that weight the neighbors in every block (:class:`lieattn.nn.AttentiveConvolution`), with a quarter of
        the channels of the block, which the heads must divide; None for convolutions without attention. ``norm`` and
        ``eps`` of the attention options are not used.
    """

    rank: int = 16
    hidden: int = 32
    norm: Literal["batch", "layer", "none"] = "batch"
    activation: Activation = "silu"
    downsampling: float = 1.0
    widening: float = 0.5
    attention: AttentionOptions | None = None
    heads: int = 8

    def __post_init__(self) -> None:
        check_arguments(ConvolutionOptions, vars(self))
        check_counts(heads=self.heads)
        if not 0 < self.downsampling <= 1:
            raise ValueError(f"downsampling: expected a share in (0, 1], got {self.downsampling}")
        if not 0 <= self.widening <= 1:
            raise ValueError(f"widening: expected an exponent from 0 to 1, got {self.widening}")


@dataclass(frozen=True)
class Readout:
    """Read-out of the field after the last block.

    Attributes
    ----------
    kind
        ``"invariant"`` numbers, by :class:`lieattn.nn.InvariantHead`; or ``"vector"`` outputs, for orthogonal frames,
        by :class:`lieattn.nn.VectorHead`.
    pool
        ``"mean"``, ``"max"`` (for numbers) or ``"sum"`` over the points of a cloud; ``"none"`` for outputs at points.
    order
        Order of pooling and maps for numbers: ``"pool_first"`` as in the authors' ``model_1``, or ``"point_first"`` as
        in their ``lieconv``. If absent, it is that of the paper of the network: the former for
        :class:`LieTransformer`, the latter for :class:`LieConvNet`. Sums are extensive, as energies should be, only
        with ``"point_first"``; the other order has a nonlinear map after the sum.
    norm
        Whether a layer normalization precedes each activation of ``"pool_first"``.
    activation
        Activation of the head.
    """

    kind: OutputKind = "invariant"
    pool: Pooling = "mean"
    order: Order | None = None
    norm: bool = False
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        check_arguments(Readout, vars(self))

    def head(self, channels: int, out_channels: int, dim: int, order: Order) -> nn.Module:
        """Return the head of a network; ``order`` is used if :attr:`order` is None."""
        check_arguments(Readout.head, locals())
        check_counts(channels=channels, out_channels=out_channels, dim=dim)
        options: dict[str, Any] = {"outputs": out_channels, "pool": self.pool, "activation": self.activation}
        if self.kind == "vector":
            return VectorHead(channels, dim, **options)
        return InvariantHead(channels, readout=self.order or order, norm=self.norm, **options)


class LieNetwork(LiftedNetwork):
    """Base class of networks on lifted points that depend on positions through coordinates of relative elements."""

    local: nn.Module | None

    def __init__(
        self,
        in_channels: PointInputs,
        channels: int,
        frames: AnyFrames | None,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None,
        vector_inputs: VectorInputs,
        lifting: Lifting | None,
    ) -> None:
        check_counts(channels=channels)
        super().__init__(frames, in_channels, neighborhood, space, vector_inputs)
        self.lifting = options = lifting or Lifting()
        self.recomputes = options.piece is not None
        chart = options.coordinates
        self.tied = tied_lengths(neighborhood, length=options.length, cutoff=options.cutoff)
        self.tied |= {
            "bound": repr(options.bound),
            "coordinates": chart if isinstance(chart, str) else tied_repr(chart),
        }
        if isinstance(chart, PairCoordinates):
            count = chart.count(self.space)
        else:
            if chart == "log":
                _check_logarithms(self.space, self.frames)
            count = num_coordinates(self.space, chart) + isinstance(self.frames, ScaleFrames)
        self.num_coordinates = options.radial + count
        if options.radial:
            if not _is_rigid(self.space):
                raise ValueError(f"radial: expected 0, since distances are not invariant in {self.space.name}")
            cutoff_of(neighborhood, options.cutoff, "lifting.cutoff")
        self.embed = nn.Linear(self.in_channels, channels)
        self.embed_vectors = VectorEmbedding(vector_inputs, self.space.group.dim, channels)

    @property
    def symmetry(self) -> Symmetry:
        found, frames = super().symmetry, self.frames
        # Frames of a finite group have finitely many relative rotations, so each half turn has one fixed logarithm.
        of_clouds = isinstance(frames, FiniteFrames) or (isinstance(frames, PrincipalFrames) and frames.of == "cloud")
        if frames is None or self.lifting.continuous or (of_clouds and isinstance(self.space, Euclidean)):
            return found
        shifts = Translations(found.group.dim) if found.all_translations and found.group is not None else None
        jumps = f"to {found.name} except at half turns, where coordinates of relative elements jump"
        return replace(found, group=shifts, notes=(*found.notes, jumps))

    @property
    def jumps(self) -> tuple[str, ...]:
        options, beyond = self.lifting, tuple[str, ...]()
        if options.cutoff is not None and (options.radial or options.local) and isinstance(self.neighborhood, Radius):
            beyond = jumps_of_neighbors(self.neighborhood, options.cutoff)
        still = options.continuous or self.space.group.only_translates
        halves = () if still else ("logarithms jump at half turns: use coordinates='smooth'",)
        return (*super().jumps, *beyond, *halves)

    def _local(self, channels: int) -> nn.Module | None:
        """Return the convolution before the blocks, or None."""
        size, cutoff = self.lifting.local, self.lifting.cutoff
        if not size:
            return None
        cutoff = self.neighborhood.length if cutoff is None else cutoff
        if cutoff is None or not _is_rigid(self.space) or isinstance(self.frames, ScaleFrames):
            return SeenInCoordinates(self.in_channels, channels, self.num_coordinates, size)
        in_vectors = len(self.vector_inputs)
        return SeenByFrames(self.space.group.dim, self.in_channels, in_vectors, channels, size, cutoff)

    def _attention(self, options: AttentionOptions, channels: int, heads: int) -> LieSelfAttention:
        """Return an attention layer, without the options of the block around it."""
        scores = asdict(options)
        del scores["norm"], scores["eps"]
        return LieSelfAttention(channels, self.num_coordinates, heads=heads, **scores)

    def _lifted(self, data: Any, generator: torch.Generator | None) -> tuple[LiftedGraph, torch.Generator | None]:
        """Return lifted clouds with all neighbors, and the generator that training continues to draw from."""
        generator = new_generator() if self.training and generator is None else generator
        chart, length = self.lifting.coordinates, self.lifting.length
        given: dict[str, Any] = {"length": length, "coordinates": chart, "generator": generator}
        if isinstance(chart, PairCoordinates):
            given |= {"length": 1.0, "coordinates": "smooth"}
        clouds = point_clouds(data)
        given["vectors"] = self.seen_vectors(data, clouds)
        return lift(clouds, self.frames, self.neighborhood, self.space, **given), generator

    def _dropped(self, graph: LiftedGraph, generator: torch.Generator | None) -> LiftedGraph:
        """Return the graph without the neighbors that training drops."""
        if self.training and self.lifting.neighbor_dropout:
            kept = share_of_neighbors(graph.neighbors, 1 - self.lifting.neighbor_dropout, generator)
            graph = graph.select_edges(kept)
        return graph

    def _prepared(self, graph: LiftedGraph) -> LiftedGraph:
        """Return the graph with the coordinates that the options ask for."""
        options, relative = self.lifting, graph.relative
        # Geometry keeps its precision under autocast.
        with without_autocast(graph.device):
            if isinstance(options.coordinates, PairCoordinates):
                relative = relative.with_coordinates(options.coordinates(graph))
            if options.bound:
                relative = relative.bounded()
            if options.radial:
                cutoff = cutoff_of(self.neighborhood, options.cutoff)
                square = (relative.displacements() / cutoff).square().sum(dim=1)
                functions = bessel_functions(square, options.radial, squared=True)
                relative = relative.joined(functions * smooth_window(square, squared=True)[:, None])
        return graph if relative is graph.relative else graph.with_relative(relative)

    def _piecewise(
        self, layer: Callable[..., Tensor], found: list[Piece], graph: LiftedGraph, *fields: Tensor
    ) -> Tensor:
        """Return ``layer(*fields, graph)``, evaluated piece by piece if there are pieces."""
        if not found:
            return self._through(layer, *fields, graph)
        rows = zip(*(Piece.rows(x, found) for x in fields), strict=True)
        parts = [recomputed(self._on_piece, layer, piece, *own) for piece, own in zip(found, rows, strict=True)]
        places = torch.cat([piece.points[piece.own] for piece in found])
        return torch.cat(parts)[places.argsort()]

    def _on_piece(self, layer: Callable[..., Tensor], piece: Piece, *fields: Tensor) -> Tensor:
        # A copy, because relative elements keep their evaluated coordinates, which would stay in memory.
        graph = self._prepared(piece.graph.with_relative(replace(piece.graph.relative)))
        return layer(*fields, graph).index_select(0, piece.own)

    def _embedded(self, data: Any, graph: LiftedGraph, found: list[Piece]) -> Tensor:
        """Return the field before the blocks, ``[points, fiber, channels]``."""
        x = self.point_features(data, graph)
        field = self.embed(x)[:, None].expand(-1, graph.fiber, -1)
        seen = self.embed_vectors(data, graph)
        if self.local is not None:
            around = self._piecewise(self.local, found, graph, x, vectors(data, self.vector_inputs, graph))
            seen = around if seen is None else seen + around
        return field if seen is None else field + seen

    def point_features(self, data: Any, graph: LiftedGraph) -> Tensor:
        """Return the input features of the lifted points, ``[points, in_channels]``."""
        check_is("graph", graph, LiftedGraph)
        return graph.spread(features(data, self.inputs, graph))


class SeenByFrames(nn.Module):
    """Convolution before the blocks: an edge network in the frames of each point, and a lifting convolution."""

    def __init__(self, dim: int, in_channels: int, in_vectors: int, channels: int, hidden: int, cutoff: float) -> None:
        super().__init__()
        self.edges = EdgeNetwork(dim, in_channels, cutoff=cutoff, in_vectors=in_vectors, hidden=hidden)
        self.convolution = LiftingConvolution(hidden, channels)

    def forward(self, x: Tensor, vectors: Tensor, graph: LiftedGraph) -> Tensor:
        """Map features ``[points, in_channels]`` and vectors to a field ``[points, fiber, channels]``."""
        terms = self.edges(graph.carrying(vectors=vectors), x)
        return cast(Tensor, self.convolution(terms.psi, graph))


class SeenInCoordinates(nn.Module):
    """Convolution before the blocks, of the features and a constant, with kernels of the coordinates."""

    def __init__(self, in_channels: int, channels: int, coordinates: int, rank: int) -> None:
        super().__init__()
        self.convolution = LieConvolution(in_channels + 1, channels, coordinates, rank=rank)
        kernel = self.convolution.kernel
        for linear in (kernel.linear1, kernel.linear2, kernel.linear3):
            keep_variance(linear, 1.5)
        nn.init.normal_(self.convolution.weight, std=2.0 / math.sqrt(rank))

    def forward(self, x: Tensor, vectors: Tensor, graph: LiftedGraph) -> Tensor:
        """Map features ``[points, in_channels]`` to a field ``[points, fiber, channels]``; ``vectors`` are not used."""
        seen = F.pad(x, (0, 1), value=1.0)[:, None].expand(-1, graph.fiber, -1)
        return cast(Tensor, self.convolution(seen, graph))


def share_of_neighbors(neighbors: Neighbors, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Return edges ``[kept]`` to a random share of each point's neighbors: at least one, the point itself first."""
    device, drawn_on = neighbors.device, "cpu" if generator is None else generator.device
    draw = torch.rand(neighbors.num_edges, generator=generator, dtype=torch.float64, device=drawn_on).to(device)
    if transformed() and is_batched(draw):
        reason = "torch.func.vmap with randomness='different' would keep different neighbors in each entry"
        raise RuntimeError(f"neighbor_dropout: {reason}; use randomness='same'")
    draw = torch.where(neighbors.is_loop, 0.0, draw)
    # Sorted by target, then by the random number.
    order = (neighbors.target + 0.5 * draw).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=device)
    rank = rank - neighbors.row_ptr[neighbors.target]
    return (rank < (neighbors.degree * share).ceil()[neighbors.target]).nonzero()[:, 0]


def _is_rigid(space: HomogeneousSpace) -> bool:
    """Whether a space is R^d with rigid motions of a group that the library defines.

    In contrast to :func:`lieattn.geometry.lift`, user-defined Lie groups are not tested numerically, because the result
    decides which layers a network has, and so which saved weights fit it.
    """
    linear = space.stabilizer
    known = linear is None or linear.has_rotations or isinstance(linear, FiniteGroup)
    return isinstance(space, Euclidean) and known and space.group.is_orthogonal is True


def _check_logarithms(space: HomogeneousSpace, frames: AnyFrames | None) -> None:
    """Raise ValueError if relative elements of the frames have no logarithms."""
    linear = space.stabilizer
    if isinstance(linear, FiniteGroup):
        raise ValueError(f"coordinates: {space.group.name} has no logarithms; use a space such as Euclidean(SE(3))")
    if isinstance(frames, FiniteFrames):
        improper = not frames.group.is_proper
    else:
        proper = isinstance(frames, PrincipalFrames) and frames.improper is False
        reflects = linear is not None and linear.has_reflections
        improper = reflects and isinstance(frames, PrincipalFrames | SampledFrames) and not proper
    if improper:
        raise ValueError(
            f"coordinates: expected 'smooth', since {frames} include reflections, which have no logarithms, got 'log'"
        )
