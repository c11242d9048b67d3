"""CIFAR-10 and CIFAR-100, from the official binary version."""

from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release
from lieattn_datasets._images import OfficialImages, Read

_PIXELS = 3 * 32 * 32
_CIFAR10 = Release(
    dataset="CIFAR-10",
    origin=(
        "The official files are data_batch_1.bin .. data_batch_5.bin and test_batch.bin, unpacked from "
        "cifar-10-binary.tar.gz ('CIFAR-10 binary version', A. Krizhevsky)."
    ),
    folders=("cifar-10-batches-bin",),
    sources=SOURCES["CIFAR-10"],
)
_CIFAR100 = Release(
    dataset="CIFAR-100",
    origin=(
        "The official files are train.bin and test.bin, unpacked from cifar-100-binary.tar.gz "
        "('CIFAR-100 binary version', A. Krizhevsky)."
    ),
    folders=("cifar-100-binary",),
    sources=SOURCES["CIFAR-100"],
)


class CIFAR10(OfficialImages):
    """CIFAR-10: 50,000 + 10,000 color photographs of 32 x 32, 10 classes, from the binary version.

    The Python version of the same images consists of pickles, which can run code, and is not read.

    Parameters
    ----------
    root
        Folder that contains ``data_batch_1.bin`` .. ``data_batch_5.bin`` and ``test_batch.bin``, directly or in its
        subfolder ``cifar-10-batches-bin``.
    split
        ``"train"``, ``"test"`` (the official halves) or ``"valid"``.
    validation
        Number of the 50,000 training images that are set aside as ``"valid"``, by a permutation with a fixed seed;
        ``"train"`` contains the others. ``validation=10_000`` for both splits gives the usual
        40,000 / 10,000 / 10,000.
    download
        Whether to download the archive if files of the half are missing, compare its digest, and unpack it into the
        subfolder ``cifar-10-batches-bin`` of the root. Nothing is downloaded otherwise.
    verify
        Whether the number of images must be that of the official files, with equally many of each class. (Only the
        archive has a published digest.) If False, any files in the same format are read.
    transform
        Function that is applied to each new ``Data``.
    """

    _release, _counts = _CIFAR10, {"train": 50_000, "test": 10_000}
    _format = 10, 3
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    }

    def _read(self, root: str | Path, half: str, download: bool, verify: bool) -> Read:
        if download:
            fetch(self._release, root, *self._batches[half])
        paths = [self._release.locate(root, name) for name in self._batches[half]]
        rows = np.concatenate([self._rows(path) for path in paths])
        labels, classes = rows[:, -1 - _PIXELS], self._format[0]
        if verify and len(rows) == self._counts[half] and np.ptp(np.bincount(labels, minlength=classes)):
            raise self._release.damaged(paths[-1].parent, "does not hold equally many images of each class")
        # The red, the green and the blue plane follow the label, each of them row by row.
        images = rows[:, -_PIXELS:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return paths[-1].parent, np.ascontiguousarray(images), labels

    def _rows(self, path: Path) -> NDArray[np.uint8]:
        """Return the images of a file, ``[images, labels + 3072]``. The last label is the one that is used."""
        with self._release.open(path) as stream:
            content = stream.read()
        classes = self._format[0]
        size = _PIXELS + (1 if classes == 10 else 2)
        if not content or len(content) % size:
            raise self._release.damaged(path, f"has {len(content)} bytes, expected a multiple of {size}, one row each")
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
        if rows[:, -1 - _PIXELS].max() >= classes:
            problem = f"has labels up to {rows[:, -1 - _PIXELS].max()}, expected 0 .. {classes - 1}"
            raise self._release.damaged(path, problem)
        return rows


class CIFAR100(CIFAR10):
    """CIFAR-100: 50,000 + 10,000 color photographs of 32 x 32, 100 fine classes.

    Parameters
    ----------
    root
        Folder that contains ``train.bin`` and ``test.bin``, directly or in its subfolder ``cifar-100-binary``.
    split, validation, download, verify, transform
        As for :class:`CIFAR10`; files are downloaded into ``cifar-100-binary``.
    """

    _release = _CIFAR100
    _format = 100, 3
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train.bin",), "test": ("test.bin",)}
