"""Measurements of ``lieattn bench``."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lieattn._core.messages import aligned
from lieattn.ops import release_memory


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

Sizes = Mapping[str, Any]
"""Sizes of the problems of a benchmark by name."""

NAN = float("nan")


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
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(_peak, build, torch.get_num_threads()).result()
        except (OSError, RuntimeError):  # it does not fit, or memory cannot be measured
            return NAN


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of the command: what it measures, its sizes, toy sizes in place of some, and its cases.

    ``run`` measures the cases in another way; it is called with the sizes, the number of repeats and the device.
    ``options`` are those of :func:`compare`.
    """

    text: str
    sizes: Sizes
    small: Sizes
    cases: Callable[[Sizes, str], Cases]
    run: Callable[[Sizes, int | None, str], list[Record]] | None = None
    remarks: Callable[[list[Record], Sizes], list[str]] = lambda records, sizes: []
    on_gpus: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def records(self, repeats: int | None, device: str, sizes: Sizes) -> list[Record]:
        """Return the records of all cases."""
        if self.run is not None:
            return self.run(sizes, repeats, device)
        given = self.options if repeats is None else {**self.options, "repeats": repeats}
        return compare(self.cases(sizes, device), device=device, **given)

    def table(self, records: list[Record]) -> str:
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
