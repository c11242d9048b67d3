"""A parser of jsonargparse whose errors about unknown options name the options that are accepted."""

from __future__ import annotations

import difflib
import re
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

_UNKNOWN = re.compile(
    r"Option '(?P<option>[\w.]+)' is not accepted$|unrecognized arguments: --(?P<argument>[\w.]+)(?=[= ]|$).*"
    r"|Subcommand '(?P<command>\w+)' does not accept option '(?P<key>[\w.]+)'$",
    re.MULTILINE,
)
_OF_THE_PARSER = ("config", "print_config", "print_shtab")  # the last one exists where shtab is installed
_MOST_NAMES = 30  # options are listed if there are not more


class SuggestingParser(ArgumentParser):
    """A parser whose errors about unknown options name those with similar names, or all options of a class."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(suggested(message, self), ex)


def suggested(message: str, parser: Any) -> str:
    """Add the option with a similar name to a message about an unknown one, or else all options that are accepted."""

    def completed(unknown: re.Match[str]) -> str:
        options = parser
        if unknown["command"]:
            options = parser._subcommands_action._name_parser_map[unknown["command"]]
        names = [name.removeprefix("--") for name in options._option_string_actions if name.startswith("--")]
        if unknown["argument"]:
            similar = difflib.get_close_matches(unknown["argument"], names, 1)
            return unknown[0] + "".join(f" (did you mean --{name}?)" for name in similar)
        names = [name for name in names if not name.endswith(("help", "+")) and name not in _OF_THE_PARSER]
        sections = list(dict.fromkeys(name.partition(".")[0] for name in names))
        given = unknown["option"] or unknown["key"]
        if (section := given.partition(".")[0]) not in sections:
            given, names = section, sections
        similar = difflib.get_close_matches(given, names, 1)
        told = f" (accepted are {', '.join(names)})" if len(names) <= _MOST_NAMES else ""
        told = f" (did you mean {similar[0]!r}?)" if similar else told
        return f"Option {given!r} is not accepted{told}"

    return _UNKNOWN.sub(completed, message)
