"""The interface of all groups."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import (
    check_alike,
    check_broadcast,
    check_count,
    check_drawing,
    check_is,
    check_last,
    check_none,
    check_tensor,
    counted,
)
from lieattn._core.contexts import in_autocast, is_mapped, without_autocast
from lieattn._core.numerics import lengths
from lieattn._core.values import equal_values


@dataclass(frozen=True, repr=False)
class Group:
    """A group G of matrices that acts on R^dim: the common interface of :class:`FiniteGroup` and :class:`LieGroup`.

    Elements are plain tensors ``[*, size, size]``. All methods broadcast over the leading axes, and compute on the
    device and in the floating dtype of their input. Methods do not verify that matrices belong to the group;
    :meth:`check` does.

    Attributes
    ----------
    name
        Name of the group in messages and checkpoints.
    dim
        Dimension of the space on which the group acts.
    size
        Number of rows of the matrices: ``dim``, or ``dim + 1`` if the group has translations.
    algebra_dim
        Dimension of the group and of its Lie algebra; 0 for a finite group.
    has_rotations, has_reflections, has_dilations
        Whether a Lie group of linear maps contains all rotations of R^dim, all reflections, and all multiples by
        positive numbers. A class declares what is true of its groups; frames, certificates and forces rely on it.
    only_translates
        Whether all linear parts are the identity.
    """

    has_rotations: ClassVar[bool] = False
    has_reflections: ClassVar[bool] = False
    has_dilations: ClassVar[bool] = False
    only_translates: ClassVar[bool] = False

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

    def __eq__(self, other: object) -> bool:
        # All attributes are compared, since a group of the user may have further ones, such as an axis.
        return equal_values(self, other) if isinstance(other, Group) else NotImplemented

    def __repr__(self) -> str:
        return self.name

    # --- the group ------------------------------------------------------------------------------------------------

    def identity(self, like: Tensor) -> Tensor:
        """Return the identity ``[size, size]`` on the device and in the dtype of ``like``."""
        return torch.eye(self.size, dtype=like.dtype, device=like.device)

    def product(self, g: Float[Tensor, "*#batch n n"], h: Float[Tensor, "*#batch n n"]) -> Float[Tensor, "... n n"]:
        """Return the product g h ``[*, size, size]``, which acts by h first and then by g."""
        return matmul(g, h)

    def inverse(self, g: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
        """Return the inverse g⁻¹ ``[*, size, size]``."""
        return inverted(g)

    def relative(self, g: Float[Tensor, "*#batch n n"], h: Float[Tensor, "*#batch n n"]) -> Float[Tensor, "... n n"]:
        """Return g⁻¹ h ``[*, size, size]``, which is h seen from the frame g. It is the same for k g and k h."""
        return self.product(self.inverse(g), h)

    # --- the action -----------------------------------------------------------------------------------------------

    @property
    def is_affine(self) -> bool:
        """Whether elements have a translation in their last column."""
        return self.size > self.dim

    def linear(self, g: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch {self.dim} {self.dim}"]:
        """Return the linear part ``[*, dim, dim]``."""
        return g[..., : self.dim, : self.dim]

    def translation(self, g: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch {self.dim}"]:
        """Return the translation part ``[*, dim]``, which is zero for a group of linear maps."""
        return g[..., : self.dim, -1] if self.is_affine else torch.zeros_like(g[..., 0])

    def act(
        self, g: Float[Tensor, "*#batch n n"], points: Float[Tensor, "*#batch {self.dim}"]
    ) -> Float[Tensor, "... {self.dim}"]:
        """Move points ``[*, dim]`` by x ↦ A x + t."""
        self._check_acting(g, "points", points)
        return self._moved(g, points)

    def _moved(self, g: Tensor, points: Tensor) -> Tensor:
        """Compute :meth:`act` without checks."""
        moved = matvec(self.linear(g), points)
        return moved + self.translation(g) if self.is_affine else moved

    def act_vectors(
        self, g: Float[Tensor, "*#batch n n"], vectors: Float[Tensor, "*#batch {self.dim}"]
    ) -> Float[Tensor, "... {self.dim}"]:
        """Rotate vectors ``[*, dim]`` by v ↦ A v. Translations do not change them. Errors are those of :meth:`act`."""
        self._check_acting(g, "vectors", vectors)
        return matvec(self.linear(g), vectors)

    def _check_acting(self, g: Tensor, argument: str, vectors: Tensor) -> None:
        """Raise an error unless shapes, dtypes and devices of elements and vectors fit; values are not read."""
        check_last(argument, vectors, (self.dim,), self.name)
        check_last("g", g, (self.size, self.size), self.name)
        check_broadcast("g", g.shape[:-2], argument, vectors.shape[:-1])
        check_alike("g", g, argument, vectors)

    # --- what the action preserves --------------------------------------------------------------------------------

    @property
    def is_orthogonal(self) -> bool | None:
        """Whether all elements preserve distances; None for a group without exponential and random elements."""
        return _preserves(self)[0]

    @property
    def is_conformal(self) -> bool | None:
        """Whether all elements preserve ratios of distances; None where :attr:`is_orthogonal` is None."""
        return _preserves(self)[1]

    # --- the Lie algebra ------------------------------------------------------------------------------------------

    @property
    def has_logarithm(self) -> bool:
        """Whether :meth:`log` is defined, for all elements that are connected with the identity."""
        return type(self).log is not Group.log

    def hat(self, a: Float[Tensor, "*batch {self.algebra_dim}"]) -> Float[Tensor, "*batch n n"]:
        """Return the matrix ``[*, size, size]`` of the Lie algebra with coordinates ``a`` ``[*, algebra_dim]``."""
        raise NotImplementedError(f"{self.name} does not define coordinates of its Lie algebra: implement hat and vee")

    def vee(self, matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch {self.algebra_dim}"]:
        """Return the coordinates ``[*, algebra_dim]`` of a matrix of the Lie algebra, the inverse of :meth:`hat`."""
        raise NotImplementedError(f"{self.name} does not define coordinates of its Lie algebra: implement hat and vee")

    def _checked_algebra(self, a: Tensor) -> Tensor:
        if a.shape[-1:] != (self.algebra_dim,):
            raise ValueError(f"a: expected coordinates [*, {self.algebra_dim}] of {self.name}, got {tuple(a.shape)}")
        return a

    def exp(self, a: Float[Tensor, "*batch {self.algebra_dim}"]) -> Float[Tensor, "*batch n n"]:
        """Return the exponential ``[*, size, size]`` of coordinates ``[*, algebra_dim]``."""
        return torch.linalg.matrix_exp(self.hat(a))

    def log(self, g: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch {self.algebra_dim}"]:
        """Return the coordinates ``[*, algebra_dim]`` of least angle whose exponential is ``g``.

        ValueError is raised if an element has no logarithm.
        """
        raise NotImplementedError(f"{self.name} does not define a logarithm: implement log, or use smooth coordinates")

    def exp_integral(
        self, a: Float[Tensor, "*batch {self.algebra_dim}"]
    ) -> Float[Tensor, "*batch {self.dim} {self.dim}"]:
        """Return ``∫₀¹ linear(exp(x a)) dx`` ``[*, dim, dim]``, which maps translations of the algebra to the group.

        If V is this integral, the exponential of (a, u) in the product of the group and the translations is
        (exp a, V u).
        """
        linear = self.linear(self.hat(a))
        top = torch.cat([linear, torch.eye(self.dim, dtype=a.dtype, device=a.device).expand_as(linear)], dim=-1)
        return torch.linalg.matrix_exp(torch.cat([top, torch.zeros_like(top)], dim=-2))[..., : self.dim, self.dim :]

    def inverse_exp_integral(
        self, a: Float[Tensor, "*batch {self.algebra_dim}"]
    ) -> Float[Tensor, "*batch {self.dim} {self.dim}"]:
        """Return the inverse ``[*, dim, dim]`` of :meth:`exp_integral`."""
        return inverted(self.exp_integral(a))

    # --- coordinates and distances ----------------------------------------------------------------------------------

    @property
    def num_coordinates(self) -> int:
        """Number of smooth coordinates."""
        return self.dim * self.size

    def coordinates(self, g: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch {self.num_coordinates}"]:
        """Return smooth coordinates ``[*, num_coordinates]``: the linear part row by row, then the translation."""
        linear = self.linear(g).flatten(-2)
        return torch.cat([linear, self.translation(g)], dim=-1) if self.is_affine else linear

    def distance(self, g: Float[Tensor, "*#batch n n"], h: Float[Tensor, "*#batch n n"]) -> Float[Tensor, " ..."]:
        """Return a left-invariant distance ``[*]``, d(k g, k h) = d(g, h).

        Its gradient is 0 where g⁻¹ h is exactly the identity. For the rotations, dilations and translations of this
        library, and their semidirect products, it is 0 at g = h.
        """
        return lengths(self.log(self.relative(g, h)))

    # --- measure --------------------------------------------------------------------------------------------------

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw the float64 elements of :meth:`sample` on the device of the generator. Subclasses override it."""
        raise NotImplementedError(f"{self.name} does not define random elements: implement draw")

    def sample(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "... n n"]:
        """Draw independent elements ``[*shape, size, size]``, from the Haar measure if the group is compact.

        Elements are drawn in float64 on the device of ``generator`` (by default, torch's global generator on the CPU),
        and then converted to ``dtype`` (by default, torch's default dtype) and moved to ``device`` (by default, left
        where they are). They are therefore the same for all dtypes and devices.
        """
        check_drawing(shape, generator, dtype, device)
        return finish(drawn(self, shape, generator), dtype, device)

    def finite_subgroup(self, count: int) -> Group:
        """Return the finite group of ``count`` elements that :meth:`design` uses, or raise ValueError without one."""
        raise ValueError(f"{self.name} has no designs: no finite set of its elements represents the whole group")

    def design(
        self, count: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Float[Tensor, "{count} n n"]:
        """Return the elements ``[count, size, size]`` of :meth:`finite_subgroup`, which represent the whole group.

        They have equal weights. ValueError is raised if the group has no design of this size.
        """
        check_drawing((), None, dtype, device)
        method, subgroup = f"finite_subgroup of {self.name}", self.finite_subgroup(count)
        check_is(method, subgroup, Group)
        if getattr(subgroup, "order", None) != count:
            raise ValueError(f"{method}: expected {counted(count, 'element')}, got {subgroup!r}")
        elements: Tensor = cast(Any, subgroup).elements.clone()  # the caller may modify them, but not the subgroup
        self.check(method, elements)
        return finish(elements, dtype, device)

    def sample_design(
        self,
        *shape: int,
        count: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "... {count} n n"]:
        """Draw randomly rotated designs ``[*shape, count, size, size]``: one uniform element times :meth:`design`.

        Each element is uniformly distributed. The elements of one design are not independent, so that their mean is
        exact for functions of low degree. ValueError is raised if the group has no design of this size.
        """
        check_drawing(shape, generator, dtype, device)
        turn = drawn(self, shape, generator)
        design = self.design(count, dtype=torch.float64, device=turn.device)
        return finish(self.product(turn[..., None, :, :], design), dtype, device)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, argument: str, g: Tensor) -> None:
        """Raise TypeError or ValueError, naming the argument, unless ``g`` contains elements of this group.

        Subclasses override :meth:`faults`, not this method. Within ``torch.func.vmap``, only shape and dtype are
        checked.
        """
        check_last(argument, g, (self.size, self.size), self.name)
        if is_mapped(g):
            return
        infinite = ~torch.isfinite(g.detach()).flatten(-2).all(-1)
        check_none(argument, infinite, f"is not an element of {self.name}: it has an entry that is not finite")
        for fault, where in self.faults(g.detach()).items():
            check_none(argument, where, f"is not an element of {self.name}: {fault}")

    def faults(self, g: Tensor) -> dict[str, Tensor]:
        """Return the reasons why matrices with finite entries are not elements, in the order of :meth:`check`.

        The keys describe the reasons. The values are masks ``[*]`` of the matrices that they apply to.
        """
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

    A name and three sizes are enough for product, inverse and action. Implement :meth:`hat` and :meth:`vee` to get
    :meth:`exp`, :meth:`log` to get :meth:`distance`, :meth:`draw` to get :meth:`sample`, and :meth:`finite_subgroup`
    to get :meth:`design`. docs/your_own_group.md has worked examples.
    """


@lru_cache(maxsize=256)
def _preserves(group: Group) -> tuple[bool | None, bool | None]:
    """Return whether generic elements preserve distances, and their ratios; None if there are no elements to test."""
    found = [elements] if (elements := getattr(group, "elements", None)) is not None else []
    with suppress(NotImplementedError):
        found.append(group.exp(torch.linspace(0.3, 0.7, group.algebra_dim, dtype=torch.float64))[None])
    with suppress(NotImplementedError):
        found.append(drawn(group, (4,), torch.Generator().manual_seed(0)))
    if not found:
        return None, None
    linear = group.linear(torch.cat(found))
    gram = linear.mT @ linear
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    one, allowed = torch.eye(group.dim, dtype=gram.dtype), max(1e-9, getattr(group, "tolerance", 0.0))
    return bool((gram - one).abs().max() <= allowed), bool((gram / scale - one).abs().max() <= allowed)


def drawn(group: Group, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw float64 elements, and check them, since :meth:`Group.draw` may be the user's."""
    method, elements = f"draw of {group.name}", group.draw(shape, generator)
    check_tensor(method, elements, "floating elements")
    expected = (*shape, group.size, group.size)
    if elements.shape != expected:
        raise ValueError(f"{method}: expected elements {expected}, got {tuple(elements.shape)}")
    return elements.double()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in their own dtype, also under autocast, because geometry needs full precision."""
    if in_autocast(a.device):
        with without_autocast(a.device):
            return a @ b
    return a @ b


def matvec(a: Float[Tensor, "*#batch m k"], v: Float[Tensor, "*#batch k"]) -> Float[Tensor, "... m"]:
    """Multiply matrices ``[*, m, k]`` and vectors ``[*, k]`` in their own dtype, as :func:`matmul` does."""
    return matmul(a, v[..., None])[..., 0]


def affine(linear: Float[Tensor, "*#batch d d"], translation: Float[Tensor, "*#batch d"]) -> Float[Tensor, "... n n"]:
    """Return matrices [[A, t], [0, 1]] ``[*, d + 1, d + 1]`` from A ``[*, d, d]`` and t ``[*, d]``."""
    check_tensor("translation", translation, "a floating tensor [*, d]")
    if translation.ndim == 0:
        raise ValueError("translation: expected [*, d], got a scalar")
    check_last("linear", linear, (translation.shape[-1],) * 2, "translations of this dimension")
    check_broadcast("linear", linear.shape[:-2], "translation", translation.shape[:-1])
    check_alike("linear", linear, "translation", translation)
    return homogeneous(linear, translation)


def homogeneous(linear: Tensor, translation: Tensor) -> Tensor:
    """Compute :func:`affine` without checks."""
    dim = translation.shape[-1]
    shape = torch.broadcast_shapes(linear.shape[:-2], translation.shape[:-1])
    top = torch.cat([linear.expand(*shape, dim, dim), translation[..., None].expand(*shape, dim, 1)], dim=-1)
    bottom = torch.zeros_like(top[..., :1, :])
    bottom[..., -1] = 1
    return torch.cat([top, bottom], dim=-2)


def determinant(matrices: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return determinants ``[*]``, in float32 for half precision, which torch does not support and which underflows."""
    return torch.linalg.det(_wide(matrices))


def volume(matrices: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return the absolute values of determinants of invertible matrices ``[*]``, in float32 for half precision.

    The second derivatives of ``torch.linalg.det`` in ``torch.func`` are wrong, or NaN at rotations.
    """
    return torch.linalg.lu_factor(_wide(matrices))[0].diagonal(dim1=-2, dim2=-1).prod(-1).abs()


def inverted(matrices: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return the inverses of matrices, also in half precision, which torch does not support."""
    return torch.linalg.inv(_wide(matrices)).to(matrices.dtype)


def _wide(matrices: Tensor) -> Tensor:
    return matrices.float() if matrices.dtype in (torch.float16, torch.bfloat16) else matrices


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest error allowed in an entry of an element: a few rounding steps in half precision."""
    return 1e-6 if dtype == torch.float64 else max(1e-4, 8 * torch.finfo(dtype).eps)


def far(found: Tensor, expected: Tensor | float) -> Tensor:
    """Return the mask of numbers that differ by more than the :func:`tolerance` of their dtype."""
    return (found - expected).abs() > tolerance(found.dtype)


def draw_normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw standard normal float64 numbers on the device of the generator."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device if generator else "cpu")


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw uniform float64 numbers in [0, 1) on the device of the generator."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device if generator else "cpu")


def finish(elements: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """Convert float64 elements to a dtype, by default torch's default one, and move them to a device, if given."""
    return elements.to(dtype=dtype or torch.get_default_dtype(), device=device)
