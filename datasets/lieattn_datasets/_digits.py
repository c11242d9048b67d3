"""The handwritten digits of 8 x 8 pixels that are part of scikit-learn."""

import hashlib
from typing import Literal

import numpy as np

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._files import check_choice
from lieattn_datasets._images import ImagePoints, Transform
from lieattn_datasets._splits import stratified
from lieattn_datasets._streams import SPLITS

_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


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
        if images.shape != (1797, 8, 8) or digest != _SHA256:
            raise ValueError(
                f"scikit-learn's digits have shape {images.shape} and SHA-256 {digest}, expected "
                f"(1797, 8, 8) and {_SHA256}: reinstall scikit-learn"
            )
        super().__init__(images, labels, num_classes=10, peak=16, channels=1, transform=transform)
        if split != "all":
            parts = stratified(labels, (0.6, 0.2))
            self._indices = parts[SPLITS.index(split)]
