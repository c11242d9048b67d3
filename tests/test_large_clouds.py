"""Large clouds: recomputed activations, pieces of a cloud with halos, halo exchange between machines."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn._core.contexts import recomputed
from lieattn.cli import main
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Nearest,
    PrincipalFrames,
    Radius,
    SampledFrames,
    ScaleFrames,
    lift,
    pieces,
    pixel_positions,
    point_clouds,
)
from lieattn.groups import cyclic, cyclic_about, tetrahedral, trivial
from lieattn.models import (
    AffineSelfConvNet,
    AttentionOptions,
    AttentiveResNet,
    DirectionConvNet,
    EnergyForces,
    FieldModel,
    FiniteSE2Transformer,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
    Lifting,
    Readout,
)
from lieattn.models.lie import _networks
from lieattn.nn import LieBlock, LieSelfAttention, PointBatchNorm, VectorHead
from lieattn.ops import backend
from lieattn.testing import randomize
from tests.cases import of_edges, refuses, short_training
from tests.test_train import config, write


def clouds(points: int, dim: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Data:
    generator = torch.Generator().manual_seed(seed)
    pos = torch.rand(points, dim, generator=generator, dtype=dtype)
    return Data(pos=pos, x=torch.randn(points, 2, generator=generator, dtype=dtype))


def images(dim: int = 2) -> Tensor:
    return torch.randn(2, 1, *[8] * dim, dtype=torch.float64)


def small_lie(**options) -> LieTransformer:
    preset = {"frames": FiniteFrames(cyclic_about(4)), "neighborhood": Radius(0.35), "channels": 8, "layers": 2}
    return LieTransformer(2, 3, **{**preset, "heads": 2, **options})


NETWORKS = {
    "framewise": lambda: FramewiseTransformer(tetrahedral(), 2, 3, channels=8, layers=2, neighborhood=Radius(0.4)),
    "gsa": lambda: GSANet(tetrahedral(), 2, 3, neighborhood=Radius(0.4), channels=8, heads=2),
    "lie": small_lie,
    "finite se2": lambda: FiniteSE2Transformer(4, 3, channels=8, layers=3, heads=2),
    "directions": lambda: DirectionConvNet(tetrahedral(), 2, 3, channels=8, layers=3, neighborhood=Radius(0.4)),
    "lie conv": lambda: LieConvNet(2, 3, frames=PrincipalFrames(), neighborhood=Radius(0.5), channels=8, layers=2),
    "field": lambda: FieldModel(
        FramewiseTransformer(tetrahedral(), 2, 1, channels=8, layers=2), VectorHead(8), start={"pos": 1.0}
    ),
    "affine": lambda: AffineSelfConvNet(cyclic(4), 1, 3, blocks=1, channels=4),
    "attentive": lambda: AttentiveResNet(cyclic(4), 1, 3, blocks=1, channels=(2, 2, 2)),
}


def gradients(network: torch.nn.Module, data) -> tuple[Tensor, dict[str, Tensor]]:
    network.zero_grad()
    torch.manual_seed(1)
    out = network(data)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {name: weight.grad.clone() for name, weight in network.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_without_checkpointing(name):
    """Gradients are the same in training mode, including running statistics and random numbers."""
    network = randomize(NETWORKS[name]()).double().train()
    data = images() if name in ("affine", "attentive") else clouds(30, 2 if name == "finite se2" else 3)
    other = copy.deepcopy(network).checkpoint_activations()
    kept: list[int] = []
    expected, out = gradients(network, data), gradients(other, data)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for buffer, again in zip(network.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(again, buffer, rtol=0, atol=0)
    for model in (network, other):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            model(data)
        kept.append(sum(x.numel() for x in saved))
    assert kept[1] < 0.7 * kept[0]


def test_checkpointing_can_be_switched_and_reaches_the_network_inside():
    network = NETWORKS["field"]()
    assert not network.recomputes
    assert network.checkpoint_activations() is network
    assert network.recomputes
    assert network.network.recomputes
    assert not network.checkpoint_activations(False).network.recomputes
    with pytest.raises(TypeError, match="enabled"):
        network.checkpoint_activations("yes")


class Watched(FramewiseTransformer):
    """Records how its activations are kept."""

    seen: ClassVar[list[bool]] = []

    def forward(self, data, geometry=None):
        if self.training:
            self.seen.append(self.recomputes)
        return super().forward(data, geometry)


@short_training
def test_configuration_has_activations_computed_again(tmp_path, capsys):
    content = config(tmp_path)
    own = content["model"]["init_args"]["network"]
    arguments = {"frames": own["init_args"]["group"], "in_channels": 1, "out_channels": 2, "channels": 4, "layers": 1}
    watched = {"class_path": f"{__name__}.Watched", "init_args": arguments}
    for network, chosen, seen in ((watched, True, {True}), (own, True, set())):
        Watched.seen.clear()
        content["model"]["init_args"]["network"] = network
        path = write(tmp_path / "run.yaml", {**content, "checkpoint_activations": chosen})
        status = main(["fit", "--config", path, "--trainer.fast_dev_run", "true", "--trainer.callbacks", "null"])
        told = capsys.readouterr().err
        assert status == (0 if seen else 2), told
        assert set(Watched.seen) == seen
    assert "checkpoint_activations: expected a lieattn.models.Network, got ToyNetwork" in told


@pytest.mark.parametrize("name", ["plain", "auto"])
def test_activations_are_computed_again_by_the_backend_of_the_forward_pass(name):
    network, data, found = randomize(NETWORKS["lie"]()).double(), clouds(20), []
    for enabled in (False, True):
        with backend(name):
            energy = network.checkpoint_activations(enabled)(data).sum()
        with backend("plain" if name == "auto" else "auto"):
            network.zero_grad()
            energy.backward()
        found.append([weight.grad.clone() for weight in network.blocks.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


SMOOTH = {"neighborhood": Radius(0.6, smooth=True), "channels": 8, "layers": 2}
ENERGIES = {
    "lie": lambda: LieTransformer(2, 1, frames=tetrahedral(), heads=2, readout=Readout(pool="sum"), **SMOOTH),
    "lie conv": lambda: LieConvNet(2, 1, frames=tetrahedral(), readout=Readout(pool="sum"), **SMOOTH),
    "framewise": lambda: FramewiseTransformer(
        tetrahedral(), 2, 1, pool="sum", options=FramewiseOptions(attention="neighborhood"), **SMOOTH
    ),
    "directions": lambda: DirectionConvNet(tetrahedral(), 2, 1, pool="sum", **SMOOTH),
}


@pytest.mark.parametrize("name", ENERGIES)
def test_forces_of_neighbors_that_fade(name):
    """Windows, rows and coordinates that relative elements cache in a block are recomputed with the block."""
    model, data, found = EnergyForces(randomize(ENERGIES[name]()).double()), clouds(20), []
    for enabled in (False, True):
        network = copy.deepcopy(model)  # a copy with its own running statistics
        network.model.checkpoint_activations(enabled)
        energy, force = network(data)
        (energy.sum() + force.square().sum()).backward()
        weights = [weight.grad.clone() for weight in network.parameters() if weight.grad is not None]
        with torch.no_grad():
            evaluated = network.eval()(data).force
        found.append((energy.detach(), force.detach(), evaluated, weights))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_parts_of_parts_update_running_statistics_once():
    """The outer part is computed again with the inner one, whose output it needs."""
    norms = [PointBatchNorm(2) for _ in range(3)]
    for depth, norm in enumerate(norms):
        part = norm
        for _ in range(depth):
            part = partial(recomputed, lambda x, inner=part: inner(x).sin())
        part(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()).square().sum().backward()
        assert torch.equal(norm.running_mean, norms[0].running_mean)


def test_half_precision_is_refused_where_activations_are_computed_again():
    network = NETWORKS["lie"]().bfloat16().checkpoint_activations()
    for refused in (network, small_lie(lifting=Lifting(piece=5)).bfloat16()):
        with pytest.raises(RuntimeError, match="bfloat16: keep the weights in float32 and use autocast"):
            refused(clouds(10))
    with torch.no_grad():
        assert network(clouds(10)).dtype == torch.bfloat16


GRAPHS = {
    "finite": lambda: lift(clouds(60).pos, cyclic_about(4), Nearest(6)),
    "principal": lambda: lift(clouds(60).pos, PrincipalFrames(of="neighborhood"), Radius(0.4)),
    "posed": lambda: lift(clouds(60).pos, FiniteFrames(tetrahedral(), PrincipalFrames()), Radius(0.4)),
    "sampled": lambda: lift(clouds(60).pos, SampledFrames(2), Radius(0.4)),
    "smooth": lambda: lift(clouds(60).pos, trivial(3), Radius(0.4, smooth=True)),
    "batch": lambda: lift(
        point_clouds(Batch.from_data_list([clouds(n, seed=n) for n in (1, 30, 7, 22)])), cyclic_about(4), Radius(0.4)
    ),
    "periodic": lambda: lift(
        point_clouds(clouds(60).pos, cell=torch.eye(3, dtype=torch.float64)), cyclic_about(4), Radius(0.3)
    ),
}


OF_GRAPHS = [*product(GRAPHS, (13, torch.arange(60) % 3 * 2)), ("finite", 1), ("periodic", 1), ("batch", 1000)]


@pytest.mark.parametrize(("name", "parts"), OF_GRAPHS)
def test_pieces_give_the_rows_of_the_whole(name, parts):
    graph = GRAPHS[name]()
    layer = LieSelfAttention(4, graph.relative.num_coordinates, heads=2)
    block = randomize(LieBlock(layer, 4)).double()
    x = torch.randn(graph.num_points, graph.fiber, 4, dtype=torch.float64)
    whole = block(x, graph)
    found = torch.full_like(whole, torch.nan)
    for piece in pieces(graph, parts):
        assert isinstance(parts, Tensor) or 0 < len(piece.own) <= parts
        assert (piece.points.diff() > 0).all()
        own = piece.points[piece.own]
        assert found[own].isnan().all()
        found[own] = block(x[piece.points], piece.graph)[piece.own]
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["given coordinates", "one scale"])
def test_edges_of_pieces_keep_their_coordinates_and_measure(kind):
    pos = pixel_positions(4, 4, dtype=torch.float64)
    if kind == "one scale":
        graph = lift(pos, ScaleFrames(cyclic(4), levels=1), Radius(1.5), weights=torch.rand(16) + 0.5)
    else:
        graph = lift(pos, cyclic(4), Radius(1.5))
        graph = graph.with_relative(graph.relative.bounded())

    for piece in pieces(graph, 5):
        edges = torch.isin(graph.neighbors.target, piece.points[piece.own])
        torch.testing.assert_close(of_edges(piece.graph), of_edges(graph)[edges])
        if kind == "one scale":
            assert torch.equal(piece.graph.log_measure, graph.log_measure[edges])


def test_sizes_and_clouds_of_pieces():
    """Different clouds are separated first, most pieces have the given size, and parts can be given and be empty."""
    batch = torch.arange(40) % 2
    graph = lift(100 * clouds(40).pos, trivial(3), Radius(40.0), batch=batch)
    assert [set(batch[piece.points].tolist()) for piece in pieces(graph, 20)] == [{0}, {1}]
    graph = lift(clouds(50).pos, trivial(3), Radius(0.4))
    assert [len(piece.own) for piece in pieces(graph, 20)] == [20, 20, 10]
    graph, parts = GRAPHS["finite"](), torch.arange(60) % 3 * 2
    found = pieces(graph, parts)
    assert [len(piece.own) for piece in found] == [20, 0, 20, 0, 20]
    for number, piece in enumerate(found):
        assert (parts[piece.points[piece.own]] == number).all()
        assert piece.graph.neighbors.num_edges == sum(graph.neighbors.degree[parts == number])


BATCH = AttentionOptions(norm="batch_pre")


test_pieces_that_cannot_be_are_refused = refuses(
    (lambda: pieces(GRAPHS["finite"](), 0), "parts: expected an integer of at least 1"),
    (lambda: pieces(GRAPHS["finite"](), 1.5), "parts"),
    (lambda: pieces(GRAPHS["finite"](), torch.zeros(3, dtype=torch.int64)), "parts: .* each of 60 points"),
    (lambda: pieces(GRAPHS["finite"](), torch.zeros(0, dtype=torch.int64)), "parts: .* 60 points, .* got 0"),
    (lambda: pieces(GRAPHS["finite"](), torch.full((60,), -1)), "parts: expected .* from -1"),
    (lambda: pieces(GRAPHS["finite"](), torch.zeros(60)), "parts: expected an int64 tensor"),
    (lambda: pieces(lift(clouds(9).pos, ScaleFrames(trivial(3)), Radius(0.4)), 4), "graph: .* 3 scales"),
    (lambda: Lifting(piece=0), "piece: expected an integer of at least 1, got 0"),
    (lambda: small_lie(lifting=Lifting(piece=9), attention=BATCH), "piece: norm="),
    (
        lambda: LieConvNet(2, neighborhood=AllPairs(), frames=PrincipalFrames(), lifting=Lifting(piece=9)),
        "piece: expected None, since LieConvNet evaluates all points at once",
    ),
    error=(TypeError, ValueError),
)


OPTIONS = {
    "default": {},
    "principal": {"frames": PrincipalFrames(of="neighborhood"), "lifting": Lifting(bound=True)},
    "radial": {"lifting": Lifting(radial=4, neighbor_dropout=0.5)},
    "vectors": {"vector_inputs": ("vel",), "readout": Readout(kind="vector", pool="none")},
    "post": {"attention": AttentionOptions(norm="layer_post", normalize="mean"), "lifting": Lifting(local=0)},
    # Points of a halo have no neighbors, so the weights of their neighbors add up to 0.
    "smooth": {"attention": AttentionOptions(normalize="mean"), "neighborhood": Radius(0.35, smooth=True)},
}


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_networks_in_pieces_have_outputs_and_gradients_of_the_whole(name):
    options = OPTIONS[name]
    lifting = options.get("lifting", Lifting())
    network = randomize(small_lie(**options)).double().train()
    piecewise = copy.deepcopy(network)
    piecewise.lifting = Lifting(**{**vars(lifting), "piece": 17})
    data = clouds(50)
    data.vel = torch.randn(50, 3, dtype=torch.float64)
    torch.testing.assert_close(gradients(piecewise, data), gradients(network, data), rtol=1e-10, atol=1e-10)


def test_relative_elements_of_pieces_are_not_kept(monkeypatch):
    made = []
    monkeypatch.setattr(_networks, "pieces", lambda *given: made.extend(pieces(*given)) or made)
    network = small_lie(lifting=Lifting(piece=10))
    graph = network.geometry(clouds(50, dtype=torch.float32))
    network(clouds(50, dtype=torch.float32), graph).sum().backward()
    assert len(made) > 2
    for relative in (graph.relative, *(piece.graph.relative for piece in made)):
        assert relative._coordinates is None
        assert relative._positions is None
