"""Eigenvectors of symmetric matrices that stay finite where eigenvalues meet, and axes from points beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Points are equally far if their distances differ by less, relative to the largest.
_TIE = 1e-5
# Points of a neighborhood that lie so near to the axes found, relative to the farthest, do not determine another one.
_ON_AXIS = 1e-3

# Of some rows: (vectors ``[candidates, k]``, the place of their row among those asked for, in the order of points).
Candidates = Callable[[Tensor], tuple[Tensor, Tensor]]


def principal_axes(moments: Tensor, gap: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors by descending eigenvalue, and which of them are determined.

    Eigenvalues λ ≥ μ next to each other count as equal unless λ - μ > gap sqrt(λ₁ λ), with λ₁ the largest of the
    matrix: rounding ε of coordinates turns the eigenvectors by about ε sqrt(λ₁ λ) / (λ - μ).

    ``moments`` ``[rows, k, k]`` are positive semidefinite and float64. Returns the eigenvectors as columns ``[rows, k,
    k]``, and a bool mask ``[rows, k]`` of those whose eigenvalue equals neither neighbor. Axes are differentiable to
    all orders in rows with distinct eigenvalues only, elsewhere to first order where they are determined.
    """
    values, axes = _descending(moments.detach())
    values = values.clamp(min=0)
    open_gap = -values.diff(dim=-1) > gap * (values[:, :1] * values[:, :-1]).sqrt()
    edge = torch.ones_like(open_gap[:, :1]) if open_gap.shape[1] else values > -1
    isolated = torch.cat([edge, open_gap], dim=-1) & torch.cat([open_gap, edge], dim=-1)
    if moments.shape[-1] == 1:
        isolated = values > 0
    if moments.requires_grad:
        # Both add zero: they only carry derivatives.
        good = isolated.all(-1).nonzero()[:, 0]
        exact = _aligned(_descending(moments[good])[1], axes[good])
        rest = (~isolated.all(-1)).nonzero()[:, 0]
        axes = axes.index_put((good,), exact).index_put((rest,), _first_order(moments[rest], values[rest], axes[rest]))
    return axes, isolated


def completed_axes(axes: Tensor, isolated: Tensor, candidates: Sequence[Candidates], epsilon: float) -> Tensor:
    """Orthonormal axes ``[rows, k, k]``: those that are isolated first, the others from farthest points.

    ``axes`` and ``isolated`` come from :func:`principal_axes`, for the rows in question alone. Each set of candidates
    is asked where the one before does not determine an axis. ``epsilon`` is the rounding of the points, relative to
    the largest.
    """
    k = axes.shape[-1]
    order = (~isolated).long().argsort(dim=-1, stable=True)
    axes = axes.gather(-1, order[:, None].expand_as(axes))
    number = isolated.sum(-1)
    columns: list[Tensor] = []
    for m in range(k):
        found = torch.stack(columns, dim=-1) if columns else axes[..., :0]
        column = axes[..., m]
        open_rows = (m >= number).nonzero()[:, 0]
        for level, candidate in enumerate(candidates):
            if len(open_rows) == 0:
                break
            least = 16 * epsilon if level == len(candidates) - 1 else _ON_AXIS
            directions, known = _farthest(*candidate(open_rows), found[open_rows], least, epsilon)
            column = column.index_put((open_rows[known],), directions[known])
            open_rows = open_rows[~known]
        columns.append(column.index_put((open_rows,), _any_across(found[open_rows])))
    return torch.stack(columns, dim=-1)


def _descending(moments: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(moments)
    return values.flip(-1), vectors.flip(-1)


def _aligned(vectors: Tensor, reference: Tensor) -> Tensor:
    """Columns with the signs of a reference."""
    sign = torch.where((vectors * reference).detach().sum(-2, keepdim=True) < 0, -1.0, 1.0)
    return vectors * sign


def _first_order(moments: Tensor, values: Tensor, axes: Tensor) -> Tensor:
    """The same axes, with their first derivatives: dv_k = Σ_j v_j (v_jᵀ dM v_k) / (λ_k - λ_j) over λ_j ≠ λ_k."""
    change = axes.mT @ (moments - moments.detach()) @ axes
    difference = values[:, None, :] - values[:, :, None]
    distinct = difference.abs() > 1e-12 * values[:, :1, None].clamp(min=1e-300)
    return axes + axes @ torch.where(distinct, change / torch.where(distinct, difference, 1.0), 0.0)


def _farthest(vectors: Tensor, row: Tensor, found: Tensor, least: float, epsilon: float) -> tuple[Tensor, Tensor]:
    """Unit vectors ``[rows, k]`` across the axes found, towards the farthest candidates; and where there is one."""
    rows, k = found.shape[:2]
    across = _across(vectors, found[row])
    length = torch.linalg.vector_norm(across.detach(), dim=-1)
    extent = _largest(torch.linalg.vector_norm(vectors.detach(), dim=-1), row, rows)
    farthest = _largest(length, row, rows)
    tied = length >= (farthest - _TIE * farthest - 16 * epsilon * extent)[row]
    place = torch.arange(len(row), device=row.device)
    first = torch.full((rows,), len(row), dtype=torch.int64, device=row.device)
    first.scatter_reduce_(0, row[tied], place[tied], "amin")
    known = farthest > least * extent
    chosen = vectors.new_zeros(rows, k).index_put((known.nonzero()[:, 0],), across[first[known]])
    # A second pass takes off what rounding has left of the axes found.
    chosen = _across(chosen, found)
    norm = torch.linalg.vector_norm(torch.where(known[:, None], chosen, 1.0), dim=-1, keepdim=True)
    return chosen / norm, known


def _any_across(found: Tensor) -> Tensor:
    """Unit vectors ``[rows, k]`` across the axes found, functions of the lines they span: not of their signs."""
    k = found.shape[1]
    unit = torch.eye(k, dtype=found.dtype, device=found.device).expand(len(found), k, k)
    across = _across(unit, found[:, None])
    length = torch.linalg.vector_norm(across.detach(), dim=-1)
    tied = length >= (1 - _TIE) * length.amax(-1, keepdim=True)
    first = tied.long().argmax(-1)
    chosen = across[torch.arange(len(found), device=found.device), first]
    return chosen / torch.linalg.vector_norm(chosen, dim=-1, keepdim=True)


def _across(vectors: Tensor, found: Tensor) -> Tensor:
    """Vectors ``[*, k]`` less their parts along orthonormal columns ``[*, k, m]``."""
    along = (vectors[..., None, :] @ found)[..., 0, :]
    return vectors - (found @ along[..., None])[..., 0]


def _largest(numbers: Tensor, row: Tensor, rows: int) -> Tensor:
    return numbers.new_zeros(rows).scatter_reduce(0, row, numbers, "amax")
