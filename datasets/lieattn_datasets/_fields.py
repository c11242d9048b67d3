"""Rigid motions of clouds."""

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
from lieattn_datasets._streams import Configured, RandomTransform

VECTORS = (
    *("vel", "momentum", "force", "dipole", "normal", "cell"),
    *("wind", "east", "sun", "sun_change", "interpolated"),
)
TENSORS = ("polarizability", "quadrupole", "stress", "virial")


class TransformFields(Configured):
    """Multiply positions, vectors and tensors of a cloud by an orthogonal matrix R, and shift the positions.

    ``pos`` becomes ``R pos + shift``, vectors become ``R v``, tensors of rank two ``R T R^T``, and ``rotation``, the
    pose ``[1, dim, dim]`` of clouds that are already rotated, ``R rotation``. All other attributes stay the same.
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
        if not error < 1e-6:
            raise ValueError(f"matrix: expected an orthogonal matrix R, got R R^T - 1 of up to {error:.1e}")
        self.shift = self.matrix.new_zeros(dim)
        if shift is not None:
            self.shift = torch.from_numpy(real_array("shift", shift)).clone()
        if self.shift.shape != (dim,) or not bool(self.shift.isfinite().all()):
            raise ValueError(f"shift: expected {dim} finite numbers, got {self.shift.tolist()}")
        self.vectors, self.tensors = tuple(vectors), tuple(tensors)

    def __call__(self, data: Data) -> Data:
        check_arguments(TransformFields.__call__, locals())
        moved = copy.copy(data)
        dim = len(self.matrix)
        for name in ("pos", *self.vectors, *self.tensors, "rotation"):
            if name == "pos" or data.get(name) is not None:
                check_attribute(data, name, floating=True)
        matrix = self.matrix.to(data.pos.device)
        moved.pos = self._turn("pos", data.pos, matrix, self.shift.to(data.pos.device))
        for name in self.vectors:
            if name != "pos" and data.get(name) is not None:
                moved[name] = self._turn(name, data[name], matrix)
        for name in (*self.tensors, "rotation"):
            tensor = data.get(name)
            if tensor is not None:
                if tensor.shape[-2:] != (dim, dim):
                    raise ValueError(f"data.{name}: expected [..., {dim}, {dim}], got {list(tensor.shape)}")
                turned = matrix @ tensor.double()
                moved[name] = (turned if name == "rotation" else turned @ matrix.T).to(tensor.dtype)
        return moved

    def _turn(self, name: str, values: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
        dim = len(matrix)
        if values.dim() < 1 or values.shape[-1] % dim or (name == "pos" and values.shape[-1] != dim):
            raise ValueError(f"data.{name}: expected [..., {dim}], got {list(values.shape)}")
        turned = values.double().unflatten(-1, (-1, dim)) @ matrix.T
        if shift is not None:
            turned = turned + shift
        return turned.flatten(-2).to(values.dtype)


class RandomRotateFields(RandomTransform):
    """Rotate each cloud with its vectors and tensors by a random rotation, as :class:`TransformFields` does.

    The rotations are a random stream that the seed determines; see ``RandomTransform`` in this package for workers and
    epochs. Batches are refused, since their clouds would share one rotation.

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
        if dim not in (2, 3):
            raise ValueError(f"dim: expected 2 or 3, got {dim}")
        if axis not in (None, "x", "y", "z") or (axis is not None and dim == 2):
            raise ValueError(f"axis: expected None, or 'x', 'y' or 'z' in 3D, got {axis!r}")
        if not 0 <= max_shift < math.inf:
            raise ValueError(f"max_shift: expected a finite number of at least 0, got {max_shift}")
        self.dim, self.axis, self.max_shift = dim, axis, max_shift
        self.vectors, self.tensors = tuple(vectors), tuple(tensors)

    def __call__(self, data: Data) -> Data:
        check_arguments(RandomRotateFields.__call__, locals())
        if isinstance(data, Batch):
            raise ValueError("data: expected one cloud, got a Batch, whose clouds would share one rotation")
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
