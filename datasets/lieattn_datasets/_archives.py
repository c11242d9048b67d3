"""Reading of archives within limits of size. Every error names the archive."""

import contextlib
import hashlib
import posixpath
import re
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO

MOST_BYTES = 1 << 30  # limit for the unpacked size of a file: no file that the loaders read is as large

_ENCRYPTED = 0x1
_END, _END_BYTES, _MANY = b"PK\5\6", 22, 0xFFFF  # the record at the end; its count if there are more members
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # other methods allocate any size that a header requests
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


def portable_name(name: str) -> str:
    """Return the name of a file or member in one form, whichever system has written it: ``chair/train/1.off``.

    Backslashes become slashes. Drive letters, leading slashes, ``.`` and ``..`` are removed, and so are blanks and dots
    at the end of folders and files, which Windows does not keep. Letters with accents are composed.
    """
    plain = re.sub(r"^[A-Za-z]:", "", unicodedata.normalize("NFC", name).replace("\\", "/"))
    parts = posixpath.normpath("/" + plain.lstrip("/"))[1:].split("/")
    return "/".join(part.rstrip(" .") or part for part in parts)


class Archive(contextlib.AbstractContextManager["Archive"]):
    """The members of a zip archive, which are never written to disk.

    Parameters
    ----------
    path
        The archive.
    refuse
        Function from a description of the problem to the error that names the archive.

    Raises
    ------
    ValueError
        If the archive is damaged, has two members with the same name, has members that overlap, or lists fewer members
        than its final record promises.
    """

    def __init__(self, path: Path, refuse: Callable[[str], ValueError]) -> None:
        self._refuse = refuse
        try:
            self._zip = zipfile.ZipFile(path)
            size = path.stat().st_size
            if (promised := _members_promised(path)) not in (len(self._zip.infolist()), _MANY):
                raise zipfile.BadZipFile(f"{len(self._zip.infolist())} of {promised} members are listed")
            members = [info for info in self._zip.infolist() if not info.filename.endswith(("/", "\\"))]
            self._members = {portable_name(info.filename): info for info in members}
            distinct = len(self._members) == len(members) and sum(info.compress_size for info in members) <= size
            for info in members if distinct else []:  # opening compares the name with the one before the content
                if not info.flag_bits & _ENCRYPTED and info.compress_type in _METHODS:
                    self._zip.open(info).close()
        except Exception as error:  # a damaged directory can fail in any way
            raise refuse(f"is not a complete zip archive ({type(error).__name__}: {error})") from error
        if not distinct:
            self._zip.close()
            raise refuse("is not a valid zip archive: members have the same name, or overlap")

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def names(self) -> list[str]:
        """Names of the members, as :func:`portable_name` gives them, without folders."""
        return list(self._members)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a member for reading.

        Raises
        ------
        ValueError
            If the member is encrypted, is compressed with another method than deflate, or promises more than
            :data:`MOST_BYTES` bytes; or, during reading, if it is damaged.
        """
        info = self._members[name]
        if info.flag_bits & _ENCRYPTED:
            raise self._refuse(f"has the encrypted member {name}: unpack the archive yourself")
        if info.compress_type not in _METHODS:
            raise self._refuse(f"has the member {name}, which is not compressed with deflate")
        if info.file_size > MOST_BYTES:
            raise self._refuse(f"has the member {name} of {info.file_size} bytes, which is more than {MOST_BYTES}")
        try:
            with self._zip.open(info) as stream:
                yield stream
        except _FAULTS as error:
            raise self._refuse(f"is a damaged zip archive: {name} cannot be unpacked ({error})") from error

    def fingerprint(self, left_out: Collection[str]) -> str:
        """Return the SHA-256 of the names, sizes and checksums of all members except ``left_out``.

        It depends on the content of the members, and not on the way in which they are compressed.
        """
        kept = sorted({*self._members} - {*left_out})
        lines = (f"{name} {self._members[name].file_size} {self._members[name].CRC:08x}\n" for name in kept)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_stored(self) -> None:
        """Raise ValueError unless all members match their checksums, and are uncompressed as ``torch.save`` does it."""
        if any(info.file_size != info.compress_size for info in self._members.values()):
            raise self._refuse("has compressed members, which torch never writes")
        for name in self._members:
            self.read(name)

    def read(self, name: str) -> bytes:
        """Return the content of a member. The exceptions are those of :meth:`open`."""
        with self.open(name) as stream:
            return stream.read()


def _members_promised(path: Path) -> int:
    """Return the number of members in the final record of an archive, which ``zipfile`` does not check."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES - 0xFFFF))  # a comment may follow
        end = file.read()
    at = end.rfind(_END)
    return int.from_bytes(end[at + 10 : at + 12], "little")
