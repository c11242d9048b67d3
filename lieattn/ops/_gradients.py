"""Gradients of those operands that need one, in the places of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradients_of(
    outputs: Sequence[Tensor],
    operands: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
    *,
    create_graph: bool = True,
    retain_graph: bool | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the first operands, one for each entry of ``wanted``; None where not wanted, absent or unused."""
    through = [operand for operand, want in zip(operands, wanted, strict=False) if want and operand is not None]
    if not through or not outputs:
        return (None,) * len(wanted)
    found = torch.autograd.grad(outputs, through, grads, retain_graph, create_graph, allow_unused=True)
    rest, places = iter(found), zip(operands, wanted, strict=False)
    return tuple(next(rest) if want and operand is not None else None for operand, want in places)
