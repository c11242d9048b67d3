"""``lieattn warm-up``: compile the kernels for CPUs in advance."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from torch import Tensor

from lieattn._core.checks import counted
from lieattn._core.machine import usable_cores
from lieattn.cli._arguments import ArgumentParser, positive
from lieattn.geometry import AllPairs, Radius
from lieattn.ops import (
    attentive_convolution,
    backend,
    cpu_kernels,
    edge_messages,
    edge_moments,
    edge_units,
    group_attention,
    head_networks,
)

_DESCRIPTION = """Compile the kernels for CPUs in advance, so that no first call has to wait.

They are compiled for the processor of this machine, for each dtype and for few and many heads, in one process per
core, and stored. Kernels that have been compiled before are not compiled again.
"""
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# There is a kernel of attention for each number of lanes; 4, 8 and 16 heads fill them.
_ATTENTION = {"attention, up to 4 heads": 4, "attention, up to 8 heads": 8, "attention, more heads": 16}
# For attentive convolution the lanes are outputs; another kernel has half as many lanes, for few outputs.
_ATTENTIVE = {"attentive convolution": 8, "attentive convolution, few outputs": 1}
_CASES = (*_ATTENTION, "networks of heads", "networks of edges", "few channels", *_ATTENTIVE)


def run(name: str, arguments: Sequence[str]) -> int:
    """Compile all kernels for the given dtypes, and return the exit status 0, or 1 if Numba is not installed."""
    parser = ArgumentParser(prog=f"lieattn {name}", description=_DESCRIPTION)
    parser.add_argument(
        "--dtype",
        choices=list(_DTYPES),
        nargs="+",
        default=["float32"],
        help="dtypes to compile for (default: float32)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=usable_cores(), help="number of processes (default: one per usable core)"
    )
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
        units = edge_units(
            random(edges, 4, 3), random(edges, 16), random(edges), random(16, 3), (random(16, 16), random(16))
        )
        out = edge_messages(units, random(8, 16), random(12, 4, 8), neighbors)
        out = out.sum() + edge_moments(random(edges, 3).detach(), random(edges, 8), neighbors)[1]
    else:
        outs = _ATTENTIVE[case], 2
        kernels, spatial = random(*outs, 2, 4, 3, 3), random(*outs, 4, 2, 3, 3)
        channel = random(*outs, 4, 1, 2), random(*outs, 4, 2, 1)
        out, _ = attentive_convolution(random(1, 2, 4, 7, 7), kernels, channel=channel, spatial=spatial)
    out.sum().backward()
    return time.perf_counter() - start
