"""Rotary encodings: pairs of channels turned by angles that are linear in the position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_COMPLEX = (torch.float32, torch.float64)


class RotaryPhases(nn.Module):
    r"""Phases of rotary encodings whose frequencies turn with the frame: :math:`\langle\omega, h_a^{-1} x_i\rangle`.

    Parameters
    ----------
    dim
        Dimension of space.
    heads, channels
        Heads and channels of a head; half as many frequencies each.
    spread
        Standard deviation of the frequencies at the start, in radians per unit of length.

    Raises
    ------
    ValueError
        If the channels do not fall into pairs.
    """

    def __init__(self, dim: int, heads: int, channels: int, *, spread: float = 1.0) -> None:
        super().__init__()
        if channels % 2 or channels < 2:
            raise ValueError(f"channels: rotary pairs need an even number of channels a head, got {channels}")
        self.frequencies = nn.Parameter(spread * torch.randn(heads, channels // 2, dim))

    def forward(self, positions: Tensor) -> Tensor:
        """Cosines and sines ``[points, fiber, heads, channels / 2, 2]`` at positions ``[points, fiber, dim]``."""
        exact = torch.promote_types(self.frequencies.dtype, torch.float32)
        frequencies = self.frequencies.to(exact)
        # Not a matrix product, which autocast would round: an angle is not known better than its rounding.
        angle = (positions.to(exact)[:, :, None, None] * frequencies).sum(dim=-1)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)


def turn_pairs(signal: Tensor, phases: Tensor) -> Tensor:
    """Turn the channel pairs (2c, 2c + 1) of a signal ``[*, channels]`` by their phases ``[*, channels / 2, 2]``."""
    pairs, phases = signal.unflatten(-1, (-1, 2)), phases.to(signal.dtype)
    if signal.dtype in _COMPLEX and not torch.compiler.is_compiling():
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(phases))
    else:  # no complex numbers of half precision, and none that torch.compile writes kernels for
        (first, second), (cosine, sine) = pairs.unbind(-1), phases.unbind(-1)
        turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return turned.flatten(-2)


def opposite(phases: Tensor) -> Tensor:
    """Phases that turn back."""
    cosine, sine = phases.unbind(-1)
    return torch.stack([cosine, -sine], dim=-1)
