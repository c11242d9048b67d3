"""Gradients of energies by positions and other inputs, in every gradient mode of the caller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def energy_and_force(energy: Callable[[Tensor], Tensor], pos: Tensor, *, create_graph: bool) -> tuple[Tensor, Tensor]:
    """Return energies ``[clouds]`` and minus the gradient of their sum."""
    values, gradient = energy_and_gradients(energy, pos, create_graph=create_graph)
    return values, -gradient


def energy_and_gradients(energy: Callable[..., Tensor], *inputs: Tensor, create_graph: bool) -> tuple[Tensor, ...]:
    """Return energies ``[clouds]`` and the gradients of their sum by all inputs, detached unless a graph is created.

    The function is never compiled, because torch computes wrong second derivatives of partially compiled functions.
    """
    gradients: Callable[..., tuple[Tensor, ...]] = _gradients
    if "torch._dynamo" in sys.modules:  # importing it takes a second, and nothing can be compiled without it
        gradients = torch.compiler.disable(_gradients)
    return gradients(energy, inputs, create_graph)


def _gradients(energy: Callable[..., Tensor], inputs: Sequence[Tensor], create_graph: bool) -> tuple[Tensor, ...]:
    with torch.inference_mode(False), torch.enable_grad():
        variables = [usable(value) for value in inputs]
        variables = [x if x.requires_grad else x.detach().requires_grad_() for x in variables]
        values = energy(*variables)
        found: Sequence[Tensor | None] = [None] * len(variables)
        if values.requires_grad:
            found = torch.autograd.grad(values.sum(), variables, create_graph=create_graph, allow_unused=True)
        pairs = zip(variables, found, strict=True)
        gradients = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]
    if not create_graph:
        return values.detach(), *(gradient.detach() for gradient in gradients)
    return values, *gradients


def usable(value: Any) -> Any:
    """Return a copy of a tensor that was created in inference mode, which autograd cannot save, or the value itself."""
    if isinstance(value, Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value
