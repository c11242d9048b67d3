"""Homogeneous spaces: sections, stabilizers, lifts and invariants, for every space of the table."""

import copy
import math

import pytest
import torch

from lieattn.geometry import AllPairs, lift
from lieattn.groups import (
    SE,
    SO,
    Dilations,
    E,
    O,
    RotationDilations,
    SemidirectProduct,
    Sim,
    Translations,
    cyclic,
    dihedral,
    tetrahedral,
)
from lieattn.spaces import Euclidean, HomogeneousSpace, Orbits, PositionDirection, Sphere
from tests.cases import each, normal, refuses
from tests.lie_cases import OWN, Heisenberg, elements


class HeisenbergSpace(HomogeneousSpace):
    """R^3 under the Heisenberg group, whose elements map each point to each other point in exactly one way."""

    def __init__(self):
        super().__init__("R^3 under Heisenberg", Heisenberg(), dim=3)

    def section(self, x):
        turned = x - torch.stack([0 * x[..., 0], 0 * x[..., 0], x[..., 0] * x[..., 1] / 2], dim=-1)
        return self.group.exp(turned)


SHEARED = dihedral(3).conjugate(torch.tensor([[1.0, 0.7], [0.0, 2.0]], dtype=torch.float64), "sheared D3")
SPACES = {
    space.name: space
    for space in [
        *(Euclidean(group) for group in (Translations(2), Translations(3), SE(2), SE(3), E(2), E(3), Sim(2), Sim(3))),
        Euclidean(SemidirectProduct(OWN["AboutVertical"]())),
        *(Euclidean(group) for group in (cyclic(4), tetrahedral(), SHEARED)),
        Sphere(),
        Sphere(improper=True),
        PositionDirection(),
        *(Orbits(group) for group in (SO(2), SO(3), Dilations(1), Dilations(3))),
        *(Orbits(group) for group in (RotationDilations(2), RotationDilations(3))),
        *(OWN["Quadrant"](), HeisenbergSpace()),
    ]
}
every_space = each("space", SPACES)
WITH_STABILIZER = {name: space for name, space in SPACES.items() if space.stabilizer is not None}


def points(space, count=50, seed=0):
    """Return random points; on the sphere and for directions, they include the axes and points near them."""
    x = normal(count, space.dim, seed=seed)
    if isinstance(space, Sphere | PositionDirection | Orbits) and x.shape[-1] >= 3:
        axes = torch.cat([torch.eye(3), -torch.eye(3)]).double()
        x[:24, -3:] = torch.cat([axes + near * normal(6, 3, seed=1) for near in (0, 1e-12, 1e-7, 1e-3)])
    if isinstance(space, Sphere | PositionDirection):
        x[:, -3:] /= x[:, -3:].norm(dim=-1, keepdim=True)
    return x.abs() + 0.1 if space.name == "quadrant" else x


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-12)


# --- laws -----------------------------------------------------------------------------------------------------------


@every_space
def test_section_is_a_section(space):
    x = points(space)
    space.check("x", x)
    section = space.section(x)
    space.group.check("section", section)
    close(space.act(section, space.representative(x)), x)
    assert section.shape == (len(x), space.group.size, space.group.size)
    single = space.section(x.float())
    assert single.dtype == torch.float32
    assert (space.act(single, space.representative(x.float())) - x).abs().max() < 1e-5
    assert space.section(x[0]).shape == section.shape[1:]
    assert space.section(x[:0]).shape == section[:0].shape
    assert space.section(x[:, None]).shape == section[:, None].shape


@every_space
def test_action_is_a_homomorphism_and_stays_in_the_space(space):
    x, (g, h) = points(space, 40), (elements(space.group, seed=seed)[:40] for seed in (1, 2))
    moved = space.act(g, space.act(h, x))
    close(space.act(space.group.product(g, h), x), moved, 1e-10)
    space.check("moved", moved)


@every_space
def test_group_moves_sections_to_sections_up_to_the_stabilizer(space):
    """s(g x)⁻¹ g s(x) fixes the origin, and is trivial if the stabilizer is."""
    x, g = points(space, 40), elements(space.group, seed=1)[:40]
    gx = space.act(g, x)
    left = space.group.relative(space.section(gx), space.group.product(g, space.section(x)))
    o = space.representative(x)
    close(space.representative(gx), o, 1e-9)
    close(space.act(left, o), o, 1e-9)
    if space.stabilizer is None:
        close(left, space.group.identity(g).expand_as(left), 1e-9)


@every_space
def test_invariants_are_invariant_and_tell_orbits_apart(space):
    x, g = points(space, 40), elements(space.group, seed=1)[:40]
    q = space.invariants(x)
    assert q.shape == (40, space.num_invariants)
    close(space.invariants(space.act(g, x)), q, 1e-9)
    if space.num_invariants and space.dim > 1:
        random = q[30:]
        assert (torch.cdist(random, random) + torch.eye(10) > 1e-6).all()
    else:
        origin = space.representative(x)
        close(origin, origin[:1].expand_as(origin)) if space.dim > 1 else None


@every_space
def test_origin_is_a_point_over_which_the_section_is_the_identity(space):
    if space.name == "quadrant":
        return
    o = space.origin
    space.check("origin", o)
    close(space.representative(o), o)
    close(space.section(o), space.group.identity(o))


@each("space", WITH_STABILIZER)
def test_stabilizer_keeps_representatives_and_lies_in_the_group(space):
    h, k = elements(space.stabilizer), elements(space.stabilizer, seed=1)
    embedded = space.embed(h)
    space.group.check("h", embedded)
    x = points(space, len(h))
    o = space.representative(x)
    close(space.act(embedded, o), o, 1e-9)
    product = space.group.product(embedded, space.embed(k))
    close(product, space.embed(space.stabilizer.product(h, k)), 1e-9)


@each("space", WITH_STABILIZER)
def test_stabilizer_is_the_whole_of_it(space):
    """Elements that fix the origin are those of the stabilizer: their Lie algebras have the same dimension."""
    o = space.origin

    def moved(a):
        return space.act(space.group.exp(a), o)

    slope = torch.autograd.functional.jacobian(moved, torch.zeros(space.group.algebra_dim, dtype=torch.float64))
    kept = space.group.algebra_dim - int(torch.linalg.matrix_rank(slope))
    assert kept == space.stabilizer.algebra_dim


@every_space
def test_lift_is_the_section_times_the_stabilizer(space):
    x, m = points(space), space.group.size
    alone = space.lift(x)
    close(alone, space.section(x)[:, None])
    if space.stabilizer is None:
        with pytest.raises(ValueError, match=r"h: expected None, since the stabilizer of .* is trivial"):
            space.lift(x, torch.eye(m)[None])
        return
    h = elements(space.stabilizer)[:5]
    lifted = space.lift(x, h)
    assert lifted.shape == (len(x), 5, m, m)
    close(space.act(lifted, space.representative(x)[:, None]), x[:, None].expand(-1, 5, -1), 1e-9)
    close(space.lift(x, h.expand(len(x), 5, *h.shape[1:])), lifted)
    close(lifted[:, 2], space.group.product(space.section(x), space.embed(h[2])))
    assert space.lift(x.float(), h).dtype == torch.float32
    assert space.lift(x[:0], h).shape == (0, 5, m, m)


# --- the sphere, where no section is continuous ---------------------------------------------------------------------


def test_section_at_the_antipode_is_a_half_turn_exactly():
    antipode = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)
    half_turn = torch.diag(torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64))
    close(Sphere().section(antipode), half_turn, 1e-15)
    close(SO(3).distance(torch.eye(3).double(), half_turn), torch.tensor(math.pi, dtype=torch.float64))
    opposite = torch.cat([torch.tensor([1.0, 2.0, 3.0]).double(), antipode])
    close(SE(3).linear(PositionDirection().section(opposite)), half_turn, 1e-15)
    close(Orbits(SO(3)).section(5 * antipode), half_turn, 1e-15)
    close(Orbits(RotationDilations(3)).section(5 * antipode), 5 * half_turn, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_section_is_the_least_rotation_even_next_to_the_antipode(dtype):
    across = normal(20, 2)
    across = across / across.norm(dim=-1, keepdim=True)
    for size in (0.0, 1e-30, 1e-12, 1e-8, 1e-4, 0.1, 0.9, 1.0):
        for sign in (1, -1):
            a = sign * math.sqrt(1 - size**2)
            n = torch.cat([torch.full((20, 1), a), size * across], dim=-1).to(dtype)
            section = Sphere().section(n)
            unit = torch.eye(3, dtype=dtype)
            close(section.mT @ section, unit.expand(20, 3, 3), 20 * torch.finfo(dtype).eps)
            assert (torch.linalg.det(section) > 0).all()
            least = torch.atan2(n[:, 1:].norm(dim=-1), n[:, 0])
            angle = SO(3).distance(unit, section)
            close(angle, least, 1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_finite_at_any_distance_from_the_antipode(dtype):
    """Reciprocals of subnormal numbers overflow."""
    for size in (0.0, 1e-320, 1e-200, 1e-45, 1e-40, 1e-20, 1e-10, 1e-3):
        n = torch.tensor([-math.sqrt(1 - size**2), size, 0.0], dtype=dtype, requires_grad=True)
        weights = torch.arange(9, dtype=dtype).view(3, 3)
        (gradient,) = torch.autograd.grad((weights * Sphere().section(n)).sum(), n)
        assert torch.isfinite(gradient).all()


def test_exponential_of_the_sphere():
    """A vector of length t leads to the point at the angle t in its direction; the map turns with its arguments."""
    x, along = torch.eye(3, dtype=torch.float64)[:2]
    angles = torch.tensor([0.0, 1e-9, 0.5, torch.pi / 2, 3.0], dtype=torch.float64)
    vectors = (angles[:, None] * along).requires_grad_()
    points = Sphere().exponential(x, vectors)
    close(points, angles.cos()[:, None] * x + angles.sin()[:, None] * along, 1e-15)
    turn = SO(3).sample(1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[0]
    close(Sphere().exponential(turn @ x, vectors @ turn.T), points @ turn.T, 1e-15)
    (gradient,) = torch.autograd.grad(points.sum(), vectors)
    assert gradient.isfinite().all()


def test_section_of_the_sphere_jumps_at_the_antipode_and_nowhere_else():
    around = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)

    def largest_step(polar_angle):
        polar_angle = torch.tensor(polar_angle, dtype=torch.float64)
        across = polar_angle.sin() * torch.stack([around.cos(), around.sin()], dim=-1)
        n = torch.cat([polar_angle.cos().expand(200, 1), across], dim=-1)
        return float(Sphere().section(n).diff(dim=0).abs().max())

    assert largest_step(0.01) < 1e-3
    assert largest_step(math.pi / 2) < 0.05
    spread = Sphere().section(torch.tensor([[-1.0, 1e-9, 0.0], [-1.0, -1e-9, 0.0], [-1.0, 0.0, 1e-9]]).double())
    assert (spread[0] - spread[2]).abs().max() > 1  # no choice of section avoids this


@every_space
def test_gradients_are_finite_everywhere_and_those_of_differences(space):
    for dtype in (torch.float64, torch.float32):
        x = points(space).to(dtype).requires_grad_()
        lifted = space.lift(x)
        pairs = space.group.relative(lifted, lifted.transpose(0, 1))
        values = space.group.coordinates(pairs).square().sum() + space.invariants(x).sum()
        values = values + space.group.distance(lifted, lifted.flip(0)).sum()
        (gradient,) = torch.autograd.grad(values, x)
        assert torch.isfinite(gradient).all()

    x = points(space)[24:30]

    def smooth(x):
        if isinstance(space, Sphere | PositionDirection):
            n = x[..., -3:]
            x = torch.cat([x[..., :-3], n / n.norm(dim=-1, keepdim=True)], dim=-1)
        return space.section(x), space.invariants(x).sum() + x.sum()

    assert torch.autograd.gradcheck(smooth, x.clone().requires_grad_(), eps=1e-6, atol=1e-6)


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [SO(2), SO(3), RotationDilations(2), RotationDilations(3), Dilations(2)], ids=repr)
@each("length", [1e-30, 1e-6, 1e6, 1e30])
def test_orbits_of_any_size_in_single_precision(group, length):
    space = Orbits(group)
    x = (length * points(space)).float()
    section = space.section(x)
    back = space.act(section, space.representative(x))
    assert ((back - x).abs().amax(-1) / x.abs().amax(-1)).max() < 1e-5
    assert torch.isfinite(space.invariants(x)).all()


def test_invariants_are_what_the_table_says():
    x = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
    close(Orbits(SO(2)).invariants(x), torch.tensor([[5.0], [2.0]]), 1e-6)
    close(Orbits(Dilations(2)).invariants(x), torch.tensor([[0.6, 0.8], [0.0, -1.0]]), 1e-6)
    assert Orbits(RotationDilations(2)).invariants(x).shape == (2, 0)
    close(Orbits(SO(3)).representative(torch.tensor([0.0, 3.0, 4.0])), torch.tensor([5.0, 0.0, 0.0]), 1e-6)


# --- errors ---------------------------------------------------------------------------------------------------------

NOT_POINTS = {
    "zero in SO(3)": (Orbits(SO(3)), [0.0, 0.0, 0.0], r"it is 0, which SO\(3\) does not move; leave it out"),
    "zero in SO(2)": (Orbits(SO(2)), [0.0, -0.0], "it is 0"),
    "zero in dilations": (Orbits(RotationDilations(2)), [0.0, 0.0], "it is 0"),
    "NaN": (Euclidean(SE(2)), [math.nan, 0.0], "it is not finite"),
    "infinite": (Orbits(SO(2)), [math.inf, 0.0], "it is not finite"),
    "zero on the sphere": (Sphere(), [0.0, 0.0, 0.0], "it is not a unit vector; divide by its length"),
    "long on the sphere": (Sphere(), [1.0, 1.0, 0.0], "it is not a unit vector"),
    "zero direction": (PositionDirection(), [1.0, 2.0, 3.0, 0.0, 0.0, 0.0], "its direction, the last three components"),
    "long direction": (PositionDirection(), [1.0, 2.0, 3.0, 0.0, 1.01, 0.0], "its direction, .* not a unit vector"),
    "outside the quadrant": (OWN["Quadrant"](), [1.0, -1.0], "its components are not positive"),
}


@each("case", NOT_POINTS.keys())
def test_what_is_no_point_is_refused(case):
    space, bad, fault = NOT_POINTS[case]
    x = torch.stack([*points(space, 30)[28:], torch.tensor(bad, dtype=torch.float64)])
    with pytest.raises(ValueError, match=rf"^pos: pos\[2\] is not a point of .*: {fault}"):
        space.check("pos", x)
    with pytest.raises(ValueError, match=r"^x: x\[2\] is not a point"):
        space.lift(x)
    with pytest.raises(ValueError, match=r"^pos: pos is not a point"):
        space.check("pos", x[2])
    space.check("pos", x[:2])


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 2**-4), (torch.float16, 2**-7)],
)
def test_unit_vectors_up_to_the_tolerance(dtype, allowed):
    n = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    Sphere().check("n", ((1 + allowed / 2) * n).to(dtype))
    with pytest.raises(ValueError, match="it is not a unit vector"):
        Sphere().check("n", ((1 + 2 * allowed) * n).to(dtype))


def test_points_next_to_zero_have_an_orbit_unless_they_are_subnormal():
    space = Orbits(SO(2))
    space.check("x", torch.tensor([[1e-37, 0.0], [0.0, -1.0]]))
    with pytest.raises(ValueError, match=r"x\[0\] is not a point of .*: it is 0"):
        space.check("x", torch.tensor([[1e-40, 0.0], [0.0, -1.0]]))


def test_points_may_be_as_inexact_as_single_precision():
    n = points(Sphere()).float()
    Sphere().check("n", n)
    Sphere().check("n", n.double())
    SO(3).check("section", Sphere().section(n.double()))  # normalized again, in the given precision


@pytest.mark.parametrize("space", [Euclidean(SE(2)), Orbits(SO(3)), Sphere(), PositionDirection()], ids=str)
def test_shapes_and_dtypes_are_refused(space):
    for error, message, x in (
        (ValueError, rf"x: expected points \[\*, {space.dim}\] of .*, got \(4, 9\)", torch.ones(4, 9)),
        (TypeError, "x: expected floating points .* torch.int64", torch.ones(4, space.dim, dtype=torch.int64)),
        (TypeError, "x: expected floating points of .*, got list", [[0.0]]),
    ):
        with pytest.raises(error, match=message):
            space.lift(x)
    with pytest.raises(ValueError, match=r"got shape|got \(4, 9\)"):
        space.act(space.group.identity(torch.ones(1)), torch.ones(4, 9))


THREE, INVERSION = torch.ones(4, 3), torch.stack([torch.eye(3), -torch.eye(3)])
MINE = HomogeneousSpace("mine", SO(3), 3, SO(2))


test_groups_and_frames_that_do_not_fit_are_refused = refuses(
    (lambda: Euclidean(SE(3)).lift(THREE, INVERSION), r"h: h\[1\] .* of SO\(3\): it is improper", ValueError),
    (lambda: Euclidean(SE(3)).lift(THREE, torch.ones(1, 3, 3)), "h: .* not orthonormal", ValueError),
    (lambda: Euclidean(SE(3)).lift(THREE, torch.eye(4).expand(2, 4, 4)), r"h: .* got \(2, 4, 4\)", ValueError),
    (lambda: Euclidean(SE(3)).lift(THREE, torch.eye(3)), r"h: .* got \(3, 3\)", ValueError),
    (lambda: Euclidean(tetrahedral()).lift(THREE, INVERSION), r"h: h\[1\] .* of T: it is not", ValueError),
    (lambda: Euclidean(SO(3)), "group: expected Translations .* use Orbits"),
    (lambda: Orbits(SE(2)), r"group: expected SO\(2\), .* use Euclidean"),
    (lambda: Orbits(O(3)), "group: expected SO"),
    (lambda: Orbits(cyclic(4)), r"group: expected SO\(2\)"),
    (lambda: Euclidean("C4"), r"group: expected a group such as SO\(3\).*, got 'C4'"),
    (lambda: Orbits("C4"), r"group: expected a group such as SO\(3\).*, got 'C4'"),
    (lambda: HomogeneousSpace("mine", SO(3), 3, "C4"), "stabilizer: expected a group"),
    (lambda: MINE.section(torch.ones(3)), "mine does not define a section", NotImplementedError),
    (lambda: MINE.embed(torch.eye(2)), "implement embed", NotImplementedError),
    error=TypeError,
)


def test_a_finite_group_is_short_for_its_semidirect_product_with_the_translations():
    space = Euclidean(tetrahedral())
    assert space == Euclidean(SemidirectProduct(tetrahedral()))
    assert space.stabilizer == tetrahedral()
    assert Euclidean(E(3)).lift(THREE, INVERSION).shape == (4, 2, 4, 4)


@pytest.mark.parametrize(
    ("method", "wrong", "found"),
    [
        ("section", lambda self, x: x, r"elements of squeeze \(6, 2, 2\), got \(6, 2\)"),
        ("section", lambda self, x: torch.eye(2, dtype=x.dtype), r"elements of squeeze \(6, 2, 2\), got \(2, 2\)"),
        ("section", lambda self, x: None, "a tensor, got NoneType"),
        ("invariants", lambda self, x: x, r"invariants \(6, 1\), got \(6, 2\)"),
    ],
)
def test_what_a_method_of_a_space_returns_is_checked_where_it_is_used(method, wrong, found):
    space = type("Own", (OWN["Quadrant"],), {method: wrong})()
    points = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)) + 0.1
    with pytest.raises((TypeError, ValueError), match=f"{method} of quadrant: expected {found}"):
        _ = lift(points, None, AllPairs(), space).relative.coordinates


def test_an_embedding_of_another_size_is_named():
    space = type("Own", (HomogeneousSpace,), {"section": Euclidean.section, "embed": lambda self, h: h})
    with pytest.raises(ValueError, match=r"embed of own: expected elements of SE\(3\) \(1, 4, 4\), got \(1, 2, 2\)"):
        space("own", SE(3), 3, SO(2)).lift(torch.ones(5, 3), torch.eye(2)[None])


def test_coordinates_of_an_affine_group_of_ones_own_are_used():
    class Two(Heisenberg):
        num_coordinates = 2

        def coordinates(self, g):
            return g[..., :2, 3]

    class Space(HeisenbergSpace):
        def __init__(self):
            HomogeneousSpace.__init__(self, "own", Two(), dim=3)

    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = lift(points, None, AllPairs(), Space())
    relative = graph.space.group.relative(graph.elements[:, None, 0], graph.elements[None, :, 0])
    assert graph.relative.num_coordinates == 2
    torch.testing.assert_close(graph.relative.coordinates.view(5, 5, 2), relative[..., :2, 3])


@every_space
def test_spaces_are_immutable_values(space):
    assert copy.deepcopy(space) == space
    assert hash(copy.copy(space)) == hash(space)
    assert [other for other in SPACES.values() if other == space] == [space]
    named = [Euclidean(SemidirectProduct(cyclic(n), "one name")) for n in (4, 8)]
    assert named[0] != named[1]
    with pytest.raises(AttributeError):
        space.dim = 7
