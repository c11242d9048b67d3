"""Finite groups: the axioms hold exactly for every group of the table, and for R^d x| H."""

import copy
import inspect
import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch

from lieattn import groups
from lieattn.groups import FiniteGroup, SemidirectProduct, cyclic, dihedral, dihedral_about, tetrahedral
from tests.cases import GROUPS, OBLIQUE, each, element_order

SHEAR = torch.tensor([[1.0, 0.7], [0.0, 2.0]], dtype=torch.float64)
SHEARED = torch.eye(3, dtype=torch.float64) + torch.ones(3, 3, dtype=torch.float64).triu(1)
ALL = {**GROUPS, "C4_sheared": cyclic(4).conjugate(SHEAR, "sheared C4")}
NON_ABELIAN = {name: GROUPS[name] for name in ("D3", "D4", "T", "O", "S3", "I")}

every_group = each("group", ALL)
every_non_abelian = each("group", NON_ABELIAN)

ORDERS = {"T": 12, "O": 24, "I": 60, "Th": 24, "Td": 24, "Oh": 48, "Ih": 120, "S3": 6, "D2_about_z": 4, "D8": 16}
ORDERS |= {"trivial3": 1, "mirror3_oblique": 2, "C4_x_mirror1": 8, "D3_x_C2": 12, "C4_mirror_inside": 8}
ROTATIONS_ONLY = {"T", "O", "I", "C4_about_z", "C3_about_oblique", "C5_about_oblique", "O_conjugated"}
ROTATIONS_ONLY |= {"C2_about_x", "D2_about_z", "D3_about_oblique"}
ROTATIONS_ONLY |= {name for name in GROUPS if re.fullmatch(r"(C|trivial)\d+", name)} | {"inversion2"}


# --- axioms ---------------------------------------------------------------------------------------------------


def test_a_case_that_fails_is_named():
    """Control of the decorator with which most tests here run for all groups."""
    seen = []

    @each("group, twice", lambda most: [(group, 2 * group.order) for group in ALL.values() if group.order <= most])
    def orders(group, twice, most):
        seen.append(group)
        assert twice < most, "too large"

    assert list(inspect.signature(orders).parameters) == ["most"]
    with pytest.raises(AssertionError, match="too large") as caught:
        orders(most=6)
    assert caught.value.__notes__ == [f"group, twice: {(seen[-1], 2 * seen[-1].order)}"]
    assert len(seen) > 1
    with pytest.raises(AssertionError, match="cannot skip"):
        each("x", [1])(lambda x: pytest.skip("no"))()


def test_orders_are_those_of_the_books():
    assert {name: ALL[name].order for name in ORDERS} == ORDERS
    assert all(len(group) == group.order for group in ALL.values())


@every_group
def test_matrices_multiply_as_the_cayley_table_says(group):
    products = group.elements[:, None] @ group.elements
    torch.testing.assert_close(products, group.elements[group.cayley], rtol=0, atol=1e-12)


@every_group
def test_table_is_associative_and_every_row_and_column_a_permutation(group):
    table, n = group.cayley, group.order
    assert torch.equal(table[table], table[:, table])  # (g h) k = g (h k) for all triples
    assert torch.equal(table.sort(dim=1).values, torch.arange(n).expand(n, n))
    assert torch.equal(table.sort(dim=0).values, torch.arange(n)[:, None].expand(n, n))


@every_group
def test_identity_and_inverses_in_table_and_matrices(group):
    n, e, g = group.order, group.identity_index, torch.arange(group.order)
    unit = torch.eye(group.dim, dtype=torch.float64)
    assert torch.equal(group.cayley[e], g)
    assert torch.equal(group.cayley[:, e], g)
    assert torch.equal(group.cayley[g, group.inverse_index], torch.full((n,), e))
    assert torch.equal(group.cayley[group.inverse_index, g], torch.full((n,), e))
    torch.testing.assert_close(group.elements[e], unit, rtol=0, atol=1e-15)
    product = group.elements @ group.elements[group.inverse_index]
    torch.testing.assert_close(product, unit.expand(n, -1, -1), rtol=0, atol=1e-12)


@every_group
def test_relative_is_g_inverse_h_and_left_invariant(group):
    wanted = torch.linalg.inv(group.elements)[:, None] @ group.elements
    torch.testing.assert_close(group.elements[group.relative_index], wanted, rtol=0, atol=1e-12)
    for k in range(group.order):
        moved = group.cayley[k]
        assert torch.equal(group.relative_index[moved][:, moved], group.relative_index)


@every_non_abelian
def test_relative_is_not_right_invariant(group):
    """Control: the tests would detect h g⁻¹ instead of g⁻¹ h, or multiplication from the other side."""
    assert not all(
        torch.equal(group.relative_index[group.cayley[:, k]][:, group.cayley[:, k]], group.relative_index)
        for k in range(group.order)
    )


@every_group
def test_no_element_occurs_twice(group):
    flat = group.elements.flatten(1)
    distance = torch.cdist(flat, flat, p=math.inf).fill_diagonal_(math.inf)
    assert distance.min() > 0.05


@each("name", GROUPS.keys())
def test_catalog_is_orthogonal_with_the_right_determinants(name):
    group = GROUPS[name]
    unit = torch.eye(group.dim, dtype=torch.float64).expand(group.order, -1, -1)
    torch.testing.assert_close(group.elements.mT @ group.elements, unit, rtol=0, atol=1e-14)
    assert group.is_orthogonal
    signs = torch.linalg.det(group.elements).round().to(torch.int64)
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert group.is_proper == (name in ROTATIONS_ONLY)
    assert int((signs > 0).sum()) == (group.order if group.is_proper else group.order // 2)


@every_group
def test_is_abelian_agrees_with_the_matrices(group):
    forward = group.elements[:, None] @ group.elements
    commute = (forward - forward.transpose(0, 1)).abs().max() < 1e-9
    assert group.is_abelian == bool(commute)


# --- the catalog, element by element --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8, 12])
def test_cyclic_element_k_turns_counter_clockwise_by_k_nths(n):
    turned = cyclic(n).act(torch.arange(n), torch.tensor([1.0, 0.0], dtype=torch.float64).expand(n, 2))
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    wanted = torch.stack([angles.cos(), angles.sin()], dim=-1)
    torch.testing.assert_close(turned, wanted, rtol=0, atol=1e-15)
    k = torch.arange(n)
    assert torch.equal(cyclic(n).cayley, (k[:, None] + k) % n)


@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_dihedral_is_rotations_then_rotations_after_the_mirror(n):
    group = dihedral(n)
    mirror = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    torch.testing.assert_close(group.elements[:n], cyclic(n).elements, rtol=0, atol=0)
    torch.testing.assert_close(group.elements[n:], cyclic(n).elements @ mirror, rtol=0, atol=1e-15)


def test_quarter_turns_are_exact():
    """Pixels must map to pixels, so entries are exactly 0, not 6e-17."""
    for group in (cyclic(4), dihedral(4), groups.cyclic_about(4), groups.octahedral()):
        assert torch.equal(group.elements, group.elements.round())
    for eighths in (cyclic(8), FiniteGroup.generate(cyclic(8).elements[1:2])):
        assert torch.equal(eighths.elements[2], cyclic(4).elements[1])
    assert torch.equal(cyclic(4).conjugate(cyclic(5).elements[1]).elements, cyclic(4).elements)
    assert cyclic(6).elements[1, 0, 0] == 0.5


@pytest.mark.parametrize("name", ["mirror2", "mirror2_x", "mirror2_oblique", "mirror3", "mirror3_oblique"])
def test_mirrors_reverse_their_axis_and_keep_what_is_perpendicular(name):
    axes = {
        "mirror2": [0.0, 1],
        "mirror2_x": [1.0, 0],
        "mirror2_oblique": [1.0, 2],
        "mirror3": [0.0, 0, 1],
        "mirror3_oblique": OBLIQUE,
    }
    axis = torch.tensor(axes[name], dtype=torch.float64)
    group = GROUPS[name]
    torch.testing.assert_close(group.act(1, axis), -axis, rtol=0, atol=1e-14)
    across = torch.randn(5, group.dim, dtype=torch.float64)
    across -= (across @ axis)[:, None] * axis / axis.square().sum()
    torch.testing.assert_close(group.act(1, across), across, rtol=0, atol=1e-14)


def test_axes_of_mirrors_can_be_numpy_integers():
    assert groups.reflection(3, np.int64(1)) == groups.reflection(3, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7])
def test_rotations_about_an_axis_are_the_exponentials(n):
    axis = torch.tensor(OBLIQUE, dtype=torch.float64)
    x, y, z = (axis / axis.norm()).tolist()
    hat = torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]], dtype=torch.float64)
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    wanted = torch.matrix_exp(angles[:, None, None] * hat)
    group = groups.cyclic_about(n, OBLIQUE)
    torch.testing.assert_close(group.elements, wanted, rtol=0, atol=1e-14)
    for length in (10, 1e200, 1e-200, 1e307):
        longer = groups.cyclic_about(n, tuple(length * a for a in OBLIQUE))
        torch.testing.assert_close(longer.elements, wanted, rtol=0, atol=1e-14)
    tiny = groups.cyclic_about(n, (0, 0, 5e-324))
    torch.testing.assert_close(tiny.elements, groups.cyclic_about(n).elements, rtol=0, atol=1e-14)


@pytest.mark.parametrize("axis", [(0, 0, 1), (1, 0, 0), (0, -2, 0), OBLIQUE, (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_dihedral_rotations_keep_their_axis_or_reverse_it(n, axis):
    group = dihedral_about(n, axis)
    torch.testing.assert_close(group.elements[:n], groups.cyclic_about(n, axis).elements, rtol=0, atol=1e-14)
    if axis == (0, 0, 1):
        torch.testing.assert_close(group.elements[:, :2, :2], dihedral(n).elements, rtol=0, atol=1e-15)
    assert (torch.linalg.det(group.elements) > 0).all()
    direction = torch.tensor(axis, dtype=torch.float64)
    signs = torch.ones(2 * n, 1, dtype=torch.float64).index_fill_(0, torch.arange(n, 2 * n), -1.0)
    torch.testing.assert_close(group.elements @ direction, signs * direction, rtol=0, atol=1e-14)
    assert torch.equal(group.cayley, dihedral(n).cayley)


@pytest.mark.parametrize(("axis", "nearest"), [((2.0, 1.0, 3.0), 0), ((-2.0, 3.0, 1.0), 0), ((3.0, -2.0, 1.0), 1)])
def test_half_turns_of_dihedral_rotations_are_about_the_direction_nearest_to_x_or_y(axis, nearest):
    direction = torch.nn.functional.normalize(torch.tensor(axis, dtype=torch.float64), dim=0)
    start = torch.eye(3, dtype=torch.float64)[nearest]
    across = start - (start @ direction) * direction
    torch.testing.assert_close(dihedral_about(4, axis).elements[4] @ across, across, rtol=0, atol=1e-14)


def test_groups_that_nearly_commute_are_told_so():
    with pytest.raises(ValueError, match=r"element 1 of .* and element 1 of .* do not commute"):
        groups.commuting_product(groups.cyclic_about(3), groups.cyclic_about(2, (1e-5, 0.0, 1.0)))


def test_names_tell_the_groups_of_the_catalog_apart():
    names = [group.name for group in GROUPS.values()]
    assert len(set(names)) == len(names)
    axes = {"z": (0, 0, 3), "-z": (0, 0, -1), "x": (1, 0, 0), "-y": (0, -1.0, 0), "[1,-2,0.5]": OBLIQUE}
    for suffix, axis in axes.items():
        assert groups.cyclic_about(3, axis).name == f"C3{suffix}"
        assert dihedral_about(3, axis).name == f"D3{suffix}"
    assert [groups.reflection(2, axis).name for axis in (-1, 1, (0, 2), 0, (1, 2))] == [
        *("mirror2", "mirror2", "mirror2", "mirror2x", "mirror2[1,2]")
    ]
    assert groups.reflection(5, 3).name == "mirror5[0,0,0,1,0]"


SUBGROUPS = [("T", "O"), ("T", "I"), ("T", "Th"), ("T", "Td"), ("O", "Oh"), ("I", "Ih"), ("Th", "Oh"), ("Th", "Ih")]
SUBGROUPS += [("Td", "Oh"), ("inversion3", "Th"), ("C4_about_z", "O"), ("C4", "C8"), ("C4", "D4"), ("C3", "D3")]


@pytest.mark.parametrize(("small", "large"), SUBGROUPS)
def test_subgroup(small, large):
    small, large = GROUPS[small], GROUPS[large]
    inside = large.index(small.elements)
    assert len(set(inside.tolist())) == small.order
    # The embedding is a homomorphism.
    assert torch.equal(large.cayley[inside[:, None], inside], inside[small.cayley])


def test_element_orders_of_the_polyhedral_groups():
    """The numbers of rotations by 1/1, 1/2, 1/3 ... of a turn distinguish T, O and I from all other groups."""
    census = {"T": {1: 1, 2: 3, 3: 8}, "O": {1: 1, 2: 9, 3: 8, 4: 6}, "I": {1: 1, 2: 15, 3: 20, 5: 24}}
    for name, wanted in census.items():
        found = [element_order(GROUPS[name], g) for g in range(GROUPS[name].order)]
        assert {k: found.count(k) for k in sorted(set(found))} == wanted


@pytest.mark.parametrize("name", ["Td", "Oh", "Ih"])
def test_rotations_come_first(name):
    signs = torch.linalg.det(GROUPS[name].elements)
    half = GROUPS[name].order // 2
    assert (signs[:half] > 0).all()
    assert (signs[half:] < 0).all()


def test_direct_product_acts_on_the_sum_of_the_spaces():
    h, k = dihedral(3), cyclic(4)
    product = groups.direct_product(h, k)
    assert (product.order, product.dim, product.name) == (24, 4, "D3xC4")
    v = torch.randn(4, dtype=torch.float64)
    for i, j in itertools.product(range(h.order), range(k.order)):
        wanted = torch.cat([h.act(i, v[:2]), k.act(j, v[2:])])
        torch.testing.assert_close(product.act(i * k.order + j, v), wanted, rtol=0, atol=1e-14)
    first = torch.arange(24) // 4
    assert torch.equal(product.cayley // 4, h.cayley[first[:, None], first])


def test_commuting_product_puts_the_first_group_first():
    product = groups.commuting_product(tetrahedral(), groups.inversion(3))
    assert product == groups.pyritohedral()
    torch.testing.assert_close(product.elements[:12], tetrahedral().elements, rtol=0, atol=0)
    torch.testing.assert_close(product.elements[12:], -tetrahedral().elements, rtol=0, atol=0)


# --- construction ---------------------------------------------------------------------------------------------


def test_permutations_send_basis_vectors_where_they_say():
    rows = list(itertools.permutations(range(4)))
    group = FiniteGroup.from_permutations(rows, "S4")
    unit = torch.eye(4, dtype=torch.float64)
    for g, p in enumerate(rows):
        for i in range(4):
            assert torch.equal(group.act(g, unit[i]), unit[p[i]])


def test_permutations_are_lists_arrays_or_tensors():
    rows = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    reversed_rows = np.array(rows[::-1])[::-1]
    made = [FiniteGroup.from_permutations(given) for given in (rows, torch.tensor(rows), reversed_rows)]
    assert made[0] == made[1] == made[2]


def test_matrices_keep_the_order_given_and_the_identity_is_found_anywhere():
    order = [2, 0, 3, 1]
    group = FiniteGroup.from_matrices(cyclic(4).elements[order])
    assert group.identity_index == 1
    torch.testing.assert_close(group.elements, cyclic(4).elements[order], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["list", "numpy", "reversed", "int64", "float32", "numpy float32"])
def test_matrices_of_any_real_kind(kind):
    exact = cyclic(4).elements if kind in ("list", "int64") else cyclic(5).elements
    given = {
        "list": exact.tolist(),
        "numpy": exact.numpy(),
        "reversed": exact.flip(0, 1, 2).numpy()[::-1, ::-1, ::-1],  # with negative strides
        "int64": exact.to(torch.int64),
        "float32": exact.float(),
        "numpy float32": exact.float().numpy(),
    }[kind]
    group = FiniteGroup.from_matrices(given, kind)
    assert group.elements.dtype == torch.float64
    assert (group.order, group.name) == (len(exact), kind)
    torch.testing.assert_close(group.elements, exact, rtol=0, atol=1e-7)


def test_closure_error_names_the_offending_product():
    missing_last = cyclic(5).elements[:4]
    with pytest.raises(ValueError, match=r"'C5' is not closed") as error:
        FiniteGroup.from_matrices(missing_last, "C5")
    g, h = map(int, re.search(r"elements\[(\d)\] @ elements\[(\d)\] is [\d.e+-]+ away", str(error.value)).groups())
    assert (g + h) % 5 == 4  # exactly the products that are missing


def test_a_tolerance_must_tell_elements_apart():
    for tolerance, matrices in ((100.0, [2 * torch.eye(2), 3 * torch.eye(2)]), (0.51, cyclic(4).elements.unbind())):
        with pytest.raises(ValueError, match="tolerance: expected less than half of the smallest difference"):
            FiniteGroup.from_matrices(torch.stack(matrices), tolerance=tolerance)
    assert FiniteGroup.from_matrices(cyclic(4).elements, tolerance=0.49) == cyclic(4)


def test_groups_made_in_inference_mode_can_be_trained_with():
    groups.real_irreps.cache_clear()
    with torch.inference_mode():
        made, irreps = cyclic(5), groups.real_irreps(cyclic(5))
    points = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    made.act(1, points).square().sum().backward()
    torch.testing.assert_close(points.grad, 2 * points.detach(), rtol=1e-12, atol=0)
    tables = made.elements, made.cayley, made.inverse_index, made.relative_index
    assert not any(table.is_inference() for table in tables)
    assert not any(table.is_inference() for irrep in irreps for table in (irrep.matrices, irrep.basis))


def test_closure_is_checked_to_nine_digits():
    """Single-precision matrices converted to double precision are refused; other libraries accept them."""
    rounded = cyclic(5).elements.float().double()
    with pytest.raises(ValueError, match="not closed"):
        FiniteGroup.from_matrices(rounded)
    assert FiniteGroup.from_matrices(rounded, tolerance=1e-6).order == 5


@pytest.mark.parametrize("generators", ["C6", "T", "Oh", "D8"])
def test_generate_finds_the_group_and_starts_with_the_identity(generators):
    whole = GROUPS[generators]
    group = FiniteGroup.generate(whole.elements[1:], generators)
    assert group.identity_index == 0
    assert sorted(whole.index(group.elements).tolist()) == list(range(whole.order))


def test_generators_of_an_infinite_group_are_named():
    """The message was only that there are too many elements."""
    rounded = [[-0.5, -0.866], [0.866, -0.5]]
    none = "more than max_order=100 elements; of the powers 1 .. 100 of generator 1, none is the identity up to 1e-06"
    for wrong in ([[1, 1], [0, 1]], rounded):
        with pytest.raises(ValueError, match=re.escape(none)):
            FiniteGroup.generate([[[0, -1], [1, 0]], wrong], max_order=100)
    mirrors = [groups.reflection(2, axis=axis).elements[1] for axis in ((1, 0), (1, 0.3))]
    with pytest.raises(ValueError, match=r"max_order=1000 elements; each generator has a small order, but their"):
        FiniteGroup.generate(torch.stack(mirrors))


@pytest.mark.parametrize(("scale", "size"), [(0.9, "0.81"), (3.0, "9"), (0.0, "0")])
def test_generators_that_change_volumes_are_named(scale, size):
    """Their powers vanish or overflow, so that an element that nobody gave had no inverse or was infinite."""
    message = f"generators of 'custom': generator 1 has a determinant of size {size}, but"
    with pytest.raises(ValueError, match=re.escape(message)):
        FiniteGroup.generate([[[0, -1], [1, 0]], [[scale, 0], [0, scale]]], max_order=10**6)


def test_a_cayley_table_is_a_group_of_permutations():
    for group in (tetrahedral(), dihedral(5)):
        assert torch.equal(FiniteGroup.from_permutations(group.cayley.tolist()).cayley, group.cayley)


def test_rounded_groups_are_groups_to_their_own_tolerance():
    """This also holds after conjugation, for products, and for groups generated by rounded matrices."""
    rounded = FiniteGroup.from_matrices(cyclic(8).elements.float(), "rounded C8")
    turned, grown = rounded.conjugate(torch.eye(2)), FiniteGroup.generate(cyclic(100).elements[1:2].float())
    wide, wider = groups.direct_product(rounded, cyclic(2)), groups.direct_product(cyclic(2), rounded)
    doubled = groups.commuting_product(
        FiniteGroup.from_matrices(cyclic(5).elements.float()), groups.inversion(2), "rounded C10"
    )
    assert [one.order for one in (rounded, turned, wide, wider, doubled, grown)] == [8, 8, 16, 16, 10, 100]
    assert all(one.is_orthogonal and one.tolerance == 1e-5 for one in (rounded, turned, wide, wider, doubled, grown))
    assert not cyclic(8).conjugate(SHEAR).is_orthogonal


def test_generate_takes_a_tolerance():
    rounded = cyclic(5).elements[1:2].float().double()
    with pytest.raises(ValueError, match="not closed"):
        FiniteGroup.generate(rounded)
    assert FiniteGroup.generate(rounded, tolerance=1e-5) == FiniteGroup.generate(rounded.float())
    with pytest.raises(ValueError, match="tolerance: expected a positive"):
        FiniteGroup.generate(rounded, tolerance=0)
    # The fifth power is no new element although it differs from the identity by more than rounding.
    assert FiniteGroup.generate(cyclic(5).elements[1:2].round(decimals=4), tolerance=1e-2).order == 5
    # Neither is that of a matrix whose determinant differs from 1 by less than the tolerance allows.
    assert FiniteGroup.generate(1.01 * cyclic(5).elements[1:2], tolerance=0.06).order == 5


@pytest.mark.parametrize("name", ["C8", "D3", "T", "S3"])
def test_conjugation_keeps_the_tables_and_moves_the_matrices(name):
    group = GROUPS[name]
    basis = torch.randn(group.dim, group.dim, dtype=torch.float64) + 2 * torch.eye(group.dim, dtype=torch.float64)
    other = group.conjugate(basis, "other")
    assert other.name == "other"
    assert group.conjugate(basis).name == group.name
    assert torch.equal(other.cayley, group.cayley)
    wanted = basis @ group.elements @ torch.linalg.inv(basis)
    torch.testing.assert_close(other.elements, wanted, rtol=0, atol=1e-12)


# --- look-up --------------------------------------------------------------------------------------------------


@every_group
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_index_finds_elements_in_any_precision_and_layout(group, dtype):
    shuffled = torch.randperm(group.order)
    given = group.elements[shuffled].to(dtype)
    found = group.index(given[:, None].expand(-1, 3, -1, -1))
    assert found.dtype == torch.int64
    assert torch.equal(found, shuffled[:, None].expand(-1, 3))
    assert int(group.index(given[0])) == int(shuffled[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_indices_of_any_integer_dtype(dtype):
    group, index, points = groups.octahedral(), torch.tensor([5, 0, 23]), torch.rand(3, 3)
    assert torch.equal(group.act(index.to(dtype), points), group.act(index, points))
    assert torch.equal(group.element(index[0].to(dtype), points), group.matrices(points)[5])


@every_group
def test_index_finds_perturbed_elements_and_refuses_others(group):
    noise = 2e-7 * (2 * torch.rand(group.elements.shape, dtype=torch.float64) - 1)
    assert torch.equal(group.index(group.elements + noise), torch.arange(group.order))
    stray = group.elements.clone()
    stray[-1, 0, 0] += 1e-3
    with pytest.raises(ValueError, match=rf"number {group.order - 1} is not an element of .* 1.0e-03 away"):
        group.index(stray)
    assert group.index(stray, tolerance=2e-3)[-1] == group.order - 1


@every_group
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elements_in_half_precision_are_found(group, dtype):
    given = group.elements.to(dtype)
    group.check("g", given)
    assert torch.equal(group.index(given), torch.arange(group.order))
    assert torch.equal(group.inverse(given), group.elements[group.inverse_index].to(dtype))
    stray = given.clone()
    stray[-1, 0, 0] += 0.25
    with pytest.raises(ValueError, match="is not one of its matrices"):
        group.check("g", stray)


def test_index_takes_what_single_precision_and_the_tolerance_of_a_group_allow():
    far_along = torch.linalg.matrix_power(cyclic(8).elements[1].float(), 1001)  # 1e-5 away from element 1
    assert int(cyclic(8).index(far_along)) == 1
    rounded = FiniteGroup("rounded C8", cyclic(8).elements.bfloat16(), tolerance=0.01)
    assert torch.equal(rounded.index(cyclic(8).elements), torch.arange(8))


def test_index_refuses_what_is_not_finite_and_takes_nothing():
    bad = cyclic(4).elements.clone()
    bad[2, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="number 2 is not an element of C4"):
        cyclic(4).index(bad)
    assert cyclic(4).index(torch.zeros(0, 2, 2)).shape == (0,)


# --- values ---------------------------------------------------------------------------------------------------


def test_groups_are_immutable():
    group = cyclic(4)
    for field in ("name", "elements", "cayley", "order", "anything"):
        with pytest.raises(AttributeError, match=f"immutable: '{field}' of C4"):
            setattr(group, field, None)
        with pytest.raises(AttributeError, match=f"immutable: '{field}' of C4"):
            delattr(group, field)


def test_a_group_does_not_share_memory_with_what_it_was_made_from():
    matrices = cyclic(4).elements.clone()
    array = matrices.numpy().copy()
    groups_made = FiniteGroup.from_matrices(matrices), FiniteGroup.from_matrices(array)
    matrices.zero_()
    array[:] = 0
    assert all(group == cyclic(4) for group in groups_made)


def test_copies_are_the_same_object():
    group = groups.icosahedral()
    assert copy.copy(group) is group
    assert copy.deepcopy(group) is group
    assert copy.deepcopy({"deep": [group]})["deep"][0] is group


@every_group
def test_pickling_gives_an_equal_group(group):
    again = pickle.loads(pickle.dumps(group))
    assert again == group
    assert (again.name, again.identity_index, hash(again)) == (group.name, group.identity_index, hash(group))
    for field in ("elements", "cayley", "inverse_index", "relative_index"):
        assert torch.equal(getattr(again, field), getattr(group, field))


def test_pickling_keeps_a_group_of_rounded_matrices():
    for digits in (7, 3):
        group = FiniteGroup.from_matrices(cyclic(5).elements.round(decimals=digits), tolerance=10.0 ** (1 - digits))
        again = pickle.loads(pickle.dumps(group))
        assert again == group
        assert again.tolerance == group.tolerance


def test_equality_and_hash_are_by_value():
    assert cyclic(4) == FiniteGroup.from_matrices(cyclic(4).elements, "another name")
    assert hash(cyclic(4)) == hash(FiniteGroup.from_matrices(cyclic(4).elements, "another name"))
    assert len({cyclic(4), cyclic(4), cyclic(8)}) == 2
    assert cyclic(4) != "C4"
    tilted = groups.cyclic_about(4, (1e-6, 0.0, 1.0))
    assert torch.equal(tilted.cayley, groups.cyclic_about(4).cayley)
    assert tilted != groups.cyclic_about(4)
    rounded = FiniteGroup.from_matrices(cyclic(5).elements.float())
    assert rounded != cyclic(5)
    assert cyclic(5) != rounded
    distinct = [cyclic(2), groups.inversion(2), groups.reflection(2), groups.reflection(2, 0), dihedral(1)]
    assert [[a == b for b in distinct] for a in distinct] == [
        [True, True, False, False, False],  # half a turn is the point reflection of the plane
        [True, True, False, False, False],
        [False, False, True, False, True],  # and D1 the mirror of the second axis
        [False, False, False, True, False],
        [False, False, True, False, True],
    ]


# --- actions --------------------------------------------------------------------------------------------------


@every_group
def test_act_is_a_left_action_on_points(group):
    points = torch.randn(7, group.dim, dtype=torch.float64)
    for g, h in torch.randint(group.order, (10, 2)).tolist():
        wanted = group.act(g, group.act(h, points))
        torch.testing.assert_close(group.act(int(group.cayley[g, h]), points), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_act_keeps_the_dtype_and_takes_many_indices(dtype):
    group = dihedral(4)
    points = torch.randn(5, 8, 2).to(dtype)
    moved = group.act(torch.arange(8), points)
    assert moved.dtype == dtype
    for g in range(8):
        torch.testing.assert_close(moved[:, g], group.act(g, points[:, g]))
    torch.testing.assert_close(group.act(3, points[0, 0]), group.act(3, points)[0, 0])


def test_act_and_translate_run_where_the_tensors_are():
    group = dihedral(3)
    assert group.act(1, torch.empty(4, 2, device="meta")).device.type == "meta"
    assert group.act(torch.arange(4), torch.empty(4, 2, device="meta")).device.type == "meta"
    assert group.translate(1, torch.empty(4, 6, 2, device="meta")).device.type == "meta"
    assert group.matrices(torch.empty(0, device="meta", dtype=torch.float32)).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_act_translate_and_index_on_a_gpu():
    group = tetrahedral()
    points, f = torch.randn(5, 3), torch.randn(5, 12, 2)
    torch.testing.assert_close(group.act(4, points.cuda()).cpu(), group.act(4, points))
    assert torch.equal(group.translate(4, f.cuda()).cpu(), group.translate(4, f))
    found = group.index(group.elements.cuda().float())
    assert found.is_cuda
    assert torch.equal(found.cpu(), torch.arange(12))


@every_group
def test_translate_moves_a_delta_at_h_to_g_h(group):
    delta = torch.eye(group.order)[..., None]  # [h, fiber, 1], the delta at h
    for g in range(0, group.order, 1 + group.order // 12):
        assert torch.equal(group.translate(g, delta), delta[group.cayley[g]])
        assert torch.equal(group.permutation(g), group.relative_index[g])


# --- as any group of matrices ---------------------------------------------------------------------------------


@every_group
def test_inverses_and_relative_elements_of_matrices_follow_the_tables(group):
    g, h = torch.randint(group.order, (2, 9))
    first, second = group.elements[g], group.elements[h]
    assert torch.equal(group.inverse(first), group.elements[group.inverse_index[g]])
    assert torch.equal(group.index(group.product(first, second)), group.cayley[g, h])
    assert torch.equal(group.index(group.relative(first, second)), group.relative_index[g, h])
    assert torch.equal(group.identity(first), group.elements[group.identity_index])
    assert torch.equal(group.inverse(first.float()), group.inverse(first).float())


@every_group
def test_matrices_act_as_their_indices_do(group):
    g, points = torch.randint(group.order, (6,)), torch.randn(6, group.dim, dtype=torch.float64)
    for act in (group.act, group.act_vectors):
        assert torch.equal(act(group.elements[g], points), act(g, points))
        assert torch.equal(act(group.elements[int(g[0])], points), act(int(g[0]), points))
    assert torch.equal(group.linear(group.elements), group.elements)
    assert not group.translation(group.elements).any()


@every_group
def test_random_elements_are_uniform_and_follow_the_generator(group):
    drawn = group.sample(200 * group.order, generator=torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.get_default_dtype()
    group.check("drawn", drawn)
    counts = torch.bincount(group.index(drawn), minlength=group.order)
    assert ((counts - 200).abs() < 6 * 200**0.5).all()
    assert torch.equal(drawn, group.sample(200 * group.order, generator=torch.Generator().manual_seed(0)))
    assert group.sample().shape == (group.dim, group.dim)


@every_group
def test_the_whole_group_is_its_design(group):
    assert torch.equal(group.design(group.order, dtype=torch.float64), group.elements)
    with pytest.raises(ValueError, match=rf"count: the only design of .* has all {group.order} elements, got 999"):
        group.design(999)
    turned = group.sample_design(3, count=group.order, dtype=torch.float64)
    assert torch.equal(group.index(turned).sort().values, torch.arange(group.order).expand(3, -1))


@each("group", {**ALL, "sheared T": tetrahedral().conjugate(SHEARED)})
def test_distances_and_coordinates_tell_elements_apart(group):
    every = group.elements
    distance = group.distance(every[:, None], every)
    assert torch.equal(distance < 1e-12, torch.eye(group.order, dtype=torch.bool))
    relative = torch.eye(group.dim, dtype=torch.float64) - torch.linalg.inv(every)[:, None] @ every
    torch.testing.assert_close(distance, relative.norm(dim=(2, 3)), rtol=0, atol=1e-12)
    moved = group.product(every[-1], every)
    torch.testing.assert_close(group.distance(moved[:, None], moved), distance, rtol=0, atol=1e-12)
    assert group.coordinates(every).shape == (group.order, group.num_coordinates)
    assert len(torch.unique(group.coordinates(every).round(decimals=6), dim=0)) == group.order


def test_strangers_are_no_elements():
    group = tetrahedral()
    stack = torch.stack([group.elements[3], group.elements.new_ones(3, 3)])
    with pytest.raises(ValueError, match=r"^frames: frames\[1\] is not an element of T: it is not one of its matrices"):
        group.check("frames", stack)
    group.check("frames", stack[:1].float())
    with pytest.raises(ValueError, match="number 1 is not an element of T"):
        group.inverse(stack)
    with pytest.raises(ValueError, match=r"g: g\[1\] has no logarithm in T: only the identity"):
        group.log(group.elements)


# --- R^d x| H -------------------------------------------------------------------------------------------------


def random_elements(motions, count, dtype=torch.float64):
    translation = torch.randn(count, motions.dim, dtype=dtype)
    index = torch.randint(motions.stabilizer.order, (count,))
    return motions.element(index, translation), translation, index


@every_group
def test_motions_are_homogeneous_matrices(group):
    motions = SemidirectProduct(group)
    g, translation, index = random_elements(motions, 6)
    assert (motions.dim, motions.name) == (group.dim, f"R^{group.dim} x| {group.name}")
    assert (motions.algebra_dim, motions.num_coordinates) == (group.dim, group.dim * (group.dim + 1))
    assert g.shape == (6, group.dim + 1, group.dim + 1)
    assert torch.equal(motions.translation(g), translation)
    assert torch.equal(motions.linear(g), group.elements[index])
    assert torch.equal(motions.element(group.elements[index], translation), g)
    assert torch.equal(motions.coordinates(g), torch.cat([group.elements[index].flatten(1), translation], dim=1))
    last_row = torch.eye(group.dim + 1, dtype=torch.float64)[-1]
    assert torch.equal(g[:, -1], last_row.expand(6, -1))
    motions.check("g", g)


@every_group
def test_exponential_of_a_finite_group_with_translations_translates(group):
    motions = SemidirectProduct(group)
    a = torch.randn(4, group.dim, dtype=torch.float64)
    assert torch.equal(motions.exp(a), motions.element(group.identity_index, a))
    assert torch.equal(motions.log(motions.exp(a)), a)
    assert torch.equal(motions.vee(motions.hat(a)), a)
    if group.order > 1:
        other = 1 if group.identity_index == 0 else 0
        with pytest.raises(ValueError, match=r"g: g has no logarithm in .* only the identity"):
            motions.log(motions.element(other, a[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_motions_keep_the_dtype_and_broadcast(dtype):
    motions = SemidirectProduct(tetrahedral())
    g, _, index = random_elements(motions, 4, dtype)
    points = torch.randn(9, 1, 3, dtype=dtype)
    moved = motions.act(g, points)
    assert moved.shape == (9, 4, 3)
    assert motions.product(g[:, None], g).shape == (4, 4, 4, 4)
    assert {t.dtype for t in (g, moved, motions.inverse(g), motions.identity(g))} == {dtype}
    found = motions.stabilizer.index(motions.linear(motions.inverse(g)))
    assert torch.equal(found, motions.stabilizer.inverse_index[index])
    for many, shift in ((2, torch.zeros(4, 3, dtype=dtype)), (torch.arange(4), torch.ones(3, dtype=dtype))):
        one = motions.element(many, shift)
        assert torch.equal(motions.stabilizer.index(motions.linear(one)), torch.arange(4) * 0 + many)
        assert torch.equal(motions.translation(one), shift.expand(4, 3))
