"""How every part of the library writes files: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file to write to, which takes the place of ``path`` once the block ends without an error.

    It is in the same folder, which is made as needed, because only then the exchange is one step: whenever the process
    is killed, either the old or the new file is there. What a kill leaves over has always the same name, and the next
    writing takes it away. OSError names ``path``.
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
