"""Compiled and exported networks, and networks under autocast, give the results of plain execution."""

import copy
import os
import shutil
import subprocess
import sys
import warnings
from functools import partialmethod

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import LinearTransformation

from lieattn.cli import main
from lieattn.geometry import AllPairs, PixelSquare, PrincipalFrames, Radius, lift, pixel_positions
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    Captured,
    DirectionConvNet,
    DirectionOptions,
    EnergyForces,
    Ensemble,
    FieldModel,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    HamiltonianDynamics,
    ImageTransformer,
    LieTransformer,
    Lifting,
    Preprocessed,
    Readout,
    Rescaled,
)
from lieattn.models.dynamics import _compiled
from lieattn.nn import FiberPool, GroupSelfAttention, VectorHead, ZonalLinear
from lieattn.nn.relative import RotaryEncoding
from lieattn.ops import RelativeTerms, backend, edge_units, group_attention
from lieattn.testing import randomize
from lieattn.train import load_network, named_outputs
from tests.cases import short_training, some
from tests.test_networks import NETWORKS
from tests.test_train import config, write

compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor needs a C++ compiler: g++ or clang++",
)

# Networks that are exported to ONNX, of each family and with each kind of head.
EXPORTED = (
    "distances framewise framewise_bonds directions directions_bonds gsa_points gsa_images lie_principal lie_logs "
    "lie_conv finite_se2 se3_transformer field_several field_tensor attentive_cnn attentive_densenet affine"
).split()


class Of(torch.nn.Module):
    """A function of tensors, ``function(network, *tensors)``, as a module that contains the network."""

    def __init__(self, net, function):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, *tensors):
        return self.function(self.net, *tensors)


def network():
    """Return a GSA-Net with one block, and a batch of images."""
    net = GSANet(cyclic(2), 1, 3, channels=6, blocks=(1,), heads=2, neighborhood=PixelSquare(3))
    pos, grid = pixel_positions(4, 4), torch.tensor([[4, 4]])
    clouds = [Data(x=torch.randn(len(pos), 1), pos=pos, grid=grid) for _ in range(2)]
    return randomize(net, spread=0.3), Batch.from_data_list(clouds)


def assert_same(found, wanted, tolerance=1e-5):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def outcomes(function, x, parameters):
    """Return the output, and gradients of the parameters that have one."""
    out = function(x)
    grads = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
    return [out, *(torch.zeros(()) if grad is None else grad for grad in grads)]


@pytest.mark.parametrize("back", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, compiler])])
@pytest.mark.parametrize("patterns", some(["joint whole", "framewise", "query_sum"], ["joint whole"]))
def test_operators_are_compiled_with_their_gradients(patterns, back):
    """Operators on some pairs and on all are compiled together, because each file of C++ takes seconds.

    What Inductor assumes about their results is what ``test_registration_with_torch`` compares.
    """
    pos, batch = torch.randn(9, 2), torch.arange(9) // 4
    signals = [torch.randn(9, 3, 2, 4, requires_grad=True) for _ in range(3)]
    near, every = (neighborhood(pos, batch) for neighborhood in (Radius(1.5), AllPairs()))
    terms = RelativeTerms(positional_key=torch.randn(near.num_edges, 3, 1, 4, requires_grad=True))

    def call(query):
        for pattern in patterns.split():
            if pattern == "whole":
                query = group_attention(query * 2, *signals[1:], every, pattern="framewise")[0]
            else:
                query = group_attention(query * 2, *signals[1:], near, pattern=pattern, terms=terms)[0]
        return torch.tanh(query)

    leaves = [*signals, terms.positional_key]
    compiled = torch.compile(call, fullgraph=True, backend=back)
    assert_same(outcomes(compiled, signals[0], leaves), outcomes(call, signals[0], leaves))


@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_statistics_stay_in_single_precision(evaluation, pattern):
    """Signals in half precision give the results of single precision for rounded signals, up to the last rounding."""
    pos = torch.randn(40, 2)
    neighbors = AllPairs()(pos)
    signals = [(5 * torch.randn(40, 3, 2, 4)).bfloat16() for _ in range(3)]
    terms = RelativeTerms(positional_key=torch.randn(neighbors.num_edges, 3, 1, 4))
    options = {"terms": terms, "pattern": pattern}
    with backend(evaluation):
        wide, _ = group_attention(*(signal.float() for signal in signals), neighbors, **options)
        with torch.autocast("cpu", torch.bfloat16):
            half, _ = group_attention(*signals, neighbors, **options)
    assert half.dtype == torch.bfloat16
    assert_same([half], [wide.bfloat16()], 2**-6)


@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_positions_are_not_rounded_under_autocast(evaluation):
    """Far from the origin, positions in half precision would change phases by whole turns."""
    group = cyclic(3)
    layer = GroupSelfAttention(
        group, 4, 6, heads=2, head_channels=4, pattern="framewise", encoding=RotaryEncoding(2, 2, 4)
    )
    x, pos = torch.randn(8, 3, 4), torch.randn(8, 2)
    outs = []
    with backend(evaluation), torch.autocast("cpu", torch.bfloat16):
        for shift in (0.0, 300.0):
            outs.append(layer(x, lift(pos + shift, group, AllPairs())).float())
        graph = lift(pos, group, Radius(2.0))
    assert graph.relative.positions.dtype == torch.float32
    assert_same(*[[out] for out in outs], 0.05)


def traced(name):
    """Return a network as a function of features and vectors, or of images, and its inputs."""
    make, clouds, _ = NETWORKS[name]
    net, data = randomize(make()).eval(), clouds()
    if isinstance(data, torch.Tensor):
        return net, (data.float(),)
    data = Batch.from_data_list(data)
    data.apply(lambda value: value.float() if value.is_floating_point() else value)
    geometry = net.geometry(data)
    keys = ("x", *net.vector_inputs, *(("edge_index", "edge_attr") if "bonds" in name else ()))

    def of_features(net, *given):
        return net(Data(**dict(zip(keys, given, strict=True))), geometry)

    return Of(net, of_features), tuple(data[key] for key in keys)


def of_sizes(clouds, sizes):
    """Return batches of so many clouds. Positions differ, so that displacements do not repeat."""
    for size in sizes:
        batch = Batch.from_data_list((clouds * size)[:size])
        batch.apply(lambda value: value.float() if value.is_floating_point() else value)
        batch.pos = batch.pos * torch.linspace(0.9, 1.1, len(batch.pos))[:, None]
        yield batch


@pytest.mark.parametrize(
    "name",
    some(
        "lie_principal framewise directions distances framewise_principal_vector gsa_points lie_vectors "
        "field_several se3_transformer".split(),
        ["distances"],
    ),
)
def test_networks_compile_for_batches_of_any_size(name):
    """Neighbors are searched outside of the graph. The second graph is for any size, in training and with gradients."""
    make, clouds, _ = NETWORKS[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = randomize(make(), spread=0.2).eval()
    compiled, weights = torch.compile(net, backend="aot_eager"), list(net.parameters())
    for batch in of_sizes(clouds(), (4, 5, 7)):
        both = [tuple(named_outputs(network(batch), "y").values()) for network in (net, compiled)]
        assert_same(both[1], both[0], 1e-4)
        loss = [sum(out.square().sum() for out in outs) for outs in both]
        grads = [torch.autograd.grad(one, weights, allow_unused=True) for one in loss]
        scale = max(float(grad.abs().max()) for grad in grads[0] if grad is not None)
        for found, wanted in zip(*reversed(grads), strict=True):
            assert wanted is None or (found - wanted).abs().max() < 1e-4 * scale
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_clouds_of_equal_size_and_few_edges_need_no_graphs_of_their_own():
    near, given = Radius(9.0), {"channels": 4, "layers": 1, "vector_inputs": ("vel",)}
    net = DirectionConvNet(tetrahedral(), 1, 1, neighborhood=near, **given).eval()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        for sizes in ((5, 7), (6, 6, 6), (1, 3)):
            clouds = [Data(x=torch.ones(n, 1), pos=torch.randn(n, 3), vel=torch.randn(n, 3)) for n in sizes]
            batch = Batch.from_data_list(clouds)
            assert_same([compiled(batch)], [net(batch)], 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@short_training
def test_option_of_fit(tmp_path, monkeypatch, capsys):
    """A compiled network is trained to the same weights, and its checkpoint is that of the network."""
    calls, compile_module = [], torch.nn.Module.compile

    def compile_by_dynamo(module, **options):
        calls.append(type(module))
        compile_module(module, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_dynamo)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    content = config(tmp_path)
    group = content["model"]["init_args"]["network"]["init_args"]["group"]
    arguments = {"frames": group, "in_channels": 1, "out_channels": 2, "channels": 4, "layers": 1}
    network = {"class_path": "lieattn.models.FramewiseTransformer", "init_args": arguments}
    content["model"]["init_args"]["network"] = network
    trained = []
    for chosen in (True, False):
        file = write(tmp_path / "run.yaml", {**content, "compile": chosen})
        assert main(["fit", "--config", file, "--trainer.default_root_dir", str(tmp_path / f"{chosen}")]) == 0
        trained.append(load_network(tmp_path / f"{chosen}/checkpoints/last.ckpt").state_dict())
    assert calls == [FramewiseTransformer]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert trained[0].keys() == trained[1].keys()
    assert_same(trained[0].values(), trained[1].values(), 1e-6)
    both = write(tmp_path / "run.yaml", {**content, "compile": True, "cuda_graphs": True})
    assert main(["fit", "--config", both]) == 2
    assert "compile, cuda_graphs: expected one of them, got both" in capsys.readouterr().err


@pytest.mark.slow
@short_training
def test_fit_compiles_energies_and_forces(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(EnergyForces, "compile", partialmethod(EnergyForces.compile, backend="aot_eager"))
    content = {**config(tmp_path), "last": {}}
    arguments = {"frames": "tetrahedral", "in_channels": 1, "out_channels": 1}
    arguments |= {"channels": 4, "layers": 1, "pool": "sum"}
    model = {"class_path": "lieattn.models.FramewiseTransformer", "init_args": arguments}
    network = {"class_path": "lieattn.models.EnergyForces", "init_args": {"model": model}}
    arguments = {"targets": {"energy": 1.0, "force": 1.0}, "scale_of": {"energy": "force"}, "network": network}
    content["model"] = {"class_path": "lieattn.train.PointSetRegressor", "init_args": arguments}
    springs = {"class_path": "tests.test_regressor.Springs", "init_args": {"size": 4}}
    content["data"] = {"train": springs, "val": springs, "batch_size": 2}
    trained = []
    for compiled in (True, False):
        content["trainer"] = {"default_root_dir": str(tmp_path / f"{compiled}"), "accelerator": "cpu", "max_epochs": 2}
        file = write(tmp_path / "run.yaml", {**content, "compile": compiled})
        assert main(["fit", "--config", file]) == 0
        told = "compile: compiled energies and forces of FramewiseTransformer in"
        assert capsys.readouterr().err.count(told) == compiled
        last = tmp_path / f"{compiled}/checkpoints/last.ckpt"
        assert main(["fit", "--config", file, "--ckpt_path", str(last), "--trainer.max_epochs", "3"]) == 0
        assert capsys.readouterr().err.count(told) == compiled
        trained.append(load_network(last).state_dict())
    assert_same(trained[0].values(), trained[1].values(), 1e-5)


def energies_and_forces(network="directions", stress=False):
    """Return a model for training, and batches of clouds."""
    near, given = Radius(3.0, smooth=True), {"channels": 4, "layers": 1, "pool": "sum"}
    if network == "directions":
        net = DirectionConvNet(tetrahedral(), 2, 1, neighborhood=near, options=DirectionOptions(angles=0), **given)
    else:
        net = FramewiseTransformer(tetrahedral(), 2, 1, heads=1, neighborhood=near, **given)
    batches = []
    for sizes in ((4, 5, 6), (6, 6), (1, 9, 2, 3), (7,), (1, 1)):
        clouds = [Data(x=torch.randn(size, 2), pos=2 * torch.rand(size, 3)) for size in sizes]
        for cloud in clouds if stress else ():
            cloud.cell, cloud.pbc = 4 * torch.eye(3)[None] + 0.1 * torch.randn(1, 3, 3), torch.tensor([[True] * 3])
        batches.append(Batch.from_data_list(clouds))
    return EnergyForces(randomize(net, spread=0.2), stress=stress).train(), batches


def with_gradients(model, data):
    """Return the outputs, and gradients by all weights of a loss on the outputs."""
    found, weights = model(data), list(model.parameters())
    grads = torch.autograd.grad(sum(part.square().sum() for part in found), weights, allow_unused=True)
    return [*found, *(torch.zeros(()) if grad is None else grad for grad in grads)]


@pytest.mark.parametrize("case", some(["directions", "stress", "framewise"], ["directions"]))
def test_energies_and_forces_are_compiled_once_for_batches_of_any_size(case):
    """Single clouds, and those with less than two edges, are computed as usual.

    Attention over whole clouds is another function for clouds of equal size, and for those of one point.
    """
    network, stress = ("framewise" if case == "framewise" else "directions"), case == "stress"
    model, batches = energies_and_forces(network, stress)
    usual = EnergyForces(model.model, stress=stress).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="aot_eager")
    for data in batches:
        found, wanted = with_gradients(model, data), with_gradients(usual, data)
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (3 if case == "framewise" else 1)


@pytest.mark.slow
@compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_energies_and_forces_through_inductor(dtype):
    model, (data, *_) = energies_and_forces()
    data.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
    usual = EnergyForces(model.to(dtype).model).train()
    torch._dynamo.reset()
    model.compile()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compile: ")  # a refusal
        found = with_gradients(model, data)
    assert_same(found, with_gradients(usual, data), {torch.float32: 1e-4, torch.float64: 1e-9}[dtype])


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_compiled_forces_are_compared_with_eager_ones(factor, monkeypatch):
    """Here the compiled function is eager, with forces that are right or not."""
    model, (data, *_) = energies_and_forces()
    usual, calls = EnergyForces(model.model).train(), []

    def compiled(values, geometry, pos):
        calls.append(pos)
        energy, force = usual(Data(**{**values, "pos": pos}))
        return energy, {}, (-factor * force,)

    monkeypatch.setattr(_compiled, "_function", lambda net, options: compiled)
    model.compile(backend="eager")
    if factor == 1:
        model(data)
    else:
        with pytest.warns(UserWarning, match="of DirectionConvNet run uncompiled, because force is wrong: errors of"):
            model(data)
    calls.clear()
    assert_same(model(data), usual(data), 1e-7)
    assert len(calls) == (factor == 1)


def test_several_clouds_are_compiled_after_a_single_one(monkeypatch):
    """Packages for dynamics may begin with one molecule, to estimate the memory of batches."""
    model, (several, _, _, single, _) = energies_and_forces()
    usual, calls = EnergyForces(model.model).train(), []

    def function(net, options):
        def compiled(values, geometry, pos):
            calls.append(len(pos))
            energy, force = usual(Data(**{**values, "pos": pos}))
            return energy, {}, (-force,)

        return compiled

    monkeypatch.setattr(_compiled, "_function", function)
    model.compile(backend="eager")
    for data, used in ((single, True), (single, True), (several, True), (several, True), (single, False)):
        calls.clear()
        assert_same(model(data), usual(data), 1e-7)
        assert bool(calls) == used


@pytest.mark.parametrize(
    ("change", "reason"),
    {
        "frames": "frames or coordinates depend on its points",
        "stages": "the geometry of ImageTransformer cannot be moved with the points",
        "dropout": "compiled dropout draws other numbers",
        "wrapped": "it is no lieattn.models.Network on points, but Rescaled",
        "half": "weights are in torch.bfloat16; keep them in float32",
        "compiler": r"Inductor needs a C\+\+ compiler: install g\+\+ or clang\+\+",
    }.items(),
)
def test_forces_that_cannot_be_compiled_are_computed_as_usual(change, reason, monkeypatch):
    model, (data, *_) = energies_and_forces()
    net = model.model
    if change == "frames":
        options, given = DirectionOptions(random_poses=False), {"channels": 4, "layers": 1, "pool": "sum"}
        net = DirectionConvNet(PrincipalFrames(), 2, 1, neighborhood=Radius(3.0), options=options, **given)
    elif change == "stages":
        net = ImageTransformer(tetrahedral(), 2, 1, neighborhood=Radius(3.0), channels=4, blocks=(1,))
    elif change == "dropout":
        net.blocks[0].dropout.p = 0.5
    elif change == "wrapped":
        net = Rescaled(net, {"energy": 1.0})
    elif change == "half":
        net.bfloat16()
    else:

        def absent():
            raise torch._inductor.exc.InvalidCxxCompiler

        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", absent)
    model = EnergyForces(net, jumps="allow").train()
    torch.manual_seed(0)
    wanted = model(data)
    model.compile(**({"backend": "aot_eager"} if change == "frames" else {}))
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=reason):
        found = model(data)
    assert_same(found, wanted)
    model(data)  # without a second warning


@pytest.mark.slow
@pytest.mark.parametrize("given", ["nothing", "by position", "by name"])
def test_a_geometry_of_none_is_searched_outside_of_the_graph(given):
    """A module around the network may pass on its own default."""
    net, data = small_energies()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    args, options = (None,) if given == "by position" else (), {"geometry": None} if given == "by name" else {}
    assert_same([torch.compile(net, backend="eager")(data, *args, **options)], [net(data)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_geometry_inside_of_a_compiled_module_is_one_break():
    """Traced itself, the search for neighbors made more than twenty graphs of its own."""
    net, data = small_energies()

    around, graphs = Of(net, lambda net, data: 2 * net.field(data, net.geometry(data)).x), []
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(around, backend=lambda graph, _: graphs.append(graph) or graph)(data)
        assert_same([found], [around(data)])
    assert len(graphs) == 1
    for module in (net, around):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"pass geometry=network.geometry\(data\)"):
            torch.compile(module, fullgraph=True, backend="eager")(data)


AROUND = {
    "the network": lambda net: net,
    "ensemble": lambda net: Ensemble([net, Rescaled(randomize(copy.deepcopy(net), 1), {"y": 2.0})]),
    "sums in units": lambda net: Rescaled(net, {"y": 2.0}, {"y": 10.0}, extensive=["y"]),
    "captured": Captured,
    "preprocessed": lambda net: Preprocessed(net, LinearTransformation(2 * torch.eye(3))),
    "field": lambda net: FieldModel(net, VectorHead(8), units={"pos": 2.0}),
}


@pytest.mark.parametrize("name", some(AROUND, ["sums in units", "preprocessed"]))
def test_modules_around_networks_take_the_geometry(name):
    """It is that of the data after a transform, in the units of the module, and may be used first by a compiler."""
    net, cloud = small_energies()
    model, data = AROUND[name](net).eval(), Batch.from_data_list([cloud, Data(x=cloud.x[:4], pos=cloud.pos[:4])])
    alone = Data(x=data.x, pos=data.pos, batch=data.batch)  # whose number of points in each cloud has to be counted
    with torch.no_grad():
        wanted = model(data)
        for given in (data, alone)[: 1 + (name == "sums in units")]:
            geometry = model.geometry(data)
            if name != "preprocessed":
                torch._dynamo.reset()
                assert_same([torch.compile(model, fullgraph=True, backend="eager")(given, geometry)], [wanted])
            assert_same([model(given, geometry)], [wanted])  # nothing from the trace was kept


def test_networks_that_cut_clouds_into_pieces_are_refused():
    options = {"channels": 8, "layers": 1, "heads": 2, "lifting": Lifting(length=1.0, piece=4)}
    net = LieTransformer(2, 1, frames=tetrahedral(), neighborhood=Radius(2.0), **options).eval()
    data = Data(x=torch.randn(9, 2), pos=torch.randn(9, 3))
    geometry = net.geometry(data)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"piece: pieces of 4 points .* and piece=None"):
        torch.compile(net, fullgraph=True, backend="eager")(data, geometry)
    for given in ((data,), (data, geometry)):  # torch went on without compiling, or with many graphs
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=r"^piece: pieces of 4 points .* and piece=None$"):
            torch.compile(net, backend="eager")(*given)

    with pytest.raises(RuntimeError, match=r"piece: pieces of 4 points .* and piece=None"):
        torch.export.export(Of(net, lambda net, x: net(Data(x=x), geometry)), (data.x,), strict=False)


def test_layers_may_be_made_in_a_compiled_function():
    field = torch.randn(5, 4, 3)
    pooled = torch.compile(lambda x: FiberPool("mean")(x), fullgraph=True, backend="eager")(field)
    torch.testing.assert_close(pooled, FiberPool("mean")(field))


@pytest.mark.slow
def test_images_of_affine_networks_compile_without_a_graph_break():
    """The graph of the pixels is created in the first call, here by a network with another, equal group object."""
    images = torch.randn(2, 1, 4, 4)
    torch._dynamo.reset()
    with torch.no_grad(), backend("plain"):
        for net in [AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=2, squeeze_excite=True) for _ in range(2)]:
            wanted = randomize(net).eval()(images)
        assert_same([torch.compile(net, fullgraph=True, backend="eager")(images)], [wanted])
    copied = copy.deepcopy(net)
    assert net.graphs.known.keys() - copied.graphs.known.keys()  # copies and pickles do not include cached graphs
    with backend("plain"):
        assert_same([copied(images)], [wanted])


@pytest.mark.parametrize("name", ["edges", "directions"])
def test_derivatives_are_compiled_once_for_any_size(name):
    """A linear map with a bias of more than two axes made the number of edges or points a constant of the graph."""
    weight, bias, graphs = torch.randn(4, 4, requires_grad=True), torch.randn(4), []
    zonal = ZonalLinear(torch.cat([torch.eye(3), -torch.eye(3)]), 4, 4)
    functions = {
        "edges": lambda x: edge_units(x, x[:, 0], x[:, 0, 0], weight, (weight, bias)),
        "directions": lambda x: zonal(x) * x[:, :1, :1],
    }
    torch._dynamo.reset()

    def gradient(x):
        return torch.func.grad(lambda x: functions[name](x).square().sum())(x)

    compiled = torch.compile(gradient, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(1) or graph)
    with backend("plain"):
        for size in (70, 83, 91):
            x = torch.randn(size, 6, 4)
            assert_same([compiled(x)], [gradient(x)])
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # a warning of dynamo about the code around the derivative
@pytest.mark.parametrize("back", some(["eager", "aot_eager"], ["eager"]))
def test_forces_are_differentiated_uncompiled(back):
    """If parts were compiled, losses on forces had wrong gradients in one of these cases, and an error in the other."""
    net, data = small_energies()
    model, gradients = EnergyForces(net).train(), []
    torch._dynamo.reset()
    with backend("plain"):
        for forces in (model, torch.compile(model, backend=back)):
            net.zero_grad()
            found = forces(data)
            found.force.square().sum().backward()
            weights = (weight.grad for weight in net.parameters() if weight.grad is not None)
            gradients.append([*(part.detach() for part in found), *(weight.clone() for weight in weights)])
    assert_same(gradients[1], gradients[0])


@pytest.mark.parametrize("way", some(["in place", "wrapped", "part"], ["part"]))
def test_forces_of_compiled_networks_are_not_trained(way):
    """Losses on forces had wrong gradients with the backend eager, and failed in the backward pass with others."""
    net, data = small_energies()
    wanted = EnergyForces(net)(data)
    around = Rescaled(net, {"y": 1.0}) if way == "part" else net
    if way == "wrapped":
        around = torch.compile(net, backend="eager")
    else:
        net.compile(backend="eager")
    model = EnergyForces(around)
    advice = "model: expected a network that is not compiled, got a compiled .* eval mode"
    with pytest.raises(RuntimeError, match=advice):
        model.train()(data)
    with torch.no_grad():
        assert_same(model(data), wanted)
    assert_same(model.eval()(data), wanted)


def test_dynamics_of_compiled_potentials_are_not_trained():
    net, data = small_energies()
    state = data.pos, torch.zeros(6, 3), torch.ones(6), data.x
    wanted = HamiltonianDynamics(net).field(*state)
    net.compile(backend="eager")
    with pytest.raises(RuntimeError, match="potential: expected a network that is not compiled"):
        HamiltonianDynamics(net).field(*state)
    with torch.no_grad():
        assert_same(HamiltonianDynamics(net).field(*state), [part.detach() for part in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 4), (5, 1, 4)], ids=["one size", "three sizes"])
@pytest.mark.parametrize("export", [False, True], ids=["compile", "export"])
def test_geometry_of_whole_clouds_is_used_first_by_a_compiler(export, sizes):
    """Lists of whole clouds are created at the first use; those created while compiling are not cached."""
    clouds = [Data(x=torch.randn(size, 2), pos=torch.randn(size, 3)) for size in sizes]
    data, options = Batch.from_data_list(clouds), {"channels": 8, "layers": 1, "heads": 2}
    net = randomize(FramewiseTransformer(tetrahedral(), 2, 1, **options)).eval().requires_grad_(False)
    geometry = net.geometry(data)

    torch._dynamo.reset()
    with backend("plain"):
        if export:
            module = Of(net, lambda net, x: net(Data(x=x), geometry))
            found = torch.export.export(module, (data.x,), strict=False).module()(data.x)
        else:
            found = torch.compile(net, fullgraph=True, backend="eager")(data, geometry)
        assert_same([found, net(data, geometry)], 2 * [net(data)])


@pytest.mark.parametrize("name", some(EXPORTED, ["distances"]))
def test_models_export_to_onnx(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, inputs = traced(name)
    with torch.no_grad(), backend("plain"):
        wanted = module(*inputs)
        exported = torch.export.export(module, inputs, strict=False)
        assert_same([exported.module()(*inputs)], [wanted])
        torch.onnx.export(exported, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    found = session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)})
    assert_same([torch.tensor(part) for part in found], named_outputs(wanted, "y").values(), 1e-4)


def test_traces_that_keep_neighbors_are_refused():
    net, batch = network()
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace would use the geometry .* use torch\.export"):
        torch.jit.trace(lambda x: net(Data(x=x, pos=batch.pos, batch=batch.batch, grid=batch.grid)), batch.x)


@pytest.mark.parametrize("moving", [True, False])
def test_exports_that_search_for_neighbors_are_refused(moving):
    net, batch = network()

    def searching(net, x, pos):
        return net(Data(x=x, pos=pos if moving else batch.pos, batch=batch.batch, grid=batch.grid))

    with pytest.raises(RuntimeError, match=r"torch\.export cannot include .* export network\(data, geometry\)"):
        torch.export.export(Of(net, searching), (batch.x, batch.pos), strict=False)


def small_energies():
    """Return a network whose energies do not jump, and a cloud."""
    options = {"channels": 8, "layers": 1, "heads": 2, "readout": Readout(pool="sum")}
    net = LieTransformer(2, 1, frames=tetrahedral(), neighborhood=Radius(2.0, smooth=True), **options)
    return randomize(net).eval(), Data(x=torch.randn(6, 2), pos=torch.randn(6, 3))


def energy_force_and_stress():
    """Return an exported program of energy, forces and stress at fixed neighbors, its inputs, and expected outputs."""
    near, local = Radius(2.0, smooth=True), FramewiseOptions(attention="neighborhood")
    options = {"channels": 8, "layers": 1, "heads": 2, "neighborhood": near, "pool": "sum", "options": local}
    net = randomize(FramewiseTransformer(tetrahedral(), 2, 1, **options)).eval().requires_grad_(False)
    cell = torch.tensor([[[2.0, 0, 0], [0.5, 2.2, 0], [0, -0.4, 2.1]]])
    data = Data(x=torch.randn(4, 2), pos=2 * torch.rand(4, 3), cell=cell, pbc=torch.ones(1, 3, dtype=torch.bool))
    geometry = net.geometry(data)
    lattice = torch.linalg.inv(cell)

    def total(net, x, pos, deformation):
        return net(Data(x=x), geometry.at(pos, deformation)).sum()

    with backend("plain"):
        energy = torch.export.export(Of(net, total), (data.x, data.pos, torch.eye(3)[None]), strict=False).module()

        def all_three(x, pos, cell):
            strain = torch.zeros(1, 3, 3).requires_grad_()
            pos, deformation = pos.detach().requires_grad_(), torch.eye(3) + (strain + strain.mT) / 2
            value = energy(x, pos @ deformation[0], lattice @ cell @ deformation)
            by_pos, by_strain = torch.autograd.grad(value, (pos, strain))
            volume = torch.linalg.cross(cell[:, 0], cell[:, 1]).mul(cell[:, 2]).sum().abs()
            return value.detach(), -by_pos, by_strain / volume

        graph = torch.fx.experimental.proxy_tensor.make_fx(all_three)(data.x, data.pos, cell)
        program = torch.export.export(graph, (data.x, data.pos, cell))
    data.pos, data.cell = data.pos + 1e-3 * torch.randn(4, 3), cell + 1e-3 * torch.randn(1, 3, 3)
    with backend("plain"):
        found = EnergyForces(net, stress=True)(data)
    return program, (data.x, data.pos, data.cell), (found.energy[0], found.force, found.stress)


def test_energies_forces_and_stresses_are_exported_with_positions_and_cells():
    program, inputs, wanted = energy_force_and_stress()
    assert wanted[2].abs().max() > 1e-4
    assert_same(program.module()(*inputs), wanted)


def test_lie_transformers_are_exported_with_positions_and_cells():
    """Their layers do not need the periodic images, which depend on values, so export does not look for them."""
    near = Radius(2.0, smooth=True)
    net = LieTransformer(2, 1, frames=tetrahedral(), neighborhood=near, channels=8, layers=1, heads=2).double()
    net = randomize(net).eval().requires_grad_(False)
    cell = torch.tensor([[[2.0, 0, 0], [0.5, 2.2, 0], [0, -0.4, 2.1]]]).double()
    data = Data(x=torch.randn(4, 2), pos=2 * torch.rand(4, 3).double(), cell=cell, pbc=torch.ones(1, 3).bool())
    geometry = net.geometry(data)

    def moved(net, pos, deformation):
        return net(Data(x=data.x), geometry.at(pos, deformation))

    deformation = torch.eye(3).double() + 1e-3 * torch.randn(1, 3, 3).double()
    with backend("plain"):
        program = torch.export.export(Of(net, moved), (data.pos, torch.eye(3)[None].double()), strict=False).module()
    data.pos, data.cell, before = data.pos @ deformation[0], cell @ deformation, net(data)
    assert_same([program(data.pos, deformation)], [net(data)], tolerance=1e-12)
    assert (net(data) - before).abs().max() > 1e-6


@pytest.mark.slow
@compiler
def test_an_exported_energy_runs_without_the_library(tmp_path):
    program, inputs, wanted = energy_force_and_stress()
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "energy.pt2"))
    torch.save((inputs, wanted), tmp_path / "case.pt")
    code = """
import sys, torch
inputs, wanted = torch.load("case.pt")
program = torch._inductor.aoti_load_package("energy.pt2")
found = program(*inputs)
for ours, theirs in zip(found, wanted):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
for wrong in (torch.cat([inputs[0], inputs[0]]), inputs[0].double()):
    try:
        program(wrong, *inputs[1:])
        sys.exit("other inputs than at export are accepted")
    except RuntimeError as error:
        print(error)
sys.exit("lieattn" in sys.modules)
"""
    checking = {**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=checking)
