"""Digits and clothes: MNIST and the sets that are made of it or like it."""

import contextlib
import functools
import itertools
import math
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_arguments
from lieattn._core.messages import needs_extra
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import MOST_BYTES, Archive, Release
from lieattn_datasets._images import ImagePoints, NpzImages, OfficialImages, Read, read_npz_images
from lieattn_datasets._splits import SPLITS, SplitOrAll, half_of, stratified

_PREFIXES = {"train": "train", "test": "t10k"}
_NPZ = "mnist.npz"
_ARCHIVE = "mnist_rotation_new.zip"
_TABLES = {
    "train": "mnist_all_rotation_normalized_float_train_valid.amat",
    "test": "mnist_all_rotation_normalized_float_test.amat",
}
_LONGEST = 1 << 16  # characters of a row: 785 numbers of 16 are 12,560
_TRAIN, _TRAIN_AND_VALID = 10_000, 12_000

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
_ROTATED = Release(
    dataset="Rotated MNIST",
    origin=(
        f"The official files are {_TABLES['train']} (12,000 rows) and {_TABLES['test']} (50,000 rows), from "
        f"{_ARCHIVE} of 'Variations on the MNIST digits' (Larochelle, Erhan, Courville, Bergstra, Bengio, "
        "ICML 2007), which is read without unpacking it."
    ),
    digests={_ARCHIVE: "md5:0f9a947ff3d30e95cd685462cbf3b847"},
    folders=("mnist_rotation_new",),
    sources=SOURCES["Rotated MNIST"],
)
RECIPE = Release(
    dataset="Rotated MNIST, re-created",
    origin="The file is mnist_rot_recipe.npz, made from MNIST by the recipe in the documentation of the class.",
    digests={"mnist_rot_recipe.npz": "content:c9371844fb61275551fc51d79edcddbf38b3f39a7936652f1d235543813fe11d"},
)
FASHION900 = Release(
    dataset="Fashion-MNIST, 900 images",
    origin="The file is fashion_mnist_900.npz, 90 images per class in the order of the classes.",
    digests={"fashion_mnist_900.npz": "content:347bdeff1046c5f95c79eca2f2e3b5a97ca43c488d9c13fdd52cded202d102eb"},
)


class Digits(ImagePoints):
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8, 10 classes. No file is needed.

    The data set has no official split. This one is stratified, with a fixed seed: about 60 % of each class for
    training, 20 % for validation and 20 % for testing.

    Parameters
    ----------
    split
        ``"train"`` (1,078 images), ``"valid"`` (360), ``"test"`` (359) or ``"all"``.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card(
        "part of scikit-learn",
        "CC BY 4.0 (UCI)",
        "1,797 images, 8 x 8, one channel, values 0 .. 16 (scaled to [0, 1]), 10 classes",
    )

    def __init__(self, split: SplitOrAll = "train", *, transform: Transform | None = None) -> None:
        check_arguments(Digits.__init__, locals())
        with needs_extra("Digits", "data"):
            from sklearn.datasets import load_digits
        source = load_digits()
        images, labels = source.images.astype(np.uint8), source.target.astype(np.int64)
        super().__init__(images, labels, num_classes=10, peak=16, channels=1, transform=transform)
        if split != "all":
            self._indices = stratified(labels, (0.6, 0.2))[SPLITS.index(split)]


class _IdxImages(OfficialImages):
    """Images of 28 x 28 and ten classes, in two idx files per official half.

    torchvision unpacks these files and reads the sizes in their headers without a limit. This reader has limits.
    """

    _counts: ClassVar[dict[str, int]] = {"train": 60_000, "test": 10_000}
    _format = 10, 1

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        names = [f"{_PREFIXES[part]}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        if download:
            fetch(self._release, root, *names)
        path, label_path = (self._release.locate(root, name, f"{name}.gz") for name in names)
        images, labels = self._read_idx(path, (28, 28), verify), self._read_idx(label_path, (), verify)
        one_each = labels.shape == images.shape[:1] and labels.max(initial=0) <= 9
        problem = f"does not hold one label in 0 .. 9 for each of the {len(images)} images"
        self._release.require(one_each, label_path, problem)
        return path, images, labels

    def _read_idx(self, path: Path, shape: tuple[int, ...], verify: bool) -> NDArray[np.uint8]:
        """Read a file of unsigned bytes whose items have this shape.

        The format consists of two zero bytes, the type, the number of dimensions, each size as a big-endian 32-bit
        integer, and then the values, with the last dimension running fastest. No more bytes are read than the header
        promises.
        """
        magic, end = bytes([0, 0, 8, 1 + len(shape)]), 8 + 4 * len(shape)
        require = functools.partial(self._release.require, path=path)
        with self._release.open(path) as stream:
            header = stream.read(end)
            found = f"starts with the bytes {header[:4].hex() or '(none)'}, but an idx file of bytes with "
            whole = len(header) == end and header[:4] == magic
            require(whole, problem=f"{found}{1 + len(shape)} dimensions starts with {magic.hex()}")
            sizes = tuple(np.frombuffer(header, dtype=">u4", offset=4).tolist())
            expected = math.prod(sizes)
            found = f"promises {sizes[0]} items of shape {sizes[1:]}"
            right = sizes[1:] == shape and expected <= MOST_BYTES
            require(right, problem=f"{found}, expected uint8 of {shape} and at most {MOST_BYTES} bytes")
            values = stream.read(expected + 1)
        found = f"has {'more' if len(values) > expected else len(values)} bytes after its header"
        right = len(values) == expected
        require(right, problem=f"{found}, but the header promises {expected}: it is damaged")
        if verify:
            self._release.check_file(path)
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

    card = Card(
        '"The MNIST database of handwritten digits", Y. LeCun, C. Cortes, C. Burges',
        "CC BY-SA 3.0",
        "60,000 + 10,000 images, 28 x 28, one channel, uint8, 10 classes",
    )

    _release = _MNIST

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        name = f"{_PREFIXES[part]}-images-idx3-ubyte"
        if self._release.find(root, _NPZ) is None or self._release.find(root, name, f"{name}.gz"):
            return super()._read(root, part, verify, download)
        return read_npz_images(self._release, root, part, (28, 28), verify, _NPZ)


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

    card = Card(
        "H. Xiao, K. Rasul, R. Vollgraf, 2017, repository zalandoresearch/fashion-mnist",
        "MIT",
        "60,000 + 10,000 images, 28 x 28, one channel, uint8, 10 classes",
    )

    _release = _FASHION


class FashionMNIST900(NpzImages):
    """A subset of Fashion-MNIST: 900 images of 28 x 28, 90 of each of the 10 classes.

    It has no official split. This one is stratified, with a fixed seed: of each class, 60 images are for training, 10
    for validation and 20 for testing.

    Parameters
    ----------
    root
        Folder with ``fashion_mnist_900.npz``.
    split
        ``"train"`` (600), ``"valid"`` (100), ``"test"`` (200) or ``"all"``.
    verify
        Whether to compare the digest and the number of images. If False, any file in the same format is read.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card("Fashion-MNIST, 90 images per class", "MIT", "900 images, 28 x 28, one channel, uint8, 10 classes")

    _release, _counts, _format = FASHION900, {"": 900}, (10, 1)

    def __init__(
        self,
        root: str | Path,
        split: SplitOrAll = "train",
        *,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(FashionMNIST900.__init__, locals())
        self._load(root, "", verify, transform)
        if split != "all":
            self._indices = stratified(self._labels, (60 / 90, 10 / 90))[SPLITS.index(split)]


class RotatedMNIST(OfficialImages):
    """Rotated MNIST of Larochelle et al. (2007): 10,000 / 2,000 / 50,000 digits of 28 x 28.

    These are the files that the literature uses, in a text format that neither torchvision nor torch_geometric reads.
    The class :class:`~lieattn_datasets.RotatedMNISTRecipe` makes a similar data set from MNIST; results on the two must
    not be mixed.

    Each row of a file contains one image **column by column**, followed by its label; the loader transposes the
    images so that they are upright. Much published code reads the pixels row by row instead, and therefore trains and
    tests on mirrored digits. For weights from such code pass ``column_major=False``.

    Parameters
    ----------
    root
        Folder that contains ``mnist_rotation_new.zip`` or the two ``.amat`` files, directly or in its subfolder
        ``mnist_rotation_new``. The archive is preferred, since only the archive has a published digest. The shape and
        the values of the bare files are checked, but not their digests.
    split
        ``"train"`` (the first 10,000 rows of the first file), ``"valid"`` (its last 2,000), ``"train+valid"`` (both)
        or ``"test"``: the official split.
    column_major
        Whether a row contains the columns of the image, one after the other.
    download
        Whether to download the archive into the subfolder ``mnist_rotation_new`` of the root if the files are missing.
        Nothing is downloaded otherwise.
    verify
        Whether to compare the digest of the archive and the number of rows with the official files. If False, any files
        in the same format are read; 10/12 of the first file are used for training.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card(
        "H. Larochelle, D. Erhan, A. Courville, J. Bergstra, Y. Bengio",
        "none stated; derived from MNIST",
        "12,000 + 50,000 images, 28 x 28, one channel, intensities in [0, 1]",
    )

    _release, _format = _ROTATED, (10, 1)
    _counts: ClassVar[dict[str, int]] = {"train": _TRAIN_AND_VALID, "test": 50_000}

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "train+valid", "test"] = "train",
        *,
        column_major: bool = True,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(RotatedMNIST.__init__, locals())
        self._column_major = column_major
        self._load(root, half_of(split), verify, transform, download)
        if split in ("train", "valid"):
            first = len(self) * _TRAIN // _TRAIN_AND_VALID
            self._indices = self._indices[:first] if split == "train" else self._indices[first:]

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        if download and self._release.find(root, _TABLES[part]) is None:
            fetch(self._release, root, _ARCHIVE)
        path = self._release.find(root, _ARCHIVE) or self._release.locate(root, _TABLES[part])
        if verify:
            self._release.check_file(path)
        table = _read_table(path, _TABLES[part])
        images = table[:, :-1].reshape(-1, 28, 28)
        images = images.transpose(0, 2, 1) if self._column_major else images
        return path, np.ascontiguousarray(images), table[:, -1].astype(np.int64)


def _read_table(path: Path, member: str) -> NDArray[np.float32]:
    """Read a table from a file, or from the member of an archive, and check its values."""
    refuse, require = functools.partial(_ROTATED.damaged, path), functools.partial(_ROTATED.require, path=path)
    with contextlib.ExitStack() as stack:
        if path.suffix == ".zip":
            archive = stack.enter_context(Archive(path, refuse))
            name = next((name for name in archive.names if Path(name).name.lower() == member.lower()), "")
            require(name, problem=f"has no member {member}")
            stream = stack.enter_context(archive.open(name))
        else:
            stream = stack.enter_context(_ROTATED.open(path))
        # The length of lines is limited, so that a file without line breaks is not read into one string.
        lines = (line.decode("ascii") for line in iter(lambda: stream.readline(_LONGEST), b""))
        try:
            first = next(lines, "")
            table = np.loadtxt(itertools.chain([first], lines), dtype=np.float32, ndmin=2) if first.strip() else None
        except ValueError as error:
            raise refuse(f"is not a table of numbers ({error})") from error
    if table is None:
        raise refuse("is empty")
    pixels, labels = table[:, :-1], table[:, -1]
    width = table.shape[1]
    require(width == 785, problem=f"has {width} numbers per row, expected 784 intensities and a label")
    require(pixels.min() >= 0 and pixels.max() <= 1, problem="has intensities outside [0, 1]")
    require(np.isin(labels, np.arange(10)).all(), problem="has labels that are not in 0 .. 9")
    return table


class RotatedMNISTRecipe(NpzImages):
    """Rotated MNIST **re-created** from MNIST: 10,000 / 2,000 / 50,000 digits of 28 x 28.

    This is NOT the data set of Larochelle et al. (2007), which :class:`~lieattn_datasets.RotatedMNIST`
    reads. The sizes are the same, but the digits, the angles and the interpolation are not. Results are close to
    published ones but not comparable with them; say so in reports.

    Each digit is rotated about the center by one uniformly distributed angle, counter-clockwise as displayed, with
    cubic spline interpolation, zeros outside the image, and rounding to uint8. No digit is in two splits.

    Parameters
    ----------
    root
        Folder with ``mnist_rot_recipe.npz``.
    split
        ``"train"``, ``"valid"`` or ``"test"``, the splits of the file, or ``"train+valid"``.
    verify, transform
        As for :class:`FashionMNIST900`.
    """

    card = Card(
        "made from MNIST by the recipe in the class's documentation",
        "CC BY-SA 3.0 (derived from MNIST)",
        "10,000 / 2,000 / 50,000 images",
    )

    _release, _format = RECIPE, (10, 1)
    _counts: ClassVar[dict[str, int]] = {"train": 10_000, "valid": 2_000, "test": 50_000}

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "train+valid", "test"] = "train",
        *,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(RotatedMNISTRecipe.__init__, locals())
        self._load(root, split, verify, transform)
