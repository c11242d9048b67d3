"""A target: inputs of a kind, and the judgement of what the library makes of one of them."""

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
    """What may become of an input. The first two are as they should be."""

    CORRECT = "correct"  # the answer is right, by a check that does not trust the code under test
    NAMED = "named"  # refused with an error that says what was wrong: a user can act on it
    UNNAMED = "unnamed"  # refused with an error from somewhere inside, or one that names nothing
    SILENT = "silent"  # a wrong answer without a word
    EXECUTED = "executed"  # code from a file ran
    LOST = "lost"  # bytes that were there before are gone
    HANG = "hang"  # no answer within the time limit
    CRASH = "crash"  # the process ended


_OF_BAD_INPUT = (ValueError, TypeError, KeyError, IndexError, OSError, NotImplementedError, ImportError)
GOOD = frozenset({Verdict.CORRECT, Verdict.NAMED})


@dataclass(frozen=True)
class Finding:
    """A verdict, and in a line what led to it."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Target:
    """Inputs of a kind and their judgement.

    Attributes
    ----------
    name
        The row of the table.
    cases
        Strategy that draws one input.
    check
        What becomes of it. An exception that it lets through counts as unnamed.
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
        """The finding for one input; warnings are no errors here."""
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
        """Draw so many inputs, from a seed, and hand every finding on. Nothing is shrunk, no examples are stored."""

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
    """Whether an error is one of bad input, and says one of these names (of arguments, files, ...)."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    expected = isinstance(
        error, (ValueError, TypeError, KeyError, IndexError, OSError, NotImplementedError, ImportError)
    )
    return expected and any(name in text for name in names)
