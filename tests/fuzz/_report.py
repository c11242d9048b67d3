"""The table of docs/trust.md, from docs/records/fuzz.json."""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from pathlib import Path

from tests.fuzz._target import GOOD, Finding, Verdict

BEGIN, END = "<!-- fuzz:begin -->", "<!-- fuzz:end -->"


class Tally:
    """Counts of verdicts, the first details of each bad one, and the time of the slowest input."""

    def __init__(self, name: str, unnamed: float = 0.0) -> None:
        self.name, self.unnamed, self.began = name, unnamed, time.perf_counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.details: dict[str, list[str]] = {}
        self.slowest = 0.0

    def add(self, finding: Finding, seconds: float, kind: str | None = None) -> None:
        """Count one input."""
        self.counts[finding.verdict] += 1
        self.slowest = max(self.slowest, seconds)
        if kind is not None:
            self.kinds[kind] += 1
        if finding.verdict not in GOOD:
            self.details.setdefault(finding.verdict, []).append(finding.detail)

    @property
    def bad(self) -> dict[str, int]:
        """Counts of the bad verdicts."""
        return {verdict: count for verdict, count in self.counts.items() if verdict not in GOOD}

    def results(self, **more: object) -> dict[str, object]:
        """Return the content of the report for this target."""
        total, unnamed = sum(self.counts.values()), self.counts[Verdict.UNNAMED]
        return {
            "name": self.name,
            "inputs": total,
            "verdicts": {verdict.value: self.counts[verdict] for verdict in Verdict},
            "bad": sum(self.bad.values()) > unnamed or unnamed > self.unnamed * total,
            "examples": {verdict: found[:20] for verdict, found in self.details.items()},
            "slowest_seconds": self.slowest,
            "minutes": round((time.perf_counter() - self.began) / 60, 1),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            **({"kinds": dict(sorted(self.kinds.items()))} if self.kinds else {}),
            **more,
        }


def merge(path: Path, name: str, found: dict[str, object]) -> None:
    """Insert the results of a target in the report, and in the table of the page above it."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = found
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    write_table(path)


def table(results: dict[str, dict[str, object]]) -> str:
    """Return a table with a row for each target: the number of inputs, and counts of their outcomes."""
    columns = list(Verdict)
    lines = [
        "| inputs | number | " + " | ".join(columns) + " | slowest | minutes |",
        "|---|" + "---:|" * (len(columns) + 3),
    ]
    for found in results.values():
        counts = found["verdicts"]
        cells = [f"{counts[verdict]:,}" for verdict in columns]  # type: ignore[index]
        lines.append(
            f"| {found['name']} | {found['inputs']:,} | {' | '.join(cells)} "
            f"| {found['slowest_seconds']:.1f} s | {found['minutes']} |"
        )
    return "\n".join(lines)


def write_table(results: Path) -> None:
    """Insert the table between its marks in the page above the results, if the page exists."""
    page = results.parents[1] / "trust.md"
    if page.exists():
        text = page.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{table(json.loads(results.read_text()))}\n\n{END}{after}")
