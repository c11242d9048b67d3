"""Training: batches, schedules, checkpoints, continued runs, two processes, the command line."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool

import lieattn
from lieattn.cli import COMMANDS, _training, main
from lieattn.cli._predictions import mean_network
from lieattn.geometry import Radius
from lieattn.groups import FiniteGroup, cyclic, tetrahedral
from lieattn.io import FORMAT, add_digests, check_content, describe_group, digest, load
from lieattn.io._files import untrusted_names
from lieattn.models import FieldModel, FramewiseTransformer, Lifting
from lieattn.nn import VectorHead
from lieattn.train import (
    AveragedWeights,
    CheckpointError,
    Constant,
    EpochSampler,
    LastCheckpoint,
    MultiStep,
    NonFiniteError,
    Plateau,
    PointSetClassifier,
    PointSetData,
    PointSetRegressor,
    Schedule,
    TrainingInterrupted,
    UsageError,
    WarmupCosine,
    _classifier,
    _inputs,
    _tasks,
    build,
    load_data,
    load_network,
    load_task,
    load_weights,
    read_checkpoint,
    read_yaml,
)
from lieattn.train._checkpoint import describe_input
from lieattn.train._tasks import _check_loss, _check_weights
from lieattn_datasets import RandomRotatePoints
from tests.cases import quiet_trainer, refuses, save_untrained, short_training, some

pytestmark = short_training

ITEMS, BATCH, EPOCHS = 20, 4, 3
TRUST = [__name__.partition(".")[0]]  # the package of the classes of this file


class ToyClouds(Dataset):
    """Clouds labeled by whether they are wide, with new noise at every access."""

    def __init__(self, size: int = ITEMS, noise: float = 0.1) -> None:
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Data:
        generator = torch.Generator().manual_seed(index)
        pos = (1 + index % 2) * torch.randn(5, 2, generator=generator)
        pos = pos + self.noise * torch.randn(5, 2)
        return Data(x=torch.ones(5, 1), pos=pos, y=torch.tensor([index % 2]))


class ToyStream(IterableDataset):
    """A stream of clouds, without a length and without access by index."""

    def __iter__(self):
        return iter([ToyClouds()[0]])


class ToyNetwork(nn.Module):
    """Depends only on distances from the center of each cloud, so it is invariant to every rotation."""

    guarantee = "invariant to all rotations and translations"

    def __init__(self, group: FiniteGroup, width: int = 6, dropout: float = 0.3) -> None:
        super().__init__()
        self.group = self.symmetry = group
        self.mlp = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, data: Batch) -> torch.Tensor:
        center = global_mean_pool(data.pos, data.batch)
        radius = (data.pos - center[data.batch]).norm(dim=1, keepdim=True)
        return global_mean_pool(self.mlp(torch.cat([data.x, radius], dim=1)), data.batch)


class Diverging(ToyNetwork):
    """Returns NaN from the seventh training step on."""

    def __init__(self, group: FiniteGroup) -> None:
        super().__init__(group)
        self.calls = 0

    def forward(self, data: Batch) -> torch.Tensor:
        self.calls += self.training
        return super().forward(data) * (float("nan") if self.calls > 6 else 1.0)


class SignalAt(Callback):
    """Sends a signal to its own process before a given step."""

    def __init__(self, step: int, signum: int) -> None:
        self.step, self.signum = step, signum

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)


def config(root: Path, *, group: int = 4, callbacks: list | None = None, **trainer) -> dict:
    """Return the configuration of a run of a few milliseconds with everything that makes continuation difficult."""
    clouds = {"class_path": f"{__name__}.ToyClouds"}
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "val/loss", "patience": EPOCHS},
    }
    cyclic_group = {"class_path": "lieattn.groups.cyclic", "init_args": {"n": group}}
    return {
        "seed_everything": 3,
        "model": {
            "class_path": "lieattn.train.PointSetClassifier",
            "init_args": {
                "classes": 2,
                "network": {"class_path": f"{__name__}.ToyNetwork", "init_args": {"group": cyclic_group}},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}},
                "schedule": {"class_path": "lieattn.train.WarmupCosine", "init_args": {"warmup_epochs": 1}},
            },
        },
        "data": {"train": clouds, "val": clouds, "test": clouds, "batch_size": BATCH},
        "last": {"every_n_train_steps": 2},
        "trainer": {
            "default_root_dir": str(root),
            "accelerator": "cpu",
            "max_epochs": EPOCHS,
            "gradient_clip_val": 1.0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "callbacks": [stopping, *(callbacks or [])],
            **trainer,
        },
    }


def write(path: Path, content: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return str(path)


def weights(path: Path) -> dict:
    return torch.load(path, weights_only=True)["state_dict"]


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Remove the seed that `seed_everything` leaves in the environment."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return the folder of a run that was never interrupted."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        assert main(["fit", "--config", write(root / "run.yaml", config(root))]) == 0
    return root


# Schedules


def test_warmup_then_cosine():
    schedule = WarmupCosine(warmup_epochs=2, floor=0.1)
    rates = [schedule.factor(step, 40, 5) for step in range(41)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[25] == pytest.approx(0.55)
    assert rates[40] == pytest.approx(0.1)
    assert schedule.factor(50, 40, 5) == pytest.approx(0.1)  # it stays there
    assert Constant().factor(7, float("inf"), 5) == 1.0


def test_milestones_are_those_of_torch():
    """The reference is torch's own chained schedulers, with one step per epoch."""
    from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [LinearLR(optimizer, 0.25, 1.0, 3), MultiStepLR(optimizer, [2, 5], 0.1)]
    torchs, rates = SequentialLR(optimizer, parts, [4]), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    schedule = MultiStep([6, 9], 0.1, warmup_epochs=4, warmup_per="epoch")
    found = [schedule.factor(step, math.inf, 3) for step in range(36)]
    assert found == pytest.approx([rate for rate in rates for _ in range(3)])
    smooth = MultiStep([0.5], 0.5, warmup_epochs=0.2)  # a budget counts as one epoch
    assert [smooth.factor(step, 10, 10) for step in (0, 1, 4, 5, 9)] == [0.5, 1, 1, 0.5, 0.5]


def test_epochs_are_rounded_to_the_nearest_step():
    """0.29 * 100 is a little less than 29 in double precision."""
    cosine, steps = WarmupCosine(0.29), MultiStep([0.29])
    assert [cosine.factor(step, 1000, 100) for step in (27, 28)] == [28 / 29, 1.0]
    assert [steps.factor(step, 1000, 100) for step in (28, 29)] == [1.0, 0.1]


@pytest.mark.parametrize(("mode", "worse"), [("min", 2.0), ("max", 0.5)])
def test_plateau_of_errors_and_of_accuracies(mode, worse):
    def rates(values):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        (found,) = Plateau(patience=0, gamma=0.5).schedulers(optimizer, math.inf, 1, 1, ("val/quality", mode))
        for value in values:
            optimizer.step()
            found["scheduler"].step(value)
        return optimizer.param_groups[0]["lr"]

    assert rates([1.0, worse, worse]) == 0.25
    assert rates([worse, 1.0]) == 1.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    (loss,) = Plateau(loss=True).schedulers(optimizer, math.inf, 1, 1, ("val/quality", mode))
    assert (loss["monitor"], loss["scheduler"].mode) == ("val/loss", "min")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rise, _ = Plateau(warmup_epochs=1).schedulers(optimizer, math.inf, 2, 2, ("val/quality", mode))  # of two steps
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.step()
    rise["scheduler"].step()
    assert optimizer.param_groups[0]["lr"] == 1.0


class Rates(Callback):
    def __init__(self) -> None:
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_plateau_follows_the_validation(tmp_path):
    rates, steps = Rates(), -(-ITEMS // BATCH)
    schedule = Plateau(patience=1, gamma=0.5, warmup_epochs=1)
    fit(tmp_path, schedule=schedule, more=[rates], max_epochs=4, rate=1e-6)  # so small that the loss does not improve
    factors = [rate / 1e-6 for rate in rates.rates]
    # The first epoch is the best. The third epoch is the second one without improvement.
    rising = [(step + 1) / steps for step in range(steps)]
    assert factors == pytest.approx(rising + [1.0] * 2 * steps + [0.5] * steps)
    options = {"check_val_every_n_epoch": 2, "limit_train_batches": 1}
    for loss in (False, True):
        rates, schedule = Rates(), Plateau(patience=0, gamma=0.5, loss=loss)
        fit(tmp_path, schedule=schedule, more=[rates], max_epochs=7, rate=1e-6, **options)
        assert [rate / 1e-6 for rate in rates.rates] == [1.0] * 4 + [0.5] * 2 + [0.25]
    rates = Rates()
    schedule = Plateau(patience=0, gamma=0.5)
    fit(tmp_path, schedule=schedule, more=[rates], max_epochs=3, rate=1e-6, accumulate_grad_batches=2)
    assert [rate / 1e-6 for rate in rates.rates] == [1.0] * 2 * steps + [0.5] * steps
    with pytest.raises(ValueError, match=r"schedule: expected validations, .*, got trainer\.limit_val_batches 0$"):
        fit(tmp_path, schedule=schedule, limit_val_batches=0)


def test_the_last_batches_of_an_epoch_are_a_step_of_their_own(tmp_path):
    rates, steps = Rates(), -(-ITEMS // BATCH)
    assert steps % 2 == 1
    schedule = MultiStep([1], 0.5)
    fit(tmp_path, schedule=schedule, more=[rates], max_epochs=2, rate=1e-6, accumulate_grad_batches=2)
    assert [rate / 1e-6 for rate in rates.rates] == [1.0] * steps + [0.5] * steps


def test_named_parameters_have_no_weight_decay():
    task = PointSetClassifier(ToyNetwork(cyclic(4)), 2, no_decay=["*bias"])
    names = {id(weight): name for name, weight in task.named_parameters()}
    decayed, free = task.make_optimizer(task._parameter_groups()).param_groups
    assert [decayed["weight_decay"], free["weight_decay"]] == [1e-4, 0.0]
    for group, ends in ((decayed, False), (free, True)):
        assert group["params"]
        assert all(names[id(weight)].endswith("bias") == ends for weight in group["params"])
    task.no_decay = ("*gain",)
    with pytest.raises(ValueError, match=r"no_decay: no parameter matches '\*gain'; one is 'network\."):
        task._parameter_groups()


test_bad_arguments = refuses(
    (lambda: WarmupCosine(warmup_epochs=-1), "warmup_epochs: expected a number >= 0, got -1"),
    (lambda: WarmupCosine(floor=2), r"floor: expected a factor in \[0, 1\], got 2"),
    (lambda: WarmupCosine(10).factor(0, 20, 5), "a training that ends after its warm-up .*, got 20 steps"),
    (lambda: WarmupCosine(1).factor(0, float("inf"), 5), "after its warm-up of 1 epochs .*, got one without end"),
    (lambda: WarmupCosine(4).factor(20, 20, 5), "a training that ends after its warm-up .*, got 20 steps"),
    (lambda: MultiStep([3, 3]), r"milestones: expected increasing numbers above 0, got \[3, 3\]"),
    (lambda: MultiStep([0, 3]), r"milestones: expected increasing numbers above 0, got \[0, 3\]"),
    (lambda: MultiStep([3], gamma=2), r"gamma: expected a factor in \(0, 1\], got 2"),
    (lambda: MultiStep([3], warmup_per="batch"), "warmup_per: expected one of"),
    (lambda: Plateau(patience=-1), "patience: expected an integer of at least 0, got -1"),
    (lambda: PointSetClassifier(ToyNetwork(cyclic(2)), 1), "classes: expected at least 2, got 1"),
    (lambda: PointSetClassifier(ToyNetwork(cyclic(2)), 2, per="points"), "per: expected one of .*, got 'points'"),
    (lambda: PointSetClassifier(ToyNetwork(cyclic(2)), 2, label_smoothing=1.0), "label_smoothing: expected a number"),
    (lambda: PointSetData(ToyClouds(), batch_size=0), "batch_size: expected an integer of at least 1, got 0"),
    (lambda: PointSetData(ToyClouds(), eval_batch_size=10**20), "eval_batch_size: expected an integer of at most"),
    (lambda: PointSetData(ToyClouds(), workers=-1), "workers: expected an integer of at least 0, got -1"),
    (lambda: PointSetData().train_dataloader(), "data.train: expected a data set, got none"),
    (lambda: PointSetData().predict_dataloader(), "data.predict: expected a data set, got none"),
    (lambda: PointSetData(ToyClouds(0)).train_dataloader(), "data.train: the data set is empty"),
    (lambda: PointSetData([]).train_dataloader(), "data.train: the data set is empty"),
    (
        lambda: PointSetData(ToyStream()).train_dataloader(),
        "data.train: expected a data set with a length and items by index, got ToyStream",
    ),
    (
        lambda: next(iter(PointSetData([Data(pos=torch.ones(2, 2), x=np.ones((2, 1)))]).train_dataloader())),
        r"data\.x: expected a tensor, got an array of NumPy in item 0",
    ),
    *(
        (lambda name=name: PointSetRegressor(nn.Identity(), name), f"targets: .* without dots, got {name!r}")
        for name in ("dipole.x", "")
    ),
    (lambda: LastCheckpoint(every_n_train_steps=-2), "every_n_train_steps: expected at least 0, got -2"),
)


# Data


def test_order_depends_on_seed_and_epoch_and_can_start_in_the_middle():
    sampler = EpochSampler(10, seed=1)
    first = list(sampler)
    assert sorted(index for _, index in first) == list(range(10))
    assert list(sampler) == first == list(EpochSampler(10, seed=1))
    sampler.start(0, 4)
    assert list(sampler) == first[4:]
    sampler.set_epoch(0)
    assert list(sampler) == first[4:]
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(second) == len(sampler) == 10
    orders = [[index for _, index in EpochSampler(10, seed=seed)] for seed in (1, 2)]
    assert [index for _, index in second] not in orders
    assert orders[0] != orders[1]


class Stacked(Data):
    """A cloud whose attribute ``y`` is stacked by batches."""

    def __cat_dim__(self, key, value, *args, **kwargs):
        return None if key == "y" else super().__cat_dim__(key, value, *args, **kwargs)


def three_points(kind=Data, **attributes):
    """Return a cloud of three points, without the attributes that are None."""
    given = {"x": torch.ones(3, 1), "pos": torch.rand(3, 3), "y": torch.ones(1, 1), "force": torch.ones(3, 3)}
    return kind(**{name: value for name, value in (given | attributes).items() if value is not None})


NO, NO_POINT, NONE = torch.tensor([False]), torch.zeros(3) > 0, torch.zeros(1, 3) > 0
CELL, PLANE = torch.eye(3)[None], torch.tensor([[True, False, True]])
# Attributes of two clouds, and those of each of them in a batch of both.
COMPLETED = {
    "cell": ({"cell": CELL}, {}, {"cell": (CELL, 0 * CELL), "pbc": (~NONE, NONE)}),
    "pbc of one": ({"cell": CELL, "pbc": PLANE}, {"cell": 2 * CELL}, {"cell": (CELL, 2 * CELL), "pbc": (PLANE, ~NONE)}),
    "pbc alone": ({"pbc": NONE}, {}, {"pbc": (NONE, NONE)}),
    "mask of clouds": ({"y_mask": NO}, {}, {"y_mask": (NO, ~NO)}),
    "mask of entries": ({"y_mask": NO[None]}, {}, {"y_mask": (NO[None], ~NO[None])}),
    "mask of points": ({"force_mask": NO_POINT}, {}, {"force_mask": (NO_POINT, ~NO_POINT)}),
    "mask of all points": ({"mask": NO_POINT}, {}, {"mask": (NO_POINT, ~NO_POINT)}),
    "mask of a number": ({"y": 2.0, "y_mask": NO}, {"y": 3}, {"y_mask": (NO, ~NO)}),
    "mask of a matrix": (
        {"kind": Stacked, "y": torch.eye(3), "y_mask": NO},
        {"kind": Stacked, "y": torch.eye(3)},
        {"y_mask": (NO, ~NO)},
    ),
    "weight": ({"weight": torch.tensor([0.5])}, {}, {"weight": (torch.tensor([0.5]), torch.ones(1))}),
    "number and tensor": ({"charge": 1}, {"charge": torch.ones(1) / 3}, {"charge": (torch.ones(1), torch.ones(1) / 3)}),
    "tensor without axes": ({"charge": torch.tensor(2.0)}, {"charge": torch.ones(1)}, {}),
    "numbers": ({"charge": 1}, {"charge": 2.5}, {"charge": (torch.tensor([1.0]), torch.tensor([2.5]))}),
    "precision": ({"x": torch.ones(3, 1).double() / 3}, {}, {"x": (torch.ones(3, 1).double() / 3, torch.ones(3, 1))}),
    "integers": ({"z": torch.ones(3).int()}, {"z": torch.ones(3).long()}, {}),
    "number of points": ({"num_nodes": 3}, {}, {}),
    "words": ({"name": "water"}, {"name": ["a", "b"]}, {}),
}


@pytest.mark.parametrize("turned", [False, True], ids=["", "other order"])
@pytest.mark.parametrize("name", COMPLETED)
def test_what_clouds_lack_is_added_if_its_absence_has_a_meaning(name, turned):
    *given, expected = COMPLETED[name]
    step = -1 if turned else 1
    clouds = [three_points(**attributes) for attributes in given][::step]
    before = [cloud.to_dict() for cloud in clouds]
    (batch,) = PointSetData(clouds, batch_size=2, shuffle=False, seed=3).train_dataloader()
    assert [list(cloud.to_dict().values()) for cloud in clouds] == [list(own.values()) for own in before]
    assert batch.num_nodes == 6
    whole = {key: torch.cat(values[::step]) for key, values in expected.items()}
    whole |= {key: torch.cat([cloud[key] for cloud in clouds]) for key in ("pos", "force")}
    for key, value in whole.items():
        value = value.unflatten(0, (2, -1)) if key == "y" and "matrix" in name else value
        torch.testing.assert_close(batch[key], value, rtol=0, atol=0)


ATOM = {"x": torch.ones(1, 1), "pos": torch.ones(1, 3), "force": torch.ones(1, 3)}
# What the last of three clouds has, and the error.
DIFFERENT = {
    "no x": ({"x": None}, r"data\.x: expected in all clouds or in none, got none in cloud 2; .*data\.x_mask"),
    "no y": ({"y": None}, r"data\.y: .* got none in cloud 2"),
    "charge": ({"charge": torch.ones(1)}, r"data\.charge: .* got none in cloud 0"),
    "vectors": ({"vel": torch.ones(3, 3)}, r"data\.vel: .* got none in cloud 0"),
    "edges": ({"edge_index": torch.ones(2, 1).long()}, r"data\.edge_index: .* got none in cloud 0"),
    "weights of edges": ({"edge_weight": torch.ones(4)}, r"data\.edge_weight: .* got none in cloud 0"),
    "mask of no target": ({"train_mask": NO_POINT}, r"data\.train_mask: .* got none in cloud 0"),
    "mask of point or cloud": ({**ATOM, "mask": NO}, r"data\.mask: .* got none in cloud 0"),
    "stress": ({"stress": torch.ones(1, 3, 3)}, r"data\.stress: .* got none in cloud 0; .* False in data\.stress_mask"),
    "grid": ({"grid": torch.tensor([[1, 3]])}, r"data\.grid: .* got none in cloud 0"),
    "words": ({"name": "water"}, r"data\.name: .* got none in cloud 0"),
    "channels": (
        {"x": torch.ones(3, 2)},
        r"data\.x: expected float32 \[\*, 1\] as in cloud 0, got float32 \[\*, 2\] in cloud 2",
    ),
    "integers": ({"x": torch.ones(3, 1).long()}, r"data\.x: .* got int64 \[\*, 1\] in cloud 2"),
    "fewer rows": ({"x": torch.ones(1, 1)}, r"data\.x: expected a row for each of 3 points, got \[1, 1\] in cloud 2"),
    "no rows": ({"z": torch.ones(0).long()}, r"data\.z: expected a row for each of 3 points, got \[0\] in cloud 2"),
    "dimension": ({"pos": torch.ones(3, 2)}, r"data\.pos: .* got float32 \[\*, 2\] in cloud 2"),
    "axes": ({"y": torch.ones(1)}, r"data\.y: .* got float32 \[\*\] in cloud 2"),
    "text": ({"y": "one"}, r"data\.y: .* got str in cloud 2"),
    "names": ({"y": {"a": torch.ones(1)}}, r"data\.y: .* got \{'a': 'float32 \[\*\]'\} in cloud 2"),
    "list": ({"force": [torch.ones(3, 3)]}, r"data\.force: .* got a list of 1 in cloud 2"),
    "sparse": ({"force": torch.ones(3, 3).to_sparse()}, r"data\.force: .* got a tensor of torch\.float32 in cloud 2"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_clouds_that_differ_are_refused_before_the_training(name):
    attributes, message = DIFFERENT[name]
    clouds = [three_points(), three_points(), three_points(**attributes)]
    for refused in (
        lambda: PointSetData(clouds).setup("fit"),
        lambda: PointSetData(clouds[:2], clouds).setup("fit"),
        lambda: next(iter(PointSetData(Subset(clouds, range(3)), batch_size=3, shuffle=False).train_dataloader())),
        lambda: PointSetRegressor(nn.Identity(), "force").measure(clouds),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(UsageError, match=message.split(":")[0]):
        PointSetData(clouds[::-1]).setup("fit")


def test_names_of_outputs_and_parts_of_lists_are_not_lost():
    """A batch would keep the keys and the number of parts of its first cloud."""
    for short, long in (({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}), ([NO], [NO, NO])):
        for pair in ((short, long), (long, short)):
            with pytest.raises(UsageError, match=r"data\.y: .* in cloud 1"):
                PointSetData([three_points(y=y) for y in pair]).setup("fit")
            PointSetData([three_points(y=pair[0]) for _ in range(2)]).setup("fit")


def test_masked_targets_do_not_count_where_other_clouds_have_no_mask():
    losses = []
    plain, masked, known = (three_points(y=torch.tensor([[value]])) for value in (1.0, 1000.0, 2.0))
    masked.y_mask, known.y_mask = NO[None], ~NO[None]
    whole = plain.clone().update({"y_mask": ~NO[None]})
    for clouds in ([whole, masked, known], [known, masked, plain], [masked, plain, known]):
        torch.manual_seed(0)
        task = PointSetRegressor(FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1), "y", shift=[])
        task.log = lambda *arguments, **options: None
        task.measure(clouds)
        (batch,) = PointSetData(clouds, batch_size=3, shuffle=False).train_dataloader()
        losses.append(float(task.evaluate(batch, "train").detach()))
    assert losses[0] < 10
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_batches_that_are_overfitted_are_the_first_ones():
    data = PointSetData(ToyClouds(), batch_size=BATCH)
    data.trainer = SimpleNamespace(overfit_batches=2, world_size=1, global_rank=0)
    assert [index for _, index in data.train_dataloader().sampler] == list(range(ITEMS))


def test_the_kind_of_clouds_without_points():
    empty = Data(x=torch.ones(0, 2, 3), pos=torch.ones(0, 2))
    found = describe_input(Batch.from_data_list([empty, empty]))
    assert (found["points"], found["channels"], found["dim"]) == (0, 6, 2)


def test_the_kind_of_batches_that_are_not_made_of_clouds():
    cloud = torch.tensor([0, 0, 1])
    batch = Batch(x=torch.ones(3, 1), pos=torch.ones(3, 2), z=torch.ones(3), y=torch.tensor([0, 1]), batch=cloud)
    task = PointSetClassifier(ToyNetwork(cyclic(4)), 2)
    task.log = lambda *arguments, **options: None
    assert task.training_step(batch, 0).isfinite()
    assert describe_input(batch)["attributes"] == {"z": {"shape": [], "range": [1.0, 1.0]}}


@pytest.mark.parametrize("error", [ValueError("no item"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_failing_items_do_not_change_the_random_generators(error):
    class Failing(ToyClouds):
        def __getitem__(self, index):
            if index == 1:
                raise error
            return super().__getitem__(index)

    seed_everything(5)
    wanted = random.random(), np.random.rand(), torch.rand(1).item()
    seed_everything(5)
    with pytest.raises(type(error)):
        next(iter(PointSetData(Failing(), shuffle=False).train_dataloader()))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == wanted


def test_random_transforms_depend_on_the_item_alone():
    """The generators of the transforms of lieattn_datasets must not depend on the items before."""
    transform = RandomRotatePoints(3)

    class Transformed(ToyClouds):
        def __getitem__(self, index):
            return transform(super().__getitem__(index))

    def batches(start=0, **options):
        loader = PointSetData(Transformed(), batch_size=BATCH, **options).train_dataloader()
        loader.sampler.start(0, start * BATCH)
        return [batch.pos for batch in loader]

    before = torch.get_rng_state()
    whole = batches()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    for others in (batches(workers=1), [*whole[:2], *batches(2)]):
        assert all(torch.equal(*pair) for pair in zip(whole, others, strict=True))
    assert not torch.equal(whole[0], batches(seed=1)[0])


class Drawn(Dataset):
    """One number of each random generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Data:
        return Data(pos=torch.zeros(1, 2), x=torch.tensor([[random.random(), np.random.rand(), float(torch.rand(()))]]))


def test_numbers_of_all_generators_depend_on_seed_epoch_and_item():
    def numbers(epoch, seed):
        random.seed(seed + 7)
        np.random.seed(seed + 7)
        loader = PointSetData(Drawn(), batch_size=2, seed=seed, shuffle=False).train_dataloader()
        loader.sampler.start(epoch, 0)
        return torch.cat([batch.x for batch in loader])

    found = {(epoch, seed): numbers(epoch, seed) for epoch in (0, 1) for seed in (0, 1)}
    random.seed(0)
    assert torch.equal(found[0, 1], numbers(0, 1))
    assert len({float(number) for one in found.values() for number in one.flatten()}) == 4 * 6 * 3


def test_seed_of_everything_is_that_of_the_data(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert [PointSetData().seed, PointSetData(seed=5).seed] == [3, 5]
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert PointSetData().seed == 0


def test_sizes_and_sets_of_evaluation():
    few, many = ToyClouds(2), ToyClouds(6)
    data = PointSetData(val=many, test=many, predict=few, batch_size=2, eval_batch_size=3)
    assert [batch.num_graphs for batch in data.val_dataloader()] == [3, 3]
    assert [batch.num_graphs for batch in data.test_dataloader()] == [3, 3]
    assert [batch.num_graphs for batch in data.predict_dataloader()] == [2]
    plain = PointSetData(test=many, batch_size=2)
    assert [batch.num_graphs for batch in plain.predict_dataloader()] == [2, 2, 2]


# Runs, without the command line


class Crash(Exception):
    pass


class CrashAt(Callback):
    """Raises an error before a given step or batch, where accumulated batches are one step."""

    def __init__(self, number: int | None, by: str = "step", error: type[BaseException] = Crash) -> None:
        self.number, self.by, self.error = number, by, error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self.number == (trainer.global_step if self.by == "step" else trainer.fit_loop.total_batch_idx):
            raise self.error


def fit(
    root: Path,
    *,
    crash: int | None = None,
    resume: bool = False,
    network: nn.Module | None = None,
    workers: int = 0,
    noise: float = 0.1,
    batch_size: int = BATCH,
    more: list[Callback] | None = None,
    schedule: Schedule | None = None,
    rate: float = 0.1,
    every: int = 1,
    **options,
) -> PointSetClassifier:
    seed_everything(7, verbose=False)
    model = PointSetClassifier(
        network or ToyNetwork(cyclic(4)),
        classes=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        schedule=schedule or WarmupCosine(warmup_epochs=1),
    )
    data = PointSetData(ToyClouds(noise=noise), val=ToyClouds(6), batch_size=batch_size, workers=workers, seed=2)
    last = LastCheckpoint(every_n_train_steps=every)
    trainer = quiet_trainer(
        default_root_dir=root,
        callbacks=[CrashAt(crash), last, *(more or [])],
        **{"max_epochs": EPOCHS, "enable_checkpointing": True, **options},
    )
    trainer.fit(model, data, ckpt_path=last.path(trainer) if resume else None)
    return model


def assert_same(one: PointSetClassifier, other: PointSetClassifier) -> None:
    """Assert that two tasks have had the same steps, bit by bit."""
    assert one.trainer.global_step == other.trainer.global_step
    found = other.state_dict()
    for key, value in one.state_dict().items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize(
    "options",
    [
        *some(
            [{"crash": step} for step in (1, 4, 5, 6, 10, 13)], [{"crash": 4}, {"crash": 10}]
        ),  # 5 and 10 begin epochs
        pytest.param({"workers": 1}, marks=pytest.mark.slow),
        {"accumulate_grad_batches": 2},
        pytest.param({"max_steps": 12, "max_epochs": -1, "crash": 6}, marks=pytest.mark.slow),
        pytest.param({"max_steps": 12, "max_epochs": -1, "crash": 5}, marks=pytest.mark.slow),
        pytest.param({"limit_train_batches": 3, "crash": 4}, marks=pytest.mark.slow),
        pytest.param({"overfit_batches": 2, "crash": 3}, marks=pytest.mark.slow),
        {"val_check_interval": 2},
        pytest.param({"precision": "64-true"}, marks=pytest.mark.slow),
        {"schedule": Plateau(0, 0.5), "val_check_interval": 0.5, "crash": 4},
        {"schedule": Plateau(0, 0.5, loss=True), "val_check_interval": 0.5, "crash": 4},
        *(
            pytest.param({"schedule": schedule, "crash": crash}, marks=() if crash == 7 else pytest.mark.slow)
            for schedule in (Plateau(0, 0.5, warmup_epochs=1.2), MultiStep([1, 2], warmup_epochs=2, warmup_per="epoch"))
            for crash in (5, 7)
        ),
    ],
    ids=lambda options: " ".join(f"{k}={type(v).__name__ if k == 'schedule' else v}" for k, v in options.items()),
)
def test_continued_like_one_that_was_not_interrupted(tmp_path, options):
    crash = options.get("crash", 7)
    options = {key: value for key, value in options.items() if key != "crash"}
    whole = fit(tmp_path / "whole", **options)
    with pytest.raises(Crash):
        fit(tmp_path / "parts", crash=crash, **options)
    assert_same(whole, fit(tmp_path / "parts", resume=True, **options))


@pytest.mark.parametrize("batch", some([4, 7, 8, 13], [7]))
@pytest.mark.parametrize("scheduling", [{0: 2}, {0: 1, 1: 2, 2: 4}], ids=str)
def test_scheduled_accumulation_continues_within_an_epoch(tmp_path, scheduling, batch):
    """Lightning sets the number of accumulated batches only at the beginning of an epoch."""

    def run(name: str, *more: Callback, resume: bool = False) -> PointSetClassifier:
        accumulation = GradientAccumulationScheduler(dict(scheduling))
        return fit(tmp_path / name, more=[accumulation, *more], schedule=Constant(), resume=resume)

    whole = run("whole")
    with pytest.raises(Crash):
        run("parts", CrashAt(batch, by="batch"))
    assert_same(whole, run("parts", resume=True))


class Validations(Callback):
    """Records the validated steps, and asks to stop after a given batch or after its validation."""

    def __init__(self, stop: int = -1, behind: str = "batch") -> None:
        self.stop, self.behind, self.steps = stop, behind, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.behind == "batch" and trainer.fit_loop.total_batch_idx + 1 == self.stop:
            trainer.should_stop = True

    def on_validation_end(self, trainer, pl_module) -> None:
        if not trainer.sanity_checking:
            self.steps.append(trainer.global_step)
            if self.behind == "validation" and trainer.fit_loop.total_batch_idx + 1 == self.stop:
                trainer.should_stop = True

    def state_dict(self) -> dict:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state_dict: dict) -> None:
        self.steps = state_dict["steps"]


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        ({"max_steps": 7}, {}),
        ({"max_steps": 7}, {"val_check_interval": 2}),
        ({"max_steps": 4}, {"accumulate_grad_batches": 2}),
        pytest.param({"max_steps": 8}, {"ema": 0.8}, marks=pytest.mark.slow),
        pytest.param({"stop": 8}, {}, marks=pytest.mark.slow),
        pytest.param({"stop": 8}, {"min_epochs": 3}, marks=pytest.mark.slow),
        ({"stop": 8}, {"ema": 0.8}),
        pytest.param({"stop": 7}, {"val_check_interval": 2}, marks=pytest.mark.slow),
        pytest.param({"stop": 7, "behind": "validation"}, {"val_check_interval": 2}, marks=pytest.mark.slow),
        ({"stop": 7, "behind": "validation"}, {"val_check_interval": 2, "ema": 0.8}),
        pytest.param({"stop": 8}, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"stop": 6}, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        ({"stop": 6, "behind": "validation"}, {"accumulate_grad_batches": 2, "val_check_interval": 1}),
        pytest.param({"stop": 10}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stopped_within_an_epoch_and_continued(tmp_path, stop, options):
    """The rest of the epoch is trained, and the results of validations are those of an uninterrupted run."""

    def run(name: str, watch: Validations, **limits) -> PointSetClassifier:
        settings = {"schedule": MultiStep([1, 2], warmup_epochs=2), "every": 0, **options, **limits}
        averages = [AveragedWeights(settings.pop("ema"))] if "ema" in settings else []
        return fit(tmp_path / name, more=[*averages, watch], **settings)

    whole, first, second = Validations(), Validations(stop.get("stop", -1), stop.get("behind", "batch")), Validations()
    expected = run("whole", whole)
    run("parts", first, **{key: value for key, value in stop.items() if key == "max_steps"})
    found = run("parts", second, resume=True)
    assert found.trainer.current_epoch == EPOCHS
    assert second.steps == whole.steps
    assert_same(expected, found)


class SignalOnStop(Callback):
    """Sends SIGTERM in the step after which another callback ends the training, or in the validation behind it."""

    def __init__(self, behind: str) -> None:
        self.behind = behind

    def _send(self, trainer) -> None:
        if trainer.should_stop and not trainer.sanity_checking:
            signal.raise_signal(signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.behind == "batch":
            self._send(trainer)

    def on_validation_end(self, trainer, pl_module) -> None:
        if self.behind == "validation":
            self._send(trainer)


class Stopping(EarlyStopping):
    """Early stopping that sends SIGTERM at the end of the epoch, where hooks of other callbacks come before its own."""

    sends = False

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.should_stop and self.sends:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("ema", some([None, 0.8], [0.8]))
@pytest.mark.parametrize(
    ("stop", "behind", "options"),
    [
        ({"check_on_train_epoch_end": True}, "epoch", {}),
        pytest.param({"check_on_train_epoch_end": False}, "validation", {}, marks=pytest.mark.slow),
        ({"check_on_train_epoch_end": False}, "validation", {"val_check_interval": 2}),
        ({"check_on_train_epoch_end": False}, "validation", {"val_check_interval": 1, "accumulate_grad_batches": 2}),
        ({"stop": 8}, "batch", {}),
        ({"stop": 8}, "validation", {}),
        ({"stop": 10}, "batch", {}),
    ],
    ids=str,
)
def test_interrupted_in_the_step_that_ends_the_training(tmp_path, stop, behind, options, ema):
    """It ends there like one without a signal; continued, it trains on like that one."""

    def run(name: str, *more: Callback, resume: bool = False, stops: bool = True) -> PointSetClassifier:
        callbacks = [AveragedWeights(ema)] if ema else []
        if "stop" in stop:
            callbacks.append(Validations(stop["stop"] if stops else -1))
        else:
            callbacks.append(Stopping("val/loss", 10.0, patience=1 if stops else 99, **stop))
            callbacks[-1].sends = bool(more) and behind == "epoch"
        return fit(tmp_path / name, more=[*callbacks, *more], every=0, resume=resume, **options)

    whole = run("whole")
    assert whole.trainer.global_step < EPOCHS * ITEMS // BATCH
    assert_same(whole, run("parts", SignalOnStop(behind)))
    assert_same(run("whole", resume=True, stops=False), run("parts", resume=True, stops=False))


@pytest.mark.parametrize(("stop", "saved"), [("crash", 7), ("crash", 8), ("signal", 7), ("signal", 8)])
def test_no_validation_is_left_out(tmp_path, stop, saved):
    """Checkpoints at a validated step, such as the seventh one, are saved after its validation."""
    crash, more = (saved, []) if stop == "crash" else (None, [SignalAt(saved - 1, signal.SIGTERM)])
    with pytest.raises((Crash, TrainingInterrupted)):
        fit(tmp_path, crash=crash, val_check_interval=2, more=[Validations(), *more])
    assert read_checkpoint(tmp_path / "checkpoints/last.ckpt")["global_step"] == saved
    found = fit(tmp_path, resume=True, val_check_interval=2, more=[parts := Validations()])
    assert parts.steps == [2, 4, 7, 9, 12, 14]
    assert found.trainer.global_step == EPOCHS * ITEMS // BATCH


class SavedAtStart(Callback):
    """Saves the state when the training starts, and ends it there."""

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.save_checkpoint(trainer.ckpt_path)
        raise Crash


def test_a_continued_run_may_be_saved_before_its_first_step(tmp_path):
    fit(tmp_path / "whole", max_epochs=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    options = {"resume": True, "batch_size": 5}  # with another number of batches in an epoch
    with pytest.raises(Crash):
        fit(tmp_path / "parts", more=[SavedAtStart()], **options)
    assert_same(fit(tmp_path / "whole", **options), fit(tmp_path / "parts", **options))


def test_the_comparison_sees_the_noise(tmp_path):
    """Control: different noise in the data gives different weights, so the tests above can fail."""
    one, other = fit(tmp_path / "a"), fit(tmp_path / "b", noise=0.11)
    assert not torch.equal(one.network.mlp[0].weight, other.network.mlp[0].weight)


class Order(Callback):
    """Records the positions of the batches."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.seen.append(batch.pos)


def test_the_order_is_that_of_new_data_after_a_continued_run(tmp_path):
    """Its epochs may have had another number of batches."""

    def train(data: PointSetData, order: Order, path: Path | None = None, **options) -> None:
        last = LastCheckpoint(str(tmp_path))
        options |= {"callbacks": [order, last], "enable_checkpointing": True, "default_root_dir": tmp_path}
        quiet_trainer(**options).fit(PointSetClassifier(ToyNetwork(cyclic(4)), classes=2), data, ckpt_path=path)

    used, new = (PointSetData(ToyClouds(), ToyClouds(4), batch_size=BATCH, seed=2) for _ in range(2))
    train(used, Order(), max_epochs=3, limit_train_batches=2)
    train(used, Order(), tmp_path / "last.ckpt", max_epochs=4)
    orders = Order(), Order()
    for data, order in zip((used, new), orders, strict=True):
        train(data, order, max_epochs=3)
    assert len(orders[0].seen) == 3 * ITEMS // BATCH
    assert all(map(torch.equal, *(order.seen for order in orders)))


def test_middle_of_an_epoch_needs_the_same_batches(tmp_path):
    with pytest.raises(Crash):
        fit(tmp_path, crash=7)
    with pytest.raises(ValueError, match=r"middle of epoch 1, .* batch_size=4 \(got 5\)"):
        fit(tmp_path, resume=True, batch_size=5)


@pytest.mark.parametrize("batch_size", [2, 9])
def test_whole_epochs_may_be_continued_with_other_batches(tmp_path, monkeypatch, batch_size):
    fit(tmp_path, max_epochs=2)
    seen, validated = [], []

    class Watched(ToyClouds):
        def __getitem__(self, index):
            if len(self) == ITEMS:  # the validation set has fewer clouds
                seen[-1].add(index)
            return super().__getitem__(index)

    class Epochs(Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(set())

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                validated.append(trainer.current_epoch)

    monkeypatch.setitem(globals(), "ToyClouds", Watched)
    fit(tmp_path, resume=True, batch_size=batch_size, more=[Epochs()])
    assert seen == [set(range(ITEMS))] * (EPOCHS - 2)
    assert validated == list(range(2, EPOCHS))


def test_checkpoints_are_made_beside_the_file_that_they_replace(tmp_path, monkeypatch):
    """A move from a temporary folder on another disk would be a copy, which a kill could leave incomplete."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    fit(tmp_path, max_epochs=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_checkpoint_of_another_group_is_refused_before_weights_are_loaded(tmp_path):
    fit(tmp_path, max_epochs=2)
    other = ToyNetwork(cyclic(8))
    before = other.mlp[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"trained for C4 \(order 4, .* built for C8 \(order 8"):
        fit(tmp_path, resume=True, network=other)
    assert torch.equal(other.mlp[0].weight, before)


class Blind(ToyNetwork):
    """Gives class 1 for every cloud, or its label."""

    seeing = False

    def forward(self, data: Batch) -> torch.Tensor:
        classes = data.y if self.seeing else torch.ones_like(data.y)
        return 0 * super().forward(data) + torch.nn.functional.one_hot(classes, 2)


@pytest.mark.parametrize("seeing", [True, False])
def test_a_network_that_only_knows_the_share_of_a_class_is_noted(monkeypatch, tmp_path, seeing):
    def item(self, index, make=ToyClouds.__getitem__):
        data = make(self, index)
        data.y = torch.tensor([int(index % 3 == 0)])
        return data

    told = []
    monkeypatch.setattr(ToyClouds, "__getitem__", item)
    monkeypatch.setattr(Blind, "seeing", seeing)
    monkeypatch.setattr(_classifier, "note", told.append)
    fit(tmp_path, network=Blind(cyclic(4)), max_epochs=1, schedule=Constant())
    note = "val/accuracy: the network gives class 1 for all .* accuracy is the share of this class, 0.333$"
    assert len(told) == (not seeing)
    assert all(re.match(note, line) for line in told)


class Confident(ToyNetwork):
    """Gives class 1 for every cloud, as surely as its first weight says."""

    def forward(self, data: Batch) -> torch.Tensor:
        sure = self.mlp[0].bias[0].exp() * torch.tensor([0.0, 1.0])
        return 0 * super().forward(data) + sure


def test_of_equal_accuracies_the_best_is_that_with_the_lowest_loss(tmp_path):
    """It was the first epoch, so that best.ckpt was an untrained network."""
    options = {"monitor": "val/accuracy", "mode": "max", "enable_version_counter": False}
    best = _training._Best(tmp_path / "ours", "best", **options)
    losses = []

    class Watch(Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                losses.append(float(trainer.callback_metrics["val/loss"]))

    network = Confident(cyclic(4))
    fit(tmp_path, network=network, more=[Watch(), best], schedule=Constant(), rate=0.05)
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == int(np.argmin(losses)) > 0
    assert best.state_key == ModelCheckpoint(**options).state_key  # of checkpoints of earlier versions
    again = _training._Best(tmp_path / "ours", "best", **options)
    again.load_state_dict(best.state_dict())
    assert again._loss == min(losses)

    # A folder that was renamed with its checkpoints is that of the same run, whose best validation is not replaced.
    moved = (tmp_path / "ours").rename(tmp_path / "theirs")
    again = _training._Best(moved, "best", **options)
    again.on_load_checkpoint(SimpleNamespace(ckpt_path=moved / "last.ckpt"), None, {})
    again.load_state_dict(best.state_dict())
    assert again.best_model_score == best.best_model_score
    assert [*again.best_k_models] == [again.best_model_path] == [str(moved / "best.ckpt")]


@pytest.mark.parametrize(
    ("radius", "note"),
    [
        (1e-3, r"Local: no point of the first batch has a neighbor within a radius of 0.001; increase it"),
        (1e3, r"Local: all points of a cloud are neighbors, [0-9.]+ on average, within a radius of 1000, so"),
        (1.0, None),
    ],
)
def test_neighborhoods_of_nothing_or_everything_are_noted_once(monkeypatch, tmp_path, radius, note):
    class Local(ToyNetwork):
        neighborhood = Radius(radius)

    told = []
    monkeypatch.setattr(_tasks, "note", told.append)
    fit(tmp_path, network=Local(cyclic(4)), max_epochs=2)
    assert len(told) == (note is not None)
    assert all(re.match(note, line) for line in told)


class Faint(Dataset):
    """Clouds with features of tiny spread far from 0, which tell the label, and a channel that does not vary."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Data:
        data = ToyClouds(noise=0.0)[index]
        data.x = torch.cat([0.5 + 0.016 * (data.y + 0.1 * data.pos[:, :1]), torch.ones(5, 1)], dim=1)
        return data


class FaintNetwork(ToyNetwork):
    def __init__(self, group: FiniteGroup) -> None:
        super().__init__(group)
        self.mlp[0] = nn.Linear(3, 6)


def test_features_are_standardized_with_the_network(tmp_path, monkeypatch):
    """With a spread of 0.016 a network learned the share of the largest class alone."""
    told = []
    monkeypatch.setattr(_tasks, "note", told.append)
    content = config(tmp_path, max_epochs=2)
    content["model"]["init_args"]["network"]["class_path"] = f"{__name__}.FaintNetwork"
    content["data"] = {key: {"class_path": f"{__name__}.Faint"} for key in ("train", "val", "test")}
    file = write(tmp_path / "run.yaml", content)
    assert main(["fit", "--config", file, "--trainer.max_epochs", "1", "--trainer.fast_dev_run", "true"]) == 0
    (note,) = told
    assert re.match(r"data\.x: the deviation of its widest channel is 0\.00\d+ .*; --data\.standardize true", note)
    told.clear()
    assert main(["fit", "--config", file, "--data.standardize", "true", "--ema", "0.9"]) == 0
    assert not told
    items = [Faint()[index] for index in range(len(Faint()))]
    x = torch.cat([item.x for item in items])[:, :1].double()
    path = tmp_path / "checkpoints/best.ckpt"
    task = load_task(path, TRUST)
    assert task.input_std.tolist() == [pytest.approx(float(x.std(correction=0)), rel=1e-2), 1.0]
    assert task.input_mean.tolist() == [pytest.approx(float(x.mean()), rel=1e-2), 0.0]
    batch, scaled = Batch.from_data_list(items), Batch.from_data_list(items)
    scaled.x = (batch.x - task.input_mean) / task.input_std
    wanted = task.network(scaled)
    assert not torch.allclose(task.network(batch), wanted, atol=1e-2)
    whole = mean_network(task, [load_task(path, TRUST)])
    for found in (task(batch), task.model(batch), load_network(path, TRUST)(batch), whole(batch)):
        torch.testing.assert_close(found, wanted)
    shutil.copy(path, tmp_path / "other.ckpt")
    for paths in ([str(path)], [str(path), str(tmp_path / "other.ckpt")]):
        assert main(["predict", "--config", file, "--trust", *TRUST, "--ckpt_path", *paths]) == 0
    for table in ("predictions.csv", "predictions-v1.csv"):
        rows = list(csv.DictReader((tmp_path / table).read_text().splitlines()))
        assert [row["predicted"] for row in rows] == [str(label) for label in wanted.argmax(dim=1).tolist()]
    regressor = PointSetRegressor(network := FaintNetwork(cyclic(4)), {"y": 1.0}).eval()
    regressor.load_state_dict({**regressor.state_dict(), "input_mean": task.input_mean, "input_std": task.input_std})
    torch.testing.assert_close(regressor(batch)["y"], network(scaled))
    with pytest.raises(
        UsageError, match=r"^data\.standardize: expected floating features x .*, got torch\.int64 \[5, 1\]"
    ):
        _inputs.spread_of_features([Data(x=torch.ones(5, 1).long())])


def test_schedules_need_an_epoch_with_a_known_number_of_batches(tmp_path):
    """The rate was constant, without a message."""
    task = PointSetClassifier(ToyNetwork(cyclic(4)), classes=2, schedule=WarmupCosine(1))
    trainer = quiet_trainer(default_root_dir=tmp_path, max_epochs=3)
    with pytest.raises(UsageError, match=r"^schedule: expected a training set with a length, since it counts epochs"):
        trainer.fit(task, DataLoader(ToyStream(), batch_size=2), DataLoader(ToyClouds(2)))


def test_loss_that_is_not_finite_stops_and_the_last_checkpoint_stays(tmp_path):
    with pytest.raises(NonFiniteError, match=r"training loss is nan at step 6 \(epoch 1\)"):
        fit(tmp_path, network=Diverging(cyclic(4)))
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 6
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.parametrize(
    ("precision", "advice"),
    [
        ("32-true", "Lower the learning rate, or clip gradients with trainer.gradient_clip_val"),
        ("16-true", "trainer.precision 16-true has no loss scaling, .*: use bf16-mixed, 16-mixed or 32-true"),
        ("16-mixed", "Numbers in float16 end at 65504: .*"),
    ],
)
def test_errors_about_numbers_that_are_not_finite_name_the_precision(monkeypatch, precision, advice):
    task = PointSetClassifier(ToyNetwork(cyclic(4)), 2)
    task.trainer = quiet_trainer()
    monkeypatch.setattr(Trainer, "precision", precision)  # on CPUs, Lightning replaces some of them
    _check_loss(torch.tensor(3e38), task)
    _check_weights(task)
    for value in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(NonFiniteError, match=rf"training loss is {value} at step .*\. {advice}$"):
            _check_loss(torch.tensor(value), task)
        task.network.mlp[0].bias.data[0] = value
        with pytest.raises(NonFiniteError, match=rf"weights of network\.mlp\.0\.bias are not finite .*\. {advice}$"):
            _check_weights(task)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Poison(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if trainer.global_step == 3:
                pl_module.network.mlp[0].bias.data[0] = float("inf")

    with pytest.raises(NonFiniteError, match=r"network\.mlp\.0\.bias are not finite after step 3"):
        fit(tmp_path, more=[Poison()])
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


@torch.no_grad()
def test_labels_are_smoothed_in_training_alone(monkeypatch):
    batch = Batch.from_data_list([ToyClouds()[number] for number in range(4)])
    model = PointSetClassifier(ToyNetwork(cyclic(4)), 2, label_smoothing=0.2).eval()
    monkeypatch.setattr(model, "log", lambda *_, **__: None)  # there is no trainer
    log_probabilities = model(batch).log_softmax(1)
    own, mean = -log_probabilities[torch.arange(4), batch.y].mean(), -log_probabilities.mean()
    torch.testing.assert_close(model.evaluate(batch, "train"), 0.8 * own + 0.2 * mean)
    torch.testing.assert_close(model.evaluate(batch, "val"), own)


@pytest.mark.parametrize("unit", [1.0, 0.25])
def test_masked_and_weighted_labels(unit, monkeypatch):
    """Masked items count as absent, even with an invalid label, and items of twice the weight count twice."""
    clouds = [ToyClouds(noise=0.0)[number] for number in range(4)]
    found = {}
    for name, chosen in (("weighted", [0, 1, 2, 3]), ("twice", [0, 2, 2, 3])):
        batch = Batch.from_data_list([clouds[number] for number in chosen])
        if name == "weighted":
            batch.y[1], batch.mask = -1, torch.tensor([True, False, True, True])
            batch.weight = unit * torch.tensor([1.0, 1.0, 2.0, 1.0])
        torch.manual_seed(0)
        model = PointSetClassifier(ToyNetwork(cyclic(4)), 2).eval()
        monkeypatch.setattr(model, "log", lambda *_, **__: None)  # there is no trainer
        found[name] = float(model.evaluate(batch, "val").detach()), float(model.val_accuracy.compute())
    assert found["weighted"] == pytest.approx(found["twice"])


def test_accuracy_of_a_network_without_an_answer_is_nan():
    """NaN would count as the first class, so that such a network could be the best one."""

    class Silent(ToyNetwork):
        def forward(self, data: Batch) -> torch.Tensor:
            return super().forward(data).masked_fill(torch.arange(data.num_graphs)[:, None] == 1, torch.nan)

    task, found = PointSetClassifier(Silent(cyclic(4)), 2).eval(), {}
    task.log = lambda name, value, **options: found.update({name: value})
    batch = Batch.from_data_list([ToyClouds()[index] for index in range(3)])
    batch.mask = torch.tensor([True, False, True])
    task.evaluate(batch, "val")
    assert torch.isfinite(found["val/accuracy"].compute())
    del batch.mask
    task.evaluate(batch, "test")
    assert found["test/accuracy"].compute().isnan()


INTEGERS, POINTS = torch.zeros(2).long(), torch.zeros(10).long()


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (INTEGERS, {"classes": 3}, r"expected logits \[2, 3\] for 2 clouds and 3 classes, got \[2, 2\]"),
        (torch.tensor([0, 2]), {}, r"data: expected labels y in 0 \.\. 1, got 0 \.\. 2"),
        (torch.tensor([0, -100]), {}, r"data: expected labels y in 0 \.\. 1, got -100 \.\. 0"),  # ignored by torch
        (INTEGERS.float(), {}, "data: expected labels y of an integer dtype, got torch.float32"),
        (INTEGERS.cfloat(), {}, "data: expected labels y of an integer dtype, got torch.complex64"),
        (["dog", "cat"], {}, r"per cloud, \[2\], got words such as 'dog'; number the classes, and pass y"),
        (POINTS, {}, r"expected one label y per cloud, \[2\], got \[10\]; points have labels with per='point'"),
        (torch.zeros(2, 3).long(), {}, r"y per .*, got \[2, 3\]; of one-hot rows, y\.argmax\(dim=1\) is the labels"),
        (POINTS, {"per": "point"}, r"got \[2, 2\]; networks of points have pool='none'"),
        (None, {}, r"expected one label y per cloud, \[2\], got none"),
    ],
)
def test_shapes_of_logits_and_labels_are_checked(labels, options, message):
    batch = Batch.from_data_list([ToyClouds()[0]] * 2)
    batch.y = labels
    with pytest.raises(ValueError, match=message):
        PointSetClassifier(ToyNetwork(cyclic(4)), **{"classes": 2, **options}).training_step(batch, 0)


# Damaged and hostile checkpoints


def rewrite(path: Path, to: Path, change: Callable[[dict], None], *, digests: bool = False) -> str:
    """Change a checkpoint and write it again, with digests of the new content if asked for."""
    content = torch.load(path, weights_only=True)
    change(content)
    if digests:
        add_digests(content)
    torch.save(content, to)
    return str(to)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("number", [1, FORMAT])
def test_no_flipped_bit_loads_as_good(finished, tmp_path, number):
    """Bits that torch does not read, such as dates, are harmless. Format 1 (version 0.1) has no digests."""

    def old(content: dict) -> None:
        content["lieattn"]["format"] = 1
        del content["lieattn"]["digests"]

    whole = finished / "checkpoints/last.ckpt"
    if number == 1:
        whole = Path(rewrite(whole, tmp_path / "old.ckpt", old))
    data, expected = whole.read_bytes(), digest(read_checkpoint(whole))
    damaged, refused = tmp_path / "damaged.ckpt", 0
    shared = 8 * data.index(b"global_step")  # the file stores equal strings only once
    for bit in (shared, *range(5, 8 * len(data), 8 * len(data) // 50)):
        damaged.write_bytes(flipped(data, bit))
        try:
            assert digest(read_checkpoint(damaged)) == expected, f"bit {bit}"
        except CheckpointError:
            refused += 1
    assert refused > 16


EDITS = {
    "state_dict": lambda part: part["network.mlp.0.bias"].mul_(1.0001),
    "optimizer_states": lambda part: part[0]["param_groups"][0].update(lr=0.3),
    "loops": lambda part: part["fit_loop"]["epoch_progress"]["total"].update(completed=7),
    "lieattn": lambda part: part["config"]["data"].update(batch_size=5),
}


@pytest.mark.parametrize("part", EDITS)
def test_edited_content_is_named(finished, tmp_path, part):
    path = tmp_path / "checkpoints/last.ckpt"
    path.parent.mkdir()
    rewrite(finished / "checkpoints/last.ckpt", path, lambda content: EDITS[part](content[part]))
    message = rf"is damaged: not as they were saved are '{part}'$"
    with pytest.raises(CheckpointError, match=rf"last\.ckpt {message}"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"the checkpoint {message}"):
        fit(tmp_path, resume=True)


def test_versions_of_checkpoints(finished, tmp_path):
    """Newer formats are refused; Lightning may write its version while it reads a checkpoint of another one."""
    path = finished / "checkpoints/last.ckpt"
    newer = rewrite(path, tmp_path / "new.ckpt", lambda content: content["lieattn"].update(format=FORMAT + 1))
    with pytest.raises(CheckpointError, match=rf"new\.ckpt has format {FORMAT + 1}, .* pip install --upgrade lieattn"):
        read_checkpoint(newer)
    content = read_checkpoint(path)
    content["legacy_pytorch-lightning_version"] = content["pytorch-lightning_version"]
    content["pytorch-lightning_version"] = "9.9.9"
    check_content(content, "it")
    del content["legacy_pytorch-lightning_version"]
    with pytest.raises(CheckpointError, match="'pytorch-lightning_version'"):
        check_content(content, "it")


def test_weights_that_are_not_finite_are_refused(finished, tmp_path, capsys):
    def change(content: dict) -> None:
        content["state_dict"]["network.mlp.0.bias"][:2] = torch.tensor([math.inf, 1.0])

    path = rewrite(finished / "checkpoints/last.ckpt", tmp_path / "nan.ckpt", change, digests=True)
    with pytest.raises(CheckpointError, match=r"weights mlp\.0\.bias of the checkpoint are not finite"):
        load_network(path, TRUST)
    assert main(["fit", "--config", write(tmp_path / "run.yaml", config(tmp_path)), "--ckpt_path", path]) == 2
    assert "weights network.mlp.0.bias of the checkpoint are not finite" in capsys.readouterr().err
    fit(tmp_path, max_epochs=2)
    last = tmp_path / "checkpoints/last.ckpt"
    rewrite(last, last, change, digests=True)
    with pytest.raises(CheckpointError, match=r"network\.mlp\.0\.bias of the checkpoint are not finite"):
        fit(tmp_path, resume=True)


def framewise(radius: float = 1.0) -> FramewiseTransformer:
    return FramewiseTransformer(cyclic(4), 1, 2, channels=4, layers=1, neighborhood=Radius(radius))


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """Return the checkpoint of a Trainer without a configuration, whose network records its arguments."""
    root = tmp_path_factory.mktemp("bare")
    fit(root, network=framewise(), max_epochs=1, limit_train_batches=2, schedule=Constant())
    return root / "checkpoints/last.ckpt"


def test_checkpoints_of_a_bare_trainer_open_in_python(bare):
    checkpoint = read_checkpoint(bare)
    task = load_task(bare)
    found = [task, PointSetClassifier.load_from_checkpoint(bare), PointSetClassifier.load_from_checkpoint(str(bare))]
    for loaded in (*found, load_network(bare)):
        prefix = "" if isinstance(loaded, PointSetClassifier) else "network."
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, checkpoint["state_dict"][prefix + name])
    assert task.classes == 2
    with pytest.raises(CheckpointError, match="expected a PointSetRegressor, got PointSetClassifier"):
        PointSetRegressor.load_from_checkpoint(bare)
    with pytest.raises(ValueError, match=r"lieattn.train.load_network opens its network, and load_task its task"):
        load(bare)
    with pytest.raises(CheckpointError, match=r"neighborhood: the weights are for Radius\(radius=1.0"):
        load_weights(framewise(2.0), checkpoint, "the network", "network.")


def test_checkpoints_of_a_bare_trainer_open_in_the_command(bare, tmp_path, monkeypatch, capsys):
    path = str(bare)
    assert main(["certify", path, "--dtype", "float32"]) == 0
    options = ["--ckpt_path", path, "--data.test", "tests.test_train.ToyClouds", "--trainer.accelerator", "cpu"]
    assert main(["test", *options, "--trainer.default_root_dir", str(tmp_path)]) == 0
    predict = ["predict", *options, "--trainer.default_root_dir", str(tmp_path)]
    assert main([*predict, "--trainer.fast_dev_run", "true"]) == 0
    assert not list(tmp_path.glob("*.csv"))
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(PointSetClassifier, "predict_step", None)  # nothing is computed before the message
        capsys.readouterr()
        assert main(["predict", *options, "--trainer.default_root_dir", str(tmp_path / "file")]) == 2
        assert "trainer.default_root_dir: cannot write " in capsys.readouterr().err
    assert main(predict) == 0
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1 + ITEMS
    fit(tmp_path / "own", max_epochs=1, limit_train_batches=1, schedule=Constant())
    capsys.readouterr()
    assert main(["certify", str(tmp_path / "own/checkpoints/last.ckpt")]) == 2
    assert "ToyNetwork does not record the arguments" in (told := capsys.readouterr().err)
    assert "load_weights" in told


def test_the_checkpoint_is_not_blamed_for_the_command_line(finished, tmp_path, monkeypatch, capsys):
    (tmp_path / "foreign.py").write_text(f"from {__name__} import ToyClouds\nclass Clouds(ToyClouds): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = str(finished / "checkpoints/last.ckpt")
    assert main(["test", "--ckpt_path", path, "--trust", *TRUST, "--data.test", "foreign.Clouds"]) == 2
    assert f"the command line, or a file that {path} refers to, names foreign.Clouds, which" in capsys.readouterr().err


def test_subclass_adds_to_checkpoints(tmp_path):
    class Task(PointSetClassifier):
        def on_save_checkpoint(self, checkpoint: dict) -> None:
            super().on_save_checkpoint(checkpoint)
            checkpoint["mine"] = [1, 2]

    save_untrained(task := Task(ToyNetwork(cyclic(4)), 2), tmp_path / "c.ckpt")
    assert read_checkpoint(tmp_path / "c.ckpt")["mine"] == [1, 2]
    loaded = Task.load_from_checkpoint(tmp_path / "c.ckpt", network=ToyNetwork(cyclic(4)), classes=2)
    assert torch.equal(loaded.network.mlp[0].weight, task.network.mlp[0].weight)


def test_checkpoints_of_compiled_networks(tmp_path):
    """They are opened as those of the original network."""
    network = framewise()
    save_untrained(PointSetClassifier(torch.compile(network, backend="eager"), 2), tmp_path / "c.ckpt")
    for loaded in (load_network(tmp_path / "c.ckpt"), load_task(tmp_path / "c.ckpt").network):
        assert all(torch.equal(value, network.state_dict()[name]) for name, value in loaded.state_dict().items())
    again = PointSetClassifier(torch.compile(framewise()), 2)
    load_weights(again, read_checkpoint(tmp_path / "c.ckpt"), "the task")
    assert torch.equal(again.network.norm.weight, network.norm.weight)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_pickles_are_not_run(finished, tmp_path, capsys):
    content = torch.load(finished / "checkpoints/last.ckpt", weights_only=True)
    marker, path = tmp_path / "marker", tmp_path / "hostile.ckpt"
    torch.save({**content, "callbacks": Payload(marker)}, path)
    run = write(tmp_path / "run.yaml", config(tmp_path))
    for arguments in (
        ["certify", str(path)],
        ["test", "--ckpt_path", str(path)],
        ["fit", "--config", run, "--ckpt_path", str(path)],
    ):
        assert main(arguments) == 2
        assert "hostile.ckpt is damaged, or holds more than tensors and plain values" in capsys.readouterr().err
    fit(tmp_path, max_epochs=2)
    torch.save({**content, "callbacks": Payload(marker)}, tmp_path / "checkpoints/last.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        fit(tmp_path, resume=True)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("place", "name", "arguments"),
    [
        ("network", "os.system", {"command": "touch MARKER"}),
        ("network", "lieattn.train._callbacks.os.system", {"command": "touch MARKER"}),
        ("network", "lieattn.compare.write_json", {"path": "MARKER", "content": 1}),
        ("network", "torch.hub.load", {"repo_or_dir": "MARKER", "model": "m", "source": "local"}),
        ("network", "hostile_package.Network", {}),
        ("group", "hostile_package.Network", {}),
        ("optimizer", "builtins.exec", {}),
        ("data", "subprocess.Popen", {"args": ["touch", "MARKER"]}),
        ("hyper_parameters", "hostile_package.Network", {}),
    ],
)
def test_checkpoints_name_no_foreign_code(finished, tmp_path, monkeypatch, capsys, place, name, arguments):
    marker = tmp_path / "marker"
    (tmp_path / "hostile_package.py").write_text(
        f"import torch\nopen({str(marker)!r}, 'w')\nclass Network(torch.nn.Module): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = yaml.safe_load(yaml.safe_dump({"class_path": name, "init_args": arguments}).replace("MARKER", str(marker)))

    def change(content: dict) -> None:
        model, data = content["lieattn"]["config"]["model"], content["lieattn"]["config"]["data"]
        match place:
            case "network":
                model["init_args"]["network"] = spec
            case "group":
                model["init_args"]["network"]["init_args"]["group"] = spec
            case "optimizer":
                model["init_args"]["optimizer"] = name
            case "data":
                data["test"] = spec
            case _:
                content[place] = {"_class_path": name}

    path = rewrite(finished / "checkpoints/last.ckpt", tmp_path / "hostile.ckpt", change, digests=True)
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    for command_line, uses in (
        (["certify", path], ("network", "group", "data")),
        (["test", "--ckpt_path", path, *quiet], ("network", "group", "data", "optimizer")),
    ):
        refused = place in uses
        assert main([*command_line, "--trust", *TRUST]) == (2 if refused else 0)
        assert (f"names {name}, which would be imported and called" in capsys.readouterr().err) == refused
    for opened, uses in (
        (load_network, ("network", "group")),
        (load_task, ("network", "group", "optimizer")),
        (load_data, ("data",)),
    ):
        expected = pytest.raises(CheckpointError, match=f"names {name}") if place in uses else nullcontext()
        with expected:
            opened(path, trust=TRUST)
    assert not marker.exists()


def test_classes_of_trusted_packages_alone(finished):
    path = finished / "checkpoints/last.ckpt"
    with pytest.raises(CheckpointError, match=rf"names {__name__}\.ToyNetwork, .* --trust {TRUST[0]}, in Python"):
        load_network(path)
    with pytest.raises(CheckpointError, match=rf"names {__name__}\.ToyClouds"):
        load_data(path)
    assert len(load_data(path, trust=TRUST)) == ITEMS
    for harmless in ("torch.nn.functional.gelu", "torch.optim.Adam", "torch.nn.Gone", "no_such_package.json"):
        assert not list(untrusted_names({"a": [harmless, "runs/x.y", "json.dumps writes it", 1.5, None]}))
    assert list(untrusted_names({"a": ["torch.nn.modules.module.functools.partial"]}))


@pytest.mark.parametrize(
    "found", [{"json.dumps": 1}, ("json.dumps",), [["torch.nnx.f"]], "lieattn.trainers.f"], ids=str
)
def test_untrusted_names_are_found_everywhere(found):
    """Also in keys and tuples, and in packages whose names begin like those of trusted ones."""
    assert len(list(untrusted_names({"a": found}))) == 1
    assert not list(untrusted_names({"a": found}, ["json", "torch", "lieattn"]))


def test_the_name_of_a_table_is_no_import_path(tmp_path, monkeypatch):
    """A module ``mols`` beside ``mols.csv`` is not imported; arguments of other kinds and classes are tested."""
    (tmp_path / "mols.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)

    def found(class_path: str, **arguments: object) -> list[str]:
        return list(untrusted_names({"data": {"class_path": class_path, "init_args": arguments}}, ["torch"]))

    table = "lieattn_datasets.SmilesTable"
    assert found(table, path="mols.csv", unit="mols.csv", smiles="mols.csv") == []
    assert found("lieattn_datasets.ImageFolder", root="mols.csv") == []
    assert found(table, transform="mols.csv", target="mols.csv", other="mols.csv") == ["mols.csv"] * 3
    assert found(table, path={"class_path": "mols.csv"}) == found(table, path=["mols.csv"]) == ["mols.csv"]
    assert found("lieattn_datasets.Gone", path="mols.csv") == ["mols.csv"]
    assert found("mols.Table", path="mols.csv") == ["mols.Table", "mols.csv"]
    assert found("lieattn.train.load_data", path="mols.csv") == ["mols.csv"]


# The command line


def test_fit_writes_logs_and_checkpoints_of_plain_values(finished):
    checkpoint = torch.load(finished / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == EPOCHS - 1
    entry = checkpoint["lieattn"]
    assert entry["group"] == {"name": "C4", "order": 4, "dim": 2}
    labels = {"y": {"integer": True, "value": [0]}}
    sizes = {"points": 5, "pairs": None, "channels": 1, "dim": 2, "grid": None}
    assert entry["input"] == {**sizes, "attributes": labels}
    assert entry["config"]["model"]["init_args"]["network"]["init_args"]["dropout"] == 0.3
    assert (finished / "checkpoints/best.ckpt").is_file()
    assert list(finished.glob("tensorboard/version_0/events*"))
    with (finished / "csv/version_0/metrics.csv").open() as file:
        columns = next(csv.reader(file))
    assert {"train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy"} <= set(columns)


def spec(path: str, **arguments) -> dict:
    return {"class_path": f"lieattn.{path}", "init_args": arguments}


LIE = {"in_channels": 2, "neighborhood": spec("geometry.Radius", radius=2.0), "channels": 8, "layers": 1}


@pytest.mark.parametrize("nested", [True, False], ids=["keys", "class"])
def test_options_are_nested_keys_or_objects(nested):
    options = {"Lifting": {"local": 0, "radial": 3}, "AttentionOptions": {"hidden": 4}, "Readout": {"kind": "vector"}}
    given = [value if nested else spec(f"models.{name}", **value) for name, value in options.items()]
    arguments = dict(zip(("lifting", "attention", "readout"), given, strict=True))
    frames = spec("geometry.FiniteFrames", group=spec("groups.tetrahedral"), pose=spec("geometry.PrincipalFrames"))
    network = build(nn.Module, spec("models.LieTransformer", frames=frames, **LIE, **arguments), "a")
    assert network.lifting == Lifting(local=0, radial=3)
    assert network.kind == "vector"
    assert network.symmetry.name == "SE(3)"


def test_groups_are_found_inside_of_other_modules():
    network = FieldModel(FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1), VectorHead(4, 3))
    assert describe_group(network) == {"name": "T", "order": 12, "dim": 3}
    assert describe_group(nn.Linear(2, 2)) is None


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_alone_continues_its_run(finished, tmp_path, monkeypatch, capsys):
    """Without a configuration, the continuation has the settings of the run, such as its clipping and its length."""
    monkeypatch.chdir(tmp_path)
    stop = {"class_path": f"{__name__}.SignalAt", "init_args": {"step": 7, "signum": int(signal.SIGINT)}}
    file = write(tmp_path / "run.yaml", config(Path("here"), callbacks=[stop]))
    assert main(["fit", "--config", file]) == 128 + signal.SIGINT
    checkpoint = tmp_path / "here/checkpoints/last.ckpt"
    told = capsys.readouterr().err
    assert "stopped by SIGINT after step 8; the state is in here/checkpoints/last.ckpt" in told
    assert "To continue: the same command with --ckpt_path last" in told
    assert main(["fit", "--ckpt_path", "here/checkpoints/last.ckpt", "--trust", *TRUST]) == 0
    assert_same_weights(checkpoint, finished / "checkpoints/last.ckpt")

    # A copy continues in the default folder, and never in one that it names. Interrupted again, it tells the file.
    copied = str(shutil.copy(checkpoint, tmp_path / "copy.ckpt"))
    more = ["--trust", *TRUST, "--trainer.max_epochs", str(EPOCHS + 1)]
    stop = [f"--trainer.callbacks={__name__}.SignalAt", "--trainer.callbacks.step", str(EPOCHS * ITEMS // BATCH + 1)]
    stop += ["--trainer.callbacks.signum", str(int(signal.SIGINT))]
    before = checkpoint.read_bytes()
    assert main(["fit", "--ckpt_path", copied, *more, *stop]) == 128 + signal.SIGINT
    assert checkpoint.read_bytes() == before
    state = capsys.readouterr().err.rpartition("To continue: the same command with --ckpt_path ")[2].strip()
    assert state == "runs/checkpoints/last.ckpt"
    assert main(["fit", "--ckpt_path", state, *more]) == 0


OF_LIGHTNING = {
    "averages": [
        {"class_path": "Timer", "init_args": {"duration": "00:01:00:00"}},  # its interval is of an enumeration
        {"class_path": "StochasticWeightAveraging", "init_args": {"swa_lrs": 0.01}},  # its device is one of torch
    ],
    "trial": [{"class_path": "BatchSizeFinder", "init_args": {"max_trials": 1}}],  # it trains before the run continues
}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name", OF_LIGHTNING)
def test_runs_with_parts_of_lightning_are_continued_from_the_checkpoint_alone(tmp_path, capsys, recwarn, name):
    averages, logs = name == "averages", tmp_path / "logs/lightning_logs"
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path / "logs")}}
    more = {"logger": logger} if averages else {}
    content = config(tmp_path, callbacks=OF_LIGHTNING[name], max_epochs=1, **more)
    del content["model"]["init_args"]["schedule"]
    assert main(["fit", "--config", write(tmp_path / "run.yaml", content)]) == 0, capsys.readouterr().err
    last = tmp_path / "checkpoints/last.ckpt"
    arguments = ["fit", "--ckpt_path", str(last), "--trainer.max_epochs", "2", "--trust", *TRUST]
    assert main(arguments) == 2
    assert re.search(r"names lightning\.pytorch\.\S+, which would be imported", capsys.readouterr().err)
    assert main([*arguments, "lightning"]) == 0, capsys.readouterr().err
    assert read_checkpoint(last)["epoch"] == 1
    assert not averages or len(list(logs.iterdir())) == 2
    told = [str(warning.message) for warning in recwarn]
    assert sum("so no checkpoint has them; lieattn.train.Averaged" in message for message in told) == 2 * averages
    assert not [message for message in told if "Unable to serialize" in message]


def test_second_signal_stops_at_once(capfd):
    last = LastCheckpoint()
    last._receive(signal.SIGINT, None)
    assert "a second signal stops at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        last._receive(signal.SIGINT, None)


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="loaders do not fork this process")
def test_interrupts_are_not_lost_while_loaders_start():
    """Python ignores exceptions raised in callbacks that run at a fork."""
    due = [True]
    os.register_at_fork(after_in_parent=lambda: due and due.pop() and os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            iter(PointSetData(ToyClouds(), workers=1).train_dataloader())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not due


class InterruptAt(CrashAt):
    def __init__(self, step: int) -> None:
        super().__init__(step, error=KeyboardInterrupt)


def test_interrupts_are_no_failures(tmp_path, capsys):
    """Without special handling, Lightning ends the process with status 1."""
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "trainer", more=[InterruptAt(2)])
    stop = {"class_path": f"{__name__}.InterruptAt", "init_args": {"step": 2}}
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(["fit", "--config", write(tmp_path / "run.yaml", config(tmp_path, callbacks=[stop]))]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "lieattn fit: interrupted"


def test_evaluation_needs_nothing_but_the_checkpoint(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    checkpoint = str(finished / "checkpoints/last.ckpt")
    quiet = ["--trust", *TRUST, "--trainer.accelerator", "cpu"]
    quiet += ["--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
    for name, metric in (("test", "test/accuracy"), ("validate", "val/accuracy")):
        assert main([name, "--ckpt_path", checkpoint, *quiet]) == 0
        assert metric in capsys.readouterr().out
    assert main(["predict", f"--ckpt_path={checkpoint}", *quiet]) == 0
    with (finished / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    network = load_network(checkpoint, TRUST)
    with torch.no_grad():
        logits = network(next(iter(PointSetData(predict=ToyClouds(), batch_size=BATCH).predict_dataloader())))
    assert main(["predict", f"--ckpt_path={checkpoint}", *quiet, "--trainer.default_root_dir", "runs"]) == 0
    assert Path("runs/predictions.csv").is_file()
    assert len(rows) == ITEMS
    assert [int(row["predicted"]) for row in rows[:BATCH]] == logits.argmax(dim=1).tolist()
    assert float(rows[0]["logit_1"]) == pytest.approx(logits[0, 1].item(), abs=1e-6)


def test_command_certifies_a_checkpoint(finished, tmp_path, capsys):
    checkpoint = str(finished / "checkpoints/last.ckpt")
    certified = ["certify", checkpoint, "--trust", *TRUST]
    assert main([*certified, "--json", str(tmp_path / "out/c.json")]) == 0
    printed = capsys.readouterr().out
    assert "guarantee: invariant to all rotations" in printed
    assert f"the first 4 clouds of {__name__}.ToyClouds" in printed
    assert json.loads((tmp_path / "out/c.json").read_text())["passed"] is True
    assert main([*certified, "--random", "--clouds", "2", "--dtype", "float64"]) == 0
    assert "2 random clouds of 5 points" in capsys.readouterr().out
    data = {"class_path": f"{__name__}.ToyClouds", "init_args": {"size": 3}}
    assert main([*certified, "--data", write(tmp_path / "data.yaml", data)]) == 0
    assert "the first 3 clouds" in capsys.readouterr().out
    assert main([*certified, "--tolerance", "float64=0"]) == 1
    assert "NOT kept" in capsys.readouterr().out


MINE = f"{{}} --trust {TRUST[0]}"  # the checkpoint of the run, which names classes of this file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "a subcommand is missing"),
        ("fly", "unknown subcommand 'fly', expected one of fit, validate"),
        ("info more", "unrecognized arguments: more"),
        ("bench absent", "invalid choice: 'absent'"),
        ("bench attention --json .", "--json: cannot write '.': it is a folder"),
        ("certify .", "there is no checkpoint .: it is a folder"),
        ("certify {}", "names .*ToyNetwork, which would be imported and called"),
        ("certify absent.ckpt", "there is no checkpoint absent.ckpt"),
        ("certify broken.ckpt", "broken.ckpt is damaged, or is not a checkpoint"),
        ("certify foreign.ckpt", "foreign.ckpt was not written by lieattn.*save networks .* with lieattn.save"),
        ("certify digits-c9", "digits-c9 is neither a file nor a trained network .* digits-c8, "),
        (f"certify {MINE} --clouds 0", "--clouds: expected an integer of at least 1, got '0'"),
        (f"certify {MINE} --seed -1", "--seed: expected an integer of at least 0, got '-1'"),
        (f"certify {MINE} --tolerance x", "--tolerance: expected VALUE or float64.*, got 'x'"),
        (f"certify {MINE} --dtype float32 --tolerance float64=1", r"--tolerance: expected one of .*32.*, got float64;"),
        (f"certify {MINE} --json run.yaml/c.json", "--json: cannot write .*/run.yaml is not a writable folder"),
        (f"certify {MINE} --json a --html ./a", "--json, --html: expected different files"),
        (f"certify {MINE} --group.n 8", "--group.n: .* needs --group CLASS"),
        ("certify torch.nn:Identity --group search --group.n 8", "--group.n: .* needs --group CLASS"),
        (f"certify {MINE} --points 7", "--points: .* those that it was trained on"),
        (f"certify {MINE} --random --data d.yaml", "--random: .* no random clouds with --data"),
        (f"certify {MINE} --model.layers 2", "--model.layers: .*last.ckpt is not MODULE:NAME"),
        (f"certify {MINE} --output y=banana", "outputs..y..: expected one of .*, got 'banana'"),
        ("certify springs --points=7", "--points: .* springs is certified on the item of its card"),
        ("certify springs --clouds 3", "--clouds: .*; use --random for random clouds"),
        ("certify springs --data.split test", "--data.split: .* needs --data CLASS"),
        ("certify a.b:c --images 1 8 8 --dim 2", "--dim: .* no random clouds with --images"),
        ("picture springs --out run.yaml/a.png", "--out: cannot write .*/run.yaml is not a writable folder"),
        ("picture springs --out run.yaml", "--out: expected a file .png, .*, or a folder, got 'run.yaml'"),
        ("picture springs --clouds 3", "--clouds: .* springs is drawn for the item of its card"),
        ("compare --config run.yaml --json a.html", "--json: expected a .json file, beside which .* got 'a.html'"),
        ("certify a.b:c --model.size [1", r"model.*size.*\[1"),
        ("certify nbody --data Digits --data.split [1", r"data.*split.*\[1"),
        ("fit --config absent.yaml", "config: File does not exist: .*absent.yaml"),
        ("fit --config latin.yaml", "latin.yaml cannot be read: 'utf-8' codec"),
        ("fit --config twice.yaml", "twice.yaml: expected each key of a section once, got 'trainer' in lines 2 and 4"),
        ("fit RUN --data.train part.yaml", r"part\.yaml: .*got 'init_args' in lines 2 and 3"),
        ("fit RUN --config list.yaml", r"list.yaml: data: expected settings by name, .* got \[1, 2\]"),
        ("fit RUN --config other.yaml", "number.txt: expected settings by name, got 3"),
        ("fit RUN --config stop.yaml", "trainer: Early stopping .* `val/none`"),  # of Lightning
        ("fit --config again.yaml", "trainer: Found more than one stateful callback of type `EarlyStopping`"),
        ("fit RUN --trainer.devices 99999999999", "trainer.devices: expected at most 512, got 99999999999"),
        ("fit RUN --trainer.accumulate_grad_batches 0", "accumulate_grad_batches: Not of type PositiveInt: 0"),
        ("fit RUN --trainer.gradient_clip_val -1", "clip_val: Not of type NonNegativeFloat.*: -1"),
        ("fit RUN --trainer.default_root_dir run.yaml", "run.yaml"),
        ("fit RUN --seed_everything -1", "trainer: -1 is not in bounds"),
        ("fit RUN --model.init_args.classes 3", r"network: expected logits \[4, 3\]"),
        ("fit RUN --model.init_args.optimizer.init_args.lr -1", "optimizer: Invalid learning rate: -1"),
        ("fit RUN --model.init_args.network no_package.Network", "network: .*no_package"),
        ("fit RUN --ckpt_path last", "there is no checkpoint .*last.ckpt; its folder has none"),
        (
            "fit RUN --model.init_args.network.init_args.width 7 --ckpt_path {}",
            "do not fit the model .* network.mlp.0.w",
        ),
        ("fit --config adam.yaml --ckpt_path {}", r"optimizer: .* of Adam, got one of .*, with \[.*--weights FILE"),
        ("test RUN", "test needs trained weights: use --ckpt_path"),
        ("validate --config empty.yaml --ckpt_path {}", "data.val: expected a data set to validate on"),
        ("validate RUN --ckpt_path {} --trainer.limit_val_batches 0", "limit_val_batches: expected at least one batch"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_bad_usage(finished, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("latin.yaml").write_bytes(b"model: \xff")
    Path("list.yaml").write_text("data: [1, 2]")
    Path("number.txt").write_text("3")
    Path("other.yaml").write_text("trainer: number.txt")
    Path("twice.yaml").write_text("data: {}\ntrainer: {}\nmodel: {}\ntrainer: {max_epochs: 1}\n")
    Path("part.yaml").write_text("class_path: Digits\ninit_args: {}\ninit_args: {}\n")
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/none"}}
    write(Path("stop.yaml"), {"trainer": {"callbacks": [stop]}})
    again = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
    write(Path("again.yaml"), config(tmp_path, callbacks=[again]))
    Path("broken.ckpt").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"state_dict": {}}, "foreign.ckpt")
    write(Path("run.yaml"), config(tmp_path))
    write(Path("empty.yaml"), {**config(tmp_path), "data": {}})
    adam = config(tmp_path, max_epochs=EPOCHS + 1)
    adam["model"]["init_args"]["optimizer"] = {"class_path": "torch.optim.Adam"}
    write(Path("adam.yaml"), adam)
    checkpoint = str(finished / "checkpoints/last.ckpt")
    arguments = words.replace("RUN", "--config run.yaml").split()
    assert main([argument.format(checkpoint) for argument in arguments]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("lieattn"), told
    assert re.search(message, told)
    assert len(told) < 500


def test_yaml_with_merged_sections_aliases_and_too_many_levels(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [*a, *a]\n")
    assert read_yaml(path, "settings") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": 2 * [{"x": 1, "y": 2}]}
    path.write_text(f"a: {'[' * 500}{']' * 500}")
    with pytest.raises(UsageError, match=r"run.yaml cannot be read: maximum recursion depth"):
        read_yaml(path, "settings")


def test_sections_may_be_files_beside_the_configuration(tmp_path, monkeypatch, capsys):
    content = config(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "runs").mkdir()
    for section in ("data", "trainer"):
        write(tmp_path / "parts" / f"{section}.yaml", content.pop(section))
    file = write(
        tmp_path / "runs" / "run.yaml", {**content, "data": "../parts/data.yaml", "trainer": "../parts/trainer.yaml"}
    )
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", file, "--print_config"]) == 0
    assert f"class_path: {__name__}.ToyClouds" in capsys.readouterr().out


def test_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightning" else object())
    assert main(["fit"]) == 2
    assert 'lieattn fit needs lightning: pip install "lieattn[train]"' in capsys.readouterr().err


def test_missing_extra_is_named_in_python_and_help_needs_none(monkeypatch, capsys):
    for name in list(sys.modules):
        if re.match(r"(lightning|jsonargparse|torchmetrics)(\.|$)", name):
            monkeypatch.setitem(sys.modules, name, None)
        elif re.match(r"lieattn\.(train|compare)(\.|$)", name):
            monkeypatch.delitem(sys.modules, name)
    for name in ("train", "compare"):
        monkeypatch.delitem(vars(lieattn), name, raising=False)
    assert main(["--help"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in told) for name in COMMANDS)
    from lieattn import train
    from lieattn.train import Constant, Muon

    assert Constant.__module__, Muon.__module__
    for use, needed in (
        (lambda: train.PointSetRegressor, "lieattn.train.PointSetRegressor needs the package lightning"),
        (lambda: train.load_task("x"), "lieattn.train.load_task needs the package lightning"),
        (lambda: train.build(dict, {}, "x"), "lieattn.train.build needs the package jsonargparse"),
        (lambda: importlib.import_module("lieattn.compare"), "lieattn.compare needs the package lightning"),
    ):
        with pytest.raises(ImportError, match=rf'^{needed}: pip install "lieattn\[train\]"$'):
            use()


@pytest.mark.filterwarnings("ignore")
def test_barebones_runs_write_neither_logs_nor_checkpoints(tmp_path, capsys):
    content = config(tmp_path)
    del content["model"]["init_args"]["schedule"]
    content["trainer"] = {"barebones": True, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": str(tmp_path)}
    assert main(["fit", "--config", write(tmp_path / "run.yaml", content)]) == 0, capsys.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_delete_no_files_outside_of_the_folder_of_their_run(finished, tmp_path, capsys, monkeypatch):
    """ModelCheckpoint deletes files that it has saved before, according to its state in the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (victim := tmp_path / "folder/precious").mkdir(parents=True)
    checkpoint = torch.load(finished / "checkpoints/last.ckpt", weights_only=True)
    state = checkpoint["callbacks"].pop(key := next(key for key in checkpoint["callbacks"] if "ModelCheckpoint" in key))
    trainer = checkpoint["lieattn"]["config"]["run"]["trainer"]
    saver = {"monitor": "val/accuracy", "mode": "max", "dirpath": str(victim.parent)}
    path = "lightning.pytorch.callbacks.ModelCheckpoint"
    trainer["callbacks"] = [{"class_path": path, "init_args": saver}]
    trainer["max_epochs"] = EPOCHS + 2
    state |= {"dirpath": str(victim.parent), "best_k_models": {str(victim): torch.tensor(-1.0)}}
    state |= {"kth_best_model_path": str(victim), "kth_value": torch.tensor(-1.0)}

    def attempt() -> str:
        checkpoint["callbacks"][key] = state
        add_digests(checkpoint)
        torch.save(checkpoint, "hostile.ckpt")
        assert main(["fit", "--ckpt_path", "hostile.ckpt", "--trust", *TRUST]) == 2
        assert victim.is_dir()
        return capsys.readouterr().err

    assert f"names {path}, which would be imported and called" in attempt()
    trainer["callbacks"] = []
    state["best_k_models"] = {f"{tmp_path}/runs/checkpoints/../../folder/precious": torch.tensor(-1.0)}
    assert "hostile.ckpt is damaged: a callback names the file" in attempt()
