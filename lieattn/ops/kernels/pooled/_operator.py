"""The kernels of the pattern ``"pooled"`` as operators of torch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops import _pooled as plain
from lieattn.ops._terms import Problem, RelativeTerms
from lieattn.ops.kernels._derivatives import register_derivatives
from lieattn.ops.kernels._heads import lanes_of

_OPERANDS = 8
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_psi, Tensor? rho, Tensor? psi, Tensor? beta, Tensor? bias, "
    "Tensor row_ptr, Tensor source, Tensor target, Tensor? index"
)


def attend(problem: Problem) -> Tensor:
    """Evaluate the softmax of pattern ``"pooled"`` on checked operands with a scaled query."""
    p, t, dtype = problem, problem.terms, problem.common_dtype
    operands = (p.query, p.key, p.value, t.key_psi, t.positional_key, t.psi, t.beta, t.displacement_bias)
    wide = [None if tensor is None else tensor.to(dtype).contiguous() for tensor in operands]
    # Frames that no table tells apart are summed beforehand; the gradient of the sum is torch's.
    for signal, table in ((1, t.key_psi), (2, t.psi)):
        if table is None or table.shape[2] == 1:
            wide[signal] = cast(Tensor, wide[signal]).sum(dim=1, keepdim=True)
    lists = p.neighbors.row_ptr.contiguous(), p.neighbors.source.contiguous(), p.neighbors.target
    out, _ = _forward(*wide, *lists, None if t.row is None else t.row.contiguous())
    return cast(Tensor, out)


@torch.library.custom_op("lieattn::pooled_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    from lieattn.ops.kernels.pooled._launch import run_forward

    return run_forward(*_split(inputs))


@torch.library.custom_op(
    "lieattn::pooled_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor out, Tensor norm, {_INPUTS}) -> ({', '.join(['Tensor'] * _OPERANDS)})",
)
def _backward(grad_out: Tensor, out: Tensor, norm: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    from lieattn.ops.kernels.pooled._launch import run_backward

    return run_backward(*_split(inputs), grad_out, out, norm)


def _split(inputs: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Neighbors, Tensor | None]:
    """Operands, neighbors, and the row of each edge."""
    *lists, index = inputs[_OPERANDS:]
    return inputs[:_OPERANDS], Neighbors(*lists), index


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    query, _, value, *tables = inputs[:_OPERANDS]
    points, heads, lanes = len(query), value.shape[2], lanes_of(value.shape[2], value.dtype)
    outs = max(t.shape[1] for t in (query, *tables) if t is not None)
    norm = value.new_empty(-(-heads // lanes), points, outs, lanes)
    return value.new_empty(points, outs, *value.shape[2:]), norm


def _plain(*inputs: Any) -> Tensor:
    (query, key, value, key_psi, rho, psi, beta, bias), neighbors, index = _split(inputs)
    terms = RelativeTerms(rho, bias, psi=psi, beta=beta, key_psi=key_psi, row=index)
    return plain.attend(Problem(query, key, cast(Tensor, value), neighbors, terms, "pooled", "softmax"))[0]


register_derivatives(_forward, _backward, _plain, _OPERANDS, saved=(0, 1))
