"""The framewise transformer and its parts: layout, attention over whole clouds, equivariance."""

import pytest
import torch
from torch_geometric.data import Data

from lieattn.geometry import AllPairs, Radius, lift, padding
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import DirectionConvNet, FramewiseOptions, FramewiseTransformer, LieTransformer, Lifting
from lieattn.models.irreps import DistanceTransformer
from lieattn.nn.relative import RotaryPhases
from lieattn.ops import _dense, backend, group_attention
from lieattn.ops._terms import opposite, turn_pairs
from lieattn.testing import randomize, relative_error
from tests.cases import random_clouds, refuses

CHANNELS = 4


@pytest.mark.parametrize(
    ("batch", "clouds"),
    [([0, 0, 1, 1], 2), ([1, 0, 1], 2), ([2, 0, 2, 2], 4), ([], 0), ([], 3), ([0], 1)],
    ids=["regular", "unsorted", "with empty clouds", "nothing", "only empty clouds", "one point"],
)
def test_padding_and_back(batch, clouds):
    batch = torch.tensor(batch, dtype=torch.int64)
    x = torch.randn(len(batch), 3)
    layout = padding(batch, clouds)
    assert torch.equal(layout.cloud, batch)
    padded = layout.pad(x)
    assert padded.shape[0] == clouds
    torch.testing.assert_close(layout.unpad(padded), x)
    for cloud in range(clouds):
        torch.testing.assert_close(padded[cloud, : int((batch == cloud).sum())], x[batch == cloud])
        assert (padded[cloud, int((batch == cloud).sum()) :] == 0).all()


def test_layouts_move_as_a_whole():
    for batch in ([0, 0, 1, 1], [1, 0, 1]):
        layout = padding(torch.tensor(batch), 2).to("meta")
        parts = [part for part in (layout.cloud, layout.place, layout.mask) if part is not None]
        assert {part.device.type for part in parts} == {"meta"}, batch


def test_the_kernel_of_torch_for_whole_clouds_is_differentiated_twice(monkeypatch):
    """It has no second derivatives itself, and is used for more than some rows."""
    monkeypatch.setattr(_dense, "_SHORT", 0)
    neighbors = lift(torch.randn(5, 2), cyclic(2), AllPairs(), batch=torch.tensor([0, 0, 2, 2, 2])).neighbors
    signals = [torch.randn(5, 2, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(*signals, way="dense"):
        with backend(way):
            return group_attention(*signals, neighbors, pattern="framewise")[0]

    torch.testing.assert_close(call(*signals), call(*signals, way="plain"), atol=1e-12, rtol=1e-12)
    plain, again = (torch.autograd.grad(call(*signals).sin().sum(), signals, create_graph=way) for way in (False, True))
    torch.testing.assert_close(again, plain, atol=1e-12, rtol=1e-12)
    assert torch.autograd.gradcheck(call, signals)
    assert torch.autograd.gradgradcheck(call, signals)


def test_phases_turn_pairs_of_channels():
    """Norms of pairs are preserved, angles add up, and products depend only on differences of positions."""
    phases = RotaryPhases(2, 3, 4).double()
    here, there, shift = (torch.randn(5, 2, 2, dtype=torch.float64) for _ in range(3))
    query, key = (torch.randn(5, 2, 3, 4, dtype=torch.float64) for _ in range(2))
    turned = turn_pairs(query, phases(here))
    torch.testing.assert_close(turned.unflatten(-1, (2, 2)).norm(dim=-1), query.unflatten(-1, (2, 2)).norm(dim=-1))
    torch.testing.assert_close(turn_pairs(turned, phases(shift)), turn_pairs(query, phases(here + shift)))
    torch.testing.assert_close(turn_pairs(turned, opposite(phases(here))), query)
    product = (turned * turn_pairs(key, phases(there))).sum(-1)
    moved = (turn_pairs(query, phases(here + shift)) * turn_pairs(key, phases(there + shift))).sum(-1)
    torch.testing.assert_close(moved, product)
    assert not torch.allclose(product, (query * key).sum(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_turns_as_well(dtype):
    phases = RotaryPhases(2, 1, 4)(20 * torch.randn(50, 1, 2))
    signal = torch.randn(50, 1, 1, 4)
    found = turn_pairs(signal.to(dtype), phases)
    assert found.dtype == dtype
    assert relative_error(found.float(), turn_pairs(signal, phases)) < 4 * torch.finfo(dtype).eps


def test_autocast_does_not_round_angles():
    phases, positions = RotaryPhases(2, 1, 4), 100 * torch.randn(50, 1, 2)
    expected = phases(positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(phases(positions), expected)


def test_autocast_does_not_round_positions_in_frames():
    model, data, seen = network(tetrahedral()), random_clouds(3, (5,), torch.float32), []
    model.phases.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(data)
    assert torch.equal(*seen)


def network(group, **options):
    model = FramewiseTransformer(group, 3, 2, channels=CHANNELS, layers=2, vector_inputs=("vel",), **options)
    return randomize(model)


CURVED = {
    "edge network": lambda: FramewiseTransformer(tetrahedral(), 3, 1, channels=8, layers=1, neighborhood=Radius(2.0)),
    "angles": lambda: FramewiseTransformer(
        tetrahedral(), 3, 1, channels=8, layers=1, options=FramewiseOptions(angles=2), neighborhood=Radius(2.0)
    ),
    "directions": lambda: DirectionConvNet(tetrahedral(), 3, 1, channels=8, layers=1, neighborhood=Radius(2.0)),
    "radial functions": lambda: LieTransformer(
        3, 1, frames=tetrahedral(), neighborhood=Radius(2.0), channels=8, layers=1, lifting=Lifting(radial=3, local=0)
    ),
    "invariants": lambda: DistanceTransformer(3, 1, channels=8, layers=1, neighborhood=Radius(2.0)),
}


@pytest.mark.parametrize("name", CURVED)
def test_second_derivatives_at_coincident_points_are_those_near_them(name):
    torch.manual_seed(0)
    model, data = randomize(CURVED[name]().double()).eval(), random_clouds(3, (4,))
    direction = torch.randn(3, dtype=torch.float64)
    direction /= direction.norm()

    def curvature(apart):
        """Return second derivatives by the distance of the first two points, at the distance ``apart``."""
        distance = torch.tensor(apart, dtype=torch.float64, requires_grad=True)
        pos = torch.cat([(data.pos[1] + distance * direction)[None], data.pos[1:]])
        (slope,) = torch.autograd.grad(model(_at(data, pos)).sum(), distance, create_graph=True)
        return float(torch.autograd.grad(slope, distance)[0])

    near = curvature(1e-7)
    assert abs(near) > 1e-3
    assert curvature(0.0) == pytest.approx(near, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in CURVED if name != "directions"])  # steep near coincident points
def test_forces_on_close_points_are_precise_in_float32(name):
    torch.manual_seed(0)
    model, data = randomize(CURVED[name]()).eval(), random_clouds(3, (6,))
    direction = torch.nn.functional.normalize(torch.randn(3), dim=0)
    for apart in (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
        pos, forces = data.pos.float(), []
        pos[0] = pos[1] + apart * direction
        for dtype in (torch.float32, torch.float64):
            moved = _at(data, pos.to(dtype).requires_grad_())
            moved.x = data.x.to(dtype)
            forces.append(torch.autograd.grad(model.to(dtype)(moved).sum(), moved.pos)[0])
        assert relative_error(forces[0].double(), forces[1]) < 1e-5


def _at(data, pos):
    other = data.clone()
    other.pos = pos
    return other


test_bad_options_are_named = refuses(
    (
        lambda: FramewiseTransformer(cyclic(2), 1, 1)(Data(x=torch.zeros(2, 1), pos=torch.zeros(2, 3))),
        r"data\.pos: C2 acts on 2 coordinates",
    ),
)
