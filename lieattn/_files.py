"""How every part of the library writes files: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file to write to, which replaces ``path`` when the block ends without an error.

    It is in the folder of ``path``, which is made if it is missing. There the replacement is a single step, so a
    process that is killed leaves either the old or the new file. The unfinished file that it may leave too always has
    the same name, and the next call replaces it. OSError names ``path``.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file by :func:`replacing`."""
    with replacing(path) as part:
        part.write_text(text)
