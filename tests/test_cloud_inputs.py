"""Values of whole clouds, such as charge and spin, as inputs of all models with features, from data to ASE."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

import lieattn
import lieattn_datasets as ld
from lieattn.geometry import PixelSquare, Radius, ScaleFrames, pixel_positions
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseNet,
    AttentiveResNet,
    CloudInputs,
    EnergyForces,
    FieldModel,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
    Readout,
    Species,
)
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.nn import InvariantHead
from lieattn.ops import backend
from lieattn.testing import randomize
from lieattn.train import build

BOTH = CloudInputs(("charge", "spin"), 2)
BALL, SMALL = {"neighborhood": Radius(2.0, smooth=True)}, {"channels": 4, "layers": 1}
T, C4 = tetrahedral(), cyclic(4)
POINTS = {
    "GSANet": lambda inputs: GSANet(T, inputs, 2, channels=8, blocks=(1,), heads=2, **BALL),
    "GSANet on scales": lambda inputs: GSANet(
        ScaleFrames(T, levels=2), inputs, 2, channels=8, blocks=(1,), heads=2, **BALL
    ),
    "LieTransformer": lambda inputs: LieTransformer(inputs, 2, frames=T, heads=2, **BALL, **SMALL),
    "LieConvNet": lambda inputs: LieConvNet(inputs, 2, frames=T, **BALL, **SMALL),
    "FramewiseTransformer": lambda inputs: FramewiseTransformer(T, inputs, 2, **BALL, **SMALL),
    "FieldModel": lambda inputs: FieldModel(FramewiseTransformer(T, inputs, 1, **SMALL), InvariantHead(4, 2)),
    "DistanceTransformer": lambda inputs: DistanceTransformer(inputs, 2, **BALL, **SMALL),
    "TensorFieldNetwork": lambda inputs: TensorFieldNetwork(inputs, 2, **BALL, **SMALL),
    "SE3Transformer": lambda inputs: SE3Transformer(inputs, 2, **BALL, **SMALL),
}
IMAGES = {
    "GSANet on pixels": lambda inputs: GSANet(
        C4, inputs, 2, neighborhood=PixelSquare(3), channels=8, blocks=(1,), heads=2
    ),
    "AffineSelfConvNet": lambda inputs: AffineSelfConvNet(C4, inputs, 2, blocks=1, channels=4),
    "AttentiveCNN": lambda inputs: AttentiveCNN(C4, inputs, 2, channels=2),
    "AttentiveAllCNN": lambda inputs: AttentiveAllCNN(C4, inputs, 2, channels=2),
    "AttentiveResNet": lambda inputs: AttentiveResNet(C4, inputs, 2, blocks=1, channels=(2, 2, 2)),
    "AttentiveDenseNet": lambda inputs: AttentiveDenseNet(C4, inputs, 2, growth=2),
}


def clouds(dim=3, sizes=(4, 6)):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    return [
        Data(
            pos=torch.randn(size, dim, **options),
            x=torch.randn(size, 2, **options),
            z=torch.tensor([8, *[1] * (size - 1)]),
            charge=torch.tensor([float(number)], dtype=torch.float64),
            spin=torch.tensor([number + 1]),  # integers are accepted too
        )
        for number, size in enumerate(sizes, 1)
    ]


def pictures(side):
    found = []
    for number, cloud in enumerate(clouds(2, (side**2,) * 2), 1):
        cloud.pos, cloud.grid = pixel_positions(side, side, dtype=torch.float64), torch.tensor([[side, side]])
        cloud.charge = cloud.charge * number
        found.append(cloud)
    return found


def changed(cloud, **attributes):
    cloud = cloud.clone()
    for name, value in attributes.items():
        cloud[name] = value
    return cloud


def check(network, parts):
    """Check that the outputs of a cloud depend on both of its own values, and on those of no other cloud."""
    network = randomize(network).double().eval()
    assert network.cloud_inputs == ("charge", "spin")
    with torch.no_grad():
        out = network(Batch.from_data_list(parts))
        for name in ("charge", "spin"):
            other = network(Batch.from_data_list([changed(parts[0], **{name: parts[0][name] + 1}), parts[1]]))
            assert (other[0] - out[0]).abs().max() > 1e-6
            torch.testing.assert_close(other[1], out[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POINTS)
def test_models_of_points(name):
    torch.manual_seed(0)
    with backend("plain"):
        check(POINTS[name](BOTH), clouds())


@pytest.mark.parametrize("inputs", [2, CloudInputs(("charge",), 2)], ids=["points", "clouds"])
@pytest.mark.parametrize("name", ["LieTransformer", "FramewiseTransformer", "GSANet"])
def test_numbers_of_features_can_be_numpy_integers(name, inputs):
    own = np.int64(2) if inputs == 2 else CloudInputs(("charge",), np.int64(2))
    batch, outputs = Batch.from_data_list(clouds()), []
    for given in (inputs, own):
        torch.manual_seed(0)
        outputs.append(POINTS[name](given).double()(batch))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", IMAGES)
def test_models_of_images(name):
    torch.manual_seed(0)
    side = {"AttentiveCNN": 28, "AttentiveDenseNet": 80}.get(name, 8)
    network = IMAGES[name](BOTH)
    with backend("plain"):
        check(network, pictures(side))
    if name != "GSANet on pixels":
        with pytest.raises(TypeError, match=r"expected a Batch with the attributes \('charge', 'spin'\), got images"):
            network(torch.zeros(1, 2, side, side))


def test_species_and_numbers():
    """Features of the points and values of the cloud can be combined, in either order."""
    inputs = CloudInputs(("spin",), Species((1, 8)))
    assert inputs.channels == 7
    batch = Batch.from_data_list(clouds())
    found = inputs(batch, lieattn.geometry.point_clouds(batch))
    assert torch.equal(found[:, -1], torch.tensor([2.0] * 4 + [3.0] * 6, dtype=found.dtype))
    assert torch.equal(found[:, :-1], Species((1, 8))(batch, lieattn.geometry.point_clouds(batch)).double())
    expected = {1: [1, 1 / 8, 1 / 64, 0, 0, 0], 8: [0, 0, 0, 1, 1, 1]}
    assert found[:, :-1].tolist() == [expected[z] for z in batch.z.tolist()]
    network = randomize(LieTransformer(inputs, 1, frames=T, heads=2, **BALL, **SMALL))
    assert not torch.equal(network(batch), network(changed(batch, spin=batch.spin + 1)))


NUMBERS = [2, 2.0, np.int64(2), np.float32(2), torch.tensor(2), torch.tensor([2.0]), torch.tensor([[2]])]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_one_cloud_may_have_a_plain_number(value):
    inputs, cloud = CloudInputs(("charge",), 2), clouds()[0]
    seen = inputs(changed(cloud, charge=value), lieattn.geometry.point_clouds(cloud))
    assert torch.equal(seen[:, 2], torch.full((4,), 2.0, dtype=torch.float64))
    assert inputs.of_clouds(changed(cloud, charge=value), 1).dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"data\.charge: expected a number for each cloud, \[clouds=2\] or \[2, 1\], got NoneType"),
        (torch.zeros(3), r"data\.charge: expected .* got torch.float32 \(3,\)"),
        (torch.zeros(10), r"data\.charge: expected .* got torch.float32 \(10,\)"),
        (torch.zeros(()), r"data\.charge: expected .* got torch.float32 \(\)"),
        (torch.zeros(2, dtype=torch.complex64), r"data\.charge: expected .* got torch.complex64 \(2,\)"),
        (torch.tensor([0.0, torch.nan]), r"data\.charge: expected finite numbers, got nan"),
        ("one", r"data\.charge: expected .* got str"),
    ],
    ids=["absent", "too many", "of points", "one for all", "complex", "nan", "text"],
)
def test_wrong_numbers(value, message):
    network = FramewiseTransformer(T, BOTH, 1, **SMALL)
    batch = changed(Batch.from_data_list(clouds()), charge=value)
    with pytest.raises(ValueError, match=message):
        network(batch)


@pytest.mark.parametrize("names", [(), ("charge", "charge")])
def test_wrong_names(names):
    with pytest.raises(ValueError, match="names: expected different attributes of the data, at least one"):
        CloudInputs(names)


def test_saved_configured_and_exported(tmp_path):
    torch.manual_seed(0)
    spec = {
        "class_path": "lieattn.models.LieTransformer",
        "init_args": {
            "frames": {"class_path": "lieattn.groups.tetrahedral"},
            "neighborhood": {"class_path": "lieattn.geometry.Radius", "init_args": {"radius": 2.0}},
            "heads": 2,
            "in_channels": {
                "class_path": "lieattn.models.CloudInputs",
                "init_args": {"names": ["charge", "spin"], "points": 2},
            },
            "out_channels": 1,
            **SMALL,
        },
    }
    network = randomize(build(nn.Module, spec, "the network")).double().eval()
    lieattn.save(network, tmp_path / "network.safetensors")
    loaded, batch = lieattn.load(tmp_path / "network.safetensors"), Batch.from_data_list(clouds())
    assert loaded.cloud_inputs == ("charge", "spin")
    assert torch.equal(loaded(batch), network(batch))
    geometry = network.geometry(batch)

    class OfNumbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, charge, spin):
            return self.network(Data(x=x, charge=charge, spin=spin), geometry)

    with backend("plain"):
        given = (batch.x, batch.charge, batch.spin)
        program = torch.export.export(OfNumbers(), given, strict=False).module()
    other = batch.charge + 2
    torch.testing.assert_close(program(batch.x, other, batch.spin), network(changed(batch, charge=other)))


def frames(infos):
    ase = pytest.importorskip("ase")
    return [ase.Atoms("OH", [[0, 0, 0], [0, 0, 0.97]], info={"energy": -1.0, **info}) for info in infos]


def test_frames_have_charge_and_spin(tmp_path):
    write = pytest.importorskip("ase.io").write
    found = frames([{"charge": -1, "spin": 1}, {"charge": 0, "spin": 2}])
    write(tmp_path / "frames.xyz", found, format="extxyz")
    for data in (ld.Molecules.from_ase(found), ld.ExtendedXYZ(tmp_path / "frames.xyz", "all")):
        batch = Batch.from_data_list(list(data))
        assert batch.charge.tolist() == [-1.0, 0.0]
        assert batch.spin.tolist() == [1.0, 2.0]
    for infos, message in (
        (
            [{"charge": 1}, {}],
            "frames: expected charge in all frames or in none, got 1 without it, the first is frame 1",
        ),
        ([{"spin": [1, 2]}, {"spin": [1, 2]}], r"spin of frames: expected \[2\], got \[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ld.Molecules.from_ase(frames(infos))


def test_calculator_reads_the_info_of_atoms():
    calculator = pytest.importorskip("lieattn.ase")
    torch.manual_seed(0)
    inputs = CloudInputs(("charge",), Species((1, 8)))
    options = {"frames": T, "heads": 2, "readout": Readout(pool="sum"), **BALL, **SMALL}
    network = randomize(LieTransformer(inputs, 1, **options)).double()
    (atoms,) = frames([{}])
    atoms.calc = calculator.Calculator(network)
    with pytest.raises(
        ValueError, match=r"atoms\.info\['charge'\]: expected a number, which is an input of the model, got None"
    ):
        atoms.get_potential_energy()
    energies = []
    for charge in (0, 1):
        atoms.info["charge"] = charge
        energies.append(atoms.get_potential_energy())
        given = {"z": torch.tensor(atoms.numbers).long(), "pos": torch.tensor(atoms.positions)}
        wanted = EnergyForces(network).eval()(Data(**given, charge=charge))
        assert energies[-1] == pytest.approx(float(wanted.energy), abs=1e-10)
        np.testing.assert_allclose(atoms.get_forces(), wanted.force.numpy(), atol=1e-10)
    assert energies[0] != energies[1]
