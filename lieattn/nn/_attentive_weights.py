"""Weights of the attention to the responses of a group convolution."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup
from lieattn.nn._grid_kernels import group_taps, lifting_taps, moved_kernels, permuted_copies

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
            first, second = (permuted_copies(m, self.between).permute(0, 3, 4, 1, 2) for m in (self.first, self.second))
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


def pairs_of_poses(group: FiniteGroup, action: ChannelAction) -> Tensor:
    """Index of the weight for each pair of an output and an input pose, ``[order, order]`` int64."""
    if action == "group":
        return group.relative_index.clone()
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
