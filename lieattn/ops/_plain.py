"""The operator in plain torch.

It consists of gathers, small matrix products, and sums over lists of edges, and can be differentiated any number of
times on any device. It stores tensors of size edges x fiber x fiber.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn._core.checks import may_read_values
from lieattn._core.contexts import transformed
from lieattn.geometry import Neighbors
from lieattn.ops._terms import Normalization, Pattern, Problem

_Rows = Callable[[Tensor], Tensor]


def attend(
    problem: Problem,
    drop: Callable[[Tensor], Tensor] | None = None,
    return_weights: bool = False,
    scattered: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Evaluate the operator on checked operands of one dtype, for all patterns except ``"pooled"``.

    ``drop`` is applied to the weights, which are ``[edges, heads, out, query]`` for the softmax of a query sum, and
    ``[edges, heads, out, query, key]`` otherwise. Torch-scatter evaluates the sums if ``scattered``.
    """
    lists = edge_lists(problem.neighbors.target, problem.neighbors.degree, scattered)
    query, neighbors, terms = problem.query, problem.neighbors, problem.terms
    summed = problem.pattern == "query_sum"
    # Axes from here on: [edges, heads, out, query, key]; out is 1 if it is the query frame.
    # Displacement tables at the edges, whose frame axis becomes the out or the query axis.
    rows = partial(_to_edges, terms.row, 3 if summed else 2)
    content = _content_score(problem, rows)
    position = _position_score(problem, rows)
    if problem.normalize == "softmax":
        biased = terms.displacement_bias is not None or terms.fiber_bias is not None
        inner, outer = _softmax_factors(content, position, lists, biased=biased)
    else:
        if query is None and terms.displacement_bias is None and terms.fiber_bias is None:
            content = content + 1  # without scores, this is a convolution, and every weight is 1
        inner, outer = _plain_weights(content, position, neighbors, problem.normalize), None
    weights = _public_weights(inner, outer, problem.pattern) if return_weights else None
    if drop is not None:
        # The query sum drops a key point with its whole fiber, so that weights are still a product of two factors.
        if summed and outer is not None:
            outer = drop(outer)
        else:
            inner = drop(inner)
    message = _weighted_values(inner, problem, rows)
    message = _close_fiber(message, outer, summed)
    return lists.sum(message).transpose(1, 2), weights


def _to_edges(index: Tensor | None, axis: int, table: Tensor) -> Tensor:
    """Convert a table with heads on axis 1, ``[types, heads, out, *]``, to ``[edges, heads, out, query, *]``."""
    return (table if index is None else table.index_select(0, index)).unsqueeze(axis)


def _content_score(problem: Problem, rows: _Rows) -> Tensor:
    """Return the scores that depend on key frames, [edges, heads, out | 1, query, key]; key is 1 if frames are tied."""
    query, key, value, terms = problem.query, problem.key, problem.value, problem.terms
    neighbors, tied = problem.neighbors, problem.pattern == "framewise"
    keys = 1 if tied else value.shape[1]
    score = value.new_zeros(()).expand(neighbors.num_edges, value.shape[2], 1, 1, keys)
    if query is not None and key is not None:
        at_target, at_source = _by_head(query, neighbors.target), _by_head(key, neighbors.source)
        if terms.key_psi is not None and tied:
            at_source = at_source * rows(terms.key_psi[:, :, 0].transpose(1, 2))[:, :, 0]
        if tied:
            score = (at_target * at_source).sum(-1)[:, :, None, :, None]
        elif terms.key_psi is not None:
            acted = _of_pairs(terms.key_psi, key, problem, rows)
            score = (acted @ at_target[:, :, None, :, :, None])[..., 0]
        else:
            score = (at_target @ at_source.mT)[:, :, None]
        if terms.fiber_key is not None:
            at_points = _fiber_score(query, terms.fiber_key, tied)
            score = score + at_points.index_select(0, neighbors.target)
    if terms.fiber_bias is not None:
        bias = terms.fiber_bias.permute(2, 0, 1)[:, None]
        bias = bias.expand(-1, -1, value.shape[1], value.shape[1]) if tied else bias
        score = score + (bias.diagonal(dim1=2, dim2=3)[..., None] if tied else bias)
    if terms.displacement_bias is not None and terms.displacement_bias.shape[2] > 1:
        score = score + rows(terms.displacement_bias.permute(0, 3, 1, 2))
    return score


def _fiber_score(query: Tensor, fiber_key: Tensor, tied: bool) -> Tensor:
    """Return ⟨q, ρ(g, m)⟩, which does not depend on the edge, [points, heads, out | 1, query, key]."""
    table = fiber_key if fiber_key.ndim == 5 else fiber_key[None]
    if tied:
        table = table.expand(-1, query.shape[1], query.shape[1], -1, -1)
        return torch.einsum("pghd,ohdg->phog", query, table.diagonal(dim1=1, dim2=2))[..., None]
    table = table.expand(-1, -1, -1, query.shape[2], -1)
    return torch.einsum("pghd,ogmhd->phogm", query, table)


def _position_score(problem: Problem, rows: _Rows) -> Tensor | None:
    """Return the scores of the displacement that are equal for all key frames, [edges, heads, out | 1, query | 1]."""
    query, neighbors, terms, score = problem.query, problem.neighbors, problem.terms, None
    if terms.positional_key is not None and query is not None:
        at_target = _by_head(query, neighbors.target)
        rho = rows(terms.positional_key.transpose(1, 2)).expand(*(-1,) * 4, query.shape[-1])
        if problem.pattern != "query_sum":
            score = (rho * at_target[:, :, None]).sum(-1)
        elif rho.shape[1] == 1:  # shared by the heads, so that one matrix product per edge is enough
            product = rho[:, 0, :, 0] @ at_target.flatten(1, 2).mT
            score = product.unflatten(-1, at_target.shape[1:3]).transpose(1, 2)
        else:
            score = rho[:, :, :, 0] @ at_target.mT
    if terms.displacement_bias is not None and terms.displacement_bias.shape[2] == 1:
        bias = rows(terms.displacement_bias[:, :, 0].transpose(1, 2))
        score = bias if score is None else score + bias
    return score


def _softmax_factors(
    content: Tensor, position: Tensor | None, lists: EdgeLists, *, biased: bool
) -> tuple[Tensor, Tensor]:
    """Return the softmax over (neighbor, key frame) as two factors: over the key fiber, and over the neighbors."""
    if biased:
        # Scores may all be minus infinity, which has no derivative, so it is replaced by a finite number.
        content = content.clamp(min=torch.finfo(content.dtype).min / 2)
    level = torch.logsumexp(content, dim=-1)
    inner = content.softmax(dim=-1)  # the sum of exp(content - level) would have the rounding error of a large level
    if biased:
        level = level.masked_fill(level < torch.finfo(level.dtype).min / 4, -torch.inf)
    total = level if position is None else level + position
    return inner, lists.softmax(total)


def _plain_weights(content: Tensor, position: Tensor | None, neighbors: Neighbors, normalize: Normalization) -> Tensor:
    """Return weights without softmax, which do not depend on other keys, [edges, heads, out | 1, query, key]."""
    score = content if position is None else content + position[..., None]
    if normalize == "exp-mean":
        score = score.exp()
    if normalize == "none":
        return score
    count = neighbors.degree[neighbors.target].to(score.dtype) * score.shape[-1]
    return score / count[:, None, None, None, None]


def _of_pairs(psi: Tensor, signal: Tensor, problem: Problem, rows: _Rows) -> Tensor:
    """Multiply a signal by ψ for pairs of frames, [edges, heads, out | 1, query | 1, key, dim]."""
    source, row = problem.neighbors.source, problem.terms.row
    if psi.ndim == 5:
        return rows(psi.permute(0, 3, 1, 2, 4)) * _by_head(signal, source)[:, :, None, None]
    index = torch.arange(len(source), device=source.device) if row is None else row
    acted = contract(psi, signal, source, index, repeats=row is not None, keys=True)
    return acted.permute(0, 3, 1, 2, 4).unsqueeze(3 if problem.pattern == "query_sum" else 2)


def _weighted_values(inner: Tensor, problem: Problem, rows: _Rows) -> Tensor:
    """Sum weight times ψ v + β over key frames, [edges, heads, out, query, value_dim]."""
    value, psi, beta = problem.value, problem.terms.psi, problem.terms.beta
    at_source = _by_head(value, problem.neighbors.source)
    if problem.pattern == "framewise":
        mixed = inner * at_source[:, :, None]
    elif psi is not None and (psi.shape[2] > 1 or psi.ndim == 6):
        # ψ depends on key frames or mixes channels, so it must be applied before the sum.
        mixed, psi = (inner[..., None, :] @ _of_pairs(psi, value, problem, rows))[..., 0, :], None
    else:
        mixed = (inner.flatten(2, 3) @ at_source).unflatten(2, inner.shape[2:4])
    if psi is not None:
        mixed = mixed * rows(psi[:, :, 0].transpose(1, 2))
    if beta is not None and beta.shape[2] > 1:
        mixed = mixed + (inner[..., None, :] @ rows(beta.permute(0, 3, 1, 2, 4)))[..., 0, :]
    elif beta is not None:
        mixed = mixed + inner.sum(-1, keepdim=True) * rows(beta[:, :, 0].transpose(1, 2))
    return mixed


def _close_fiber(message: Tensor, outer: Tensor | None, summed: bool) -> Tensor:
    """Apply the second factor of the weights, and sum over query frames if ``summed``, [edges, heads, fiber, dim]."""
    if not summed:
        message = message[:, :, 0]
        return message if outer is None else outer[:, :, 0, :, None] * message
    if outer is None:
        return message.sum(dim=3)
    if message.shape[2] == 1:
        return outer @ message[:, :, 0]
    return (outer[..., None, :] @ message)[..., 0, :]


def _public_weights(inner: Tensor, outer: Tensor | None, pattern: Pattern) -> Tensor:
    weights = inner if outer is None else inner * outer[..., None]
    weights = weights.movedim(1, -1)
    if pattern == "joint":
        return weights[:, 0]
    return weights[:, 0, :, 0] if pattern == "framewise" else weights


def _by_head(signal: Tensor, index: Tensor) -> Tensor:
    """Convert [points, fiber, heads, dim] to [edges, heads, fiber, dim], contiguous for matrix products."""
    return signal.transpose(1, 2).contiguous().index_select(0, index)


_functorch = torch._C._functorch  # there is no public function for this question


@dataclass(frozen=True, eq=False)
class EdgeLists:
    """Lists of edges, sorted by target.

    Attributes
    ----------
    target, degree
        Target of each edge ``[edges]`` int64, and number of edges of each target ``[targets]`` int64.
    ptr
        First edge of each target ``[targets + 1]`` int64 if torch-scatter evaluates the sums; None for torch.
    """

    target: Tensor
    degree: Tensor
    ptr: Tensor | None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums over the edges of each target, ``[targets, *]``, of ``[edges, *]``."""
        if self.ptr is not None:
            return _segments(x, self.ptr, False)
        from torch_geometric.utils import scatter

        return scatter(x, self.target, dim=0, dim_size=len(self.degree), reduce="sum")

    def softmax(self, score: Tensor) -> Tensor:
        """Return the softmax over the edges of each target, of scores ``[edges, *]``."""
        if self.ptr is None:
            from torch_geometric.utils import softmax

            return softmax(score, self.target, num_nodes=len(self.degree))
        from torch_scatter import gather_csr, segment_csr

        largest = segment_csr(score.detach().contiguous(), self.ptr, reduce="max")
        weight = (score - gather_csr(largest, self.ptr)).exp()
        return weight / _segments(self.sum(weight), self.ptr, True)


def edge_lists(target: Tensor, degree: Tensor, scattered: bool) -> EdgeLists:
    """Return the lists of edges, for torch-scatter if ``scattered``."""
    return EdgeLists(target, degree, F.pad(degree.cumsum(0), (1, 0)) if scattered else None)


class _Segments(torch.autograd.Function):
    """Sums over segments, or copies to their entries; the derivative of each is the other, any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ptr: Tensor, spread: bool) -> Tensor:
        from torch_scatter import gather_csr, segment_csr

        ctx.spread = spread
        ctx.save_for_backward(ptr)
        ctx.save_for_forward(ptr)
        x = x.contiguous()
        found: Tensor = gather_csr(x, ptr) if spread else segment_csr(x, ptr, reduce="sum")
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ptr,) = ctx.saved_tensors
        if transformed() or _functorch.is_legacy_batchedtensor(grad):  # torch-scatter does not know batched tensors
            rows = torch.arange(len(ptr) - 1, device=ptr.device).repeat_interleave(ptr.diff())
            if not ctx.spread:
                return grad.index_select(0, rows), None, None
            return grad.new_zeros(len(ptr) - 1, *grad.shape[1:]).index_add(0, rows, grad), None, None
        return _segments(grad, ptr, not ctx.spread), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (ptr,) = ctx.saved_tensors
        return _segments(tangent, ptr, ctx.spread)


def _segments(x: Tensor, ptr: Tensor, spread: bool) -> Tensor:
    found: Tensor = _Segments.apply(x, ptr, spread)
    return found


def contract(psi: Tensor, signal: Tensor, source: Tensor, row: Tensor, *, repeats: bool, keys: bool = False) -> Tensor:
    """Multiply the signal by psi at every edge, and sum over key frames, ``[edges, out, heads, dim]``.

    With ``keys``, the sum is not computed, and there is an axis for key frames after ``out``. If ``repeats``, edges may
    share rows of psi.
    """
    factors, entries, made = "ambc", "mbc", "ambc" if keys else "abc"
    if psi.ndim == 6:
        factors, entries, signal = "ambcd", "md", signal.flatten(2)
        signal = signal.sum(dim=1, keepdim=True) if psi.shape[2] == 1 and not keys else signal
    if repeats:
        points, place = _used(source, len(signal))
        if len(points) * len(psi) <= 2 * len(source):
            every = torch.einsum(f"t{factors},p{entries}->pt{made}", psi, signal.index_select(0, points))
            return every.flatten(0, 1).index_select(0, place * len(psi) + row)
    at_edges = signal.index_select(0, source)
    return torch.einsum(f"e{factors},e{entries}->e{made}", psi.index_select(0, row), at_edges)


def _used(source: Tensor, num_points: int) -> tuple[Tensor, Tensor]:
    """Return the points that are sources, and the place of each source among them; all points in traces."""
    if not may_read_values(source):
        return torch.arange(num_points, device=source.device), source
    here = torch.zeros(num_points, dtype=torch.bool, device=source.device)
    here[source] = True
    return here.nonzero()[:, 0], (here.cumsum(0) - 1).index_select(0, source)
