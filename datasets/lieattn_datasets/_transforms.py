"""Transforms: callables that take a ``Data`` and return a new one, without changing their input.

Angles are in radians, and positive angles rotate counter-clockwise as displayed (x right, y up).
``torch_geometric.transforms.Compose`` chains transforms.
"""

import copy
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn_datasets._arrays import real_array, square_matrix
from lieattn_datasets._checks import check_arguments, check_attribute
from lieattn_datasets._grid import data_to_image
from lieattn_datasets._streams import Configured, RandomTransform

_QUARTER_TURN_TOLERANCE = 1e-12


class TransformPoints(Configured):
    """Multiply the coordinates of every point by a matrix. All other attributes stay the same.

    Nothing is resampled: the points keep their features. The transform accepts a ``Data`` or a ``Batch``.

    Parameters
    ----------
    matrix
        Finite matrix ``[dim, dim]``. The new position is ``matrix @ pos``, computed in float64.
    """

    def __init__(self, matrix: ArrayLike | Tensor) -> None:
        check_arguments(TransformPoints.__init__, locals())
        self.matrix = square_matrix("matrix", matrix)

    def __call__(self, data: Data) -> Data:
        check_arguments(TransformPoints.__call__, locals())
        pos = check_attribute(data, "pos", floating=True)
        dim = len(self.matrix)
        if pos.dim() != 2 or pos.shape[1] != dim:
            raise ValueError(f"data.pos: expected [points, {dim}], got {list(pos.shape)}")
        turned = copy.copy(data)
        turned.pos = (pos.double() @ self.matrix.to(pos.device).T).to(pos.dtype)
        return turned


class RotatePoints(TransformPoints):
    """Rotate the coordinates of every point in the plane about the origin, the center of an image.

    This is the exact rotation of an image as a point set: no pixel is resampled or lost. Multiples of a quarter turn
    use the integer matrix and map the grid onto itself without rounding.

    Parameters
    ----------
    angle
        Angle in radians, counter-clockwise as displayed.

    Examples
    --------
    >>> import math
    >>> from torch_geometric.data import Data
    >>> RotatePoints(math.pi / 2)(Data(pos=torch.tensor([[1.0, 0.0]]))).pos
    tensor([[0., 1.]])
    """

    def __init__(self, angle: float) -> None:
        check_arguments(RotatePoints.__init__, locals())
        cosine, sine = _cosine_sine(angle)
        super().__init__([[cosine, -sine], [sine, cosine]])
        self.angle = float(angle)


class RandomRotatePoints(RandomTransform):
    """Rotate the points of each cloud by a random angle, as :class:`RotatePoints` does.

    The angles are a random stream that the seed determines. In worker processes of a loader, and if torch is seeded
    later, they also depend on torch's generator (so that epochs differ, and ``torch.manual_seed`` has an effect),
    unless ``set_epoch`` was called. Batches are refused, since their clouds would share one angle.

    Parameters
    ----------
    seed
        Non-negative integer.
    max_angle
        The angle is uniform in ``[-max_angle, max_angle)``, in radians. Default: pi, all rotations.
    """

    def __init__(self, seed: int = 0, max_angle: float = math.pi) -> None:
        check_arguments(RandomRotatePoints.__init__, locals())
        super().__init__(seed)
        if not 0 <= max_angle < math.inf:
            raise ValueError(f"max_angle: expected a finite number of at least 0, got {max_angle}")
        self.max_angle = max_angle

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomRotatePoints.__call__, locals())
        if isinstance(data, Batch):
            raise ValueError("data: expected one cloud, got a Batch, whose clouds would share one angle")
        angle = self._stream().uniform(-self.max_angle, self.max_angle)
        return RotatePoints(angle)(data)


class RandomScalePoints(RandomTransform):
    """Scale the points of each cloud about the origin, the center of an image, by a random factor.

    Like rotations (:class:`RotatePoints`), dilations of a point set are exact: no pixel is resampled. For one fixed
    factor s use ``TransformPoints([[s, 0], [0, s]])``. Batches are refused, since their clouds would share one factor.

    Parameters
    ----------
    seed
        As for :class:`RandomRotatePoints`.
    least, most
        Bounds of the factor, whose logarithm is uniformly distributed.

    Examples
    --------
    >>> from torch_geometric.data import Data
    >>> RandomScalePoints(least=2.0, most=2.0)(Data(pos=torch.tensor([[1.0, 0.5]]))).pos
    tensor([[2., 1.]])
    """

    def __init__(self, seed: int = 0, least: float = 0.5, most: float = 2.0) -> None:
        check_arguments(RandomScalePoints.__init__, locals())
        super().__init__(seed)
        if not 0 < least <= most < math.inf:
            raise ValueError(f"least, most: expected finite numbers with 0 < least <= most, got {least} and {most}")
        self.least, self.most = least, most

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomScalePoints.__call__, locals())
        if isinstance(data, Batch):
            raise ValueError("data: expected one cloud, got a Batch, whose clouds would share one factor")
        factor = self.least * (self.most / self.least) ** self._stream().uniform()
        dilated = copy.copy(data)
        dilated.pos = factor * check_attribute(data, "pos")
        return dilated


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
        if order not in range(6):
            raise ValueError(f"order: expected 0, 1, 2, 3, 4 or 5, got {order}")
        cosine, sine = _cosine_sine(angle)
        self.angle = float(angle)
        self.order: Literal[0, 1, 2, 3, 4, 5] = order
        # from output (row, column) to input (row, column): the inverse rotation, with rows pointing down
        self._matrix = np.array([[cosine, sine], [-sine, cosine]])

    def __call__(self, data: Data) -> Data:
        check_arguments(RotateImage.__call__, locals())
        from scipy.ndimage import affine_transform

        image = data_to_image(data).float().cpu().numpy()
        _check_only_pixels(data)
        check_attribute(data, "x", floating=True)
        if not (image.min() >= -1e-6 and image.max() <= 1 + 1e-6):
            raise ValueError(
                f"data.x: expected intensities in [0, 1], got {image.min():g} .. {image.max():g}; standardize "
                "after RotateImage, not before"
            )
        center = (np.array(image.shape[:2]) - 1) / 2
        offset = center - self._matrix @ center
        planes = [
            affine_transform(plane, self._matrix, offset, order=self.order)
            for plane in np.moveaxis(image.astype(np.float64), -1, 0)
        ]
        values = torch.from_numpy(np.stack(planes, axis=-1).clip(0, 1)).to(data.x)
        turned = copy.copy(data)
        turned.x = values.reshape(data.x.shape)
        return turned


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
        if padding < 0:
            raise ValueError(f"padding: expected an integer of at least 0, got {padding}")
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
        Number of rows and columns of a square.

    Examples
    --------
    >>> from lieattn_datasets import image_to_data
    >>> AveragePixels(2)(image_to_data(np.array([[0.0, 0.2], [0.4, 0.6]])))
    Data(x=[1, 1], pos=[1, 2], grid=[1, 2])
    """

    def __init__(self, size: int = 2) -> None:
        check_arguments(AveragePixels.__init__, locals())
        if size < 1:
            raise ValueError(f"size: expected an integer of at least 1, got {size}")
        self.size = size

    def __call__(self, data: Data) -> Data:
        check_arguments(AveragePixels.__call__, locals())
        if isinstance(data, Batch):
            return Batch.from_data_list([self(image) for image in data.to_data_list()])
        grid, size = data.get("grid"), self.size
        if not isinstance(grid, Tensor) or grid.shape != (1, 2) or bool((grid % size != 0).any()):
            got = "none" if grid is None else grid.tolist()
            raise ValueError(
                f"data.grid: expected height and width of an image, [1, 2], that are multiples of {size}, got {got}"
            )
        height, width = grid[0].tolist()
        _check_only_pixels(data)
        averaged = copy.copy(data)
        for name, unit in (("x", 1), ("pos", size)):
            value = check_attribute(data, name, height * width, floating=True)
            cells = value.reshape(height // size, size, width // size, size, -1)
            averaged[name] = cells.mean(dim=(1, 3)).flatten(0, 1) / unit
        averaged.grid = grid // size
        return averaged


class _Scaling(Configured):
    """Subtract a mean and divide by a standard deviation: one number of each, or one for each column."""

    _dtype = torch.float64

    def __init__(self, mean: float | Sequence[float] | Tensor, std: float | Sequence[float] | Tensor) -> None:
        check_arguments(_Scaling.__init__, locals())
        self.mean, self.std = (
            torch.atleast_1d(torch.from_numpy(real_array(name, values)).to(self._dtype, copy=True))
            for name, values in (("mean", mean), ("std", std))
        )
        if self.mean.dim() != 1 or self.mean.shape != self.std.shape:
            raise ValueError(f"mean, std: expected the same length, got mean={mean} and std={std}")
        if not bool((self.mean.isfinite() & self.std.isfinite() & (self.std > 0)).all()):
            raise ValueError(
                f"mean: expected finite numbers, std: expected positive finite numbers, got {mean} and {std}"
            )


class Standardize(_Scaling):
    """Subtract a mean from each channel of ``x`` and divide it by a standard deviation.

    Parameters
    ----------
    mean, std
        One number, or one per channel; std must be positive. See ``Standardize(*dataset.statistics())``.
    """

    _dtype = torch.float32

    def __call__(self, data: Data) -> Data:
        check_arguments(Standardize.__call__, locals())
        x = check_attribute(data, "x")
        if len(self.mean) not in (1, x.shape[-1]) or not x.is_floating_point():
            raise ValueError(f"data.x: expected {len(self.mean)} floating channels, got {x.dtype} {list(x.shape)}")
        scaled = copy.copy(data)
        scaled.x = (x - self.mean.to(x)) / self.std.to(x)
        return scaled


class StandardizeTargets(_Scaling):
    """Subtract a mean from each target in ``y`` and divide it by a standard deviation.

    The method :meth:`restore` reverts this for predictions.

    Parameters
    ----------
    mean, std
        One number, or one per target; std must be positive. See ``StandardizeTargets(*train.statistics())``.
    """

    def __call__(self, data: Data) -> Data:
        check_arguments(StandardizeTargets.__call__, locals())
        self._check("data.y", data.get("y"))
        check_attribute(data, "y", floating=True)
        scaled = copy.copy(data)
        scaled.y = ((data.y.double() - self.mean.to(data.y.device)) / self.std.to(data.y.device)).to(data.y.dtype)
        return scaled

    def restore(self, y: Tensor) -> Tensor:
        """Return predictions ``[..., targets]`` in the units of the data set."""
        self._check("y", y)
        return (y.double() * self.std.to(y.device) + self.mean.to(y.device)).to(y.dtype)

    def _check(self, argument: str, y: Tensor) -> None:
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise TypeError(f"{argument}: expected a tensor [..., targets], got {type(y).__name__}")
        if len(self.mean) not in (1, y.shape[-1]):
            raise ValueError(f"{argument}: expected {len(self.mean)} targets, got {list(y.shape)}")


class DropBackground(Configured):
    """Keep only the points whose signal is not zero, for example the ink of an image of handwriting.

    The choice of points does not depend on their positions, so networks stay equivariant. A cloud whose signal is zero
    everywhere keeps its first point. The attributes of the remaining points and edges are kept; ``grid`` is removed.
    Batches are refused.

    Parameters
    ----------
    threshold
        Non-negative number. A point is kept if the absolute value of a channel of ``data.x`` exceeds it.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        check_arguments(DropBackground.__init__, locals())
        if not 0 <= threshold < math.inf:
            raise ValueError(f"threshold: expected a finite number of at least 0, got {threshold}")
        self.threshold = threshold

    def __call__(self, data: Data) -> Data:
        check_arguments(DropBackground.__call__, locals())
        if isinstance(data, Batch):
            raise ValueError("data: expected one cloud, got a Batch")
        x = check_attribute(data, "x")
        keep = (x.reshape(len(x), -1).abs() > self.threshold).any(dim=1)
        if len(x) and not bool(keep.any()):
            keep[0] = True
        kept = data.subgraph(keep)
        kept.pop("grid", None)  # the remaining points are not a raster
        return kept


class PermutePoints(Configured):
    """Permute the points of a cloud at random. The seed and the number of points determine the permutation.

    The cloud is the same set of points with the same attributes, so the output of a network must not change.
    Batches, edges, faces and other indices of points are refused.

    Parameters
    ----------
    seed
        Non-negative integer. With the same seed, clouds of the same size are permuted in the same way.
    """

    def __init__(self, seed: int = 0) -> None:
        check_arguments(PermutePoints.__init__, locals())
        if seed < 0:
            raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
        self.seed = seed

    def __call__(self, data: Data) -> Data:
        check_arguments(PermutePoints.__call__, locals())
        if isinstance(data, Batch):
            raise ValueError("data: expected one cloud without edge_index, got a Batch")
        for name, _ in data:
            if "index" in name or name == "face":
                raise ValueError(f"data: expected one cloud without edge_index or other indices of points, got {name}")
        size = len(check_attribute(data, "pos"))
        if data.get("x") is not None:
            check_attribute(data, "x", size)
        order = torch.from_numpy(np.random.default_rng(self.seed).permutation(size))
        permuted = copy.copy(data)
        for name in data.node_attrs() if size > 1 else ():  # with one point, attributes of the cloud also have one row
            value = data[name]
            if isinstance(value, Tensor):
                permuted[name] = value.index_select(data.__cat_dim__(name, value), order.to(value.device))
            else:
                permuted[name] = [value[number] for number in order.tolist()]
        return permuted


def _check_only_pixels(data: Data) -> None:
    """Raise ValueError if pixels have values besides ``x`` and ``pos``, since the transform changes only these."""
    # With one pixel, attributes of the image also have one row.
    for name in sorted(data.node_attrs()) if data.num_nodes != 1 else ():
        if name not in ("x", "pos"):
            found = f"{name} for each of {data.num_nodes} pixels"
            raise ValueError(f"data: expected pixels with x and pos, which alone are transformed, got {found}")


def _cosine_sine(angle: float) -> tuple[float, float]:
    """Return the cosine and sine of an angle, exactly 0 and +-1 at multiples of a quarter turn."""
    if not math.isfinite(angle):
        raise ValueError(f"angle: expected a finite number of radians, got {angle}")
    turns = angle / (math.pi / 2)
    if abs(turns - round(turns)) < _QUARTER_TURN_TOLERANCE * max(1.0, abs(turns)):
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[round(turns) % 4]
    return math.cos(angle), math.sin(angle)
