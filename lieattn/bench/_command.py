"""``lieattn bench NAME [--json FILE] [--repeats N]``."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lieattn.bench import _measure

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


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one benchmark, print its table and write its records.

    Parameters
    ----------
    name
        ``"bench"``.
    arguments
        What follows it on the command line.

    Returns
    -------
    int
        Exit status 0; argparse exits with 2 on bad usage.
    """
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
    print(getattr(module, "table", _measure.table)(records))
    for remark in module.remarks(records) if hasattr(module, "remarks") else ():
        print(remark)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
        print(f"records: {options.json}")
    return 0
