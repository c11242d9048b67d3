"""Frames that rotate with the data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count, check_flag, check_is, check_length
from lieattn._core.contexts import outside_of_transforms, transformed, without_autocast
from lieattn._core.messages import warn
from lieattn._core.numerics import sums
from lieattn.geometry._clouds import point_weights
from lieattn.geometry._frames import CheckedFrames, GroupFrames, Sites
from lieattn.geometry._indices import first_true
from lieattn.geometry._principal_axes import (
    Candidates,
    Jumps,
    above_rounding,
    completed_axes,
    differentiable_once,
    principal_axes,
    rounding,
)
from lieattn.groups import FiniteGroup, Group, check_group, cyclic, dihedral_about
from lieattn.spaces import HomogeneousSpace


class DegenerateFramesWarning(UserWarning):
    """Warning that some principal axes are not determined by the second moments, and were replaced."""


@dataclass(frozen=True)
class PrincipalFrames(CheckedFrames):
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

    **Degenerate moments.** Two adjacent eigenvalues λ ≥ μ count as equal if λ - μ < ``gap`` sqrt(λ₁ λ), where λ₁ is
    the largest. A :class:`DegenerateFramesWarning` is then issued, and each undetermined axis points to the point that
    is farthest from the center, perpendicular to the axes found so far; of several equally far points, the first one
    is chosen. With ``of="neighborhood"``, the neighbors are tried first, then all points of the cloud. If all of these
    lie on the axes found, the longest of the ``vectors`` passed to :func:`lift` is used, and otherwise an arbitrary
    function of the other axes. Frames are discontinuous where eigenvalues cross and where another point becomes the
    farthest. docs/exactness.md says which outputs stay exact, and where second derivatives by the positions exist;
    elsewhere ``torch.func`` and ``torch.autograd.grad`` raise ValueError, and ``backward()`` returns NaN or derivatives
    to one side. First derivatives are correct wherever frames are continuous.

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
                completed = completed_axes(axes[rows], isolated[rows], rows, data.candidates, data.error[rows])
                axes = axes.index_put((rows,), completed.axes)
                if (axes.requires_grad or transformed()) and not torch.compiler.is_compiling():
                    cloud = clouds.batch[rows] if data.per_point else rows
                    jumps = _jumps(sites, completed.across, completed.tied, cloud)
                    axes = axes if jumps is None else differentiable_once(axes, clouds.pos, jumps)
            improper = torch.linalg.det(axes.detach()) < 0
            axes = torch.cat([axes[..., :-1], torch.where(improper[:, None, None], -1.0, 1.0) * axes[..., -1:]], dim=-1)
            if group.has_dilations:
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

    def degenerate(self, sites: Sites) -> Bool[Tensor, " points"]:
        """Return the mask ``[points]`` bool of points whose axes second moments do not determine, without a warning."""
        check_is("sites", sites, Sites)
        data = self._data(sites)
        vague = ~principal_axes(data.moments.detach(), self.gap)[1].all(-1)
        return vague if data.per_point else vague[sites.clouds.batch]

    def _data(self, sites: Sites) -> _Data:
        clouds, group = sites.clouds, sites.space.group
        if self.cutoff is not None and group.is_orthogonal is False:
            raise ValueError(f"cutoff: expected None, since {group.name} does not preserve lengths")
        ones = torch.ones(clouds.num_points, dtype=torch.float64, device=clouds.device)
        weights = ones if sites.weights is None else point_weights(sites.weights, clouds.pos)
        pos = clouds.pos[:, : group.dim].double()
        basis = _local_basis(sites.space, sites.stabilizer, clouds.pos)
        # Rounding error of the coordinates of each cloud.
        noise = rounding(clouds.pos.dtype, clouds.pos, clouds.batch, clouds.num_clouds)
        if self.of == "cloud":
            if clouds.cell is not None:
                raise ValueError("of: periodic clouds have no center; use PrincipalFrames(of='neighborhood')")
            centered = _centered(pos, weights, clouds.batch, clouds.num_clouds)
            pos = centered if group.is_affine else pos
            around = pos if basis is None else centered
            moments = _mean(around[:, :, None] * around[:, None, :], weights, clouds.batch, clouds.num_clouds)
            rows, own = None, noise
            if basis is not None:
                # The mean is added after the projection. Before it, rounding of the mean would hide small clouds.
                mean = basis.mT @ (pos - centered)[..., None]
                moments, rows = basis.mT @ moments[clouds.batch] @ basis + mean @ mean.mT, clouds.batch
                own = noise[rows]
            candidates = [Candidates(pos, clouds.batch, noise, rows, basis), *_input_vectors(sites, rows, basis)]
            return _Data(above_rounding(own, moments), candidates, rows is not None, own)
        target, seen = sites.neighbors.target, sites.neighbors.displacements(pos)
        weights = weights[sites.neighbors.source]
        if self.cutoff is not None:
            weights = weights * (1 - seen.square().sum(-1) / self.cutoff**2).clamp(min=0).square()
        if basis is not None:
            seen = (basis.mT[target] @ seen[..., None])[..., 0]
        moments = _mean(seen[:, :, None] * seen[:, None, :], weights, target, clouds.num_points)
        # Points beyond the cutoff must not determine axes either.
        own = noise[clouds.batch]
        candidates = [Candidates(seen[weights > 0], target[weights > 0], own)]
        if clouds.cell is None:
            candidates.append(Candidates(pos, clouds.batch, noise, clouds.batch, basis, center=pos))
        candidates += _input_vectors(sites, clouds.batch, basis)
        return _Data(above_rounding(own, moments), candidates, True, own)


@dataclass(frozen=True, eq=False)
class _Data:
    """Float64 moments ``[rows, k, k]`` for the axes, and candidates for axes that these do not determine.

    ``noise`` ``[rows]`` is the rounding error of the coordinates.
    """

    moments: Tensor
    candidates: list[Candidates]
    per_point: bool
    noise: Tensor

    @property
    def error(self) -> Tensor:
        """Angle ``[rows]`` by which rounding turns the first axis; 0 if there is none."""
        size = self.moments.detach().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        return torch.where(size > 0, self.noise / torch.where(size > 0, size, 1.0), 0.0)


def _input_vectors(sites: Sites, rows: Tensor | None, basis: Tensor | None) -> list[Candidates]:
    """Return candidates from the input vectors, if there are any; ``rows`` are the clouds of points, or None."""
    given, clouds = sites.vectors, sites.clouds
    if given is None or given.numel() == 0:
        return []
    noise = rounding(given.dtype, given, clouds.batch, clouds.num_clouds)
    vectors, cloud = given.double().flatten(0, 1), clouds.batch.repeat_interleave(given.shape[1])
    return [Candidates(vectors, cloud, noise, rows, basis)]


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


@outside_of_transforms
def _jumps(sites: Sites, across: Tensor, tied: Tensor, cloud: Tensor) -> Jumps | None:
    """Return where axes jump whose rows belong to these clouds, see :class:`Completed`, or None if they do not."""
    clouds, group, k = sites.clouds, sites.space.group, across.shape[-1]
    flat = group.dim == k
    rank = k - across.diagonal(dim1=-2, dim2=-1).sum(-1).round()
    # Displacements of n points span n - 1 dimensions beside a motion of all, and cannot leave as many axes.
    free = (rank < k) & (clouds.counts[cloud] - int(group.is_affine or not flat) > (rank if clouds.cell is None else 0))
    bad = free | (tied >= 0)
    if not bool(bad.any()):
        return None
    matrices = across.new_zeros(clouds.num_clouds, group.dim, group.dim)
    unit = torch.eye(group.dim, dtype=across.dtype, device=across.device)
    matrices = matrices.index_add(0, cloud[free], across[free] if flat else unit.expand(int(free.sum()), -1, -1))
    undefined = (matrices != 0).flatten(1).any(1)
    matrices = matrices.index_add(0, cloud[tied >= 0], unit.expand(int((tied >= 0).sum()), -1, -1))
    row = first_true(bad)
    found = int(rank[row] if free[row] else tied[row])
    why = "all its points lie on the others" if free[row] else "several of its points are equally far from the center"
    what = f"principal axes {found + 1} to {k} of cloud {int(cloud[row])} jump if it is deformed, since {why}"
    return Jumps(matrices[clouds.batch], undefined[clouds.batch], what)


def _signs(group: Group, improper: bool | None) -> FiniteGroup:
    """Return the sign matrices by which axes are multiplied."""
    if isinstance(group, FiniteGroup):
        return sign_group(group.dim, improper=not group.is_proper)
    if not group.has_rotations:
        groups = "SO(d), O(d) or R+xSO(d)"
        raise ValueError(f"frames: principal axes are elements of {groups}, not of {group.name}; use GivenFrames")
    if improper and not group.has_reflections:
        raise ValueError(f"improper: {group.name} has no improper elements")
    return sign_group(group.dim, improper=group.has_reflections and improper is not False)


@cache
@outside_of_transforms
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
def _generic_rotation(k: int) -> Tensor:
    skew = torch.linspace(0.3, 0.7, k * k, dtype=torch.float64).reshape(k, k)
    return torch.linalg.matrix_exp(skew - skew.T)


def _warn(frames: PrincipalFrames, moments: Tensor) -> None:
    """Issue the warning, unless all these moments vanish, since points at one place need no axes."""
    if bool((moments.detach() != 0).any()):
        what = f"some eigenvalues of the second moments are closer together than gap={frames.gap:g}, so axes point to "
        what += "the farthest points; they may jump, and may depend on the order of points"
        warn(f"{frames}: {what}", DegenerateFramesWarning)
