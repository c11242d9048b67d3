"""Attentive group convolution on grids: attention to the responses of a convolution, before they are summed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup
from lieattn.nn._attentive_weights import Attention, ChannelAction, ResponseAttention
from lieattn.nn._grid_convolution import (
    GridConvolution,
    GridGroupConvolution,
    GridLiftingConvolution,
    Inexact,
    check_field,
    check_planes,
)
from lieattn.nn._grid_kernels import published_measure
from lieattn.ops import AttentionMaps, attentive_convolution, convolution_responses


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
