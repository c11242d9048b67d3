"""Networks and groups while torch has another default device, as after ``torch.set_default_device("cuda")``.

The device here is "meta": a tensor that is created on the default device by mistake has no numbers, and cannot be
combined with the others.
"""

import copy

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn import groups, spaces
from lieattn.certify import certify
from lieattn.geometry import AllPairs, Nearest, Radius, lift
from lieattn.groups import FiniteGroup, real_irreps
from lieattn.models import EnergyForces, Ensemble, FramewiseTransformer, Rescaled
from lieattn.nn import GroupLinear, ZonalLinear
from lieattn.reps import Irreps, SymmetricTensor, to_irreps
from lieattn.testing import randomize
from lieattn.train import named_outputs
from lieattn.viz import Microscope
from lieattn_datasets import (
    Constellation,
    Digits,
    NBodySimulated,
    ProceduralScenes,
    ProceduralShapes,
    RandomCrop,
    RandomRotateFields,
    RandomRotatePoints,
    RandomScalePoints,
    RotatePoints,
    Springs,
    Standardize,
    StandardizeTargets,
    TransformFields,
    grid_positions,
    image_to_data,
)
from tests.cases import some
from tests.lifted_cases import LIFTED
from tests.test_certify import MODELS, VARIANTS
from tests.test_equivariance import LAYERS, Made, clouds_of, fits

ELSEWHERE = torch.device("meta")
CATALOG = {
    "C4": lambda: groups.cyclic(4),
    "D3": lambda: groups.dihedral(3),
    "C5z": lambda: groups.cyclic_about(5),
    "D6z": lambda: groups.dihedral_about(6),
    "trivial3": lambda: groups.trivial(3),
    "mirror3": lambda: groups.reflection(3),
    "inversion3": lambda: groups.inversion(3),
    "T": groups.tetrahedral,
    "O": groups.octahedral,
    "I": groups.icosahedral,
    "Th": groups.pyritohedral,
    "Td": groups.full_tetrahedral,
    "Oh": groups.full_octahedral,
    "generated": lambda: FiniteGroup.generate(groups.cyclic(4).elements[1:2]),
    "matrices": lambda: FiniteGroup.from_matrices([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [0.0, -1.0]]]),
    "permutations": lambda: FiniteGroup.from_permutations([[0, 1, 2], [1, 2, 0], [2, 0, 1]]),
}


def inputs(data):
    data = Batch.from_data_list(data) if isinstance(data, list) else data.float()
    if isinstance(data, Batch):
        data.apply(lambda value: value.float() if value.is_floating_point() else value)
    return data


def evaluated(name):
    """Return a network with random weights, its data and its outputs there."""
    make, clouds, _, _ = MODELS[name]
    network, data = randomize(make(), spread=0.2).eval(), inputs(clouds())
    torch.manual_seed(0)
    return network, data, network(data)


@pytest.mark.parametrize("name", CATALOG)
def test_tables_of_groups_are_on_the_cpu(name):
    group = CATALOG[name]()
    with ELSEWHERE:
        other = CATALOG[name]()
        assert other == group
        assert all(irrep.basis.device.type == "cpu" for irrep in real_irreps(other))
        assert GroupLinear(other, 2, 2).weight.device == ELSEWHERE


@pytest.mark.parametrize("space", [spaces.Sphere(), spaces.PositionDirection(), spaces.Euclidean(groups.SE(3))])
def test_origins_are_on_the_cpu(space):
    with ELSEWHERE:
        assert space.origin.device.type == "cpu"


def test_lifts_stay_on_the_device_of_the_points():
    pos = torch.randn(6, 3)
    for neighborhood in (Radius(1.5), Nearest(2), AllPairs()):
        with ELSEWHERE:
            graph = lift(pos, groups.octahedral(), neighborhood)
            found = graph.relative.coordinates
        assert torch.equal(found, lift(pos, groups.octahedral(), neighborhood).relative.coordinates)


@pytest.mark.parametrize("name", some(MODELS, MODELS.keys() - VARIANTS))
def test_networks_compute_on_the_device_of_their_weights(name):
    network, data, wanted = evaluated(name)
    with ELSEWHERE:
        torch.manual_seed(0)
        found = network(data)
    torch.testing.assert_close(found, wanted)
    network.train()
    with ELSEWHERE:
        first = next(iter(named_outputs(network(data), "y").values()))
        if first.requires_grad:
            first.square().sum().backward()
    assert all(weight.grad is None or weight.grad.device.type == "cpu" for weight in network.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_constructed_on_the_default_device(name):
    case = next(case for case in LIFTED.values() if fits(name, case))
    made = Made(case, clouds_of(case, torch.float32)[2])
    with ELSEWHERE:
        layer = LAYERS[name](made)
    assert all(value.device == ELSEWHERE for value in (*layer.parameters(), *layer.buffers()))


@pytest.mark.parametrize("name", some(MODELS, MODELS.keys() - VARIANTS))
def test_networks_are_constructed_on_the_default_device(name):
    make = MODELS[name][0]
    with ELSEWHERE:
        network = make()
    state, expected = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (network, make()))
    assert state.keys() == expected.keys()
    for key, value in state.items():
        assert value.device == ELSEWHERE
        assert value.shape == expected[key].shape
        assert value.dtype == expected[key].dtype
    assert copy.deepcopy(network).state_dict().keys() == network.state_dict().keys()


def test_tables_of_irreps():
    with ELSEWHERE:
        assert Irreps("2e+3o").polar_z().device.type == "cpu"
        assert SymmetricTensor(3).matrix(torch.eye(3, device="cpu")).shape == (6, 6)
        assert to_irreps(SymmetricTensor(3))[1].device.type == "cpu"
    assert Irreps("4e").matrix(torch.eye(3)).shape == (9, 9)


@pytest.mark.parametrize("name", some(MODELS, MODELS.keys() - VARIANTS))
def test_networks_without_numbers_take_weights(name):
    """Tables of groups are no weights, so nothing else would bring their values back."""
    make = MODELS[name][0]
    trained, data, wanted = evaluated(name)
    with ELSEWHERE:
        made, assigned = make(), make()
    # Fresh memory has arbitrary numbers, so these tables would be wrong.
    for network in (made.to_empty(device="cpu"), assigned):
        network.eval().load_state_dict(trained.state_dict(), assign=network is assigned)
        torch.manual_seed(0)
        torch.testing.assert_close(network(data), wanted)


def test_tables_keep_their_precision_where_they_have_no_numbers():
    layer = ZonalLinear(groups.octahedral().elements[:, :, 0].unique(dim=0), 8, 8)
    tables = {name: table.clone() for name, table in layer.named_buffers()}
    other = layer.to(ELSEWHERE).half().to_empty(device="cpu")
    assert all(torch.equal(table, tables[name]) for name, table in other.named_buffers())
    assert {table.dtype for table in tables.values()} >= {torch.float64}


def test_images_are_on_the_cpu():
    """All images of one size share their positions, so the first one must not decide on the device of the others."""
    grid_positions.cache_clear()
    with ELSEWHERE:
        image = image_to_data(np.zeros((4, 5)), label=1)
    assert {value.device.type for _, value in image} == {"cpu"}
    assert torch.equal(image_to_data(np.zeros((4, 5))).pos[0], torch.tensor([-2.0, 1.5]))


def test_positions_of_images_are_no_inference_tensors():
    """The first image of a size may be made in inference mode, and others used in training."""
    grid_positions.cache_clear()
    with torch.inference_mode():
        image_to_data(np.zeros((4, 5)))
    assert not image_to_data(np.zeros((4, 5))).pos.is_inference()


DATASETS = {
    "constellation": lambda: Constellation("train", 2),
    "digits": lambda: Digits("train"),
    "particles": lambda: NBodySimulated("train", 2),
    "scenes": lambda: ProceduralScenes("train", 2, points=32),
    "shapes": lambda: ProceduralShapes("train", 2, points=32),
    "springs": lambda: Springs("train", 2),
}
TRANSFORMS = {
    "crop": lambda: RandomCrop(1),
    "rotated fields": lambda: RandomRotateFields(1, dim=2),
    "rotated points at random": lambda: RandomRotatePoints(1),
    "scaled points": lambda: RandomScalePoints(1),
    "rotated points": lambda: RotatePoints(0.3),
    "standardized": lambda: Standardize([0.2], [0.1]),
    "standardized targets": lambda: StandardizeTargets([0.2], [0.1]),
    "transformed fields": lambda: TransformFields([[0.0, -1.0], [1.0, 0.0]], [1.0, 2.0]),
}


def assert_same_data(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted:
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", DATASETS)
def test_items_are_on_the_cpu(name):
    wanted = DATASETS[name]()[0]
    with ELSEWHERE:
        assert_same_data(DATASETS[name]()[0], wanted)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_compute_on_the_device_of_the_data(name):
    image = image_to_data(np.random.default_rng(0).uniform(size=(4, 4)))
    image.y = torch.ones(1, 1)
    torch.manual_seed(0)
    wanted = TRANSFORMS[name]()(image)
    torch.manual_seed(0)
    with ELSEWHERE:
        assert_same_data(TRANSFORMS[name]()(image), wanted)


def test_networks_within_modules_stay_on_their_device():
    """A module around a network would otherwise move it, and on the meta device its weights would be lost."""
    network, other = (randomize(framewise()).eval() for _ in range(2))
    data = Data(x=torch.ones(4, 1), pos=torch.randn(4, 3))
    wanted = network(data)
    with ELSEWHERE:
        rescaled, mean, forces = Rescaled(network, {"y": 2.0}), Ensemble([network, other]), EnergyForces(network)
    assert rescaled.scale_y.device == ELSEWHERE
    assert torch.equal(network(data), wanted)
    assert torch.equal(forces(data).energy, wanted[:, 0])
    torch.testing.assert_close(mean(data), (wanted + other(data)) / 2)


def test_certify_and_microscope_compute_on_the_device_of_the_network(tmp_path):
    network, data = randomize(framewise()).eval(), Data(x=torch.ones(5, 1), pos=torch.randn(5, 3))
    wanted = Microscope(network, data, turns=3)
    with torch.device("meta"):
        certificate = certify(network, data, elements=2, rotations=1)
        microscope = Microscope(network, data, turns=3)
        assert torch.equal(microscope.fields(), wanted.fields())
        assert microscope.deviation() == wanted.deviation()
        microscope.save(tmp_path / "page.html")
    assert certificate.passed


class Frugal(torch.nn.Module):
    """Sums of squared distances of all pairs. It asks for the default device, as ``torch.zeros(3)`` does."""

    def __init__(self):
        super().__init__()
        self.seen, self.network = set(), torch.nn.Linear(1, 1)

    def forward(self, data):
        self.seen.add(torch.get_default_device())
        squares = [torch.pdist(pos).square().sum() for pos in data.pos.split(data.ptr.diff().tolist())]
        return self.network(torch.stack(squares)[:, None])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_certify_calls_networks_under_the_default_device_of_the_user(device):
    network, seen = Frugal(), Data(pos=torch.randn(5, 3))
    with torch.device(device):
        certificate = certify(lambda data: network.to(data.pos.dtype)(data), seen, groups.E(3), elements=1)
        assert torch.get_default_device() == torch.device(device)
    assert certificate.passed
    assert network.seen == {torch.device(device)}


def test_certify_measures_calculators_under_another_default_device():
    pytest.importorskip("ase")
    from ase.calculators.lj import LennardJones

    data = Data(pos=torch.tensor([[0.0, 0.0, 0.0], [1.1, 0.0, 0.0], [0.0, 1.2, 0.1]]))
    with ELSEWHERE:
        certificate = certify(LennardJones(rc=8.0), data, groups.E(3), elements=1, continuity=False)
    assert certificate.passed


def framewise():
    return FramewiseTransformer(groups.tetrahedral(), 1, 1, channels=4, layers=1)
