"""How benchmarks measure: ways in turn, medians, and the memory of each way in a process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lieattn.ops import release_memory


@dataclass(frozen=True)
class Record:
    """One way of doing one case.

    Attributes
    ----------
    case, way
        What was done, and how.
    step_ms, forward_ms
        Median milliseconds of forward and backward together, and of the forward pass alone.
    peak_mb
        Largest memory during a step above that before it, in MiB; NaN where the system does not tell.
    spread
        Range from the fastest to the slowest step, relative to the median.
    threads, repeats
        Threads of torch, number of steps measured.
    """

    case: str
    way: str
    step_ms: float
    forward_ms: float
    peak_mb: float
    spread: float
    threads: int
    repeats: int


Problem = Callable[[], Iterator[Tensor]]
"""Forward passes that end in scalars, one for each part of the batch; graphs lead to the parameters and inputs.

Most problems yield once. One that does not fit into memory yields part by part, and each part's graph is gone before
the next one is made, as with gradient accumulation.
"""


def compare(
    case: str, builders: Mapping[str, Callable[[], Problem]], *, repeats: int = 5, memory: bool = True
) -> list[Record]:
    """Measure several ways of one case, taking turns so that a busy machine disturbs all alike.

    Parameters
    ----------
    case
        Name of the case.
    builders
        For each way a function that makes the problem; it must be importable (it is sent to a process).
    repeats
        Steps measured for each way, after one that warms up.
    memory
        Whether to measure peak memory too.
    """
    problems = {way: build() for way, build in builders.items()}
    steps: dict[str, list[float]] = {way: [] for way in problems}
    forwards: dict[str, list[float]] = {way: [] for way in problems}
    for turn in range(repeats + 1):
        for way, problem in problems.items():
            forward, step = _timed(problem)
            if turn:
                forwards[way].append(forward)
                steps[way].append(step)
    del problems
    return [
        Record(
            case=case,
            way=way,
            step_ms=statistics.median(steps[way]),
            forward_ms=statistics.median(forwards[way]),
            peak_mb=peak_memory(build) if memory else float("nan"),
            spread=(max(steps[way]) - min(steps[way])) / statistics.median(steps[way]),
            threads=torch.get_num_threads(),
            repeats=repeats,
        )
        for way, build in builders.items()
    ]


def peak_memory(build: Callable[[], Problem]) -> float:
    """Peak resident memory in MiB of one step above that before it, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report_peak, args=(build, torch.get_num_threads(), sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        return float("nan")
    finally:
        process.join()


def table(records: list[Record]) -> str:
    """Aligned text, with the speed and memory of each way relative to the first way of its case."""
    head = (
        f"{'case':20}{'way':12}{'step ms':>10}{'forward ms':>12}{'peak MiB':>10}{'spread':>8}{'speed':>8}{'memory':>8}"
    )
    lines = [head, "-" * len(head)]
    first: dict[str, Record] = {}
    for record in records:
        base = first.setdefault(record.case, record)
        lines.append(
            f"{record.case:20}{record.way:12}{record.step_ms:>10.1f}{record.forward_ms:>12.1f}{record.peak_mb:>10.1f}"
            f"{record.spread:>8.0%}{base.step_ms / record.step_ms:>7.1f}x{_ratio(record, base):>7.2f}x"
        )
    return "\n".join(lines)


def _ratio(record: Record, base: Record) -> float:
    return record.peak_mb / max(base.peak_mb, 1e-9)


def _timed(problem: Problem) -> tuple[float, float]:
    """Milliseconds of the forward passes and of the whole step."""
    forward = 0.0
    started = resumed = time.perf_counter()
    for loss in problem():
        forward += time.perf_counter() - resumed
        loss.backward()
        del loss
        resumed = time.perf_counter()
    return 1e3 * forward, 1e3 * (time.perf_counter() - started)


def _step(problem: Problem) -> None:
    for loss in problem():
        loss.backward()
        del loss


def _report_peak(build: Callable[[], Problem], threads: int, sender: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(threads)
    problem = build()
    _step(problem)  # what is kept (gradients, compiled code) is not part of a step
    _give_back()
    before = _reset_peak()
    _step(problem)
    sender.send(_peak() - before)
    sender.close()


def _give_back() -> None:
    """Return memory that the kernels or the C library keep to the system: the next step is to be seen whole."""
    release_memory()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def _reset_peak() -> float:
    """Resident memory in MiB; the high-water mark is set back to it (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return float("nan")
    return _status("VmRSS")


def _peak() -> float:
    return _status("VmHWM")


def _status(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(field)), float("nan"))
