"""Finished cells in files of their own, written atomically, and the folders of cells in progress."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lieattn.compare._settings import Cell

Record = dict[str, Any]
"""What is known of a finished cell: plain values only."""


class CellStore:
    """The folder ``cells`` of a comparison.

    Each finished cell is ``NAME.json``, which holds its record and the key of the settings it was made with. While a
    cell is in progress, the folder ``NAME`` holds its last checkpoint; afterwards, its best weights. ``warn`` is called
    with a message where a file is damaged or belongs to other settings.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder / "cells"
        self.warn = warn

    def load(self, cell: Cell, key: str) -> Record | None:
        """The record of a cell; None if it is to be run, because there is none or it was made with other settings."""
        path = self._path(cell)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict) or not {"key", "record"} <= set(content):
                raise ValueError("it is not what `lieattn compare` writes")
            problem = "was made with other settings" if content["key"] != key else None
        except (OSError, ValueError) as error:
            problem = f"is damaged ({error})"
        if problem is not None:
            self.warn(f"{path} {problem}: the cell is run again")
        return cast(Record, content["record"]) if problem is None else None

    def save(self, cell: Cell, key: str, record: Record) -> None:
        """Write the record of a finished cell, and leave nothing of its progress but the best weights."""
        write_json(self._path(cell), {"key": key, "record": record})
        for name in ("last.ckpt", "key"):
            (self.folder / cell.name / name).unlink(missing_ok=True)

    def progress(self, cell: Cell, key: str) -> Path:
        """Folder of a cell in progress; emptied if what it holds is of other settings."""
        folder = self.folder / cell.name
        mark = folder / "key"
        if folder.exists() and (not mark.is_file() or mark.read_text() != key):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.is_file():
            replace_text(mark, key)
        return folder

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    replace_text(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: if the process is killed, either the old or the new file is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def finite(value: Any) -> Any:
    """The same with None instead of NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
