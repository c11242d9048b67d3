"""The table of lifted clouds that tests of layers share: every kind of frames, and how its elements transform."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch_geometric.data import Data

from lieattn.geometry import FiniteFrames, Given, GivenFrames, LiftedGraph, PrincipalFrames, Radius, ScaleFrames, lift
from lieattn.groups import SE, SO, E, FiniteGroup, O, SemidirectProduct, Translations, cyclic, dihedral_about
from lieattn.spaces import Euclidean, HomogeneousSpace, Orbits, PositionDirection, Sphere
from tests.cases import SMALL_GROUPS, turns

POINTS = 12
RADIUS = 1.6


@dataclass(frozen=True, eq=False)
class Lifted:
    """Clouds of one kind.

    Attributes
    ----------
    space, group
        Arguments of layers: the space, and the finite group of the fiber, or None if there is none.
    draw
        ``draw(generator, dtype)`` returns points and batch.
    lift
        ``lift(pos, batch)`` returns the graph.
    moves
        ``moves(pos, batch)`` yields transformed points, a function that transforms a field in the same way, and the
        graph of the transformed points. If the function is None, means over the fiber are compared, since the order of
        the frames may change.
    """

    space: HomogeneousSpace
    group: FiniteGroup | None
    draw: Callable
    lift: Callable[..., LiftedGraph]
    moves: Callable

    @property
    def made_for(self):
        """The arguments for layers of this case."""
        return self.space if self.group is None else self.group

    @cached_property
    def tied(self):
        """Whether all points of a cloud have the same frames."""
        pos, batch = self.draw(torch.Generator().manual_seed(0), torch.float64)
        return self.lift(pos, batch).relative.tied


def _normal(dim):
    def draw(generator, dtype, points=POINTS):
        pos = torch.randn(points, dim, generator=generator, dtype=torch.float64).to(dtype)
        return pos, torch.arange(points) % 2

    return draw


def _finite(group, frames=None, neighborhood=None):
    frames = group if frames is None else frames
    neighborhood = Radius(RADIUS) if neighborhood is None else neighborhood

    def lifted(pos, batch):
        # Edges to the point after the next, which is in the same cloud.
        edges = torch.arange(max(len(pos) - 2, 0)) + torch.tensor([[0], [2]])
        return lift(Data(pos=pos, batch=batch, edge_index=edges), frames, neighborhood)

    def moves(pos, batch):
        generator = torch.Generator().manual_seed(1)
        for h in turns(group):
            shift = torch.randn(group.dim, generator=generator, dtype=torch.float64).to(pos)
            moved = group.act(h, pos) + shift
            yield moved, lambda field, h=h: group.translate(h, field), lifted(moved, batch)

    return Lifted(Euclidean(SemidirectProduct(group)), group, _normal(group.dim), lifted, moves)


def _elements(space, draw, frames_of, neighborhood=None):
    """Return given frames, which random elements of the group transform with the points."""
    neighborhood = Radius(RADIUS) if neighborhood is None else neighborhood

    def with_frames(pos, batch, frames):
        given = None if frames is None else GivenFrames(frames.to(pos.dtype))
        return lift(pos, given, neighborhood, space, batch=batch)

    def lifted(pos, batch):
        return with_frames(pos, batch, frames_of(len(pos)))

    def moves(pos, batch):
        generator = torch.Generator().manual_seed(2)
        for g in space.group.sample(2, generator=generator, dtype=torch.float64):
            wide = pos.double()
            moved = space.act(g, wide)
            frames = frames_of(len(pos))
            if frames is not None:
                elements = space.group.product(g, space.lift(wide, frames))
                own = space.group.product(space.group.inverse(space.section(moved))[:, None], elements)
                k = frames.shape[-1]
                own = space.group.linear(own)
                frames = own[..., -k:, -k:]
            moved = moved.to(pos)
            yield moved, lambda field: field, with_frames(moved, batch, frames)

    return Lifted(space, None, draw, lifted, moves)


def _principal(space, frames, dim):
    """Return frames computed from the data; their order in the fiber may change."""

    def lifted(pos, batch):
        return lift(pos, frames, Radius(RADIUS), space, batch=batch)

    def moves(pos, batch):
        generator = torch.Generator().manual_seed(3)
        for g in space.group.sample(2, generator=generator, dtype=torch.float64):
            moved = space.act(g, pos.double()).to(pos)
            yield moved, None, lifted(moved, batch)

    group = lifted(*_normal(dim)(torch.Generator().manual_seed(0), torch.float64)).group
    return Lifted(space, group, _normal(dim), lifted, moves)


def _sampled(group, fiber):
    def frames_of(points):
        generator = torch.Generator().manual_seed(5)
        return group.sample(points, fiber, generator=generator, dtype=torch.float64)

    return frames_of


def _on_sphere(generator, dtype, points=POINTS):
    pos, batch = _normal(3)(generator, torch.float64, points)
    return (pos / pos.norm(dim=1, keepdim=True)).to(dtype), batch


def _with_directions(generator, dtype, points=POINTS):
    pos, batch = _normal(3)(generator, torch.float64, points)
    return torch.cat([pos, _on_sphere(generator, torch.float64, points)[0]], dim=1).to(dtype), batch


LIFTED: dict[str, Lifted] = {
    **{name: _finite(group) for name, group in SMALL_GROUPS.items()},
    "C3 on scales": _finite(SMALL_GROUPS["C3"], ScaleFrames(SMALL_GROUPS["C3"], levels=2)),
    "C4 in SE(2)": _finite(cyclic(4), FiniteFrames(cyclic(4))),
    "C3, smooth": _finite(SMALL_GROUPS["C3"], neighborhood=Radius(RADIUS, smooth=True)),
    "C3, edges of the data": _finite(SMALL_GROUPS["C3"], neighborhood=Given("edge_index")),
    "SE(2), given, smooth": _elements(Euclidean(SE(2)), _normal(2), _sampled(SO(2), 3), Radius(RADIUS, smooth=True)),
    "R^2": _elements(Euclidean(Translations(2)), _normal(2), lambda points: None),
    "SE(2), given": _elements(Euclidean(SE(2)), _normal(2), _sampled(SO(2), 3)),
    "SE(3), given": _elements(Euclidean(SE(3)), _normal(3), _sampled(SO(3), 2)),
    "E(3), given": _elements(Euclidean(E(3)), _normal(3), _sampled(E(3).stabilizer, 2)),
    "SE(3), principal": _principal(Euclidean(SE(3)), PrincipalFrames(), 3),
    "SE(2), principal of neighborhoods": _principal(Euclidean(SE(2)), PrincipalFrames(of="neighborhood"), 2),
    "SE(3), posed D2": _principal(Euclidean(SE(3)), FiniteFrames(dihedral_about(2), PrincipalFrames()), 3),
    "sphere": _elements(Sphere(), _on_sphere, _sampled(SO(2), 2)),
    "sphere, O(3)": _elements(Sphere(improper=True), _on_sphere, _sampled(O(2), 2)),
    "SO(3)": _elements(Orbits(SO(3)), _normal(3), _sampled(SO(2), 2)),
    "positions and directions": _elements(PositionDirection(), _with_directions, _sampled(SO(2), 2)),
}
"""Lifted clouds by what stands over the points; those of SMALL_GROUPS by the name of the group."""
