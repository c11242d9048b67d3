"""Checks of what a configuration file of a comparison may say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lieattn.train._errors import UsageError


def check_spec(where: str, value: Any) -> None:
    """Refuse what is not ``class_path`` with ``init_args``."""
    given = isinstance(value, dict) and set(value) <= {"class_path", "init_args"}
    if not given or not isinstance(value.get("class_path"), str) or not isinstance(value.get("init_args", {}), dict):
        raise UsageError(f"{where}: expected class_path and init_args, got {value!r}")


def check_texts(where: str, value: Any) -> None:
    """Refuse what is no list of names."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{where}: expected a list of names, got {value!r}")


def check_distinct(where: str, value: Any, allowed: Callable[[Any], bool]) -> None:
    """Refuse what is no list of different seeds or fractions that are allowed."""
    if not isinstance(value, list) or not value or not all(allowed(item) for item in value):
        what = "integers of at least 0" if where == "seeds" else "numbers in (0, 1]"
        raise UsageError(f"{where}: expected a list of {what}, got {value!r}")
    if len(set(value)) < len(value):
        raise UsageError(f"{where}: expected different ones, got {value}")


def is_number(value: Any) -> bool:
    """Whether a value is a number, which a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
