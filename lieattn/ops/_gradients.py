"""Gradients of functions that fused kernels evaluate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lieattn._core.contexts import outside_of_transforms, transformed
from lieattn.ops.kernels._calls import expect_gradients

_functorch = torch._C._functorch  # there are no public functions for these questions


def need_plain_torch(grads: Sequence[Tensor | None]) -> bool:
    """Return whether a backward pass must use plain torch: its result is differentiated, or gradients are batched."""
    return torch.is_grad_enabled() or _is_batched(grads)


def _is_batched(grads: Sequence[Tensor | None]) -> bool:
    """Return whether a transform is active or gradients are batched, which kernels do not support."""
    if transformed():
        return True
    # torch.autograd.grad(..., is_grads_batched=True) passes special tensors, which do not occur in compiled code.
    if torch.compiler.is_compiling():
        return False
    return any(grad is not None and _functorch.is_legacy_batchedtensor(grad) for grad in grads)


def plain_gradients(
    evaluate: Callable[..., Tensor | Sequence[Tensor]],
    operands: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``evaluate(*operands)`` in a backward pass, in the format of :func:`gradients_of`."""
    again = torch.is_grad_enabled()

    @outside_of_transforms  # requires_grad_ is not allowed in transforms
    def graph() -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        leaves: Sequence[Tensor | None] = aliases(operands)
        if not again:  # a separate graph
            needed = [*wanted, *[False] * (len(operands) - len(wanted))]
            pairs = zip(operands, needed, strict=True)
            leaves = [None if operand is None else operand.detach().requires_grad_(need) for operand, need in pairs]
        with torch.enable_grad():
            made = evaluate(*leaves)
            return leaves, [made] if isinstance(made, Tensor) else made

    leaves, outputs = graph()
    return gradients_of(outputs, leaves, wanted, grads, create_graph=again)


def aliases(operands: Sequence[Any]) -> list[Any]:
    """Return other objects with the values and the graph of the operands, of which some may be None.

    Some operands may depend on others, or be the same object. The gradient of a function of aliases by one of them does
    not contain what goes through the others.
    """
    return [None if operand is None else operand.view_as(operand) for operand in operands]


def gradients_of(
    outputs: Sequence[Tensor],
    operands: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
    *,
    create_graph: bool = True,
    retain_graph: bool | None = None,
) -> tuple[Tensor | None, ...]:
    """Return gradients of the first operands, one for each entry of ``wanted``.

    The gradient of an operand is None if it is not wanted, absent or unused.
    """
    through = [operand for operand, want in zip(operands, wanted, strict=False) if want and operand is not None]
    if not through or not outputs:
        return (None,) * len(wanted)
    found = torch.autograd.grad(outputs, through, grads, retain_graph, create_graph, allow_unused=True)
    rest, places = iter(found), zip(operands, wanted, strict=False)
    return tuple(next(rest) if want and operand is not None else None for operand, want in places)


class Kernels(NamedTuple):
    """The kernels of a function of tensors, some of which may be None, and its plain torch.

    ``forward(*operands)`` returns one or several outputs, and tensors that only the gradient needs. ``backward(grads,
    wanted, *operands, *tensors)`` returns a gradient for each operand. ``again`` are the kernels of the gradients as a
    function ``(*grads, *operands)``, for derivatives of second order; without them, these are those of plain torch.
    """

    forward: Callable[..., tuple[Any, Sequence[Tensor]]]
    backward: Callable[..., Sequence[Tensor | None]]
    plain: Callable[..., Tensor | Sequence[Tensor]]
    again: Kernels | None = None


def evaluate(kernels: Kernels, *operands: Tensor | None) -> Any:
    """Return the outputs of kernels, which can be differentiated any number of times."""
    expect_gradients(operands)
    return _Fused.apply(kernels, *operands)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *operands: Tensor | None) -> Any:
        outputs, tensors = kernels.forward(*operands)
        ctx.save_for_backward(*operands, *tensors)
        ctx.kernels = kernels
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, _wanted(ctx, 1)
        if need_plain_torch(grads):
            if ctx.kernels.again is not None and not _is_batched(grads):
                return None, *evaluate(ctx.kernels.again, *grads, *saved[: len(wanted)])
            return None, *plain_gradients(ctx.kernels.plain, saved[: len(wanted)], wanted, grads)
        found = ctx.kernels.backward(grads, wanted, *saved)
        return None, *(grad if want else None for grad, want in zip(found, wanted, strict=True))


def smooth(derivative: Callable[[int, Tensor], Tensor], x: Tensor, order: int = 0) -> Tensor:
    """Return a derivative of a function of each number in x ``[*]``, given those of any order, ``[*]`` or ``[*, n]``.

    Those of higher orders are then one function each, instead of the derivatives of all steps of the one before.
    """
    if transformed() or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return derivative(order, x)
    out: Tensor = _Smooth.apply(derivative, order, x)
    return out


class _Smooth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, derivative: Callable[[int, Tensor], Tensor], order: int, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.derivative, ctx.order = derivative, order
        return derivative(order, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        (x,) = ctx.saved_tensors
        changed = grad * smooth(ctx.derivative, x, ctx.order + 1)
        return None, None, changed if changed.ndim == x.ndim else changed.sum(dim=-1)


def _wanted(ctx: Any, first: int) -> tuple[bool, ...]:
    """Return which operands, the inputs of a node from ``first`` on, need gradients in the present backward pass.

    Forces, for example, need none of the weights.
    """
    needed = ctx.needs_input_grad[first:]
    if torch.compiler.is_compiling() or transformed():
        return tuple(needed)
    nodes = iter(node for node, _ in ctx.next_functions if node is not None)
    return tuple(need and _is_reached(next(nodes)) for need in needed)


def _is_reached(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not tell whether the gradient of a leaf is asked for, and it is
        return True
