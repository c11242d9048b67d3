"""Attention to the input of a group convolution on a grid: gates ``gate(x) -> x`` before a plain layer."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup
from lieattn.nn._attentive_weights import Attention, check_choice, check_odd
from lieattn.nn._grid_convolution import GridGroupConvolution, GridLiftingConvolution, check_field, check_planes
from lieattn.nn._grid_kernels import check_lattice_group, published_measure
from lieattn.ops import AttentionMaps, expand_kernel


class ChannelGate(nn.Module):
    r"""Channel attention of a field, from statistics of its channels.

    .. math::
        \alpha = \sigma\big( W_2 \operatorname{relu}(W_1 s_{mean}) + W_2 \operatorname{relu}(W_1 s_{max}) \big)

    On a field W1 and W2 are group convolutions of the poses, (W s)(h) = Σ_h̃ W(h⁻¹h̃) s(h̃), without a measure.

    **Equivariance.** It commutes with the left regular representation of H.

    Parameters
    ----------
    group
        H, or None for planes.
    channels
        Channels of the field.
    hidden
        Hidden width.
    """

    relative: Tensor

    def __init__(self, group: FiniteGroup | None, channels: int, hidden: int) -> None:
        super().__init__()
        check_count("channels", channels)
        check_count("hidden", hidden)
        fiber = () if group is None else (group.order,)
        relative = torch.zeros(1, 1, dtype=torch.int64) if group is None else group.relative_index.clone()
        self.first = nn.Parameter(torch.empty(hidden, channels, *fiber))
        self.second = nn.Parameter(torch.empty(channels, hidden, *fiber))
        self.register_buffer("relative", relative, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices uniformly from ±1 / sqrt(fan)."""
        for matrix in (self.first, self.second):
            bound = 1 / math.sqrt(math.prod(matrix.shape[1:]))
            nn.init.uniform_(matrix, -bound, bound)

    def forward(self, mean: Tensor, top: Tensor) -> Tensor:
        """Statistics ``[batch, channels, fiber]`` to scores of the same shape; fiber is 1 for planes."""
        hidden = torch.relu(self._mix(self.first, mean)) + torch.relu(self._mix(self.first, top))
        return torch.sigmoid(self._mix(self.second, hidden))

    def _mix(self, matrix: Tensor, statistics: Tensor) -> Tensor:
        kernel = matrix.flatten(2).permute(2, 0, 1) if matrix.ndim == 3 else matrix[None]
        return torch.einsum("hogc,bcg->boh", expand_kernel(kernel, self.relative), statistics)


class GridInputAttention(nn.Module):
    r"""Input attention α_F: maps shared by all output channels of the convolution behind it.

    .. math::  f' = (1 - \alpha_X \alpha_C) f

    :math:`\alpha_C` is a :class:`ChannelGate` on mean and maximum of f over positions; :math:`\alpha_X` the sigmoid of
    a group convolution of mean and maximum over the channels of :math:`\alpha_C f`. On planes the latter is a
    lifting convolution and its maximum over the poses, so that the map of a plane is a plane.

    **Equivariance.** Moving the image and permuting its poses does the same to f' and to the maps.

    Parameters
    ----------
    group
        H: any group of quarter turns and mirrors that keep the lattice.
    channels
        Channels of the input.
    attention
        ``"full"``, ``"channel"`` or ``"spatial"``.
    hidden
        Hidden width of the channel attention; half the channels if absent.
    spatial_size, spatial_dilation
        Odd side of the spatial kernel, and its dilation; the border keeps the size of the image.
    lifting
        Whether the input has no poses.
    measure
        Weight of the sum over poses; if absent that of :class:`lieattn.nn.GridGroupConvolution`.
    spread
        Scale of the initial spatial kernel.
    """

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        attention: Attention = "full",
        hidden: int | None = None,
        spatial_size: int = 7,
        spatial_dilation: int = 1,
        lifting: bool = False,
        measure: float | None = None,
        spread: float = 1.0,
    ) -> None:
        super().__init__()
        check_lattice_group("group", group)
        check_choice("attention", attention, get_args(Attention))
        check_odd("spatial_size", spatial_size)
        self.group, self.channels, self.lifting = group, channels, lifting
        hidden = max(1, channels // 2) if hidden is None else hidden
        self.channel = None if attention == "spatial" else ChannelGate(None if lifting else group, channels, hidden)
        self.spatial: GridLiftingConvolution | GridGroupConvolution | None = None
        border = spatial_dilation * (spatial_size // 2)
        if attention != "channel" and lifting:
            self.spatial = GridLiftingConvolution(
                group, 2, 1, spatial_size, pad=border, dilation=spatial_dilation, spread=spread
            )
        elif attention != "channel":
            self.spatial = GridGroupConvolution(
                group, 2, 1, spatial_size, pad=border, dilation=spatial_dilation, measure=measure, spread=spread
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, (order,) rows, columns]`` to the same shape."""
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Gated input and, if asked for, maps ``[batch, channels, (order,) 1, 1]``, ``[batch, 1, (order,) *, *]``."""
        weight = next(self.parameters())
        if self.lifting:
            check_planes(x, self.channels, weight)
        else:
            check_field(x, self.group, self.channels, weight)
        scores = seen = None
        removed = x
        if self.channel is not None:
            flat = x.flatten(-2)
            statistics = flat.mean(-1), flat.amax(-1)
            if self.lifting:
                scores = self.channel(*(s[..., None] for s in statistics))[..., None]
            else:
                scores = self.channel(*statistics)[..., None, None]
            removed = scores * x
        if self.spatial is not None:
            seen = self._spatial_map(removed)
            removed = seen * removed
        return x - removed, AttentionMaps(scores, seen) if return_maps else None

    def _spatial_map(self, x: Tensor) -> Tensor:
        statistics = torch.stack([x.mean(dim=1), x.amax(dim=1)], dim=1)
        if self.spatial is None:
            raise RuntimeError("this gate has no spatial attention")
        level = self.spatial(statistics)
        return torch.sigmoid(level.amax(dim=2) if self.lifting else level)


class GridPoseAttention(nn.Module):
    r"""Co-attention over the poses alone, α_RH: a group convolution of side 1 to one map.

    .. math::
        \alpha_H(h, y) = \sigma\Big( \mu \sum_{c, \tilde h} w_c(h^{-1} \tilde h) f_c(\tilde h, y) \Big), \qquad
        f' = (1 - \alpha_H) f

    On planes it is the maximum over poses of the lifting convolution of side 1, which is the same for all poses. As
    in the authors' comparison there is a sigmoid in place of the softmax of co-attentive networks.

    **Equivariance.** Moving the image and permuting its poses does the same to f' and to the map.

    Parameters
    ----------
    group
        H.
    channels
        Channels of the input.
    lifting
        Whether the input has no poses.
    measure
        Weight of the sum over poses; if absent that of the authors' plain layer.
    spread
        Weights start uniform in ±spread / sqrt(channels).
    """

    relative: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        lifting: bool = False,
        measure: float | None = None,
        spread: float = 1.0,
    ) -> None:
        super().__init__()
        check_lattice_group("group", group)
        check_count("channels", channels)
        self.group, self.channels, self.lifting = group, channels, lifting
        self.measure = published_measure(group) if measure is None else float(measure)
        if lifting:
            self.measure = 1.0
        self.weight = nn.Parameter(torch.empty(channels, *(() if lifting else (group.order,))))
        nn.init.uniform_(self.weight, -spread / math.sqrt(channels), spread / math.sqrt(channels))
        self.register_buffer("relative", group.relative_index.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, (order,) rows, columns]`` to the same shape."""
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Gated input and, if asked for, the map ``[batch, 1, (order,) rows, columns]``, as ``spatial``."""
        if self.lifting:
            check_planes(x, self.channels, self.weight)
            level = torch.einsum("c,bcxy->bxy", self.weight, x)[:, None]
        else:
            check_field(x, self.group, self.channels, self.weight)
            level = torch.einsum("chg,bcgxy->bhxy", self.weight[:, self.relative], x)[:, None]
        seen = torch.sigmoid(self.measure * level)
        return x - seen * x, AttentionMaps(None, seen) if return_maps else None
