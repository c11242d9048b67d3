"""The fused kernels as operators of torch.

The gradient is computed by a kernel, and the gradient of the gradient by plain torch. Derivatives of any order are
therefore exact, and torch.compile supports the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops import _plain as plain
from lieattn.ops import _pooled as pooled
from lieattn.ops._backend import fused_backend
from lieattn.ops._gradients import aliases, gradients_of
from lieattn.ops._terms import Problem, RelativeTerms
from lieattn.ops.kernels._calls import expect_gradients
from lieattn.ops.kernels.attention._bundle import SINGLE, Bundle, block_seed, norm_shape, seeded_heads

_OPERANDS, _TENSORS = 10, 15
_WORD = 2**32 - 1
_INPUTS = (
    "Tensor? query, Tensor? key, Tensor value, Tensor? positional_key, Tensor? displacement_bias, Tensor? fiber_key, "
    "Tensor? fiber_bias, Tensor? psi, Tensor? beta, Tensor? key_psi, Tensor row_ptr, Tensor source, Tensor target, "
    "Tensor? index, Tensor seed, str pattern, str normalize, float dropout"
)


def attend(problem: Problem) -> Tensor:
    """Evaluate the operator on checked operands with a scaled query.

    Numbers are computed in the widest dtype of the operands, but at least in float32. Signals in half precision are not
    converted if the kernel does this itself.
    """
    p = _over_elements(problem) if problem.pattern == "joint" and problem.terms.key_psi is not None else problem
    row, dtype = p.terms.row, p.common_dtype
    alike = all(signal is None or signal.dtype == p.value.dtype for signal in (p.query, p.key))
    narrow = dtype == torch.float32 and alike and fused_backend(p.value.device) == "triton"
    operands = {
        name: None if t is None else t.to(p.value.dtype if narrow and name in ("query", "key", "value") else dtype)
        for name, t in p.operands().items()
    }
    if p.pattern == "pooled":
        _pool_frames(operands, p.outs)
    given = [None if t is None else t.contiguous() for t in operands.values()]
    lists = p.neighbors.row_ptr.contiguous(), p.neighbors.source.contiguous(), p.neighbors.target
    # torch draws the seed, so that the mask depends on torch.manual_seed, and compiled graphs draw a new one each time.
    # It stays on the GPU, so that CUDA graphs do as well.
    draws = p.value.device if fused_backend(p.value.device) == "triton" else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    seed = torch.randint(2**62, (), device=draws) if p.dropout > 0 else zero
    index = None if row is None else row.contiguous()
    expect_gradients(given)
    out, _ = _forward(*given, *lists, index, seed, p.pattern, p.normalize, p.dropout)
    return cast(Tensor, out)[: len(problem.value)]


def _over_elements(problem: Problem) -> Problem:
    """Convert a joint problem to a pooled one, whose neighbors are the elements over the points, with one frame each.

    The points come first. Further points without neighbors are added, up to the number of elements.
    """
    p, frames, terms = problem, problem.value.shape[1], problem.terms
    points, edges = p.neighbors.num_points, p.neighbors.num_edges
    own = torch.arange(frames, device=p.value.device)

    def spread(index: Tensor) -> Tensor:
        return (index[:, None] * frames + own).flatten()

    def of_elements(table: Tensor) -> Tensor:
        """Convert ``[types, out, key, *]`` to ``[types * key, out, *]``."""
        return table.expand(-1, -1, frames, *(-1,) * (table.ndim - 3)).transpose(1, 2).flatten(0, 1)

    tables: Any = {
        name: of_elements(table[:, :, None]) if name == "positional_key" else of_elements(table)[:, :, None]
        for name, table in terms.tables().items()
    }
    row = spread(torch.arange(edges, device=own.device) if terms.row is None else terms.row)
    row_ptr = F.pad(p.neighbors.row_ptr * frames, (0, points * (frames - 1)), value=edges * frames)
    neighbors = Neighbors(row_ptr, spread(p.neighbors.source), p.neighbors.target.repeat_interleave(frames))
    query = F.pad(cast(Tensor, p.query), (*[0] * 7, points * (frames - 1)))
    key, value = (cast(Tensor, signal).flatten(0, 1)[:, None] for signal in (p.key, p.value))
    return Problem(query, key, value, neighbors, RelativeTerms(**tables, row=row), "pooled", p.normalize)


def _pool_frames(operands: dict[str, Tensor | None], outs: int) -> None:
    """Sum the frames of keys and values if no table distinguishes them, and expand queries to all output frames."""
    for name, table in (("key", operands["key_psi"]), ("value", operands["psi"])):
        if table is None or table.shape[2] == 1:
            operands[name] = cast(Tensor, operands[name]).sum(dim=1, keepdim=True)
    operands["query"] = cast(Tensor, operands["query"]).expand(-1, outs, -1, -1)


def _launcher(device: torch.device) -> ModuleType:
    """Import the kernels for a device. Kernels for other devices may not be installed."""
    if fused_backend(device) == "triton":
        from lieattn.ops.kernels.triton import _launch as triton_launch

        return triton_launch
    from lieattn.ops.kernels.attention import _launch

    return _launch


def problem_of(inputs: Sequence[Any]) -> Problem:
    """Convert the inputs of the forward kernel to arguments of the operator."""
    query, key, value, *terms = inputs[:_OPERANDS]
    row_ptr, source, target, index, _, *options = inputs[_OPERANDS:]
    terms.append(index)
    return Problem(query, key, value, Neighbors(row_ptr, source, target), RelativeTerms(*terms), *options)


@torch.library.custom_op("lieattn::group_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    problem, seed = problem_of(inputs), inputs[_TENSORS - 1]
    return cast(tuple[Tensor, Tensor], _launcher(problem.value.device).run_forward(problem, seed))


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    problem = problem_of(inputs)
    value = problem.value
    out = value.new_empty(value.shape[0], problem.outs, *value.shape[2:])
    return out, value.new_empty(norm_shape(problem), dtype=torch.promote_types(value.dtype, torch.float32))


@torch.library.custom_op(
    "lieattn::group_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor norm, {_INPUTS}) -> ({', '.join(['Tensor'] * _OPERANDS)})",
)
def _backward(grad_out: Tensor, norm: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the operands, with empty tensors for those that are None."""
    problem, seed = problem_of(inputs), inputs[_TENSORS - 1]
    launch = _launcher(problem.value.device)
    return cast(tuple[Tensor, ...], launch.run_backward(problem, seed, grad_out, norm))


@_backward.register_fake
def _(grad_out: Tensor, norm: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(grad_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs[:_OPERANDS])


def _plain(*inputs: Any) -> Tensor:
    """Evaluate the operator plainly, with the same dropped weights as in the kernels."""
    problem = problem_of(inputs)
    wide = problem.to(torch.promote_types(problem.value.dtype, torch.float32))

    def drop(weights: Tensor) -> Tensor:
        bundled = _launcher(wide.value.device).bundle(wide)
        mask = dropout_mask(wide, int(inputs[_TENSORS - 1]), bundled)
        return weights * (mask if weights.ndim == mask.ndim else mask[..., 0])

    evaluate = pooled.attend if problem.pattern == "pooled" else plain.attend
    return evaluate(wide, drop if problem.dropout > 0 else None)[0]


def dropout_mask(problem: Problem, seed: int, bundle: Bundle = SINGLE) -> Tensor:
    """Return the factors of the weights, 0 or 1 / (1 - dropout), that the kernels draw, for second derivatives.

    They are ``[edges, heads, out, query, key]``. ``out`` is 1 if it is the query frame, and ``key`` is 1 if a key point
    is dropped with its whole fiber, or with the pattern ``"framewise"``.
    """
    a = problem
    heads, edges = a.value.shape[2] * bundle.clouds, a.neighbors.num_edges // bundle.clouds
    together = seeded_heads(a.value.dtype)
    outs = a.outs if a.pattern == "query_sum" else 1
    keys = a.value.shape[1] if a.pattern == "joint" else 1
    weights = outs * a.queries * keys
    counter = torch.arange(edges * weights, device=a.value.device).reshape(edges, outs, a.queries, keys)
    offsets, blocks = 0x9E3779B9 * torch.arange(together, device=counter.device).reshape(-1, 1, 1, 1), []
    for block in range(-(-heads // together)):
        state = counter * _signed(0x9E3779B97F4A7C15) + _signed(block_seed(seed, block))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            state = (state ^ ((state >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
        word = (state[:, None] + offsets) & _WORD
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            word = ((word ^ (word >> shift)) * factor) & _WORD
        blocks.append(word)
    threshold = int(a.dropout * 2**32)
    kept = torch.cat(blocks, dim=1)[:, :heads] >= threshold
    kept = bundle.scatter_edges(kept)
    return kept.to(a.value.dtype) * (2**32 / (2**32 - threshold))


def _signed(word: int) -> int:
    """Return the 64 bits of an unsigned word as a signed integer, as torch requires."""
    return word - 2**64 if word >= 2**63 else word


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_TENSORS:]
    ctx.save_for_backward(output[1], *inputs[:_TENSORS])


def _differentiate(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if grad_out is not None:
        grads = _backward(grad_out.contiguous(), *ctx.saved_tensors, *ctx.options)
        found[:_OPERANDS] = [grad if ctx.needs_input_grad[i] else None for i, grad in enumerate(grads)]
    return tuple(found)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, _, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.options = rest[_TENSORS:]
    ctx.save_for_backward(grad_out, *rest[:_TENSORS])


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the output's gradient and of the operands, given the gradients of their gradients."""
    tensors, further = aliases(ctx.saved_tensors), torch.is_grad_enabled()
    wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2 : 2 + _OPERANDS]]
    with torch.enable_grad():
        if not further:  # there is no third derivative, so a separate graph is enough
            for i, want in enumerate(wanted):
                tensors[i] = None if tensors[i] is None else tensors[i].detach().requires_grad_(want)
        out = _plain(*tensors[1:], *ctx.options)
        first = gradients_of([out], tensors[1:], wanted[1:], [tensors[0].to(out.dtype)])
        pairs = [
            (one, grad)
            for one, grad in zip(first, grads, strict=True)
            if one is not None and grad is not None and one.requires_grad
        ]
        outputs, given = [one for one, _ in pairs], [grad for _, grad in pairs]
        found = gradients_of(outputs, tensors, wanted, given, create_graph=further)
    return (found[0], None, *found[1:], *[None] * (len(ctx.needs_input_grad) - 2 - _OPERANDS))


_forward.register_autograd(_differentiate, setup_context=_keep_forward)
_backward.register_autograd(_differentiate_twice, setup_context=_keep_backward)
FORWARD_AND_BACKWARD = torch.ops.lieattn.group_attention, torch.ops.lieattn.group_attention_backward
