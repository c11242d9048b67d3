"""MNIST and Fashion-MNIST, from files in idx format.

torchvision unpacks these files and reads the sizes in their headers without a limit. This reader has limits.
"""

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._archives import MOST_BYTES
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release
from lieattn_datasets._images import OfficialImages, Read

_PREFIXES = {"train": "train", "test": "t10k"}
_NPZ = "mnist.npz"

_MNIST = Release(
    dataset="MNIST",
    origin=(
        "The official files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
        "t10k-labels-idx1-ubyte (as they are or with .gz), from 'The MNIST database of handwritten digits' "
        "(LeCun, Cortes, Burges); mnist.npz with x_train, y_train, x_test, y_test is read as well."
    ),
    digests={
        "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
        _NPZ: "content:c7cd0d492e687fe684affee973c33a5242cca1e6bc6bf319f1f23bc43028c893",
    },
    folders=("MNIST/raw",),
    sources=SOURCES["MNIST"],
)
_FASHION = Release(
    dataset="Fashion-MNIST",
    origin=(
        "The official files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
        "t10k-labels-idx1-ubyte (as they are or with .gz), in the folder data/fashion of the repository "
        "zalandoresearch/fashion-mnist; those of MNIST have the same names."
    ),
    digests={
        "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
    },
    folders=("FashionMNIST/raw",),
    sources=SOURCES["Fashion-MNIST"],
)


class _IdxImages(OfficialImages):
    """Images of 28 x 28 and ten classes, in two idx files per official half."""

    _counts: ClassVar[dict[str, int]] = {"train": 60_000, "test": 10_000}
    _format = 10, 1

    def _read(self, root: str | Path, half: str, download: bool, verify: bool) -> Read:
        names = [f"{_PREFIXES[half]}-{part}-ubyte" for part in ("images-idx3", "labels-idx1")]
        if download:
            fetch(self._release, root, *names)
        path, label_path = (self._release.locate(root, name, f"{name}.gz") for name in names)
        images, labels = self._read_idx(path, (28, 28), verify), self._read_idx(label_path, (), verify)
        if labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
            problem = f"does not hold one label in 0 .. 9 for each of the {len(images)} images"
            raise self._release.damaged(label_path, problem)
        return path, images, labels

    def _read_idx(self, path: Path, shape: tuple[int, ...], verify: bool) -> NDArray[np.uint8]:
        """Read a file of unsigned bytes whose items have this shape.

        The format consists of two zero bytes, the type, the number of dimensions, each size as a big-endian 32-bit
        integer, and then the values, with the last dimension running fastest. No more bytes are read than the header
        promises.
        """
        magic, end = bytes([0, 0, 8, 1 + len(shape)]), 8 + 4 * len(shape)
        with self._release.open(path) as stream:
            header = stream.read(end)
            if len(header) < end or header[:4] != magic:
                problem = f"starts with the bytes {header[:4].hex() or '(none)'}, but an idx file of bytes with "
                raise self._release.damaged(path, f"{problem}{1 + len(shape)} dimensions starts with {magic.hex()}")
            sizes = tuple(np.frombuffer(header, dtype=">u4", offset=4).tolist())
            expected = math.prod(sizes)
            if sizes[1:] != shape or expected > MOST_BYTES:
                found = f"{sizes[0]} items of shape {sizes[1:]}"
                problem = f"promises {found}, expected uint8 of {shape} and at most {MOST_BYTES} bytes"
                raise self._release.damaged(path, problem)
            values = stream.read(expected + 1)
        if len(values) != expected:
            found = f"{'more' if len(values) > expected else len(values)} bytes after its header"
            raise self._release.damaged(path, f"has {found}, but the header promises {expected}: it is damaged")
        if verify:
            self._release.check_content(path, header + values)
        return np.frombuffer(values, dtype=np.uint8).reshape(sizes)


class MNIST(_IdxImages):
    """MNIST: 60,000 + 10,000 handwritten digits of 28 x 28, from the official idx files.

    Parameters
    ----------
    root
        Folder that contains the four official files (plain or ``.gz``), directly or in its subfolder ``MNIST/raw``; or
        ``mnist.npz`` with the same images in the same order, which is used if there are no idx files.
    split
        ``"train"``, ``"test"`` (the official halves) or ``"valid"``.
    validation
        Number of the 60,000 training images that are set aside as ``"valid"``, by a permutation with a fixed seed;
        ``"train"`` contains the others. Give the same number for both splits.
    download
        Whether to download missing files of the half into the subfolder ``MNIST/raw`` of the root. Nothing is
        downloaded otherwise.
    verify
        Whether to compare digests and the number of images with the official files. If False, any files in the same
        format are read; shapes and ranges are checked in any case.
    transform
        Function that is applied to each new ``Data``.
    """

    _release = _MNIST

    def _read(self, root: str | Path, half: str, download: bool, verify: bool) -> Read:
        name = f"{_PREFIXES[half]}-images-idx3-ubyte"
        archive = self._release.find(root, _NPZ)
        if archive is None or self._release.find(root, name, f"{name}.gz"):
            return super()._read(root, half, download, verify)
        if verify:
            self._release.check_file(archive)
        expected = {f"x_{half}": "uint8 [images, 28, 28]", f"y_{half}": "integer [images]"}
        images, labels = self._release.read_npz(archive, expected)
        return archive, images, self._release.check_indices(archive, f"y_{half}", labels, 10)


class FashionMNIST(_IdxImages):
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes of 28 x 28, from the official idx files.

    The files have the same names as those of MNIST; the digests distinguish them.

    Parameters
    ----------
    root
        Folder that contains the four official files (plain or ``.gz``), directly or in its subfolder
        ``FashionMNIST/raw``.
    split, validation, download, verify, transform
        As for :class:`MNIST`; files are downloaded into ``FashionMNIST/raw``.
    """

    _release = _FASHION
