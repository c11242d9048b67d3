"""Group convolutions of fields on grids of pixels or voxels; kernels are moved by integer indices, without rounding.

Axes of arrays are ``rows, columns`` in the plane and ``layers, rows, columns`` in space. The first coordinate points to
the right (along columns), the second up (against rows), and the third along layers. ``*sides`` stands for both cases.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lieattn._core.checks import (
    axes_of,
    check_alike,
    check_arguments,
    check_choice,
    check_count,
    check_counts,
    check_features,
    check_is,
    check_positive,
    check_tensor,
    permute_axes,
)
from lieattn._core.contexts import transformed
from lieattn.geometry import Raster, point_clouds
from lieattn.groups import FiniteGroup, check_group
from lieattn.io import TiedWeights
from lieattn.nn._statistics import Inexact, warn_or_raise

CONVOLUTIONS = {2: F.conv2d, 3: F.conv3d}


def to_grid(x: Tensor, grid: Tensor) -> Tensor:
    """Reshape a field ``[points, (fiber,) channels]`` to ``[images, channels, (fiber,) *sides]``.

    Points are in raster order, image after image. ``grid`` ``[images, dim]`` int64 contains the numbers of rows and
    columns, or of layers, rows and columns, of each image. ValueError is raised if images differ in size or the number
    of points is not the number of pixels.
    """
    check_is("x", x, Tensor)
    check_tensor("grid", grid, "sides [images, dim], int64", torch.int64)
    if grid.ndim != 2 or grid.shape[1] not in CONVOLUTIONS or len(grid) == 0 or bool((grid != grid[0]).any()):
        raise ValueError(f"grid: expected [images, 2 or 3] with one size for all images, got {grid.tolist()}")
    sides = grid[0].tolist()
    points = len(grid) * math.prod(sides)
    if x.ndim not in (2, 3) or x.shape[0] != points:
        raise ValueError(f"x: expected [points={points}, (fiber,) channels], got {tuple(x.shape)}")
    planes = x.reshape(len(grid), *sides, *x.shape[1:]).movedim(-1, 1)
    return planes if x.ndim == 2 else planes.movedim(-1, 2)


def from_grid(x: Tensor, dim: int = 2) -> Tensor:
    """Reshape a grid field with ``dim`` sides to points in raster order, the inverse of :func:`to_grid`.

    ``x`` ``[images, channels, (fiber,) *sides]`` becomes ``[points, (fiber,) channels]``; ValueError for other shapes.
    """
    check_is("x", x, Tensor)
    check_choice("dim", dim, tuple(CONVOLUTIONS))
    if x.ndim not in (2 + dim, 3 + dim):
        raise ValueError(f"x: expected [images, channels, (fiber,) {axes_of(dim)}], got {tuple(x.shape)}")
    return (x if x.ndim == 2 + dim else x.movedim(2, -1)).movedim(1, -1).flatten(0, dim)


def act_on_grid(group: FiniteGroup, h: int, x: Tensor) -> Tensor:
    """Apply a group element to an image or field, about the center: (h · f)(h̃, y) = f(h⁻¹h̃, h⁻¹y).

    Parameters
    ----------
    group
        A group of the plane or space that preserves the lattice of pixels or voxels; otherwise ValueError.
    h
        Index of the element.
    x
        ``[batch, channels, (order,) *sides]``. Sides are exchanged if h exchanges the axes.
    """
    check_arguments(act_on_grid, locals())
    check_lattice_group(group)
    dim = group.dim
    if not 0 <= h < group.order:
        raise ValueError(f"h: expected the index of one of the {group.order} elements of {group.name}, got {h}")
    if x.ndim not in (2 + dim, 3 + dim) or (x.ndim == 3 + dim and x.shape[2] != group.order):
        axes = axes_of(dim)
        raise ValueError(
            f"x: expected [batch, channels, {axes}] or [batch, channels, {group.order}, {axes}], got {tuple(x.shape)}"
        )
    if x.ndim == 3 + dim:
        x = x[:, :, group.permutation(h).to(x.device)]
    # Axis a of the result is axis source[a] of x, possibly reversed.
    matrix = _on_axes(group)[group.inverse_index[h]]
    source, sign = matrix.abs().argmax(dim=0).tolist(), matrix.sum(dim=0).tolist()
    first = x.ndim - dim
    moved = x.permute(*range(first), *(first + axis for axis in source))
    return moved.flip([first + axis for axis in range(dim) if sign[axis] < 0])


def grid_images(data: Any) -> Tensor:
    """Return images ``[images, channels, *sides]`` of a batch of clouds, with pixels placed by their coordinates.

    If quarter turns, reflections and translations were applied to the points, the result is the moved image.

    Parameters
    ----------
    data
        A tensor of images, which is returned unchanged; or a torch_geometric ``Data`` or ``Batch`` with features ``x``
        ``[points, channels]``, coordinates ``pos`` ``[points, dim]`` (right, up, along layers), and ``grid``
        ``[images, dim]``. TypeError or ValueError is raised if an attribute is missing, images differ in size, or
        points are not on a lattice that is parallel to the axes.
    """
    if isinstance(data, Tensor):
        if data.ndim not in (4, 5):
            expected = "[images, channels, (layers,) rows, columns]"
            raise ValueError(f"data: expected images {expected}, got {tuple(data.shape)}")
        return data
    x, pos = getattr(data, "x", None), getattr(data, "pos", None)
    if not isinstance(x, Tensor) or not isinstance(pos, Tensor) or x.ndim != 2:
        raise TypeError(
            "data: expected images as a tensor, or a torch_geometric Data or Batch with x [points, channels] and pos, "
            f"got {type(data).__name__}"
        )
    clouds = point_clouds(data)
    check_alike("data.x", x, "data.pos", pos)
    if len(x) != clouds.num_points:
        raise ValueError(f"data.x: expected a row for each of {clouds.num_points} points, got {tuple(x.shape)}")
    raster, order = Raster.read(clouds)
    return raster.unflatten(x[order]).movedim(-1, 1)


def check_lattice_group(group: FiniteGroup) -> None:
    """Raise an error unless a group maps the lattice of pixels or voxels, and its square windows, to themselves."""
    check_group("group", group)
    if group.dim not in CONVOLUTIONS or not bool(permute_axes(group.elements).all()):
        raise ValueError(
            "group: expected a group of the plane or space that permutes and reverses coordinate axes, such as "
            f"cyclic(4), dihedral(4) or octahedral(), got {group.name}; for other groups use the layers on point clouds"
        )


def _on_axes(group: FiniteGroup) -> Tensor:
    """Return the elements as matrices on array axes, ``[order, dim, dim]`` int64: in reverse order, rows down."""
    matrices = group.elements.round().to(torch.int64).flip(-1, -2)
    down = torch.ones(group.dim, dtype=torch.int64)
    down[-2] = -1
    return down[:, None] * matrices * down


def lifting_taps(group: FiniteGroup, size: int) -> Tensor:
    """Return the index of cell h⁻¹p in a kernel without frames, for each frame h and cell p.

    The result is ``[order, size^dim]`` int64. Cells are in raster order, and the group acts about the center.
    """
    check_lattice_group(group)
    check_count("size", size)
    steps = 2 * torch.arange(size) - (size - 1)
    place = torch.stack(torch.meshgrid(*[steps] * group.dim, indexing="ij"), dim=-1).flatten(0, -2)
    moved = torch.einsum("hij,pj->hpi", _on_axes(group)[group.inverse_index], place)
    entries = moved.new_tensor([size**axis for axis in reversed(range(group.dim))])
    return ((size - 1 + moved) // 2) @ entries


def group_taps(group: FiniteGroup, size: int) -> Tensor:
    """Return the index of entry (h⁻¹h̃, h⁻¹p) in a kernel on the group, ``[order, order, size^dim]`` int64."""
    cells = lifting_taps(group, size)
    return group.relative_index[:, :, None] * cells.shape[1] + cells[:, None]


class _PermutedCopies(torch.autograd.Function):
    """Copies of the last axis in several orders. The gradient gathers by the inverse orders, in place of a scatter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, orders: Tensor) -> Tensor:
        ctx.save_for_backward(orders)
        return weight.index_select(-1, orders.flatten()).unflatten(-1, orders.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (orders,) = ctx.saved_tensors
        copies, entries = orders.shape
        starts = entries * torch.arange(copies, device=orders.device)[:, None]
        places = (orders.argsort(dim=1) + starts).flatten()
        copied = grads[0].flatten(-2).index_select(-1, places)
        # Batched gradients do not support unflatten.
        return copied.view(*copied.shape[:-1], *orders.shape).sum(dim=-2), None


def permuted_copies(
    weight: Float[Tensor, "*batch entries"], orders: Int[Tensor, "copies entries"]
) -> Float[Tensor, "*batch copies entries"]:
    """Return ``weight[..., orders]`` ``[*, copies, entries]``; each row of ``orders`` is a permutation."""
    if transformed():
        return weight.index_select(-1, orders.flatten()).unflatten(-1, orders.shape)
    return cast(Tensor, _PermutedCopies.apply(weight, orders))


def moved_kernels(weight: Tensor, taps: Tensor) -> Tensor:
    """Return the kernels ``[out, order, in, fiber, *sides]`` of all output frames; without input frames the fiber is 1.

    ``weight`` is ``[out, in, (fiber,) *sides]``, and ``taps`` the result of :func:`lifting_taps` or
    :func:`group_taps`.
    """
    moved = permuted_copies(weight.flatten(2), taps.flatten(1))
    return moved.unflatten(-1, (-1, *weight.shape[taps.ndim :])).transpose(1, 2)


def checked_measure(measure: float | None, group: FiniteGroup, *, lifting: bool, attentive: bool = False) -> float:
    """Return the given weight of the sum over the input fiber, or the default; ValueError if it is not finite.

    The default is that of the authors' code: 2π/n for n rotations, and twice as much with reflections (π for p4m); for
    the attentive layers 2π/|H| (π/4 for p4m). For lifting and for groups without rotations or of other dimensions it is
    1.
    """
    if measure is None:
        rotations = int((torch.linalg.det(group.elements) > 0).sum())
        published = not lifting and group.dim == 2 and rotations > 1
        measure = 2 * math.pi / (group.order if attentive else rotations**2 / group.order) if published else 1.0
    if not math.isfinite(measure):
        raise ValueError(f"measure: expected a finite number, got {measure}")
    return float(measure)


class GridConvolution(TiedWeights):
    """Base class of the two convolutions: the kernel, its copies for all frames, and a check of strides."""

    lifting: ClassVar[bool] = False
    attentive: ClassVar[bool] = False
    taps: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        stride: int = 1,
        pad: int = 0,
        dilation: int = 1,
        measure: float | None = None,
        init_scale: float = 1.0,
        inexact: Inexact = "refuse",
    ) -> None:
        check_arguments(GridConvolution.__init__, locals())
        check_positive(init_scale=init_scale)
        super().__init__()
        taps = lifting_taps(group, size) if self.lifting else group_taps(group, size)
        check_counts(in_channels=in_channels, out_channels=out_channels, stride=stride, dilation=dilation)
        check_count("pad", pad, least=0)
        self.measure = checked_measure(measure, group, lifting=self.lifting, attentive=self.attentive)
        self.group, self.size, self.in_channels, self.out_channels = group, size, in_channels, out_channels
        self.stride, self.pad, self.dilation, self.inexact = stride, pad, dilation, inexact
        fiber = () if self.lifting else (group.order,)
        bound, sides = init_scale / math.sqrt(in_channels * size**group.dim), [size] * group.dim
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *fiber, *sides).uniform_(-bound, bound))
        self.register_buffer("taps", taps, persistent=False)
        # Strided samples need to be symmetric about the center only on axes of the array that an element reverses.
        self._turns = (_on_axes(group) < 0).any(dim=-1).any(dim=0).tolist()

    def kernels(self) -> Tensor:
        """Return the kernel of every output frame, ``[out, order, in, fiber, *sides]``."""
        return moved_kernels(self.weight, self.taps)

    def forward(self, x: Float[Tensor, "batch channels ..."]) -> Float[Tensor, "batch outputs order ..."]:
        """Map ``[batch, in_channels, (order,) *sides]`` to ``[batch, out_channels, order, *sides']``.

        ValueError is raised if the shape is wrong, the kernel does not fit, or the stride breaks the symmetry and
        ``inexact`` is ``"refuse"``.
        """
        kernels = self.kernels().flatten(0, 1).flatten(1, 2)
        if self.measure != 1:
            kernels = self.measure * kernels
        convolve = CONVOLUTIONS[self.group.dim]
        out = convolve(self.checked(x).flatten(1, 2), kernels, None, self.stride, self.pad, self.dilation)
        return out.unflatten(1, (self.out_channels, self.group.order))

    def checked(self, x: Tensor) -> Tensor:
        """Return the input with an axis for the fiber, also for lifting; raise or warn if it does not fit."""
        x = check_grid(x, self.group, self.in_channels, self.weight, lifting=self.lifting)
        sides = x.shape[3:]
        for side, turns in zip(sides, self._turns, strict=True):
            reach = side + 2 * self.pad - self.dilation * (self.size - 1) - 1
            if reach < 0:
                raise ValueError(
                    f"x: a kernel of side {self.size} with dilation {self.dilation} and pad {self.pad} does not fit "
                    f"into {' x '.join(map(str, sides))} pixels: take larger images, or a pad"
                )
            rest = reach % self.stride
            if rest and turns:
                exact = " or ".join(str(s) for s in (side - rest, side + self.stride - rest) if s > 0)
                warn_or_raise(
                    self.inexact,
                    f"stride {self.stride} samples {side} pixels off center, which breaks equivariance to "
                    f"{self.group.name}; use {exact} pixels, or stride 1 and pooling by {self.stride}",
                )
        return x

    def extra_repr(self) -> str:
        """Return group and sizes as text."""
        return (
            f"{self.group.name}, {self.in_channels}, {self.out_channels}, size={self.size}, stride={self.stride}, "
            f"pad={self.pad}, dilation={self.dilation}, measure={self.measure:.6g}"
        )


class GridLiftingConvolution(GridConvolution):
    r"""Lifting convolution on a grid of pixels or voxels: from planes to a field on the group.

    .. math::  f'_o(h, y) = \sum_c \sum_p f_c(y + p) \psi_{oc}(h^{-1} p)

    The parameters are those of :class:`GridGroupConvolution`. The default of the measure is 1.

    **Equivariance.** If h acts on the image about its center, f'(h̃, y) becomes f'(h⁻¹h̃, h⁻¹y), exactly, for even and
    odd sizes. With stride s, (side + 2 pad - dilation (size - 1) - 1) must be divisible by s.
    """

    lifting = True


class GridGroupConvolution(GridConvolution):
    r"""Group convolution on a grid of pixels or voxels: from a field to a field on the group.

    .. math::  f'_o(h, y) = \mu \sum_c \sum_{\tilde h} \sum_p f_c(\tilde h, y + p)
        \psi_{oc}(h^{-1} \tilde h, h^{-1} p)

    with zero border and without bias.

    **Equivariance.** If f(h̃, y) is replaced by f(h⁻¹h̃, h⁻¹y), f' is transformed in the same way, exactly. For strides
    see :class:`GridLiftingConvolution`.

    Parameters
    ----------
    group, in_channels, out_channels
        A group of the plane or of space that preserves the lattice, such as ``cyclic(4)`` or ``octahedral()``; channels
        of the input and of each frame of the output.
    size
        Side of the kernel, odd or even.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    measure
        Weight μ of the sum over frames; if absent that of the authors' code, π/2 for p4, π for p4m, and 1 in space.
    init_scale
        Initial weights are uniform in ±init_scale / sqrt(in_channels · size^dim), without the order of the group as in
        the authors' code.
    inexact
        Treatment of images on which the stride breaks the symmetry: ``"refuse"`` raises ValueError, ``"warn"`` issues a
        warning, and ``"allow"`` does neither.
    """


def check_grid(x: Tensor, group: FiniteGroup, channels: int, weight: Tensor, *, lifting: bool) -> Tensor:
    """Check a field ``[batch, channels, order, *sides]`` or, for lifting, planes, which get a fiber of 1."""
    check_features(x, weight)
    axes = axes_of(group.dim)
    if lifting:
        if x.ndim != 2 + group.dim or x.shape[1] != channels:
            raise ValueError(f"x: expected planes [batch, {channels}, {axes}], got {tuple(x.shape)}")
        x = x[:, :, None]
    elif x.ndim != 3 + group.dim or x.shape[1:3] != (channels, group.order):
        expected = f"[batch, {channels}, {group.order}, {axes}]"
        raise ValueError(f"x: expected a field on {group.name} {expected}, got {tuple(x.shape)}")
    if 0 in x.shape[3:]:
        raise ValueError(f"x: expected images with pixels, got {' x '.join(map(str, x.shape[3:]))} pixels")
    return x
