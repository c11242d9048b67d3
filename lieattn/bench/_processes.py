"""A training step in one, two and four processes on one machine, with the same total number of clouds."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from lieattn.geometry import Radius
from lieattn.groups import tetrahedral
from lieattn.models import LieTransformer

CLOUDS, POINTS = 32, 40
PROCESSES = (1, 2, 4)
SMALL = {"PROCESSES": (1, 2)}


@dataclass(frozen=True)
class ProcessesRecord:
    """Steps with a number of ``processes``; times in milliseconds."""

    processes: int
    step_ms: float  # median over the steps, for the slowest process
    work_ms: float  # total processor time of all processes
    spread: float  # range from the fastest to the slowest step, relative to the median
    repeats: int


def run(repeats: int = 5) -> list[ProcessesRecord]:
    """Return the records of ``LieTransformer`` in distributed data parallel training (gloo), one thread per process."""
    records = []
    for count in PROCESSES:
        with tempfile.TemporaryDirectory(prefix="lieattn-") as folder:
            spawn(_train, (count, folder, repeats), nprocs=count)
            found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(count)]
        # The processes begin a step together, and it ends when the slowest one has its gradients.
        steps = [max(parts) for parts in zip(*(walls for walls, _ in found), strict=True)]
        step = statistics.median(steps)
        work = sum(statistics.median(busy) for _, busy in found)
        spread = (max(steps) - min(steps)) / step
        records.append(ProcessesRecord(count, step, work, spread, repeats))
    return records


def table(records: list[ProcessesRecord]) -> str:
    """Format records as aligned text, with the speed relative to one process."""
    head = f"{'processes':14}{'step ms':>10}{'work ms':>10}{'spread':>8}{'speed':>8}"
    first = records[0].step_ms
    lines = [
        f"{record.processes:<14}{record.step_ms:>10.1f}{record.work_ms:>10.1f}{record.spread:>8.0%}"
        f"{first / record.step_ms:>7.2f}x"
        for record in records
    ]
    return "\n".join([head, "-" * len(head), *lines])


def _train(rank: int, count: int, folder: str, repeats: int) -> None:
    """Measure the steps of one process, and save their times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        torch.save(_steps(rank, count, repeats), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def _steps(rank: int, count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Times of the steps of one process on its part of the clouds, in milliseconds of the clock and of the processor.

    The model must be freed before its process group is destroyed. If the model holds the last reference to the group,
    torch waits for threads of gloo without releasing Python's lock, which these threads may need.
    """
    torch.manual_seed(0)
    network = LieTransformer(1, 1, frames=tetrahedral(), neighborhood=Radius(1.0), channels=16, layers=2, heads=4)
    model = DistributedDataParallel(network)
    mine = CLOUDS // count
    generator = torch.Generator().manual_seed(rank)
    pos = 3 * torch.rand(mine * POINTS, 3, generator=generator)
    batch = torch.arange(mine).repeat_interleave(POINTS)
    data = Data(pos=pos, batch=batch, x=torch.ones(len(pos), 1))
    walls, busy = [], []
    for _ in range(repeats + 1):
        dist.barrier()
        started, work = time.perf_counter(), time.process_time()
        model(data).square().mean().backward()
        walls.append(1e3 * (time.perf_counter() - started))
        busy.append(1e3 * (time.process_time() - work))
    return walls[1:], busy[1:]
