"""Attentive group convolution on grids: attention to the responses of a convolution, before they are summed."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup
from lieattn.nn._grid_convolution import (
    GridConvolution,
    GridGroupConvolution,
    GridLiftingConvolution,
    Inexact,
    check_field,
    check_planes,
)
from lieattn.nn._grid_kernels import group_taps, lifting_taps, moved_kernels, published_measure
from lieattn.ops import AttentionMaps, attentive_convolution, convolution_responses

Attention = Literal["full", "channel", "spatial"]
ChannelAction = Literal["group", "cyclic"]


class ResponseChannels(nn.Module):
    """Matrices of the channel attention to responses: a pair for every output channel and relative pose.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels of the convolution.
    hidden
        Hidden width; None for no channel attention.
    lifting
        Whether responses have no input pose.
    channel_action
        ``"group"`` takes matrices at h⁻¹h̃; ``"cyclic"`` at (h̃ - h) modulo the order, as the authors' code does,
        which is not equivariant to groups with mirrors and there to import weights.
    """

    first: nn.Parameter | None
    second: nn.Parameter | None
    between: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int | None,
        lifting: bool,
        channel_action: ChannelAction = "group",
    ) -> None:
        super().__init__()
        check_choice("channel_action", channel_action, get_args(ChannelAction))
        self.group, self.lifting, self.channel_action = group, lifting, channel_action
        fiber = () if lifting else (group.order,)
        for name in ("first", "second"):
            self.register_parameter(name, None)
        if hidden is not None:
            check_count("hidden", hidden)
            self.first = nn.Parameter(torch.empty(out_channels, hidden, in_channels, *fiber))
            self.second = nn.Parameter(torch.empty(out_channels, in_channels, hidden, *fiber))
        self.register_buffer("between", pairs_of_poses(group, channel_action), persistent=False)
        self.reset_channels()

    def reset_channels(self) -> None:
        """Draw the matrices uniformly from ±1 / sqrt(fan)."""
        for matrix in (self.first, self.second):
            if matrix is not None:
                bound = 1 / math.sqrt(math.prod(matrix.shape[1:]))
                nn.init.uniform_(matrix, -bound, bound)

    def channel_matrices(self) -> tuple[Tensor, Tensor] | None:
        """W1 ``[out, order, fiber, hidden, in]`` and W2 ``[out, order, fiber, in, hidden]`` of all pairs of poses."""
        if self.first is None or self.second is None:
            return None
        if self.lifting:
            order = self.group.order
            first, second = (m[:, None, None].expand(-1, order, 1, -1, -1) for m in (self.first, self.second))
        else:
            first, second = (m[..., self.between].permute(0, 3, 4, 1, 2) for m in (self.first, self.second))
        return first, second


class ResponseAttention(ResponseChannels):
    """Weights of the attention to responses on a grid: channel matrices and a spatial kernel, as ``attention`` says.

    Parameters
    ----------
    group, in_channels, out_channels, lifting, channel_action
        See :class:`ResponseChannels`.
    attention
        ``"full"``: channel attention, then spatial attention; ``"channel"`` or ``"spatial"``: one of them.
    hidden
        Hidden width of the channel attention.
    size
        Odd side of the spatial kernel.
    spread
        The spatial kernel starts uniform in ±spread / sqrt(2 size²).
    """

    spatial: nn.Parameter | None
    taps: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        attention: Attention,
        hidden: int,
        size: int,
        lifting: bool,
        channel_action: ChannelAction,
        spread: float,
    ) -> None:
        check_choice("attention", attention, get_args(Attention))
        check_odd("spatial_size", size)
        super().__init__(
            group,
            in_channels,
            out_channels,
            hidden=None if attention == "spatial" else hidden,
            lifting=lifting,
            channel_action=channel_action,
        )
        self.size = size
        self.register_parameter("spatial", None)
        if attention != "channel":
            fiber = () if lifting else (group.order,)
            bound = spread / math.sqrt(2 * size**2)
            self.spatial = nn.Parameter(torch.empty(out_channels, 2, *fiber, size, size).uniform_(-bound, bound))
        taps = lifting_taps(group, size) if lifting else group_taps(group, size)
        self.register_buffer("taps", taps, persistent=False)

    def spatial_kernels(self) -> Tensor | None:
        """Spatial kernels ``[out, order, fiber, 2, size, size]`` of all pairs of poses."""
        if self.spatial is None:
            return None
        return moved_kernels(self.spatial, self.taps, self.size).transpose(2, 3)


class GridAttentiveLifting(GridLiftingConvolution):
    r"""Lifting convolution with attention to its responses.

    .. math::
        f'_o(h, y) = \sum_c (1 - \alpha_X(o, h, y)\, \alpha_C(o, h, c)) \, t_{oc}(h, y)

    Channel attention looks at mean and maximum of t over positions through two matrices that do not depend on the
    pose; spatial attention at mean and maximum of α_C t over the channels, through a kernel moved by h.

    **Equivariance.** That of :class:`lieattn.nn.GridLiftingConvolution`; the attention maps are moved like the output.

    Parameters are those of :class:`GridAttentiveConvolution`.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        attention: Attention = "full",
        hidden: int | None = None,
        spatial_size: int = 7,
        spatial_dilation: int = 1,
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
            stride=stride,
            pad=pad,
            dilation=dilation,
            spread=spread,
            inexact=inexact,
        )
        check_count("spatial_dilation", spatial_dilation)
        self.spatial_dilation = spatial_dilation
        self.attention = ResponseAttention(
            group,
            in_channels,
            out_channels,
            attention=attention,
            hidden=in_channels if hidden is None else hidden,
            size=spatial_size,
            lifting=True,
            channel_action="group",
            spread=spread,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Planes ``[batch, in_channels, rows, columns]`` to ``[batch, out_channels, order, rows', columns']``."""
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Field and, if asked for, the maps: α_C ``[batch, out, order, in, 1, 1, 1]`` and α_X."""
        check_planes(x, self.in_channels, self.weight)
        return _attend(self, self.attention, x[:, :, None], self.spatial_dilation, return_maps)

    def responses(self, x: Tensor) -> Tensor:
        """What the layer attends to: ``[batch, out, order, in, 1, rows', columns']``."""
        return _responses(self, x[:, :, None])


class GridAttentiveConvolution(GridGroupConvolution):
    r"""Group convolution with attention to its responses (attentive group convolution).

    .. math::
        t_{oc}(y, h, \tilde h) &= \sum_p f_c(\tilde h, y + p) \psi_{oc}(h^{-1} \tilde h, h^{-1} p), \\
        f'_o(h, y) &= \mu \sum_{c, \tilde h} (1 - \alpha_X(o, h, \tilde h, y)\, \alpha_C(o, h, c, \tilde h))
        \, t_{oc}(y, h, \tilde h)

    where :math:`\alpha_C` are the scores of channels, from mean and maximum of t over positions, and :math:`\alpha_X`
    those of positions, from mean and maximum of :math:`\alpha_C t` over channels; all weights are taken at
    :math:`h^{-1} \tilde h`, and every output channel has its own (Romero, Bekkers, Tomczak, Hoogendoorn 2020,
    Eqs. 14-20, as implemented: what attention gives is subtracted, the residual branch).

    **Equivariance.** Moving and permuting the input, f(h̃, y) becomes f(h⁻¹h̃, h⁻¹y), does the same to the output
    and to the maps: A[L_g f](g1, g2) = A[f](g⁻¹ g1, g⁻¹ g2).

    **Cost.** Time of a depth-wise convolution for every pair of channels; memory of one plane for every output
    channel and pair of poses, since responses are never kept (see :func:`lieattn.ops.attentive_convolution`).

    Parameters
    ----------
    group
        H: any group of quarter turns and mirrors that keep the lattice.
    in_channels, out_channels
        Channels per pose.
    size
        Side of the kernel, odd or even.
    attention
        ``"full"``, ``"channel"`` (α_CH, α_X = 1) or ``"spatial"`` (α_SP, α_C = 1).
    hidden
        Hidden width of the channel attention; half the input channels if absent (all of them where it lifts).
    spatial_size, spatial_dilation
        Odd side of the spatial kernel, and its dilation.
    channel_action
        ``"group"``; or ``"cyclic"``, which imports weights of the authors' code and is not equivariant to mirrors.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    measure
        μ; if absent that of the authors' code, 2π/|H|, which on p4m differs from that of the plain layer.
    spread
        Scale of the initial kernels, see :class:`lieattn.nn.GridGroupConvolution`.
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
        attention: Attention = "full",
        hidden: int | None = None,
        spatial_size: int = 7,
        spatial_dilation: int = 1,
        channel_action: ChannelAction = "group",
        measure: float | None = None,
        **options: Any,
    ) -> None:
        measure = published_measure(group, attentive=True) if measure is None else measure
        super().__init__(group, in_channels, out_channels, size, measure=measure, **options)
        check_count("spatial_dilation", spatial_dilation)
        self.spatial_dilation = spatial_dilation
        self.attention = ResponseAttention(
            group,
            in_channels,
            out_channels,
            attention=attention,
            hidden=max(1, in_channels // 2) if hidden is None else hidden,
            size=spatial_size,
            lifting=False,
            channel_action=channel_action,
            spread=options.get("spread", 1.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, order, rows, columns]`` to ``[batch, out_channels, order, rows', columns']``."""
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Field and, if asked for, the maps ``[batch, out, order, in or 1, fiber, 1 or rows', 1 or columns']``."""
        check_field(x, self.group, self.in_channels, self.weight)
        return _attend(self, self.attention, x, self.spatial_dilation, return_maps)

    def responses(self, x: Tensor) -> Tensor:
        """What the layer attends to: ``[batch, out, order, in, fiber, rows', columns']``."""
        return _responses(self, x)


def _attend(
    layer: GridConvolution, weights: ResponseAttention, x: Tensor, dilation: int, return_maps: bool
) -> tuple[Tensor, AttentionMaps | None]:
    layer.check_sides(*x.shape[-2:])
    return attentive_convolution(
        x,
        layer.kernels(),
        channel=weights.channel_matrices(),
        spatial=weights.spatial_kernels(),
        measure=layer.measure,
        stride=layer.stride,
        pad=layer.pad,
        dilation=layer.dilation,
        spatial_dilation=dilation,
        return_maps=return_maps,
    )


def _responses(layer: GridConvolution, x: Tensor) -> Tensor:
    return convolution_responses(x, layer.kernels(), stride=layer.stride, pad=layer.pad, dilation=layer.dilation)


def pairs_of_poses(group: FiniteGroup, action: ChannelAction) -> Tensor:
    """Index of the weight for each pair of an output and an input pose, ``[order, order]`` int64."""
    if action == "group":
        return group.relative.clone()
    poses = torch.arange(group.order)
    return (poses[None, :] - poses[:, None]) % group.order


def check_choice(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse what is not among the allowed words."""
    if value not in allowed:
        raise ValueError(f"{argument}: expected one of {allowed}, got {value!r}")


def check_odd(argument: str, size: int) -> None:
    """Refuse sides of kernels whose border cannot keep the size of an image."""
    check_count(argument, size)
    if size % 2 == 0:
        raise ValueError(f"{argument}: expected an odd side, whose border keeps the size, got {size}")
