"""A long training of small networks on clouds of changing sizes: memory, files and threads must not grow."""

from __future__ import annotations

import os
import random
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from tqdm import tqdm

from lieattn.geometry import PrincipalFrames, Radius
from lieattn.groups import cyclic, octahedral
from lieattn.models import FramewiseTransformer, GSANet, LieTransformer
from lieattn.ops import backend

WARM_UP = 0.1  # share of the steps in which caches and pools fill
TOLERANCE = 0.02  # allowed growth of resident memory from the tenth after the warm-up to the last tenth


def soak(steps: int, seed: int) -> tuple[dict[str, float], str | None]:
    """Train, and return the measurements and a description of the fault, if there is one."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    networks = _networks()
    optimizers = [torch.optim.Adam(network.parameters(), 1e-3) for network, _ in networks]
    part = max(1, round(WARM_UP * steps))
    memory: list[float] = []
    handles: list[tuple[int, int]] = []
    slowest = 0.0
    for step in tqdm(range(steps), unit="step"):
        at = draw.randrange(len(networks))
        torch.set_num_threads(draw.choice((1, 2)))
        began = time.perf_counter()
        with backend(draw.choice(("plain", "numba"))), warnings.catch_warnings(action="ignore"):
            loss = _step(*networks[at], optimizers[at], draw)
        slowest = max(slowest, time.perf_counter() - began) if step >= part else slowest
        if not loss < 1e6:
            return {"slowest_seconds": slowest}, f"the loss is {loss} at step {step}"
        memory.append(_resident())
        if step % max(1, part // 10) == 0:
            handles.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    first, last = (sum(some) / len(some) for some in (memory[part : 2 * part], memory[-part:]))
    files, threads = zip(*handles[len(handles) // 10 :], strict=True)
    measured = {
        "mib_at_first": round(first, 1),
        "mib_at_last": round(last, 1),
        "growth": round(last / first - 1, 4),
        "files": max(files),
        "threads": max(threads),
        "slowest_seconds": round(slowest, 2),
    }
    if last > (1 + TOLERANCE) * first:
        return measured, f"memory grew from {first:.0f} to {last:.0f} MiB"
    if files[-1] > files[0] or threads[-1] > threads[0]:
        return measured, f"open files {files[0]} -> {files[-1]}, threads {threads[0]} -> {threads[-1]}"
    return measured, None


def _networks() -> list[tuple[nn.Module, int]]:
    """Return networks for clouds of one feature, and the dimensions of the clouds."""
    small = {"channels": 8, "layers": 1, "heads": 2}
    near = Radius(1.5)
    return [
        (FramewiseTransformer(cyclic(4), 1, 1, neighborhood=near, **small), 2),
        (FramewiseTransformer(PrincipalFrames(), 1, 1, neighborhood=near, **small), 3),
        (LieTransformer(1, 1, frames=PrincipalFrames(), neighborhood=near, **small), 3),
        (LieTransformer(1, 1, frames=octahedral(), neighborhood=Radius(0.8), **small), 3),
        (GSANet(cyclic(4), 1, 1, neighborhood=near, channels=8, blocks=(1,), heads=2), 2),
    ]


def _step(network: nn.Module, dim: int, optimizer: torch.optim.Optimizer, draw: random.Random) -> float:
    sizes = [draw.randint(1, 24) for _ in range(draw.randint(1, 4))]
    batch = Batch.from_data_list([Data(x=torch.ones(size, 1), pos=torch.randn(size, dim)) for size in sizes])
    loss = network(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
