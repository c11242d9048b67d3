"""The number of multiply-adds of a computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lieattn._core.checks import check_arguments
from lieattn.ops import _plain as plain
from lieattn.ops._backend import plain_layers
from lieattn.ops._terms import Problem
from lieattn.ops.kernels.attention._operator import FORWARD_AND_BACKWARD, problem_of

_aten = torch.ops.aten
_ENTRYWISE = (_aten.mul.Tensor, _aten.mul_.Tensor, _aten.addcmul.default, _aten.addcmul_.default)
# Torch's kernels of scaled dot product attention, and whether they are gradients. Its own formulas include what kernels
# compute again for the gradient, and differ between devices and versions.
_SCALED_DOT_PRODUCT = {
    getattr(_aten, f"_scaled_dot_product_{kind}{end}"): bool(end)
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for end in ("", "_backward")
}


def count_operations(work: Callable[[], Any]) -> int:
    """Count the multiply-adds of a function, including its backward passes. The function is called once.

    Matrix products, convolutions, torch's scaled dot product attention, and entrywise products of two tensors are
    counted. Fused kernels of attention, torch's and that of :func:`group_attention`, count like the equivalent plain
    torch, without recomputations for the gradient. Other kernels of this library are replaced by plain torch during the
    call. Computations of packages outside of torch's operators are not counted.

    Parameters
    ----------
    work
        Function without arguments, such as ``lambda: network(batch).sum().backward()``.

    Examples
    --------
    >>> import torch
    >>> from lieattn.ops import count_operations
    >>> count_operations(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    30
    """
    check_arguments(count_operations, locals())
    counter = _Counter()
    with plain_layers(), counter:
        work()
    return counter.total + sum(count() for count in counter.kernels)


class _Counter(TorchDispatchMode):
    """Counter that is called for every operator of torch, also in backward passes."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports Triton where it is installed

        super().__init__()
        self.formulas = flop_registry
        self.total = 0
        self.kernels: list[Callable[[], int]] = []  # called afterwards, since autograd is off in here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in FORWARD_AND_BACKWARD:
            backward = packet is FORWARD_AND_BACKWARD[1]
            inputs = [_without_storage(value) for value in args[2 * backward :]]
            self.kernels.append(lambda: _attention(inputs, backward=backward))
        elif packet in _SCALED_DOT_PRODUCT:
            backward = _SCALED_DOT_PRODUCT[packet]
            self.total += _scaled_dot_product(args[backward : backward + 3], backward)
        elif packet in self.formulas:
            self.total += self.formulas[packet](*args, **kwargs, out_val=out) // 2  # a multiply-add is two of them
        elif func in _ENTRYWISE and all(isinstance(factor, Tensor) and factor.ndim for factor in args[-2:]):
            self.total += out.numel()
        return out


def _scaled_dot_product(signals: Sequence[Tensor], backward: bool) -> int:
    """Count scaled dot product attention, or its gradient, for signals ``[clouds, heads, rows, dim]``."""
    query, key, value = signals
    pairs = query.shape[:3].numel() * key.shape[2]
    return (1 + backward) * pairs * (query.shape[3] + value.shape[3])


def _without_storage(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _attention(inputs: list[Any], *, backward: bool) -> int:
    """Count the operator, or its gradient, by plain torch on tensors without storage."""
    problem = problem_of([*inputs[:-1], 0.0])  # dropped weights are computed too
    if problem.pattern == "pooled":
        return (1 + backward) * _pooled(problem)
    leaves = [t.requires_grad_() for t in problem.operands().values() if t is not None]
    counter = _Counter()
    with torch.enable_grad():
        if not backward:
            with counter:
                plain.attend(problem)
        else:
            out, _ = plain.attend(problem)
            with counter:
                torch.autograd.grad(out, leaves, torch.empty_like(out), allow_unused=True)
    return counter.total


def _pooled(problem: Problem) -> int:
    """Count the pattern ``"pooled"``, edge by edge."""
    signals = (problem.terms.key_psi, problem.key), (problem.terms.psi, problem.value)
    each = problem.neighbors.num_edges * problem.outs * problem.value.shape[2]
    widths = [
        signal.shape[-1] * (1 if psi is None else 1 + psi.shape[2]) for psi, signal in signals if signal is not None
    ]
    return each * sum(widths)
