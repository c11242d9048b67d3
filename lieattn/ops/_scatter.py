"""Reductions over sorted lists of edges, by torch-scatter where it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn._core.contexts import transformed

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
