"""The long run: ``python -m tests.fuzz`` runs every target in separate processes, and writes the report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from tests.fuzz import Finding, Verdict
from tests.fuzz._report import Tally, merge
from tests.fuzz._target import GOOD
from tests.fuzz.targets import TARGETS

_CHUNK = 500  # inputs per process, which are drawn from one seed
_SECONDS = 1800  # time limit of a chunk, after which it counts as a hang


def main() -> int:
    """Run the targets and write the report. The exit status is 1 if there are bad outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"names of targets (default: all): {', '.join(TARGETS)}")
    parser.add_argument("--share", type=float, default=1.0, help="share of the inputs of the long run (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first chunk")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--report", type=Path, default=Path("docs/records/fuzz.json"), help="file for the results")
    parser.add_argument("--chunk", nargs=3, metavar=("TARGET", "SEED", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.chunk:
        _worker(options.chunk[0], int(options.chunk[1]), int(options.chunk[2]))
        return 0
    bad = False
    for name in options.targets or TARGETS:
        found = _long_run(name, options)
        bad = bad or found["bad"]
        merge(options.report, name, found)
    return int(bad)


def _worker(name: str, start: int, number: int) -> None:
    """Print every finding as a line of JSON, so that the findings before a crash are known."""
    at = time.perf_counter()

    def tell(finding: Finding) -> None:
        nonlocal at
        now = time.perf_counter()
        detail = "" if finding.verdict in GOOD else finding.detail
        sys.stdout.write(json.dumps([finding.verdict, detail, round(now - at, 2)]) + "\n")
        sys.stdout.flush()
        at = now

    TARGETS[name].run(number, start, tell)


def _long_run(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Return the counts of verdicts, the first details of each bad one, and the time of the slowest input."""
    target = TARGETS[name]
    number = max(1, round(target.long * options.share))
    chunks = [(options.seed + at // _CHUNK, min(_CHUNK, number - at)) for at in range(0, number, _CHUNK)]
    tally = Tally(target.name, target.unnamed)
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=number, desc=target.name, unit="input") as bar:
        for (start, size), rows in zip(
            chunks, pool.map(lambda chunk: _in_a_process(name, *chunk), chunks), strict=True
        ):
            for verdict, detail, seconds in rows:
                tally.add(Finding(Verdict(verdict), f"seed {start}: {detail}"), seconds)
            bar.update(size)
            bar.set_postfix(tally.bad)
    return tally.results(jobs=options.jobs, seed=options.seed)


def _in_a_process(name: str, start: int, number: int) -> list[tuple[str, str, float]]:
    command = [sys.executable, "-m", "tests.fuzz", "--chunk", name, str(start), str(number)]
    end = None
    try:
        one = os.environ | {"OMP_NUM_THREADS": "1"}  # otherwise threads would wait for cores most of the time
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=one)
        output, errors = done.stdout, done.stderr
        if done.returncode != 0:
            end = (Verdict.CRASH, f"exit code {done.returncode}: {errors[-500:]}", 0.0)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        end = (Verdict.HANG, f"after {output.count(chr(10))} inputs", float(_SECONDS))
    rows = [tuple(json.loads(line)) for line in output.splitlines() if line.startswith("[")]
    return [*rows, end] if end else rows


if __name__ == "__main__":
    sys.exit(main())
