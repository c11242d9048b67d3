"""Labeled images that are converted to point sets on access."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn_datasets._arrays import class_array
from lieattn_datasets._checks import check_arguments
from lieattn_datasets._clouds import Clouds, Transform
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._grid import CHUNK, ImageArray, check_images, check_layout, image_array, make_data
from lieattn_datasets._splits import hold_out
from lieattn_datasets._streams import SPLITS

__all__ = ["ImagePoints", "OfficialImages", "Read", "Transform"]

Read = tuple[Path, NDArray[Any], NDArray[Any]]  # where the images come from, the images, their labels


class ImagePoints(Clouds):
    """Labeled images, each converted to a point set on access.

    The images are kept in their original form (uint8 stays uint8). All images of one size share the tensor ``pos``, so
    do not write to it. The data set works with ``torch_geometric.loader.DataLoader`` and can be pickled. Methods never
    change it: :meth:`subset` and :meth:`with_transform` return views of the same images.

    Parameters
    ----------
    images
        Intensities ``[images, height, width]`` or ``[images, height, width, channels]``, the top row first, uint8,
        uint16 or floating: an array, a tensor, a list of images, or a file that is indexed like an array. Nested lists
        of integers are read as uint8.
    labels
        Class of each image, integers ``[images]`` in ``0 .. num_classes - 1``.
    num_classes
        Number of classes. Default: the largest label plus one.
    peak
        The value that becomes intensity 1. Default: 255 for uint8, 65,535 for uint16, 1 for floating types.
    channels
        Number of channels, the last axis, or 1 without that axis. It must be given if the order of the axes is not
        clear from their sizes: with more than four channels, or for gray images that are as many as they are wide, or
        not wider than four.
    transform
        Function that is applied to each new ``Data``, for example :class:`~lieattn_datasets.RotatePoints`.

    Attributes
    ----------
    num_classes : int
    num_channels : int
    image_shape : tuple[int, int]
        (height, width).

    Examples
    --------
    >>> import numpy as np
    >>> images = np.zeros((3, 2, 5), dtype=np.uint8)
    >>> dataset = ImagePoints(images, [0, 1, 1])
    >>> dataset[0]
    Data(x=[10, 1], pos=[10, 2], grid=[1, 2], y=[1])
    >>> len(dataset.subset([0, 2])), dataset.num_classes, dataset.image_shape
    (2, 2, (2, 5))
    """

    def __init__(
        self,
        images: ImageArray | ArrayLike,
        labels: ArrayLike,
        *,
        num_classes: int | None = None,
        peak: float | None = None,
        channels: int | None = None,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ImagePoints.__init__, locals())
        listed = isinstance(images, Tensor | Sequence | np.ma.MaskedArray)
        images = image_array("images", cast(ArrayLike, images)) if listed else cast(ImageArray, images)
        if not hasattr(images, "shape") or not hasattr(images, "dtype"):
            raise TypeError(
                f"images: expected an array, or an object that is indexed like one, got {type(images).__name__}"
            )
        shape = tuple(images.shape)
        if len(shape) not in (3, 4) or 0 in shape[1:]:
            raise ValueError(
                "images: expected [images, height, width] or [images, height, width, channels] with no size of zero, "
                f"got {list(shape)}"
            )
        check_layout("images", shape, channels, "images")
        classes = class_array("labels", labels)
        if classes.shape != shape[:1]:
            axis = shape.index(len(classes)) if classes.ndim == 1 and len(classes) in shape else 0
            order = f"; if axis {axis} counts the images, use np.moveaxis(images, {axis}, 0)" if axis else ""
            raise ValueError(f"labels: expected one per image, [{shape[0]}], got {list(classes.shape)}{order}")
        count = int(classes.max(initial=-1)) + 1
        self.num_classes = count if num_classes is None else num_classes
        if classes.size and (int(classes.min()) < 0 or count > self.num_classes):
            raise ValueError(
                f"labels: expected integers in 0 .. {self.num_classes - 1} (num_classes - 1), got "
                f"{classes.min()} .. {classes.max()}"
            )
        self.image_shape = (shape[1], shape[2])
        self.num_channels = shape[3] if len(shape) == 4 else 1
        super().__init__(shape[0], transform)
        self._peak = check_images(images, peak)
        self._images = images
        self._labels = classes

    def _make(self, index: int) -> Data:
        return make_data(np.asarray(self._images[index]), int(self._labels[index]), self._peak)

    def __repr__(self) -> str:
        height, width = self.image_shape
        size = f"{height} x {width} x {self.num_channels}"
        return f"{type(self).__name__}({len(self)} images of {size}, {self.num_classes} classes)"

    @property
    def labels(self) -> Tensor:
        """Class of each image, int64 ``[images]``, in the order of this data set."""
        return torch.from_numpy(self._labels[self._indices])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and standard deviation of each channel on [0, 1], before any transform.

        Returns
        -------
        tuple
            Means and standard deviations, one per channel, for ``Standardize(*dataset.statistics())``.
        """
        if not len(self):
            raise ValueError("statistics need at least one image, but the data set is empty")
        total = np.zeros(self.num_channels)
        squares = np.zeros(self.num_channels)
        for start in range(0, len(self), CHUNK):
            chosen = self._indices[start : start + CHUNK]
            chunk = np.stack([np.asarray(self._images[int(index)]) for index in chosen])
            values = chunk.reshape(-1, self.num_channels).astype(np.float64) / self._peak
            total += values.sum(axis=0)
            squares += np.square(values).sum(axis=0)
        pixels = len(self) * self.image_shape[0] * self.image_shape[1]
        mean = total / pixels
        deviation = np.sqrt(np.maximum(squares / pixels - np.square(mean), 0.0))
        return tuple(mean.tolist()), tuple(deviation.tolist())


class OfficialImages(ImagePoints):
    """Images in two official halves. A part of the training images can be set aside as ``"valid"``."""

    _release: ClassVar[Release]
    _counts: ClassVar[dict[str, int]]
    _format: ClassVar[tuple[int, int]]  # numbers of classes and of channels

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
        check_arguments(OfficialImages.__init__, locals())
        check_choice("split", split, SPLITS)
        half = "test" if split == "test" else "train"
        path, images, labels = self._read(root, half, download, verify)
        if verify:
            check_count(self._release, path, len(images), self._counts[half])
        classes, channels = self._format
        super().__init__(images, labels, num_classes=classes, channels=channels, transform=transform)
        if half == "train":
            self._indices = hold_out(len(images), validation, split)

    def _read(self, root: str | Path, half: str, download: bool, verify: bool) -> Read:
        raise NotImplementedError
