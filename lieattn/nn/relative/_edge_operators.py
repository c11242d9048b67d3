"""What linear maps make of a network of all edges and frames: kernels, and their products with signals, in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn._functional import transformed

_BLOCK = 1 << 17  # entries of one layer's units that are computed at a time: they should fit into a core's cache
_MESSAGES = 1 << 17  # entries of messages that are computed at a time
_aten = torch.ops.aten


def edge_kernels(
    seen: Tensor,
    invariants: Tensor,
    weight: Tensor,
    first: Tensor,
    second: tuple[Tensor, Tensor],
    maps: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    r"""Kernels :math:`w_e\, C_k\, \sigma(B\, \sigma(A\, s_{ea} + t_e) + b)` of edges e and frames a, σ the swish.

    Units are computed block by block, and once more in the backward pass, so memory is that of the result. It can be
    differentiated as often as one likes.

    Parameters
    ----------
    seen, invariants, weight
        s ``[edges, fiber, inputs]``, t ``[edges, hidden]``, w ``[edges]``.
    first, second, maps
        A ``[hidden, inputs]``; B ``[hidden, hidden]`` and b ``[hidden]``; C_k ``[channels, hidden]``.

    Returns
    -------
    tuple of Tensor
        ``[edges, fiber, channels]`` for each of the maps.
    """
    operands = seen, invariants, weight, first, *second, *maps
    if not _in_blocks(seen):
        return _plain(*operands)
    out: tuple[Tensor, ...] = _EdgeKernels.apply(*operands)
    return out


def edge_messages(units: Tensor, last: Tensor, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    r"""Sums :math:`\sum_j (C z_{ija}) \odot f(x_j, a)` over the edges from j to i, with products of their own.

    Messages are computed block by block, and once more in the backward pass. They can be differentiated as often as one
    likes.

    Parameters
    ----------
    units, last, x
        z ``[edges, fiber, hidden]``, C ``[channels, hidden]``, f ``[points, fiber, channels]``.
    source, target
        The points j and i of the edges ``[edges]``.

    Returns
    -------
    Tensor
        ``[points, fiber, channels]``.
    """
    if not _in_blocks(units):
        return _plain_messages(units, last, x, source, target)
    out: Tensor = _EdgeMessages.apply(units, last, x, source, target)
    return out


def _in_blocks(x: Tensor) -> bool:
    """Whether nobody but autograd looks at what is computed."""
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return not (x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or recorded or transformed())


def _plain(
    seen: Tensor, invariants: Tensor, weight: Tensor, first: Tensor, second: Tensor, bias: Tensor, *maps: Tensor
) -> tuple[Tensor, ...]:
    y = F.silu(F.linear(seen, first) + invariants[:, None])
    z = F.silu(F.linear(y, second, bias)) * weight[:, None, None]
    return tuple(F.linear(z, last) for last in maps)


class _EdgeKernels(torch.autograd.Function):
    """:func:`_plain` in blocks of edges."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        seen, invariants, weight, first, second, bias, *maps = operands
        fiber = seen.shape[1]
        outs = [seen.new_empty(len(seen) * fiber, len(part)) for part in maps]
        for rows, s, t in _blocks(seen, invariants):
            y = F.silu(_first_layer(s, t, first), inplace=True)
            z = F.silu(torch.addmm(bias, y, second.T), inplace=True)
            z.view(len(t), -1).mul_(weight[rows, None])
            for out, last in zip(outs, maps, strict=True):
                torch.mm(z, last.T, out=out[rows.start * fiber : rows.stop * fiber])
        return tuple(out.unflatten(0, (-1, fiber)) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operands, wanted = ctx.saved_tensors, ctx.needs_input_grad
        if not torch.is_grad_enabled():
            return _gradients(grads, operands, wanted)
        through = [operand for operand, want in zip(operands, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(_plain(*operands), through, grads, create_graph=True))
        return tuple(next(found) if want else None for want in wanted)


def _plain_messages(units: Tensor, last: Tensor, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    messages = F.linear(units, last) * x.index_select(0, source)
    return messages.new_zeros(x.shape).index_add(0, target, messages)


class _EdgeMessages(torch.autograd.Function):
    """:func:`_plain_messages` in blocks of edges."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        units, last, x, source, target = operands
        signals, out = x.flatten(1), x.new_zeros(len(x), x[0:1].numel())
        for rows in _slices(units, last):
            kernel = (units[rows].flatten(0, 1) @ last.T).view(-1, out.shape[1])
            out.index_add_(0, target[rows], kernel.mul_(signals.index_select(0, source[rows])))
        return out.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        units, last, x, source, target = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = ctx.needs_input_grad[:3]
            through = [operand for operand, want in zip((units, last, x), wanted, strict=True) if want]
            out = _plain_messages(units, last, x, source, target)
            found = iter(torch.autograd.grad(out, through, grads, create_graph=True))
            return *(next(found) if want else None for want in wanted), None, None
        signals, grad = x.flatten(1), grads[0].flatten(1)
        of_units, of_last, of_x = torch.empty_like(units), torch.zeros_like(last), torch.zeros_like(signals)
        for rows in _slices(units, last):
            z, change = units[rows].flatten(0, 1), grad.index_select(0, target[rows])
            of_x.index_add_(0, source[rows], (z @ last.T).view(change.shape).mul_(change))
            change = change.mul_(signals.index_select(0, source[rows])).view(-1, len(last))
            of_last.addmm_(change.T, z)
            torch.mm(change, last, out=of_units[rows].flatten(0, 1))
        return of_units, of_last, of_x.view_as(x), None, None


def _slices(units: Tensor, last: Tensor) -> Iterator[slice]:
    size = max(16, _MESSAGES // max(1, units.shape[1] * len(last)))
    return (slice(begin, min(len(units), begin + size)) for begin in range(0, len(units), size))


def _gradients(
    grads: Sequence[Tensor], operands: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of all operands, of what is seen and the weights of edges only if wanted."""
    seen, invariants, weight, first, second, bias, *maps = operands
    last, hidden = torch.cat(maps), len(second)
    # A product with many rows is faster where the longer side of its result is the last one.
    to_first = torch.zeros_like(first.T, memory_format=torch.contiguous_format)
    to_second, to_bias, to_last = (torch.zeros_like(part) for part in (second, bias, last))
    of_seen, of_weight = (
        torch.empty_like(t) if want else None for t, want in zip((seen, weight), wanted[:3:2], strict=True)
    )
    of_invariants = torch.empty_like(invariants)
    for rows, s, t in _blocks(seen, invariants):
        share = weight[rows, None]
        u = _first_layer(s, t, first)
        y = F.silu(u)
        v = torch.addmm(bias, y, second.T)
        z = F.silu(v)
        grad = torch.cat([part[rows].reshape(len(s), -1) for part in grads], dim=1)
        change = grad @ last
        if of_weight is not None:
            of_weight[rows] = (change * z).view(len(t), -1).sum(dim=1)
        z.view(len(t), -1).mul_(share)
        change.view(len(t), -1).mul_(share)
        to_last.addmm_(grad.T, z)
        change = _aten.silu_backward(change, v)
        to_bias += change.sum(dim=0)
        to_second.addmm_(change.T, y)
        change = _aten.silu_backward(change @ second, u)
        of_invariants[rows] = change.view(len(t), -1, hidden).sum(dim=1)
        to_first.addmm_(s.T, change)
        if of_seen is not None:
            of_seen[rows] = (change @ first).view_as(of_seen[rows])
    of_maps = to_last.split([len(part) for part in maps])
    return of_seen, of_invariants, of_weight, to_first.T, to_second, to_bias, *of_maps


def _first_layer(seen: Tensor, invariants: Tensor, first: Tensor) -> Tensor:
    """What the first layer has before its swish, ``[edges * fiber, hidden]``."""
    y = (seen @ first.T).view(len(invariants), -1, len(first)).add_(invariants[:, None])
    return y.view(-1, len(first))


def _blocks(seen: Tensor, invariants: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Edges of each block, what is seen with a row for each of their frames, and their invariants."""
    edges, fiber, inputs = seen.shape
    size = max(16, _BLOCK // max(1, fiber * invariants.shape[1]))
    for begin in range(0, edges, size):
        rows = slice(begin, min(edges, begin + size))
        yield rows, seen[rows].reshape(-1, inputs), invariants[rows]
