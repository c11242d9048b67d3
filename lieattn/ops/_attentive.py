"""Attentive group convolution on grids: a group convolution whose responses are gated before they are summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.ops import _attentive_plain as plain
from lieattn.ops._attentive_plain import Window
from lieattn.ops._backend import uses_cpu_kernel


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention of a layer, the residual α⁻ that is subtracted; what passes is 1 - channel · spatial.

    Attributes
    ----------
    channel
        Channel attention, or None.
    spatial
        Spatial attention, or None.
    """

    channel: Tensor | None = None
    spatial: Tensor | None = None

    @property
    def removed(self) -> Tensor:
        """The residual attention α⁻, the product of both."""
        if self.channel is None or self.spatial is None:
            only = self.channel if self.spatial is None else self.spatial
            if only is None:
                raise ValueError("these maps are empty: there is neither channel nor spatial attention")
            return only
        return self.channel * self.spatial

    @property
    def passed(self) -> Tensor:
        """α⁺ = 1 - α⁻, by which responses are multiplied."""
        return 1 - self.removed


def attentive_convolution(
    x: Tensor,
    kernels: Tensor,
    *,
    channel: tuple[Tensor, Tensor] | None = None,
    spatial: Tensor | None = None,
    measure: float = 1.0,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    spatial_dilation: int = 1,
    return_maps: bool = False,
) -> tuple[Tensor, AttentionMaps | None]:
    r"""Convolve, attend to the responses, and sum what attention leaves.

    With the responses t_{oc}(y, h, h̃) = Σ_p f_c(h̃, y + p) ψ_{o c}(h, h̃, p),

    .. math::
        \alpha_C &= \sigma\big( W_2 \operatorname{relu}(W_1 \operatorname{mean}_y t)
            + W_2 \operatorname{relu}(W_1 \max_y t) \big), \\
        \alpha_X &= \sigma\big( \psi_X * (\operatorname{mean}_c \alpha_C t, \max_c \alpha_C t) \big), \\
        f'_o(h, y) &= \mu \sum_c \sum_{\tilde h} (1 - \alpha_X \alpha_C) t_{oc}

    for every output channel o and pair of poses (h, h̃) by itself (Romero et al. 2020, Eqs. 14-20 as implemented).

    The sum is evaluated as Σ_h̃ (Σ_c t - α_X Σ_c α_C t), a plain convolution less a gated one: only the two maxima
    need every response, and these are made one pair of poses at a time and again for the backward pass. One of
    several equal maxima takes its gradient, as in torch.

    Parameters
    ----------
    x
        ``[batch, in, fiber, rows, columns]``; planes have a fiber of 1.
    kernels
        ``[out, order, in, fiber, size, size]``, moved to all output poses.
    channel
        W1 ``[out, order, fiber, hidden, in]`` and W2 ``[out, order, fiber, in, hidden]``; None for α_C = 1.
    spatial
        ψ_X ``[out, order, fiber, 2, side, side]`` with odd side; None for α_X = 1.
    measure
        μ.
    stride, pad, dilation
        As for :func:`torch.nn.functional.conv2d`.
    spatial_dilation
        Dilation of ψ_X, whose border keeps the size.
    return_maps
        Whether to return the attention too.

    Returns
    -------
    out
        ``[batch, out, order, rows', columns']``.
    maps
        None, or channel attention ``[batch, out, order, in, fiber, 1, 1]`` and spatial attention
        ``[batch, out, order, 1, fiber, rows', columns']``.

    Raises
    ------
    ValueError
        If shapes do not fit; the message names the argument.
    """
    _check(x, kernels, channel, spatial)
    window = Window(
        size=kernels.shape[-1],
        dilation=dilation,
        spatial_size=1 if spatial is None else spatial.shape[-1],
        spatial_dilation=spatial_dilation,
        stride=stride,
    )
    narrow, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        x, kernels = F.pad(x.to(wide), (pad,) * 4), kernels.to(wide)
        filters = measure * kernels.flatten(0, 1).flatten(1, 2)
        out = F.conv2d(x.flatten(1, 2), filters, stride=stride, dilation=dilation)
        first, second = (None, None) if channel is None else (matrix.to(wide).flatten(0, 1) for matrix in channel)
        operands = (
            x.transpose(1, 2),
            kernels.flatten(0, 1).transpose(1, 2).flatten(-2),
            first,
            second,
            None if spatial is None else spatial.to(wide).flatten(0, 1).flatten(-2),
        )
        maps = None
        if return_maps:
            kept, levels, scores = plain.attend(*operands, window)
            outs = kernels.shape[:2]
            maps = AttentionMaps(
                None if scores is None else scores.unflatten(1, outs).transpose(3, 4)[..., None, None],
                None if levels is None else torch.sigmoid(levels).unflatten(1, outs).unsqueeze(3),
            )
            gated = plain.gate(kept, levels)
        elif stride == 1 and uses_cpu_kernel(x):
            from lieattn.ops.kernels.attentive._launch import gated_sums

            gated = gated_sums(*operands, window)
        else:
            gated = plain.gated_sums(*operands, window)
        out = torch.sub(out, gated, alpha=measure).unflatten(1, kernels.shape[:2]).to(narrow)
    return out, maps


def residual_branch(responses: Tensor, maps: AttentionMaps, measure: float = 1.0) -> Tensor:
    """Sum of what attention leaves, μ Σ_c Σ_h̃ (1 - α⁻) t: ``[batch, out, order, in, fiber, *, *]`` to a field."""
    return measure * (maps.passed * responses).sum(dim=(3, 4))


def convolution_responses(x: Tensor, kernels: Tensor, *, stride: int = 1, pad: int = 0, dilation: int = 1) -> Tensor:
    """Responses of a group convolution before any sum, ``[batch, out, order, in, fiber, rows', columns']``.

    Parameters are those of :func:`attentive_convolution`; the result has a plane for every pair of channels and
    poses.
    """
    _check(x, kernels, None, None)
    window = Window(size=kernels.shape[-1], dilation=dilation, stride=stride)
    outs = kernels.flatten(0, 1).transpose(1, 2).flatten(-2)
    t = plain.responses(F.pad(x, (pad,) * 4).transpose(1, 2), outs, window)
    return t.unflatten(1, kernels.shape[:2]).transpose(3, 4)


def _check(x: Tensor, kernels: Tensor, channel: tuple[Tensor, Tensor] | None, spatial: Tensor | None) -> None:
    if kernels.ndim != 6 or kernels.shape[-1] != kernels.shape[-2]:
        raise ValueError(f"kernels: expected [out, order, in, fiber, size, size], got {tuple(kernels.shape)}")
    out, order, channels, fiber = kernels.shape[:4]
    if x.ndim != 5 or x.shape[1:3] != (channels, fiber):
        raise ValueError(f"x: expected [batch, {channels}, {fiber}, rows, columns], got {tuple(x.shape)}")
    if channel is not None:
        first, second = channel
        hidden = first.shape[-2] if first.ndim == 5 else 0
        for name, matrix, shape in (("W1", first, (hidden, channels)), ("W2", second, (channels, hidden))):
            if matrix.shape != (out, order, fiber, *shape):
                raise ValueError(
                    f"channel: expected {name} of shape {(out, order, fiber, *shape)}, got {tuple(matrix.shape)}"
                )
    if spatial is not None:
        side = spatial.shape[-1]
        if spatial.shape != (out, order, fiber, 2, side, side) or side % 2 == 0:
            raise ValueError(
                f"spatial: expected [{out}, {order}, {fiber}, 2, side, side] with odd side, got {tuple(spatial.shape)}"
            )
