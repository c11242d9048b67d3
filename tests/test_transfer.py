"""Training that starts from the weights of another network."""

import copy
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch_geometric.data import Data

import lieattn
from lieattn.cli import _training, main
from lieattn.geometry import Radius
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseNet,
    AttentiveResNet,
    DirectionConvNet,
    EnergyForces,
    Ensemble,
    FieldModel,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
    Preprocessed,
    Rescaled,
    transfer_weights,
)
from lieattn.models.irreps import SE3Transformer, TensorFieldNetwork
from lieattn.nn import FieldHead, Heads, InvariantHead, VectorHead
from lieattn.reps import Pseudovector, SymmetricTensor, Vector
from lieattn.testing import randomize
from lieattn.train import load_network

T, NEAR = tetrahedral(), Radius(2.0, smooth=True)
LOCAL = {"frames": T, "neighborhood": NEAR, "channels": 8, "layers": 1, "heads": 2}
IRREPS = {"neighborhood": NEAR, "channels": 4, "layers": 1}
BY_OUTPUTS = {
    "framewise": lambda outputs: framewise(outputs),
    "directions": lambda outputs: DirectionConvNet(T, 1, outputs, channels=4, layers=1, neighborhood=NEAR),
    "lie": lambda outputs: LieTransformer(1, outputs, **LOCAL),
    "lieconv": lambda outputs: LieConvNet(1, outputs, frames=T, neighborhood=NEAR, channels=8, layers=1),
    "gsa": lambda outputs: GSANet(T, 1, outputs, neighborhood=NEAR, channels=8, heads=2),
    "p4": lambda outputs: AttentiveCNN(cyclic(4), 1, outputs, channels=2),
    "residual": lambda outputs: AttentiveResNet(cyclic(4), 1, outputs, blocks=1, channels=(2, 2, 2)),
    "dense": lambda outputs: AttentiveDenseNet(cyclic(4), 1, outputs, growth=2),
    "affine": lambda outputs: AffineSelfConvNet(cyclic(4), 1, outputs),
    "SE3": lambda outputs: SE3Transformer(1, outputs, **IRREPS),
}


def framewise(outputs=1, **options):
    options = {"channels": 4, "layers": 1, "neighborhood": NEAR, "pool": "sum", **options}
    return FramewiseTransformer(T, 1, outputs, **options)


def cloud():
    torch.manual_seed(0)
    return Data(x=torch.randn(5, 1), pos=torch.randn(5, 3))


@pytest.mark.parametrize("name", BY_OUTPUTS)
def test_all_weights_but_those_of_other_outputs_are_copied(name):
    torch.manual_seed(1)
    source, network = randomize(BY_OUTPUTS[name](2)), BY_OUTPUTS[name](3)
    before, given = copy.deepcopy(network.state_dict()), copy.deepcopy(source.state_dict())
    new = transfer_weights(network, source)
    after = network.state_dict()
    assert 0 < len(new) <= 4
    assert set(new) == {key for key in after if after[key].shape != given[key].shape}
    for key, value in after.items():
        assert torch.equal(value, before[key] if key in new else given[key])
    assert all(torch.equal(value, given[key]) for key, value in source.state_dict().items())
    assert transfer_weights(randomize(source), network) == tuple(key for key in given if key in new)
    assert transfer_weights(source, copy.deepcopy(source)) == ()


@pytest.mark.parametrize("name", [name for name in BY_OUTPUTS if name != "SE3"])
def test_another_head_may_be_replaced_again(name, tmp_path):
    once = BY_OUTPUTS[name](2).with_head(VectorHead(2))
    assert once.with_head(VectorHead(2)).state_dict().keys() == once.state_dict().keys()
    model = FieldModel(once, VectorHead(2))
    lieattn.save(model, tmp_path / "model")
    assert lieattn.load(tmp_path / "model").state_dict().keys() == model.state_dict().keys()


def test_modules_around_a_network_are_neither_compared_nor_copied():
    source = Preprocessed(Rescaled(randomize(framewise()), {"y": 7.0}), lambda data: data)
    network = EnergyForces(framewise())
    assert transfer_weights(network, source) == ()
    # With gradients of positions, edges are evaluated in another order.
    torch.testing.assert_close(network(cloud()).energy.squeeze(), source.network.network(cloud()).squeeze())
    rescaled = Rescaled(framewise(3), {"y": 2.0})
    assert all(name.startswith("network.head.") for name in transfer_weights(rescaled, source))
    assert float(rescaled.scale_y) == 2


def test_heads_for_fields():
    source, vectors = randomize(framewise()), FieldModel(framewise(), VectorHead(4))
    assert transfer_weights(vectors, source) == tuple(name for name in vectors.state_dict() if name.startswith("head."))
    source.head = vectors.network.head
    assert torch.equal(vectors.network.field(cloud()).x, source.field(cloud()).x)
    other = FieldModel(framewise(), FieldHead(4, 2 * Vector(3)))
    assert transfer_weights(other, vectors) == ("head.linear2.weight",)
    again = FieldModel(framewise(), VectorHead(4))
    assert transfer_weights(again, vectors) == ()
    assert torch.equal(again(cloud()), vectors(cloud()))
    assert transfer_weights(FieldModel(framewise(), FieldHead(4, Vector(3))), vectors) == ()  # of the same kind


def test_heads_of_several_outputs():
    """Heads are kept by their names."""

    def several(**outputs):
        return randomize(FieldModel(framewise(), Heads({name: InvariantHead(4, n) for name, n in outputs.items()})))

    source, network = several(energy=1, gap=1), several(charge=1, energy=1, gap=2)
    new = transfer_weights(EnergyForces(network), EnergyForces(source))
    charge = {name for name in network.state_dict() if name.startswith("head.heads.charge.")}
    assert set(new) == {f"model.{name}" for name in charge} | {
        f"model.head.heads.gap.linears.2.{w}" for w in ("weight", "bias")
    }
    assert torch.equal(network(cloud())["energy"], source(cloud())["energy"])
    first = several(energy=1)
    assert set(transfer_weights(EnergyForces(first), framewise())) == {
        f"model.{name}" for name in first.state_dict() if name.startswith("head.")
    }


@pytest.mark.parametrize(
    ("source", "network", "new"),
    [
        (lambda: headed(FieldHead(4, 2 * Vector(3))), lambda: headed(FieldHead(4, SymmetricTensor(3))), "head."),
        (lambda: framewise(3), lambda: framewise(1, kind="vector"), "head."),
        (
            lambda: TensorFieldNetwork(1, 3, **IRREPS),
            lambda: TensorFieldNetwork(1, 3, kind="vector", **IRREPS),
            "head.",
        ),
        (
            lambda: headed(Heads({"energy": InvariantHead(4, 1), "moment": VectorHead(4)})),
            lambda: headed(Heads({"energy": InvariantHead(4, 1), "moment": FieldHead(4, Pseudovector())})),
            "head.heads.moment.",
        ),
    ],
    ids=["tensors", "vectors", "irreps", "several"],
)
def test_heads_for_another_kind_of_outputs_are_new(source, network, new):
    source, network = randomize(source()), network()
    before = copy.deepcopy(network.state_dict())
    found = transfer_weights(network, source)
    assert set(found) == {name for name in before if name.startswith(new)}
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name] if name in found else source.state_dict()[name])


def headed(head):
    return FieldModel(framewise(), head)


def test_weights_are_converted_to_the_dtype_of_the_network():
    source, network = randomize(framewise()), framewise().double()
    transfer_weights(network, source)
    data = cloud()
    double = Data(x=data.x.double(), pos=data.pos.double())
    torch.testing.assert_close(network(double), source(data).double(), rtol=1e-4, atol=1e-4)
    assert network(double).dtype == torch.float64


@pytest.mark.parametrize(
    ("network", "source", "message"),
    [
        (framewise, lambda: BY_OUTPUTS["lie"](1), "expected the class of the network, FramewiseTransformer, got LieT"),
        (
            framewise,
            lambda: framewise(neighborhood=Radius(3.0, smooth=True)),
            "neighborhood: the weights are for .*; build the module with the neighborhood of the weights.( .and|$)",
        ),
        (framewise, lambda: framewise(channels=6), r"size mismatch for embed_features.weight"),
        (framewise, lambda: framewise(layers=2), r"Unexpected key\(s\) in state_dict: \"blocks.1"),
        (framewise, lambda: Ensemble([framewise(), framewise()]), "got Ensemble"),
        (
            lambda: AttentiveAllCNN(cyclic(4), 1, 3),
            lambda: AttentiveAllCNN(cyclic(4), 1, 2),
            "size mismatch for layers",
        ),
    ],
)
def test_other_networks_are_refused(network, source, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        transfer_weights(network(), source())


def test_a_refused_network_stays_as_it_was():
    """Also its choices stay open: weights decide whether a radius is smooth, if the network leaves it open."""
    network = framewise(neighborhood=Radius(2.0))
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match="source: the weights do not fit the network"):
        transfer_weights(network, randomize(framewise(layers=2)))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert network.neighborhood == Radius(2.0)
    transfer_weights(network, framewise())
    assert network.neighborhood == NEAR


def test_replaced_networks_are_named():
    model = Rescaled(framewise(), {"y": 1.0})
    model.network = framewise()
    message = "the FramewiseTransformer within the Rescaled was replaced after its construction; construct the Rescaled"
    with pytest.raises(ValueError, match=f"network: {message} with the new one"):
        transfer_weights(model, framewise())


class Clouds(torch.utils.data.Dataset):
    """Random clouds with labels."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes

    def __len__(self):
        return 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x, pos = torch.randn(5, 1, generator=generator), torch.randn(5, 3, generator=generator)
        return Data(x=x, pos=pos, y=torch.tensor([index % self.classes]))


def configuration(folder, classes):
    """Write a configuration whose steps change nothing, so that the start is visible in the checkpoint."""
    network = {"class_path": "lieattn.models.FramewiseTransformer"}
    group = {"class_path": "lieattn.groups.tetrahedral"}
    near = {"class_path": "lieattn.geometry.Radius", "init_args": {"radius": 2.0, "smooth": True}}
    network["init_args"] = {"frames": group, "in_channels": 1, "out_channels": classes, "neighborhood": near}
    network["init_args"] |= {"channels": 4, "layers": 1, "pool": "sum"}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}}
    task = {"classes": classes, "network": network, "optimizer": optimizer}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    content = {
        "model": {"class_path": "lieattn.train.PointSetClassifier", "init_args": task},
        "data": {"train": {"class_path": f"{__name__}.Clouds", "init_args": {"classes": classes}}},
        "trainer": {"default_root_dir": str(folder), "max_epochs": 1, **quiet},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.mark.filterwarnings("ignore")
def test_command_starts_from_files_and_checkpoints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    source = randomize(framewise(2))
    lieattn.save(source, tmp_path / "source.safetensors")
    saved, last = str(tmp_path / "source.safetensors"), str(tmp_path / "checkpoints" / "last.ckpt")
    run = ["fit", "--config", configuration(tmp_path, 2), "--weights", saved]
    assert main(run) == 0
    assert f"training starts from the weights of {saved}; new weights: none" in capsys.readouterr().err
    trained = load_network(last)
    assert torch.equal(trained(cloud()), source.eval()(cloud()))
    lieattn.save(source, tmp_path / "source-1.0", card=True)  # a folder, of which 1.0 is no suffix
    _training._start_from(again := framewise(2), str(tmp_path / "source-1.0"), (), ())
    assert torch.equal(again.eval()(cloud()), source(cloud()))
    # In the file of the training, they do not disturb other commands.
    file = Path(configuration(tmp_path, 2))
    content = yaml.safe_load(file.read_text())
    content["data"]["test"] = content["data"]["train"]
    file.write_text(yaml.safe_dump({**content, "weights": saved}))
    assert main(["test", "--config", str(file), "--ckpt_path", "last"]) == 0
    configuration(tmp_path, 2)
    # An interrupted run continues from its own weights, also if the source is gone.
    (tmp_path / "source.safetensors").unlink()
    assert main([*run, "--ckpt_path", "last", "--trainer.max_epochs", "2"]) == 0
    assert f"{saved} is not read: training continues from the weights of the checkpoint" in capsys.readouterr().err
    (tmp_path / "more").mkdir()
    assert main(["fit", "--config", configuration(tmp_path / "more", 3), "--weights", last]) == 0
    assert re.search(r"new weights: head\.\d\.weight, head\.\d\.bias\n", capsys.readouterr().err)
    other = load_network(tmp_path / "more" / "checkpoints" / "last.ckpt")
    torch.testing.assert_close(other.field(cloud()).x, trained.field(cloud()).x)


@pytest.mark.parametrize("option", ["weights=digits-c8", "ema=0.9", "compile=true"])
def test_commands_without_training_refuse_options_of_fit(option, tmp_path, capsys):
    assert main(["test", "--config", configuration(tmp_path, 2), "--ckpt_path", "best", f"--{option}"]) == 2
    name = option.partition("=")[0]
    message = f"lieattn test: --{name}: expected none for test, which uses the network and the weights of --ckpt_path\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("absent", "weights: absent: no such file; the trained networks are"),
        ("absent.ckpt", "weights: there is no checkpoint absent.ckpt"),
        ("digits-c8", "weights: source: expected the class of the network, FramewiseTransformer, got GSANet"),
    ],
)
def test_command_names_weights_that_do_not_fit(weights, message, tmp_path, capsys):
    assert main(["fit", "--config", configuration(tmp_path, 2), "--weights", weights]) == 2
    assert re.search(message, capsys.readouterr().err)
