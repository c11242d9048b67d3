"""Group convolution on point clouds: the corner of the operator without attention."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from lieattn._checks import check_features
from lieattn.geometry import LiftedGraph
from lieattn.nn._convolution_kernels import ConvolutionKernel
from lieattn.nn._grid_kernels import published_measure

Reduction = Literal["sum", "mean"]


class GroupConvolution(nn.Module):
    r"""Lifting or group convolution on point clouds, ``layer(x, graph) -> x``.

    .. math::  f'_o(x_i, h_a) = \mu \sum_{j \in N(i)} \sum_b \sum_c \psi_{oc}(h_a^{-1}(x_j - x_i), h_a^{-1} h_b)
        f_c(x_j, h_b)

    with the sum over b absent where the kernel lifts. It is group attention whose weights are all 1 and whose values
    are ψ f. A :class:`lieattn.nn.TableKernel` on a grid gives the numbers of
    :class:`lieattn.nn.GridGroupConvolution` with a border; a :class:`lieattn.nn.NetworkKernel` serves any cloud.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h (features that are lifted
    stay as they are), the output is translated by h. Exact for every H where neighborhoods are balls.

    Parameters
    ----------
    kernel
        ψ, which knows group, channels and whether the layer lifts.
    measure
        μ; if absent that of grids: 1 for lifting, π/2 on p4 and π on p4m.
    reduction
        ``"sum"`` over the neighbors, or ``"mean"``, which does not depend on how densely points are sampled.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import Radius, lift
    >>> from lieattn.groups import cyclic
    >>> from lieattn.nn import NetworkKernel
    >>> graph = lift(torch.randn(20, 2), cyclic(4), Radius(1.0))
    >>> lifting = GroupConvolution(NetworkKernel(cyclic(4), 3, 8, lifting=True))
    >>> lifting(torch.randn(20, 3), graph).shape
    torch.Size([20, 4, 8])
    """

    def __init__(
        self, kernel: ConvolutionKernel, *, measure: float | None = None, reduction: Reduction = "sum"
    ) -> None:
        super().__init__()
        check_kernel("kernel", kernel)
        self.kernel, self.group = kernel, kernel.group
        self.measure = checked_measure(measure, kernel)
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction: expected 'sum' or 'mean', got {reduction!r}")
        self.reduction: Reduction = reduction

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Features ``[points, in]`` or a field ``[points, order, in]`` to a field ``[points, order, out]``."""
        x = check_input(x, graph, self.kernel)
        return self.measure * per_neighbor(self.kernel.convolve(x, graph), graph, self.reduction)


def check_kernel(argument: str, kernel: object) -> None:
    """Refuse what is no kernel."""
    if not isinstance(kernel, ConvolutionKernel):
        raise TypeError(f"{argument}: expected a ConvolutionKernel such as NetworkKernel, got {type(kernel).__name__}")


def checked_measure(measure: float | None, kernel: ConvolutionKernel, *, attentive: bool = False) -> float:
    """The measure given, or that of grids."""
    if measure is None:
        return 1.0 if kernel.lifting else published_measure(kernel.group, attentive=attentive)
    if not math.isfinite(measure):
        raise ValueError(f"measure: expected a finite number, got {measure}")
    return float(measure)


def check_input(x: Tensor, graph: LiftedGraph, kernel: ConvolutionKernel) -> Tensor:
    """Refuse features that do not fit kernel and graph; return them as ``[points, poses, in]``."""
    check_features(x, next(kernel.parameters()))
    if graph.group != kernel.group:
        raise ValueError(f"graph: is lifted to {graph.group.name}, this layer is for {kernel.group.name}")
    expected = (graph.num_points, *(() if kernel.lifting else (kernel.group.order,)), kernel.in_channels)
    if x.shape != expected:
        what = "features [points, channels]" if kernel.lifting else "a field [points, fiber, channels]"
        raise ValueError(f"x: expected {what} = {expected}, got {tuple(x.shape)}")
    return x[:, None] if kernel.lifting else x


def per_neighbor(summed: Tensor, graph: LiftedGraph, reduction: Reduction) -> Tensor:
    """Sums over neighbors ``[points, ...]``, divided by their number for ``"mean"``."""
    if reduction == "sum":
        return summed
    count = graph.neighbors.degree.clamp(min=1).to(summed.dtype)
    return summed / count.view(-1, *[1] * (summed.ndim - 1))
