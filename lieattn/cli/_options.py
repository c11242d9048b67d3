"""Code shared by all subcommands: options that are checked when they are parsed, and reports of errors."""

from __future__ import annotations

import argparse
import importlib
import inspect
import io
import os
import pkgutil
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
_MOST_DEVICES = 512
# Smaller numbers end with an error about a division, or have no effect.
_LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0, "log_every_n_steps": 0}
_LIGHTNING = f"{os.sep}lightning{os.sep}pytorch{os.sep}"
_OURS = (f"{os.sep}lieattn{os.sep}", f"{os.sep}lieattn_datasets{os.sep}")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises ``argparse.ArgumentError``, which :func:`report` prints without a usage page.

    Options cannot be abbreviated, as in ``lieattn fit``.
    """

    def __init__(self, **options: Any) -> None:
        wide = partial(argparse.HelpFormatter, max_help_position=32, width=110)
        super().__init__(allow_abbrev=False, **{"formatter_class": wide, **options})

    def error(self, message: str) -> NoReturn:
        """Raise ``argparse.ArgumentError``."""
        raise argparse.ArgumentError(None, message)


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the arguments of a subcommand ask for its help page."""
    return any(word in ("-h", "--help") for word in arguments)


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


def command_line(words: Sequence[str]) -> str:
    """Return a command as it is typed into the shell of this system."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def check_trainer(trainer: Any) -> None:
    """Raise UsageError for settings that Lightning ignores, or that end with an error about something else."""
    from lieattn.train import UsageError

    devices = str(trainer.devices)
    # Every device is a process, even if the machine does not have it.
    if devices.isdecimal() and int(devices) > _MOST_DEVICES:
        raise UsageError(f"trainer.devices: expected at most {_MOST_DEVICES}, got {devices}")
    for name, least in _LEAST.items():
        if (value := trainer[name]) is not None and value < least:
            raise UsageError(f"trainer.{name}: expected at least {least}, got {value}")


def check_classes(content: Any, path: str | Path) -> None:
    """Raise UsageError if a class in a configuration has other entries than those that describe it."""
    from lieattn.train import UsageError

    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, dict):
        return
    if unknown := [key for key in content if key not in _OF_A_CLASS] if "class_path" in content else []:
        found = f"{unknown[0]!r} beside class_path {content['class_path']!r}"
        raise UsageError(f"{path}: expected the arguments of a class under init_args, got {found}")
    for value in content.values():
        check_classes(value, path)


def check_built(content: Any, place: str = "") -> None:
    """Raise UsageError if dict_kwargs, whose values stay as they are, describe an object that should be built.

    It is also raised if a preset of the library does not take the argument.
    """
    from lieattn.train import UsageError

    entries = dict(enumerate(content)) if isinstance(content, list) else content
    if not isinstance(entries, dict):
        return
    given = entries.get("dict_kwargs") or {}
    accepted = _of_preset(entries["class_path"]) if given else None
    for name, value in given.items():
        if accepted is not None and name not in accepted:
            raise UsageError(f"{place}dict_kwargs.{name}: expected one of {', '.join(accepted)}, got {name!r}")
        if isinstance(value, dict) and "class_path" in value:
            found = f"an object, {value['class_path']}, which {entries['class_path']} takes only in Python"
            raise UsageError(f"{place}dict_kwargs.{name}: expected a number, a text or a list of them, got {found}")
    for name, value in entries.items():
        check_built(value, f"{place}{name}.")


def _of_preset(path: str) -> list[str] | None:
    """Names that a preset of this library, such as ``GSANet.rot_mnist``, passes on to the class that it returns."""
    preset = pkgutil.resolve_name(path) if path.startswith("lieattn.") else None
    if not inspect.isroutine(preset):  # other classes may take any names
        return None
    made: Any = inspect.get_annotations(preset, eval_str=True)["return"]
    # A preset gives the other arguments itself, or has them as its own.
    named = inspect.signature(made).parameters.values()
    return [parameter.name for parameter in named if parameter.kind is inspect.Parameter.KEYWORD_ONLY]


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


def import_catalog() -> dict[str, list[ModuleType]]:
    """Import the modules with models and data sets, whose classes may be named without their package."""
    names = {"models": ("lieattn.models", "lieattn.models.irreps"), "datasets": ("lieattn_datasets",)}
    return {kind: [importlib.import_module(name) for name in modules] for kind, modules in names.items()}


@contextmanager
def importable_folder() -> Iterator[None]:
    """Let class paths name modules in the working directory, which is searched after all installed packages."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        del sys.path[-1 - sys.path[::-1].index(folder)]  # the last entry, since the folder may have been there before


@contextmanager
def printable_output() -> Iterator[None]:
    """Print characters that the encoding of the output lacks as escapes, as Python does in error messages.

    On Windows, files and pipes have the encoding of the system, without many mathematical symbols.
    """
    stream, errors = sys.stdout, getattr(sys.stdout, "errors", None)
    if errors != "strict" or not isinstance(stream, io.TextIOWrapper):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings of the library and of Lightning as one line; others also name a line of the user's code."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        theirs = filename != sys.argv[0] and not any(part in filename for part in (*_OURS, _LIGHTNING))
        return before(message, category, filename, lineno, line) if theirs else f"lieattn: warning: {message}\n"

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def report(command: str, error: Exception) -> int:
    """Print one message about an error, and return the exit status: 2 for errors that the user can correct, else 1.

    With status 1, the message names the line of the user's code, or else of this library, in which the error was
    raised. The traceback is written to a file.
    """
    if isinstance(error, BrokenPipeError):  # for example from `| head`; Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)  # Windows has no such signal
    message, status, notes = usage_message(error), 2, ""  # this message contains the notes
    if message is None:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        frames = traceback.extract_tb(error.__traceback__)
        foreign = ("site-packages", sysconfig.get_path("stdlib"), *_OURS)
        users = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
        ours = [frame for frame in frames if any(part in frame.filename for part in _OURS)]
        place = (users or ours or frames)[-1]
        where = f"\n  in {place.filename}, line {place.lineno}: {place.line}\n  traceback: {_written_traceback(error)}"
        message, status, notes = f"{type(error).__name__}: {error}", 1, f"{notes}{where}"
    sys.stdout.flush()
    sys.stderr.write(f"lieattn {command}: {message}{notes}\n")
    return status


def _written_traceback(error: Exception) -> str:
    """Write a traceback to a temporary file, and return its path; the traceback itself if no folder is writable."""
    text = "".join(traceback.format_exception(error))
    options: Any = {"prefix": "lieattn-", "suffix": ".txt", "delete": False}
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="backslashreplace", **options) as file:
            file.write(text)
    except OSError:
        return text.rstrip()
    return file.name


def usage_message(error: Exception) -> str | None:
    """The message for an error that the user can correct; None for other errors, which need a traceback.

    The user can correct errors about files, and errors that are raised by a ``raise`` statement of this library, or of
    Lightning about its settings. A ValueError that Python raises inside the code of this library is a bug.
    """
    from lieattn.train import UsageError

    checked = (ValueError, TypeError, NotImplementedError, ImportError)
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif lightning is not None and (
        isinstance(error, lightning.MisconfigurationException)
        or (isinstance(error, ValueError) and _is_raised_in(error, (_LIGHTNING,)))
    ):
        text = f"trainer: {text.strip()}"
    elif not isinstance(error, (argparse.ArgumentError, UsageError)) and not (
        isinstance(error, checked) and _is_raised_in(error, _OURS)
    ):
        return None
    return "\n".join([text.strip(), *getattr(error, "__notes__", [])])


def _is_raised_in(error: Exception, folders: Sequence[str]) -> bool:
    """Whether an error was raised by a ``raise`` statement in one of these folders."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return any(part in last.filename for part in folders) and (last.line or "").startswith("raise ")
