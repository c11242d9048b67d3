"""``lieattn bench``, and how it measures: ways in turn, medians, the memory of each way in a process of its own."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lieattn._files import replace_text
from lieattn.ops import release_memory

BENCHMARKS = {
    "attention": "one group attention layer on images: plain maths and the fused kernel",
    "attentive": "attentive group convolution: layer and rot-MNIST network, against the formula written out",
    "gsa-net": "a training step of the rot-MNIST networks, against the published cubic formula",
    "framewise": "a training step of the framewise transformer, against torch's TransformerEncoder",
    "lietransformer": "an SE(3) attention layer of LieTransformer, against its literal dense evaluation",
    "lifts": "equivariance error of LieTransformer with each lift (repeats: motions)",
    "scales": "equivariance error of the scale fiber at its ends (repeats: clouds)",
    "scaling": "time and memory against points, group order, neighbors",
    "peers": "one layer beside those of other packages",
    "roofline": "operations and bytes a second against the machine's ceilings",
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


Problem = Callable[[], Iterator[Tensor]]
"""Forward passes that end in scalars, one for each part of the batch; graphs lead to the parameters and inputs.

Most problems yield once. One that does not fit into memory yields part by part, and each part's graph is gone before
the next one is made, as with gradient accumulation.
"""

Cases = Mapping[str, Mapping[str, Callable[[], Problem]]]
"""For each case and way a function that makes the problem; it must be importable (it is sent to a process)."""


def compare(cases: Cases, *, repeats: int = 5, threads: int | None = None, memory: bool = True) -> list[Record]:
    """Measure several ways of each of the :data:`Cases`, taking turns so that a busy machine disturbs all alike.

    ``repeats`` steps of each way are measured, after one that warms up, on as many ``threads`` of torch, or those of
    the process; ``memory`` says whether to measure peak memory too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return [record for case, ways in cases.items() for record in _measured(case, ways, repeats, memory)]
    finally:
        torch.set_num_threads(before)


def _measured(case: str, builders: Mapping[str, Callable[[], Problem]], repeats: int, memory: bool) -> Iterator[Record]:
    problems = {way: build() for way, build in builders.items()}
    turns = [{way: _timed(problem) for way, problem in problems.items()} for _ in range(repeats + 1)][1:]
    del problems
    for way, build in builders.items():
        forwards, steps = zip(*(turn[way] for turn in turns), strict=True)
        step = statistics.median(steps)
        yield Record(
            case=case,
            way=way,
            step_ms=step,
            forward_ms=statistics.median(forwards),
            peak_mb=peak_memory(build) if memory else float("nan"),
            spread=(max(steps) - min(steps)) / step,
            threads=torch.get_num_threads(),
            repeats=repeats,
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


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one benchmark, print its table and write its records; argparse exits with 2 on bad usage."""
    lines = [f"  {benchmark:14} {text}" for benchmark, text in BENCHMARKS.items()]
    parser = argparse.ArgumentParser(
        prog=f"lieattn {name}",
        description="benchmarks:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--repeats", type=int, help="steps measured for each way, after one that warms up")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    module: Any = importlib.import_module(f"lieattn.bench._{options.benchmark.replace('-', '_')}")
    records = module.run(**({} if options.repeats is None else {"repeats": options.repeats}))
    print(f"{BENCHMARKS[options.benchmark]}; torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(getattr(module, "table", table)(records))
    for remark in module.remarks(records) if hasattr(module, "remarks") else ():
        print(remark)
    if options.json is not None:
        replace_text(options.json, json.dumps([asdict(record) for record in records], indent=1) + "\n")
        print(f"records: {options.json}")
    return 0
