"""Frames, the elements of the stabilizer over each point.

A choice of frames is a small callable value. :func:`lift` calls it with the clouds, and it returns elements of the
stabilizer of the space, ``[points, fiber, k, k]``, or :class:`GroupFrames`. docs/exactness.md has measured errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lieattn._core.checks import (
    check_arguments,
    check_choice,
    check_count,
    check_is,
    check_neighborhood,
    check_none,
    check_tensor,
    counted,
    kind,
)
from lieattn._core.contexts import outside_of_transforms
from lieattn.geometry._clouds import PointClouds
from lieattn.geometry._indices import ranks
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Nearest, Neighborhood, PixelSquare, Radius
from lieattn.groups import FiniteGroup, Group, SemidirectProduct, check_group, trivial
from lieattn.spaces import HomogeneousSpace

_BLOCK = 64  # number of points whose frames are drawn at a time


class GroupFrames(NamedTuple):
    """Frames that are the elements of a finite group H, optionally rotated by one pose for each cloud.

    The elements are multiplied from the left by the ``pose`` ``[points, k, k]``, which is equal for all points of a
    cloud.
    """

    group: FiniteGroup
    pose: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sites:
    """The arguments of a choice of frames: clouds, their neighbor lists, and their space.

    ``weights`` ``[points]`` are used by frames that average over points. Random frames are drawn from the
    ``generator``. ``vectors`` ``[points, count, dim]`` are input vectors that rotate with the points. They provide axes
    that the points do not determine.
    """

    clouds: PointClouds
    neighbors: Neighbors
    space: HomogeneousSpace
    weights: Tensor | None = None
    generator: torch.Generator | None = None
    vectors: Tensor | None = None

    @property
    def stabilizer(self) -> Group:
        """Group that the frames belong to. ValueError is raised if it is trivial."""
        if self.space.stabilizer is None:
            what = f"the stabilizer of {self.space.name} is trivial"
            raise ValueError(f"frames: expected None, since {what}")
        return self.space.stabilizer


@runtime_checkable
class Frames(Protocol):
    """Interface of choices of frames, which are callable with :class:`Sites`."""

    def __call__(self, sites: Sites) -> Tensor | GroupFrames:
        """Return elements of the stabilizer of the space, ``[points, fiber, k, k]``, or all of a finite group."""


class CheckedFrames:
    """Base class of frames that return what :class:`Frames` documents, so that it is not checked again."""


@dataclass(frozen=True)
class FiniteFrames(CheckedFrames):
    """The same finite fiber over every point of a cloud: all elements h of a subgroup H of the stabilizer, or V h.

    The *pose* V is one frame for each cloud, and the fiber rotates with it. The signs of principal axes are not
    determined; if H contains the sign changes, another choice of signs permutes the fiber.

    **Equivariance.** Exact for R^d ⋊ H on any clouds. For other rotations, the error decreases with the order of H.
    With principal axes as pose, exact for all rigid motions. With a sampled pose, in distribution.

    ``group`` is H, for example ``octahedral()`` for SE(3), or ``cyclic(n)`` for SE(2) and the sphere. ``pose`` is
    ``PrincipalFrames()``, ``SampledFrames(1, per="cloud")``, or None for the elements of H themselves. TypeError or
    ValueError is raised for other poses, or if H does not contain the sign changes of principal axes.
    """

    group: FiniteGroup
    pose: Frames | None = None

    def __post_init__(self) -> None:
        check_group("group", self.group)
        if isinstance(self.pose, SampledFrames):
            if self.pose.count != 1 or self.pose.per != "cloud":
                raise ValueError(f"pose: expected one per cloud, SampledFrames(1, per='cloud'), got {self.pose}")
        elif self.pose is not None:
            check = getattr(self.pose, "check_pose", None)
            if check is None:
                raise TypeError(f"pose: expected PrincipalFrames or SampledFrames, got {type(self.pose).__name__}")
            check(self.group)

    def __call__(self, sites: Sites) -> GroupFrames:
        """Return the group and the pose, or raise ValueError unless H is a subgroup of the stabilizer."""
        check_is("sites", sites, Sites)
        sites.stabilizer.check("frames", self.group.matrices(sites.clouds.pos))
        if self.pose is None:
            return GroupFrames(self.group)
        chosen = self.pose(sites)
        return GroupFrames(self.group, chosen[:, 0] if isinstance(chosen, Tensor) else chosen.pose)


@dataclass(frozen=True)
class SampledFrames(CheckedFrames):
    """Random frames, drawn for each point, or once for all points of a cloud.

    **Equivariance.** Only in distribution: the output of a rotated cloud differs from the rotated output by an error
    that decreases with ``count``. For exact equivariance, use frames that rotate with the cloud, such as
    :class:`PrincipalFrames`.

    By default, frames depend only on the ``seed`` and the index of the point in its cloud. They are the same at every
    call, and for a cloud alone and in a batch. If a generator is passed to :func:`lift`, as in training, new frames are
    drawn at every call.

    Parameters
    ----------
    count
        Number of frames, the size of the fiber.
    per
        ``"point"``, or ``"cloud"`` for one set of frames over all points of a cloud, which then determines all relative
        rotations.
    design
        If True, frames are an equal-weight design (see :meth:`LieGroup.design`) times one random element: each frame is
        uniformly distributed, and together they average functions of low degree exactly. If False, frames are drawn
        independently. If None, a design is used if one of this size exists. SO(3) has designs of 1, 2, 4, 12, 24 and
        60 elements.
    seed
        Seed of the frames if no generator is given, of which torch uses the lowest 32 bits.
    """

    count: int
    per: Literal["point", "cloud"] = "point"
    design: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("count", self.count)
        check_count("seed", self.seed, least=0)
        check_arguments(SampledFrames, vars(self))

    def __call__(self, sites: Sites) -> Tensor:
        """Return frames ``[points, fiber, k, k]``, or raise ValueError if a required design does not exist."""
        check_is("sites", sites, Sites)
        clouds, per_cloud = sites.clouds, self.per == "cloud"
        if sites.generator is None:
            place = torch.zeros_like(clouds.batch) if per_cloud else ranks(clouds.batch, clouds.num_clouds)
            blocks = int(place.max()) // _BLOCK + 1 if len(place) else 0
            # Frames of a point must not depend on the number of points, so whole blocks are drawn in their order.
            generator = torch.Generator().manual_seed(self.seed)
            drawn = [self._draw(sites.stabilizer, _BLOCK, generator) for _ in range(blocks)]
            frames = torch.cat(drawn) if drawn else self._draw(sites.stabilizer, 0, generator)
        else:
            number = clouds.num_clouds if per_cloud else clouds.num_points
            place = clouds.batch if per_cloud else torch.arange(number, device=clouds.device)
            frames = self._draw(sites.stabilizer, number, sites.generator)
        return frames.to(clouds.pos)[place]

    @outside_of_transforms
    def _draw(self, group: Group, number: int, generator: torch.Generator) -> Tensor:
        # A single uniform element needs no design.
        if self.design or (self.design is None and self.count > 1 and _has_design(group, self.count)):
            return group.sample_design(number, count=self.count, generator=generator, dtype=torch.float64)
        return group.sample(number, self.count, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class GivenFrames(CheckedFrames):
    """Frames given as a tensor: learned, from a physical system, or from another lift.

    **Equivariance.** Exact if the frames rotate with the points. Gradients flow into them.

    ``frames`` are elements of the stabilizer, ``[points, fiber, k, k]``, or ``[clouds, fiber, k, k]`` with
    ``per="cloud"``. :func:`lift` raises TypeError or ValueError if their number differs from that of the points or
    clouds, or if a matrix is not in the stabilizer, for example if it is improper and the group is SE(3).
    """

    frames: Tensor
    per: Literal["point", "cloud"] = "point"

    def __post_init__(self) -> None:
        check_tensor("frames", self.frames, "a floating tensor [points, fiber, k, k]")
        if self.frames.ndim != 4 or self.frames.shape[1] == 0:
            raise ValueError(f"frames: expected [points, fiber, k, k] with a fiber, got {tuple(self.frames.shape)}")
        check_choice("per", self.per, ("point", "cloud"))

    def __call__(self, sites: Sites) -> Tensor:
        """Return the frames ``[points, fiber, k, k]`` in the dtype of the points."""
        check_is("sites", sites, Sites)
        clouds = sites.clouds
        number = clouds.num_clouds if self.per == "cloud" else clouds.num_points
        if len(self.frames) != number:
            raise ValueError(f"frames: expected frames of {number} {self.per}s, got {len(self.frames)}")
        if self.frames.device != clouds.device:
            raise ValueError(f"frames: expected on {clouds.device} as the points, got on {self.frames.device}")
        sites.stabilizer.check("frames", self.frames)
        frames = self.frames.to(clouds.pos.dtype)
        return frames[clouds.batch] if self.per == "cloud" else frames


def chosen_frames(frames: Frames | None, sites: Sites) -> Tensor | GroupFrames | None:
    """Return the frames of the clouds, or None if the space has none."""
    space = sites.space
    if frames is not None:
        chosen = frames(sites)
        return chosen if isinstance(frames, CheckedFrames) else _checked_frames(chosen, sites)
    if space.stabilizer is not None:
        raise TypeError(f"frames: expected frames in {space.stabilizer.name}, which {space.name} needs, got None")
    return _identity_frames(space.dim) if space.group.only_translates else None


@lru_cache(maxsize=8)
@outside_of_transforms
def _identity_frames(dim: int) -> GroupFrames:
    return GroupFrames(trivial(dim))


def _checked_frames(chosen: object, sites: Sites) -> Tensor | GroupFrames:
    """Return what frames of the user returned, or raise an error unless it is what :class:`Frames` documents."""
    points = sites.clouds.num_points
    if not isinstance(chosen, Tensor | GroupFrames):
        raise TypeError(f"frames: expected to return a tensor [points, fiber, k, k] or GroupFrames, got {kind(chosen)}")
    if isinstance(chosen, Tensor):
        if chosen.ndim != 4 or chosen.shape[0] != points or chosen.shape[1] == 0:
            expected = f"[points, fiber, k, k] with {counted(points, 'point')} and a fiber"
            raise ValueError(f"frames: expected to return {expected}, got {tuple(chosen.shape)}")
        sites.stabilizer.check("frames", chosen)
        return chosen
    check_group("frames", chosen.group)
    sites.stabilizer.check("frames", chosen.group.matrices(sites.clouds.pos))
    if chosen.pose is not None:
        sites.stabilizer.check("frames", chosen.pose)
        if chosen.pose.ndim != 3 or len(chosen.pose) != points:
            found = tuple(chosen.pose.shape)
            raise ValueError(f"frames: expected a pose [points, k, k] with {counted(points, 'point')}, got {found}")
        pose, clouds = chosen.pose.detach(), sites.clouds
        spread = (pose + clouds.max(-pose)[clouds.batch]).flatten(1).amax(1)
        differs = spread > 100 * torch.finfo(pose.dtype).eps
        advice = "return frames [points, fiber, k, k] if points of a cloud have different ones"
        check_none("frames", differs, f"has another pose than a point of the same cloud; {advice}")
    return chosen


def check_moves_along(neighborhood: Neighborhood, space: HomogeneousSpace, frames: object = None) -> None:
    """Raise ValueError if a neighborhood depends on distances that the group of a space does not preserve."""
    check_neighborhood(neighborhood)
    if not isinstance(neighborhood, Radius | Nearest | PixelSquare):
        return
    group = space.group
    finite = isinstance(group, SemidirectProduct) and isinstance(group.stabilizer, FiniteGroup)
    if isinstance(neighborhood, PixelSquare):
        # Elements of a finite group may preserve the square. The guarantee of a network states which of them do.
        if not (finite or group.only_translates or isinstance(frames, FiniteFrames)):
            raise ValueError(f"neighborhood: {neighborhood} is not symmetric under {group.name}; use a Radius")
        return
    keeps = group.is_conformal if isinstance(neighborhood, Nearest) else group.is_orthogonal
    if keeps is False:
        advice = "AllPairs, Nearest where all distances change alike, or give the matrices in an orthonormal basis"
        what = f"{group.name} does not preserve distances, so {neighborhood} would not move with the points"
        raise ValueError(f"neighborhood: {what}; use {advice}")


def _has_design(group: Group, count: int) -> bool:
    try:
        group.finite_subgroup(count)
    except ValueError:
        return False
    return True
