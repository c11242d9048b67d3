"""How ``lieattn bench`` measures: ways in turn, medians, the memory of each way in a process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lieattn.ops import release_memory

BENCHMARKS = {
    "attention": "one group attention layer on images: plain PyTorch (scatter), unfolded windows, and the fused kernel",
    "whole-clouds": "framewise attention over whole clouds, compared with FlexAttention and torch's own attention",
    "epochs": "training steps of one main network of each paper, at the size of its data",
    "attentive": "attentive group convolution: a layer and a rotated MNIST network, compared with a direct evaluation",
    "gsa-net": "a training step of the rotated MNIST networks, compared with the published cubic formula",
    "framewise": "a training step of the framewise transformer, compared with torch's TransformerEncoder",
    "fibers": "a training step with fibers of 4 to 60 frames at equal width, and its parts (CPU time)",
    "lietransformer": "an SE(3) attention layer of LieTransformer, compared with a direct dense evaluation",
    "lifts": "equivariance error of LieTransformer with each lift (--repeats: number of motions)",
    "scales": "equivariance error of the scale fiber at its ends (--repeats: number of clouds)",
    "scaling": "time and memory as functions of the number of points, the group order, and the number of neighbors",
    "peers": "one layer compared with those of other packages",
    "threads": "a training step and an attention layer, on an idle machine and beside busy processes (takes minutes)",
    "processes": "a training step in one, two and four processes, with the same total number of clouds",
    "roofline": "operations and bytes per second, compared with the limits of the machine",
}


@dataclass(frozen=True)
class Record:
    """One way of doing one case; times are medians in milliseconds."""

    case: str
    way: str
    step_ms: float  # forward and backward together
    forward_ms: float
    peak_mb: float  # largest memory during a step above that before it, in MiB; NaN where the system does not tell
    spread: float  # range from the fastest to the slowest step, relative to the median
    threads: int  # of torch
    repeats: int  # number of steps measured
    device: str = "cpu"


Problem = Callable[[], Iterator[Tensor]]
"""Forward passes that end in scalars, one for each part of the batch; graphs lead to the parameters and inputs.

Most problems yield once. One that does not fit into memory yields part by part, and each part's graph is gone before
the next one is made, as with gradient accumulation.
"""

Clock = Callable[[], float]
"""Seconds, from any beginning."""

Cases = Mapping[str, Mapping[str, Callable[[], Problem]]]
"""For each case and way a function that makes the problem; it must be importable (it is sent to a process)."""


def compare(
    cases: Cases,
    *,
    repeats: int = 5,
    threads: int | None = None,
    memory: bool = True,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
) -> list[Record]:
    """Measure several ways of each of the :data:`Cases`, taking turns so that a busy machine disturbs all alike.

    ``repeats`` steps of each way are measured, after one that warms up, on as many ``threads`` of torch, or those of
    the process; ``memory`` says whether to measure peak memory too. Problems are on the ``device``: on ``"cuda"`` times
    are those between events, memory is what torch has taken of the card, and a way that does not fit has NaN for all.
    On the CPU a ``clock`` of processor time, ``time.process_time``, is disturbed less where a machine is busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return [
            record for case, ways in cases.items() for record in _measured(case, ways, repeats, memory, device, clock)
        ]
    finally:
        torch.set_num_threads(before)


def _measured(
    case: str, builders: Mapping[str, Callable[[], Problem]], repeats: int, memory: bool, device: str, clock: Clock
) -> Iterator[Record]:
    problems = {way: build() for way, build in builders.items()}
    fitting = {way: problem for way, problem in problems.items() if _fits(problem, device)}
    turns = [{way: _timed(problem, device, clock) for way, problem in fitting.items()} for _ in range(repeats)]
    peaks = {way: _cuda_peak(problem) for way, problem in fitting.items()} if device == "cuda" and memory else {}
    del problems
    nothing = float("nan"), float("nan")
    for way, build in builders.items():
        forwards, steps = zip(*(turn.get(way, nothing) for turn in turns), strict=True)
        step = statistics.median(steps)
        if device == "cpu" and memory:
            peaks[way] = peak_memory(build)
        yield Record(
            case=case,
            way=way,
            step_ms=step,
            forward_ms=statistics.median(forwards),
            peak_mb=peaks.get(way, float("nan")),
            spread=(max(steps) - min(steps)) / step,
            threads=torch.get_num_threads(),
            repeats=repeats,
            device=device,
        )


def peak_memory(build: Callable[[], Problem]) -> float:
    """Peak resident memory in MiB of one step above that before it, in a fresh process; NaN if it fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_peak, build, torch.get_num_threads()).result()
        except (OSError, RuntimeError):  # it does not fit, or the system does not tell
            return float("nan")


def table(records: list[Record]) -> str:
    """Aligned text, with the speed and memory of each way relative to the first way of its case."""
    head = (
        f"{'case':20}{'way':12}{'step ms':>10}{'forward ms':>12}{'peak MiB':>10}{'spread':>8}{'speed':>8}{'memory':>8}"
    )
    lines = [head, "-" * len(head)]
    first = {record.case: record for record in reversed(records)}
    for record in records:
        base = first[record.case]
        speed, memory = base.step_ms / record.step_ms, record.peak_mb / max(base.peak_mb, 1e-9)
        lines.append(
            f"{record.case:20}{record.way:12}{record.step_ms:>10.1f}{record.forward_ms:>12.1f}{record.peak_mb:>10.1f}"
            f"{record.spread:>8.0%}{speed:>7.1f}x{memory:>7.2f}x"
        )
    return "\n".join(lines)


def _timed(problem: Problem, device: str = "cpu", clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Milliseconds of the forward passes and of the whole step."""
    resumed, made = [_mark(device, clock)], list[Any]()
    for loss in problem():
        made.append(_mark(device, clock))
        loss.backward()
        del loss
        resumed.append(_mark(device, clock))
    forward = sum(_milliseconds(*passed) for passed in zip(resumed, made, strict=False))
    return forward, _milliseconds(resumed[0], _mark(device, clock))


def _mark(device: str, clock: Clock) -> Any:
    """A moment: a time, or an event of the card, which does not wait for it."""
    if device == "cpu":
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return 1e3 * float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end))


def _fits(problem: Problem, device: str) -> bool:
    """Whether a first step, which warms up, finds enough memory."""
    try:
        _timed(problem, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def _cuda_peak(problem: Problem) -> float:
    """Largest memory in MiB that torch takes of the card during a step, above that before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _timed(problem, "cuda")
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak(build: Callable[[], Problem], threads: int) -> float:
    torch.set_num_threads(threads)
    problem = build()
    _timed(problem)  # what is kept (gradients, compiled code) is not part of a step
    release_memory()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or the C library reuses what it has kept, and the step is not seen whole
    except (AttributeError, OSError, TypeError):
        pass
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back (Linux)
    before = _status("VmRSS")
    _timed(problem)
    return _status("VmHWM") - before


def _status(field: str) -> float:
    """A number of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(field)), float("nan"))
