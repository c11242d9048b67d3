"""Configuration files: building objects from them, and short messages about errors in them."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lieattn._core.checks import check_arguments
from lieattn._core.extras import needs_extra
from lieattn.io import loaded
from lieattn.train._schedule import Schedule

_NOISE = re.compile(
    r"(Problem with instantiation.*)?Does not validate against any of|Subtypes: |Errors:|Given value type: "
    r"|Expected a path but .* either not accessible or invalid"
    r"|Subclass types expect one of|a class path \(str\)|a dict with"
    r'|Parser key "\S*": Unable to load config "'
)
_PARSER_KEY = re.compile(r'Parser key "(.*?)":')
_CLASS = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>")
_IMPORTED = r"Import path (?:\S+ )?does not correspond to a subclass of "
_OTHER_CLASS = re.compile(rf"(?:Not a valid subclass of |{_IMPORTED})(\w+)|Subclasses are disabled for (\w+), thus .*")
_CHOICES = re.compile(r"Expected a typing\.Literal\[(.*?)\](?=[,.]|$)")
_EXPECTED = re.compile(r"(?<=expected )\w+(?: expected \w+)+")
_NO_CLASS = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (\S*)")
_OR_NO_CLASS = re.compile(r"(?<=expected )(\w+|one of '[^:]*') (?='\S*' is no class)")
_NO_SETTINGS = re.compile(r"Unable to load config ('.*')")
# Messages of jsonargparse about members of a union that the user did not mean. "Option ...", about an unknown option,
# may also concern the member that was meant.
_NOT_MEANT = re.compile(rf"\s*- (?:(Expected |Unexpected |Subclasses |Not a valid |{_IMPORTED})|Option )")
_SUGGESTION = re.compile(r" \((?:did you mean|accepted are) .*?\)$")
_NESTED = re.compile(r"NestedArg\(key=.*, val='?(.*?)'?\)")
_MOST_GIVEN = 60  # a value with more characters is not repeated in a message

T = TypeVar("T")


class UsageError(ValueError):
    """Settings that are incomplete or contradict each other; reported in one line, without a traceback."""


def read_yaml(path: str | Path, expected: str) -> dict[str, Any]:
    """Read a mapping from a YAML file; UsageError names a key that occurs twice, or an alias of itself."""
    check_arguments(read_yaml, locals())
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    with needs_extra("lieattn.train.read_yaml", "train"):
        try:
            content = loaded(str(path), text)
        except ValueError as error:
            raise UsageError(str(error)) from error
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
        from jsonargparse import ArgumentError

    from lieattn._core.suggestions import SuggestingParser

    register_types()
    parser = SuggestingParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "object", required=True)
    try:
        made: T = parser.instantiate(parser.parse_object({"object": spec})).object
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be built: {short_message(error)}") from error
    return made


def short_message(error: Exception) -> str:
    """Return the cause and place of an error of jsonargparse.

    Its own message lists every attempt at reading the value.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    in_code = isinstance(cause, LookupError | RuntimeError | AssertionError)
    if in_code and not type(cause).__module__.startswith("jsonargparse"):  # raised by the class to be built
        place = traceback.extract_tb(cause.__traceback__)[-1]
        return f"{type(cause).__name__}: {cause}, in {place.filename}, line {place.lineno}"
    lines, given = [], ""
    for line in _members_meant([line for line in str(error).splitlines() if line.strip()]):
        text = line.strip().removeprefix("- ")
        if text.startswith("Given value: "):
            given = given or _NESTED.sub(r"\1", text.removeprefix("Given value: "))
        elif not text.endswith("<class 'NoneType'>") and not _NOISE.match(text):
            text = _NO_CLASS.sub(r"'\1' is no class: give its path, package.Class", text)
            text = _NO_SETTINGS.sub(r"expected settings by name, or a file with them, got \1", text)
            text = _CHOICES.sub(r"expected one of \1", text)
            text = _OTHER_CLASS.sub(r"expected \1\2", text)
            lines.append(_PARSER_KEY.sub(r"\1:", text))
    found = _CLASS.sub(r"\1", " ".join(" ".join(lines).split()).replace("Expected a <class", "expected <class"))
    found = _EXPECTED.sub(lambda types: types[0].replace(" expected ", " or "), found)
    found = _OR_NO_CLASS.sub(r"\1, or a class, but ", found).replace(". Got value: ", ", got ")
    schedules = ", ".join(one.__name__ for one in Schedule.__subclasses__() if one.__module__ == Schedule.__module__)
    found = found.replace("expected Schedule, got", f"expected one of {schedules} of lieattn.train, got")
    told = not given or f"'{given}'" in found or "got" in found.casefold() or len(given) > _MOST_GIVEN
    return found if told else f"{found}, got {given}"


def _members_meant(lines: list[str]) -> list[str]:
    """Return the lines of an error without those about members of a union that the user did not mean."""
    found: list[str] = []
    while lines:
        line, *lines = lines
        found.append(line)
        if line.strip() == "Errors:":
            bullet = line.replace("Errors:", "  - ")
            end = next((number for number, other in enumerate(lines) if not other.startswith(bullet[:-2])), len(lines))
            starts = [number for number in range(end) if lines[number].startswith(bullet)]
            members = [tuple(lines[i:j]) for i, j in itertools.pairwise([*starts, end])]
            plain = [tuple(_SUGGESTION.sub("", line) for line in member) for member in members]
            # Suggestions of several members, of which one was meant, are left out.
            members = [one if plain.count(same) == 1 else same for one, same in zip(members, plain, strict=True)]
            said = {member: _NOT_MEANT.match(member[0]) for member in members}
            meant = [member for member in members if said[member] is None]
            meant = meant or [member for member, other in said.items() if other and not other[1]]
            for member in meant or said:
                found += _members_meant(list(member))
            lines = lines[end:]
    return found


def register_types() -> None:
    """Let configuration files name any function of ``lieattn.groups`` where a group is expected, and any space."""
    with needs_extra("lieattn.train.register_types", "train"):
        from jsonargparse import set_parsing_settings

    from lieattn.groups import Group
    from lieattn.spaces import HomogeneousSpace

    # FiniteGroup is final and the others are dataclasses, so jsonargparse would accept only their own constructors.
    set_parsing_settings(subclasses_enabled=[Group, HomogeneousSpace])
