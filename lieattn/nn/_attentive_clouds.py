"""Attentive group convolution on point clouds: statistics per cloud and pose, spatial attention by a second sweep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lieattn.geometry import LiftedGraph, PointClouds
from lieattn.groups import FiniteGroup
from lieattn.nn._attentive_gates import ChannelGate
from lieattn.nn._attentive_weights import ResponseChannels
from lieattn.nn._convolution_kernels import ConvolutionKernel
from lieattn.nn._grid_kernels import published_measure
from lieattn.nn._group_convolution import (
    GroupConvolution,
    Reduction,
    check_input,
    check_kernel,
    checked_measure,
    per_neighbor,
)
from lieattn.nn._linear import GroupLinear
from lieattn.ops import AttentionMaps, RelativeTerms, group_attention


class AttentiveGroupConvolution(nn.Module):
    r"""Group convolution with attention to its responses, on point clouds: ``layer(x, graph) -> x``.

    With the responses :math:`t_{oc}(i, a, b) = \sum_j \psi_{oc}(h_a^{-1}(x_j - x_i), h_a^{-1} h_b) f_c(x_j, h_b)`,

    .. math::  f'_o(x_i, h_a) = \mu \sum_{b, c} (1 - \alpha_X \alpha_C) \, t_{oc}(i, a, b) ,

    where the channel attention sees mean and maximum of t over the points of a cloud, pair of poses by pair of poses,
    and the spatial attention mean and maximum of :math:`\alpha_C t` over the channels, swept over the neighbors with a
    kernel of its own, for a fixed pair of poses. On a grid, with tables, it gives the numbers of
    :class:`lieattn.nn.GridAttentiveConvolution` with a border.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, the output and the
    attention are translated by h, exactly, in every pose: A[L_g f](g1, g2) = A[f](g⁻¹ g1, g⁻¹ g2).

    **Cost.** Memory of all responses, points x |H|² x out x in.

    Parameters
    ----------
    kernel
        ψ; the layer lifts if it does.
    hidden
        Hidden width of the channel attention; None for none (α_SP).
    spatial
        Kernel of the spatial attention from 2 channels to those of ``kernel``; None for none (α_CH).
    measure
        μ; if absent that of grids, 2π/|H|, or 1 for lifting.
    reduction
        ``"sum"`` or ``"mean"`` over the neighbors, in both sweeps.
    """

    def __init__(
        self,
        kernel: ConvolutionKernel,
        *,
        hidden: int | None = None,
        spatial: ConvolutionKernel | None = None,
        measure: float | None = None,
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__()
        check_kernel("kernel", kernel)
        self.kernel, self.group = kernel, kernel.group
        if hidden is None and spatial is None:
            raise ValueError("hidden, spatial: give one of them; without attention use GroupConvolution")
        if spatial is not None:
            check_kernel("spatial", spatial)
            wanted = (kernel.group, 2, kernel.out_channels, kernel.lifting)
            if (spatial.group, spatial.in_channels, spatial.out_channels, spatial.lifting) != wanted:
                raise ValueError(
                    f"spatial: expected a kernel on {kernel.group.name} from 2 to {kernel.out_channels} channels, "
                    f"lifting={kernel.lifting}, got one on {spatial.group.name} from {spatial.in_channels} to "
                    f"{spatial.out_channels}, lifting={spatial.lifting}"
                )
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction: expected 'sum' or 'mean', got {reduction!r}")
        self.reduction: Reduction = reduction
        self.measure = checked_measure(measure, kernel, attentive=True)
        self.channels = ResponseChannels(
            kernel.group, kernel.in_channels, kernel.out_channels, hidden=hidden, lifting=kernel.lifting
        )
        self.spatial = spatial

    def forward(self, x: Tensor, graph: LiftedGraph, spatial_graph: LiftedGraph | None = None) -> Tensor:
        """Features ``[points, in]`` or a field ``[points, order, in]`` to a field ``[points, order, out]``."""
        return self.attend(x, graph, spatial_graph)[0]

    def attend(
        self,
        x: Tensor,
        graph: LiftedGraph,
        spatial_graph: LiftedGraph | None = None,
        *,
        return_maps: bool = False,
    ) -> tuple[Tensor, AttentionMaps | None]:
        """Field and, if asked for, the maps.

        Parameters
        ----------
        x
            Features or a field on ``graph``.
        graph
            Neighborhoods of ψ.
        spatial_graph
            Neighborhoods of the spatial attention over the same points; ``graph`` if absent.
        return_maps
            Whether to return the channel attention ``[clouds, order, fiber, out, in]`` and the spatial attention
            ``[points, order, fiber, out, 1]``.
        """
        x = check_input(x, graph, self.kernel)
        t = per_neighbor(self.kernel.responses(x, graph), graph, self.reduction)
        scores = seen = None
        removed = t
        matrices = self.channels.channel_matrices()
        if matrices is not None:
            mean, top = cloud_statistics(t, graph)
            first, second = (matrix.permute(1, 2, 0, 3, 4) for matrix in matrices)
            hidden = sum(torch.relu(torch.einsum("abonc,gaboc->gabon", first, part)) for part in (mean, top))
            scores = torch.sigmoid(torch.einsum("abocn,gabon->gaboc", second, hidden))
            removed = scores[graph.batch] * removed
        if self.spatial is not None:
            statistics = torch.stack([removed.mean(dim=-1), removed.amax(dim=-1)], dim=-1)
            where = graph if spatial_graph is None else spatial_graph
            seen = torch.sigmoid(self._levels(statistics, where))[..., None]
            removed = seen * removed
        out = self.measure * (t - removed).sum(dim=(2, 4))
        return out, AttentionMaps(scores, seen) if return_maps else None

    def _levels(self, statistics: Tensor, graph: LiftedGraph) -> Tensor:
        """Spatial attention before the sigmoid, ``[points, order, fiber, out]``: a sweep for each pair of poses."""
        if self.spatial is None or graph.num_points != len(statistics):
            raise ValueError(f"spatial_graph: expected {len(statistics)} points as in graph, got {graph.num_points}")
        values = self.spatial.between_poses(graph)
        swept, _ = group_attention(
            None,
            None,
            statistics.flatten(2)[..., None],
            graph.neighbors,
            pattern="framewise",
            normalize="none",
            terms=RelativeTerms(psi=values.flatten(2)[:, :, None, :, None], row=graph.displacement_index),
        )
        levels = swept[..., 0].unflatten(2, statistics.shape[2:]).sum(dim=-1)
        return per_neighbor(levels, graph, self.reduction)


class InputAttention(nn.Module):
    r"""Input attention α_F on point clouds, a gate before a layer: ``gate(x, graph) -> x``.

    .. math::  f' = (1 - \alpha_X \alpha_C) f

    :math:`\alpha_C` from mean and maximum of f over the points of a cloud, :math:`\alpha_X` the sigmoid of a group
    convolution of mean and maximum over the channels of :math:`\alpha_C f`; for features without poses it is a lifting
    convolution and its maximum over the poses.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, so are f' and the maps.

    Parameters
    ----------
    group
        H.
    channels
        Channels of the input.
    hidden
        Hidden width of the channel attention; None for none.
    spatial
        Kernel of the spatial attention from 2 channels to 1, lifting if the input has no poses; None for none.
    lifting
        Whether the input has no poses.
    measure
        Weight of the sum over poses in the spatial attention; see :class:`GroupConvolution`.
    reduction
        ``"sum"`` or ``"mean"`` over the neighbors.
    """

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        hidden: int | None = None,
        spatial: ConvolutionKernel | None = None,
        lifting: bool = False,
        measure: float | None = None,
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__()
        if hidden is None and spatial is None:
            raise ValueError("hidden, spatial: give one of them, or there is no attention")
        if spatial is not None:
            check_kernel("spatial", spatial)
            if (spatial.group, spatial.in_channels, spatial.out_channels, spatial.lifting) != (group, 2, 1, lifting):
                raise ValueError(
                    f"spatial: expected a kernel on {group.name} from 2 channels to 1, lifting={lifting}, got one on "
                    f"{spatial.group.name} from {spatial.in_channels} to {spatial.out_channels}, "
                    f"lifting={spatial.lifting}"
                )
        self.group, self.lifting = group, lifting
        self.channel = None if hidden is None else ChannelGate(None if lifting else group, channels, hidden)
        self.spatial = None if spatial is None else GroupConvolution(spatial, measure=measure, reduction=reduction)

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Features ``[points, channels]`` or a field ``[points, order, channels]`` to the same."""
        return self.attend(x, graph)[0]

    def attend(
        self, x: Tensor, graph: LiftedGraph, *, return_maps: bool = False
    ) -> tuple[Tensor, AttentionMaps | None]:
        """Gated input and, if asked for, maps ``[clouds, (order,) channels]`` and ``[points, (order,) 1]``."""
        scores = seen = None
        removed = x
        if self.channel is not None:
            mean, top = (part.mT if x.ndim == 3 else part[..., None] for part in cloud_statistics(x, graph))
            levels = self.channel(mean, top)
            scores = levels.mT if x.ndim == 3 else levels[..., 0]
            removed = scores[graph.batch] * removed
        if self.spatial is not None:
            level = self.spatial(torch.stack([removed.mean(dim=-1), removed.amax(dim=-1)], dim=-1), graph)
            seen = torch.sigmoid(level.amax(dim=1) if self.lifting else level)
            removed = seen * removed
        return x - removed, AttentionMaps(scores, seen) if return_maps else None


class PoseAttention(nn.Module):
    r"""Co-attention over the poses, α_RH, on point clouds: a gate ``gate(x) -> x`` that does not look at neighbors.

    .. math::
        f' = (1 - \alpha) f, \qquad
        \alpha(x, h) = \sigma\Big( \mu \sum_{c, \tilde h} w_c(h^{-1} \tilde h) f_c(x, \tilde h) \Big)

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, so are f' and the map.

    Parameters
    ----------
    group
        H.
    channels
        Channels per pose.
    measure
        μ; that of grids if absent.
    """

    def __init__(self, group: FiniteGroup, channels: int, *, measure: float | None = None) -> None:
        super().__init__()
        self.linear = GroupLinear(group, channels, 1, bias=False)
        self.group = group
        self.measure = published_measure(group) if measure is None else float(measure)

    def forward(self, x: Tensor) -> Tensor:
        """``[points, order, channels]`` to the same."""
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Gated input and, if asked for, the map ``[points, order, 1]``, as ``spatial``."""
        seen = torch.sigmoid(self.measure * self.linear(x))
        return x - seen * x, AttentionMaps(None, seen) if return_maps else None


def cloud_statistics(x: Tensor, clouds: PointClouds) -> tuple[Tensor, Tensor]:
    """Mean and maximum of ``[points, ...]`` over the points of each cloud; 0 for an empty cloud."""
    shape = (clouds.num_clouds, *x.shape[1:])
    count = torch.bincount(clouds.batch, minlength=clouds.num_clouds)
    wide = count.clamp(min=1).to(x.dtype).view(-1, *[1] * (x.ndim - 1))
    mean = x.new_zeros(shape).index_add(0, clouds.batch, x) / wide
    index = clouds.batch.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
    top = x.new_zeros(shape).scatter_reduce(0, index, x, "amax", include_self=False)
    return mean, top
