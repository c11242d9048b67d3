"""Derivatives of pairs of operators of torch: the gradient of a kernel is a kernel, that of the gradient plain maths.

So second and higher derivatives are exact, and torch.compile knows the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_derivatives(
    forward: Any, backward: Any, plain: Callable[..., Tensor], operands: int, saved: tuple[int, ...]
) -> None:
    """Make an operator differentiable as often as one likes.

    Parameters
    ----------
    forward
        ``forward(*operands, *lists, *options)`` gives the output and what else the backward pass needs. Operands and
        lists are tensors or None, options are not.
    backward
        ``backward(grad_out, *saved, *operands, *lists, *options)`` gives the gradients of the operands, empty tensors
        for those that are None.
    plain
        Evaluation of the output from the arguments of ``forward``.
    operands
        Number of operands.
    saved
        Which outputs of ``forward`` are handed to ``backward``.
    """
    begin = 1 + len(saved)  # the operands among the arguments of ``backward``

    def keep(ctx: Any, outputs: list[Tensor], inputs: tuple[Any, ...]) -> None:
        ctx.set_materialize_grads(False)
        tensors = [value for value in inputs if value is None or isinstance(value, Tensor)]
        ctx.options = inputs[len(tensors) :]
        ctx.save_for_backward(*outputs, *tensors)

    def keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep(ctx, [output[number] for number in saved], inputs)

    def keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep(ctx, [inputs[0]], inputs[begin:])

    def differentiate(ctx: Any, grad_out: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad_out is not None:
            grads = backward(grad_out.contiguous(), *inputs, *ctx.options)
            found[:operands] = [grad if ctx.needs_input_grad[i] else None for i, grad in enumerate(grads)]
        return tuple(found)

    def differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        places = [0, *range(begin, begin + operands)]
        wanted = [ctx.needs_input_grad[place] for place in places]
        found = _differentiate_gradient(plain, list(ctx.saved_tensors), ctx.options, wanted, grads)
        second: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, grad in zip(places, found, strict=True):
            second[place] = grad
        return tuple(second)

    @backward.register_fake
    def _(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        given = inputs[len(saved) : len(saved) + operands]
        return tuple(grad_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)

    forward.register_autograd(differentiate, setup_context=keep_forward)
    backward.register_autograd(differentiate_twice, setup_context=keep_backward)


def _differentiate_gradient(
    plain: Callable[..., Tensor],
    tensors: list[Any],
    options: tuple[Any, ...],
    wanted: list[bool],
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Pull ``grads`` back through the gradients of the operands, to the gradient of the output and the operands.

    ``tensors`` are the gradient of the output, the operands and the lists, ``wanted`` belongs to the first of them.
    """
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        if not further:  # nothing is differentiated a third time: a graph of its own
            for i, want in enumerate(wanted):
                tensors[i] = None if tensors[i] is None else tensors[i].detach().requires_grad_(want)
        out = plain(*tensors[1:], *options)
        first = _gradients(out, tensors[1:], wanted[1:], tensors[0].to(out.dtype), create_graph=True)
        pairs = [
            (one, grad)
            for one, grad in zip(first, grads, strict=True)
            if one is not None and grad is not None and one.requires_grad
        ]
        ones, seconds = zip(*pairs, strict=True) if pairs else ((), ())
        return _gradients(ones, tensors, wanted, seconds, create_graph=further)


def _gradients(
    outputs: Any, inputs: list[Any], wanted: list[bool], grads: Any, *, create_graph: bool
) -> list[Tensor | None]:
    """Gradients with respect to the first inputs, None for those not wanted."""
    through = [tensor for tensor, want in zip(inputs, wanted, strict=False) if want]
    if not through or (isinstance(outputs, tuple) and not outputs):
        return [None] * len(wanted)
    found = iter(torch.autograd.grad(outputs, through, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if want else None for want in wanted]
