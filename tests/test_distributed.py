"""Training in several processes: equal to one process with the whole batch, and orderly termination."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lieattn.geometry import Radius
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import (
    AttentionOptions,
    FieldModel,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
)
from lieattn.nn import DipoleHead, FieldBatchNorm, Heads, InvariantHead, PointBatchNorm, VectorHead
from lieattn.testing import randomize
from lieattn.train import (
    EpochSampler,
    LastCheckpoint,
    NonFiniteError,
    PointSetClassifier,
    PointSetData,
    PointSetRegressor,
    TrainingInterrupted,
    UsageError,
)
from lieattn.train._callbacks import _WholeFiles
from lieattn.train._data import random_state, set_random_state, set_random_states
from tests.cases import quiet_trainer, short_training

pytestmark = short_training

LIMIT = 300.0  # seconds within which processes must end, on a busy machine


class Clouds(Dataset):
    """Clouds of 3 to 8 points with a label, a target at every point, and a mask of the targets.

    The label of the cloud ``wrong`` is out of range.
    """

    def __init__(self, size: int, seed: int = 0, wrong: int | None = None) -> None:
        self.size, self.seed, self.wrong = size, seed, wrong

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Data:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        points = 3 + int(torch.randint(6, (), generator=generator))
        x, pos, u = (torch.randn(points, n, generator=generator) for n in (1, 2, 1))
        counts = torch.rand(points, generator=generator) < 0.7
        y = torch.tensor([9 if index == self.wrong else index % 2])
        return Data(x=x, pos=pos, y=y, u=u, u_mask=counts, number=torch.tensor([index]))


class Pool(nn.Module):
    """Computes logits or numbers from features and distances, with dropout."""

    def __init__(self, dropout: float = 0.0, at_points: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1 if at_points else 2)
        )
        self.at_points = at_points

    def forward(self, data: Batch) -> Tensor:
        out: Tensor = self.layers(torch.cat([data.x, data.pos.norm(dim=1, keepdim=True)], dim=1))
        if self.at_points:
            return out
        return out.new_zeros(data.num_graphs, 2).index_add(0, data.batch, out)


# --- processes ----------------------------------------------------------------------------------------------------


def in_processes(count: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return results of ``function(rank, *arguments)`` in each process of a group, which is killed after a minute."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = [folder / f"result{rank}.pt" for rank in range(count)]
    started = []
    for rank in range(count):
        process = context.Process(target=_work, args=(rank, count, port, found[rank], function, arguments))
        process.start()
        started.append(process)
    deadline = time.monotonic() + LIMIT
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(started) if process.is_alive()]
    for process in started:
        process.kill()
        process.join()
    assert not late, f"processes {late} hang"
    results = [torch.load(path, weights_only=False) if path.exists() else "no result" for path in found]
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise AssertionError(f"process {rank}: {result}")
    return results


def _work(rank: int, count: int, port: int, path: Path, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    try:
        result = function(rank, *arguments)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, path)


def joined(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process group, for functions that do not start one."""
    dist.init_process_group("gloo")
    try:
        return function(rank, *arguments)
    finally:
        dist.destroy_process_group()


# --- gradients ----------------------------------------------------------------------------------------------------


class Step(nn.Module):
    """A training step as the forward pass of a module, as DistributedDataParallel requires."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task
        task.log = lambda *arguments, **options: None

    def forward(self, batch: Batch) -> Tensor:
        return self.task.evaluate(batch, "train")


def _network(name: str) -> nn.Module:
    options: dict[str, Any] = {"neighborhood": Radius(1.5), "channels": 6}
    made = {
        "pool": Pool,
        "points": lambda: Pool(at_points=True),
        "gsa": lambda: GSANet(cyclic(2), 1, 2, heads=1, blocks=(1,), **options),
        "lie conv": lambda: LieConvNet(1, 2, frames=cyclic(2), layers=1, **options),
        "batch norm": lambda: LieTransformer(
            1, 2, frames=cyclic(2), layers=1, heads=1, attention=AttentionOptions(norm="batch_pre"), **options
        ),
        "checkpointed": lambda: FramewiseTransformer(cyclic(2), 1, 2, layers=1, **options).checkpoint_activations(),
    }
    seed_everything(0, verbose=False)
    return randomize(made[name]())


def _task(name: str, network: nn.Module) -> Any:
    if name != "points":
        return PointSetClassifier(network, 2)
    return PointSetRegressor(network, {"u": 2.0}, loss="mse")


def gradients(rank: int, name: str, batches: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a step on batches that are parts of one batch."""
    data = Clouds(9)
    batch = Batch.from_data_list([data[index] for index in batches[rank]])
    step: Any = Step(_task(name, _network(name)).double())
    step = DistributedDataParallel(step) if len(batches) > 1 else step
    loss = step(step.module.task.cast(batch) if len(batches) > 1 else step.task.cast(batch))
    loss.backward()
    named = {key.removeprefix("module."): weight.grad for key, weight in step.named_parameters()}
    named |= {key.removeprefix("module."): value for key, value in step.named_buffers() if "running" in key}
    return loss.item(), named


QUICK = ("pool", "points", "batch norm", "checkpointed")
NAMES = QUICK + (("gsa", "lie conv") if "LIEATTN_SLOW" in os.environ else ())


def all_gradients(rank: int, batches: list[list[int]]) -> dict[str, Any]:
    return {name: gradients(rank, name, batches) for name in NAMES}


def test_gradients_of_unequal_parts_are_those_of_the_whole(tmp_path):
    """Two processes with 5 and 2 clouds of several sizes, with masks and batch statistics over all points."""
    whole = all_gradients(0, [list(range(7))])
    for part in in_processes(2, tmp_path, joined, all_gradients, [[0, 1, 2, 3, 4], [5, 6]]):
        torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-12)


def normed(rank: int, *cases: list[int]) -> list[Any]:
    """Return results, gradients, statistics, and results in eval mode of both normalizations for a part of a field.

    Each case has the sizes of the parts of all processes.
    """
    found = []
    for sizes in cases:
        torch.manual_seed(0)
        whole = torch.randn(sum(sizes), 3, 4, dtype=torch.float64) + 2
        weights = torch.randn_like(whole)
        for layer in (FieldBatchNorm(4), PointBatchNorm(4)):
            norm = randomize(layer).double().train()
            x, factor = (part.split(sizes)[rank].clone() for part in (whole, weights))
            x.requires_grad_()
            out = norm(x)
            (out * factor).sum().backward()
            after = norm.eval()(x.detach())
            grads = torch.stack([norm.weight.grad, norm.bias.grad])
            if len(sizes) > 1:
                dist.all_reduce(grads)
            found.append([out.detach(), x.grad, after, grads, norm.running_mean, norm.running_var])
    return found


def test_statistics_of_batch_normalizations_are_of_all_processes(tmp_path):
    """With parts of unequal sizes, and with an empty one."""
    parts = in_processes(2, tmp_path, joined, normed, [5, 2], [7, 0])
    for whole, one, two in zip(normed(0, [7], [7]), *parts, strict=True):
        for number in range(3):
            torch.testing.assert_close(torch.cat([one[number], two[number]]), whole[number], rtol=1e-10, atol=1e-12)
        for part in (one, two):
            torch.testing.assert_close(part[3:], whole[3:], rtol=1e-10, atol=1e-12)


def test_torch_and_lightning_leave_these_normalizations_alone():
    """The synchronized batch norm of torch expects channels in dimension 1, and runs only on GPUs."""
    network = nn.Sequential(FieldBatchNorm(4), PointBatchNorm(4))
    assert str(nn.SyncBatchNorm.convert_sync_batchnorm(network)) == str(network)


OF_POINTS = [
    lambda: FramewiseTransformer(tetrahedral(), 1, 2, channels=4, layers=2, neighborhood=Radius(1.0)),
    lambda: FramewiseTransformer(tetrahedral(), 1, 2, channels=4, layers=2),
    lambda: GSANet(tetrahedral(), 1, 2, neighborhood=Radius(1.0), channels=8, heads=1),
    lambda: LieTransformer(1, 2, frames=tetrahedral(), neighborhood=Radius(1.0), channels=4, layers=2, heads=1),
    lambda: LieConvNet(1, 2, frames=tetrahedral(), neighborhood=Radius(1.0), channels=4, layers=2),
    lambda: FieldModel(FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1), VectorHead(4)),
]


@pytest.mark.parametrize("number", range(len(OF_POINTS)))
def test_all_parameters_take_part_with_a_single_point(number):
    """Otherwise torch would wait for gradients if a process has only a point without neighbors."""
    network = OF_POINTS[number]()
    network(Data(x=torch.randn(1, 1), pos=3 * torch.randn(1, 3))).square().sum().backward()
    assert [name for name, weight in network.named_parameters() if weight.grad is None] == []


def sharded(rank: int, wrap: bool) -> tuple[list[float], int]:
    """Return losses of three steps of a transformer with sharded weights, and the number of weights in this process."""
    torch.manual_seed(0)
    network = FramewiseTransformer(tetrahedral(), 1, 2, channels=8, layers=3)
    if wrap:
        for block in network.blocks:
            fully_shard(block)
        fully_shard(network)
    held = sum((weight.to_local() if wrap else weight).numel() for weight in network.parameters())
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(3)
    pos, x = (torch.randn(8, 5, size, generator=generator) for size in (3, 1))
    losses = []
    for _ in range(3):
        mine = slice(rank, None, 2) if wrap else slice(None)
        batch = Batch.from_data_list([Data(pos=p, x=f) for p, f in zip(pos[mine], x[mine], strict=True)])
        loss = network(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if wrap:
            dist.all_reduce(total)
        losses.append(total.item() / (2 if wrap else 1))
    return losses, held


def test_weights_split_over_processes_learn_like_those_of_one(tmp_path):
    """FSDP2: torch.distributed.fsdp.fully_shard of every block and of the network."""
    whole, size = sharded(0, False)
    (one, first), (two, second) = in_processes(2, tmp_path, joined, sharded, True)
    assert one == two == pytest.approx(whole, rel=1e-5)
    assert whole[2] < whole[0]
    assert max(first, second) < 0.6 * size


# --- training with Lightning --------------------------------------------------------------------------------------


class Seen(PointSetClassifier):
    """Records which clouds count in every stage."""

    def __init__(self, *arguments: Any, fails_at: tuple[int, int] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "test": []}
        self.drawn: list[Tensor] = []
        self.fails_at = fails_at

    def evaluate(self, batch: Batch, stage: str) -> Tensor:
        counts = ~batch.repeated if "repeated" in batch else torch.ones(batch.num_graphs, dtype=torch.bool)
        self.seen[stage] += batch.number[counts].tolist()
        loss = super().evaluate(batch, stage)
        self.drawn.append(torch.rand(()))
        return loss


class Broken(Pool):
    """Returns NaN in one process at the third step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def forward(self, data: Batch) -> Tensor:
        self.calls += self.training
        broken = self.calls == 3 and self.training and os.environ.get("RANK") == str(self.rank)
        return super().forward(data) * (float("nan") if broken else 1.0)


class StopAt(Callback):
    """Sends a signal to the first process."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 0:
            signal.raise_signal(signal.SIGTERM)


def train(rank: int, folder: Path, devices: int, batch_size: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Train on 21 clouds, validate and test on 13, and return the results."""
    saved: list[str] = []
    write = _WholeFiles.save_checkpoint
    _WholeFiles.save_checkpoint = lambda self, content, path, storage_options=None: (  # type: ignore[method-assign]
        saved.append(Path(path).name) or write(self, content, path, storage_options)  # type: ignore[func-returns-value]
    )
    seed_everything(0, verbose=False)
    sizes = {"train": 21, "val": 13, "test": 13, **changes.get("sizes", {})}
    sets: Any = {name: Clouds(size, seed) for seed, (name, size) in enumerate(sizes.items())}
    task = Seen(changes.get("network", Pool()).double(), 2, optimizer=changes.get("optimizer"))
    data = PointSetData(**sets, batch_size=batch_size)
    options: dict[str, Any] = {"max_epochs": 2, **changes.get("trainer", {})}
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="64-true",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
        inference_mode=False,
        callbacks=[LastCheckpoint(every_n_train_steps=1), StopAt(changes.get("stop_at", -1))],
        **options,
    )
    try:
        trainer.fit(task, data, ckpt_path=changes.get("ckpt_path"), weights_only=True)
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        logged |= trainer.test(task, data, verbose=False)[0]
        error = None
    except (NonFiniteError, TrainingInterrupted, UsageError) as found:
        error, logged = f"{type(found).__name__}: {found}", {}
    finally:
        _WholeFiles.save_checkpoint = write  # type: ignore[method-assign]
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    found = {"weights": weights, "logged": logged, "seen": task.seen, "drawn": task.drawn, "saved": saved}
    return {**found, "error": error, "steps": trainer.global_step}


def two(folder: Path, batch_size: int = 4, **changes: Any) -> list[dict[str, Any]]:
    return in_processes(2, folder, train, folder, 2, batch_size, changes)


def test_two_processes_train_and_evaluate_like_one(tmp_path):
    """With 21 clouds and 8 per step, the last batches have 3 and 2 clouds; the 13 others are split into 7 and 6."""
    one, parts = train(0, tmp_path / "one", 1, 8, {}), two(tmp_path / "two")
    for part in parts:
        torch.testing.assert_close(part["weights"], one["weights"], rtol=1e-9, atol=1e-12)
        assert part["logged"] == pytest.approx(one["logged"], rel=1e-6)
    assert {"train/loss_epoch", "train/accuracy", "val/loss", "val/accuracy", "test/loss", "test/accuracy"} <= set(
        one["logged"]
    )
    for stage in ("train", "val", "test"):
        assert sorted(parts[0]["seen"][stage] + parts[1]["seen"][stage]) == sorted(one["seen"][stage])
    # Written only by the first process.
    assert parts[0]["saved"] == one["saved"]
    assert parts[1]["saved"] == []
    assert parts[0]["drawn"] != parts[1]["drawn"]  # dropout, random frames and neighbor dropout are drawn separately


def train_one_output(rank: int, folder: Path, devices: int) -> dict[str, Tensor]:
    """Train the numbers of a network with numbers and dipoles, and return the weights."""
    seed_everything(0, verbose=False)
    network = FramewiseTransformer(cyclic(2), 1, 1, channels=4, layers=1, neighborhood=Radius(2.0))
    heads = {"u": InvariantHead(4, 1, pool="none"), "dipole": DipoleHead(4, 2)}
    task = PointSetRegressor(FieldModel(network, Heads(heads)).double(), "u")
    options = {"strategy": "ddp" if devices > 1 else "auto", "max_epochs": 2, "precision": "64-true"}
    quiet_trainer(devices=devices, default_root_dir=folder, **options).fit(
        task, PointSetData(Clouds(12), val=Clouds(4), batch_size=4 // devices)
    )
    return {name: weight.detach().clone() for name, weight in task.network.named_parameters()}


def test_outputs_that_are_no_targets_keep_their_weights(tmp_path):
    one = train_one_output(0, tmp_path / "one", 1)
    for part in in_processes(2, tmp_path / "two", train_one_output, tmp_path / "two", 2):
        torch.testing.assert_close(part, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 9])
def test_batches_that_are_empty_but_for_what_fills_them_up(size, tmp_path):
    """One cloud for two processes, and nine clouds with four per step, so one process has only padding at the end."""
    changes: dict[str, Any] = {"sizes": {"train": size, "val": size, "test": size}}
    one, parts = train(0, tmp_path / "one", 1, 4, changes), two(tmp_path / "two", 2, **changes)
    for part in parts:
        torch.testing.assert_close(part["weights"], one["weights"], rtol=1e-9, atol=1e-12)
        assert part["logged"] == pytest.approx(one["logged"], rel=1e-6)
    assert sorted(parts[0]["seen"]["train"] + parts[1]["seen"]["train"]) == sorted(one["seen"]["train"])


def test_a_loss_that_is_no_number_in_one_process_ends_all_of_them(tmp_path):
    parts = two(tmp_path, network=Broken(1))
    assert [part["error"][:45] for part in parts] == ["NonFiniteError: the training loss is nan at s"] * 2
    assert " at step 2 " in parts[0]["error"]


def test_going_on_with_another_number_of_processes(tmp_path):
    """In the middle of an epoch, continuing is exact if a step has as many clouds, and refused otherwise."""
    whole = train(0, tmp_path / "whole", 1, 8, {})
    for part in two(tmp_path / "begun", stop_at=3):  # all processes stop, although only one gets the signal
        assert part["error"].startswith("TrainingInterrupted: stopped by SIGTERM after step 4")
    last = str(tmp_path / "begun/checkpoints/last.ckpt")
    going_on = train(0, tmp_path / "one", 1, 8, {"ckpt_path": last})
    torch.testing.assert_close(going_on["weights"], whole["weights"], rtol=1e-9, atol=1e-12)
    assert going_on["logged"]["val/loss"] == pytest.approx(whole["logged"]["val/loss"], rel=1e-6)
    refused = train(0, tmp_path / "refused", 1, 4, {"ckpt_path": last})
    assert (
        "the middle of epoch 1, which can only be continued with the settings with which it began:" in refused["error"]
    )
    assert "processes=2 (got 1)" in refused["error"]
    assert train(0, tmp_path / "one begun", 1, 8, {"stop_at": 4})["error"] is not None
    last = str(tmp_path / "one begun/checkpoints/last.ckpt")
    for part in two(tmp_path / "on in two", ckpt_path=last):
        torch.testing.assert_close(part["weights"], whole["weights"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("size", "replicas"), [(11, 3), (1, 4), (12, 4), (5, 4)])
def test_every_item_counts_once(size, replicas):
    parts = [list(EpochSampler(size, replicas=replicas, rank=rank).items()) for rank in range(replicas)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(index for part in parts for _, index, repeated in part if not repeated) == list(range(size))
    sampler = EpochSampler(size, replicas=replicas, rank=replicas - 1)
    sampler.start(0, 1)
    assert list(sampler.items()) == parts[-1][1:]


# --- the command --------------------------------------------------------------------------------------------------


def write_run(folder: Path, clouds: int = 9) -> list[str]:
    """Write the configuration of a run of a tiny network, and return the options that read it."""
    sets = {
        name: {"class_path": f"{__name__}.Clouds", "init_args": {"size": size}}
        for name, size in (("train", clouds), ("val", 5), ("test", 5))
    }
    network = {"class_path": f"{__name__}.Pool"}
    task = {"class_path": "lieattn.train.PointSetClassifier", "init_args": {"network": network, "classes": 2}}
    options = {"default_root_dir": str(folder), "max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False}
    content = {"model": task, "data": {**sets, "batch_size": 2}, "trainer": {**options, "logger": False}}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(folder / "run.yaml"), "--trainer.strategy", "ddp"]


def start(*words: str) -> subprocess.Popen[str]:
    """Start a command in its own session, so that its processes can be identified."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    root = Path(__file__).parent.parent
    return subprocess.Popen([sys.executable, *words], env=environment, cwd=root, start_new_session=True, **pipes)


def members(session: int) -> list[int]:
    """Return processes of a session that have not ended, including zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += [int(folder.name)] if int(fields[3]) == session else []
    return found


def end_of(process: subprocess.Popen[str]) -> str:
    """Wait for a command, check that no process is left, and return its output."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
        deadline = time.monotonic() + LIMIT
        while left := members(process.pid):
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.2)
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    return output


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_the_command_in_three_processes_of_lightning_and_two_of_torchrun(tmp_path):
    logged = []
    for name, devices, words in (
        ("one", 1, ["-m", "lieattn"]),
        ("lightning", 3, ["-m", "lieattn"]),
        ("torchrun", 2, ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "lieattn"]),
    ):
        (tmp_path / name).mkdir()
        sizes = ["--trainer.devices", str(devices), "--data.batch_size", str(6 // devices)]
        process = start(*words, "fit", *write_run(tmp_path / name), *sizes)
        output = end_of(process)
        assert process.returncode == 0, output
        saved = torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)
        assert len(saved["lieattn"]["random"]) == devices
        assert sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
        logged.append(saved["state_dict"])
    for weights in logged[1:]:
        torch.testing.assert_close(weights, logged[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_stops_all(signum, tmp_path):
    options = [*write_run(tmp_path, clouds=4000), "--trainer.devices", "2", "--last.every_n_train_steps", "2"]
    process = start("-m", "lieattn", "fit", *options)
    wait_for(tmp_path / "checkpoints/last.ckpt", process)
    process.send_signal(signum)
    output = end_of(process)
    assert process.returncode == 128 + signum
    assert output.count("To continue: the same command") == 1


def test_processes_have_seeds_of_their_own_on_every_device(monkeypatch):
    """Without it, dropout on CUDA is the same in all processes, because its generators all have the seed of the run."""
    found = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", found.append)
    before = random_state()
    try:
        for rank in range(3):
            torch.manual_seed(5)
            found.clear()
            set_random_states(None, rank)
            assert len(found) == (rank > 0)
            assert torch.initial_seed() == (found[0] if rank else 5)
    finally:
        set_random_state(before)
