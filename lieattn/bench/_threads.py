"""Steps on an idle machine and beside other busy processes, on one thread and on all threads that torch would use."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.utils.data import RandomSampler
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from lieattn._core.checks import counted
from lieattn.bench import _attention
from lieattn.bench._measure import fresh_process
from lieattn.geometry import Radius, pixel_positions
from lieattn.groups import cyclic
from lieattn.models import GSANet, GSAOptions

IMAGES, SIDE, CHANNELS, CLASSES = 32, 8, 16, 10
BUSY = (0, 1, 2, 4)
SMALL = {"IMAGES": 2, "BUSY": (0, 1)}
SHRINKS = ("lieattn.bench._attention",)
_TURNS = 3
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(100000): pass"


@dataclass(frozen=True)
class ThreadsRecord:
    """Steps of one case on ``threads`` threads, beside ``busy`` busy processes; times in milliseconds."""

    case: str
    way: str
    busy: int
    threads: int
    step_ms: float  # median
    worst_ms: float
    repeats: int  # number of steps measured


def gsa_net() -> Callable[[], None]:
    """A training step of a small C4 network on a batch of 8 x 8 images, with its geometry, as in a first experiment."""
    return _training(itertools.repeat(Batch.from_data_list(_images(IMAGES))))


def gsa_net_with_loader() -> Callable[[], None]:
    """The same step, with batches of random images from another process."""
    images = _images(10 * IMAGES)
    order = RandomSampler(images, replacement=True, num_samples=2**30)
    return _training(iter(DataLoader(images, IMAGES, sampler=order, num_workers=1)))


def attention() -> Callable[[], None]:
    """The case H4 of the benchmark ``attention`` with the fused kernel."""
    problem = _attention.build(4, "auto")

    def step() -> None:
        for loss in problem():
            loss.backward()

    return step


STEPS = {"gsa-net": gsa_net, "gsa-net, loader": gsa_net_with_loader, "attention H4": attention}


def run(repeats: int = 5) -> list[ThreadsRecord]:
    """Return the records of all cases; ``repeats`` steps follow two warm-up steps, three times per thread count."""
    threads = sorted({1, torch.get_num_threads()})
    return [record for case in STEPS for record in _measured(case, threads, repeats)]


def table(records: list[ThreadsRecord]) -> str:
    """Format records as aligned text, with times relative to the same threads on an idle machine, and to one thread."""
    head = f"{'case':16}{'busy':>5}{'threads':>9}{'step ms':>10}{'worst ms':>10}{'/ alone':>9}{'/ one thread':>14}"
    times = {(record.case, record.busy, record.threads): record.step_ms for record in records}
    lines = [head, "-" * len(head)]
    for record in records:
        alone = record.step_ms / times[record.case, min(BUSY), record.threads]
        single = record.step_ms / times[record.case, record.busy, 1]
        lines.append(
            f"{record.case:16}{record.busy:>5}{record.threads:>9}{record.step_ms:>10.1f}{record.worst_ms:>10.1f}"
            f"{alone:>9.2f}{single:>14.2f}"
        )
    return "\n".join(lines)


def _images(number: int) -> list[Data]:
    pos, grid = pixel_positions(SIDE, SIDE), torch.tensor([[SIDE, SIDE]])
    return [Data(x=torch.randn(SIDE**2, 1), pos=pos, grid=grid) for _ in range(number)]


def _training(batches: Iterator[Batch]) -> Callable[[], None]:
    torch.manual_seed(0)
    options = GSAOptions(values=False)
    network = GSANet(cyclic(4), channels=CHANNELS, blocks=(0, 2), heads=8, neighborhood=Radius(1.5), options=options)
    optimizer = torch.optim.AdamW(network.parameters())
    labels = torch.arange(IMAGES) % CLASSES

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(next(batches)), labels).backward()
        optimizer.step()

    return step


def _measured(case: str, threads: Iterable[int], repeats: int) -> Iterator[ThreadsRecord]:
    with ExitStack() as stack:
        # The way threads wait is fixed when torch is loaded, and depends on earlier work.
        processes = {count: stack.enter_context(fresh_process()) for count in threads}
        for busy in BUSY:
            times: dict[int, list[float]] = {count: [] for count in processes}
            with _busy(busy):
                for _, count in itertools.product(range(_TURNS), processes):
                    times[count] += processes[count].submit(_times, case, count, repeats).result()
            for count, found in times.items():
                way, middle = f"{counted(count, 'thread')}, {busy} busy", statistics.median(found)
                yield ThreadsRecord(case, way, busy, count, middle, max(found), len(found))


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Run ``number`` processes that keep one core each busy; they end with this process, however it ends."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _times(case: str, threads: int, repeats: int) -> list[float]:
    """Times of steps in milliseconds; this runs in the process that is measured."""
    torch.set_num_threads(threads)
    step, times = _step(case), []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return times[2:]


@cache
def _step(case: str) -> Callable[[], None]:
    return STEPS[case]()
