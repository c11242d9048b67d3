"""Principal axes of second moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lieattn._core.contexts import accumulates, is_mapped, outside_of_transforms, transformed
from lieattn.geometry._indices import members, ranges
from lieattn.geometry._search import TIE_TOLERANCE

# Distances below this multiple of the rounding error of coordinates count as zero.
_NOISE = 16
# Points of a neighborhood closer to the axes found, relative to the farthest point, do not determine another axis.
_ON_AXIS = 1e-3

_AT_ONCE = 2**18  # number of candidates that are compared at a time


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidates for axes of rows, such as the points of their clouds.

    Attributes
    ----------
    vectors, owner, noise
        Vectors ``[n, dim]``, the owner of each, ``[n]`` int64, and the rounding error of each owner's vectors.
    batch
        Owner of each row, int64, whose vectors are the candidates of the row, or None if rows are owners.
    basis, center
        ``[rows, dim, k]``, in which the vectors are seen from a row, and ``[rows, dim]``, which is subtracted first.
    """

    vectors: Tensor
    owner: Tensor
    noise: Tensor
    batch: Tensor | None = None
    basis: Tensor | None = None
    center: Tensor | None = None

    @cached_property
    def _members(self) -> tuple[Tensor, Tensor, Tensor]:
        return members(self.owner, len(self.noise))

    def of(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the candidates of parts of some rows.

        These are the numbers of the candidates in ascending order for each row, the place of the row of each candidate
        in the part, and the rounding error of each row.
        """
        order, first, size = self._members
        owners = rows if self.batch is None else self.batch[rows]
        for some in owners.split(max(1, _AT_ONCE // max(1, int(size[owners].max())))):
            place, position = ranges(first[some], size[some])
            yield order[position], place, self.noise[some]

    def seen(self, number: Tensor, rows: Tensor) -> Tensor:
        """Return the vectors ``[n, k]`` of candidates with numbers ``[n]`` as seen from rows ``[n]``."""
        found = self.vectors[number]
        if self.center is not None:
            found = found - self.center[rows]
        return found if self.basis is None else (self.basis.mT[rows] @ found[..., None])[..., 0]


def rounding(dtype: torch.dtype, numbers: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the rounding error ``[rows]`` of numbers ``[n, *]`` of a dtype, each of which belongs to a row."""
    largest = _largest(numbers.detach().double().abs().flatten(1).amax(1), row, rows)
    return 2 * torch.finfo(dtype).eps * largest


def above_rounding(noise: Tensor, moments: Tensor) -> Tensor:
    """Return moments ``[rows, k, k]``, replaced by 0 if they can be explained by rounding."""
    size = moments.detach().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    return torch.where((size > _NOISE * noise)[:, None, None], moments, 0.0)


def principal_axes(moments: Tensor, gap: float) -> tuple[Tensor, Tensor]:
    """Return eigenvectors by descending eigenvalue, and the mask of those that are determined.

    Adjacent eigenvalues λ ≥ μ count as equal unless λ - μ > gap sqrt(λ₁ λ), where λ₁ is the largest of the matrix: a
    rounding error ε of coordinates rotates the eigenvectors by about ε sqrt(λ₁ λ) / (λ - μ).

    ``moments`` ``[rows, k, k]`` are positive semidefinite and float64. The eigenvectors are columns ``[rows, k, k]``.
    The mask ``[rows, k]`` is true if an eigenvalue differs from both neighbors. The first and second derivatives of
    these eigenvectors are correct.
    """
    values, axes = torch.linalg.eigh(moments.detach())
    values, axes = values.flip(-1).clamp(min=0), axes.flip(-1)
    open_gap = -values.diff(dim=-1) > gap * (values[:, :1] * values[:, :-1]).sqrt()
    edge = torch.ones_like(open_gap[:, :1]) if open_gap.shape[1] else values > -1
    isolated = torch.cat([edge, open_gap], dim=-1) & torch.cat([open_gap, edge], dim=-1)
    if moments.shape[-1] == 1:
        isolated = values > 0
    if moments.requires_grad or transformed():
        for _ in range(2):  # each step makes at least one more order of derivatives correct
            axes = _refined(moments, axes, isolated)
    return axes, isolated


class Completed(NamedTuple):
    """Orthonormal axes of rows, and where they jump if the points are displaced.

    ``axes`` ``[rows, k, k]`` are differentiable as long as the points lie on as many axes, and the same point is the
    farthest. ``across`` ``[rows, k, k]`` projects on the space of all axes that no candidate determines, if it has two
    dimensions or more: any displacement into it determines them. Otherwise it is 0. ``tied`` ``[rows]`` is the number
    of axes found when several candidates in different directions were equally far, or -1.
    """

    axes: Tensor
    across: Tensor
    tied: Tensor


def completed_axes(
    axes: Tensor, isolated: Tensor, rows: Tensor, candidates: Sequence[Candidates], error: Tensor | float = 0.0
) -> Completed:
    """Return axes: isolated ones first, then axes to the farthest candidates.

    Each set of candidates is used for those of the ``rows`` ``[rows]`` in which the previous set determines no axis.
    ``error`` ``[rows]`` is the angle by which rounding turns isolated axes, so that candidates on them seem to lie
    beside them.
    """
    k = axes.shape[-1]
    order = (~isolated).long().argsort(dim=-1, stable=True)
    axes = axes.gather(-1, order[:, None].expand_as(axes))
    number = isolated.sum(-1)
    columns: list[Tensor] = []
    across, tied = torch.zeros_like(axes.detach()), torch.full_like(number, -1)
    error = torch.as_tensor(error, dtype=axes.dtype, device=axes.device).expand(len(rows))
    for m in range(k):
        found = torch.stack(columns, dim=-1) if columns else axes[..., :0]
        column = axes[..., m]
        open_rows = (m >= number).nonzero()[:, 0]
        for level, candidate in enumerate(candidates):
            if len(open_rows) == 0:
                break
            least = 0.0 if level == len(candidates) - 1 else _ON_AXIS
            parts = rows[open_rows], found[open_rows], least, error[open_rows]
            directions, known, several = _farthest(candidate, *parts)
            column = column.index_put((open_rows[known],), directions[known])
            if m < k - 1:  # the last axis is determined by the others, up to its sign
                tied[open_rows[several]] = torch.where(tied[open_rows[several]] < 0, m, tied[open_rows[several]])
            open_rows = open_rows[~known]
        if m < k - 1:
            new = open_rows[~across[open_rows].flatten(1).any(1)]
            known = found[new].detach()
            rest = torch.eye(k, dtype=axes.dtype, device=axes.device) - known @ known.mT
            across = across.index_add(0, new, rest)
        columns.append(column.index_put((open_rows,), _any_across(found[open_rows])))
    return Completed(torch.stack(columns, dim=-1), across, tied)


def _refined(moments: Tensor, axes: Tensor, isolated: Tensor) -> Tensor:
    """Return axes after a step toward the eigenvectors with isolated eigenvalues (Ogita, Aishima 2018, Algorithm 1).

    The step converges quadratically if all are isolated, otherwise by one order. It can be differentiated everywhere;
    the derivatives of ``torch.linalg.eigh`` in ``torch.func`` are NaN where reverse mode follows forward mode.
    """
    unit = torch.eye(axes.shape[-1], dtype=axes.dtype, device=axes.device)
    turns = (isolated[:, :, None] | isolated[:, None, :]) & (unit == 0)
    gram, seen = axes.mT @ axes, axes.mT @ moments @ axes
    value = (seen.diagonal(dim1=-2, dim2=-1) / gram.diagonal(dim1=-2, dim2=-1))[..., None, :]
    excess = unit - gram
    turned = (seen + value * excess) / torch.where(turns, value - value.mT, 1.0)
    return axes + axes @ torch.where(turns, turned, excess / 2)


def _farthest(
    candidates: Candidates, rows: Tensor, found: Tensor, least: float, error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit vectors ``[rows, k]`` to the farthest candidates, perpendicular to the axes found, and two masks.

    The masks of rows have a farthest candidate, and several of them in different directions.
    """
    numbers, masks, ties, start = [], [], [], 0
    with torch.no_grad():  # only the chosen candidates need derivatives
        for number, place, noise in candidates.of(rows):
            part, start = slice(start, start + len(noise)), start + len(noise)
            vectors = candidates.seen(number, rows[part][place])
            first, known, several = _first_farthest(vectors, place, noise, found[part], least, error[part])
            numbers.append(number[first[known]])
            masks.append(known)
            ties.append(several)
    known = torch.cat(masks)
    chosen = found.new_zeros(found.shape[:2])
    chosen = chosen.index_put((known.nonzero()[:, 0],), candidates.seen(torch.cat(numbers), rows[known]))
    # The second pass removes the components along the axes that rounding has left.
    chosen = _across(_across(chosen, found), found)
    norm = torch.linalg.vector_norm(torch.where(known[:, None], chosen, 1.0), dim=-1, keepdim=True)
    return chosen / norm, known, torch.cat(ties)


def _first_farthest(
    vectors: Tensor, row: Tensor, noise: Tensor, found: Tensor, least: float, error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the place of the first of the farthest vectors of each row, and the masks of :func:`_farthest`."""
    rows = len(found)
    across = _across(vectors, found[row])
    length = torch.linalg.vector_norm(across, dim=-1)
    extent = _largest(torch.linalg.vector_norm(vectors, dim=-1), row, rows)
    farthest = _largest(length, row, rows)
    margin = TIE_TOLERANCE * farthest + _NOISE * noise
    tied = length >= (farthest - margin)[row]
    place = torch.arange(len(row), device=row.device)
    first = torch.full((rows,), len(row), dtype=torch.int64, device=row.device)
    first.scatter_reduce_(0, row[tied], place[tied], "amin")
    known = farthest > torch.maximum(least * extent, _NOISE * torch.maximum(noise, error * extent))
    apart = torch.linalg.vector_norm(across[tied] - across[first[row[tied]]], dim=-1)
    return first, known, known & (_largest(apart, row[tied], rows) > 2 * margin)


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


def _largest(sizes: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the largest of the sizes ``[n]`` of each row, ``[rows]``, or 0. It takes a third of the time of maxima."""
    return sizes.new_zeros(rows).scatter_reduce(0, row, sizes, "amax")


# --- second derivatives that do not exist ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # no tuple, which torch.func would take apart
class Jumps:
    """Displacements of points at which axes jump, and why they do, in words.

    ``matrices`` ``[points, dim, dim]`` float64 are 0 on all other displacements. ``undefined`` ``[points]`` bool is
    whether axes are arbitrary without a displacement, so that there are not even second derivatives to one side.
    """

    matrices: Tensor
    undefined: Tensor
    reason: str


def differentiable_once(axes: Tensor, pos: Tensor, jumps: Jumps) -> Tensor:
    """Return axes ``[*]``, whose derivatives refuse to be differentiated by the positions ``[points, dim]``.

    ValueError is raised if a second derivative by displacements at which axes jump is computed, except by
    ``backward()``, which differentiates by all leaves of the graph. In training on forces, nobody reads the derivatives
    by the positions, and those by the weights are correct. So the former become NaN where they are undefined.
    """
    return cast(Tensor, _Once.apply(axes, pos, jumps))


class _Once(torch.autograd.Function):
    """The identity of axes. Zeros that depend on the positions are added to its derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(axes: Tensor, pos: Tensor, jumps: Jumps) -> Tensor:
        return axes.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.jumps = inputs[2]
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *by_axes: Any) -> Any:
        return by_axes[0], _zeros(ctx.saved_tensors[0], None, ctx.jumps), None

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> Any:
        axes, pos = ctx.saved_tensors
        return (torch.zeros_like(axes) if along[0] is None else along[0]) + _zeros(pos, along[1], ctx.jumps).sum()


def _zeros(pos: Tensor, along: Tensor | None, jumps: Jumps) -> Tensor:
    leaf = None if transformed() else torch.zeros((), requires_grad=True).clone()
    return cast(Tensor, _Zeros.apply(pos, along, leaf, jumps))


class _Zeros(torch.autograd.Function):
    """Zeros like the positions, which cannot be differentiated by them.

    ``along`` is the first displacement in forward mode. Only ``backward()`` executes the node of the ``leaf``.
    """

    @staticmethod
    def forward(pos: Tensor, along: Tensor | None, leaf: Tensor | None, jumps: Jumps) -> Tensor:
        return torch.zeros_like(pos)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])
        ctx.node, ctx.jumps = None if inputs[2] is None else inputs[2].grad_fn, inputs[3]

    @staticmethod
    def backward(ctx: Any, *second: Any) -> Any:
        along = second[0] if ctx.saved_tensors[0] is None else ctx.saved_tensors[0]
        return _second_derivative(along, ctx.jumps, accumulates(ctx.node)), None, None, None

    @staticmethod
    def jvp(ctx: Any, *second: Any) -> Any:
        return _second_derivative(second[0] if ctx.saved_tensors[0] is None else ctx.saved_tensors[0], ctx.jumps)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _Zeros.apply(*inputs), None  # vmap maps over displacements only


def _second_derivative(along: Tensor | None, jumps: Jumps, unread: bool = False) -> Tensor | None:
    if along is None:
        return None
    found = None if is_mapped(along) else _jumping(along.detach(), jumps.matrices)
    if found is not None and (unread or not bool(found.any())):
        return torch.where((found & jumps.undefined)[..., None], torch.nan, torch.zeros_like(along))
    raise ValueError(f"pos: second derivatives cannot be computed here, because {jumps.reason}; use FiniteFrames")


@outside_of_transforms
def _jumping(along: Tensor, matrices: Tensor) -> Tensor:
    """Return the mask ``[*, points]`` of displacements ``[*, points, dim]`` at which axes jump."""
    change = (matrices @ along[..., : matrices.shape[-1], None].double())[..., 0]
    return change.abs().amax(-1) > TIE_TOLERANCE * along.double().abs().amax()
