"""The fused kernels as operators of torch, for CPUs and CUDA."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops import _plain as plain
from lieattn.ops._backend import fused_backend
from lieattn.ops._terms import Problem, RelativeTerms
from lieattn.ops.kernels._derivatives import register_derivatives
from lieattn.ops.kernels._heads import norm_shape
from lieattn.ops.kernels.attention._dropout import dropout_mask

_OPERANDS = 9
_INPUTS = (
    "Tensor? query, Tensor? key, Tensor value, Tensor? positional_key, Tensor? displacement_bias, Tensor? fiber_key, "
    "Tensor? fiber_bias, Tensor? psi, Tensor? beta, Tensor row_ptr, Tensor source, Tensor target, Tensor? index, "
    "Tensor seed, str pattern, str normalize, float dropout"
)


def attend(problem: Problem) -> Tensor:
    """Evaluate the operator on checked operands with a scaled query.

    Computes in the widest dtype of the operands, half precisions in float32. Signals in half precision are left as
    they are where the kernel widens them itself.
    """
    p, t, dtype = problem, problem.terms, problem.common_dtype
    alike = all(signal is None or signal.dtype == p.value.dtype for signal in (p.query, p.key))
    narrow = dtype == torch.float32 and alike and fused_backend(p.value.device) == "triton"
    signals = (_prepared(signal, p.value.dtype if narrow else dtype) for signal in (p.query, p.key, p.value))
    tables = (t.positional_key, t.displacement_bias, t.fiber_key, t.fiber_bias, t.psi, t.beta)
    lists = p.neighbors.row_ptr.contiguous(), p.neighbors.source.contiguous(), p.neighbors.target
    index = None if t.row is None else t.row.contiguous()
    # Drawn by torch, so that torch.manual_seed governs the mask and a compiled graph draws a new one each time.
    seed = torch.randint(2**62, ()) if p.dropout > 0 else torch.zeros((), dtype=torch.int64)
    operands = (*signals, *(_prepared(table, dtype) for table in tables))
    out, _ = _forward(*operands, *lists, index, seed, p.pattern, p.normalize, p.dropout)
    return cast(Tensor, out)


def _prepared(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


def _launcher(device: torch.device) -> ModuleType:
    """The kernels for a device; those for another one may not be installed."""
    if fused_backend(device) == "triton":
        from lieattn.ops.kernels.triton import _launch as triton_launch

        return triton_launch
    from lieattn.ops.kernels.attention import _launch

    return _launch


def _problem(inputs: tuple[Any, ...]) -> Problem:
    query, key, value, rho, bias, fiber_key, fiber_bias, psi, beta = inputs[:_OPERANDS]
    row_ptr, source, target, index, _, pattern, normalize, dropout = inputs[_OPERANDS:]
    terms = RelativeTerms(rho, bias, fiber_key, fiber_bias, psi, beta, row=index)
    return Problem(query, key, value, Neighbors(row_ptr, source, target), terms, pattern, normalize, dropout)


@torch.library.custom_op("lieattn::group_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    problem, seed = _problem(inputs), inputs[_OPERANDS + 4]
    return cast(tuple[Tensor, Tensor], _launcher(problem.value.device).run_forward(problem, int(seed)))


@torch.library.custom_op(
    "lieattn::group_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor norm, {_INPUTS}) -> ({', '.join(['Tensor'] * _OPERANDS)})",
)
def _backward(grad_out: Tensor, norm: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    problem, seed = _problem(inputs), inputs[_OPERANDS + 4]
    launch = _launcher(problem.value.device)
    return cast(tuple[Tensor, ...], launch.run_backward(problem, int(seed), grad_out, norm))


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    problem = _problem(inputs)
    value = problem.value
    out = value.new_empty(len(value), problem.outs, *value.shape[2:])
    return out, value.new_empty(norm_shape(problem), dtype=torch.promote_types(value.dtype, torch.float32))


def _plain(*inputs: Any) -> Tensor:
    """The plain evaluation, with the weights dropped that the kernels drop."""
    problem = _problem(inputs)
    wide = problem.to(torch.promote_types(problem.value.dtype, torch.float32))

    def drop(weights: Tensor) -> Tensor:
        bundled = _launcher(wide.value.device).bundle(wide)
        mask = dropout_mask(wide, int(inputs[_OPERANDS + 4]), bundled)
        return weights * (mask if weights.ndim == mask.ndim else mask[..., 0])

    return plain.attend(wide, drop if problem.dropout > 0 else None)[0]


register_derivatives(_forward, _backward, _plain, _OPERANDS, saved=(1,))
