"""Small image sets: the digits of scikit-learn, and ``.npz`` archives made from published data sets."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._images import ImagePoints, Transform
from lieattn_datasets._splits import hold_out, stratified
from lieattn_datasets._streams import SPLITS

_ROTATED = Release(
    dataset="Rotated MNIST, re-created",
    origin="The file is mnist_rot_recipe.npz, made from MNIST by the recipe in the documentation of the class.",
    digests={"mnist_rot_recipe.npz": "content:c9371844fb61275551fc51d79edcddbf38b3f39a7936652f1d235543813fe11d"},
)
_FASHION = Release(
    dataset="Fashion-MNIST, 900 images",
    origin="The file is fashion_mnist_900.npz, 90 images per class in the order of the classes.",
    digests={"fashion_mnist_900.npz": "content:347bdeff1046c5f95c79eca2f2e3b5a97ca43c488d9c13fdd52cded202d102eb"},
)
_CIFAR = Release(
    dataset="CIFAR-10, 3,000 images",
    origin="The file is cifar10_subset.npz, the first 2,000 training and 1,000 test images of CIFAR-10.",
    digests={"cifar10_subset.npz": "content:3dbf072b05462d86e95725a7ce51af19c80c04ca22b628dfe07e77981b7411bd"},
)
_DIGITS = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"  # SHA-256


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

    def __init__(
        self,
        split: Literal["train", "valid", "test", "all"] = "train",
        *,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(Digits.__init__, locals())
        check_choice("split", split, ("train", "valid", "test", "all"))
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("Digits needs scikit-learn: pip install 'lieattn[data]'") from error
        source = load_digits()
        images = source.images.astype(np.uint8)
        labels = source.target.astype(np.int64)
        digest = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
        if images.shape != (1797, 8, 8) or digest != _DIGITS:
            raise ValueError(
                f"scikit-learn's digits have shape {images.shape} and SHA-256 {digest}, expected "
                f"(1797, 8, 8) and {_DIGITS}: reinstall scikit-learn"
            )
        super().__init__(images, labels, num_classes=10, peak=16, channels=1, transform=transform)
        if split != "all":
            parts = stratified(labels, (0.6, 0.2))
            self._indices = parts[SPLITS.index(split)]


class RotatedMNISTRecipe(ImagePoints):
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
    verify
        Whether to compare the digest and the number of images. If False, any file in the same format is read.
    transform
        Function that is applied to each new ``Data``.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "train+valid", "test"] = "train",
        *,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(RotatedMNISTRecipe.__init__, locals())
        check_choice("split", split, ("train", "valid", "train+valid", "test"))
        counts = {"train": 10_000, "valid": 2_000, "test": 50_000}
        parts = [
            _read(_ROTATED, root, f"x_{part}", f"y_{part}", "28, 28", counts[part] if verify else None)
            for part in split.split("+")
        ]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        super().__init__(images, labels, num_classes=10, channels=1, transform=transform)


class FashionMNIST900(ImagePoints):
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

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "test", "all"] = "train",
        *,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(FashionMNIST900.__init__, locals())
        check_choice("split", split, ("train", "valid", "test", "all"))
        images, labels = _read(_FASHION, root, "x", "y", "28, 28", 900 if verify else None)
        super().__init__(images, labels, num_classes=10, channels=1, transform=transform)
        if split != "all":
            parts = stratified(labels, (60 / 90, 10 / 90))
            self._indices = parts[SPLITS.index(split)]


class CIFAR10Subset(ImagePoints):
    """A subset of CIFAR-10: its first 2,000 training and first 1,000 test images, 32 x 32 in color.

    Parameters
    ----------
    root
        Folder with ``cifar10_subset.npz``.
    split
        ``"train"``, ``"test"`` (as in CIFAR-10) or ``"valid"``.
    validation
        Number of the 2,000 training images that are set aside as ``"valid"``, by a permutation with a fixed seed;
        ``"train"`` contains the others. Give the same number for both splits.
    verify
        Whether to compare the digest and the number of images. If False, any file in the same format is read.
    transform
        Function that is applied to each new ``Data``.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "test"] = "train",
        *,
        validation: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(CIFAR10Subset.__init__, locals())
        check_choice("split", split, SPLITS)
        half = "test" if split == "test" else "train"
        count = {"train": 2_000, "test": 1_000}[half] if verify else None
        images, labels = _read(_CIFAR, root, f"x_{half}", f"y_{half}", "32, 32, 3", count)
        super().__init__(images, labels, num_classes=10, channels=3, transform=transform)
        if half == "train":
            self._indices = hold_out(len(images), validation, split)


def _read(
    release: Release,
    root: str | Path,
    images_key: str,
    labels_key: str,
    shape: str,
    count: int | None,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read and check images and labels of ten classes, including the digest if a count is given."""
    path = release.locate(root, *release.digests, verify=count is not None)
    expected = {images_key: f"uint8 [images, {shape}]", labels_key: "integer [images]"}
    images, labels = release.read_npz(path, expected)
    if not len(images):
        raise release.damaged(path, f"has no images in {images_key}")
    if count is not None:
        check_count(release, path, len(images), count)
    return images, release.check_indices(path, labels_key, labels, 10)
