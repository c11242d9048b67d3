"""Inputs of models besides positions: given edges, and features that may be absent."""

from dataclasses import replace

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn import train
from lieattn.geometry import Given, PrincipalFrames, Radius, ScaleFrames, find_neighbors, lift, point_clouds
from lieattn.groups import cyclic, octahedral, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    DirectionConvNet,
    DirectionOptions,
    FiniteSE2Transformer,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    HamiltonianDynamics,
    LieConvNet,
    LieTransformer,
    Lifting,
)
from lieattn.models._base import inputs as _inputs
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.reps import Irreps, Permutation, Pseudovector, SymmetricTensor, Vector

BALL, EDGES = Radius(1.5), Given("edge_index")
SMALL = {"channels": 4, "layers": 1}
LENGTH = Lifting(length=1.5, cutoff=1.5)
MODELS = {
    "GSANet": lambda n: GSANet(
        tetrahedral(), 1, 2, neighborhood=n, channels=8, blocks=(1,), heads=2, options=GSAOptions(length=1.5)
    ),
    "LieTransformer": lambda n: LieTransformer(
        1, 2, frames=tetrahedral(), neighborhood=n, heads=2, lifting=LENGTH, **SMALL
    ),
    "LieConvNet": lambda n: LieConvNet(1, 2, frames=PrincipalFrames(), neighborhood=n, lifting=LENGTH, **SMALL),
    "FiniteSE2Transformer": lambda n: FiniteSE2Transformer(4, 2, neighborhood=n, channels=4, layers=1, heads=2),
    "FramewiseTransformer": lambda n: FramewiseTransformer(
        tetrahedral(), 1, 2, neighborhood=n, options=FramewiseOptions(cutoff=1.5), **SMALL
    ),
    "DirectionConvNet": lambda n: DirectionConvNet(
        tetrahedral(), 1, 2, neighborhood=n, options=DirectionOptions(cutoff=1.5), **SMALL
    ),
    "DistanceTransformer": lambda n: DistanceTransformer(1, 2, neighborhood=n, cutoff=1.5, **SMALL),
    "TensorFieldNetwork": lambda n: TensorFieldNetwork(1, 2, neighborhood=n, cutoff=1.5, **SMALL),
    "SE3Transformer": lambda n: SE3Transformer(1, 2, neighborhood=n, cutoff=1.5, **SMALL),
}
every_model = pytest.mark.parametrize("name", MODELS)


# Kernels do not depend on how neighbors were found.
pytestmark = pytest.mark.usefixtures("plain")


def clouds(dim=3, sizes=(5, 8)):
    """Return two clouds with the edges of a ball in random order, without self-loops."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        pos = torch.randn(size, dim, generator=generator, dtype=torch.float64)
        edges = Radius(1.5, include_self=False)(pos).edge_index
        found.append(Data(pos=pos, edge_index=edges[:, torch.randperm(edges.shape[1], generator=generator)]))
    return found


def build(name, neighborhood):
    torch.manual_seed(0)
    return MODELS[name](neighborhood).double().eval()


@every_model
def test_edges_of_the_data(name):
    """The edges of a ball give the results of the ball, alone and in a batch; without them, outputs differ."""
    parts = clouds(2 if name == "FiniteSE2Transformer" else 3)
    batch = Batch.from_data_list(parts)
    expected = build(name, BALL)(batch)
    network = build(name, EDGES)
    torch.testing.assert_close(network(batch), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([network(part) for part in parts]), expected, rtol=1e-12, atol=1e-12)
    batch.edge_index = batch.edge_index[:, ::2]
    assert (network(batch) - expected).abs().max() > 1e-6


@every_model
def test_features_may_be_absent(name, records):
    """Every point then has the feature 1, which the log says once."""
    _inputs._say_constant.cache_clear()
    batch = Batch.from_data_list(clouds(2 if name == "FiniteSE2Transformer" else 3))
    network = build(name, BALL)
    found = [network(batch) for _ in range(2)]
    torch.testing.assert_close(found[0], network(Data(x=batch.pos.new_ones(13, 1), pos=batch.pos, batch=batch.batch)))
    said = [record.getMessage() for record in records]
    assert said == ["data.x: the data have no features; every point gets the feature 1 (in_channels=1)"] * (
        name != "FiniteSE2Transformer"  # it uses only positions
    )


def test_points_are_their_own_neighbors_as_asked_for():
    pos, edges = torch.zeros(3, 2), torch.tensor([[0, 1, 1], [1, 1, 2]])
    for options, expected in {
        (): [[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]],
        (("include_self", False),): [[0, 1], [1, 2]],
    }.items():
        found = find_neighbors(point_clouds(Data(pos=pos, edge_index=edges)), Given("edge_index", **dict(options)))
        assert found.edge_index.tolist() == expected
        assert not found.is_symmetric()
    assert Given(edges)(pos).edge_index.tolist() == [[0, 1, 1], [1, 1, 2]]
    assert Given(edges, include_self=True)(pos).edge_index.tolist() == [[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]]


def test_missing_edges_are_named():
    expected = r"edge_index: expected int64 \[2, edges\] in the data for Given\(.*but the data have none"
    with pytest.raises(ValueError, match=expected):
        build("LieTransformer", EDGES)(Data(pos=torch.zeros(3, 3, dtype=torch.float64)))


def test_edges_stay_where_points_are_chosen_or_repeat():
    data = clouds()[0]
    with pytest.raises(ValueError, match="edge_index: expected 'edge_index' of the data, or a tensor, got 'bonds'"):
        Given("bonds")
    with pytest.raises(ValueError, match=r"edge_index: Given\(.* is read from data"):
        EDGES(data.pos)
    graph = lift(data, tetrahedral(), EDGES)
    with pytest.raises(ValueError, match=r"edge_index: .* or their points were cropped, pooled or subsampled"):
        graph.subset(torch.tensor([0, 1]), EDGES)
    with pytest.raises(ValueError, match=r"neighborhood: Given\(.*cannot be scaled"):
        lift(data, ScaleFrames(tetrahedral()), EDGES)
    with pytest.raises(ValueError, match="neighborhood: expected a Radius for periodic clouds"):
        find_neighbors(replace(point_clouds(data), cell=torch.eye(3)[None], pbc=torch.ones(1, 3) > 0), EDGES)


def from_settings(name, **options):
    options |= {"in_channels": 1, "out_channels": 1}
    return train.build(torch.nn.Module, {"class_path": f"lieattn.models.{name}", "init_args": options}, "network")


def test_edges_in_configuration_files():
    given = {"class_path": "lieattn.geometry.Given", "init_args": {"edge_index": "edge_index"}}
    frames = {"class_path": "lieattn.geometry.PrincipalFrames"}
    model = from_settings("LieTransformer", frames=frames, neighborhood=given, channels=4, layers=1, heads=2)
    assert model.neighborhood.edge_index == "edge_index"


def test_padded_positions_in_data_are_refused_with_advice():
    """The mask of the data would be ignored."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    pos = torch.randn(2, 3, 3)
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1)
    with pytest.raises(
        ValueError, match=r"data.pos: expected \[points, dim\], got \(2, 3, 3\); of padded clouds use Data"
    ):
        network(Data(pos=pos, mask=mask))
    advised = Data(pos=pos[mask], batch=mask.nonzero()[:, 0])
    assert torch.equal(network(advised), network(Data(pos=pos[mask], ptr=torch.tensor([0, 3, 4]))))
    assert torch.equal(point_clouds(pos, mask=mask).batch, advised.batch)


def test_cells_that_a_batch_concatenates_are_named():
    data = Batch.from_data_list([Data(pos=torch.randn(2, 3), cell=torch.eye(3)) for _ in range(2)])
    with pytest.raises(
        ValueError, match=r"cell: expected .* got \[6, 3\]; each Data of a batch has a cell \[1, 3, 3\]"
    ):
        point_clouds(data)
    data = Batch.from_data_list([Data(pos=torch.randn(2, 3), cell=torch.eye(3)[None], pbc=torch.ones(3) > 0)] * 2)
    with pytest.raises(ValueError, match=r"pbc: expected .* got \[6\]; each Data of a batch has a pbc \[1, 3\]"):
        point_clouds(data)


FIELDS = {"spin": Pseudovector(), "strain": SymmetricTensor(3)}
VERTICES = [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]


@pytest.mark.parametrize("points", [(3, 2), (2, 0), (1, 1, 1), (0, 3, 0), (0, 0)])
def test_fields_of_clouds_are_those_of_all_points(points):
    """Also of empty clouds, where there can be as many clouds as points."""
    network, of_clouds, of_points = framewise(vector_inputs=FIELDS), [], []
    for number in points:
        data = Data(x=torch.ones(number, 1), pos=torch.randn(number, 3))
        values = {name: torch.randn(1, rep.dim) for name, rep in FIELDS.items()}
        of_clouds.append(data.clone().update(values))
        of_points.append(data.clone().update({name: value.expand(number, -1) for name, value in values.items()}))
    found, expected = (network(Batch.from_data_list(clouds)) for clouds in (of_clouds, of_points))
    assert torch.equal(found, expected)


def test_vectors_by_name_are_those_with_a_representation():
    one, other = framewise(vector_inputs=("vel",)), framewise(vector_inputs={"vel": Vector(3)})
    data = Data(x=torch.ones(3, 1), pos=torch.randn(3, 3), vel=torch.randn(3, 3))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(data), other(data))
    with pytest.raises(RuntimeError, match=r"field_inputs"):
        framewise(vector_inputs=FIELDS).load_state_dict(framewise(vector_inputs={**FIELDS, "spin": "1o"}).state_dict())


def test_positions_are_vectors_from_an_origin():
    """A cell has no origin, networks on rasters see no positions, and positions are no other field."""
    network = DistanceTransformer(1, 1, neighborhood=BALL, vector_inputs=("pos",), **SMALL)
    data = Data(x=torch.ones(3, 1), pos=torch.randn(3, 3), cell=9 * torch.eye(3)[None])
    with pytest.raises(ValueError, match=r"data.cell: vector_inputs with 'pos' need clouds that are not periodic"):
        network(data)
    with pytest.raises(ValueError, match=r"vector_inputs: expected vectors at the pixels, got 'pos'"):
        AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=2, heads=2, vector_inputs=("pos",))
    with pytest.raises(ValueError, match=r"vector_inputs\['pos'\]: expected Vector\(3\) for positions, got Ps"):
        framewise(vector_inputs={"pos": Pseudovector()})
    energy = FramewiseTransformer(tetrahedral(), 1, 1, pool="sum", **SMALL, vector_inputs=("pos",))
    with pytest.raises(ValueError, match=r"center: expected False for a potential that sees the origin"):
        HamiltonianDynamics(energy)
    assert HamiltonianDynamics(energy, center=False).symmetry.name == "T about the origin"


def test_permuted_channels_need_frames_of_their_group():
    """Of other frames, the permutation would be that of the nearest element."""
    sites = {"sites": Permutation(tetrahedral(), points=VERTICES)}
    with pytest.raises(ValueError, match=r"vector_inputs\['sites'\], frames O: expected elements of T, .* got others"):
        FramewiseTransformer(octahedral(), 1, 1, vector_inputs=sites, **SMALL)
    for make in (
        lambda: FramewiseTransformer(PrincipalFrames(), 1, 1, vector_inputs=sites, **SMALL),
        lambda: DistanceTransformer(1, 1, neighborhood=BALL, vector_inputs=sites, **SMALL),
    ):
        with pytest.raises(ValueError, match=r"vector_inputs\['sites'\]: Permutation\(T, 4 .* needs the elements of T"):
            make()


def test_fields_are_given_in_settings():
    tensor = {"class_path": "lieattn.reps.SymmetricTensor", "init_args": {"d": 3}}
    sites = {"group": {"class_path": "lieattn.groups.tetrahedral"}, "points": VERTICES}
    fields = {"spin": "1e", "strain": tensor, "curl": {"class_path": "lieattn.reps.Pseudovector"}}
    fields["sites"] = {"class_path": "lieattn.reps.Permutation", "init_args": sites}
    frames = {"class_path": "lieattn.groups.tetrahedral"}
    expected = {"spin": Irreps("1e"), "strain": SymmetricTensor(3), "curl": Pseudovector()}
    expected["sites"] = Permutation(tetrahedral(), points=VERTICES)
    assert from_settings("FramewiseTransformer", frames=frames, vector_inputs=fields).field_inputs == expected


def framewise(**options):
    torch.manual_seed(0)
    return FramewiseTransformer(tetrahedral(), 1, 1, pool="none", **SMALL, **options)


def test_features_that_are_no_tensor_are_named():
    """The message blamed the data, although they were as expected."""
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1)
    with pytest.raises(TypeError, match=r"data.x: expected floating features as a tensor, got ndarray"):
        network(Data(x=torch.ones(3, 1).numpy(), pos=torch.randn(3, 3)))
