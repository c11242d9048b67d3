"""Warnings that name the line of the user's program."""

from __future__ import annotations

import sys
import warnings

import torch

# Packages whose functions call the library, or are called by it.
_BETWEEN = frozenset({"lieattn", "torch", "torch_geometric", "lightning", "contextlib", "functools"})


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
