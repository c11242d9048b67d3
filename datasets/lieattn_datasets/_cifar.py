"""CIFAR-10 and CIFAR-100, from the official Python batches.

torchvision unpickles the batches, which can run code in them. This module reads them as data.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._images import ImagePoints, Transform
from lieattn_datasets._pickles import ForbiddenError, read_pickle
from lieattn_datasets._splits import hold_out
from lieattn_datasets._streams import SPLITS

_COUNTS = {"train": 50_000, "test": 10_000}
_SHOWN = 200  # characters of a problem in a message

_CIFAR10 = Release(
    dataset="CIFAR-10",
    origin=(
        "The official files are data_batch_1 .. data_batch_5 and test_batch, unpacked from "
        "cifar-10-python.tar.gz ('CIFAR-10 python version', A. Krizhevsky)."
    ),
    digests={
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    },
    folders=("cifar-10-batches-py",),
    sources=SOURCES["CIFAR-10"],
)
_CIFAR100 = Release(
    dataset="CIFAR-100",
    origin=(
        "The official files are train and test, unpacked from cifar-100-python.tar.gz "
        "('CIFAR-100 python version', A. Krizhevsky)."
    ),
    digests={
        "train": "md5:16019d7e3df5f24257cddd939b257f8d",
        "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
    folders=("cifar-100-python",),
    sources=SOURCES["CIFAR-100"],
)


class _CifarImages(ImagePoints):
    """Pickled batches of 32 x 32 color images."""

    _release: ClassVar[Release]
    _batches: ClassVar[dict[str, tuple[str, ...]]]
    _label_key: ClassVar[str]
    _classes: ClassVar[int]

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "test"] = "train",
        *,
        validation: int = 0,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(_CifarImages.__init__, locals())
        check_choice("split", split, SPLITS)
        half = "test" if split == "test" else "train"
        if download:
            fetch(self._release, root, *self._batches[half])
        paths = [self._release.locate(root, name) for name in self._batches[half]]
        batches = [self._read(path, verify) for path in paths]
        images = np.concatenate([batch for batch, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        if verify:
            check_count(self._release, paths[-1].parent, len(images), _COUNTS[half])
        super().__init__(images, labels, num_classes=self._classes, channels=3, transform=transform)
        if half == "train":
            self._indices = hold_out(len(images), validation, split)

    def _read(self, path: Path, verify: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        with self._release.open(path) as stream:
            content = stream.read()
        if verify:
            self._release.check_content(path, content)
        batch = load_batch(content, path, self._release)
        table, labels = batch.get("data"), batch.get(self._label_key)
        if table is None or labels is None:
            problem = f"has the keys {str(sorted(batch))[:_SHOWN]}, expected 'data' and {self._label_key!r}"
            raise self._release.damaged(path, problem)
        if not isinstance(table, np.ndarray) or table.dtype != np.uint8 or table.shape[1:] != (3072,):
            found = f"{table.dtype} {table.shape}" if isinstance(table, np.ndarray) else type(table).__name__
            raise self._release.damaged(path, f"has data of {found}, expected uint8 [images, 3072]")
        valid = isinstance(labels, list) and all(type(y) is int and 0 <= y < self._classes for y in labels)
        if not valid or len(labels) != len(table):
            expected = f"{len(table)} integers in 0 .. {self._classes - 1}"
            raise self._release.damaged(path, f"has labels that are not {expected}")
        # each row contains the red, the green and the blue plane, each of them row by row
        images = np.ascontiguousarray(table.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return images, np.asarray(labels, dtype=np.int64)


class CIFAR10(_CifarImages):
    """CIFAR-10: 50,000 + 10,000 color photographs of 32 x 32, 10 classes, from the Python batches.

    The batches are pickles. They are read as data, by a reader that supports only byte arrays and plain containers.
    It refuses files with any other object and never runs code from a file.

    Parameters
    ----------
    root
        Folder that contains ``data_batch_1`` .. ``data_batch_5`` and ``test_batch``, directly or in its subfolder
        ``cifar-10-batches-py``.
    split
        ``"train"``, ``"test"`` (the official halves) or ``"valid"``.
    validation
        Number of the 50,000 training images that are set aside as ``"valid"``, by a permutation with a fixed seed;
        ``"train"`` contains the others. ``validation=10_000`` for both splits gives the usual
        40,000 / 10,000 / 10,000.
    download
        Whether to download the archive if files of the half are missing, and unpack it into the subfolder
        ``cifar-10-batches-py`` of the root. Nothing is downloaded otherwise.
    verify
        Whether to compare digests and the number of images with the official files. If False, any files in the same
        format are read; shapes and ranges are checked in any case.
    transform
        Function that is applied to each new ``Data``.
    """

    _release = _CIFAR10
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test": ("test_batch",),
    }
    _label_key = "labels"
    _classes = 10


class CIFAR100(_CifarImages):
    """CIFAR-100: 50,000 + 10,000 color photographs of 32 x 32, 100 fine classes.

    Parameters
    ----------
    root
        Folder that contains ``train`` and ``test``, directly or in its subfolder ``cifar-100-python``.
    split, validation, download, verify, transform
        As for :class:`CIFAR10`; files are downloaded into ``cifar-100-python``.
    """

    _release = _CIFAR100
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train",), "test": ("test",)}
    _label_key = "fine_labels"
    _classes = 100


def load_batch(content: bytes, path: Path, release: Release) -> dict[Any, Any]:
    """Read a pickled dictionary of arrays, lists, numbers and strings, without running any code in it."""
    try:
        batch = read_pickle(content)
    except ForbiddenError as error:
        raise release.damaged(path, f"is not a CIFAR batch and was not loaded: it asks for {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        problem = f"is not a complete pickle ({type(error).__name__}: {str(error)[:_SHOWN]})"
        raise release.damaged(path, problem) from error
    if not isinstance(batch, dict):
        raise release.damaged(path, f"holds a {type(batch).__name__}, expected a dictionary")
    return batch
