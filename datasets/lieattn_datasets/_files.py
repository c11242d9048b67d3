"""Finding, reading and checking the files of a data set. Nothing here, or anywhere, downloads."""

import functools
import gzip
import hashlib
import os
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LISTED = 12


@dataclass(frozen=True)
class Release:
    """A published set of files: what they are called, what they contain, where they come from.

    Parameters
    ----------
    dataset
        Name of the data set, as errors give it.
    origin
        Where the files come from, in words: the end of every error.
    digests
        File name to ``"md5:..."`` or ``"sha256:..."`` of its uncompressed content. A file that is
        not in the table has no published digest that could be confirmed.
    folders
        Folders under the root that are searched, in this order, after the root itself.
    """

    dataset: str
    origin: str
    digests: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    def find(self, root: str | Path, *names: str) -> Path | None:
        """Return the first of the files that exists under the root, or None."""
        folders = [Path(root), *(Path(root) / folder for folder in self.folders)]
        candidates = (folder / name for folder in folders for name in names)
        return next((path for path in candidates if path.is_file()), None)

    def locate(self, root: str | Path, *names: str) -> Path:
        """Return the path of the first of the files that exists under the root.

        Raises
        ------
        FileNotFoundError
            If none exists. The message says what was looked for, what is there, and what to do.
        """
        path = self.find(root, *names)
        if path is not None:
            return path
        folder = Path(root)
        if folder.is_dir():
            present = sorted(entry.name for entry in folder.iterdir())
            listed = ", ".join(present[:_LISTED]) + (", ..." if len(present) > _LISTED else "")
            found = f"it holds: {listed}" if present else "it is empty"
        else:
            found = "there is no such folder"
        inside = f" (or in its subfolder {' or '.join(self.folders)})" if self.folders else ""
        raise FileNotFoundError(
            f"{self.dataset} needs the file {' or '.join(names)} in root={str(root)!r}{inside}; {found}. "
            f"Nothing is downloaded: put the file there yourself. {self.origin}"
        )

    def damaged(self, path: Path, problem: str) -> ValueError:
        """Return (not raise) the error that names a bad file, what is wrong, and what to do."""
        return ValueError(f"{self.dataset}: {path} {problem}. Replace the file. {self.origin}")

    def read(self, path: Path) -> bytes:
        """Return the content of a file, uncompressed if its name ends in ``.gz``."""
        if path.suffix != ".gz":
            return path.read_bytes()
        try:
            with gzip.open(path) as stream:
                return stream.read()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise self.damaged(path, f"is not a complete gzip file ({error})") from error

    def check_content(self, path: Path, content: bytes) -> None:
        """Raise ValueError unless the uncompressed content has the digest of its file name."""
        name = path.name.removesuffix(".gz")
        if name in self.digests:
            algorithm, _, _ = self.digests[name].partition(":")
            digest = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
            self._compare(path, name, f"{algorithm}:{digest}")

    def check_file(self, path: Path) -> None:
        """Raise ValueError unless the file has the digest of its name; reads it piece by piece."""
        if path.name in self.digests:
            algorithm, _, _ = self.digests[path.name].partition(":")
            status = os.stat(path)
            digest = _file_digest(str(path), status.st_size, status.st_mtime_ns, algorithm)
            self._compare(path, path.name, f"{algorithm}:{digest}")

    def _compare(self, path: Path, name: str, digest: str) -> None:
        if digest == self.digests[name]:
            return
        twins = [other for other, known in self.digests.items() if known == digest]
        hint = f" (it is the content of {twins[0]})" if twins else ""
        raise self.damaged(
            path,
            f"has the digest {digest}{hint}, but {name} has {self.digests[name]}: it is damaged or another "
            "file. Pass verify=False only for a file of your own in the same format",
        )

    def read_npz(self, path: Path, *keys: str) -> list[NDArray[Any]]:
        """Return the named arrays of an ``.npz`` archive; pickled objects are refused."""
        if not zipfile.is_zipfile(path):
            raise self.damaged(path, "is not a complete .npz archive")
        try:
            with np.load(path, allow_pickle=False) as archive:
                present = archive.files
                arrays = [archive[key] for key in keys if key in present]
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
            raise self.damaged(path, f"is damaged or holds more than plain arrays ({error})") from error
        missing = [key for key in keys if key not in present]
        if missing:
            raise self.damaged(path, f"has no array {missing[0]!r}, only {', '.join(present) or 'nothing'}")
        return arrays


@functools.lru_cache(maxsize=64)
def _file_digest(path: str, size: int, modified: int, algorithm: str) -> str:
    """Hash a file once per process; size and modification time make the key follow changes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def check_choice(argument: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_count(release: Release, path: Path, found: int, expected: int) -> None:
    """Raise ValueError unless a file holds the official number of images."""
    if found != expected:
        raise release.damaged(path, f"holds {found} images, the official file {expected}")
