"""The examples run offline, with a little data."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch_geometric.data import Data

import lieattn
from lieattn.cli import main
from lieattn.models import Preprocessed, Rescaled, transfer_weights
from lieattn.train import CheckpointError, UsageError, load_task
from lieattn_datasets import ImagePoints
from tests import test_data_molecules, test_data_shapes, test_data_sphere
from tests.cases import some

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their annotations there
    spec.loader.exec_module(module)
    return module


def test_rotated_digits(tmp_path, capsys):
    example = load("rotated_digits")
    results = example.main(example.Config(epochs=1, digits=8, out=str(tmp_path)))
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].startswith("RESULT ")
    assert json.loads(lines[-1].removeprefix("RESULT ")) == results
    assert list(results) == ["Z2", "C4", "C8", "C8 in axes"]
    for name, angles in (
        ("C4", "group_angles"),
        ("C8", "45_degrees"),
        ("C8 in axes", "worst_angle"),
        ("C8 in axes", "random_angles"),
    ):
        assert results[name][f"accuracy_{angles}"] == results[name]["accuracy_upright"]
        assert results[name]["equivariance_error"] < 1e-4
    assert results["Z2"]["change_45_degrees"] > 1e-3
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) < 1.03 * min(sizes)
    pictures = [line.removeprefix("picture: ") for line in lines if line.startswith("picture: ")]
    assert len(pictures) == 4
    assert all(Path(path).stat().st_size > 10_000 for path in pictures)


def test_published_networks(monkeypatch, capsys):
    example = load("published_networks")
    images = np.random.default_rng(0).integers(256, size=(12, 8, 8, 3), dtype=np.uint8)
    dataset = ImagePoints(images, np.arange(12) % 10)
    monkeypatch.setattr(example, "load", lambda config: (dataset, dataset))
    config = example.Config(epochs=2, networks="ResNet, p4 ASC,p4 All-CNN alpha_F ", channels=2)
    results = example.main(config)
    assert json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT ")) == results
    assert list(results) == ["ResNet", "p4 ASC", "p4 All-CNN alpha_F"]
    for name in ("p4 ASC", "p4 All-CNN alpha_F"):
        assert results[name]["unchanged_by_quarter_turn"] == 1.0


def run_script(name, monkeypatch, *arguments):
    """Run a script with its command line, and return what it exits with."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return stop.value.code


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rotated_mnist", "--group C3", "rotated_mnist: group: expected one of .*'Z2'.*, got 'C3'"),
        ("rotated_mnist", "--train 0", "train: expected an integer of at least 1, got 0"),
        ("rotated_mnist", "--out FILE", "FILE"),
        ("published_networks", "--networks ResNet,p4", "networks: expected some of ResNet, .*, got 'p4'"),
        ("published_networks", "--test -1", "test: expected an integer of at least 1, got -1"),
        (
            "published_networks",
            "--networks p4-CNN,ResNet --channels 4",
            "channels: expected the default 16, since p4-CNN, ResNet ignore it, got 4",
        ),
        ("published_networks", "--data mnist", "data: expected 'cifar10' or 'rotated_mnist', got 'mnist'"),
        ("fine_tuning", "--root . --steps 0", "fine_tuning: --steps: expected larger integers, got 0"),
        ("fine_tuning", "--root .", "fine_tuning: .*qm9_subset.npz"),
        ("rotated_digits", "--epochs 0", "rotated_digits: epochs: expected an integer of at least 1, got 0"),
        ("rotated_digits", "--radius -1", "radius: expected a positive finite length"),
        ("rotated_digits", "--out FILE", "FILE"),
        ("trained/make", "nbody --checkpoint nowhere.ckpt", "make: there is no checkpoint nowhere.ckpt"),
        ("trained/make", "nbody --minutes 3", "--minutes: a training without --checkpoint is measured, got 3.0"),
        ("trained/make", "nbody --out FILE", "FILE"),
    ],
)
def test_scripts_report_wrong_settings_in_one_line_before_they_train(name, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    found = run_script(name, monkeypatch, *arguments.split())
    assert re.search(message, found)
    assert "\n" not in found


def test_the_search_of_learning_rates_names_wrong_models_and_ends_with_its_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configs = [str(EXAMPLES / "configs" / f"compare_{name}.yaml") for name in ("base", "shapes")]
    few = ["--models", "distances", "--rates", "0.002", "--budget.steps", "5", "--budget.seconds", "null"]
    found = run_script("peers/search", monkeypatch, "--config", *configs, "--models", "distances", "PaiN")
    assert re.fullmatch(r"search: --models: expected some of framewise exact frames, .*, got 'PaiN'", found)
    commands = []
    monkeypatch.setattr("lieattn.cli.main", lambda command: commands.append(command) or 3)
    assert run_script("peers/search", monkeypatch, "--config", *configs, *few) == 3
    searched = yaml.safe_load(Path(commands[0][2]).read_text())
    assert (searched["budget"]["steps"], searched["budget"]["seconds"]) == (None, 8.0)
    assert list(searched["models"]) == ["distances 0.002"]


@pytest.mark.parametrize(
    ("task", "source", "unit"), [("qm9_homo", "QM9Subset", "meV"), ("rmd17_ethanol", "RMD17", "kcal/mol")]
)
def test_errors_in_other_units_than_their_names_say_are_refused(monkeypatch, task, source, unit):
    example = load("evaluate")
    monkeypatch.setattr(example, "load_task", lambda path: None)
    monkeypatch.setattr(example, "load_data", lambda path: type(source, (), {"target_units": ("eV",)})())
    with pytest.raises(UsageError, match=f"--task: {task} measures in {unit}, got FILE in eV"):
        example.main("FILE", task)


def test_fine_tuning_on_more_molecules_than_there_are(monkeypatch):
    example = load("fine_tuning")
    monkeypatch.setattr(example, "QM9GFN2", lambda *_, **options: [None] * 3)
    with pytest.raises(ValueError, match="--molecules: expected at most the 3 of the training set, got 4"):
        example.trained("", 4, 2, 0, None, 1e-6)


def test_fine_tuning_starts_from_the_trained_network(monkeypatch):
    example = load("fine_tuning")
    cloud = Data(z=torch.tensor([8, 1, 1]), pos=torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.1]]))

    def water(root, split, targets, energy_unit, transform):
        return [transform(Data(**cloud.to_dict(), y=torch.tensor([[100.0 * number]]))) for number in range(3)]

    monkeypatch.setattr(example, "QM9GFN2", water)
    starts = []
    monkeypatch.setattr(example, "transfer_weights", lambda *networks: starts.append(transfer_weights(*networks)))
    new, tuned = (example.trained("", 2, 2, 0, start, 1e-6) for start in (None, "qm9-homo"))
    assert starts == [()]
    assert new["steps"] == tuned["steps"] == 2
    assert new["mae_mev"] != tuned["mae_mev"]


def test_rotated_digits_takes_all_digits_if_more_are_asked_for(tmp_path, monkeypatch):
    example = load("rotated_digits")

    def stop(network, digits, *_):
        raise InterruptedError(len(digits))

    monkeypatch.setattr(example, "train", stop)
    with pytest.raises(InterruptedError) as stopped:
        example.main(example.Config(digits=500, out=str(tmp_path)))
    assert stopped.value.args == (500 + 360,)


def test_checkpoints_of_another_task_are_refused(tmp_path, monkeypatch):
    config = yaml.safe_load((EXAMPLES / "configs" / "constellation.yaml").read_text())
    for split in ("train", "val", "test"):
        config["data"][split]["init_args"]["size"] = 4
    config["model"]["init_args"]["network"]["init_args"].update(channels=8, layers=1)
    config["model"]["init_args"]["schedule"]["init_args"]["warmup_epochs"] = 0
    config["trainer"].update(default_root_dir=str(tmp_path), max_epochs=1, check_val_every_n_epoch=1, logger=False)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(file)]) == 0
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    for task, expected in (("nbody", "NBodySimulated"), ("qm9_homo", "QM9 or QM9Subset")):
        found = run_script("evaluate", monkeypatch, checkpoint, "--task", task)
        assert found == f"evaluate: --task: {task} measures on {expected}, got {checkpoint} with Constellation"
    for number in (-1, 1):
        found = run_script("evaluate", monkeypatch, checkpoint, "--task", "constellation", "--clouds", str(number))
        assert found == f"evaluate: --clouds: expected 0, for all, or at least 2, got {number}"
    found = run_script("trained/make", monkeypatch, "nbody", "--checkpoint", checkpoint, "--out", tmp_path)
    assert found == (
        f"make: --checkpoint: nbody is trained on lieattn_datasets.NBodySimulated, {checkpoint} on "
        f"lieattn_datasets.Constellation"
    )


def test_cards_have_the_networks_of_their_configurations():
    """The check of checkpoints accepts the published ones, and tells two cards of one data set apart."""
    make = load("trained/make")
    folder = EXAMPLES / "trained"
    networks = {name: make.configured(folder / (about.config or f"{name}.yaml")) for name, about in make.ABOUT.items()}
    alike = {"aspirin-energy", "ethanol-energy"}  # one network for the atoms of both
    for other in networks:
        published = lieattn.load(other)
        while isinstance(published, Preprocessed | Rescaled):
            published = published.network
        for name, network in networks.items():
            try:
                network.load_state_dict(published.state_dict())
            except RuntimeError:
                fits = False
            else:
                fits = True
            assert fits == (name == other or {name, other} == alike), (name, other)


@pytest.mark.parametrize("name", some(["rotated_mnist", "rotated_digits"], ["rotated_digits"]))
def test_configuration_of_digits_has_a_dry_run_that_writes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data.batch_size", "2", "--data.eval_batch_size", "2", "--trainer.enable_progress_bar", "false"]
    if name == "rotated_mnist":
        digits = np.random.default_rng(0).integers(0, 256, (2, 28, 28)).astype(np.uint8)
        splits = ("train", "valid", "test")
        parts = {f"{axis}_{split}": value for split in splits for axis, value in (("x", digits), ("y", np.arange(2)))}
        Path("data").mkdir()
        np.savez("data/mnist_rot_recipe.npz", **parts)
        words += [word for split in ("train", "val", "test") for word in (f"--data.{split}.verify", "false")]
    file = str(EXAMPLES / f"configs/{name}.yaml")
    assert main(["fit", "--config", file, *words, "--trainer.fast_dev_run", "true"]) == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"data"}


def write_qm9(root):
    test_data_molecules.write_gfn2(root, test_data_molecules.write_subset(root))


def write_rmd17(root):
    z, pos, energy, force = test_data_molecules.trajectory(116)
    np.savez(root / "rmd17_split01.npz", ethanol_z=z, ethanol_R=pos, ethanol_E=energy, ethanol_F=force)


FILES = {
    "qm9_homo": write_qm9,
    "qm9_dipole": write_qm9,
    "rmd17_ethanol": write_rmd17,
    "wind": test_data_sphere.write_wind,
    "sensors": test_data_sphere.write_wind,
}
SMALLER = {
    "nbody": {"size": 4, "start_time": 0.1, "end_time": 0.2},
    "springs": {"size": 4},
    "constellation": {"size": 4},
    "wind": {"points": 40, "draws": 1},
    "sensors": {"points": 40, "draws": 1},
}
# For these, the configuration is that of the experiment itself.
OF_PAPERS = ("wind", "sensors")
# One for each kind of data: values on the sphere, molecules with energies and with forces.
QUICK = ("wind", "qm9_homo", "rmd17_ethanol")
# Exact for all rotations, up to float32; with finite groups, other rotations change the outputs.
EXACT = {"qm9_homo", "constellation", "rmd17_ethanol"}


@pytest.mark.parametrize("name", some([*FILES, "nbody", "springs", "constellation"], QUICK))
def test_configuration_trains_and_its_figures_can_be_had(name, tmp_path, monkeypatch, capsys):
    folder = "papers/homogeneous" if name in OF_PAPERS else "configs"
    config = yaml.safe_load((EXAMPLES / folder / f"{name}.yaml").read_text())
    monkeypatch.setattr(test_data_molecules, "RANDOM", np.random.default_rng(0))
    if name in FILES:
        FILES[name](tmp_path)
    for split in ("train", "val", "test"):
        options = config["data"][split]["init_args"]
        if name in FILES:
            options.update(root=str(tmp_path), verify=False)
        options.update(SMALLER.get(name, {}))
    config["data"].update(batch_size=2, eval_batch_size=2)
    config["trainer"].update(default_root_dir=str(tmp_path / "runs" / name), enable_model_summary=False)
    file = tmp_path / "config.yaml"
    config["model"]["init_args"]["schedule"]["init_args"]["warmup_epochs"] = 0
    config["trainer"].update(max_epochs=1, limit_train_batches=2, check_val_every_n_epoch=1, logger=False)
    file.write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(file)]) == 0, capsys.readouterr().err
    best = tmp_path / "runs" / name / "checkpoints" / "best.ckpt"
    capsys.readouterr()

    example = load("evaluate")
    example.ROLL_OUT = 3
    figures = example.main(str(best), clouds=2)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1].removeprefix("RESULT ")) == figures
    assert all(np.isfinite(value).all() for value in figures.values())
    if name in EXACT:
        assert figures["equivariance"] < 1e-4
    elif name != "springs":
        assert 1e-4 < figures["equivariance"]


@pytest.mark.slow
def test_several_properties_are_trained_at_once(tmp_path, monkeypatch, capsys):
    """Energies, forces, dipoles and charges of one network, from the command line to the ASE calculator."""
    pytest.importorskip("tblite")
    build, calculator = pytest.importorskip("ase.build"), pytest.importorskip("lieattn.ase")
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((EXAMPLES / "configs/properties.yaml").read_text())
    for split in ("train", "val", "test"):
        config["data"][split]["init_args"].update(conformers=1, smiles="C CC CO CN CF O N C=C C=O C#N".split())
    config["trainer"].update(max_epochs=1, limit_train_batches=2, check_val_every_n_epoch=1, enable_model_summary=False)
    config["model"]["init_args"]["schedule"]["init_args"]["warmup_epochs"] = 0
    Path("config.yaml").write_text(yaml.safe_dump(config))
    for command in (["fit"], ["test", "--ckpt_path", "best"]):
        assert main([*command, "--config", "config.yaml"]) == 0, capsys.readouterr().err
    names = {"energy": "eV", "force": "eV_A", "dipole": "D", "charge": "e"}
    printed = dict(re.findall(r"test/error_(\w+) .*? ([\d.e-]+) ", capsys.readouterr().out))
    figures = load("evaluate").main("runs/properties/checkpoints/best.ckpt")
    for name, unit in names.items():
        assert figures[f"{name}_{unit}"] == pytest.approx(float(printed[name]), rel=1e-4)
        # The energies of one test molecule have no spread.
        assert name == "energy" or 1e-4 < figures[f"equivariance_{name}"] < 1
    task = load_task("runs/properties/checkpoints/best.ckpt")
    assert set(task.model.kind) == set(names)
    water = build.molecule("H2O")
    water.calc = calculator.Calculator(task.model)
    assert np.isfinite(water.get_potential_energy())
    assert np.abs(water.get_forces().sum(axis=0)).max() < 1e-5


def test_evaluation_needs_a_checkpoint():
    with pytest.raises(CheckpointError, match=r"there is no checkpoint nowhere.ckpt"):
        load("evaluate").main("nowhere.ckpt")


def test_modelnet_trains_on_points_that_are_drawn_anew_and_is_tested_turned(tmp_path, capsys):
    test_data_shapes.TestVoxels().write_tiny(tmp_path)
    config = yaml.safe_load((EXAMPLES / "configs" / "modelnet10.yaml").read_text())
    for split in ("train", "test"):
        config["data"][split]["init_args"].update(root=str(tmp_path), verify=False)
    transforms = config["data"]["train"]["init_args"]["transform"]["init_args"]["transforms"]
    (drawn,) = [part["init_args"] for part in transforms if part["class_path"].endswith("FixedPoints")]
    drawn["num"] = 8
    config["data"].update(batch_size=4, eval_batch_size=4)
    config["model"]["init_args"]["schedule"]["init_args"]["warmup_epochs"] = 0
    config["trainer"].update(default_root_dir=str(tmp_path / "runs"), max_epochs=1, logger=False)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(file)]) == 0, capsys.readouterr().err
    checkpoint = tmp_path / "runs" / "checkpoints" / "last.ckpt"
    assert main(["test", "--ckpt_path", str(checkpoint), "--trainer.default_root_dir", str(tmp_path / "test")]) == 0
    assert "accuracy" in capsys.readouterr().out
