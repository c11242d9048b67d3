"""Fuzzing: random inputs of every kind against every entrance of the library, and how their outcomes are counted.

A :class:`Target` draws inputs and judges what became of them. The fast part runs in the suite (tests/test_fuzz.py),
the long one as ``make fuzz``, which writes docs/fuzz.json and the table of docs/trust.md.
"""

from tests.fuzz._target import Finding, Target, Verdict

__all__ = ["Finding", "Target", "Verdict"]
