"""Attentive group convolution on point clouds: sums over neighbors whose terms are weighted before they are added."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_arguments, check_field, check_graph, check_tensor
from lieattn._core.numerics import attention_of
from lieattn.geometry import LiftedGraph
from lieattn.ops._attentive import AttentionMaps
from lieattn.ops._backend import fused_kernel, is_recorded
from lieattn.ops._gated_sums import Lists, Operands
from lieattn.ops._gradients import Kernels, evaluate
from lieattn.ops._group_attention import group_attention
from lieattn.ops._terms import RelativeTerms
from lieattn.ops.kernels._calls import check_lists


def attentive_sums(
    x: Float[Tensor, "points frames ins"],
    terms: RelativeTerms,
    graph: LiftedGraph,
    *,
    channel: tuple[Float[Tensor, "outs fiber frames hidden ins"], Float[Tensor, "outs fiber frames ins hidden"]]
    | None = None,
    spatial: RelativeTerms | None = None,
    mean: bool = False,
    return_maps: bool = False,
) -> tuple[Float[Tensor, "points fiber outs"], AttentionMaps | None]:
    r"""Compute :func:`attentive_convolution` on point clouds, with sums over neighbors in place of windows of pixels.

    The responses are t_{oc}(i, h, h̃) = Σ_j ψ_{oc}(h, h̃; i, j) f_c(j, h̃). Attention and result are computed from them
    as on grids, with statistics over the points of each cloud.

    **Equivariance.** If the terms are functions of the relative element, and the channel attention depends on h⁻¹ h̃
    only, then moving the points by (t, h) and translating x by h translates the result by h.

    A fused kernel for CPUs computes the responses to one frame at a time, and again in the backward pass, if all clouds
    have equally many points. It can be differentiated any number of times.

    Parameters
    ----------
    x
        f. Features without frames have one frame.
    terms
        Factors ``psi`` ``[types, fiber, frames, outs, ins]``, and the ``row`` of each edge.
    graph
        The clouds and the edges that spatial attention sees. If it has a ``local`` graph, its edges are those of
        ``terms``.
    channel, spatial
        Matrices of the channel attention, and terms with ``psi`` ``[types, fiber, frames, outs, 2]`` of the spatial
        attention; None for a factor of 1.
    mean
        Whether sums are divided by the numbers of neighbors.
    return_maps
        Whether to return the attention as well.

    Returns
    -------
    out
        ``[points, fiber, outs]``.
    maps
        None, or channel attention ``[clouds, fiber, frames, outs, ins]`` and spatial attention ``[points, fiber,
        frames, outs, 1]``.
    """
    check_arguments(attentive_sums, locals())
    first, second = channel or (None, None)
    levels = None if spatial is None else spatial.psi
    check_tensor("terms.psi", terms.psi, "a floating tensor")
    psi = cast(Tensor, terms.psi)
    axes = psi.shape[1:] if psi.ndim == 5 else (-1, -1, -1, -1)
    fiber, frames, outs, ins = axes
    hidden = first.shape[-2] if first is not None and first.ndim == 5 else -1
    wanted = {
        "terms.psi": (psi, (len(psi), *axes)),
        "channel[0]": (first, (outs, fiber, frames, hidden, ins)),
        "channel[1]": (second, (outs, fiber, frames, ins, hidden)),
        "spatial.psi": (levels, (-1 if levels is None else len(levels), fiber, frames, outs, 2)),
    }
    for name, (table, shape) in wanted.items():
        if table is not None and table.shape != shape:
            raise ValueError(f"{name}: expected shape {shape} (-1: any), got {tuple(table.shape)}")
    check_graph(graph, LiftedGraph, x)
    check_field(x, graph, ins, frames)
    seen = _Seen(graph, terms.row, None if spatial is None else spatial.row, mean)
    operands = x, psi, first, second, levels
    alike = all(part is None or part.dtype == x.dtype for part in operands) and x.dtype.itemsize >= 4
    each = None if return_maps or is_recorded() or torch.is_autocast_enabled(x.device.type) else graph.each
    moved = mean and graph.degree.requires_grad  # smooth neighborhoods of points with gradients
    if each is None or not alike or moved or fused_kernel(x.device) != "numba":
        out, maps = _weigh(seen, *operands)
        return out, maps if return_maps else None
    kernels = _kernels(seen, each, fiber, outs)
    return cast(Tensor, evaluate(kernels, *operands)), None


class _Seen(NamedTuple):
    """The clouds with their edges, and the row of each edge."""

    graph: LiftedGraph
    row: Tensor | None
    spatial_row: Tensor | None
    mean: bool

    def sum(self, psi: Tensor, x: Tensor, *, spatial: bool) -> Tensor:
        """Return Σ_j ψ(u) x(j) ``[points, fiber, frames, outs, ins]``, entry by entry."""
        graph = self.graph if spatial or self.graph.local is None else self.graph.local
        sizes = torch.broadcast_shapes(psi.shape[1:], x.shape[1:])
        terms = RelativeTerms(psi=psi.flatten(1, 2)[:, :, None], row=self.spatial_row if spatial else self.row)
        # Pairs of frames are the fiber of the operator.
        value = x.expand(-1, *sizes).flatten(1, 2)
        found, _ = group_attention(
            None, None, value, graph.neighbors, pattern="framewise", normalize="none", terms=terms
        )
        found = found.unflatten(1, sizes[:2])
        return found / graph.degree.clamp(min=1).to(found.dtype).view(-1, 1, 1, 1, 1) if self.mean else found

    def lists(self, each: int, rows: int, dtype: torch.dtype, *, spatial: bool) -> Lists:
        """Return the edges for the kernel, or raise ValueError if it would read invalid memory."""
        graph, row = (self.graph, self.spatial_row) if spatial else (self.graph.local or self.graph, self.row)
        near = graph.neighbors
        row = torch.arange(near.num_edges, device="cpu") if row is None else row
        check_lists(near, row, [torch.empty(rows, 0)])
        share = 1 / graph.degree.clamp(min=1) if self.mean else torch.ones(near.num_points)
        return Lists(near.row_ptr, near.source % each, row, share.to(dtype))


def _weigh(
    seen: _Seen, x: Tensor, psi: Tensor, first: Tensor | None, second: Tensor | None, levels: Tensor | None
) -> tuple[Tensor, AttentionMaps]:
    """Compute :func:`attentive_sums` by plain maths."""
    graph = seen.graph
    removed = seen.sum(psi, x[:, None, :, None], spatial=False)
    out, channel, passed = torch.zeros_like(removed[..., 0]), None, None
    if first is not None and second is not None:
        hidden = sum(
            torch.einsum("oabnc,kaboc->kabon", first, found).relu()
            for found in (graph.mean(removed), graph.max(removed))
        )
        channel, rest = attention_of(torch.einsum("oabcn,kabon->kaboc", second, hidden))
        out = (rest[graph.batch] * removed).sum(-1)
        removed = channel[graph.batch] * removed
    if levels is not None:
        statistics = torch.stack([removed.mean(-1), removed.amax(-1)], dim=-1)
        passed, rest = attention_of(seen.sum(levels, statistics, spatial=True).sum(-1))
        out = out + rest * removed.sum(-1)
    return out.sum(2), AttentionMaps(channel, None if passed is None else passed[..., None])


def _kernels(seen: _Seen, each: int, fiber: int, outs: int) -> Kernels:
    """Return the fused kernel, whose lanes are pairs of an output channel and a frame."""
    from lieattn.ops.kernels import _attentive as cpu

    def packed(x: Tensor, psi: Tensor, *tables: Tensor | None) -> Operands:
        first, second, levels = tables
        return Operands(
            x.unflatten(0, (-1, each)).permute(0, 2, 3, 1)[:, :, :, None],
            psi.permute(3, 1, 2, 4, 0).flatten(0, 1),
            None if first is None else first.flatten(0, 1),
            None if second is None else second.flatten(0, 1),
            None if levels is None else levels.permute(3, 1, 2, 4, 0).flatten(0, 1),
        )

    def lists(x: Tensor, psi: Tensor, levels: Tensor | None) -> tuple[Lists, Lists]:
        near = seen.lists(each, len(psi), x.dtype, spatial=False)
        return near, near if levels is None else seen.lists(each, len(levels), x.dtype, spatial=True)

    def forward(x: Tensor, psi: Tensor, *tables: Tensor | None) -> tuple[Tensor, tuple[()]]:
        out = cpu.run_forward(packed(x, psi, *tables), lists(x, psi, tables[-1]))
        return out.unflatten(1, (outs, fiber)).permute(0, 4, 2, 1, 3).flatten(0, 1)[..., 0], ()

    def backward(grads: Any, wanted: Any, x: Tensor, psi: Tensor, *tables: Tensor | None) -> list[Tensor | None]:
        grad = grads[0].unflatten(0, (-1, each)).permute(0, 3, 2, 1).flatten(1, 2)[:, :, None]
        of_x, *found = cpu.run_backward(grad, packed(x, psi, *tables), lists(x, psi, tables[-1]), wanted[0])
        found = [None if part is None else part.unflatten(0, (outs, fiber)) for part in found]
        of_psi, of_first, of_second, of_levels = found
        return [
            None if of_x is None else of_x[:, :, :, 0].permute(0, 3, 1, 2).flatten(0, 1),
            None if of_psi is None else of_psi.permute(4, 1, 2, 0, 3),
            of_first,
            of_second,
            None if of_levels is None else of_levels.permute(4, 1, 2, 0, 3),
        ]

    return Kernels(forward, backward, lambda *operands: _weigh(seen, *operands)[0])
