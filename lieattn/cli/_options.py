"""What all subcommands share: options that are checked as they are read, and errors that are the user's to mend."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

_OURS = (f"{os.sep}lieattn{os.sep}", f"{os.sep}lieattn_datasets{os.sep}")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises ``argparse.ArgumentError``, for :func:`usage_message` to report without a page of usage."""

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
        fault = "it is a folder" if path.is_dir() else f"{folder} is no folder that can be written to"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {fault}")
    return path


def package(text: str) -> str:
    """The name of a package."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"expected the name of a package, got {text!r}")
    return text


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
