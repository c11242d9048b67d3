"""Checks that a layer keeps its promise, for our tests and yours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lieattn._checks import TOLERANCE
from lieattn.groups import FiniteGroup, SemidirectProduct

if TYPE_CHECKING:
    from lieattn.certify import Certificate

__all__ = [
    "TOLERANCE",
    "assert_certified",
    "assert_equivariant",
    "equivariance_error",
    "random_cloud",
    "randomize",
    "relative_error",
]


def randomize(module: nn.Module, seed: int = 0, spread: float = 0.5) -> nn.Module:
    """Draw every parameter anew, biases and gains included, and return the module in eval mode.

    Initial values hide mistakes: a zero bias cannot leak, a gain of one cannot be forgotten.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.eval()


def random_cloud(
    group: FiniteGroup, points: int, *, clouds: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Coordinates ``[points, dim]``, standard normal, and their unsorted cloud indices ``[points]`` int64."""
    generator = torch.Generator().manual_seed(seed)
    pos = torch.randn(points, group.dim, generator=generator, dtype=torch.float64).to(dtype)
    batch = torch.randint(clouds, (points,), generator=generator)
    batch[:clouds] = torch.arange(clouds)[:points]
    return pos, batch


def relative_error(found: Tensor, expected: Tensor, floor: float = 1.0) -> float:
    """Largest difference over the largest expected entry or the floor; infinite if anything is not finite."""
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=floor))


def equivariance_error(
    call: Callable[[Tensor, Tensor], Tensor],
    group: FiniteGroup,
    x: Tensor,
    pos: Tensor,
    *,
    input_field: bool = True,
    output_field: bool = True,
    seed: int = 0,
) -> float:
    """Largest relative error of ``call(x, pos) -> y`` over all elements of H, each with a random translation.

    ``x`` are fields ``[points, fiber, channels]``, which H translates, or with ``input_field=False`` invariant features
    ``[points, channels]``; ``output_field`` says the same of the output. ``pos`` is ``[points, dim]``.
    """
    generator = torch.Generator().manual_seed(seed)
    motions = SemidirectProduct(group)
    expected = call(x, pos)
    worst = 0.0
    for h in range(group.order):
        shift = torch.randn(group.dim, generator=generator, dtype=torch.float64).to(pos)
        g = motions.element(h, shift)
        moved = call(group.translate(h, x) if input_field else x, motions.act(g, pos))
        turned = group.translate(h, expected) if output_field else expected
        worst = max(worst, relative_error(moved, turned))
    return worst


def assert_equivariant(
    call: Callable[[Tensor, Tensor], Tensor],
    group: FiniteGroup,
    x: Tensor,
    pos: Tensor,
    *,
    input_field: bool = True,
    output_field: bool = True,
    tolerance: float | None = None,
) -> None:
    """Raise AssertionError, with the error measured, if ``call`` does not commute with the group.

    Parameters are those of :func:`equivariance_error`; the tolerance is that of the dtype if absent, and where
    there is none, ValueError is raised.
    """
    if tolerance is None and pos.dtype not in TOLERANCE:
        raise ValueError(f"tolerance: expected one for {pos.dtype}, since only {list(TOLERANCE)} have defaults")
    allowed = TOLERANCE[pos.dtype] if tolerance is None else tolerance
    error = equivariance_error(call, group, x, pos, input_field=input_field, output_field=output_field)
    if not error <= allowed:
        raise AssertionError(f"equivariance error {error:.1e} under {group.name} exceeds {allowed:.0e}")


def assert_certified(network: Any, data: Any, group: Any = None, **options: Any) -> Certificate:
    """Raise AssertionError, with the certificate and the first layer that breaks, unless a network keeps its promise.

    Networks of any library and all arguments are those of :func:`lieattn.certify.certify`; it also fails where an
    output does not depend on the input, where nothing is promised, and where a search finds no group. Returns the
    certificate.
    """
    from lieattn.certify import certify

    certificate = certify(network, data, group, **options)
    if certificate.verdict != "kept":
        raise AssertionError(str(certificate))
    return certificate
