"""Configuration files."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lieattn._core.checks import check_arguments
from lieattn._core.messages import needs_extra
from lieattn.io import UsageError, loaded

# How lines of jsonargparse's messages begin that list its attempts at reading a value.
_ATTEMPTS = (
    *("Does not validate against any of", "Subtypes: ", "Errors:", "Expected a <class 'NoneType'>"),
    *("Expected a path but", "Subclass types expect one of", "a class path (str)", "a dict with", "Subclasses are"),
    *("Given value type: ", "Given value: NestedArg", "Given value: Namespace"),
)
_MOST_GIVEN = 60  # a value with more characters is not repeated in a message

T = TypeVar("T")


def read_yaml(path: str | Path, expected: str) -> dict[str, Any]:
    """Read a mapping from a YAML file; UsageError names a key that occurs twice, or an alias of itself."""
    check_arguments(read_yaml, locals())
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    with needs_extra("lieattn.train.read_yaml", "train"):
        content = loaded(str(path), text)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected {expected}, got {content!r}")
    return content


def build(base: type[T], spec: Mapping[str, Any], what: str) -> T:
    """Build an instance of ``base`` from ``class_path`` and ``init_args``, as written in configuration files.

    Arguments may themselves be described in this way. UsageError is raised if a class does not exist or an argument
    does not fit; its message calls the object ``what``.
    """
    check_arguments(build, locals())
    with needs_extra("lieattn.train.build", "train"):
        from jsonargparse import ArgumentError, ArgumentParser

    register_types()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "object", required=True)
    try:
        made: T = parser.instantiate(parser.parse_object({"object": spec})).object
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be built: {short_message(error)}") from error
    return made


def short_message(error: Exception) -> str:
    """Return the cause and place of an error of jsonargparse.

    Its own message also lists every attempt at reading the value.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    in_code = isinstance(cause, LookupError | RuntimeError | AssertionError)
    if in_code and not type(cause).__module__.startswith("jsonargparse"):  # raised by the class to be built
        place = traceback.extract_tb(cause.__traceback__)[-1]
        return f"{type(cause).__name__}: {cause}, in {place.filename}, line {place.lineno}"
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(_ATTEMPTS)]
    given = [line for line in told if line.startswith("Given value: ")]
    told = [line for line in dict.fromkeys(told) if line not in given]
    told += [line for line in given[:1] if len(line) <= _MOST_GIVEN]
    ended = [line if line.endswith(":") else f"{line};" for line in told]
    return " ".join(ended).rstrip(";").replace('Parser key "', "").replace('":', ":")


def register_types() -> None:
    """Let configuration files name any function of ``lieattn.groups`` where a group is expected, and any space."""
    with needs_extra("lieattn.train.register_types", "train"):
        from jsonargparse import set_parsing_settings

    from lieattn.groups import Group
    from lieattn.spaces import HomogeneousSpace

    # FiniteGroup is final and the others are dataclasses, so jsonargparse would accept only their own constructors.
    set_parsing_settings(subclasses_enabled=[Group, HomogeneousSpace])
