"""Lie groups: all laws for every group of the table, accuracy of exp and log, gradients, uniformity, errors."""

import copy
import itertools
import math
import pickle
import re

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck, gradgradcheck

from lieattn.geometry import GivenFrames, Radius, lift
from lieattn.groups import (
    SE,
    SO,
    Dilations,
    E,
    LieGroup,
    O,
    RotationDilations,
    SemidirectProduct,
    Sim,
    Translations,
    cyclic,
    cyclic_about,
    dihedral,
    quaternion_from_rotation,
    rotation_from_quaternion,
)
from lieattn.spaces import Euclidean
from tests.cases import GROUPS, each, normal, refuses
from tests.lie_cases import (
    LIE_GROUPS,
    OWN_NAMES,
    algebra_cases,
    elements,
    failures_of_page,
    turning,
    turns,
    with_angle,
)

every_group = each("group", LIE_GROUPS)
WITH_LOGARITHM = {name: group for name, group in LIE_GROUPS.items() if group.has_logarithm}
every_with_logarithm = each("group", WITH_LOGARITHM)
FINITE = ("trivial1", "C4", "D3", "mirror2_oblique", "C5_about_oblique", "T", "Ih", "C4_x_mirror1", "S3")
FINITE = {motions.name: motions for motions in (SemidirectProduct(GROUPS[name]) for name in FINITE)}
SHEARED = SemidirectProduct(cyclic(4).conjugate(torch.tensor([[1.0, 0.7], [0.0, 2.0]]).double(), "sheared C4"))
MOTIONS = {**LIE_GROUPS, **FINITE, SHEARED.name: SHEARED}
every_motion = each("group", MOTIONS)
REFLECTING = {name: group for name, group in LIE_GROUPS.items() if name in ("O(2)", "O(3)", "E(2)", "E(3)")}
RIGID = {name: LIE_GROUPS[name] for name in ("SO(2)", "SO(3)", "O(2)", "O(3)", "SE(2)", "SE(3)", "E(2)", "E(3)")}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def close(found, expected, atol=1e-12, rtol=1e-12):
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def proper(group, count=40, seed=0):
    """Return elements of the identity component, which have a logarithm."""
    g = elements(group, count, seed)
    return g[torch.linalg.det(group.linear(g)) > 0]


# --- axioms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SO, O, SE, E, Sim, Translations, RotationDilations])
def test_dimensions_can_be_numpy_integers(kind):
    assert kind(np.int64(3)) == kind(3)
    assert repr(kind(np.int64(3))) == repr(kind(3))


@every_motion
def test_product_is_associative_with_identity_and_inverses(group):
    g, h, k = (elements(group, seed=seed) for seed in range(3))
    close(group.product(group.product(g, h), k), group.product(g, group.product(h, k)), 1e-10)
    unit = group.identity(g)
    close(group.product(unit, g), g)
    close(group.product(g, unit), g)
    close(group.product(g, group.inverse(g)), unit.expand_as(g))
    close(group.product(group.inverse(g), g), unit.expand_as(g))
    close(group.relative(g, h), group.product(group.inverse(g), h), 1e-10)
    for made in (group.product(g, h), group.inverse(g), group.relative(g, h), unit, group.product(g, h).float()):
        group.check("made", made)


@every_motion
def test_action_is_a_homomorphism_that_moves_differences_as_vectors(group):
    g, h = elements(group), elements(group, seed=1)
    x, y = normal(2, len(g), group.dim)
    close(group.act(group.product(g, h), x), group.act(g, group.act(h, x)), 1e-10)
    close(group.act(group.identity(x), x), x, 0, 0)
    close(group.act(g, x) - group.act(g, y), group.act_vectors(g, x - y), 1e-10)
    close(group.act(g, torch.zeros_like(x)), group.translation(g))
    close(group.act_vectors(g, x), torch.einsum("nij,nj->ni", group.linear(g), x), 1e-10)


@every_with_logarithm
def test_everything_broadcasts_and_keeps_the_dtype(group):
    a = normal(5, 1, group.algebra_dim).float()
    g, h = group.exp(a), group.exp(a[:, 0])
    assert g.shape == (5, 1, group.size, group.size)
    assert g.dtype == torch.float32
    pairs = group.relative(g, h)
    assert pairs.shape == (5, 5, group.size, group.size)
    assert group.log(pairs).shape == (5, 5, group.algebra_dim)
    assert group.coordinates(pairs).shape == (5, 5, group.num_coordinates)
    assert group.distance(g, h).shape == (5, 5)
    assert group.act(g, normal(7, group.dim).float()).shape == (5, 7, group.dim)
    results = (pairs, group.log(pairs), group.coordinates(pairs), group.distance(g, h), group.identity(a))
    assert {result.dtype for result in results} == {torch.float32}
    assert group.log(group.exp(a[0, 0])).shape == (group.algebra_dim,)
    assert group.exp(a[:0]).shape == (0, 1, group.size, group.size)
    assert group.log(g[:0]).shape == (0, 1, group.algebra_dim)


@every_group
def test_algebra_coordinates_and_matrices(group):
    a, b = normal(2, 9, group.algebra_dim)
    close(group.vee(group.hat(a)), a, 0, 0)
    close(group.hat(2 * a + b), 2 * group.hat(a) + group.hat(b))
    assert torch.linalg.matrix_rank(group.hat(torch.eye(group.algebra_dim)).flatten(-2)) == group.algebra_dim


# --- exp and log ------------------------------------------------------------------------------------------------


def exp_in_many_digits(group, a, digits=30):
    with mpmath.workdps(digits):
        return torch.tensor(
            [mpmath.expm(mpmath.matrix(matrix), method="taylor").tolist() for matrix in group.hat(a).tolist()],
            dtype=torch.float64,
        )


@every_with_logarithm
def test_exp_and_log_against_many_digits(group):
    a = algebra_cases(group)[::2]
    exact = exp_in_many_digits(group, a)
    close(group.exp(a), exact, 1e-12)
    close(group.log(exact), a, 1e-12)
    close(group.log(group.exp(a)), a, 1e-12)


@every_with_logarithm
def test_exp_and_log_in_single_precision(group):
    a = algebra_cases(group)
    a = a[a.abs().amax(-1) < math.pi - 1e-5]  # closer to π, rounding decides between two logarithms
    exact = group.exp(a)
    close(group.exp(a.float()).double(), exact, 1e-5, 1e-5)
    with_room = ~near_half_turn(group, a)
    close(group.log(exact.float()).double()[with_room], a[with_room], 1e-5, 1e-5)
    close(group.exp(group.log(exact.float())).double(), exact, 1e-5, 1e-5)


@every_with_logarithm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elements_in_half_precision(group, dtype):
    """Elements, products and inverses pass `check`; distances and logarithms are those of double precision."""
    g, h = group.sample(2, 50, generator=generator(), dtype=dtype)
    group.check("g", g)
    group.check("h", h)
    found, wanted = group.inverse(g), group.inverse(g.double())
    assert found.dtype == dtype
    rough = 0.05 if dtype == torch.bfloat16 else 0.01
    assert float(((found - wanted).abs() / wanted.abs().amax((-2, -1), keepdim=True)).max()) < rough
    distance = group.distance(group.identity(g), g)
    assert distance.dtype == dtype
    wanted = group.distance(group.identity(g).double(), g.double())
    assert float((distance - wanted).abs().median()) < rough  # not for half turns, whose axes are ill-conditioned
    assert group.log(proper(group).to(dtype)).dtype == dtype


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_elements_are_exact_up_to_the_tolerance(dtype, allowed):
    for share in (0.5, 2.0):
        g = torch.eye(3, dtype=dtype)
        g[0, 1] = share * allowed
        for group in (SO(3), Dilations(3), SemidirectProduct(Dilations(2)), Translations(2)):
            if share < 1:
                group.check("g", g)
            else:
                with pytest.raises(ValueError, match="g is not an element"):
                    group.check("g", g)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_no_element_in_half_precision(dtype):
    for group, matrix, fault in NOT_ELEMENTS.values():
        with pytest.raises(ValueError, match=fault.split(r"\(")[0]):
            group.check("frames", matrix.to(dtype))
    Dilations(3).check("g", 1e-3 * torch.eye(3, dtype=dtype))  # the determinant underflows in half precision


def near_half_turn(group, a, within=1e-5):
    part = a[..., turning(group)]
    return part.norm(dim=-1) > math.pi - within if turns(group) else torch.zeros(a.shape[:-1], dtype=torch.bool)


@every_group
def test_exp_is_that_of_matrices_beyond_half_and_full_turns(group):
    for angle in (math.pi, 4.0, 2 * math.pi - 1e-6, 2 * math.pi, 7.0, 20.0):
        a = with_angle(group, normal(4, group.algebra_dim), angle)
        close(group.exp(a), torch.linalg.matrix_exp(group.hat(a)), 1e-11, 1e-11)


@each("log_scale", [-20.0, -1.0, -0.6, 1e-9, 0.4, 1.7, 8.0])
@pytest.mark.parametrize("dim", [2, 3])
def test_similarities_of_any_scale(dim, log_scale):
    group = Sim(dim)
    a = algebra_cases(group)[::6]
    a[:, 0] = log_scale
    exact = exp_in_many_digits(group, a)
    largest = math.exp(max(log_scale, 0.0))
    close(group.exp(a), exact, 1e-12 * largest)
    close(group.log(exact), a, 1e-11)


@pytest.mark.parametrize(
    ("group", "log_scale", "angle"), [(SE(2), None, 0.99), (SE(3), None, 0.99), (Sim(2), 0.7, 0.7), (Sim(3), -0.7, 0.7)]
)
def test_power_series_are_precise_up_to_the_closed_forms(group, log_scale, angle):
    """The sum of the squares is slightly less than 1."""
    a = with_angle(group, normal(10, group.algebra_dim), angle)
    if log_scale is not None:
        a[:, 0] = log_scale
    close(group.exp(a), torch.linalg.matrix_exp(group.hat(a)), 1e-14)


def test_logarithms_are_precise_where_the_power_series_ends():
    a = with_angle(SO(3), normal(10, 3), 2 * math.atan(math.sqrt(0.0499)))
    close(SO(3).log(SO(3).exp(a)), a, 5e-15, 0.0)


def test_gradients_of_many_turns_are_finite_in_single_precision():
    """Power series of such angles, which are not used, would overflow."""
    for size in (10.0, 1e3, 1e6):
        a = (size * normal(10, 6)).float().requires_grad_()
        (gradient,) = torch.autograd.grad(SE(3).exp(a).sum(), a)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_up_to_the_largest_number(dtype):
    largest = math.log(torch.finfo(dtype).max)
    for sign in (-1, 1):
        assert Dilations(2).exp(torch.tensor([sign * (largest - 1e-3)], dtype=dtype))[0, 0] > 0
        with pytest.raises(ValueError, match="a: expected logarithms of scales"):
            Dilations(2).exp(torch.tensor([sign * (largest + 1e-3)], dtype=dtype))


def test_half_turn_of_the_plane_is_plus_pi():
    for zero in (0.0, -0.0):
        half_turn = torch.tensor([[-1.0, zero], [zero, -1.0]], dtype=torch.float64)
        assert SO(2).log(half_turn).item() == math.pi
    just_past = torch.tensor([[-1.0, 1e-300], [-1e-300, -1.0]], dtype=torch.float64)
    assert SO(2).log(just_past).item() == math.pi
    close(SO(2).log(SO(2).exp(torch.tensor([1e-12 - math.pi], dtype=torch.float64))).item(), 1e-12 - math.pi, 1e-15)


AXES = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, -1, 0), (1, -1, 1), (0.6, 0, -0.8), (-0.309, 0.5, 0.809)]


@each("axis", AXES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_half_turns_have_one_logarithm_however_they_were_rounded(axis, dtype):
    """The largest component of the axis is positive."""
    axis = torch.tensor(axis, dtype=torch.float64)
    axis = axis / axis.norm()
    half_turn = 2 * axis[:, None] * axis - torch.eye(3, dtype=torch.float64)
    turns = SO(3).sample(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = ((half_turn @ turns).to(dtype) @ turns.mT.to(dtype)).to(dtype)
    expected = math.pi * (axis if axis[axis.abs().argmax()] > 0 else -axis).to(dtype)
    close(SO(3).log(half_turn.to(dtype)), expected, 2e-6 if dtype == torch.float32 else 1e-12)
    logs = SO(3).log(rounded)
    assert (logs - logs[0]).abs().max() < 20 * torch.finfo(dtype).eps
    close(logs[0], expected, 2e-6 if dtype == torch.float32 else 1e-12)
    turns = SO(2).sample(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    assert (SO(2).log(-turns @ turns.mT) > 3).all()


@every_with_logarithm
def test_elements_are_mapped_over(group):
    """Within torch.func.vmap, elements have no values that could be checked."""
    g, h = proper(group), elements(group, seed=1)[: len(proper(group))]
    a = group.log(g)
    close(torch.func.vmap(group.log)(g), a)
    if group.name not in OWN_NAMES:
        close(torch.func.vmap(group.exp)(a), group.exp(a))
    close(torch.func.vmap(group.product)(h, g), group.product(h, g))
    close(torch.func.vmap(group.inverse)(g), group.inverse(g))
    assert torch.equal(torch.func.vmap(lambda one: (group.check("g", one), one)[1])(h), h)
    close(torch.func.vmap(group.distance)(h, g), group.distance(h, g))


def test_indices_of_elements_are_mapped_over():
    """With torch 2.10 too, where an index without dimensions cannot be looked up within torch.func.vmap."""
    group, x = dihedral(4), normal(3, 2)
    indices = torch.tensor([1, 3, 5])
    g = group.element(indices, x)
    for call in (group.element, group.act, group.act_vectors):
        close(torch.func.vmap(call)(indices, x), call(indices, x))
    close(torch.func.vmap(group.inverse)(g), group.inverse(g))
    close(torch.func.vmap(group.distance)(g, g.flip(0)), group.distance(g, g.flip(0)))


@pytest.mark.parametrize("name", ["SO(2)", "SO(3)", "O(3)", "SE(3)", "Sim(2)", "Heisenberg"])
def test_second_derivatives_of_distances(name):
    """Transforms of torch.func agree with plain derivatives, at rotations too, where torch.linalg.det has NaN."""

    group = LIE_GROUPS[name]

    def distance(a):
        return group.distance(group.identity(a), group.exp(a))

    a = 0.3 * normal(group.algebra_dim)
    wanted = torch.autograd.functional.hessian(distance, a)
    for first, second in itertools.permutations((torch.func.jacrev, torch.func.jacfwd)):
        close(second(first(distance))(a), wanted, 1e-10, 1e-10)


@each("group", REFLECTING)
def test_reflections_have_no_logarithm(group):
    g = elements(group)
    improper = torch.linalg.det(group.linear(g)) < 0
    first = int(improper.nonzero()[0])
    with pytest.raises(ValueError, match=rf"g: g\[{first}\] has no logarithm in O\({group.dim}\): it is improper"):
        group.log(g)
    assert torch.isfinite(group.log(g[~improper])).all()


# --- gradients --------------------------------------------------------------------------------------------------

SMOOTH = (0.0, 1e-300, 1e-12, 1e-8, 1e-4, 0.4, 0.99, 1.01, 2.0, 3.0, math.pi - 1e-4, math.pi - 1e-8, math.pi)


def points_of_algebra(group, angles=SMOOTH):
    """Return one vector for each angle, also with the whole vector of that size."""
    cases = [torch.zeros(1, group.algebra_dim, dtype=torch.float64)]
    for angle in angles:
        a = normal(1, group.algebra_dim, seed=3)
        cases += [min(angle, 1.0) * a, with_angle(group, a, angle)]
    return torch.cat(cases)


def jacobian(call, a):
    """Return the derivative ``[cases, *, k]`` of ``call`` ``[cases, *]`` with respect to ``a`` ``[cases, k]``."""
    a = a.clone().requires_grad_()
    values = call(a)
    columns = values.flatten(1).sum(0)
    rows = [torch.autograd.grad(column, a, retain_graph=True)[0] for column in columns]
    return torch.stack(rows, dim=1).unflatten(1, values.shape[1:])


@every_group
def test_derivative_of_exp_is_that_of_the_matrix_exponential(group):
    a = points_of_algebra(group)
    expected = jacobian(lambda a: torch.linalg.matrix_exp(group.hat(a)), a)
    close(jacobian(group.exp, a), expected, 1e-10, 1e-10)


@every_with_logarithm
def test_derivative_of_log_inverts_that_of_exp_also_at_the_identity_and_at_half_turns(group):
    """With g = exp(a), changing a by the derivative of log(g exp(b)) at b = 0 changes exp(a) as b does."""
    g = group.exp(points_of_algebra(group))
    a = group.log(g)  # at half turns, the other of two logarithms may be returned
    of_log = jacobian(lambda b: group.log(group.product(g, group.exp(b))), torch.zeros_like(a))
    of_exp = jacobian(lambda a: torch.linalg.matrix_exp(group.hat(a)), a)
    moved = torch.einsum("nija,nab->nbij", of_exp, of_log)
    unit = torch.eye(group.algebra_dim, dtype=torch.float64)
    close(moved, g[:, None] @ group.hat(unit), 1e-9, 1e-9)


@every_with_logarithm
def test_derivatives_are_finite_differences(group):
    g, h = proper(group, 3)[:2]
    a = 0.5 * normal(group.algebra_dim, seed=5)

    def of_relative(a):
        moved = group.product(g, group.exp(a))
        relative = group.relative(h, moved)
        return group.log(relative), group.coordinates(relative), group.distance(h, moved)

    a.requires_grad_()
    assert gradcheck(of_relative, a, eps=1e-6, atol=1e-6, fast_mode=True)
    log = lambda a: group.log(group.product(g, group.exp(a)))  # noqa: E731
    assert not turns(group) or gradgradcheck(log, a, eps=1e-6, atol=1e-5, fast_mode=True)


@every_with_logarithm
def test_gradients_are_finite_where_elements_coincide_or_are_half_a_turn_apart(group):
    for dtype in (torch.float64, torch.float32):
        half_turn = group.exp(with_angle(group, normal(6, group.algebra_dim), math.pi)).to(dtype)
        apart = torch.cat([group.identity(half_turn).expand_as(half_turn), half_turn])
        a = normal(12, group.algebra_dim, seed=1).to(dtype).requires_grad_()
        g = group.exp(a)
        h = group.product(g, apart)
        total = group.log(group.relative(g, h)).sum() + group.distance(g, h).sum()
        total = total + group.coordinates(group.relative(g, h)).square().sum() + group.distance(g, g).sum()
        (gradient,) = torch.autograd.grad(total, a, create_graph=True)
        assert torch.isfinite(gradient).all()
        (second,) = torch.autograd.grad(gradient.square().sum(), a)
        assert torch.isfinite(second).all()


# --- distances and coordinates ------------------------------------------------------------------------------------


@every_with_logarithm
def test_distance_is_left_invariant_symmetric_and_vanishes_on_the_diagonal(group):
    g, h, k = (proper(group, seed=seed)[:40] for seed in range(3))
    k = elements(group, seed=2)[:40]
    d = group.distance(g, h)
    close(group.distance(group.product(k, g), group.product(k, h)), d, 1e-7)
    close(group.distance(h, g), d, 1e-7)
    assert (group.distance(g, g) < 1e-12).all()
    assert (d[(g - h).abs().amax((-2, -1)) > 1e-2] > 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each("group", [group for name, group in WITH_LOGARITHM.items() if name not in OWN_NAMES])
def test_gradient_of_the_distance_to_the_same_element_is_zero(group, dtype):
    """Also for dilations, whose inverse times themselves is the identity only up to rounding."""
    g = elements(group).to(dtype)
    for ends in ((g.clone().requires_grad_(), g), (g, g.clone().requires_grad_())):
        moving = next(end for end in ends if end.requires_grad)
        (gradient,) = torch.autograd.grad(group.distance(*ends).sum(), moving)
        assert torch.equal(gradient, torch.zeros_like(g))


@every_with_logarithm
def test_distance_is_not_invariant_from_the_right_unless_it_should_be(group):
    """Control: with g h⁻¹ instead of g⁻¹ h, the test above must fail for some groups."""
    g, h, k = (proper(group, seed=seed)[:40] for seed in range(3))
    error = (group.distance(group.product(g, k), group.product(h, k)) - group.distance(g, h)).abs().max()
    if group.name in ("SE(2)", "SE(3)", "Sim(3)", "Heisenberg"):
        assert error > 1e-2
    elif not group.is_affine:
        assert error < 1e-7


@each("group", RIGID)
def test_distance_obeys_the_triangle_inequality(group):
    g, h, k = (elements(group, seed=seed) for seed in range(3))
    assert (group.distance(g, k) <= group.distance(g, h) + group.distance(h, k) + 1e-9).all()


def test_distances_are_the_angles_and_lengths_that_they_are_said_to_be():
    a = torch.tensor([0.0, 2.0, 0.0, 3.0, 4.0, 0.0], dtype=torch.float64)
    g = SE(3).element(SO(3).exp(a[:3]), a[3:])
    unit = SE(3).identity(g)
    close(SE(3).distance(unit, g), torch.tensor(0.2 * 2 + 0.8 * 5, dtype=torch.float64))
    close(SE(3).distance(unit, g, alpha=1.0), torch.tensor(2.0, dtype=torch.float64))
    both = RotationDilations(2).exp(torch.tensor([-3.0, 1.0], dtype=torch.float64))
    close(
        RotationDilations(2).distance(torch.eye(2).double(), both, alpha=0.25), torch.tensor(2.5, dtype=torch.float64)
    )
    close(RotationDilations(2).distance(torch.eye(2).double(), both), torch.tensor(2.0, dtype=torch.float64))
    mirror = torch.diag(torch.tensor([1.0, 1.0, -1.0]))
    assert O(3).distance(torch.eye(3), mirror).item() == pytest.approx(math.pi)


@every_group
def test_coordinates_tell_elements_apart_and_do_not_jump(group):
    g, h = elements(group), elements(group, seed=1)
    assert group.coordinates(g).shape[-1] == group.num_coordinates
    different = (g - h).abs().amax((-2, -1)) > 1e-3
    apart = (group.coordinates(g) - group.coordinates(h)).abs().amax(-1)
    assert (apart[different] > 1e-5).all()
    step = 1e-7 * normal(len(g), group.algebra_dim)
    moved = group.coordinates(group.product(g, group.exp(step)))
    assert (moved - group.coordinates(g)).abs().max() < 1e-4


def test_relative_elements_stay_exact_far_from_the_origin():
    group = SE(3)
    g, h = group.sample(2, 100, generator=generator())
    far = Translations(3).element(torch.tensor([4096.0, -8192.0, 2048.0]))
    steps = torch.randint(-8, 8, (2, 100, 3), generator=generator()) / 8  # the shift does not round them
    g, h = (group.element(group.linear(e), t) for e, t in zip((g, h), steps, strict=True))
    shifted = group.relative(group.product(far, g), group.product(far, h))
    close(shifted, group.relative(g, h), 1e-6, 0)
    naive = group.product(group.inverse(group.product(far, g)), group.product(far, h))
    assert (naive - group.relative(g, h)).abs().max() > 1e-4


def test_geometry_keeps_its_precision_under_autocast():
    group = SE(3)
    g, h = group.sample(2, 20, generator=generator())
    expected = [group.relative(g, h), group.act(g, torch.ones(3)), group.log(group.product(g, h))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [group.relative(g, h), group.act(g, torch.ones(3)), group.log(group.product(g, h))]
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-5)


# --- measure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [SO(2), SO(3), O(3), cyclic_about(4)], ids=repr)
def test_designs_can_be_modified(group):
    design = group.design(4, dtype=torch.float64)
    expected = design.clone()
    design.zero_()
    assert torch.equal(group.design(4, dtype=torch.float64), expected)


COUNT = 20_000
LEAST_P = 1e-3


def uniform_on(values, low, high):
    return stats.kstest(values.numpy(), stats.uniform(low, high - low).cdf).pvalue > LEAST_P


def test_rotations_of_the_plane_are_uniform():
    angle = SO(2).log(SO(2).sample(COUNT, generator=generator(), dtype=torch.float64))[:, 0]
    assert uniform_on(angle, -math.pi, math.pi)
    assert not uniform_on(angle.abs().sqrt(), 0, math.sqrt(math.pi))  # control


@pytest.mark.parametrize("turned", [False, True])
def test_rotations_of_space_are_uniform(turned):
    """Angles have the density (1 - cos θ)/π, and every column is uniform on the sphere, also after a fixed rotation."""
    rotation = SO(3).sample(COUNT, generator=generator(1), dtype=torch.float64)
    if turned:
        rotation = SO(3).product(SO(3).exp(torch.tensor([0.3, -2.0, 0.7], dtype=torch.float64)), rotation)
    angle = SO(3).distance(torch.eye(3, dtype=torch.float64), rotation)
    assert stats.kstest(angle.numpy(), lambda t: (t - np.sin(t)) / math.pi).pvalue > LEAST_P
    assert all(uniform_on(rotation[:, i, j], -1, 1) for i in range(3) for j in range(3))
    second = torch.einsum("nij,nkl->ijkl", rotation, rotation) / COUNT
    unit = torch.eye(3, dtype=torch.float64)
    close(second, torch.einsum("ik,jl->ijkl", unit, unit) / 3, 0.02, 0)


@pytest.mark.parametrize("dim", [2, 3])
def test_half_of_the_orthogonal_group_is_improper(dim):
    g = O(dim).sample(COUNT, generator=generator(2), dtype=torch.float64)
    det = torch.linalg.det(g)
    close(det.abs(), torch.ones_like(det))
    assert stats.binomtest(int((det < 0).sum()), COUNT).pvalue > LEAST_P
    for improper in (False, True):
        assert g[(det < 0) == improper].mean(0).abs().max() < 0.03


@every_group
def test_samples_are_elements_and_follow_the_generator_alone(group):
    first = group.sample(4, 3, generator=generator(7), dtype=torch.float64)
    torch.manual_seed(1)
    again = group.sample(4, 3, generator=generator(7), dtype=torch.float64)
    assert first.shape == (4, 3, group.size, group.size)
    assert torch.equal(first, again)
    group.check("sample", first)
    assert not torch.equal(first, group.sample(4, 3, generator=generator(8), dtype=torch.float64))
    single = group.sample(4, 3, generator=generator(7), dtype=torch.float32)
    assert torch.equal(single, first.float())


DESIGNS = {
    **{("SO", 2, count): count - 1 for count in (1, 2, 3, 4, 7)},
    **{("SO", 3, count): degree for count, degree in {1: 0, 2: 0, 4: 1, 12: 2, 24: 3, 60: 5}.items()},
    **{("O", 2, 2 * count): count - 1 for count in (1, 2, 3, 4)},
    **{("O", 3, 2 * count): degree for count, degree in {1: 1, 2: 1, 4: 1, 12: 3, 24: 3, 60: 5}.items()},
}


@each("letters, dim, count", list(DESIGNS))
def test_designs_average_polynomials_of_their_degree_exactly(letters, dim, count):
    """Powers of u · g v span the matrix elements: means are exact up to the degree of the design, and no further."""
    group = {"SO": SO, "O": O}[letters](dim)
    design = group.design(count, dtype=torch.float64)
    group.check("design", design)
    close(design[0], torch.eye(dim, dtype=torch.float64))
    assert len(torch.unique(design.flatten(1).round(decimals=6), dim=0)) == count
    u, v = normal(2, 5, dim)
    turned = group.product(group.sample(3, 1, generator=generator(), dtype=torch.float64), design)

    def moves(power):
        means = [torch.einsum("ki,...nij,kj->...nk", u, g, v).pow(power).mean(-2) for g in (turned, design)]
        return float((means[0] - means[1]).abs().max())

    degree = DESIGNS[letters, dim, count]
    assert max(moves(power) for power in range(degree + 1)) < 1e-9
    assert moves(degree + 1) > 1e-3


@pytest.mark.parametrize("group", [SO(2), SO(3), O(2), O(3)], ids=repr)
def test_turned_designs_are_designs_and_each_element_is_uniform(group):
    turned = group.sample_design(2000, count=4, generator=generator(), dtype=torch.float64)
    assert turned.shape == (2000, 4, group.dim, group.dim)
    close(turned.mean(1), torch.zeros(2000, group.dim, group.dim, dtype=torch.float64))
    relative = group.relative(turned[:, :1], turned)
    close(relative, group.design(4, dtype=torch.float64).expand_as(relative))
    assert uniform_on(turned[:, 3, 0, 0], -1, 1) or group.dim == 2
    assert turned[:, 3].mean(0).abs().max() < 0.06
    assert group.sample_design(2, count=2).dtype == torch.get_default_dtype()


# --- quaternions --------------------------------------------------------------------------------------------------


def test_quaternions_and_rotations_both_ways():
    q = normal(200, 4)
    q = q / q.norm(dim=-1, keepdim=True)
    rotation = rotation_from_quaternion(q)
    SO(3).check("rotation", rotation)
    close(quaternion_from_rotation(rotation), torch.where(q[:, :1] < 0, -q, q))
    for length in (3.0, 1e-300, 1e300):
        close(rotation_from_quaternion(length * q), rotation)
    close(rotation_from_quaternion(-q), rotation)
    angle = 0.8
    about_y = torch.tensor([math.cos(angle / 2), 0.0, math.sin(angle / 2), 0.0], dtype=torch.float64)
    close(rotation_from_quaternion(about_y), SO(3).exp(torch.tensor([0.0, angle, 0.0], dtype=torch.float64)))


def test_quaternions_of_subnormal_length_have_rotations():
    smallest = torch.tensor([0.0, 1e-45, 0.0, 0.0])
    assert torch.equal(rotation_from_quaternion(smallest), torch.diag(torch.tensor([1.0, -1.0, -1.0])))


@pytest.mark.parametrize("length", [1.0, 0.01, 3.0, 1e5, 1e-200, 1e200])
def test_gradients_by_quaternions_of_any_length(length):
    """The gradient of torch.ldexp is zero for negative exponents, that is for quaternions with components above 1."""
    q = normal(20, 4)
    q = torch.cat([q / q.norm(dim=-1, keepdim=True), torch.eye(4, dtype=torch.float64)])
    weights = normal(3, 3)

    def gradient(rotations, q):
        q = q.clone().requires_grad_()
        return torch.autograd.grad((weights * rotations(q)).sum(), q)[0]

    def by_conjugation(q):  # v -> q v / q on vectors, by Rodrigues' formula
        w, v = q[:, 0, None, None], q[:, 1:]
        square = v.square().sum(-1)[:, None, None]
        rotated = (w * w - square) * torch.eye(3, dtype=q.dtype) + 2 * v[:, :, None] * v[:, None] + 2 * w * SO(3).hat(v)
        return rotated / (w * w + square)

    wanted = gradient(by_conjugation, q)
    assert (wanted.abs().amax(-1) > 0).all()
    close(length * gradient(rotation_from_quaternion, length * q), wanted)


# --- values and errors --------------------------------------------------------------------------------------------


@every_group
def test_groups_are_immutable_values(group):
    assert copy.deepcopy(group) == group
    assert hash(copy.copy(group)) == hash(group)
    if group.name not in OWN_NAMES:
        assert pickle.loads(pickle.dumps(group)) == group
    assert repr(group) == group.name
    assert [other for other in LIE_GROUPS.values() if other == group] == [group]
    with pytest.raises(AttributeError):
        group.dim = 7


def test_groups_with_the_same_stabilizer_are_the_same():
    assert SE(3) == SemidirectProduct(SO(3), "SE(3)")
    assert SE(3) != E(3)
    assert SE(3) != SE(2)
    assert SemidirectProduct(SO(2), "mine") != SemidirectProduct(O(2), "mine")


NOT_ELEMENTS = {
    "a reflection in SO(3)": (SO(3), torch.diag(torch.tensor([1.0, 1.0, -1.0])), "it is improper"),
    "a reflection in SO(2)": (SO(2), torch.diag(torch.tensor([1.0, -1.0])), "it is improper"),
    "a reflection in SE(3)": (SE(3), torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0])), "linear part, it is improper"),
    "a reflection in Sim(2)": (Sim(2), torch.diag(torch.tensor([2.0, -2.0, 1.0])), "improper"),
    "a stretched frame": (SO(3), torch.diag(torch.tensor([1.0, 1.0, 1.1])), r"not orthonormal \(largest error 2.1e-01"),
    "a sheared frame": (O(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "not orthonormal"),
    "a stretched similarity": (RotationDilations(2), torch.diag(torch.tensor([1.0, 2.0])), "after scaling"),
    "zero": (RotationDilations(3), torch.zeros(3, 3), "it is zero"),
    "NaN": (SO(3), torch.full((3, 3), math.nan), "not finite"),
    "infinite translation": (SE(2), SE(2).element(torch.eye(2), torch.tensor([math.inf, 0.0])), "not finite"),
    "last row": (SE(2), torch.ones(3, 3) + torch.eye(3), r"its last row is not \[0, 0, 1\]"),
    "a turned translation": (Translations(2), SE(2).exp(torch.tensor([0.5, 0.0, 0.0])), "is not the identity"),
    "a negative dilation": (Dilations(2), -torch.eye(2), "positive"),
    "an uneven dilation": (Dilations(2), torch.diag(torch.tensor([1.0, 2.0])), "multiple of the identity"),
    "a singular matrix": (LieGroup("GL(2)", 2, 2, 4), torch.ones(2, 2), "it has no inverse"),
}


@each("case", NOT_ELEMENTS.keys())
def test_what_is_no_element_is_refused(case):
    group, matrix, fault = NOT_ELEMENTS[case]
    stack = torch.stack([group.identity(matrix), group.identity(matrix), matrix])
    with pytest.raises(ValueError, match=rf"^frames: frames\[2\] is not an element of .*{fault}"):
        group.check("frames", stack)
    with pytest.raises(ValueError, match=rf"^frames: frames is not an element of .*{fault}"):
        group.check("frames", matrix)
    with pytest.raises(ValueError, match=r"frames\[0, 2\]"):
        group.check("frames", stack[None])
    group.check("frames", stack[:2])
    group.check("frames", stack[:0])


test_what_does_not_fit_is_named = refuses(
    (lambda: SO(3).check("g", torch.eye(4).expand(5, 4, 4)), r"g: expected \[\*, 3, 3\] for SO\(3\), got"),
    (lambda: LieGroup("mine", 2, 4, 1), r"size: expected 2 .* or 3"),
    (lambda: SemidirectProduct(SE(2)), r"stabilizer: expected a group of linear maps, but SE\(2\) has translations"),
    (lambda: SO(3).design(5), r"count: SO\(3\) has designs of \[1, 2, 4, 12, 24, 60\] elements, got 5"),
    (lambda: O(2).design(3), r"expected an even number, .* got 3"),
    (lambda: SO(2).design(0), "count: expected an integer"),
    *((lambda group=group: group.design(4), "has no designs") for group in (SE(3), Dilations(), Translations(2))),
    *((lambda kind=kind: kind(4), "dim: ") for kind in (SO, O, SE, E, Sim, RotationDilations)),
    *((lambda dim=dim: SO(dim), "dim: ") for dim in (1, 2.5, "3")),
    *((lambda kind=kind: kind(0), "dim: expected an integer") for kind in (Dilations, Translations)),
    (lambda: rotation_from_quaternion(torch.ones(2, 3)), r"q: expected \[\*, 4\]"),
    (lambda: quaternion_from_rotation(torch.ones(2, 4)), r"rotation: expected \[\*, 3, 3\]"),
    error=(TypeError, ValueError),
)


@pytest.mark.parametrize("method", ["hat", "exp", "exp_integral", "inverse_exp_integral"])
@each("group", [SO(2), SO(3), Dilations(3), RotationDilations(2), SE(3), cyclic_about(4)])
def test_other_numbers_of_coordinates_are_refused(group, method):
    """Three logarithms of scales are no dilation of space, and a number is no coordinate of a finite group."""
    for count in {1, 3} - {group.algebra_dim}:
        expected = re.escape(f"a: expected coordinates [*, {group.algebra_dim}] of {group.name}, got (5, {count})")
        with pytest.raises(ValueError, match=expected):
            getattr(group, method)(torch.ones(5, count))


def test_a_group_says_what_it_does_not_define():
    group = LieGroup("GL(2)", dim=2, size=2, algebra_dim=4)
    g, h = normal(2, 5, 2, 2)
    close(group.act(group.product(g, h), h[..., 0]), group.act(g, group.act(h, h[..., 0])))
    close(group.product(group.inverse(g), g), torch.eye(2, dtype=torch.float64).expand_as(g))
    assert not group.has_logarithm
    with pytest.raises(ValueError, match="coordinates: expected 'smooth'"):
        lift(h[..., 0], GivenFrames(g[:, None]), Radius(1.0), Euclidean(SemidirectProduct(group)), coordinates="log")
    for call in (lambda: group.log(g), lambda: group.distance(g, h)):
        with pytest.raises(NotImplementedError, match="implement log"):
            call()
    for call in (lambda: group.exp(g), lambda: group.vee(g)):
        with pytest.raises(NotImplementedError, match="implement hat and vee"):
            call()
    with pytest.raises(NotImplementedError, match="implement draw"):
        group.sample()


def test_a_group_says_which_of_its_own_methods_returns_something_else():
    class Scalings(LieGroup):
        def draw(self, shape, generator):
            return torch.eye(2, dtype=torch.float64)

        def finite_subgroup(self, count):
            return torch.eye(2)[None] if count == 1 else SO(2).finite_subgroup(count)

    group = Scalings("scalings", dim=2, size=2, algebra_dim=1)
    assert group.sample().shape == (2, 2)
    for call in (lambda: group.sample(3), lambda: group.sample_design(3, count=4)):
        with pytest.raises(ValueError, match=r"draw of scalings: expected elements \(3, 2, 2\), got \(2, 2\)"):
            call()
    with pytest.raises(TypeError, match="finite_subgroup of scalings: expected a Group, got "):
        group.design(1)


class OneParameter(LieGroup):
    """The maps exp(t X) of the plane for a matrix X."""

    def __init__(self, generator):
        super().__init__("exp(t X)", dim=2, size=2, algebra_dim=1)
        self.generator = generator

    def hat(self, a):
        return a[..., None] * torch.as_tensor(self.generator, dtype=a.dtype)


TURN, STRETCH = [[0.0, -1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_groups_of_your_own_with_other_attributes_are_different(kind):
    turns, again, stretches = (OneParameter(kind(matrix)) for matrix in (TURN, TURN, STRETCH))
    for of in (lambda group: group, SemidirectProduct, lambda group: Euclidean(SemidirectProduct(group))):
        assert of(turns) == of(again)
        assert hash(of(turns)) == hash(of(again))
        assert of(turns) != of(stretches)
    frames, pos = GivenFrames(torch.eye(2).expand(3, 1, 2, 2)), torch.ones(3, 2)
    lift(pos, frames, Radius(1.0), Euclidean(SemidirectProduct(turns)))
    with pytest.raises(ValueError, match="does not preserve distances"):
        lift(pos, frames, Radius(1.0), Euclidean(SemidirectProduct(stretches)))


def test_page_on_your_own_group_shows_what_happens():
    failed, tried = failures_of_page()
    assert failed == 0
    assert tried > 20
