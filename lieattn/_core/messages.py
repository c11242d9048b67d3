"""Texts for the user that no check raises."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape

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


_STYLE = """
.lieattn{font:14px/1.5 system-ui,sans-serif;color:#1f2328;background:#fff}
.lieattn{max-width:60rem;margin:1rem auto;padding:0 1rem}
.lieattn h1{font-size:1.3rem;margin:0}.lieattn h2{font-size:1rem;margin:1.4rem 0 .4rem}
.lieattn .verdict{color:#fff;border-radius:.4rem;padding:.7rem 1rem;margin:1rem 0}
.lieattn .verdict b{font-size:1.1rem}
.lieattn dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0}
.lieattn dt{color:#57606a}.lieattn dd{margin:0;overflow-wrap:anywhere}
.lieattn table{display:block;overflow-x:auto;border-collapse:collapse;font-variant-numeric:tabular-nums}
.lieattn th,.lieattn td{text-align:left;padding:.15rem .8rem .15rem 0;border-bottom:1px solid #d0d7de}
.lieattn .bad{color:#b42318;font-weight:600}.lieattn .good{color:#1a7f37}.lieattn .idle{color:#57606a}
.lieattn svg{max-width:100%;height:auto}.lieattn details{margin-top:1rem}
@media (prefers-color-scheme:dark){body{background:#0d1117}.lieattn{color:#e6edf3;background:#0d1117}
.lieattn dt,.lieattn .idle{color:#9da7b3}.lieattn th,.lieattn td{border-color:#3d444d}
.lieattn .bad{color:#ff8f87}.lieattn .good{color:#56d364}}
"""


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns, with a line under the heads, which are the first row."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return the HTML of a table, whose text is escaped."""
    lines = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"] if heads else []
    lines += [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def titled_table(title: str, rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return the HTML of a title and a table, whose text is escaped."""
    return f"<div><b>{escape(title)}</b>{table(rows, heads)}</div>"


def page(title: str, body: str) -> str:
    """Return a complete HTML document. ``title`` is escaped, and ``body`` is HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n"
        f'<body><div class="lieattn">{body}\n</div></body></html>\n'
    )
