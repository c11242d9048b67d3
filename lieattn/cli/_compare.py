"""``lieattn compare``: train several models under the same budget."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lieattn import compare
from lieattn.cli import ArgumentParser, import_catalog, output_file, positive, report, short_warnings, take_settings
from lieattn.compare import Cell, Matched, ModelSettings, Record, Settings
from lieattn.io import replace_text
from lieattn.train import TrainingInterrupted, UsageError


def run(name: str, arguments: Sequence[str]) -> int:
    """Run the missing cells of a comparison, and report all cells.

    A cell that ends with an error does not stop the others; it is missing from the report, and the same command tries
    it again. The exit status is 0 for success, 1 if a training diverged or a cell ended with an error, 2 for an error
    in the configuration, and 128 + n after signal n.
    """
    names = {field.name for field in dataclasses.fields(Settings)} - {"models", "root"}
    settings, others = take_settings(arguments, names)
    options = _parser(name).parse_args(others)
    options.set = settings
    folder = options.out or Path("runs") / options.config[-1].stem
    status = _status(name, partial(_compare, options, folder))
    if status > 128:
        _say(f"lieattn {name}: interrupted; finished cells are kept in {folder}\nTo continue: the same command")
    return status


def _status(name: str, work: Callable[[], int]) -> int:
    """Do the work and return its exit status, also if it is stopped by a signal or an error."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)  # otherwise Lightning reports every trainer of every cell
    try:
        with short_warnings():
            return work()
    except (TrainingInterrupted, KeyboardInterrupt) as stop:
        return 128 + (stop.signum if isinstance(stop, TrainingInterrupted) else signal.SIGINT)
    except Exception as error:
        return report(name, error)
    finally:
        logger.setLevel(level)


def _parser(name: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"lieattn {name}",
        description="Train several models of equal size or cost under the same budget, and compare them. Results of "
        "finished cells (model, share of the data, seed) are kept, so that the same command continues a comparison. "
        "Later configuration files override earlier ones, and options such as --budget.seconds 20 "
        "--data.rotate_train true override the files.",
    )
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+"}
    add(
        "--config",
        **several,
        type=Path,
        required=True,
        metavar="YAML",
        help="files with models, task, data, budget and seeds",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results (default runs/NAME, with the name of the last configuration)",
    )
    add("--json", type=_report_file, metavar="FILE", help="file for the report (default DIR/comparison.json)")
    add("--root", metavar="DIR", help="folder of the data, instead of `root` in the configuration")
    add("--models", **several, metavar="NAME", help="run the cells of these models only")
    part = "run every N-th cell, starting at the I-th, on one of N machines that share --out; no report is written"
    add("--cells", type=_part, metavar="I/N", help=part)
    jobs = "number of processes that train cells in parallel and share the threads (OMP_NUM_THREADS); default 1"
    add("--jobs", type=positive, default=1, metavar="N", help=jobs)
    add("--plan", action="store_true", help="show the widths of the models and the missing cells, without training")
    return parser


def _report_file(text: str) -> Path:
    """Parse the path of the report; a page and a picture of the same name are written beside it."""
    path = output_file(text)
    if path.suffix in (".html", ".png"):
        raise argparse.ArgumentTypeError(
            f"expected a .json file, beside which the {path.suffix} is written, got {text!r}"
        )
    return path


def _part(text: str) -> tuple[int, int]:
    """Parse ``I/N``, the I-th of N parts."""
    first, _, parts = text.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, such as 2/8, got {text!r}")
    return int(first), int(parts)


def _compare(options: argparse.Namespace, folder: Path) -> int:
    settings = compare.read_settings(options.config, options.root, options.set)
    if unknown := [name for name in options.models or () if name not in settings.models]:
        raise UsageError(f"--models: {unknown[0]!r} is not among {', '.join(settings.models)}")
    store, cells = compare.CellStore(folder, _say), settings.cells()
    models = compare.match_models(settings, folder, options.models)
    records = _finished(settings, models, store, cells)
    first, step = options.cells or (1, 1)
    wanted = [cell for cell in cells[first - 1 :: step] if cell.model in (options.models or models)]
    missing = [cell for cell in wanted if cell not in records]
    for name, (model, value) in models.items():
        _say(f"{name}: {compare.in_words(settings, value)}" + (f" with {model.choice}" if model.choice else ""))
    _say(f"{len(records)} of {len(cells)} cells are finished, {len(missing)} to run; results in {folder}")
    if options.plan:
        compare.Sets(settings)  # raises an error if the data do not fit
        return 0
    jobs, work = min(options.jobs, len(missing)), partial(_run_cells, settings, models, missing, store)
    status = _in_processes(work, jobs) if jobs > 1 else work()
    records |= _finished(settings, models, store, missing)
    lost = [cell for cell in missing if cell not in records]
    if status > 128 or (lost and not records):
        return max(status, 1)
    if lost:
        _say(f"cells that ended with an error: {len(lost)}; the report omits them, the same command tries them again")
    if options.cells is None:
        found = [records[cell] for cell in cells if cell in records]
        _report(settings, found, options.json or folder / "comparison.json")
    return max(status, 1 if lost or any(record["failed"] for record in records.values()) else 0)


def _run_cells(
    settings: Settings, models: Matched, cells: list[Cell], store: compare.CellStore, claimed: Any = None
) -> int:
    """Run cells one after the other; processes that share the number ``claimed`` take the cells in turn.

    Return 0, or the highest exit status among the errors of cells. A signal, or an error such as a full disk that
    concerns all cells, ends the run.
    """
    status, runner = 0, compare.CellRunner(settings, compare.Sets(settings), store)
    for number, cell in enumerate(cells):
        if claimed is not None:
            with claimed.get_lock():
                if number < claimed.value:
                    continue
                claimed.value = number + 1
        place, bar = f"{number + 1}/{len(cells)}", claimed is None
        try:
            _run(runner, cell, models[cell.model][0], place, bar)
        except (OSError, TrainingInterrupted):
            raise
        except Exception as error:
            status = max(status, report("compare", error))
    return status


def _in_processes(work: Callable[..., Any], jobs: int) -> int:
    """Work in several processes, which share the threads of torch and are stopped together.

    SIGTERM is passed on to each process, and a terminal sends SIGINT to all of them, so that they save their state.
    Return the highest exit status, where a process that was ended by signal n has the status 128 + n.
    """
    context = multiprocessing.get_context("spawn")
    given = work, context.Value("i", 0), max(1, torch.get_num_threads() // jobs)
    children = [context.Process(target=_share, args=given) for _ in range(jobs)]

    def receive(signum: int, _: Any) -> None:
        for child in children:
            if signum == signal.SIGTERM and child.pid is not None and child.is_alive():
                child.terminate()

    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {signum: signal.signal(signum, receive) for signum in signals}
    try:
        for child in children:
            child.start()
        for child in children:
            child.join()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    codes = [child.exitcode or 0 for child in children]
    return max(code if code >= 0 else 128 - code for code in codes)


def _share(work: Callable[..., Any], claimed: Any, threads: int) -> None:
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    torch.set_num_threads(threads)
    import_catalog()
    sys.exit(_status("compare", lambda: int(work(claimed))))


def _stop_without_parent() -> None:
    """Let this process save its state and end if its parent process is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _finished(
    settings: Settings, models: Matched, store: compare.CellStore, cells: Sequence[Cell]
) -> dict[Cell, Record]:
    """Records of the cells that are finished."""
    known = [cell for cell in cells if cell.model in models]  # leaves out models of other environments
    found = {cell: store.load(cell, settings.key(cell, models[cell.model][0])) for cell in known}
    return {cell: record for cell, record in found.items() if record is not None}


def _run(runner: compare.CellRunner, cell: Cell, model: ModelSettings, place: str, bar: bool) -> None:
    """Run one cell; show a progress bar for its budget if there is a terminal, and print its result."""
    budget = runner.settings.budget
    unit, total = ("step", budget.steps) if budget.steps is not None else ("s", budget.seconds)
    hidden = None if bar else True  # with None, tqdm shows the bar on terminals only
    with tqdm(total=total, desc=f"{place} {cell}", unit=unit, leave=False, disable=hidden) as shown:
        try:
            record = runner.run(cell, model, lambda *spent: shown.update(round(spent[unit == "s"], 1) - shown.n))
        except Exception as error:
            error.add_note(f"in the cell: {cell}")
            raise
    result = f"failed: {record['failed']}"
    if record["failed"] is None:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
        result = f"{metrics}; {record['steps']} steps, {record['seconds']:.1f} s"
    _say(f"[{place}] {cell}: {result}")


def _report(settings: Settings, records: list[Record], path: Path) -> None:
    content = compare.report(settings, records)
    sys.stdout.write(compare.tables(content) + "\n")
    compare.write_json(path, content)
    written, picture = [path], None
    if importlib.util.find_spec("matplotlib") is None:
        _say('no picture is drawn, since matplotlib is not installed: pip install "lieattn[viz]"')
    elif any(row["test"]["mean"] is not None for row in content["summary"]):
        from lieattn.viz import comparison, save

        written.append(save(comparison(content), path.with_suffix(".png")))
        picture = written[-1].read_bytes()
    written.append(path.with_suffix(".html"))
    replace_text(written[-1], compare.page(content, picture))
    _say("\n".join(f"written: {file}" for file in written))


def _say(message: str) -> None:
    sys.stdout.flush()
    # The line and its end are written at once, because the processes of --jobs share the stream.
    tqdm.write(f"{message}\n", file=sys.stderr, end="")
