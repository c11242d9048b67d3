"""Softmax attention over whole clouds: rectangles for torch's scaled dot product attention.

Clouds are filled up to the size of the largest one, and what is filled up is masked. Torch then chooses one of its own
kernels, none of which can be differentiated twice: where that is asked for, the gradient is taken through plain maths.
So are small clouds on CPUs, such as molecules, for which plain maths is faster.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.geometry import Padding
from lieattn.ops._precision import without_autocast

_SHORT = 32  # rows up to which plain maths took less time than torch's kernel on a CPU, forward and backward


def attend(query: Tensor, key: Tensor, value: Tensor, padding: Padding, *, joint: bool, dropout: float = 0.0) -> Tensor:
    """Attend to all points of the cloud, over all frames (``joint``) or within each frame.

    Parameters
    ----------
    query, key, value
        ``[points, fiber, heads, dim]``, the query scaled.
    padding
        Layout of the clouds.
    joint
        Whether keys range over all frames.
    dropout
        Probability of dropping a weight.

    Returns
    -------
    Tensor
        ``[points, fiber, heads, value_dim]``, of the dtype of ``value``.
    """
    fiber, heads = value.shape[1:3]
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, rows = (_to_rows(padding.pad(signal.to(dtype)), joint) for signal in (query, key, value))
    mask = padding.mask
    if mask is not None:
        mask = (mask.repeat_interleave(fiber, dim=1) if joint else mask)[:, None, None]
    # Autocast would round positions that are worked into queries and keys.
    with without_autocast(value.device):
        out = scaled_dot_product(query, key, rows, mask, dropout=dropout)
    if joint:
        places = out.transpose(1, 2).unflatten(1, (-1, fiber))
    else:
        places = out.transpose(1, 2).unflatten(2, (fiber, heads))
    return padding.unpad(places).to(value.dtype)


def _to_rows(signal: Tensor, joint: bool) -> Tensor:
    """``[clouds, places, fiber, heads, dim]`` to what is a batch, what attends, and its channels."""
    return (signal.flatten(1, 2) if joint else signal.flatten(2, 3)).transpose(1, 2)


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float = 0.0
) -> Tensor:
    """Torch's scaled dot product attention without its scale, differentiable as often as one likes.

    Parameters
    ----------
    query, key, value
        ``[clouds, heads, rows, dim]``.
    mask
        ``[clouds, 1, 1, rows]`` bool, which keys there are; None: all.
    dropout
        Probability of dropping a weight; then torch takes plain maths on CPUs, and on GPUs a kernel that can be
        differentiated once.
    """
    if _is_short(query, key) and dropout == 0:
        return _plain(query, key, value, mask)
    watched = torch.is_grad_enabled() and any(signal.requires_grad for signal in (query, key, value))
    if not watched or dropout > 0 or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=1.0)
    out: Tensor = _Attention.apply(query, key, value, mask)
    return out


def _is_short(query: Tensor, key: Tensor) -> bool:
    return query.device.type == "cpu" and key.shape[2] <= _SHORT and not torch.compiler.is_compiling()


class _Attention(torch.autograd.Function):
    """The kernel's own gradient, or that of plain maths where the gradient has a gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        wanted = ctx.needs_input_grad
        q, k, v = (t.detach().requires_grad_(wanted[i]) for i, t in enumerate((query, key, value)))
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
        ctx.inner = (q, k, v), out
        ctx.save_for_backward(query, key, value, mask)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        again = torch.is_grad_enabled()
        leaves, out = ((query, key, value), _plain(query, key, value, mask)) if again else ctx.inner
        through = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(out, through, grad, retain_graph=True, create_graph=again))
        return (*(next(found) if want else None for want in wanted), None)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    score = query @ key.mT
    if mask is not None:
        # Finite, so that clouds without points keep finite derivatives.
        score = score + score.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(score.dtype).min / 2)
    return score.softmax(-1) @ value
