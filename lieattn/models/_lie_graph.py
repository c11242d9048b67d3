"""From data to the graph that LieTransformer and LieConv work on: lifting, coordinates, squash, training subsets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_count, check_length, check_neighborhood
from lieattn.geometry import (
    FiniteFrames,
    GivenFrames,
    Lift,
    LiftedElements,
    Neighborhood,
    Neighbors,
    PrincipalFrames,
    SampledFrames,
    join_coordinates,
    lift_elements,
)
from lieattn.groups import SO, O
from lieattn.models._lie_coordinates import Coordinates, check_coordinates, num_coordinates, published_pairs
from lieattn.models._point_inputs import length_of
from lieattn.nn import bessel_functions, smooth_lengths, smooth_window
from lieattn.spaces import Euclidean, HomogeneousSpace

# The lifts are named one by one for configuration files, which cannot name a class for a protocol that is called.
Frames = FiniteFrames | SampledFrames | PrincipalFrames | GivenFrames | Lift


@dataclass(frozen=True, eq=False)
class Lifting:
    """How point clouds become graphs of pairs of group elements; a value.

    Attributes
    ----------
    space
        X = G/H.
    frames
        What stands over each point: a lift of :mod:`lieattn.geometry`, None where the stabilizer is trivial.
    neighborhood
        Which points are neighbors.
    coordinates
        See :func:`lieattn.models.published_pairs`.
    scale
        Length that translations are divided by; the neighborhood's own if absent, or 1. The conventions of the authors
        know none.
    squash
        Whether coordinates p become p tanh(|p| / 7) / |p|.
    keep
        Share of the neighbors of a point that training keeps, drawn anew each time; a point keeps itself.
    radial
        Number of Bessel functions of the distance, windowed, that follow the coordinates of each pair.
    cutoff
        Distance at which they vanish; the neighborhood's own length if absent.
    """

    space: HomogeneousSpace
    frames: Frames | None
    neighborhood: Neighborhood
    coordinates: Coordinates = "smooth"
    scale: float | None = None
    squash: bool = False
    keep: float = 1.0
    radial: int = 0
    cutoff: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.space, HomogeneousSpace):
            raise TypeError(f"space: expected a HomogeneousSpace such as Euclidean(SE(3)), got {self.space!r}")
        if self.space.stabilizer is not None and self.frames is None:
            raise TypeError(f"frames: expected a lift such as PrincipalFrames(), since {self.space.name} needs one")
        check_neighborhood(self.neighborhood)
        check_coordinates(self.space, self.coordinates)
        if self.scale is not None:
            check_length("scale", self.scale)
            if self.coordinates not in ("smooth", "log"):
                raise ValueError(f"scale: coordinates {self.coordinates!r} are those of the authors and have none")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep: expected a share in (0, 1], got {self.keep}")
        check_count("radial", self.radial, least=0)
        if self.radial:
            check_distances("radial", self.space)
            length_of("cutoff", self.neighborhood, self.cutoff)

    @property
    def num_coordinates(self) -> int:
        """Numbers that describe a relative element and its distance."""
        return num_coordinates(self.space, self.coordinates) + self.radial

    def __call__(
        self, data: Any, *, training: bool = False, generator: torch.Generator | None = None
    ) -> LiftedElements:
        """Graph of the clouds of ``data``.

        In training random frames and the share of the neighbors are new at every call, drawn from the generator or,
        if absent, from torch's default one; otherwise the result is a function of the data.
        """
        if training and generator is None:
            generator = _new_generator()
        graph = self.elements(data, training=training, generator=generator)
        return self.coordinated(graph, training=training, generator=generator)

    def elements(
        self, data: Any, *, training: bool = False, generator: torch.Generator | None = None
    ) -> LiftedElements:
        """Lifted clouds with all neighbors and the coordinates that ``lift_elements`` has."""
        return lift_elements(
            data,
            self.space,
            self.frames,
            self.neighborhood,
            scale=self.scale if self._own else 1.0,
            coordinates="log" if self.coordinates == "log" else "smooth",
            generator=_new_generator() if training and generator is None else generator,
        )

    def coordinated(
        self, graph: LiftedElements, *, training: bool = False, generator: torch.Generator | None = None
    ) -> LiftedElements:
        """The graph with the coordinates asked for and, in training, a share of its neighbors."""
        if training and self.keep < 1:
            kept = share_of_neighbors(graph.neighbors, self.keep, generator)
            graph = replace(
                graph,
                neighbors=selected(graph.neighbors, kept),
                relative_coordinates=graph.relative_coordinates[kept],
            )
        if not self._own:
            pairs = published_pairs(self.space, graph.elements, graph.invariants, graph.neighbors, self.coordinates)
            graph = replace(graph, relative_coordinates=pairs)
        if self.squash:
            graph = replace(graph, relative_coordinates=squashed(graph.relative_coordinates))
        return self._with_distances(graph) if self.radial else graph

    def _with_distances(self, graph: LiftedElements) -> LiftedElements:
        pairs = graph.relative_coordinates
        edges = graph.neighbors.displacements(graph.pos)
        length = smooth_lengths(edges) / length_of("cutoff", self.neighborhood, self.cutoff)
        radial = bessel_functions(length, self.radial) * smooth_window(length)[:, None]
        radial = radial.to(pairs.dtype)[:, None, None].expand(*pairs.shape[:3], -1)
        return replace(graph, relative_coordinates=join_coordinates([pairs, radial]))

    @property
    def _own(self) -> bool:
        return self.coordinates in ("smooth", "log")


def check_distances(argument: str, space: HomogeneousSpace) -> None:
    """Refuse spaces whose group does not preserve distances."""
    rigid = space.stabilizer is None or isinstance(space.stabilizer, SO | O)
    if not (isinstance(space, Euclidean) and rigid):
        raise ValueError(f"{argument}: distances are invariant under rigid motions, not in {space.name}")


def _new_generator() -> torch.Generator:
    """A generator that continues torch's default one."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))


def squashed(pairs: Tensor, radius: float = 7.0) -> Tensor:
    """P tanh(ν / radius) / ν with ν = |p| + 1e-6: no pair is further than ``radius``. Smooth at 0."""
    squared = pairs.square().sum(-1, keepdim=True)
    apart = squared > 0
    length = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0) + 1e-6
    return pairs * (torch.tanh(length / radius) / length)


def share_of_neighbors(neighbors: Neighbors, keep: float, generator: torch.Generator | None = None) -> Tensor:
    """Edges ``[kept]`` of a random share of each point's neighbors, at least one, itself if it is one."""
    device = neighbors.device
    draw = torch.rand(neighbors.num_edges, generator=generator, dtype=torch.float64).to(device)
    draw = torch.where(neighbors.source == neighbors.target, 0.0, draw)
    # By target, then by draw.
    order = (neighbors.target + 0.5 * draw).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=device)
    rank = rank - neighbors.row_ptr[neighbors.target]
    return (rank < (neighbors.degree * keep).ceil()[neighbors.target]).nonzero()[:, 0]


def selected(neighbors: Neighbors, edges: Tensor) -> Neighbors:
    """Neighbor lists of some of the edges, given in ascending order."""
    target = neighbors.target[edges]
    counts = torch.bincount(target, minlength=neighbors.num_points)
    row_ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = None if neighbors.shift is None else neighbors.shift[edges]
    return Neighbors(row_ptr, neighbors.source[edges], target, shift=shift)
