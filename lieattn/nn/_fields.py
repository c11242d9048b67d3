"""Conversion of fields of any type to fields on the group."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_tensor
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup, Group
from lieattn.reps import Representation, check_orthogonal, check_representation, is_orthogonal

FrameMatrices = Tensor | FiniteGroup | LiftedGraph  # frames, or objects that have frames


def lift_field(
    values: Float[Tensor, "points channels"], frames: FrameMatrices, rep: Representation
) -> Float[Tensor, "points fiber channels"]:
    r"""Lift a field on the points to the group: compute its components in every frame.

    .. math::  F(x, h) = \rho(h)^{-1} v(x)

    The result is a field ``[points, fiber, rep.dim]`` of invariant channels. Its dtype is at least float32, also under
    autocast. TypeError or ValueError is raised if shapes, dtypes or devices do not fit, or if frames are not orthogonal
    although ρ requires it.

    **Equivariance.** If R acts on points and frames, the field v(R x) = ρ(R) v(x) has the same channels in the rotated
    frames. For a finite group, F is translated by the left regular representation.

    Parameters
    ----------
    values
        v ``[points, rep.dim]``, in any unit. The channels have the same unit.
    frames
        Linear parts h of the frames: orthogonal matrices ``[fiber, dim, dim]``, if all points have the same frames, or
        ``[points, fiber, dim, dim]``; or a finite group; or a lifted graph, which has ``frames``. Frames with scaling
        are accepted if ρ is defined for them (:attr:`lieattn.reps.Representation.orthogonal_only`).
    rep
        Representation ρ, for example ``Vector(3)`` or ``Scalar() + 2 * Vector(3)``.
    """
    matrices = _frame_matrices(values, frames, rep, lifted=False)
    return rep.act_unchecked(_inverse(matrices, frames, rep), values[:, None])


def project_field(
    values: Float[Tensor, "points fiber channels"], frames: FrameMatrices, rep: Representation
) -> Float[Tensor, "points channels"]:
    r"""Project a field on the group to a field of type ρ on the points.

    .. math::  v(x) = \frac{1}{n} \sum_h \rho(h) F(x, h)

    ``values`` are F. ``project_field(lift_field(v)) == v`` up to rounding, for any frames.
    See :func:`lift_field` for the other arguments and for exceptions.

    **Equivariance.** If R acts on points and frames and F is the same in the rotated frames, the result is ρ(R) v. For
    random frames this holds in distribution.
    """
    check_representation("rep", rep)
    return rep.act_unchecked(_frame_matrices(values, frames, rep, lifted=True), values).mean(dim=1)


def _frame_matrices(values: Tensor, frames: FrameMatrices, rep: Representation, *, lifted: bool) -> Tensor:
    check_representation("rep", rep)
    check_tensor("values", values, "a floating tensor")
    if isinstance(frames, FiniteGroup):
        matrices = frames.matrices(values.new_empty(0, dtype=torch.float64))
    else:
        matrices = frames if isinstance(frames, Tensor) else cast(Tensor, getattr(frames, "frames", frames))
        check_tensor("frames", matrices, "floating matrices, a finite group or a lifted graph")
    given = tuple(matrices.shape)
    if len(given) not in (3, 4) or given[-1] != given[-2] or given[-3] == 0:
        expected = "[fiber, dim, dim] or [points, fiber, dim, dim] with at least one frame"
        raise ValueError(f"frames: expected {expected}, got {given}")
    shape = (given[-3], rep.dim) if lifted else (rep.dim,)
    if values.ndim != len(shape) + 1 or values.shape[1:] != shape:
        raise ValueError(f"values: expected [points, {', '.join(map(str, shape))}], got {tuple(values.shape)}")
    if matrices.device != values.device:
        raise ValueError(f"frames: expected a tensor on {values.device} like values, got one on {matrices.device}")
    if len(given) == 4 and len(matrices) != len(values):
        raise ValueError(f"frames: expected frames of {len(values)} points as in values, got {given}")
    if isinstance(frames, LiftedGraph) and frames.num_points != len(values):  # all points may share their frames
        raise ValueError(f"values: expected a field on the {frames.num_points} points of the graph, got {len(values)}")
    if rep.space_dim not in (None, given[-1]):
        raise ValueError(f"frames: expected matrices of {rep.space_dim} dimensions for {rep.name}, got {given}")
    if rep.orthogonal_only and not _known_orthogonal(frames):
        check_orthogonal("frames", matrices)
    rep.check_domain("frames", matrices)
    return matrices


def _known_orthogonal(frames: FrameMatrices) -> bool:
    """Return whether the group of the frames tells, without reading their values, that they are orthogonal."""
    group = frames.space.group if isinstance(frames, LiftedGraph) else frames
    return isinstance(group, Group) and group.is_orthogonal is True


def _inverse(matrices: Tensor, frames: FrameMatrices, rep: Representation) -> Tensor:
    """Return the inverses of the matrices of frames; values are read only if their group does not tell enough."""
    if rep.orthogonal_only or _known_orthogonal(frames) or is_orthogonal(matrices):
        return matrices.mT
    try:
        return torch.linalg.inv(matrices.to(torch.float64))
    except RuntimeError as error:
        raise ValueError("frames: expected invertible matrices, but at least one is singular") from error
