"""Motions of clouds: callables that take a ``Data`` and return a new one, without changing their input.

Angles are in radians, and positive angles rotate counter-clockwise as displayed (x right, y up).
``torch_geometric.transforms.Compose`` chains transforms.
"""

import copy
import inspect
import math
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments
from lieattn_datasets._checks import check_attribute, check_one_cloud, real_array, require, square_matrix

VECTORS = (
    *("vel", "drift", "momentum", "force", "dipole", "normal", "cell"),
    *("wind", "east", "sun", "sun_change", "interpolated"),
)
TENSORS = ("polarizability", "quadrupole", "stress", "virial")
_OF_EDGES = ("edge_vec", "edge_shift")  # those of lieattn.transforms, if floating: integers count cells elsewhere

_QUARTER_TURN_TOLERANCE = 1e-12


class Configured:
    """A transform that shows its arguments, which are attributes of the same names."""

    def __repr__(self) -> str:
        values = {name: getattr(self, name, ...) for name in inspect.signature(type(self)).parameters}
        shown = (f"{name}={value.tolist() if isinstance(value, Tensor) else value!r}" for name, value in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"


class RandomTransform(Configured):
    """A random transform, whose numbers are a stream that the seed and the class determine.

    If the seed of torch has changed since the transform was constructed, the numbers also depend on torch's generator.
    Worker processes of a loader therefore draw different numbers, which differ between epochs and follow
    ``torch.manual_seed``. (To set the same seed once more is no change: construct the transform again to repeat its
    stream.) In a loader that seeds torch for each item, such as ``lieattn.train.PointSetData``, the numbers of an item
    do not depend on the other items.

    Transforms of different classes have different streams. Two transforms of the same class in a chain need different
    seeds.

    Parameters
    ----------
    seed
        Non-negative integer.
    """

    def __init__(self, seed: int) -> None:
        check_arguments(RandomTransform.__init__, locals())
        require(seed >= 0, "seed", "an integer of at least 0", seed)
        self.seed = seed
        self._class = zlib.crc32(type(self).__name__.encode())
        # In a worker process the seed of torch was set before, and a stream of its own would be that of all workers.
        self._torch_seed = None if get_worker_info() else torch.initial_seed()
        self._generator = np.random.default_rng([self._class, seed])

    def _stream(self) -> np.random.Generator:
        if torch.initial_seed() == self._torch_seed:
            return self._generator
        return np.random.default_rng([self.seed, *torch.randint(2**31, (2,), device="cpu").tolist()])


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
        require(pos.dim() == 2 and pos.shape[1] == dim, "data.pos", f"[points, {dim}]", list(pos.shape))
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
        cosine, sine = cosine_sine(angle)
        super().__init__([[cosine, -sine], [sine, cosine]])
        self.angle = float(angle)


class RandomRotatePoints(RandomTransform):
    """Rotate the points of each cloud by a random angle, as :class:`RotatePoints` does.

    The angles are a random stream that the seed determines. In worker processes of a loader, and if torch is seeded
    later, they also depend on torch's generator (so that epochs differ, and ``torch.manual_seed`` has an effect).
    Batches are refused, since their clouds would share one angle.

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
        require(0 <= max_angle < math.inf, "max_angle", "a finite number of at least 0", max_angle)
        self.max_angle = max_angle

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomRotatePoints.__call__, locals())
        check_one_cloud(data, "whose clouds would share one angle")
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
        expected = "finite numbers with 0 < least <= most"
        require(0 < least <= most < math.inf, "least, most", expected, f"{least} and {most}")
        self.least, self.most = least, most

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomScalePoints.__call__, locals())
        check_one_cloud(data, "whose clouds would share one factor")
        factor = self.least * (self.most / self.least) ** self._stream().uniform()
        dilated = copy.copy(data)
        dilated.pos = factor * check_attribute(data, "pos")
        return dilated


class TransformFields(Configured):
    """Multiply positions, vectors and tensors of a cloud by an orthogonal matrix R, and shift the positions.

    ``pos`` becomes ``R pos + shift``, vectors, and always ``edge_vec`` and ``edge_shift``, become ``R v``, tensors of
    rank two ``R T R^T``, and ``rotation``, the pose ``[1, dim, dim]`` of clouds that are already rotated,
    ``R rotation``. All other attributes stay the same.
    (:class:`~lieattn_datasets.TransformPoints` moves only positions, so that forces or velocities no longer match.)
    The result is computed in float64. The transform accepts a ``Data`` or a ``Batch``.

    Parameters
    ----------
    matrix
        Matrix R ``[dim, dim]``, orthogonal up to 1e-6.
    shift
        Translation ``[dim]``. Default: none.
    vectors
        Names of the vector attributes, which are rotated if present: ``[..., dim]``, or ``[..., k dim]`` for k vectors
        side by side. The default contains the names that data sets of this package use. If a target ``y`` is a vector,
        it must be named: ``vectors=dataset.vectors``.
    tensors
        Names of the tensor attributes ``[..., dim, dim]``, which are also rotated if present.
    """

    def __init__(
        self,
        matrix: ArrayLike | Tensor,
        shift: ArrayLike | Tensor | None = None,
        *,
        vectors: Sequence[str] = VECTORS,
        tensors: Sequence[str] = TENSORS,
    ) -> None:
        check_arguments(TransformFields.__init__, locals())
        self.matrix = square_matrix("matrix", matrix)
        dim = len(self.matrix)
        error = float((self.matrix @ self.matrix.T - self.matrix.new_ones(dim).diag()).abs().max())
        require(error < 1e-6, "matrix", "an orthogonal matrix R", f"R R^T - 1 of up to {error:.1e}")
        self.shift = self.matrix.new_zeros(dim)
        if shift is not None:
            self.shift = torch.from_numpy(real_array("shift", shift)).clone()
        require(self.shift.shape == (dim,), "shift", f"{dim} finite numbers", self.shift.tolist())
        self.vectors, self.tensors = tuple(vectors), tuple(tensors)

    def __call__(self, data: Data) -> Data:
        check_arguments(TransformFields.__call__, locals())
        moved = copy.copy(data)
        dim = len(self.matrix)
        of_edges = (name for name in _OF_EDGES if isinstance(data.get(name), Tensor))
        vectors = (*self.vectors, *(name for name in of_edges if data[name].is_floating_point()))
        for name in ("pos", *vectors, *self.tensors, "rotation"):
            if name == "pos" or data.get(name) is not None:
                check_attribute(data, name, floating=True)
        matrix = self.matrix.to(data.pos.device)
        moved.pos = self._turn("pos", data.pos, matrix, self.shift.to(data.pos.device))
        for name in vectors:
            if name != "pos" and data.get(name) is not None:
                moved[name] = self._turn(name, data[name], matrix)
        for name in (*self.tensors, "rotation"):
            tensor = data.get(name)
            if tensor is not None:
                square = tensor.shape[-2:] == (dim, dim)
                require(square, f"data.{name}", f"[..., {dim}, {dim}]", list(tensor.shape))
                turned = matrix @ tensor.double()
                moved[name] = (turned if name == "rotation" else turned @ matrix.T).to(tensor.dtype)
        return moved

    def _turn(self, name: str, values: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
        dim = len(matrix)
        right = values.shape[-1] == dim or (name != "pos" and values.shape[-1] % dim == 0)
        require(right, f"data.{name}", f"[..., {dim}]", list(values.shape))
        turned = values.double().unflatten(-1, (-1, dim)) @ matrix.T
        if shift is not None:
            turned = turned + shift
        return turned.flatten(-2).to(values.dtype)


class RandomRotateFields(RandomTransform):
    """Rotate each cloud with its vectors and tensors by a random rotation, as :class:`TransformFields` does.

    The rotations are a random stream that the seed determines; see ``RandomTransform`` in this package for workers.
    Batches are refused, since their clouds would share one rotation.

    Parameters
    ----------
    seed
        Non-negative integer.
    dim
        Dimension of the points, 2 or 3.
    axis
        In 3D, the only axis of the rotations: ``"z"`` gives the z/SO(3) protocol of shape classification. Default: all
        rotations, Haar-distributed.
    max_shift
        Largest shift of each coordinate. Shifts are uniformly distributed.
    vectors, tensors
        As for :class:`TransformFields`.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        dim: Literal[2, 3] = 3,
        axis: Literal["x", "y", "z"] | None = None,
        max_shift: float = 0.0,
        vectors: Sequence[str] = VECTORS,
        tensors: Sequence[str] = TENSORS,
    ) -> None:
        check_arguments(RandomRotateFields.__init__, locals())
        super().__init__(seed)
        require(axis is None or dim == 3, "axis", "None in 2D", repr(axis))
        require(0 <= max_shift < math.inf, "max_shift", "a finite number of at least 0", max_shift)
        self.dim, self.axis, self.max_shift = dim, axis, max_shift
        self.vectors, self.tensors = tuple(vectors), tuple(tensors)

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomRotateFields.__call__, locals())
        check_one_cloud(data, "whose clouds would share one rotation")
        stream = self._stream()
        quaternion = stream.normal(size=4)  # drawn in every case, so that the stream does not depend on the axis
        if self.dim == 2 or self.axis is not None:
            turned = 2 if self.axis is None else "xyz".index(self.axis)
            quaternion[[1 + other for other in range(3) if other != turned]] = 0.0
        matrix = rotation_matrix(quaternion)[: self.dim, : self.dim]
        shift = stream.uniform(-self.max_shift, self.max_shift, self.dim)
        return TransformFields(matrix, shift, vectors=self.vectors, tensors=self.tensors)(data)


def rotation_matrix(quaternion: ArrayLike) -> np.ndarray:
    """Return the rotation matrix of a quaternion (w, x, y, z) of any nonzero length.

    The rotation is uniformly distributed if the direction of the quaternion is.
    """
    w, x, y, z = np.asarray(quaternion, dtype=np.float64) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def cosine_sine(angle: float) -> tuple[float, float]:
    """Return the cosine and sine of an angle, exactly 0 and +-1 at multiples of a quarter turn."""
    require(math.isfinite(angle), "angle", "a finite number of radians", angle)
    turns = angle / (math.pi / 2)
    if abs(turns - round(turns)) < _QUARTER_TURN_TOLERANCE * max(1.0, abs(turns)):
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[round(turns) % 4]
    return math.cos(angle), math.sin(angle)
