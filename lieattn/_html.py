"""What notebooks show of an object: a title and a small table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def titled_table(title: str, rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """HTML of a title and rows of cells, whose text is escaped."""
    cells = [f"<th>{escape(head)}</th>" for head in heads]
    lines = [f"<tr>{''.join(cells)}</tr>"] if cells else []
    lines += [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<div><b>{escape(title)}</b><table>{''.join(lines)}</table></div>"
