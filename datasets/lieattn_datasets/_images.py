"""Images as point sets: one point per pixel, at the pixel's center."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments
from lieattn_datasets._checks import check_attribute, class_array, plain_array, require
from lieattn_datasets._clouds import LabeledClouds, Transform
from lieattn_datasets._files import Release
from lieattn_datasets._splits import Split, half_of, hold_out

Read = tuple[Path, Any, NDArray[Any]]  # where the images come from, the images, their labels

_CHUNK = 1024
_MOST_CHANNELS = 4  # largest usual number of channels of an image
_ROUNDING = 1e-6  # tolerance for float intensities outside [0, 1], which can result from rounding


class ImageArray(Protocol):
    """Images for :class:`~lieattn_datasets.ImagePoints`: an array, or a file that is indexed like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of images, height, width and, for color images, number of channels."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8, uint16 or a floating type."""

    def __getitem__(self, index: Any) -> Any:
        """Return one image for an integer, or an array of images for a slice."""


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def grid_positions(height: int, width: int) -> Float[Tensor, "pixels 2"]:
    """Return the coordinates of the pixel centers, in raster order.

    The origin is the center of the image, the spacing is 1, x points right and y points up. The pixel in row r and
    column c lies at ``(c - (width - 1) / 2, (height - 1) / 2 - r)``.

    Parameters
    ----------
    height, width
        Size of the image, at least 1.

    Returns
    -------
    Tensor
        Coordinates on the CPU, float32 ``[height * width, 2]``. All images of one size share this tensor, so do not
        write to it.
    """
    check_arguments(grid_positions, locals())
    require(min(height, width) >= 1, "height, width", "integers of at least 1", f"{height} and {width}")
    # On the CPU, like the images: the tensor is shared, so it must not depend on torch's default device.
    x = torch.arange(width, dtype=torch.float32, device="cpu") - (width - 1) / 2
    y = (height - 1) / 2 - torch.arange(height, dtype=torch.float32, device="cpu")
    return torch.stack([x.repeat(height), y.repeat_interleave(width)], dim=1)


def image_to_data(
    image: ArrayLike, label: int | None = None, *, peak: float | None = None, channels: int | None = None
) -> Data:
    """Convert one image to a point set.

    Parameters
    ----------
    image
        Intensities ``[height, width]`` or ``[height, width, channels]``, the top row first; uint8, uint16 or
        floating.
    label
        Class of the image. If it is None, the result has no ``y``.
    peak
        The value that becomes intensity 1. Default: 255 for uint8, 65,535 for uint16, 1 for floating types.
    channels
        Number of channels, the last axis. It must be given if there are more than four.

    Returns
    -------
    Data
        ``x`` float32 ``[points, channels]`` in [0, 1], ``pos`` float32 ``[points, 2]``, the shared tensor of
        :func:`grid_positions` (do not write to it), ``grid`` int64 ``[1, 2]`` = (height, width), and ``y`` int64
        ``[1]``.

    Raises
    ------
    ValueError
        If the image has another number of axes, can be read in another order, or a value is not finite or outside [0,
        peak].
    """
    check_arguments(image_to_data, locals())
    array = plain_array("image", image)
    expected = "[height, width] or [height, width, channels]"
    require(array.ndim in (2, 3), "image", expected, list(array.shape))
    _check_layout("image", array.shape, channels)
    peak = _check_images(array[None], peak)
    return _make_data(array, label, peak)


def data_to_image(data: Data) -> Shaped[Tensor, "height width channels"]:
    """Convert a point set in raster order back to an image ``[height, width, channels]``, in the dtype of ``x``.

    Raises
    ------
    ValueError
        If the data is a batch, has no ``grid``, or its points are not the upright grid in raster order (because they
        were rotated or permuted).
    """
    check_arguments(data_to_image, locals())
    grid = data.get("grid")
    missing = [name for name in ("x", "pos", "grid") if data.get(name) is None]
    if missing or not isinstance(grid, Tensor):
        found = f"no {' and no '.join(missing)}" if missing else type(grid).__name__
        expected = "all pixels of an image made by image_to_data, with x, pos and grid"
        raise ValueError(f"data: expected {expected}, got {found}; remove pixels afterwards")
    require(grid.shape == (1, 2), "data", "one image, with a grid of shape [1, 2]", list(grid.shape))
    height, width = grid[0].tolist()
    pos, x = check_attribute(data, "pos"), check_attribute(data, "x", height * width)
    if pos.is_meta or x.is_meta or not x.numel():
        raise ValueError("data.x, data.pos: expected tensors with values, got empty ones or ones on the meta device")
    if not torch.equal(pos.cpu(), grid_positions(height, width).to(pos.dtype)):
        raise ValueError(
            "data.pos: expected the upright pixel grid in raster order, got points that were rotated, moved or "
            "permuted, which have no image without resampling"
        )
    return x.reshape(height, width, -1)


def _check_layout(argument: str, shape: tuple[int, ...], channels: int | None, *before: str) -> None:
    """Raise ValueError if images ``[*before, height, width]`` or ``[*before, height, width, channels]`` are ambiguous.

    They are if the shape is also usual for another order of axes, and ``channels`` does not confirm the last axis.
    """
    axes, sizes = [*before, "height", "width", "channels"][: len(shape)], shape[len(before) :]
    last = shape[-1] if axes[-1] == "channels" else 1
    if channels is not None:
        require(channels == last, "channels", f"{last} for {argument} {list(shape)}", channels)
        return
    count, other = len(before), ""
    if last > _MOST_CHANNELS and sizes[0] <= _MOST_CHANNELS:
        other = ", ".join([*before, "channels", "height", "width"])
        order = ", ".join(map(str, [*range(count), *(count + axis for axis in (1, 2, 0))]))
        advice = f"use permute({order}) of a tensor or transpose({order}) of an array"
    elif last > _MOST_CHANNELS:
        other = ", ".join([*(before or ["images"]), *(["depth"] if before else []), "height", "width"])
        advice = "make a Data of each volume, with pos [points, 3]" if before else "use ImagePoints for several images"
    elif before and len(sizes) == 2 and sizes[1] <= _MOST_CHANNELS < min(shape[:2]):
        other, advice = "height, width, channels", f"use {argument}[None] for one image"
    elif before and len(sizes) == 2 and shape[0] == shape[2] > _MOST_CHANNELS:
        other, advice = "height, width, images", f"use np.moveaxis({argument}, 2, 0)"
    if other:
        raise ValueError(
            f"{argument}: expected [{', '.join(axes)}], got {list(shape)}, which can also be [{other}]; {advice}, or "
            f"give channels={last} to confirm the first"
        )


def _check_images(images: ImageArray, peak: float | None) -> float:
    """Check type and range in pieces, and return the value that becomes intensity 1."""
    natural = {"uint8": 255.0, "uint16": 65535.0}.get(images.dtype.name, 1.0)
    if natural == 1 and not np.issubdtype(images.dtype, np.floating):
        advice = "integers from 0 to 255 are images.astype('uint8')"
        raise TypeError(f"images: expected uint8, uint16 or a floating dtype, got {images.dtype}; {advice}")
    limit = natural if peak is None else float(peak)
    require(np.isfinite(limit) and limit > 0, "peak", "a positive finite number", peak)
    if 1 < natural <= limit:
        return limit  # every integer is in range, so the images need not be read
    slack = _ROUNDING * limit
    for start in range(0, images.shape[0], _CHUNK):
        chunk = np.asarray(images[start : start + _CHUNK])
        low, high = float(chunk.min()), float(chunk.max())
        right = low >= -slack and high <= limit + slack
        require(right, "images", f"finite numbers in [0, peak={limit:g}]", f"values {low:g} .. {high:g}")
    return limit


def _make_data(image: NDArray[Any], label: int | None, peak: float) -> Data:
    """Convert a checked image to a point set; see :func:`image_to_data`."""
    height, width = image.shape[:2]
    intensities = image.astype(np.float32).reshape(height * width, -1)
    intensities /= np.float32(peak)
    data = Data(
        x=torch.from_numpy(intensities),
        pos=grid_positions(height, width),
        grid=torch.tensor([[height, width]], device="cpu"),
    )
    if label is not None:
        data.y = torch.tensor([label], device="cpu")
    return data


class ImagePoints(LabeledClouds):
    """Labeled images, each converted to a point set on access.

    The images are kept in their original form (uint8 stays uint8). All images of one size share the tensor ``pos``, so
    do not write to it. See :class:`~lieattn_datasets.Clouds` for views, loaders and pickles.

    Parameters
    ----------
    images
        Intensities ``[images, height, width]`` or ``[images, height, width, channels]``, the top row first, uint8,
        uint16 or floating: an array, a tensor, a list of images, or a file that is indexed like an array.
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
        images = plain_array("images", cast(ArrayLike, images)) if listed else cast(ImageArray, images)
        if not hasattr(images, "shape") or not hasattr(images, "dtype"):
            raise TypeError(
                f"images: expected an array, or an object that is indexed like one, got {type(images).__name__}"
            )
        shape = tuple(images.shape)
        expected = "[images, height, width] or [images, height, width, channels] with no size of zero"
        require(len(shape) in (3, 4) and 0 not in shape[1:], "images", expected, list(shape))
        _check_layout("images", shape, channels, "images")
        classes = class_array("labels", labels)
        if classes.shape != shape[:1]:
            axis = shape.index(len(classes)) if classes.ndim == 1 and len(classes) in shape else 0
            order = f"; if axis {axis} counts the images, use np.moveaxis(images, {axis}, 0)" if axis else ""
            raise ValueError(f"labels: expected one per image, [{shape[0]}], got {list(classes.shape)}{order}")
        low, high = int(classes.min(initial=0)), int(classes.max(initial=-1))
        self.num_classes = high + 1 if num_classes is None else num_classes
        expected = f"integers in 0 .. {self.num_classes - 1} (num_classes - 1)"
        require(low >= 0 and high < self.num_classes, "labels", expected, f"{low} .. {high}")
        self.image_shape = (shape[1], shape[2])
        self.num_channels = shape[3] if len(shape) == 4 else 1
        super().__init__(shape[0], transform)
        self._peak = _check_images(images, peak)
        self._images = images
        self._labels = classes

    def _make(self, index: int) -> Data:
        return _make_data(np.asarray(self._images[index]), int(self._labels[index]), self._peak)

    def __repr__(self) -> str:
        height, width = self.image_shape
        size = f"{height} x {width} x {self.num_channels}"
        return f"{type(self).__name__}({len(self)} images of {size}, {self.num_classes} classes)"

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
        for start in range(0, len(self), _CHUNK):
            chosen = self._indices[start : start + _CHUNK]
            chunk = np.stack([np.asarray(self._images[int(index)]) for index in chosen])
            values = chunk.reshape(-1, self.num_channels).astype(np.float64) / self._peak
            total += values.sum(axis=0)
            squares += np.square(values).sum(axis=0)
        pixels = len(self) * self.image_shape[0] * self.image_shape[1]
        mean = total / pixels
        deviation = np.sqrt(np.maximum(squares / pixels - np.square(mean), 0.0))
        return tuple(mean.tolist()), tuple(deviation.tolist())


class OfficialImages(ImagePoints):
    """Images of published files, which subclasses find and read; count, classes and splits are checked here."""

    _release: ClassVar[Release]
    _counts: ClassVar[Mapping[str, int]]  # of images in each official part
    _format: ClassVar[tuple[int, int]]  # numbers of classes and of channels

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        validation: int = 0,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(OfficialImages.__init__, locals())
        self._load(root, half_of(split), verify, transform, download)
        self._indices = hold_out(len(self), validation, split)

    def _load(
        self, root: str | Path, part: str, verify: bool, transform: Transform | None, download: bool = False
    ) -> None:
        """Read an official part, or several that are joined by ``+``."""
        read = []
        for one in part.split("+"):
            path, images, labels = self._read(root, one, verify, download)
            self._release.require(images.shape[0], path, f"has no images of {one}")
            if verify:
                self._release.check_count(path, images.shape[0], self._counts[one])
            read.append((images, labels))
        images, labels = read[0] if len(read) == 1 else map(np.concatenate, zip(*read, strict=True))
        classes, channels = self._format
        super().__init__(images, labels, num_classes=classes, channels=channels, transform=transform)

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        """Return the path that errors name, the images, and the labels of an official part."""
        raise NotImplementedError


class NpzImages(OfficialImages):
    """Images of an ``.npz`` archive."""

    _shape: ClassVar[tuple[int, ...]] = (28, 28)

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        return read_npz_images(self._release, root, part, self._shape, verify)


def read_npz_images(
    release: Release, root: str | Path, part: str, shape: tuple[int, ...], verify: bool, name: str = ""
) -> tuple[Path, NDArray[np.uint8], NDArray[np.int64]]:
    """Return the path of an ``.npz`` archive, and images and labels of ten classes of an official part."""
    x, y = (f"{key}_{part}" if part else key for key in "xy")
    sizes = ", ".join(map(str, ("images", *shape)))
    path, (images, labels) = release.read(root, {x: f"uint8 [{sizes}]", y: "integer [images]"}, verify, name)
    return path, images, release.check_indices(path, y, labels, 10)
