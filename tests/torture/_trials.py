"""Trials: the disturbed work, the number of disturbances, and the judgement of the result.

A trial disturbs the same work in the same folder a few times, as if a user started it again, and then completes it. The
result must be equal to that of undisturbed work.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lieattn.train import CheckpointError, read_checkpoint
from tests.fuzz import Finding, Verdict
from tests.torture import _work as work
from tests.torture._children import Disturbance, End, run

_STATUS = {"SIGKILL": {-9}, "SIGINT": {130}, "SIGTERM": {143, -15}, "SIGINT twice": {130}, "Ctrl-C": {130}}
_STATUS |= {"full disk": {1, 2}}
_SIGNALS = ("SIGKILL", "SIGINT", "SIGTERM", "SIGINT twice", "Ctrl-C")


class Lost(Exception):
    """Raised if existing data are missing or changed."""


@dataclass(frozen=True)
class Trial:
    """Work in a folder that is disturbed.

    Attributes
    ----------
    prepare
        Function that fills an empty folder.
    work
        Function that runs in a child, with the folder, until it ends or is disturbed. The same call continues it.
    check
        Function that raises :class:`Lost` if the folder is damaged after a disturbance.
    result
        Function that returns the result, which must be equal to that of undisturbed work; None for work without an end.
    disturbances
        Kinds of disturbances: :data:`_SIGNALS` and a full disk.
    seconds
        Period in which disturbances happen, for work without an end.
    most
        Largest number of disturbances of one trial.
    """

    prepare: Callable[[Path], None]
    work: Callable[[Path], int]
    check: Callable[[Path], None]
    result: Callable[[Path], Any] | None = None
    disturbances: tuple[str, ...] = (*_SIGNALS, "full disk")
    seconds: float = 1.0
    most: int = 3

    @functools.cached_property
    def undisturbed(self) -> tuple[float, Any]:
        """Duration of the whole work in seconds, and its result."""
        with _folder() as folder:
            self.prepare(folder)
            end = run(lambda: self.work(folder), folder)
            if end.status != 0 or end.left:
                raise RuntimeError(f"undisturbed work ended with {end.status}, {end.left} processes left: {end.said}")
            assert self.result is not None
            return end.seconds, self.result(folder)

    def findings(self, draw: random.Random) -> Iterator[tuple[str, Finding]]:
        """Run a trial, and yield the kind of each disturbance with its finding."""
        seconds = self.undisturbed[0] if self.result else self.seconds
        with _folder() as folder:
            self.prepare(folder)
            number = draw.randint(1, self.most)
            for count in range(1, number + 1):
                kind = draw.choice(self.disturbances)
                what = Disturbance(kind, draw.uniform(0, seconds), draw.uniform(0, 0.5), draw.randint(0, 60_000))
                end = run(lambda: self.work(folder), folder, what)
                last = count == number or end.status == 0
                yield kind, self._judge(folder, what, end, last)
                if last:
                    return

    def _judge(self, folder: Path, what: Disturbance, end: End, last: bool) -> Finding:
        text = f"{what.kind} after {what.after:.2f} s"
        if end.status is None:
            return Finding(Verdict.HANG, text)
        if end.left:
            return Finding(Verdict.HANG, f"{text}: {end.left} processes did not end")
        try:
            self.check(folder)
            if len(left := _left_over(folder)) > 1:
                return Finding(Verdict.LOST, f"{text}: unfinished files accumulate: {left}")
            if last and self.result is not None:
                found = run(lambda: self.work(folder), folder)
                if found.status != 0:
                    return Finding(Verdict.LOST, f"{text}: it cannot be continued: {found.said[-300:]}")
                if self.result(folder) != self.undisturbed[1]:
                    return Finding(Verdict.SILENT, f"{text}: the continued work has another result")
        except (Lost, CheckpointError, OSError, ValueError) as error:
            return Finding(Verdict.LOST, f"{text}: {error}")
        if end.status not in _STATUS[what.kind] | {0}:
            return Finding(Verdict.UNNAMED, f"{text}: exit status {end.status}: {end.said[-300:]}")
        if what.kind != "SIGKILL" and "traceback" in end.said.casefold():
            return Finding(Verdict.UNNAMED, f"{text}: a traceback: {end.said[-300:]}")
        return Finding(Verdict.CORRECT if end.status == 0 else Verdict.NAMED, text)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="torture-"))  # a TemporaryDirectory would be removed by the first child
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _left_over(folder: Path) -> list[str]:
    """Return the files that were not renamed from their temporary names."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.startswith(".")]


def _weights(path: Path) -> dict[str, list[Any]]:
    return {key: value.tolist() for key, value in read_checkpoint(path)["state_dict"].items()}


def _check_fit(folder: Path) -> None:
    noted, last = work.noted(folder / "notes/step"), folder / "checkpoints/last.ckpt"
    if noted and not last.exists():
        raise Lost(f"no checkpoint, after step {noted} was saved")
    if last.exists() and (step := read_checkpoint(last)["global_step"]) < noted:
        raise Lost(f"the checkpoint is of step {step}, after step {noted} was saved")
    if (best := folder / "checkpoints/best.ckpt").exists():
        read_checkpoint(best)


def _fit(threads: int, workers: int) -> Trial:
    return Trial(
        lambda folder: work.write_fit(folder, workers),
        lambda folder: work.fit(folder, threads),
        _check_fit,
        lambda folder: [_weights(folder / f"checkpoints/{name}.ckpt") for name in ("last", "best")],
    )


def _check_compare(folder: Path) -> None:
    """Check that the records of the last check still exist unchanged, and keep new ones for the next check."""
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    for copy in kept.iterdir():
        present = folder / "cells" / copy.name
        if not present.is_file() or present.read_bytes() != copy.read_bytes():
            raise Lost(f"the record {copy.name} is gone or changed")
    for record in folder.glob("cells/*.json"):
        json.loads(record.read_text())
        shutil.copy(record, kept)
    for checkpoint in folder.glob("cells/*/*.ckpt"):
        read_checkpoint(checkpoint) if checkpoint.name == "last.ckpt" else None


def _records(folder: Path) -> list[dict[str, Any]]:
    cells = json.loads((folder / "comparison.json").read_text())["cells"]
    for cell in cells:
        for name in ("seconds", "train_clouds_per_s", "inference_clouds_per_s", "threads"):
            cell.pop(name)
        cell["history"] = [[step, value] for step, _, value in cell["history"]]
    return cells


def _compare(jobs: int) -> Trial:
    return Trial(
        work.write_compare,
        lambda folder: work.compare(folder, jobs),
        _check_compare,
        _records,
        most=3 if jobs == 1 else 1,
    )


def _check_reports(folder: Path) -> None:
    path = folder / "report.json"
    if not path.exists():
        if work.noted(folder / "notes/report"):
            raise Lost("no report, after one was written")
        return
    found = json.loads(path.read_text())["number"]
    if path.read_text() != work.report_of(found) or found < work.noted(folder / "notes/report"):
        raise Lost(f"the report is {found}, or incomplete")


def _check_pictures(folder: Path) -> None:
    path = folder / "picture.png"
    if work.noted(folder / "notes/picture") and not path.read_bytes().endswith(b"IEND\xaeB`\x82"):
        raise Lost("the picture is not complete")


def _with_notes(folder: Path) -> None:
    (folder / "notes").mkdir()


@functools.cache
def _checkpoint() -> Path:
    """Return a checkpoint of an undisturbed run."""
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    work.write_fit(folder, 0)
    if run(lambda: work.fit(folder, 1), folder).status != 0:
        raise RuntimeError("the undisturbed run has no checkpoint")
    return folder / "checkpoints/last.ckpt"


def _command(name: str, file: str, prepare: Callable[[Path], None], beside: str | None = None) -> Trial:
    """Return the trial of a command that replaces a file or writes another file beside it.

    At any time there must be either the complete old file or the complete new one.
    """
    new = functools.cache(lambda: trial.undisturbed[1])

    def write(folder: Path) -> None:
        _checkpoint()  # made here, since it is cached only in this process
        prepare(folder)
        (folder / file).write_text("old")

    def check(folder: Path) -> None:
        allowed = ("old",) if beside else ("old", new())
        if (text := (folder / file).read_text()) not in allowed:
            raise Lost(f"{file} is neither the old nor the new one: {text[:40]!r}")
        if beside and (folder / beside).exists() and (folder / beside).read_text() != new():
            raise Lost(f"{beside} is not complete")

    trial = Trial(
        write,
        lambda folder: getattr(work, name)(folder, _checkpoint()),
        check,
        lambda folder: (folder / (beside or file)).read_text(),
    )
    return trial


_KILLS = ("SIGKILL", "SIGTERM")
TRIALS: dict[str, Trial] = {
    "fit": _fit(1, 0),
    "fit, two threads": _fit(2, 0),
    "fit, a worker": _fit(1, 1),
    "compare": _compare(1),
    "compare, two jobs": _compare(2),
    "certify": _command("certify", "report.json", lambda folder: None),
    "predict": _command(
        "predict", "predictions.csv", lambda folder: work.write_fit(folder, 0), beside="predictions-v1.csv"
    ),
    "reports": Trial(_with_notes, work.write_reports, _check_reports, disturbances=(*_KILLS, "full disk")),
    "pictures": Trial(_with_notes, work.write_pictures, _check_pictures, disturbances=_KILLS, seconds=3.0),
}
# Shares of the disturbances of a long run. Kernels are interrupted in a separate process.
SHARES = {
    "fit": 0.1,
    "fit, two threads": 0.07,
    "fit, a worker": 0.06,
    "compare": 0.07,
    "compare, two jobs": 0.01,
    "certify": 0.03,
    "predict": 0.03,
    "reports": 0.19,
    "pictures": 0.05,
    "kernels": 0.39,
}


def findings(name: str, seed: int) -> Iterator[tuple[str, Finding, float]]:
    """Run one trial, and yield the kind of each disturbance, its finding and its duration in seconds."""
    draw = random.Random(f"{name} {seed}")
    at = time.monotonic()
    for kind, found in _kernels(draw) if name == "kernels" else TRIALS[name].findings(draw):
        now = time.monotonic()
        yield kind, Finding(found.verdict, f"{name}: {found.detail}"), now - at
        at = now


def _kernels(draw: random.Random, number: int = 20) -> Iterator[tuple[str, Finding]]:
    with _folder() as folder:
        end = run(lambda: work.interrupt_kernels(folder, draw.choice((1, 2)), draw.randrange(2**31), number), folder)
        lines = [line.split() for line in (folder / "calls").read_text().splitlines()] if end.status == 0 else []
    for interrupted, right in lines:
        if right == "0":
            yield "SIGALRM", Finding(Verdict.SILENT, "the call after an interrupted one is wrong")
        elif interrupted == "1":
            yield "SIGALRM", Finding(Verdict.NAMED)
    if end.status is None:
        yield "SIGALRM", Finding(Verdict.HANG, f"after {len(lines)} interrupts")
    elif end.status != 0:
        yield "SIGALRM", Finding(Verdict.CRASH, f"after {len(lines)} interrupts: {end.said[-300:]}")
