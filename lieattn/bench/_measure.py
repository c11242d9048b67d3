"""Measurements of ``lieattn bench``."""

from __future__ import annotations

import ctypes
import importlib
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

from lieattn._core.reports import aligned
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
}
"""The benchmarks by name, and what each of them measures."""


@dataclass(frozen=True)
class Record:
    """One way of doing one case; times are medians in milliseconds."""

    case: str
    way: str
    step_ms: float  # forward and backward together
    forward_ms: float
    peak_mb: float  # largest increase of memory during a step, in MiB; NaN if it cannot be measured
    spread: float  # range from the fastest to the slowest step, relative to the median
    threads: int  # number of threads of torch
    repeats: int  # number of steps measured
    device: str = "cpu"


Problem = Callable[[], Iterator[Tensor]]
"""Forward passes that yield scalars, one for each part of the batch, for backward passes to parameters and inputs.

Most problems yield once. A problem that does not fit into memory yields once for each part, and the graph of a part is
freed before the next one is computed, as with gradient accumulation.
"""

Cases = Mapping[str, Mapping[str, Callable[[], Problem]]]
"""For each case and way, a function that makes the problem. It is sent to a process, so it must be importable."""

Clock = Callable[[], float]
"""A clock in seconds with any origin."""

NAN = float("nan")
_TOYS: list[str] = []  # modules that have toy sizes


def use_toy_sizes(*names: str) -> None:
    """Give benchmarks, by the names of their modules, the sizes ``SMALL``, also where memory is measured."""
    for name in names:
        module: Any = importlib.import_module(name)
        vars(module).update(module.SMALL)
        _TOYS.append(name)


def mean_square(forward: Callable[[], Tensor]) -> Problem:
    """Return the problem of one forward pass, with the mean of the squares of its outputs as the loss."""

    def problem() -> Iterator[Tensor]:
        yield forward().square().mean()

    return problem


def compare(
    cases: Cases,
    *,
    repeats: int = 5,
    threads: int | None = None,
    memory: bool = True,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
) -> list[Record]:
    """Measure several ways of each of the ``cases``, in turn, so that a busy machine affects all ways alike.

    After a warm-up step, ``repeats`` steps of each way are measured on ``threads`` threads of torch, by default the
    present number. With ``memory`` the peak memory is measured too. Problems are on the ``device``. On ``"cuda"``,
    times are measured between events, memory is the memory allocated by torch, and a way that does not fit has NaN in
    all measurements. On the CPU, a ``clock`` of processor time, ``time.process_time``, is affected less by other
    programs on a busy machine.
    """
    before, records = torch.get_num_threads(), []
    torch.set_num_threads(threads or before)
    try:
        for case, builders in cases.items():
            problems = {way: build() for way, build in builders.items()}
            fitting = {way: problem for way, problem in problems.items() if _fits(problem, device)}
            turns = [{way: _timed(problem, device, clock) for way, problem in fitting.items()} for _ in range(repeats)]
            peaks = {way: _cuda_peak(problem) for way, problem in fitting.items() if device == "cuda" and memory}
            del problems, fitting
            for way, build in builders.items():
                forwards, steps = zip(*(turn.get(way, (NAN, NAN)) for turn in turns), strict=True)
                step, forward = statistics.median(steps), statistics.median(forwards)
                peak = peak_memory(build) if device == "cpu" and memory else peaks.get(way, NAN)
                spread, used = (max(steps) - min(steps)) / step, torch.get_num_threads()
                records.append(Record(case, way, step, forward, peak, spread, used, repeats, device))
    finally:
        torch.set_num_threads(before)
    return records


def peak_memory(build: Callable[[], Problem]) -> float:
    """Return the largest increase of resident memory in MiB during a step, in a fresh process; NaN if it fails."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=use_toy_sizes, initargs=tuple(_TOYS)) as pool:
        try:
            return pool.submit(_peak, build, torch.get_num_threads()).result()
        except (OSError, RuntimeError):  # it does not fit, or memory cannot be measured
            return NAN


def table(records: list[Record]) -> str:
    """Format records as aligned text, with speed and memory of each way relative to the first way of its case."""
    heads = ["case", "way", "step ms", "forward ms", "peak MiB", "spread", "speed", "memory"]
    first, rows = {record.case: record for record in reversed(records)}, []
    for record in records:
        base = first[record.case]
        speed, memory = base.step_ms / record.step_ms, record.peak_mb / max(base.peak_mb, 1e-9)
        cells = [f"{value:.1f}" for value in (record.step_ms, record.forward_ms, record.peak_mb)]
        cells += [f"{record.spread:.0%}", f"{speed:.1f}x", f"{memory:.2f}x"]
        # A memory that was not measured is NaN.
        rows.append([record.case, record.way, *("-" if "nan" in cell else cell for cell in cells)])
    return aligned([heads, *rows])


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of the command: its records for a number of repeats and a device, their table, and remarks."""

    run: Callable[..., list[Any]]
    table: Callable[[list[Any]], str] = table
    remarks: Callable[[list[Any]], list[str]] = lambda records: []
    on_gpus: bool = True


def timed(cases: Callable[[str], Cases], remarks: Any = Benchmark.remarks, **options: Any) -> Benchmark:
    """Return the benchmark of the cases on a device, with ``options`` of :func:`compare`."""

    def run(repeats: int | None = None, device: str = "cpu") -> list[Record]:
        given = options if repeats is None else options | {"repeats": repeats}
        return compare(cases(device), device=device, **given)

    return Benchmark(run, remarks=remarks)


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
    """A point in time: seconds of the clock on the CPU, or a CUDA event, which does not block."""
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
    """Run a first step as a warm-up, and return whether there is enough memory for it."""
    try:
        _timed(problem, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def _cuda_peak(problem: Problem) -> float:
    """Largest increase of the memory that torch allocates on the GPU during a step, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _timed(problem, "cuda")
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak(build: Callable[[], Problem], threads: int) -> float:
    torch.set_num_threads(threads)
    problem = build()
    _timed(problem)  # memory that stays allocated (gradients, compiled code) is not counted
    release_memory()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the C library reuses freed memory, and the step seems smaller
    except (AttributeError, OSError, TypeError):
        pass
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak memory of the process (Linux)
    before = _status("VmRSS")
    _timed(problem)
    return _status("VmHWM") - before


def _status(field: str) -> float:
    """A field of ``/proc/self/status`` in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(field)), NAN)
