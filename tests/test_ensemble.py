"""Ensembles: means and standard deviations of outputs, including forces; files; certificates."""

import csv
import os
import re
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lieattn.certify import certify
from lieattn.cli import main
from lieattn.cli._predictions import mean_network
from lieattn.geometry import Radius
from lieattn.groups import octahedral, tetrahedral
from lieattn.models import EnergyAndForce, EnergyForces, Ensemble, FramewiseTransformer, Rescaled
from lieattn.reps import Scalar, Vector
from lieattn.testing import randomize
from lieattn.train import PointSetClassifier, PointSetRegressor, load_task
from tests.cases import save_untrained, short_training

pytestmark = [
    short_training,
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*"),
]
NUMBER = 3
T = tetrahedral()


def network(seed, group=T):
    options = {"channels": 4, "layers": 1, "neighborhood": Radius(2.0, smooth=True), "pool": "sum"}
    return randomize(FramewiseTransformer(group, 1, 1, **options), seed).double().eval()


@pytest.fixture(scope="module")
def networks():
    return [network(seed) for seed in range(NUMBER)]


@pytest.fixture(scope="module")
def clouds():
    torch.manual_seed(0)
    return [Data(x=torch.rand(n, 1).double(), pos=torch.randn(n, 3).double()) for n in (4, 6)]


def test_means_and_unbiased_deviations(networks, clouds):
    batch, ensemble = Batch.from_data_list(clouds), Ensemble(networks)
    each = np.stack([member(batch).detach().numpy() for member in networks])
    mean, std = ensemble.spread(batch)
    np.testing.assert_allclose(mean.detach().numpy(), each.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(std.detach().numpy(), each.std(axis=0, ddof=1), atol=1e-12)
    assert std.min() > 1e-3
    assert torch.equal(ensemble(batch), mean)


class Stating(nn.Module):
    """States discontinuities, kinks, and whether it sees the order of the points."""

    def __init__(self, jumps, has_kinks, sees_order):
        super().__init__()
        self.jumps, self.has_kinks, self.sees_order = jumps, has_kinks, sees_order


def test_what_one_network_has_the_ensemble_has():
    smooth, other = Stating(("first",), False, False), Stating(("second", "third"), True, True)
    for pair in ([smooth, other], [other, smooth]):
        ensemble = Ensemble(pair)
        assert set(ensemble.jumps) == {"first", "second", "third"}
        assert ensemble.has_kinks
        assert ensemble.sees_order
    plain = Ensemble([smooth, Stating((), False, False)])
    assert (plain.jumps, plain.has_kinks, plain.sees_order) == (("first",), False, False)
    assert Ensemble([smooth, Stating(None, False, False)]).jumps is None  # not known
    smooth.cloud_inputs, other.cloud_inputs = ("charge",), ("spin", "charge")
    smooth.vector_inputs, other.vector_inputs = (), ("vel",)
    found = Ensemble([smooth, other])
    assert (found.cloud_inputs, found.vector_inputs) == (("charge", "spin"), ("vel",))


class Scaled(nn.Module):
    def forward(self, data, geometry=None, factor=1.0):
        return torch.tensor([geometry * factor])


def test_geometry_and_options_reach_each_network(networks, clouds, monkeypatch):
    batch, ensemble = Batch.from_data_list(clouds), Ensemble(networks)
    expected, geometry = ensemble.spread(batch), ensemble.geometry(batch)
    assert len(geometry) == len(networks)
    with monkeypatch.context() as patched:
        for member in networks:
            patched.setattr(member, "geometry", None)  # it is not computed again
        for given in (geometry, geometry[0]):
            torch.testing.assert_close(ensemble.spread(batch, given), expected)
            torch.testing.assert_close(ensemble(batch, given), expected.mean)
    with pytest.raises(ValueError, match=f"geometry: expected one for each of {len(networks)} networks, got 1"):
        ensemble(batch, geometry[:1])
    near = FramewiseTransformer(T, 1, 1, channels=4, layers=1, neighborhood=Radius(1.5, smooth=True))
    apart = Ensemble([randomize(near).double().eval(), networks[0]])
    torch.testing.assert_close(apart(batch, apart.geometry(batch)), apart(batch))
    both = Ensemble([Scaled(), Scaled()])
    assert both(None, [1.0, 3.0], factor=5.0).item() == both(None, 2.0, factor=5.0).item() == 10.0
    assert both.spread(None, [1.0, 3.0], factor=5.0).std.item() == pytest.approx(50**0.5)
    forces = Ensemble([EnergyForces(member) for member in networks]).eval()
    assert forces(batch, create_graph=True).force.requires_grad
    assert forces.spread(batch, create_graph=True).std.force.requires_grad


class Fixed(nn.Module):
    """Returns the same outputs for all data."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, data):
        return self.outputs


def named(**outputs):
    return {name: torch.tensor([value]) for name, value in outputs.items()}


def test_names_may_be_in_another_order():
    mean, std = Ensemble([Fixed(named(a=1.0, b=4.0)), Fixed(named(b=8.0, a=3.0))]).spread(None)
    assert (mean["a"].item(), mean["b"].item()) == (2.0, 6.0)
    assert std["b"].item() == pytest.approx(8**0.5)


def test_means_of_sums_over_the_points_are_in_the_units_of_the_first_task(networks, clouds):
    tasks = [PointSetRegressor(one, "energy", extensive=["energy"]).double() for one in networks[:2]]
    for number, task in enumerate(tasks, 1):
        task.shift_energy.fill_(number), task.scale_energy.fill_(10.0 * number)
    batch = Batch.from_data_list(clouds)
    unreferenced = mean_network(tasks[0], tasks[1:])(batch)
    batch.z = torch.ones(batch.num_nodes, dtype=torch.long)
    for task in tasks:  # references of both change the mean, and those of the first are those of the data
        task.references_energy = torch.tensor([[1.0, -7.0]]).double()
    torch.testing.assert_close(mean_network(tasks[0], tasks[1:])(batch), unreferenced)
    for task in tasks:
        task.references_energy = None
    mean = torch.stack([task(batch)["energy"] for task in tasks]).mean(dim=0)
    found = mean_network(tasks[0], tasks[1:])(batch)
    torch.testing.assert_close(found, (mean - torch.tensor([[4.0], [6.0]])) / 10)


def test_outputs_without_rows_have_no_deviations(networks):
    """Torch would warn about the standard deviation of nothing, and warnings are errors here."""
    empty = Data(x=torch.zeros(0, 1).double(), pos=torch.zeros(0, 3).double())
    mean, std = Ensemble([EnergyForces(member) for member in networks]).spread(empty)
    assert mean.force.shape == std.force.shape == (0, 3)
    assert std.energy.tolist() == [0.0]


def test_forces_have_means_and_deviations(networks, clouds):
    """The mean force is that of the mean energy, for an ensemble of energies with forces and the other way round."""
    batch = Batch.from_data_list(clouds)
    mean, std = Ensemble([EnergyForces(member) for member in networks]).eval().spread(batch)
    assert isinstance(mean, EnergyAndForce)
    assert std.force.shape == batch.pos.shape
    whole = EnergyForces(Ensemble(networks)).eval()(batch)
    torch.testing.assert_close(mean.energy, whole.energy, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mean.force, whole.force, rtol=1e-10, atol=1e-10)
    each = torch.stack([EnergyForces(member).eval()(batch).force for member in networks])
    torch.testing.assert_close(std.force, each.std(dim=0), rtol=1e-10, atol=1e-10)


def test_outputs_by_name_keep_their_names(networks, clouds):
    units = [Rescaled(EnergyForces(member), {"energy": 2.0, "force": 2.0}, {"energy": 1.0}) for member in networks]
    mean, std = Ensemble(units).eval().spread(clouds[0])
    wanted = Ensemble([EnergyForces(member) for member in networks]).eval().spread(clouds[0])
    torch.testing.assert_close(mean.energy, 1 + 2 * wanted.mean.energy)
    torch.testing.assert_close(std.energy, 2 * wanted.std.energy)
    scaled = Ensemble([Rescaled(EnergyForces(member), {"energy": 2.0}) for member in networks]).eval().spread(clouds[0])
    assert list(scaled.mean) == ["energy"]


@pytest.mark.parametrize("kind", ["vector", "position", Vector(3), {"y": "vector", "z": "invariant"}], ids=str)
def test_units_of_what_turns_keep_the_symmetry(kind):
    """A constant vector does not turn, and neither does a vector whose components have different units."""
    network = nn.Identity()
    network.kind = kind
    with pytest.raises(ValueError, match=r"shift\['y'\]: expected 0 or none, since y turns with the points, got 1"):
        Rescaled(network, {"y": 2.0}, {"y": 1.0})
    with pytest.raises(ValueError, match=r"scale\['y'\]: expected one for all components of y, which turns, got"):
        Rescaled(network, {"y": torch.tensor([[1.0, 1.0, 2.0]])})
    scale = torch.tensor([[[2.0]], [[3.0]]])  # of two vectors
    if kind == "position":
        with pytest.raises(ValueError, match=r"scale\['y'\]: expected 1, since y moves with the points, got"):
            Rescaled(network, {"y": scale})
        scale = torch.ones(2, 1, 1)
    Rescaled(network, {"y": scale}, {"y": torch.zeros(3)})
    if isinstance(kind, dict):
        Rescaled(network, {"z": torch.tensor([1.0, 2.0])}, {"z": 1.0})
    network.kind = Scalar() + Vector(3)
    numbers = torch.tensor([1.0, 0.0, 0.0, 0.0])
    Rescaled(network, {"y": 1.0 + numbers}, {"y": numbers})
    with pytest.raises(ValueError, match="expected 0 or none"):
        Rescaled(network, {"y": 1.0}, {"y": 1.0})


def test_loaded_units_are_those_of_the_network_alone():
    scale, shift = torch.tensor(2.0), torch.tensor(1.0)
    model = Rescaled(nn.Identity(), {"y": scale}, {"y": shift})
    model.load_state_dict(Rescaled(nn.Identity(), {"y": 5.0}, {"y": 4.0}).state_dict())
    assert model(torch.tensor(1.0)) == 9
    assert (scale, shift) == (2, 1)


def test_calculator_of_ase(networks):
    """The ensemble may be inside EnergyForces or Rescaled."""
    ase, calculator = pytest.importorskip("ase"), pytest.importorskip("lieattn.ase")
    atoms = ase.Atoms("OH2", [[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]])
    scale = {"energy": 2.0}, {"energy": 3.0}
    units = [Rescaled(member, *scale) for member in networks]
    each = []
    for one in units:
        atoms.calc = calculator.Calculator(one, energy_unit="kcal/mol")
        each.append((atoms.get_potential_energy(), atoms.get_forces()))
    energies, forces = (np.stack(column) for column in zip(*each, strict=True))
    for model in (Ensemble(units), EnergyForces(Ensemble(units)), Rescaled(EnergyForces(Ensemble(networks)), *scale)):
        atoms.calc = calculator.Calculator(model, energy_unit="kcal/mol")
        assert atoms.get_potential_energy() == pytest.approx(energies.mean(), abs=1e-12)
        np.testing.assert_allclose(atoms.get_forces(), forces.mean(axis=0), atol=1e-12)
        assert atoms.calc.get_property("energy_std", atoms) == pytest.approx(energies.std(ddof=1), abs=1e-12)
        np.testing.assert_allclose(atoms.calc.results["forces_std"], forces.std(axis=0, ddof=1), atol=1e-12)


def promising(guarantee, symmetry):
    made = nn.Identity()
    made.guarantee, made.symmetry = guarantee, symmetry
    return made


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (
            lambda: [promising("kept", T), promising("kept", octahedral())],
            ValueError,
            r"got kept \(R\^3 x. O\) and kept",
        ),
        (lambda: [promising("kept", T), promising("well kept", T)], ValueError, r"got kept .* and well kept"),
        (lambda: [network(0)], ValueError, "networks: expected at least two, got 1"),
        (lambda: 2 * [network(0)], ValueError, "networks: expected different networks, got one of them more than once"),
        (
            lambda: [network(0), network(0, octahedral())],
            ValueError,
            "networks: expected the same guarantee for all, got",
        ),
        (lambda: [network(0), 3], TypeError, "networks"),
    ],
    ids=["same words", "other words", "one", "the same twice", "other group", "no network"],
)
def test_wrong_networks(made, error, message):
    with pytest.raises(error, match=message):
        Ensemble(made())


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("text", "text", "expected tensors or mappings of tensors as outputs, got str"),
        ("text", torch.ones(1), "expected the same outputs of all, got str and a tensor"),
        (torch.ones(2, 2), torch.ones(2, 1), r"expected outputs of one shape, got \[2, 2\] and \[2, 1\]"),
        *(
            (*pair, r"expected the same outputs of all, got .*\['charge', 'energy'\]")
            for other in (named(energy=1.0, dipole=1.0), named(energy=1.0), torch.ones(1))
            for pair in permutations((named(energy=1.0, charge=1.0), other))
        ),
    ],
)
def test_outputs_must_be_tensors_that_agree(one, other, message):
    with pytest.raises(TypeError if one is other else ValueError, match=f"networks: {message}"):
        Ensemble([Fixed(one), Fixed(other)])(None)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1], ids=["without first", "without last"])
def test_vectors_that_only_some_networks_read_turn(order, clouds):
    options = {"channels": 4, "layers": 1, "pool": "sum"}
    networks = [
        randomize(FramewiseTransformer(T, 1, 1, vector_inputs=names, **options)).double() for names in ((), ("vel",))
    ]
    ensemble = Ensemble(networks[::order])
    assert ensemble.vector_inputs == ("vel",)
    items = [cloud.clone() for cloud in clouds]
    for item in items:
        item.vel = torch.randn_like(item.pos)
    assert certify(ensemble, items).passed


class Clouds(Dataset):
    """Clouds with a label, an energy and forces, in units that differ between the training sets."""

    def __init__(self, unit: float = 1.0) -> None:
        self.unit = unit

    def __len__(self):
        return 5

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        pos = torch.randn(4, 3, generator=generator)
        energy = self.unit * (3 + pos.square().sum()).reshape(1)
        force = -2 * self.unit * pos
        return Data(
            x=torch.rand(4, 1, generator=generator), pos=pos, energy=energy, force=force, y=torch.tensor([index % 2])
        )


def whole_batch():
    return Batch.from_data_list([Clouds()[index] for index in range(len(Clouds()))])


def classifier(seed, labels=1, group=T):
    made = FramewiseTransformer(group, 1, 2 * labels, channels=4, layers=1, neighborhood=Radius(2.0, smooth=True))
    return PointSetClassifier(randomize(made, seed), 2, labels=labels)


def regressor(seed, **targets):
    return PointSetRegressor(EnergyForces(network(seed).float()), targets or {"energy": 1.0, "force": 2.0})


TASKS = {
    "a": lambda: classifier(0),
    "b": lambda: classifier(1),
    "c": lambda: classifier(2),
    "O": lambda: classifier(0, group=octahedral()),
    "energy": lambda: regressor(0, energy=1.0),
    "e": lambda: regressor(0),
    "f": lambda: regressor(1),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return checkpoint files of tasks, by name; regressors have measured data in units of their own."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for number, (name, make) in enumerate(TASKS.items()):
        task = make()
        if isinstance(task, PointSetRegressor):
            task.measure(Clouds(1.0 + number))
        save_untrained(task, folder / f"{name}.ckpt")
    (folder / "damaged.ckpt").write_bytes((folder / "a.ckpt").read_bytes()[:-200])
    return {path.stem: str(path) for path in folder.glob("*.ckpt")}


def command(name, files, root, *more):
    options = ["--data.test", f"{__name__}.Clouds", "--data.val", f"{__name__}.Clouds", "--data.eval_batch_size", "2"]
    trainer = {"accelerator": "cpu", "default_root_dir": root, "logger": "false", "enable_progress_bar": "false"}
    given = [word for key, value in trainer.items() for word in (f"--trainer.{key}", str(value))]
    return main([name, "--ckpt_path", *files, *options, *given, *more])


def table(path):
    with path.open() as file:
        return {name: np.array(column, float) for name, *column in zip(*csv.reader(file), strict=True)}


@pytest.mark.parametrize("number", [1, 3])
def test_scores_of_several_checkpoints_and_their_deviations(number, checkpoints, tmp_path):
    files = [checkpoints[name] for name in "abc"[:number]]
    assert command("predict", files, tmp_path) == 0
    found = table(tmp_path / "predictions.csv")
    with torch.no_grad():
        each = np.stack([load_task(path)(whole_batch()).numpy() for path in files])
    names = ["cloud", "true", "predicted", "probability_0", "probability_1", "logit_0", "logit_1"]
    assert list(found) == names + (["logit_std_0", "logit_std_1"] if number > 1 else [])
    for k in range(2):
        np.testing.assert_allclose(found[f"logit_{k}"], each.mean(axis=0)[:, k], rtol=1e-5, atol=1e-6)
        if number > 1:
            np.testing.assert_allclose(found[f"logit_std_{k}"], each.std(axis=0, ddof=1)[:, k], rtol=1e-4, atol=1e-6)
    assert found["predicted"].tolist() == each.mean(axis=0).argmax(axis=1).tolist()


def test_numbers_of_several_checkpoints_are_in_the_units_of_the_data(checkpoints, tmp_path, capsys):
    """Tasks trained on different units have different shifts and scales, which the mean must apply."""
    files, batch = [checkpoints["e"], checkpoints["f"]], whole_batch()
    assert command("predict", files, tmp_path) == 0
    outputs = [load_task(path)(batch) for path in files]
    for name in ("energy", "force"):
        each = np.stack([output[name].detach().numpy() for output in outputs])
        found = table(tmp_path / f"predictions_{name}.csv")
        each = each.reshape(*each.shape[:2], -1)
        width = each.shape[-1]
        true = np.stack([found.pop(f"true_{name}_{k}") for k in range(width)], axis=1)
        np.testing.assert_allclose(true, batch[name].reshape(true.shape), rtol=1e-6)
        first = batch.batch if name == "force" else torch.arange(batch.num_graphs)
        assert found.pop("cloud").tolist() == first.tolist()
        if name == "force":
            assert found.pop("point").tolist() == (torch.arange(len(first)) - batch.ptr[first]).tolist()
        assert list(found) == [f"{name}{kind}_{k}" for kind in ("", "_std") for k in range(width)]
        columns = np.stack(list(found.values()), axis=1)
        np.testing.assert_allclose(columns[:, :width], each.mean(axis=0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(columns[:, width:], each.std(axis=0, ddof=1), rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    assert command("validate", files, tmp_path) == 0
    told = dict(re.findall(r"val/(\w+) +\S? +(\S+)", capsys.readouterr().out))
    for name in ("energy", "force"):
        mean = sum(output[name] for output in outputs) / 2
        wanted = (mean - batch[name]).abs().mean().item()
        assert float(told[f"error_{name}"]) == pytest.approx(wanted, rel=1e-4)


def test_loss_of_several_checkpoints_is_in_the_units_of_the_first(checkpoints, tmp_path, capsys):
    losses = {}
    for files in (["e"], ["f"], ["e", "f"]):
        assert command("test", [checkpoints[name] for name in files], tmp_path) == 0
        losses["".join(files)] = float(re.search(r"test/loss +\S? +(\S+)", capsys.readouterr().out)[1])
    first = load_task(checkpoints["e"])
    batch = whole_batch()
    outputs = [load_task(checkpoints[name])(batch) for name in "ef"]
    wanted = 0.0
    for name, weight in first.targets.items():
        mean = sum(output[name] for output in outputs) / 2
        wanted += weight * ((mean - batch[name]) / first.get_buffer(f"scale_{name}")).abs().mean().item()
    assert losses["ef"] == pytest.approx(wanted, rel=1e-4)
    assert len(set(losses.values())) == 3


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("test", ["a", "e"], "got the task 'PointSetClassifier' of {a} and 'PointSetRegressor' of {e}"),
        ("predict", ["e", "energy"], "got targets ['energy', 'force'] of {e} and ['energy'] of {energy}"),
        ("predict", ["a", "b", "O"], "R^3 x| O acting on the points, exactly up to rounding' of {O}"),
        ("predict", ["a", "damaged"], "{damaged} is damaged, or is not a checkpoint"),
        ("test", ["a", "none"], "there is no checkpoint none.ckpt"),
        ("test", ["a", "a"], "--ckpt_path: expected different files, got {a} {a}"),
        ("test", ["a", "again"], "--ckpt_path: expected different files, got {a} {again}"),
        ("fit", ["a", "b"], "--ckpt_path: expected one checkpoint, since fit continues one run, got 2"),
    ],
)
def test_checkpoints_that_make_no_ensemble(name, files, message, checkpoints, tmp_path, capsys):
    paths = {"none": "none.ckpt", **checkpoints}
    paths["again"] = os.path.join(os.path.dirname(paths["a"]), ".", os.path.basename(paths["a"]))
    assert command(name, [paths[file] for file in files], tmp_path) == 2
    assert message.format(**paths) in capsys.readouterr().err
    assert not list(tmp_path.glob("*.csv"))
