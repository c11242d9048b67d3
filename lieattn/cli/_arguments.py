"""Options that are checked when they are parsed, for all subcommands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises ``argparse.ArgumentError``, which is reported without a usage page.

    Options cannot be abbreviated, as in ``lieattn fit``.
    """

    def __init__(self, **options: Any) -> None:
        wide = partial(argparse.HelpFormatter, max_help_position=32, width=110)
        super().__init__(allow_abbrev=False, **{"formatter_class": wide, **options})

    def error(self, message: str) -> NoReturn:
        """Raise ``argparse.ArgumentError``."""
        raise argparse.ArgumentError(None, message)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return natural(text, least=1)


def natural(text: str, least: int = 0) -> int:
    """Parse an integer from ``least`` to 2^63 - 1, such as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def output_file(text: str) -> Path:
    """Parse a path, and check that a file can be written there before the work begins."""
    path = Path(text)
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)  # "/" has no parents
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        fault = "it is a folder" if path.is_dir() else f"{folder} is not a writable folder"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {fault}")
    return path


def package(text: str) -> str:
    """Parse the name of a package."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"expected the name of a package, got {text!r}")
    return text


def take_settings(arguments: Sequence[str], names: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split the arguments into settings, such as ``"data.batch_size=16"`` for ``--data.batch_size 16``, and others.

    Settings are the options with a dot, as in ``lieattn fit``, and the options in ``names``.
    """
    settings, others = [], list[str]()
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or ("." not in name and name not in names):
            others.append(word)
            continue
        if not equals and (value := next(words, "--")).startswith("--"):
            raise argparse.ArgumentError(None, f"argument --{name}: expected one argument")
        settings.append(f"{name}={value}")
    return settings, others
