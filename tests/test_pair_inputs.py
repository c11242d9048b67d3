"""Features of pairs of points, such as types of bonds, as inputs of networks."""

import copy
import itertools
import json

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.geometry import FiniteFrames, Given, PrincipalFrames, Radius, lift
from lieattn.groups import icosahedral, octahedral, tetrahedral
from lieattn.models import DirectionConvNet, DirectionOptions, EnergyForces, FramewiseOptions, FramewiseTransformer
from lieattn.models.frames._network import with_pair_features
from lieattn.testing import assert_conforms, randomize
from lieattn.train import random_clouds
from lieattn.train._checkpoint import describe_input

CHANNELS, NEAR = 3, Radius(3.0, smooth=True)
T, PRINCIPAL = tetrahedral(), PrincipalFrames()


def framewise(frames=T, neighborhood=NEAR, edge_channels=CHANNELS, kind="invariant", **options):
    options = FramewiseOptions(edge_channels=edge_channels, **options)
    arguments = {"channels": 4, "layers": 2, "neighborhood": neighborhood, "kind": kind, "options": options}
    return randomize(FramewiseTransformer(frames, 2, 1, **arguments)).double().eval()


def directions(frames=T, neighborhood=NEAR, edge_channels=CHANNELS, kind="invariant", **options):
    options = DirectionOptions(edge_channels=edge_channels, **options)
    arguments = {"channels": 4, "layers": 2, "neighborhood": neighborhood, "kind": kind, "options": options}
    return randomize(DirectionConvNet(frames, 2, 1, **arguments)).double().eval()


NETWORKS = {
    "framewise T": framewise,
    "framewise O": lambda **options: framewise(octahedral(), **options),
    "framewise axes": lambda **options: framewise(PRINCIPAL, **options),
    "framewise angles": lambda **options: framewise(angles=2, **options),
    "framewise neighborhood": lambda **options: framewise(attention="neighborhood", **options),
    "framewise none": lambda **options: framewise(FiniteFrames(T, PRINCIPAL), attention="none", **options),
    "directions T": directions,
    "directions I": lambda **options: directions(icosahedral(), **options),
    "directions axes": lambda **options: directions(PRINCIPAL, **options),
    "directions without angles": lambda **options: directions(angles=0, **options),
}


def molecule(points, seed=0):
    """A cloud in which most pairs of neighbors have features, in both directions different ones."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [pair for pair in itertools.product(range(points), repeat=2) if sum(pair) % 3 and pair[0] != pair[1]]
    order = torch.randperm(len(pairs), generator=generator)
    index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)[order].T.contiguous()
    pos, x = (torch.randn(points, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    attr = torch.randn(index.shape[1], CHANNELS, generator=generator, dtype=torch.float64)
    return Data(x=x, pos=pos, edge_index=index, edge_attr=attr)


def test_features_belong_to_edges_from_the_first_to_the_second_point():
    data = molecule(6)
    graph = lift(data.pos, T, NEAR)
    found = with_pair_features(None, data, CHANNELS, graph)
    given = dict(zip(map(tuple, data.edge_index.T.tolist()), data.edge_attr.tolist(), strict=True))
    edges = map(tuple, graph.neighbors.edge_index.T.tolist())
    assert found.tolist() == [given.get(edge, [0.0] * CHANNELS) for edge in edges]


@pytest.mark.parametrize("name", NETWORKS)
def test_features_of_pairs_are_seen_and_keep_the_symmetry(name):
    network, data = NETWORKS[name](), molecule(6)
    other = data.clone()
    other.edge_attr = data.edge_attr.flip(0)
    assert (network(other) - network(data)).abs().max() > 1e-6
    assert not assert_conforms(network, [data, molecule(5)], ["equivariance", "order"])


@pytest.mark.parametrize("name", NETWORKS)
def test_zeros_are_the_same_as_no_pairs(name):
    network, data, none = NETWORKS[name](), molecule(6), molecule(6)
    data.edge_attr = torch.zeros_like(data.edge_attr)
    none.edge_index, none.edge_attr = none.edge_index[:, :0], none.edge_attr[:0]
    torch.testing.assert_close(network(none), network(data))


@pytest.mark.parametrize("make", [framewise, directions])
def test_given_edges_keep_their_features(make):
    """The edges are the neighbors in another order, so each feature has to find its pair."""
    network = make(neighborhood=Given("edge_index"), cutoff=4.0)
    data = molecule(6)
    order = torch.randperm(data.edge_index.shape[1], generator=torch.Generator().manual_seed(2))
    other = Data(x=data.x, pos=data.pos, edge_index=data.edge_index[:, order], edge_attr=data.edge_attr[order])
    torch.testing.assert_close(network(other), network(data))
    wrong = Data(x=data.x, pos=data.pos, edge_index=data.edge_index[:, order], edge_attr=data.edge_attr)
    assert (network(wrong) - network(data)).abs().max() > 1e-6


@pytest.mark.parametrize("make", [framewise, directions])
def test_gradients(make):
    network, data = make(), molecule(5)

    def energy(pos, attr):
        return network(Data(x=data.x, pos=pos, edge_index=data.edge_index, edge_attr=attr))

    inputs = data.pos.clone().requires_grad_(), data.edge_attr.clone().requires_grad_()
    assert torch.autograd.gradcheck(energy, inputs)
    forces = EnergyForces(network)
    again = copy.copy(data)
    again.pos = data.pos + 3.0
    torch.testing.assert_close(forces(again).force, forces(data).force)


@pytest.mark.parametrize("sizes", [(9, 4), (2, 1)])
def test_random_clouds_have_pairs_with_features(sizes):
    """Checkpoints without a test set are certified on random clouds like those of the training."""
    kind = describe_input(Batch.from_data_list([molecule(size) for size in sizes]))
    found = random_clouds(json.loads(json.dumps(kind)), 3, 0)
    for cloud in found:
        pairs = cloud.edge_index.T.tolist()
        assert len({tuple(pair) for pair in pairs}) == len(pairs) > 0
        assert all(one != other and 0 <= min(one, other) <= max(one, other) < len(cloud.pos) for one, other in pairs)
        assert cloud.edge_attr.shape == (len(pairs), CHANNELS)
    assert not torch.equal(found[0].edge_attr, found[1].edge_attr)
    assert framewise().float()(Batch.from_data_list(found)).isfinite().all()


def test_dtypes_of_features():
    network, data = framewise(), molecule(6)
    data.edge_attr = data.edge_attr > 0
    found = network(data)
    for dtype in (torch.int64, torch.float32, torch.float16):
        data.edge_attr = data.edge_attr.to(dtype)
        torch.testing.assert_close(network(data), found)
    data.edge_attr = data.edge_attr.float()
    data.x, data.pos = data.x.float(), data.pos.float()
    assert network.float()(data).dtype == torch.float32
    one = framewise(edge_channels=1)
    flat = molecule(6)
    flat.edge_attr = flat.edge_attr[:, 0]
    column = copy.copy(flat)
    column.edge_attr = flat.edge_attr[:, None]
    assert torch.equal(one(flat), one(column))


def changed(**attributes):
    data = molecule(4)
    for name, value in attributes.items():
        data[name] = value(data) if callable(value) else value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(edge_attr=None), "data.edge_attr: expected a tensor, got NoneType"),
        (changed(edge_index=None), "data.edge_index: expected a tensor, got NoneType"),
        (changed(edge_attr=lambda data: data.edge_attr[:, :2]), r"data.edge_attr: expected features .*8, 3"),
        (changed(edge_attr=lambda data: data.edge_attr[:, 0]), r"data.edge_attr: expected features .*8, 3"),
        (changed(edge_attr=lambda data: data.edge_attr[1:]), r"data.edge_attr: expected features .*8, 3"),
        (changed(edge_index=lambda data: data.edge_index.int()), r"data.edge_index: expected int64 \[2, pairs\], got"),
        (changed(edge_index=lambda data: data.edge_index + 1), "expected points from 0 to 3, got 1 .. 4"),
        (
            changed(edge_index=lambda data: data.edge_index[:, [0, 0, *range(2, 8)]]),
            r"data.edge_index: expected different pairs, got \(\d, \d\) twice",
        ),
    ],
)
def test_wrong_pairs_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        with_pair_features(None, data, CHANNELS, lift(data.pos, T, NEAR))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"neighborhood: expected .* which edge_channels=3 needs, got None"):
        framewise(neighborhood=None)
    with pytest.raises(ValueError, match="edge_channels: expected an integer of at least 0, got -1"):
        DirectionOptions(edge_channels=-1)
    lattice = molecule(4)
    lattice.cell, lattice.pbc = 2 * torch.eye(3).double()[None], torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"data\.edge_attr: expected clouds that are not periodic"):
        framewise(attention="neighborhood")(lattice)
