"""What all subcommands share: options that are checked as they are read, and errors that are the user's to mend."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_OURS = (f"{os.sep}lieattn{os.sep}", f"{os.sep}lieattn_datasets{os.sep}")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises ``argparse.ArgumentError``, for :func:`report` to tell without a page of usage.

    As in ``lieattn fit``, options have their full names.
    """

    def __init__(self, **options: Any) -> None:
        wide = partial(argparse.HelpFormatter, max_help_position=32, width=110)
        super().__init__(allow_abbrev=False, **{"formatter_class": wide, **options})

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise argparse.ArgumentError(None, message)


def positive(text: str) -> int:
    """An integer of at least 1."""
    return natural(text, least=1)


def natural(text: str, least: int = 0) -> int:
    """An integer from ``least`` to 2^63 - 1, such as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def output_file(text: str) -> Path:
    """A path where a file can be written, known before the work begins whose result it is."""
    path = Path(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        fault = "it is a folder" if path.is_dir() else f"{folder} is not a writable folder"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {fault}")
    return path


def package(text: str) -> str:
    """The name of a package."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"expected the name of a package, got {text!r}")
    return text


def take_settings(arguments: Sequence[str], names: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Settings such as ``--data.batch_size 16`` as ``"data.batch_size=16"``, and the other arguments.

    Options with a dot are settings, as in ``lieattn fit``, and those in ``names``.
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


def import_catalog() -> dict[str, list[ModuleType]]:
    """Import the modules with the classes that may be named without their package: models, and data sets."""
    names = {"models": ("lieattn.models", "lieattn.models.irreps"), "datasets": ("lieattn_datasets",)}
    return {kind: [importlib.import_module(name) for name in modules] for kind, modules in names.items()}


@contextmanager
def importable_folder() -> Iterator[None]:
    """Let class paths name modules in the working directory, behind all that is installed."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        del sys.path[-1 - sys.path[::-1].index(folder)]  # not one that was there before


def report(command: str, error: Exception) -> int:
    """Tell of an error in one message, and return the exit status: 2 for what the user can mend, or 1.

    The message for 1 says where in the user's code, or else in ours, it was raised; a file has the traceback.
    """
    if isinstance(error, BrokenPipeError):  # as behind `| head`; Python would tell of it once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    message, status = usage_message(error), 2
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    if message is None:
        frames = traceback.extract_tb(error.__traceback__)
        foreign = ("site-packages", sysconfig.get_path("stdlib"), *_OURS)
        users = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
        ours = [frame for frame in frames if any(part in frame.filename for part in _OURS)]
        place = (users or ours or frames)[-1]
        with tempfile.NamedTemporaryFile("w", prefix="lieattn-", suffix=".txt", delete=False) as file:
            file.writelines(traceback.format_exception(error))
        where = f"\n  in {place.filename}, line {place.lineno}: {place.line}\n  traceback: {file.name}"
        message, status, notes = f"{type(error).__name__}: {error}", 1, f"{notes}{where}"
    sys.stdout.flush()
    sys.stderr.write(f"lieattn {command}: {message}{notes}\n")
    return status


def usage_message(error: Exception) -> str | None:
    """What to tell of an error that the user can mend; None for others, of which a traceback is to be seen.

    Errors that a statement of this library raises on purpose are the user's to mend, and so are those of files. A
    ValueError that Python raises in the midst of our code is a fault of ours.
    """
    from lieattn.train import UsageError

    checked = (ValueError, TypeError, NotImplementedError, ImportError)
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif lightning is not None and isinstance(error, lightning.MisconfigurationException):
        text = f"trainer: {error}"
    elif not isinstance(error, (argparse.ArgumentError, UsageError)) and not (
        isinstance(error, checked) and _is_raised_here(error)
    ):
        return None
    return "\n".join([text.strip(), *getattr(error, "__notes__", [])])


def _is_raised_here(error: Exception) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return any(part in last.filename for part in _OURS) and (last.line or "").startswith("raise ")
