"""Vector and tensor outputs of networks on groups, input vectors of LieTransformer, and several labels per cloud."""

import copy

import pytest
import torch
from torch_geometric.data import Batch, Data

import lieattn
from lieattn.certify import certify
from lieattn.geometry import AllPairs, PrincipalFrames, Radius
from lieattn.groups import SE, tetrahedral
from lieattn.models import (
    EnergyForces,
    FieldModel,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    HamiltonianDynamics,
    LieTransformer,
    Readout,
    Rescaled,
    transfer_weights,
)
from lieattn.nn import DipoleHead, FieldHead, Heads, InvariantHead, PolarizabilityHead, RotationHead, VectorHead
from lieattn.reps import Pseudovector, Vector
from lieattn.spaces import Euclidean
from lieattn.testing import randomize
from lieattn.train import PointSetClassifier, PointSetRegressor
from lieattn_datasets import TransformFields
from tests.cases import refuses

SHIFT = [0.3, -1.0, 2.0]


def clouds(sizes=(5, 7), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return [Data(x=draw(size, 3), pos=draw(size, 3), vel=draw(size, 3), wind=draw(size, 3)) for size in sizes]


def moved(items, matrix):
    transform = TransformFields(matrix, SHIFT, vectors=("vel", "wind"))
    return Batch.from_data_list([transform(item) for item in items])


def lie_transformer(group, frames, **options):
    options = {"channels": 8, "layers": 2, "heads": 2, "vector_inputs": ("vel", "wind"), **options}
    return LieTransformer(3, 2, space=Euclidean(group), frames=frames, neighborhood=AllPairs(), **options)


def framewise(frames=None):
    frames = tetrahedral() if frames is None else frames
    return FramewiseTransformer(frames, 3, 2, channels=8, layers=2, vector_inputs=("vel", "wind"))


def test_start_and_units():
    plain = randomize(FieldModel(framewise(), VectorHead(8)), seed=3).double()
    scaled = FieldModel(framewise(), VectorHead(8), start={"vel": 2.0}, units={"wind": 4.0}, unit=3.0).double()
    scaled.load_state_dict(dict(plain.state_dict()))
    data = clouds((6,))[0]
    weak = data.clone()
    weak.wind = data.wind / 4
    torch.testing.assert_close(scaled(data), 2 * data.vel + 3 * plain(weak))
    assert torch.equal(data.wind, weak.wind * 4)


def test_cells_have_the_unit_of_the_positions():
    options = FramewiseOptions(attention="neighborhood")
    network = FramewiseTransformer(tetrahedral(), 3, 1, channels=8, layers=1, neighborhood=Radius(1.0), options=options)
    plain = randomize(FieldModel(network, InvariantHead(8, 1)), seed=3).double()
    scaled, unscaled = (
        FieldModel(network, plain.head, units=units) for units in ({"pos": 2.0}, {"pos": 2.0, "cell": 1})
    )
    small = Data(x=clouds((6,))[0].x, pos=torch.rand(6, 3).double(), cell=torch.eye(3).double()[None])
    large = Data(x=small.x, pos=2 * small.pos, cell=2 * small.cell)
    torch.testing.assert_close(scaled(large), plain(small))
    torch.testing.assert_close(unscaled(large), plain(Data(x=small.x, pos=small.pos, cell=large.cell)))
    assert torch.equal(large.cell, 2 * small.cell)


def test_the_network_stays_as_it_is():
    network, data = framewise(), clouds((6,), torch.float32)[0]
    before = network(data)
    model = FieldModel(network, VectorHead(8))
    torch.testing.assert_close(network(data), before, atol=0, rtol=0)
    assert "head.0.weight" in network.state_dict()
    assert not any(name.startswith("network.head") for name in model.state_dict())
    assert model.network.blocks is network.blocks


def test_what_a_network_promises_is_passed_on():
    model = FieldModel(framewise(), VectorHead(8), start={"pos": 1.0, "force": 0.5})
    assert model.symmetry == framewise().symmetry
    assert model.guarantee == framewise().guarantee
    assert model.kind == "position"
    assert FieldModel(framewise(), PolarizabilityHead(8)).kind == "tensor"
    assert model.vector_inputs == ("vel", "wind", "force")
    invariant = FieldModel(framewise(), InvariantHead(8, 1), start={"charge": 2.0})
    assert invariant.vector_inputs == ("vel", "wind")
    for head, factor in ((VectorHead(8), 0.5), (InvariantHead(8, 1), 1.0)):
        with pytest.raises(
            ValueError, match=r"start: expected the factor 1 for pos, and none .*, got \S+ for (vector|invariant)"
        ):
            FieldModel(framewise(), head, start={"pos": factor, "vel": 1.0})
    absolute = GSANet(
        tetrahedral(), 1, 1, neighborhood=AllPairs(), channels=8, options=GSAOptions(positions="absolute", values=False)
    )
    assert FieldModel(absolute, VectorHead(8), start={"pos": 0.5}).kind == "vector"  # without translations


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"network: expected a lieattn\.models\.Network, got Linear"):
        FieldModel(torch.nn.Linear(1, 1), VectorHead(8))
    for name, value in (("units", {"wind": 0.0}), ("unit", -1.0)):
        with pytest.raises(ValueError, match=f"{name}: expected positive numbers"):
            FieldModel(framewise(), VectorHead(8), **{name: value})
    data = clouds((6,))[0]
    for start, message in (("force", r"data.force: expected a tensor"), ("x1", r"data.x1: expected \(6, 3\)")):
        data.x1 = data.x[:, :1]
        with pytest.raises(ValueError, match=message):
            FieldModel(framewise(), VectorHead(8), start={start: 1.0}).double()(data)
    del data.vel
    with pytest.raises(ValueError, match=r"data\.vel: expected a field of type Vector\(3\)"):
        lie_transformer(SE(3), PrincipalFrames()).double()(data)


def test_without_vectors_no_weights():
    model = lie_transformer(SE(3), PrincipalFrames(), vector_inputs=())
    assert not any("vectors" in name for name, _ in model.named_parameters())


class Logits(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(1, width)

    def forward(self, batch):
        return self.linear(batch.pos.new_ones(batch.num_graphs, 1))


def test_several_labels():
    items = [
        Data(pos=torch.zeros(2, 2), y=torch.tensor([[0, 2]])),
        Data(pos=torch.zeros(2, 2), y=torch.tensor([[1, 1]])),
    ]
    batch = Batch.from_data_list(items)
    task = PointSetClassifier(Logits(6), 3, labels=2)
    logs = {}
    task.log = lambda name, value, **_: logs.update({name: value})
    with torch.no_grad():
        task.network.linear.weight.zero_()
        task.network.linear.bias.copy_(torch.tensor([9.0, 0, 0, 0, 9.0, 0]))  # predicts (0, 1): correct in 2 of 4 cases
    assert task(batch).shape == (2, 2, 3)
    loss = task.evaluate(batch, "val")
    right, wrong = torch.log_softmax(torch.tensor([9.0, 0, 0]), 0)[[0, 1]]
    torch.testing.assert_close(loss, -(right + wrong) / 2)
    assert float(logs["val/accuracy"].compute()) == 0.5
    assert {name: tuple(part.shape) for name, part in task.predict_step(batch, 0).items()} == {
        "label_0": (2, 3),
        "label_1": (2, 3),
    }
    with pytest.raises(ValueError, match=r"expected logits \[2, 9\] for 2 clouds and 3 labels of 3 classes"):
        PointSetClassifier(Logits(6), 3, labels=3)(batch)
    with pytest.raises(ValueError, match=r"expected 3 labels y per cloud, \[2, 3\], got \[2, 2\]"):
        PointSetClassifier(Logits(9), 3, labels=3).evaluate(batch, "val")
    with pytest.raises(ValueError, match="labels: expected at least 1"):
        PointSetClassifier(Logits(6), 3, labels=0)


def test_several_outputs_are_no_logits():
    task = PointSetClassifier(FieldModel(framewise(), Heads(properties())), 3)
    with pytest.raises(TypeError, match="network: output: expected a tensor, got dict"):
        task(Batch.from_data_list(clouds(dtype=torch.float32)))


def properties(**more):
    """Return heads for an energy, a dipole and charges."""
    return {
        "energy": InvariantHead(8, 1, pool="sum"),
        "dipole": DipoleHead(8),
        "charge": InvariantHead(8, 1, pool="none"),
        **more,
    }


def periodic(items):
    for item in items:
        item.cell, item.pbc = 4 * torch.eye(3)[None].to(item.pos), torch.ones(1, 3, dtype=torch.bool)
    return items


def test_several_heads_give_the_outputs_of_each():
    heads, network, data = properties(), framewise(), Batch.from_data_list(clouds())
    model = randomize(FieldModel(network, Heads(heads))).double().eval()
    found = model(data)
    assert list(found) == list(heads) == list(model.kind)
    assert model.kind == {"energy": "invariant", "dipole": "vector", "charge": "invariant"}
    for name, head in heads.items():
        assert torch.equal(found[name], FieldModel(model.network, head)(data))
    assert network.with_head(Heads(heads))(data).keys() == found.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_outputs_have_the_dtype_of_the_weights(dtype):
    heads, data = properties(tensor=PolarizabilityHead(8)), clouds(dtype=torch.float32)[0]
    model = randomize(FieldModel(framewise(), Heads(heads))).to(dtype).eval()
    for name, output in model(data).items():
        assert output.dtype == dtype
        assert torch.equal(output, FieldModel(model.network, heads[name])(data))


@pytest.mark.parametrize("stress", [False, True])
def test_energies_forces_and_other_outputs(stress):
    near = FramewiseOptions(attention="neighborhood")
    network = FramewiseTransformer(tetrahedral(), 3, 1, channels=8, layers=1, neighborhood=Radius(3.0), options=near)
    items = periodic(clouds()) if stress else clouds()
    heads, data = properties(), Batch.from_data_list(items)
    model = randomize(EnergyForces(FieldModel(network, Heads(heads)), stress=stress)).double().train()
    single = EnergyForces(FieldModel(model.model.network, heads["energy"]), stress=stress)
    found, derivatives = model(data), single(data)._asdict()
    assert found.keys() == derivatives.keys() | heads.keys() == model.kind.keys()
    assert model.kind["dipole"] == model.kind["force"] == "vector"
    for name, value in derivatives.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    sum(value.square().sum() for value in found.values()).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    for evaluated in (model.eval()(data), model(data, create_graph=False)):
        for name, value in evaluated.items():
            assert not value.requires_grad
            torch.testing.assert_close(value, found[name].detach(), rtol=0, atol=1e-14)


def test_dynamics_use_the_energy_among_several_outputs():
    heads, data = properties(), clouds()[0]
    network = randomize(FieldModel(framewise(), Heads(heads)), spread=0.3).double()
    fixed = {"features": data.x, "attributes": {"vel": data.vel, "wind": data.wind}}
    mass = torch.ones(len(data.pos), dtype=torch.float64)
    several, single = (
        HamiltonianDynamics(potential).field(data.pos, data.vel, mass, **fixed)
        for potential in (network, FieldModel(network.network, heads["energy"]))
    )
    torch.testing.assert_close(several, single, rtol=0, atol=1e-12)
    assert several[1].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "expected one energy per cloud, .*, got NoneType"),
        (("energy", 1), "expected one energy per cloud, .*, got tuple"),
        ({"energy": 3.0}, "expected .*, got float"),
    ],
    ids=str,
)
def test_energies_are_tensors(outputs, message):
    data = clouds()[0]
    with pytest.raises(TypeError, match=f"model: {message}"):
        EnergyForces(lambda data: outputs)(data)
    with pytest.raises(TypeError, match=f"potential: {message}"):
        HamiltonianDynamics(lambda data: outputs).field(data.pos, data.vel, torch.ones(len(data.pos)))


def test_other_outputs_within_torch_func():
    model = randomize(EnergyForces(FieldModel(framewise(), Heads(properties())))).double().train()
    data = clouds()[0]
    pos, along = data.pos, torch.randn_like(data.pos)

    def outputs(pos):
        moved = data.clone()
        moved.pos = pos
        return model(moved)

    found = torch.func.jvp(outputs, (pos,), (along,))[1]
    step = 1e-5
    before, after = outputs(pos - step * along), outputs(pos + step * along)
    for name, value in found.items():
        slope = (after[name] - before[name]) / (2 * step)
        torch.testing.assert_close(value, slope, rtol=1e-5, atol=1e-6 * float(slope.detach().abs().max()))


def test_units_of_several_outputs(tmp_path):
    """Each output has its own unit; those of energies and forces are the same."""
    items = clouds(dtype=torch.float32)
    for item in items:
        item.energy, item.dipole = item.pos.square().sum()[None], 30 * item.vel.sum(dim=0, keepdim=True)
        item.force, item.charge = -2 * item.pos, item.x[:, 0]
    model = EnergyForces(FieldModel(framewise(), Heads(properties())))
    targets = {"energy": 1.0, "force": 1.0, "dipole": 1.0, "charge": 1.0}
    task = PointSetRegressor(model, targets, scale_of={"energy": "force"})
    task.measure(items)
    task.log = lambda *arguments, **options: None
    batch = Batch.from_data_list(items)
    task.training_step(batch, 0).backward()
    assert all(weight.grad.isfinite().all() for weight in task.parameters())
    lieattn.save(task.eval().model, tmp_path / "model.safetensors")
    loaded = lieattn.load(tmp_path / "model.safetensors").eval()
    assert isinstance(loaded, Rescaled)
    predicted, known = loaded(batch), task.model(batch)
    assert predicted.keys() == known.keys() == targets.keys()
    for name, value in known.items():
        torch.testing.assert_close(predicted[name], value)
    assert float(task.scale_dipole) > 5 * float(task.scale_energy)


def test_a_task_for_some_of_the_outputs_is_certified():
    items = clouds(dtype=torch.float32)
    for item in items:
        item.dipole, item.charge = item.vel.sum(dim=0, keepdim=True), item.x[:, 0]
    model = randomize(EnergyForces(FieldModel(framewise(), Heads(properties()))))
    task = PointSetRegressor(model, {"dipole": 1.0, "charge": 1.0})
    task.measure(items)
    assert task.model.kind == {"dipole": "vector", "charge": "invariant"}
    certificate = certify(task.model, items, elements=1, rotations=0, continuity=False)
    assert certificate.passed
    assert {row.output for row in certificate.rows} == {"dipole", "charge"}


test_bad_heads = refuses(
    (lambda: Heads({}), "heads: expected at least one name with its head, got none"),
    (lambda: Heads({"a.b": VectorHead(8)}), "heads: expected names of outputs such as 'energy', .* got 'a.b'"),
    (lambda: Heads({"values": VectorHead(8)}), "heads: expected names of outputs .* got 'values'"),
    (lambda: Heads({"training": VectorHead(8)}), "heads: expected names .* got 'training'"),
    (lambda: Heads({1: VectorHead(8)}), "heads: expected names .* got 1"),
    (lambda: Heads({"all": Heads(properties())}), "heads: expected one output .*, got several for 'all'"),
    (
        lambda: Heads(dict.fromkeys(("energy", "y"), InvariantHead(8, 1))),
        "heads: expected a head of its own for 'y', got that of 'energy'",
    ),
    (lambda: FieldModel(framewise(), Heads(properties()), unit=2.0), "start, unit: expected none for several outputs"),
)


def lie(**readout):
    return lie_transformer(SE(3), PrincipalFrames(), readout=Readout(**readout))


def model_of(head):
    return FieldModel(framewise(), head)


@pytest.mark.parametrize(
    ("source", "network", "fault"),
    [
        (lambda: lie(pool="sum"), lie, "pool: the weights are for sum, the module has mean"),
        (
            lambda: model_of(FieldHead(8, Vector(3))),
            lambda: model_of(FieldHead(8, Pseudovector(), pool="sum")),
            r"kind: the weights are for Vector\(3\), the module has Pseudovector; .*\n.*for none, the module has sum",
        ),
        (
            lambda: model_of(Heads(properties())),
            lambda: model_of(Heads(properties(energy=InvariantHead(8, 1, pool="max")))),
            "pool: the weights are for charge=none, energy=sum, the module has charge=none, energy=max",
        ),
        (
            lambda: model_of(Heads({"pose": RotationHead(8)})),
            lambda: model_of(Heads({"pose": PolarizabilityHead(8)})),
            "kind: the weights are for pose=rotation, the module has pose=tensor",
        ),
    ],
    ids=["lie", "field", "heads", "pose"],
)
def test_weights_of_other_outputs_are_refused(source, network, fault):
    weights, model = randomize(source()).state_dict(), network()
    with pytest.raises(RuntimeError, match=fault):
        copy.deepcopy(model).load_state_dict(weights)
    for name in ("kind", "pool"):  # weights of earlier versions do not have them
        weights._metadata[""]["geometry"].pop(name, None)
    model.load_state_dict(weights)


@pytest.mark.parametrize(
    "make", [lie, lambda **readout: Rescaled(lie(**readout), {"y": 2.0})], ids=["alone", "rescaled"]
)
def test_weights_of_other_outputs_are_a_start(make):
    source, network = randomize(make(pool="sum", order="point_first")), make(pool="none", order="point_first")
    assert transfer_weights(network, source) == ()
    assert torch.equal(network.state_dict().popitem()[1], source.state_dict().popitem()[1])


def test_weights_for_energies_are_weights_for_stresses():
    first, second = (framewise().with_head(InvariantHead(8, 1)) for _ in range(2))
    EnergyForces(first, stress=True).load_state_dict(EnergyForces(second).state_dict())


def test_heads_are_modules():
    with pytest.raises(TypeError, match=r"heads\['energy'\]: expected a Module, got function"):
        Heads({"energy": lambda x, graph: x})
