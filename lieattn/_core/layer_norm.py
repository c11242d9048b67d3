"""Layer normalization with correct second derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.functional import transformed


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Compute ``torch.nn.functional.layer_norm``, within transforms by plain operations."""
    if not transformed():
        return F.layer_norm(x, shape, weight, bias, eps)
    axes = tuple(range(-len(shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(axes, keepdim=True)
    normal = (centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)).to(x.dtype)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` by :func:`layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
