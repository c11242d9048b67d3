"""Trained networks of the library: they load by name, predict the values of their cards, and keep their guarantees."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Compose, Constant

import lieattn
import lieattn_datasets as ld
from lieattn.certify import certify
from lieattn.cli import main
from lieattn.geometry import PrincipalFrames, Radius
from lieattn.groups import FiniteGroup, cyclic
from lieattn.io import trained_cards
from lieattn.models import FramewiseTransformer, GSANet, Preprocessed, Rescaled
from lieattn.testing import relative_error
from tests.cases import some

FOLDER = Path(lieattn.__file__).parent / "trained"
CARDS = trained_cards()
LARGEST = 2 * 2**20
FACTS = (
    "name task inputs outputs network parameters transform guarantee group data training test certificate version "
    "example"
).split()
every_network = pytest.mark.parametrize("name", sorted(CARDS))


def item(card):
    """Return the example item of a card as a cloud."""
    return Data(**{name: torch.tensor(value) for name, value in card["example"]["input"].items()})


def assert_predicts(network, card, given):
    """Assert that the outputs for an example item, or for a batch of copies of it, are those of its card."""
    outputs, found = card["example"]["output"], network(given)
    for key, values in found._asdict().items() if isinstance(outputs, dict) else [("", found)]:
        expected = torch.tensor(outputs[key] if key else outputs)
        # Relative to the largest output: a force of 0.1 beside one of 89 has the rounding errors of the larger one.
        assert relative_error(values.detach()[: len(expected)].cpu(), expected) < 1e-5


@every_network
def test_a_network_predicts_what_its_card_says(name):
    card = CARDS[name]
    assert list(card) == FACTS
    assert card["name"] == name
    assert (FOLDER / f"{name}.safetensors").stat().st_size <= LARGEST
    network = lieattn.load(name)
    assert not network.training
    assert network.guarantee == card["guarantee"]
    assert sum(weight.numel() for weight in network.parameters()) == card["parameters"]
    for given in (item(card), Batch.from_data_list([item(card)] * 2)):
        assert_predicts(network, card, given)


# Numbers and vectors; below, the command certifies a network with forces.
QUICK = {"digits-c8", "nbody"}


@pytest.mark.parametrize("name", some(sorted(CARDS), QUICK))
def test_a_network_keeps_what_it_promises(name):
    card, network = CARDS[name], lieattn.load(name)
    measured = card["certificate"]
    assert measured["verdict"] == "kept"
    tolerances = {getattr(torch, dtype): value for dtype, value in measured["tolerances"].items()}
    certificate = certify(network, item(card), tolerances=tolerances, rotations=1, elements=2, continuity=False)
    assert certificate.verdict == "kept", str(certificate)
    assert (certificate.group, certificate.guarantee) == (card["group"], card["guarantee"])
    assert certificate.worst().keys() == measured["errors"]["element"].keys()
    # Only reflections are outside of SE(3), and the example may be its own mirror image. Invariants of six or
    # twelve directions do not change under reflections of the cube or the icosahedron either.
    if name not in ("qm9-homo-o", "ethanol-energy", "aspirin-energy") and card["group"] != "SE(3)":
        assert certificate.unique is not False


def test_names_are_found_unless_there_is_such_a_file(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="digits-c8") as error:
        lieattn.load("digits-c9")
    assert all(name in str(error.value) for name in CARDS)
    with pytest.raises(FileNotFoundError, match=r"the trained networks are .*digits-c8\.safetensors"):
        lieattn.load("digits-c8.safetensors")
    for path in ("digits-c9.safetensors", "folder/digits-c8", tmp_path / "digits-c8"):
        with pytest.raises(FileNotFoundError) as error:
            lieattn.load(path)
        assert "trained networks" not in str(error.value)
    monkeypatch.chdir(tmp_path)
    network = FramewiseTransformer(cyclic(4), 1, 1, channels=4, layers=1)
    lieattn.save(network, "digits-c8")
    assert isinstance(lieattn.load("digits-c8"), FramewiseTransformer)


def test_cards_are_shown(capsys):
    assert main(["models", "--trained"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in CARDS)
    assert main(["models", "--trained", "digits-c8"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {key: value for key, value in CARDS["digits-c8"].items() if key != "example"}
    assert main(["models", "--trained", "digits-c9"]) == 2
    assert "expected one of" in capsys.readouterr().err


def molecules():
    torch.manual_seed(0)
    return [Data(z=torch.tensor([6, 1, 8, 1]), pos=torch.randn(4, 3)) for _ in range(2)]


def images():
    torch.manual_seed(0)
    return [ld.image_to_data(torch.rand(8, 8).numpy()) for _ in range(2)]


PREPROCESSED = {
    "charges": (
        lambda: Preprocessed(
            Rescaled(
                FramewiseTransformer(PrincipalFrames(), 6, 1, channels=4, layers=1, neighborhood=Radius(3.0)),
                {"y": 2.0},
                {"y": -7.0},
            ),
            ld.MoleculeFeatures((1, 6, 8), powers=2),
        ),
        molecules,
    ),
    "constant": (
        lambda: Preprocessed(FramewiseTransformer(PrincipalFrames(), 1, 2, channels=4, layers=1), Constant(cat=False)),
        molecules,
    ),
    "averaged pixels": (
        lambda: Preprocessed(
            GSANet(cyclic(4), 1, 3, channels=8, heads=1, blocks=(1,), neighborhood=Radius(1.5)),
            Compose([ld.AveragePixels(2), ld.Standardize(0.5, 0.2)]),
        ),
        images,
    ),
}


@pytest.mark.parametrize("name", PREPROCESSED)
def test_a_transform_goes_with_its_network(name, tmp_path):
    make, clouds = PREPROCESSED[name]
    network, data = make().eval(), Batch.from_data_list(clouds())
    wanted = network.network(network.transform(data))
    torch.testing.assert_close(network(data), wanted, rtol=0, atol=0)
    lieattn.save(network, tmp_path / "network.safetensors")
    again = lieattn.load(tmp_path / "network.safetensors")
    torch.testing.assert_close(again(data), wanted, rtol=0, atol=0)
    assert (again.guarantee, again.kind, again.jumps) == (network.guarantee, network.network.kind, network.jumps)
    certificate = certify(again, clouds(), rotations=0, continuity=False)
    assert certificate.verdict == "kept", str(certificate)
    assert isinstance(again.symmetry.group, FiniteGroup) == (name == "averaged pixels")


def test_a_transform_gives_data():
    network = FramewiseTransformer(cyclic(4), 1, 1, channels=4, layers=1)
    with pytest.raises(TypeError, match="transform: expected data with pos"):
        Preprocessed(network, len)(Data(pos=torch.randn(3, 2)))
    with pytest.raises(TypeError, match="transform"):
        Preprocessed(network, "MoleculeFeatures")


def test_the_command_has_the_tolerances_of_the_card(capsys):
    """Rounding of its forces exceeds the default of float32, so its card allows 5e-05."""
    quick = ["certify", "aspirin-forces", "--dtype", "float32", "--elements", "2", "--outside", "1"]
    assert main(quick) == 0
    assert "measured on: the item of its card" in capsys.readouterr().out
    assert main([*quick, "--tolerance", "1e-9"]) == 1
    assert "guarantee NOT kept" in capsys.readouterr().out


@every_network
def test_the_table_of_the_documentation_is_that_of_the_cards(name):
    card = CARDS[name]
    page = (Path(__file__).parent.parent / "docs" / "trained.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    _, task, _, parameters, group, test, change, outside, minutes = [cell.strip() for cell in line[1:-1].split("|")]
    assert task == card["task"]
    assert int(parameters.replace(",", "")) == card["parameters"]
    assert group == card["group"]
    assert float(minutes) == card["training"]["minutes"]
    for text, value in zip((change, outside), card["certificate"]["relative"].values(), strict=True):
        assert (value is None) == (text == "refused")
        assert value is None or float(text) == pytest.approx(value, abs=0.5001 * float(f"1{text[1:]}"))
    errors, items = test.rsplit("(", 1)
    assert int(items.split()[0].replace(",", "")) == card["test"]["items"]
    kind = {"accuracy": "accuracy", "MAE": "error", "MSE": "loss"}[test.split()[0]]
    figures = [figure for name, figure in card["test"].items() if name.startswith(kind)]  # of each target
    for value, figure in zip(re.findall(r"[\d.]+", errors), figures, strict=True):
        assert float(value) == pytest.approx(figure * (100 if kind == "accuracy" else 1), rel=0.012)
