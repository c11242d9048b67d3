"""Averages of weights over the steps: which weights are validated, saved, tested and continued from."""

import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch_geometric.data import Batch, Data

from lieattn.cli import main
from lieattn.geometry import Radius
from lieattn.groups import cyclic
from lieattn.models import FramewiseTransformer
from lieattn.train import (
    AveragedWeights,
    CheckpointError,
    LastCheckpoint,
    PointSetData,
    PointSetRegressor,
    UsageError,
    load_network,
    load_weights,
    read_checkpoint,
)
from tests.cases import quiet_trainer, short_training
from tests.test_train import Crash, CrashAt, ToyNetwork, config, fit, write

pytestmark = [
    short_training,
    pytest.mark.filterwarnings("ignore:.*was not created with WeightAveraging.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*"),
]
DECAY = 0.8


class Normalized(ToyNetwork):
    """A network with running statistics, a counter of batches, and tables of floats and integers."""

    def __init__(self):
        super().__init__(cyclic(7))
        self.mlp = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        self.register_buffer("elements", self.group.elements.float(), persistent=False)
        self.register_buffer("cayley", self.group.cayley.clone(), persistent=False)


class Steps(Callback):
    """Records the trained weights after each step."""

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.states.append({name: value.clone() for name, value in pl_module.network.state_dict().items()})


def averages(states):
    """Return averages by the recursion of the docstring, in float64."""
    found = {name: value.double() for name, value in states[0].items()}
    for n, state in enumerate(states[1:], 1):
        decay = min(DECAY, (1 + n) / (10 + n))
        found = {name: decay * found[name] + (1 - decay) * value.double() for name, value in state.items()}
    return found


def test_averages_are_saved_validated_and_kept(tmp_path):
    steps = Steps()
    task = fit(tmp_path, network=Normalized(), noise=0.0, more=[AveragedWeights(DECAY), steps])
    checkpoint = read_checkpoint(LastCheckpoint().path(task.trainer))
    expected = averages(steps.states)
    moved = 0.0
    for name, value in task.network.state_dict().items():
        last = steps.states[-1][name]
        assert torch.equal(checkpoint["state_dict"][f"network.{name}"], value)
        assert torch.equal(checkpoint["current_model_state"][f"network.{name}"], last)
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-6)
            moved = max(moved, float((value - last).abs().max()))
        else:
            assert torch.equal(value, last)  # batches are counted, not averaged
    assert moved > 0.01  # otherwise the averages would equal the last weights, and the test would compare nothing
    # Tables keep their bits, which weighted means of equal numbers would round for this group.
    assert torch.equal(task.network.elements, cyclic(7).elements.float())
    assert torch.equal(task.network.cayley, cyclic(7).cayley)
    validated = float(task.trainer.callback_metrics["val/loss"])
    (measured,) = quiet_trainer().validate(task, task.trainer.datamodule, verbose=False)
    assert measured["val/loss"] == pytest.approx(validated, rel=1e-6)


def test_averages_of_lightning_are_refused(tmp_path):
    """Control: the formula of Lightning changes tables: integers are rounded down, and group elements drift."""
    average = AveragedModel(network := Normalized(), use_buffers=True, avg_fn=get_ema_avg_fn(0.9))
    for _ in range(10):
        average.update_parameters(network)
    assert not torch.equal(average.module.cayley, network.cayley)
    assert not torch.equal(average.module.elements, network.elements)
    with pytest.raises(UsageError, match=r"EMAWeightAveraging changes tables of networks, use .*AveragedWeights"):
        fit(tmp_path, more=[EMAWeightAveraging()])


@pytest.mark.parametrize("options", [{"crash": 6}, {"accumulate_grad_batches": 2}], ids=str)
def test_continued_to_the_same_bits(tmp_path, options):
    def run(name, **more):
        torch.manual_seed(1)
        return fit(tmp_path / name, network=Normalized(), more=[AveragedWeights(DECAY)], **more)

    options = {"crash": 7, **options}
    crash = options.pop("crash")
    whole = run("whole", **options)
    with pytest.raises(Crash):
        run("parts", crash=crash, **options)
    parts = run("parts", resume=True, **options)
    saved = [read_checkpoint(tmp_path / name / "checkpoints/last.ckpt") for name in ("whole", "parts")]
    for entry in ("state_dict", "current_model_state", "averaging_state"):
        for name, value in saved[0][entry].items():
            assert torch.equal(value, saved[1][entry][name]), (entry, name)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", "bfloat16"), ("16-true", "float16")])
def test_weights_in_half_precision_are_refused(tmp_path, precision, dtype):
    """Averages would stand still: their steps are smaller than the distance to the next number."""
    with pytest.raises(UsageError, match=f"ema: expected weights in float32 .* bf16-mixed, got torch.{dtype}, in"):
        fit(tmp_path, precision=precision, more=[AveragedWeights(DECAY)])


def test_averages_in_double_precision(tmp_path):
    steps = Steps()
    task = fit(tmp_path, precision="64-true", more=[AveragedWeights(DECAY), steps])
    for name, value in averages(steps.states).items():
        torch.testing.assert_close(task.network.state_dict()[name].double(), value, rtol=0, atol=1e-13)


def test_begun_later_and_not_left_off(tmp_path):
    with pytest.raises(Crash):
        fit(tmp_path, crash=5)
    with pytest.raises(Crash):
        fit(tmp_path, resume=True, crash=10, more=[AveragedWeights(DECAY)])
    with pytest.raises(UsageError, match="ema: the checkpoint is of a training with averaged weights: continue"):
        fit(tmp_path, resume=True)
    assert fit(tmp_path, resume=True, more=[AveragedWeights(DECAY)]).trainer.global_step == 15


class Sizes(torch.utils.data.Dataset):
    """Clouds with two targets of different scales."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        pos = torch.randn(4, 2, generator=torch.Generator().manual_seed(index))
        size = pos.norm()
        return Data(x=torch.ones(4, 1), pos=pos, y=torch.stack([100 + 10 * size, 0.1 * size])[None])


def test_statistics_of_the_data_and_geometry_go_along(tmp_path):
    """They are measured after the averages are created, and have a different shape."""

    def run(crash, path=None):
        task, last = PointSetRegressor(framewise(2.0)), LastCheckpoint(str(tmp_path), every_n_train_steps=1)
        options = {"default_root_dir": tmp_path, "enable_checkpointing": True, "max_epochs": 2}
        callbacks = [AveragedWeights(0.9), last, CrashAt(crash)]
        quiet_trainer(callbacks=callbacks, **options).fit(
            task, PointSetData(Sizes(), val=Sizes(), batch_size=4), ckpt_path=path
        )
        return task

    def framewise(radius):
        torch.manual_seed(0)
        return FramewiseTransformer(cyclic(4), 1, 2, channels=4, layers=1, neighborhood=Radius(radius))

    with pytest.raises(Crash):
        run(3)
    task = run(None, path=tmp_path / "last.ckpt")
    assert task.shift_y.shape == (2,)
    assert float(task.shift_y[0]) > 100
    saved = load_network(tmp_path / "last.ckpt")
    batch = Batch.from_data_list([Sizes()[0]])
    assert torch.equal(saved(batch), task.network.eval()(batch))
    weights = read_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"neighborhood: the weights are for Radius\(radius=2.0"):
        load_weights(framewise(1.0), weights, "the network", "network.")


@pytest.mark.slow
def test_option_of_fit(tmp_path, capsys):
    path = write(tmp_path / "run.yaml", config(tmp_path) | {"ema": DECAY})
    assert main(["fit", "--config", path]) == 0
    saved = read_checkpoint(tmp_path / "checkpoints/last.ckpt")
    weight = "network.mlp.0.weight"
    assert not torch.equal(saved["state_dict"][weight], saved["current_model_state"][weight])
    loaded = load_network(tmp_path / "checkpoints/last.ckpt", trust=["tests"])
    assert torch.equal(loaded.mlp[0].weight, saved["state_dict"][weight])
    capsys.readouterr()
    assert main(["test", "--config", path, "--ckpt_path", "last"]) == 0
    for decay, message in (
        ("1.5", r"ema: decay: expected a number in \[0, 1\), got 1.5"),
        ("null", "continue with --ema"),
    ):
        assert main(["fit", "--config", path, "--ckpt_path", "last", "--ema", decay, "--trainer.max_epochs", "4"]) == 2
        assert re.search(message, capsys.readouterr().err.splitlines()[-1])
