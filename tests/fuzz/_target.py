"""A target: inputs of a kind, and the judgement of the outcome for one of them."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy


class Verdict(StrEnum):
    """Outcome of an input. The first two are good."""

    CORRECT = "correct"  # the result is correct, by a check that is independent of the code under test
    NAMED = "named"  # refused with an error that names the problem, so that a user can correct it
    UNNAMED = "unnamed"  # refused with an error from inside the library, or one that does not name the problem
    SILENT = "silent"  # a wrong result without an error
    EXECUTED = "executed"  # code from a file was executed
    LOST = "lost"  # existing data are lost
    HANG = "hang"  # no result within the time limit
    CRASH = "crash"  # the process ended


_OF_BAD_INPUT = (ValueError, TypeError, KeyError, IndexError, OSError, NotImplementedError, ImportError)
GOOD = frozenset({Verdict.CORRECT, Verdict.NAMED})


@dataclass(frozen=True)
class Finding:
    """A verdict, and its reason in one line."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Target:
    """Inputs of a kind and their judgement.

    Attributes
    ----------
    name
        Name in the table.
    cases
        Strategy that draws one input.
    check
        Function from an input to its finding or verdict. An exception that it raises counts as unnamed.
    long, quick
        Number of inputs of ``make fuzz`` and of the suite.
    unnamed
        Share of unnamed errors that is tolerated in the long run.
    """

    name: str
    cases: SearchStrategy[Any]
    check: Callable[[Any], Finding | Verdict]
    long: int
    quick: int = 25
    unnamed: float = 0.0

    def judge(self, case: Any) -> Finding:
        """Return the finding for one input. Warnings are ignored."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = self.check(case)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                line = f"{type(error).__name__} at {where.filename.rpartition('/')[2]}:{where.lineno}: {error}"
                return Finding(Verdict.UNNAMED, f"{line[:300]} <- {str(case)[:300]}")
        return found if isinstance(found, Finding) else Finding(found, str(case)[:300])

    def run(self, number: int, start: int, each: Callable[[Finding], None]) -> None:
        """Draw this number of inputs from a seed, and call ``each`` with every finding.

        Inputs are not shrunk, and no examples are stored.
        """

        @seed(start)
        @settings(
            max_examples=number,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.cases)
        def draw(case: Any) -> None:
            each(self.judge(case))

        draw()


def named(error: BaseException, *names: str) -> bool:
    """Return whether an error is one for bad input, and contains one of these names (of arguments, files, ...)."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return isinstance(error, _OF_BAD_INPUT) and any(name in text for name in names)
