"""The kernels of the pattern ``"pooled"`` as operators of torch, differentiable and known to torch.compile.

As for the other patterns, forward and backward pass are an operator each, and the gradient of the backward pass is
that of the plain evaluation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops import _pooled as plain
from lieattn.ops._precision import common_dtype
from lieattn.ops._terms import RelativeTerms
from lieattn.ops.kernels._arguments import lanes_of

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_OPERANDS = 8


def attend(query: Tensor, key: Tensor, value: Tensor, neighbors: Neighbors, terms: RelativeTerms) -> Tensor:
    """Evaluate :func:`lieattn.ops.group_attention` with softmax on checked operands with a scaled query."""
    operands = (query, key, value, terms.key_psi, terms.positional_key, terms.psi, terms.beta, terms.displacement_bias)
    dtype = common_dtype(*operands)
    wide = [None if t is None else t.to(dtype).contiguous() for t in operands]
    # Frames that no table tells apart are summed beforehand; the gradient of the sum is torch's.
    for signal, table in ((1, terms.key_psi), (2, terms.psi)):
        if table is None or table.shape[2] == 1:
            wide[signal] = cast(Tensor, wide[signal]).sum(dim=1, keepdim=True)
    lists = neighbors.row_ptr.contiguous(), neighbors.source.contiguous(), neighbors.target
    out, _ = _forward(*wide, *lists, None if terms.row is None else terms.row.contiguous())
    return out.to(value.dtype) if value.dtype.itemsize < 4 else out


@torch.library.custom_op("lieattn::pooled_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_psi: Tensor | None,
    rho: Tensor | None,
    psi: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    row_ptr: Tensor,
    source: Tensor,
    target: Tensor,
    index: Tensor | None,
) -> tuple[Tensor, Tensor]:
    operands = (query, key, value, key_psi, rho, psi, beta, bias)
    from lieattn.ops.kernels._pooled_launch import run_forward

    return run_forward(operands, row_ptr, source, index)


@torch.library.custom_op("lieattn::pooled_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    out: Tensor,
    norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_psi: Tensor | None,
    rho: Tensor | None,
    psi: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    row_ptr: Tensor,
    source: Tensor,
    target: Tensor,
    index: Tensor | None,
) -> _Gradients:
    operands = (query, key, value, key_psi, rho, psi, beta, bias)
    from lieattn.ops.kernels._pooled_launch import run_backward

    return cast(_Gradients, run_backward(operands, row_ptr, source, index, grad_out, out, norm))


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, _, value, *tables = arguments[:_OPERANDS]
    points, heads, lanes = len(arguments[_OPERANDS]) - 1, value.shape[2], lanes_of(value.shape[2], value.dtype)
    outs = max(t.shape[1] for t in (query, *tables) if t is not None)
    norm = value.new_empty(-(-heads // lanes), points, outs, lanes)
    return value.new_empty(points, outs, *value.shape[2:]), norm


@_backward.register_fake
def _(grad_out: Tensor, out: Tensor, norm: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(grad_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in arguments[:_OPERANDS])


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_norm: Tensor | None) -> tuple[Tensor | None, ...]:
    out, norm, *inputs = ctx.saved_tensors
    if grad_out is None:
        return (None,) * len(inputs)
    grads = _backward(grad_out.contiguous(), out, norm, *inputs)
    wanted = ctx.needs_input_grad
    return tuple(grad if wanted[i] else None for i, grad in enumerate(grads)) + (None,) * (len(inputs) - _OPERANDS)


_forward.register_autograd(_differentiate, setup_context=_keep_forward)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], *inputs[3:])


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of the plain gradient: with respect to the gradient of the output, and to the operands."""
    tensors = list(ctx.saved_tensors)
    wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3 : 3 + _OPERANDS]]
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        if not further:  # nothing is differentiated a third time: a graph of its own
            for i, want in enumerate(wanted):
                tensors[i] = None if tensors[i] is None else tensors[i].detach().requires_grad_(want)
        first = _plain_gradients(tensors, wanted)
        pairs = [
            (one, grad)
            for one, grad in zip(first, grads, strict=True)
            if one is not None and grad is not None and one.requires_grad
        ]
        through = [t for t, want in zip(tensors, wanted, strict=False) if want]
        found: list[Tensor | None] = [None] * len(through)
        if pairs:
            ones, seconds = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(ones, through, seconds, create_graph=further, allow_unused=True))
    results = iter(found)
    second = [next(results) if want else None for want in wanted]
    return (second[0], None, None, *second[1:], *(None,) * (len(tensors) - 1 - _OPERANDS))


_backward.register_autograd(_differentiate_twice, setup_context=_keep_backward)


def _plain_gradients(tensors: list[Any], wanted: list[bool]) -> list[Tensor | None]:
    """What the backward operator computes, by the plain evaluation, with a graph behind it."""
    grad_out, query, key, value, key_psi, rho, psi, beta, bias, row_ptr, source, target, index = tensors
    out, _ = plain.attend(
        query,
        key,
        value,
        Neighbors(row_ptr, source, target),
        normalize="softmax",
        terms=RelativeTerms(rho, bias, psi=psi, beta=beta, key_psi=key_psi, row=index),
    )
    operands, needed = tensors[1 : 1 + _OPERANDS], wanted[1:]
    through = [t for t, want in zip(operands, needed, strict=True) if want]
    found = iter(torch.autograd.grad(out, through, grad_out, create_graph=True, allow_unused=True) if through else ())
    return [next(found) if want else None for want in needed]
