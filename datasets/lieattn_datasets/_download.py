"""Download of published files with pooch, on request: their addresses, digests and sizes."""

import contextlib
import errno
import functools
import io
import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lieattn_datasets._archives import Archive, unpack
from lieattn_datasets._files import Release, Source, remove_abandoned, write_atomically

_STAGING = ".download-"  # start of the name of a folder beside the files, which holds incomplete downloads
_CHUNK = 1 << 16  # bytes
_SECONDS = 30.0  # without an answer until a connection counts as interrupted; pooch 1.8.0 would wait forever
_ATTEMPTS = 2  # at each address, if the connection is interrupted
_ADVICE = {
    "free some space there": (errno.ENOSPC, errno.EDQUOT),
    "make it writable": (errno.EACCES, errno.EPERM, errno.EROFS),
}

_log = logging.getLogger(__name__)


def fetch(release: Release, root: str | Path, *wanted: str) -> None:
    """Download the files of a release that are missing under the root. Existing files are not changed.

    Files are stored in the first of the release's folders. A file gets its name after it is complete and its digest is
    checked, so an interrupted download leaves no file that a loader would read.

    Raises
    ------
    OSError
        If no address provides the published file, or the file cannot be written.
    ValueError
        If the downloaded file is not an archive, although it should be one.
    """
    folder = Path(root, *release.folders[:1])
    for source in release.sources:
        names = [name for name in source.members or (source.name,) if _missing(release, root, name)]
        if any(name.removesuffix(".gz") in wanted for name in names):
            try:
                _fetch(release, source, folder, names)
            except ConnectionError:
                raise
            except OSError as error:
                number = error.errno or errno.EACCES  # pooch raises errors without a number
                problem = f"{source.name} cannot be written into {folder} ({os.strerror(number)})"
                advice = next((f"{words}, or " for words, numbers in _ADVICE.items() if number in numbers), "")
                raise OSError(number, f"{release.dataset}: {problem}: {advice}use another root") from error


def _missing(release: Release, root: str | Path, name: str) -> bool:
    """Return whether a file is missing, both as published and unpacked."""
    return release.find(root, name, name.removesuffix(".gz")) is None


def _fetch(release: Release, source: Source, folder: Path, names: list[str]) -> None:
    """Download a file to a temporary folder, then move it to its folder or unpack it there."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder, f"{_STAGING}*")
    staging = folder / f"{_STAGING}{secrets.token_hex(4)}"  # a unique name: other processes may download the same file
    staging.mkdir()
    try:
        file = _retrieve(release, source, staging)
        if source.members:
            for name, stream in unpack(file, names, source.unpacked, functools.partial(release.damaged, file)):
                write_atomically(folder / name, functools.partial(shutil.copyfileobj, stream))
            return
        if source.digest is None and file.suffix == ".zip":  # without a digest it could be an error page of a server
            with Archive(file, functools.partial(release.damaged, file)):
                pass
        file.chmod(staging.stat().st_mode & 0o666)  # only the owner can read pooch's temporary files
        file.replace(folder / source.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder with a file stays
            for path in new:
                path.rmdir()


def _retrieve(release: Release, source: Source, staging: Path) -> Path:
    """Download a file from the first address that provides the published file."""
    try:
        import pooch
        import requests
        import urllib3
    except ImportError as error:
        raise ImportError(f"{release.dataset}: download=True needs pooch: pip install 'lieattn[data]'") from error
    faults, receive = [], functools.partial(_receive, source)
    for address in source.addresses:
        for _ in range(_ATTEMPTS):
            try:
                return Path(pooch.retrieve(address, source.digest, source.name, staging, downloader=receive))
            except requests.exceptions.ChunkedEncodingError:
                faults.append(f"{address}: the connection was interrupted")
            except requests.exceptions.ConnectionError as error:
                if isinstance(error.args[0], urllib3.exceptions.ReadTimeoutError):  # within the content
                    faults.append(f"{address}: the connection was interrupted")
                    continue
                faults.append(f"{address}: no connection ({type(error).__name__})")
                break
            except (requests.exceptions.RequestException, ValueError) as error:  # no file, or a different file
                faults.append(f"{address}: {error}")
                break
        _log.warning("%s", faults[-1])
    raise ConnectionError(
        f"{release.dataset}: {source.name} could not be downloaded ({'; '.join(faults)}). Try again later, or put the "
        f"file into {staging.parent} yourself. {release.origin}"
    )


def _receive(source: Source, address: str, path: str, _: object) -> None:
    """Write the content of an address to a file, with a progress bar if it takes more than two seconds."""
    import pooch

    options = {"unit": "B", "unit_scale": True, "delay": 2.0, "leave": False, "disable": None}
    with _Limited(path, source.most) as file, tqdm(desc=source.name, total=source.most, **options) as bar:
        pooch.HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, timeout=_SECONDS)(address, file, None)


class _Limited(io.BufferedWriter):
    """A file that refuses more than a number of bytes."""

    def __init__(self, path: str, most: int) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._most = most

    def write(self, content: Any) -> int:
        """Write all of the content."""
        if self.tell() + len(content) > self._most:
            raise ValueError(f"the file has more than {self._most} bytes")
        return super().write(content)


def _packed(places: tuple[str, ...], *files: tuple[str, str, int], unpacked: int = 0) -> tuple[Source, ...]:
    """Return sources of ``.gz`` files at the same addresses, given as name, MD5 and size.

    They are stored unpacked if ``unpacked``, the largest unpacked size, is not 0.
    """
    return tuple(
        Source(
            f"{name}.gz",
            tuple(f"{place}/{name}.gz" for place in places),
            f"md5:{digest}",
            size,
            *(((name,), unpacked) if unpacked else ()),
        )
        for name, digest, size in files
    )


SOURCES: dict[str, tuple[Source, ...]] = {
    "MNIST": _packed(
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
    "Fashion-MNIST": _packed(
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        ("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        ("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        ("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        ("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
    "Rotated MNIST": (
        Source(
            "mnist_rotation_new.zip",
            (
                "http://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip",
                "https://zenodo.org/record/3670627/files/mnist_rotation_new.zip",
            ),
            "md5:0f9a947ff3d30e95cd685462cbf3b847",
            1 << 28,
        ),
    ),
    "CIFAR-10": (
        Source(
            "cifar-10-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            1 << 28,
            (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        ),
    ),
    "CIFAR-100": (
        Source(
            "cifar-100-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            1 << 28,
            ("train.bin", "test.bin"),
        ),
    ),
    "PatchCamelyon": _packed(
        ("https://zenodo.org/records/2546921/files", "https://zenodo.org/record/2546921/files"),
        ("camelyonpatch_level_2_split_train_x.h5", "1571f514728f59376b705fc836ff4b63", 6_421_353_462),
        ("camelyonpatch_level_2_split_train_y.h5", "35c2d7259d906cfc8143347bb8e05be7", 21_378),
        ("camelyonpatch_level_2_split_valid_x.h5", "d5b63470df7cfa627aeec8b9dc0c066e", 805_965_320),
        ("camelyonpatch_level_2_split_valid_y.h5", "2b85f58b927af9964a4c15b8f7e8f179", 3_038),
        ("camelyonpatch_level_2_split_test_x.h5", "d8c2d60d490dbd479f8199bdfa0cf6ec", 800_875_929),
        ("camelyonpatch_level_2_split_test_y.h5", "60a7035772fbdb7f34eb86d4420cf66a", 3_040),
        unpacked=1 << 33,
    ),
    "QM9": (
        Source(
            "gdb9.tar.gz",
            (
                "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/gdb9.tar.gz",
                "http://deepchem.io.s3-website-us-west-1.amazonaws.com/datasets/gdb9.tar.gz",
            ),
            "md5:560f62d8e6c992ca0cf8ed8d013f9131",
            1 << 28,
            ("gdb9.sdf", "gdb9.sdf.csv"),
        ),
        Source(
            "uncharacterized.txt",
            (
                "https://ndownloader.figshare.com/files/3195404",
                "https://figshare.com/ndownloader/files/3195404",
            ),
            "md5:a361887bacb427b8a0ce7903d92a53b4",
            486_752,
        ),
    ),
    "rMD17": (
        Source(
            "rmd17.tar.bz2",
            (
                "https://archive.materialscloud.org/records/pfffs-fff86/files/rmd17.tar.bz2",
                "https://figshare.com/ndownloader/files/23950376",
            ),
            "md5:cb1a927628d96f2e966025da4fb63d18",
            1_066_301_513,
            unpacked=1 << 32,
        ),
    ),
    "ModelNet10": (
        Source(
            "ModelNet10.zip",
            (
                "https://3dvision.princeton.edu/projects/2014/3DShapeNets/ModelNet10.zip",
                "https://3dshapenets.cs.princeton.edu/ModelNet10.zip",
            ),
            None,
            473_402_300,
        ),
    ),
    "ModelNet40": (Source("ModelNet40.zip", ("https://modelnet.cs.princeton.edu/ModelNet40.zip",), None, 1 << 32),),
}
"""The published files of each data set."""
