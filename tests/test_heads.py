"""Vector and tensor read-outs, and forces: equivariant, conservative, finite everywhere."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Constant

from lieattn.geometry import AllPairs, GivenFrames, Radius, SampledFrames, lift, point_clouds
from lieattn.groups import cyclic, octahedral, tetrahedral, trivial
from lieattn.models import (
    DirectionConvNet,
    EnergyForces,
    FramewiseTransformer,
    GSANet,
    HamiltonianDynamics,
    LieTransformer,
    Preprocessed,
)
from lieattn.nn import (
    CloudPool,
    DipoleHead,
    FiberPool,
    FieldHead,
    GroupLinear,
    GroupSelfAttention,
    Heads,
    InvariantHead,
    PolarizabilityHead,
    RotationHead,
    VectorHead,
    lift_field,
)
from lieattn.nn.relative import MLPEncoding
from lieattn.reps import Pseudovector, Scalar, SymmetricTensor, Vector
from lieattn.spaces import PositionDirection
from lieattn.testing import randomize
from tests.cases import GROUPS, SMALL_GROUPS, normal, refuses, turns
from tests.test_reps import rotations

every_group = pytest.mark.parametrize("group", SMALL_GROUPS.values(), ids=SMALL_GROUPS)
CHANNELS = 4


class Energy(nn.Module):
    """A small invariant network, smooth within its neighborhoods. Velocities, if any, enter through lift_field."""

    def __init__(self, group, neighborhood=None, velocities=False):
        super().__init__()
        self.group, self.neighborhood = group, neighborhood or Radius(2.5)
        self.rep = Scalar() + Vector(group.dim) if velocities else Scalar()
        encoding = MLPEncoding(group, 2, value_channels=4)
        self.attention = GroupSelfAttention(
            group, self.rep.dim, CHANNELS, heads=2, head_channels=4, pattern="joint", encoding=encoding
        )
        self.linear = GroupLinear(group, CHANNELS, 1)

    def forward(self, data):
        graph = lift(data, self.group, self.neighborhood)
        charge = data.z.to(data.pos.dtype)[:, None]
        values = torch.cat([charge, data.vel], dim=1) if self.rep.dim > 1 else charge
        x = self.attention(lift_field(values, graph, self.rep), graph)
        return CloudPool("sum")(FiberPool("mean")(torch.tanh(self.linear(x))), graph)


def molecule(group, points=6, seed=0, **more):
    return Data(pos=normal(points, group.dim, seed=seed), z=torch.arange(points) % 3 + 1, **more)


def model(group, **options):
    return EnergyForces(randomize(Energy(group, **options)).double()).eval()


# --- heads ----------------------------------------------------------------------------------------------------


@every_group
def test_fields_on_points(group):
    d = group.dim
    heads = [FieldHead(CHANNELS, Scalar()), VectorHead(CHANNELS, d, hidden=7), FieldHead(CHANNELS, SymmetricTensor(d))]
    heads += [FieldHead(CHANNELS, Pseudovector())] if d == 3 else []
    x = normal(5, group.order, CHANNELS)
    for head in heads:
        randomize(head.double())
        out = head(x, group)
        assert out.shape == (5, head.rep.dim)
        for g in turns(group):
            moved = head(group.translate(g, x), group)
            torch.testing.assert_close(moved, head.rep.act(group.elements[g], out), atol=1e-12, rtol=0)


REDUCTIONS = {
    "mean": lambda part: part.mean(dim=(0, 1)),
    "max": lambda part: part.amax(dim=(0, 1)),
    "sum": lambda part: part.mean(dim=1).sum(dim=0),
}


@pytest.mark.parametrize("pool", REDUCTIONS)
def test_invariant_heads_by_their_definition(pool):
    """Pooled over frames and points first, by default, and three linear maps after them."""
    graph = lift(normal(5, 3), tetrahedral(), AllPairs(), batch=torch.tensor([0, 0, 1, 1, 1]))
    x = normal(5, 12, CHANNELS)
    head = randomize(InvariantHead(CHANNELS, 2, pool=pool, norm=True).double())
    y = torch.stack([REDUCTIONS[pool](part) for part in (x[:2], x[2:])])
    for norm, linear in zip(head.norms, head.linears, strict=True):
        y = linear(nn.functional.silu(nn.functional.layer_norm(y, [CHANNELS], norm.weight, norm.bias)))
    torch.testing.assert_close(head(x, graph), y)


def test_heads_are_as_wide_as_the_field():
    widths = FieldHead(5, Vector(3)).linear1, DipoleHead(5).charge[0], PolarizabilityHead(5).field.linear1
    assert [linear.out_features for linear in widths] == [5, 5, 5]


def test_poses_of_nothing_are_rotations():
    graph = lift(normal(4, 3), tetrahedral(), AllPairs(), batch=torch.tensor([0, 0, 2, 2]))  # cloud 1 is empty
    head = randomize(RotationHead(CHANNELS).double())
    with pytest.warns(UserWarning, match=r"undetermined for 1 of 3 clouds \(the first has index 1\)"):
        found = head(normal(4, 12, CHANNELS), graph)
    torch.testing.assert_close(found @ found.mT, torch.eye(3, dtype=torch.float64).expand(3, 3, 3))


def test_heads_of_your_own_are_invariant_unless_they_say_otherwise():
    assert Heads({"own": nn.Linear(4, 1), "vector": VectorHead(4)}).kind == {"own": "invariant", "vector": "vector"}


@every_group
def test_dipoles_and_polarizabilities(group):
    pos, batch = normal(9, group.dim), torch.tensor([2, 0, 0, 2, 0, 3, 2, 2, 0])  # cloud 1 is empty, 3 a single point
    x = normal(9, group.order, CHANNELS, seed=1)
    dipole = randomize(DipoleHead(CHANNELS, group.dim).double())
    polarizability = randomize(PolarizabilityHead(CHANNELS, group.dim).double())
    total = normal(4, seed=2)

    def call(x, pos):
        graph = lift(pos, group, Radius(1.5), batch=batch)
        return dipole(x, graph), dipole(x, replace(graph, charge=total)), polarizability(x, graph)

    expected = call(x, pos)
    assert [tuple(out.shape) for out in expected] == [(4, group.dim)] * 2 + [(4, group.dim, group.dim)]
    assert all(not out[1].any() for out in expected)
    torch.testing.assert_close(expected[2], expected[2].mT)
    for g in turns(group):
        R = group.elements[g]
        mu, charged, alpha = call(group.translate(g, x), pos @ R.T + 5.0)
        torch.testing.assert_close(mu, expected[0] @ R.T, atol=1e-11, rtol=0)
        torch.testing.assert_close(charged, expected[1] @ R.T, atol=1e-11, rtol=0)
        torch.testing.assert_close(alpha, R @ expected[2] @ R.T, atol=1e-11, rtol=0)


SPATIAL = {name: group for name, group in GROUPS.items() if group.dim == 3 and group.order <= 60}


@pytest.mark.parametrize("group", SPATIAL.values(), ids=SPATIAL)
def test_rotations(group):
    """R rotates with the clouds and stays a rotation under reflections, in both precisions and for tiny vectors."""
    pos, batch = normal(9, 3), torch.tensor([0, 1] * 4 + [0])
    x = normal(9, group.order, CHANNELS, seed=1)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        head = randomize(RotationHead(CHANNELS, hidden=7), seed=2).to(dtype)

        def call(x, pos, head=head, dtype=dtype):
            return head(x.to(dtype), lift(pos.to(dtype), group, Radius(1.5), batch=batch)).double()

        still = call(x, pos)
        assert still.shape == (2, 3, 3)
        torch.testing.assert_close(still.det(), torch.ones(2).double(), atol=tolerance, rtol=0)
        for g in turns(group):
            turn = group.elements[g] * group.elements[g].det()
            moved = call(group.translate(g, x), group.act(g, pos) + 1.0)
            torch.testing.assert_close(moved, turn @ still, atol=tolerance, rtol=0)
        with torch.no_grad():
            head.field.linear2.weight *= 1e-15
        torch.testing.assert_close(call(x, pos), still, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poses_of_symmetric_clouds_are_named(dtype):
    """The octahedron determines no vector, and three points that a third of a turn permutes one direction."""
    group = octahedral()
    head = randomize(RotationHead(1).to(dtype))
    triangle = torch.stack([torch.tensor([1.0, 0.5, 0.2]).roll(shift) for shift in range(3)])
    pos = torch.cat([normal(4, 3), torch.eye(3), -torch.eye(3), triangle]).to(dtype)
    batch = torch.tensor([0] * 4 + [1] * 6 + [2] * 3)
    graph = lift(pos, group, AllPairs(), batch=batch)
    x = ((graph.frame_positions() @ torch.tensor([[1.0], [0.5], [0.2]]).to(dtype)) ** 3).requires_grad_()
    with pytest.warns(UserWarning, match=r"undetermined for 2 of 3 clouds \(the first has index 1\)"):
        found = head(x, graph)
    torch.testing.assert_close(found @ found.mT, torch.eye(3).to(dtype).expand(3, 3, 3))
    (slope,) = torch.autograd.grad(found[:, 0, 1].sum(), x)
    assert slope.isfinite().all()


def test_charges_sum_to_the_total():
    head = randomize(DipoleHead(CHANNELS).double())
    clouds = lift(normal(7, 3), trivial(3), AllPairs(), batch=torch.tensor([1, 0, 1, 1, 0, 1, 0]))
    x, total = normal(7, 1, CHANNELS, seed=1), torch.tensor([-1.0, 2.0], dtype=torch.float64)

    def sums(charges):
        return charges.new_zeros(2).index_add(0, clouds.batch, charges)

    torch.testing.assert_close(sums(head.charges(x, clouds)), torch.zeros(2).double(), atol=1e-14, rtol=0)
    torch.testing.assert_close(sums(head.charges(x, replace(clouds, charge=total))), total)
    free = DipoleHead(CHANNELS, neutral=False).double()
    free.load_state_dict(head.state_dict())
    assert sums(free.charges(x, clouds)).abs().min() > 1e-3


def test_dipole_is_charge_times_position():
    """Two opposite charges q at distance d, without vectors, have the dipole moment q d."""
    head = DipoleHead(1).double()
    nn.init.zeros_(head.vector.linear2.weight)
    head.charge = nn.Identity()
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None, None]
    graph = lift(torch.tensor([[7.0, 0, 1], [5.0, 0, 1]], dtype=torch.float64), trivial(3), AllPairs())
    assert head(x, graph).tolist() == [[2, 0, 0]]


def test_dipoles_of_ions_are_relative_to_the_means_of_their_clouds():
    head, x = randomize(DipoleHead(CHANNELS)), normal(5, 12, CHANNELS).float()
    pos, batch, total = normal(5, 3), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1.0, -2.0])

    def dipoles(pos):
        return head(x, replace(lift(pos, tetrahedral(), AllPairs(), batch=batch), charge=total))

    found = dipoles(pos)
    for cloud in (0, 1):
        own = batch == cloud
        alone = head(x[own], replace(lift(pos[own], tetrahedral(), AllPairs()), charge=total[cloud : cloud + 1]))
        torch.testing.assert_close(found[cloud : cloud + 1], alone)
    # Positions in double precision are not rounded before the mean is subtracted.
    torch.testing.assert_close(dipoles(pos + 1e7), found)


def test_heads_take_frames_of_every_point():
    """With frames computed from the data, heads are exact for every rotation and reflection."""
    head, pseudo = VectorHead(CHANNELS).double(), FieldHead(CHANNELS, Pseudovector()).double()
    frames, x = rotations(5 * 4).reshape(5, 4, 3, 3), normal(5, 4, CHANNELS)
    R = -rotations(1, seed=4)[0]
    torch.testing.assert_close(head(x, R @ frames), head(x, frames) @ R.T)
    torch.testing.assert_close(pseudo(x, R @ frames), -pseudo(x, frames) @ R.T)
    several = VectorHead(CHANNELS, outputs=2).double()
    assert several(x, frames).shape == (5, 2, 3)
    torch.testing.assert_close(several(x, R @ frames), several(x, frames) @ R.T)


def test_dipoles_of_points_with_directions_use_their_positions():
    head, pos, x = randomize(DipoleHead(CHANNELS).double()), normal(5, 3), normal(5, 4, CHANNELS, seed=1)
    points = torch.cat([pos, nn.functional.normalize(normal(5, 3, seed=2), dim=1)], dim=1)
    graph = lift(points, SampledFrames(4), AllPairs(), PositionDirection())
    same = lift(pos, GivenFrames(graph.frames), AllPairs())
    torch.testing.assert_close(head(x, graph), head(x, same))


def test_heads_keep_single_precision_under_autocast():
    graph = lift(normal(4, 3).float(), tetrahedral(), AllPairs())
    x = normal(4, 12, CHANNELS).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert DipoleHead(CHANNELS)(x, graph).dtype == torch.float32
        assert PolarizabilityHead(CHANNELS)(x, graph).dtype == torch.float32


@pytest.mark.parametrize("neutral", [True, False])
def test_dipoles_of_periodic_clouds_are_those_of_the_given_images(neutral):
    cell, shift = 4 * torch.eye(3, dtype=torch.float64), torch.zeros(5, 3, dtype=torch.float64)
    shift[1, 0] = 4
    pos, x = normal(5, 3), normal(5, 12, CHANNELS, seed=1)
    clouds = [point_clouds(places, cell=cell) for places in (pos, pos + shift)]
    graph, moved = (lift(one, tetrahedral(), Radius(2.0)) for one in clouds)
    head = randomize(DipoleHead(CHANNELS, neutral=neutral).double())
    charges = head.charges(x, graph)
    torch.testing.assert_close(head.charges(x, moved), charges)
    added = (charges[1] - charges.mean()) * shift[1]
    torch.testing.assert_close(head(x, moved)[0] - head(x, graph)[0], added)


def called(head, *shape, **charge):
    """Call a head on features of this shape on four points."""
    return head.double()(normal(*shape, CHANNELS), replace(lift(normal(4, 3), octahedral(), AllPairs()), **charge))


test_errors_of_heads = refuses(
    (lambda: called(DipoleHead(CHANNELS), 4, 24, charge=torch.zeros(3)), r"graph\.charge: expected shape"),
    (lambda: called(DipoleHead(CHANNELS, neutral=False), 4, 24, charge=torch.zeros(1)), "graph.charge: expected None"),
    (lambda: called(VectorHead(CHANNELS), 3, 24), "values: expected a field on the 4 points of the graph, got 3"),
    (lambda: called(PolarizabilityHead(CHANNELS), 5, 24), "values: expected a field on the 4 points .*, got 5"),
    (lambda: VectorHead(CHANNELS, pool="mean")(torch.rand(4, 24, CHANNELS), octahedral()), "graph: expected a lifted"),
    (
        lambda: InvariantHead(3, 1, readout="point_first", norm=True),
        "norm: expected False, since readout 'point_first'",
    ),
    *(  # the first was averaged over the points
        (
            lambda o=(pool, shape): called(InvariantHead(CHANNELS, 1, pool=o[0]), *o[1]),
            r"x: expected a field \[points=4, ",
        )
        for pool in ("none", "mean")
        for shape in ((4,), (3, 24), (4, 2, 24))
    ),
    error=(TypeError, ValueError),
)


# --- forces ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("name", ["D3", "T"])
def test_forces_are_minus_the_gradient_and_sum_to_zero(name):
    group, step = SMALL_GROUPS[name], 1e-6
    forces, data = model(group, velocities=True), molecule(group, vel=normal(6, group.dim, seed=9))
    energy, force = forces(data)
    assert energy.shape == (1,)
    assert force.shape == data.pos.shape
    torch.testing.assert_close(force.sum(dim=0), torch.zeros(group.dim).double(), atol=1e-12, rtol=0)
    for point, axis in [(0, 0), (3, group.dim - 1), (5, 0)]:
        ends = []
        for sign in (1, -1):
            moved = data.clone()
            moved.pos[point, axis] += sign * step
            ends.append(forces(moved).energy)
        expected = -(ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(force[point, axis], expected[0], atol=1e-7, rtol=1e-6)


def test_forces_whatever_the_callers_gradient_mode():
    group = cyclic(4)
    forces, data = model(group), molecule(group)
    expected = forces(data)
    with torch.no_grad():
        found = forces(data)
    torch.testing.assert_close(found.force, expected.force)
    with torch.inference_mode():
        inside = Batch.from_data_list([molecule(group)])
        found = forces(inside)
        forces.train()
        torch.testing.assert_close(forces(inside).force, expected.force)
    torch.testing.assert_close(found.force, expected.force)
    assert not found.force.requires_grad
    assert not data.pos.requires_grad
    assert set(data.keys()) == {"pos", "z"}


def test_energies_without_positions_have_no_forces():
    class Count(nn.Module):
        def forward(self, data):
            return data.z.sum().reshape(1, 1).float()

    energy, force = EnergyForces(Count())(molecule(octahedral()))
    assert energy.shape == (1,)
    assert not force.any()


def test_other_outputs_have_gradients_where_forces_do():
    heads = Heads({"energy": InvariantHead(4, 1), "charge": InvariantHead(4, 1, pool="none")})
    forces = EnergyForces(framewise(1, neighborhood=Radius(1.5, smooth=True)).with_head(heads))
    data = Data(x=torch.randn(5, 1), pos=torch.randn(5, 2))
    found = forces(data)
    assert found.keys() == {"energy", "force", "charge"}
    assert all(output.requires_grad for output in found.values())
    assert not any(output.requires_grad for output in forces.eval()(data).values())


def framewise(outputs, **options):
    return FramewiseTransformer(cyclic(4), 1, outputs, channels=4, layers=1, **options)


def test_errors_of_forces():
    class Many(nn.Module):
        def forward(self, data):
            return data.pos

    with pytest.raises(ValueError, match="model: expected one energy per cloud"):
        EnergyForces(Many())(molecule(octahedral()))

    one, near = "expected one energy per cloud, .* got", Radius(1.5)
    for network, message in (
        (GSANet(cyclic(4), 1, 2, channels=8, heads=1, neighborhood=near), f"{one} a network with 2 outputs"),
        (DirectionConvNet(tetrahedral(), 1, 3, channels=4, layers=1, neighborhood=near), f"{one} .* 3 outputs"),
        (LieTransformer(1, 2, frames=cyclic(4), channels=4, layers=1, heads=1, neighborhood=near), f"{one} .* 2 out"),
        (framewise(2), f"{one} a network with 2 outputs"),
        (Preprocessed(framewise(2), Constant()), f"{one} a network with 2 outputs"),
        (framewise(1, pool="none"), f"{one} a network with outputs at the points"),
        (framewise(1, kind="vector"), f"{one} outputs that change under rotations"),
        (framewise(1).with_head(Heads({"energy": InvariantHead(4, 2)})), f"{one} a network with 2 outputs"),
        (framewise(1).with_head(Heads({"y": InvariantHead(4, 1)})), r"expected an output 'energy', .* got \['y'\]"),
        *(
            (framewise(1).with_head(Heads({"energy": InvariantHead(4, 1), name: VectorHead(4)})), f".* got .*'{name}'")
            for name in ("force", "stress", "virial")
        ),
    ):
        with pytest.raises(ValueError, match=f"model: {message}"):
            EnergyForces(network)
        with pytest.raises(ValueError, match=f"potential: {message}"):
            HamiltonianDynamics(network)

    class OwnHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 8)  # a sum follows

        def forward(self, data):
            return self.head(data.pos).square().sum()[None]

    EnergyForces(OwnHead())(Data(pos=torch.randn(3, 2)))

    class OfAtoms(nn.Module):
        def forward(self, data):
            return data.pos.square().sum(dim=1)

    for data, number in (
        (Data(pos=torch.randn(4, 3)), 1),
        (Batch.from_data_list([Data(pos=torch.randn(4, 3))] * 2), 2),
    ):
        with pytest.raises(
            ValueError, match=f"model: expected one energy for each of {number} clouds, got {4 * number}"
        ):
            EnergyForces(OfAtoms())(data)
