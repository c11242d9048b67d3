"""The precision that the operator computes in: that of its widest operand, and no less than float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lieattn.ops._terms import RelativeTerms


def common_dtype(*operands: Tensor | None) -> torch.dtype:
    """Widest dtype of the operands, float32 at least: scores and their statistics are not rounded to half precision."""
    dtype = torch.float32
    for tensor in operands:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def widened(terms: RelativeTerms, dtype: torch.dtype) -> RelativeTerms:
    """The same terms in another dtype."""
    tables: dict[str, Any] = {name: table.to(dtype) for name, table in terms.tables().items()}
    return replace(terms, **tables)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which products are taken in the dtype of their operands."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
