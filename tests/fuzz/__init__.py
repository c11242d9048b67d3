"""Fuzzing: random inputs of every kind for all public entry points of the library, and counts of the outcomes.

A :class:`Target` draws inputs and judges their outcomes. A short run is part of the suite (tests/test_fuzz.py). The
long run is ``make fuzz``, which writes docs/records/fuzz.json and the table of docs/trust.md.
"""

from tests.fuzz._target import Finding, Target, Verdict

__all__ = ["Finding", "Target", "Verdict"]
