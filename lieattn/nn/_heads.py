"""Read-outs of any type: fields on the points, and vectors and tensors of whole clouds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_features
from lieattn.geometry import PointClouds
from lieattn.nn._fields import Frames, project_field
from lieattn.reps import Pseudovector, Representation, SymmetricTensor, Vector, check_representation


class FieldHead(nn.Module):
    r"""A field of any type on the points from a field on the group.

    .. math::  v(x) = \frac{1}{n} \sum_h \rho(h) \big( W_2 \, \mathrm{silu}(W_1 F(x, h) + b_1) \big)

    **Equivariance.** That of :func:`lieattn.nn.project_field`: if the field is translated by h in H, the result is
    multiplied by ρ(h).

    Parameters
    ----------
    in_channels
        Channels of the field.
    rep
        ρ, the type of the output.
    hidden
        Channels of the hidden layer; as many as of the field if absent.
    """

    def __init__(self, in_channels: int, rep: Representation, *, hidden: int | None = None) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_representation("rep", rep)
        hidden = in_channels if hidden is None else hidden
        check_count("hidden", hidden)
        self.rep = rep
        self.linear1 = nn.Linear(in_channels, hidden)
        # A constant behind it would be projected on the invariants of ρ, which most types have not.
        self.linear2 = nn.Linear(hidden, rep.dim, bias=False)

    @property
    def kind(self) -> Representation:
        """How the output transforms."""
        return self.rep

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points, rep.dim]``; frames as in ``project_field``."""
        check_features(x, self.linear1.weight)
        return project_field(self.linear2(nn.functional.silu(self.linear1(x))), frames, self.rep)


class VectorHead(FieldHead):
    """A vector at every point, ``[points, dim]``: a velocity, a force, a normal, in the units of the targets.

    See :class:`FieldHead`.

    Parameters
    ----------
    in_channels
        Channels of the field.
    dim
        Dimension of the space.
    hidden
        Channels of the hidden layer.
    """

    def __init__(self, in_channels: int, dim: int = 3, *, hidden: int | None = None) -> None:
        super().__init__(in_channels, Vector(dim), hidden=hidden)


class PseudovectorHead(FieldHead):
    """A pseudovector at every point, ``[points, 3]``, which mirrors treat as a rotation axis: a magnetic moment.

    See :class:`FieldHead`.

    Parameters
    ----------
    in_channels
        Channels of the field.
    hidden
        Channels of the hidden layer.
    """

    def __init__(self, in_channels: int, *, hidden: int | None = None) -> None:
        super().__init__(in_channels, Pseudovector(), hidden=hidden)


class DipoleHead(nn.Module):
    r"""Dipole moment of every cloud: partial charges at the points, and a vector of each.

    .. math::  \mu = \sum_i q_i (x_i - \bar x) + \mu_i

    The charges are shifted alike so that they sum to the total charge of the cloud, 0 if none is given. For a neutral
    cloud the result does not depend on the origin; for a charged one it is the moment about the mean position.

    **Equivariance.** Turned with the points by H; invariant to translations.

    Parameters
    ----------
    in_channels
        Channels of the field.
    dim
        Dimension of the space.
    hidden
        Channels of the hidden layer.
    neutral
        Whether charges are shifted to their total; otherwise they are as the network gives them.
    """

    kind = "vector"

    def __init__(self, in_channels: int, dim: int = 3, *, hidden: int | None = None, neutral: bool = True) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        hidden = in_channels if hidden is None else hidden
        self.vector = VectorHead(in_channels, dim, hidden=hidden)
        self.charge = nn.Sequential(nn.Linear(in_channels, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.neutral = neutral

    def charges(self, x: Tensor, clouds: PointClouds, total: Tensor | None = None) -> Tensor:
        """Partial charges ``[points]``, in the unit of the dipole over that of the positions.

        ``total`` is the charge of each cloud, ``[clouds]``.
        """
        if total is not None and (not self.neutral or total.shape != (clouds.num_clouds,)):
            expected = f"shape [{clouds.num_clouds}], got {tuple(total.shape)}" if self.neutral else "none: not neutral"
            raise ValueError(f"total: expected {expected}")
        charge = _wide(self.charge(x.mean(dim=1))[:, 0])
        if not self.neutral:
            return charge
        excess = _cloud_sum(charge, clouds)
        if total is not None:
            excess = excess - total.to(charge)
        return charge - (excess / _counts(clouds, charge))[clouds.batch]

    def forward(
        self, x: Tensor, clouds: PointClouds, frames: Frames | None = None, total: Tensor | None = None
    ) -> Tensor:
        """Dipole moments ``[clouds, dim]``.

        Parameters
        ----------
        x
            ``[points, fiber, in_channels]``.
        clouds
            The points, with positions in Ångström for moments in e Å (1 e Å = 4.80320 Debye).
        frames
            See :func:`lieattn.nn.project_field`; those of ``clouds`` if absent.
        total
            ``[clouds]`` total charges in e, 0 if absent.
        """
        vectors = self.vector(x, _frames(clouds, frames))
        charges = self.charges(x, clouds, total)
        mean = _cloud_sum(clouds.pos, clouds) / _counts(clouds, clouds.pos)[:, None]
        centered = (clouds.pos - mean[clouds.batch]).to(charges.dtype)
        return _cloud_sum(vectors.to(charges.dtype) + charges[:, None] * centered, clouds)


class PolarizabilityHead(nn.Module):
    r"""Symmetric tensor of every cloud, trace included: :math:`\alpha = \sum_i \alpha_i`.

    **Equivariance.** α ↦ R α Rᵀ under R in H; invariant to translations.

    Parameters
    ----------
    in_channels
        Channels of the field.
    dim
        Dimension of the space.
    hidden
        Channels of the hidden layer.
    """

    kind = "tensor"

    def __init__(self, in_channels: int, dim: int = 3, *, hidden: int | None = None) -> None:
        super().__init__()
        self.rep = SymmetricTensor(dim)
        self.field = FieldHead(in_channels, self.rep, hidden=hidden)

    def forward(self, x: Tensor, clouds: PointClouds, frames: Frames | None = None) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to tensors ``[clouds, dim, dim]``, in the unit of the targets.

        ``frames`` are those of ``clouds``, a lifted graph, if absent.
        """
        return self.rep.to_tensor(_cloud_sum(self.field(x, _frames(clouds, frames)), clouds))


def _frames(clouds: PointClouds, frames: Frames | None) -> Frames:
    found = getattr(clouds, "frames", None) if frames is None else frames
    if found is None:
        raise ValueError("frames: give them, since the point clouds are not lifted and have none")
    return found


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _cloud_sum(values: Tensor, clouds: PointClouds) -> Tensor:
    """Sum over the points of each cloud, ``[points, *]`` to ``[clouds, *]``, zero for an empty one."""
    if len(values) != clouds.num_points:
        raise ValueError(f"x: expected one row for each of {clouds.num_points} points, got {len(values)}")
    return values.new_zeros(clouds.num_clouds, *values.shape[1:]).index_add(0, clouds.batch, values)


def _counts(clouds: PointClouds, like: Tensor) -> Tensor:
    """Points of each cloud, at least 1: ``[clouds]``."""
    return torch.bincount(clouds.batch, minlength=clouds.num_clouds).clamp(min=1).to(like.dtype)
