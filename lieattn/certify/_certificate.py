"""What is reported: rows of measurements, and the certificate that holds them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_HEADER = ("check", "dtype", "max error", "relative L2", "allowed", "verdict")


@dataclass(frozen=True)
class Row:
    """One measurement.

    ``check`` is ``"finite"`` (outputs are not: always a failure, and a row only then), ``"element"`` (moved by an
    element of the group and a translation), ``"degenerate"`` (the same for clouds where something is not determined: of
    one point, of coincident points, ...), ``"raster"`` (an image moved likewise, its pixels then written in raster
    order), ``"permutation"`` (points of each cloud in another order), ``"alone"`` (each cloud without the rest of its
    batch), ``"continuity"`` and ``"first derivative"`` (the largest jump while a cloud changes), ``"gradient"`` (forces
    against minus the gradient of the energy), ``"curl"`` (forces alone: asymmetry of their derivatives, 0 if any energy
    has them), ``"searched"`` (a subgroup that was tried, which passes if it belongs to the symmetry) or ``"outside"``
    (turned by a rotation or reflection that is not in the group: information, nothing is promised).
    """

    check: str
    label: str  # which element or rotation
    output: str  # which one, of a network that gives several by name
    dtype: str  # of weights and inputs
    max_error: float  # largest absolute difference of an output from what it should be
    relative: float  # L2 norm of the difference over that of the outputs
    allowed: float | None  # the largest ``max_error`` that passes; None where nothing is promised
    passed: bool | None  # whether ``max_error <= allowed``, which NaN never is; None where nothing is promised


NOT_PROMISED = "not promised"
"""The cause of a diagnosis where an element does not belong to the group."""


@dataclass(frozen=True)
class Diagnosis:
    """The first layer that breaks a symmetry, and the likely cause.

    ``check`` is the change under which outputs are not what they should be: ``"translation"``, an element of the group
    without a translation, ``"order of points"``, ``"rest of the batch"`` or ``"same clouds"``; or it is
    ``"any clouds"``, if outputs are not finite.

    ``module`` is the name, within the network, of the first module in the order of evaluation whose inputs all follow
    a known law while some output follows none. Known laws are: invariant, a vector or position that moves along,
    permuted fibers or pixels, and irreps of e3nn. If outputs are not finite, it is the first module that makes values
    which are not finite from finite inputs. It is ``""`` for the network itself. It is None if there is no such module,
    as in a plain function, and for elements that the network never promised, whose cause is ``"not promised"``.
    """

    check: str
    module: str | None
    type: str | None  # class of the module
    inputs: tuple[str, ...]  # the laws that its inputs follow
    cause: str  # in a few words: absolute positions, padding, capped neighbors, ...
    evidence: str  # what speaks for it

    def __str__(self) -> str:
        if self.cause == NOT_PROMISED:
            return f"{self.check}: {self.cause}: {self.evidence}"
        where = "no single layer" if self.module is None else f"{self.module or 'the network itself'} ({self.type})"
        return f"{self.check}: first broken by {where}; likely cause: {self.cause}: {self.evidence}"


@dataclass(frozen=True, repr=False)
class Certificate:
    """What a network promises and what was measured.

    ``spread`` is the largest difference of an output between two clouds of equally many points, or between a cloud and
    the same one with its points moved at random, each by itself; for outputs at points, also between points. Errors are
    to be compared with it. ``vacuous`` names the outputs whose spread is no larger than the error that is allowed: an
    output that never changes is invariant to everything, so a promise about it has no content.
    """

    guarantee: str  # the promise in words
    group: str | None  # None for a network that promises nothing exactly
    order: int | None  # None for a Lie group, of which some elements are drawn
    clouds: int  # measured on
    points: int
    spread: float
    seed: int  # of all that was drawn
    rows: tuple[Row, ...]
    vacuous: tuple[str, ...] = ()
    device: str = "cpu"  # on which was measured
    diagnoses: tuple[Diagnosis, ...] = ()  # where and why a symmetry is broken or, after a search, is not there

    @property
    def promised(self) -> bool:
        """Whether anything was promised."""
        return any(row.passed is not None for row in self._judged)

    @property
    def _judged(self) -> list[Row]:
        return [row for row in self.rows if row.check != "searched"]

    @property
    def passed(self) -> bool:
        """Whether every promise was kept, and says something."""
        return self.verdict in ("kept", "not promised")

    @property
    def verdict(self) -> str:
        """``"not promised"``, ``"failed"``, ``"vacuous"`` or ``"kept"``."""
        if not self.promised:
            return "not promised"
        if not all(row.passed for row in self._judged if row.passed is not None):
            return "failed"
        return "vacuous" if self.vacuous else "kept"

    @property
    def failure(self) -> str:
        """What failed, in words; empty if the verdict is another."""
        failed = [row for row in self._judged if row.passed is False]
        numbers = [math.isfinite(row.max_error) for row in failed]
        found = {"outputs are not finite": not all(numbers), "an error is beyond its tolerance": any(numbers)}
        return ", and ".join(words for words, holds in found.items() if holds)

    @property
    def unique(self) -> bool | None:
        """Whether every motion tried outside of the group changes every output: no symmetry but the promised one.

        Unique equivariance, Definition 4.3 of GSA-Nets (arXiv 2010.00977). None if no motion outside was tried, or
        nothing was promised.
        """
        allowed = {(row.output, row.dtype): row.allowed for row in self.rows if row.check == "element"}
        outside = [row for row in self.rows if row.check == "outside" and not math.isnan(row.max_error)]
        limits = [allowed.get((row.output, row.dtype)) for row in outside]
        if not outside or None in limits:
            return None
        return all(row.max_error > limit for row, limit in zip(outside, limits, strict=True) if limit is not None)

    def worst(self, check: str = "element") -> dict[str, float]:
        """Largest error of one kind of check, per dtype; NaN if one of them is NaN."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.check == check:
                errors = found.get(row.dtype, 0.0), row.max_error
                found[row.dtype] = max(errors, key=lambda error: (math.isnan(error), error))
        return found

    def __repr__(self) -> str:
        measured = f"{self.clouds} clouds, {self.points} points, {len(self.rows)} rows"
        return f"{type(self).__name__}({self.verdict!r}, group={self.group}, {measured})"

    def __str__(self) -> str:
        """The promise, and the worst row of each check."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.check, row.output, row.dtype), []).append(row)
        rows = []
        for several in found.values():
            worst = max(several, key=lambda row: (row.passed is False, math.isnan(row.max_error), row.max_error))
            label = f"{worst.label}, worst of {len(several)}" if len(several) > 1 else worst.label
            rows.append(dataclasses.replace(worst, label=label))
        tried = "random and special" if self.order is None else self.order
        group = "none" if self.group is None else f"{self.group}, {tried} elements"
        heading = f"guarantee: {self.guarantee}\ngroup: {group}\nverdict: {self.verdict}"
        told = "".join(f"\n{diagnosis}" for diagnosis in self.diagnoses)
        spread = f"{self.clouds} clouds, outputs differ by up to {self.spread:.1e}"
        return f"{heading}; {spread}{told}\n\n{self._table(rows)}"

    def table(self) -> str:
        """Return the measurements as a table of aligned text."""
        return self._table(self.rows)

    def _table(self, rows: Iterable[Row]) -> str:
        cells = [_HEADER]
        for row in rows:
            kept = "vacuous" if row.output in self.vacuous else "ok"
            verdict = "not promised" if row.passed is None else kept if row.passed else "FAILED"
            if row.check == "searched":
                verdict = "yes" if row.passed else "no"
            allowed = "" if row.allowed is None else f"{row.allowed:.1e}"
            name = " ".join(filter(None, (row.check, row.label, row.output and f"({row.output})")))
            cells.append((name, row.dtype, f"{row.max_error:.1e}", f"{row.relative:.1e}", allowed, verdict))
        widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

    def to_json(self) -> str:
        """Return everything as JSON; a number that is not finite becomes ``"nan"`` or ``"inf"``."""
        content = {**dataclasses.asdict(self), "verdict": self.verdict, "passed": self.passed}
        return json.dumps(_writable(content), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return a card: one page of HTML that needs nothing else, with the verdict, the errors and their causes."""
        from lieattn.certify._card import card

        return card(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Certificate from what :meth:`to_json` wrote; ValueError for anything else."""
        content = json.loads(text)
        try:
            del content["passed"], content["verdict"]
            rows, vacuous = (Row(**_readable(row)) for row in content.pop("rows")), content.pop("vacuous")
            told = (Diagnosis(**{**one, "inputs": tuple(one["inputs"])}) for one in content.pop("diagnoses", ()))
            return cls(**_readable(content), rows=tuple(rows), vacuous=tuple(vacuous), diagnoses=tuple(told))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"text: expected the JSON of a certificate, but {error}") from error


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _readable(content: dict[str, Any]) -> dict[str, Any]:
    numbers = ("max_error", "relative", "allowed", "spread")
    return {key: float(value) if key in numbers and isinstance(value, str) else value for key, value in content.items()}
