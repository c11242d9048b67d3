"""Errors about packages of the optional extras, which are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Name the extra to install, as an ImportError, if a package is not found in the ``with`` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "lieattn").partition(".")[0]
        if package == "lieattn":  # a fault of the library, which no extra mends
            raise
        advice = f'pip install "lieattn[{extra}]"'
        raise ImportError(f"{what} needs the package {package}: {advice}", name=error.name) from error
