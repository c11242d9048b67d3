"""A table of SMILES as molecules in space."""

import csv
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lieattn._core.checks import check_arguments
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._files import LARGEST, listed
from lieattn_datasets._molecules import Molecules
from lieattn_datasets._splits import SplitOrAll, progress, seeded
from lieattn_datasets._xtb import embed_molecule

Conformer = tuple[torch.Tensor, torch.Tensor]


class SmilesTable(Molecules):
    """Molecules of a CSV table with a column of SMILES, each with one conformer and its targets.

    Conformers are those of :func:`embed_molecule`, which take about 0.3 s for 15 heavy atoms. They are kept in a file
    beside the table, ``mols.csv.seed0.pt``, if the folder can be written. Items are as in :class:`Molecules`, and
    ``lieattn predict`` writes the SMILES, or another column, beside the predictions.

    Parameters
    ----------
    path
        The table, in UTF-8, with commas, semicolons or tabulators. Its first line has the names of its columns.
    split
        ``"train"``, ``"valid"`` or ``"test"``, by a permutation of the rows; or ``"all"``.
    smiles
        Name of the column of SMILES.
    names
        Name of the column that names the molecules in tables of predictions. Default: that of SMILES.
    target
        Name of a column of numbers, or of several. Default: none, for predictions.
    unit
        Unit of the targets.
    on_error
        Whether rows without a conformer or a target are an error, ``"raise"``, or left out with a warning, ``"skip"``.
        No split changes its other rows.
    shares, split_seed
        As for :class:`ExtendedXYZ`.
    seed
        Seed of the conformers.
    transform
        Function that is applied to each new ``Data``.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the table has no such column, or the split no usable row; if rows cannot be used (the message has their
        lines); or if an argument is out of range.

    Attributes
    ----------
    skipped : tuple[str, ...]
        What is wrong with each row that is left out.
    """

    card = Card("your own table of SMILES", "those of your file", "all rows of the table")

    def __init__(
        self,
        path: str | Path,
        split: SplitOrAll = "train",
        *,
        smiles: str = "smiles",
        names: str | None = None,
        target: str | Sequence[str] = (),
        unit: str = "",
        on_error: Literal["raise", "skip"] = "raise",
        shares: Sequence[float] = (0.8, 0.1),
        split_seed: int = 0,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(SmilesTable.__init__, locals())
        targets, named = [target] if isinstance(target, str) else [*target], smiles if names is None else names
        rows = _read_table(Path(path), list(dict.fromkeys([smiles, *targets, named])))
        conformers = _embed(Path(path), [row[smiles] for _, row in rows], seed)
        broken, used, values = [], [], []
        for index, (line, row) in enumerate(rows):
            numbers = [_number(row[name]) for name in targets]
            wrong = [
                f"{name}: expected a number of at most {LARGEST:g} in size, got {row[name]!r}"
                for name, number in zip(targets, numbers, strict=True)
                if number is None
            ]
            conformer = conformers[row[smiles]]
            if problem := "; ".join([*([conformer] if isinstance(conformer, str) else []), *wrong]):
                broken.append(f"line {line}: {problem}")
            else:
                used.append(index)
                values.append(numbers)
        if broken:
            told = f"{path}: {len(broken)} of {len(rows)} rows cannot be used: {listed(broken, '; ')}"
            if on_error == "raise" or not used:
                raise ValueError(f"{told}; on_error='skip' leaves them out")
            warnings.warn(told, stacklevel=2)
        self.skipped = tuple(broken)
        self._names = [rows[index][1][named] for index in used]
        atoms: list[Any] = [conformers[rows[index][1][smiles]] for index in used]
        super().__init__(
            np.concatenate([z for z, _ in atoms]),
            np.concatenate([pos for _, pos in atoms]),
            np.cumsum([0, *(len(z) for z, _ in atoms)]),
            np.array(values, dtype=np.float64).reshape(len(used), len(targets)),
            targets,
            [unit] * len(targets),
            transform=transform,
        )
        chosen = seeded(np.zeros(len(rows), dtype=np.int64), split, shares, split_seed)
        self._indices = np.flatnonzero(np.isin(used, chosen))
        got = f"{tuple(shares)}, which leave it {len(chosen)} that cannot; another split_seed has other rows"
        require(len(self._indices), "shares", f"at least one row that can be used for split={split!r}", got)

    @property
    def names(self) -> list[str]:
        """The SMILES of each item, or its entry in the column ``names``."""
        return [self._names[int(index)] for index in self._indices]


def _read_table(path: Path, names: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the line in which each row ends, and its entries by column."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter, restval="")
            columns = [*(reader.fieldnames or ())]
            rows = [(reader.line_num, row) for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from error
    absent = [name for name in names if name not in columns]
    require(not absent, ", ".join(absent), f"one of the columns {', '.join(columns)} of {path}", "another")
    require(rows, str(path), "at least one row", "none")
    return rows


def _number(text: str) -> float | None:
    """Return a number that float32 can hold, or None."""
    with suppress(ValueError):
        if abs(value := float(text)) <= LARGEST:
            return value
    return None


def _embed(table: Path, smiles: Sequence[str], seed: int) -> dict[str, Conformer | str]:
    """Return the nuclear charges and positions of each molecule, or why there are none."""
    file = table.with_name(f"{table.name}.seed{seed}.pt")
    found: dict[str, Conformer | str] = {}
    with suppress(Exception):  # there is none, or it is damaged, which can fail in any way
        found = dict(torch.load(file, weights_only=True))
    missing = [text for text in dict.fromkeys(smiles) if text not in found]
    try:
        for text in progress(missing, "conformers", len(missing)):
            try:
                z, pos = embed_molecule(text, seed)
                found[text] = torch.from_numpy(z), torch.from_numpy(pos)
            except (ValueError, RuntimeError) as error:
                found[text] = str(error)
    finally:
        if missing:
            new = file.with_name(f".{file.name}.{os.getpid()}")
            with suppress(OSError, RuntimeError):
                torch.save(found, new)
                new.replace(file)
    return found
