"""Group convolutions on grids of pixels: fields ``[batch, channels, fiber, rows, columns]``, through conv2d."""

from __future__ import annotations

import math
import warnings
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_features
from lieattn.groups import FiniteGroup
from lieattn.nn._grid_kernels import (
    group_taps,
    lifting_taps,
    moved_kernels,
    published_measure,
    reverses_an_axis,
)

Inexact = Literal["refuse", "warn", "allow"]


class GridConvolution(nn.Module):
    """What lifting and group convolution on a grid share: the kernel, its moved copies, and exact strides."""

    taps: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        size: int,
        taps: Tensor,
        *,
        stride: int,
        pad: int,
        dilation: int,
        measure: float,
        spread: float,
        inexact: Inexact,
    ) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        check_count("stride", stride)
        check_count("dilation", dilation)
        check_count("pad", pad, least=0)
        if inexact not in get_args(Inexact):
            raise ValueError(f"inexact: expected one of {get_args(Inexact)}, got {inexact!r}")
        if not math.isfinite(measure):
            raise ValueError(f"measure: expected a finite number, got {measure}")
        self.group, self.size = group, size
        self.in_channels, self.out_channels = in_channels, out_channels
        self.stride, self.pad, self.dilation = stride, pad, dilation
        self.measure, self.inexact = float(measure), inexact
        fiber = taps.shape[1:-1]
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *fiber, size, size))
        self.register_buffer("taps", taps, persistent=False)
        self._turns = reverses_an_axis(group)
        self.reset_parameters(spread)

    def reset_parameters(self, spread: float = 1.0) -> None:
        """Draw the kernel uniformly from ±spread / sqrt(in_channels · size²), as the authors of the paper do."""
        bound = spread / math.sqrt(self.in_channels * self.size**2)
        nn.init.uniform_(self.weight, -bound, bound)

    def kernels(self) -> Tensor:
        """Kernel seen from every output pose: ``[out, order, in, fiber, size, size]``."""
        return moved_kernels(self.weight, self.taps, self.size)

    def check_sides(self, rows: int, columns: int) -> None:
        """Refuse, or warn of, images on which the stride does not sample symmetrically about the center."""
        for side in (rows, columns):
            reach = side + 2 * self.pad - self.dilation * (self.size - 1) - 1
            if reach < 0:
                raise ValueError(
                    f"x: a kernel of side {self.size} with dilation {self.dilation} and pad {self.pad} does not fit "
                    f"into {rows} x {columns} pixels"
                )
            rest = reach % self.stride
            if rest and self._turns and self.inexact != "allow":
                exact = [side - rest, side + self.stride - rest]
                message = (
                    f"stride {self.stride} samples {side} pixels off center, so the result would not turn with "
                    f"{self.group.name}; exact would be {' or '.join(str(s) for s in exact if s > 0)} pixels, or "
                    f"stride 1 and pooling by {self.stride}"
                )
                if self.inexact == "refuse":
                    raise ValueError(message)
                warnings.warn(message, stacklevel=3)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"{self.group.name}, {self.in_channels}, {self.out_channels}, size={self.size}, stride={self.stride}, "
            f"pad={self.pad}, dilation={self.dilation}, measure={self.measure:.6g}"
        )

    def _convolve(self, x: Tensor) -> Tensor:
        """Planes ``[batch, in · fiber, rows, columns]`` to a field."""
        kernels = self.kernels().flatten(0, 1).flatten(1, 2)
        if self.measure != 1:
            kernels = self.measure * kernels
        out = F.conv2d(x, kernels, stride=self.stride, padding=self.pad, dilation=self.dilation)
        return out.unflatten(1, (self.out_channels, self.group.order))


class GridLiftingConvolution(GridConvolution):
    r"""Lifting convolution on a grid: from planes to a field on the group.

    .. math::  f'_o(h, y) = \sum_c \sum_p f_c(y + p) \psi_{oc}(h^{-1} p)

    with zero border and without bias; the kernel's copies come from an integer index.

    **Equivariance.** Moving the image by h about its center moves the output and permutes its poses:
    f'(h̃, y) becomes f'(h⁻¹h̃, h⁻¹y), exactly, for even and odd sizes. For stride s this needs
    (rows + 2 pad - dilation (size - 1) - 1) divisible by s.

    Parameters
    ----------
    group
        H: any group of quarter turns and mirrors that keep the lattice.
    in_channels, out_channels
        Channels of the image, channels per pose.
    size
        Side of the kernel, odd or even.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    spread
        Weights start uniform in ±spread / sqrt(in_channels · size²).
    inexact
        What to do with an image on which the stride breaks the symmetry: ``"refuse"``, ``"warn"`` or ``"allow"``.
    """

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
        spread: float = 1.0,
        inexact: Inexact = "refuse",
    ) -> None:
        super().__init__(
            group,
            in_channels,
            out_channels,
            size,
            lifting_taps(group, size),
            stride=stride,
            pad=pad,
            dilation=dilation,
            measure=1.0,
            spread=spread,
            inexact=inexact,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Planes ``[batch, in_channels, rows, columns]`` to ``[batch, out_channels, order, rows', columns']``."""
        check_planes(x, self.in_channels, self.weight)
        self.check_sides(*x.shape[-2:])
        return self._convolve(x)


class GridGroupConvolution(GridConvolution):
    r"""Group convolution on a grid: from a field to a field on the group.

    .. math::  f'_o(h, y) = \mu \sum_c \sum_{\tilde h} \sum_p f_c(\tilde h, y + p)
        \psi_{oc}(h^{-1} \tilde h, h^{-1} p)

    with zero border and without bias; the kernel's copies come from an integer index.

    **Equivariance.** Moving and permuting the input, f(h̃, y) becomes f(h⁻¹h̃, h⁻¹y), does the same to the output;
    strides as in :class:`GridLiftingConvolution`.

    Parameters
    ----------
    group
        H: any group of quarter turns and mirrors that keep the lattice.
    in_channels, out_channels
        Channels per pose.
    size
        Side of the kernel, odd or even.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    measure
        Weight μ of the sum over poses; if absent that of the authors' code, π/2 on p4 and π on p4m.
    spread
        Weights start uniform in ±spread / sqrt(in_channels · size²); the authors leave the group's order out.
    inexact
        What to do with an image on which the stride breaks the symmetry: ``"refuse"``, ``"warn"`` or ``"allow"``.
    """

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
        spread: float = 1.0,
        inexact: Inexact = "refuse",
    ) -> None:
        taps = group_taps(group, size)
        super().__init__(
            group,
            in_channels,
            out_channels,
            size,
            taps,
            stride=stride,
            pad=pad,
            dilation=dilation,
            measure=published_measure(group) if measure is None else measure,
            spread=spread,
            inexact=inexact,
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, order, rows, columns]`` to ``[batch, out_channels, order, rows', columns']``."""
        check_field(x, self.group, self.in_channels, self.weight)
        self.check_sides(*x.shape[-2:])
        return self._convolve(x.flatten(1, 2))


def check_planes(x: Tensor, channels: int, weight: Tensor) -> None:
    """Refuse what are no planes ``[batch, channels, rows, columns]`` of the weight's dtype and device."""
    check_features(x, weight)
    if x.ndim != 4 or x.shape[1] != channels:
        raise ValueError(f"x: expected planes [batch, {channels}, rows, columns], got {tuple(x.shape)}")


def check_field(x: Tensor, group: FiniteGroup, channels: int, weight: Tensor) -> None:
    """Refuse what is no field ``[batch, channels, order, rows, columns]`` of the weight's dtype and device."""
    check_features(x, weight)
    if x.ndim != 5 or x.shape[1:3] != (channels, group.order):
        raise ValueError(
            f"x: expected a field on {group.name} [batch, {channels}, {group.order}, rows, columns], got "
            f"{tuple(x.shape)}"
        )
