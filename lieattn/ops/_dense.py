"""Attention over whole clouds by matrix products.

Clouds are padded to the size of the largest one, and the padding is masked. Without a bias, torch chooses one of its
kernels of scaled dot product attention. None of them can be differentiated twice, so second derivatives use plain
torch. Small clouds on CPUs, such as molecules, are always evaluated by plain torch, which is faster. With few channels
per head, as in networks with many frames, a fused kernel is faster than both. A bias for each pair of elements is added
to the scores, which are then stored and are as large as the bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn._core.contexts import without_autocast
from lieattn.geometry import Neighbors, Padding
from lieattn.ops._backend import fused_kernel, is_recorded
from lieattn.ops._gradients import Kernels, aliases, evaluate, gradients_of
from lieattn.ops._terms import Problem

_FEW, _FEWEST = 8, 4  # channels up to which the fused kernel was faster on a CPU: for large clouds, and for all clouds
_SHORT = 32  # rows up to which plain torch was faster than torch's kernel on a CPU, forward and backward


def attend(problem: Problem) -> Tensor:
    """Evaluate the operator on checked operands, where every point attends to its whole cloud."""
    clouds = cast(Padding, problem.neighbors.whole_clouds)
    if problem.terms.displacement_bias is None:
        return _attend(problem, clouds)
    with without_autocast(problem.value.device):
        return _attend_with_bias(problem.to(problem.common_dtype), clouds)


def _attend(problem: Problem, padding: Padding) -> Tensor:
    """Attend to all points of the cloud, over all frames or framewise."""
    query, key, value = cast(Tensor, problem.query), cast(Tensor, problem.key), problem.value
    (fiber, heads), joint = value.shape[1:3], problem.pattern == "joint"
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)

    def to_rows(signal: Tensor) -> Tensor:
        padded = padding.pad(signal.to(dtype))
        return (padded.flatten(1, 2) if joint else padded.flatten(2, 3)).transpose(1, 2)

    mask = padding.mask
    if mask is not None:
        mask = (mask.repeat_interleave(fiber, dim=1) if joint else mask)[:, None, None]
    # Autocast would round positions, which can be part of queries and keys.
    with without_autocast(value.device):
        out = _scaled_dot_product(to_rows(query), to_rows(key), to_rows(value), mask, problem.dropout)
    places = out.transpose(1, 2)
    places = places.unflatten(1, (-1, fiber)) if joint else places.unflatten(2, (fiber, heads))
    return padding.unpad(places)


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Compute scaled dot product attention without the scale, differentiable any number of times.

    Signals are ``[clouds, heads, rows, dim]``, and ``mask`` ``[clouds, 1, 1, rows]`` is false for padded keys. With
    dropout, torch uses its plain operations on CPUs, and on GPUs a kernel that can be differentiated once.
    """
    compiled = torch.compiler.is_compiling()
    if _kernel_takes(query, key, value, dropout):
        return _few_channels(query, key, value, mask)
    if query.device.type == "cpu" and key.shape[2] <= _SHORT and dropout == 0 and not compiled:
        return _plain_torch(query, key, value, mask)
    watched = torch.is_grad_enabled() and any(signal.requires_grad for signal in (query, key, value))
    if not watched or dropout > 0 or compiled:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=1.0)
    out: Tensor = _Attention.apply(query, key, value, mask)
    return out


def _kernel_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether the kernel for few channels supports these signals: on CPUs, outside of traces and compilers."""
    sizes = query.shape[-1], value.shape[-1]
    few = 0 < min(sizes) and max(sizes) <= (_FEW if key.shape[2] > _SHORT else _FEWEST)
    if is_recorded() or dropout > 0 or not few or query.device.type != "cpu":
        return False
    alike = query.dtype == key.dtype == value.dtype and query.dtype in (torch.float32, torch.float64)
    return alike and fused_kernel(query.device) == "numba"


def _few_channels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    from lieattn.ops.kernels import _dense as launch

    whole = query.new_full((len(query),), key.shape[2], dtype=torch.int64)
    counts = whole if mask is None else mask.sum(dim=-1).view(-1)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        columns, norm = launch.run_forward(query, key, value, counts)
        return columns[..., : query.shape[2]].mT.contiguous(), (columns, norm)

    def backward(grads: Any, wanted: Any, query: Tensor, key: Tensor, value: Tensor, *norm: Tensor) -> list[Tensor]:
        return launch.run_backward(grads[0], norm[0], norm[1], query, key, value, counts)

    made: Tensor = evaluate(Kernels(forward, backward, partial(_plain_torch, mask=mask)), query, key, value)
    return made


class _Attention(torch.autograd.Function):
    """Torch's kernel with its own gradient, or that of plain torch if the gradient is differentiated again."""

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
        leaves, out = ctx.inner
        if again:
            leaves = query, key, value = aliases((query, key, value))
            out = _plain_torch(query, key, value, mask)
        return *gradients_of([out], leaves, wanted, [grad], retain_graph=True, create_graph=again), None


def _plain_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    # Torch's kernels compute sums and weights of signals in half precision in float32, too.
    narrow, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    score = query @ key.mT
    if mask is not None:
        # A finite number, so that derivatives of clouds without points are finite.
        score += score.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(score.dtype).min / 2)
    return (score.softmax(-1) @ value).to(narrow)


def _attend_with_bias(problem: Problem, padding: Padding) -> Tensor:
    """Attend over all frames, with a bias for each pair of elements, on operands of one dtype."""
    query, key, value, normalize = problem.query, problem.key, problem.value, problem.normalize
    fiber, heads = value.shape[1:3]

    def to_rows(signal: Tensor) -> Tensor:
        return padding.pad(signal).flatten(1, 2).transpose(1, 2).flatten(0, 1)

    bias = cast(Tensor, problem.terms.displacement_bias)
    bias = bias if problem.terms.row is None else bias.index_select(0, problem.terms.row)
    score = _squares(bias.expand(-1, fiber, fiber, heads), problem.neighbors, padding)
    mask = None if padding.mask is None else padding.mask.repeat_interleave(fiber, dim=1)
    if query is not None and key is not None:
        score = torch.baddbmm(score, to_rows(query), to_rows(key).mT)
    score = score.unflatten(0, (-1, heads))
    if normalize == "softmax":
        if mask is not None:
            score = score.masked_fill(~mask[:, None, None], float("-inf"))
        weight = score.softmax(dim=-1)
    else:
        weight = score.exp() if normalize == "exp-mean" else score
        if mask is not None:
            weight = weight * mask[:, None, None]
        if normalize != "none":
            count = score.shape[-1] if mask is None else mask.sum(dim=1)[:, None, None, None]
            weight = weight / count
    out = (weight.flatten(0, 1) @ to_rows(value)).unflatten(0, (-1, heads))
    return padding.unpad(out.transpose(1, 2).unflatten(1, (-1, fiber)))


def _squares(bias: Tensor, neighbors: Neighbors, padding: Padding) -> Tensor:
    """Return scores of edges as ``[clouds * heads, places * fiber, places * fiber]``, zero for padding."""
    clouds, places = padding.shape
    if padding.place is None:
        # Edges are sorted by target, then by source, so they already have the order of the squares.
        square = bias.unflatten(0, (clouds, places, places))
    else:
        target, source = padding.place[neighbors.target], padding.place[neighbors.source]
        flat = bias.new_zeros(clouds * places * places, *bias.shape[1:])
        square = flat.index_copy(0, target * places + source % places, bias).unflatten(0, (clouds, places, places))
    size = places * bias.shape[1]
    return square.permute(0, 5, 1, 3, 2, 4).reshape(-1, size, size)
