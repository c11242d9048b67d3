"""Certificates: measured errors as rows with a verdict."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from lieattn._core.checks import counted
from lieattn._core.messages import aligned, page, table
from lieattn._core.values import with_finite

_HEADER = ("check", "dtype", "max error", "relative L2", "allowed", "verdict")
_WHERE = ("broken under", "first layer", "likely cause", "evidence")
_VERDICTS = {  # color and sentence; for failures, the sentence is that of the certificate
    "kept": ("#1a7f37", "Every promise was kept, up to rounding."),
    "failed": ("#b42318", ""),
    "vacuous": ("#9a6700", "An output does not depend on its input."),
    "not promised": ("#57606a", "No exact guarantee: errors are for information only."),
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    The values of ``check`` are:

    * ``"finite"``: outputs are not finite. This is always a failure, and there is no row otherwise.
    * ``"element"``: the clouds are moved by an element of the group and a translation.
    * ``"degenerate"``: the same, for clouds of one point, coincident points, and other special clouds.
    * ``"raster"``: the same for images, with the moved pixels in raster order.
    * ``"permutation"``: the points of each cloud are reordered.
    * ``"image"``: the points of periodic clouds are replaced by other periodic images of the same points.
    * ``"alone"``: each cloud is evaluated without the rest of its batch.
    * ``"continuity"`` and ``"first derivative"``: the largest jump while a cloud changes continuously.
    * ``"gradient"``: forces are compared with minus the gradient of the energy.
    * ``"curl"``: forces without an energy; the asymmetry of their derivatives, which is 0 if they have an energy.
    * ``"searched"``: a subgroup that was tested, which passes if it belongs to the symmetry.
    * ``"outside"``: a motion outside of the group, for which nothing is promised, ``"element of C16, outside of C8"``.
    """

    check: str
    label: str  # name of the element or rotation
    output: str  # name of the output, if there are several
    dtype: str  # dtype of weights and inputs
    max_error: float  # largest absolute difference between the actual and the expected output
    relative: float  # L2 norm of the difference, divided by the norm of the outputs
    allowed: float | None  # largest ``max_error`` that passes; None if nothing is promised
    passed: bool | None  # whether ``max_error <= allowed`` (false for NaN); None if nothing is promised


NOT_PROMISED = "not promised"
"""Cause of a diagnosis if an element does not belong to the group."""


@dataclass(frozen=True)
class Diagnosis:
    """The first layer that breaks a symmetry, and the likely cause.

    ``check`` is the change for which the outputs are wrong: ``"translation"``, the name of an element of the group
    (without translation), ``"order of points"``, ``"periodic images"``, ``"rest of the batch"`` or ``"same clouds"``.
    If outputs are not finite, it is ``"any clouds"``. If positions are rounded too coarsely, it names the row and the
    dtype.

    ``module`` is the name of the first module in the order of evaluation whose inputs all follow a known law, and whose
    outputs do not. Known laws are: invariants, vectors, positions, permuted fibers or pixels, and irreps of e3nn. If
    outputs are not finite, it is the first module with finite inputs whose outputs are not finite. It is ``""`` for the
    network itself. It is None if there is no such module, for example in a function, and for elements that the network
    does not promise, whose cause is ``"not promised"``.
    """

    check: str
    module: str | None
    type: str | None  # class of the module
    inputs: tuple[str, ...]  # laws that its inputs follow
    cause: str  # likely cause in a few words, such as absolute positions, padding, or capped neighbors
    evidence: str  # observation from which the cause was inferred

    def __str__(self) -> str:
        if self.cause == NOT_PROMISED:
            return f"{self.check}: {self.cause}: {self.evidence}"
        where = "no single layer" if self.module is None else f"{self.module or 'the network itself'} ({self.type})"
        return f"{self.check}: first broken by {where}; likely cause: {self.cause}: {self.evidence}"


@dataclass(frozen=True, repr=False)
class Certificate:
    """The promise of a network, and the measurements.

    ``spread`` is the largest difference of an output between two clouds with the same number of points, or between a
    cloud and the same cloud with every point moved at random; for outputs at points, also between points. It gives the
    scale for errors. ``vacuous`` has the names of outputs whose spread is not larger than the allowed error. An output
    that never changes is invariant to everything, so a promise about it is empty.
    """

    guarantee: str  # promise in words
    group: str | None  # name of the group; None if nothing is promised exactly
    order: int | None  # order of the group; None for a Lie group, of which some elements are tested
    clouds: int  # number of clouds
    points: int  # number of points of all clouds
    spread: float
    seed: int  # seed of all random numbers
    rows: tuple[Row, ...]
    vacuous: tuple[str, ...] = ()
    device: str = "cpu"  # device of the measurements
    diagnoses: tuple[Diagnosis, ...] = ()  # for symmetries that are broken or, after a search, absent

    @property
    def promised(self) -> bool:
        """Whether anything was promised."""
        return any(row.passed is not None for row in self._judged)

    @property
    def _judged(self) -> list[Row]:
        return [row for row in self.rows if row.check != "searched"]

    @property
    def passed(self) -> bool:
        """Whether all promises were kept, and none is vacuous."""
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
        """What failed, in words. It is empty if nothing failed."""
        failed = [row for row in self._judged if row.passed is False]
        numbers = [math.isfinite(row.max_error) for row in failed]
        found = {"outputs are not finite": not all(numbers), "an error is beyond its tolerance": any(numbers)}
        return ", and ".join(words for words, holds in found.items() if holds)

    @property
    def unique(self) -> bool | None:
        """Whether all tested motions outside of the group change all outputs, so that there is no further symmetry.

        This is unique equivariance, Definition 4.3 of GSA-Nets (arXiv 2010.00977). It is judged in the finest dtype,
        because coarser ones may round the changes away. It is None if no motion outside was tested, or if nothing was
        promised.
        """
        outside = [row for row in self.rows if row.check == "outside" and not math.isnan(row.max_error)]
        finest = min((row.dtype for row in outside), key=lambda name: torch.finfo(getattr(torch, name)).eps, default="")
        outside = [row for row in outside if row.dtype == finest]
        allowed = {row.output: row.allowed for row in self.rows if row.check == "element" and row.dtype == finest}
        limits = [allowed.get(row.output) for row in outside]
        if not outside or None in limits:
            return None
        return all(row.max_error > limit for row, limit in zip(outside, limits, strict=True) if limit is not None)

    def worst(self, check: str = "element") -> dict[str, float]:
        """Return the largest error of a check for each dtype, or NaN if one of them is NaN."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.check == check:
                errors = found.get(row.dtype, 0.0), row.max_error
                found[row.dtype] = max(errors, key=lambda error: (math.isnan(error), error))
        return found

    def __repr__(self) -> str:
        measured = f"{size_in_words(self)}, {len(self.rows)} rows"
        return f"{type(self).__name__}({self.verdict!r}, group={self.group}, {measured})"

    def __str__(self) -> str:
        """Return the promise, and the worst row of each check."""
        tried = "random and special elements" if self.order is None else counted(self.order, "element")
        group = "none" if self.group is None else f"{self.group}, {tried}"
        heading = f"guarantee: {self.guarantee}\ngroup: {group}\nverdict: {self.verdict}"
        diagnoses = "".join(f"\n{diagnosis}" for diagnosis in self.diagnoses)
        spread = f"{size_in_words(self)}, outputs differ by up to {self.spread:.1e}"
        return f"{heading}; {spread}{diagnoses}\n\n{aligned([_HEADER, *self._cells(self._worst_rows())])}"

    def table(self) -> str:
        """Return the measurements as a table of aligned text."""
        return aligned([_HEADER, *self._cells(self.rows)])

    def _worst_rows(self) -> Iterator[Row]:
        """Yield the worst row of each check, output and dtype."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.check, row.output, row.dtype), []).append(row)
        for several in found.values():
            worst = max(several, key=lambda row: (row.passed is False, math.isnan(row.max_error), row.max_error))
            label = f"{worst.label}, worst of {len(several)}" if len(several) > 1 else worst.label
            yield dataclasses.replace(worst, label=label)

    def _cells(self, rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
        for row in rows:
            kept = "vacuous" if row.output in self.vacuous else "ok"
            verdict = "not promised" if row.passed is None else kept if row.passed else "FAILED"
            if row.check == "searched":
                verdict = "yes" if row.passed else "no"
            allowed = "" if row.allowed is None else f"{row.allowed:.1e}"
            check = row.check if row.check not in row.label.split() else ""  # such as "element of C16, outside of C8"
            name = " ".join(filter(None, (check, row.label, row.output and f"({row.output})")))
            yield name, row.dtype, f"{row.max_error:.1e}", f"{row.relative:.1e}", allowed, verdict

    def to_json(self) -> str:
        """Return the certificate as JSON. Numbers that are not finite become ``"nan"`` or ``"inf"``."""
        content = {**dataclasses.asdict(self), "verdict": self.verdict, "passed": self.passed}
        return json.dumps(with_finite(content, str), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return one page of HTML without references to other files, with the verdict, errors and diagnoses."""
        color, sentence = _VERDICTS[self.verdict]
        sentence = sentence or f"{self.failure.capitalize()}."
        group = self.group and f"{self.group}, {'all' if self.order else 'random and special'} elements"
        facts = {
            "Guarantee": self.guarantee,
            "Group": group or "none",
            "Measured on": f"{size_in_words(self)}, {self.device}",
            "Outputs differ between clouds by": f"{self.spread:.2g}",
            "Seed": str(self.seed),
        }
        found = [
            (
                one.check,
                "none" if one.module is None else f"{one.module or 'the network'} ({one.type})",
                one.cause,
                one.evidence,
            )
            for one in self.diagnoses
        ]
        parts = [
            "<h1>Equivariance certificate</h1>",
            f'<div class="verdict" style="background:{color}"><b>{self.verdict}</b> &middot; {sentence}</div>',
            f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(fact)}</dd>' for name, fact in facts.items())}</dl>",
            "<h2>Where it breaks</h2>" + table(found, _WHERE) if found else "",
            f"<h2>Errors, worst of each check</h2>{table(self._cells(self._worst_rows()), _HEADER)}",
            f"<details><summary>All {len(self.rows)} measurements</summary>",
            f"{table(self._cells(self.rows), _HEADER)}</details>",
        ]
        return page(f"Certificate: {self.verdict}", "\n".join(filter(None, parts)))

    def _repr_html_(self) -> str:
        return self.to_html()

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Return the certificate that :meth:`to_json` wrote."""
        content = json.loads(text)
        try:
            del content["passed"], content["verdict"]
            rows, vacuous = (Row(**_readable(row)) for row in content.pop("rows")), content.pop("vacuous")
            found = (Diagnosis(**{**one, "inputs": tuple(one["inputs"])}) for one in content.pop("diagnoses", ()))
            return cls(**_readable(content), rows=tuple(rows), vacuous=tuple(vacuous), diagnoses=tuple(found))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"text: expected the JSON of a certificate, but {error}") from error


def size_in_words(certificate: Certificate) -> str:
    """Return the numbers of clouds and points in words."""
    return f"{counted(certificate.clouds, 'cloud')}, {counted(certificate.points, 'point')}"


def _readable(content: dict[str, Any]) -> dict[str, Any]:
    numbers = ("max_error", "relative", "allowed", "spread")
    return {key: float(value) if key in numbers and isinstance(value, str) else value for key, value in content.items()}
