"""MNIST and Fashion-MNIST, from files in idx format.

torchvision unpacks these files and reads the sizes in their headers without a limit. This reader has limits.
"""

import math
import struct
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._archives import MOST_BYTES
from lieattn_datasets._checks import check_arguments
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._images import ImagePoints, Transform
from lieattn_datasets._splits import hold_out
from lieattn_datasets._streams import SPLITS

_UNSIGNED_BYTE = 0x08
_COUNTS = {"train": 60_000, "test": 10_000}
_PREFIXES = {"train": "train", "test": "t10k"}
_NPZ = "mnist.npz"

_Loaded = tuple[Path, Path, NDArray[Any], NDArray[Any]]  # paths of images and labels, images, labels

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


class _IdxImages(ImagePoints):
    """Images of 28 x 28 and ten classes, in two idx files per official half."""

    _release: ClassVar[Release]

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
        check_arguments(_IdxImages.__init__, locals())
        check_choice("split", split, SPLITS)
        half = "test" if split == "test" else "train"
        path, label_path, images, labels = self._load(root, half, download, verify)
        if labels.shape != images.shape[:1] or not np.isin(labels, np.arange(10)).all():
            problem = f"does not hold one label in 0 .. 9 for each of the {len(images)} images"
            raise self._release.damaged(label_path, problem)
        if verify:
            check_count(self._release, path, len(images), _COUNTS[half])
        super().__init__(images, labels, num_classes=10, channels=1, transform=transform)
        if half == "train":
            self._indices = hold_out(len(images), validation, split)

    def _load(self, root: str | Path, half: str, download: bool, verify: bool) -> _Loaded:
        images = f"{_PREFIXES[half]}-images-idx3-ubyte"
        labels = f"{_PREFIXES[half]}-labels-idx1-ubyte"
        if download:
            fetch(self._release, root, images, labels)
        path = self._release.locate(root, images, f"{images}.gz")
        label_path = self._release.locate(root, labels, f"{labels}.gz")
        return path, label_path, self._read(path, (28, 28), verify), self._read(label_path, (), verify)

    def _read(self, path: Path, shape: tuple[int, ...], verify: bool) -> NDArray[np.uint8]:
        with self._release.open(path) as stream:
            content, array = read_idx(stream, shape, path, self._release)
        if verify:
            self._release.check_content(path, content)
        return array


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

    def _load(self, root: str | Path, half: str, download: bool, verify: bool) -> _Loaded:
        name = f"{_PREFIXES[half]}-images-idx3-ubyte"
        archive = self._release.find(root, _NPZ)
        if archive is None or self._release.find(root, name, f"{name}.gz"):
            return super()._load(root, half, download, verify)
        if verify:
            self._release.check_file(archive)
        expected = {f"x_{half}": "uint8 [images, 28, 28]", f"y_{half}": "integer [images]"}
        images, labels = self._release.read_npz(archive, expected)
        return archive, archive, images, labels


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


def read_idx(
    stream: IO[bytes], shape: tuple[int, ...], path: Path, release: Release
) -> tuple[bytes, NDArray[np.uint8]]:
    """Read an idx file of unsigned bytes whose items have the given shape; return its content and the array.

    The format consists of two zero bytes, the type, the number of dimensions, each size as a big-endian 32-bit
    integer, and then the values, with the last dimension running fastest.
    """
    dimensions = 1 + len(shape)
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions or header[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]):
        raise release.damaged(
            path,
            f"starts with the bytes {header[:4].hex() or '(none)'}, "
            f"but an idx{dimensions} file of bytes starts with 000008{dimensions:02x}",
        )
    sizes = struct.unpack(f">{dimensions}I", header[4:])
    expected = math.prod(sizes)
    if sizes[1:] != shape or expected > MOST_BYTES:
        found = f"{sizes[0]} items of shape {sizes[1:]}"
        raise release.damaged(path, f"promises {found}, expected uint8 of {shape} and at most {MOST_BYTES} bytes")
    values = stream.read(expected + 1)
    if len(values) != expected:
        found = f"{'more' if len(values) > expected else len(values)} bytes after its header"
        raise release.damaged(path, f"has {found}, but the header promises {expected}: it is truncated or damaged")
    return header + values, np.frombuffer(values, dtype=np.uint8).reshape(sizes)
