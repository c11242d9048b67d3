"""Fields of any type into and out of models on the group."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lieattn._checks import kind
from lieattn.groups import FiniteGroup
from lieattn.reps import Representation, check_orthogonal, check_representation, is_orthogonal


class HasFrames(Protocol):
    """A lifted graph: what knows the frames over its points."""

    @property
    def frames(self) -> Tensor:
        """Matrices ``[fiber, dim, dim]``, or ``[points, fiber, dim, dim]``."""


Frames = Tensor | FiniteGroup | HasFrames


def lift_field(values: Tensor, frames: Frames, rep: Representation) -> Tensor:
    r"""Lift a field on the points to the group: its components as every frame sees them.

    .. math::  F(x, h) = \rho(h)^{-1} v(x)

    The result is a field of ``rep.dim`` invariant channels, and any layer may work on them.

    **Equivariance.** If points and frames are turned by R and v is a field of type ρ, then v(R x) = ρ(R) v(x) is
    lifted to the same channels at the turned frames: for a finite group, F is translated by the left regular
    representation.

    Parameters
    ----------
    values
        v ``[points, rep.dim]``, in any unit, which the channels keep: velocities, charges, external fields.
    frames
        The linear parts h of the frames: orthogonal matrices ``[fiber, dim, dim]`` for the same frames over all
        points or ``[points, fiber, dim, dim]``; or a finite group; or a lifted graph, which has ``frames``. Frames
        that scale too are taken where ρ is defined for them (:attr:`lieattn.reps.Representation.orthogonal_only`).
    rep
        ρ, for example ``Vector(3)`` or ``Scalar() + 2 * Vector(3)``.

    Returns
    -------
    Tensor
        F ``[points, fiber, rep.dim]``; float32 at least, also under autocast.

    Raises
    ------
    TypeError, ValueError
        If shapes, dtypes or devices do not fit, or frames are not orthogonal where they must be.
    """
    check_representation("rep", rep)
    matrices = _frame_matrices(frames, values)
    _check_values(values, ("points", rep.dim))
    _check_frames(matrices, values, rep)
    return rep.act(_inverse(matrices, rep), values[:, None])


def project_field(values: Tensor, frames: Frames, rep: Representation) -> Tensor:
    r"""Project a field on the group to a field of type ρ on the points.

    .. math::  v(x) = \frac{1}{n} \sum_h \rho(h) F(x, h)

    ``project_field(lift_field(v)) == v`` up to rounding, for any frames.

    **Equivariance.** If points and frames are turned by R and F is the same at the turned frames, the result is
    ρ(R) v: exactly for finite groups and for frames that turn with the points; in distribution for frames drawn at
    random.

    Parameters
    ----------
    values
        F ``[points, fiber, rep.dim]``.
    frames, rep
        See :func:`lift_field`.

    Returns
    -------
    Tensor
        v ``[points, rep.dim]``; float32 at least, also under autocast.

    Raises
    ------
    TypeError, ValueError
        As :func:`lift_field`.
    """
    check_representation("rep", rep)
    matrices = _frame_matrices(frames, values)
    _check_values(values, ("points", matrices.shape[-3], rep.dim))
    _check_frames(matrices, values, rep)
    return rep.act(matrices, values).mean(dim=1)


def _frame_matrices(frames: Frames, values: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError(f"values: expected a floating tensor, got {kind(values)}")
    if isinstance(frames, FiniteGroup):
        return frames.elements.to(values.device)
    matrices = frames if isinstance(frames, Tensor) else getattr(frames, "frames", None)
    if not isinstance(matrices, Tensor) or not matrices.is_floating_point():
        raise TypeError(f"frames: expected floating matrices, a finite group or a lifted graph, got {kind(frames)}")
    if matrices.ndim not in (3, 4) or matrices.shape[-1] != matrices.shape[-2] or matrices.shape[-3] == 0:
        raise ValueError(
            f"frames: expected [fiber, dim, dim] or [points, fiber, dim, dim] with at least one frame, got "
            f"{tuple(matrices.shape)}"
        )
    return matrices


def _check_values(values: Tensor, expected: tuple[str | int, ...]) -> None:
    shape = tuple(values.shape)
    if len(shape) != len(expected) or shape[1:] != expected[1:]:
        raise ValueError(f"values: expected [{', '.join(map(str, expected))}], got {shape}")


def _check_frames(matrices: Tensor, values: Tensor, rep: Representation) -> None:
    if matrices.device != values.device:
        raise ValueError(f"frames: are on {matrices.device}, values on {values.device}")
    if matrices.ndim == 4 and len(matrices) != len(values):
        raise ValueError(f"frames: expected those of {len(values)} points as in values, got {tuple(matrices.shape)}")
    if rep.space_dim not in (None, matrices.shape[-1]):
        raise ValueError(
            f"frames: {rep.name} takes matrices of {rep.space_dim} dimensions, got {tuple(matrices.shape)}"
        )
    if rep.orthogonal_only:
        check_orthogonal("frames", matrices)


def _inverse(matrices: Tensor, rep: Representation) -> Tensor:
    if rep.orthogonal_only or is_orthogonal(matrices):
        return matrices.mT
    try:
        return torch.linalg.inv(matrices.to(torch.float64))
    except RuntimeError as error:
        raise ValueError("frames: expected invertible matrices, but at least one is singular") from error
