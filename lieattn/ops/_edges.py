"""Networks of edges: functions of distances, hidden units, messages that are linear in the units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_count, check_flag, check_is, check_tensor, kind
from lieattn._core.numerics import lengths, sums
from lieattn.geometry import Neighbors
from lieattn.ops._backend import fused_kernel, is_recorded, may_choose
from lieattn.ops._gradients import Kernels, evaluate, smooth

_OPERANDS = 6  # number of operands of a network, without its maps
_KERNEL_ROWS = 64  # edges times frames below which a kernel is not worth its call
_KERNEL_PRODUCTS = 2**16  # the same for products with given kernels, which take hardly any time
# If positions need gradients, plain torch is faster, since it neither computes the gradients of weights with those of
# positions nor anything twice, as long as its largest intermediate results, with this many numbers, fit into the cache.
_CACHED = 2**21
_FULL = torch.float32, torch.float64  # precisions of kernels


def edge_units(
    seen: Float[Tensor, "edges fiber inputs"],
    shared: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, " edges"],
    first: Float[Tensor, "hidden inputs"],
    second: tuple[Float[Tensor, "hidden hidden"], Float[Tensor, " hidden"]],
) -> Float[Tensor, "edges fiber hidden"]:
    r"""Compute :math:`w_e\, \sigma(B\, \sigma(A\, s_{ea} + t_e) + b)` for edges e and frames a, where σ is the swish.

    A fused kernel recomputes the hidden units in the backward pass, so only the result is stored. Plain torch is used
    if the weights w, and so positions, need a gradient, unless there are many units. The function can be differentiated
    any number of times.

    Parameters
    ----------
    seen, shared, weight
        s, t, w.
    first, second
        A; B and b.
    """
    return _network(_checked(seen, shared, weight, first, second), ())[0]


def edge_kernels(
    seen: Float[Tensor, "edges fiber inputs"],
    shared: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, " edges"],
    first: Float[Tensor, "hidden inputs"],
    second: tuple[Float[Tensor, "hidden hidden"], Float[Tensor, " hidden"]],
    maps: Sequence[Float[Tensor, "_ hidden"]],
) -> tuple[Float[Tensor, "edges fiber _"], ...]:
    """Apply linear maps ``[channels, hidden]`` to :func:`edge_units`, and return ``[edges, fiber, channels]`` for each.

    The fused kernel does not store the units. The other parameters and the errors are those of :func:`edge_units`.
    """
    operands = _checked(seen, shared, weight, first, second)
    if not isinstance(maps, list | tuple) or not maps:
        raise TypeError(f"maps: expected a list or tuple of tensors [channels, hidden], at least one, got {kind(maps)}")
    for index, part in enumerate(maps):
        check_tensor(f"maps[{index}]", part, "a floating tensor")
        if part.ndim != 2 or part.shape[1] != len(first):
            raise ValueError(f"maps[{index}]: expected [channels, {len(first)}], got {tuple(part.shape)}")
    return _network(operands, maps)


def edge_messages(
    units: Float[Tensor, "edges fiber hidden"],
    weight: Float[Tensor, "channels hidden"] | None,
    x: Float[Tensor, "points fiber channels"],
    neighbors: Neighbors,
    *,
    moving: bool = False,
) -> Float[Tensor, "points fiber channels"]:
    r"""Compute :math:`\sum_j (C z_{ija}) \odot f(x_j, a)` over the edges from j to i.

    A fused kernel does not store the products C z. The function can be differentiated any number of times.

    Parameters
    ----------
    units, weight, x
        z, C, f. Without C, the units are these products.
    neighbors
        The edges.
    moving
        Whether positions need gradients. It is then faster to store the products C z, unless there are many.
    """
    check_is("neighbors", neighbors, Neighbors)
    check_flag(moving=moving)
    given = [("units", units, 3), ("x", x, 3), *([] if weight is None else [("weight", weight, 2)])]
    for argument, tensor, size in given:
        check_tensor(argument, tensor, "a floating tensor")
        if tensor.ndim != size:
            raise ValueError(f"{argument}: expected {size} axes, got {tuple(tensor.shape)}")
    wanted = {
        "units": (units, (neighbors.num_edges, x.shape[1], x.shape[2] if weight is None else weight.shape[1])),
        "x": (x, (neighbors.num_points, units.shape[1], units.shape[2] if weight is None else len(weight))),
    }
    _check_shapes(wanted)
    if weight is None:
        return _gated(units, x, neighbors)
    operands = [units, weight, x]
    if (moving and _is_cached(units, len(weight))) or not _kernel_takes(
        operands, units.shape[0] * units.shape[1], units.shape[2]
    ):
        return _plain_messages(units, weight, x, neighbors)
    launch = _launcher()
    kernels = Kernels(
        lambda *given: (launch.run_messages(*given, neighbors), ()),
        lambda grads, wanted, *given: launch.run_messages_backward(*grads, *given, neighbors, wanted[1]),
        partial(_plain_messages, neighbors=neighbors),
    )
    out: Tensor = evaluate(kernels, *operands)
    return out


def edge_moments(
    arrows: Float[Tensor, "edges size"], functions: Float[Tensor, "edges count"], neighbors: Neighbors
) -> tuple[Float[Tensor, "points size count"], Float[Tensor, "edges count"], Float[Tensor, "edges count"]]:
    r"""Compute moments :math:`M_i = \sum_j a_{ij} \otimes f_{ij}`, and their products with the arrows of each edge.

    The sum is over the edges from j to i. The products are :math:`\langle a_{ij}, M_i \rangle` and
    :math:`\langle a_{ij}, M_j \rangle`, so they are sums over pairs of edges at a cost that is linear in the edges. A
    fused kernel is used unless the arrows need a gradient. The function can be differentiated any number of times.

    Parameters
    ----------
    arrows, functions
        a, f.
    neighbors
        The edges.

    Returns
    -------
    tuple of Tensor
        Moments, and the products with those at the target and at the source of each edge.
    """
    check_is("neighbors", neighbors, Neighbors)
    for argument, tensor in (("arrows", arrows), ("functions", functions)):
        check_tensor(argument, tensor, "a floating tensor")
        if tensor.ndim != 2 or len(tensor) != neighbors.num_edges:
            raise ValueError(f"{argument}: expected {neighbors.num_edges} rows of numbers, got {tuple(tensor.shape)}")
    if arrows.requires_grad or not _kernel_takes([arrows, functions], *functions.shape):
        return _plain_moments(arrows, functions, neighbors)
    launch = _launcher()
    kernels = Kernels(
        lambda *given: (tuple(launch.run_moments(*given, neighbors)), ()),
        lambda grads, wanted, arrows, _: (None, launch.run_moments_backward(grads, arrows, neighbors)),
        partial(_plain_moments, neighbors=neighbors),
    )
    out: tuple[Tensor, Tensor, Tensor] = evaluate(kernels, arrows, functions)
    return out


def _kernel_takes(operands: Sequence[Tensor], rows: int, hidden: int) -> bool:
    """Return whether the kernel supports these operands: on CPUs, outside of traces and compilers."""
    dtype, device = operands[0].dtype, operands[0].device
    if is_recorded():  # asked first, since compilers would make a graph for each answer about the number of rows
        return False
    if rows < _KERNEL_ROWS or fused_kernel(device) != "numba" or torch.is_autocast_enabled("cpu"):
        return False
    alike = all(operand.dtype == dtype for operand in operands) and dtype in _FULL
    return alike and bool(_launcher().lanes_of(dtype, hidden))


def _is_cached(rows: Tensor, width: int) -> bool:
    """Return whether ``width`` numbers for each of the rows ``[edges, fiber, *]`` fit into the cache."""
    return may_choose() and not is_recorded() and rows.shape[0] * rows.shape[1] * width <= _CACHED


def _launcher() -> ModuleType:
    from lieattn.ops.kernels import _edges

    return _edges


def _checked(
    seen: Tensor, shared: Tensor, weight: Tensor, first: Tensor, second: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Return the operands of a network, or raise an error unless their shapes fit."""
    if not isinstance(second, tuple | list) or len(second) != 2:
        raise TypeError(f"second: expected two tensors, [hidden, hidden] and [hidden], got {kind(second)}")
    named = {"seen": seen, "shared": shared, "weight": weight, "first": first, "second[0]": second[0]}
    named["second[1]"] = second[1]
    for argument, tensor in named.items():
        check_tensor(argument, tensor, "a floating tensor")
    if seen.ndim != 3 or first.ndim != 2:
        found = tuple(seen.shape), tuple(first.shape)
        raise ValueError(
            f"seen, first: expected [edges, fiber, inputs] and [hidden, inputs], got {found[0]} and {found[1]}"
        )
    edges, hidden = len(seen), len(first)
    shapes = (
        (*seen.shape[:2], first.shape[1]),
        (edges, hidden),
        (edges,),
        tuple(first.shape),
        (hidden, hidden),
        (hidden,),
    )
    _check_shapes(dict(zip(named, zip(named.values(), shapes, strict=True), strict=True)))
    return tuple(named.values())


def _check_shapes(wanted: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for argument, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{argument}: expected {shape}, got {tuple(tensor.shape)}")


def _network(operands: Sequence[Tensor], maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    seen, hidden, given = operands[0], len(operands[4]), (*operands, *maps)
    alike = all(part.shape == maps[0].shape for part in maps)
    cached = operands[2].requires_grad and _is_cached(seen, max(hidden, sum(map(len, maps))))
    if cached or not alike or not _kernel_takes(given, seen.shape[0] * seen.shape[1], hidden):
        return _plain_network(*given)
    launch, split = _launcher(), lambda given: (given[:_OPERANDS], given[_OPERANDS:])
    kernels = Kernels(
        lambda *given: (tuple(launch.run_units(*split(given))), ()),
        lambda grads, wanted, *given: launch.run_units_backward(grads, *split(given), wanted),
        _plain_network,
    )
    out: tuple[Tensor, ...] = evaluate(kernels, *given)
    return out


def _plain_network(
    seen: Tensor, shared: Tensor, weight: Tensor, first: Tensor, second: Tensor, bias: Tensor, *maps: Tensor
) -> tuple[Tensor, ...]:
    y = F.silu(F.linear(seen, first) + shared[:, None])
    # Flat rows, because torch.compile takes the sizes of others as constants within torch.func.grad.
    z = F.silu(F.linear(y.flatten(0, 1), second, bias).view_as(y)) * weight[:, None, None]
    return tuple(F.linear(z, part) for part in maps) if maps else (z,)


def _plain_messages(units: Tensor, weight: Tensor, x: Tensor, neighbors: Neighbors) -> Tensor:
    return _gated(F.linear(units, weight), x, neighbors)


def _gated(kernels: Tensor, x: Tensor, neighbors: Neighbors) -> Tensor:
    """Return the sums ``[points, *]`` at the targets of kernels ``[edges, *]`` times ``x`` ``[points, *]`` at sources.

    Kernels for CPUs store neither the products nor the signals at the ends of edges, for derivatives up to the second.
    """
    many = is_recorded() or kernels.numel() >= _KERNEL_PRODUCTS
    if not many or not _kernel_takes([kernels, x], kernels.shape[0] * kernels.shape[1], kernels.shape[1:].numel()):
        return _plain_gated(kernels, x, neighbors)
    launch = _launcher()
    again = Kernels(
        lambda *given: (launch.run_gated_backward(*given, neighbors), ()),
        lambda grads, _, *given: launch.run_gated_again(*grads, *given, neighbors),
        partial(_plain_gated_backward, neighbors=neighbors),
    )
    kernels_of_sums = Kernels(
        lambda *given: (launch.run_gated(*given, neighbors), ()),
        lambda grads, _, *given: launch.run_gated_backward(*grads, *given, neighbors),
        partial(_plain_gated, neighbors=neighbors),
        again,
    )
    out: Tensor = evaluate(kernels_of_sums, kernels, x)
    return out


def _plain_gated(kernels: Tensor, x: Tensor, neighbors: Neighbors) -> Tensor:
    return neighbors.sum_to_targets(kernels * x.index_select(0, neighbors.source))


def _plain_gated_backward(grad: Tensor, kernels: Tensor, x: Tensor, neighbors: Neighbors) -> tuple[Tensor, Tensor]:
    change, source = grad.index_select(0, neighbors.target), neighbors.source
    return change * x.index_select(0, source), sums(kernels * change, source, neighbors.num_points)


def _plain_moments(arrows: Tensor, functions: Tensor, neighbors: Neighbors) -> tuple[Tensor, Tensor, Tensor]:
    moments = neighbors.sum_to_targets(arrows[:, :, None] * functions[:, None])
    ends = neighbors.target, neighbors.source
    at_target, at_source = ((arrows[:, :, None] * moments.index_select(0, end)).sum(dim=1) for end in ends)
    return moments, at_target, at_source


def bessel_functions(
    x: Float[Tensor, "*batch"], count: int, *, squared: bool = False
) -> Float[Tensor, "*batch {count}"]:
    """Return spherical Bessel functions sin(n π x) / x, which vanish at 1, scaled to order one (DimeNet, Eq. 7).

    ``x`` ``[*]`` are distances as fractions of the cutoff or, if ``squared``, their squares. The result is
    ``[*, count]`` for n = 1..count. It is a smooth function of the square, so all derivatives by a vector exist, also
    where the vector is 0.
    """
    check_tensor("x", x, "a floating tensor")
    check_count("count", count)
    return smooth(partial(_bessel, count), x if squared else x.square())


def _bessel(count: int, order: int, square: Tensor) -> Tensor:
    """Return the derivative of an order of the Bessel functions by the square, see :func:`bessel_functions`."""
    wave = math.pi * torch.arange(1, count + 1, dtype=square.dtype, device=square.device)
    curve = wave.square()
    if order:
        return math.sqrt(2) / math.pi * wave * (-curve / 2) ** order * _spherical(order, square[..., None] * curve)
    # Relative errors of derivatives are near eps / angle² for the quotient, and angle⁶ / 15120 for four terms of the
    # series. Where one of them is chosen, the other needs finite derivatives: an infinite one times 0 would be NaN.
    near = square[..., None] < (15120 * torch.finfo(square.dtype).eps) ** 0.25 / curve
    small = torch.where(near[..., 0], square, 0.0)[..., None]
    first = math.sqrt(2) / math.pi * wave
    second, third, fourth = first * curve / -6, first * curve**2 / 120, first * curve**3 / -5040
    series = torch.addcmul(first, small, torch.addcmul(second, small, torch.addcmul(third, small, fourth)))
    distance = torch.where(near[..., -1], 1.0, square).sqrt()[..., None]
    return torch.where(near, series, (wave * distance).sin() * (math.sqrt(2) / math.pi / distance))


def _spherical(order: int, square: Tensor) -> Tensor:
    """Return j(x) / x^order for the spherical Bessel function j of an order above 0 and x², by recurrence or series."""
    near, terms = square < 1, 4 if torch.finfo(square.dtype).eps > 1e-10 else 9
    series, scaled, one = square.new_ones(()), torch.where(near, square, 0.0), square.new_ones(())
    for term in range(terms, 0, -1):
        series = torch.addcmul(one, scaled, series, value=-0.5 / (term * (2 * order + 2 * term + 1)))
    square = torch.where(near, 1.0, square)
    angle = square.sqrt()
    lower = angle.sin() / angle
    found = (lower - angle.cos()) / square
    for number in range(1, order):
        lower, found = found, ((2 * number + 1) * found - lower) / square
    return torch.where(near, series / math.prod(range(2 * order + 1, 1, -2)), found)


def smooth_window(x: Float[Tensor, "*batch"], power: int = 4, *, squared: bool = False) -> Float[Tensor, "*batch"]:
    """Return a window ``[*]`` of ``x`` ``[*]``: 1 at 0 and 0 for x >= 1, with ``power`` - 1 continuous derivatives.

    It is (1 - x²)^power and serves as the window of DimeNet, Eq. 8. If ``squared``, the argument is x², of which it is
    a polynomial.
    """
    check_tensor("x", x, "a floating tensor")
    check_count("power", power)
    return smooth(partial(_window, power), x if squared else x.square())


def _window(power: int, order: int, square: Tensor) -> Tensor:
    """Return the derivative of an order of (1 - x²)^power by x² in the window."""
    inside = (1 - square).clamp(min=0)
    if order >= power:  # a step, then 0
        return (inside > 0) * (float((-1) ** order * math.factorial(power)) if order == power else inside.new_zeros(()))
    return inside**power if order == 0 else (-1) ** order * math.perm(power, order) * inside ** (power - order)


def smooth_lengths(vectors: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"]:
    """Return the lengths ``[*]`` of vectors ``[*, dim]``, whose derivatives are 0 for vectors that are 0."""
    check_tensor("vectors", vectors, "a floating tensor [*, dim]")
    return lengths(vectors)
