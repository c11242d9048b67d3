"""What LieTransformer and LieConv share: from data to lifted clouds, and to the field before the blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_neighborhood
from lieattn.geometry import (
    FiniteFrames,
    Frames,
    GivenFrames,
    LiftedGraph,
    Neighborhood,
    Neighbors,
    PrincipalFrames,
    SampledFrames,
    ScaleFrames,
    lift,
    natural_space,
    num_coordinates,
)
from lieattn.groups import SO, FiniteGroup, O, Translations
from lieattn.models._network import Network, Symmetry, VectorEmbedding, cutoff_of, features, new_generator, vectors
from lieattn.models.lie._options import Lifting, PairCoordinates, SortedDistances, Species
from lieattn.nn import LieConvolution, LiftingConvolution
from lieattn.nn.relative import EdgeNetwork, keep_variance
from lieattn.ops import bessel_functions, smooth_lengths, smooth_window
from lieattn.spaces import Euclidean, HomogeneousSpace

# The frames are named one by one for configuration files, which cannot name a class for a protocol that is called.
AnyFrames = FiniteGroup | FiniteFrames | PrincipalFrames | SampledFrames | GivenFrames | ScaleFrames | Frames


class LieNetwork(Network):
    """A network on lifted points that sees them through coordinates of relative elements; see the subclasses."""

    local: nn.Module | None

    def __init__(
        self,
        in_channels: int | Species | SortedDistances,
        channels: int,
        frames: AnyFrames | None,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None,
        vector_inputs: Sequence[str],
        lifting: Lifting | None,
    ) -> None:
        super().__init__()
        check_neighborhood(neighborhood)
        check_count("channels", channels)
        self.inputs = None
        if isinstance(in_channels, Species | SortedDistances):
            self.inputs, in_channels = in_channels, in_channels.channels
        check_count("in_channels", in_channels)
        self.in_channels, self.vector_inputs = in_channels, tuple(vector_inputs)
        self.frames = FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
        self.space = natural_space(self.frames) if space is None else space
        if not isinstance(self.space, HomogeneousSpace):
            raise TypeError(f"space: expected a HomogeneousSpace such as Euclidean(SE(3)), got {self.space!r}")
        if self.space.stabilizer is not None and frames is None:
            raise TypeError(f"frames: expected some such as PrincipalFrames(), since {self.space.name} needs them")
        self.neighborhood, self.lifting = neighborhood, lifting or Lifting()
        self.num_coordinates = self.lifting.radial + self._num_coordinates(self.lifting.coordinates)
        if self.lifting.radial:
            if not _keeps_distances(self.space):
                raise ValueError(f"radial: distances are invariant under rigid motions, not in {self.space.name}")
            cutoff_of(neighborhood, self.lifting.cutoff)
        self.embed = nn.Linear(self.in_channels, channels)
        self.sees_order = isinstance(self.frames, SampledFrames) and self.frames.per == "point"
        self.embed_vectors = VectorEmbedding(vector_inputs, self.space.group.dim, channels)

    @property
    def symmetry(self) -> Symmetry:
        """That of the frames; translations alone where coordinates of relative elements jump."""
        found = Symmetry.of_frames(self.space, self.frames)
        if self.frames is None or self.lifting.continuous:
            return found
        shifts = Translations(self.space.group.dim) if isinstance(self.space, Euclidean) else None
        jumps = f"coordinates of relative elements jump at half turns, elsewhere to {found.name}"
        return replace(found, group=shifts, notes=(*found.notes, jumps))

    def _num_coordinates(self, chart: Literal["smooth", "log"] | PairCoordinates) -> int:
        space = self.space
        if isinstance(chart, PairCoordinates):
            return chart.count(space)
        if chart == "log" and isinstance(space.stabilizer, FiniteGroup):
            name = space.group.name
            raise ValueError(f"coordinates: {name} has no logarithms; give a space such as Euclidean(SE(3))")
        return num_coordinates(space, chart) + isinstance(self.frames, ScaleFrames)

    def _local(self, channels: int) -> nn.Module | None:
        """The convolution before the blocks."""
        size, cutoff = self.lifting.local, self.lifting.cutoff
        if not size:
            return None
        cutoff = self.neighborhood.length if cutoff is None else cutoff
        if cutoff is None or not _keeps_distances(self.space) or isinstance(self.frames, ScaleFrames):
            return SeenInCoordinates(self.in_channels, channels, self.num_coordinates, size)
        in_vectors = len(self.vector_inputs)
        return SeenByFrames(self.space.group.dim, self.in_channels, in_vectors, channels, size, cutoff)

    def _generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """Where training draws from: a generator that continues torch's default one, if none is given."""
        return new_generator() if self.training and generator is None else generator

    def _lifted(self, data: Any, generator: torch.Generator | None) -> LiftedGraph:
        """Lifted clouds with all neighbors."""
        options = self.lifting
        own = not isinstance(options.coordinates, PairCoordinates)
        return lift(
            data,
            self.frames,
            self.neighborhood,
            self.space,
            length=options.length if own else 1.0,
            coordinates="log" if options.coordinates == "log" else "smooth",
            generator=generator,
        )

    def _prepared(self, graph: LiftedGraph, generator: torch.Generator | None) -> LiftedGraph:
        """The graph with the neighbors and the coordinates that the options ask for, evaluated."""
        options = self.lifting
        if self.training and options.neighbor_dropout:
            kept = share_of_neighbors(graph.neighbors, 1 - options.neighbor_dropout, generator)
            graph = graph.select_edges(kept)
        relative = graph.relative
        # Geometry keeps its precision under autocast.
        with torch.autocast(graph.device.type, enabled=False):
            if isinstance(options.coordinates, PairCoordinates):
                relative = relative.with_coordinates(options.coordinates(graph))
            if options.bound:
                relative = relative.bounded()
            if options.radial:
                length = smooth_lengths(relative.displacements()) / cutoff_of(self.neighborhood, options.cutoff)
                relative = relative.joined(bessel_functions(length, options.radial) * smooth_window(length)[:, None])
        if relative.coordinates.shape[-1] != self.num_coordinates:
            raise ValueError(
                f"graph: expected {self.num_coordinates} coordinates of a relative element, got "
                f"{relative.coordinates.shape[-1]}"
            )
        return graph if relative is graph.relative else graph.with_relative(relative)

    def _embedded(self, data: Any, graph: LiftedGraph) -> Tensor:
        """Field before the blocks, ``[points, fiber, channels]``."""
        x = self.point_features(data, graph)
        field = self.embed(x)[:, None].expand(-1, graph.fiber, -1)
        seen = self.embed_vectors(data, graph)
        if self.local is not None:
            around = self.local(x, vectors(data, self.vector_inputs, graph), graph)
            seen = around if seen is None else seen + around
        return field if seen is None else field + seen

    def point_features(self, data: Any, graph: LiftedGraph) -> Tensor:
        """What the embedding sees of each point, ``[points, in_channels]``."""
        if self.inputs is None:
            return graph.spread(features(data, self.in_channels, graph))
        return graph.spread(self.inputs(data, graph).to(self.embed.weight))


class SeenByFrames(nn.Module):
    """What the frames of each point see of its neighbors: an edge network, and a lifting convolution."""

    def __init__(self, dim: int, in_channels: int, in_vectors: int, channels: int, hidden: int, cutoff: float) -> None:
        super().__init__()
        self.edges = EdgeNetwork(dim, in_channels, cutoff=cutoff, in_vectors=in_vectors, hidden=hidden)
        self.convolution = LiftingConvolution(hidden, channels)

    def forward(self, x: Tensor, vectors: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, channels]`` of features ``[points, in_channels]`` and vectors."""
        field: Tensor = self.convolution(self.edges(graph, x, vectors), graph)
        return field


class SeenInCoordinates(nn.Module):
    """A convolution of features, and of a constant beside them, with kernels of the coordinates."""

    def __init__(self, in_channels: int, channels: int, coordinates: int, rank: int) -> None:
        super().__init__()
        self.convolution = LieConvolution(in_channels + 1, channels, coordinates, rank=rank)
        kernel = self.convolution.kernel
        for linear in (kernel.linear1, kernel.linear2, kernel.linear3):
            keep_variance(linear, 1.5)
        nn.init.normal_(self.convolution.weight, std=2.0 / math.sqrt(rank))

    def forward(self, x: Tensor, vectors: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, channels]`` of features ``[points, in_channels]``; vectors are not seen."""
        field: Tensor = self.convolution(F.pad(x, (0, 1), value=1.0)[:, None].expand(-1, graph.fiber, -1), graph)
        return field


def share_of_neighbors(neighbors: Neighbors, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Edges ``[kept]`` of a random share of each point's neighbors, at least one, itself if it is one."""
    device = neighbors.device
    draw = torch.rand(neighbors.num_edges, generator=generator, dtype=torch.float64).to(device)
    draw = torch.where(neighbors.source == neighbors.target, 0.0, draw)
    # By target, then by draw.
    order = (neighbors.target + 0.5 * draw).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=device)
    rank = rank - neighbors.row_ptr[neighbors.target]
    return (rank < (neighbors.degree * share).ceil()[neighbors.target]).nonzero()[:, 0]


def _keeps_distances(space: HomogeneousSpace) -> bool:
    """Whether a space is R^d under rigid motions."""
    linear = space.stabilizer
    rigid = linear is None or isinstance(linear, SO | O) or (isinstance(linear, FiniteGroup) and linear.is_orthogonal)
    return isinstance(space, Euclidean) and rigid
