"""Rotary encodings: pairs of channels turned by angles that are linear in the position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import LiftedGraph
from lieattn.nn.relative._base import RelativeFunction
from lieattn.ops import RelativeTerms


class RotaryPhases(nn.Module):
    r"""Phases of rotary encodings whose frequencies turn with the frame: :math:`\langle\omega, h_a^{-1} x_i\rangle`.

    Parameters
    ----------
    dim
        Dimension of space.
    heads, channels
        Heads and channels of a head; half as many frequencies each.
    init_scale
        Standard deviation of the frequencies at the start, in radians per unit of length.

    Raises
    ------
    ValueError
        If the channels do not fall into pairs.
    """

    def __init__(self, dim: int, heads: int, channels: int, *, init_scale: float = 1.0) -> None:
        super().__init__()
        if channels % 2 or channels < 2:
            raise ValueError(f"channels: rotary pairs need an even number of channels a head, got {channels}")
        self.frequencies = nn.Parameter(init_scale * torch.randn(heads, channels // 2, dim))

    def forward(self, positions: Tensor) -> Tensor:
        """Cosines and sines ``[points, fiber, heads, channels / 2, 2]`` at positions ``[points, fiber, dim]``."""
        exact = torch.promote_types(self.frequencies.dtype, torch.float32)
        frequencies = self.frequencies.to(exact)
        # Not a matrix product, which autocast would round: an angle is not known better than its rounding.
        angle = (positions.to(exact)[:, :, None, None] * frequencies).sum(dim=-1)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)


class RotaryEncoding(RelativeFunction):
    """Rotary encoding with frequencies that turn with the frame, for the framewise pattern.

    Pairs of channels of q(x_i, a) and k(x_j, a) are turned by the angles ⟨ω, h_a⁻¹ x⟩, so their product depends on
    h_a⁻¹(x_j - x_i); turning x back is turning the frequencies along. Keys of other frames would be turned by
    other angles: hence framewise only, and on graphs whose points have the same frames.

    Parameters
    ----------
    dim
        Dimension of the points.
    heads
        Number of heads, each with frequencies of its own.
    channels
        Channels of a head, even.
    init_scale
        Standard deviation of the frequencies at the start, in radians per ``graph.length``.
    values
        Whether values are turned too, and what is attended turned back, so that geometry counts where features are
        constant.
    """

    patterns = ("framewise",)

    def __init__(self, dim: int, heads: int, channels: int, *, init_scale: float = 1.0, values: bool = False) -> None:
        super().__init__()
        check_count("dim", dim)
        self.dim, self.values = dim, values
        self.phases = RotaryPhases(dim, heads, channels, init_scale=init_scale)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Terms with ``rotary``: phases of all points."""
        return rotary_terms(self.phases, graph, values=self.values)


def rotary_terms(phases: RotaryPhases, graph: LiftedGraph, *, values: bool) -> RelativeTerms:
    """Terms that turn channel pairs by the phases of the points of a graph, those of the values too if asked for.

    Raises
    ------
    ValueError
        If the points of a cloud have frames of their own.
    """
    if not graph.relative.tied:
        raise ValueError("graph: rotary encodings need the same frames over all points of a cloud")
    return RelativeTerms(rotary=phases(graph.frame_positions()), rotary_values=values)
