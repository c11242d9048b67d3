"""Continuity: outputs and forces do not jump when a pair crosses a smooth radius, and networks report jumps."""

import math
from functools import cache

import pytest
import torch
from torch_geometric.data import Batch, Data

import lieattn
from lieattn.certify import certify
from lieattn.certify._rows import paths
from lieattn.geometry import AllPairs, FiniteFrames, Given, Nearest, PrincipalFrames, Radius, SampledFrames, lift
from lieattn.groups import SE, Translations, cyclic, cyclic_about, octahedral, tetrahedral, trivial
from lieattn.models import (
    AttentionOptions,
    ConvolutionOptions,
    EnergyForces,
    Ensemble,
    FieldModel,
    FiniteSE2Transformer,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    HamiltonianDynamics,
    ImageOptions,
    ImageTransformer,
    LieConvNet,
    LieTransformer,
    Lifting,
    Readout,
    Rescaled,
    Symmetry,
)
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.nn import GroupAttention, Heads, InvariantHead, VectorHead
from lieattn.spaces import Euclidean
from lieattn.testing import randomize
from lieattn.train import PointSetClassifier, PointSetRegressor, UsageError, build
from tests.cases import each
from tests.lifted_cases import LIFTED
from tests.lifted_cases import RADIUS as LIFTED_RADIUS
from tests.test_equivariance import LAYERS, call, clouds_of, fits, prepared

RADIUS = 1.5
SMOOTH = Radius(RADIUS, smooth=True)
SMALL = {"channels": 8, "layers": 2}
PLANE = {"space": Euclidean(SE(2)), "frames": SampledFrames(2, seed=0)}


def _lie(neighborhood, **options):
    return LieTransformer(2, 1, neighborhood=neighborhood, **SMALL, heads=2, **options)


MODELS = {
    "GSANet, T": lambda n: GSANet(tetrahedral(), 2, 1, neighborhood=n, channels=8, heads=2),
    "GSANet, principal": lambda n: GSANet(PrincipalFrames(), 2, 1, neighborhood=n, channels=8, heads=2),
    "LieTransformer, T": lambda n: _lie(n, frames=tetrahedral()),
    "LieTransformer, principal": lambda n: _lie(n, frames=PrincipalFrames()),
    "LieTransformer, sampled": lambda n: _lie(n, frames=SampledFrames(2, seed=0)),
    "LieTransformer, mean": lambda n: _lie(n, frames=tetrahedral(), attention=AttentionOptions(normalize="mean")),
    "LieTransformer, exp-mean": lambda n: _lie(
        n, frames=tetrahedral(), attention=AttentionOptions(normalize="exp-mean")
    ),
    "LieTransformer, combined": lambda n: _lie(n, frames=tetrahedral(), attention=AttentionOptions(kernel="combined")),
    "LieTransformer, radial": lambda n: _lie(n, frames=tetrahedral(), lifting=Lifting(radial=4)),
    "LieTransformer, no local": lambda n: _lie(n, frames=tetrahedral(), lifting=Lifting(local=0)),
    "LieTransformer, SE(2)": lambda n: _lie(n, **PLANE),
    "LieTransformer, translations": lambda n: _lie(n, space=Euclidean(Translations(3))),
    "LieConvNet": lambda n: LieConvNet(
        2, 1, frames=tetrahedral(), neighborhood=n, **SMALL, convolution=ConvolutionOptions(norm="layer")
    ),
    "LieConvNet, attentive": lambda n: LieConvNet(
        2,
        1,
        frames=tetrahedral(),
        neighborhood=n,
        **SMALL,
        convolution=ConvolutionOptions(norm="none", attention=AttentionOptions(), heads=2),
    ),
    "FiniteSE2Transformer": lambda n: FiniteSE2Transformer(4, 1, **SMALL, neighborhood=n),
    "FramewiseTransformer": lambda n: FramewiseTransformer(tetrahedral(), 2, 1, **SMALL, neighborhood=n),
    "FramewiseTransformer, neighborhoods": lambda n: FramewiseTransformer(
        tetrahedral(), 2, 1, **SMALL, neighborhood=n, options=FramewiseOptions(attention="neighborhood")
    ),
    "DistanceTransformer": lambda n: DistanceTransformer(2, 1, **SMALL, neighborhood=n),
    "TensorFieldNetwork": lambda n: TensorFieldNetwork(2, 1, channels=4, layers=1, neighborhood=n),
    "SE3Transformer": lambda n: SE3Transformer(2, 1, channels=4, layers=1, neighborhood=n),
}
"""Models with a neighborhood ``n``, one output for each cloud."""
WINDOWED = {"FramewiseTransformer", "DistanceTransformer", "TensorFieldNetwork", "SE3Transformer"}
"""Those with windows of their own, for any radius."""


def crossing(dim, others, gap, seed=0):
    """Return a cloud whose points 0 and 1 are at distance RADIUS + gap; ``others`` are additional points."""
    generator = torch.Generator().manual_seed(seed)
    pos = torch.randn(2 + others, dim, generator=generator, dtype=torch.float64)
    along = torch.nn.functional.normalize(torch.randn(dim, generator=generator, dtype=torch.float64), dim=0)
    pos[1] = pos[0] + (RADIUS + gap) * along
    x = torch.randn(2 + others, 2, generator=generator, dtype=torch.float64)
    return Data(pos=pos, x=x)


def energy_and_force(network, *clouds, **options):
    return EnergyForces(network, **options).eval()(Batch.from_data_list(clouds))


def dimension(name):
    return 2 if "SE2" in name or "SE(2)" in name else 3


@pytest.mark.parametrize("name", MODELS)
def test_energies_and_forces_do_not_jump_at_the_radius(name):
    """At the radius, and at the end of neighbor lists, a relative 1e-5 above it, with 0, 1 and 5 further points."""
    numbers = (1, 5) if "principal" in name else (0, 1, 5)  # two points do not determine axes
    network = randomize(MODELS[name](Radius(RADIUS)).double()).eval()
    options = {"jumps": "allow"} if "principal" in name else {}
    cases = [(others, gap) for others in numbers for gap in (0.0, 1e-5 * RADIUS)]
    (low, before), (high, behind) = (
        energy_and_force(network, *(crossing(dimension(name), others, gap + step) for others, gap in cases), **options)
        for step in (-1e-9, 1e-9)
    )
    assert torch.isfinite(before).all()
    sizes = [2 + others for others, _ in cases]
    for cloud in zip(low, high, before.split(sizes), behind.split(sizes), strict=True):
        slope = max(1.0, float(cloud[2].abs().max()))
        torch.testing.assert_close(cloud[1], cloud[0], rtol=0, atol=1e-8 * slope)
        torch.testing.assert_close(cloud[3], cloud[2], rtol=0, atol=1e-5 * slope)
    assert network.neighborhood == (Radius(RADIUS) if name in WINDOWED else SMOOTH)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - WINDOWED))
def test_without_an_envelope_they_do(name):
    network, sharp = randomize(MODELS[name](Radius(RADIUS)).double()).eval(), Radius(RADIUS, smooth=False)
    with torch.no_grad():
        inside, outside = (network(Batch.from_data_list([crossing(dimension(name), 5, g)])) for g in (-1e-9, 3e-5))
    assert float((inside - outside).abs().max()) > 1e-3
    for found in (network, MODELS[name](sharp)):
        assert any("smooth=True" in jump for jump in found.jumps)
    with pytest.raises(ValueError, match=r"model: .*smooth=True"):
        EnergyForces(found)
    assert found.neighborhood == sharp
    assert EnergyForces(found, jumps="allow").model.neighborhood == sharp


SMOOTH_CASES = [name for name in LIFTED if name.endswith("smooth")]


@cache
def crossed(case):
    """Return pairs of graphs of a case before and after two points cross the radius, and the end of neighbor lists."""
    pos, batch, _ = clouds_of(case, torch.float64)
    pair = (batch == batch[0]).nonzero()[:2, 0]
    along = torch.nn.functional.normalize(pos[pair[1]] - pos[pair[0]], dim=0)
    pairs = []
    for gap in (0.0, 1e-5 * LIFTED_RADIUS):
        found = []
        for step in (-1e-9, 1e-9):
            moved = pos.clone()
            moved[pair[1]] = pos[pair[0]] + (LIFTED_RADIUS + gap + step) * along
            found.append(case.lift(moved, batch))
        pairs.append(found)
    return pairs


@pytest.mark.parametrize("kind", SMOOTH_CASES)
@each("name", lambda kind: [name for name in LAYERS if fits(name, LIFTED[kind])])
def test_layers_do_not_jump_at_the_radius(name, kind):
    case = LIFTED[kind]
    layer, x, *_ = prepared(name, case, torch.float64)
    for graphs in crossed(case):
        before, behind = (call(name, layer, x, graph) for graph in graphs)
        torch.testing.assert_close(behind, before, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("normalize", ["softmax", "mean", "exp-mean"])
def test_weights_are_those_of_the_outputs(normalize):
    """For the mean, the values of smooth neighbors are multiplied by their weights besides."""
    layer, x = GroupAttention(3, 3, normalize=normalize).double(), torch.randn(6, 1, 3, dtype=torch.float64)
    graph = lift(torch.randn(6, 2, dtype=torch.float64), trivial(2), SMOOTH)
    out, weights = layer.attend(x, graph, return_weights=True)
    square = (graph.neighbors.displacements(graph.pos) / RADIUS).square().sum(dim=1, keepdim=True)
    faded = torch.exp(-square / (1 - square)) if normalize == "mean" else 1.0
    messages = faded * weights[:, 0, 0] * layer.value(x)[graph.neighbors.source, 0]
    torch.testing.assert_close(out[:, 0], layer.output(graph.neighbors.sum_to_targets(messages)))


def test_windows_are_those_of_the_lists():
    pos = torch.tensor([[0.0], [0.75], [1.5], [9.0]], dtype=torch.float64)
    half = math.exp(-1 / 3)  # for neighbors at half the radius
    assert lift(pos, None, SMOOTH).degree.tolist() == pytest.approx([1 + half, 1 + 2 * half, 1 + half, 1.0])
    assert lift(pos, None, Radius(RADIUS)).degree.tolist() == [3.0, 3.0, 3.0, 1.0]


def test_a_smooth_radius_grows_and_needs_the_point_itself():
    assert SMOOTH.scaled(2.0) == Radius(3.0, smooth=True)
    with pytest.raises(ValueError, match="include_self"):
        Radius(1.0, include_self=False, smooth=True)
    with pytest.raises(TypeError, match="smooth"):
        Radius(1.0, smooth=1)


JUMPING = {
    "smooth=True": lambda: _lie(Radius(RADIUS, smooth=False), frames=tetrahedral()),
    "include_self=False": lambda: _lie(Radius(RADIUS, include_self=False), frames=tetrahedral()),
    "nearest": lambda: _lie(Nearest(4), frames=tetrahedral()),
    "principal": lambda: _lie(SMOOTH, frames=PrincipalFrames()),
    "half turns": lambda: _lie(
        SMOOTH, space=Euclidean(SE(3)), frames=SampledFrames(2, seed=0), lifting=Lifting(coordinates="log")
    ),
    "subsampling": lambda: LieConvNet(
        2, 1, frames=tetrahedral(), neighborhood=SMOOTH, **SMALL, convolution=ConvolutionOptions(downsampling=0.5)
    ),
    "cutoff": lambda: FramewiseTransformer(
        tetrahedral(), 2, 1, **SMALL, neighborhood=Radius(1.0), options=FramewiseOptions(cutoff=2.0)
    ),
    "principal axes": lambda: FramewiseTransformer(
        FiniteFrames(octahedral(), PrincipalFrames()), 2, 1, **SMALL, neighborhood=Radius(1.0)
    ),
    "poolings": lambda: ImageTransformer(tetrahedral(), 2, 1, channels=4, blocks=(1, 1), heads=1, neighborhood=SMOOTH),
    "nearest points": lambda: ImageTransformer(
        tetrahedral(),
        2,
        1,
        channels=4,
        blocks=(1,),
        heads=1,
        neighborhood=SMOOTH,
        options=ImageOptions(window=Nearest(4)),
    ),
}


@pytest.mark.parametrize("word", JUMPING)
def test_energies_that_jump_are_refused(word):
    network = JUMPING[word]()
    assert any(word in jump for jump in network.jumps)
    with pytest.raises(ValueError, match=f"model: .*{word}"):
        EnergyForces(network)
    with pytest.raises(ValueError, match=word):
        HamiltonianDynamics(network)
    kinks = [jump for jump in EnergyForces(network, jumps="allow").jumps if jump not in network.jumps]
    assert len(kinks) == network.has_kinks
    HamiltonianDynamics(network, jumps="allow")


@pytest.mark.parametrize("neighborhood", [SMOOTH, AllPairs(), Given(torch.tensor([[0, 1], [1, 0]]))], ids=str)
def test_continuous_energies_are_accepted(neighborhood):
    network = _lie(neighborhood, frames=tetrahedral())
    assert network.jumps == ()
    EnergyForces(network)


class Doubled(torch.nn.Module):
    """A module without statements about jumps, around a module with them."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, data):
        return 2 * self.network(data)


WRAPPED = {
    "alone": lambda network: network,
    "module": Doubled,
    "rescaled": lambda network: Rescaled(network, {"energy": 2.0}),
    "field model": lambda network: FieldModel(network, InvariantHead(8, 1)),
}


@pytest.mark.parametrize("make", [EnergyForces, HamiltonianDynamics])
@pytest.mark.parametrize("around", WRAPPED)
def test_an_open_radius_becomes_smooth_wherever_it_is(around, make):
    network = _lie(Radius(RADIUS), frames=tetrahedral())
    wrapped = WRAPPED[around](network)
    model = make(wrapped)
    assert model.jumps == ()
    part = next(part for part in model.modules() if isinstance(part, LieTransformer))
    assert part.neighborhood == SMOOTH
    # Heads are added to a copy, and the network itself does not change.
    assert network.neighborhood == (Radius(RADIUS) if around == "field model" else SMOOTH)
    sharp = WRAPPED[around](_lie(Radius(RADIUS, smooth=False), frames=tetrahedral()))
    with pytest.raises(ValueError, match="smooth=True"):
        make(sharp)


def test_what_is_refused_stays_open():
    network = _lie(Radius(RADIUS), frames=PrincipalFrames())
    with pytest.raises(ValueError, match="principal axes"):
        EnergyForces(network)
    assert network.neighborhood == Radius(RADIUS)
    assert EnergyForces(network, jumps="allow").model.neighborhood == SMOOTH


def test_weights_decide_what_was_left_open(tmp_path):
    def made():
        return _lie(Radius(RADIUS), frames=tetrahedral())

    sharp, smooth = made(), EnergyForces(made())
    assert sharp.tied_to()["neighborhood"].endswith("smooth=False)")
    for network, wanted in ((sharp, False), (smooth.model, True)):
        lieattn.save(network, tmp_path / "network")
        filled = made()
        filled.load_state_dict(network.state_dict())
        for again in (filled, lieattn.load(tmp_path / "network")):
            assert again.neighborhood == Radius(RADIUS, smooth=wanted)
            cloud = Batch.from_data_list([crossing(3, 5, -0.1)])
            assert torch.equal(again(cloud), network(cloud))
    # Weights trained without an envelope do not load into a network with one.
    again = made()
    again.load_state_dict(sharp.state_dict())
    with pytest.raises(ValueError, match=r"model: .*smooth=False"):
        EnergyForces(again)
    with pytest.raises(RuntimeError, match=r"smooth=False.*smooth=True"):
        EnergyForces(made()).load_state_dict(EnergyForces(again, jumps="allow").state_dict())
    lieattn.save(smooth, tmp_path / "energies")
    assert lieattn.load(tmp_path / "energies").model.neighborhood == SMOOTH


def test_weights_for_another_radius_are_refused_by_neighborhoods_without_the_point():
    """These cannot be smooth."""
    sharp, other = (_lie(Radius(radius, include_self=False), frames=tetrahedral()) for radius in (RADIUS, 2.0))
    with pytest.raises(RuntimeError, match=r"Radius\(radius=2.0"):
        sharp.load_state_dict(other.state_dict())


def test_configuration_files_leave_it_open():
    lie = {"in_channels": 2, "neighborhood": {"class_path": "lieattn.geometry.Radius", "init_args": {"radius": 1.5}}}
    lie |= {"frames": {"class_path": "lieattn.groups.tetrahedral"}, "channels": 4, "layers": 1, "heads": 1}
    network = {"class_path": "lieattn.models.LieTransformer", "init_args": lie}
    energies = {"class_path": "lieattn.models.EnergyForces", "init_args": {"model": network}}
    assert build(torch.nn.Module, network, "it").neighborhood == Radius(RADIUS)
    assert build(torch.nn.Module, energies, "it").model.neighborhood == SMOOTH
    lie["neighborhood"]["init_args"]["smooth"] = False
    with pytest.raises(UsageError, match="smooth=True"):
        build(torch.nn.Module, energies, "it")


def test_what_is_trained_by_itself_stays_sharp():
    task = PointSetClassifier(_lie(Radius(RADIUS), frames=tetrahedral()), classes=2)
    task.on_fit_start()
    assert task.network.neighborhood == Radius(RADIUS, smooth=False)
    task = PointSetRegressor(EnergyForces(_lie(Radius(RADIUS), frames=tetrahedral())))
    task.measured.fill_(True)
    task.on_fit_start()
    assert task.network.model.neighborhood == SMOOTH


def test_field_models_jump_where_their_network_does():
    network = GSANet(cyclic(4), 2, 1, neighborhood=Radius(1.0), channels=8, heads=2)
    assert FieldModel(network, VectorHead(8, 2)).jumps == network.jumps != ()
    with pytest.raises(ValueError, match="jumps: "):
        EnergyForces(network, jumps="maybe")


HEADS = {
    "maximum": InvariantHead(8, 1, pool="max"),
    "relu": InvariantHead(8, 1, activation="relu"),
    "leaky relu": VectorHead(8, activation="leaky_relu"),
    "several": Heads({"smooth": VectorHead(8), "charge": InvariantHead(8, 1, activation="relu")}),
}
RELU, LEAKY = AttentionOptions(activation="relu"), AttentionOptions(activation="leaky_relu")
PARTS = [
    (LieTransformer, {"readout": Readout(activation="relu")}),
    (LieTransformer, {"attention": LEAKY}),
    (LieConvNet, {"readout": Readout(activation="leaky_relu")}),
    (LieConvNet, {"readout": Readout(pool="max")}),
    (LieConvNet, {"convolution": ConvolutionOptions(activation="relu")}),
    (LieConvNet, {"convolution": ConvolutionOptions(attention=RELU, heads=1)}),
    *((network, {"pool": "max"}) for network in (TensorFieldNetwork, SE3Transformer, DistanceTransformer)),
]


@pytest.mark.parametrize("name", HEADS)
def test_kinks_of_heads_are_known(name):
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=8, layers=1)
    assert not FieldModel(network, InvariantHead(8, 1)).has_kinks
    assert FieldModel(network, HEADS[name]).has_kinks
    assert network.with_head(HEADS[name]).has_kinks
    assert not network.has_kinks


@pytest.mark.parametrize(("network", "part"), PARTS)
def test_kinks_of_activations_and_maxima_are_known(network, part):
    """Activations of a network stay with another head."""
    options = {"frames": tetrahedral()} if network in (LieTransformer, LieConvNet) else {}
    options |= {"neighborhood": SMOOTH, "channels": 8, "layers": 1}
    assert not network(1, 1, **options).has_kinks
    found = network(1, 1, **part, **options)
    assert found.has_kinks
    assert not part.keys() & {"attention", "convolution"} or found.with_head(VectorHead(8)).has_kinks


def test_forces_may_jump_at_kinks_of_a_head():
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=8, layers=1)
    heads = Heads({"energy": InvariantHead(8, 1, pool="max"), "gap": InvariantHead(8, 1)})
    model = randomize(EnergyForces(FieldModel(network, heads))).double()
    assert model.jumps == ("the energy has kinks, from maxima or relu, where forces jump",)
    assert EnergyForces(FieldModel(network, InvariantHead(8, 1))).jumps == ()
    cloud = Data(x=torch.ones(6, 1), pos=torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    rows = certify(model, cloud, elements=1, rotations=0, dtypes=[torch.float64]).rows
    rows = [row for row in rows if row.output == "force" and row.check == "continuity"]
    assert rows
    assert all(row.passed is None for row in rows)


class Tall(torch.nn.Module):
    """Energy of a cloud with a step of 1 for each pair at distance 1 and a kink at distance 2, both optional.

    The second output is minus the energy, so that the sum of both hides steps and kinks.
    """

    symmetry = SE(3)

    def __init__(self, step, kink):
        super().__init__()
        self.step, self.kink = step, kink
        self.jumps, self.has_kinks = (), False

    def forward(self, data):
        near = AllPairs(include_self=False)(data.pos.detach(), data.batch)
        distance = near.displacements(data.pos).square().sum(dim=1).add(1e-6).sqrt()
        energy = torch.exp(-distance) + self.step * (distance < 1) + self.kink * (distance - 2).abs()
        total = torch.zeros(data.num_graphs, dtype=energy.dtype).index_add(0, data.batch[near.target], energy)
        return torch.stack([total, -total], dim=1)


@pytest.mark.parametrize("dim", [2, 3])
def test_paths_cross_the_cloud_and_exchange_its_second_moments(dim):
    generator = torch.Generator().manual_seed(0)
    cloud = Data(pos=torch.randn(7, dim, generator=generator, dtype=torch.float64))
    crossing, stretched = paths(cloud, dim, generator)
    start, end = (one.pos - cloud.pos.mean(dim=0) for one in crossing.at(torch.tensor([0.0, 1.0])))
    (point,) = (start != end).any(dim=1).nonzero()[:, 0]
    torch.testing.assert_close(end[point].norm(), 2 * start.norm(dim=1).max())
    assert end[point] @ start[point] < 0
    first, last = (one.pos - one.pos.mean(dim=0) for one in stretched.at(torch.tensor([0.0, 1.0])))
    values, axes = torch.linalg.eigh(first.mT @ first)
    along = (last @ axes).square().sum(dim=0)
    torch.testing.assert_close(along[-1], values[-1])
    torch.testing.assert_close(along[-2], 1.5**2 * values[-1])  # the smaller one is now larger by far
    torch.testing.assert_close(along[:-2], values[:-2])


def test_clouds_without_extent_have_no_paths():
    """Nor can points on a line be stretched until two moments are equal."""
    generator, line = torch.Generator().manual_seed(0), torch.linspace(0, 1, 4)[:, None].expand(-1, 3)
    assert [len(list(paths(Data(pos=pos), 3, generator))) for pos in (line[:1], 0 * line + 1, line)] == [0, 0, 1]


@pytest.mark.parametrize(("step", "kink"), [(0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3)])
def test_certificates_find_jumps_and_kinks(step, kink):
    cloud = Data(pos=torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    certificate = certify(Tall(step, kink), cloud, elements=1)
    failed = {row.check for row in certificate.rows if row.passed is False}
    assert failed == ({"continuity"} if step else {"first derivative"} if kink else set())
    # A step counts once for each end of a pair. A kink changes the slope by twice its size times the speed.
    jumps = certificate.worst("continuity")["float64"], certificate.worst("first derivative")["float64"]
    assert jumps[0] == pytest.approx(2 * step, abs=1e-6)
    assert (jumps[1] > 1e-3) == bool(kink)


class Silent(torch.nn.Module):
    """Energy with a kink where a distance is 1. It is invariant and says so, but says nothing about continuity."""

    symmetry = SE(3)
    guarantee = "energies depend on distances alone"

    def forward(self, data):
        energy = [(torch.pdist(pos) - 1).relu().square().sum() for pos in data.pos.split(data.ptr.diff().tolist())]
        return torch.stack(energy) + data.pos.sum() * 0


AROUND = {
    "units": lambda: Rescaled(Silent(), {"energy": 2.0}),
    "forces": lambda: EnergyForces(Silent()),
    "both": lambda: Rescaled(EnergyForces(Silent()), {"energy": 2.0, "force": 2.0}),
    "ensemble": lambda: Ensemble([Silent(), Silent()]),
}


@pytest.mark.parametrize("around", AROUND)
def test_modules_around_a_network_promise_what_it_promises(around):
    model = AROUND[around]()
    assert (model.symmetry.group, model.guarantee) == (SE(3), Silent.guarantee)
    assert model.guarantee in str(model)
    assert model.jumps is None
    cloud = Data(pos=torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    certificate = certify(model, cloud, elements=1)
    assert (certificate.guarantee, certificate.group, certificate.verdict) == (Silent.guarantee, "SE(3)", "kept")
    unknown = [row.passed for row in certificate.rows if row.check in ("continuity", "first derivative")]
    assert unknown
    assert set(unknown) == {None}


def test_modules_around_a_network_know_what_it_says_about_jumps_and_inputs():
    model = Tall(0.0, 0.0)
    assert EnergyForces(model).jumps == ()
    model.has_kinks, model.vector_inputs, model.sees_order = True, ("vel",), True
    for around in (Rescaled(model, {"energy": 2.0}), Ensemble([model, Tall(0.0, 0.0)])):
        assert around.jumps == ()
        assert (around.has_kinks, around.vector_inputs, around.sees_order) == (True, ("vel",), True)
    assert "kinks" in EnergyForces(model).jumps[0]
    model.jumps = ("steps",)
    with pytest.raises(ValueError, match="steps"):
        EnergyForces(model)
    del model.jumps
    assert Ensemble([model, Tall(0.0, 0.0)]).jumps is None


def test_an_ensemble_has_one_group():
    """The sentence of a user may be the same for different groups."""
    networks = [Silent(), Silent()]
    networks[1].symmetry = tetrahedral()
    with pytest.raises(ValueError, match=r"networks: .*SE\(3\)"):
        Ensemble(networks)


@pytest.mark.parametrize("stated", [tetrahedral(), SE(3), None, "cubic"], ids=str)
def test_symmetries_that_networks_state(stated):
    network = torch.nn.Linear(1, 1)
    network.symmetry = stated
    assert Symmetry.stated_by(network).group == (None if isinstance(stated, str) else stated)
    assert Rescaled(network, {"y": 1.0}).symmetry == Symmetry.stated_by(network)


@pytest.mark.parametrize("smooth", [True, False])
def test_certificates_of_models_measure_their_jumps(smooth):
    options = {"frames": cyclic_about(2), "channels": 4, "layers": 1, "heads": 1}
    network = randomize(LieTransformer(2, 1, neighborhood=Radius(RADIUS, smooth=smooth), **options))
    cloud = Data(pos=torch.randn(6, 3), x=torch.randn(6, 2))
    certificate = certify(network, cloud, elements=1, rotations=0, dtypes=[torch.float64])
    assert certificate.passed
    judged = {row.passed for row in certificate.rows if row.check in ("continuity", "first derivative")}
    assert judged == ({True} if smooth else {None})
    assert (certificate.worst("continuity")["float64"] > 1e-4) != smooth


def test_certificates_see_principal_axes_turn_over():
    network = randomize(_lie(SMOOTH, frames=PrincipalFrames()))
    few = {"elements": 1, "rotations": 0, "dtypes": [torch.float64]}
    certificate = certify(network, Data(pos=torch.randn(6, 3), x=torch.randn(6, 2)), **few)
    assert certificate.worst("continuity")["float64"] > 1e-4
    assert certificate.passed  # it does not guarantee otherwise
