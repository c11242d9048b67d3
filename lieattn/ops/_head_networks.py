"""A small network for every head, evaluated without storing its hidden units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_choice, check_tensor, kind
from lieattn._core.contexts import transformed
from lieattn.ops._backend import fused_backend, fused_kernel
from lieattn.ops._gradients import need_plain_torch
from lieattn.ops.kernels._calls import expect_gradients

Activation = Literal["silu", "relu", "gelu", "elu", "leaky_relu", "softplus", "tanh", "none"]
"""Name of an activation, see :func:`activation` and :func:`head_networks`."""

# Number of hidden units of one layer that plain torch computes at a time. They should fit into the cache of a core.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
_KERNEL_ROWS = 64  # rows below which the kernel is not worth its call
_WIDEST = 64  # largest number of inputs and of hidden units whose weights fit into the registers of a GPU program


_aten = torch.ops.aten


def _pull_silu(grad: Tensor, u: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(grad, u)
    # Torch's silu_backward, used above, reads memory only once, but cannot be differentiated.
    share = torch.sigmoid(u)
    return grad * (share * (1 + u * (1 - share)))


# For each name, the activation f(u), and a function of (gradient, u) that multiplies the gradient by f'(u). Both are
# differentiable.
_SLOPES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, _pull_silu),
    "relu": (F.relu, lambda grad, u: _aten.threshold_backward(grad, u, 0)),
    "gelu": (F.gelu, lambda grad, u: _aten.gelu_backward(grad, u)),
    "elu": (F.elu, lambda grad, u: grad * torch.where(u > 0, 1.0, u.clamp(max=0).exp())),
    "leaky_relu": (F.leaky_relu, lambda grad, u: torch.where(u > 0, grad, 0.01 * grad)),
    # Torch's softplus has an error of 2e-9 for large numbers.
    "softplus": (lambda u: -F.logsigmoid(-u), lambda grad, u: grad * torch.sigmoid(u)),
    "tanh": (torch.tanh, lambda grad, u: grad * (1 - torch.tanh(u).square())),
    "none": (lambda u: u, lambda grad, u: grad),
}


def activation(argument: str, name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function of a name, or raise ValueError, naming the argument, if it is unknown."""
    check_choice(argument, name, Activation)
    return _SLOPES[name][0]


def kinked(name: str) -> bool:
    """Return whether the first derivative of an activation is discontinuous; ValueError for an unknown name."""
    check_choice("name", name, Activation)
    return name in ("relu", "leaky_relu")


def head_networks(
    rows: Float[Tensor, "rows inputs"],
    weights: Sequence[Float[Tensor, "heads _ _"]],
    biases: Sequence[Float[Tensor, "heads _"]],
    activation: Activation = "silu",
) -> Float[Tensor, "rows _"]:
    """Evaluate a network for every head: three linear maps, each followed by the activation.

    Hidden units are computed in blocks that fit into the cache, and recomputed in the backward pass, so only the result
    is stored. The function can be differentiated any number of times. A fused kernel evaluates networks with the swish
    (on a GPU, only those with one output).

    Parameters
    ----------
    rows
        The inputs of all networks.
    weights
        ``[heads, inputs, hidden]``, ``[heads, hidden, hidden]``, ``[heads, hidden, outputs]``.
    biases
        ``[heads, hidden]``, ``[heads, hidden]``, ``[heads, outputs]``.
    activation
        ``"silu"`` (swish), ``"relu"``, ``"gelu"``, ``"elu"``, ``"leaky_relu"`` (slope 0.01), ``"softplus"``,
        ``"tanh"`` or ``"none"``.

    Returns
    -------
    Tensor
        ``[rows, heads * outputs]``, where the outputs of a head are contiguous.
    """
    check_choice("activation", activation, Activation)
    for argument, given in (("rows", (rows,)), ("weights", weights), ("biases", biases)):
        if not isinstance(given, Sequence):
            raise TypeError(f"{argument}: expected three tensors, got {kind(given)}")
        for part in given:
            check_tensor(argument, part, "floating tensors")
            if (part.dtype, part.device) != (rows.dtype, rows.device):
                raise TypeError(
                    f"{argument}: expected {rows.dtype} on {rows.device} as in rows, got {part.dtype} on {part.device}"
                )
    if not weights or weights[0].ndim != 3:
        raise ValueError("weights: expected [heads, inputs, hidden], [heads, hidden, hidden], [heads, hidden, outputs]")
    heads, inputs, hidden = weights[0].shape
    shapes = [tuple(part.shape) for part in (*weights, *biases)]
    outputs = weights[-1].shape[-1] if weights[-1].ndim == 3 else 1
    of_weights = [(heads, inputs, hidden), (heads, hidden, hidden), (heads, hidden, outputs)]
    wanted = [*of_weights, (heads, hidden), (heads, hidden), (heads, outputs)]
    if shapes != wanted or rows.ndim != 2 or rows.shape[1] != inputs:
        raise ValueError(f"weights, biases: expected {wanted} for rows [rows, {inputs}], got {shapes}")
    parameters = [part for layer in zip(weights, biases, strict=True) for part in layer]
    if transformed():
        return _plain_forward(activation, rows, parameters).T
    expect_gradients((rows, *parameters))
    out: Tensor = _HeadNetworks.apply(activation, rows, *parameters)
    return out.T


class _HeadNetworks(torch.autograd.Function):
    """The networks as a function from ``[rows, inputs]`` to ``[heads * outputs, rows]``."""

    @staticmethod
    def forward(ctx: Any, name: str, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(rows, *parameters)
        if _kernel_takes(name, rows, parameters):
            return _kernel_forward(rows, list(parameters))
        heads, _, hidden = parameters[0].shape
        out = rows.new_empty(parameters[-1].numel(), len(rows))
        for begin, block in _blocks(rows, heads * hidden):
            out[:, begin : begin + len(block)] = _plain_forward(name, block, parameters)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        if _kernel_takes(ctx.name, rows, parameters) and not need_plain_torch(grads):
            found = _kernel_backward(grads[0], rows, parameters, wanted)
            return (None, found[0] if wanted else None, *found[1:])
        return (None, *_plain_backward(ctx.name, grads[0], rows, parameters, wanted))


def _plain_forward(name: str, rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Evaluate all rows ``[rows, inputs]`` at once, to ``[heads * outputs, rows]``."""
    act, _ = _SLOPES[name]
    x = rows.expand(len(parameters[0]), *rows.shape)
    for weight, bias in _layers(parameters):
        x = act(torch.baddbmm(bias[:, None], x, weight))
    return x.mT.flatten(0, 1)


def _plain_backward(
    name: str, grad: Tensor, rows: Tensor, parameters: Sequence[Tensor], wanted: bool
) -> list[Tensor | None]:
    """Return the gradients of rows, if wanted, and of parameters. They are differentiable."""
    value, pull = _SLOPES[name]
    layers = _layers(parameters)
    heads, _, hidden = parameters[0].shape
    narrow, wide = rows.dtype, torch.promote_types(rows.dtype, torch.float32)
    totals = [torch.zeros_like(parameter, dtype=wide) for parameter in parameters]  # sums over many blocks
    to_rows = []
    for begin, block in _blocks(rows, heads * hidden):
        inputs, sums = [block.expand(heads, *block.shape)], []
        for weight, bias in layers:
            sums.append(torch.baddbmm(bias[:, None], inputs[-1], weight))
            if len(sums) < len(layers):
                inputs.append(value(sums[-1]))
        # Batched gradients support neither unflatten nor a full slice.
        change = grad.narrow(1, begin, len(block)).reshape(heads, -1, len(block)).mT
        for number in reversed(range(len(layers))):
            change = pull(change.contiguous(), sums[number])
            if narrow == wide:
                totals[2 * number] = torch.baddbmm(totals[2 * number], inputs[number].mT, change)
            else:
                totals[2 * number] = totals[2 * number] + (inputs[number].mT @ change).to(wide)
            totals[2 * number + 1] = totals[2 * number + 1] + change.sum(dim=1)
            if number or wanted:
                change = change @ layers[number][0].mT
        if wanted:
            to_rows.append(change.sum(dim=0))
    found = [total.to(narrow) for total in totals]
    if not wanted:
        return [None, *found]
    return [torch.cat(to_rows) if to_rows else torch.zeros_like(rows), *found]


def _layers(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def _blocks(rows: Tensor, width: int) -> list[tuple[int, Tensor]]:
    """Return the first row and the rows of each block."""
    size = max(64, _BLOCK.get(rows.device.type, 1 << 20) // width)
    return [(begin, rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def _kernel_takes(name: str, rows: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return whether the kernel of the device supports these rows."""
    kernel = fused_kernel(rows.device) if name == "silu" and len(rows) >= _KERNEL_ROWS else None
    if kernel == "triton":
        return parameters[-1].shape[1] == 1 and max(parameters[0].shape[1:]) <= _WIDEST
    return kernel == "numba" and rows.dtype in (torch.float32, torch.float64)


def _launcher(device: torch.device) -> ModuleType:
    """Import the kernels for a device. Kernels for other devices may not be installed."""
    if fused_backend(device) == "triton":
        from lieattn.ops.kernels.triton import _head_networks as _of_triton

        return _of_triton
    from lieattn.ops.kernels import _head_networks

    return _head_networks


@torch.library.custom_op("lieattn::head_networks", mutates_args=())
def _kernel_forward(rows: Tensor, parameters: list[Tensor]) -> Tensor:
    return cast(Tensor, _launcher(rows.device).run_forward(rows, parameters))


@_kernel_forward.register_fake
def _(rows: Tensor, parameters: list[Tensor]) -> Tensor:
    return rows.new_empty(parameters[-1].numel(), rows.shape[0])


@torch.library.custom_op("lieattn::head_networks_backward", mutates_args=())
def _kernel_backward(grad: Tensor, rows: Tensor, parameters: list[Tensor], wanted: bool) -> list[Tensor]:
    return cast(list[Tensor], _launcher(rows.device).run_backward(grad, rows, parameters, wanted))


@_kernel_backward.register_fake
def _(grad: Tensor, rows: Tensor, parameters: list[Tensor], wanted: bool) -> list[Tensor]:
    to_rows = torch.empty_like(rows) if wanted else rows.new_empty(0)
    return [to_rows, *(torch.empty_like(part) for part in parameters)]
