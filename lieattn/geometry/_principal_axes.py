"""Principal axes of second moments, and axes toward points where the moments do not determine them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lieattn._core.functional import transformed
from lieattn.geometry._clouds import PointClouds
from lieattn.geometry._indices import members, ranges
from lieattn.geometry._search import TIE_TOLERANCE

# Distances below this multiple of the rounding error of coordinates count as zero.
_NOISE = 16
# Points of a neighborhood closer to the axes found, relative to the farthest point, do not determine another axis.
_ON_AXIS = 1e-3

_AT_ONCE = 2**18  # number of candidates that are compared at a time


class Candidates(NamedTuple):
    """Candidates for axes of rows, such as the points of their clouds.

    ``of`` yields, for parts of its argument, row numbers ``[rows]``: the numbers of candidates in the order of points,
    the place of the row of each candidate in the part, and the rounding error of each row. ``seen`` returns the vectors
    ``[n, k]`` of candidates with numbers ``[n]`` as seen from rows ``[n]``.
    """

    of: Callable[[Tensor], Iterator[tuple[Tensor, Tensor, Tensor]]]
    seen: Callable[[Tensor, Tensor], Tensor]


def rounding(dtype: torch.dtype, numbers: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the rounding error ``[rows]`` of numbers ``[n, *]`` of a dtype, each of which belongs to a row."""
    largest = _largest(numbers.detach().double().abs().flatten(1).amax(1), row, rows)
    return 2 * torch.finfo(dtype).eps * largest


def above_rounding(noise: Tensor, moments: Tensor) -> Tensor:
    """Return moments ``[rows, k, k]``, replaced by 0 if they can be explained by rounding."""
    size = moments.detach().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    return torch.where((size > _NOISE * noise)[:, None, None], moments, 0.0)


def candidates_of_rows(vectors: Tensor, row: Tensor, noise: Tensor) -> Candidates:
    """Return candidates for axes from vectors, each of which belongs to one row."""

    def of(rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        place = torch.full((len(noise),), -1, dtype=torch.int64, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        kept = (place[row] >= 0).nonzero()[:, 0]
        yield kept, place[row[kept]], noise[rows]

    return Candidates(of, lambda number, rows: vectors[number])


def candidates_of_clouds(
    clouds: PointClouds,
    vectors: Tensor,
    cloud: Tensor,
    noise: Tensor,
    basis: Tensor | None,
    center: Tensor | None = None,
) -> Candidates:
    """Return candidates for axes of points: all vectors of their clouds, minus the ``center`` ``[points, dim]``."""
    order, first, size = members(cloud, clouds.num_clouds)

    def of(points: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        own = clouds.batch[points]
        for some in own.split(max(1, _AT_ONCE // max(1, int(size[own].max())))):
            place, position = ranges(first[some], size[some])
            yield order[position], place, noise[some]

    def seen(number: Tensor, points: Tensor) -> Tensor:
        found = vectors[number]
        if center is not None:
            found = found - center[points]
        return found if basis is None else (basis.mT[points] @ found[..., None])[..., 0]

    return Candidates(of, seen)


def principal_axes(moments: Tensor, gap: float) -> tuple[Tensor, Tensor]:
    """Return eigenvectors by descending eigenvalue, and the mask of those that are determined.

    Adjacent eigenvalues λ ≥ μ count as equal unless λ - μ > gap sqrt(λ₁ λ), where λ₁ is the largest of the matrix: a
    rounding error ε of coordinates rotates the eigenvectors by about ε sqrt(λ₁ λ) / (λ - μ).

    ``moments`` ``[rows, k, k]`` are positive semidefinite and float64. The eigenvectors are columns ``[rows, k, k]``.
    The mask ``[rows, k]`` is true if an eigenvalue differs from both neighbors. In rows with distinct eigenvalues, axes
    are differentiable to all orders (within transforms, to the seventh). In other rows, determined axes are
    differentiable to first order.
    """
    values, axes = _descending(moments.detach())
    values = values.clamp(min=0)
    open_gap = -values.diff(dim=-1) > gap * (values[:, :1] * values[:, :-1]).sqrt()
    edge = torch.ones_like(open_gap[:, :1]) if open_gap.shape[1] else values > -1
    isolated = torch.cat([edge, open_gap], dim=-1) & torch.cat([open_gap, edge], dim=-1)
    if moments.shape[-1] == 1:
        isolated = values > 0
    if moments.requires_grad or transformed():
        # Both replace axes by equal values that have derivatives.
        good = isolated.all(-1).nonzero()[:, 0]
        if transformed():
            exact = axes[good]
            for _ in range(3):  # each step doubles the number of correct orders, from 1 to 8 with the values
                exact = _refined(moments[good], exact)
        else:
            exact = _descending(moments[good])[1]
            exact = exact * torch.where((exact * axes[good]).detach().sum(-2, keepdim=True) < 0, -1.0, 1.0)
        rest = (~isolated.all(-1)).nonzero()[:, 0]
        axes = axes.index_put((good,), exact).index_put((rest,), _first_order(moments[rest], values[rest], axes[rest]))
    return axes, isolated


def completed_axes(axes: Tensor, isolated: Tensor, rows: Tensor, candidates: Sequence[Candidates]) -> Tensor:
    """Return orthonormal axes ``[rows, k, k]``: isolated ones first, then axes to the farthest candidates.

    Each set of candidates is used for those of the ``rows`` ``[rows]`` in which the previous set determines no axis.
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
            least = 0.0 if level == len(candidates) - 1 else _ON_AXIS
            directions, known = _farthest(candidate, rows[open_rows], found[open_rows], least)
            column = column.index_put((open_rows[known],), directions[known])
            open_rows = open_rows[~known]
        columns.append(column.index_put((open_rows,), _any_across(found[open_rows])))
    return torch.stack(columns, dim=-1)


def _descending(moments: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(moments)
    return values.flip(-1), vectors.flip(-1)


def _refined(moments: Tensor, axes: Tensor) -> Tensor:
    """Return axes of distinct eigenvalues after a step that converges quadratically (Ogita, Aishima 2018, Algorithm 1).

    The derivatives of ``torch.linalg.eigh`` in ``torch.func`` are NaN where reverse mode follows forward mode.
    """
    own = torch.eye(axes.shape[-1], dtype=torch.bool, device=axes.device)
    gram, seen = axes.mT @ axes, axes.mT @ moments @ axes
    value = (seen.diagonal(dim1=-2, dim2=-1) / gram.diagonal(dim1=-2, dim2=-1))[..., None, :]
    excess = torch.eye(axes.shape[-1], dtype=axes.dtype, device=axes.device) - gram
    turned = (seen + value * excess) / torch.where(own, 1.0, value - value.mT)
    return axes + axes @ torch.where(own, excess / 2, turned)


def _first_order(moments: Tensor, values: Tensor, axes: Tensor) -> Tensor:
    """Return the axes with their first derivatives: dv_k = Σ_j v_j (v_jᵀ dM v_k) / (λ_k - λ_j) over λ_j ≠ λ_k."""
    change = axes.mT @ (moments - moments.detach()) @ axes
    difference = values[:, None, :] - values[:, :, None]
    distinct = difference.abs() > 1e-12 * values[:, :1, None].clamp(min=1e-300)
    return axes + axes @ torch.where(distinct, change / torch.where(distinct, difference, 1.0), 0.0)


def _farthest(candidates: Candidates, rows: Tensor, found: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return unit vectors ``[rows, k]`` to the farthest candidates, perpendicular to the axes found, and their mask."""
    numbers, masks, start = [], [], 0
    with torch.no_grad():  # only the chosen candidates need derivatives
        for number, place, noise in candidates.of(rows):
            part, start = slice(start, start + len(noise)), start + len(noise)
            vectors = candidates.seen(number, rows[part][place])
            first, known = _first_farthest(vectors, place, noise, found[part], least)
            numbers.append(number[first[known]])
            masks.append(known)
    known = torch.cat(masks)
    chosen = found.new_zeros(found.shape[:2])
    chosen = chosen.index_put((known.nonzero()[:, 0],), candidates.seen(torch.cat(numbers), rows[known]))
    # The second pass removes the components along the axes that rounding has left.
    chosen = _across(_across(chosen, found), found)
    norm = torch.linalg.vector_norm(torch.where(known[:, None], chosen, 1.0), dim=-1, keepdim=True)
    return chosen / norm, known


def _first_farthest(vectors: Tensor, row: Tensor, noise: Tensor, found: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return the place of the first of the farthest vectors of each row, and the mask of rows with a clear axis."""
    rows = len(found)
    length = torch.linalg.vector_norm(_across(vectors, found[row]), dim=-1)
    extent = _largest(torch.linalg.vector_norm(vectors, dim=-1), row, rows)
    farthest = _largest(length, row, rows)
    tied = length >= (farthest - TIE_TOLERANCE * farthest - _NOISE * noise)[row]
    place = torch.arange(len(row), device=row.device)
    first = torch.full((rows,), len(row), dtype=torch.int64, device=row.device)
    first.scatter_reduce_(0, row[tied], place[tied], "amin")
    return first, farthest > torch.maximum(least * extent, _NOISE * noise)


def _any_across(found: Tensor) -> Tensor:
    """Return unit vectors ``[rows, k]`` perpendicular to the axes found, which do not depend on the axes' signs."""
    k = found.shape[1]
    unit = torch.eye(k, dtype=found.dtype, device=found.device).expand(len(found), k, k)
    across = _across(unit, found[:, None])
    length = torch.linalg.vector_norm(across.detach(), dim=-1)
    tied = length >= (1 - TIE_TOLERANCE) * length.amax(-1, keepdim=True)
    first = tied.long().argmax(-1)
    chosen = across[torch.arange(len(found), device=found.device), first]
    return chosen / torch.linalg.vector_norm(chosen, dim=-1, keepdim=True)


def _across(vectors: Tensor, found: Tensor) -> Tensor:
    """Return the parts of vectors ``[*, k]`` that are perpendicular to orthonormal columns ``[*, k, m]``."""
    along = (vectors[..., None, :] @ found)[..., 0, :]
    return vectors - (found @ along[..., None])[..., 0]


def _largest(numbers: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the largest number ``[rows]`` of each row of numbers ``[n]``; 0 if all are negative or there are none."""
    return numbers.new_zeros(rows).scatter_reduce(0, row, numbers, "amax")
