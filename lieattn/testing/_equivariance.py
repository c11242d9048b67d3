"""Checks of equivariance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lieattn._core.checks import TOLERANCE
from lieattn.groups import FiniteGroup, SemidirectProduct

if TYPE_CHECKING:
    from lieattn.certify import Certificate


def randomize(module: nn.Module, seed: int = 0, spread: float = 0.5) -> nn.Module:
    """Replace all parameters by normal random numbers of deviation ``spread``, and return the module in eval mode.

    Initial values can hide mistakes: a bias of zero or a gain of one has no effect on the output.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.eval()


def random_cloud(
    group: FiniteGroup, points: int, *, clouds: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Float[Tensor, "points dim"], Int[Tensor, " points"]]:
    """Return standard normal coordinates and their unsorted cloud indices, int64."""
    generator = torch.Generator().manual_seed(seed)
    pos = torch.randn(points, group.dim, generator=generator, dtype=torch.float64).to(dtype)
    batch = torch.randint(clouds, (points,), generator=generator)
    batch[:clouds] = torch.arange(clouds)[:points]
    return pos, batch


def relative_error(found: Tensor, expected: Tensor, floor: float = 1.0) -> float:
    """Return the largest difference divided by the largest expected entry, or by ``floor`` if that is larger.

    The error is infinite if an entry of either tensor is not finite or only one of them is empty, and 0 if both are.
    """
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return float("inf")
    if found.numel() == 0 or expected.numel() == 0:
        return 0.0 if found.numel() == expected.numel() else float("inf")
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=floor))


def equivariance_error(
    call: Callable[[Tensor, Tensor], Tensor],
    group: FiniteGroup,
    x: Float[Tensor, "points *fiber channels"],
    pos: Float[Tensor, "points dim"],
    *,
    input_field: bool = True,
    output_field: bool = True,
    elements: Iterable[int] | None = None,
    seed: int = 0,
) -> float:
    """Return the largest :func:`relative_error` of ``call(x, pos) -> y`` over h in H with random translations t.

    The output for h · x and points h pos + t is compared with h · y. ``x`` is a field ``[points, fiber, channels]``
    that H translates, or, with ``input_field=False``, invariant features ``[points, channels]``. ``output_field``
    states the same for the output. ``elements`` are the indices of the elements h, by
    default of all. Elements that generate H are enough: a call that commutes with them at all inputs commutes with H.
    """
    chosen = range(group.order) if elements is None else tuple(elements)
    if not chosen:
        raise ValueError("elements: expected indices of elements to test, got none")
    generator = torch.Generator().manual_seed(seed)
    motions = SemidirectProduct(group)
    expected = call(x, pos)
    worst = 0.0
    for h in chosen:
        shift = torch.randn(group.dim, generator=generator, dtype=torch.float64).to(pos)
        g = motions.element(h, shift)
        moved = call(group.translate(h, x) if input_field else x, motions.act(g, pos))
        turned = group.translate(h, expected) if output_field else expected
        worst = max(worst, relative_error(moved, turned))
    return worst


def assert_equivariant(
    call: Callable[[Tensor, Tensor], Tensor],
    group: FiniteGroup,
    x: Float[Tensor, "points *fiber channels"],
    pos: Float[Tensor, "points dim"],
    *,
    input_field: bool = True,
    output_field: bool = True,
    elements: Iterable[int] | None = None,
    tolerance: float | None = None,
) -> None:
    """Raise AssertionError, with the measured error, if ``call`` does not commute with the group.

    Parameters are those of :func:`equivariance_error`, whose seed is 0. The default tolerance is 1e-10 in float64 and
    1e-5 in float32. ValueError is raised for other dtypes if no tolerance is given.
    """
    allowed = _allowed(tolerance, pos.dtype)
    fields = {"input_field": input_field, "output_field": output_field}
    error = equivariance_error(call, group, x, pos, elements=elements, **fields)
    if not error <= allowed:
        raise AssertionError(f"equivariance error {error:.1e} under {group.name} exceeds {allowed:.0e}")


def _allowed(tolerance: float | None, dtype: torch.dtype) -> float:
    if tolerance is None and dtype not in TOLERANCE:
        raise ValueError(f"tolerance: expected one for {dtype}, since only {list(TOLERANCE)} have defaults")
    return TOLERANCE[dtype] if tolerance is None else tolerance


def further_symmetries(
    call: Callable[[Tensor, Tensor], Tensor],
    group: FiniteGroup,
    x: Tensor,
    pos: Tensor,
    *,
    tolerance: float | None = None,
) -> list[tuple[int, int]]:
    """Return pairs (u, v) of different elements that ``call`` commutes with, u on the field and v on the points.

    H acts on a field and its points together, by (u, u). A layer also commutes with (u, v) if its output is translated
    by some element, within ``tolerance`` (default: as :func:`assert_equivariant`). With no such pair it is uniquely
    equivariant (GSA-Nets, Definition 4.3); otherwise it does not see how fibers are turned against positions. ``x`` is
    a field ``[points, fiber, channels]``, and so is the output.
    """
    allowed = _allowed(tolerance, pos.dtype)
    expected = call(x, pos)
    translated = [group.translate(w, expected) for w in range(group.order)]
    found = []
    for u, v in itertools.permutations(range(group.order), 2):
        moved = call(group.translate(u, x), group.act(v, pos))
        if any(relative_error(moved, out) <= allowed for out in translated):
            found.append((u, v))
    return found


def assert_certified(network: Any, data: Any, group: Any = None, **options: Any) -> Certificate:
    """Certify a network, and raise AssertionError unless its guarantee holds. Return the certificate.

    Arguments are those of :func:`lieattn.certify.certify`, which accepts networks of any library. The error contains
    the certificate with the first layer that breaks equivariance. It is also raised if an output does not depend on the
    input, if the network guarantees nothing, and if the search for a group finds none.
    """
    from lieattn.certify import certify

    certificate = certify(network, data, group, **options)
    if certificate.verdict != "kept":
        raise AssertionError(str(certificate))
    return certificate
