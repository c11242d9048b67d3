"""``lieattn bench``: one benchmark of this library on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from lieattn._core.checks import counted
from lieattn._core.values import with_finite
from lieattn.bench import BENCHMARKS, Benchmark, use_toy_sizes
from lieattn.cli._arguments import ArgumentParser, output_file, positive
from lieattn.io import replace_text
from lieattn.ops import cpu_kernels


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one benchmark, print its table and write its records; the exit status is 0."""
    lines = [f"  {benchmark:14} {text}" for benchmark, text in BENCHMARKS.items()]
    parser = ArgumentParser(
        prog=f"lieattn {name}",
        description="benchmarks:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--json", type=output_file, help="write the records to this file")
    parser.add_argument("--repeats", type=positive, help="steps to measure for each variant, after a warm-up step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument(
        "--small", action="store_true", help="use toy sizes and one step, to check that the benchmark runs"
    )
    options = parser.parse_args(arguments)
    module: Any = importlib.import_module(f"lieattn.bench._{options.benchmark.replace('-', '_')}")
    benchmark: Benchmark = module.BENCHMARK
    if options.device != "cpu" and not benchmark.on_gpus:
        parser.error(f"argument --device: expected cpu, since {options.benchmark} measures the cores of this machine")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device on this machine")
    if options.small:
        use_toy_sizes(module.__name__)
    repeats = 1 if options.small and options.repeats is None else options.repeats
    records = benchmark.run(repeats, options.device)
    machine = [
        f"torch {torch.__version__}",
        counted(torch.get_num_threads(), "thread"),
        cpu_kernels().get("instruction set"),
    ]
    if options.device == "cuda":
        machine[1:] = [torch.cuda.get_device_name()]
    print(f"{BENCHMARKS[options.benchmark]}; {', '.join(filter(None, machine))}\n")
    print("\n".join([benchmark.table(records), *benchmark.remarks(records)]))
    if options.json is not None:
        content = with_finite([asdict(record) for record in records])
        replace_text(options.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(f"records: {options.json}")
    return 0
