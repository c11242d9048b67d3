"""What the library finds, measures or compiles on this machine: ``lieattn info``, ``bench``, ``warm-up``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import multiprocessing
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any, get_args

import torch
from torch import Tensor

from lieattn._core.checks import counted
from lieattn._core.machine import usable_cores
from lieattn._core.values import with_finite
from lieattn.cli import ArgumentParser, output_file, positive
from lieattn.geometry import AllPairs, Radius
from lieattn.io import replace_text
from lieattn.ops import (
    Pattern,
    RelativeTerms,
    attentive_convolution,
    backend,
    cpu_kernels,
    edge_messages,
    edge_moments,
    edge_units,
    explain,
    fused_kernel,
    group_attention,
    head_networks,
)

_PACKAGES = ("lieattn", "torch", "torch-geometric", "torch-scatter", "numba", "triton", "lightning", "e3nn", "numpy")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# There is a kernel of attention for each number of lanes; 4, 8 and 16 heads fill them.
_ATTENTION = {"attention, up to 4 heads": 4, "attention, up to 8 heads": 8, "attention, more heads": 16}
# For attentive convolution the lanes are outputs; another kernel has half as many lanes, for few outputs.
_ATTENTIVE = {"attentive convolution": 8, "attentive convolution, few outputs": 1}
_CASES = (*_ATTENTION, "networks of heads", "networks of edges", "few channels", *_ATTENTIVE)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run ``"info"``, ``"bench"`` or ``"warm-up"``; the exit status is 1 if there are no kernels to compile, else 0."""
    return {"info": _info, "bench": _bench, "warm-up": _warm_up}[name](arguments)


def _info(arguments: Sequence[str]) -> int:
    """Print versions, threads, and the backend that evaluates each operation."""
    description = "Show versions, threads, and the backend that evaluates each operation, with reasons."
    ArgumentParser(prog="lieattn info", description=description).parse_args(arguments)
    cores, threads = counted(usable_cores(), "core"), counted(torch.get_num_threads(), "thread")
    print(f"Python {platform.python_version()}, {cores}, torch uses {threads}")
    for about, found in cpu_kernels().items():
        print(f"{about} of the kernels for CPUs: {found}")
    print(f"CUDA: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'not available'}\n")
    for package in _PACKAGES:
        print(f"{package:16} {_version(package)}")
    print("\nbackend of each operation, and why not a faster one:")
    for case, choice in _choices().items():
        print(f"  {case:44} {choice}")
    print("to select another one: lieattn.ops.backend(...) or the environment variable LIEATTN_BACKEND")
    return 0


def _choices() -> dict[str, Any]:
    """The backend for typical calls, in words."""
    x = torch.zeros(1, 4, 2, 8)
    three = RelativeTerms(fiber_key=torch.zeros(4, 4, 4, 1, 8))
    patterns = get_args(Pattern)
    choices: dict[str, Any] = {f"pattern {pattern}": explain(x, x, x, pattern=pattern) for pattern in patterns}
    choices |= {
        "attention over whole clouds (AllPairs)": explain(x, x, x, AllPairs()(torch.zeros(1, 1))),
        "float64": explain(x.double(), x.double(), x.double()),
        "bfloat16": explain(x.bfloat16(), x.bfloat16(), x.bfloat16()),
        "convolution (no scores)": explain(None, None, x, normalize="none"),
        "attention weights returned": explain(x, x, x, return_weights=True),
        "published encoding of GSA-Nets": explain(x, x, x, pattern="query_sum", terms=three),
    }
    layers = {"cpu": "networks of heads and of edges, attention on grids, cpu"}
    if torch.cuda.is_available():
        y = x.cuda()
        choices |= {f"CUDA, pattern {pattern}": explain(y, y, y, pattern=pattern) for pattern in patterns}
        layers["cuda"] = "networks of heads, attention on grids, cuda"
    absent = "plain (another backend was selected, or this device has no kernels)"
    return choices | {case: fused_kernel(torch.device(device)) or absent for device, case in layers.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _bench(arguments: Sequence[str]) -> int:
    """Run one benchmark, print its table and write its records."""
    from lieattn.bench import BENCHMARKS

    lines = [f"  {name:14} {benchmark.text}" for name, benchmark in BENCHMARKS.items()]
    form, described = argparse.RawDescriptionHelpFormatter, "benchmarks:\n" + "\n".join(lines)
    parser = ArgumentParser(prog="lieattn bench", description=described, formatter_class=form)
    add = parser.add_argument
    add("benchmark", choices=BENCHMARKS)
    add("--json", type=output_file, help="write the records to this file")
    add("--repeats", type=positive, help="steps to measure for each variant, after a warm-up step")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    add("--small", action="store_true", help="use toy sizes and one step, to check that the benchmark runs")
    options = parser.parse_args(arguments)
    benchmark = BENCHMARKS[options.benchmark]
    if options.device != "cpu" and not benchmark.on_gpus:
        parser.error(f"argument --device: expected cpu, since {options.benchmark} measures the cores of this machine")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device on this machine")
    sizes = {**benchmark.sizes, **(benchmark.small if options.small else {})}
    repeats = 1 if options.small and options.repeats is None else options.repeats
    records = benchmark.records(repeats, options.device, sizes)
    here = [counted(torch.get_num_threads(), "thread"), cpu_kernels().get("instruction set")]
    machine = [torch.cuda.get_device_name()] if options.device == "cuda" else here
    print(f"{benchmark.text}; {', '.join(filter(None, [f'torch {torch.__version__}', *machine]))}\n")
    print("\n".join([benchmark.table(records), *benchmark.remarks(records, sizes)]))
    if options.json is not None:
        content = with_finite([asdict(record) for record in records])
        replace_text(options.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(f"records: {options.json}")
    return 0


def _warm_up(arguments: Sequence[str]) -> int:
    """Compile all kernels for the given dtypes."""
    description = """Compile the kernels for CPUs in advance, so that no first call has to wait.

    They are compiled for the processor of this machine, for each dtype and for few and many heads, in one process per
    core, and stored. Kernels that have been compiled before are not compiled again."""
    parser = ArgumentParser(prog="lieattn warm-up", description=description)
    add, named = parser.add_argument, "dtypes to compile for (default: float32)"
    add("--dtype", choices=list(_DTYPES), nargs="+", default=["float32"], help=named)
    add("--jobs", type=positive, default=usable_cores(), help="number of processes (default: one per usable core)")
    options = parser.parse_args(arguments)
    if not cpu_kernels():
        print("lieattn: there are no kernels to compile, since numba is not installed", file=sys.stderr)
        return 1
    cases = [(case, dtype) for dtype in dict.fromkeys(options.dtype) for case in _CASES]
    jobs = min(options.jobs, len(cases))  # Windows allows 61
    print(f"compiling for {cpu_kernels()['instruction set']}, {counted(jobs, 'process')}")
    start = time.perf_counter()
    # A forked process would inherit the state of torch's thread pool, but not its threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = {pool.submit(compile_case, *case): case for case in cases}
        for done in as_completed(found):
            print(f"  {', '.join(found[done]):44} {done.result():5.1f} s", flush=True)
    print(f"ready after {time.perf_counter() - start:.1f} s")
    return 0


def compile_case(case: str, dtype: str) -> float:
    """Run forward and backward pass of a small problem, and return the seconds that this took."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    logging.getLogger("lieattn").setLevel(logging.ERROR)  # the command itself reports what is compiled

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=_DTYPES[dtype], requires_grad=True)

    if case in _ATTENTION:
        x = random(8, 2, _ATTENTION[case], 4)
        with backend("numba"):
            out, _ = group_attention(x, x, x, Radius(1.5)(torch.arange(8.0)[:, None]))
    elif case == "networks of heads":
        weights, biases = (
            [random(2, 3, 8), random(2, 8, 8), random(2, 8, 1)],
            [random(2, 8), random(2, 8), random(2, 1)],
        )
        out = head_networks(random(256, 3), weights, biases)
    elif case == "few channels":
        x = random(24, 2, 1, 4)
        out, _ = group_attention(x, x, x, AllPairs()(torch.zeros(24, 3)), pattern="framewise")
    elif case == "networks of edges":
        neighbors = AllPairs()(torch.zeros(12, 3))
        edges = neighbors.num_edges
        share, second = random(edges).detach(), (random(16, 16), random(16))
        units = edge_units(random(edges, 4, 3), random(edges, 16), share, random(16, 3), second)
        out = edge_messages(units, random(8, 16), random(12, 4, 8), neighbors)
        out = out.sum() + edge_moments(random(edges, 3).detach(), random(edges, 8), neighbors)[1]
    else:
        outs = _ATTENTIVE[case], 2
        kernels, spatial = random(*outs, 2, 4, 3, 3), random(*outs, 4, 2, 3, 3)
        channel = random(*outs, 4, 1, 2), random(*outs, 4, 2, 1)
        out, _ = attentive_convolution(random(1, 2, 4, 7, 7), kernels, channel=channel, spatial=spatial)
    out.sum().backward()
    return time.perf_counter() - start
