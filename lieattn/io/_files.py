"""Functions that write files either completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces ``path`` if the block ends without an error.

    The temporary file is in the folder of ``path``, which is created if it is missing. In the same folder, replacement
    is a single step, so a process that is killed leaves either the old or the new file. It may also leave the temporary
    file, which always has the same name and is replaced by the next call. If ``path`` is a symbolic link, the file that
    it leads to is replaced. OSError names ``path``. ValueError is raised for null characters in it.
    """
    path = Path(path)
    if "\0" in str(path):
        raise ValueError(f"path: expected a path without null characters, got {str(path)!r}")
    if not path.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, f"cannot write: {os.strerror(errno.EISDIR)}", str(path))
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(path)) from error
    finally:
        with suppress(OSError):  # such as on a disk that is read-only, where even a missing file cannot be removed
            part.unlink(missing_ok=True)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 with :func:`replacing`."""
    with replacing(path) as part:
        part.write_bytes(text.encode())
