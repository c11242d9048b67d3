"""Irreducible representations found numerically, and group-tied linear maps in their basis."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lieattn.groups import FiniteGroup, cyclic, icosahedral, octahedral, real_irreps, tetrahedral
from lieattn.nn import GroupLinear
from lieattn.ops import fourier_pays
from lieattn.testing import randomize
from tests.cases import GROUPS, each

# Left multiplication by the unit quaternions ±1, ±i, ±j, ±k: the smallest group with a quaternionic irrep.
_I = torch.tensor([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]], dtype=torch.float64)
_J = torch.tensor([[0, 0, -1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, -1, 0, 0]], dtype=torch.float64)
QUATERNIONS = FiniteGroup.generate(torch.stack([_I, _J]), "Q8")
ALL = {**GROUPS, "Q8": QUATERNIONS}
every_group = each("group", ALL)


@every_group
def test_irreps_are_irreducible_and_complete(group):
    irreps = real_irreps(group)
    assert sum(irrep.degree * irrep.copies for irrep in irreps) == group.order
    for irrep in irreps:
        norm = float(irrep.matrices.diagonal(dim1=1, dim2=2).sum(-1).square().mean())
        # 1, 2, 4 for the real, complex and quaternionic types, with degree, degree / 2, degree / 4 copies.
        assert round(norm) in (1, 2, 4)
        assert norm == pytest.approx(round(norm), abs=1e-9)
        assert irrep.copies * round(norm) == irrep.degree
    bases = torch.cat([irrep.basis.flatten(0, 1) for irrep in irreps])
    torch.testing.assert_close(bases @ bases.T, torch.eye(group.order, dtype=torch.float64), atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("group", "degrees"),
    [
        (cyclic(5), [1, 2, 2]),
        (tetrahedral(), [1, 2, 3]),
        (octahedral(), [1, 1, 2, 3, 3]),
        (icosahedral(), [1, 3, 3, 4, 5]),
        (QUATERNIONS, [1, 1, 1, 1, 4]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_degrees_are_those_of_the_character_tables(group, degrees):
    assert sorted(irrep.degree for irrep in real_irreps(group)) == degrees


class Largest(TorchDispatchMode):
    """Records the largest number of entries of a result."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else (out,)
        self.entries = max(self.entries, *(one.numel() for one in results if isinstance(one, torch.Tensor)), 0)
        return out


def test_irreps_need_no_matrices_of_all_translations():
    group = cyclic(96)
    with Largest() as largest:
        irreps = real_irreps(group)
    assert len(irreps) == 49
    assert largest.entries < 96**3 // 4


@every_group
def test_right_translations_act_on_the_basis_by_the_irrep(group):
    f = torch.randn(group.order, dtype=torch.float64)
    for irrep in real_irreps(group):
        for k in range(0, group.order, max(1, group.order // 5)):
            moved = irrep.basis @ f[group.cayley[:, k]]
            expected = torch.einsum("ab,mb->ma", irrep.matrices[k], irrep.basis @ f)
            torch.testing.assert_close(moved, expected, atol=1e-11, rtol=0)


@every_group
def test_fourier_linear_is_the_dense_one(group):
    layers = [GroupLinear(group, 3, 5, fourier=way).double() for way in (False, True)]
    layers[1].load_state_dict(randomize(layers[0]).state_dict())
    x = torch.randn(4, group.order, 3, dtype=torch.float64, requires_grad=True)
    dense, fourier = (layer(x) for layer in layers)
    torch.testing.assert_close(fourier, dense, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn_like(dense)
    parts = [
        torch.autograd.grad((y * cotangent).sum(), [x, layer.weight, layer.bias])
        for y, layer in zip((dense, fourier), layers, strict=True)
    ]
    for one, other in zip(*parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


def test_the_cheaper_way_is_taken():
    assert GroupLinear(tetrahedral(), 32, 32).fourier
    assert not GroupLinear(cyclic(4), 2, 2).fourier
    assert not fourier_pays(1, [1], 64, 64)


def test_gradgradcheck():
    layer = GroupLinear(cyclic(5), 2, 3, fourier=True).double()
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, x)


def test_constants_keep_their_precision_in_casts():
    """Fourier bases keep float64 precision through casts to float32, half precision and back, also in copies."""
    layer = GroupLinear(tetrahedral(), 4, 4, fourier=True)
    exact = {name: getattr(layer, name).clone() for name in ("transform", "matrices")}
    for cast in (lambda: layer.float().half().double(), lambda: copy.deepcopy(layer.to(torch.bfloat16))):
        moved = cast()
        for name, value in exact.items():
            assert getattr(moved, name).dtype == torch.float64
            assert torch.equal(getattr(moved, name), value)
    assert not any(name in layer.state_dict() for name in exact)
    assert all(getattr(layer.to("meta"), name).is_meta for name in exact)
