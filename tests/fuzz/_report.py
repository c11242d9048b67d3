"""The table of docs/trust.md, from docs/fuzz.json."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fuzz._target import Verdict

BEGIN, END = "<!-- fuzz:begin -->", "<!-- fuzz:end -->"


def table(results: dict[str, dict[str, object]]) -> str:
    """A row a target: how many inputs, and what became of them."""
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
    """Put the table between its marks in the page beside the results; a folder without the page is left alone."""
    page = results.with_name("trust.md")
    if page.exists():
        text = page.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{table(json.loads(results.read_text()))}\n\n{END}{after}")
