"""R^d ⋊ H, the semidirect product of the translations with a group of matrices, written once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.groups._finite import FiniteGroup, check_group
from lieattn.groups._matrices import rows


@dataclass(frozen=True)
class AffineGroup:
    """G = R^d ⋊ H for a finite group H of d x d matrices: elements x ↦ A x + t with A in H.

    Elements are plain tensors ``[*, d + 1, d + 1]``, the homogeneous matrices [[A, t], [0, 1]]; the object
    itself holds no data but H. Everything broadcasts over the leading axes and runs on the device and
    in the floating dtype of its input.

    Attributes
    ----------
    stabilizer
        H, which keeps the origin where it is.
    """

    stabilizer: FiniteGroup

    def __post_init__(self) -> None:
        check_group("stabilizer", self.stabilizer)

    @property
    def name(self) -> str:
        """What the group is called in messages."""
        return f"R{self.dim}x|{self.stabilizer.name}"

    @property
    def dim(self) -> int:
        """Dimension d of the space acted on."""
        return self.stabilizer.dim

    def element(self, translation: Tensor, h: int | Tensor) -> Tensor:
        """Element with translation ``[*, d]`` and matrix of index ``h`` ``[*]``: ``[*, d + 1, d + 1]``."""
        self._check_vectors("translation", translation)
        matrix = rows("h", h, self.stabilizer.matrices(translation), self.stabilizer.name)
        shape = torch.broadcast_shapes(matrix.shape[:-2], translation.shape[:-1])
        column = translation[..., None].expand(*shape, self.dim, 1)
        top = torch.cat([matrix.expand(*shape, self.dim, self.dim), column], dim=-1)
        bottom = torch.zeros_like(top[..., :1, :])
        bottom[..., -1] = 1
        return torch.cat([top, bottom], dim=-2)

    def identity(self, like: Tensor) -> Tensor:
        """The identity ``[d + 1, d + 1]`` on the device and in the dtype of ``like``."""
        return torch.eye(self.dim + 1, dtype=like.dtype, device=like.device)

    def translation(self, g: Tensor) -> Tensor:
        """Translation part ``[*, d]``."""
        return g[..., :-1, -1]

    def linear(self, g: Tensor) -> Tensor:
        """Matrix part ``[*, d, d]``."""
        return g[..., :-1, :-1]

    def index(self, g: Tensor) -> Tensor:
        """Index in H of the matrix part, ``[*]`` int64; raises ValueError if it is not in H."""
        return self.stabilizer.index(self.linear(g))

    def product(self, g: Tensor, h: Tensor) -> Tensor:
        """The element g h, which acts by h first: (A, t)(B, s) = (A B, A s + t)."""
        return g @ h

    def inverse(self, g: Tensor) -> Tensor:
        """The inverse (A⁻¹, -A⁻¹ t), with A⁻¹ looked up in H and so without rounding."""
        inverse = self.stabilizer.inverse_index.to(g.device)[self.index(g)]
        return self.element(-self.stabilizer.act(inverse, self.translation(g)), inverse)

    def act_points(self, g: Tensor, points: Tensor) -> Tensor:
        """Move points ``[*, d]``: x ↦ A x + t."""
        self._check_vectors("points", points)
        return self.act_vectors(g, points) + self.translation(g)

    def act_vectors(self, g: Tensor, vectors: Tensor) -> Tensor:
        """Turn vectors ``[*, d]``, which translations leave alone: v ↦ A v."""
        self._check_vectors("vectors", vectors)
        return (self.linear(g) @ vectors[..., None])[..., 0]

    def act_field(self, g: Tensor, field: Tensor) -> Tensor:
        """Move a field sampled on a cloud: ``[points, fiber, channels]``, (g · f)(g x, a) = f(x, A⁻¹ a).

        The points carry their values along, so only the fiber is permuted; move the points themselves
        with :meth:`act_points`. ``g`` is one element.
        """
        if g.shape != (self.dim + 1, self.dim + 1):
            raise ValueError(f"g: expected one element [{self.dim + 1}, {self.dim + 1}], got {tuple(g.shape)}")
        return self.stabilizer.translate(int(self.index(g)), field)

    def fiber_permutation(self, g: Tensor) -> Tensor:
        """``[*, order]`` int64 p with (g · f)(g x, a) = f(x, p[a])."""
        return self.stabilizer.relative_index.to(g.device)[self.index(g)]

    def _check_vectors(self, argument: str, vectors: Tensor) -> None:
        if vectors.shape[-1] != self.dim or not vectors.is_floating_point():
            raise ValueError(
                f"{argument}: {self.name} takes floating vectors [*, {self.dim}], got {vectors.dtype} "
                f"{tuple(vectors.shape)}"
            )
