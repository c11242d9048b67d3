"""Download of published files with pooch, on request: their addresses and digests."""

import gzip
import logging
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from tqdm import tqdm

from lieattn._core.messages import needs_extra
from lieattn_datasets._files import Archive, Release, Source

_STAGING = ".download-"  # start of the name of a folder beside the files, which holds incomplete downloads
_SECONDS = 30.0  # without an answer until a connection counts as interrupted
_ATTEMPTS = 2  # at each address, since connections can be interrupted

_log = logging.getLogger(__name__)


def fetch(release: Release, root: str | Path, *wanted: str) -> None:
    """Download the files of a release that are missing under the root. Existing files are not changed.

    Files are stored in the first of the release's folders. A file gets its name after it is complete and its digest is
    checked, so an interrupted download leaves no file that a loader would read. OSError is raised if no address
    provides the published file, or it cannot be written.
    """
    folder = Path(root, *release.folders[:1])
    for source in release.sources:
        names = [name for name in source.members or (source.name,) if _missing(release, root, name)]
        if any(name.removesuffix(".gz") in wanted for name in names):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=_STAGING, dir=folder) as staging:
                    _store(release, source, _retrieve(release, source, Path(staging)), folder, names)
            except ConnectionError:
                raise
            except OSError as error:
                problem = f"{source.name} cannot be written into {folder} ({error.strerror or error})"
                advice = "free some space there, make it writable, or use another root"
                raise OSError(error.errno, f"{release.dataset}: {problem}: {advice}") from error


def _missing(release: Release, root: str | Path, name: str) -> bool:
    """Return whether a file is missing, both as published and unpacked."""
    return release.find(root, name, name.removesuffix(".gz")) is None


def _retrieve(release: Release, source: Source, staging: Path) -> Path:
    """Download a file from the first address that provides the published file."""
    with needs_extra(f"{release.dataset}: download=True", "data"):
        import pooch
        import requests
    faults: dict[str, str] = {}
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": 2.0, "leave": False, "disable": None}
    for address in source.addresses * _ATTEMPTS:
        try:
            with tqdm(desc=source.name, total=1, **options) as bar:  # pooch sets the total
                receive = pooch.HTTPDownloader(progressbar=bar, timeout=_SECONDS)
                return Path(pooch.retrieve(address, source.digest, source.name, staging, downloader=receive))
        except (requests.exceptions.RequestException, ValueError) as error:  # no file, or a different file
            faults[address] = str(error)
            _log.warning("%s: %s", address, error)
    raise ConnectionError(
        f"{release.dataset}: {source.name} could not be downloaded "
        f"({'; '.join(f'{address}: {error}' for address, error in faults.items())}). Try again later, or put the file "
        f"into {staging.parent} yourself. {release.origin}"
    )


def _store(release: Release, source: Source, file: Path, folder: Path, names: Collection[str]) -> None:
    """Move a downloaded file to its folder, or unpack these files of it there."""
    for name, stream in unpack(file, names) if source.members else ():
        unpacked = file.with_name(f"unpacked {name}")
        with unpacked.open("wb") as target:
            shutil.copyfileobj(stream, target)
        unpacked.replace(folder / name)
    if source.members:
        return
    if source.digest is None and file.suffix == ".zip":  # without a digest it could be an error page of a server
        with Archive(file, partial(release.damaged, file)):
            pass
    file.chmod(folder.stat().st_mode & 0o666)  # only the owner can read pooch's temporary files
    file.replace(folder / source.name)


def unpack(path: Path, names: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the files with these names of a tar archive, or the single file of a ``.gz``, for reading.

    Its digest must have been checked: neither damage nor the unpacked size is expected. Folders and links are skipped,
    and no path of the archive is used, which is why pooch's own ``Untar`` is not.
    """
    if not path.with_suffix("").suffix == ".tar":
        with gzip.open(path) as stream:
            for name in names:
                yield name, cast(IO[bytes], stream)
        return
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            content = archive.extractfile(member) if member.isfile() and name in names else None
            if content is not None:
                yield name, content


def _packed(places: tuple[str, ...], *files: tuple[str, str], unpacked: bool = False) -> tuple[Source, ...]:
    """Return sources of ``.gz`` files at the same addresses, given as name and MD5."""
    return tuple(
        Source(
            f"{name}.gz",
            tuple(f"{place}/{name}.gz" for place in places),
            f"md5:{digest}",
            (name,) if unpacked else (),
        )
        for name, digest in files
    )


SOURCES: dict[str, tuple[Source, ...]] = {
    "MNIST": _packed(
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
        ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
        ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "Fashion-MNIST": _packed(
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        ("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "Rotated MNIST": (
        Source(
            "mnist_rotation_new.zip",
            (
                "http://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip",
                "https://zenodo.org/record/3670627/files/mnist_rotation_new.zip",
            ),
            "md5:0f9a947ff3d30e95cd685462cbf3b847",
        ),
    ),
    "CIFAR-10": (
        Source(
            "cifar-10-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        ),
    ),
    "CIFAR-100": (
        Source(
            "cifar-100-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            ("train.bin", "test.bin"),
        ),
    ),
    "PatchCamelyon": _packed(
        ("https://zenodo.org/records/2546921/files", "https://zenodo.org/record/2546921/files"),
        ("camelyonpatch_level_2_split_train_x.h5", "1571f514728f59376b705fc836ff4b63"),
        ("camelyonpatch_level_2_split_train_y.h5", "35c2d7259d906cfc8143347bb8e05be7"),
        ("camelyonpatch_level_2_split_valid_x.h5", "d5b63470df7cfa627aeec8b9dc0c066e"),
        ("camelyonpatch_level_2_split_valid_y.h5", "2b85f58b927af9964a4c15b8f7e8f179"),
        ("camelyonpatch_level_2_split_test_x.h5", "d8c2d60d490dbd479f8199bdfa0cf6ec"),
        ("camelyonpatch_level_2_split_test_y.h5", "60a7035772fbdb7f34eb86d4420cf66a"),
        unpacked=True,
    ),
    "QM9": (
        Source(
            "gdb9.tar.gz",
            (
                "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/gdb9.tar.gz",
                "http://deepchem.io.s3-website-us-west-1.amazonaws.com/datasets/gdb9.tar.gz",
            ),
            "md5:560f62d8e6c992ca0cf8ed8d013f9131",
            ("gdb9.sdf", "gdb9.sdf.csv"),
        ),
        Source(
            "uncharacterized.txt",
            (
                "https://ndownloader.figshare.com/files/3195404",
                "https://figshare.com/ndownloader/files/3195404",
            ),
            "md5:a361887bacb427b8a0ce7903d92a53b4",
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
        ),
    ),
    "ModelNet40": (Source("ModelNet40.zip", ("https://modelnet.cs.princeton.edu/ModelNet40.zip",), None),),
}
"""The published files of each data set."""
