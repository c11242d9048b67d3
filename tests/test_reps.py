"""Representations: homomorphisms for every group, accurate at every angle, and in the conventions of e3nn."""

import math

import numpy as np
import pytest
import torch

from lieattn.groups import SO, cyclic
from lieattn.nn import lift_field
from lieattn.reps import (
    DirectSum,
    Irreps,
    Multiple,
    Permutation,
    Pseudoscalar,
    Pseudovector,
    Scalar,
    SymmetricTensor,
    TracelessSymmetric,
    Vector,
    _irreps,
    check_representation,
    is_orthogonal,
    to_irreps,
)
from tests.cases import GROUPS, each, refuses, turns

SPATIAL = {
    "scalar": Scalar(),
    "pseudoscalar": Pseudoscalar(),
    "vector": Vector(3),
    "pseudovector": Pseudovector(),
    "symmetric": SymmetricTensor(3),
    "traceless": TracelessSymmetric(3),
    "irreps": Irreps("2x0e + 1o + 2e + 0o + 2x1e + 3o + 6e"),
    "sum": Scalar() + 2 * Vector(3) + 3 * (Pseudovector() + Irreps("2o")),
}
PLANAR = {
    "scalar": Scalar(),
    "pseudoscalar": Pseudoscalar(),
    "vector": Vector(2),
    "symmetric": SymmetricTensor(2),
    "traceless": TracelessSymmetric(2),
    "sum": Vector(2) + 2 * TracelessSymmetric(2) + Scalar(),
}
AT_SPECIAL_ANGLES = ("D2_about_z", "mirror3_oblique", "C5_about_oblique", "Oh", "Ih")  # general ones are below
EVERY = [(group, rep) for group in GROUPS.values() if group.dim == 2 for rep in PLANAR.values()]
EVERY += [(GROUPS[name], rep) for name in AT_SPECIAL_ANGLES for rep in SPATIAL.values()]
every_case = each("group, rep", EVERY)
every_spatial = each("rep", SPATIAL)


def rotations(count, seed=0):
    """Return proper rotations in general position, ``[count, 3, 3]`` float64."""
    return SO(3).sample(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def about(axis, angle):
    """Return a rotation matrix by Rodrigues' formula, differentiable in the angle."""
    x, y, z = (torch.tensor(axis, dtype=torch.float64) / math.hypot(*axis)).tolist()
    hat = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
    return torch.eye(3, dtype=torch.float64) + torch.sin(angle) * hat + (1 - torch.cos(angle)) * hat @ hat


def real_harmonics(degree, points):
    """Return real spherical harmonics of m = -l..l about z from SciPy's complex ones, component normalization."""
    pytest.importorskip("scipy", minversion="1.15")
    from scipy.special import sph_harm_y

    x, y, z = points.numpy().T
    theta, phi = np.arccos(z), np.arctan2(y, x)
    columns = []
    for m in range(-degree, degree + 1):
        value = sph_harm_y(degree, abs(m), theta, phi) * (-1) ** m * math.sqrt(4 * math.pi)
        columns.append(value.real if m == 0 else math.sqrt(2) * (value.imag if m < 0 else value.real))
    return torch.from_numpy(np.stack(columns, axis=1))


def e3nn_harmonics(degree, points):
    from e3nn import o3

    return o3.spherical_harmonics(degree, points, normalize=False, normalization="component")


# --- homomorphisms --------------------------------------------------------------------------------------------


@every_case
def test_products_go_to_products(group, rep):
    matrices = rep.matrix(group.elements)
    assert matrices.shape == (group.order, rep.dim, rep.dim)
    some = slice(None, None, max(1, group.order // 12))  # multiplied with all others
    products = matrices[some, None] @ matrices
    torch.testing.assert_close(products, matrices[group.cayley[some]], atol=1e-12, rtol=0)
    torch.testing.assert_close(matrices[group.inverse_index], matrices.mT, atol=1e-12, rtol=0)


@every_spatial
def test_homomorphism_on_all_rotations_and_mirrors(rep):
    first, second = rotations(20), rotations(20, seed=1)
    first[::2] *= -1
    second[::3] *= -1
    torch.testing.assert_close(rep.matrix(first @ second), rep.matrix(first) @ rep.matrix(second), atol=1e-12, rtol=0)


def test_vectors_and_tensors_transform_as_they_should():
    R = -rotations(1)[0]
    v, w = torch.randn(2, 3, dtype=torch.float64)
    cross = torch.linalg.cross
    torch.testing.assert_close(Pseudovector().act(R, cross(v, w)), cross(R @ v, R @ w))
    torch.testing.assert_close(Pseudoscalar().act(R, (v @ cross(w, v + 2 * w))[None] + 1), -torch.ones(1).double())
    T = torch.randn(3, 3, dtype=torch.float64)
    T = T + T.T
    rep = SymmetricTensor(3)
    torch.testing.assert_close(rep.to_tensor(rep.act(R, rep.from_tensor(T))), R @ T @ R.T)
    torch.testing.assert_close(rep.from_tensor(T).norm(), T.norm())
    part = TracelessSymmetric(3)
    traceless = T - torch.eye(3, dtype=torch.float64) * T.trace() / 3
    torch.testing.assert_close(part.to_tensor(part.from_tensor(T)), traceless)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_bases_of_symmetric_tensors_are_orthonormal(d):
    for rep in (SymmetricTensor(d), TracelessSymmetric(d)):
        basis = rep.to_tensor(torch.eye(rep.dim, dtype=torch.float64))
        torch.testing.assert_close(basis, basis.mT)
        gram = torch.einsum("aij,bij->ab", basis, basis)
        torch.testing.assert_close(gram, torch.eye(rep.dim, dtype=torch.float64), atol=1e-14, rtol=0)
        features = torch.randn(4, rep.dim, dtype=torch.float64, requires_grad=True)
        rep.from_tensor(rep.to_tensor(features)).square().sum().backward()
        torch.testing.assert_close(features.grad, 2 * features.detach())
    assert SymmetricTensor(d).dim == d * (d + 1) // 2 == TracelessSymmetric(d).dim + 1


@every_spatial
def test_action_is_the_matrix(rep):
    R = -rotations(5)
    v = torch.randn(4, 1, rep.dim, dtype=torch.float64)
    expected = (rep.matrix(R) @ v[..., None])[..., 0]
    torch.testing.assert_close(rep.act(R, v), expected, atol=1e-13, rtol=0)


# --- e3nn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 4, 5, 8, 11])
def test_wigner_matrices_turn_harmonics_as_e3nn_has_them(degree):
    """The definition is D Y(x) = Y(R x), without any angles."""
    R = rotations(6)
    points = torch.nn.functional.normalize(torch.randn(20, 3, dtype=torch.float64), dim=1)
    turned = torch.einsum("rij,pj->rpi", R, points)
    found = torch.einsum("rmn,pn->rpm", Irreps(f"{degree}e").matrix(R), e3nn_harmonics(degree, points))
    torch.testing.assert_close(found, e3nn_harmonics(degree, turned), atol=1e-11, rtol=0)


ANGLES = [0.0, 1e-12, 1e-8, 1e-4, 1.0, math.pi / 2, math.pi - 1e-4, math.pi - 1e-8, math.pi, 4.0]


@each("angle", ANGLES)
@pytest.mark.parametrize("axis", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -2, 0.5)])
def test_wigner_matrices_are_accurate_at_every_angle(axis, angle):
    """The reference is the matrix exponential of the generator, also where Euler angles degenerate."""
    degree = 4
    step = torch.tensor(angle, dtype=torch.float64)
    whole = Irreps(f"{degree}e").matrix(about(axis, step))
    tiny = 1e-5
    generator = (
        Irreps(f"{degree}e").matrix(about(axis, torch.tensor(tiny, dtype=torch.float64)))
        - Irreps(f"{degree}e").matrix(about(axis, torch.tensor(-tiny, dtype=torch.float64)))
    ) / (2 * math.sin(tiny))
    spectrum = torch.linalg.eigvals(generator)
    assert float((spectrum.imag.sort().values - torch.arange(-4.0, 5)).abs().max()) < 1e-8
    halves = Irreps(f"{degree}e").matrix(about(axis, step / 2))
    torch.testing.assert_close(whole, halves @ halves, atol=1e-12, rtol=0)
    assert abs(float(whole.trace()) - sum(math.cos(m * angle) for m in range(-4, 5))) < 1e-12


@each("angle", [0.0, 1e-9, 1.0, math.pi - 1e-9, math.pi])
@pytest.mark.parametrize("axis", [(0, 1, 0), (1, 0, 0), (1, -2, 0.5)])
def test_gradients_of_wigner_matrices(axis, angle):
    """d/da D(exp(a X)) = L D is exact and finite, also at beta = 0 and pi."""
    t = torch.tensor(angle, dtype=torch.float64)

    def turned(a):
        return Irreps("3e").matrix(about(axis, a))

    _, found = torch.autograd.functional.jvp(turned, t, torch.ones_like(t))
    _, generator = torch.autograd.functional.jvp(turned, torch.zeros_like(t), torch.ones_like(t))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, generator @ turned(t), atol=1e-11, rtol=0)


def test_gradcheck_through_irreps():
    rep = Irreps("1o + 2e + 3o")
    a = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, rep.dim, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, v: rep.act(-about((1, -2, 0.5), a[0]), v), (a, v))
    assert torch.autograd.gradgradcheck(lambda a, v: rep.act(-about((1, -2, 0.5), a[0]), v), (a, v))


@pytest.mark.parametrize("degree", range(5))
def test_polar_z_gives_the_usual_real_harmonics(degree):
    points = torch.nn.functional.normalize(torch.randn(20, 3, dtype=torch.float64), dim=1)
    irreps = Irreps(f"{degree}{'eo'[degree % 2]}")
    found = e3nn_harmonics(degree, points) @ irreps.polar_z().T
    torch.testing.assert_close(found, real_harmonics(degree, points), atol=1e-11, rtol=0)


@each("rep", SPATIAL)
def test_change_of_basis_to_irreps_and_back(rep):
    irreps, basis = to_irreps(rep)
    torch.testing.assert_close(basis @ basis.T, torch.eye(rep.dim, dtype=torch.float64), atol=1e-13, rtol=0)
    R = rotations(8)
    R[::2] *= -1
    torch.testing.assert_close(basis @ rep.matrix(R), irreps.matrix(R) @ basis, atol=1e-12, rtol=0)


def test_tensors_become_irreps_as_in_e3nn():
    """The traceless part of v vᵀ is the harmonic of degree 2, up to a positive factor."""
    from e3nn.io import CartesianTensor

    irreps, basis = to_irreps(SymmetricTensor(3))
    v = torch.randn(7, 3, dtype=torch.float64)
    tensor = v[:, :, None] * v[:, None, :]
    features = SymmetricTensor(3).from_tensor(tensor) @ basis.T
    torch.testing.assert_close(features[:, 0], v.square().sum(1) / math.sqrt(3))
    torch.testing.assert_close(features[:, 1:] / e3nn_harmonics(2, v), torch.full((7, 5), math.sqrt(2 / 15)).double())
    theirs = CartesianTensor("ij=ji")
    assert str(theirs) == irreps.spec
    torch.testing.assert_close(theirs.from_cartesian(tensor.float()).double(), features, atol=1e-5, rtol=1e-5)


# --- values ---------------------------------------------------------------------------------------------------


@every_spatial
def test_vmap_over_rotations(rep):
    R = rotations(3)
    features = torch.linspace(-1, 1, 3 * rep.dim, dtype=torch.float64).view(3, rep.dim)
    torch.testing.assert_close(torch.func.vmap(rep.act)(R, features), rep.act(R, features))
    torch.testing.assert_close(torch.func.vmap(rep.matrix)(R), rep.matrix(R))


def test_representations_are_values():
    assert Irreps("1o+0e") == Irreps("1x1o + 1x0e")
    assert hash(2 * Vector(3)) == hash(Multiple(2, Vector(3)))
    assert Vector(3) != Vector(2)
    assert Vector(3) != Pseudovector()
    assert 1 * Vector(3) == Vector(3)
    total = Vector(3) + Scalar() + Vector(3)
    assert total == DirectSum((Vector(3), Scalar(), Vector(3)))
    assert (total.dim, total.space_dim, Scalar().space_dim) == (7, 3, None)
    assert (Scalar() + Vector(3)).space_dim == (2 * (Scalar() + Vector(3))).space_dim == 3
    assert str(total) == "Vector(3) + Scalar + Vector(3)"
    with pytest.raises(AttributeError):
        Vector(3).d = 2


@pytest.mark.parametrize("make", [SymmetricTensor, TracelessSymmetric, lambda d: Vector(d) + SymmetricTensor(d)])
def test_values_made_in_inference_mode_can_be_trained_with(make):
    with torch.inference_mode():
        rep = make(3)
    R, features = (x.requires_grad_() for x in (rotations(2), torch.ones(2, rep.dim, dtype=torch.float64)))
    rep.act(R, features).sum().backward()
    expected = torch.autograd.grad(make(3).act(R, features).sum(), (R, features))
    assert torch.equal(R.grad, expected[0])
    assert torch.equal(features.grad, expected[1])


def test_tables_of_irreps_made_in_inference_mode_are_ordinary_tensors():
    _irreps._clebsch_gordan.cache_clear()
    with torch.inference_mode():
        rep = Irreps("3o")
    assert not any(table.is_inference() for table in rep._isometries)


def test_tables_of_irreps_made_within_transforms_are_ordinary_tensors():
    R, features = rotations(1)[0], torch.ones(7, dtype=torch.float64)
    _irreps._clebsch_gordan.cache_clear()
    slope = torch.func.grad(lambda x: Irreps("3o").act(R, x).sum())(features)
    torch.testing.assert_close(slope, Irreps("3o").matrix(R).sum(dim=0))
    tables = Irreps("3o")._isometries
    assert tables
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(table) for table in tables)


def test_dtypes():
    R = rotations(2).float()
    rep = Irreps("2e")
    assert rep.matrix(R).dtype == torch.float32
    assert rep.act(R, torch.ones(2, 5, dtype=torch.float64)).dtype == torch.float64
    assert rep.act(R.double(), torch.ones(2, 5, dtype=torch.bfloat16)).dtype == torch.float32
    exact = rep.matrix(R.double())
    assert (rep.matrix(R).double() - exact).abs().max() < 1e-7
    with torch.autocast("cpu", torch.bfloat16):
        assert (rep.matrix(R).double() - exact).abs().max() < 1e-7
        torch.testing.assert_close(rep.act(R, torch.ones(2, 5)), exact.sum(dim=2).float())
        tensors, features = SymmetricTensor(3), torch.randn(4, 6)
        torch.testing.assert_close(tensors.from_tensor(tensors.to_tensor(features)), features)


def test_linear_representations_take_any_matrix():
    A, B = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    for rep in (Scalar(), Vector(3), SymmetricTensor(3), 2 * Vector(3) + Scalar()):
        torch.testing.assert_close(rep.matrix(A @ B), rep.matrix(A) @ rep.matrix(B))
    assert not SymmetricTensor(3).orthogonal_only
    assert (Vector(3) + Pseudovector()).orthogonal_only


def test_one_wrong_matrix_among_many():
    R = rotations(200)
    Pseudovector().matrix(R)
    R[150] *= 1 + 1e-6
    with pytest.raises(ValueError, match="rotation: expected orthogonal matrices"):
        Pseudovector().matrix(R)


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float64, 1e-6), (torch.float32, 1e-3), (torch.bfloat16, 8 * 2**-7), (torch.float16, 8 * 2**-10)],
    ids=str,
)
def test_orthogonal_matrices_up_to_the_tolerance(dtype, allowed):
    for share, expected in ((0.5, True), (2.0, False)):
        matrix = torch.eye(3, dtype=torch.float64)
        matrix[0, 1] = share * allowed
        assert is_orthogonal(matrix.to(dtype)) == expected


def test_signs_are_exact_for_rounded_rotations():
    rounded = 1.0001 * torch.stack([torch.eye(3), -torch.eye(3)])
    assert torch.equal(Pseudoscalar().matrix(rounded).flatten(), torch.tensor([1.0, -1.0]))
    assert torch.equal(Pseudovector().matrix(rounded), 1.0001 * torch.eye(3).expand(2, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotations_in_half_precision_are_within_tolerance(dtype):
    exact = SO(3).sample(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rep in (Irreps("3o"), Pseudovector()):
        error = (rep.matrix(exact.to(dtype)).double() - rep.matrix(exact)).abs().max()
        assert error < 20 * torch.finfo(dtype).eps
    step, eye = torch.finfo(dtype).eps, torch.eye(3, dtype=dtype)
    Pseudovector().matrix((1 + 3 * step) * eye)  # Rᵀ R differs from the identity by six steps, eight are allowed
    with pytest.raises(ValueError, match="rotation: expected orthogonal matrices"):
        Pseudovector().matrix((1 + 5 * step) * eye)


test_errors = refuses(
    (lambda: Irreps("nonsense"), "spec: expected irreps"),
    (lambda: Irreps("0x1o"), "spec: expected at least one irrep"),
    (lambda: Irreps("12e"), "degrees are limited to 11"),
    (lambda: Vector(0), "d: expected an integer of at least 1"),
    (lambda: SymmetricTensor(1), "d: expected an integer of at least 2"),
    (lambda: 0 * Vector(3), "count: expected an integer"),
    (lambda: Vector(3) + Vector(2), "parts: expected representations on spaces of the same dimension"),
    (lambda: DirectSum(()), "parts: expected a tuple"),
    (lambda: DirectSum((3,)), "parts: expected a Representation", TypeError),
    (lambda: check_representation("rep", Vector), "rep: expected a Representation", TypeError),
    (lambda: Vector(3).matrix(torch.eye(2)), r"rotation: expected matrices \[\*, 3, 3\] for Vector\(3\)"),
    (lambda: Vector(3).matrix(torch.eye(3).long()), "rotation: expected a floating tensor", TypeError),
    (lambda: Irreps("1o").matrix(2 * torch.eye(3)), "rotation: expected orthogonal matrices"),
    (lambda: Pseudovector().matrix(torch.full((3, 3), math.nan)), "rotation: expected orthogonal"),
    (lambda: Vector(3).act(torch.eye(3), torch.ones(4)), r"features: expected \[\*, 3\]"),
    (
        lambda: Vector(3).act(torch.eye(3).expand(2, 3, 3), torch.ones(5, 3)),
        r"rotation, features: expected leading axes that broadcast, got \(2,\) and \(5,\)",
    ),
    (lambda: to_irreps(Vector(2)), r"rep: expected a representation of O\(3\) .* got Vector\(2\)"),
    (lambda: SymmetricTensor(3).to_tensor(torch.ones(5)), r"features: expected \[\*, 6\]"),
    (lambda: SymmetricTensor(3).from_tensor(torch.ones(2, 2)), r"tensor: expected \[\*, 3, 3\]"),
)


# --- channels that a group permutes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group", [group for group in GROUPS.values() if group.dim in (2, 3) and group.order < 60], ids=str
)
def test_permutations_of_points_are_those_of_their_positions(group):
    """Channels at generic places and their images are the regular representation, and other orbits are shorter."""
    start = torch.linspace(0.5, 1.7, group.dim, dtype=torch.float64)
    rep = Permutation(group, points=(group.elements @ start).tolist())
    assert rep.dim == group.order
    assert rep == Permutation(group, torch.tensor(rep.permutations))
    values = torch.randn(3, rep.dim, dtype=torch.float64)
    places, matrices = group.elements @ start, rep.matrix(group.elements)
    for g in turns(group):
        assert torch.equal(matrices[g] @ matrices, matrices[group.cayley[g]])
        moved = rep.act(group.elements[g], values)
        apart = torch.cdist(places @ group.elements[g].T, places)  # channel i is at the place of channel p(i) now
        assert torch.equal(moved[:, apart.argmin(dim=1)], values)


def test_composites_of_permutations_keep_their_group():
    cameras = Permutation(cyclic(4), points=[(1, 0), (0, 1), (-1, 0), (0, -1)])
    both = 2 * cameras + Vector(2)
    assert both.domain == cyclic(4)
    turned = both.act(cyclic(4).elements[1], torch.arange(10.0))
    assert turned.tolist() == [3, 0, 1, 2, 7, 4, 5, 6, -9, 8]
    assert Vector(2).domain is None
    narrow = cameras.act(cyclic(4).elements[1].float(), torch.arange(4, dtype=torch.bfloat16))
    assert narrow.tolist() == [3, 0, 1, 2]


test_errors_of_permutations = refuses(
    (lambda: Permutation(cyclic(4)), r"permutations, points: expected one of them, got none"),
    (lambda: Permutation(cyclic(1), [[0]], [[0.0, 0.0]]), r"permutations, points: expected one of them, got both"),
    (lambda: Permutation(cyclic(4), [[0, 1]] * 3), r"permutations: expected integers .* got .* \(3, 2\)"),
    (lambda: Permutation(cyclic(2), [[0, 1], [0, 0]]), r"permutations: row 1 is \[0, 0\], not a permutation of 0..1"),
    (lambda: Permutation(cyclic(2), [[1, 0], [1, 0]]), r"for elements g = 0 and h = 0 of C2, with g h = 0"),
    (lambda: Permutation(cyclic(3), [[0, 1], [1, 0], [0, 1]]), r"permutations: .* elements g = 1 and h = 2 of C3"),
    (lambda: Permutation(cyclic(4), points=[(1, 0), (0, 1)]), r"points: .* of C4, but element 1 maps point 1"),
    (lambda: Permutation(cyclic(4), points=[(1, 0, 0)]), r"points: expected finite \[channels, 2\] for C4, got"),
    (
        lambda: Permutation(cyclic(2), [[0], [0]]) + Permutation(cyclic(4), [[0]] * 4),
        r"parts: expected representations of the same group, got Permutation\(C2",
    ),
    (
        lambda: Permutation(cyclic(2), [[0], [0]]).act(cyclic(4).elements[1], torch.ones(1)),
        r"rotation: expected elements of C2, for which Permutation\(C2, 1 channels\) is defined, got others",
    ),
    (
        lambda: lift_field(torch.ones(5, 1), cyclic(4), Permutation(cyclic(2), [[0], [0]])),
        r"frames: expected elements of C2",
    ),
)
