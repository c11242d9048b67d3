"""Rotary terms: pairs of channels turned by phases that the operator's scores see as differences."""

from __future__ import annotations

import torch
from torch import Tensor

_COMPLEX = (torch.float32, torch.float64)


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
