"""Attentive group convolution on grids: a group convolution whose responses are weighted before they are summed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import (
    axes_of,
    check_alike,
    check_broadcast,
    check_count,
    check_counts,
    check_features,
    check_flag,
    check_is,
    check_number,
    check_tensor,
    kind,
)
from lieattn._core.contexts import without_autocast
from lieattn.ops._backend import fused_kernel, is_recorded
from lieattn.ops._gated_sums import (
    CONVOLUTIONS,
    Operands,
    Window,
    attend,
    over_positions,
    residual_sums,
    responses_of,
    weighted,
)
from lieattn.ops._gradients import Kernels, evaluate, plain_gradients


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention maps of a layer, with at least one of the factors ``channel`` and ``spatial``.

    Responses are multiplied by 1 minus the product of the factors. Shapes are those of :func:`attentive_convolution`.
    """

    channel: Tensor | None = None
    spatial: Tensor | None = None

    @property
    def removed(self) -> Tensor:
        """The residual attention α⁻, the product of the factors."""
        given = [factor for factor in (self.channel, self.spatial) if factor is not None]
        if not given:
            raise ValueError("attention maps: expected channel or spatial attention, got neither")
        return reduce(torch.mul, given)

    @property
    def passed(self) -> Tensor:
        """The factors α⁺ = 1 - α⁻ by which responses are multiplied."""
        return 1 - self.removed


def attentive_convolution(
    x: Float[Tensor, "batch ins fiber *sides"],
    kernels: Float[Tensor, "outs order ins fiber *sizes"],
    *,
    channel: tuple[Float[Tensor, "outs order fiber hidden ins"], Float[Tensor, "outs order fiber ins hidden"]]
    | None = None,
    spatial: Float[Tensor, "outs order fiber 2 *sides2"] | None = None,
    measure: float = 1.0,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    spatial_dilation: int = 1,
    return_maps: bool = False,
) -> tuple[Float[Tensor, "batch outs order *places"], AttentionMaps | None]:
    r"""Convolve, compute attention from the responses, and sum the weighted responses.

    With the responses t_{oc}(y, h, h̃) = Σ_p f_c(h̃, y + p) ψ_{o c}(h, h̃, p), it computes

    .. math::
        \alpha_C &= \sigma\big( W_2 \operatorname{relu}(W_1 \operatorname{mean}_y t)
            + W_2 \operatorname{relu}(W_1 \max_y t) \big), \\
        \alpha_X &= \sigma\big( \psi_X * (\operatorname{mean}_c \alpha_C t, \max_c \alpha_C t) \big), \\
        f'_o(h, y) &= \mu \sum_c \sum_{\tilde h} (1 - \alpha_X \alpha_C) t_{oc}

    separately for every output channel o and pair of frames (h, h̃) (Romero et al. 2020, Eqs. 14-20 as implemented).

    **Equivariance.** If the group moves ``kernels``, ``channel`` and ``spatial`` to the output frames, as in the layers
    of this library, the output at stride 1 is equivariant to the group and, away from the border, to translations.

    The sum is evaluated as Σ_h̃ (Σ_c (1 - α_C) t + (1 - α_X) Σ_c α_C t), without cancellation where attention is close
    to 1. Only the two maxima require all responses, which are computed for one pair of frames at a time, and recomputed
    in the backward pass. If several maxima are equal, one of them gets the gradient, as in torch.

    Parameters
    ----------
    x
        ``[batch, in, fiber, *sides]``, with 2 sides (rows, columns) or 3 (layers, rows, columns). The fiber of images
        is 1.
    kernels
        ``[out, order, in, fiber, *sizes]``, with as many equal sizes as sides, moved to all output frames.
    channel
        W1 ``[out, order, fiber, hidden, in]`` and W2 ``[out, order, fiber, in, hidden]``, or None for α_C = 1.
    spatial
        ψ_X ``[out, order, fiber, 2, *sizes]`` with equal odd sizes, or None for α_X = 1.
    measure
        The factor μ.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    spatial_dilation
        Dilation of ψ_X, which is padded so that the size does not change.
    return_maps
        Whether to return the attention as well.

    Returns
    -------
    out
        ``[batch, out, order, *sides']``.
    maps
        None, or channel attention ``[batch, out, order, in, fiber, 1, 1]`` (with a further 1 if there are three sides),
        and spatial attention ``[batch, out, order, 1, fiber, *sides']``.
    """
    _check(x, kernels, channel, spatial, stride=stride, pad=pad, dilation=dilation)
    check_count("spatial_dilation", spatial_dilation)
    check_number("measure", measure)
    check_flag(return_maps=return_maps)
    window = Window(
        size=kernels.shape[-1],
        dilation=dilation,
        spatial_size=1 if spatial is None else spatial.shape[-1],
        spatial_dilation=spatial_dilation,
        stride=stride,
    )
    dim = kernels.ndim - 4
    narrow, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x.device):
        x, kernels = F.pad(x.to(wide), (pad, pad) * dim), kernels.to(wide)
        first, second = (None, None) if channel is None else (matrix.to(wide).flatten(0, 1) for matrix in channel)
        operands = Operands(
            x.transpose(1, 2),
            kernels.flatten(0, 1).transpose(1, 2).flatten(3),
            first,
            second,
            None if spatial is None else spatial.to(wide).flatten(0, 1).flatten(3),
        )
        maps = None
        if return_maps:
            found, scores = attend(operands, window)
            outs, levels = kernels.shape[:2], found.levels
            maps = AttentionMaps(
                None if scores is None else over_positions(scores.unflatten(1, outs).transpose(3, 4), dim),
                None if levels is None else torch.sigmoid(levels).unflatten(1, outs).unsqueeze(3),
            )
            sums = weighted(found).sum(dim=2)
        elif stride == 1 and dim == 2 and not is_recorded() and (name := fused_kernel(x.device)) is not None:
            sums = _fused_sums(name, operands, window)
        else:
            sums = residual_sums(operands, window)
        out = (measure * sums).unflatten(1, kernels.shape[:2]).to(narrow)
    return out, maps


def _fused_sums(name: str, operands: Operands, window: Window) -> Tensor:
    """Compute :func:`residual_sums` by a fused kernel, imported here because the other one may not be installed."""

    def plain(*given: Any) -> Tensor:
        return residual_sums(Operands(*given), window)

    if name == "triton":
        from lieattn.ops.kernels.triton import _attentive as gpu

        def on_gpu(*given: Any) -> Tensor:
            return gpu.residual_sums(Operands(*given), window)

        kernels = Kernels(
            lambda *given: (on_gpu(*given), ()),
            lambda grads, wanted, *given: plain_gradients(on_gpu, given, wanted, grads),
            plain,
        )
    else:
        from lieattn.ops.kernels import _attentive as cpu

        kernels = Kernels(
            lambda *given: (cpu.run_forward(Operands(*given), window), ()),
            lambda grads, wanted, *given: cpu.run_backward(grads[0], Operands(*given), window, wanted[0]),
            plain,
        )
    return cast(Tensor, evaluate(kernels, *operands))


def residual_branch(
    responses: Float[Tensor, "batch outs order ins fiber *sides"], maps: AttentionMaps, measure: float = 1.0
) -> Float[Tensor, "batch outs order *sides"]:
    """Sum the weighted responses t, μ Σ_c Σ_h̃ (1 - α⁻) t."""
    check_tensor("responses", responses, "a floating tensor")
    check_is("maps", maps, AttentionMaps)
    check_number("measure", measure)
    check_alike("responses", responses, "maps", maps.removed)
    check_broadcast("responses", responses.shape, "maps", maps.removed.shape)
    return measure * (maps.passed * responses).sum(dim=(3, 4))


def convolution_responses(
    x: Float[Tensor, "batch ins fiber *sides"],
    kernels: Float[Tensor, "outs order ins fiber *sizes"],
    *,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
) -> Float[Tensor, "batch outs order ins fiber ..."]:
    """Return the responses of a group convolution before any sum.

    Parameters and errors are those of :func:`attentive_convolution`. The result has a plane for every pair of channels
    and frames.
    """
    _check(x, kernels, None, None, stride=stride, pad=pad, dilation=dilation)
    check_features(x, kernels, beside="the kernels")
    window = Window(size=kernels.shape[-1], dilation=dilation, stride=stride)
    outs = kernels.flatten(0, 1).transpose(1, 2).flatten(3)
    t = responses_of(F.pad(x, (pad, pad) * (x.ndim - 3)).transpose(1, 2), outs, window)
    return t.unflatten(1, kernels.shape[:2]).transpose(3, 4)


def _check(
    x: Tensor,
    kernels: Tensor,
    channel: tuple[Tensor, Tensor] | None,
    spatial: Tensor | None,
    *,
    stride: int,
    pad: int,
    dilation: int,
) -> None:
    check_counts(stride=stride, dilation=dilation)
    check_count("pad", pad, least=0)
    _check_types(x, kernels, channel, spatial)
    dim = kernels.ndim - 4
    if dim not in CONVOLUTIONS or len(set(kernels.shape[4:])) != 1:
        expected = "[out, order, in, fiber, size, size], or three sizes in space"
        raise ValueError(f"kernels: expected {expected}, got {tuple(kernels.shape)}")
    out, order, channels, fiber = kernels.shape[:4]
    if x.ndim != 3 + dim or x.shape[1:3] != (channels, fiber):
        raise ValueError(f"x: expected [batch, {channels}, {fiber}, {axes_of(dim)}], got {tuple(x.shape)}")
    span, most = dilation * (kernels.shape[-1] - 1) + 1, min(x.shape[3:]) + 2 * pad
    if kernels.numel() == 0 or span > most:
        raise ValueError(
            f"kernels: expected a window of 1 to {most} pixels, which x has with its border, got one of {span} "
            f"with shape {tuple(kernels.shape)}"
        )
    if channel is not None:
        first, second = channel
        hidden = first.shape[-2] if first.ndim == 5 else 0
        for name, matrix, shape in (("W1", first, (hidden, channels)), ("W2", second, (channels, hidden))):
            if matrix.shape != (out, order, fiber, *shape):
                raise ValueError(
                    f"channel: expected {name} of shape {(out, order, fiber, *shape)} for these kernels, got "
                    f"{tuple(matrix.shape)}"
                )
    if spatial is not None:
        side = spatial.shape[-1] if spatial.ndim else 0
        if spatial.shape != (out, order, fiber, 2, *[side] * dim) or side % 2 == 0:
            expected = f"[{out}, {order}, {fiber}, 2{', side' * dim}] with odd side for these kernels"
            raise ValueError(f"spatial: expected {expected}, got {tuple(spatial.shape)}")


def _check_types(x: Tensor, kernels: Tensor, channel: tuple[Tensor, Tensor] | None, spatial: Tensor | None) -> None:
    if channel is not None and (not isinstance(channel, tuple | list) or len(channel) != 2):
        raise TypeError(f"channel: expected the tensors W1 and W2, got {kind(channel)}")
    matrices = [] if channel is None else [("channel", matrix) for matrix in channel]
    tables = [] if spatial is None else [("spatial", spatial)]
    for name, tensor in (("x", x), ("kernels", kernels), *matrices, *tables):
        check_tensor(name, tensor, "a floating tensor")
        if tensor.device != x.device:
            raise ValueError(f"{name}: expected a tensor on {x.device} like x, got one on {tensor.device}")
