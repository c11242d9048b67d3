"""Images as point sets: one point per pixel, at the pixel's center."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn_datasets._arrays import plain_array
from lieattn_datasets._checks import check_arguments, check_attribute

CHUNK = 1024

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
def grid_positions(height: int, width: int) -> Tensor:
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
    if height < 1 or width < 1:
        raise ValueError(f"height, width: expected integers of at least 1, got {height} and {width}")
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
        floating. Nested lists of integers are read as uint8.
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
    array = image_array("image", image)
    if array.ndim not in (2, 3):
        raise ValueError(f"image: expected [height, width] or [height, width, channels], got {list(array.shape)}")
    check_layout("image", array.shape, channels)
    peak = check_images(array[None], peak)
    return make_data(array, label, peak)


def data_to_image(data: Data) -> Tensor:
    """Convert a point set in raster order back to an image ``[height, width, channels]``, float32.

    Raises
    ------
    ValueError
        If the data is a batch, has no ``grid``, or its points are not the upright grid in raster order (because they
        were rotated or permuted).
    """
    check_arguments(data_to_image, locals())
    grid = data.get("grid")
    if not isinstance(grid, Tensor) or data.get("x") is None or data.get("pos") is None:
        raise ValueError("data: expected an image made by image_to_data, with x, pos and grid")
    if grid.shape != (1, 2):
        raise ValueError(f"data: expected one image, with a grid of shape [1, 2], got {list(grid.shape)}")
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


def check_layout(argument: str, shape: tuple[int, ...], channels: int | None, *before: str) -> None:
    """Raise ValueError if images ``[*before, height, width]`` or ``[*before, height, width, channels]`` are ambiguous.

    They are if the shape is also usual for another order of axes, and ``channels`` does not confirm the last axis.
    """
    axes, sizes = [*before, "height", "width", "channels"][: len(shape)], shape[len(before) :]
    last = shape[-1] if axes[-1] == "channels" else 1
    if channels is not None:
        if channels != last:
            raise ValueError(f"channels: expected {last} for {argument} {list(shape)}, got {channels}")
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


def image_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """Return intensities as an array of their own dtype; integers in nested lists, which have none, become uint8."""
    found, inner = plain_array(argument, values), values
    while isinstance(inner, Sequence) and len(inner):
        inner = inner[0]
    if type(inner) is not int or found.dtype.kind not in "iu":
        return found
    if found.min() < 0 or found.max() > 255:
        raise ValueError(f"{argument}: expected integers in 0 .. 255 in lists, got {found.min()} .. {found.max()}")
    return found.astype(np.uint8)


def check_images(images: ImageArray, peak: float | None) -> float:
    """Check type and range in pieces, and return the value that becomes intensity 1."""
    natural = {"uint8": 255.0, "uint16": 65535.0}.get(images.dtype.name, 1.0)
    if natural == 1 and not np.issubdtype(images.dtype, np.floating):
        raise TypeError(f"images: expected uint8, uint16 or a floating dtype, got {images.dtype}")
    limit = natural if peak is None else float(peak)
    if not (np.isfinite(limit) and limit > 0):
        raise ValueError(f"peak: expected a positive finite number, got {peak}")
    if 1 < natural <= limit:
        return limit  # every integer is in range, so the images need not be read
    slack = _ROUNDING * limit
    for start in range(0, images.shape[0], CHUNK):
        chunk = np.asarray(images[start : start + CHUNK])
        low, high = float(chunk.min()), float(chunk.max())
        if not (low >= -slack and high <= limit + slack):
            raise ValueError(f"images: expected finite numbers in [0, {limit:g}], got values {low:g} .. {high:g}")
    return limit


def make_data(image: NDArray[Any], label: int | None, peak: float) -> Data:
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
