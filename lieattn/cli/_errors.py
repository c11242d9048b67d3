"""One message with one exit status for each error of a subcommand."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LIGHTNING = f"{os.sep}lightning{os.sep}"
_OURS = (f"{os.sep}lieattn{os.sep}", f"{os.sep}lieattn_datasets{os.sep}")


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings of the library and of Lightning as one line; others also name a line of the user's code.

    Lightning's advice about intended choices, such as no workers for small data, and its information are not printed.
    """
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        theirs = filename != sys.argv[0] and not any(part in filename for part in (*_OURS, _LIGHTNING))
        return before(message, category, filename, lineno, line) if theirs else f"lieattn: warning: {message}\n"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")  # its own use of torch
        logger.setLevel(logging.WARNING)
        warnings.formatwarning = formatted
        try:
            yield
        finally:
            warnings.formatwarning = before
            logger.setLevel(level)


def report(command: str, error: Exception) -> int:
    """Print one message about an error, and return the exit status: 2 for errors that the user can correct, else 1.

    With status 1, the message names the line of the user's code, or else of this library, in which the error was
    raised. The traceback is written to a file.
    """
    if isinstance(error, BrokenPipeError):  # for example from `| head`; Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
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

    text = str(error).strip()
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif _is_raised_in(error, (_LIGHTNING,)):
        text = f"trainer: {text}"
    elif not isinstance(error, argparse.ArgumentError | UsageError) and not (
        isinstance(error, ValueError | TypeError | NotImplementedError | ImportError) and _is_raised_in(error, _OURS)
    ):
        return None
    return "\n".join([text, *getattr(error, "__notes__", [])])


def _is_raised_in(error: Exception, folders: Sequence[str]) -> bool:
    """Whether an error was raised by a ``raise`` statement in one of these folders."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return any(part in last.filename for part in folders) and (last.line or "").startswith("raise ")
