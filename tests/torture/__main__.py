"""``python -m tests.torture`` disturbs the library at random moments; ``python -m tests.torture soak`` trains long."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from tests.fuzz import Finding, Verdict
from tests.fuzz._report import Tally, merge

# Waiting threads should not use the cores of those for which they wait.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_NAME = "kills, interrupts and full disks"


def main() -> int:
    """Run disturbances or the long training. The exit status is 1 if there are bad outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("torture", "soak"), default="torture")
    parser.add_argument("--number", type=int, help="disturbances (default 240), or training steps (default 10,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="disturbances at a time")
    parser.add_argument("--minutes", type=float, default=30.0, help="no trial begins after this time (default 30)")
    parser.add_argument("--only", nargs="+", help="kinds of work, by their names in _trials.py")
    parser.add_argument("--report", type=Path, default=Path("docs/records/fuzz.json"), help="file for the results")
    parser.add_argument("--slot", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.slot:
        _disturb(options.slot, options.seed, options.minutes)
        return 0
    found = _soak(options) if options.what == "soak" else _torture(options)
    merge(options.report, options.what, found)
    return int(bool(found["bad"]))


def _torture(options: argparse.Namespace) -> dict[str, object]:
    """Return the counts of all disturbances, which are made by several fork servers."""
    from tests.torture._trials import SHARES

    shares = {name: share for name, share in SHARES.items() if not options.only or name in options.only}
    number = options.number or 240
    wanted = [
        {name: -(-round(number * share / sum(shares.values())) // options.jobs) for name, share in shares.items()}
        for _ in range(options.jobs)
    ]
    tally = Tally(_NAME)
    with tqdm(total=number, unit="disturbance") as bar, ThreadPoolExecutor(options.jobs) as pool:
        for slot, counts in enumerate(wanted):
            pool.submit(_slot, counts, options.seed + 1000 * slot, options.minutes, tally, bar)
    return tally.results(jobs=options.jobs, seed=options.seed)


def _slot(counts: dict[str, int], seed: int, minutes: float, tally: Tally, bar: tqdm) -> None:
    """Read the findings of a process while it runs."""
    command = [sys.executable, "-m", "tests.torture", "--slot", json.dumps(counts)]
    command += ["--seed", str(seed), "--minutes", str(minutes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | _ENVIRONMENT) as process:
        for line in process.stdout or ():
            if line.startswith("["):
                kind, verdict, detail, seconds = json.loads(line)
                tally.add(Finding(Verdict(verdict), detail), seconds, kind)
                bar.update()
    if process.returncode != 0:
        tally.add(Finding(Verdict.CRASH, f"the fork server ended with exit status {process.returncode}"), 0.0)


def _disturb(counts: dict[str, int], seed: int, minutes: float) -> None:
    """Run a fork server, which prints a line for every disturbance until the counts of all kinds are reached."""
    import torch

    from tests.torture._children import adopt
    from tests.torture._trials import findings
    from tests.torture._work import is_alone, warm_up

    torch.set_num_threads(1)
    adopt()
    warm_up(set(counts))
    if not is_alone():
        raise RuntimeError("expected a process with a single thread, since threads do not survive a fork")
    left = {name: count for name, count in counts.items() if count > 0}
    draw, until = random.Random(seed), time.monotonic() + 60 * minutes
    while left and time.monotonic() < until:
        seed += 1
        name = draw.choice(list(left))
        for kind, found, seconds in findings(name, seed):
            sys.stdout.write(json.dumps([f"{name}: {kind}", found.verdict, found.detail, round(seconds, 2)]) + "\n")
            sys.stdout.flush()
            left[name] -= 1
        left = {name: count for name, count in left.items() if count > 0}


def _soak(options: argparse.Namespace) -> dict[str, object]:
    os.environ |= _ENVIRONMENT
    from tests.torture.soak import soak

    tally = Tally("steps of training on changing clouds")
    steps = options.number or 10_000
    measured, fault = soak(steps, options.seed)
    tally.counts[Verdict.CORRECT] = steps - int(fault is not None)
    if fault is not None:
        tally.add(Finding(Verdict.CRASH, fault), 0.0)
    tally.slowest = measured.pop("slowest_seconds")
    return tally.results(jobs=1, seed=options.seed) | {"measured": measured}


if __name__ == "__main__":
    sys.exit(main())
