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
from lieattn.ops._gated_sums import Clouds, Lists, Operands
from lieattn.ops._gradients import Kernels, evaluate
from lieattn.ops._group_attention import group_attention
from lieattn.ops._terms import RelativeTerms
from lieattn.ops.kernels._calls import check_lists


def attentive_sums(
    x: Float[Tensor, "points frames ins"],
    terms: RelativeTerms,
    graph: LiftedGraph,
    *,
    mix: Float[Tensor, "fiber frames units outs ins"] | None = None,
    channel: tuple[Float[Tensor, "outs fiber frames hidden ins"], Float[Tensor, "outs fiber frames ins hidden"]]
    | None = None,
    spatial: RelativeTerms | None = None,
    spatial_mix: Float[Tensor, "fiber frames units2 outs 2"] | None = None,
    mean: bool = False,
    return_maps: bool = False,
) -> tuple[Float[Tensor, "points fiber outs"], AttentionMaps | None]:
    r"""Compute :func:`attentive_convolution` on point clouds, with sums over neighbors in place of windows of pixels.

    The responses are t_{oc}(i, h, h̃) = Σ_j ψ_{oc}(h, h̃; i, j) f_c(j, h̃). Attention and result are computed from them
    as on grids, with statistics over the points of each cloud.

    **Equivariance.** If the terms are functions of the relative element, and the channel attention depends on h⁻¹ h̃
    only, then moving the points by (t, h) and translating x by h translates the result by h.

    A fused kernel for CPUs computes the responses to one frame at a time, and again in the backward pass, for clouds of
    any sizes, one after another. It can be differentiated any number of times.

    **Cost.** Without ``mix``, ψ is stored for every distinct displacement. With ``mix``, sums over neighbors of units
    times inputs, which all outputs share, are stored for every point instead, and units for every edge. Spatial
    attention stores its ψ for every edge or distinct displacement. All are linear in edges, times the pairs of frames.

    Parameters
    ----------
    x
        f. Features without frames have one frame.
    terms
        Factors ``psi`` ``[types, fiber, frames, outs, ins]``, and the ``row`` of each edge; with ``mix`` the units u of
        the edges, ``[types, fiber, 1, units, 1]``.
    graph
        The clouds and the edges that spatial attention sees. If it has a ``local`` graph, its edges are those of
        ``terms``.
    mix
        Matrices M with ψ_{oc}(h, h̃) = Σ_m u_m(h) M_{moc}(h, h̃).
    channel, spatial
        Matrices of the channel attention, and terms with ``psi`` ``[types, fiber, frames, outs, 2]`` of the spatial
        attention; None for a factor of 1.
    spatial_mix
        Matrices like ``mix``, with which ``spatial`` has units.
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
    if not torch.compiler.is_compiling():
        check_arguments(attentive_sums, locals())
    first, second = channel or (None, None)
    levels = None if spatial is None else spatial.psi
    check_tensor("terms.psi", terms.psi, "a floating tensor")
    psi = cast(Tensor, terms.psi)
    axes = psi.shape[1:] if psi.ndim == 5 else (-1, -1, -1, -1)
    if mix is not None:
        if mix.ndim != 5:
            raise ValueError(f"mix: expected [fiber, frames, units, outs, ins], got {tuple(mix.shape)}")
        fiber, frames, units, outs, ins = mix.shape
        axes = (fiber, 1, units, 1)
    else:
        fiber, frames, outs, ins = axes
    wide = (fiber, frames, outs, 2) if spatial_mix is None else (fiber, 1, spatial_mix.shape[2], 1)
    hidden = first.shape[-2] if first is not None and first.ndim == 5 else -1
    wanted = {
        "terms.psi": (psi, (len(psi), *axes)),
        "channel[0]": (first, (outs, fiber, frames, hidden, ins)),
        "channel[1]": (second, (outs, fiber, frames, ins, hidden)),
        "spatial.psi": (levels, (-1 if levels is None else len(levels), *wide)),
        "spatial_mix": (spatial_mix, (fiber, frames, wide[2], outs, 2)),
    }
    for name, (table, shape) in wanted.items():
        if table is not None and table.shape != shape:
            raise ValueError(f"{name}: expected shape {shape} (-1: any), got {tuple(table.shape)}")
    check_graph(graph, LiftedGraph, x)
    check_field(x, graph, ins, frames)
    seen = _Seen(graph, terms.row, None if spatial is None else spatial.row, mean, mix is not None)
    if mix is not None:
        x, psi = seen.unit_sums(psi[:, :, 0, :, 0], x), mix
    if spatial_mix is not None and levels is not None:
        if mix is None:
            levels, spatial_mix = _product(levels, spatial_mix), None
        else:
            levels = levels[:, :, 0, :, 0]
    operands = x, psi, first, second, levels, spatial_mix
    alike = all(part is None or part.dtype == x.dtype for part in operands) and x.dtype.itemsize >= 4
    moved = mean and graph.degree.requires_grad  # smooth neighborhoods of points with gradients
    if return_maps or moved or not alike or not fuses_attentive_sums(graph):
        out, maps = _weigh(seen, *operands)
        return out, maps if return_maps else None
    return cast(Tensor, evaluate(_kernels(seen, fiber, outs), *operands)), None


def fuses_attentive_sums(graph: LiftedGraph) -> bool:
    """Return whether a fused kernel computes :func:`attentive_sums` on a graph, whose clouds are one after another."""
    if is_recorded() or torch.is_autocast_enabled(graph.device.type) or fused_kernel(graph.device) != "numba":
        return False
    return graph.each is not None or bool((graph.batch.diff() >= 0).all())


def _product(units: Tensor, mix: Tensor) -> Tensor:
    """Return ψ ``[types, fiber, frames, outs, ins]`` of units ``[types, fiber, units]`` and matrices."""
    return torch.einsum("eam,abmoc->eaboc", units.flatten(2), mix)


class _Seen(NamedTuple):
    """The clouds with their edges, and the row of each edge."""

    graph: LiftedGraph
    row: Tensor | None
    spatial_row: Tensor | None
    mean: bool
    mixed: bool  # whether x are sums of units times inputs

    @property
    def local(self) -> LiftedGraph:
        """The graph of the kernel."""
        return self.graph if self.graph.local is None else self.graph.local

    def unit_sums(self, units: Tensor, x: Tensor) -> Tensor:
        """Return Σ_j u_m(h) x_c(j, h̃) ``[points, fiber, units, frames, ins]``, all points of a degree at a time."""
        near, degree = self.local.neighbors, self.local.neighbors.degree
        found, order = [x.new_empty(0, units.shape[1:].numel(), x.shape[1:].numel())], [degree[:0]]
        for number in degree.unique().tolist():
            points = (degree == number).nonzero()[:, 0]
            edges = near.row_ptr[points, None] + torch.arange(number, device=x.device)
            factor = units[edges if self.row is None else self.row[edges]].flatten(2)
            if self.mean:
                factor = factor / self.local.degree[points, None, None].clamp(min=1).to(factor.dtype)
            found.append(factor.mT @ x[near.source[edges]].flatten(2))
            order.append(points)
        sums = found[1] if len(found) == 2 else torch.cat(found)[torch.cat(order).argsort()]
        return sums.unflatten(1, units.shape[1:]).unflatten(3, x.shape[1:])

    def responses(self, x: Tensor, psi: Tensor) -> Tensor:
        """Return the responses ``[points, fiber, frames, outs, ins]``."""
        if self.mixed:
            return torch.einsum("pambc,abmoc->paboc", x, psi)
        return self.sum(psi, x[:, None, :, None], spatial=False)

    def sum(self, psi: Tensor, x: Tensor, *, spatial: bool) -> Tensor:
        """Return Σ_j ψ(u) x(j) ``[points, fiber, frames, outs, ins]``, entry by entry."""
        graph = self.graph if spatial else self.local
        sizes = torch.broadcast_shapes(psi.shape[1:], x.shape[1:])
        terms = RelativeTerms(psi=psi.flatten(1, 2)[:, :, None], row=self.spatial_row if spatial else self.row)
        # Pairs of frames are the fiber of the operator.
        value = x.expand(-1, *sizes).flatten(1, 2)
        found, _ = group_attention(
            None, None, value, graph.neighbors, pattern="framewise", normalize="none", terms=terms
        )
        found = found.unflatten(1, sizes[:2])
        return found / graph.degree.clamp(min=1).to(found.dtype).view(-1, 1, 1, 1, 1) if self.mean else found

    def lists(self, rows: int, dtype: torch.dtype, *, spatial: bool) -> Lists:
        """Return the edges for the kernel, or raise ValueError if it would read invalid memory."""
        graph, row = (self.graph, self.spatial_row) if spatial else (self.local, self.row)
        near = graph.neighbors
        row = torch.arange(near.num_edges, device="cpu") if row is None else row
        check_lists(near, row, [torch.empty(rows, 0)])
        first = graph.counts.cumsum(0) - graph.counts
        cloud = graph.batch[near.source]
        if not torch.equal(cloud, graph.batch[near.target]):
            raise ValueError("graph: expected edges within clouds, got one between two")
        share = 1 / graph.degree.clamp(min=1) if self.mean else torch.ones(near.num_points)
        return Lists(near.row_ptr, near.source - first[cloud], row, share.to(dtype))


def _weigh(
    seen: _Seen,
    x: Tensor,
    psi: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    levels: Tensor | None,
    spatial_mix: Tensor | None,
) -> tuple[Tensor, AttentionMaps]:
    """Compute :func:`attentive_sums` by plain torch."""
    graph = seen.graph
    removed = seen.responses(x, psi)
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
        levels = levels if spatial_mix is None else _product(levels, spatial_mix)
        statistics = torch.stack([removed.mean(-1), removed.amax(-1)], dim=-1)
        passed, rest = attention_of(seen.sum(levels, statistics, spatial=True).sum(-1))
        out = out + rest * removed.sum(-1)
    return out.sum(2), AttentionMaps(channel, None if passed is None else passed[..., None])


def _kernels(seen: _Seen, fiber: int, outs: int) -> Kernels:
    """Return the fused kernel.

    Its lanes are pairs of an output channel and a frame. With ``mix``, they are channels, and frames are turns.
    """
    from lieattn.ops.kernels import _attentive as cpu

    sizes = seen.graph.counts.tolist()

    def in_order(table: Tensor) -> Tensor:
        """Convert ``[outs, fiber, *]`` to ``[lanes, *]``."""
        return (table.transpose(0, 1) if seen.mixed else table).flatten(0, 1)

    def out_of_order(table: Tensor) -> Tensor:
        return table.unflatten(0, (fiber, outs)).transpose(0, 1) if seen.mixed else table.unflatten(0, (outs, fiber))

    def packed(x: Tensor, psi: Tensor, *tables: Tensor | None) -> tuple[Operands, Clouds]:
        first, second, levels, spatial_mix = tables
        units = None if spatial_mix is None else levels
        near = None if seen.mixed else seen.lists(len(psi), x.dtype, spatial=False)
        wide = near if levels is None else seen.lists(len(levels), x.dtype, spatial=True)
        spatial = levels if spatial_mix is None else spatial_mix
        if spatial is not None:
            spatial = in_order(spatial.permute(3, 1, 2, 4, 0) if units is None else spatial.permute(3, 0, 1, 4, 2))
        operands = Operands(
            x,
            in_order(psi.permute(3, 0, 1, 4, 2) if seen.mixed else psi.permute(3, 1, 2, 4, 0)),
            None if first is None else in_order(first),
            None if second is None else in_order(second),
            spatial,
        )
        return operands, Clouds(sizes, near, wide, units)

    def forward(*operands: Any) -> tuple[Tensor, tuple[()]]:
        out = cpu.run_forward(*packed(*operands))
        return out_of_order(out.mT).permute(2, 1, 0).contiguous(), ()

    def backward(grads: Any, wanted: Any, *operands: Any) -> list[Tensor | None]:
        grad = in_order(grads[0].permute(2, 1, 0)).mT
        of_x, *found = cpu.run_backward(grad, *packed(*operands), wanted[0])
        of_units = found.pop() if len(found) > 4 else None
        of_psi, of_first, of_second, of_levels = (None if part is None else out_of_order(part) for part in found)
        if of_psi is not None:
            of_psi = of_psi.permute(1, 2, 4, 0, 3) if seen.mixed else of_psi.permute(4, 1, 2, 0, 3)
        if of_levels is None:
            return [of_x, of_psi, of_first, of_second, None, None]
        if of_units is None:
            return [of_x, of_psi, of_first, of_second, of_levels.permute(4, 1, 2, 0, 3), None]
        return [of_x, of_psi, of_first, of_second, of_units, of_levels.permute(1, 2, 4, 0, 3)]

    return Kernels(forward, backward, lambda *operands: _weigh(seen, *operands)[0])
