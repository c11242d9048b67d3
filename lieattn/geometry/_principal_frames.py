"""Frames that rotate with the data: principal axes of the cloud, or of the neighborhood of each point."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lieattn._autocast import without_autocast
from lieattn._checks import check_arguments, check_count, check_flag, check_is, check_length
from lieattn._default_device import on_cpu
from lieattn._functional import outside_of_transforms, transformed
from lieattn._segments import sums
from lieattn._warnings import warn
from lieattn.geometry._clouds import PointClouds, members, point_weights, ranges
from lieattn.geometry._frames import GroupFrames, Sites, keeps_lengths
from lieattn.geometry._search import TIE_TOLERANCE
from lieattn.groups import SO, FiniteGroup, Group, O, RotationDilations, check_group, cyclic, dihedral_about
from lieattn.spaces import HomogeneousSpace


class DegenerateFramesWarning(UserWarning):
    """Warning that some principal axes are not determined by the second moments, and were replaced."""


@dataclass(frozen=True)
class PrincipalFrames:
    r"""Principal axes as frames, with all choices of their signs as the fiber. They are exact for rigid motions.

    The frames over a point are :math:`V \operatorname{diag}(\pm 1, ..., \pm 1)`. The columns of V are the eigenvectors
    of the moments :math:`M = \sum_j w_j (x_j - c)(x_j - c)^T / \sum_j w_j`, by descending eigenvalue. With
    ``of="cloud"``, the sum runs over the cloud, and c is its weighted mean. With ``of="neighborhood"``, it runs over
    the neighbors of a point, and c is the point itself. The fiber consists of 2^(d-1) proper frames (4 in space, 2 in
    the plane), or of all 2^d frames if the group contains reflections. If the stabilizer contains dilations, as for
    ``Sim(d)``, frames are multiplied by the root mean square radius :math:`\sqrt{\operatorname{tr} M}`. At points
    of a sphere or an orbit, frames are orthogonal to the direction of the point: M is projected accordingly, and c is
    the origin if ``of="cloud"``.

    **Equivariance.** Exact: rotating and shifting a cloud rotates and shifts the set of its frames. The order of the
    frames in the fiber may change, and with ``of="neighborhood"`` differently at each point. Later layers must not
    depend on this order; attention in the joint pattern and sums over the fiber do not. The error is of the size of
    rounding divided by the ``gap``.

    **Degenerate moments.** Eigenvectors are not determined if eigenvalues coincide, and jump where they cross. Two
    adjacent eigenvalues λ ≥ μ count as equal if λ - μ < ``gap`` sqrt(λ₁ λ), where λ₁ is the largest. A
    :class:`DegenerateFramesWarning` is then issued, and the undetermined axes are replaced one after the other. Each
    new axis points to the point that is farthest from the center, measured perpendicular to the axes found so far. Of
    several equally far points, the first one is chosen. With ``of="neighborhood"``, the neighbors are tried first, then
    all points of the cloud. If all of these lie on the axes found (points on a line, or at one place), the longest of
    the ``vectors`` passed to :func:`lift` is used. If these lie on the axes as well, the new axis is arbitrary, but a
    function of the others.

    Networks remain exact for rigid motions in this case. An arbitrary axis is orthogonal to the displacements of all
    points, so none has a component along it, and it cancels out of vector outputs, since the fiber contains it with
    both signs. Only components of higher tensors along it are undetermined. Outputs may depend on the order of the
    points, however, if several points are equally far. With ``of="cloud"``, invariant outputs of a cloud do not if a
    symmetry of the cloud in the group exchanges these points. Frames are also discontinuous where a difference of
    eigenvalues reaches the gap, and where another point becomes the farthest. Points that are closer together than the
    rounding of their coordinates count as one point.

    **Derivatives.** They are correct wherever frames are continuous: to all orders where no moments are degenerate (in
    ``torch.func`` and forward mode, to the seventh), and to first order elsewhere.

    :func:`lift` raises ValueError if some frames do not belong to the stabilizer, or if clouds are periodic and
    ``of="cloud"``.

    Parameters
    ----------
    of
        ``"cloud"`` if all points of a cloud have the same frames, or ``"neighborhood"`` if the frames of each point are
        computed from its neighbors.
    improper
        Whether to include improper frames. If None, they are included if the stabilizer contains reflections.
    gap
        Relative difference below which eigenvalues count as equal, see above.
    cutoff
        Distance at which the weights (1 - (r / cutoff)²)² of neighbors vanish. With the radius of the neighborhood as
        cutoff, frames do not jump when a point enters the neighborhood. If None, all neighbors have the same weight.
    """

    of: Literal["cloud", "neighborhood"] = "cloud"
    improper: bool | None = None
    gap: float = 1e-2
    cutoff: float | None = None

    def __post_init__(self) -> None:
        check_arguments(PrincipalFrames, vars(self))
        if not 0 < self.gap < 1:
            raise ValueError(f"gap: expected a number between 0 and 1, got {self.gap}")
        if self.cutoff is not None:
            check_length("cutoff", self.cutoff)
            if self.of == "cloud":
                raise ValueError("cutoff: expected None, since these are frames of clouds, not of neighborhoods")

    def __call__(self, sites: Sites) -> Tensor | GroupFrames:
        """Return signs and axes of each cloud, or frames ``[points, fiber, k, k]`` of each point."""
        check_is("sites", sites, Sites)
        clouds, group = sites.clouds, sites.stabilizer
        signs = _signs(group, self.improper)
        with without_autocast(clouds.device):
            data = self._data(sites)
            axes, isolated = principal_axes(data.moments, self.gap)
            rows = (~isolated.all(-1)).nonzero()[:, 0]
            if len(rows):
                _warn(self, data.moments[rows])
                axes = axes.index_put((rows,), completed_axes(axes[rows], isolated[rows], rows, data.candidates))
            improper = torch.linalg.det(axes.detach()) < 0
            axes = torch.cat([axes[..., :-1], torch.where(improper[:, None, None], -1.0, 1.0) * axes[..., -1:]], dim=-1)
            if isinstance(group, RotationDilations):
                squared = data.moments.diagonal(dim1=-2, dim2=-1).sum(-1)
                if sites.vectors is not None:
                    own = clouds.mean(sites.vectors.double().square().sum((1, 2)))
                    squared = torch.where(squared > 0, squared, own[clouds.batch] if data.per_point else own)
                axes = axes * torch.where(squared > 0, squared, 1.0).sqrt()[:, None, None]
            if not data.per_point:
                return GroupFrames(signs, axes.to(clouds.pos.dtype)[clouds.batch])
            return (axes[:, None] @ signs.matrices(axes)).to(clouds.pos.dtype)

    def check_pose(self, group: FiniteGroup) -> None:
        """Raise ValueError unless these axes can be the pose of :class:`FiniteFrames` of a group."""
        check_group("group", group)
        proper = group.is_proper
        if self.of != "cloud" or self.improper not in (None, not proper):
            raise ValueError(f"pose: expected principal axes of clouds, PrincipalFrames(), got {self}")
        signs = sign_group(group.dim, improper=not proper).elements
        distance = (group.elements[:, None] - signs).abs().amax(dim=(2, 3)).amin(dim=0)
        if distance.max() > 1e-9:
            missing = f"{group.name} does not contain all {'proper ' if proper else ''}diagonal matrices of signs"
            raise ValueError(f"pose: principal axes are determined up to signs, but {missing}")

    def degenerate(self, sites: Sites) -> Tensor:
        """Return the mask ``[points]`` bool of points whose axes second moments do not determine, without a warning."""
        check_is("sites", sites, Sites)
        data = self._data(sites)
        vague = ~principal_axes(data.moments.detach(), self.gap)[1].all(-1)
        return vague if data.per_point else vague[sites.clouds.batch]

    def _data(self, sites: Sites) -> _Data:
        clouds, group = sites.clouds, sites.space.group
        if self.cutoff is not None and not keeps_lengths(group):
            raise ValueError(f"cutoff: expected None, since {group.name} does not preserve lengths")
        ones = torch.ones(clouds.num_points, dtype=torch.float64, device=clouds.device)
        weights = ones if sites.weights is None else point_weights(sites.weights, clouds.pos)
        pos = clouds.pos[:, : group.dim].double()
        basis = _local_basis(sites.space, sites.stabilizer, clouds.pos)
        # Rounding error of the coordinates of each cloud.
        noise = _rounding(clouds.pos.dtype, clouds.pos, clouds.batch, clouds.num_clouds)
        if self.of == "cloud":
            if clouds.cell is not None:
                raise ValueError("of: periodic clouds have no center; use PrincipalFrames(of='neighborhood')")
            centered = _centered(pos, weights, clouds.batch, clouds.num_clouds)
            pos = centered if group.is_affine else pos
            around = pos if basis is None else centered
            moments = _mean(around[:, :, None] * around[:, None, :], weights, clouds.batch, clouds.num_clouds)
            candidates, own = [_grouped(pos, clouds.batch, noise)], noise
            if basis is not None:
                # The mean is added after the projection. Before it, rounding of the mean would hide small clouds.
                mean = basis.mT @ (pos - centered)[..., None]
                moments, own = basis.mT @ moments[clouds.batch] @ basis + mean @ mean.mT, noise[clouds.batch]
                candidates = [_of_clouds(clouds, pos, clouds.batch, noise, basis)]
            per_point = basis is not None
            candidates += _input_vectors(sites, basis, per_point=per_point)
            return _Data(_above(own, moments), candidates, per_point=per_point)
        target, seen = sites.neighbors.target, sites.neighbors.displacements(pos)
        weights = weights[sites.neighbors.source]
        if self.cutoff is not None:
            weights = weights * (1 - seen.square().sum(-1) / self.cutoff**2).clamp(min=0).square()
        if basis is not None:
            seen = (basis.mT[target] @ seen[..., None])[..., 0]
        moments = _mean(seen[:, :, None] * seen[:, None, :], weights, target, clouds.num_points)
        # Points beyond the cutoff must not determine axes either.
        own = noise[clouds.batch]
        candidates = [_grouped(seen[weights > 0], target[weights > 0], own)]
        if clouds.cell is None:
            candidates.append(_of_clouds(clouds, pos, clouds.batch, noise, basis, center=pos))
        candidates += _input_vectors(sites, basis, per_point=True)
        return _Data(_above(own, moments), candidates, per_point=True)


@dataclass(frozen=True, eq=False)
class _Data:
    """Float64 moments ``[rows, k, k]`` for the axes, and candidates for axes that these do not determine."""

    moments: Tensor
    candidates: list[Candidates]
    per_point: bool


def _rounding(dtype: torch.dtype, numbers: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the rounding error ``[rows]`` of numbers ``[n, *]`` of a dtype, each of which belongs to a row."""
    largest = _largest(numbers.detach().double().abs().flatten(1).amax(1), row, rows)
    return 2 * torch.finfo(dtype).eps * largest


def _above(noise: Tensor, moments: Tensor) -> Tensor:
    """Return moments ``[rows, k, k]``, replaced by 0 if they can be explained by rounding."""
    size = moments.detach().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    return torch.where((size > _NOISE * noise)[:, None, None], moments, 0.0)


def _grouped(vectors: Tensor, row: Tensor, noise: Tensor) -> Candidates:
    """Return candidates for axes from vectors, each of which belongs to one row."""

    def of(rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        place = torch.full((len(noise),), -1, dtype=torch.int64, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        kept = (place[row] >= 0).nonzero()[:, 0]
        yield kept, place[row[kept]], noise[rows]

    return Candidates(of, lambda number, rows: vectors[number])


def _of_clouds(
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


def _input_vectors(sites: Sites, basis: Tensor | None, *, per_point: bool) -> list[Candidates]:
    """Return candidates for axes of clouds or points from the input vectors, or an empty list if there are none."""
    given, clouds = sites.vectors, sites.clouds
    if given is None or given.numel() == 0:
        return []
    noise = _rounding(given.dtype, given, clouds.batch, clouds.num_clouds)
    vectors, cloud = given.double().flatten(0, 1), clouds.batch.repeat_interleave(given.shape[1])
    if per_point:
        return [_of_clouds(clouds, vectors, cloud, noise, basis)]
    return [_grouped(vectors, cloud, noise)]


def _mean(numbers: Tensor, weights: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return weighted means ``[rows, *]`` of numbers ``[n, *]`` that belong to one row each; 0 for empty rows."""
    weighted = numbers * weights.reshape(-1, *[1] * (numbers.ndim - 1))
    total = sums(weights, row, rows)
    return sums(weighted, row, rows) / torch.where(total > 0, total, 1.0).reshape(-1, *[1] * (numbers.ndim - 1))


def _centered(pos: Tensor, weights: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return positions ``[n, dim]`` relative to the weighted mean of their row.

    The mean is computed relative to a place next to the points. Otherwise, rounding errors of the sum grow with the
    number of points, and move the mean of many points at one place away from there.
    """
    index = row[:, None].expand_as(pos)
    place = pos.new_zeros(rows, pos.shape[1]).scatter_reduce(0, index, pos.detach(), "amax", include_self=False)
    pos = pos - place[row]
    return pos - _mean(pos, weights, row, rows)[row]


@on_cpu
def _local_basis(space: HomogeneousSpace, group: Group, points: Tensor) -> Tensor | None:
    """Return the columns ``[points, dim, k]`` of the section on which frames act, or None if they act on all."""
    dim, k = space.group.dim, group.dim
    turn = _generic_rotation(k)
    found = space.group.linear(space.embed(turn))
    expected = torch.block_diag(torch.eye(dim - k, dtype=turn.dtype), turn)
    if not torch.allclose(found, expected):
        what = f"in {space.name}, {group.name} does not act only on the last {k} of {dim} coordinates"
        raise ValueError(f"frames: {what}, so principal axes are not defined here; use GivenFrames")
    return None if k == dim else space.group.linear(space.section(points))[..., -k:].double()


def _signs(group: Group, improper: bool | None) -> FiniteGroup:
    """Return the sign matrices by which axes are multiplied."""
    if isinstance(group, FiniteGroup):
        return sign_group(group.dim, improper=not group.is_proper)
    # Test the class, since a user-defined group need not define which elements belong to it.
    if not isinstance(group, SO | O | RotationDilations):
        groups = "SO(d), O(d) or R+xSO(d)"
        raise ValueError(f"frames: principal axes are elements of {groups}, not of {group.name}; use GivenFrames")
    if improper and not isinstance(group, O):
        raise ValueError(f"improper: {group.name} has no improper elements")
    return sign_group(group.dim, improper=isinstance(group, O) and improper is not False)


@cache
@outside_of_transforms
@on_cpu
def sign_group(dim: int, *, improper: bool = False) -> FiniteGroup:
    """Return the group of diagonal sign matrices with determinant 1, or of all of them if ``improper``.

    Principal axes are determined up to multiplication by this group.
    """
    check_count("dim", dim)
    check_flag(improper=improper)
    if not improper and dim in (2, 3):
        return cyclic(2) if dim == 2 else dihedral_about(2)
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=dim)), dtype=torch.float64)
    chosen = signs if improper else signs[signs.prod(-1) > 0]
    return FiniteGroup.from_matrices(torch.diag_embed(chosen), f"signs{dim}{'i' if improper else ''}")


@cache
@outside_of_transforms
@on_cpu
def _generic_rotation(k: int) -> Tensor:
    skew = torch.linspace(0.3, 0.7, k * k, dtype=torch.float64).reshape(k, k)
    return torch.linalg.matrix_exp(skew - skew.T)


def _warn(frames: PrincipalFrames, moments: Tensor) -> None:
    """Issue the warning, unless all these moments vanish, since points at one place need no axes."""
    if bool((moments.detach() != 0).any()):
        what = f"some eigenvalues of the second moments are closer together than gap={frames.gap:g}, so axes point to "
        what += "the farthest points; they may jump, and may depend on the order of points"
        warn(f"{frames}: {what}", DegenerateFramesWarning)


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
