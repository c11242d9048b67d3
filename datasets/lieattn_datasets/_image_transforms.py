"""Transforms of images and of signals on clouds: callables that take a ``Data`` and return a new one."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.values import attributes_of_points, listing_pixels, select_points
from lieattn_datasets._checks import check_attribute, check_one_cloud, real_array, require
from lieattn_datasets._images import data_to_image
from lieattn_datasets._transforms import Configured, RandomTransform, cosine_sine

_Numbers = float | Sequence[float] | NDArray[Any] | Tensor

_BEND_LENGTH = 4.0  # standard deviation, in pixels, of the filter that makes random displacements smooth


class RotateImage(Configured):
    """Rotate an image by resampling it on its own grid, for comparison with :class:`RotatePoints`.

    The image is rotated about its center by spline interpolation. Pixels from outside the image are black, and parts
    that leave the frame are lost. Intensities are clipped to [0, 1], so use this transform before :class:`Standardize`.
    Pixels with labels or other values besides ``x`` and ``pos`` are refused, since these would not turn with the image.

    Parameters
    ----------
    angle
        Angle in radians, counter-clockwise as displayed. A quarter turn of a square image permutes pixels.
    order
        Order of the spline, 0 (nearest) to 5; 1 is bilinear, 3 is cubic.
    """

    def __init__(self, angle: float, order: Literal[0, 1, 2, 3, 4, 5] = 3) -> None:
        check_arguments(RotateImage.__init__, locals())
        cosine, sine = cosine_sine(angle)
        self.angle = float(angle)
        self.order: Literal[0, 1, 2, 3, 4, 5] = order
        # from output (row, column) to input (row, column): the inverse rotation, with rows pointing down
        self._matrix = np.array([[cosine, sine], [-sine, cosine]])

    def __call__(self, data: Data) -> Data:
        check_arguments(RotateImage.__call__, locals())
        from scipy.ndimage import affine_transform

        image = _intensities(data, "RotateImage")
        center = (np.array(image.shape[:2]) - 1) / 2
        offset = center - self._matrix @ center
        planes = [
            affine_transform(plane, self._matrix, offset, order=self.order) for plane in np.moveaxis(image, -1, 0)
        ]
        return _with_intensities(data, planes)


class RandomWarpImage(RandomTransform):
    """Rotate, scale, shift and bend an image at random, by one interpolation on its own grid.

    The lattice stays as it is, so networks see warped images as they see those of a test set. (Points of a set are
    rotated and scaled without interpolation, by :class:`RandomRotatePoints` and :class:`RandomScalePoints`, which turn
    the lattice too. Networks on points are invariant to shifts of all points, but not of the content on its lattice.)
    Pixels from outside of the image are black. Use this transform before :class:`Standardize`, with one image that has
    all its pixels and no labels of pixels, as for :class:`RotateImage`.

    Parameters
    ----------
    seed
        As for :class:`RandomRotatePoints`.
    max_angle
        The angle is uniform in ``[-max_angle, max_angle)``, in radians. Default: pi, all rotations.
    max_scale
        The factor is between ``1 / max_scale`` and ``max_scale``, at least 1, with a uniform logarithm.
    max_shift
        Largest shift along each axis, in pixels.
    bend
        Root mean square, along each axis and in pixels, of a smooth random displacement of the pixels, far from the
        border. It is 0.76 times as large at the border, 0.57 times at the corners, and 0.72 times in images of 8 x 8.
    order
        Order of the spline, as for :class:`RotateImage`. The cubic one, 3, blurs images less than the bilinear one, 1.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        max_angle: float = math.pi,
        max_scale: float = 1.0,
        max_shift: float = 0.0,
        bend: float = 0.0,
        order: Literal[0, 1, 2, 3, 4, 5] = 1,
    ) -> None:
        check_arguments(RandomWarpImage.__init__, locals())
        super().__init__(seed)
        for name, value in (("max_angle", max_angle), ("max_shift", max_shift), ("bend", bend)):
            require(0 <= value < math.inf, name, "a finite number of at least 0", value)
        require(1 <= max_scale < math.inf, "max_scale", "a finite number of at least 1", max_scale)
        self.max_angle, self.max_scale, self.max_shift, self.bend = max_angle, max_scale, max_shift, bend
        self.order: Literal[0, 1, 2, 3, 4, 5] = order

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomWarpImage.__call__, locals())
        from scipy.ndimage import gaussian_filter, map_coordinates

        image, stream = _intensities(data, "RandomWarpImage"), self._stream()
        cosine, sine = cosine_sine(stream.uniform(-self.max_angle, self.max_angle))
        matrix = np.array([[cosine, sine], [-sine, cosine]]) * self.max_scale ** stream.uniform(-1, 1)
        shape = image.shape[:2]
        center = (np.array(shape)[:, None, None] - 1) / 2
        shift = stream.uniform(-self.max_shift, self.max_shift, (2, 1, 1))
        places = np.tensordot(matrix, np.indices(shape) - center, 1) + center + shift
        if self.bend:
            waves = gaussian_filter(stream.normal(size=(2, *shape)), (0, _BEND_LENGTH, _BEND_LENGTH), mode="constant")
            # The standard deviation of white noise behind this filter is 1 / (2 sqrt(pi) length).
            places = places + 2 * math.sqrt(math.pi) * _BEND_LENGTH * self.bend * waves
        planes = [map_coordinates(plane, places, order=self.order) for plane in np.moveaxis(image, -1, 0)]
        return _with_intensities(data, planes)


class RandomCrop(Configured):
    """Pad an image, crop it to its size at a random place, and mirror it left to right with probability 1/2.

    Pixels move by whole steps, so nothing is resampled. The crops of a rotated image are the rotated crops; mirrored
    ones are equal up to half a turn. Positions and raster stay the same. Random numbers come from torch's generator.
    Pixels with labels or other values besides ``x`` and ``pos`` are refused, since these would not move with the image.

    Parameters
    ----------
    padding
        Number of rows and columns of zeros on every side, at least 0. Zeros are black before :class:`Standardize`.
    flip
        Whether images are mirrored with probability 1/2.
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        check_arguments(RandomCrop.__init__, locals())
        require(padding >= 0, "padding", "an integer of at least 0", padding)
        self.padding, self.flip = padding, flip

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomCrop.__call__, locals())
        image, pad = data_to_image(data), self.padding
        _check_only_pixels(data)
        row, column = torch.randint(2 * pad + 1, (2,), device="cpu").tolist()
        padded = torch.nn.functional.pad(image, (0, 0, pad, pad, pad, pad))
        cut = padded[row : row + image.shape[0], column : column + image.shape[1]]
        if self.flip and torch.rand((), device="cpu") < 0.5:
            cut = cut.flip(1)
        cropped = copy.copy(data)
        cropped.x = cut.reshape(data.x.shape)
        return cropped


class AveragePixels(Configured):
    """Average the intensities and positions of images over squares of pixels, and rescale the spacing to 1.

    Points must be in raster order, as in images, but may be rotated; then the averaged image is rotated in the same
    way. Labels of pixels have no average and are refused. The transform accepts a ``Data`` or a ``Batch`` of images.

    Parameters
    ----------
    size
        Number of rows and columns of a square, or side of a cube of voxels.

    Examples
    --------
    >>> from lieattn_datasets import image_to_data
    >>> AveragePixels(2)(image_to_data(np.array([[0.0, 0.2], [0.4, 0.6]])))
    Data(x=[1, 1], pos=[1, 2], grid=[1, 2])
    """

    def __init__(self, size: int = 2) -> None:
        check_arguments(AveragePixels.__init__, locals())
        check_counts(size=size)
        self.size = size

    def __call__(self, data: Data) -> Data:
        check_arguments(AveragePixels.__call__, locals())
        if isinstance(data, Batch):
            return Batch.from_data_list([self(image) for image in data.to_data_list()])
        grid, size = data.get("grid"), self.size
        expected = f"height and width of an image, [1, 2], or sides of a volume, [1, 3], that are multiples of {size}"
        right = isinstance(grid, Tensor) and grid.shape in ((1, 2), (1, 3)) and not bool((grid % size).any())
        require(right, "data.grid", expected, "none" if grid is None else grid.tolist())
        sides = grid[0].tolist()
        _check_only_pixels(data)
        averaged, squares = copy.copy(data), [part for side in sides for part in (side // size, size)]
        for name, unit in (("x", 1), ("pos", size)):
            value = check_attribute(data, name, math.prod(sides), floating=True)
            cells = value.reshape(*squares, -1).mean(dim=tuple(range(1, 2 * len(sides), 2)))
            averaged[name] = cells.flatten(0, -2) / unit
        averaged.grid = grid // size
        return averaged


class Standardize(Configured):
    """Subtract a mean from each channel of ``x`` and divide it by a standard deviation.

    Parameters
    ----------
    mean, std
        One number, or one per channel; std must be positive. See ``Standardize(*dataset.statistics())``.
    """

    def __init__(self, mean: _Numbers, std: _Numbers) -> None:
        check_arguments(Standardize.__init__, locals())
        self.mean, self.std = (
            torch.atleast_1d(torch.from_numpy(real_array(name, values)).float())
            for name, values in (("mean", mean), ("std", std))
        )
        alike = self.mean.dim() == 1 and self.mean.shape == self.std.shape
        require(alike, "mean, std", "the same length", f"mean={mean} and std={std}")
        right = self.mean.isfinite() & self.std.isfinite() & (self.std > 0)
        require(right.all(), "mean, std", "finite numbers and positive finite numbers", f"{mean} and {std}")

    def __call__(self, data: Data) -> Data:
        check_arguments(Standardize.__call__, locals())
        x = check_attribute(data, "x")
        right = len(self.mean) in (1, x.shape[-1]) and x.is_floating_point()
        require(right, "data.x", f"{len(self.mean)} floating channels", f"{x.dtype} {list(x.shape)}")
        scaled = copy.copy(data)
        scaled.x = (x - self.mean.to(x)) / self.std.to(x)
        return scaled


class DropBackground(Configured):
    """Keep only the points whose signal is not zero, for example the ink of an image of handwriting.

    The choice of points does not depend on their positions, so networks stay equivariant. A cloud whose signal is zero
    everywhere keeps its first point. What remains is described at :class:`DropPoints`.

    Parameters
    ----------
    threshold
        Non-negative number. A point is kept if the absolute value of a channel of ``data.x`` exceeds it.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        check_arguments(DropBackground.__init__, locals())
        require(0 <= threshold < math.inf, "threshold", "a finite number of at least 0", threshold)
        self.threshold = threshold

    def __call__(self, data: Data) -> Data:
        check_arguments(DropBackground.__call__, locals())
        check_one_cloud(data, "of which some clouds could become empty")
        x = check_attribute(data, "x")
        return _subset(data, (x.reshape(len(x), -1).abs() > self.threshold).any(dim=1))


class DropPoints(RandomTransform):
    """Remove each point of a cloud with the same probability, for example to train with missing pixels.

    The choice does not depend on positions or values, so the outputs of networks stay equivariant in distribution. One
    point remains at least. The attributes of the remaining points and edges are kept. In images, ``grid`` becomes
    ``raster``, the sides of the whole image, with the row and column ``pixel`` int64 ``[points, 2]`` of each point (or
    layer, row and column), by which :class:`lieattn.models.ImageTransformer` pools. Batches are refused.

    Parameters
    ----------
    seed
        As for :class:`RandomRotatePoints`.
    share
        Probability in [0, 1) that a point is removed.
    """

    def __init__(self, seed: int = 0, share: float = 0.1) -> None:
        check_arguments(DropPoints.__init__, locals())
        super().__init__(seed)
        require(0 <= share < 1, "share", "a probability in [0, 1)", share)
        self.share = share

    def __call__(self, data: Data) -> Data:
        check_arguments(DropPoints.__call__, locals())
        check_one_cloud(data, "whose points would be one choice")
        keep = torch.from_numpy(self._stream().uniform(size=len(check_attribute(data, "pos"))) >= self.share)
        return _subset(data, keep.to(data.pos.device))


def _subset(data: Data, keep: Tensor) -> Data:
    """Return the points of a cloud where ``keep`` is true; the first point, if there is none."""
    require(data.get("face") is None, "data", "points without faces, whose corners could be removed", "a face")
    if len(keep) and not bool(keep.any()):
        keep[0] = True
    kept = copy.copy(listing_pixels(data))
    names, edges = attributes_of_points(kept), {name: kept[name] for name in kept.edge_attrs()}
    select_points(kept, keep.nonzero()[:, 0], names)
    left = Data(**edges, num_nodes=len(keep)).subgraph(keep).to_dict()
    return kept.update({name: value for name, value in left.items() if name in kept})


def _intensities(data: Data, transform: str) -> NDArray[np.float64]:
    """Return an image ``[height, width, channels]`` that may be resampled by a transform."""
    image = data_to_image(data).double().cpu().numpy()
    _check_only_pixels(data)
    check_attribute(data, "x", floating=True)
    found = f"{image.min():g} .. {image.max():g}; standardize after {transform}, not before"
    require(image.min() >= -1e-6 and image.max() <= 1 + 1e-6, "data.x", "intensities in [0, 1]", found)
    return image


def _with_intensities(data: Data, planes: list[NDArray[np.float64]]) -> Data:
    """Return the image with other intensities, one array ``[height, width]`` for each channel."""
    changed = copy.copy(data)
    changed.x = torch.from_numpy(np.stack(planes, axis=-1).clip(0, 1)).to(data.x).reshape(data.x.shape)
    return changed


def _check_only_pixels(data: Data) -> None:
    """Raise ValueError if pixels have values besides ``x`` and ``pos``, since the transform changes only these."""
    # With one pixel, attributes of the image also have one row.
    for name in sorted(data.node_attrs()) if data.num_nodes != 1 else ():
        found = f"{name} for each of {data.num_nodes} pixels"
        require(name in ("x", "pos"), "data", "pixels with x and pos, which alone are transformed", found)
