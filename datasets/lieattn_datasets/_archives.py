"""Zip archives: what is in them is read within limits, and everything that is wrong with one names it."""

import contextlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

MOST_BYTES = 1 << 30  # that anything compressed may unpack to: no file that the loaders read holds as much

_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others allocate whatever their headers ask for
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


class Archive(contextlib.AbstractContextManager["Archive"]):
    """The members of a zip archive, which are never written to disk.

    Parameters
    ----------
    path
        The archive.
    refuse
        Makes the error that names the archive out of what is wrong with it.

    Raises
    ------
    ValueError
        If the archive is damaged, has a member twice, or members that overlap.
    """

    def __init__(self, path: Path, refuse: Callable[[str], ValueError]) -> None:
        self._refuse = refuse
        try:
            self._zip = zipfile.ZipFile(path)
            size = path.stat().st_size
            members = [info for info in self._zip.infolist() if not info.is_dir()]
            for info in members:  # each has its name twice: in the directory, and before its content
                if not info.flag_bits & _ENCRYPTED and info.compress_type in _METHODS:
                    self._zip.open(info).close()
        except Exception as error:  # a damaged directory can fail in any way
            raise refuse(f"is not a complete zip archive ({type(error).__name__}: {error})") from error
        self._members = {info.filename: info for info in members}
        if len(self._members) < len(members) or sum(info.compress_size for info in members) > size:
            self._zip.close()
            raise refuse("is not a proper zip archive: members have the same name, or overlap")

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def names(self) -> list[str]:
        """Names of the members, without folders."""
        return list(self._members)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a member for reading.

        Raises
        ------
        ValueError
            If it is encrypted, compressed by another method than deflate, promises more than :data:`MOST_BYTES`, or,
            while it is read, if it is damaged.
        """
        info = self._members[name]
        if info.flag_bits & _ENCRYPTED:
            raise self._refuse(f"is encrypted (its member {name}): unpack it yourself")
        if info.compress_type not in _METHODS:
            raise self._refuse(f"has the member {name}, which is compressed by another method than deflate")
        if info.file_size > MOST_BYTES:
            raise self._refuse(f"has the member {name}, of {info.file_size} bytes: more than {MOST_BYTES}")
        try:
            with self._zip.open(info) as stream:
                yield stream
        except _FAULTS as error:
            raise self._refuse(f"is a damaged zip archive: {name} cannot be unpacked ({error})") from error

    def check_stored(self) -> None:
        """Raise ValueError unless all members have their checksums, and are stored as ``torch.save`` does it."""
        if any(info.file_size != info.compress_size for info in self._members.values()):
            raise self._refuse("has compressed members, which torch never writes")
        for name in self._members:
            self.read(name)

    def read(self, name: str) -> bytes:
        """Return the content of a member; raises as :meth:`open` does."""
        with self.open(name) as stream:
            return stream.read()
