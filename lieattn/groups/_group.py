"""The interface of all groups, finite and Lie, and the defaults that serve any group of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lieattn._autocast import in_autocast, without_autocast
from lieattn._checks import (
    check_alike,
    check_broadcast,
    check_count,
    check_drawing,
    check_is,
    check_last,
    check_none,
    check_tensor,
)
from lieattn._lengths import lengths

if TYPE_CHECKING:
    from lieattn.groups._finite import FiniteGroup


@dataclass(frozen=True, repr=False)
class Group:
    """A group G of matrices that acts on R^dim: the interface that :class:`FiniteGroup` and :class:`LieGroup` share.

    Elements are plain tensors ``[*, size, size]``. Everything broadcasts over the leading axes and runs on the device
    and in the floating dtype of its input. Only :meth:`check` looks for matrices that do not belong to the group.

    ``name`` is what the group is called in messages and checkpoints, ``dim`` the dimension of the space acted on,
    ``size`` the rows of the matrices, ``dim`` or, if there are translations, ``dim + 1``, and ``algebra_dim`` the
    dimension of the group and of its Lie algebra, 0 for a finite group.
    """

    name: str
    dim: int
    size: int
    algebra_dim: int

    def __post_init__(self) -> None:
        check_is("name", self.name, str)
        check_count("dim", self.dim)
        check_count("algebra_dim", self.algebra_dim, least=0)
        if self.size not in (self.dim, self.dim + 1):
            raise ValueError(f"size: expected {self.dim} (linear) or {self.dim + 1} (affine), got {self.size}")

    def __repr__(self) -> str:
        return self.name

    # --- the group ------------------------------------------------------------------------------------------------

    def identity(self, like: Tensor) -> Tensor:
        """The identity ``[size, size]`` on the device and in the dtype of ``like``."""
        return torch.eye(self.size, dtype=like.dtype, device=like.device)

    def product(self, g: Tensor, h: Tensor) -> Tensor:
        """The element g h, which acts by h first."""
        return matmul(g, h)

    def inverse(self, g: Tensor) -> Tensor:
        """The inverse g⁻¹."""
        return inverted(g)

    def relative(self, g: Tensor, h: Tensor) -> Tensor:
        """The element g⁻¹ h, which is h seen from the frame g: the same for k g and k h."""
        return self.product(self.inverse(g), h)

    # --- the action -----------------------------------------------------------------------------------------------

    @property
    def is_affine(self) -> bool:
        """Whether elements carry a translation in their last column."""
        return self.size > self.dim

    def linear(self, g: Tensor) -> Tensor:
        """Linear part ``[*, dim, dim]``."""
        return g[..., : self.dim, : self.dim]

    def translation(self, g: Tensor) -> Tensor:
        """Translation part ``[*, dim]``; zero for a group of linear maps."""
        return g[..., : self.dim, -1] if self.is_affine else torch.zeros_like(g[..., 0])

    def act(self, g: Tensor, points: Tensor) -> Tensor:
        """Move points ``[*, dim]``, x ↦ A x + t; raises ValueError if they have another dimension."""
        self._check_acting(g, "points", points)
        return self._moved(g, points)

    def _moved(self, g: Tensor, points: Tensor) -> Tensor:
        """:meth:`act` of tensors that are known to fit."""
        moved = matvec(self.linear(g), points)
        return moved + self.translation(g) if self.is_affine else moved

    def act_vectors(self, g: Tensor, vectors: Tensor) -> Tensor:
        """Turn vectors ``[*, dim]``, v ↦ A v, which translations leave alone; raises ValueError as :meth:`act`."""
        self._check_acting(g, "vectors", vectors)
        return matvec(self.linear(g), vectors)

    def _check_acting(self, g: Tensor, argument: str, vectors: Tensor) -> None:
        """Raise an error unless shapes, dtypes and devices are those of elements and of points; values are not read."""
        self._check_vectors(argument, vectors)
        check_last("g", g, (self.size, self.size), self.name)
        check_broadcast("g", g.shape[:-2], argument, vectors.shape[:-1])
        check_alike("g", g, argument, vectors)

    def _check_vectors(self, argument: str, vectors: Tensor) -> None:
        check_tensor(argument, vectors, f"floating vectors [*, {self.dim}]")
        if vectors.shape[-1:] != (self.dim,):
            raise ValueError(
                f"{argument}: expected vectors [*, {self.dim}] for {self.name}, got {tuple(vectors.shape)}"
            )

    # --- the Lie algebra ------------------------------------------------------------------------------------------

    def hat(self, a: Tensor) -> Tensor:
        """Matrix ``[*, size, size]`` of the Lie algebra with coordinates ``a`` ``[*, algebra_dim]``."""
        raise NotImplementedError(f"{self.name} does not define coordinates of its Lie algebra: implement hat and vee")

    def vee(self, matrix: Tensor) -> Tensor:
        """Coordinates ``[*, algebra_dim]`` of a matrix of the Lie algebra: the inverse of :meth:`hat`."""
        raise NotImplementedError(f"{self.name} does not define coordinates of its Lie algebra: implement hat and vee")

    def _checked_algebra(self, a: Tensor) -> Tensor:
        if a.shape[-1:] != (self.algebra_dim,):
            raise ValueError(f"a: expected coordinates [*, {self.algebra_dim}] of {self.name}, got {tuple(a.shape)}")
        return a

    def exp(self, a: Tensor) -> Tensor:
        """Exponential ``[*, size, size]`` of coordinates ``[*, algebra_dim]``."""
        return torch.linalg.matrix_exp(self.hat(a))

    def log(self, g: Tensor) -> Tensor:
        """Coordinates ``[*, algebra_dim]`` of least angle with exponential ``g``; ValueError where there is none."""
        raise NotImplementedError(f"{self.name} does not define a logarithm: implement log, or use smooth coordinates")

    def exp_integral(self, a: Tensor) -> Tensor:
        """``∫₀¹ linear(exp(x a)) dx`` ``[*, dim, dim]``, which takes translations of the Lie algebra to the group.

        With V the integral, exp of (a, u) is (exp a, V u) in the product of this group with the translations.
        """
        linear = self.hat(a)[..., : self.dim, : self.dim]
        top = torch.cat([linear, torch.eye(self.dim, dtype=a.dtype, device=a.device).expand_as(linear)], dim=-1)
        return torch.linalg.matrix_exp(torch.cat([top, torch.zeros_like(top)], dim=-2))[..., : self.dim, self.dim :]

    def inverse_exp_integral(self, a: Tensor) -> Tensor:
        """Inverse ``[*, dim, dim]`` of :meth:`exp_integral`."""
        return inverted(self.exp_integral(a))

    # --- numbers made of elements -----------------------------------------------------------------------------------

    @property
    def num_coordinates(self) -> int:
        """Number of smooth coordinates."""
        return self.dim * self.size

    def coordinates(self, g: Tensor) -> Tensor:
        """Coordinates ``[*, num_coordinates]``, smooth everywhere: the linear part row by row, then the translation."""
        linear = self.linear(g).flatten(-2)
        return torch.cat([linear, self.translation(g)], dim=-1) if self.is_affine else linear

    def distance(self, g: Tensor, h: Tensor) -> Tensor:
        """Left-invariant distance ``[*]``: d(k g, k h) = d(g, h). Its gradient where g = h is 0."""
        return lengths(self.log(self.relative(g, h)))

    # --- measure --------------------------------------------------------------------------------------------------

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Float64 elements of :meth:`sample`, on the device of the generator: a subclass overrides this method."""
        raise NotImplementedError(f"{self.name} does not define random elements: implement draw")

    def sample(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Independent random elements ``[*shape, size, size]``, uniform (Haar) if the group is compact.

        The draw is made in float64 on the device of the generator (torch's default one if absent), so the elements do
        not depend on ``dtype`` and ``device``, which are those of the result (torch's defaults if absent).
        """
        check_drawing(shape, generator, dtype, device)
        return _finish(self.draw(shape, generator), dtype, device)

    def finite_subgroup(self, count: int) -> FiniteGroup:
        """Finite subgroup of ``count`` elements, of which :meth:`design` is made; ValueError where there is none."""
        raise ValueError(f"{self.name} has no designs: no finite set of its elements represents the whole group")

    def design(
        self, count: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Equal-weight elements ``[count, size, size]`` that stand for the whole group: :meth:`finite_subgroup`.

        ValueError is raised where there is none.
        """
        check_drawing((), None, dtype, device)
        return _finish(self.finite_subgroup(count).elements, dtype, device)

    def sample_design(
        self,
        *shape: int,
        count: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Designs turned at random, ``[*shape, count, size, size]``: one uniform element times :meth:`design`.

        Each element is uniform, but those of one design are not independent: together they average functions of low
        degree exactly.
        """
        check_drawing(shape, generator, dtype, device)
        turn = self.draw(shape, generator)
        design = self.design(count, dtype=torch.float64, device=turn.device)
        return _finish(self.product(turn[..., None, :, :], design), dtype, device)

    # --- bad input ------------------------------------------------------------------------------------------------

    def check(self, argument: str, g: Tensor) -> None:
        """Raise TypeError or ValueError, naming the argument, unless ``g`` holds elements of this group.

        Subclasses override :meth:`faults`, not this method.
        """
        check_tensor(argument, g, f"floating matrices of {self.name}")
        if g.shape[-2:] != (self.size, self.size):
            size = f"[*, {self.size}, {self.size}]"
            raise ValueError(f"{argument}: expected elements {size} of {self.name}, got {tuple(g.shape)}")
        infinite = ~torch.isfinite(g.detach()).flatten(-2).all(-1)
        check_none(argument, infinite, f"is not an element of {self.name}: it has an entry that is not finite")
        for fault, where in self.faults(g.detach()).items():
            check_none(argument, where, f"is not an element of {self.name}: {fault}")

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        """Reasons why finite matrices are not elements: a description, and ``[*]`` bool where it holds, in order."""
        found = {}
        if self.is_affine:
            bottom = self.identity(g)[-1]
            found[f"its last row is not {bottom.int().tolist()}"] = far(g[..., -1, :], bottom).any(-1)
        linear = self.linear(g)
        volume = torch.linalg.vector_norm(_wide(linear), dim=-2).prod(-1)
        found["it has no inverse"] = determinant(linear).abs() <= 4 * torch.finfo(g.dtype).eps * volume
        return found


class LieGroup(Group):
    """A Lie group of matrices; derive your own from this class.

    A name and three sizes are enough for product, inverse and action. Override :meth:`hat` and :meth:`vee` to get
    :meth:`exp`, :meth:`log` to get :meth:`distance`, :meth:`draw` to get :meth:`sample`, and :meth:`finite_subgroup`
    to get :meth:`design`. docs/your_own_group.md has worked examples.
    """


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Product of matrices in their own dtype, also under autocast: geometry keeps its precision."""
    if in_autocast(a.device):
        with without_autocast(a.device):
            return a @ b
    return a @ b


def matvec(a: Tensor, v: Tensor) -> Tensor:
    """Product of matrices ``[*, m, k]`` and vectors ``[*, k]``, in their dtype as :func:`matmul`."""
    return matmul(a, v[..., None])[..., 0]


def determinant(matrices: Tensor) -> Tensor:
    """Determinants ``[*]``, of matrices in half precision in single: torch has no others, and they would underflow."""
    return torch.linalg.det(_wide(matrices))


def inverted(matrices: Tensor) -> Tensor:
    """Inverses of matrices, also in half precision, which torch does not invert."""
    return torch.linalg.inv(_wide(matrices)).to(matrices.dtype)


def _wide(matrices: Tensor) -> Tensor:
    return matrices.float() if matrices.dtype in (torch.float16, torch.bfloat16) else matrices


def tolerance(dtype: torch.dtype) -> float:
    """How far from its group an element may be, largest entry: in half precision a few of its roundings."""
    return 1e-6 if dtype == torch.float64 else max(1e-4, 8 * torch.finfo(dtype).eps)


def far(found: Tensor, expected: Tensor | float) -> Tensor:
    """Where numbers differ by more than the :func:`tolerance` of their dtype."""
    return (found - expected).abs() > tolerance(found.dtype)


def draw_normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Standard normal float64 numbers, drawn where the generator lives."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device if generator else "cpu")


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Uniform float64 numbers in [0, 1), drawn where the generator lives."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device if generator else "cpu")


def _finish(elements: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """Elements made in float64, in the dtype and on the device asked for."""
    return elements.to(dtype=dtype or torch.get_default_dtype(), device=device)
