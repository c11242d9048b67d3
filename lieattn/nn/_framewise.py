"""Layers of the framewise transformer: attention within each frame, frames mixed by group-tied linear maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout
from lieattn.geometry import Padding
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn._lifting_convolution import FrameEdges, FrameMessages
from lieattn.nn._linear import GroupLinear
from lieattn.nn._rotary import opposite, turn_pairs
from lieattn.ops import whole_cloud_attention


class FiberNorm(nn.Module):
    """Layer normalization over the fiber and channels of each point, with one gain and shift for each channel.

    **Equivariance.** The group permutes the fiber, which leaves the statistics alone.

    Parameters
    ----------
    channels
        Channels per frame.
    eps
        Added to the variance.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_count("channels", channels)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[points, fiber, channels]``."""
        weight, bias = self.weight.expand(x.shape[-2:]), self.bias.expand(x.shape[-2:])
        return F.layer_norm(x, x.shape[-2:], weight, bias, self.eps)


class FramewiseAttention(nn.Module):
    r"""Rotary self-attention of every frame with itself, over whole clouds.

    With :math:`R_a(x)` the rotation of channel pairs by the angles of :class:`RotaryPhases`, and q, k, v and the
    output group-tied linear maps,

    .. math::
        f'(x_i, a) = W_o R_a(x_i)^{-1} \sum_j \operatorname{softmax}_j
        \big( \langle R_a(x_i) q(x_i, a), R_a(x_j) k(x_j, a) \rangle / \sqrt d \big) R_a(x_j) v(x_j, a) .

    Scores and values see :math:`h_a^{-1}(x_j - x_i)` alone, so geometry counts where features are constant too.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, so is the output.

    **Cost.** That of attention with |H| heads on tokens of |H| channels; the maps cost less, see
    :class:`GroupLinear`.

    Parameters
    ----------
    group
        H.
    channels
        Channels per frame, divisible by ``heads`` into even numbers.
    heads
        Heads of each frame.
    dropout
        On the attention weights.
    """

    def __init__(self, group: FiniteGroup, channels: int, *, heads: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        check_group("group", group)
        check_count("channels", channels)
        check_count("heads", heads)
        check_dropout("dropout", dropout)
        if channels % (2 * heads):
            raise ValueError(f"heads: {channels} channels do not fall into {heads} heads of even width")
        self.heads, self.dropout = heads, dropout
        self.projection = GroupLinear(group, channels, 3 * channels)
        self.output = GroupLinear(group, channels, channels)

    def forward(self, x: Tensor, phases: Tensor, padding: Padding) -> Tensor:
        """Field ``[points, fiber, channels]`` to the same, with the :class:`RotaryPhases` of its points."""
        signals = self.projection(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = turn_pairs(signals, phases[:, :, None]).unbind(dim=2)
        dropout = self.dropout if self.training else 0.0
        out = whole_cloud_attention(query, key, value, padding, dropout=dropout)
        return self.output(turn_pairs(out, opposite(phases)).flatten(-2))


class FramewiseBlock(nn.Module):
    """Pre-norm transformer block: framewise attention, then a group-tied network with one hidden layer.

    Where asked for, messages between neighbors run beside the attention.

    **Equivariance.** That of :class:`FramewiseAttention`.

    Parameters
    ----------
    group, channels, heads
        See :class:`FramewiseAttention`.
    widening
        Hidden channels of the network, as a multiple of ``channels``.
    dropout
        On attention weights and behind both branches.
    messages
        Channels of the :class:`FrameEdges` whose :class:`FrameMessages` are added to what is attended; None for none.
    """

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        heads: int = 1,
        widening: int = 4,
        dropout: float = 0.0,
        messages: int | None = None,
    ) -> None:
        super().__init__()
        check_count("widening", widening)
        self.norm1, self.norm2 = FiberNorm(channels), FiberNorm(channels)
        self.attention = FramewiseAttention(group, channels, heads=heads, dropout=dropout)
        self.linear1 = GroupLinear(group, channels, widening * channels)
        self.linear2 = GroupLinear(group, widening * channels, channels)
        self.dropout = nn.Dropout(dropout)
        self.messages = None if messages is None else FrameMessages(messages, channels)

    def forward(self, x: Tensor, phases: Tensor, padding: Padding, edges: FrameEdges | None = None) -> Tensor:
        """Field ``[points, fiber, channels]`` to the same; ``edges`` for blocks with messages."""
        y = self.norm1(x)
        attended = self.attention(y, phases, padding)
        if self.messages is not None:
            if edges is None:
                raise TypeError("edges: expected FrameEdges, for the block has messages, got none")
            attended = attended + self.messages(y, edges)
        x = x + self.dropout(attended)
        return x + self.dropout(self.linear2(F.gelu(self.linear1(self.norm2(x)))))
