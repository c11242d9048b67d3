"""Energies and their gradients, whatever gradient mode the caller is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def energy_and_force(energy: Callable[[Tensor], Tensor], pos: Tensor, *, create_graph: bool) -> tuple[Tensor, Tensor]:
    """Energies and minus the gradient of their sum with respect to positions.

    Parameters
    ----------
    energy
        From positions ``[points, dim]`` to energies ``[clouds]``, where each point counts for one cloud only.
    pos
        ``[points, dim]``.
    create_graph
        Whether both can be differentiated further; otherwise both are detached.

    Returns
    -------
    energy
        ``[clouds]``.
    force
        ``[points, dim]``, zero where the energy does not depend on a position.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = pos.clone() if pos.is_inference() else pos
        x = x if x.requires_grad else x.detach().requires_grad_()
        values = energy(x)
        gradient = None
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), x, create_graph=create_graph, allow_unused=True)
        force = torch.zeros_like(x) if gradient is None else -gradient
    if not create_graph:
        return values.detach(), force.detach()
    return values, force


def usable(value: Any) -> Any:
    """A tensor that gradients may save: one made in inference mode is copied, anything else is left alone."""
    if isinstance(value, Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value


def per_cloud(values: Tensor) -> Tensor:
    """Energies ``[clouds]`` of what a model gives, ``[clouds]`` or ``[clouds, 1]``.

    Raises
    ------
    ValueError
        For other shapes.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(f"model: expected one energy a cloud, [clouds] or [clouds, 1], got {tuple(values.shape)}")
    return values
