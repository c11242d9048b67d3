"""Experiments of the papers: each file is complete and starts, and the table has the measured results."""

import functools
import inspect
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback, Trainer
from torch.utils.data import ConcatDataset
from torch_geometric.data import Data

from lieattn.cli import main
from lieattn.compare import build_task, read_settings
from lieattn.geometry import pixel_positions
from lieattn.train import PointSetData, PointSetTask, UsageError, register_types
from lieattn_datasets import Constellation, ImagePoints, NBodySimulated, ProceduralShapes, Springs
from tests.cases import each, quiet_trainer, some

PAPERS = Path(__file__).parent.parent / "examples" / "papers"
FILES = {
    f"{path.parent.name}/{path.stem}": path for path in sorted(PAPERS.glob("*/*.yaml")) if path.parent.name != "parts"
}
SWEEPS = {name: path for name, path in FILES.items() if "models" in yaml.safe_load(path.read_text())}
EXPERIMENTS = {name: path for name, path in FILES.items() if name not in SWEEPS}
# For each family, the experiment that starts in the default suite; if absent, the first one.
CHEAPEST = {"attentive": "attentive/rot_mnist_p4", "gsa": "gsa/rot_mnist_z2", "homogeneous": "homogeneous/pose"}
QUICK = {name.split("/")[0]: name for name in reversed(EXPERIMENTS)} | CHEAPEST
# The first experiment of each family and data set, which is built in the default suite.
FIRST = {name.split("_")[0]: name for name in reversed(EXPERIMENTS)}

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def images(height, width, channels, classes):
    """Return six random images, with the transform of the data set."""

    def make(arguments, transform):
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (6, height, width, channels), generator=generator, dtype=torch.uint8)
        return ImagePoints(pixels, torch.arange(6) % classes, num_classes=classes, transform=transform)

    return make


def voxels(arguments, transform):
    """Return four random masks on a few voxels."""
    pos, grid = pixel_positions(8, 8, 8), torch.tensor([[8, 8, 8]])
    noise = torch.randint(2, (4, 512, 1), generator=torch.Generator().manual_seed(0)).float()
    masks = [Data(x=x, pos=pos, grid=grid, y=torch.tensor([number % 2])) for number, x in enumerate(noise)]
    return ConcatDataset([masks])


def clouds(**attributes):
    """Return four clouds of eight directions with random attributes, given by sizes or functions without arguments."""

    def make(arguments, transform):
        draws = torch.Generator().manual_seed(0)
        items = [Data(pos=pos / pos.norm(dim=1, keepdim=True)) for pos in torch.randn(4, 8, 3, generator=draws)]
        for item in items:
            for name, size in attributes.items():
                item[name] = size() if callable(size) else torch.randn(8, size, generator=draws)
        return ConcatDataset([[item if transform is None else transform(item) for item in items]])

    return make


def few(kind):
    """Return four clouds of a data set that is generated."""
    return lambda arguments, transform: kind(**{**vars(arguments), "size": 4, "transform": transform})


def label():
    return torch.tensor([1])


def atoms():
    return torch.tensor([6, 1, 1, 1, 7, 8, 1, 6])


AXES = dict.fromkeys(("sun", "sun_change"), lambda: torch.ones(1, 3))
WIND = dict.fromkeys(("wind", "y", "east", "interpolated"), lambda: torch.zeros(8, 3)) | AXES

# Generated data for each data set, as functions of its arguments and transform.
MADE = {
    **{kind.__name__: few(kind) for kind in (Constellation, NBodySimulated, ProceduralShapes, Springs)},
    "QM9": clouds(z=atoms, y=lambda: torch.randn(1, 1)),
    "RMD17": clouds(z=atoms, energy=lambda: torch.randn(1), force=3),
    "ModelNet": clouds(normal=3, y=label),
    **dict.fromkeys(("SphericalImages", "SphericalMNIST"), clouds(x=1, y=label, area=lambda: torch.ones(8))),
    "WindOnSphere": clouds(x=1, mask=lambda: torch.arange(8) > 2, weight=lambda: torch.rand(8), **WIND),
    "Digits": images(8, 8, 1, 10),
    "RotatedMNISTRecipe": images(28, 28, 1, 10),
    "CIFAR10": images(32, 32, 3, 10),
    "CIFAR100": images(32, 32, 3, 100),
    "PatchCamelyon": images(96, 96, 3, 2),
    "AdrenalMNIST3D": voxels,
}


@functools.cache
def parser():
    register_types()
    found = ArgumentParser(exit_on_error=False)
    found.add_subclass_arguments(PointSetTask, "model", fail_untyped=False)
    found.add_class_arguments(PointSetData, "data", fail_untyped=False, sub_configs=True)
    found.add_argument("--trainer", type=dict)
    found.add_argument("--seed_everything", type=int)
    found.add_argument("--ema", type=float)
    found.add_argument("--transform", type=Callable)
    found.add_argument("--config", action="config")
    return found


def settings(*paths, changes=()):
    """Return the settings of the files together, with all parts that they name, followed by options."""
    return parser().parse_args([*(word for path in paths for word in ("--config", str(path))), *changes])


def task_of(found):
    return parser().instantiate(Namespace(model=found.model)).model


def made(spec):
    arguments = spec.get("init_args", {})
    transform = arguments.get("transform")
    if transform is not None:
        transform = parser().instantiate(Namespace(transform=transform)).transform
    return MADE[spec["class_path"].rpartition(".")[2]](arguments, transform)


def parts(content):
    """Return all files that a file names."""
    if isinstance(content, dict | list):
        return [name for value in (content.values() if isinstance(content, dict) else content) for name in parts(value)]
    return [content] if isinstance(content, str) and content.endswith(".yaml") else []


@each("name", EXPERIMENTS.keys())
def test_file_is_a_whole_experiment(name):
    content = yaml.safe_load(EXPERIMENTS[name].read_text())
    trainer = content["trainer"]
    assert set(trainer) <= set(inspect.signature(Trainer).parameters)
    assert not {"accelerator", "devices", "strategy"} & set(trainer)  # defaults that Lightning sets
    assert trainer["default_root_dir"] == f"runs/papers/{name}"
    assert trainer.get("max_epochs") or trainer.get("max_steps")
    assert all((EXPERIMENTS[name].parent / part).is_file() for part in parts(content))


@pytest.mark.parametrize("name", some(EXPERIMENTS, FIRST.values()))
def test_experiment_is_built(name):
    found = settings(EXPERIMENTS[name])
    assert found.data.train is not None
    assert found.data.test is not None
    assert isinstance(task_of(found), PointSetTask)


def test_small_changes_any_experiment_into_a_short_run():
    for name in QUICK.values():
        short = settings(EXPERIMENTS[name], PAPERS / "small.yaml")
        assert short.trainer["max_epochs"] == 2
        assert short.model.init_args.get("schedule") is None
        assert short.model.init_args.network is not None
        assert short.data.train is not None


@pytest.mark.parametrize("name", [QUICK["gsa"], QUICK["attentive"]])
def test_command_reads_the_files_that_an_experiment_names(name, capsys):
    path = str(EXPERIMENTS[name])
    assert "parts/" in EXPERIMENTS[name].read_text()
    assert main(["fit", "--config", path, "--config", str(PAPERS / "small.yaml"), "--print_config"]) == 0
    assert "limit_train_batches: 10" in capsys.readouterr().out


def test_options_reach_into_presets():
    dropout = ["--model.network.dropout.input=0.3", "--model.network.dropout.pool=0.2"]
    network = task_of(settings(EXPERIMENTS["gsa/cifar10_z2"], changes=dropout)).network
    rates = [network.input_dropout.p, network.pool_dropout.p, network.blocks[0].attention.dropout]
    assert rates == [0.3, 0.2, 0.1]
    changes = ["--model.network.size=3"]
    assert task_of(settings(EXPERIMENTS["gsa/rot_mnist_r4"], changes=changes)).network.neighborhood.size == 3
    changes = ["--model.network.dict_kwargs.heads=3"]
    assert task_of(settings(EXPERIMENTS["gsa/rot_mnist_r4"], changes=changes)).network.blocks[0].attention.heads == 3


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("hads=3", "unexpected keyword argument 'hads'"),
        ("out_channels=3", "multiple values for argument 'out_channels'"),
        ("neighborhood={class_path: lieattn.geometry.Radius, init_args: {radius: 2.0}}", "such as Radius.*, got dict"),
    ],
)
def test_arguments_that_a_preset_does_not_take_are_named(change, found):
    changes = [f"--model.network.dict_kwargs.{change}"]
    with pytest.raises(ValueError, match=found):
        task_of(settings(EXPERIMENTS["gsa/rot_mnist_r4"], changes=changes))


@pytest.mark.parametrize("name", ["homogeneous/qm9_lietransformer_t3", "homogeneous/qm9_lietransformer_se3"])
def test_molecules_of_lietransformer_have_the_moments_of_its_code(name):
    """train_molecule.py of the authors: Adam with beta1 0.5 and beta2 0.9, for constellations as well."""
    optimizer = settings(EXPERIMENTS[name]).model.init_args.optimizer
    assert list(optimizer.init_args.betas) == [0.5, 0.9]


class Stop(Callback):
    """Stops after two steps of a training that is as long as the experiment."""

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= 2


@pytest.mark.parametrize("name", some(EXPERIMENTS, QUICK.values()))
def test_experiment_starts(name, tmp_path):
    found = settings(EXPERIMENTS[name])
    task = task_of(found)
    sets = {stage: made(found.data[stage]) for stage in ("train", "val") if found.data.get(stage)}
    before = [weight.detach().clone() for weight in task.parameters()]
    kept = {key: value for key, value in found.trainer.items() if key in ("max_epochs", "gradient_clip_val")}
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "inference_mode": False}
    trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=[Stop()], **kept | {"max_epochs": 100} | limits)
    trainer.fit(task, PointSetData(**sets, batch_size=2))
    assert trainer.global_step == 2
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    assert any(not torch.equal(*pair) for pair in zip(before, task.parameters(), strict=True))


@pytest.mark.parametrize("name", SWEEPS)
def test_sweep_is_whole(name):
    found = read_settings([SWEEPS[name]])
    model, chosen = next(iter(found.models.items()))
    assert isinstance(build_task(found, model, chosen), PointSetTask)


@pytest.mark.slow
def test_every_molecule_has_errors_in_its_unit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    for molecule in ("ethanol", "uracil"):
        charges, pos = np.array([6, 8, 1, 1]), draws.normal(size=(60, 4, 3))
        vectors = {"coords": pos, "forces": draws.normal(size=pos.shape)}
        np.savez(tmp_path / f"rmd17_{molecule}.npz", nuclear_charges=charges, energies=draws.normal(size=60), **vectors)
    for half, frames in (("train", range(52)), ("test", range(52, 60))):
        np.savetxt(tmp_path / f"index_{half}_01.csv", frames, "%d")
    spec = spec_from_file_location("every", PAPERS / "every.py")
    every = module_from_spec(spec)
    spec.loader.exec_module(every)
    sets = [f"--data.{stage}.{option}" for stage in ("train", "val", "test") for option in ("root=.", "verify=false")]
    network = ["--model.network.model.channels=4", "--model.network.model.layers=1"]
    options = ["--config", str(PAPERS / "small.yaml"), *sets, *network]
    found = {}
    for molecule in ("ethanol", "uracil"):  # the second run keeps the errors of the first
        found |= every.main(str(EXPERIMENTS["homogeneous/rmd17"]), [molecule], options)
    assert list(found) == ["ethanol", "uracil"]
    assert all(set(errors) == {"error_energy", "error_force", "unit"} for errors in found.values())
    assert found["uracil"]["unit"] == "meV"
    assert found == json.loads((tmp_path / "runs/papers/homogeneous/rmd17/errors.json").read_text())


def test_folder_of_several_values_can_be_chosen(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("lieattn.cli.main", lambda arguments: calls.append(arguments) or 3)
    options = ["--values", "ethanol", "--seed_everything", "1", "--trainer.default_root_dir", str(tmp_path)]
    path = str(EXPERIMENTS["homogeneous/rmd17"])
    monkeypatch.setattr("sys.argv", ["every.py", path, *options])
    with pytest.raises(SystemExit, match="3"):
        run_path(str(PAPERS / "every.py"), run_name="__main__")
    assert calls[0][:5] == ["fit", "--config", path, "--seed_everything", "1"]
    assert calls[0][-1] == f"--trainer.default_root_dir={tmp_path / 'ethanol'}"


def test_only_molecules_have_several_values():
    spec = spec_from_file_location("every", PAPERS / "every.py")
    every = module_from_spec(spec)
    spec.loader.exec_module(every)
    with pytest.raises(UsageError, match=r"config: expected a file that trains on QM9 or RMD17, got .* with WindOn"):
        every.main(str(EXPERIMENTS["homogeneous/wind"]))


# The table


def results():
    return json.loads((PAPERS / "results.json").read_text())


def measured(records):
    """Return the table cell of one experiment: the results for each budget, with the deviation over seeds."""
    budgets = defaultdict(list)
    for record in records:
        budgets[record["epochs"], record["machine"], *record["figures"]].append(record)
    parts = []
    for (epochs, machine, *_), group in budgets.items():
        figures = []
        for figure in group[0]["figures"]:
            values = [record["figures"][figure] for record in group]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            figures.append(f"{figure} **{statistics.mean(values):.4g}**{spread}")
        minutes = statistics.mean(record["minutes"] for record in group)
        seeds = "seed" + ("s " if len(group) > 1 else " ") + ", ".join(str(record["seed"]) for record in group)
        length = "epoch" if epochs == 1 else "epochs"
        parts.append(f"{', '.join(figures)} ({seeds}; {epochs} {length}, {minutes:.3g} minutes, {machine})")
    return "; ".join(parts) or "not run here"


def rows():
    """Return the cells of the table, by experiment."""
    table = {}
    for line in (PAPERS / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[0].startswith("`lieattn "):
            table[cells[0].split("examples/papers/")[1].split(".yaml")[0]] = cells
    return table


def test_every_experiment_has_a_row():
    assert set(rows()) == set(FILES)


def test_figures_of_the_table_are_the_measured_ones():
    by_experiment = defaultdict(list)
    for record in results():
        assert set(record) == {"experiment", "command", "seed", "epochs", "minutes", "machine", "figures"}
        assert f"--config examples/papers/{record['experiment']}.yaml" in record["command"]
        by_experiment[record["experiment"]].append(record)
    assert set(by_experiment) <= set(FILES)
    for name, (_, _, ours, _, _) in rows().items():
        assert ours == measured(by_experiment[name]), name


def test_reached_compares_the_accuracies():
    """Ours is the best accuracy of a row, published the first printed one."""
    compared = 0
    for name, (_, published, ours, reached, _) in rows().items():
        accuracies = [float(number) for number in re.findall(r"\*\*([\d.]+)\*\*", ours) if "accuracy" in ours]
        printed = re.match(r"\d+\.\d+", published)
        if ours == "not run here":
            assert reached == "not run", name
        elif printed and accuracies:
            below = float(printed[0]) - max(accuracies)
            assert reached == (f"no, {below:.2f} below" if below > 0 else "yes"), name
            compared += 1
    assert compared >= 10


def test_cells_have_mean_and_deviation():
    one = {"seed": 0, "epochs": 3, "minutes": 2.0, "machine": "one core", "figures": {"accuracy, %": 90.0}}
    two = one | {"seed": 1, "minutes": 3.0, "figures": {"accuracy, %": 92.0}}
    assert measured([one]) == "accuracy, % **90** (seed 0; 3 epochs, 2 minutes, one core)"
    assert measured([one, two]) == "accuracy, % **91** ± 1.4 (seeds 0, 1; 3 epochs, 2.5 minutes, one core)"
    assert measured([]) == "not run here"
