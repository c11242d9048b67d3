"""Messages to the user that no check raises."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Packages whose functions call the library, or are called by it.
_BETWEEN = frozenset({"lieattn", "torch", "torch_geometric", "lightning", "contextlib", "functools"})
_NAMES = {"PIL": "Pillow", "sklearn": "scikit-learn"}  # on a package index


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning for the line that called the library, through torch and Lightning if it did.

    Python displays a warning once for each line, so a line that runs several networks warns once.
    """
    level = 2
    if not torch.compiler.is_compiling():
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
            frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Name the extra to install, as an ImportError, if a package is not found in the ``with`` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "lieattn").partition(".")[0]
        if package == "lieattn":  # a fault of the library, which no extra mends
            raise
        found, advice = _NAMES.get(package, package), f'pip install "lieattn[{extra}]"'
        raise ImportError(f"{what} needs the package {found}: {advice}", name=error.name) from error
