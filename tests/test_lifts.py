"""Lifted elements: relative coordinates against their definition, and the guarantee of every lift, with controls."""

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lieattn.geometry import (
    AllPairs,
    Coarse,
    DegenerateFramesWarning,
    FiniteFrames,
    GivenFrames,
    GroupFrames,
    Nearest,
    PixelSquare,
    PrincipalFrames,
    Radius,
    SampledFrames,
    Sites,
    _principal_axes,
    coarsen,
    farthest_by_distance,
    farthest_points,
    lift,
    natural_space,
    pixel_positions,
    point_clouds,
)
from lieattn.geometry._principal_axes import Candidates, completed_axes, principal_axes
from lieattn.groups import (
    SE,
    SO,
    Dilations,
    E,
    FiniteGroup,
    O,
    RotationDilations,
    Sim,
    Translations,
    _finite,
    cyclic,
    inversion,
    octahedral,
    tetrahedral,
)
from lieattn.models import FramewiseTransformer, GSANet, LieConvNet, LieTransformer, Lifting
from lieattn.nn import GridPool
from lieattn.spaces import Euclidean, HomogeneousSpace, Orbits, PositionDirection, Sphere
from lieattn.testing import TOLERANCE, randomize
from tests.cases import each, of_edges, refuses

F64 = torch.float64

SPACES = {
    "R2 translations": Euclidean(Translations(2)),
    "R3 translations": Euclidean(Translations(3)),
    "SE(2)": Euclidean(SE(2)),
    "E(2)": Euclidean(E(2)),
    "Sim(2)": Euclidean(Sim(2)),
    "SE(3)": Euclidean(SE(3)),
    "E(3)": Euclidean(E(3)),
    "Sim(3)": Euclidean(Sim(3)),
    "orbits of SO(2)": Orbits(SO(2)),
    "orbits of SO(3)": Orbits(SO(3)),
    "orbits of R+": Orbits(Dilations(3)),
    "orbits of R+xSO(2)": Orbits(RotationDilations(2)),
    "orbits of R+xSO(3)": Orbits(RotationDilations(3)),
    "sphere": Sphere(),
    "positions with directions": PositionDirection(),
}
LIFTED = {name: space for name, space in SPACES.items() if space.stabilizer is not None}
every_space = each("space", SPACES)
every_lifted_space = each("space", LIFTED)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_points(space, number=9, seed=0, dtype=F64):
    """Return random points of a space, none of them near 0."""
    pos = torch.randn(number, space.dim, generator=generator(seed), dtype=F64)
    pos[:, : space.group.dim] += 0.3
    if isinstance(space, Sphere):
        pos = pos / pos.norm(dim=1, keepdim=True)
    if isinstance(space, PositionDirection):
        pos[:, 3:] /= pos[:, 3:].norm(dim=1, keepdim=True)
    return pos.to(dtype)


def random_clouds(space, dtype=F64):
    """Return points of three clouds in random order, and their cloud indices."""
    return random_points(space, 15, seed=1, dtype=dtype), torch.tensor([0, 2, 1, 0, 0, 2, 2, 0, 1, 2, 0, 2, 1, 0, 1])


def frames_for(space, fiber=3, number=15, seed=2):
    if space.stabilizer is None:
        return None
    return GivenFrames(space.stabilizer.sample(number, fiber, generator=generator(seed), dtype=F64))


def neighborhood_for(space):
    """Return a ball if the group preserves distances, otherwise all pairs."""
    scales = isinstance(space.group, Dilations | RotationDilations) or space.group.name.startswith("Sim")
    return AllPairs() if scales else Radius(1.9)


def functional(coordinates, seed=0):
    """Return a function of coordinates ``[edges, fiber, fiber, k]`` that does not depend on the order of fibers."""
    weight = torch.randn(coordinates.shape[-1], 7, generator=generator(seed), dtype=F64).to(coordinates.dtype)
    return torch.tanh(torch.sin(coordinates @ weight).mean(2)).mean(1)


def largest_error(found, expected):
    assert torch.isfinite(found).all()
    return float((found - expected).detach().abs().max())


def moved_by(space, g, pos):
    return space.act(g, pos.double()).to(pos.dtype)


def lift_to(points, space, frames, neighborhood, **options):
    """Call `lift` with the space before the frames, as in the tables of this file."""
    return lift(points, frames, neighborhood, space, **options)


def random_motion(space, seed=3):
    return space.group.sample(generator=generator(seed), dtype=F64)


# --- relative coordinates -------------------------------------------------------------------------------------


@every_space
@pytest.mark.parametrize("kind", ["smooth", "log"])
def test_relative_coordinates_are_those_of_the_definition(space, kind):
    """Element by element: coordinates of inverse(g_ia) g_jb, in the documented order. Elements map the origin to i."""
    group = space.group
    pos, batch = random_clouds(space)
    frames = frames_for(space)
    if kind == "log" and isinstance(space.stabilizer, O):  # improper elements have no logarithm
        frames = GivenFrames(SO(space.stabilizer.dim).sample(15, 3, generator=generator(2), dtype=F64))
    graph = lift_to(pos, space, frames, neighborhood_for(space), batch=batch, length=1.7, coordinates=kind)
    lies = space.act(graph.elements, space.representative(pos)[:, None].expand(-1, graph.fiber, -1))
    torch.testing.assert_close(lies, pos[:, None].expand_as(lies), rtol=0, atol=1e-12)
    q, dim = space.num_invariants, space.group.dim
    assert torch.equal(graph.frames.expand(15, graph.fiber, dim, dim), graph.elements[..., :dim, :dim])
    for edge in range(0, graph.neighbors.num_edges, 7):
        i, j = int(graph.neighbors.target[edge]), int(graph.neighbors.source[edge])
        assert batch[i] == batch[j]
        for a in range(graph.fiber):
            for b in range(graph.fiber):
                relative = torch.linalg.inv(graph.elements[i, a]) @ graph.elements[j, b]
                if group.is_affine:
                    relative[:-1, -1] /= 1.7
                if kind == "log":
                    expected = group.log(relative)
                elif isinstance(group, Translations):
                    expected = relative[:-1, -1]
                elif group.is_affine:
                    linear = group.stabilizer.coordinates(relative[:-1, :-1])
                    expected = torch.cat([relative[:-1, -1], linear])
                else:
                    expected = group.coordinates(relative)
                found = of_edges(graph)[edge, a, b]
                assert len(found) == len(expected) + 2 * q
                torch.testing.assert_close(found[: len(expected)], expected, rtol=0, atol=1e-10)
                both = torch.cat([space.invariants(pos[i]), space.invariants(pos[j])])
                torch.testing.assert_close(found[len(expected) :], both)


def test_gradients_flow_into_given_frames():
    pos = random_points(SPACES["SE(3)"], 4)
    algebra = torch.randn(4, 2, 3, generator=generator(5), dtype=F64, requires_grad=True)

    def call(a):
        frames = GivenFrames(SO(3).exp(a))
        return of_edges(lift_to(pos, SPACES["SE(3)"], frames, AllPairs())).sin().sum()

    assert torch.autograd.gradcheck(call, (algebra,))


def test_far_from_the_origin_single_precision_keeps_differences():
    """Relative translations are computed from differences of points, not from products of large matrices."""
    pos = random_points(SPACES["SE(3)"]).float()
    far = (pos.double() + 2.0**12).float()
    near = far.double() - 2.0**12
    lift = SampledFrames(2)
    found = of_edges(lift_to(far, SPACES["SE(3)"], lift, AllPairs()))
    expected = of_edges(lift_to(near, SPACES["SE(3)"], lift, AllPairs()))
    assert largest_error(found.double(), expected) < 1e-5


# --- lifts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["point", "cloud"])
@pytest.mark.parametrize("design", [None, True, False])
@pytest.mark.parametrize("name", ["E(2)", "SE(3)", "sphere", "orbits of SO(3)"])
def test_sampled_frames_are_deterministic_and_the_same_in_a_batch(name, per, design):
    space = SPACES[name]
    pos, batch = random_clouds(space)
    lift = SampledFrames(4, per=per, design=design)
    whole = lift_to(pos, space, lift, neighborhood_for(space), batch=batch)
    again = lift_to(pos, space, lift, neighborhood_for(space), batch=batch)
    assert torch.equal(whole.elements, again.elements)
    for cloud in range(3):
        alone = lift_to(pos[batch == cloud], space, lift, neighborhood_for(space))
        assert torch.equal(alone.elements, whole.elements[batch == cloud])
    other = lift_to(pos, space, SampledFrames(4, per=per, design=design, seed=1), AllPairs(), batch=batch)
    assert largest_error(other.elements, whole.elements) > 1e-2
    drawn = [
        lift_to(pos, space, lift, AllPairs(), batch=batch, generator=generator(seed)).elements for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert largest_error(drawn[2], drawn[0]) > 1e-2


def test_sampled_frames_of_large_clouds_do_not_repeat():
    pos = random_points(SPACES["SE(3)"], 200)
    for design in (None, False):
        whole = lift_to(pos, SPACES["SE(3)"], SampledFrames(2, design=design), Nearest(2)).frames
        assert torch.pdist(whole.flatten(1)).min() > 1e-3
        for number in (30, 64, 65, 130):
            first = lift_to(pos[:number], SPACES["SE(3)"], SampledFrames(2, design=design), Nearest(2)).frames
            assert torch.equal(first, whole[:number])


def test_sampled_frames_of_a_cloud_are_shared_and_designs_are_designs():
    space = SPACES["SE(3)"]
    pos, batch = random_clouds(space)
    frames = lift_to(pos, space, SampledFrames(24, per="cloud"), AllPairs(), batch=batch).frames
    assert all((frames[batch == cloud] == frames[batch == cloud][:1]).all() for cloud in range(3))
    drawn = lift_to(pos, space, SampledFrames(24, "cloud"), AllPairs(), batch=batch, generator=generator()).frames
    assert largest_error(drawn[1], drawn[0]) > 0.1  # of two clouds
    # A design averages matrix elements of degrees 1 to 3 exactly, independent frames do not.
    for design, exact in ((None, True), (True, True), (False, False)):
        frames = lift_to(pos, space, SampledFrames(24, design=design), AllPairs()).frames
        cubic = torch.einsum("pnij,pnkl,pnrs->pijklrs", frames, frames, frames) / 24
        spread = largest_error(cubic, cubic[:1].expand_as(cubic))
        assert (spread < 1e-12) == exact
    # If there is no design of this size, frames are drawn independently.
    assert lift_to(pos, space, SampledFrames(5), AllPairs()).fiber == 5


def bad_frames(frames, name="SE(3)"):
    return lambda: lift_to(random_points(SPACES[name]), SPACES[name], GivenFrames(frames), AllPairs())


def bad_lift(frames, name="SE(3)", pos=None, **options):
    pos = random_points(SPACES[name]) if pos is None else pos
    return lambda: lift_to(pos, SPACES[name], frames, AllPairs(), **options)


test_bad_arguments = refuses(
    (bad_frames(torch.diag(torch.tensor([1.0, 1.0, -1.0])).expand(9, 2, 3, 3)), r"frames: .* improper"),
    (bad_frames(1.1 * torch.eye(3).expand(9, 2, 3, 3)), r"frames: .* not orthonormal"),
    (bad_frames(torch.eye(2).expand(9, 2, 2, 2)), r"frames: expected \[\*, 3, 3\]"),
    (bad_frames(torch.eye(3).expand(8, 2, 3, 3)), "frames: expected frames of 9 points, got 8"),
    (bad_frames(torch.full((9, 1, 3, 3), torch.nan)), "frames: .* not finite"),
    (bad_frames(torch.zeros(9, 0, 3, 3)), "with a fiber"),
    (bad_frames(torch.eye(3).expand(9, 2, 3, 3), "R3 translations"), "frames: expected None, since the stabilizer"),
    (bad_lift(PrincipalFrames("neighborhood", cutoff=1.0), "Sim(3)"), r"cutoff: .* Sim\(3\) does not preserve lengths"),
    (lambda: PrincipalFrames(cutoff=1.0), "cutoff: expected None, since these are frames of clouds"),
    (bad_lift(PrincipalFrames(improper=True)), "improper: SO.3. has no improper"),
    (bad_lift(PrincipalFrames(), weights=torch.ones(3)), "weights: expected"),
    (
        bad_lift(PrincipalFrames(), weights=-torch.ones(9)),
        "weights: expected finite numbers from 0, got -1.0 for point 0",
    ),
    (bad_lift(SampledFrames(2), "orbits of SO(3)", torch.zeros(2, 3)), "is not a point of"),
)


SHEARED = FiniteGroup.generate(torch.tensor([[[-0.5, -1.25], [1.0, 0.5]]], dtype=torch.float64), "sheared C4")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LieTransformer(1, frames=PrincipalFrames(), neighborhood=Radius(1.0), space=Euclidean(Sim(3))),
        lambda: LieConvNet(1, frames=SHEARED, neighborhood=Radius(1.0)),
        lambda: LieTransformer(1, frames=PrincipalFrames(), neighborhood=PixelSquare(3), space=Euclidean(SE(2))),
        lambda: GSANet(SHEARED, 1, 2, neighborhood=Radius(1.0)),
        lambda: FramewiseTransformer(SHEARED, 1, 2, neighborhood=Radius(1.0)),
    ],
)
def test_networks_refuse_neighborhoods_that_do_not_move_along(make):
    """At construction, not at the first batch."""
    with pytest.raises(ValueError, match=r"neighborhood: .*(does not preserve distances|is not symmetric under)"):
        make()


# --- principal frames -----------------------------------------------------------------------------------------

PRINCIPAL = {
    "cloud": PrincipalFrames(),
    "neighborhood": PrincipalFrames(of="neighborhood"),
    "neighborhood, smooth": PrincipalFrames(of="neighborhood", cutoff=1.9),
}
every_principal = pytest.mark.parametrize("frames", PRINCIPAL.values(), ids=PRINCIPAL)


@every_lifted_space
@every_principal
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_principal_frames_are_exact(space, frames, dtype):
    """Relative coordinates are invariant under any motion of the group, for any number of clouds, up to fiber order."""
    pos, batch = random_points(space, 30, seed=4, dtype=dtype), torch.arange(30) % 3
    neighborhood = neighborhood_for(space)
    if frames.cutoff is not None and isinstance(neighborhood, AllPairs):
        return  # a group with dilations keeps no length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateFramesWarning)
        before = lift_to(pos, space, frames, neighborhood, batch=batch)
        expected = functional(of_edges(before))
        for seed in (3, 4):
            g = random_motion(space, seed)
            after = lift_to(moved_by(space, g, pos), space, frames, neighborhood, batch=batch)
            found = functional(of_edges(after))
            assert torch.equal(after.neighbors.edge_index, before.neighbors.edge_index)
            assert largest_error(found, expected) < TOLERANCE[dtype]
    # Control: a single frame of the fiber is not exact.
    alone = [functional(of_edges(graph)[:, :1, :1]) for graph in (before, after)]
    if space.group.dim > 2 or not isinstance(space, Euclidean):
        assert largest_error(*alone) > 1e-3


@every_principal
@pytest.mark.parametrize("name", ["SE(2)", "E(2)", "SE(3)", "E(3)"])
def test_principal_frames_are_elements_with_all_signs(frames, name):
    space = SPACES[name]
    pos = random_points(space, 20)
    frames = replace(frames, cutoff=frames.cutoff and 9.0)
    found = lift_to(pos, space, frames, Radius(5.0)).frames
    d, improper = space.dim, name.startswith("E")
    assert found.shape[1] == 2 ** (d if improper else d - 1)
    space.stabilizer.check("frames", found)
    signs = found[:, :1].mT @ found
    assert (signs.abs() - torch.eye(d).double()).abs().max() < 1e-12
    assert len({tuple(row) for row in signs[0].diagonal(dim1=1, dim2=2).round().tolist()}) == found.shape[1]
    proper = lift_to(pos, space, replace(frames, improper=False), Radius(5.0)).frames
    assert (torch.linalg.det(proper) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_close_neighbors_on_a_line_do_not_give_an_axis_beside_it(dtype):
    """The direction to a close neighbor is inexact, so that far points of the line seem to lie beside it."""
    steps = torch.tensor([-4.0, -3.9, -0.4, 0.0, 0.3, 2.9, 3.0], dtype=F64)[:, None]
    for seed in range(10):
        direction = torch.randn(3, generator=generator(seed), dtype=F64)
        pos = (steps * direction / direction.norm()).to(dtype)
        frames = quietly(lift_to, pos, SPACES["SE(3)"], PrincipalFrames("neighborhood"), Radius(1.0)).frames
        assert ((frames[:, :1].mT @ frames[0, 0]).abs() - torch.eye(3)).abs().max() < 4000 * torch.finfo(dtype).eps


def test_principal_frames_diagonalize_the_weighted_covariance():
    space, pos = SPACES["SE(3)"], random_points(SPACES["SE(3)"], 12)
    mass = torch.rand(12, generator=generator(6), dtype=F64)
    frames = lift_to(pos, space, PrincipalFrames(), AllPairs(), weights=mass).frames[0]
    centered = pos - (mass @ pos) / mass.sum()
    covariance = torch.einsum("p,pi,pj->ij", mass / mass.sum(), centered, centered)
    seen = frames.mT @ covariance @ frames
    assert (seen - torch.diag_embed(seen.diagonal(dim1=1, dim2=2))).abs().max() < 1e-12
    assert (seen.diagonal(dim1=1, dim2=2).diff() < 0).all()
    unweighted = lift_to(pos, space, PrincipalFrames(), AllPairs()).frames[0]
    assert largest_error(unweighted.abs(), frames.abs()) > 1e-2


def test_neighbors_fade_out_of_principal_frames_at_the_cutoff():
    """Weights are (1 - (r / cutoff)²)², and neighbors beyond the cutoff do not even determine an axis."""
    space, pos, cutoff = SPACES["SE(3)"], random_points(SPACES["SE(3)"], 12), 2.5
    fading = PrincipalFrames(of="neighborhood", cutoff=cutoff)
    frames = lift_to(pos, space, fading, AllPairs()).frames[0, 0]
    seen = pos - pos[0]
    weights = (1 - seen.square().sum(dim=1) / cutoff**2).clamp(min=0).square()
    moments = frames.mT @ torch.einsum("p,pi,pj->ij", weights, seen, seen) @ frames
    assert (moments - moments.diagonal().diag()).abs().max() < 1e-12
    corner = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 2.0, 2.0]], dtype=F64)
    with pytest.warns(DegenerateFramesWarning):
        frames = lift_to(corner, space, fading, AllPairs()).frames[0]
    assert (frames.abs() == torch.eye(3).roll(1, 1)).all()  # the determined axis is first


def test_moments_are_equal_up_to_the_gap():
    """Adjacent eigenvalues λ ≥ μ are, if λ - μ < gap sqrt(λ₁ λ)."""
    for difference, isolated in ((1.9e-3, [True, False, False]), (2.1e-3, [True, True, True])):
        moments = torch.tensor([0.04 - difference, 1.0, 0.04], dtype=F64).diag()[None]
        assert principal_axes(moments, PrincipalFrames().gap)[1][0].tolist() == isolated


def test_determined_axes_have_first_derivatives_where_others_are_not_determined():
    moments = torch.tensor([3.0, 1.0, 1.0], dtype=F64).diag()[None].requires_grad_()
    axes, isolated = principal_axes(moments, PrincipalFrames().gap)
    assert isolated.tolist() == [[True, False, False]]
    weights = torch.tensor([0.3, -0.7, 1.1], dtype=F64)
    (slope,) = torch.autograd.grad(axes[0, :, 0] @ weights * axes[0, 0, 0].detach(), moments)
    # The axis turns toward another one by the moment of both, divided by the difference of their own moments.
    found = (slope + slope.mT)[0, 0, 1:]
    torch.testing.assert_close(found, weights[1:] / (3 - 1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("aside", "column"), [(5e-4, [0.0, 0.0, 1.0]), (2e-3, [0.0, 1.0, 0.0])])
def test_points_next_to_the_axes_found_determine_no_other_axis(aside, column):
    of_row, noise = torch.zeros(1, dtype=torch.int64), torch.full((1,), 1e-16, dtype=F64)
    near, others = (
        Candidates(torch.tensor([vector], dtype=F64), of_row, noise) for vector in ([1.0, aside, 0.0], [0.0, 0.0, 1.0])
    )
    axes, isolated = torch.eye(3, dtype=F64)[None], torch.tensor([[True, False, False]])
    found = completed_axes(axes, isolated, of_row, [near, others]).axes
    torch.testing.assert_close(found[0, :, 1], torch.tensor(column, dtype=F64), rtol=0, atol=1e-12)


def ring(n, height=0.0):
    angle = 2 * math.pi * torch.arange(n) / n
    return torch.stack([angle.cos(), angle.sin(), torch.full((n,), height)], dim=1).double()


CORNERS = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=F64)
CUBE = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3).double()
# Clouds whose second moments do not determine all axes.
DEGENERATE = {
    "methane": torch.cat([torch.zeros(1, 3), CORNERS]).double(),
    "ammonia": torch.cat([torch.zeros(1, 3), ring(3, 0.4)]).double(),
    "benzene": torch.cat([ring(6), 1.8 * ring(6)]),
    "cube": CUBE,
    "octahedron with a point beside": torch.cat([torch.eye(3), -torch.eye(3), torch.zeros(1, 3)]).double(),
    "equal moments without symmetry": torch.tensor(
        [[3.0, 0, 0], [-3, 0, 0], [0, 3, 0], [0, -3, 0], [0, 0, 3 / 2**0.5], [0, 0, -3 / 2**0.5]], dtype=F64
    )
    @ torch.diag(torch.tensor([1.0, 1.0, 2**0.5], dtype=F64)),
    "line": torch.tensor([[-1.0, 0, 0], [0.2, 0, 0], [0.9, 0, 0], [2.1, 0, 0]], dtype=F64),
    "nearly a line": torch.tensor([[-1.0, 0, 0], [0.2, 1e-4, 0], [0.9, 0, 2e-4], [2.1, 0, 0]], dtype=F64),
    "two points": torch.tensor([[0.0, 0, 0], [1, 0, 0]], dtype=F64),
}


def invariants_of(of, pos, dtype, name="SE(3)", radius=20.0):
    return functional(of_edges(lift_to(pos.to(dtype), SPACES[name], PrincipalFrames(of=of), Radius(radius))))


def quietly(call, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateFramesWarning)
        return call(*arguments)


@pytest.mark.parametrize("of", ["cloud", "neighborhood"])
@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_degenerate_clouds_warn_and_stay_exact(case, of, dtype):
    shape = DEGENERATE[case]
    start = SO(3).sample(generator=generator(9), dtype=F64)
    shape = shape @ start.T + 0.4
    if of == "cloud":
        with pytest.warns(DegenerateFramesWarning, match="axes point to the farthest points"):
            invariants_of(of, shape, dtype)
    expected = quietly(invariants_of, of, shape, dtype)
    for seed in (1, 2, 3):
        g = SO(3).sample(generator=generator(seed), dtype=F64)
        found = quietly(invariants_of, of, shape @ g.T - 1.3, dtype)
        if case == "nearly a line" and of == "neighborhood" and dtype == torch.float32:
            continue  # the axes of points that deviate by 1e-4 are known up to rounding / 1e-4
        assert largest_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", ["methane", "ammonia", "benzene", "cube", "line", "two points"])
def test_the_order_of_points_that_a_symmetry_exchanges_does_not_matter(case):
    """Points that a symmetry of the shape exchanges give the same sums, whichever of them comes first."""
    shape = DEGENERATE[case]
    with pytest.warns(DegenerateFramesWarning):
        expected = invariants_of("cloud", shape, F64, "E(3)").sum(0)
    for seed in range(4):
        shuffled = shape[torch.randperm(len(shape), generator=generator(seed))]
        with pytest.warns(DegenerateFramesWarning):
            found = invariants_of("cloud", shuffled, F64, "E(3)").sum(0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("of", ["cloud", "neighborhood"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_points_at_one_place_have_frames_without_a_warning(number, of):
    pos = torch.ones(number, 3, dtype=F64, requires_grad=True)
    graph = lift_to(pos, SPACES["SE(3)"], PrincipalFrames(of=of), AllPairs())
    assert torch.isfinite(of_edges(graph)).all()
    (gradient,) = torch.autograd.grad(of_edges(graph).square().sum(), pos, allow_unused=True)
    assert gradient is None or torch.isfinite(gradient).all()


def test_planar_clouds_are_fine():
    """The third axis is the cross product of the others, so there is no warning."""
    pos = random_points(SPACES["SE(3)"])
    pos[:, 2] = 0.0
    expected = invariants_of("cloud", pos, F64)
    turn = SO(3).sample(generator=generator(2), dtype=F64)
    assert largest_error(invariants_of("cloud", pos @ turn.T, F64), expected) < 1e-10


@pytest.mark.parametrize("name", ["SE(2)", "SE(3)", "Sim(3)", "E(3)", "orbits of SO(3)"])
@every_principal
def test_gradients_through_principal_frames(name, frames):
    """First and second derivatives equal finite differences if the gap between eigenvalues is large."""
    space = SPACES[name]
    pos = random_points(space, 5, seed=12)
    neighborhood = AllPairs()
    if frames.cutoff:
        if name == "Sim(3)":
            pytest.skip("a group with dilations keeps no length")
        frames = PrincipalFrames(of="neighborhood", cutoff=6.0)
    assert not frames.degenerate(Sites(point_clouds(pos), neighborhood(pos), space)).any()

    def call(pos):
        return functional(of_edges(lift_to(pos, space, frames, neighborhood)))[::3, :2]

    pos.requires_grad_()
    assert torch.autograd.gradcheck(call, (pos,), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (pos,), fast_mode=True)


@pytest.mark.parametrize("moments", [(3, 1, 1), (3, 3, 1), (3, 3, 0), (2, 2, 2), None])
def test_derivatives_of_completed_axes_are_correct(moments):
    """First and second derivatives where moments are equal and one point is the farthest, and of two points."""
    space, pos = SPACES["SE(3)"], random_points(SPACES["SE(3)"], 6, seed=3)
    pos = pos - pos.mean(dim=0)
    if moments is None:
        pos = pos[:2]
    else:
        pos = pos @ torch.linalg.inv(torch.linalg.cholesky(pos.mT @ pos)).mT * torch.tensor(moments, dtype=F64).sqrt()
    pos = (pos @ SO(3).sample(generator=generator(9), dtype=F64).T).requires_grad_()

    def call(pos):
        return quietly(invariants_of, "cloud", pos, F64)[::3, :2]

    assert PrincipalFrames().degenerate(Sites(point_clouds(pos), AllPairs()(pos), space)).all()
    assert torch.autograd.gradcheck(call, (pos,), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (pos,), fast_mode=True)


def test_axes_of_isolated_points_need_memory_for_each_point_only(monkeypatch):
    """The axes of each point are found among all points of the cloud, of which only the chosen ones are kept."""
    pos = torch.randn(200, 3, dtype=F64, generator=generator(1), requires_grad=True)

    def call():
        return quietly(lift_to, pos, SPACES["SE(3)"], PrincipalFrames(of="neighborhood"), Radius(1e-3)).elements

    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        expected = call()
    assert max(x.numel() for x in saved) < 100 * len(pos)
    monkeypatch.setattr(_principal_axes, "_AT_ONCE", 3 * len(pos))
    assert torch.equal(call(), expected)


def test_principal_frames_of_a_space_of_ones_own():
    """If frames do not act on the last coordinates, the error message says so."""

    class Sideways(Sphere):
        def embed(self, h):
            return super().embed(h)[..., [1, 2, 0], :][..., [1, 2, 0]]

    with pytest.raises(ValueError, match="principal axes are not defined here"):
        lift_to(random_points(Sphere()), Sideways(), PrincipalFrames(), AllPairs())
    only_scales = HomogeneousSpace("scales", SE(2), 2, Dilations(2))
    with pytest.raises(ValueError, match="principal axes are elements of"):
        PrincipalFrames()(Sites(point_clouds(torch.rand(3, 2)), AllPairs()(torch.rand(3, 2)), only_scales))


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, r"expected to return a tensor \[points, fiber, k, k\] or GroupFrames, got NoneType"),
        ([1.0], "expected to return a tensor .*, got list"),
        (torch.eye(3).expand(6, 3, 3), r"with 6 points and a fiber, got \(6, 3, 3\)"),
        (torch.eye(3).expand(1, 2, 3, 3), r"with 6 points and a fiber, got \(1, 2, 3, 3\)"),
        (torch.eye(3).expand(6, 0, 3, 3), r"with 6 points and a fiber, got \(6, 0, 3, 3\)"),
        (-torch.eye(3).expand(6, 2, 3, 3), r"frames\[0, 0\] is not an element of SO\(3\): it is improper"),
        (GroupFrames(cyclic(4)), r"expected \[\*, 3, 3\] for SO\(3\), got \(4, 2, 2\)"),
        (GroupFrames(inversion(3)), r"frames\[1\] is not an element of SO\(3\): it is improper"),
        (GroupFrames(octahedral(), torch.eye(3)), r"expected a pose \[points, k, k\] with 6 points, got \(3, 3\)"),
    ],
)
def test_frames_of_ones_own_that_return_something_else_are_refused(returned, found):
    """Frames ``[points, k, k]`` would otherwise be taken for one fiber over every point."""
    pos = random_points(SPACES["SE(3)"], 6).float()
    with pytest.raises((TypeError, ValueError), match=f"frames: .*{found}"):
        lift(pos, lambda sites: returned, Radius(1.5), SPACES["SE(3)"])


def test_poses_of_ones_own_that_differ_within_a_cloud_are_refused():
    """Relative elements would be those of equal poses, without a message."""
    pos = random_points(SPACES["SE(3)"], 6)
    poses = SO(3).sample(2, generator=generator(1), dtype=F64)
    batch = torch.tensor([0, 0, 1, 1, 0, 1])
    lift(pos, lambda sites: GroupFrames(octahedral(), poses[batch]), AllPairs(), SPACES["SE(3)"], batch=batch)
    frames = GroupFrames(octahedral(), poses[torch.tensor([0, 1, 0, 0, 0, 0])])
    with pytest.raises(ValueError, match=r"frames: frames\[1\] has another pose than a point of the same cloud"):
        lift(pos, lambda sites: frames, AllPairs(), SPACES["SE(3)"], batch=torch.tensor([1, 0, 0, 1, 1, 0]))


def test_frames_of_ones_own_may_be_those_of_a_group():
    space = SPACES["SE(3)"]
    pos = random_points(space, 6)
    pose = SO(3).sample(generator=generator(1), dtype=F64).expand(6, 3, 3)
    graph = lift(pos, lambda sites: GroupFrames(octahedral(), pose), AllPairs(), space)
    turned = lift(pos @ pose[0], octahedral(), AllPairs())
    torch.testing.assert_close(graph.relative.coordinates, turned.relative.coordinates)


# --- values ---------------------------------------------------------------------------------------------------


def test_subset():
    space = SPACES["SE(3)"]
    pos, batch = random_clouds(space)
    order = batch.argsort(stable=True)
    pos, batch = pos[order], batch[order]
    frames = PrincipalFrames()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateFramesWarning)
        whole = lift_to(pos, space, frames, Radius(1.5), batch=batch)
    single = whole.astype(torch.float32)
    assert single.pos.dtype == single.elements.dtype == of_edges(single).dtype == torch.float32
    kept = torch.tensor([0, 3, 4, 9, 12])
    part = whole.to("cpu").subset(kept, Radius(2.0))
    assert torch.equal(part.elements, whole.elements[kept])
    assert part.length == whole.length
    expected = lift_to(pos[kept], space, GivenFrames(whole.frames[kept]), Radius(2.0), batch=batch[kept], length=1.5)
    torch.testing.assert_close(of_edges(part), of_edges(expected), rtol=0, atol=1e-14)
    given = lift_to(pos, space, GivenFrames(whole.frames), Radius(1.5), batch=batch)
    assert torch.equal(of_edges(given.subset(kept, Radius(2.0))), of_edges(expected))


@pytest.mark.parametrize("frames", [None, SampledFrames(4), PrincipalFrames()], ids=repr)
@pytest.mark.parametrize("group", ["default", "E(3)"])
def test_lifts_do_not_build_the_same_groups_again(frames, group, monkeypatch):
    space = Euclidean(E(3)) if group == "E(3)" and frames is not None else None
    lift(torch.randn(70, 3), frames, Radius(0.5), space)
    monkeypatch.setattr(_finite, "cayley_table", None)
    lift(torch.randn(70, 3), frames, Radius(0.5), space)


@pytest.mark.parametrize("frames", [SampledFrames(3), PrincipalFrames(), cyclic(4)], ids=repr)
def test_frames_keep_their_precision_under_autocast(frames):
    pos, vectors = torch.randn(6, 2), torch.randn(6, 2, 2)

    def of_graph():
        graph = lift(pos, frames, AllPairs())
        return graph.frames, graph.elements, graph.seen_in_frames(vectors), of_edges(graph)

    expected = of_graph()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = of_graph()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# --- subsampling ----------------------------------------------------------------------------------------------


def slow_farthest(pos, count, start):
    chosen = [start]
    while len(chosen) < count:
        distance = (pos[:, None] - pos[chosen]).norm(dim=-1).amin(1)
        chosen.append(int(distance.argmax()))
    return chosen


def test_farthest_points_of_ragged_clouds():
    pos = torch.randn(40, 3, generator=generator(1), dtype=F64)
    batch = torch.randint(4, (40,), generator=generator(2))
    batch[batch == 2] = 1  # cloud 2 is empty
    ptr_free = {"batch": batch}
    for wanted, number in (
        ({"count": 5}, lambda n: min(n, 5)),
        ({"fraction": 0.3}, lambda n: max(1, round(0.3 * n))),
        ({"fraction": 0.01}, lambda n: 1),
    ):
        kept = farthest_points(pos, start="first", **wanted, **ptr_free)
        expected = []
        for cloud in (0, 1, 3):
            mine = (batch == cloud).nonzero()[:, 0]
            expected += mine[slow_farthest(pos[mine], number(len(mine)), 0)].tolist()
        assert kept.tolist() == expected


def test_farthest_points_start_where_they_are_told():
    batch = torch.arange(20) % 2
    pos = torch.randn(20, 3, generator=generator(1), dtype=F64) + 9.0 * batch[:, None]
    outermost = []
    for cloud in (0, 1):
        mine = (batch == cloud).nonzero()[:, 0]
        outermost.append(int(mine[(pos[mine] - pos[mine].mean(0)).norm(dim=1).argmax()]))
    assert farthest_points(pos, count=1, batch=batch).tolist() == outermost
    drawn = [farthest_points(pos, count=3, batch=batch, generator=generator(seed)).tolist() for seed in range(5)]
    assert drawn[0] == farthest_points(pos, count=3, batch=batch, generator=generator(0)).tolist()
    assert len({row[0] for row in drawn}) > 1
    assert all(row[0] % 2 == 0 and row[3] % 2 == 1 for row in drawn)


def test_farthest_points_move_with_the_cloud_and_do_not_repeat():
    grid = torch.cartesian_prod(*[torch.arange(5.0)] * 2)
    turn = SO(2).exp(torch.tensor([0.7]))
    for start in ("first", "outermost"):
        kept = farthest_points(grid, fraction=np.float32(0.5), start=start)
        assert kept.tolist() == farthest_points(grid @ turn.T + 3.3, fraction=0.5, start=start).tolist()
        assert len(set(kept.tolist())) == len(kept) == 12
    assert sorted(farthest_points(torch.ones(6, 3), count=6).tolist()) == list(range(6))
    assert farthest_points(torch.zeros(0, 3), count=2).tolist() == []


COARSENED = {  # a quarter of the points, or what is near it without a choice among equally far ones
    "random": (15, lambda: torch.randn(60, 3, generator=generator(1), dtype=F64)),
    "voxels": (16, lambda: pixel_positions(4, 4, 4, dtype=F64)),
    "missing pixels": (16, lambda: pixel_positions(9, 9, dtype=F64)[torch.rand(81, generator=generator(1)) < 0.8]),
    "ring": (12, lambda: SO(2).exp(torch.arange(12, dtype=F64)[:, None] * math.pi / 6)[:, 0]),
    "repeated": (5, lambda: torch.randn(8, 3, generator=generator(1), dtype=F64).repeat(3, 1)),
    "coincident": (1, lambda: torch.ones(5, 3, dtype=F64)),
    "one": (1, lambda: torch.ones(1, 2, dtype=F64)),
    "none": (0, lambda: torch.zeros(0, 2, dtype=F64)),
}


@pytest.mark.parametrize(("expected", "points"), COARSENED.values(), ids=COARSENED)
def test_coarse_clouds_and_pooled_fields_move_with_the_points(expected, points):
    pos = points()
    size, dim = pos.shape
    order = torch.randperm(size, generator=generator(2))
    turn = SO(dim).exp(torch.tensor([0.7, -0.4, 0.2], dtype=F64)[: dim * (dim - 1) // 2])
    x = torch.randn(size, 2, 3, generator=generator(3), dtype=F64)
    ours, theirs = coarsen(pos, 0.25), coarsen((pos @ turn.T + 3.3)[order], 0.25)
    kept = ours.clouds.num_points
    assert kept == theirs.clouds.num_points == expected
    moved = ours.clouds.pos @ turn.T + 3.3
    away = (moved[:, None] - theirs.clouds.pos).norm(dim=-1)
    place = away.argmin(1) if kept else torch.zeros(0, dtype=torch.int64)
    assert away.amin(1).le(1e-12).all() if kept else size == 0
    assert sorted(place.tolist()) == list(range(kept))
    for reduction in ("max", "mean"):
        torch.testing.assert_close(theirs.pool(x[order], reduction)[place], ours.pool(x, reduction))
    torch.testing.assert_close(theirs.spread(theirs.pool(x[order])), ours.spread(ours.pool(x))[order])
    # Every point lies in the cells of all nearest kept points.
    distance = (pos[:, None] - ours.clouds.pos).norm(dim=-1)
    nearest = distance <= distance.amin(1, keepdim=True) + 1e-9 if kept else distance.bool()
    assert sorted(zip(ours.points.tolist(), ours.cells.tolist(), strict=True)) == [
        tuple(row) for row in nearest.nonzero().tolist()
    ]


def test_clouds_of_a_batch_are_coarsened_alone():
    clouds = [torch.randn(n, 2, generator=generator(n), dtype=F64) * 10.0**n for n in (7, 0, 1, 4)]
    sizes = torch.tensor([len(pos) for pos in clouds])
    together = coarsen(point_clouds(torch.cat(clouds), batch=torch.arange(4).repeat_interleave(sizes)), 0.5)
    assert together.clouds.counts.tolist() == [4, 0, 1, 2]
    alone = [coarsen(pos, 0.5) for pos in clouds]
    assert torch.equal(together.clouds.pos, torch.cat([coarse.clouds.pos for coarse in alone]))
    assert len(together.points) == sum(len(coarse.points) for coarse in alone)


@pytest.mark.parametrize("reduction", ["max", "mean", "sum"])
def test_cells_of_pixels_pool_as_grids_do(reduction):
    pool, grid = GridPool(2, reduction), torch.tensor([[4, 6]])
    graph = point_clouds(pixel_positions(4, 6, dtype=F64), grid=grid)
    cell, _ = pool.cells(grid)
    x = torch.randn(24, 4, 2, generator=generator(1), dtype=F64)
    kept = point_clouds(pool.centers(graph.pos, cell, 6))
    # The cells of pixels are the pixels that are nearest to their centers.
    assert torch.equal(torch.cdist(graph.pos, kept.pos).argmin(1), cell)
    assert torch.equal(Coarse(kept, torch.arange(24), cell, 24).pool(x, reduction), pool(x, graph))


@pytest.mark.parametrize("sides", [(4, 6), (2, 4, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["max", "mean", "sum"])
def test_cells_of_images_of_one_size_are_views(reduction, sides):
    pos = pixel_positions(*sides, dtype=F64)
    clouds = point_clouds(pos.repeat(2, 1), batch=torch.arange(2).repeat_interleave(len(pos)))
    views = Coarse.of_rasters(replace(clouds, grid=torch.tensor([sides] * 2)))
    assert views.sides == sides
    lists = replace(views, sides=None)
    # Small whole numbers, so that some maxima are equal and share the gradient.
    x = torch.randint(0, 3, (2 * len(pos), 4, 2), generator=generator(1)).to(F64).requires_grad_()
    pooled = [cells.pool(x, reduction) for cells in (views, lists)]
    torch.testing.assert_close(*pooled, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(found.square().sum(), x)[0] for found in pooled]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert torch.equal(views.spread(pooled[0]), lists.spread(pooled[0]))


@pytest.mark.parametrize("sides", [(4, 6), (5, 7), (1, 5), (2, 4, 2), (3, 4, 5)], ids=str)
def test_cells_that_lack_pixels_are_where_those_of_all_pixels_are(sides):
    pos = pixel_positions(*sides, dtype=F64) @ torch.randn(len(sides), len(sides), generator=generator(0), dtype=F64)
    place = torch.cartesian_prod(*map(torch.arange, sides))
    left = (torch.rand(len(pos), generator=generator(1)) < 0.5).nonzero()[:, 0].flip(0)
    raster = torch.tensor([sides])
    whole = Coarse.of_rasters(point_clouds(pos, grid=raster))
    some = Coarse.of_rasters(point_clouds(pos[left], raster=raster, pixel=place[left]))
    assert torch.equal(some.clouds.raster, whole.clouds.grid)
    number = torch.from_numpy(np.ravel_multi_index(some.clouds.pixel.T.numpy(), whole.clouds.grid[0].tolist()))
    torch.testing.assert_close(some.clouds.pos, whole.clouds.pos[number], rtol=1e-12, atol=1e-12)
    pairs = zip(left[some.points].tolist(), number[some.cells].tolist(), strict=True)
    kept = set(left.tolist())
    wanted = zip(whole.points.tolist(), whole.cells.tolist(), strict=True)
    assert set(pairs) == {pair for pair in wanted if pair[0] in kept}


def test_steps_between_the_pixels_of_each_image_are_its_own():
    pos, place = pixel_positions(3, 3, dtype=F64), torch.cartesian_prod(torch.arange(3), torch.arange(3))
    left = torch.tensor([[0, 4, 5, 6, 7], [0, 1, 2, 5, 7]])
    points = torch.cat([pos[left[0]], 2 * pos[left[1]] + 5])
    ptr = torch.tensor([0, 5, 10, 10])  # the third image is empty
    images = point_clouds(points, ptr=ptr, raster=torch.full((3, 2), 3), pixel=place[left.flatten()])
    coarse, cells = Coarse.of_rasters(images).clouds, pixel_positions(2, 2, dtype=F64)
    assert coarse.batch.tolist() == [0] * 4 + [1] * 4
    torch.testing.assert_close(coarse.pos, torch.cat([cells, 2 * cells + 5]))


def test_farthest_by_distance_chooses_every_point_before_it_repeats_one():
    pos = torch.tensor([[[0.0], [0.0], [3.0], [0.0]], [[1.0], [1.0], [1.0], [1.0]]])
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    distance, start = torch.cdist(pos, pos), torch.tensor([1, 2])
    assert farthest_by_distance(distance, 4, start).tolist() == [[1, 2, 0, 3], [2, 0, 1, 3]]
    assert farthest_by_distance(distance, 4, start, mask).tolist() == [[1, 2, 0, 3], [2, 0, 1, 0]]
    assert farthest_by_distance(distance, 2, start, mask & False).shape == (2, 2)


PADDED = torch.tensor([[True, True, True], [True, True, False]])
test_bad_arguments_of_subsampling = refuses(
    (
        lambda: coarsen(point_clouds(torch.rand(4, 3), cell=torch.eye(3)), 0.5),
        "cell: subsampling does not see periodic",
    ),
    (lambda: coarsen(torch.rand(4, 3), 0.5).pool(torch.rand(3, 2)), r"x: expected one row for each of 4 points, got"),
    (lambda: farthest_points(torch.rand(4, 3), count=2, fraction=0.5), "count, fraction: expected exactly one"),
    (lambda: farthest_points(torch.rand(4, 3), count=2, start=torch.tensor([4])), "start: expected one of"),
    (lambda: farthest_by_distance(torch.rand(2, 3, 3), 4, torch.tensor([0, 0])), "count: expected at most 3"),
    (
        lambda: farthest_by_distance(torch.rand(2, 3, 3), 2, torch.tensor([2, 2]), PADDED),
        "start: .*2, which is padding",
    ),
)


# --- the table of errors --------------------------------------------------------------------------------------


def lifts(drawn):
    """Yield names, motions, frames over each point, and lifts: approximate ones, exact ones, those of finite groups."""
    groups = tetrahedral(), octahedral()
    yield from ((f"finite, {group.name}", "random motions", FiniteFrames(group)) for group in groups)
    for count, per, design in itertools.product((4, 24), ("point", "cloud"), (False, True)):
        name = f"sampled, per {per}, {'design' if design else 'independent'}"
        yield name, "random motions", SampledFrames(count, per=per, design=design)
    for of in ("cloud", "neighborhood"):
        yield f"principal axes, {of}", "random motions", PrincipalFrames(of=of)
    yield "given, moved along", "random motions", GivenFrames(drawn)
    yield from ((f"finite, {group.name}", "motions of its group", FiniteFrames(group)) for group in groups)


def errors_of_lifts(clouds, points, repeats):
    """Yield (lift, motions, error in float64, error in float32), where 1 is the difference between two clouds.

    The table of docs/exactness.md has 4 clouds of 18 points and 6 motions. The network is rough on purpose.
    """
    generator = torch.Generator().manual_seed(0)
    pos = 1.5 * torch.randn(clouds * points, 3, generator=generator, dtype=F64)
    x = torch.randn(clouds * points, 5, generator=generator, dtype=F64)
    batch = torch.arange(clouds).repeat_interleave(points)
    given = {"space": Euclidean(SE(3)), "neighborhood": Radius(3.0), "channels": 32, "layers": 2, "heads": 4}
    drawn = SO(3).sample(len(pos), 4, generator=torch.Generator().manual_seed(2), dtype=F64)
    for case, way, frames in lifts(drawn):
        generator = torch.Generator().manual_seed(1)
        if way == "random motions":
            motions = SE(3).sample(repeats, generator=generator, dtype=F64)
        else:
            order = frames.group.order
            elements = frames.group.elements[torch.randint(order, (repeats,), generator=generator)]
            motions = SE(3).element(elements, torch.randn(repeats, 3, generator=generator, dtype=F64))
        errors = []
        for dtype in (F64, torch.float32):
            network = randomize(LieTransformer(5, 16, frames=PrincipalFrames(), lifting=Lifting(local=0), **given))
            network, outputs = network.double().to(dtype), []
            for g in (SE(3).identity(motions), *motions):
                moved = isinstance(frames, GivenFrames)
                network.frames = GivenFrames(SE(3).linear(g) @ frames.frames) if moved else frames
                with torch.no_grad():
                    data = Data(pos=SE(3).act(g, pos).to(dtype), x=x.to(dtype), batch=batch)
                    outputs.append(network(data).double())
            apart = (torch.stack(outputs[1:]) - outputs[0]).square().mean().sqrt()
            errors.append(float(apart / outputs[0].var(dim=0).mean().sqrt()))
        yield case, way, *errors


def test_a_whole_model_is_exact_with_exact_frames_and_not_with_sampled_ones():
    """The table of docs/exactness.md, on smaller clouds."""
    records = quietly(lambda: list(errors_of_lifts(clouds=2, points=8, repeats=1)))
    for (case, way, wide, narrow), (*_, frames) in zip(records, lifts(torch.eye(3).expand(1, 4, 3, 3)), strict=True):
        if case.startswith(("principal", "given")) or way == "motions of its group":
            assert wide < 1e-10
            assert narrow < 1e-5
        else:
            assert wide > (1e-2 if getattr(frames, "count", 0) == 4 else 1e-5)
    assert len(records) == 15


@pytest.mark.parametrize("of", ["cloud", "neighborhood"])
@pytest.mark.parametrize(
    ("name", "points"),
    [
        *(("SE(3)", points) for points in (1, 2, 5, 300)),  # a sum of hundreds of equal numbers is not exact
        *((name, points) for name in ("sphere", "positions with directions") for points in (1, 5)),
    ],
)
def test_input_vectors_give_the_axes_that_points_at_one_place_do_not(of, name, points):
    space = SPACES[name]
    pos = random_points(space, 1, seed=points).expand(points, -1)
    vectors = torch.randn(points, 2, 3, generator=generator(points), dtype=F64)
    g, seen = random_motion(space), []
    for moved, turned in ((pos, vectors), (moved_by(space, g, pos), vectors @ space.group.linear(g).mT)):
        graph = lift_to(moved, space, PrincipalFrames(of=of), AllPairs(), vectors=turned)
        seen.append(graph.seen_in_frames(turned).flatten(2).sort(dim=1).values)
    assert (seen[0] - seen[1]).abs().max() < 1e-14
    with pytest.raises(ValueError, match=rf"vectors: expected \[points={points}, count, 3\], got"):
        lift_to(pos, space, PrincipalFrames(of=of), AllPairs(), vectors=vectors[:, 0])


def test_chosen_points_have_the_images_and_windows_of_their_neighborhood():
    pos, cell, kept = torch.rand(6, 2, dtype=F64), torch.eye(2, dtype=F64), torch.tensor([0, 2, 5])
    near = Radius(1.2, smooth=True)
    found = lift(point_clouds(pos, cell=cell), cyclic(4), Radius(1.0)).subset(kept, near)
    expected = lift(point_clouds(pos[kept], cell=cell), cyclic(4), near)
    torch.testing.assert_close(found.degree, expected.degree)
    assert found.degree.min() > 1


def test_chosen_edges_keep_given_coordinates_of_shared_rows():
    whole = lift(pixel_positions(3, 3), cyclic(4), PixelSquare(3))
    whole = whole.with_relative(whole.relative.bounded())
    kept = torch.arange(1, whole.neighbors.num_edges, 3)
    found = whole.select_edges(kept).relative.coordinates
    assert torch.equal(found, whole.relative.coordinates[whole.relative.row[kept]])


def test_fibers_on_the_sphere_rotate_with_their_pose():
    pos = torch.nn.functional.normalize(torch.randn(5, 3, generator=generator(1), dtype=F64), dim=1)
    group, pose = cyclic(4), SampledFrames(1, per="cloud")
    found = lift(pos, FiniteFrames(group, pose), AllPairs(), Sphere())
    frames = pose(Sites(found, found.neighbors, Sphere())) @ group.elements
    expected = lift(pos, GivenFrames(frames), AllPairs(), Sphere())
    torch.testing.assert_close(found.elements, expected.elements)


def test_given_frames_determine_their_space():
    frames = torch.eye(2).repeat(3, 1, 1, 1)
    assert natural_space(GivenFrames(frames)).name == Euclidean(SE(2)).name
    frames[1, 0, 0, 0] = -1.0  # one reflection
    assert natural_space(GivenFrames(frames)).name == Euclidean(E(2)).name


def test_input_vectors_give_the_scale_that_points_at_one_place_do_not():
    pos, vectors = torch.zeros(3, 3, dtype=F64), torch.randn(3, 2, 3, generator=generator(1), dtype=F64)

    def volume(vectors):
        frames = lift(pos, PrincipalFrames(), AllPairs(), Euclidean(Sim(3)), vectors=vectors).frames
        return torch.linalg.det(frames).abs()

    torch.testing.assert_close(volume(2 * vectors), 8 * volume(vectors))


def test_degenerate_neighborhoods_are_told_point_by_point():
    pos = torch.randn(6, 2, generator=generator(1), dtype=F64)
    pos[5] = 99.0  # has no neighbors
    clouds, space = point_clouds(pos), Euclidean(SE(2))
    sites = Sites(clouds, lift(clouds, cyclic(1), Radius(9.0)).neighbors, space)
    assert PrincipalFrames(of="neighborhood").degenerate(sites).tolist() == [False] * 5 + [True]


def test_values_are_printed_on_one_screen():
    """The printed form omits the entries of tensors."""
    graph = lift(torch.randn(30, 3), octahedral(), Radius(1.0))
    assert repr(graph).startswith("LiftedGraph(points=30, dim=3, clouds=1, dtype=float32, device=cpu, fiber=24, edges=")
    for value in (graph, graph.relative, graph.neighbors, graph.space, octahedral(), PrincipalFrames()):
        assert "tensor" not in repr(value)
        assert len(str(value)) < 200
    network = GSANet(octahedral(), 1, 10, neighborhood=Radius(1.5))
    first, *parts = str(network).splitlines()
    total = sum(weight.numel() for weight in network.parameters())
    assert first == f"GSANet: {total:,} parameters; {network.guarantee}"
    assert sum(int(line.split()[-1].replace(",", "")) for line in parts) == total
