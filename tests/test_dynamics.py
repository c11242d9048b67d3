"""Hamiltonian dynamics: exact springs, conserved quantities, roll-outs, and training through roll-outs."""

import math

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from lieattn.geometry import AllPairs, Radius, lift
from lieattn.groups import (
    SE,
    Dilations,
    E,
    FiniteGroup,
    LieGroup,
    RotationDilations,
    SemidirectProduct,
    Sim,
    Translations,
    cyclic,
    tetrahedral,
)
from lieattn.models import (
    CloudInputs,
    DirectionConvNet,
    EnergyForces,
    FramewiseTransformer,
    HamiltonianDynamics,
    Species,
    Symmetry,
    Trajectory,
    energy_drift,
)
from lieattn.nn import CloudPool, FiberPool, GroupLinear, GroupSelfAttention
from lieattn.nn.relative import MLPEncoding
from lieattn.ops import backend
from lieattn.testing import randomize, relative_error
from lieattn_datasets import Springs
from tests.cases import normal, refuses

# Shears of the plane by whole numbers preserve no distances; these two are a finite group.
SHEARED = FiniteGroup.from_matrices([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, -1.0]]])


class Squeeze(LieGroup):
    """The maps (x, y) -> (r x, y / r), which preserve areas but no distances."""

    def __init__(self):
        super().__init__("squeeze", dim=2, size=2, algebra_dim=1)

    def hat(self, a):
        return torch.diag_embed(torch.cat([a, -a], dim=-1))


class SpringPotential(nn.Module):
    """V = 1/2 sum_ij k_i k_j |q_i - q_j|², with k the last feature."""

    def forward(self, data):
        k = data.x[:, -1] * (data.batch[:, None] == data.batch)
        squared = (data.pos[:, None] - data.pos).square().sum(dim=-1)
        each = 0.5 * (k * data.x[:, -1:] * squared).sum(dim=1)
        return each.new_zeros(int(data.batch.max()) + 1).index_add(0, data.batch, each)


class Learned(nn.Module):
    """A small invariant network of positions and features."""

    def __init__(self, group, channels):
        super().__init__()
        self.group = group
        encoding = MLPEncoding(group, 2, value_channels=4)
        self.attention = GroupSelfAttention(
            group, channels, 4, heads=2, head_channels=4, pattern="joint", encoding=encoding
        )
        self.linear = GroupLinear(group, 4, 1)

    def forward(self, data):
        graph = lift(data, self.group, AllPairs())
        x = self.attention(data.x[:, None].expand(-1, self.group.order, -1), graph)
        return CloudPool("sum")(FiberPool("mean")(torch.tanh(self.linear(x))), graph)


def system(points=4, dim=2, clouds=3):
    """Return position, momentum, mass and (mass, stiffness) of some systems."""
    q, p = normal(clouds, points, dim), normal(clouds, points, dim, seed=1)
    mass, stiffness = normal(clouds, points, seed=2).abs() + 0.3, normal(clouds, points, seed=3).abs()
    return q, p, mass, torch.stack([mass, stiffness], dim=-1)


# --- the true system ------------------------------------------------------------------------------------------


def test_field_is_the_symplectic_gradient():
    """The vector field equals J ∇H, computed by differentiating H."""
    q, p, mass, features = system()
    q, p = q.requires_grad_(), p.requires_grad_()
    dynamics = HamiltonianDynamics(randomize(Learned(cyclic(4), 2)).double())
    by_q, by_p = torch.autograd.grad(dynamics.hamiltonian(q, p, mass, features).sum(), (q, p))
    velocity, force = dynamics.field(q, p, mass, features)
    torch.testing.assert_close(velocity, by_p)
    torch.testing.assert_close(force, -by_q)


@pytest.mark.parametrize("method", ["rk4", "dopri5"])
def test_roll_outs_agree_with_the_exact_solution(method):
    item = Springs("test", 2, chunk=None)[1].apply(lambda value: value.double())
    times = item.time[0, :60]
    dynamics = HamiltonianDynamics(SpringPotential(), method=method)
    with torch.no_grad():
        path = dynamics.trajectory(item.pos, item.momentum, item.x[:, 0], times, item.x)
    found = torch.cat([path.position, path.momentum], dim=-1).transpose(0, 1)
    tolerance = 2e-4 if method == "rk4" else 2e-5  # the data set is stored in single precision
    torch.testing.assert_close(found, item.y[:, :60], atol=tolerance, rtol=0)


def test_energy_and_momentum_are_conserved():
    q, p, mass, features = system()
    dynamics = HamiltonianDynamics(randomize(Learned(cyclic(4), 2)).double(), method="dopri5", rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        path = dynamics.trajectory(q, p, mass, torch.linspace(0, 0.1, 3, dtype=torch.float64), features)
        drift = dynamics.drift(path, mass, features)
    assert 0 < drift.relative < 1e-7
    torch.testing.assert_close(path.momentum.sum(2), p.sum(1).expand(3, -1, -1), atol=1e-7, rtol=0)


def test_steps_may_be_finer_than_the_times():
    q, p, mass, features = system(clouds=1)
    paths, times = [], torch.linspace(0, 1, 41, dtype=torch.float64)
    for options, given in ((None, times), ({"step_size": 1 / 40}, times[::4])):
        with torch.no_grad():
            paths.append(
                HamiltonianDynamics(SpringPotential(), options=options).trajectory(q, p, mass, given, features)
            )
    torch.testing.assert_close(paths[1].position, paths[0].position[::4], atol=1e-10, rtol=0)


def test_energy_drift_in_numbers():
    drift = energy_drift(torch.tensor([[2.0, -4.0], [2.5, -4.0], [2.0, -4.25]]))
    assert (drift.initial, drift.largest, drift.final, drift.relative) == (-1.0, 0.5, 0.25, 0.125)
    assert str(drift) == "energy -1, drift at most 5.00e-01 (relative: 1.25e-01)"
    assert energy_drift(torch.tensor([0.0, 1.0])).relative == math.inf
    assert energy_drift(torch.zeros(3)).relative == 0
    assert energy_drift(torch.tensor([[2, 4], [3, 8]])).initial == 3


# --- learned potentials ---------------------------------------------------------------------------------------


ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")


@pytest.mark.parametrize("method", ["rk4", *ADAPTIVE])
@pytest.mark.filterwarnings("ignore:.*finds no step within its tolerances")
def test_trajectories_that_diverge_are_nan_and_wrong_positions_are_named(method):
    """The error was about the positions of the data also if those were fine, or an assertion about small steps."""

    def steep(data):
        return 1e40 * data.pos.pow(4).sum().reshape(1)

    dynamics = HamiltonianDynamics(steep, jumps="allow", method=method)
    q, p, mass = torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1), torch.ones(2)
    times = torch.tensor([0.0, 1.0, 2.0])
    found = dynamics.trajectory(q, p, mass, times)
    assert torch.equal(found.position[0], q)
    assert found.position[-1].isnan().all()
    dynamics = HamiltonianDynamics(Refusing(), jumps="allow", method=method)
    assert dynamics.trajectory(q, p, mass, times).position[-1].isnan().all()
    with pytest.raises(ValueError, match="pos: expected finite coordinates"):
        dynamics.trajectory(q / 0, p, mass, times)


def test_adaptive_steps_that_fail_say_so():
    """These were assertions of the solver."""
    q, p, mass, times = torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1), torch.ones(2), torch.tensor([0.0, 1.0, 2.0])
    dynamics = HamiltonianDynamics(Refusing(), jumps="allow", method="dopri5")
    with pytest.warns(UserWarning, match="dopri5 finds no step within its tolerances, .* trajectories are NaN$"):
        assert dynamics.trajectory(q, p, mass, times).momentum[1:].isnan().all()
    few = {"max_num_steps": 2}
    dynamics = HamiltonianDynamics(energy_of_springs, jumps="allow", method="dopri5", options=few)
    with pytest.raises(ValueError, match=r"^options: max_num_steps exceeded"):
        dynamics.trajectory(q, p, mass, times)


def energy_of_springs(data):
    return data.pos.square().sum().reshape(1)


class Refusing(nn.Module):
    """Strong springs between points whose neighbors are searched."""

    def forward(self, data):
        Radius(1.0)(data.pos)
        return 1e30 * data.pos.pow(4).sum().reshape(1)


def test_clouds_of_different_sizes():
    """A batch with points in any order gives the same results as each cloud alone."""
    q, p, mass, features = (value.flatten(0, 1) for value in system(points=3, clouds=3))
    batch = torch.tensor([1, 0, 1, 2, 2, 1, 2, 2, 1])
    dynamics = HamiltonianDynamics(randomize(Learned(cyclic(4), 2)).double())
    times = torch.tensor([0.0, 0.2, 0.3])
    with torch.no_grad():
        energy = dynamics.hamiltonian(q, p, mass, features, batch=batch)
        path = dynamics.trajectory(q, p, mass, times, features, batch=batch)
        for cloud in range(3):
            mine = batch == cloud
            state = q[mine], p[mine], mass[mine]
            torch.testing.assert_close(energy[cloud], dynamics.hamiltonian(*state, features[mine])[0])
            alone = dynamics.trajectory(*state, times, features[mine])
            torch.testing.assert_close(path.position[:, mine], alone.position)


def test_modes_without_gradients():
    q, p, mass, features = system()
    dynamics = HamiltonianDynamics(randomize(Learned(cyclic(4), 2)).double())
    expected = dynamics.field(q, p, mass, features)[1]
    assert expected.requires_grad
    with torch.no_grad():
        found = dynamics.field(q, p, mass, features)[1]
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())
    assert dynamics.eval().field(q, p, mass, features)[1].requires_grad
    with torch.inference_mode():
        inside = [value * 1 for value in (q, p, mass, features)]
        found = dynamics.field(*inside)[1]
        path = dynamics.trajectory(*inside[:3], torch.tensor([0.0, 0.1]), inside[3])
    torch.testing.assert_close(found.clone(), expected.detach())
    assert path.position.shape == (2, *q.shape)


def test_batches_of_the_data_set():
    """forward(data) returns the targets of Springs, and can be trained on them."""
    batch = Batch.from_data_list([Springs("train", 3)[i] for i in range(3)])
    exact = batch.clone().apply(lambda value: value.double() if value.is_floating_point() else value)
    with torch.no_grad():
        found = HamiltonianDynamics(SpringPotential(), method="dopri5")(exact)
    torch.testing.assert_close(found, exact.y, atol=2e-5, rtol=0)
    learned = HamiltonianDynamics(randomize(Learned(cyclic(4), 2), spread=0.1))
    (learned(batch) - batch.y).square().mean().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in learned.parameters())


def test_velocities_masses_and_other_attributes():
    seen = {}

    class Watching(nn.Module):
        def forward(self, data):
            seen.update(data.to_dict())
            return data.pos.square().sum().reshape(1, 1)

    q, p = normal(4, 3), normal(4, 3, seed=1)
    mass, z = torch.tensor([1.0, 2, 3, 4]).double(), torch.tensor([1, 6, 7, 8])
    dynamics = HamiltonianDynamics(Watching())
    data = Data(pos=q, vel=p / mass[:, None], mass=mass, time=torch.tensor([[0.0, 0.1]]))
    path = dynamics.trajectory(q, p, mass, data.time[0], attributes={"z": z})
    torch.testing.assert_close(dynamics(data)[:, 1, :3], path.position[1])
    dynamics.field(q, p, mass, attributes={"z": z})
    assert seen["z"].tolist() == [1, 6, 7, 8]
    torch.testing.assert_close(seen["pos"].mean(dim=0), torch.zeros(3).double(), atol=1e-14, rtol=0)
    HamiltonianDynamics(Watching(), center=False).field(q, p, mass)
    torch.testing.assert_close(seen["pos"], q)


def test_positions_are_relative_to_the_mean_of_their_own_cloud():
    def quartic(data):
        return torch.zeros(2).double().index_add(0, data.batch, data.pos.pow(4).sum(dim=1))

    q, p, mass, _ = system(clouds=2)
    centered, given = (HamiltonianDynamics(quartic, center=center).hamiltonian for center in (True, False))
    torch.testing.assert_close(centered(q, p, mass), given(q - q.mean(dim=1, keepdim=True), p, mass))


def test_tolerances_reach_the_solver():
    q, p, mass, features = system()
    times, ends = torch.tensor([0.0, 2.0]).double(), []
    for tolerances in ({}, {"atol": 10.0}, {"rtol": 10.0}):
        dynamics = HamiltonianDynamics(SpringPotential(), method="dopri5", **tolerances)
        with torch.no_grad():
            ends.append(dynamics.trajectory(q, p, mass, times, features).position[1])
    assert all(float((end - ends[0]).abs().max()) > 1e-4 for end in ends[1:])


def test_data_with_momentum_and_velocities_and_names():
    """The momentum is used, times may differ by rounding, and other attributes than tensors are ignored."""
    data = Data(**STATE, vel=torch.full_like(Q[0], 5.0), time=torch.tensor([[0.0, 0.1]]), name="springs")
    expected = SPRING_DYNAMICS(Data(**STATE, time=data.time))
    torch.testing.assert_close(SPRING_DYNAMICS(data), expected)
    other = Data(**STATE, time=data.time + 1e-6, name="springs", vel=data.vel)
    both = SPRING_DYNAMICS(Batch.from_data_list([data, other]))
    torch.testing.assert_close(both, torch.cat([expected, expected]))


def test_data_have_all_inputs_of_the_potential():
    options = {"channels": 8, "layers": 1, "heads": 2, "pool": "sum", "vector_inputs": ("wind",)}
    potential = FramewiseTransformer(cyclic(4), CloudInputs(("charge",), Species((1, 8))), 1, **options)
    dynamics = HamiltonianDynamics(randomize(potential).double())
    q, p, times = normal(4, 2), normal(4, 2, seed=1), torch.tensor([[0.0, 0.5]]).double()
    mass, wind = torch.ones(4).double(), normal(4, 2, seed=2)
    attributes = {"z": torch.tensor([1, 8, 8, 1]), "charge": torch.ones(1).double(), "wind": wind}
    found = dynamics(Data(pos=q, momentum=p, mass=mass, time=times, **attributes))
    path = dynamics.trajectory(q, p, mass, times[0], attributes=attributes)
    torch.testing.assert_close(found[:, 1], torch.cat([path.position[1], path.momentum[1]], dim=1))
    assert dynamics.vector_inputs == ("momentum", "vel", "wind")


def test_clouds_without_points():
    """Empty clouds have an energy too, also where no index of a point tells of them."""
    potential = FramewiseTransformer(cyclic(4), CloudInputs(("charge",), 1), 1, channels=8, layers=1, heads=2)
    dynamics = HamiltonianDynamics(randomize(potential).double())
    for shape in ((2, 0), (0,), (0, 3)):
        clouds = shape[0] if len(shape) == 2 else 1
        state = torch.zeros(*shape, 2), torch.zeros(*shape, 2), torch.ones(shape), torch.ones(*shape, 1)
        state, charge = [value.double() for value in state], torch.ones(clouds).double()
        assert dynamics.hamiltonian(*state, attributes={"charge": charge}).shape == (clouds,)
        path = dynamics.trajectory(*state[:3], torch.tensor([0.0, 1.0]), state[3], attributes={"charge": charge})
        assert path.position.shape == (2, *shape, 2)
    alone = Data(pos=normal(3, 2), vel=normal(3, 2, seed=1), x=torch.ones(3, 1).double(), charge=torch.ones(1).double())
    alone.time = torch.tensor([[0.0, 0.1]]).double()
    empty = Data(**{name: value[:0] if alone.is_node_attr(name) else value for name, value in alone.to_dict().items()})
    torch.testing.assert_close(dynamics(Batch.from_data_list([alone, empty])), dynamics(alone))


def test_one_time_and_times_backwards():
    q, p, mass, features = system()
    dynamics = HamiltonianDynamics(SpringPotential(), method="dopri5")
    start = dynamics.trajectory(q, p, mass, torch.tensor([3.0]), features)
    assert torch.equal(start.position[0], q)
    there = dynamics.trajectory(q, p, mass, torch.tensor([0.0, 1.0]), features)
    back = dynamics.trajectory(there.position[1], there.momentum[1], mass, torch.tensor([1.0, 0.0]), features)
    torch.testing.assert_close(back.position[1], q, atol=1e-5, rtol=0)
    assert isinstance(back, Trajectory)


# --- bad input ------------------------------------------------------------------------------------------------

Q, P, M, F = system()
Q32, M32 = Q.float(), M.float()
CLOSE = torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64)
SPRING_DYNAMICS = HamiltonianDynamics(SpringPotential())
STATE = {"pos": Q[0], "momentum": P[0], "x": F[0]}


test_errors = refuses(
    (lambda: SPRING_DYNAMICS.field(Q[0, 0], P, M, F), r"position: expected \[points, dim\]"),
    (lambda: SPRING_DYNAMICS.field(Q, P[:2], M, F), "momentum: expected torch.float64"),
    (lambda: SPRING_DYNAMICS.field(Q, P, M[0], F), r"mass: expected \(3, 4\)"),
    (lambda: SPRING_DYNAMICS.field(Q, P, 0 * M, F), "mass: expected positive masses"),
    (lambda: SPRING_DYNAMICS.field(Q, P, M, F[0]), r"features: expected \(3, 4\) and channels"),
    (lambda: SPRING_DYNAMICS.field(Q, P, M, F, batch=torch.zeros(4).long()), "batch: expected int64"),
    (lambda: SPRING_DYNAMICS.trajectory(Q, P, M, torch.tensor([0.0, 0.0]), F), "times: expected incr"),
    (lambda: SPRING_DYNAMICS.trajectory(Q32, Q32, M32, CLOSE, F), "times: expected incr"),
    (lambda: HamiltonianDynamics(lambda data: data.pos)(Data(pos=Q[0])), "data: expected .* time", TypeError),
    (lambda: HamiltonianDynamics(lambda data: data.pos).field(Q, P, M), "one energy per cloud"),
    (
        lambda: HamiltonianDynamics(lambda data: data.pos.sum().reshape(1)).field(Q, P, M),
        "potential: expected one energy for each of 3 clouds, got 1",
    ),
    (lambda: SPRING_DYNAMICS(Data(pos=Q[0], time=torch.ones(1, 2))), "data: expected momentum or vel", TypeError),
    (
        lambda: SPRING_DYNAMICS(Data(**STATE, time=torch.tensor([[0.0, 1.0], [0.0, 1.001]]))),
        r"data: expected time \[clouds, times\], the same in all clouds",
    ),
)


def test_missing_torchdiffeq_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r'needs the package torchdiffeq: pip install "lieattn\[dynamics\]"'):
        SPRING_DYNAMICS.trajectory(Q, P, M, torch.tensor([0.0, 0.1]), F)


@pytest.mark.parametrize("module", [EnergyForces, HamiltonianDynamics])
@pytest.mark.parametrize(
    ("symmetry", "expected"),
    [
        (Symmetry(Sim(3)), "SE(3)"),
        (Symmetry(RotationDilations(2)), "SO(2)"),
        (Symmetry(SemidirectProduct(Dilations(2))), "R^2"),
        (Symmetry(Dilations(2)), "no group"),
        (Symmetry(SHEARED), "R^2"),
        (Symmetry(SemidirectProduct(Squeeze())), "R^2"),
        (Symmetry(Squeeze()), "no group"),
        (Symmetry(SHEARED, translations=False), "no group"),
        (Symmetry(E(3)), "E(3)"),
        (Symmetry(cyclic(4)), "R^2 x| C4"),
        (Symmetry(None), "no group"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_have_the_symmetry_without_dilations(module, symmetry, expected):
    energy = SpringPotential()
    energy.symmetry = symmetry
    made = module(energy, jumps="allow")
    assert made.symmetry.name == expected
    assert ("dilation" in made.guarantee) == (symmetry.name != expected)
    assert expected in made.guarantee or expected == "no group"


def test_gradients_are_vectors_on_average_without_dilations():
    energy = SpringPotential()
    energy.symmetry = Symmetry(Translations(2), on_average=Sim(2))
    made = EnergyForces(energy, jumps="allow").symmetry
    assert (made.group, made.on_average) == (Translations(2), SE(2))
    assert any("dilation" in note for note in made.notes)


@pytest.mark.parametrize("kind", [DirectionConvNet, FramewiseTransformer])
def test_losses_on_forces_have_the_gradients_of_plain_torch(kind):
    """By the way that the library chooses, by kernels as far as there are any, and by plain torch alone."""
    pos = 1.4 * torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = Data(x=torch.eye(3, dtype=torch.float64).repeat(3, 1), pos=pos, batch=torch.arange(9) // 5)
    options = {"neighborhood": Radius(4.0), "channels": 8, "layers": 1, "pool": "sum"}
    model = randomize(EnergyForces(kind(tetrahedral(), 3, 1, **options)).double()).train()
    found = []
    for way in ("plain", "auto", "numba"):
        with backend(way):
            energy, force = model(data)
            loss = energy.square().mean() + force.square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            found.append([force, *(gradient for gradient in gradients if gradient is not None)])
    for wanted, *ours in zip(*found, strict=True):
        assert all(relative_error(mine, wanted) < 1e-10 for mine in ours)
