"""Group convolutions on grids of pixels: fields ``[batch, channels, fiber, rows, columns]``, through conv2d."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_choice, check_count, check_features
from lieattn.groups import FiniteGroup
from lieattn.nn._grid_kernels import group_taps, lifting_taps, moved_kernels, published_measure
from lieattn.nn._pool import Inexact, complain


class GridConvolution(nn.Module):
    """Lifting or group convolution on a grid: the kernel, its copies seen from every frame, and exact strides.

    Parameters
    ----------
    group
        H: any group of quarter turns and mirrors that keep the lattice.
    in_channels, out_channels
        Channels of the input and per frame of the output.
    size
        Side of the kernel, odd or even.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    measure
        Weight μ of the sum over frames; if absent 1 for lifting, else that of the authors' code, π/2 on p4, π on p4m.
    init_scale
        Weights start uniform in ±init_scale / sqrt(in_channels · size²); the authors leave the group's order out.
    inexact
        What to do with an image on which the stride breaks the symmetry: ``"refuse"``, ``"warn"`` or ``"allow"``.
    """

    lifting: ClassVar[bool]
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
        super().__init__()
        taps = lifting_taps(group, size) if self.lifting else group_taps(group, size)
        counts = {"in_channels": in_channels, "out_channels": out_channels, "stride": stride, "dilation": dilation}
        for argument, count in counts.items():
            check_count(argument, count)
        check_count("pad", pad, least=0)
        check_choice("inexact", inexact, Inexact)
        if measure is None:
            measure = 1.0 if self.lifting else self._natural_measure(group)
        if not math.isfinite(measure):
            raise ValueError(f"measure: expected a finite number, got {measure}")
        self.group, self.size, self.in_channels, self.out_channels = group, size, in_channels, out_channels
        self.stride, self.pad, self.dilation, self.inexact = stride, pad, dilation, inexact
        self.measure = float(measure)
        fiber = () if self.lifting else (group.order,)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *fiber, size, size))
        self.register_buffer("taps", taps, persistent=False)
        # Only what reverses rows or columns asks for samples that are symmetric about the center.
        self._turns = bool((group.elements.round() < 0).any())
        self.reset_parameters(init_scale)

    @staticmethod
    def _natural_measure(group: FiniteGroup) -> float:
        return published_measure(group)

    def reset_parameters(self, init_scale: float = 1.0) -> None:
        """Draw the kernel uniformly from ±init_scale / sqrt(in_channels · size²), as the authors of the paper do."""
        bound = init_scale / math.sqrt(self.in_channels * self.size**2)
        nn.init.uniform_(self.weight, -bound, bound)

    def kernels(self) -> Tensor:
        """Kernel seen from every output frame: ``[out, order, in, fiber, size, size]``."""
        return moved_kernels(self.weight, self.taps, self.size)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, (order,) rows, columns]`` to ``[batch, out_channels, order, rows', columns']``."""
        x = self.checked(x).flatten(1, 2)
        kernels = self.kernels().flatten(0, 1).flatten(1, 2)
        if self.measure != 1:
            kernels = self.measure * kernels
        out = F.conv2d(x, kernels, stride=self.stride, padding=self.pad, dilation=self.dilation)
        return out.unflatten(1, (self.out_channels, self.group.order))

    def checked(self, x: Tensor) -> Tensor:
        """The input with an axis for the fiber, also where it lifts; refuses or warns of what does not fit."""
        x = check_grid(x, None if self.lifting else self.group, self.in_channels, self.weight)
        rows, columns = x.shape[-2:]
        for side in (rows, columns):
            reach = side + 2 * self.pad - self.dilation * (self.size - 1) - 1
            if reach < 0:
                raise ValueError(
                    f"x: a kernel of side {self.size} with dilation {self.dilation} and pad {self.pad} does not fit "
                    f"into {rows} x {columns} pixels"
                )
            rest = reach % self.stride
            if rest and self._turns:
                exact = " or ".join(str(s) for s in (side - rest, side + self.stride - rest) if s > 0)
                complain(
                    self.inexact,
                    f"stride {self.stride} samples {side} pixels off center, so the result would not turn with "
                    f"{self.group.name}; exact would be {exact} pixels, or stride 1 and pooling by {self.stride}",
                )
        return x

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"{self.group.name}, {self.in_channels}, {self.out_channels}, size={self.size}, stride={self.stride}, "
            f"pad={self.pad}, dilation={self.dilation}, measure={self.measure:.6g}"
        )


class GridLiftingConvolution(GridConvolution):
    r"""Lifting convolution on a grid: from planes to a field on the group.

    .. math::  f'_o(h, y) = \sum_c \sum_p f_c(y + p) \psi_{oc}(h^{-1} p)

    with zero border and without bias; the kernel's copies come from an integer index. Parameters are those of
    :class:`GridConvolution`.

    **Equivariance.** Moving the image by h about its center moves the output and permutes its frames:
    f'(h̃, y) becomes f'(h⁻¹h̃, h⁻¹y), exactly, for even and odd sizes. For stride s this needs
    (rows + 2 pad - dilation (size - 1) - 1) divisible by s.
    """

    lifting = True


class GridGroupConvolution(GridConvolution):
    r"""Group convolution on a grid: from a field to a field on the group.

    .. math::  f'_o(h, y) = \mu \sum_c \sum_{\tilde h} \sum_p f_c(\tilde h, y + p)
        \psi_{oc}(h^{-1} \tilde h, h^{-1} p)

    with zero border and without bias; the kernel's copies come from an integer index. Parameters are those of
    :class:`GridConvolution`.

    **Equivariance.** Moving and permuting the input, f(h̃, y) becomes f(h⁻¹h̃, h⁻¹y), does the same to the output;
    strides as in :class:`GridLiftingConvolution`.
    """

    lifting = False


def check_grid(x: Tensor, group: FiniteGroup | None, channels: int, weight: Tensor) -> Tensor:
    """A field ``[batch, channels, order, rows, columns]`` like the weight; planes, without a group, get a fiber."""
    check_features(x, weight)
    if group is None:
        if x.ndim != 4 or x.shape[1] != channels:
            raise ValueError(f"x: expected planes [batch, {channels}, rows, columns], got {tuple(x.shape)}")
        return x[:, :, None]
    if x.ndim != 5 or x.shape[1:3] != (channels, group.order):
        raise ValueError(
            f"x: expected a field on {group.name} [batch, {channels}, {group.order}, rows, columns], got "
            f"{tuple(x.shape)}"
        )
    return x
