"""The files of a data set, which are read within limits of size. Every error names the file."""

import contextlib
import functools
import gzip
import hashlib
import io
import math
import posixpath
import re
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from lieattn._core.messages import needs_extra

MOST_BYTES = 1 << 30  # limit for the unpacked size of a file: no file that the loaders read is as large
LARGEST = 1e15  # largest number in a file: typical data are of the order of 1, and squares of 1e19 overflow in float32

_LISTED = 12
_KINDS = {"boolean": "b", "integer": "iu", "number": "iuf", "text": "SU"}  # of NumPy's types
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

    ``refuse`` turns a description of a problem into the error that names the archive. It is raised if the archive is
    damaged, has members that overlap or have the same name, or lists fewer than its final record promises.
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

        The error is raised if it is encrypted, is compressed with another method than deflate, or promises more than
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


@dataclass(frozen=True)
class Source:
    """A published file with this name at these URLs, which are tried in order.

    The digest is ``"md5:..."`` or ``"sha256:..."`` of the file, or None if none is published. The files with the names
    in ``members`` are unpacked from it; if there are none, the file is stored as it is.
    """

    name: str
    addresses: tuple[str, ...]
    digest: str | None
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Release:
    """A published set of files: their names, their digests and their sources.

    Parameters
    ----------
    dataset, origin
        Name of the data set and origin of the files, in words: beginning and end of every error message.
    digests
        Map from file names to ``"md5:..."`` or ``"sha256:..."`` of the uncompressed content. Files that are not in the
        map have no published digest that could be confirmed. The digest of an ``.npz`` archive, ``"content:..."``, is
        computed from its members, so that a recompressed archive passes.
    computed
        Members of an archive that were computed in floating-point arithmetic. They may differ in their last digits
        between machines, and are left out of the digest.
    folders
        Folders under the root that are searched, in this order, after the root itself. Downloads go to the first.
    sources
        Sources for downloads.
    """

    dataset: str
    origin: str
    digests: Mapping[str, str] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def find(self, root: str | Path, *names: str) -> Path | None:
        """Return the first of the files that exists under the root, or None."""
        folders = [Path(root), *(Path(root) / folder for folder in self.folders)]
        candidates = (folder / name for folder in folders for name in names)
        return next((path for path in candidates if path.is_file()), None)

    def locate(self, root: str | Path, *names: str, verify: bool = False) -> Path:
        """Return the path of the first of the files that exists under the root; with ``verify``, compare its digest.

        The message of FileNotFoundError lists the names and the files that exist, and says what to do.
        """
        path = self.find(root, *names)
        if path is not None:
            if verify:
                self.check_file(path)
            return path
        folder = Path(root)
        if folder.is_dir():
            present = sorted(entry.name for entry in folder.iterdir())
            listed = ", ".join(present[:_LISTED]) + (", ..." if len(present) > _LISTED else "")
            found = f"it holds: {listed}" if present else "it is empty"
        else:
            found = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        inside = f" (or in its subfolder {' or '.join(self.folders)})" if self.folders else ""
        raise FileNotFoundError(
            f"{self.dataset} needs the file {' or '.join(names)} in root={str(root)!r}{inside}; {found}. "
            f"Nothing is downloaded{' unless you pass download=True' if self.sources else ''}: put the file there "
            f"yourself{self._or_make(folder / names[0])}. {self.origin}"
        )

    def damaged(self, path: Path, problem: str, advice: str = "Replace the file") -> ValueError:
        """Return (not raise) an error that names a bad file, states the problem, and says what to do."""
        return ValueError(f"{self.dataset}: {path} {problem}. {advice}. {self.origin}")

    def require(self, holds: object, path: Path, problem: str) -> None:
        """Raise the error of :meth:`damaged` unless a condition on a file holds."""
        if not holds:
            raise self.damaged(path, problem)

    def check_count(self, path: Path, found: int, expected: int, kind: str = "images") -> None:
        """Raise ValueError unless a file holds the official number of items."""
        self.require(found == expected, path, f"holds {found} {kind}, but the official file holds {expected}")

    def _or_make(self, path: Path) -> str:
        """Return the command that makes a file, as the end of an advice; nothing for files that are downloaded."""
        if self.sources or not self.digests.get(path.name, "").startswith("content:"):
            return ""
        return f", or run 'python datasets/scripts/make.py {path.stem} {path.parent}' in the source of lieattn"

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file for reading, and unpack it if its name ends in ``.gz``.

        The unpacked size is not limited, so never read more bytes than you expect.
        """
        try:
            with path.open("rb") as stream:
                yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if path.suffix == ".gz" else stream
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise self.damaged(path, f"is not a complete gzip file ({error})") from error
        except OSError as error:
            raise self.damaged(path, f"cannot be read ({error})") from error

    def check_file(self, path: Path) -> None:
        """Raise ValueError unless the file has the digest of its name, which is that of its uncompressed content.

        It is read in pieces, and if it does not change, once per process.
        """
        name = path.name.removesuffix(".gz")
        if name not in self.digests:
            return
        algorithm, _, _ = self.digests[name].partition(":")
        if algorithm == "content":
            with Archive(path, functools.partial(self.damaged, path)) as archive:
                digest = archive.fingerprint([f"{name}.npy" for name in self.computed])
        else:
            with self.open(path):  # names the file in errors
                status = path.stat()
                digest = _file_digest(path, status.st_size, status.st_mtime_ns, algorithm)
        digest = f"{algorithm}:{digest}"
        if digest == self.digests[name]:
            return
        twins = [other for other, known in self.digests.items() if known == digest]
        hint = f" (it is the content of {twins[0]})" if twins else ""
        raise self.damaged(
            path,
            f"has the digest {digest}{hint}, but {name} has {self.digests[name]}: the file is damaged or a different "
            "file. Pass verify=False only for a file of your own in the same format",
        )

    def read(
        self, root: str | Path, expected: Mapping[str, str], verify: bool, name: str = ""
    ) -> tuple[Path, list[NDArray[Any]]]:
        """Return the path of an ``.npz`` archive under the root, by default the only one, and arrays of it."""
        path = self.locate(root, *([name] if name else self.digests), verify=verify)
        return path, self.read_npz(path, expected)

    def read_npz(self, path: Path, expected: Mapping[str, str]) -> list[NDArray[Any]]:
        """Return arrays of an ``.npz`` archive; pickled objects are never loaded.

        ``expected`` maps keys to descriptions of the arrays, for example ``"uint8 [images, 28, 28]"``: a type, which is
        one of NumPy's or ``boolean``, ``integer``, ``number`` (an integer or floating type) or ``text``, and sizes. A
        named size must be the same in all arrays, and ``...`` at the end stands for any others. Numbers must be finite
        and within :data:`LARGEST`. ValueError is raised if the archive is damaged, or an array is missing or does not
        match its description.
        """
        with Archive(path, functools.partial(self.damaged, path)) as archive:
            present = [name.removesuffix(".npy") for name in archive.names if name.endswith(".npy")]
            missing = [key for key in expected if key not in present]
            if missing:
                problem = f"has no array {missing[0]!r}, only {', '.join(present) or 'nothing'}"
                # Computed arrays are not part of the digest, so the same file may be what the user would put there.
                raise self.damaged(path, problem, f"Use a file that contains it{self._or_make(path)}")
            content = {key: archive.read(f"{key}.npy") for key in expected}
        sizes: dict[str, int] = {}
        arrays = []
        for key, wanted in expected.items():
            try:
                array = parse_npy(content[key])
            except Exception as error:  # a damaged header can fail in any way
                raise self.damaged(path, f"has {key}, which is not a plain array ({error})") from error
            self.check_array(path, key, array, wanted, sizes)
            arrays.append(array)
        return arrays

    def check_array(self, path: Path, key: str, array: NDArray[Any], wanted: str, sizes: dict[str, int]) -> None:
        """Raise ValueError unless an array has the type, the sizes and the range of its description in a file.

        ``sizes`` are the named sizes so far; new ones are added.
        """
        if not _fits(array, wanted, sizes):
            known = {name: size for name, size in sizes.items() if name in wanted}
            found = f"{array.dtype} {list(array.shape)}, expected {wanted}" + (f" with {known}" if known else "")
            raise self.damaged(path, f"has {key} of {found}")
        bounded = array.dtype.kind not in "iuf" or within_bounds(array)
        self.require(bounded, path, f"has {key} with numbers that are not finite, or beyond {LARGEST:g}")

    def check_indices(self, path: Path, key: str, values: NDArray[Any], size: int) -> NDArray[np.int64]:
        """Return labels or indices as int64; raise ValueError unless all are in ``0 .. size - 1``."""
        if values.size:
            low, high = values.min(), values.max()
            self.require(low >= 0 and high < size, path, f"has {key} in {low} .. {high}, expected 0 .. {size - 1}")
        return values.astype(np.int64)


def within_bounds(array: NDArray[Any]) -> bool:
    """Return whether all numbers are finite and at most :data:`LARGEST` in size."""
    return not array.size or (-LARGEST <= float(array.min()) and float(array.max()) <= LARGEST)


def parse_npy(content: bytes) -> NDArray[Any]:
    """Read the format of ``numpy.save``, of any version and order; objects, which are pickled, are refused."""
    stream = io.BytesIO(content)
    array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    if rest := len(content) - stream.tell():
        raise ValueError(f"{rest} bytes follow the array")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _fits(array: NDArray[Any], wanted: str, sizes: dict[str, int]) -> bool:
    """Return whether an array has the type and sizes of a description, and add new named sizes to ``sizes``."""
    kind, _, dims = wanted.partition(" ")
    right = array.dtype.kind in _KINDS[kind] if kind in _KINDS else array.dtype == np.dtype(kind)
    names = [name for name in dims.strip("[]").split(", ") if name]
    if names[-1:] == ["..."]:
        names[-1:] = [f"{size}" for size in array.shape[len(names) - 1 :]]
    if not right or array.ndim != len(names):
        return False
    return all(
        size == (int(name) if name.isdigit() else sizes.setdefault(name, size))
        for name, size in zip(names, array.shape, strict=True)
    )


@functools.lru_cache(maxsize=64)
def _file_digest(path: Path, size: int, modified: int, algorithm: str) -> str:
    """Hash a file once per process. Size and modification time are part of the key, so changed files are read again."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def files_below(root: Path) -> dict[str, Path]:
    """Return the files below a folder by their names in it, as :func:`portable_name` gives them, without hidden ones.

    Links to folders are followed in the upper four levels, because they may lead to a folder above. Broken links are
    returned, so that reading them is an error. ValueError is raised if two files have the same name.
    """
    places = {*root.rglob("*"), *(path for depth in (2, 3, 4) for path in root.glob("/".join("*" * depth)))}
    found: dict[str, Path] = {}
    for path in sorted(path for path in places if path.is_file() or not path.exists()):
        name = portable_name(path.relative_to(root).as_posix())
        if found.setdefault(name, path) != path:
            raise ValueError(f"{str(path)!r} and {str(found[name])!r} have the same name on other systems: rename one")
    return {name: path for name, path in found.items() if not is_hidden(name)}


def is_hidden(name: str) -> bool:
    """Return whether a file, or a folder that contains it, begins with a dot, or is an addition of macOS."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names, separated, and the number of the remaining ones."""
    more = f"{separator}and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return separator.join(names[:_LISTED]) + more


def read_text(values: NDArray[Any]) -> list[str]:
    """Return byte strings or strings as a list of ``str``; bytes that are not ASCII are shown as escapes."""
    return [
        value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else value for value in values.tolist()
    ]


_FILTERS = {1, 2, 3}  # deflate, shuffle and a checksum; HDF5 searches for other filters in libraries on the disk


def open_hdf5(release: Release, path: Path, key: str) -> Any:
    """Open an array of a file; raise ValueError if its values are in other files, or incomplete."""
    with needs_extra(release.dataset, "data"):
        import h5py
    try:
        file = h5py.File(path, "r")
        link = file.get(key, getlink=True)
        source = file[key] if isinstance(link, h5py.HardLink) else None
        if not isinstance(source, h5py.Dataset):
            problem = f"has no array {key!r}, only {', '.join(file) or 'nothing'}"
        else:
            problem = _problem(source)
    except Exception as error:  # a damaged file can fail in any way
        raise release.damaged(path, f"is not a complete HDF5 file ({error})") from error
    if problem:
        file.close()
        raise release.damaged(path, problem)
    return source


def read_hdf5(release: Release, path: Path, expected: Mapping[str, str]) -> list[NDArray[Any]]:
    """Return whole arrays of a file, with descriptions and errors as for :meth:`Release.read_npz`."""
    sizes: dict[str, int] = {}
    arrays = []
    for key, wanted in expected.items():
        source = open_hdf5(release, path, key)
        try:
            small = source.size * source.dtype.itemsize <= MOST_BYTES
            release.require(
                small, path, f"has {key} of {source.dtype} {source.shape}, which exceeds {MOST_BYTES} bytes"
            )
            array = np.asarray(source[...])
        except OSError as error:
            raise release.damaged(path, f"cannot be read ({error})") from error
        finally:
            source.file.close()
        release.check_array(path, key, array, wanted, sizes)
        arrays.append(array)
    return arrays


def _problem(source: Any) -> str:
    """Return a description of the problem with the storage of an array, or an empty string."""
    stored = source.id.get_create_plist()
    filters = {stored.get_filter(number)[0] for number in range(stored.get_nfilters())}
    if source.is_virtual or stored.get_external_count():
        return f"has an array {source.name!r} whose values are in other files"
    if not filters <= _FILTERS:
        return f"has an array {source.name!r} with the filters {sorted(filters)}, expected some of {sorted(_FILTERS)}"
    if source.chunks is None:
        complete = source.id.get_storage_size() == source.size * source.dtype.itemsize
    else:
        if math.prod(source.chunks) * source.dtype.itemsize > MOST_BYTES:
            return f"has an array {source.name!r} in chunks of {source.chunks}, which exceed {MOST_BYTES} bytes"
        pieces = zip(source.shape, source.chunks, strict=True)
        complete = source.id.get_num_chunks() == math.prod(-(-size // chunk) for size, chunk in pieces)
    return "" if complete else f"has an array {source.name!r} that was written only in part"
