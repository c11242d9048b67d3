"""Attention by a sigmoid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attention_of(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return α = σ(levels) and 1 - α. Derivatives of ``torch.sigmoid``, but not these, lose digits for α close to 1."""
    return F.logsigmoid(levels).exp(), F.logsigmoid(-levels).exp()
